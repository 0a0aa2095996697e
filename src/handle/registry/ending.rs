//! The end of a registry.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use super::LockRegistry;
use crate::base::operation::operation;
use crate::engine::Engine;

impl LockRegistry {
    /// Shuts the registry down. New callers, waiters and running work get
    /// [`LockError::Closed`](crate::LockError::Closed). Every lease is released, unless its key is to
    /// [stay](crate::OnFinish), and every ticket is withdrawn. Resolves when the store has confirmed
    /// that, after three response time-outs at the latest. What is left then expires.
    ///
    /// Work in a combinator, or of a task that awaits [`Lease::lost`](crate::Lease::lost), is dropped before its lease
    /// is released, so nobody else begins before it has ended. It has 100 ms for that (one response time-out, if that
    /// is less). A guard whose loss nobody awaits is released at once: release it yourself before. If the program ends
    /// before this future resolves, leases that are left last for their ttl.
    ///
    /// The shutdown begins at the first poll. A second shutdown does nothing.
    ///
    /// # Cancel safety
    ///
    /// Once polled, the shutdown goes on in the background if the future is dropped.
    pub fn shutdown(&self) -> Shutdown {
        Shutdown::new(shut_down(self.engine.clone()))
    }

    /// Refuses new callers, waits up to `within` for held leases to end by themselves, and then [shuts
    /// down](Self::shutdown). For a process that is to stop without cutting off work.
    ///
    /// New callers of all clones of this registry get [`LockError::Closed`](crate::LockError::Closed), and so do
    /// waiters, since no new turn begins. Leases are renewed as before, and work may still lock what it holds, by
    /// [`reentrant`](crate::Lock::reentrant). The work is not told: a service stops its own loops first.
    ///
    /// Resolves when the shutdown is done: as soon as nothing is held, or after `within` and the time of the shutdown.
    /// [`Duration::MAX`] waits as long as anything is held. A [`shutdown`](Self::shutdown) meanwhile ends the drain at
    /// once. Of two drains the one that ends first ends both.
    ///
    /// # Cancel safety
    ///
    /// The drain begins at the first poll. If it is dropped after that, the registry still refuses callers, and leases
    /// stay held until the next `drain` or `shutdown`.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::{FutureLockExt, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let locks = LockRegistry::in_memory();
    /// let lock = locks.obtain("report");
    /// let work = tokio::spawn(async { "sent" }.with_lock(&lock));
    /// # tokio::task::yield_now().await;
    /// // … at SIGTERM …
    /// locks.drain(Duration::from_secs(20)).await;
    /// assert_eq!(work.await??, "sent");
    /// assert!(lock.acquire_once().await.is_err_and(|error| error.is_closed()));
    /// # Ok(()) }
    /// ```
    pub fn drain(&self, within: Duration) -> Drain {
        let engine = self.engine.clone();
        Drain::new(async move {
            engine.drain();
            let _ = timeout(within, engine.idle()).await;
            shut_down(engine).await;
        })
    }
}

async fn shut_down(engine: Arc<Engine>) {
    let (grace, answered) = engine.close();
    if timeout_at(grace, engine.idle()).await.is_err() {
        // Not left to the timer, whose runtime may stand still. If the whole process did, what is
        // given back only now is to reach the store.
        engine.close();
        let soon = Instant::now() + engine.settings.response_timeout;
        let _ = timeout_at(answered.max(soon), engine.idle()).await;
    }
    engine.disconnect();
}

operation! {
    /// Future of [`LockRegistry::shutdown`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Shutdown(Operation<()>);
}

operation! {
    /// Future of [`LockRegistry::drain`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Drain(Operation<()>);
}
