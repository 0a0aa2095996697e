//! The task that has the connection to one primary: connects, sends calls, and reads what comes.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, RedisResult, Value};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until};

use super::call;
use super::clock::Clock;
use super::cluster::Address;
use super::fault::{Fault, Refusal};
use super::grant::Message;
use super::handshake::{ClientId, Connected, Handshake, is_subscription, message};
use super::pipe::Pipe;
use super::replicas::Confirmer;
use super::reply::{self, Verdict};
use super::request::Request;
use super::session::{NodeId, Shared};
use crate::store::contract::{Grant, OpError, ServerTime};
use crate::store::send_window::{Limits, Priority, SendWindow};

/// A connection that was not used for so long is closed, unless leases or callers need it.
pub(super) const IDLE: Duration = Duration::from_secs(60);

/// When the last answers went to more callers than this, others may be about to ask, too.
const FEW: usize = 2;

/// What a node said.
#[derive(Debug)]
pub(super) enum Received {
    Answer {
        request: Request,
        at: ServerTime,
        verdict: Verdict,
    },
    Granted {
        key: Arc<str>,
        grant: Grant,
    },
    Freed {
        key: Arc<str>,
    },
    /// Not sent in time, or not confirmed by enough replicas.
    Failed {
        request: Request,
        error: OpError,
    },
    /// Enough replicas have what it acquired.
    Confirmed {
        request: Request,
    },
    /// A question about what it acquired was refused.
    Refused {
        request: Request,
        refusal: Refusal,
    },
}

/// Dropped, wherever it stands, it gives every request that it has back to the session.
pub(super) struct NodeTask {
    shared: Arc<Shared>,
    id: NodeId,
    address: Address,
    wake: Arc<Notify>,
    window: SendWindow<Request, Instant>,
    confirmer: Confirmer,
    /// The last call's number, over all connections of this task.
    number: u64,
    /// The connection that ended with calls in flight.
    predecessor: Option<ClientId>,
    /// Whether a connection was made.
    has_connected: bool,
    /// Whether the task was ever polled.
    has_begun: bool,
    /// Whether the session knows that it has ended: there may be another by now.
    has_ended: bool,
}

/// A connection in use. Dropping it drops what moves its bytes, and so closes it with all that was
/// not written (O4).
struct Connection {
    connected: Connected,
    replies: Pipe<Of>,
    /// The last call before the script was loaded anew; none of those after it was answered yet.
    loaded_after: Option<u64>,
    /// Whether each call carries the whole script: it cannot be loaded, or a proxy stands before
    /// several servers.
    sends_text: bool,
    /// How long the last calls took, smoothed.
    round_trip: Duration,
    last_used: Instant,
    /// What came and was not told yet.
    received: Vec<Received>,
}

/// What a reply answers.
enum Of {
    Call(u64),
    Load,
}

impl Connection {
    /// When to look whether the oldest request is overdue, or the connection idle.
    fn alarm(&self, response_timeout: Duration) -> Instant {
        match self.replies.oldest_sent_at() {
            Some(sent_at) => sent_at + response_timeout,
            None => self.last_used + IDLE,
        }
    }
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
            window: SendWindow::new(Limits::default()),
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
            let ended = match self.connect().await {
                Ok((connected, moved)) => {
                    stood_since = Some(Instant::now());
                    self.serve(connected, moved).await
                }
                Err(fault) => Err(fault),
            };
            if let Err(fault) = ended {
                tracing::debug!(address = &*self.address, error = %fault, "lost the connection");
                let (sent, unsent) = self.abort();
                self.shared.lost(self.id, fault, sent, unsent, stood_since);
            } else {
                self.confirmer = Confirmer::default();
                self.shared.closed_idle(self.id);
            }
        }
    }

    /// Gives up all requests: those that were sent, and the others.
    fn abort(&mut self) -> (Vec<Request>, Vec<Request>) {
        let (mut sent, unsent) = self.window.abort();
        sent.extend(self.confirmer.abort());
        (sent, unsent)
    }

    async fn connect(&mut self) -> Result<(Connected, BoxFuture<'static, Fault>), Fault> {
        self.number += 1;
        let shared = &self.shared;
        let within = shared.opening.response_timeout;
        let endpoint = shared.topology.endpoint(&self.address, within).await?;
        let handshake = Handshake {
            endpoint: &endpoint,
            names: &shared.names,
            script: shared.script,
            purpose: shared.purpose(self.id),
            predecessor: self.predecessor.as_ref(),
            number: self.number,
            asks_policy: !self.has_connected,
            within,
        };
        let connected = handshake.run().await;
        let connected = connected.inspect_err(|_| shared.topology.doubt())?;
        self.has_connected = true;
        Ok((connected, shared.topology.moved(endpoint, within)))
    }

    /// Sends and reads on a connection until it is lost, or nobody needs it.
    async fn serve(
        &mut self,
        mut connected: Connected,
        mut moved: BoxFuture<'static, Fault>,
    ) -> Result<(), Fault> {
        self.predecessor = None;
        self.shared.connected(self.id, &self.address, &connected);
        let early = std::mem::take(&mut connected.early);
        let mut connection = Connection {
            connected,
            replies: Pipe::new(),
            loaded_after: None,
            sends_text: false,
            round_trip: Duration::ZERO,
            last_used: Instant::now(),
            received: Vec::new(),
        };
        let mut read = early.iter();
        let mut end = read.try_for_each(|push| self.on_push(&mut connection, push));
        if end.is_ok() {
            end = self.serve_until_end(&mut connection, &mut moved).await;
        }
        self.shared.received(self.id, &mut connection.received);
        if self.window.oldest().is_some() {
            self.predecessor = connection.connected.id;
        }
        end
    }

    async fn serve_until_end(
        &mut self,
        connection: &mut Connection,
        moved: &mut BoxFuture<'static, Fault>,
    ) -> Result<(), Fault> {
        let timeout = self.shared.opening.response_timeout;
        let mut alarm = pin!(sleep_until(connection.alarm(timeout)));
        loop {
            let (window, to_confirm) = (&mut self.window, &mut self.confirmer.waiting);
            self.shared.take(self.id, window, to_confirm);
            self.send_calls(connection);
            self.shared.received(self.id, &mut connection.received);
            self.confirmer.begin(&self.shared, &self.address);
            let due = connection.alarm(timeout);
            if due < alarm.deadline() {
                alarm.as_mut().reset(due);
            }
            let read = tokio::select! {
                biased;
                () = connection.connected.link.ended() => self.read_rest(connection),
                reply = connection.replies.next() => {
                    let read = self.on_reply(connection, reply);
                    read.and_then(|()| self.read_ready(connection))
                }
                Some(push) = connection.connected.pushes.recv() => self.on_push(connection, &push),
                mut confirmed = self.confirmer.end() => {
                    connection.received.append(&mut confirmed);
                    Ok(())
                }
                () = self.wake.notified() => {
                    if connection.replies.oldest_sent_at().is_some() {
                        // Callers that were woken together share the next call.
                        yield_now().await;
                    }
                    Ok(())
                }
                () = &mut alarm => {
                    if self.is_idle(connection)? {
                        return Ok(());
                    }
                    alarm.as_mut().reset(connection.alarm(timeout));
                    Ok(())
                }
                fault = &mut *moved => Err(fault),
            };
            let told = connection.received.len();
            self.shared.received(self.id, &mut connection.received);
            read?;
            if told > FEW {
                yield_now().await;
            }
        }
    }

    /// Sends as many calls as may go.
    fn send_calls(&mut self, connection: &mut Connection) {
        if !self.window.is_waiting() {
            return;
        }
        let now = Instant::now();
        while let Some((priority, mut requests)) = self.window.next_call() {
            if priority == Priority::Renew {
                // A renewal that cannot be in time any more is not sent (G4).
                let in_time = now + connection.round_trip;
                let is_late = |request: &mut Request| {
                    request.useful_until().is_some_and(|until| until <= in_time)
                };
                for request in requests.extract_if(.., is_late) {
                    let address = self.address.clone();
                    let error = OpError::TooLate(Fault::TooLate { address }.into());
                    connection
                        .received
                        .push(Received::Failed { request, error });
                }
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
            // Nobody may wait for a message that cannot reach us (W5).
            requests
                .iter_mut()
                .for_each(|request| request.listen_to_nothing());
        }
        let within = shared.opening.response_timeout;
        let useful_until = connected.clock.of_use(now, within);
        let (script, names) = (shared.script, &shared.names);
        let command = call::command(script, names, number, useful_until, &requests);
        let command = match connection.sends_text {
            true => script.in_full(&command),
            false => command,
        };
        let asks = requests.iter().any(|request| request.asking.is_some());
        let client = connected.link.connection.clone();
        let sending = send_command(client, command, asks);
        connection.replies.send(Of::Call(number), now, sending);
        connection.last_used = now;
        self.window.sent(requests, now);
    }

    /// Reads what the connection brought before it ended.
    fn read_rest(&mut self, connection: &mut Connection) -> Result<(), Fault> {
        self.read_ready(connection)?;
        while let Ok(push) = connection.connected.pushes.try_recv() {
            self.on_push(connection, &push)?;
        }
        Err(self.closed())
    }

    /// Reads the replies that are here.
    fn read_ready(&mut self, connection: &mut Connection) -> Result<(), Fault> {
        while let Some(reply) = connection.replies.next().now_or_never() {
            self.on_reply(connection, reply)?;
        }
        Ok(())
    }

    fn on_reply(
        &mut self,
        connection: &mut Connection,
        (of, sent_at, reply): (Of, Instant, RedisResult<Value>),
    ) -> Result<(), Fault> {
        // What came before the reply is read before it; above all a change of subscriptions, after
        // which the client gives each call its neighbour's answer (O4).
        while let Ok(push) = connection.connected.pushes.try_recv() {
            self.on_push(connection, &push)?;
        }
        let address = self.address.clone();
        let reply = reply.map_err(|source| Fault::Broken { address, source })?;
        let now = Instant::now();
        let took = now.saturating_duration_since(sent_at);
        connection.round_trip = (connection.round_trip * 7 + took) / 8;
        let Of::Call(number) = of else {
            // What came of it shows the next call.
            return Ok(());
        };
        let call = self.window.answered().expect("each call has one reply");
        if let Value::ServerError(error) = &reply {
            return self.on_refused_call(connection, number, call.requests, error.into());
        }
        connection.loaded_after.take_if(|last| number > *last);
        let Some(reply) = reply::read_reply(number, &call.requests, reply) else {
            // Perhaps they are done, perhaps not: lost() tells so of all that is in flight.
            self.window.sent(call.requests, sent_at);
            return Err(self.garbled("a reply is not the one to its call"));
        };
        if let Some(at) = reply.at {
            connection.connected.clock = Clock::told(at, now);
        }
        let at = connection.connected.clock.last();
        // Whatever ends the connection does so after the last of the answers.
        let mut end = Ok(());
        for (request, verdict) in call.requests.into_iter().zip(reply.verdicts) {
            end = end.and(self.on_verdict(connection, request, at, verdict));
        }
        end
    }

    /// The server did nothing of the whole call.
    fn on_refused_call(
        &mut self,
        connection: &mut Connection,
        number: u64,
        requests: Vec<Request>,
        refusal: Refusal,
    ) -> Result<(), Fault> {
        let is_shared = requests.len() > 1;
        let again = match refusal.code() {
            "NOSCRIPT" => {
                match connection.loaded_after {
                    Some(last) => connection.sends_text |= number > last,
                    None => self.load_script(connection),
                }
                true
            }
            // It looks at the keys of a call before it runs any of it, and does not say which of
            // them it minds (S1); so each goes again by itself, at once.
            "TRYAGAIN" => is_shared,
            _ => is_shared && refusal.may_be_one_keys(),
        };
        if again {
            for mut request in requests.into_iter().rev() {
                request.alone |= refusal.code() != "NOSCRIPT";
                self.window.add_again(request);
            }
            return Ok(());
        }
        let at = connection.connected.clock.last();
        let mut end = Ok(());
        for request in requests {
            let verdict = Verdict::Refused(refusal.clone());
            end = end.and(self.on_verdict(connection, request, at, verdict));
        }
        end
    }

    fn load_script(&self, connection: &mut Connection) {
        connection.loaded_after = Some(self.number);
        let mut client = connection.connected.link.connection.clone();
        let load = self.shared.script.load();
        let loading = async move { client.send_packed_command(&load).await };
        connection.replies.send(Of::Load, Instant::now(), loading);
    }

    fn on_verdict(
        &mut self,
        connection: &mut Connection,
        mut request: Request,
        at: ServerTime,
        verdict: Verdict,
    ) -> Result<(), Fault> {
        let mut end = Ok(());
        match &verdict {
            Verdict::More => {
                self.window.add_again(request);
                return Ok(());
            }
            Verdict::Stale => {
                if !std::mem::replace(&mut request.was_stale, true) {
                    self.window.add_again(request);
                    return Ok(());
                }
                end = Err(self.garbled("the server's clock runs away from ours"));
            }
            Verdict::Refused(refusal) if refusal.ends_connection() && !self.shared.is_cluster() => {
                let address = self.address.clone();
                end = Err(Fault::refused(address, refusal.clone(), &self.shared.names));
            }
            _ => {}
        }
        self.window.finish(&request);
        connection.received.push(Received::Answer {
            request,
            at,
            verdict,
        });
        end
    }

    fn on_push(&self, connection: &mut Connection, push: &PushInfo) -> Result<(), Fault> {
        if push.kind == PushKind::Disconnection {
            return Err(self.closed());
        }
        if is_subscription(&push.kind) {
            return Err(self.garbled("a subscription changed that nobody asked to"));
        }
        match message(&self.shared.names, push) {
            Some(Message::Granted { key, grant }) => {
                connection.received.push(Received::Granted { key, grant });
            }
            Some(Message::Freed { key }) => connection.received.push(Received::Freed { key }),
            // A late probe's.
            Some(Message::Probe(_)) => {}
            None => tracing::debug!(kind = ?push.kind, "ignored a push that is no grant for us"),
        }
        Ok(())
    }

    /// Whether nobody needs the connection any more. Errs when an answer is overdue.
    fn is_idle(&self, connection: &mut Connection) -> Result<bool, Fault> {
        let now = Instant::now();
        let within = self.shared.opening.response_timeout;
        if now < connection.alarm(within) {
            return Ok(false);
        }
        if connection.replies.oldest_sent_at().is_some() {
            let address = self.address.clone();
            return Err(Fault::Silent { address, within });
        }
        connection.last_used = now;
        Ok(self.confirmer.is_empty() && !self.shared.is_needed(self.id))
    }

    fn closed(&self) -> Fault {
        let address = self.address.clone();
        Fault::Closed { address }
    }

    fn garbled(&self, what: &'static str) -> Fault {
        let address = self.address.clone();
        Fault::Garbled { address, what }
    }
}

async fn send_command(
    mut client: MultiplexedConnection,
    command: redis::Cmd,
    asks: bool,
) -> RedisResult<Value> {
    if !asks {
        return client.send_packed_command(&command).await;
    }
    let mut pipeline = redis::Pipeline::with_capacity(2);
    pipeline.cmd("ASKING");
    pipeline.add_command(command);
    let answers = client.send_packed_commands(&pipeline, 1, 1).await?;
    Ok(answers.into_iter().next().unwrap_or(Value::Nil))
}

impl Drop for NodeTask {
    /// The session was dropped, or the runtime has gone.
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let (sent, unsent) = self.abort();
        self.shared.abandoned(self.id, self.has_begun, sent, unsent);
    }
}
