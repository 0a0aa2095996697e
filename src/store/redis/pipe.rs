//! Requests that were sent on a connection, and whose replies have not come yet.

use std::collections::VecDeque;
use std::future;

use futures::FutureExt;
use futures::future::BoxFuture;
use redis::{RedisResult, Value};
use tokio::task::coop;
use tokio::time::Instant;

/// Replies come in the order of the requests. A request has a tag, which says what it asks.
pub(super) struct Pipe<T> {
    sent: VecDeque<Sent<T>>,
}

struct Sent<T> {
    tag: T,
    at: Instant,
    reply: BoxFuture<'static, RedisResult<Value>>,
}

impl<T> Pipe<T> {
    pub(super) fn new() -> Self {
        let sent = VecDeque::new();
        Self { sent }
    }

    /// Writes a request. The future is polled once, so that it is sent whatever happens to this task
    /// (O2: a call that is dropped before it is written is never sent, and nobody knows).
    pub(super) fn send(
        &mut self,
        tag: T,
        at: Instant,
        sending: impl Future<Output = RedisResult<Value>> + Send + 'static,
    ) {
        // The client has room for more requests than its users send, so it never waits here; nor may
        // tokio's budget make it wait.
        let mut reply = coop::unconstrained(sending).boxed();
        if let Some(done) = (&mut reply).now_or_never() {
            reply = future::ready(done).boxed();
        }
        self.sent.push_back(Sent { tag, at, reply });
    }

    /// Resolves when the oldest request is answered. May be dropped: the reply stays here.
    pub(super) async fn next(&mut self) -> (T, Instant, RedisResult<Value>) {
        let Some(oldest) = self.sent.front_mut() else {
            return future::pending().await;
        };
        let reply = (&mut oldest.reply).await;
        let Sent { tag, at, .. } = self.sent.pop_front().expect("it was just looked at");
        (tag, at, reply)
    }

    /// When the oldest request was sent that is not answered.
    pub(super) fn oldest_sent_at(&self) -> Option<Instant> {
        self.sent.front().map(|sent| sent.at)
    }

    pub(super) fn len(&self) -> usize {
        self.sent.len()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn o2_requests_are_sent_in_order_and_their_replies_wait() {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let mut pipe = Pipe::new();
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
            let (tag, _, reply) = pipe.next().await;
            assert_eq!((tag, reply), (number, Ok(Value::Int(number))));
        }
        assert_eq!((pipe.len(), pipe.oldest_sent_at()), (0, None));
    }

    #[tokio::test]
    async fn a_request_that_fails_when_it_is_sent_is_answered_in_its_turn() {
        let mut pipe = Pipe::new();
        let (answer, answered) = oneshot::channel();
        let first = async { Ok(answered.await.unwrap_or(Value::Nil)) };
        pipe.send("first", Instant::now(), first);
        pipe.send("second", Instant::now(), async { Ok(Value::Okay) });
        assert!(pipe.next().now_or_never().is_none());
        answer.send(Value::Nil).unwrap();
        for expected in ["first", "second"] {
            assert_eq!(pipe.next().await.0, expected);
        }
    }
}
