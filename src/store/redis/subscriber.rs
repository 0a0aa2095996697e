//! The task that has a second connection to a primary of a cluster: it carries the subscriptions of
//! the keys that are waited for there.
//!
//! The client takes a `sunsubscribe` that nobody asked for, as when a slot has moved away, for the
//! answer to its oldest request. So such a push ends this connection, and another one replaces it at
//! once; the connection for calls does not notice.

use std::collections::{HashMap, VecDeque};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use redis::{Cmd, PushInfo, PushKind, RedisResult, Value, cmd};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::task::coop;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until, timeout, timeout_at};

use super::backoff::Backoff;
use super::change::Change;
use super::cluster::Address;
use super::fault::{Fault, Refusal};
use super::grant::{self, Message};
use super::handshake::{ClientId, message};
use super::node::Received;
use super::session::{NodeId, Shared};
use super::stream::Link;
use super::subscriptions::Order;
use crate::store::contract::{News, Scope};

/// So many subscriptions are unconfirmed at a time.
const UNCONFIRMED: usize = 64;

/// How often keys that nobody waits for any more are left.
const CLEANUP: Duration = Duration::from_secs(1);

/// How often a connection that says nothing is asked whether it is there.
const PING: Duration = Duration::from_secs(10);

/// What a session knows of the task.
#[derive(Default)]
pub(super) struct Status {
    pub(super) wake: Arc<Notify>,
    has_task: bool,
    backoff: Backoff,
}

pub(super) struct SubscriberTask {
    shared: Arc<Shared>,
    id: NodeId,
    address: Address,
    wake: Arc<Notify>,
    /// The last connection: the server may take it for one that hears our grants.
    predecessor: Option<ClientId>,
    /// Whether the session knows that it has ended: there may be another by now.
    has_ended: bool,
}

/// Why a connection ends.
enum End {
    /// The session was dropped, or no key of the node is waited for.
    Needless,
    /// The server took a subscription away.
    Condemned,
    Broken(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Broken(fault)
    }
}

struct Connection {
    link: Link,
    pushes: UnboundedReceiver<PushInfo>,
    id: Option<ClientId>,
    /// In the order in which it was sent.
    asked: VecDeque<Asked>,
    /// How often we asked to leave each channel without having seen it confirmed.
    leaving: HashMap<String, u32>,
}

struct Asked {
    what: Question,
    sent_at: Instant,
    answer: BoxFuture<'static, RedisResult<Value>>,
}

enum Question {
    Subscribe { key: Arc<str>, channel: String },
    Unsubscribe { channel: String },
    Ping,
}

impl SubscriberTask {
    pub(super) async fn run(mut self) {
        loop {
            let Some(not_before) = self.shared.next_subscriber_attempt(self.id) else {
                self.has_ended = true;
                return;
            };
            let connecting = async {
                if let Some(until) = not_before {
                    sleep_until(until).await;
                }
                self.connect().await
            };
            let connected = tokio::select! {
                connected = connecting => connected,
                () = self.shared.closed() => break,
            };
            let (end, stood_since) = match connected {
                Ok(connection) => {
                    let since = Instant::now();
                    self.predecessor.clone_from(&connection.id);
                    self.shared.subscriber_up(self.id);
                    (self.serve(connection).await, Some(since))
                }
                Err(fault) => (fault.into(), None),
            };
            let address = &*self.address;
            match end {
                End::Needless => {}
                End::Condemned => {
                    tracing::debug!(address, "the server ended a subscription, connecting anew");
                    self.shared.subscriber_condemned(self.id, stood_since);
                }
                End::Broken(fault) => {
                    tracing::debug!(address, error = %fault, "lost the subscriptions");
                    self.shared.subscriber_lost(self.id, fault, stood_since);
                }
            }
        }
    }

    /// Connects, and sees that a message that is published in a slot of the node arrives (O4).
    async fn connect(&self) -> Result<Connection, Fault> {
        let within = self.shared.opening.response_timeout;
        let endpoint = self.shared.topology.endpoint(&self.address, within).await?;
        let (sender, mut pushes) = mpsc::unbounded_channel();
        let address = self.address.clone();
        let Some(mut link) = endpoint.connect(within, sender).await? else {
            let reason = "it, or a proxy before it, speaks RESP2 only";
            return Err(Fault::NoPush {
                address,
                reason: reason.to_owned(),
            });
        };
        let channel = self.shared.probe_channel(self.id);
        let nonce = format!("{:016x}", rand::random::<u64>());
        let mut questions = vec![cmd("CLIENT").arg("INFO").take()];
        questions.extend(self.predecessor.as_ref().map(ClientId::kill));
        let optional = questions.len();
        questions.push(cmd("SSUBSCRIBE").arg(&channel).take());
        let probe = grant::probe(&nonce);
        questions.push(cmd("SPUBLISH").arg(&channel).arg(probe).take());
        questions.push(cmd("SUNSUBSCRIBE").arg(&channel).take());
        // Polled in this order, so all of it is sent in this order and in one go.
        let asking = questions.into_iter().map(|question| {
            let mut connection = link.connection.clone();
            async move { connection.send_packed_command(&question).await }
        });
        let asking = futures::future::join_all(asking);
        let Ok(answers) = timeout(within, link.run(asking)).await else {
            return Err(Fault::Silent { address, within });
        };
        let broken = |source| {
            let address = address.clone();
            Fault::Broken { address, source }
        };
        let answers: Vec<_> = answers
            .into_iter()
            .collect::<RedisResult<_>>()
            .map_err(broken)?;
        for answer in &answers[optional..] {
            if let Value::ServerError(error) = answer {
                let refusal = Refusal::from(error).naming(&self.shared.names);
                return Err(match refusal.is_lasting() {
                    true => Fault::NoPush {
                        address,
                        reason: refusal.to_string(),
                    },
                    false => Fault::Refused { address, refusal },
                });
            }
        }
        let mut has_heard = false;
        let give_up = Instant::now() + within;
        while !has_heard {
            let Ok(push) = timeout_at(give_up, link.run(pushes.recv())).await else {
                let reason = "a message published to our own channel did not arrive".to_owned();
                return Err(Fault::NoPush { address, reason });
            };
            let Some(push) = push.filter(|push| push.kind != PushKind::Disconnection) else {
                return Err(Fault::Closed { address });
            };
            let heard = message(&self.shared.names, &push);
            has_heard = matches!(heard, Some(Message::Probe(heard)) if heard == nonce);
        }
        // The rest is about the probe's channel.
        while pushes.try_recv().is_ok() {}
        Ok(Connection {
            link,
            pushes,
            id: ClientId::read(&answers[0]),
            asked: VecDeque::new(),
            leaving: HashMap::new(),
        })
    }

    async fn serve(&self, mut connection: Connection) -> End {
        let within = self.shared.opening.response_timeout;
        let mut cleanup = interval_at(Instant::now() + CLEANUP, CLEANUP);
        cleanup.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ping = interval_at(Instant::now() + PING.mul_f64(rand::random()), PING);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut alarm = pin!(sleep_until(Instant::now() + within));
        let mut closed = pin!(self.shared.closed());
        loop {
            self.follow_orders(&mut connection);
            tokio::select! {
                biased;
                () = &mut connection.link.driver => {
                    let address = self.address.clone();
                    return Fault::Closed { address }.into();
                }
                push = connection.pushes.recv() => {
                    let Some(push) = push else {
                        let address = self.address.clone();
                        return Fault::Closed { address }.into();
                    };
                    if let Err(end) = self.on_push(&mut connection, &push) {
                        return end;
                    }
                }
                answer = first_answer(&mut connection.asked) => {
                    if let Err(end) = self.on_answer(answer) {
                        return end;
                    }
                }
                () = self.wake.notified() => {}
                () = &mut closed => return End::Needless,
                () = &mut alarm => {
                    let now = Instant::now();
                    let oldest = connection.asked.front().map(|asked| asked.sent_at);
                    if oldest.is_some_and(|sent_at| sent_at + within <= now) {
                        let address = self.address.clone();
                        return Fault::Silent { address, within }.into();
                    }
                    alarm.as_mut().reset(oldest.unwrap_or(now) + within);
                }
                _ = cleanup.tick() => {
                    if !self.shared.clean_up_subscriptions(self.id) {
                        return End::Needless;
                    }
                }
                _ = ping.tick() => {
                    if connection.asked.is_empty() {
                        connection.ask(Question::Ping);
                    }
                }
            }
        }
    }

    fn follow_orders(&self, connection: &mut Connection) {
        while connection.asked.len() < UNCONFIRMED
            && let Some(order) = self.shared.next_order(self.id)
        {
            let question = match order {
                Order::Subscribe(key) => {
                    let channel = self.shared.names.channel_of(&key);
                    Question::Subscribe { key, channel }
                }
                Order::Unsubscribe(key) => {
                    let channel = self.shared.names.channel_of(&key);
                    *connection.leaving.entry(channel.clone()).or_default() += 1;
                    Question::Unsubscribe { channel }
                }
            };
            connection.ask(question);
        }
    }

    fn on_push(&self, connection: &mut Connection, push: &PushInfo) -> Result<(), End> {
        match push.kind {
            PushKind::Disconnection => {
                let address = self.address.clone();
                return Err(Fault::Closed { address }.into());
            }
            PushKind::SUnsubscribe => {
                let channel = named_channel(&push.data).unwrap_or_default();
                match connection.leaving.get_mut(channel) {
                    None => return Err(End::Condemned),
                    Some(1) => drop(connection.leaving.remove(channel)),
                    Some(times) => *times -= 1,
                }
            }
            _ => {
                if let Some(Message::Granted { key, grant }) = message(&self.shared.names, push) {
                    self.shared
                        .received(self.id, &mut vec![Received::Granted { key, grant }]);
                }
            }
        }
        Ok(())
    }

    fn on_answer(&self, (what, answer): (Question, RedisResult<Value>)) -> Result<(), End> {
        let address = self.address.clone();
        let answer = answer.map_err(|source| Fault::Broken { address, source })?;
        let is_its_own = match (&what, &answer) {
            (Question::Ping, answer) => !matches!(answer, Value::Push { .. }),
            (_, Value::ServerError(_)) => true,
            (Question::Subscribe { channel, .. }, Value::Push { kind, data }) => {
                *kind == PushKind::SSubscribe && named_channel(data) == Some(channel)
            }
            (Question::Unsubscribe { channel }, Value::Push { kind, data }) => {
                *kind == PushKind::SUnsubscribe && named_channel(data) == Some(channel)
            }
            _ => false,
        };
        if !is_its_own {
            return Err(End::Condemned);
        }
        match (what, answer) {
            (Question::Subscribe { key, .. }, Value::ServerError(error)) => {
                self.shared
                    .subscription_refused(self.id, &key, &Refusal::from(&error));
            }
            (Question::Subscribe { key, .. }, _) => self.shared.subscribed(self.id, &key),
            // Whoever has lost the slot refuses this too; then nothing is heard there any more.
            (Question::Unsubscribe { .. } | Question::Ping, _) => {}
        }
        Ok(())
    }
}

impl Connection {
    fn ask(&mut self, what: Question) {
        let command: Cmd = match &what {
            Question::Subscribe { channel, .. } => cmd("SSUBSCRIBE").arg(channel).take(),
            Question::Unsubscribe { channel } => cmd("SUNSUBSCRIBE").arg(channel).take(),
            Question::Ping => cmd("PING"),
        };
        let mut client = self.link.connection.clone();
        let asking = async move { client.send_packed_command(&command).await };
        let mut answer = coop::unconstrained(asking).boxed();
        // Polled once, so that questions are sent in this order.
        if let Some(done) = (&mut answer).now_or_never() {
            answer = std::future::ready(done).boxed();
        }
        self.asked.push_back(Asked {
            what,
            sent_at: Instant::now(),
            answer,
        });
    }
}

/// Resolves when the oldest question is answered.
async fn first_answer(asked: &mut VecDeque<Asked>) -> (Question, RedisResult<Value>) {
    let Some(first) = asked.front_mut() else {
        return std::future::pending().await;
    };
    let answer = (&mut first.answer).await;
    let first = asked.pop_front().expect("it was just looked at");
    (first.what, answer)
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

/// Subscriptions on their way to a node.
impl Change<'_> {
    /// There are new orders for the tasks, or a runtime.
    pub(super) fn wake_subscribers(&mut self) {
        for (id, node) in self.state.nodes.iter().enumerate() {
            if node.subscriber.has_task {
                if self.state.subscriptions.has_orders(id) {
                    node.subscriber.wake.notify_one();
                }
            } else if self.state.subscriptions.is_wanted_at(id) {
                self.effects.subscribers.push(id);
            }
        }
    }
}

impl Shared {
    pub(super) fn subscriber_task(self: &Arc<Self>, id: NodeId) -> Option<SubscriberTask> {
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            let is_new = !std::mem::replace(&mut node.subscriber.has_task, true);
            is_new.then(|| SubscriberTask {
                shared: self.clone(),
                id,
                address: node.address.clone(),
                wake: node.subscriber.wake.clone(),
                predecessor: None,
                has_ended: false,
            })
        })
    }

    /// When the task is to connect; `None`: not at all, and it ends.
    fn next_subscriber_attempt(self: &Arc<Self>, id: NodeId) -> Option<Option<Instant>> {
        self.clean_up_subscriptions(id);
        self.change(|change| {
            let is_wanted = !change.state.is_closed && change.state.subscriptions.is_wanted_at(id);
            let subscriber = &mut change.state.nodes[id].subscriber;
            subscriber.has_task = is_wanted;
            is_wanted.then(|| subscriber.backoff.not_before())
        })
    }

    fn next_order(self: &Arc<Self>, id: NodeId) -> Option<Order> {
        self.change(|change| change.state.subscriptions.next_order(id))
    }

    /// A connection for subscriptions stands: all are asked for, and grants that came meanwhile are
    /// made good by entering again.
    fn subscriber_up(self: &Arc<Self>, id: NodeId) {
        self.change(|change| {
            if change.state.nodes[id].no_push.take().is_some() {
                let slots = change.slots_of(id);
                change.state.unsettled.extend(&slots);
                change.settle();
            }
            let doubtful = change.state.subscriptions.renew(id);
            if !doubtful.is_empty() {
                change.effects.news.push(News::Up {
                    scope: Scope::Keys(Arc::new(move |key| doubtful.contains(key))),
                    queue: true,
                    complete: false,
                });
            }
        });
    }

    /// The first replacement of a connection that stood for a while has no pause.
    fn subscriber_condemned(self: &Arc<Self>, id: NodeId, stood_since: Option<Instant>) {
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            if stood_since.is_some_and(|since| since.elapsed() < CLEANUP) {
                node.subscriber.backoff.failed(Instant::now(), stood_since);
            }
            change.state.subscriptions.lost(id);
            // Perhaps a slot has moved.
            change.search();
        });
    }

    fn subscriber_lost(self: &Arc<Self>, id: NodeId, fault: Fault, stood_since: Option<Instant>) {
        if let (Fault::NoPush { address, reason }, None) = (&fault, stood_since) {
            self.warn_of_no_push(address, reason);
        }
        self.change(|change| {
            let node = &mut change.state.nodes[id];
            node.subscriber.backoff.failed(Instant::now(), stood_since);
            change.state.subscriptions.lost(id);
            if stood_since.is_some() {
                return;
            }
            if let Fault::NoPush { reason, .. } = &fault {
                change.state.nodes[id].no_push = Some(reason.clone());
                // All its keys are to be waited for in another way (W5).
                let slots = change.slots_of(id);
                change.state.unsettled.extend(&slots);
            }
            let error = crate::StoreError::from(fault);
            for request in change.state.subscriptions.take_pending(id) {
                change.answer_unsent(request, error.clone());
            }
            change.search();
            change.settle_soon();
        });
    }

    fn subscriber_ended(self: &Arc<Self>, id: NodeId) {
        self.change(|change| {
            if std::mem::take(&mut change.state.nodes[id].subscriber.has_task) {
                self.lack_task();
            }
        });
    }

    fn subscribed(self: &Arc<Self>, id: NodeId, key: &str) {
        self.change(|change| {
            for request in change.state.subscriptions.confirmed(id, key) {
                change.hand_to(id, request);
            }
        });
    }

    fn subscription_refused(self: &Arc<Self>, id: NodeId, key: &str, refusal: &Refusal) {
        self.change(|change| {
            for request in change.state.subscriptions.refused(id, key) {
                change.on_refused(id, request, refusal);
            }
        });
    }

    /// Leaves the keys that nobody waits for any more; false: no key is left.
    fn clean_up_subscriptions(self: &Arc<Self>, id: NodeId) -> bool {
        let keys = self.change(|change| change.state.subscriptions.unused_at(id));
        let listener = self.opening.listener.upgrade();
        let waits = |key: &Arc<str>| listener.as_ref().is_some_and(|it| it.waits(key));
        // Without the lock: it asks the registry, which has a lock of its own.
        let needless: Vec<_> = keys.into_iter().filter(|key| !waits(key)).collect();
        self.change(|change| {
            for key in &needless {
                change.state.subscriptions.leave(id, key);
            }
            change.state.subscriptions.is_wanted_at(id)
        })
    }

    /// A channel of nobody's in a slot of the node.
    fn probe_channel(self: &Arc<Self>, id: NodeId) -> String {
        let slot = match self.purpose(id) {
            super::handshake::Purpose::Primary(slot) => slot,
            _ => 0,
        };
        let [_, _, channel] = self.names.probe_in(slot);
        channel
    }
}
