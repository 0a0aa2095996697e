//! The task that owns the connection to one primary: it connects, sends calls and reads replies and pushes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, PushInfo, PushKind, RedisResult, Value};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use super::call;
use super::cluster::Address;
use super::fault::{ErrorReply, Fault};
use super::grant::Message;
use super::handshake::{ClientId, Connected, message};
use super::pipe::Event;
use super::replicas::Confirmer;
use super::reply::{self, RequestReply};
use super::request::Request;
use super::session::{NodeId, Shared};
use crate::store::contract::{OpError, ServerTime, StoreEvent};
use crate::store::send_window::{Limits, Priority, SendWindow};
use crate::store::server_clock::ServerClock;
use crate::user_code::log;

/// A connection is closed after this time without use, unless leases or callers need it.
pub(super) const IDLE: Duration = Duration::from_secs(60);

/// If the last answers went to more callers than this, more requests may follow at once.
const FEW: usize = 2;

/// What comes from a node.
#[derive(Debug)]
pub(super) enum Received {
    Answer {
        request: Request,
        at: ServerTime,
        reply: RequestReply,
    },
    /// A push: a grant, or a notice that a lock is free.
    Heard(StoreEvent),
    /// Not sent in time, or not confirmed by enough replicas.
    Failed { request: Request, error: OpError },
    /// Enough replicas have the acquisition.
    Confirmed { request: Request },
    /// The question to the replicas was refused.
    Refused {
        request: Request,
        refusal: ErrorReply,
    },
}

/// When it is dropped, it returns every request that it has to the session.
pub(super) struct NodeTask {
    pub(super) shared: Arc<Shared>,
    pub(super) id: NodeId,
    address: Address,
    wake: Arc<Notify>,
    window: SendWindow<Request>,
    confirmer: Confirmer,
    /// The number of the last call, over all connections of this task.
    pub(super) number: u64,
    /// The connection that ended with calls in flight.
    pub(super) predecessor: Option<ClientId>,
    /// Whether a connection was made.
    pub(super) has_connected: bool,
    /// Whether the task was ever polled.
    has_begun: bool,
    /// Whether the session knows that the task has ended: there may be another by now.
    has_ended: bool,
}

/// A connection in use.
struct Connection {
    connected: Connected,
    /// The call that loads the script again. Neither it nor a later one was answered yet.
    loaded_by: Option<u64>,
    /// Whether each call carries the whole script: it cannot be loaded, or a proxy stands before several servers.
    sends_text: bool,
    /// How long the last calls took, smoothed.
    round_trip: Duration,
    last_used: Instant,
    /// Events that were received and not delivered yet.
    received: Vec<Received>,
    /// Resolves when another server is the primary.
    moved: BoxFuture<'static, Fault>,
}

impl NodeTask {
    pub(super) fn new(
        shared: Arc<Shared>,
        id: NodeId,
        address: Address,
        wake: Arc<Notify>,
    ) -> Self {
        Self {
            shared,
            id,
            address,
            wake,
            window: SendWindow::new(Limits::USUAL),
            confirmer: Confirmer::default(),
            number: 0,
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
                let connection = self.connect().await?;
                stood_since = Some(Instant::now());
                self.serve(connection).await
            };
            if let Err(fault) = ended.await {
                log!(debug, address = &*self.address, error = %fault, "lost the connection");
                let (sent, unsent) = self.abort();
                self.shared.lost(self.id, fault, sent, unsent, stood_since);
            } else {
                self.confirmer = Confirmer::default();
            }
        }
    }

    /// Gives up all requests: those that were sent, and the others.
    fn abort(&mut self) -> (Vec<Request>, Vec<Request>) {
        let (mut sent, unsent) = self.window.abort();
        sent.extend(self.confirmer.abort());
        (sent, unsent)
    }

    async fn connect(&mut self) -> Result<Connection, Fault> {
        self.number += 1;
        let shared = self.shared.clone();
        let within = shared.config.response_timeout;
        let endpoint = shared.topology.endpoint(&self.address, within).await?;
        let connected = self.set_up(&endpoint).await;
        let connected = connected.inspect_err(|_| shared.topology.doubt())?;
        self.has_connected = true;
        Ok(Connection {
            connected,
            loaded_by: None,
            sends_text: false,
            round_trip: Duration::ZERO,
            last_used: Instant::now(),
            received: Vec::new(),
            moved: shared.topology.clone().moved(endpoint, within).boxed(),
        })
    }

    /// Sends and reads on a connection until it is lost or not needed.
    async fn serve(&mut self, mut connection: Connection) -> Result<(), Fault> {
        self.predecessor = None;
        let connected = &connection.connected;
        self.shared.connected(self.id, &self.address, connected);
        let end = self.serve_until_end(&mut connection).await;
        self.shared.received(self.id, &mut connection.received);
        if self.window.is_in_flight() {
            self.predecessor = connection.connected.id;
        }
        end
    }

    async fn serve_until_end(&mut self, connection: &mut Connection) -> Result<(), Fault> {
        for push in std::mem::take(&mut connection.connected.early) {
            self.on_push(connection, &push)?;
        }
        let mut idle = pin!(sleep_until(connection.last_used + IDLE));
        loop {
            let told = connection.received.len();
            self.shared.received(self.id, &mut connection.received);
            if told > FEW {
                yield_now().await;
            }
            let (window, to_confirm) = (&mut self.window, &mut self.confirmer.waiting);
            self.shared.take(self.id, window, to_confirm);
            self.send_calls(connection);
            self.confirmer.begin(&self.shared, &self.address);
            let pipe = &mut connection.connected.pipe;
            tokio::select! {
                biased;
                event = pipe.next() => {
                    self.on_event(connection, event?)?;
                    while let Some(event) = connection.connected.pipe.ready() {
                        self.on_event(connection, event?)?;
                    }
                }
                mut confirmed = self.confirmer.end() => connection.received.append(&mut confirmed),
                () = self.wake.notified() => {
                    if pipe.len() > 0 {
                        // Callers that were woken together share the next call.
                        yield_now().await;
                    }
                }
                () = &mut idle => {
                    if self.is_idle(connection) {
                        return Ok(());
                    }
                    idle.as_mut().reset(connection.last_used + IDLE);
                }
                fault = &mut connection.moved => return Err(fault),
            }
        }
    }

    /// Sends as many calls as the window allows.
    fn send_calls(&mut self, connection: &mut Connection) {
        if !self.window.is_waiting() {
            return;
        }
        let now = Instant::now();
        while let Some((priority, mut requests)) = self.window.next_call() {
            if priority == Priority::Renew {
                // A renewal that cannot be in time is not sent (G4).
                let in_time = now + connection.round_trip;
                let is_late = |request: &mut Request| {
                    request.useful_until().is_some_and(|until| until <= in_time)
                };
                let late = requests.extract_if(.., is_late).map(|request| {
                    let address = self.address.clone();
                    let error = OpError::TooLate(Fault::TooLate { address }.into());
                    Received::Failed { request, error }
                });
                self.shared.received(self.id, &mut late.collect());
                if requests.is_empty() {
                    continue;
                }
            }
            self.send_call(connection, requests, now);
        }
    }

    fn send_call(&mut self, connection: &mut Connection, mut requests: Vec<Request>, now: Instant) {
        self.number += 1;
        let number = self.number;
        let shared = &self.shared;
        let connected = &connection.connected;
        if connected.no_push.is_some() {
            // Nobody may wait for a push that cannot arrive (W5).
            requests
                .iter_mut()
                .for_each(|request| request.listen_to_nothing());
        }
        let within = shared.config.response_timeout;
        let useful_until = connected.clock.of_use(now, within);
        let (script, names) = (shared.script, &shared.names);
        let command = call::command(script, names, number, useful_until, &requests);
        let command = match connection.sends_text {
            true => script.in_full(&command),
            false => command,
        };
        let mut first = Pipeline::new();
        if connection.loaded_by == Some(number) {
            first.add_command(script.load());
        }
        if requests.iter().any(|request| request.asking.is_some()) {
            first.cmd("ASKING");
        }
        let sending = send_command(connected.pipe.client(), first, command);
        connection.connected.pipe.send(number, now, sending);
        connection.last_used = now;
        self.window.sent(requests);
    }

    fn on_event(&mut self, connection: &mut Connection, event: Event<u64>) -> Result<(), Fault> {
        match event {
            Event::Push(push) => self.on_push(connection, &push),
            Event::Reply(number, sent_at, reply) => {
                self.on_reply(connection, number, sent_at, reply)
            }
        }
    }

    fn on_reply(
        &mut self,
        connection: &mut Connection,
        number: u64,
        sent_at: Instant,
        reply: Value,
    ) -> Result<(), Fault> {
        let now = Instant::now();
        let took = now.saturating_duration_since(sent_at);
        // It falls at once: after a stall, renewals that can be in time would else not be sent.
        connection.round_trip = took.min((connection.round_trip * 7 + took) / 8);
        let mut requests = self.window.answered().expect("each call has one reply");
        let replies = if let Value::ServerError(error) = &reply {
            let reply = self.on_refused_call(connection, number, &mut requests, error.into());
            vec![reply; requests.len()]
        } else {
            connection.loaded_by.take_if(|call| number >= *call);
            let Some(reply) = reply::read_reply(number, &requests, reply) else {
                // They may be done or not: lost() reports all that are in flight.
                self.window.sent(requests);
                return Err(self.garbled("unexpected reply to a call"));
            };
            if let Some(at) = reply.at {
                connection.connected.clock = ServerClock::told(at, now);
            }
            reply.replies
        };
        let at = connection.connected.clock.last();
        // An error that ends the connection comes after the last of the answers.
        let (mut end, mut again) = (Ok(()), Vec::new());
        for (mut request, reply) in requests.into_iter().zip(replies) {
            let goes_again = match &reply {
                RequestReply::More => true,
                RequestReply::Stale => !std::mem::replace(&mut request.was_stale, true),
                _ => false,
            };
            if goes_again {
                again.push(request);
                continue;
            }
            end = end.and(self.look_at(&reply));
            self.window.finish(&request);
            connection
                .received
                .push(Received::Answer { request, at, reply });
        }
        for request in again.into_iter().rev() {
            self.window.add_again(request);
        }
        end
    }

    /// The reply to each request of a call that the server refused as a whole.
    fn on_refused_call(
        &self,
        connection: &mut Connection,
        number: u64,
        requests: &mut [Request],
        refusal: ErrorReply,
    ) -> RequestReply {
        if refusal.code() == "NOSCRIPT" {
            match connection.loaded_by {
                Some(call) => connection.sends_text |= number >= call,
                None => connection.loaded_by = Some(self.number + 1),
            }
            return RequestReply::More;
        }
        // The server checks the keys of a call before it runs any of it, and does not say which one it refuses (S1).
        // So each request is sent again by itself, at once.
        let may_be_one_keys = ["NOPERM", "CROSSSLOT", "TRYAGAIN"].contains(&refusal.code());
        if requests.len() > 1 && may_be_one_keys {
            requests.iter_mut().for_each(|it| it.alone = true);
            return RequestReply::More;
        }
        RequestReply::Refused(refusal)
    }

    /// Fails if the connection must not be used after such a reply.
    fn look_at(&self, reply: &RequestReply) -> Result<(), Fault> {
        match reply {
            RequestReply::Stale => {
                Err(self.garbled("the server's clock runs too differently from ours"))
            }
            RequestReply::Refused(refusal)
                if refusal.ends_connection() && !self.shared.is_cluster() =>
            {
                let (address, refusal) = (self.address.clone(), refusal.clone());
                Err(Fault::refused(address, refusal, &self.shared.names))
            }
            _ => Ok(()),
        }
    }

    fn on_push(&self, connection: &mut Connection, push: &PushInfo) -> Result<(), Fault> {
        let events = match (message(&self.shared.names, push), &push.kind) {
            (Some(message @ (Message::Granted { .. } | Message::Freed { .. })), _) => {
                message.into_events()
            }
            // From a late probe, or of another format.
            (_, PushKind::Message | PushKind::SMessage | PushKind::Other(_)) => return Ok(()),
            // The client takes most other pushes for the answer to its oldest request.
            _ => return Err(self.garbled("unexpected change of a subscription")),
        };
        connection
            .received
            .extend(events.into_iter().map(Received::Heard));
        Ok(())
    }

    /// Whether the connection is not needed any more.
    fn is_idle(&self, connection: &mut Connection) -> bool {
        let now = Instant::now();
        if now < connection.last_used + IDLE {
            return false;
        }
        connection.last_used = now;
        let is_quiet = connection.connected.pipe.len() == 0 && self.confirmer.is_empty();
        is_quiet && !self.shared.is_needed(self.id)
    }

    fn garbled(&self, what: &'static str) -> Fault {
        Fault::garbled(&self.address, what)
    }
}

/// Sends these commands. Only the answer to the last one counts.
async fn send_command(
    mut client: MultiplexedConnection,
    mut first: Pipeline,
    command: Cmd,
) -> RedisResult<Value> {
    if first.is_empty() {
        return client.send_packed_command(&command).await;
    }
    let before = first.len();
    first.add_command(command);
    let answers = client.send_packed_commands(&first, before, 1).await?;
    Ok(answers.into_iter().next().unwrap_or(Value::Nil))
}

impl Drop for NodeTask {
    /// The session was dropped, or the runtime has ended.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (sent, unsent) = self.abort();
        self.shared.abandoned(self.id, self.has_begun, sent, unsent);
    }
}
