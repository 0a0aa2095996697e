//! How the lock is taken, and by whom.

use std::time::Duration;

use lockstream::{LockError, LockRegistry, OnLost, Renewal, Repeat, with_lock};
use tokio::time::{Instant, sleep};

use crate::remaining;

#[with_lock(key = "ticket", registry = locks, ttl = "1m 30s")]
async fn by_text(locks: &LockRegistry) -> Result<Duration, LockError> {
    Ok(remaining(locks, "ticket").await)
}

const TTL: Duration = Duration::from_millis(2500);

#[with_lock(key = "ticket", registry = locks, ttl = TTL * times)]
async fn by_expression(locks: &LockRegistry, times: u32) -> Result<Duration, LockError> {
    Ok(remaining(locks, "ticket").await)
}

#[tokio::test(start_paused = true)]
async fn ttl() {
    let locks = LockRegistry::in_memory();
    assert_eq!(by_text(&locks).await.unwrap(), Duration::from_secs(90));
    assert_eq!(by_expression(&locks, 2).await.unwrap(), TTL * 2);
    let error = by_expression(&locks, 0).await.unwrap_err();
    assert!(matches!(error, LockError::InvalidTtl { .. }), "{error}");
}

#[with_lock(key = "ticket", registry = locks, wait = "3s")]
async fn three_seconds(locks: &LockRegistry) -> Result<(), LockError> {
    let _ = locks;
    Ok(())
}

#[with_lock(key = "ticket", registry = locks, wait = wait)]
async fn as_long_as(locks: &LockRegistry, wait: Duration) -> Result<(), LockError> {
    let _ = locks;
    Ok(())
}

#[with_lock(key = "ticket", registry = locks, wait = "forever")]
async fn for_ever(locks: &LockRegistry) -> Result<(), LockError> {
    let _ = locks;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn wait() {
    let locks = LockRegistry::in_memory();
    let day = Duration::from_secs(24 * 60 * 60);
    let lease = locks.obtain("ticket").ttl(day).lease().await.unwrap();
    let begin = Instant::now();
    assert!(three_seconds(&locks).await.unwrap_err().is_not_acquired());
    assert_eq!(begin.elapsed().as_secs(), 3);
    let wait = Duration::from_secs(5);
    assert!(
        as_long_as(&locks, wait)
            .await
            .unwrap_err()
            .is_not_acquired()
    );
    assert_eq!(begin.elapsed().as_secs(), 8);

    let patient = tokio::spawn({
        let locks = locks.clone();
        async move { for_ever(&locks).await }
    });
    sleep(day / 2).await;
    assert!(!patient.is_finished());
    lease.release().await.unwrap();
    patient.await.unwrap().unwrap();
}

macro_rules! renewed {
    ($($name:ident: ($($option:tt)*);)*) => {$(
        #[with_lock(key = "ticket", registry = locks, ttl = "3s", $($option)*)]
        async fn $name(locks: &LockRegistry, work: Duration) -> Result<(), LockError> {
            let _ = locks;
            sleep(work).await;
            Ok(())
        }
    )*};
}

renewed! {
    unsaid: ();
    off: (renewal = "off");
    watchdog: (renewal = "watchdog");
    by_value: (renewal = Renewal::watchdog());
    twice: (max_renewals = 2);
    twice_by_watchdog: (renewal = "watchdog", max_renewals = 1 + 1);
    twice_by_value: (renewal = Renewal::watchdog(), max_renewals = 2);
}

#[tokio::test(start_paused = true)]
async fn renewal() {
    let locks = LockRegistry::in_memory();
    let (short, long) = (Duration::from_millis(4500), Duration::from_secs(60));
    for lost in [unsaid(&locks, short).await, off(&locks, short).await] {
        assert!(lost.unwrap_err().is_lost());
    }
    watchdog(&locks, long).await.unwrap();
    by_value(&locks, long).await.unwrap();

    // At 1 s and 2 s, so that it lasts until 5 s.
    twice(&locks, short).await.unwrap();
    twice_by_watchdog(&locks, short).await.unwrap();
    twice_by_value(&locks, short).await.unwrap();
    assert!(twice(&locks, long).await.unwrap_err().is_lost());
    assert!(twice_by_watchdog(&locks, long).await.unwrap_err().is_lost());
    assert!(twice_by_value(&locks, long).await.unwrap_err().is_lost());
}

macro_rules! lost {
    ($($name:ident: $on_lost:expr;)*) => {$(
        #[with_lock(key = "ticket", registry = locks, ttl = "1s", on_lost = $on_lost)]
        async fn $name(locks: &LockRegistry) -> Result<&'static str, LockError> {
            let _ = locks;
            sleep(Duration::from_secs(5)).await;
            Ok("done")
        }
    )*};
}

lost! {
    stop: "stop";
    run_on: "run_on";
    run_on_by_value: OnLost::RunOn;
}

#[tokio::test(start_paused = true)]
async fn on_lost() {
    let locks = LockRegistry::in_memory();
    assert!(stop(&locks).await.unwrap_err().is_lost());
    assert_eq!(run_on(&locks).await.unwrap(), "done");
    assert_eq!(run_on_by_value(&locks).await.unwrap(), "done");
}

#[with_lock(
    key = "ticket",
    registry = locks,
    ttl = "10s",
    repeat = Repeat::fixed(Duration::from_millis(1)),
    crate = ::lockstream,
)]
async fn all_at_once(locks: &LockRegistry) -> Result<Duration, LockError> {
    Ok(remaining(locks, "ticket").await)
}

mod renamed {
    pub(super) use lockstream as locks;
}

#[with_lock(key = "ticket", registry = locks, crate = renamed::locks)]
async fn by_another_name(locks: &LockRegistry) -> Result<bool, LockError> {
    Ok(crate::held(locks, "ticket").await)
}

#[tokio::test(start_paused = true)]
async fn the_crate_by_another_name() {
    let locks = LockRegistry::in_memory();
    assert_eq!(all_at_once(&locks).await.unwrap().as_secs(), 10);
    assert!(by_another_name(&locks).await.unwrap());
}

#[with_lock(key = "installed:{id}")]
async fn by_installed(id: u32) -> Result<u32, LockError> {
    Ok(id)
}

/// The one test that installs a registry, which stays for the life of the process.
#[tokio::test(start_paused = true)]
async fn without_a_registry_the_installed_one_is_asked() {
    let error = by_installed(7).await.unwrap_err();
    assert!(matches!(error, LockError::NoRegistry { .. }), "{error}");
    assert_eq!(error.key(), "installed:7");

    let locks = LockRegistry::in_memory();
    locks.install().unwrap();
    let lock = locks.obtain("installed:7").ttl(Duration::from_secs(1));
    let lease = lock.lease().await.unwrap();
    let working = tokio::spawn(by_installed(7));
    tokio::task::yield_now().await;
    assert!(!working.is_finished(), "others hold it");
    lease.release().await.unwrap();
    assert_eq!(working.await.unwrap().unwrap(), 7);
}
