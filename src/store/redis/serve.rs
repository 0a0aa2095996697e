//! What the task does while a connection stands: sends, hears, and watches for the end.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::time::{Instant, Sleep, sleep_until};

use super::call::{self, Job, Verdict, Wish};
use super::clock::Clock;
use super::fault::{Fault, Refusal};
use super::grant::Message;
use super::link::{End, Link};
use super::setup::{self, Standing};
use crate::store::contract::{Answer, News, OpError, ServerTime};

type Call = BoxFuture<'static, (u64, RedisResult<Value>)>;

/// A connection while it serves. Dropping it drops every clone of it, and so closes it (O4).
struct Wire {
    standing: Standing,
    calls: FuturesUnordered<Call>,
    /// Fires no later than the oldest call is overdue.
    watch: Pin<Box<Sleep>>,
}

enum Event {
    Closed,
    Pushed(Option<PushInfo>),
    Replied(u64, RedisResult<Value>),
    Overdue,
    Submitted,
}

impl Link {
    /// Sends and hears on a connection until it ends.
    pub(super) async fn serve(&mut self, mut standing: Standing) -> End {
        self.old = standing.id.take();
        let deaf = standing.deaf.take();
        tracing::debug!(address = &**self.endpoint.address(), ?deaf, "connected");
        self.tell(News::Up {
            queue: deaf.is_none(),
        });
        self.warn_once(deaf);
        let early = std::mem::take(&mut standing.early);
        let mut wire = Wire {
            standing,
            calls: FuturesUnordered::new(),
            watch: Box::pin(sleep_until(Instant::now())),
        };
        let mut result = early.into_iter().try_for_each(|push| self.on_push(&push));
        loop {
            if let Err(fault) = result {
                return fault.into();
            }
            self.traffic.add(self.inbox.take());
            self.send(&mut wire);
            result = match poll_fn(|cx| self.poll_event(&mut wire, cx)).await {
                Event::Closed => return End::Closed,
                Event::Submitted => Ok(()),
                Event::Pushed(Some(push)) => self.on_push(&push),
                Event::Pushed(None) => Err(self.closed()),
                Event::Replied(number, reply) => self.on_reply(&mut wire, number, reply),
                Event::Overdue => Err(Fault::Silent {
                    address: self.endpoint.address().clone(),
                    within: self.opening.response_timeout,
                }),
            };
        }
    }

    fn warn_once(&mut self, deaf: Option<String>) {
        if let Some(reason) = deaf.filter(|_| !self.was_warned) {
            self.was_warned = true;
            tracing::warn!(
                address = &**self.endpoint.address(),
                reason,
                "this server cannot push grants to us: busy locks are asked for again and again"
            );
        }
    }

    /// Sends what may go.
    fn send(&mut self, wire: &mut Wire) {
        while let Some((lane, jobs)) = self.traffic.next_call() {
            self.number += 1;
            let number = self.number;
            let of_use = wire.standing.clock.of_use(self.opening.response_timeout);
            let command = lane.command(&self.names, number, of_use, &jobs);
            let mut connection = wire.standing.connection.clone();
            // Polled by this task until its reply is here or the whole connection ends: a call
            // that is dropped before it is written is never sent, and nobody knows (O2).
            let call = async move { (number, lane.script().send(&mut connection, &command).await) };
            wire.calls.push(call.boxed());
            self.traffic.take_off(number, lane, jobs);
        }
    }

    fn poll_event(&self, wire: &mut Wire, cx: &mut Context<'_>) -> Poll<Event> {
        let submitted = self.inbox.poll_filled(cx);
        if self.inbox.is_closed() {
            return Poll::Ready(Event::Closed);
        }
        if let Some(pushes) = &mut wire.standing.pushes
            && let Poll::Ready(push) = pushes.poll_recv(cx)
        {
            return Poll::Ready(Event::Pushed(push));
        }
        if let Poll::Ready(Some((number, reply))) = wire.calls.poll_next_unpin(cx) {
            return Poll::Ready(Event::Replied(number, reply));
        }
        if self.poll_overdue(wire, cx).is_ready() {
            return Poll::Ready(Event::Overdue);
        }
        submitted.map(|()| Event::Submitted)
    }

    /// Ready when the oldest call has been unanswered for too long. The clock is asked first: a
    /// runtime's budget can leave an elapsed sleep pending.
    fn poll_overdue(&self, wire: &mut Wire, cx: &mut Context<'_>) -> Poll<()> {
        let Some(oldest) = self.traffic.oldest() else {
            return Poll::Pending;
        };
        let overdue = oldest + self.opening.response_timeout;
        if overdue <= Instant::now() {
            return Poll::Ready(());
        }
        // The watch is moved only when it has fired: to set it for each call would cost more than
        // the call does, and the oldest call only ever gets younger.
        while wire.watch.as_mut().poll(cx).is_ready() {
            wire.watch.as_mut().reset(overdue);
        }
        Poll::Pending
    }

    fn on_push(&self, push: &PushInfo) -> Result<(), Fault> {
        match &push.kind {
            PushKind::Disconnection => return Err(self.closed()),
            // The client has given it to the oldest call for an answer, and from now on would give
            // every call its neighbour's (O4).
            kind if setup::is_subscription(kind) => {
                return Err(self.garbled("a subscription changed that nobody asked to"));
            }
            _ => {}
        }
        match setup::message(&self.names, push) {
            Some(Message::Granted { key, grant }) => self.tell(News::Granted { key, grant }),
            // A probe's, late.
            Some(Message::Probe(_)) => {}
            None => {
                tracing::debug!(kind = ?push.kind, "passed over a push that is no grant for us")
            }
        }
        Ok(())
    }

    fn on_reply(
        &mut self,
        wire: &mut Wire,
        number: u64,
        reply: RedisResult<Value>,
    ) -> Result<(), Fault> {
        // What came before the reply is heard before it. Above all a change of subscription, after
        // which no answer is its call's: an error does not even name its call.
        if let Some(pushes) = &mut wire.standing.pushes {
            while let Ok(push) = pushes.try_recv() {
                self.on_push(&push)?;
            }
        }
        let reply = reply.map_err(|source| Fault::Broken {
            address: self.endpoint.address().clone(),
            source,
        })?;
        let flight = self
            .traffic
            .land(number)
            .expect("a call is under way until its reply is here");
        // Whatever ends the connection does so after the last of the answers.
        let mut end = Ok(());
        if let Value::ServerError(error) = &reply {
            let refusal = error.into();
            for job in flight.jobs {
                end = end.and(self.refuse(job, &refusal));
            }
            return end;
        }
        let Some(reply) = call::read_reply(number, &flight.jobs, reply) else {
            // Perhaps they are done, perhaps not.
            let fault = self.garbled("a reply is not the one to its call");
            self.answer_all(flight.jobs, &OpError::Unknown(fault.clone().into()));
            return Err(fault);
        };
        if let Some(at) = reply.at {
            wire.standing.clock = Clock::told(at);
        }
        let at = wire.standing.clock.last();
        for (job, verdict) in flight.jobs.into_iter().zip(reply.verdicts) {
            end = end.and(self.on_verdict(job, at, verdict));
        }
        end
    }

    fn on_verdict(&mut self, mut job: Job, at: ServerTime, verdict: Verdict) -> Result<(), Fault> {
        match (verdict, &mut job.wish) {
            (Verdict::Refused(refusal), _) => return self.refuse(job, &refusal),
            (
                Verdict::Stale,
                Wish::Op {
                    was_stale: was_stale @ false,
                    ..
                },
            ) => {
                *was_stale = true;
                self.traffic.add_again(job);
            }
            (Verdict::Stale, _) => {
                let fault = self.garbled("the server's clock runs away from ours");
                self.answer(job, OpError::Unknown(fault.clone().into()));
                return Err(fault);
            }
            (Verdict::Done(outcome), _) => {
                if let Wish::Op { op, .. } = job.wish {
                    let result = Ok(Answer { at, outcome });
                    let key = job.key;
                    self.tell(News::Replied { key, op, result });
                }
            }
            (Verdict::Seen(sight), _) => {
                if let Wish::Look(answer) = job.wish {
                    // Whoever asked may have gone.
                    let _ = answer.send(Ok(sight));
                }
            }
        }
        Ok(())
    }

    /// The server said no, which may end the connection.
    fn refuse(&self, job: Job, refusal: &Refusal) -> Result<(), Fault> {
        let fault = Fault::Refused {
            address: self.endpoint.address().clone(),
            refusal: refusal.clone(),
        };
        self.answer(job, OpError::Refused(fault.clone().into()));
        if refusal.ends_connection() {
            Err(fault)
        } else {
            Ok(())
        }
    }

    fn closed(&self) -> Fault {
        Fault::Closed {
            address: self.endpoint.address().clone(),
        }
    }

    fn garbled(&self, what: &'static str) -> Fault {
        Fault::Garbled {
            address: self.endpoint.address().clone(),
            what,
        }
    }
}
