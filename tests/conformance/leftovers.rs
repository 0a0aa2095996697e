//! What is left when nobody wants anything any more: nothing.

use std::collections::BTreeSet;

use futures::future::{join_all, try_join_all};
use futures::stream::FusedStream;
use futures::{StreamExt, TryStreamExt};
use lockstream::FutureLockExt;
use tokio::time::Instant;

use crate::assert_err;
use crate::world::{self, SOON, TTL, World, assert_took, empty, idle, is_held, ms};

pub(crate) async fn idle_registries_hold_no_entries(w: &dyn World) {
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
pub(crate) async fn a_release_by_another_handle_harms_nothing(w: &dyn World) {
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
pub(crate) async fn the_last_of_a_registry_gives_everything_back(w: &dyn World) {
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
    assert_took(begin, ms(0), w.late());
}

/// One who waits in the queue when its registry's last handle goes keeps its place.
pub(crate) async fn a_future_keeps_its_registry_alive(w: &dyn World) {
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

pub(crate) async fn inspecting_touches_nothing(w: &dyn World) {
    let [here, there] = w.registries().await;
    let lock = there.obtain("k");
    let seen = lock.inspect().await.unwrap();
    assert_eq!(
        (seen.owner(), seen.remaining(), seen.waiting),
        (None, None, 0)
    );
    assert!(w.leftovers().is_empty());

    let lease = here.obtain("k").lease().await.unwrap();
    let seen = lock.inspect().await.unwrap();
    let remaining = seen.remaining().unwrap();
    assert!(remaining > TTL - SOON && remaining <= TTL, "{remaining:?}");
    assert!(seen.owner().is_some_and(|owner| owner.contains(':')));
    assert_eq!(seen.waiting, 0);
    assert!(!lock.acquire_within(ms(20)).await.unwrap());
    idle(&there).await;
    lease.release().await.unwrap();
    assert_eq!(lock.inspect().await.unwrap().owner(), None);
    assert_err!(there.obtain("~").inspect().await, InvalidKey, "~");
}

/// Those of all registries, whatever their mode, and no key twice: a queue has a name of its own on some stores.
pub(crate) async fn a_scan_lists_what_is_held_and_waited_for(w: &dyn World) {
    let [here, there] = w.registries().await;
    let other = w.builder().await.prefix("other").build().unwrap();
    let found = async |start: &str| {
        let locks: Vec<_> = there.scan(start).try_collect().await.unwrap();
        let keys: BTreeSet<_> = locks.iter().map(|lock| lock.key.to_string()).collect();
        assert_eq!(keys.len(), locks.len(), "{locks:?}");
        keys.into_iter().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(found("").await, "");

    let held = here.obtain("a*[1]").lease().await.unwrap();
    let tagged = there.obtain("{a}2").lease().await.unwrap();
    let readers = [
        here.obtain("a3").shared().lease().await.unwrap(),
        there.obtain("a3").shared().lease().await.unwrap(),
    ];
    let elsewhere = other.obtain("a4").lease().await.unwrap();
    let lock = there.obtain("a*[1]");
    let waiting = tokio::spawn(lock.lease());
    world::waiting(&lock, 1).await;
    assert_eq!(found("").await, "a*[1] a3 {a}2");
    assert_eq!(found("a").await, "a*[1] a3");
    assert_eq!(found("a*").await, "a*[1]");
    assert_eq!(found("{a").await, "{a}2");
    assert_eq!(found("b").await, "");
    let scanned = other.scan("").try_collect::<Vec<_>>().await.unwrap();
    assert_eq!(&*scanned[0].key, "a4");
    for lock in there.scan("").try_collect::<Vec<_>>().await.unwrap() {
        let (holders, tickets) = match &*lock.key {
            "a*[1]" => (1, 1),
            "a3" => (2, 0),
            _ => (1, 0),
        };
        let seen = (lock.inspection.holders.len(), lock.inspection.waiting);
        assert_eq!(seen, (holders, tickets), "{lock:?}");
    }

    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    tagged.release().await.unwrap();
    for reader in readers {
        reader.release().await.unwrap();
    }
    elsewhere.release().await.unwrap();
    assert_eq!(found("").await, "");

    here.shutdown().await;
    let mut closed = here.scan("a");
    assert_err!(closed.next().await.unwrap(), Closed, "a");
    assert!(closed.next().await.is_none() && closed.is_terminated());
}

/// More than a page of any store.
pub(crate) async fn a_scan_of_many_keys_lists_each_once(w: &dyn World) {
    const KEYS: usize = 1_200;
    let [here, there] = w.registries().await;
    let acquiring = (0..KEYS).map(|n| here.obtain(format!("k{n}")).ttl(ms(60_000)).lease());
    let held = try_join_all(acquiring).await.unwrap();
    let mut locks: Vec<_> = there.scan("k").try_collect().await.unwrap();
    locks.sort_by(|one, other| one.key.cmp(&other.key));
    locks.dedup_by(|one, other| one.key == other.key);
    assert_eq!(locks.len(), KEYS);
    let mut some = there.scan("k");
    assert!(some.next().await.unwrap().is_ok());
    drop(some);
    try_join_all(held.into_iter().map(|lease| lease.release()))
        .await
        .unwrap();
}
