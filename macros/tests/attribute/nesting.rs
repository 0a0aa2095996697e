//! More than one lock on a function.

use std::sync::Mutex;

use futures::{Stream, TryStreamExt};
use lockstream::{Lease, LockError, LockRegistry, with_lock};

use crate::{ShopError, held};

/// Notes the order in which it is asked for keys.
#[derive(Default)]
struct Order(Mutex<Vec<&'static str>>);

#[with_lock(key = "from:{from}", registry = locks, wait = "0s")]
#[with_lock(key = "to:{to}", registry = locks, wait = "0s")]
#[must_use]
async fn transfer(
    locks: &LockRegistry,
    from: u32,
    to: u32,
    order: &Order,
) -> Result<(), LockError> {
    assert!(held(locks, &format!("from:{from}")).await);
    assert!(held(locks, &format!("to:{to}")).await);
    order.0.lock().unwrap().push("body");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_first_line_is_taken_first() {
    let locks = LockRegistry::in_memory();
    let order = Order::default();
    transfer(&locks, 1, 2, &order).await.unwrap();
    assert!(!held(&locks, "from:1").await);
    assert!(!held(&locks, "to:2").await);

    // Both are busy: the one that is asked for first says so.
    let from = locks.obtain("from:1").lease().await.unwrap();
    let to = locks.obtain("to:2").lease().await.unwrap();
    let error = transfer(&locks, 1, 2, &order).await.unwrap_err();
    assert_eq!(error.key(), "from:1");
    from.release().await.unwrap();
    let error = transfer(&locks, 1, 2, &order).await.unwrap_err();
    assert_eq!(error.key(), "to:2");
    assert!(!held(&locks, "from:1").await);
    to.release().await.unwrap();
    assert_eq!(*order.0.lock().unwrap(), ["body"]);
}

#[with_lock(key = "outer", registry = locks, wait = "0s")]
#[must_use]
#[with_lock(key = "middle", registry = locks, wait = "0s")]
#[lockstream::with_lock(key = "inner", registry = locks, wait = "0s")]
fn nested(locks: LockRegistry) -> impl Stream<Item = Result<bool, ShopError>> {
    futures::stream::once(async move {
        let outer = held(&locks, "outer").await;
        let middle = held(&locks, "middle").await;
        Ok(outer && middle && held(&locks, "inner").await)
    })
}

#[tokio::test(start_paused = true)]
async fn streams_under_several_locks() {
    let locks = LockRegistry::in_memory();
    let seen: Vec<bool> = nested(locks.clone()).try_collect().await.unwrap();
    assert_eq!(seen, [true]);
    for key in ["outer", "middle", "inner"] {
        assert!(!held(&locks, key).await, "{key}");
    }
    // Kept to the end, so that one more is busy each time.
    let mut leases = Vec::new();
    for key in ["inner", "middle", "outer"] {
        leases.push(locks.obtain(key).lease().await.unwrap());
        let busy: Result<Vec<bool>, ShopError> = nested(locks.clone()).try_collect().await;
        let Err(ShopError::Lock(error)) = busy else {
            panic!("{key} is held: {busy:?}");
        };
        assert_eq!(error.key(), key, "the outermost that is busy");
    }
    assert!(leases.iter().all(Lease::is_valid));
}
