//! What a registry tells of its locks and of its store.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::LockRegistry;
use crate::base::StoreError;
use crate::base::operation::operation;
use crate::engine::{Engine, FORKED};
use crate::store::contract::Session;

impl LockRegistry {
    /// The events of this registry from now on: waits, acquisitions, ends of leases, and outages of the store.
    ///
    /// A stream of [`LockEvent`](crate::LockEvent)s in order. Each reader gets all of them. The last 1,024 events are
    /// stored for slow readers, in less than 100 KiB for all of them together. A reader that is slower gets
    /// [`LockEvent::Missed`](crate::LockEvent::Missed) with the number of lost events, and continues with the oldest
    /// stored one. Without a reader no events are stored, and they cost next to nothing.
    ///
    /// The stream does not keep the registry alive. It ends after the last event of a registry that was shut down or
    /// dropped. Other registries on the same store have their own events.
    ///
    /// With the feature `metrics` the events are also counted for the recorder of the `metrics` facade, by prefix and
    /// not by key, since there may be any number of keys; acquisitions and their waits by mode, too (`exclusive`, `shared`,
    /// `permit`), and lost leases by their [cause](crate::LossCause) (`fixed_ttl`, `store_unreachable` and so on): the gauges
    /// `lockstream_waiting` and `lockstream_held`; the counters `lockstream_acquired_total`,
    /// `lockstream_passed_total`, `lockstream_renewed_total`,
    /// `lockstream_renewal_unknown_total`, `lockstream_renewal_late_total`, `lockstream_lost_total`,
    /// `lockstream_given_up_total`, `lockstream_queue_full_total` and `lockstream_store_down_total`; the histograms
    /// `lockstream_wait_seconds` and `lockstream_hold_seconds`. Install the recorder before the first registry is
    /// built, or it does not get their descriptions.
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream, or a `next()` on it, loses no event for other readers. The next `next()` gets the next
    /// event.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{FutureLockExt, LockEvent, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let mut events = locks.events();
    /// async {}.with_lock(locks.obtain("till")).await?;
    /// locks.shutdown().await;
    /// while let Some(event) = events.next().await {
    ///     match event {
    ///         LockEvent::Acquired { key, token, waited, .. } => println!("{key} #{token} after {waited:?}"),
    ///         LockEvent::Lost { key, token, .. } => eprintln!("{key} #{token} was lost"),
    ///         LockEvent::Missed { count, .. } => eprintln!("{count} events were missed"),
    ///         other => println!("{other}"),
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub fn events(&self) -> crate::observe::Events {
        self.engine.events()
    }

    /// [`events`](Self::events) without a bound: a test that reads at the end misses nothing.
    #[cfg(feature = "test-util")]
    #[doc(hidden)]
    pub fn every_event(&self) -> std::sync::mpsc::Receiver<crate::observe::LockEvent> {
        self.engine.every_event()
    }

    /// The leases and waiters of this registry now, and since when.
    ///
    /// It sends nothing: leases of other processes are not in it. It is made under the registry's own lock, and takes
    /// time proportional to the keys in use and the waiters.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("till").lease().await?;
    /// for key in locks.snapshot().keys {
    ///     for held in &key.held {
    ///         assert_eq!((&*key.key, held.token), ("till", lease.token()));
    ///         println!("{} is held for {:?}", key.key, held.since.elapsed());
    ///     }
    /// }
    /// # lease.release().await
    /// # }
    /// ```
    #[must_use]
    pub fn snapshot(&self) -> crate::observe::Snapshot {
        self.engine.snapshot()
    }

    /// Lists the locks in the store whose keys begin with `prefix` and that somebody, of any registry, holds or waits
    /// for; with an empty prefix, all under this registry's own [prefix](crate::LockRegistryBuilder::prefix).
    ///
    /// A stream of [`ScannedLock`](crate::ScannedLock)s in no order, each once. It reads page by page as it is polled,
    /// so it needs no memory but for the keys that it has yielded, and holds up nobody. It is no snapshot: a lock that
    /// is taken or released meanwhile may be in it or not. Each item was true when the store told it.
    ///
    /// It has a connection of its own while it runs, on a cluster to each primary in turn. On Redis it needs the right
    /// to `scan`, which looks at all names of the database, and in PostgreSQL that to `scan_1`. For people and
    /// monitoring, not for programs that want to know whether a key is free: those acquire it.
    ///
    /// # Errors
    ///
    /// [`LockError::Store`](crate::LockError::Store) with a key if that key could not be read, say since another
    /// program's value has its name: the stream goes on. With `prefix` in place of a key if the store could not list
    /// its keys: the stream ends. A quorum never can. [`LockError::Closed`](crate::LockError::Closed).
    ///
    /// # Cancel safety
    ///
    /// It changes nothing. A `next()` may be dropped and called again.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::TryStreamExt;
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let lease = locks.obtain("order:42").lease().await?;
    /// let other = locks.obtain("user:7").lease().await?;
    /// let found: Vec<_> = locks.scan("order:").try_collect().await?;
    /// assert_eq!(found.len(), 1);
    /// assert_eq!(&*found[0].key, "order:42");
    /// assert_eq!(found[0].inspection.holders.len(), 1);
    /// # lease.release().await?; other.release().await
    /// # }
    /// ```
    pub fn scan(&self, prefix: impl AsRef<str>) -> crate::handle::scan::Scan {
        crate::handle::scan::Scan::new(self.engine.clone(), prefix.as_ref().into())
    }

    /// Asks the store one small question, as a lock would: for readiness probes. Yields how long the answer took.
    ///
    /// It uses the connections of the registry, and makes one only if there is none, as the first lock does. So it is true
    /// also while the server refuses further connections. A question is a call that goes with renewals: it writes nothing,
    /// and needs no right that locks do not. On one server it is one call; on a cluster one to each primary that this
    /// registry uses now, or to any if it uses none; on a quorum one to each node, and a majority must answer. A memory
    /// store answers at once. A connection that is asked more often than once a minute stays open.
    ///
    /// [`check`](Self::check) looks at more, and costs more.
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if there is no answer within the response time-out, to which the first connection
    /// adds its `connect_timeout`; if a server refuses; if the registry was shut down. While the store is down it is the
    /// reason of that, as in [`LockEvent::StoreDown`](crate::LockEvent::StoreDown).
    ///
    /// # Cancel safety
    ///
    /// It changes nothing, and may be dropped at any time. With a server that is gone it takes up to the response
    /// time-out, 1 s: give a probe more time than that (Kubernetes: `timeoutSeconds: 2`), or put a time-out around it.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::StoreError> {
    /// let locks = LockRegistry::in_memory();
    /// // GET /ready
    /// let (status, body) = match locks.ping().await {
    ///     Ok(took) => (200, format!("the lock store answered in {took:?}")),
    ///     Err(error) => (503, error.to_string()),
    /// };
    /// # assert_eq!(status, 200, "{body}");
    /// # Ok(()) }
    /// ```
    pub fn ping(&self) -> Ping {
        let engine = self.engine.clone();
        Ping::new(async move {
            let session = session(&engine)?;
            let began = Instant::now();
            let within = engine.settings.response_timeout + session.connects_within();
            let answered = session.ping(within).await;
            // What it waited for may be the pause after a failed attempt to connect.
            answered.map_err(|error| engine.away().unwrap_or(error))?;
            Ok(began.elapsed())
        })
    }

    /// Looks thoroughly whether the store can be used, and what it is: before anything else on a new machine, at a start or
    /// a deploy. For readiness probes, which are many, there is [`ping`](Self::ping).
    ///
    /// It connects to each server anew: of a cluster to all primaries, of a quorum to all nodes. Each must accept the
    /// user, take writes, and allow what every registry needs. What not everybody needs is told in the
    /// [`Check`](crate::Check): missing rights, servers that cannot push. No lock is touched, and the registry's own
    /// connection is not. `docs/operations.md` counts what it costs.
    ///
    /// It takes one `connect_timeout` and one response time-out at most: the servers are looked at side by side.
    ///
    /// # Errors
    ///
    /// [`StoreError`](crate::StoreError) if the store cannot be used: a server that cannot be reached in that time (of a
    /// quorum, if no majority is left), that refuses, that takes no writes, or whose PostgreSQL schema is missing. Its text
    /// says why, and [`is_retryable`](crate::StoreError::is_retryable) whether that may pass by itself. Also if the registry
    /// was shut down.
    ///
    /// # Cancel safety
    ///
    /// It changes nothing. Dropped, it closes its connections.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::StoreError> {
    /// let locks = LockRegistry::in_memory();
    /// let check = locks.check().await?;
    /// println!("{check}");
    /// assert!(check.shares && check.servers[0].no_push.is_none());
    /// # Ok(()) }
    /// ```
    pub fn check(&self) -> CheckStore {
        let engine = self.engine.clone();
        CheckStore::new(async move {
            let session = session(&engine)?;
            session.check().await
        })
    }
}

/// Through which the store is asked, or why it cannot be.
fn session(engine: &Engine) -> Result<Arc<dyn Session>, StoreError> {
    if !engine.is_of_this_process() {
        return Err(StoreError::lasting(format!("the registry {FORKED}")));
    }
    let session = engine.session();
    session.ok_or_else(|| StoreError::lasting("the registry is closed"))
}

operation! {
    /// Future of [`LockRegistry::check`].
    #[must_use = "futures do nothing unless polled"]
    pub struct CheckStore(Operation<Result<crate::base::Check, crate::base::StoreError>>);
}

operation! {
    /// Future of [`LockRegistry::ping`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Ping(Operation<Result<Duration, crate::base::StoreError>>);
}
