//! A connection in use: the requests that were sent on it, and what comes from the server.

use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, MaybeDone, OptionFuture, maybe_done};
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::coop;
use tokio::time::{Instant, Sleep, sleep_until};

use super::cluster::Address;
use super::fault::Fault;
use super::stream::Link;

/// Each request has a tag, which says what it asks.
pub(super) enum Event<T> {
    Push(PushInfo),
    /// The reply to the oldest request, which was sent at that time.
    Reply(T, Instant, Value),
}

/// Replies come in the order of the requests. Dropping it closes the connection; unwritten requests are lost (O4).
pub(super) struct Pipe<T> {
    address: Address,
    /// A request must be answered within this time.
    within: Duration,
    link: Link,
    pushes: UnboundedReceiver<PushInfo>,
    /// The oldest first.
    sent: VecDeque<Sent<T>>,
    /// At the latest when the oldest request is overdue.
    alarm: Pin<Box<Sleep>>,
}

struct Sent<T> {
    tag: T,
    at: Instant,
    reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

impl<T> Pipe<T> {
    pub(super) fn new(
        link: Link,
        pushes: UnboundedReceiver<PushInfo>,
        address: Address,
        within: Duration,
    ) -> Self {
        Self {
            address,
            within,
            link,
            pushes,
            sent: VecDeque::new(),
            alarm: Box::pin(sleep_until(Instant::now() + within)),
        }
    }

    pub(super) fn client(&self) -> MultiplexedConnection {
        self.link.connection.clone()
    }

    /// Writes a request. The future is polled once here, so the request is sent even if this task is dropped (O2: a
    /// call that is dropped before it is written is never sent, and nobody knows).
    pub(super) fn send(
        &mut self,
        tag: T,
        at: Instant,
        sending: impl Future<Output = RedisResult<Value>> + Send + 'static,
    ) {
        // The client library has room for more requests than are sent, so it never waits here. tokio's budget must not
        // make it wait either.
        let mut reply = maybe_done(coop::unconstrained(sending).boxed());
        (&mut reply).now_or_never();
        self.sent.push_back(Sent { tag, at, reply });
    }

    /// The next event. Fails when the connection has ended, or the oldest request is overdue. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Event<T>, Fault> {
        loop {
            let oldest = self.sent.front_mut();
            let due = oldest.as_ref().map(|it| it.at + self.within);
            tokio::select! {
                biased;
                // All that the connection received has been handled by then.
                () = self.link.ended() => return self.ready().unwrap_or_else(|| Err(self.closed())),
                Some(()) = OptionFuture::from(oldest.map(|it| &mut it.reply)) => {}
                Some(push) = self.pushes.recv() => return self.heard(push),
                () = &mut self.alarm, if due.is_some() => {
                    if let Some(due) = due.filter(|due| Instant::now() < *due) {
                        self.alarm.as_mut().reset(due);
                        continue;
                    }
                    let (address, within) = (self.address.clone(), self.within);
                    return Err(Fault::Silent { address, within });
                }
            }
            if let Some(event) = self.ready() {
                return event;
            }
        }
    }

    /// What has come already. A push that came before a reply is returned before it. Above all a change of
    /// subscriptions, after which the client library shifts replies by one request (O4).
    pub(super) fn ready(&mut self) -> Option<Result<Event<T>, Fault>> {
        let reply = self.sent.front_mut().map(|it| &mut it.reply);
        let is_answered = reply.is_some_and(|reply| reply.now_or_never().is_some());
        if let Ok(push) = self.pushes.try_recv() {
            return Some(self.heard(push));
        }
        if !is_answered {
            return None;
        }
        let mut sent = self.sent.pop_front()?;
        let reply = Pin::new(&mut sent.reply).take_output()?;
        let address = self.address.clone();
        let reply = reply.map_err(|source| Fault::Broken { address, source });
        Some(reply.map(|reply| Event::Reply(sent.tag, sent.at, reply)))
    }

    fn heard(&self, push: PushInfo) -> Result<Event<T>, Fault> {
        match push.kind {
            PushKind::Disconnection => Err(self.closed()),
            _ => Ok(Event::Push(push)),
        }
    }

    fn closed(&self) -> Fault {
        let address = self.address.clone();
        Fault::Closed { address }
    }

    /// The tags of the requests that are not answered yet.
    pub(super) fn tags(&self) -> impl Iterator<Item = &T> {
        self.sent.iter().map(|it| &it.tag)
    }

    /// How many requests are not answered yet.
    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::sync::{mpsc, oneshot};

    use super::*;
    use crate::store::redis::stream::tests::pair;

    /// On a connection to a server that says nothing.
    async fn pipe<T>() -> (Pipe<T>, impl Drop) {
        let (link, server) = pair().await;
        let (_, pushes) = mpsc::unbounded_channel();
        let address = Address::from("a:1");
        (
            Pipe::new(link, pushes, address, Duration::from_secs(5)),
            server,
        )
    }

    async fn reply<T>(pipe: &mut Pipe<T>) -> (T, Value) {
        match pipe.next().await.unwrap() {
            Event::Reply(tag, _, reply) => (tag, reply),
            Event::Push(push) => panic!("{push:?}"),
        }
    }

    #[tokio::test]
    async fn o2_requests_are_sent_in_order_and_their_replies_wait() {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let (mut pipe, _server) = pipe().await;
        let mut answers = Vec::new();
        // Without tokio's budget, which two hundred of them would use up.
        for number in 0..200_i64 {
            let (answer, answered) = oneshot::channel();
            let log = sent.clone();
            pipe.send(number, Instant::now(), async move {
                log.lock().unwrap().push(number);
                Ok(answered.await.unwrap_or(Value::Nil))
            });
            answers.push((number, answer));
        }
        let all: Vec<_> = (0..200).collect();
        assert_eq!(*sent.lock().unwrap(), all);
        assert!(pipe.next().now_or_never().is_none());
        for (number, answer) in answers.into_iter().rev() {
            answer.send(Value::Int(number)).unwrap();
        }
        for number in all {
            assert_eq!(reply(&mut pipe).await, (number, Value::Int(number)));
        }
        assert_eq!(pipe.len(), 0);
    }

    #[tokio::test]
    async fn a_request_that_fails_when_it_is_sent_is_answered_in_its_turn() {
        let (mut pipe, _server) = pipe().await;
        let (answer, answered) = oneshot::channel();
        let first = async { Ok(answered.await.unwrap_or(Value::Nil)) };
        pipe.send("first", Instant::now(), first);
        pipe.send("second", Instant::now(), async { Ok(Value::Okay) });
        assert!(pipe.next().now_or_never().is_none());
        answer.send(Value::Nil).unwrap();
        for expected in ["first", "second"] {
            assert_eq!(reply(&mut pipe).await.0, expected);
        }
    }
}
