//! One registry's line to a quorum: a session a node, and the state that their answers change.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::fault::{Fault, too_few};
use super::node::Deferred;
use super::quarantine::Quarantine;
use super::state::State;
use super::tally::Quorum;
use crate::StoreError;
use crate::engine::run_task;
use crate::store::LockStore;
use crate::store::contract::{
    KeyStatus, LostOps, Scope, Session, SessionConfig, StoreEvent, StoreEvents, SubmittedOp,
};
use crate::store::notifier::OrderedNotifier;
use crate::user_code::log;

/// No alarm sleeps longer: what it is set for may be a ttl away, and the registry gone by then.
const LONGEST: Duration = Duration::from_secs(1);

pub(super) struct QuorumSession {
    core: Arc<Core>,
}

struct Core {
    me: Weak<Core>,
    quorum: Quorum,
    config: SessionConfig,
    nodes: Vec<Arc<dyn Session>>,
    /// What each node's session has lost: seen at every start and alarm.
    lost: Vec<Arc<LostOps>>,
    /// What the nodes tell; they know them weakly.
    _ears: Vec<Arc<dyn StoreEvents>>,
    shared: Mutex<Shared>,
    notifier: OrderedNotifier,
    /// Whether no majority is there, as far as is known: seen at every arrival.
    is_down: AtomicBool,
    /// Told when nothing is under way any more.
    idle: Notify,
}

struct Shared {
    state: State,
    /// When the alarm rings that was set last.
    alarm: Option<Instant>,
}

impl Shared {
    /// Whether something is to be done in time, and no timer will see to it: the runtime that it was
    /// on may have gone.
    fn is_overdue(&self, now: Instant) -> bool {
        self.state.next_timeout().is_some() && self.alarm.is_none_or(|alarm| alarm <= now)
    }
}

/// What one node tells.
struct EventSink {
    core: Weak<Core>,
    node: usize,
}

impl QuorumSession {
    pub(super) fn new(
        stores: &[Arc<dyn LockStore>],
        quarantine: Quarantine,
        config: SessionConfig,
    ) -> Self {
        let size = stores.len();
        let name = |(number, store): (usize, &Arc<dyn LockStore>)| {
            let place = store.place();
            place.unwrap_or_else(|| format!("node {}", number + 1))
        };
        let names = stores.iter().enumerate().map(name).collect();
        let core = Arc::new_cyclic(|me: &Weak<Core>| {
            let subscriptions: Vec<Arc<dyn StoreEvents>> = (0..size)
                .map(|node| -> Arc<dyn StoreEvents> {
                    let core = me.clone();
                    Arc::new(EventSink { core, node })
                })
                .collect();
            let open = |(store, subscription): (&Arc<dyn LockStore>, &Arc<dyn StoreEvents>)| {
                let listener = Arc::downgrade(subscription);
                store.open(SessionConfig {
                    listener,
                    ..config.clone()
                })
            };
            Core {
                me: me.clone(),
                quorum: Quorum { size },
                nodes: stores.iter().zip(&subscriptions).map(open).collect(),
                lost: (0..size).map(|_| Arc::default()).collect(),
                _ears: subscriptions,
                notifier: OrderedNotifier::new(config.listener.clone()),
                config,
                shared: Mutex::new(Shared {
                    state: State::new(names, quarantine),
                    alarm: None,
                }),
                is_down: AtomicBool::new(false),
                idle: Notify::new(),
            }
        });
        Self { core }
    }

    #[cfg(test)]
    pub(super) fn keys(&self) -> usize {
        self.core.lock().state.keys()
    }
}

impl Core {
    fn lock(&self) -> MutexGuard<'_, Shared> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and does what follows once it is unlocked.
    fn act(&self, event: impl FnOnce(&mut State, Instant, &mut Deferred)) {
        let mut deferred = Deferred::default();
        let alarm = {
            let mut guard = self.lock();
            let shared = &mut *guard;
            let now = Instant::now();
            shared.alarm.take_if(|alarm| *alarm <= now);
            event(&mut shared.state, now, &mut deferred);
            self.notifier.put(deferred.events.drain(..));
            self.is_down
                .store(shared.state.is_down(), Ordering::Relaxed);
            let next = shared.state.next_timeout().map(|it| it.min(now + LONGEST));
            let alarm = next.filter(|next| shared.alarm.is_none_or(|alarm| *next < alarm));
            if alarm.is_some() {
                shared.alarm = alarm;
            }
            if !shared.state.is_busy() {
                self.idle.notify_waiters();
            }
            alarm
        };
        if let Some(error) = &deferred.same_server {
            log!(error, %error, "a node of the quorum has no vote");
        }
        // At most one op a node and key is under way, so whoever sends, the order is right.
        for (node, key, op) in deferred.sends {
            self.nodes[node].submit(SubmittedOp::new(key, op, &self.lost[node]));
        }
        if let Some(alarm) = alarm {
            self.ring_at(alarm);
        }
        self.notifier.tell();
    }

    /// Does what is due, also about ops that were lost.
    fn tick(&self) {
        self.act(|state, now, deferred| {
            for (node, lost) in self.lost.iter().enumerate() {
                for (key, op) in lost.take() {
                    state.op_lost(now, node, &key, &op, deferred);
                }
            }
            state.tick(now, deferred);
        });
    }

    fn ring_at(&self, alarm: Instant) {
        if let Ok(runtime) = Handle::try_current() {
            let core = self.me.clone();
            runtime.spawn(run_task(self.config.listener.clone(), async move {
                sleep_until(alarm).await;
                if let Some(core) = core.upgrade() {
                    core.tick();
                }
            }));
        }
    }
}

impl EventSink {
    fn listener(&self) -> Option<Arc<dyn StoreEvents>> {
        let core = self.core.upgrade()?;
        core.config.listener.upgrade()
    }
}

impl StoreEvents for EventSink {
    fn on_event(&self, event: StoreEvent) {
        self.on_events(vec![event]);
    }

    fn on_events(&self, events: Vec<StoreEvent>) {
        let Some(core) = self.core.upgrade() else {
            return;
        };
        let node = self.node;
        core.act(|state, now, deferred| {
            for event in events {
                match event {
                    StoreEvent::Replied {
                        mut submitted,
                        result,
                    } => {
                        submitted.answered();
                        state.replied(now, node, &submitted.key, result, deferred);
                    }
                    StoreEvent::Up { .. } => {
                        let identity = core.nodes[node].identity();
                        state.came_up(now, node, identity, deferred);
                    }
                    StoreEvent::Down { error, .. } => state.went_down(node, error, deferred),
                    StoreEvent::Freed { key } => state.freed(now, node, key, deferred),
                    // Nobody of ours stands in a node's queue.
                    StoreEvent::Granted { .. } | StoreEvent::Unconfirmed { .. } => {}
                }
            }
        });
    }

    fn uses(&self, scope: &Scope) -> bool {
        self.listener().is_some_and(|listener| listener.uses(scope))
    }

    fn failed(&self, panicked: &(dyn Any + Send)) {
        if let Some(listener) = self.listener() {
            listener.failed(panicked);
        }
    }

    /// Nobody of ours stands in a node's queue.
    fn waits(&self, _: &str) -> bool {
        false
    }
}

impl Session for QuorumSession {
    fn start(&self) {
        self.core.nodes.iter().for_each(|node| node.start());
        let is_overdue = self.core.lock().is_overdue(Instant::now());
        if is_overdue || self.core.lost.iter().any(|lost| !lost.is_empty()) {
            self.core.tick();
        }
    }

    fn submit(&self, submitted: SubmittedOp) {
        self.core
            .act(|state, now, deferred| state.submit(now, submitted, deferred));
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let core = self.core.clone();
        async move {
            let within = core.config.response_timeout;
            let mut looks: FuturesUnordered<_> = core
                .nodes
                .iter()
                .map(|node| timeout(within, node.inspect(key.clone())))
                .collect();
            let mut seen = Seen::default();
            while let Some(look) = looks.next().await {
                match look {
                    Ok(Ok(key_status)) => seen.sights.push(key_status),
                    Ok(Err(error)) => seen.troubles.push(error),
                    Err(_) => seen.troubles.push(Fault::Away.into()),
                }
                if let Some(key_status) = seen.verdict(core.quorum, looks.len()) {
                    return Ok(key_status);
                }
            }
            Err(too_few(core.quorum, &seen.troubles))
        }
        .boxed()
    }
}

/// What the nodes showed of one lock.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) sights: Vec<KeyStatus>,
    troubles: Vec<StoreError>,
}

impl Seen {
    /// What a majority shows, with so many nodes still to come. Once they have all come, an owner
    /// that those may have which are away is taken for the holder.
    pub(super) fn verdict(&self, quorum: Quorum, to_come: usize) -> Option<KeyStatus> {
        if self.sights.len() < quorum.majority() {
            return None;
        }
        let mut votes: HashMap<&str, usize> = HashMap::new();
        for owner in self.sights.iter().filter_map(|it| it.owner.as_deref()) {
            *votes.entry(owner).or_default() += 1;
        }
        let first = votes.into_iter().max_by_key(|(_, votes)| *votes);
        let (owner, votes) = first.map_or((None, 0), |(owner, votes)| (Some(owner), votes));
        let silent = quorum.size - self.sights.len();
        let majority = quorum.majority();
        let may_hold = owner.is_some() && votes + silent >= majority;
        if may_hold && votes < majority && to_come > 0 {
            return None;
        }
        if !may_hold && to_come > 0 && silent >= majority {
            return None;
        }
        let owner = owner.filter(|_| may_hold);
        let mut lefts: Vec<_> = self
            .sights
            .iter()
            .filter(|it| owner.is_some() && it.owner.as_deref() == owner)
            .map(|it| it.left)
            .collect();
        // It is held for as long as a majority has it, or longer; no ttl is the longest.
        lefts.sort_unstable_by_key(|left| std::cmp::Reverse(left.unwrap_or(Duration::MAX)));
        let left = lefts.get(majority - 1).or(lefts.last()).copied();
        Some(KeyStatus {
            owner: owner.map(str::to_owned),
            left: left.flatten(),
            tickets: 0,
        })
    }
}

impl Drop for QuorumSession {
    fn drop(&mut self) {
        // Votes that come late, or whose node is away for a moment, are still to be given back: for as
        // long as a shutdown waits (O6).
        let is_busy = self.core.lock().state.is_busy();
        if let Ok(runtime) = Handle::try_current()
            && is_busy
        {
            let core = self.core.clone();
            let patience = core.config.response_timeout.saturating_mul(3);
            runtime.spawn(async move {
                let idle = async {
                    loop {
                        let idle = core.idle.notified();
                        if !core.lock().state.is_busy() {
                            break;
                        }
                        idle.await;
                    }
                };
                let _ = timeout(patience, idle).await;
            });
        }
    }
}
