//! What is left when nobody wants anything any more: nothing.

use futures::future::join_all;
use lockstream::FutureLockExt;
use tokio::time::Instant;

use crate::assert_err;
use crate::world::{World, assert_took, empty, idle, is_held, ms};

pub(crate) async fn idle_registries_hold_no_entries<W: World>(w: &W) {
    let registries: [_; 2] = w.registries().await;
    for registry in &registries {
        join_all((0..100).map(async |n| {
            let lock = registry.obtain(format!("key {n}")).wait(ms(20));
            let _ = async {}.with_lock(&lock).await;
            let _ = lock.acquire_once().await.unwrap();
            let _ = lock.release().await.unwrap();
        }))
        .await;
    }
    for registry in &registries {
        idle(registry).await;
    }
    empty(w).await;
}

/// What only another handle holds is not to be released.
pub(crate) async fn a_release_by_another_handle_harms_nothing<W: World>(w: &W) {
    let [here, there] = w.registries().await;
    let holder = here.obtain("k");
    assert!(holder.acquire().await.unwrap());
    let lease = here.obtain("guard").lease().await.unwrap();
    let others = [here.obtain("k"), there.obtain("k"), holder.clone()];
    for other in &others {
        assert!(!other.release().await.unwrap());
        assert!(!other.is_acquired());
    }
    let others = [here.obtain("guard"), there.obtain("guard")];
    for other in &others {
        assert!(!other.release().await.unwrap());
    }
    assert!(holder.is_acquired() && lease.is_valid());
    assert!(is_held(&holder).await);
    assert!(!there.obtain("k").acquire_once().await.unwrap());
    assert!(holder.release().await.unwrap());
    lease.release().await.unwrap();
}

/// A registry is at work as long as anything of it lives, and what is left behind is released.
pub(crate) async fn the_last_of_a_registry_gives_everything_back<W: World>(w: &W) {
    let [here, there] = w.registries().await;
    let lease = here.obtain("lease").lease().await.unwrap();
    let lock = here.obtain("lock");
    assert!(lock.acquire().await.unwrap());
    drop(here);
    assert!(lease.is_valid() && lock.is_acquired());
    drop((lease, lock));
    let begin = Instant::now();
    for key in ["lease", "lock"] {
        let lock = there.obtain(key);
        assert!(lock.acquire().await.unwrap());
    }
    assert_took(begin, ms(0), W::LATE);
}

/// One who waits in the queue when its registry's last handle goes keeps its place.
pub(crate) async fn a_future_keeps_its_registry_alive<W: World>(w: &W) {
    let [here, there] = w.registries().await;
    let held = here.obtain("k").lease().await.unwrap();
    let acquire = there.obtain("k").lease();
    drop(there);
    let watch = here.obtain("k");
    let (lease, ()) = tokio::join!(acquire, async {
        crate::world::waiting(&watch, 1).await;
        held.release().await.unwrap();
    });
    let lease = lease.unwrap();
    assert!(lease.is_valid());
    assert!(!watch.acquire_once().await.unwrap());
    lease.release().await.unwrap();
}

pub(crate) async fn inspecting_touches_nothing<W: World>(w: &W) {
    let [here, there] = w.registries().await;
    let lock = there.obtain("k");
    let seen = lock.inspect().await.unwrap();
    assert_eq!((seen.owner, seen.remaining, seen.waiting), (None, None, 0));
    assert!(w.leftovers().is_empty());

    let lease = here.obtain("k").lease().await.unwrap();
    let seen = lock.inspect().await.unwrap();
    let remaining = seen.remaining.unwrap();
    assert!(
        remaining > ms(1000) && remaining <= ms(2000),
        "{remaining:?}"
    );
    assert!(seen.owner.is_some_and(|owner| owner.contains(':')));
    assert_eq!(seen.waiting, 0);
    assert!(!lock.acquire_within(ms(20)).await.unwrap());
    idle(&there).await;
    lease.release().await.unwrap();
    assert_eq!(lock.inspect().await.unwrap().owner, None);
    assert_err!(there.obtain("~").inspect().await, InvalidKey, "~");
}
