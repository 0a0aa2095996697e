use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use crate::LockError;
use crate::engine::Engine;
use crate::key::{self, Key};
use crate::renewal::Renewal;
use crate::repeat::{Repeat, Repeats};
use crate::settings::{OnFinish, OnLost, TTL};

/// What a handle is told to lock, and how.
#[derive(Clone)]
pub(crate) struct Plan {
    engine: Option<Arc<Engine>>,
    key: Key,
    /// Why the key cannot name a lock: found once, however often the handle acquires.
    key_fault: Option<&'static str>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) repeat: Option<Repeat>,
    pub(crate) renewal: Option<Renewal>,
    pub(crate) on_lost: OnLost,
    pub(crate) reentrant: bool,
    /// Where the lock was asked for.
    place: &'static Location<'static>,
    pub(crate) on_finish: OnFinish,
}

impl Plan {
    #[track_caller]
    pub(crate) fn new(engine: Option<Arc<Engine>>, key: &str) -> Self {
        let key_fault = engine
            .as_ref()
            .and_then(|engine| key::fault(&engine.settings().prefix, key));
        Self {
            engine,
            key: Key::from(Arc::from(key)),
            key_fault,
            ttl: None,
            wait: None,
            repeat: None,
            renewal: None,
            on_lost: OnLost::default(),
            reentrant: false,
            place: Location::caller(),
            on_finish: OnFinish::default(),
        }
    }

    /// The same, asked for where the caller's caller stands.
    #[track_caller]
    pub(crate) fn asked_here(&self) -> Self {
        Self {
            place: Location::caller(),
            ..self.clone()
        }
    }

    pub(crate) fn place(&self) -> &'static Location<'static> {
        self.place
    }

    /// Who is to acquire it, or why it cannot be.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>, LockError> {
        let key = || self.key.name().clone();
        let Some(engine) = &self.engine else {
            return Err(LockError::NoRegistry { key: key() });
        };
        if let Some(reason) = self.key_fault {
            return Err(LockError::InvalidKey { key: key(), reason });
        }
        if !TTL.contains(&self.ttl()) {
            return Err(LockError::InvalidTtl {
                key: key(),
                ttl: self.ttl(),
            });
        }
        if self.ttl() <= engine.overhead() {
            return Err(LockError::InvalidSetting {
                key: key(),
                setting: "min_replicas",
                reason: "must give replicas less time than the ttl",
            });
        }
        Ok(engine)
    }

    /// The same, once it was found that it can be acquired.
    pub(crate) fn registry(&self) -> &Arc<Engine> {
        self.engine.as_ref().expect("who is in line has a registry")
    }

    /// The registry goes on to the lease, and nothing is acquired by this plan after that. All threads
    /// count on its one counter, so each clone that is not made saves them a wait for each other.
    pub(crate) fn take_registry(&mut self) -> Arc<Engine> {
        self.engine.take().expect("who is in line has a registry")
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        self.key.name()
    }

    pub(crate) fn hashed_key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn on_lost(&self) -> OnLost {
        self.on_lost
    }

    pub(crate) fn ttl(&self) -> Duration {
        self.ttl
            .or_else(|| Some(self.engine.as_ref()?.settings().ttl))
            .unwrap_or_default()
    }

    pub(crate) fn wait(&self) -> Duration {
        self.wait
            .or_else(|| Some(self.engine.as_ref()?.settings().wait))
            .unwrap_or_default()
    }

    /// The pauses of one wait.
    pub(crate) fn repeats(&self) -> Repeats {
        let repeat = self
            .repeat
            .as_ref()
            .or_else(|| Some(&self.engine.as_ref()?.settings().repeat));
        repeat.map_or_else(|| Repeat::default().start(), Repeat::start)
    }

    /// A ttl that was set asks for a lease of just that length, unless the lock says otherwise.
    pub(crate) fn renewal(&self) -> Renewal {
        match (self.renewal, self.ttl, &self.engine) {
            (Some(renewal), _, _) => renewal,
            (None, None, Some(engine)) => engine.settings().renewal,
            (None, _, _) => Renewal::off(),
        }
    }

    pub(crate) fn max_waiters(&self) -> usize {
        let engine = self.engine.as_ref();
        engine.map_or(usize::MAX, |engine| engine.settings().max_waiters)
    }
}
