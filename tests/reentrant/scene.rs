//! A store, two processes on it, and a lock.

use std::fmt::Display;
use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{Lock, LockRegistry, LockRegistryBuilder, Renewal, Token};
use tokio::time::{sleep, timeout};

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// For what must come about sooner or later; far below any lease that is not meant to end.
pub(crate) const BOUND: Duration = Duration::from_secs(10);

/// For what must not come about.
pub(crate) const BRIEF: Duration = ms(60);

/// A ttl for leases that are to end under their work: over soon, but not before a slow machine is there.
pub(crate) const SHORT: Duration = ms(600);

pub(crate) const KEY: &str = "k";

pub(crate) trait World: Send + Sync + 'static {
    fn builder(&self) -> impl Future<Output = LockRegistryBuilder>;

    /// What is in the store, but for the fence.
    fn leftovers(&self) -> usize;
}

#[derive(Default)]
pub(crate) struct Memory(pub(crate) MemoryStore);

impl World for Memory {
    async fn builder(&self) -> LockRegistryBuilder {
        LockRegistry::builder(self.0.clone())
    }

    fn leftovers(&self) -> usize {
        self.0.keys()
    }
}

#[cfg(feature = "redis")]
pub(crate) struct Redis(pub(crate) crate::support::RedisServer);

#[cfg(feature = "redis")]
impl Default for Redis {
    fn default() -> Self {
        Self(crate::support::RedisServer::start())
    }
}

#[cfg(feature = "redis")]
impl World for Redis {
    async fn builder(&self) -> LockRegistryBuilder {
        let store = lockstream::store::RedisStore::builder(self.0.url());
        let store = store.connect_timeout(crate::support::PATIENCE).connect();
        LockRegistry::builder(store.await.unwrap())
    }

    fn leftovers(&self) -> usize {
        let keys = self.0.keys("*");
        keys.iter().filter(|key| !key.contains("~fence")).count()
    }
}

pub(crate) struct Scene<W> {
    pub(crate) world: W,
    pub(crate) here: LockRegistry,
    /// Another process.
    pub(crate) there: LockRegistry,
    /// What is around.
    pub(crate) lock: Lock,
    /// What is inside.
    pub(crate) nested: Lock,
}

impl<W: World> Scene<W> {
    pub(crate) async fn new(world: W) -> Self {
        Self::with(world, |builder| builder).await
    }

    pub(crate) async fn with(
        world: W,
        set: impl Fn(LockRegistryBuilder) -> LockRegistryBuilder,
    ) -> Self {
        let registry = async || {
            let builder = world.builder().await;
            let builder = builder
                .ttl(Duration::from_secs(60))
                .renewal(Renewal::off())
                .wait(BOUND)
                .response_timeout(BOUND);
            set(builder).build().unwrap()
        };
        let (here, there) = (registry().await, registry().await);
        let lock = here.obtain(KEY);
        // A nested wait fails soon.
        let nested = here.obtain(KEY).wait(BRIEF).reentrant();
        Self {
            world,
            here,
            there,
            lock,
            nested,
        }
    }

    /// Whether somebody has the lock, as another process sees it.
    pub(crate) async fn is_busy(&self) -> bool {
        is_busy(&self.there).await
    }

    /// The end of what is nested: the lock is held, also after some polls.
    pub(crate) async fn inmost(&self) -> Token {
        assert!(self.is_busy().await);
        tokio::task::yield_now().await;
        assert!(self.is_busy().await);
        let lease = self.nested.lease().await.unwrap();
        let token = lease.token();
        lease.release().await.unwrap();
        assert!(self.is_busy().await, "the inmost freed it");
        token
    }

    /// Waits until another process has had the lock, and nothing is left of anything.
    pub(crate) async fn settles(&self) {
        let next = timeout(BOUND, self.there.obtain(KEY).lease()).await;
        let next = next.expect("nobody has the lock any more").unwrap();
        next.release().await.unwrap();
        eventually("nothing is left", || {
            (self.here.in_use(), self.there.in_use()) == (0, 0) && self.world.leftovers() == 0
        })
        .await;
    }
}

pub(crate) async fn is_busy(there: &LockRegistry) -> bool {
    match there.obtain(KEY).lease_once().await.unwrap() {
        None => true,
        Some(lease) => {
            lease.release().await.unwrap();
            false
        }
    }
}

/// Waits until `condition` holds, on tokio's clock.
pub(crate) async fn eventually(what: impl Display, mut condition: impl FnMut() -> bool) {
    let wait = async {
        while !condition() {
            sleep(ms(2)).await;
        }
    };
    assert!(timeout(BOUND, wait).await.is_ok(), "never: {what}");
}

/// Fails unless the lock was not available.
#[macro_export]
macro_rules! assert_waited_in_vain {
    ($result:expr) => {
        match $result {
            Err(lockstream::LockError::NotAcquired { .. }) => (),
            other => panic!("{}: had, or failed: {other:?}", stringify!($result)),
        }
    };
}
