//! The task that owns the connection to one server: it connects, sends calls, and reads answers and grants.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::OptionFuture;
use tokio::task::yield_now;
use tokio::time::Instant;

use super::backend::{Address, Backend, Call, Connected, Hello, Incoming, Link, Reply, Trouble};
use super::request::Request;
use super::routing::STRANGE_CLOCK;
use super::server_clock::ServerClock;
use super::session::{NodeId, Shared};
use super::subscriptions::{CLEANUP, UNCONFIRMED};
use crate::base::StoreError;
use crate::base::mutex::Mutex;
use crate::base::sync::Notify;
use crate::base::user_code::log;
use crate::roaming::time::sleep_until;
use crate::store::attempts::{ATTEMPTS, Pace, SetUps, first_success};
use crate::store::contract::{OpError, StoreEvent};
use crate::store::send_window::{Priority, SendWindow};

/// A connection is closed after this time without use, unless leases or callers need it.
pub(crate) const IDLE: Duration = Duration::from_secs(60);

/// After answers to more callers than this the task yields: their next requests share a call.
const FEW: usize = 2;

/// What comes from a node.
#[derive(Debug)]
pub(crate) enum Received {
    Answer {
        request: Request,
        reply: Reply,
    },
    /// A push: a grant, or a notice that a lock is free.
    Heard(StoreEvent),
    /// The end of a subscription that nobody asked for.
    Unsubscribed {
        key: Arc<str>,
    },
    /// Not sent in time, or not confirmed.
    Failed {
        request: Request,
        error: OpError,
    },
    /// The acquisition counts.
    Confirmed {
        request: Request,
    },
}

/// When it is dropped, it returns every request that it has to the session.
pub(super) struct NodeTask<B: Backend> {
    shared: Arc<Shared<B>>,
    id: NodeId,
    address: Address,
    wake: Arc<Notify>,
    /// Empty, and used again.
    taken: Vec<Request>,
    /// One for each lane.
    windows: Vec<SendWindow<Request>>,
    /// Requests that the server put off, and when they are sent again.
    delayed: Vec<(Instant, Request)>,
    /// While there is one.
    connection: Option<Connection<B::Link>>,
    /// The trace of the last connection, if that ended with calls in flight.
    predecessor: Option<<B::Link as Link>::Trace>,
    /// Whether a connection was made.
    has_connected: bool,
    /// Whether the task was ever polled.
    has_begun: bool,
    /// Whether the session knows that the task has ended: there may be another by now.
    has_ended: bool,
}

/// A connection in use.
struct Connection<L> {
    link: L,
    can_push: bool,
    clock: ServerClock,
    /// How long the last calls took, smoothed.
    round_trip: Duration,
    last_used: Instant,
    /// Whether there may be subscriptions that nobody uses.
    has_subscriptions: bool,
    /// How many orders are not answered yet.
    orders: usize,
    /// Events that were received and not delivered yet.
    received: Vec<Received>,
}

impl<L: Link> Connection<L> {
    async fn next(&mut self) -> Result<Incoming<L::Answer>, StoreError> {
        poll_fn(|cx| self.link.poll_next(cx)).await
    }
}

impl<B: Backend> NodeTask<B> {
    pub(super) fn new(
        shared: Arc<Shared<B>>,
        id: NodeId,
        address: Address,
        wake: Arc<Notify>,
    ) -> Self {
        let window = || SendWindow::new(shared.backend.limits());
        let windows = std::iter::repeat_with(window).take(shared.backend.lanes());
        Self {
            taken: Vec::new(),
            windows: windows.collect(),
            shared,
            id,
            address,
            wake,
            delayed: Vec::new(),
            connection: None,
            predecessor: None,
            has_connected: false,
            has_begun: false,
            has_ended: false,
        }
    }

    /// Runs until the session is dropped, or nobody needs the node.
    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let shared = self.shared.clone();
        // May be dropped anywhere: the connection is dropped with it (O2).
        tokio::select! {
            biased;
            () = shared.closed() => {}
            () = self.connect_and_serve() => self.has_ended = true,
        }
    }

    async fn connect_and_serve(&mut self) {
        while let Some(not_before) = self.shared.next_attempt(self.id) {
            if let Some(until) = not_before {
                sleep_until(until).await;
            }
            let mut stood_since = None;
            let ended = async {
                let connected = self.connect().await?;
                stood_since = Some(Instant::now());
                self.serve(connected).await
            };
            if let Err(error) = ended.await {
                log!(debug, address = &*self.address, %error, "lost the connection");
                let (sent, unsent) = self.abort();
                self.shared.lost(self.id, error, sent, unsent, stood_since);
            }
        }
    }

    /// Gives up all requests: those that were sent, and the others.
    fn abort(&mut self) -> (Vec<Request>, Vec<Request>) {
        let (mut sent, mut unsent) = (Vec::new(), Vec::new());
        for window in &mut self.windows {
            let (of_window, rest) = window.abort();
            sent.extend(of_window);
            unsent.extend(rest);
        }
        sent.extend(self.delayed.drain(..).map(|(_, request)| request));
        if let Some(mut connection) = self.connection.take() {
            sent.extend(connection.link.unconfirmed());
        }
        (sent, unsent)
    }

    async fn connect(&mut self) -> Result<Connected<B::Link>, StoreError> {
        let slots = self.shared.change(|change| change.slots_of(self.id));
        let backend = &self.shared.backend;
        let within = backend.connect_timeout();
        // One that hangs, as at an address that is gone, does not keep the next from trying. The first counts however it
        // ends: after its failure there is a pause (G1). A later one counts if it succeeds, since it may have failed
        // because of those before it: some users may have few connections.
        let set_ups = SetUps::default();
        let within_host = backend.host_timeout();
        let pace = Pace::of_attempts(&set_ups, within_host, self.shared.config.response_timeout);
        let failed = Mutex::new(None::<StoreError>);
        // The last, unless one before it will not pass.
        let keep = |error| {
            let mut failed = failed.lock();
            if failed.as_ref().is_none_or(StoreError::is_retryable) {
                *failed = Some(error);
            }
        };
        let attempts = (0..ATTEMPTS).map(|index| {
            let hello = Hello {
                address: &self.address,
                slots: slots.clone(),
                is_first: !self.has_connected,
                is_beside: index > 0,
                predecessor: self.predecessor.as_ref(),
            };
            let (connecting, keep) = (backend.connect(hello, &set_ups), &keep);
            let attempt = async move {
                match connecting.await {
                    Err(error) if index > 0 => {
                        keep(error);
                        std::future::pending().await
                    }
                    ended => Ok::<_, Infallible>(ended),
                }
            };
            attempt.boxed()
        });
        // The store gives up by itself, and knows better why.
        let until = Instant::now() + within + within / 8;
        let connected = first_success(attempts, pace, until).await;
        let silent = |_| Err(backend.error(&self.address, Trouble::Silent(within)));
        let connected = connected.unwrap_or_else(silent);
        // Those that were answered know more than the first, if that was not.
        let later = failed.lock().take();
        let connected = connected.map_err(|first| match later {
            Some(later) if first.is_retryable() => later,
            _ => first,
        })?;
        self.has_connected = true;
        Ok(connected)
    }

    /// Sends and reads on a connection until it is lost or not needed.
    async fn serve(&mut self, connected: Connected<B::Link>) -> Result<(), StoreError> {
        self.predecessor = None;
        self.shared.connected(self.id, &self.address, &connected);
        self.connection = Some(Connection {
            link: connected.link,
            can_push: connected.no_push.is_none(),
            clock: connected.clock,
            round_trip: Duration::ZERO,
            last_used: Instant::now(),
            has_subscriptions: false,
            orders: 0,
            received: Vec::new(),
        });
        let end = self.serve_until_end().await;
        self.deliver();
        if self.windows.iter().any(SendWindow::is_in_flight) {
            self.predecessor = self.connection().link.trace();
        }
        if end.is_ok() {
            self.connection = None;
        }
        end
    }

    fn connection(&mut self) -> &mut Connection<B::Link> {
        self.connection.as_mut().expect("it is served")
    }

    async fn serve_until_end(&mut self) -> Result<(), StoreError> {
        let mut idle = pin!(sleep_until(self.connection().last_used + IDLE));
        let mut cleanup = pin!(sleep_until(Instant::now() + CLEANUP));
        loop {
            if self.deliver() > FEW {
                yield_now().await;
            }
            self.take();
            self.send_calls();
            let due = self.delayed.iter().map(|(at, _)| *at).min();
            let connection = self.connection.as_mut().expect("it is served");
            let has_subscriptions = connection.has_subscriptions;
            tokio::select! {
                biased;
                incoming = connection.next() => {
                    self.on_incoming(incoming?)?;
                    while let Some(incoming) = self.connection().next().now_or_never() {
                        self.on_incoming(incoming?)?;
                    }
                }
                () = self.wake.notified() => {
                    if !self.connection().link.is_quiet() {
                        // Callers that were woken together share the next call.
                        yield_now().await;
                    }
                }
                Some(()) = OptionFuture::from(due.map(sleep_until)) => self.send_again(),
                () = &mut cleanup, if has_subscriptions => {
                    cleanup.as_mut().reset(Instant::now() + CLEANUP);
                    let is_left = self.shared.clean_up_subscriptions(self.id);
                    self.connection().has_subscriptions = is_left;
                }
                () = &mut idle => {
                    if self.is_idle() {
                        return Ok(());
                    }
                    idle.as_mut().reset(self.connection().last_used + IDLE);
                }
            }
        }
    }

    /// Tells the session what has come. Returns how much that was.
    fn deliver(&mut self) -> usize {
        let connection = self.connection.as_mut().expect("it is served");
        let told = connection.received.len();
        self.shared.received(self.id, &mut connection.received);
        told
    }

    /// Takes what the session has for the node.
    fn take(&mut self) {
        let connection = self.connection.as_mut().expect("it is served");
        for asked in self.shared.take(self.id, &mut self.taken) {
            connection.link.ask_map(asked);
        }
        for request in self.taken.drain(..) {
            if request.held.is_some() {
                connection.link.confirm(request);
                continue;
            }
            let lane = self.shared.lane_of(&request);
            self.windows[lane].add([request]);
        }
        if !self.shared.has_map() {
            return;
        }
        let room = UNCONFIRMED.saturating_sub(connection.orders);
        for order in self.shared.next_orders(self.id, room) {
            connection.has_subscriptions |= order.number.is_some();
            connection.orders += 1;
            connection.link.subscribe(order);
        }
    }

    fn send_again(&mut self) {
        let now = Instant::now();
        let due: Vec<_> = self.delayed.extract_if(.., |(at, _)| *at <= now).collect();
        for (_, request) in due {
            let lane = self.shared.lane_of(&request);
            self.windows[lane].add_again(request);
        }
    }

    /// Sends as many calls as the windows allow.
    fn send_calls(&mut self) {
        let connection = self.connection.as_mut().expect("it is served");
        let now = Instant::now();
        for (lane, window) in self.windows.iter_mut().enumerate() {
            while let Some((priority, mut requests)) = window.next_call() {
                if priority == Priority::Renew {
                    // A renewal that cannot be in time is not sent (G4).
                    let in_time = now + connection.round_trip;
                    let is_late =
                        |it: &mut Request| it.useful_until().is_some_and(|until| until <= in_time);
                    let late = requests.extract_if(.., is_late).map(|request| {
                        let error = self.shared.backend.error(&self.address, Trouble::TooLate);
                        let error = OpError::TooLate(error);
                        Received::Failed { request, error }
                    });
                    self.shared.received(self.id, &mut late.collect());
                    if requests.is_empty() {
                        continue;
                    }
                }
                if !connection.can_push {
                    // Nobody may wait for a push that cannot arrive (W5).
                    requests.iter_mut().for_each(Request::listen_to_nothing);
                }
                let within = self.shared.config.response_timeout;
                let until = requests
                    .iter()
                    .filter_map(|it| it.of_use_until(within))
                    .min();
                let of_use = until.map_or(within, |until| until.saturating_duration_since(now));
                connection.last_used = now;
                connection.link.send(Call {
                    lane,
                    now,
                    of_use: connection.clock.of_use(now, of_use),
                    requests: &mut requests,
                });
                window.sent(requests);
            }
        }
    }

    fn on_incoming(
        &mut self,
        incoming: Incoming<<B::Link as Link>::Answer>,
    ) -> Result<(), StoreError> {
        match incoming {
            Incoming::Answer {
                lane,
                sent_at,
                answer,
            } => self.on_answer(lane, sent_at, answer),
            Incoming::Told(order, told) => {
                self.connection().orders -= 1;
                self.shared.told(self.id, &order, told);
                Ok(())
            }
            Incoming::Other(received) => {
                self.connection().received.push(received);
                Ok(())
            }
        }
    }

    fn on_answer(
        &mut self,
        lane: usize,
        sent_at: Instant,
        answer: <B::Link as Link>::Answer,
    ) -> Result<(), StoreError> {
        let connection = self.connection.as_mut().expect("it is served");
        let window = &mut self.windows[lane];
        let (now, within) = (Instant::now(), self.shared.config.response_timeout);
        let mut requests = window.answered().expect("each call has one answer");
        if requests.iter().all(|request| request.op().is_some()) {
            let took = now.saturating_duration_since(sent_at);
            // It falls at once: after a stall, renewals that can be in time would else not be sent.
            connection.round_trip = took.min((connection.round_trip * 7 + took) / 8);
        }
        let replies = match connection.link.read(lane, answer, &mut requests) {
            Ok(replies) => replies,
            Err(error) => {
                // They may be done or not: lost() reports all that are in flight.
                window.sent(requests);
                return Err(error);
            }
        };
        if let Some(at) = replies.at {
            connection.clock = ServerClock::told(at, now);
        }
        // An error that ends the connection comes after the last of the answers.
        let (mut end, mut again) = (replies.end, Vec::new());
        for (mut request, reply) in requests.into_iter().zip(replies.list) {
            let pause = match reply {
                Reply::Later(pause) => {
                    // Its time counts for the whole call.
                    (request.is_put_off, request.most) = (true, 1);
                    Some(pause)
                }
                Reply::Stale if request.is_put_off => Some(Duration::ZERO),
                _ => None,
            };
            if pause.is_some_and(|pause| request.gives_up(now, pause, within)) {
                window.finish(&request);
                let error = self.shared.backend.error(&self.address, Trouble::Fenced);
                let error = OpError::Refused(error);
                connection
                    .received
                    .push(Received::Failed { request, error });
                continue;
            }
            match reply {
                Reply::Again => again.push(request),
                Reply::InParts => window.add_behind(request),
                Reply::Stale if !request.was_stale => {
                    request.was_stale = true;
                    again.push(request);
                }
                Reply::Later(pause) => self.delayed.push((now + pause, request)),
                reply => {
                    if let Reply::Stale = reply {
                        let error = self.shared.backend.error(&self.address, STRANGE_CLOCK);
                        end.get_or_insert(error);
                    }
                    window.finish(&request);
                    let answer = Received::Answer { request, reply };
                    connection.received.push(answer);
                }
            }
        }
        for request in again.into_iter().rev() {
            window.add_again(request);
        }
        end.map_or(Ok(()), Err)
    }

    /// Whether the connection is not needed any more.
    fn is_idle(&mut self) -> bool {
        let now = Instant::now();
        let connection = self.connection();
        if now < connection.last_used + IDLE {
            return false;
        }
        connection.last_used = now;
        let is_quiet = connection.link.is_quiet() && self.delayed.is_empty();
        is_quiet && !self.shared.is_needed(self.id)
    }
}

impl<B: Backend> Drop for NodeTask<B> {
    /// The session was dropped, or the runtime has ended.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (sent, unsent) = self.abort();
        self.shared.abandoned(self.id, self.has_begun, sent, unsent);
    }
}

#[cfg(test)]
mod tests;
