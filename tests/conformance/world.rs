//! A world: one store, the processes on it, and what may befall them.

use std::fmt::{Debug, Display};
use std::future::Future;
use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::{Lease, Lock, LockError, LockRegistry};
use tokio::time::Instant;

use crate::watch::{Builder, Watch};

/// One store of the case's own. Each registry made on it is a process to the others.
///
/// The cases take it as `&dyn World`, so that each is compiled once and not for every store.
pub(crate) trait World: Send + Sync + 'static {
    /// An empty store that nobody uses yet. Needs no runtime.
    fn new() -> Self
    where
        Self: Sized;

    /// Whether time stands still while anything runs.
    fn is_paused(&self) -> bool {
        false
    }

    /// How late something may come about that a timer or another process causes.
    fn late(&self) -> Duration {
        LATE_AT_A_SERVER
    }

    /// How many leases a case may take one after the other, in a minute on a busy machine.
    fn many(&self) -> usize {
        10_000
    }

    /// The shortest that a lease is to last.
    fn brief(&self) -> Duration {
        ms(60)
    }

    /// Some leases of the case last for so long, and none for less. Without this they last for more than 1.2 s, and nobody
    /// is given longer than that before they begin.
    fn leases_last(&self, _shortest: Duration) {}

    /// Sees what happens in every registry of the case.
    fn watch(&self) -> &Watch;

    /// A registry to be. Leases last 8 s, callers wait for a minute, and so long may answers take.
    fn builder(&self) -> BoxFuture<'_, Builder>;

    /// [`builder`](Self::builder) without any I/O, and without a runtime.
    fn lazy_builder(&self) -> Builder;

    /// The store cannot be reached from now on, or can be again.
    fn set_offline(&self, offline: bool);

    /// Answers take this long from now on.
    fn set_latency(&self, latency: Duration);

    /// Takes the key away from whoever has it, who is not told.
    fn expire(&self, key: &str);

    /// A process took the key for `ttl` and died at once.
    fn crashed_holder(&self, key: &str, ttl: Duration);

    /// A process queued for the key, which is held, and died.
    fn dead_waiter(&self, key: &str);

    /// What is in the store, but for the fence: locks and queues.
    fn leftovers(&self) -> Vec<String>;

    /// How many commands the store has had from registries; always 0 where nobody counts.
    fn commands(&self) -> u64;

    /// A registry whose line to the store stands.
    fn registry(&self) -> BoxFuture<'_, LockRegistry> {
        Box::pin(async {
            let registry = self.builder().await.build().unwrap();
            registry.obtain("anything").inspect().await.unwrap();
            registry
        })
    }
}

impl dyn World {
    pub(crate) async fn registries<const N: usize>(&self) -> [LockRegistry; N] {
        let mut registries = Vec::new();
        for _ in 0..N {
            registries.push(self.registry().await);
        }
        registries.try_into().expect("as many as were pushed")
    }
}

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// For what a renewal brings about, or the end of a lease: a little more than [`TTL`].
pub(crate) const BOUND: Duration = Duration::from_secs(10);

/// For what must come about sooner or later, on a slow machine, too. Leases, and keys that are kept, run out before that or
/// last for a minute: nothing comes about by the end of these.
pub(crate) const EVENTUALLY: Duration = Duration::from_secs(30);

/// How long callers wait, and answers may take, unless a case is about that: of two hundred callers on a slow machine the
/// last one, too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// How long a lease of [`World::builder`] lasts: no machine that stands still for a moment takes it away.
pub(crate) const TTL: Duration = ms(8000);

/// Ends before [`TTL`] does, so what comes within it did not come by a lease's end.
pub(crate) const SOON: Duration = ms(5000);

/// How late something may be where a real server has a part in it, on a machine that has other work. That nothing is late
/// by itself is seen in memory, on a clock that stands still.
pub(crate) const LATE_AT_A_SERVER: Duration = ms(2000);

/// A store that was away is connected to again by then, on a slow machine, too: the pauses between the first attempts are
/// at most 0.2, 1 and 2 s (G1). Ends before [`TTL`] does, and before who waits asks by itself (W2).
pub(crate) const BACK: Duration = ms(7_500);

/// Waits until `condition` holds, on tokio's clock.
#[track_caller]
pub(crate) fn eventually(
    what: impl Display,
    mut condition: impl AsyncFnMut() -> bool,
) -> impl Future<Output = ()> {
    let place = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        while !condition().await {
            assert!(
                begin.elapsed() < EVENTUALLY,
                "{place}: not within {EVENTUALLY:?}: {what}"
            );
            tokio::time::sleep(ms(2)).await;
        }
    }
}

/// Waits until so many registries stand in the store's queue for the lock's key.
#[track_caller]
pub(crate) fn waiting(lock: &Lock, n: u64) -> impl Future<Output = ()> {
    eventually(
        format!("{n} in the queue of {}", lock.key()),
        async move || lock.inspect().await.unwrap().waiting == n,
    )
}

/// Waits until the store says that nobody has the lock.
#[track_caller]
pub(crate) fn free(lock: &Lock) -> impl Future<Output = ()> {
    // An attempt to connect that fails tells any waiter for it.
    eventually(format!("{} is free", lock.key()), async move || {
        lock.inspect()
            .await
            .is_ok_and(|seen| seen.owner().is_none())
    })
}

/// Waits until the store answers a registry in its response time-out. The first answer comes with the connection, and on a
/// slow machine later than a short time-out allows.
pub(crate) fn connected(registry: &LockRegistry) -> impl Future<Output = ()> {
    let lock = registry.obtain("first");
    eventually("the store answers", async move || {
        lock.inspect().await.is_ok()
    })
}

/// Waits until nothing is left in the store.
#[track_caller]
pub(crate) fn empty(w: &dyn World) -> impl Future<Output = ()> {
    let place = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        loop {
            let left = w.leftovers();
            if left.is_empty() {
                return;
            }
            assert!(
                begin.elapsed() < EVENTUALLY,
                "{place}: left in the store: {left:?}"
            );
            tokio::time::sleep(ms(2)).await;
        }
    }
}

/// Waits until nothing is in use in the registry.
#[track_caller]
pub(crate) fn idle(registry: &LockRegistry) -> impl Future<Output = ()> {
    eventually("the registry is idle", async move || registry.in_use() == 0)
}

/// Whether the store has a holder for the lock.
pub(crate) async fn is_held(lock: &Lock) -> bool {
    lock.inspect().await.unwrap().owner().is_some()
}

/// Polls a future once.
pub(crate) async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match futures::poll!(future) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

/// Fails unless what began at `begin` took `expected`, or up to `late` more.
///
/// Tokio's timers tick in whole milliseconds, so one more on either side is nobody's fault.
#[track_caller]
pub(crate) fn assert_took(begin: Instant, expected: Duration, late: Duration) {
    let took = begin.elapsed();
    assert!(
        took + ms(1) >= expected && took <= expected + late + ms(1),
        "took {took:?} instead of {expected:?}, at most {late:?} late"
    );
}

/// [`assert_took`] for a key that is kept. The key's time starts between `begin` and `done`, the moment at which its work
/// was done: how long the store took in between does not count.
#[track_caller]
pub(crate) fn assert_was_kept(begin: Instant, done: Instant, expected: Duration, late: Duration) {
    let (most, least) = (begin.elapsed(), done.elapsed());
    assert!(
        most + ms(1) >= expected && least <= expected + late + ms(1),
        "took {least:?} to {most:?} instead of {expected:?}, at most {late:?} late"
    );
}

/// Releases a brief lease. Where an answer takes long it may be over by then, and nowhere else.
pub(crate) async fn release_brief(w: &dyn World, lease: Lease) {
    let deadline = lease.deadline();
    match lease.release().await {
        Ok(()) => {}
        Err(LockError::Lost { .. } | LockError::Store { .. })
            if !w.is_paused() && Instant::now() + ms(50) >= deadline => {}
        Err(error) => panic!("{error}"),
    }
}

/// Fails unless an error is of the variant and names the key.
#[macro_export]
macro_rules! assert_err {
    ($result:expr, $variant:ident, $key:expr) => {
        match $result {
            Err(error @ lockstream::LockError::$variant { .. }) => {
                assert_eq!(error.key(), $key);
                error
            }
            other => panic!(concat!("not Err(", stringify!($variant), "): {:?}"), other),
        }
    };
}

/// The error's fields that an assertion looks at.
pub(crate) fn waited(error: &LockError) -> Duration {
    match error {
        LockError::NotAcquired { waited, .. } => *waited,
        other => panic!("{other:?} tells of no wait"),
    }
}

#[track_caller]
pub(crate) fn ok<T, E: Debug>(result: Result<T, E>) -> T {
    result.unwrap()
}
