//! The test that docs/guide.md shows, as it is.

use std::time::Duration;

use lockstream::{prelude::*, store::MemoryStore, verify::StepVerifier};

#[tokio::test(start_paused = true)]
async fn work_is_stopped_at_the_end_of_its_lease_and_the_next_runs() {
    let store = MemoryStore::new(); // two registries on one store behave as two processes
    let here = LockRegistry::builder(store.clone()).build().unwrap();
    let there = LockRegistry::builder(store).build().unwrap();

    let slow = tokio::time::sleep(Duration::from_secs(60));
    let lock = here.obtain("report").ttl(Duration::from_secs(10));
    let next = async { "mine now" }.with_lock((&there, "report"));
    let (slow, next) = tokio::join!(slow.with_lock(lock), next);

    assert!(slow.unwrap_err().is_lost());
    assert_eq!(next.unwrap(), "mine now");
}

#[tokio::test]
async fn a_busy_lock_is_waited_for_until_the_wait_is_over() {
    let locks = LockRegistry::in_memory();
    let _held = locks.obtain("report").lease().await;
    let lock = locks.obtain("report").wait(Duration::from_secs(3));

    StepVerifier::with_virtual_time(|| async { "mine" }.with_lock(lock))
        .expect_no_event(Duration::from_millis(2_999))
        .expect_error_matches(LockError::is_not_acquired)
        .expect_complete()
        .verify()
        .await;
}
