//! What the task does while a connection stands: sends, hears, and watches for the end.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::FutureExt;
use futures::future::{BoxFuture, MaybeDone, maybe_done};
use futures::task::waker;
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::task::{coop, yield_now};
use tokio::time::{Instant, Sleep, sleep_until};

use super::bell::Bell;
use super::busy_poll::BusyPoll;
use super::call::{Job, Wish};
use super::clock::Clock;
use super::fault::{Fault, Refusal};
use super::grant::Message;
use super::link::{End, Link};
use super::reply::{self, Verdict};
use super::setup::{self, Connected};
use crate::store::contract::{Answer, News, OpError, ServerTime};
use crate::store::traffic::Lane;

/// So many tasks that are woken together need not share a call.
const FEW: usize = 8;

/// The same where replies are looked for.
const FEW_NEAR: usize = 2;

/// So many answers are told before those who have them may act on them, and what they want then is
/// sent: the server has work again while the others are told, where it would idle until all have
/// had their turn. In rounds of 1 s 8, 16 and 24 are alike at 64 tasks, and 64 makes a tenth less.
const BURST: usize = 16;

/// Of very many it is this part, since what is sent in calls that are too short costs the server
/// more: at 256 tasks a fifth more pairs a second, at 64 no fewer (12 rounds of 0.5 s each, in turns).
const SHARE: usize = 8;

/// And no more than share a call.
const LONG_BURST: usize = 64;

/// A call under way.
struct Call {
    number: u64,
    reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

/// A connection while it serves. Dropping it drops every clone of it and what moves its bytes, and
/// so closes it with all that was not written (O4).
struct Wire {
    standing: Connected,
    /// In the order in which they were sent. A handful, so that looking at all costs less than to
    /// learn which is done.
    calls: VecDeque<Call>,
    /// Fires no later than the oldest call is overdue.
    watch: Pin<Box<Sleep>>,
    /// The time, if it was asked in this turn: a call and its reply cost one look at the clock each.
    now: Option<Instant>,
    /// How much was told in the last turns, and so how many tasks may be about to want something.
    told: usize,
    /// How many replies were heard.
    heard: u64,
    busy_poll: BusyPoll,
}

impl Wire {
    fn now(&mut self) -> Instant {
        *self.now.get_or_insert_with(Instant::now)
    }
}

impl Link {
    /// Sends and hears on a connection until it ends.
    pub(super) async fn serve(&mut self, mut standing: Connected) -> End {
        self.old = standing.id.take();
        let deaf = standing.deaf.take();
        self.is_deaf = deaf.is_some();
        tracing::debug!(address = &**self.endpoint.address(), ?deaf, "connected");
        self.teller.announce(News::Up {
            queue: deaf.is_none(),
        });
        self.warn_once(deaf);
        for push in std::mem::take(&mut standing.early) {
            if let Err(fault) = self.on_push(&push) {
                self.teller.tell_all();
                return fault.into();
            }
        }
        let mut wire = Wire {
            standing,
            calls: VecDeque::new(),
            watch: Box::pin(sleep_until(Instant::now())),
            now: None,
            told: 0,
            heard: 0,
            busy_poll: BusyPoll::new(self.endpoint.busy_poll()),
        };
        let bell = Arc::new(Bell::default());
        let ring = waker(bell.clone());
        poll_fn(|cx| self.work(&mut wire, &bell, &ring, cx.waker())).await
    }

    /// Takes turns as long as there is something to do.
    fn work(&mut self, wire: &mut Wire, bell: &Bell, ring: &Waker, task: &Waker) -> Poll<End> {
        bell.begin(task);
        // The first of the tasks that were woken together to want something has had this one run
        // next. The others are let by, once, and share its call: at 64 tasks a fifth more pairs a
        // second, with a tenth less of both processors, in rounds of 0.25 s; in those of 1 s it does
        // not show. A few are not held up: at 8 tasks each has its answer in about three quarters of
        // the time, for a quarter more of the processors. Not so where replies are looked for: then 8
        // that share their calls are as fast, for a third less of the server's processor.
        let few = if wire.busy_poll.pays() { FEW_NEAR } else { FEW };
        if std::mem::take(&mut wire.told) > few {
            bell.call_back();
            return Poll::Pending;
        }
        wire.now = None;
        loop {
            let end = self.turn(wire, bell, &mut Context::from_waker(ring));
            if let Err(end) = end {
                // After what came before it.
                self.teller.tell_all();
                return Poll::Ready(end);
            }
            wire.told += self.teller.tell_some(self.burst());
            if self.teller.has_news() {
                wire.told = 0;
                bell.call_back();
                return Poll::Pending;
            }
            // What the tokio's budget kept from being looked at has rung only us.
            if !coop::has_budget_remaining() {
                bell.call_back();
                return Poll::Pending;
            }
            if !bell.has_rung() {
                self.look_again(wire, task);
                return Poll::Pending;
            }
        }
    }

    /// How much is told at once.
    fn burst(&self) -> usize {
        let all = self.teller.count() + self.traffic.under_way(Lane::Batch);
        (all / SHARE).clamp(BURST, LONG_BURST)
    }

    /// Has the task polled again when others have had their turn, if a reply may be here by then.
    fn look_again(&self, wire: &mut Wire, task: &Waker) {
        // Renewals and looks have time.
        let awaited = self.traffic.under_way(Lane::Batch);
        let age = |sent_at| wire.now().saturating_duration_since(sent_at);
        let oldest = self.traffic.oldest().map(age).unwrap_or_default();
        let (sent, heard) = (self.number, wire.heard);
        let clock = std::time::Instant::now;
        if wire
            .busy_poll
            .looks_again(sent, heard, awaited, oldest, clock)
        {
            // The runtime has the waker now, for when it has nothing better to do.
            let _ = pin!(yield_now()).poll(&mut Context::from_waker(task));
        }
    }

    /// Sends what may go, and hears what came: a wish goes from the inbox to the socket, and a
    /// reply from the socket to the registry, in one go.
    fn turn(&mut self, wire: &mut Wire, bell: &Bell, cx: &mut Context<'_>) -> Result<(), End> {
        self.take_in();
        self.send(wire);
        bell.listen();
        // From here on everything that may ring is looked at.
        if self.inbox.poll_filled(cx).is_ready() {
            if self.inbox.is_closed() {
                return Err(End::Closed);
            }
            cx.waker().wake_by_ref();
        }
        let pump = &mut wire.standing.socket.pump;
        let moved = pump.poll(cx);
        // What has just been brought need not ring as well: it is looked at now, and the bell would
        // cost a turn more for every reply.
        let mut silent = Context::from_waker(Waker::noop());
        let cx_of_replies = if pump.is_here() {
            // A burst uses up tokio's budget while it is read. What nobody may look at then would pile up, turn by
            // turn, until the connection ends for it (`bounded.rs`).
            self.hear_rest(wire)?;
            &mut silent
        } else {
            &mut *cx
        };
        self.hear(wire, cx_of_replies)?;
        let under_way = wire.calls.len();
        let mut index = 0;
        while let Some(call) = wire.calls.get_mut(index) {
            if call.reply.poll_unpin(cx_of_replies).is_pending() {
                index += 1;
                continue;
            }
            self.hear_rest(wire)?;
            let mut call = wire.calls.remove(index).expect("it was just looked at");
            let reply = Pin::new(&mut call.reply).take_output();
            self.on_reply(wire, call.number, reply.expect("it is done"))?;
        }
        if wire.calls.len() < under_way && self.traffic.is_waiting() {
            // For a key or a place that has come free.
            cx.waker().wake_by_ref();
        }
        if moved.is_ready() {
            return Err(self.closed().into());
        }
        if self.poll_overdue(wire, cx).is_ready() {
            return Err(End::Broken(Fault::Silent {
                address: self.endpoint.address().clone(),
                within: self.opening.response_timeout,
            }));
        }
        Ok(())
    }

    fn hear(&mut self, wire: &mut Wire, cx: &mut Context<'_>) -> Result<(), Fault> {
        if let Some(pushes) = &mut wire.standing.pushes {
            while let Poll::Ready(push) = pushes.poll_recv(cx) {
                self.on_push(&push.ok_or_else(|| self.closed())?)?;
                wire.standing.socket.pump.taken();
            }
        }
        Ok(())
    }

    /// What came before a reply is heard before it. Above all a change of subscription, after which
    /// no answer is its call's: an error does not even name its call. So it is looked for once the
    /// reply is seen, since a task of the client's may bring both meanwhile; and no budget cuts it
    /// short.
    fn hear_rest(&mut self, wire: &mut Wire) -> Result<(), Fault> {
        if let Some(pushes) = &mut wire.standing.pushes {
            while let Ok(push) = pushes.try_recv() {
                self.on_push(&push)?;
                wire.standing.socket.pump.taken();
            }
        }
        Ok(())
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
        while let Some((lane, mut jobs)) = self.traffic.next_call() {
            if self.is_deaf {
                // Nobody must stand there who cannot be told (W5).
                jobs.iter_mut().for_each(Job::listen_to_nothing);
            }
            self.number += 1;
            let number = self.number;
            let now = wire.now();
            let timeout = self.opening.response_timeout;
            let of_use = wire.standing.clock.of_use(now, timeout);
            let command = lane.command(&self.names, number, of_use, &jobs);
            let mut connection = wire.standing.socket.connection.clone();
            // Kept until its reply is here or the whole connection ends: a call that is dropped
            // before it is written is never sent, and nobody knows (O2).
            let reply = async move { lane.script().send(&mut connection, &command).await };
            let mut reply = maybe_done(coop::unconstrained(reply).boxed());
            // Puts it where the pump finds it: there is room for more calls than the window lets
            // through, and no budget holds it up.
            let _ = reply.poll_unpin(&mut Context::from_waker(Waker::noop()));
            wire.calls.push_back(Call { number, reply });
            self.traffic.take_off(number, lane, jobs, now);
        }
    }

    /// Ready when the oldest call has been unanswered for too long. The clock is asked first: a
    /// runtime's budget can leave an elapsed sleep pending.
    fn poll_overdue(&self, wire: &mut Wire, cx: &mut Context<'_>) -> Poll<()> {
        let Some(oldest) = self.traffic.oldest() else {
            return Poll::Pending;
        };
        let overdue = oldest + self.opening.response_timeout;
        if overdue <= wire.now() {
            return Poll::Ready(());
        }
        // The watch is moved only when it has fired: to set it for each call would cost more than
        // the call does, and the oldest call only ever gets younger.
        while wire.watch.as_mut().poll(cx).is_ready() {
            if overdue <= Instant::now() {
                return Poll::Ready(());
            }
            wire.watch.as_mut().reset(overdue);
        }
        Poll::Pending
    }

    fn on_push(&mut self, push: &PushInfo) -> Result<(), Fault> {
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
            Some(Message::Granted { key, grant }) => self.teller.tell(News::Granted { key, grant }),
            Some(Message::Freed { key }) => self.teller.tell(News::Freed { key }),
            // A probe's, late.
            Some(Message::Probe(_) | Message::Nothing) => {}
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
        wire.heard += 1;
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
            let refusal: Refusal = error.into();
            if flight.jobs.len() > 1 && refusal.may_be_one_keys() {
                // S1: the server looks at the keys of a call before it runs any of it, and does not
                // say which of them it minds. Each goes again by itself, once, before whatever else
                // waits for its key (O2).
                for mut job in flight.jobs.into_iter().rev() {
                    job.alone = true;
                    self.traffic.add_again(job);
                }
                return Ok(());
            }
            for job in flight.jobs {
                end = end.and(self.refuse(job, &refusal));
            }
            return end;
        }
        let Some(reply) = reply::read_reply(number, &flight.jobs, reply) else {
            // Perhaps they are done, perhaps not.
            let fault = self.garbled("a reply is not the one to its call");
            self.answer_all(flight.jobs, &OpError::Unknown(fault.clone().into()));
            return Err(fault);
        };
        if let Some(at) = reply.at {
            // Not before it reached us (O5).
            let now = *wire.now.insert(Instant::now());
            wire.standing.clock = Clock::told(at, now);
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
                    self.teller.tell(News::Replied { key, op, result });
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
    fn refuse(&mut self, job: Job, refusal: &Refusal) -> Result<(), Fault> {
        let address = self.endpoint.address().clone();
        let fault = Fault::refused(address, refusal.clone(), &self.names);
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
