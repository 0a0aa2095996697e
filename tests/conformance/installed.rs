//! The process's own registry. There is one a process, so this is one test, on a store of its own.

use std::sync::LazyLock;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockRegistry, StreamLockExt};

use crate::assert_err;

static LOCKS: LazyLock<LockRegistry> = LazyLock::new(LockRegistry::in_memory);

#[test]
fn bare_keys_ask_the_installed_registry() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().build().unwrap()
    };
    runtime().block_on(async {
        // Never a lock that only looks like one.
        let work = async { panic!("never polled") };
        assert_err!(work.with_lock("k").await, NoRegistry, "k");
        let mut rows = Box::pin(stream::iter([1]).with_lock(String::from("k")));
        assert_err!(rows.next().await.unwrap(), NoRegistry, "k");
    });

    LOCKS.install().unwrap();
    LOCKS.clone().install().unwrap();
    let other = LockRegistry::in_memory();
    let refused = other.install().unwrap_err();
    assert_eq!(other.install(), Err(refused));

    // It outlives the runtimes that use it.
    for _ in 0..2 {
        runtime().block_on(async {
            let held = LOCKS.obtain("k");
            let work = async { !held.acquire_once().await.unwrap() };
            assert!(work.with_lock("k").await.unwrap());
            let rows = stream::iter([1]).with_lock(std::borrow::Cow::from("k"));
            assert_eq!(rows.count().await, 1);
            async {}.with_lock(Box::<str>::from("k")).await.unwrap();
            async {}
                .with_lock(std::sync::Arc::<str>::from("k"))
                .await
                .unwrap();
            let name = String::from("k");
            async {}.with_lock(&name).await.unwrap();
            async {}.with_lock(name).await.unwrap();
            assert_eq!(LOCKS.in_use(), 0);
        });
    }
}
