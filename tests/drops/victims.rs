use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::LocalBoxFuture;
use futures::{FutureExt, Stream, StreamExt};
use lockstream::{FutureLockExt, Lock, LockError, LockRegistry, StreamLockExt};

/// What a victim locks. Each excludes an exclusive holder of the key.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Exclusive,
    Reader,
    Permit,
    /// Another key first, and then this one.
    Group,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Exclusive, Self::Reader, Self::Permit, Self::Group];

    pub(crate) fn lock(self, locks: &LockRegistry, key: &str) -> Lock {
        match self {
            Self::Exclusive => locks.obtain(key),
            Self::Reader => locks.obtain(key).shared(),
            Self::Permit => locks.obtain(key).permits_of(3, 2),
            Self::Group => locks.obtain_all([key, &format!("! {key}")]),
        }
    }
}

/// A future to be dropped; whatever it yields is dropped after it.
pub(crate) type Victim = LocalBoxFuture<'static, Box<dyn Any>>;

/// What is locked: only one may stand on it.
#[derive(Clone, Default)]
pub(crate) struct Floor(Arc<AtomicBool>);

impl Floor {
    pub(crate) fn enter(&self) -> Standing {
        let taken = self.0.swap(true, Ordering::SeqCst);
        assert!(!taken, "two stand on what is locked");
        Standing(self.clone())
    }
}

pub(crate) struct Standing(Floor);

impl Drop for Standing {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::SeqCst);
    }
}

/// Work with several awaits.
async fn work(floor: Floor) -> u8 {
    let _standing = floor.enter();
    tokio::time::sleep(Duration::from_millis(2)).await;
    tokio::task::yield_now().await;
    tokio::time::sleep(Duration::from_millis(2)).await;
    7
}

async fn try_work(floor: Floor) -> Result<u8, LockError> {
    Ok(work(floor).await)
}

fn rows(floor: Floor) -> impl Stream<Item = u8> {
    async_stream::stream! {
        let _standing = floor.enter();
        yield 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
        yield 2;
        tokio::task::yield_now().await;
        yield 3;
    }
}

fn try_rows(floor: Floor) -> impl Stream<Item = Result<u8, LockError>> {
    rows(floor).map(Ok)
}

fn erase<F: Future<Output: 'static> + 'static>(future: F) -> Victim {
    future
        .map(|output| Box::new(output) as Box<dyn Any>)
        .boxed_local()
}

fn drain<S: Stream<Item: 'static> + 'static>(stream: S) -> Victim {
    erase(stream.collect::<Vec<_>>())
}

/// Makes a future that wants the lock.
pub(crate) type Make = fn(&Lock, Floor) -> Victim;

/// Every public future and stream that acquires, by name.
pub(crate) const ENTERING: &[(&str, Make)] = &[
    ("acquire_once", |lock, _| erase(lock.acquire_once())),
    ("acquire", |lock, _| erase(lock.acquire())),
    ("acquire_within", |lock, _| {
        erase(lock.acquire_within(Duration::from_secs(5)))
    }),
    ("acquire, release", |lock, _| {
        let lock = lock.clone();
        erase(async move { (lock.acquire().await, lock.release().await) })
    }),
    ("lease", |lock, _| erase(lock.lease())),
    ("lease_within", |lock, _| {
        erase(lock.lease_within(Duration::from_secs(5)))
    }),
    ("lease.or_skip", |lock, _| erase(lock.lease().or_skip())),
    ("lease_once", |lock, _| erase(lock.lease_once())),
    ("lease, release", |lock, _| {
        let lease = lock.lease();
        erase(async move { lease.await?.release().await })
    }),
    ("inspect", |lock, _| erase(lock.inspect())),
    ("with_lock", |lock, floor| {
        erase(FutureLockExt::with_lock(work(floor), lock))
    }),
    ("with_lock.or_skip", |lock, floor| {
        erase(FutureLockExt::with_lock(work(floor), lock).or_skip())
    }),
    ("try_with_lock", |lock, floor| {
        erase(FutureLockExt::try_with_lock(try_work(floor), lock))
    }),
    ("try_with_lock.or_skip", |lock, floor| {
        erase(FutureLockExt::try_with_lock(try_work(floor), lock).or_skip())
    }),
    ("with_lease", |lock, floor| {
        erase(lock.with_lease(|_| work(floor)))
    }),
    ("with_lease.or_skip", |lock, floor| {
        erase(lock.with_lease(|_| work(floor)).or_skip())
    }),
    ("try_with_lease", |lock, floor| {
        erase(lock.try_with_lease(|_| try_work(floor)))
    }),
    ("try_with_lease.or_skip", |lock, floor| {
        erase(lock.try_with_lease(|_| try_work(floor)).or_skip())
    }),
    ("stream with_lock", |lock, floor| {
        drain(StreamLockExt::with_lock(rows(floor), lock))
    }),
    ("stream with_lock.or_skip", |lock, floor| {
        drain(StreamLockExt::with_lock(rows(floor), lock).or_skip())
    }),
    ("stream try_with_lock", |lock, floor| {
        drain(StreamLockExt::try_with_lock(try_rows(floor), lock))
    }),
    ("stream try_with_lock.or_skip", |lock, floor| {
        drain(StreamLockExt::try_with_lock(try_rows(floor), lock).or_skip())
    }),
    ("with_lease_stream", |lock, floor| {
        drain(lock.with_lease_stream(|_| rows(floor)))
    }),
    ("with_lease_stream.or_skip", |lock, floor| {
        drain(lock.with_lease_stream(|_| rows(floor)).or_skip())
    }),
    ("try_with_lease_stream", |lock, floor| {
        drain(lock.try_with_lease_stream(|_| try_rows(floor)))
    }),
    ("try_with_lease_stream.or_skip", |lock, floor| {
        drain(lock.try_with_lease_stream(|_| try_rows(floor)).or_skip())
    }),
];
