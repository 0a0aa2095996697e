//! What sqlx offers: `PgAdvisoryLock`, a lock of the session. Each task that may wait needs a connection.

use std::collections::VecDeque;
use std::sync::Mutex;

use futures::StreamExt;
use sqlx_core::connection::Connection;
use sqlx_postgres::{PgAdvisoryLock, PgAdvisoryLockGuard, PgConnection};

use super::{Library, Outcome, Passes, told};

/// So many connect at a time.
const AT_ONCE: usize = 16;

pub(crate) struct Advisory {
    /// The one that was idle for longest comes first, as in the pool of sqlx.
    idle: Mutex<VecDeque<PgConnection>>,
}

impl Library for Advisory {
    type Lock = PgAdvisoryLock;
    type Held = PgAdvisoryLockGuard<PgConnection>;

    async fn connect(url: &str, _: Passes, callers: usize) -> Outcome<Self> {
        let connecting = (0..callers).map(|_| PgConnection::connect(url));
        let connected = futures::stream::iter(connecting).buffer_unordered(AT_ONCE);
        let connected: Vec<_> = connected.collect().await;
        let idle: Result<VecDeque<_>, _> = connected.into_iter().collect();
        let idle = Mutex::new(idle.map_err(told("connect"))?);
        Ok(Self { idle })
    }

    fn lock(&self, key: &str) -> PgAdvisoryLock {
        PgAdvisoryLock::new(key)
    }

    async fn acquire(&self, lock: &PgAdvisoryLock) -> Outcome<Self::Held> {
        let idle = self.idle.lock().expect("no panic").pop_front();
        let connection = idle.ok_or("a task has no connection")?;
        lock.acquire(connection).await.map_err(told("acquire"))
    }

    async fn release(&self, held: Self::Held) -> Outcome<()> {
        let connection = held.release_now().await.map_err(told("release"))?;
        self.idle.lock().expect("no panic").push_back(connection);
        Ok(())
    }
}
