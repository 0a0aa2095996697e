use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use foldhash::HashMap;
use tokio::time::Instant;

use super::keyspace::Keyspace;
use crate::base::mutex::{Mutex, MutexGuard};
use crate::base::thread_end;
use crate::store::contract::{ServerTime, StoreEvents};

/// What the clones of a [`MemoryStore`](super::MemoryStore) and its sessions share.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<StoreState>,
    began: Instant,
    /// Microseconds since the Unix epoch at `began`.
    epoch: u64,
}

/// The registries, by their ids.
pub(super) type Listeners = HashMap<Arc<str>, Weak<dyn StoreEvents>>;

#[derive(Debug, Default)]
pub(super) struct StoreState {
    pub(super) keyspace: Keyspace,
    pub(super) listeners: Listeners,
    pub(super) offline: bool,
    pub(super) latency: Duration,
}

impl Default for Shared {
    fn default() -> Self {
        let epoch = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            state: Mutex::default(),
            began: Instant::now(),
            epoch: u64::try_from(epoch.as_micros()).unwrap_or(u64::MAX / 2),
        }
    }
}

impl Shared {
    pub(super) fn now(&self) -> ServerTime {
        let since = thread_end::now().saturating_duration_since(self.began);
        self.epoch + u64::try_from(since.as_micros()).unwrap_or(0)
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock()
    }
}
