//! A whole registry in a model, with its callers and its timer's task.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use shuttle::future::block_on;
use shuttle::thread;

use super::Silent;
use crate::base::LockError;
use crate::base::model::check_with_tasks;
use crate::handle::LockRegistry;
use crate::store::{LockStore, MemoryStore};

const HOUR: Duration = Duration::from_secs(3_600);

/// Without the heartbeat: a thread of the system's is not part of a model. Nothing is over because the machine stands still.
fn registry(store: impl LockStore) -> LockRegistry {
    let builder = LockRegistry::builder(store).renew_while_busy(Duration::ZERO);
    let builder = builder.ttl(2 * HOUR).response_timeout(HOUR);
    builder.build().unwrap()
}

/// Two registries on one store, one of them with two callers. Each caller has the key in its turn, alone, and then nothing
/// is in use.
///
/// Finds: `idle` looks whether anything is in use before it registers with the notification.
#[test]
fn model_callers_of_two_registries_take_turns() {
    check_with_tasks(|| {
        let store = MemoryStore::new();
        let (here, there) = (registry(store.clone()), registry(store));
        let is_held = Arc::new(AtomicBool::new(false));
        let callers = [&here, &here, &there].map(|locks| {
            let (locks, is_held) = (locks.clone(), is_held.clone());
            thread::spawn(move || {
                let lease = block_on(locks.obtain("k").lease()).unwrap();
                assert!(!is_held.swap(true, Ordering::Relaxed), "another has it");
                thread::yield_now();
                is_held.store(false, Ordering::Relaxed);
                drop(lease);
            })
        });
        for locks in [&here, &there] {
            block_on(locks.engine.idle());
        }
        for caller in callers {
            caller.join().unwrap();
        }
        for locks in [&here, &there] {
            block_on(locks.engine.idle());
            assert_eq!(locks.engine.in_use(), 0);
        }
    });
}

/// A session loses an op while the timer's task, which is to hear of it, begins or goes to sleep. The caller is told.
///
/// Finds: a lost op wakes the task before it is noted.
#[test]
fn model_the_timer_sleeps_through_no_lost_op() {
    check_with_tasks(|| {
        let store = Silent::default();
        let locks = registry(store.clone());
        let mut once = Box::pin(locks.obtain("k").lease_once());
        assert!((&mut once).now_or_never().is_none());
        let lost = thread::spawn(move || drop(store.asked()));
        let told = block_on(once);
        assert!(matches!(told, Err(LockError::Store { .. })), "{told:?}");
        lost.join().unwrap();
    });
}
