//! The connections of a registry, as the driver sees them: calls, inspections, and what is heard and looked up.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{BoxFuture, Either, FutureExt, TryFutureExt, join_all};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::time::Instant;
use tokio_postgres::types::Type;
use tokio_postgres::{Error, Row};

use super::backend::PostgresBackend;
use super::call::{self, Argument};
use super::connection::Connection;
use super::fault::{Fault, ends_connection};
use super::hello::Process;
use super::notice;
use crate::base::StoreError;
use crate::roaming::Spot;
use crate::roaming::time::{Sleep, sleep_until, timeout};
use crate::store::contract::{Outcome, StoreEvent};
use crate::store::driver::{
    Call, Incoming, Link, Next, Received, Refusal, Replies, Reply, Request,
};

/// How often a registry looks for what nobody uses, on average.
const SWEEP: Duration = Duration::from_secs(600);

/// The pauses between two looks of a waiting session for grants that it was not told of, in milliseconds. Whoever
/// granted them may have died before it could send the notification.
const LOOK: RangeInclusive<u64> = 400..=750;

/// It looks for this long after the last answer that left a ticket. Each key that is waited for is asked about more
/// often than that (W2).
const LOOK_FOR: Duration = Duration::from_secs(15);

/// In so many parts a call is sent again that was refused.
const PARTS: usize = 4;

pub(super) struct PostgresLink {
    backend: Arc<PostgresBackend>,
    /// The first of them listens.
    connections: Vec<Connection>,
    /// The advisory lock that the first of them holds; 0 if it cannot listen.
    number: i64,
    /// The server processes behind them.
    processes: Vec<Process>,
    running: FuturesUnordered<BoxFuture<'static, Result<Done, Fault>>>,
    spot: Spot,
    /// What was heard and not taken yet.
    heard: VecDeque<StoreEvent>,
    /// Why a connection has ended.
    ended: Option<Fault>,
    /// Until when it may have tickets.
    waits_until: Instant,
    /// Until it looks for grants.
    look: Pin<Box<Sleep>>,
    is_looking: bool,
    sweep: Pin<Box<Sleep>>,
}

/// What the connections did.
enum Done {
    Call {
        lane: usize,
        sent_at: Instant,
        answer: Answer,
    },
    /// Notices were sent, or unused rows were deleted.
    Aside,
    /// Grants that this session was not told of.
    Looked(Vec<String>),
}

/// The rows for all ops of a call, or for each of its inspections.
type Answer = Vec<Result<Vec<Row>, Error>>;

impl PostgresLink {
    pub(super) fn new(
        backend: Arc<PostgresBackend>,
        connections: Vec<Connection>,
        number: i64,
        processes: Vec<Process>,
    ) -> Self {
        let now = Instant::now();
        Self {
            backend,
            connections,
            number,
            processes,
            running: FuturesUnordered::new(),
            spot: Spot::here(),
            heard: VecDeque::new(),
            ended: None,
            waits_until: now,
            look: Box::pin(sleep_until(now)),
            is_looking: false,
            sweep: Box::pin(sleep_until(now + SWEEP.mul_f64(rand::random()))),
        }
    }

    /// The connection that listens.
    pub(super) fn first(&mut self) -> &mut Connection {
        &mut self.connections[0]
    }

    /// The connection that carries the calls of a lane. Before a pooler, the first one carries none.
    fn carrier(&mut self, lane: usize) -> &mut Connection {
        let silent = usize::from(self.backend.settings.pooled.is_some());
        &mut self.connections[silent + lane]
    }

    /// Runs `asking` until it is answered, but not longer than an answer may take.
    fn run(&mut self, asking: impl Future<Output = Done> + Send + 'static) {
        let (address, within) = (self.address().clone(), self.backend.within);
        let silent = move |_| Fault::silent(&address, within);
        let asking = timeout(within, asking).map_err(silent);
        self.running.push(asking.boxed());
    }

    fn address(&self) -> &Arc<str> {
        &self.backend.settings.endpoint.address
    }

    /// What is done, and what it brings.
    fn poll_done(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Incoming<Answer>>, StoreError>> {
        let Poll::Ready(Some(done)) = self.running.poll_next_unpin(cx) else {
            return Poll::Pending;
        };
        Poll::Ready(Ok(match done? {
            Done::Call {
                lane,
                sent_at,
                answer,
            } => {
                // Else the connection itself knows the reason.
                let mut errors = answer.iter().filter_map(|rows| rows.as_ref().err());
                let is_closed = errors.any(|error| error.as_db_error().is_none());
                (self.ended.is_none() || !is_closed).then_some(Incoming::Answer {
                    lane,
                    sent_at,
                    answer,
                })
            }
            Done::Aside => None,
            Done::Looked(untold) => {
                untold.iter().for_each(|payload| self.told(payload));
                self.is_looking = false;
                self.plan_look();
                None
            }
        }))
    }

    /// Moves the bytes of all connections. Returns whether anything was heard.
    fn poll_connections(&mut self, cx: &mut Context<'_>) -> bool {
        let mut told = Vec::new();
        for connection in &mut self.connections {
            while self.ended.is_none()
                && let Poll::Ready(notice) = connection.poll_notice(cx)
            {
                match notice {
                    Ok(notice) => told.push(notice),
                    Err(fault) => self.ended = Some(fault),
                }
            }
        }
        told.iter().for_each(|notice| self.told(notice.payload()));
        !told.is_empty()
    }

    /// A notice that was heard or looked up.
    fn told(&mut self, payload: &str) {
        let names = &self.backend.names;
        let events = notice::read(&names.prefix, &names.instance, payload);
        self.heard.extend(events);
    }

    /// Sends notices of a call: before anybody is told of its answer, and after it is done.
    fn notify(&mut self, lane: usize, notices: Vec<String>) {
        if notices.is_empty() {
            return;
        }
        let backend = self.backend.clone();
        let carrier = self.carrier(lane);
        let caller = carrier.caller.clone();
        let mut notifying = async move {
            let notices: [Argument<'_>; 1] = [(&notices, Type::TEXT_ARRAY)];
            // Refused: whoever waits finds out by asking (W2).
            let _ = caller.call(&backend.names, call::NOTIFY, &notices).await;
            Ok(Done::Aside)
        }
        .boxed();
        // It is sent now, in front of all later calls of this connection.
        let is_done = (&mut notifying).now_or_never().is_some();
        carrier.flush();
        if !is_done {
            self.running.push(notifying);
        }
    }

    /// It may have tickets from now on.
    fn waits(&mut self) {
        let now = Instant::now();
        if self.waits_until < now && !self.is_looking {
            self.plan_look();
        }
        self.waits_until = now + LOOK_FOR;
    }

    fn plan_look(&mut self) {
        let pause = Duration::from_millis(rand::random_range(LOOK));
        self.look.as_mut().reset(Instant::now() + pause);
    }

    /// Looks for grants that it was not told of, on the connection that hears the others.
    fn look(&mut self) {
        self.is_looking = true;
        let (backend, number) = (self.backend.clone(), self.number);
        let caller = self.connections[0].caller.clone();
        self.run(async move {
            let line: [Argument<'_>; 1] = [(&number, Type::INT8)];
            let untold = caller.call(&backend.names, call::UNTOLD, &line).await;
            // Refused: whoever waits finds out by asking (W2).
            let untold = untold.unwrap_or_default();
            Done::Looked(
                untold
                    .iter()
                    .filter_map(|row| row.try_get(0).ok())
                    .collect(),
            )
        });
    }

    /// Begins what is due. Returns whether anything was.
    fn poll_timers(&mut self, cx: &mut Context<'_>) -> bool {
        // It looks while it waits for something.
        let may_look = !self.is_looking && self.look.deadline() < self.waits_until;
        if may_look && self.look.as_mut().poll(cx).is_ready() {
            self.look();
            return true;
        }
        if self.sweep.as_mut().poll(cx).is_ready() {
            let pause = SWEEP.mul_f64(rand::random_range(0.5..1.5));
            self.sweep.as_mut().reset(Instant::now() + pause);
            let backend = self.backend.clone();
            let sweeping = async move {
                backend.sweep().await;
                Ok(Done::Aside)
            };
            self.running.push(sweeping.boxed());
            return true;
        }
        false
    }

    /// What the rows say about ops.
    fn read_ops(
        &mut self,
        lane: usize,
        rows: &[Row],
        requests: &mut [Request],
    ) -> Result<Replies, StoreError> {
        let said = rows.iter().zip(&*requests);
        let said: Option<Vec<_>> = said.map(|(row, it)| call::read(row, it)).collect();
        let Some(said) = said.filter(|said| said.len() == requests.len()) else {
            return Err(Fault::given_up(self.address(), "unexpected answer to a call").into());
        };
        let at = said.iter().map(|said| said.at).max();
        let (mut list, mut notices) = (Vec::new(), Vec::new());
        for (said, request) in said.into_iter().zip(requests) {
            self.note(&said.reply, request);
            list.push(said.reply);
            notices.extend(said.notices);
        }
        self.notify(lane, notices);
        Ok(Replies {
            at,
            list,
            end: None,
        })
    }

    /// What a reply means for what is sent next.
    fn note(&mut self, reply: &Reply, request: &mut Request) {
        match reply {
            // An adoption that is put off has ended nothing, but nothing reads this flag for one.
            Reply::Later(_) => request.has_ended = true,
            Reply::Done {
                outcome: Outcome::Busy { score: Some(_), .. },
                ..
            } => self.waits(),
            _ => {}
        }
    }

    /// The server has undone the whole call. Perhaps because of one of its requests, or since it waited too long for the
    /// calls of others: so it is sent again in four parts, after what waits already. One request by itself each would wait
    /// that long once more.
    fn refused(&self, requests: &mut [Request], error: &Error) -> Replies {
        let many = requests.len();
        let reply = if many > 1 {
            let most = many.div_ceil(PARTS);
            requests.iter_mut().for_each(|it| it.most = most);
            Reply::InParts
        } else {
            Reply::Refused(refusal(Fault::refused(self.address(), error)))
        };
        Replies {
            list: vec![reply; requests.len()],
            ..Replies::default()
        }
    }

    /// The rows of an inspection.
    fn read_look(&self, rows: Result<Vec<Row>, Error>) -> Result<Reply, StoreError> {
        let address = self.address();
        let rows = match rows {
            Ok(rows) => rows,
            Err(error) => return Ok(Reply::Refused(refusal(Fault::refused(address, &error)))),
        };
        let garbled = || Fault::given_up(address, "unexpected answer to an inspection");
        Ok(Reply::Seen(call::read_status(&rows).ok_or_else(garbled)?))
    }
}

impl Link for PostgresLink {
    type Answer = Answer;
    type Trace = Vec<Process>;

    fn send(&mut self, call: Call<'_>) {
        let (lane, sent_at) = (call.lane, call.now);
        let backend = self.backend.clone();
        let number = self.number;
        let caller = self.carrier(lane).caller.clone();
        // All of them are inspections, or none is.
        let asking = if call.requests.iter().any(|request| request.op().is_none()) {
            let locks = call.requests.iter().map(|it| backend.names.lock(it.key()));
            let locks: Vec<_> = locks.collect();
            Either::Left(async move {
                let looks = locks.iter().map(async |lock| {
                    let which: [Argument<'_>; 2] = [(lock, Type::TEXT), (&number, Type::INT8)];
                    caller.call(&backend.names, call::INSPECT, &which).await
                });
                join_all(looks).await
            })
        } else {
            // Locks are taken in the order of their keys.
            call.requests.sort_by(|a, b| a.key().cmp(b.key()));
            let is_durable = backend.settings.is_durable;
            let asking = call::Call::new(
                &backend.names,
                is_durable,
                number,
                call.of_use,
                call.requests,
            );
            Either::Right(async move {
                let arguments = asking.arguments();
                let rows = caller.call(&backend.names, call::OPS, &arguments);
                vec![rows.await]
            })
        };
        self.run(asking.map(move |answer| Done::Call {
            lane,
            sent_at,
            answer,
        }));
    }

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Incoming<Answer>, StoreError>> {
        if self.spot.has_moved() {
            // Each is polled: its timer moves, too.
            self.running = std::mem::take(&mut self.running).into_iter().collect();
        }
        'polling: loop {
            if let Some(event) = self.heard.pop_front() {
                return Poll::Ready(Ok(Incoming::Other(Received::Heard(event))));
            }
            let mut has_heard = false;
            // First for what has come: it counts also if its time is over, since nobody could read it sooner. And again,
            // since what this brings may be something new to write.
            for _ in 0..2 {
                has_heard |= self.poll_connections(cx);
                if let Poll::Ready(done) = self.poll_done(cx) {
                    match done? {
                        Some(incoming) => return Poll::Ready(Ok(incoming)),
                        None => continue 'polling,
                    }
                }
            }
            // What was answered before that counts.
            if let Some(fault) = self.ended.take() {
                return Poll::Ready(Err(fault.into()));
            }
            if !has_heard && !self.poll_timers(cx) {
                return Poll::Pending;
            }
        }
    }

    fn read(
        &mut self,
        lane: usize,
        mut answer: Answer,
        requests: &mut [Request],
    ) -> Result<Replies, StoreError> {
        let mut errors = answer.iter().filter_map(|rows| rows.as_ref().err());
        if let Some(error) = errors.find(|error| ends_connection(error)) {
            return Err(Fault::broken(self.address(), error).into());
        }
        if requests.iter().any(|request| request.op().is_none()) {
            let list = answer.into_iter().map(|rows| self.read_look(rows));
            return Ok(Replies {
                list: list.collect::<Result<_, _>>()?,
                ..Replies::default()
            });
        }
        match answer.pop().transpose() {
            Ok(rows) => self.read_ops(lane, &rows.unwrap_or_default(), requests),
            Err(error) => Ok(self.refused(requests, &error)),
        }
    }

    fn is_quiet(&self) -> bool {
        self.running.is_empty()
    }

    fn trace(&self) -> Option<Vec<Process>> {
        Some(self.processes.clone())
    }
}

fn refusal(fault: Fault) -> Refusal {
    Refusal {
        text: fault.to_string(),
        error: fault.into(),
        next: Next::Nothing,
    }
}
