//! A nested lock asks the store for nothing, and stands in nobody's way.

use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use lockstream::store::MemoryStore;
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use tokio::time::{Instant, timeout};

use crate::assert_waited_in_vain;
use crate::scene::{BOUND, KEY, Memory, Scene, World, ms};

/// Three deep, in every form, many times.
async fn nest(locks: &LockRegistry) {
    let nested = locks.obtain(KEY).reentrant();
    let work = async {
        for _ in 0..10 {
            let rows = stream::iter(0..3).then(async |_| {
                nested.lease().await.unwrap().release().await.unwrap();
                assert!(nested.acquire().await.unwrap());
                nested.release().await.unwrap();
                nested
                    .with_lease(async |lease| lease.token())
                    .await
                    .unwrap()
            });
            let rows = StreamLockExt::with_lock(rows, &nested);
            assert_eq!(rows.count().with_lock(&nested).await.unwrap(), 3);
        }
    };
    work.with_lock(locks.obtain(KEY)).await.unwrap();
}

/// A round trip to the store takes a while here: one pair is all that there is.
#[tokio::test(start_paused = true)]
async fn nested_locks_take_no_time() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    store.set_latency(ms(10));
    let begin = Instant::now();
    nest(&locks).await;
    assert_eq!(begin.elapsed(), ms(20));
    assert_eq!((locks.in_use(), store.keys()), (0, 0));
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn nested_locks_cost_no_call() {
    let scene = Scene::new(crate::scene::Redis::default()).await;
    let server = &scene.world.0;
    scene.settles().await;
    drop(scene.lock.lease().await.unwrap().release().await);
    server.reset_stats();
    nest(&scene.here).await;
    let calls = server.calls("evalsha") + server.calls("eval");
    assert_eq!(calls, 2, "{:?}", server.all_calls());
    scene.settles().await;
}

/// Others wait in the queue, in this process and in another: who is inside goes past them, needs no
/// wait for it, and they are served when the outermost is done.
pub(crate) async fn others_in_the_queue_are_not_in_the_way<W: World>(s: &Scene<W>) {
    let at_once = s.nested.clone().wait(Duration::ZERO);
    let (mut here, mut there) = (s.lock.lease(), s.there.obtain(KEY).lease());
    let outer = s.lock.with_lease(async |lease| {
        // Two in the queue; the one of this process is not told of what it is polled inside of.
        assert!(futures::poll!(&mut here).is_pending());
        assert!(futures::poll!(&mut there).is_pending());
        let look = async || s.lock.inspect().await.unwrap().waiting;
        timeout(BOUND, async { while look().await == 0 {} })
            .await
            .expect("it queues");
        for _ in 0..3 {
            let inner = at_once.lease().now_or_never().expect("at once");
            assert_eq!(inner.unwrap().token(), lease.token());
            assert!(
                at_once
                    .acquire_once()
                    .now_or_never()
                    .expect("at once")
                    .unwrap()
            );
            at_once.release().await.unwrap();
            assert_eq!(s.inmost().with_lock(&at_once).await.unwrap(), lease.token());
        }
        assert!(futures::poll!(&mut here).is_pending());
        assert!(futures::poll!(&mut there).is_pending());
        lease.token()
    });
    let token = outer.await.unwrap();
    let serve = async |waiter| {
        let lease: Result<lockstream::Lease, LockError> = waiter;
        let lease = lease.unwrap();
        assert!(lease.token() > token);
        lease.release().await.unwrap();
    };
    let served = async {
        tokio::join!(here.then(serve), there.then(serve));
    };
    timeout(BOUND, served).await.expect("they are served");
}

/// `max_waiters` counts who waits; who is inside does not.
pub(crate) async fn who_shares_is_no_waiter<W: World>(s: &Scene<W>) {
    let narrow = Scene::with(Memory::default(), |builder| builder.max_waiters(1)).await;
    let mut waiter = narrow.lock.lease();
    let outer = narrow.lock.with_lease(async |_| {
        assert!(futures::poll!(&mut waiter).is_pending());
        let full = narrow.here.obtain(KEY).lease().await;
        assert!(matches!(full, Err(LockError::QueueFull { .. })), "{full:?}");
        narrow.inmost().with_lock(&narrow.nested).await.unwrap();
    });
    outer.await.unwrap();
    waiter.await.unwrap().release().await.unwrap();
    narrow.settles().await;
    assert_waited_in_vain!(
        s.nested
            .lease()
            .with_lock(s.there.obtain(KEY))
            .await
            .unwrap()
    );
}
