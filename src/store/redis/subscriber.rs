//! The task that owns the second connection to a primary of a cluster. It has the subscriptions of the keys that are
//! waited for there.
//!
//! When a slot has moved away, the server sends a `sunsubscribe` that nobody asked for. The client library takes it
//! for the answer to its oldest request. So such a push ends this connection, and another one replaces it at once. The
//! connection for calls is not affected.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use redis::{Cmd, PushInfo, PushKind, Value, cmd};
use tokio::sync::Notify;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until};

use super::change::Change;
use super::cluster::Address;
use super::fault::{ErrorReply, Fault};
use super::grant::Message;
use super::handshake::{ClientId, ONLY_RESP2, Probe, UNHEARD, client_commands, message};
use super::node::Received;
use super::pipe::{Event, Pipe};
use super::session::{NodeId, Shared};
use super::subscriptions::Order;
use crate::store::backoff::Backoff;
use crate::user_code::log;

/// How many subscriptions may be unconfirmed at a time.
const UNCONFIRMED: usize = 64;

/// How often keys that nobody waits for are unsubscribed.
const CLEANUP: Duration = Duration::from_secs(1);

/// How often an idle connection is probed.
const PING: Duration = Duration::from_secs(10);

/// What a session knows of the task.
#[derive(Default)]
pub(super) struct Status {
    pub(super) wake: Arc<Notify>,
    pub(super) has_task: bool,
    pub(super) backoff: Backoff,
}

pub(super) struct SubscriberTask {
    shared: Arc<Shared>,
    id: NodeId,
    address: Address,
    wake: Arc<Notify>,
    /// The last connection: the server may still count it as a subscriber.
    predecessor: Option<ClientId>,
    /// Whether the session knows that the task has ended: there may be another by now.
    has_ended: bool,
}

/// A connection whose requests are orders; `None`: a `PING`.
type Connection = Pipe<Option<Order>>;

impl SubscriberTask {
    pub(super) async fn run(mut self) {
        let shared = self.shared.clone();
        // May be dropped anywhere: the connection is dropped with it.
        tokio::select! {
            () = self.connect_and_serve() => {}
            () = shared.closed() => {}
        }
    }

    /// Until no key of the node is waited for.
    async fn connect_and_serve(&mut self) {
        while let Some(not_before) = self.shared.next_subscriber_attempt(self.id) {
            if let Some(until) = not_before {
                sleep_until(until).await;
            }
            let mut stood_since = None;
            let ended = async {
                let connection = self.connect().await?;
                stood_since = Some(Instant::now());
                self.shared.subscriber_up(self.id);
                self.serve(connection).await
            };
            if let Err(fault) = ended.await {
                log!(debug, address = &*self.address, error = %fault, "lost the subscriptions");
                self.shared.subscriber_lost(self.id, fault, stood_since);
            }
        }
        self.has_ended = true;
    }

    /// Connects, and checks that a message published in a slot of the node arrives (O4).
    async fn connect(&mut self) -> Result<Connection, Fault> {
        let within = self.shared.config.response_timeout;
        let endpoint = self.shared.topology.endpoint(&self.address, within).await?;
        let (sender, pushes) = mpsc::unbounded_channel();
        let (mut link, true) = endpoint.connect(within, sender).await? else {
            return Err(self.no_push(ONLY_RESP2.to_owned()));
        };
        let names = &self.shared.names;
        // A channel in a slot of the node that nothing else uses.
        let probe_names = self.shared.probe_names(self.id);
        let [.., channel] = probe_names.unwrap_or_else(|| names.probe_in(0));
        let probe = Probe::new(names);
        let mut commands = client_commands(self.predecessor.as_ref());
        let optional = commands.len();
        commands.cmd("SSUBSCRIBE").arg(&channel);
        commands.cmd("SPUBLISH").arg(&channel).arg(probe.message());
        commands.cmd("SUNSUBSCRIBE").arg(&channel);
        let answers = link.ask_all(&commands, &self.address, within).await?;
        for answer in &answers[optional..] {
            if let Value::ServerError(error) = answer {
                let refusal = ErrorReply::from(error).naming(names);
                if refusal.is_lasting() {
                    return Err(self.no_push(refusal.to_string()));
                }
                let address = self.address.clone();
                return Err(Fault::Refused { address, refusal });
            }
        }
        let mut connection = Pipe::new(link, pushes, self.address.clone(), within);
        if !probe.hear(&mut connection, within).await?.0 {
            return Err(self.no_push(UNHEARD.to_owned()));
        }
        // All that follows is about the probe's channel.
        while connection.ready().is_some() {}
        self.predecessor = ClientId::read(&answers[0]);
        Ok(connection)
    }

    /// Returns `Ok` when no key of the node is waited for.
    async fn serve(&self, mut connection: Connection) -> Result<(), Fault> {
        let mut cleanup = interval_at(Instant::now() + CLEANUP, CLEANUP);
        cleanup.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ping = interval_at(Instant::now() + PING.mul_f64(rand::random()), PING);
        loop {
            self.follow_orders(&mut connection);
            tokio::select! {
                biased;
                event = connection.next() => match event? {
                    Event::Push(push) => self.on_push(&connection, &push)?,
                    Event::Reply(order, _, answer) => self.on_answer(order, answer)?,
                },
                () = self.wake.notified() => {}
                _ = cleanup.tick() => {
                    if !self.shared.clean_up_subscriptions(self.id) {
                        return Ok(());
                    }
                }
                _ = ping.tick() => {
                    if connection.len() == 0 {
                        ask(&mut connection, cmd("PING"), None);
                    }
                }
            }
        }
    }

    fn follow_orders(&self, connection: &mut Connection) {
        while connection.len() < UNCONFIRMED
            && let Some(order) = self.shared.next_order(self.id)
        {
            let verb = match order.number {
                Some(_) => "SSUBSCRIBE",
                None => "SUNSUBSCRIBE",
            };
            let channel = self.shared.names.channel_of(&order.key);
            ask(connection, cmd(verb).arg(channel).take(), Some(order));
        }
    }

    fn on_push(&self, connection: &Connection, push: &PushInfo) -> Result<(), Fault> {
        let is_asked = |order: &Order| self.is_done(order, &push.kind, &push.data);
        if push.kind == PushKind::SUnsubscribe && !connection.tags().flatten().any(is_asked) {
            return Err(self.condemned());
        }
        if let Some(message @ Message::Granted { .. }) = message(&self.shared.names, push) {
            let events = message.into_events().into_iter();
            self.shared
                .received(self.id, &mut events.map(Received::Heard).collect());
        }
        Ok(())
    }

    fn on_answer(&self, order: Option<Order>, answer: Value) -> Result<(), Fault> {
        let refusal = match (&order, &answer) {
            (_, Value::ServerError(error)) => Some(ErrorReply::from(error)),
            (Some(order), Value::Push { kind, data }) if self.is_done(order, kind, data) => None,
            (None, answer) if !matches!(answer, Value::Push { .. }) => None,
            _ => return Err(self.condemned()),
        };
        if let Some(order) = order {
            self.shared.told(self.id, &order, refusal.as_ref());
        }
        Ok(())
    }

    /// Whether a push confirms the order.
    fn is_done(&self, order: &Order, kind: &PushKind, data: &[Value]) -> bool {
        let wanted = match order.number {
            Some(_) => PushKind::SSubscribe,
            None => PushKind::SUnsubscribe,
        };
        *kind == wanted && named_channel(data) == Some(&self.shared.names.channel_of(&order.key))
    }

    fn no_push(&self, reason: String) -> Fault {
        let address = self.address.clone();
        Fault::NoPush { address, reason }
    }

    /// The server ended a subscription.
    fn condemned(&self) -> Fault {
        let what = "unexpected change of a subscription";
        Fault::garbled(&self.address, what)
    }
}

fn ask(connection: &mut Connection, command: Cmd, order: Option<Order>) {
    let mut client = connection.client();
    let asking = async move { client.send_packed_command(&command).await };
    connection.send(order, Instant::now(), asking);
}

fn named_channel(data: &[Value]) -> Option<&str> {
    match data.first()? {
        Value::BulkString(channel) => std::str::from_utf8(channel).ok(),
        _ => None,
    }
}

impl Drop for SubscriberTask {
    fn drop(&mut self) {
        if !self.has_ended {
            self.shared.subscriber_ended(self.id);
        }
    }
}

impl Change<'_> {
    /// The tasks have new orders.
    pub(super) fn wake_subscribers(&mut self) {
        let nodes: Vec<_> = self.state.subscriptions.nodes_with_orders().collect();
        for id in nodes {
            self.state.nodes[id].subscriber.wake.notify_one();
            self.start_subscriber(id);
        }
    }

    pub(super) fn start_subscriber(&mut self, id: NodeId) {
        let node = &mut self.state.nodes[id];
        if !node.subscriber.has_task && self.shared.has_runtime() {
            node.subscriber.has_task = true;
            let task = SubscriberTask {
                shared: self.shared.clone(),
                id,
                address: node.address.clone(),
                wake: node.subscriber.wake.clone(),
                predecessor: None,
                has_ended: false,
            };
            self.effects.tasks.push(task.run().boxed());
        }
    }
}

impl Shared {
    /// When the task connects next. `None`: never, and it ends.
    fn next_subscriber_attempt(self: &Arc<Self>, id: NodeId) -> Option<Option<Instant>> {
        self.clean_up_subscriptions(id);
        self.change(|change| {
            let is_wanted = !change.state.is_closed && change.state.subscriptions.is_wanted_at(id);
            if !is_wanted {
                // Nobody is there to tell which keys were left.
                change.state.subscriptions.lost(id);
            }
            let subscriber = &mut change.state.nodes[id].subscriber;
            subscriber.has_task = is_wanted;
            is_wanted.then(|| subscriber.backoff.not_before())
        })
    }

    fn next_order(self: &Arc<Self>, id: NodeId) -> Option<Order> {
        self.change(|change| change.state.subscriptions.next_order(id))
    }

    /// A connection for subscriptions is up. All subscriptions are asked for, and grants that were missed are
    /// recovered by entering again.
    fn subscriber_up(self: &Arc<Self>, id: NodeId) {
        self.change(|change| {
            if change.state.nodes[id].no_push.take().is_some() {
                let slots = change.slots_of(id);
                change.state.unsettled.extend(&slots);
                change.settle();
            }
            change.effects.doubtful = change.state.subscriptions.renew(id);
        });
    }

    fn subscriber_lost(self: &Arc<Self>, id: NodeId, fault: Fault, stood_since: Option<Instant>) {
        if let (Fault::NoPush { address, reason }, None) = (&fault, stood_since) {
            self.warn_of_no_push(address, reason);
        }
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            // If the server ended a subscription, the first replacement of a connection that stood for a while has no
            // pause. Perhaps a slot has moved.
            let is_condemned = matches!(fault, Fault::Garbled { .. });
            if !is_condemned || stood_since.is_none_or(|since| since.elapsed() < CLEANUP) {
                node.subscriber.backoff.failed(Instant::now(), stood_since);
            }
            change.state.subscriptions.lost(id);
            if stood_since.is_some() {
                if is_condemned {
                    change.search();
                }
                return;
            }
            if let Fault::NoPush { reason, .. } = &fault {
                change.state.nodes[id].no_push = Some(reason.clone());
                // Its keys must be waited for without grants (W5).
                let slots = change.slots_of(id);
                change.state.unsettled.extend(&slots);
            }
            let error = crate::StoreError::from(fault);
            for request in change.state.subscriptions.take_pending(id) {
                change.answer_unsent(request, error.clone());
            }
            change.search();
        });
    }

    fn subscriber_ended(self: &Arc<Self>, id: NodeId) {
        self.change(|change| {
            if std::mem::take(&mut change.state.nodes[id].subscriber.has_task) {
                change.state.subscriptions.lost(id);
                self.lack_task();
            }
        });
    }

    /// The node has confirmed an order, or refused it. A node that has lost the slot refuses unsubscriptions, too;
    /// then no grants come from there any more.
    fn told(self: &Arc<Self>, id: NodeId, order: &Order, refusal: Option<&ErrorReply>) {
        self.change(|change| {
            for request in change.state.subscriptions.told(order, refusal.is_none()) {
                match refusal {
                    Some(refusal) => change.on_refused(id, request, refusal),
                    None => change.hand_to(id, request),
                }
            }
        });
    }

    /// Unsubscribes keys that nobody waits for. Returns false if no key is left.
    fn clean_up_subscriptions(self: &Arc<Self>, id: NodeId) -> bool {
        let keys = self.change(|change| change.state.subscriptions.unused_at(id));
        let listener = self.config.listener.upgrade();
        let waits = |key: &Arc<str>| listener.as_ref().is_some_and(|it| it.waits(key));
        // Not under our lock: it asks the registry, which takes its own.
        let needless: Vec<_> = keys.into_iter().filter(|key| !waits(key)).collect();
        self.change(|change| {
            for key in &needless {
                change.state.subscriptions.leave(id, key);
            }
            change.state.subscriptions.is_wanted_at(id)
        })
    }
}
