//! Leases that are prolonged while they are held.

use std::future::pending;
use std::sync::Arc;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, Renewal, StreamLockExt};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::assert_err;
use crate::world::{World, assert_took, free, idle, is_held, ms, release_brief};

pub(crate) async fn a_renewed_lease_is_held_for_three_ttls_and_still_ours(w: &dyn World) {
    let [here, there] = w.registries().await;
    // Long enough that a busy machine is never late with three renewals in a row.
    let ttl = ms(3000);
    let lock = here.obtain("k").ttl(ttl).renewal(Renewal::watchdog());
    let lease = lock.lease().await.unwrap();
    let other = there.obtain("k");
    assert!(!other.acquire_within(3 * ttl).await.unwrap());
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    assert!(other.acquire_within(ms(500)).await.unwrap());
}

pub(crate) async fn work_longer_than_its_ttl_keeps_its_lock(w: &dyn World) {
    // Long enough that a busy machine is never late with a renewal.
    let builder = w.builder().await.ttl(ms(3000));
    let registry = builder.renewal(Renewal::watchdog()).build().unwrap();
    let slow = async {
        sleep(ms(4000)).await;
        7
    };
    assert_eq!(slow.with_lock((&registry, "k")).await.unwrap(), 7);
    // A ttl of its own is not renewed, whatever the registry does.
    let fixed = registry.obtain("k").ttl(ms(500));
    let begin = Instant::now();
    assert_err!(pending::<()>().with_lock(fixed).await, Lost, "k");
    assert_took(begin, ms(493), w.late());

    // A stream is work, too: for two ttls, and between its items.
    let other = w.registry().await.obtain("k");
    let renewed = registry.obtain("k").ttl(ms(3000));
    let rows = stream::iter(0..20).then(async |row| {
        sleep(ms(300)).await;
        row
    });
    let mut rows = Box::pin(rows.with_lock(renewed.renewal(Renewal::watchdog())));
    for expected in 0..20 {
        assert_eq!(rows.next().await.unwrap().unwrap(), expected);
        assert!(!other.acquire_once().await.unwrap());
    }
    assert!(rows.next().await.is_none());
}

pub(crate) async fn at_most_so_many_renewals(w: &dyn World) {
    let registry = w.registry().await;
    let twice = Renewal::watchdog().max_renewals(2);
    let lock = registry.obtain("k").ttl(ms(3000)).renewal(twice);
    let begin = Instant::now();
    let lease = lock.lease().await.unwrap();
    assert!(matches!(lease.lost().await, LockError::Lost { .. }));
    // Renewed at 1,000 and 2,000 ms, and over a whole ttl later.
    assert_took(begin, ms(2000 + 2968), w.late());
}

/// The key is gone, or another's: the holder knows at the next renewal, long before its deadline. Work is dropped then.
pub(crate) async fn a_renewal_finds_the_loss(w: &dyn World) {
    let registry = w.registry().await;
    let renewed = |key| {
        let lock = registry.obtain(key).ttl(ms(6000));
        lock.renewal(Renewal::watchdog())
    };
    let lease = renewed("k").lease().await.unwrap();
    let guard = Arc::new(());
    let inside = guard.clone();
    let (tells, mut runs) = oneshot::channel();
    let work = async move {
        let _inside = inside;
        let _ = tells.send(());
        pending::<()>().await;
    };
    let mut work = Box::pin(work.with_lock(renewed("work")));
    // That its key is there says less: an acquisition that replicas have not confirmed would be begun anew.
    tokio::select! {
        ended = &mut work => panic!("{ended:?}"),
        told = &mut runs => told.unwrap(),
    }
    let begin = Instant::now();
    w.expire("k");
    w.expire("work");
    let (lost, ended) = tokio::join!(lease.lost(), work);
    assert!(lost.is_lost());
    assert!(begin.elapsed() <= ms(2000) + w.late());
    assert_err!(lease.release().await, Lost, "k");
    assert_err!(ended, Lost, "work");
    assert_eq!(Arc::strong_count(&guard), 1, "the work outlived its lease");
}

/// Nothing is prolonged after its release, however the two cross.
pub(crate) async fn released_leases_are_not_renewed(w: &dyn World) {
    let registry = w.registry().await;
    let lock = registry.obtain("k").ttl(ms(900));
    let lock = lock.renewal(Renewal::watchdog());
    for round in 0..14 {
        let lease = lock.lease().await.unwrap();
        // The first renewal goes out at 300 ms.
        sleep(ms(293 + round)).await;
        if round % 2 == 0 {
            drop(lease);
        } else {
            release_brief(w, lease).await;
        }
    }
    free(&lock).await;
    idle(&registry).await;
    sleep(ms(350)).await;
    assert!(!is_held(&lock).await);
}
