//! The one task of a session: connects, sends, hears, and connects again.

use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::future::{BoxFuture, Either, select};
use futures::stream::{FuturesUnordered, StreamExt};
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::time::{Instant, Sleep, sleep_until};

use super::call::{self, Job, Verdict, Wish};
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::grant::Message;
use super::inbox::{Inbox, Pace};
use super::keys::Names;
use super::pauses::Pauses;
use super::setup::{self, ClientId, Setup, Standing};
use super::traffic::Traffic;
use crate::StoreError;
use crate::store::contract::{Answer, News, OpError, Opening};

/// The task's state. Dropped, wherever the task stands, it answers every job that it has.
pub(super) struct Link {
    inbox: Arc<Inbox>,
    endpoint: Endpoint,
    opening: Opening,
    names: Names,
    traffic: Traffic,
    /// Whether the task was ever polled.
    has_begun: bool,
    /// The last call's number, over all connections of this task.
    number: u64,
    /// The last connection that stood.
    old: Option<ClientId>,
    was_warned: bool,
}

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

/// Why a connection serves no more.
enum End {
    /// The session was dropped.
    Closed,
    Broken(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Broken(fault)
    }
}

impl Link {
    pub(super) fn new(inbox: Arc<Inbox>, endpoint: Endpoint, opening: Opening) -> Self {
        Self {
            inbox,
            endpoint,
            names: Names::new(opening.prefix.clone(), opening.instance.clone()),
            opening,
            traffic: Traffic::default(),
            has_begun: false,
            number: 0,
            old: None,
            was_warned: false,
        }
    }

    /// Runs until the session is dropped, or the registry has gone.
    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let mut pauses = Pauses::default();
        while self.opening.listener.strong_count() > 0 {
            if self.pause(&mut pauses).await.is_break() {
                return;
            }
            match self.connect().await {
                Ok(standing) => {
                    let began = Instant::now();
                    match self.serve(standing).await {
                        End::Closed => return,
                        End::Broken(fault) => self.lose(&fault.into()),
                    }
                    // One that breaks at once is as good as none.
                    if began.elapsed() > Pauses::LONGEST {
                        pauses = Pauses::default();
                    }
                }
                Err(End::Closed) => return,
                Err(End::Broken(fault)) => self.fail(&fault.into()),
            }
        }
    }

    /// Waits before the next attempt, unless somebody wants something.
    async fn pause(&mut self, pauses: &mut Pauses) -> ControlFlow<()> {
        let pause = pauses.next();
        if !pause.is_zero() && !self.traffic.is_waiting() {
            self.inbox.set_pace(Pace::Pausing);
            let hurried = poll_fn(|cx| self.inbox.poll_hurried(cx));
            select(hurried, pin!(tokio::time::sleep(pause))).await;
            self.inbox.set_pace(Pace::Running);
        }
        if self.inbox.is_closed() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    async fn connect(&mut self) -> Result<Standing, End> {
        self.number += 1;
        let setup = Setup {
            endpoint: &self.endpoint,
            names: &self.names,
            within: self.opening.response_timeout,
        };
        let connecting = setup.run(self.old.as_ref(), self.number);
        let closed = poll_fn(|cx| self.inbox.poll_closed(cx));
        match select(closed, pin!(connecting)).await {
            Either::Left(_) => Err(End::Closed),
            Either::Right((standing, _)) => Ok(standing?),
        }
    }

    /// Sends and hears on a connection until it ends.
    async fn serve(&mut self, mut standing: Standing) -> End {
        self.old = standing.id.take();
        let queue = standing.deaf.is_none();
        if let Some(reason) = standing.deaf.take().filter(|_| !self.was_warned) {
            self.was_warned = true;
            tracing::warn!(
                address = &**self.endpoint.address(),
                reason,
                "this server cannot push grants to us: locks are asked for again and again instead"
            );
        }
        self.tell(News::Up { queue });
        let early = std::mem::take(&mut standing.early);
        let mut wire = Wire {
            watch: Box::pin(sleep_until(Instant::now())),
            calls: FuturesUnordered::new(),
            standing,
        };
        let mut result = early.into_iter().try_for_each(|push| self.on_push(push));
        loop {
            if let Err(fault) = result {
                return fault.into();
            }
            self.traffic.add(self.inbox.take());
            self.send(&mut wire);
            result = match poll_fn(|cx| self.poll_event(&mut wire, cx)).await {
                Event::Closed => return End::Closed,
                Event::Submitted => Ok(()),
                Event::Pushed(Some(push)) => self.on_push(push),
                Event::Pushed(None) => Err(self.closed()),
                Event::Replied(number, reply) => self.on_reply(&mut wire, number, reply),
                Event::Overdue => Err(Fault::Silent {
                    address: self.endpoint.address().clone(),
                    within: self.opening.response_timeout,
                }),
            };
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
            // Polled in this task until its reply is here or the whole connection ends: a call
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
        // Only ever late calls move the watch, and only once it has fired: setting a timer for
        // each call would cost more than the call.
        while wire.watch.as_mut().poll(cx).is_ready() {
            wire.watch.as_mut().reset(overdue);
        }
        Poll::Pending
    }

    fn on_push(&mut self, push: PushInfo) -> Result<(), Fault> {
        match &push.kind {
            PushKind::Disconnection => return Err(self.closed()),
            // The client has given it to the oldest call for an answer, and from now on would give
            // every call its neighbour's (O4).
            kind if setup::is_subscription(kind) => {
                return Err(self.garbled("a subscription changed that nobody asked to"));
            }
            _ => {}
        }
        match setup::message(&self.names, &push) {
            Some(Message::Granted { key, grant }) => self.tell(News::Granted { key, grant }),
            // A probe's, late.
            Some(Message::Probe(_)) => {}
            None => tracing::debug!(kind = ?push.kind, "ignored a push that is not a grant for us"),
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
                self.on_push(push)?;
            }
        }
        let address = self.endpoint.address().clone();
        let reply = reply.map_err(|source| Fault::Broken {
            address: address.clone(),
            source,
        })?;
        let flight = self
            .traffic
            .land(number)
            .expect("a call is under way until its reply is here");
        if let Value::ServerError(error) = &reply {
            let refusal = error.into();
            let mut end = Ok(());
            for job in flight.jobs {
                end = end.and(self.refuse(job, &refusal));
            }
            return end;
        }

        let Some(reply) = call::read_reply(number, &flight.jobs, reply) else {
            // Not known to be done, and not known not to be.
            let fault = self.garbled("a reply is not the one to its call");
            self.answer_all(flight.jobs, &OpError::Unknown(fault.clone().into()));
            return Err(fault);
        };
        wire.standing.clock = super::clock::Clock::told(reply.at);
        let mut end = Ok(());
        for (job, verdict) in flight.jobs.into_iter().zip(reply.verdicts) {
            end = end.and(self.on_verdict(job, reply.at, verdict));
        }
        end
    }

    fn on_verdict(&mut self, mut job: Job, at: u64, verdict: Verdict) -> Result<(), Fault> {
        match verdict {
            Verdict::Done(outcome) => {
                if let Wish::Op { op, .. } = job.wish {
                    let result = Ok(Answer { at, outcome });
                    self.tell(News::Replied {
                        key: job.key,
                        op,
                        result,
                    });
                }
            }
            Verdict::Seen(sight) => {
                if let Wish::Look(answer) = job.wish {
                    // Whoever asked may have gone.
                    let _ = answer.send(Ok(sight));
                }
            }
            Verdict::Refused(refusal) => return self.refuse(job, &refusal),
            Verdict::Stale => match &mut job.wish {
                Wish::Op {
                    was_stale: was_stale @ false,
                    ..
                } => {
                    *was_stale = true;
                    self.traffic.add_again(job);
                }
                _ => {
                    let fault = self.garbled("the server's clock runs away from ours");
                    self.answer(job, OpError::Unknown(fault.clone().into()));
                    return Err(fault);
                }
            },
        }
        Ok(())
    }

    /// The server said no. That may end the connection.
    fn refuse(&self, job: Job, refusal: &super::fault::Refusal) -> Result<(), Fault> {
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

    /// A connection ended that had stood.
    fn lose(&mut self, error: &StoreError) {
        let jobs = self.traffic.crash();
        self.answer_all(jobs, &OpError::Unknown(error.clone()));
        self.tell(News::Down(error.clone()));
    }

    /// A connection could not be made: whoever waited for it is told.
    fn fail(&mut self, error: &StoreError) {
        self.traffic.add(self.inbox.take());
        let jobs = self.traffic.cancel();
        self.answer_all(jobs, &OpError::Unsent(error.clone()));
        self.tell(News::Down(error.clone()));
    }

    fn answer_all(&self, jobs: impl IntoIterator<Item = Job>, error: &OpError) {
        for job in jobs {
            self.answer(job, error.clone());
        }
    }

    fn answer(&self, job: Job, error: OpError) {
        match job.wish {
            Wish::Op { op, .. } => self.tell(News::Replied {
                key: job.key,
                op,
                result: Err(error),
            }),
            Wish::Look(answer) => {
                let _ = answer.send(Err(error.store_error().clone()));
            }
        }
    }

    fn tell(&self, news: News) {
        if let Some(listener) = self.opening.listener.upgrade() {
            listener.news(news);
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

impl Drop for Link {
    /// The session was dropped, or the runtime has gone: nobody else will answer these.
    fn drop(&mut self) {
        if !self.has_begun {
            // A runtime on its way down took the task and dropped it. Whatever waits was never
            // ours: an answer here could make its taker ask again, and so start the next task on
            // the same runtime, without end.
            self.inbox.set_pace(Pace::Absent);
            return;
        }
        self.traffic.add(self.inbox.resign());
        let address = self.endpoint.address().clone();
        let error = StoreError::from(Fault::Abandoned { address });
        let (sent, unsent) = (self.traffic.crash(), self.traffic.cancel());
        self.answer_all(sent, &OpError::Unknown(error.clone()));
        self.answer_all(unsent, &OpError::Unsent(error.clone()));
        self.tell(News::Down(error));
    }
}
