//! Runtimes that come and go, and one that is busy. Time is real here.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;

use crate::base::Renewal;
use crate::handle::LockRegistry;
use crate::store::MemoryStore;

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// No other thread polls its tasks (D8).
fn registry() -> LockRegistry {
    let builder = LockRegistry::builder(MemoryStore::new()).renew_while_busy(Duration::ZERO);
    builder.renewal(Renewal::off()).build().unwrap()
}

/// How many tasks the runtime has.
fn tasks(runtime: &Runtime) -> usize {
    runtime.handle().metrics().num_alive_tasks()
}

/// What brings another runtime to a registry, whose timer's task is on the first.
#[derive(Clone, Copy, Debug)]
enum Comes {
    /// Somebody asks for the store while the first runtime is there.
    AsksBefore,
    /// Somebody asks for the store when the first runtime has gone.
    AsksAfter,
    /// Somebody waits for a key that the registry itself has, so nothing is sent.
    WaitsAfter,
}

/// D7: whoever comes with another runtime has the timer's task there when the first runtime has gone. Else a guard that
/// nobody looks at was not renewed any more, and a wait did not end. A registry that is not in use needs no task.
#[test]
fn d7_who_asks_or_waits_brings_a_runtime_for_the_timer() {
    for comes in [Comes::AsksBefore, Comes::AsksAfter, Comes::WaitsAfter] {
        let locks = registry();
        let (first, second) = (runtime(), runtime());
        second.block_on(locks.ping()).unwrap();
        assert_eq!(tasks(&second), 0, "nothing is in use");
        let lease = first.block_on(locks.obtain("k").lease()).unwrap();
        assert_eq!((tasks(&first), tasks(&second)), (1, 0));
        let wait = locks.obtain("k").lease_within(Duration::from_secs(60));
        let mut waiting = Box::pin(wait);
        if let Comes::AsksBefore = comes {
            second.block_on(locks.ping()).unwrap();
        }
        drop(first);
        match comes {
            Comes::AsksBefore => {}
            Comes::AsksAfter => _ = second.block_on(locks.ping()).unwrap(),
            Comes::WaitsAfter => second.block_on(async {
                assert!(futures::poll!(&mut waiting).is_pending());
            }),
        }
        assert_eq!(tasks(&second), 1, "{comes:?}");
        drop((waiting, lease));
    }
}

/// A registry remembers the runtimes on which somebody has waited. It keeps nothing of one that has ended, and leaves
/// nothing on the others.
#[test]
fn runtimes_that_have_ended_are_forgotten_and_the_others_left_as_they_were() {
    // Every handle of the second runtime keeps its settings, and this with them.
    let setting = Arc::new(());
    let kept = setting.clone();
    let first = runtime();
    let second = Builder::new_current_thread()
        .enable_all()
        .on_thread_park(move || assert!(Arc::strong_count(&kept) > 0))
        .build()
        .unwrap();
    let locks = registry();
    let lease = first.block_on(locks.obtain("k").lease()).unwrap();
    second.block_on(locks.ping()).unwrap();
    // As the timer's task does at each of its rounds.
    let look = || {
        first.block_on(async {
            locks.engine.run_due();
        });
    };
    look();
    drop(second);
    look();
    assert_eq!(Arc::strong_count(&setting), 1, "it is forgotten");
    drop((lease, locks));
    first.block_on(async {
        for _ in 0..100 {
            yield_now().await;
        }
    });
    assert_eq!(tasks(&first), 0, "nothing is left");
}

/// D8: the thread looks after a lease with a shorter ttl in time, though it was to look at the first one much later.
#[test]
fn d8_a_lease_with_a_shorter_ttl_is_looked_after_in_time() {
    let locks = LockRegistry::in_memory();
    runtime().block_on(async {
        let renewed = |key: &str, secs| {
            let lock = locks.obtain(key).ttl(Duration::from_secs(secs));
            lock.renewal(Renewal::watchdog()).lease()
        };
        let _long = renewed("long", 3600).await.unwrap();
        let short = renewed("short", 6).await.unwrap();
        let deadline = short.deadline();
        // The runtime is busy.
        while short.deadline() <= deadline {
            assert!(short.is_valid(), "it is not renewed");
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
