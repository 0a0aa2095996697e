//! The same events, counted for the recorder of the `metrics` facade.
//!
//! By prefix and not by key: there may be any number of keys, and a recorder keeps a series for
//! each value of a label.

use std::sync::Arc;
use std::time::Duration;

use metrics::{
    Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use crate::observe::LockEvent;

const WAITING: &str = "lockstream_waiting";
const HELD: &str = "lockstream_held";
const STORE_UP: &str = "lockstream_store_up";
const POLLING: &str = "lockstream_polling";
const ACQUIRED: &str = "lockstream_acquired_total";
const PASSED: &str = "lockstream_passed_total";
const RENEWED: &str = "lockstream_renewed_total";
const RENEWAL_UNKNOWN: &str = "lockstream_renewal_unknown_total";
const RENEWAL_LATE: &str = "lockstream_renewal_late_total";
const LOST: &str = "lockstream_lost_total";
const GIVEN_UP: &str = "lockstream_given_up_total";
const QUEUE_FULL: &str = "lockstream_queue_full_total";
const DROPPED: &str = "lockstream_dropped_while_held_total";
const STORE_DOWN: &str = "lockstream_store_down_total";
const RUNTIME_BUSY: &str = "lockstream_runtime_busy_total";
const WAIT: &str = "lockstream_wait_seconds";
const HOLD: &str = "lockstream_hold_seconds";

const GAUGES: [(&str, &str); 4] = [
    (WAITING, "Callers that wait for a lock."),
    (HELD, "Leases that are held or being released."),
    (
        STORE_UP,
        "1 while the store can be reached, 0 while it cannot.",
    ),
    (
        POLLING,
        "1 while waiters poll, since nothing can be pushed.",
    ),
];

#[rustfmt::skip]
const COUNTERS: [(&str, &str); 11] = [
    (ACQUIRED, "Leases acquired."),
    (PASSED, "Leases acquired from another caller of the same registry, without asking the store."),
    (RENEWED, "Renewals that the store confirmed."),
    (RENEWAL_UNKNOWN, "Renewals that got no answer, or a refusal, or were not sent."),
    (RENEWAL_LATE, "Renewals that were not confirmed although most of the time left was over."),
    (LOST, "Leases that were over before their holders were done."),
    (GIVEN_UP, "Waits that ended with nothing."),
    (QUEUE_FULL, "Callers refused because max_waiters waited already."),
    (DROPPED, "Locks whose last handle was dropped while held."),
    (STORE_DOWN, "Outages of the store."),
    (RUNTIME_BUSY, "Times that the runtime was too busy to renew leases, and a thread did."),
];

#[rustfmt::skip]
const HISTOGRAMS: [(&str, &str); 2] = [
    (WAIT, "Time from the first poll until the lock was acquired."),
    (HOLD, "Time from when a lease was taken until it was given back, or over."),
];

/// Tells the recorder what they are.
pub(crate) fn describe() {
    for (name, what) in GAUGES {
        describe_gauge!(name, Unit::Count, what);
    }
    for (name, what) in COUNTERS {
        describe_counter!(name, Unit::Count, what);
    }
    for (name, what) in HISTOGRAMS {
        describe_histogram!(name, Unit::Seconds, what);
    }
}

/// Counts one event.
pub(crate) fn record(event: &LockEvent, prefix: &Arc<str>) {
    let count = |name: &'static str| counter!(name, "prefix" => prefix.clone()).increment(1);
    let store_up = |up: f64| gauge!(STORE_UP, "prefix" => prefix.clone()).set(up);
    let waiting = || gauge!(WAITING, "prefix" => prefix.clone());
    let ended = |held: Duration| {
        gauge!(HELD, "prefix" => prefix.clone()).decrement(1);
        histogram!(HOLD, "prefix" => prefix.clone()).record(held);
    };
    match event {
        LockEvent::Waiting { .. } => waiting().increment(1),
        LockEvent::Acquired { waited, mode, .. } => {
            waiting().decrement(1);
            gauge!(HELD, "prefix" => prefix.clone()).increment(1);
            let mode = mode.kind();
            counter!(ACQUIRED, "prefix" => prefix.clone(), "mode" => mode).increment(1);
            histogram!(WAIT, "prefix" => prefix.clone(), "mode" => mode).record(*waited);
        }
        LockEvent::Passed { .. } => count(PASSED),
        LockEvent::Renewed { .. } => count(RENEWED),
        LockEvent::RenewalUnknown { .. } => count(RENEWAL_UNKNOWN),
        LockEvent::RenewalLate { .. } => count(RENEWAL_LATE),
        LockEvent::Lost { held, cause, .. } => {
            ended(*held);
            counter!(LOST, "prefix" => prefix.clone(), "cause" => cause.label()).increment(1);
        }
        LockEvent::Released { held, .. }
        | LockEvent::Unreleased { held, .. }
        | LockEvent::LeftToExpire { held, .. }
        | LockEvent::Detached { held, .. }
        | LockEvent::Closed { held, .. } => ended(*held),
        LockEvent::GaveUp { .. } => {
            waiting().decrement(1);
            count(GIVEN_UP);
        }
        LockEvent::QueueFull { .. } => {
            waiting().decrement(1);
            count(QUEUE_FULL);
        }
        LockEvent::DroppedWhileHeld { .. } => count(DROPPED),
        LockEvent::StoreUp {} => store_up(1.0),
        LockEvent::StoreDown { .. } => {
            store_up(0.0);
            count(STORE_DOWN);
        }
        LockEvent::RuntimeBusy { .. } => count(RUNTIME_BUSY),
        LockEvent::LastRenewal { .. } | LockEvent::Missed { .. } => {}
    }
}

/// Whether waiters poll, as far as is known.
pub(crate) fn polls(is_so: bool, prefix: &Arc<str>) {
    gauge!(POLLING, "prefix" => prefix.clone()).set(f64::from(u8::from(is_so)));
}
