use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt, stream};
use tokio::time::Instant;

use super::keyspace::Asking;
use super::shared::{Listeners, Shared, StoreState};
use crate::base::{Check, CheckedServer, StoreError};
use crate::roaming::runtime;
use crate::roaming::time::sleep;
use crate::store::contract::{
    Answer, KeyStatus, Op, OpError, OpResult, Session, SessionConfig, StoreEvent, SubmittedOp,
};

/// One registry's session with a [`MemoryStore`](super::MemoryStore).
#[derive(Clone)]
pub(super) struct MemorySession {
    core: Arc<Core>,
}

struct Core {
    shared: Arc<Shared>,
    config: SessionConfig,
}

impl MemorySession {
    pub(super) fn new(shared: Arc<Shared>, config: SessionConfig) -> Self {
        let core = Arc::new(Core { shared, config });
        Self { core }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.listeners.remove(&self.config.instance);
    }
}

impl Core {
    fn tell(&self, event: StoreEvent) {
        if let Some(listener) = self.config.listener.upgrade() {
            listener.on_event(event);
        }
    }

    fn reply(&self, submitted: SubmittedOp, result: Result<Answer, OpError>) {
        let failed = result.is_err();
        self.tell(StoreEvent::Replied { submitted, result });
        // The store may have come back between the failure and this report. It reports that again, or the registry
        // would believe that the store is still down.
        if failed && !self.is_offline() {
            self.tell(StoreEvent::up(true));
        }
    }

    /// Runs the operation. Grants are delivered here; the caller handles the reply.
    fn apply(&self, SubmittedOp { key, op, .. }: &SubmittedOp) -> Result<Answer, OpError> {
        let mut told = Vec::new();
        let applied = {
            let mut state = self.shared.lock();
            if state.offline {
                return Err(OpError::Unsent(offline_error()));
            }
            let state = &mut *state;
            let listeners = &state.listeners;
            let live = |instance: &Arc<str>| is_live(listeners, instance);
            let asking = Asking {
                prefix: &self.config.prefix,
                instance: &self.config.instance,
                key,
                now: self.shared.now(),
            };
            let mut applied = state.keyspace.apply(asking, op, &live);
            for delivery in applied.deliveries.drain(..) {
                let listener = listeners.get(&delivery.instance).and_then(Weak::upgrade);
                told.extend(listener.map(|listener| (listener, delivery)));
            }
            applied
        };
        for (listener, delivery) in told {
            let key = || key.clone();
            let Some(grant) = delivery.grant else {
                listener.on_event(StoreEvent::Freed { key: key() });
                continue;
            };
            let owner = grant.owner;
            let mut events = vec![StoreEvent::Granted { key: key(), grant }];
            if delivery.unserved {
                events.push(StoreEvent::Unserved { key: key(), owner });
            }
            listener.on_events(events);
        }
        if applied.unserved {
            let (key, owner) = (key.clone(), op.owner());
            self.tell(StoreEvent::Unserved { key, owner });
        }
        Ok(applied.answer)
    }

    /// The same with the latency: half of it is the way to the store.
    async fn apply_slowly(&self, latency: Duration, submitted: &SubmittedOp) -> OpResult {
        sleep(latency / 2).await;
        let result = self.apply(submitted);
        sleep(latency - latency / 2).await;
        match result.is_ok() && self.is_offline() {
            true => Err(OpError::Unknown(offline_error())),
            false => result,
        }
    }

    /// Reads the data after the latency.
    async fn read<T>(&self, read: impl FnOnce(&mut StoreState) -> T) -> Result<T, StoreError> {
        let latency = self.latency();
        if !latency.is_zero() {
            tokio::time::sleep(latency).await;
        }
        let mut state = self.shared.lock();
        match state.offline {
            true => Err(offline_error()),
            false => Ok(read(&mut state)),
        }
    }

    fn latency(&self) -> Duration {
        self.shared.lock().latency
    }

    /// The reply to an operation that was in flight when the store went offline is lost.
    fn is_offline(&self) -> bool {
        self.shared.lock().offline
    }
}

impl Session for MemorySession {
    fn start(&self) {}

    fn submit(&self, submitted: SubmittedOp) {
        let latency = self.core.latency();
        let runtime = if latency.is_zero() { None } else { runtime() };
        let Some(runtime) = runtime else {
            let result = self.core.apply(&submitted);
            return self.core.reply(submitted, result);
        };
        let core = self.core.clone();
        // A task of its own: the operation goes on if its caller is dropped.
        self.core.config.spawn(&runtime, async move {
            let result = core.apply_slowly(latency, &submitted).await;
            core.reply(submitted, result);
        });
    }

    fn identity(&self) -> Option<Arc<str>> {
        Some(format!("memory {:p}", self.core.shared).into())
    }

    fn check(&self) -> BoxFuture<'static, Result<Check, StoreError>> {
        let core = self.core.clone();
        async move {
            let began = Instant::now();
            core.read(|_| ()).await?;
            let server = CheckedServer {
                address: "this process".to_owned(),
                version: Some("memory".to_owned()),
                round_trip: began.elapsed(),
                ..CheckedServer::default()
            };
            Ok(Check {
                servers: vec![server],
                failed: Vec::new(),
                shares: true,
            })
        }
        .boxed()
    }

    fn ask(&self, key: Arc<str>, op: Op) -> BoxFuture<'static, OpResult> {
        let core = self.core.clone();
        async move {
            let submitted = SubmittedOp::unattended(key, op);
            match core.latency() {
                Duration::ZERO => core.apply(&submitted),
                latency => core.apply_slowly(latency, &submitted).await,
            }
        }
        .boxed()
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<KeyStatus, StoreError>> {
        let core = self.core.clone();
        async move {
            let (prefix, shared) = (&core.config.prefix, &core.shared);
            let inspect = |state: &mut StoreState| {
                let live = |instance: &Arc<str>| is_live(&state.listeners, instance);
                state.keyspace.inspect(prefix, &key, shared.now(), &live)
            };
            core.read(inspect).await
        }
        .boxed()
    }

    fn scan(&self, start: Arc<str>) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        let core = self.core.clone();
        stream::once(async move {
            let prefix = &core.config.prefix;
            core.read(|state| state.keyspace.scan(prefix, &start)).await
        })
        .boxed()
    }
}

fn is_live(listeners: &Listeners, instance: &Arc<str>) -> bool {
    let listener = listeners.get(instance);
    listener.is_some_and(|listener| listener.strong_count() > 0)
}

pub(super) fn offline_error() -> StoreError {
    StoreError::new("the memory store was set offline")
}
