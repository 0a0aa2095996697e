//! What a recorder of the `metrics` facade gets to see.
#![cfg(all(feature = "metrics", feature = "test-util"))]

use std::collections::BTreeMap;
use std::time::Duration;

use futures::StreamExt;
use lockstream::store::{MemoryStore, QuorumStore};
use lockstream::{FutureLockExt, LockRegistry, Renewal};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// On one thread, whose recorder this is, under paused time.
fn recorded(run: impl AsyncFnOnce(&MemoryStore, &Snapshotter)) {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(run(&MemoryStore::new(), &snapshotter));
    });
}

fn registry(store: &MemoryStore, prefix: &str) -> LockRegistry {
    LockRegistry::builder(store.clone())
        .prefix(prefix)
        .max_waiters(2)
        .local_span(ms(60_000))
        .renewal(Renewal::off())
        .build()
        .unwrap()
}

/// What changed since the last look, of registries with that prefix: by name, without the crate's. Histograms are their
/// values in milliseconds.
fn look(snapshotter: &Snapshotter, of: &str) -> BTreeMap<String, Vec<i64>> {
    let mut seen = BTreeMap::new();
    for (key, unit, description, value) in snapshotter.snapshot().into_vec() {
        let key = key.key();
        let labels: Vec<_> = key.labels().collect();
        let names: Vec<_> = labels.iter().map(|label| label.key()).collect();
        assert!(
            names == ["prefix"] || names == ["prefix", "mode"] || names == ["prefix", "cause"],
            "a series for every key, or the like: {key:?}"
        );
        assert!(unit.is_some() && description.is_some(), "{key:?}");
        if labels[0].value() != of {
            continue;
        }
        let name = key.name().strip_prefix("lockstream_").unwrap();
        let name = match labels.get(1).map(|mode| mode.value()) {
            None | Some("exclusive") => name.to_owned(),
            Some(mode) => format!("{name} {mode}"),
        };
        #[allow(
            clippy::cast_possible_truncation,
            reason = "counts, and times of a test"
        )]
        let value = match value {
            DebugValue::Counter(count) => vec![i64::try_from(count).unwrap()],
            DebugValue::Gauge(level) => vec![level.into_inner() as i64],
            DebugValue::Histogram(values) => {
                let millis = values.into_iter().map(|value| value.into_inner() * 1000.0);
                millis.map(|value| value.round() as i64).collect()
            }
        };
        seen.insert(name, value);
    }
    seen
}

fn expected(values: &[(&str, &[i64])]) -> BTreeMap<String, Vec<i64>> {
    let values = values.iter();
    values
        .map(|(name, value)| ((*name).to_owned(), value.to_vec()))
        .collect()
}

/// Nobody reads events here: metrics need no reader.
#[test]
fn waits_and_leases_are_counted() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        let other = registry(store, "other");
        let lock = locks.obtain("a").ttl(ms(90_000));
        let lease = lock.lease().await.unwrap();
        let (mut one, mut two) = (lock.lease(), lock.lease());
        assert!(futures::poll!(&mut one).is_pending());
        assert!(futures::poll!(&mut two).is_pending());
        assert!(lock.lease().await.is_err(), "the queue is full");
        let _their_key = other.obtain("a").lease().await.unwrap();
        let seen = look(snapshotter, "shop");
        let level = |name: &str| seen[name][0];
        assert_eq!((level("waiting"), level("held")), (2, 1));
        assert_eq!(level("queue_full_total"), 1);
        assert_eq!(seen["wait_seconds"], [0]);

        tokio::time::sleep(ms(250)).await;
        drop(two);
        lease.release().await.unwrap();
        let passed = one.await.unwrap();
        tokio::time::sleep(ms(40)).await;
        passed.release().await.unwrap();
        let lost = std::future::pending::<()>().with_lock(locks.obtain("b").ttl(ms(1000)));
        assert!(lost.await.unwrap_err().is_lost());
        // Gauges by how much they changed, too.
        let expected = expected(&[
            ("acquired_total", &[2]),
            ("given_up_total", &[1]),
            ("held", &[-1]),
            ("hold_seconds", &[250, 40, 988]),
            ("lost_total fixed_ttl", &[1]),
            ("passed_total", &[1]),
            ("queue_full_total", &[0]),
            ("wait_seconds", &[250, 0]),
            ("waiting", &[-2]),
        ]);
        assert_eq!(look(snapshotter, "shop"), expected);
    });
}

#[test]
fn renewals_and_outages_are_counted() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        let twice = Renewal::watchdog().max_renewals(2);
        let lock = locks.obtain("a").ttl(ms(3000)).renewal(twice);
        let lease = lock.lease().await.unwrap();
        tokio::time::sleep(ms(1500)).await;
        // The second renewal's answer is lost, and it is made good by the next connection.
        store.set_latency(ms(1000));
        tokio::time::sleep(ms(900)).await;
        store.set_offline(true);
        tokio::time::sleep(ms(700)).await;
        store.set_latency(ms(0));
        store.set_offline(false);
        lease.release().await.unwrap();
        let seen = look(snapshotter, "shop");
        assert_eq!(seen["renewed_total"], [2], "{seen:?}");
        assert_eq!(seen["renewal_unknown_total"], [1], "{seen:?}");
        assert_eq!(seen["store_down_total"], [1], "{seen:?}");
        assert_eq!(seen["held"], [0], "{seen:?}");
    });
}

/// A renewal takes half of its lease's time.
#[test]
fn late_renewals_are_counted() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        let lock = locks.obtain("a").ttl(ms(3000));
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        store.set_latency(ms(1500));
        tokio::time::sleep(ms(2700)).await;
        store.set_latency(ms(0));
        lease.release().await.unwrap();
        let seen = look(snapshotter, "shop");
        assert_eq!(seen["renewed_total"], [1], "{seen:?}");
        assert_eq!(seen["renewal_late_total"], [1], "{seen:?}");
        assert!(
            !seen.keys().any(|name| name.starts_with("lost_total")),
            "{seen:?}"
        );
    });
}

/// However a registry ends, its gauges end at nothing; also with a reader of events beside.
#[test]
fn nothing_is_held_or_waited_for_in_the_end() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        let events = locks.events();
        let lease = locks.obtain("a").lease().await.unwrap();
        let mut waits = locks.obtain("a").lease();
        assert!(futures::poll!(&mut waits).is_pending());
        locks.shutdown().await;
        // Too late for events, and still a wait.
        assert!(locks.obtain("b").lease().await.is_err());
        assert!(waits.await.is_err());
        drop((lease, locks));
        assert_eq!(events.count().await, 5);
        let seen = look(snapshotter, "shop");
        assert_eq!(
            (&seen["waiting"][..], &seen["held"][..]),
            (&[0][..], &[0][..])
        );
        assert_eq!(seen["given_up_total"], [2]);
    });
}

/// Readers and permits are counted apart.
#[test]
fn modes_are_told_apart() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        async {}.with_lock(locks.obtain("a")).await.unwrap();
        async {}
            .with_lock(locks.obtain("a").shared())
            .await
            .unwrap();
        for _ in 0..2 {
            let permit = locks.obtain("b").permits_of(4, 3);
            async {}.with_lock(permit).await.unwrap();
        }
        let seen = look(snapshotter, "shop");
        assert_eq!(seen["acquired_total"], [1]);
        assert_eq!(seen["acquired_total shared"], [1]);
        assert_eq!(seen["acquired_total permit"], [2]);
        assert_eq!(seen["wait_seconds permit"].len(), 2);
        assert_eq!(seen["held"], [0]);
    });
}

/// How the store is, and what is forgotten.
#[test]
fn an_outage_and_a_dropped_handle_are_seen() {
    recorded(async |store, snapshotter| {
        let locks = registry(store, "shop");
        let lock = locks.obtain("a");
        assert!(lock.acquire().await.unwrap());
        store.set_offline(true);
        tokio::time::sleep(ms(100)).await;
        let seen = look(snapshotter, "shop");
        assert_eq!(seen["store_up"], [0], "{seen:?}");
        store.set_offline(false);
        tokio::time::sleep(ms(100)).await;
        drop(lock);
        locks.drain(ms(1000)).await;
        let seen = look(snapshotter, "shop");
        assert_eq!(seen["store_up"], [1], "{seen:?}");
        assert_eq!(seen["polling"], [0], "{seen:?}");
        assert_eq!(seen["dropped_while_held_total"], [1], "{seen:?}");

        // Its nodes push no grants.
        let nodes = [MemoryStore::new(), MemoryStore::new(), MemoryStore::new()];
        let quorum = QuorumStore::new(nodes).unwrap().quarantine(None);
        let locks = LockRegistry::builder(quorum).prefix("quorum").build();
        let lease = locks.unwrap().obtain("a").lease().await.unwrap();
        lease.release().await.unwrap();
        let seen = look(snapshotter, "quorum");
        assert_eq!(
            (&seen["polling"][..], &seen["store_up"][..]),
            (&[1][..], &[1][..])
        );
    });
}
