//! The task that has a session's connections: it connects, sends calls and reads answers and grants.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_postgres::Row;

use super::address::Heard;
use super::call::{self, Call, Look, Reply, Request, Verdict};
use super::fault::{Fault, ends_connection};
use super::hello::{Backend, Connected, Hello};
use super::notice;
use super::session::{Shared, abort, replied};
use crate::store::contract::{Answer, Op, OpError, Outcome, StoreEvent};
use crate::store::send_window::{Limits, Priority, SendWindow};
use crate::store::server_clock::ServerClock;
use crate::user_code::log;

/// Connections are closed after this time without use, unless leases or callers need them.
const IDLE: Duration = Duration::from_secs(60);

/// A connection has one call in flight. All that comes meanwhile shares the next, and one flush of the server's log.
const LIMITS: Limits = Limits {
    requests: 256,
    calls: 1,
    bytes: 1 << 20,
};

/// After so long an op is sent again that waits for the end of a transaction, and later less often: after an eighth of
/// the time that it has waited.
const AGAIN: Duration = Duration::from_millis(5);
const LONGEST_AGAIN: Duration = Duration::from_millis(500);

/// How often a registry looks for what nobody uses, on average.
const SWEEP: Duration = Duration::from_secs(600);

/// The pauses between two looks of a waiting session for grants that it was not told of, in milliseconds. Whoever
/// granted them may have died before it could send the notification.
const LOOK: RangeInclusive<u64> = 400..=750;

/// It looks for this long after the last answer that left a ticket. Each key that is waited for is asked about more
/// often than that (W2).
const LOOK_FOR: Duration = Duration::from_secs(15);

/// If the last answers went to more callers than this, more requests may follow at once.
const FEW: usize = 2;

/// When it is dropped, it returns every request that it has to the session.
pub(super) struct PostgresTask {
    shared: Arc<Shared>,
    /// One for each connection that carries calls.
    windows: Vec<SendWindow<Request>>,
    /// Sent, and to be sent again then.
    delayed: Vec<(Instant, Request)>,
    /// The server processes of connections that ended with a call in flight.
    predecessors: Vec<Backend>,
    /// Whether the task was ever polled.
    has_begun: bool,
    /// Whether the session knows that the task has ended: there may be another by now.
    has_ended: bool,
}

/// What the connections did.
enum Done {
    Call {
        lane: usize,
        sent_at: Instant,
        rows: Result<Result<Vec<Row>, tokio_postgres::Error>, Fault>,
    },
    /// Notices were sent, a lock was inspected, or unused rows were deleted.
    Aside(Result<(), Fault>),
    /// Grants that this session was not told of.
    Looked(Result<Vec<String>, Fault>),
}

/// Connections in use.
struct Connections {
    connected: Connected,
    /// How many of the links, the first ones, carry no calls.
    silent: usize,
    running: FuturesUnordered<BoxFuture<'static, Done>>,
    /// How long the last calls took, smoothed.
    round_trip: Duration,
    last_used: Instant,
    /// Until when it may have tickets.
    waits_until: Instant,
    /// When it looks for grants; `None` while it does.
    look_at: Option<Instant>,
    /// Events that were not delivered yet.
    events: Vec<StoreEvent>,
}

impl PostgresTask {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let window = || SendWindow::new(LIMITS);
        let windows = std::iter::repeat_with(window).take(shared.settings.lanes);
        Self {
            windows: windows.collect(),
            shared,
            delayed: Vec::new(),
            predecessors: Vec::new(),
            has_begun: false,
            has_ended: false,
        }
    }

    /// Runs until the session is dropped, or nobody needs the store.
    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let shared = self.shared.clone();
        // May be dropped anywhere: the connections are dropped with it (O2).
        tokio::select! {
            biased;
            () = shared.closed() => {}
            () = self.connect_and_serve() => self.has_ended = true,
        }
    }

    async fn connect_and_serve(&mut self) {
        while let Some(not_before) = self.shared.next_attempt() {
            if let Some(until) = not_before {
                sleep_until(until).await;
            }
            let mut stood_since = None;
            let ended = async {
                let connections = self.connect().await?;
                stood_since = Some(Instant::now());
                self.serve(connections).await
            };
            if let Err(fault) = ended.await {
                let address = &*self.shared.settings.endpoint.address;
                log!(debug, address, error = %fault, "lost the connection");
                let (sent, unsent) = self.abort();
                self.shared.lost(fault, sent, unsent, stood_since);
            }
        }
    }

    /// Gives up all requests: those that were sent, and the others.
    fn abort(&mut self) -> (Vec<Request>, Vec<Request>) {
        let (mut sent, unsent) = abort(&mut self.windows);
        sent.extend(self.delayed.drain(..).map(|(_, request)| request));
        (sent, unsent)
    }

    async fn connect(&mut self) -> Result<Connections, Fault> {
        let hello = Hello {
            settings: &self.shared.settings,
            names: &self.shared.names,
            within: self.shared.config.response_timeout,
        };
        let (connected, backends) = hello.set_up(&self.predecessors).await?;
        // Taken back if these connections end with nothing in flight.
        self.predecessors = backends;
        Ok(Connections {
            silent: usize::from(self.shared.settings.pooled.is_some()),
            connected,
            running: FuturesUnordered::new(),
            round_trip: Duration::ZERO,
            last_used: Instant::now(),
            waits_until: Instant::now(),
            look_at: Some(Instant::now()),
            events: Vec::new(),
        })
    }

    /// Sends and reads until a connection is lost, or none is needed.
    async fn serve(&mut self, mut connections: Connections) -> Result<(), Fault> {
        self.shared.connected(&connections.connected);
        let end = self.serve_until_end(&mut connections).await;
        self.shared.tell(connections.events.drain(..));
        if !self.windows.iter().any(SendWindow::is_in_flight) {
            self.predecessors.clear();
        }
        end
    }

    async fn serve_until_end(&mut self, connections: &mut Connections) -> Result<(), Fault> {
        let mut idle = pin!(sleep_until(connections.last_used + IDLE));
        let mut sweep = pin!(sleep_until(Instant::now() + SWEEP.mul_f64(rand::random())));
        loop {
            let told = connections.events.len();
            self.shared.tell(connections.events.drain(..));
            if told > FEW {
                yield_now().await;
            }
            self.take(connections);
            self.send_calls(connections);
            let due = self.delayed.iter().map(|(at, _)| *at).min();
            let look_at = connections.next_look();
            tokio::select! {
                biased;
                Some(done) = connections.running.next() => self.done(connections, done)?,
                heard = connections.connected.heard.recv() => self.hear(connections, heard)?,
                () = self.shared.wake.notified() => {
                    if self.windows.iter().any(SendWindow::is_in_flight) {
                        // Callers that were woken together share the next call.
                        yield_now().await;
                    }
                }
                () = wait_until(due) => self.send_again(),
                () = wait_until(look_at) => connections.look(&self.shared),
                () = &mut sweep => {
                    connections.sweep(&self.shared);
                    sweep.as_mut().reset(Instant::now() + SWEEP.mul_f64(rand::random_range(0.5..1.5)));
                }
                () = &mut idle => {
                    if self.is_idle(connections) {
                        return Ok(());
                    }
                    idle.as_mut().reset(connections.last_used + IDLE);
                }
            }
        }
    }

    /// Takes what the registry has submitted. The requests of a key go over one connection.
    fn take(&mut self, connections: &mut Connections) {
        let (requests, looks) = self.shared.take();
        for request in requests {
            let lane = lane_of(&request.submitted.key, self.windows.len());
            self.windows[lane].add([request]);
        }
        for (key, look) in looks {
            connections.inspect(&self.shared, &key, look);
        }
    }

    fn send_again(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.delayed.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, request) in due {
            let lane = lane_of(&request.submitted.key, self.windows.len());
            self.windows[lane].add_again(request);
        }
    }

    fn send_calls(&mut self, connections: &mut Connections) {
        let now = Instant::now();
        for (lane, window) in self.windows.iter_mut().enumerate() {
            while let Some((priority, mut requests)) = window.next_call() {
                if priority == Priority::Renew {
                    // A renewal that cannot be in time is not sent (G4).
                    let in_time = now + connections.round_trip;
                    let is_late =
                        |it: &mut Request| it.useful_until().is_some_and(|until| until <= in_time);
                    let error = OpError::TooLate(
                        Fault::too_late(&self.shared.settings.endpoint.address).into(),
                    );
                    let late = requests.extract_if(.., is_late);
                    self.shared.tell(
                        late.map(|request| replied(request, Err(error.clone())))
                            .collect::<Vec<_>>(),
                    );
                    if requests.is_empty() {
                        continue;
                    }
                }
                // Locks are taken in the order of their keys.
                requests.sort_by(|a, b| a.submitted.key.cmp(&b.submitted.key));
                connections.send(&self.shared, lane, now, &requests);
                window.sent(requests);
            }
        }
    }

    fn hear(&mut self, connections: &mut Connections, heard: Option<Heard>) -> Result<(), Fault> {
        let address = &self.shared.settings.endpoint.address;
        match heard {
            Some(Heard::Notice(told)) => {
                connections.told(&self.shared, told.payload());
                Ok(())
            }
            Some(Heard::Ended(fault)) => {
                // What was answered before that counts.
                while let Some(Some(done)) = connections.running.next().now_or_never() {
                    if let Done::Call {
                        rows: Ok(Ok(_)), ..
                    } = &done
                    {
                        self.done(connections, done)?;
                    }
                }
                Err(fault)
            }
            // The task of the connection was dropped: its runtime ends.
            None => Err(Fault::abandoned(address)),
        }
    }

    fn done(&mut self, connections: &mut Connections, done: Done) -> Result<(), Fault> {
        let (lane, sent_at, rows) = match done {
            Done::Aside(result) => return result,
            Done::Looked(untold) => {
                for payload in untold? {
                    connections.told(&self.shared, &payload);
                }
                connections.plan_look();
                return Ok(());
            }
            Done::Call {
                lane,
                sent_at,
                rows,
            } => (lane, sent_at, rows?),
        };
        let took = sent_at.elapsed();
        // It falls at once: after a stall, renewals that can be in time would else not be sent.
        connections.round_trip = took.min((connections.round_trip * 7 + took) / 8);
        let window = &mut self.windows[lane];
        let requests = window.answered().expect("each call has one answer");
        let address = &self.shared.settings.endpoint.address;
        let rows = match rows {
            Ok(rows) => rows,
            Err(error) if error.code().is_none_or(ends_connection) => {
                window.sent(requests);
                return Err(Fault::broken(address, &error));
            }
            Err(error) => {
                self.refused(connections, lane, requests, &error);
                return Ok(());
            }
        };
        let read: Option<Vec<_>> = rows
            .iter()
            .zip(&requests)
            .map(|(row, request)| call::read(row, request))
            .collect();
        let Some(replies) = read.filter(|replies| replies.len() == requests.len()) else {
            // They are done, but nobody knows how.
            window.sent(requests);
            return Err(Fault::given_up(address, "unexpected answer to a call"));
        };
        let at = replies.iter().map(|reply| reply.at).max().unwrap_or(0);
        connections.connected.clock = ServerClock::told(at, Instant::now());
        let notices = replies
            .iter()
            .flat_map(|reply| reply.notices.iter().cloned());
        connections.notify(&self.shared, lane, notices.collect());
        let mut end = Ok(());
        for (request, reply) in requests.into_iter().zip(replies) {
            end = end.and(self.answer(connections, lane, request, reply));
        }
        end
    }

    fn answer(
        &mut self,
        connections: &mut Connections,
        lane: usize,
        mut request: Request,
        reply: Reply,
    ) -> Result<(), Fault> {
        let address = &self.shared.settings.endpoint.address;
        let owner = request.submitted.op.owner();
        let unserved = reply.unserved.then(|| StoreEvent::Unserved {
            key: request.submitted.key.clone(),
            owner,
        });
        let mut end = Ok(());
        match reply.verdict {
            Verdict::Again => {
                request.has_ended |= matches!(
                    request.submitted.op,
                    Op::Release { .. }
                        | Op::Withdraw { .. }
                        | Op::Unlisten { .. }
                        | Op::Yield { .. }
                );
                let pause = (request.since.elapsed() / 8).clamp(AGAIN, LONGEST_AGAIN);
                self.delayed.push((Instant::now() + pause, request));
            }
            Verdict::More => self.windows[lane].add_again(request),
            Verdict::Stale if !request.was_stale => {
                request.was_stale = true;
                self.windows[lane].add_again(request);
            }
            Verdict::Stale => {
                let fault =
                    Fault::given_up(address, "the server's clock runs too differently from ours");
                self.windows[lane].finish(&request);
                let unsent = OpError::Unsent(fault.clone().into());
                connections.events.push(replied(request, Err(unsent)));
                end = Err(fault);
            }
            Verdict::Done(outcome) => {
                self.windows[lane].finish(&request);
                if let Outcome::Busy { score: Some(_), .. } = outcome {
                    connections.waits();
                }
                let answer = Answer {
                    at: reply.at,
                    outcome,
                };
                connections.events.push(replied(request, Ok(answer)));
            }
        }
        connections.events.extend(unserved);
        end
    }

    /// The server has undone the whole call. Perhaps because of one of its requests: so each is sent again by itself.
    fn refused(
        &mut self,
        connections: &mut Connections,
        lane: usize,
        mut requests: Vec<Request>,
        error: &tokio_postgres::Error,
    ) {
        let window = &mut self.windows[lane];
        if requests.len() > 1 {
            for mut request in requests.into_iter().rev() {
                request.alone = true;
                window.add_again(request);
            }
            return;
        }
        let fault = Fault::refused(&self.shared.settings.endpoint.address, error);
        if let Some(request) = requests.pop() {
            window.finish(&request);
            connections
                .events
                .push(replied(request, Err(OpError::Refused(fault.into()))));
        }
    }

    /// Whether the connections are not needed any more.
    fn is_idle(&self, connections: &mut Connections) -> bool {
        let now = Instant::now();
        if now < connections.last_used + IDLE {
            return false;
        }
        connections.last_used = now;
        connections.running.is_empty() && self.delayed.is_empty() && !self.shared.is_needed()
    }
}

impl Connections {
    fn send(&mut self, shared: &Shared, lane: usize, now: Instant, requests: &[Request]) {
        let within = shared.config.response_timeout;
        let connected = &self.connected;
        let of_use = connected.clock.of_use(now, within);
        let call = Call::new(
            &shared.names,
            shared.settings.is_durable,
            connected.line,
            of_use,
            requests,
        );
        let ready = &connected.links[self.silent + lane];
        let (client, prepared) = (ready.link.client.clone(), ready.prepared.clone());
        let (names, address) = (
            shared.names.clone(),
            shared.settings.endpoint.address.clone(),
        );
        self.last_used = now;
        let calling = async move {
            let sending = call.send(&client, &names, prepared.as_ref());
            let rows = timeout(within, sending)
                .await
                .map_err(|_| Fault::silent(&address, within));
            Done::Call {
                lane,
                sent_at: now,
                rows,
            }
        };
        self.running.push(calling.boxed());
    }

    /// Sends notices of a call: before anybody is told of its answer, and after it is done.
    fn notify(&mut self, shared: &Shared, lane: usize, notices: Vec<String>) {
        if notices.is_empty() {
            return;
        }
        let ready = &self.connected.links[self.silent + lane];
        let (client, prepared) = (ready.link.client.clone(), ready.prepared.clone());
        let names = shared.names.clone();
        let mut notifying = async move {
            // Refused: whoever waits finds out by asking (W2).
            let _ = call::notify(&client, &names, prepared.as_ref(), &notices).await;
            Done::Aside(Ok(()))
        }
        .boxed();
        // It is sent now, in front of all later calls of this connection.
        if (&mut notifying).now_or_never().is_none() {
            self.running.push(notifying);
        }
    }

    fn inspect(&mut self, shared: &Shared, key: &str, look: Look) {
        let client = self.connected.links[self.silent].link.client.clone();
        let (names, key) = (shared.names.clone(), key.to_owned());
        let (address, within) = (
            shared.settings.endpoint.address.clone(),
            shared.config.response_timeout,
        );
        self.last_used = Instant::now();
        let inspecting = async move {
            let asked = timeout(within, call::inspect(&client, &names, &key)).await;
            let garbled = || Fault::given_up(&address, "unexpected answer to an inspection");
            let status = match &asked {
                Ok(Ok(rows)) => call::read_status(rows).ok_or_else(garbled),
                Ok(Err(error)) => Err(Fault::broken(&address, error)),
                Err(_) => Err(Fault::silent(&address, within)),
            };
            let end = match &asked {
                Ok(Err(error)) if !error.code().is_none_or(ends_connection) => Ok(()),
                _ => status.as_ref().map(drop).map_err(Clone::clone),
            };
            // The caller may have gone.
            let _ = look.send(status.map_err(Into::into));
            Done::Aside(end)
        };
        self.running.push(inspecting.boxed());
    }

    fn sweep(&mut self, shared: &Arc<Shared>) {
        let shared = shared.clone();
        let sweeping = async move {
            shared.sweep().await;
            Done::Aside(Ok(()))
        };
        self.running.push(sweeping.boxed());
    }

    /// A notice that was heard or looked up.
    fn told(&mut self, shared: &Shared, payload: &str) {
        let names = &shared.names;
        let events = notice::read(&names.prefix, &names.instance, payload);
        self.events.extend(events);
    }

    /// It may have tickets from now on.
    fn waits(&mut self) {
        let now = Instant::now();
        if self.waits_until < now && self.look_at.is_some() {
            self.plan_look();
        }
        self.waits_until = now + LOOK_FOR;
    }

    fn plan_look(&mut self) {
        let pause = Duration::from_millis(rand::random_range(LOOK));
        self.look_at = Some(Instant::now() + pause);
    }

    /// When it looks next; `None` if it does, or waits for nothing.
    fn next_look(&self) -> Option<Instant> {
        self.look_at.filter(|at| *at < self.waits_until)
    }

    /// Looks for grants that it was not told of, on the connection that hears the others.
    fn look(&mut self, shared: &Shared) {
        self.look_at = None;
        let first = &self.connected.links[0];
        let (client, is_ours) = (first.link.client.clone(), first.prepared.is_some());
        let (names, line) = (shared.names.clone(), self.connected.line);
        let (address, within) = (
            shared.settings.endpoint.address.clone(),
            shared.config.response_timeout,
        );
        let looking = async move {
            let asked = timeout(within, call::untold(&client, &names, is_ours, line)).await;
            Done::Looked(match asked {
                // Refused: whoever waits finds out by asking (W2).
                Ok(untold) => Ok(untold.unwrap_or_default()),
                Err(_) => Err(Fault::silent(&address, within)),
            })
        };
        self.running.push(looking.boxed());
    }
}

fn lane_of(key: &str, lanes: usize) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let lanes = lanes as u64;
    usize::try_from(hasher.finish() % lanes).expect("less than the number of lanes")
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) => sleep_until(due).await,
        None => std::future::pending().await,
    }
}

impl Drop for PostgresTask {
    /// The session was dropped, or the runtime has ended.
    fn drop(&mut self) {
        if !self.has_ended {
            let (sent, unsent) = self.abort();
            self.shared.ended(self.has_begun, sent, unsent);
        }
    }
}
