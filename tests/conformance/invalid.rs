//! What is wrong with a key, a ttl or a setting is told before anything is sent.

use std::time::Duration;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, Lock, LockError, StreamLockExt};

use crate::watch::Builder;
use crate::world::{World, ms};

/// Every way to lock gives the one error.
async fn assert_refused(lock: &Lock, is_right: impl Fn(&LockError) -> bool) {
    let check = |error: LockError| {
        assert!(is_right(&error), "{error:?}");
        assert_eq!(error.key(), lock.key());
    };
    check(lock.acquire_once().await.unwrap_err());
    check(lock.acquire().await.unwrap_err());
    check(lock.acquire_within(ms(0)).await.unwrap_err());
    check(lock.lease().await.unwrap_err());
    check(lock.lease().or_skip().await.unwrap_err());
    check(lock.lease_once().await.unwrap_err());
    check(lock.inspect().await.unwrap_err());
    check(async {}.with_lock(lock).await.unwrap_err());
    check(lock.with_lease(async |_| ()).await.unwrap_err());
    let mut rows = Box::pin(stream::iter([1]).with_lock(lock));
    check(rows.next().await.unwrap().unwrap_err());
    assert!(rows.next().await.is_none());
    assert!(!lock.is_acquired());
    assert!(!lock.release().await.unwrap());
}

pub(crate) async fn bad_keys(w: &dyn World) {
    let registry = w.registry().await;
    let before = w.commands();
    let long = "x".repeat(513);
    let keys = [
        "",
        &long,
        "a\nb",
        "a\0b",
        "~fence",
        "a:~queue2",
        "a:~listen1",
        "billing:~fence",
        "a}",
        "{}a",
    ];
    for key in keys {
        assert_refused(&registry.obtain(key), |error| {
            matches!(error, LockError::InvalidKey { .. })
        })
        .await;
    }
    assert_eq!(registry.in_use(), 0);
    assert_eq!(w.commands(), before);
}

pub(crate) async fn bad_ttls(w: &dyn World) {
    let registry = w.registry().await;
    let before = w.commands();
    let day = Duration::from_secs(24 * 60 * 60);
    for ttl in [ms(0), ms(9), day + ms(1), Duration::MAX] {
        assert_refused(
            &registry.obtain("k").ttl(ttl),
            |error| matches!(error, LockError::InvalidTtl { ttl: told, .. } if *told == ttl),
        )
        .await;
    }
    assert_eq!(w.commands(), before);
    // The limits themselves will do.
    let lock = registry.obtain("k").ttl(day);
    assert!(lock.acquire_once().await.unwrap());
    assert!(lock.release().await.unwrap());
}

/// Told when the registry is built, before the store is asked anything.
///
/// A response time-out without end was taken: when a call was overdue was more than the clock can show, and the
/// connection's task on Redis panicked again and again, without a pause.
pub(crate) async fn bad_settings(w: &dyn World) {
    type Change = fn(Builder) -> Builder;
    let changes: [(&str, Change); 15] = [
        ("prefix", |builder| builder.prefix("")),
        ("prefix", |builder| builder.prefix("a~b")),
        ("prefix", |builder| builder.prefix("a:b")),
        ("prefix", |builder| builder.prefix("{a")),
        ("name", |builder| builder.name("")),
        ("name", |builder| builder.name("a~b")),
        ("name", |builder| builder.name("a:b")),
        ("name", |builder| builder.name("a b")),
        ("name", |builder| builder.name("é")),
        ("ttl", |builder| builder.ttl(Duration::ZERO)),
        ("ttl", |builder| builder.ttl(Duration::MAX)),
        ("max_waiters", |builder| builder.max_waiters(0)),
        ("local_passes", |builder| builder.local_passes(64)),
        ("response_timeout", |builder| {
            builder.response_timeout(Duration::ZERO)
        }),
        ("response_timeout", |builder| {
            builder.response_timeout(Duration::MAX)
        }),
    ];
    let (least, most) = (w.builder().await, w.builder().await);
    let mut builders = Vec::new();
    for (setting, change) in changes {
        builders.push((setting, change(w.builder().await)));
    }
    let before = w.commands();
    for (wrong, builder) in builders {
        let error = builder.build().unwrap_err();
        assert_eq!(error.setting(), wrong);
        let told = format!("invalid setting `{wrong}`: {}", error.reason());
        assert_eq!(error.to_string(), told);
    }
    // The limits themselves will do.
    let prefix = "x".repeat(128);
    let least = least.ttl(ms(10)).max_waiters(1).local_passes(0);
    least.response_timeout(ms(1)).build().unwrap();
    let day = Duration::from_secs(24 * 60 * 60);
    let most = most.ttl(day).local_passes(63).prefix(&prefix);
    let most = most.name(&prefix[..64]);
    most.response_timeout(day).build().unwrap();
    assert_eq!(w.commands(), before);
}
