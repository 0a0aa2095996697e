//! A registry that asks a quorum op by op, and keeps what it hears.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::nodes::{Node, ms};
use crate::store::contract::{
    KeyScope, Op, OpError, Outcome, Owner, Session, SessionConfig, StoreEvent, StoreEvents,
    SubmittedOp,
};
use crate::store::{LockStore, QuorumStore};

pub(super) const TTL: Duration = Duration::from_secs(30);

/// A registry that only listens.
#[derive(Default)]
pub(super) struct Recorder {
    events: Mutex<Vec<StoreEvent>>,
    /// Whether it says that it uses nothing.
    pub(super) is_idle: AtomicBool,
}

impl StoreEvents for Recorder {
    fn uses(&self, _: &KeyScope) -> bool {
        !self.is_idle.load(Relaxed)
    }

    fn waits(&self, _: &str) -> bool {
        true
    }

    fn failed(&self, _: &(dyn std::any::Any + Send)) {
        unreachable!("no task panics here")
    }

    fn on_events(&self, events: Vec<StoreEvent>) {
        self.events.lock().unwrap().extend(events);
    }
}

pub(super) struct Harness {
    pub(super) session: Arc<dyn Session>,
    pub(super) heard: Arc<Recorder>,
}

pub(super) fn store(nodes: &[Node]) -> QuorumStore {
    let store = QuorumStore::new(nodes.iter().cloned()).unwrap();
    store.quarantine(None)
}

pub(super) fn config(instance: &str, heard: &Arc<Recorder>) -> SessionConfig {
    let listener: Arc<dyn StoreEvents> = heard.clone();
    SessionConfig {
        prefix: "lock".into(),
        instance: instance.into(),
        ttl: TTL,
        response_timeout: ms(1000),
        listener: Arc::downgrade(&listener),
        tasks: Arc::default(),
    }
}

impl Harness {
    pub(super) fn new(store: &QuorumStore, instance: &str) -> Self {
        let heard = Arc::<Recorder>::default();
        let session = store.open(config(instance, &heard));
        session.start();
        Self { session, heard }
    }

    pub(super) fn take(&self) -> Vec<StoreEvent> {
        std::mem::take(&mut *self.heard.events.lock().unwrap())
    }

    /// Asks, and waits for the answer, but not for what is behind it.
    pub(super) async fn ask(&self, op: Op) -> Result<Outcome, OpError> {
        self.session.submit(SubmittedOp::unattended("k", op));
        self.answer().await
    }

    pub(super) async fn answer(&self) -> Result<Outcome, OpError> {
        let patience = Instant::now() + Duration::from_secs(100);
        loop {
            let reply = {
                let mut heard = self.heard.events.lock().unwrap();
                let at = heard
                    .iter()
                    .position(|it| matches!(it, StoreEvent::Replied { .. }));
                at.map(|at| heard.remove(at))
            };
            if let Some(StoreEvent::Replied { result, .. }) = reply {
                return result.map(|answer| answer.outcome);
            }
            assert!(Instant::now() < patience, "no answer");
            sleep(ms(1)).await;
        }
    }

    pub(super) async fn attempt(&self, owner: u64) -> Outcome {
        self.ask(attempt(owner)).await.unwrap()
    }

    pub(super) async fn wins(&self, owner: u64) -> u64 {
        match self.attempt(owner).await {
            Outcome::Won { epoch } => epoch,
            other => panic!("{other:?}"),
        }
    }
}

pub(super) fn attempt(owner: u64) -> Op {
    let (owner, ttl) = (Owner::exclusive(owner), TTL);
    Op::Attempt { owner, ttl }
}

pub(super) fn release(owner: u64) -> Op {
    let owner = Owner::exclusive(owner);
    Op::Release { owner }
}

pub(super) fn renew(owner: u64) -> Op {
    let (owner, ttl) = (Owner::exclusive(owner), TTL);
    Op::Renew {
        owner,
        ttl,
        within: ttl,
    }
}

pub(super) fn keys(nodes: &[Node]) -> Vec<usize> {
    nodes.iter().map(Node::keys).collect()
}

pub(super) const GONE: Outcome = Outcome::Gone { held: true };

pub(super) fn is_busy(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Busy { score: None, .. })
}

pub(super) fn adopt(owner: u64, from: &str) -> Op {
    Op::Adopt {
        owner: Owner::exclusive(owner),
        from: from.into(),
        ttl: TTL,
        within: TTL,
    }
}

pub(super) fn listen(owner: u64) -> Op {
    let (owner, ttl) = (Owner::exclusive(owner), TTL);
    Op::Listen { owner, ttl }
}

pub(super) fn unlisten(owner: u64) -> Op {
    let owner = Owner::exclusive(owner);
    Op::Unlisten { owner }
}
