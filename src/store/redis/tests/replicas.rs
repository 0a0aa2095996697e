//! Acquisitions that count only when replicas have them, on a server that says what it likes of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::fake::{Fake, HANG_UP, NOW, Request};
use super::registry::{BOUND, Registry, Settings, attempt, release, unknown, won};
use super::support::{on_a_steady_machine, wait_until};
use crate::base::StoreError;
use crate::store::contract::{OpError, Outcome, StoreEvent};

const WITHIN: Duration = Duration::from_millis(150);

const OURS: &[u8] = b"*1\r\n:1\r\n";

/// Whether it asks for locks whether they are their owners': other calls begin with a number.
fn confirms(request: &Request) -> bool {
    (request.is("EVAL") || request.is("EVALSHA")) && request.arguments()[0].contains(':')
}

async fn open(fake: &Fake, within: Duration, response_timeout: Duration) -> Registry {
    let settings = Settings::url(fake.url(), "r").response_timeout(response_timeout);
    settings.replicas(2, within).up().await
}

#[track_caller]
fn unconfirmed(result: Result<crate::store::contract::Answer, OpError>) -> StoreError {
    match result {
        Err(OpError::Unconfirmed(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_win_is_told_when_enough_replicas_have_it() {
    for (state, replicas, reason) in [
        (1, 2, ""),
        (1, 5, ""),
        (1, 1, "1 of 2 replicas of Redis at 127.0.0.1"),
        (0, 2, "it was gone before"),
    ] {
        let fake = Fake::start(move |request| match confirms(request) {
            true => Some(format!("*1\r\n:{state}\r\n").into()),
            false => request
                .is("WAIT")
                .then(|| format!(":{replicas}\r\n").into()),
        });
        let mut registry = open(&fake, WITHIN, BOUND).await;
        let result = registry.ask("k", attempt(1)).await;
        if reason.is_empty() {
            won(&result.unwrap().outcome);
            continue;
        }
        let error = unconfirmed(result);
        assert!(
            error.is_retryable() && error.to_string().contains(reason),
            "{error}"
        );
    }
}

/// What is no win is told at once.
#[tokio::test]
async fn others_are_not_held_up() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let fake = Fake::start(move |request| {
        if confirms(request) {
            return Some(OURS.to_vec());
        }
        if request.is("WAIT") {
            count.fetch_add(1, Ordering::Relaxed);
            return Some(Vec::new());
        }
        let releases = request.is_call() && request.letters() == "R";
        releases.then(|| request.reply(NOW, b"$1\r\n1\r\n"))
    });
    let mut registry = open(&fake, BOUND, BOUND).await;
    registry.submit("k", attempt(1));
    wait_until("the replicas are asked", BOUND, || {
        asked.load(Ordering::Relaxed) > 0
    })
    .await;
    let outcome = registry.outcome("other", release(2)).await;
    assert_eq!(outcome, Outcome::Gone { held: true });
    let told = registry.heard_by_now();
    assert!(told.is_none(), "{told:?}");
}

/// Told after the `Down`, an answer would be taken for one of the next connection.
#[tokio::test]
async fn o4_nothing_outlives_its_connection() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let fake = Fake::start(move |request| {
        if confirms(request) {
            return Some(OURS.to_vec());
        }
        if request.is("WAIT") {
            return Some(match count.fetch_add(1, Ordering::Relaxed) {
                0 => Vec::new(),
                _ => b":2\r\n".to_vec(),
            });
        }
        (request.is_call() && request.letters() == "R").then(|| HANG_UP.to_vec())
    });
    let mut registry = open(&fake, BOUND, BOUND).await;
    registry.submit("k", attempt(1));
    wait_until("the replicas are asked", BOUND, || {
        asked.load(Ordering::Relaxed) > 0
    })
    .await;
    registry.submit("end", release(2));
    let mut told = Vec::new();
    while told.len() < 3 {
        told.push(match registry.next().await {
            StoreEvent::Replied { submitted, result } => {
                unknown(result);
                submitted.key.to_string()
            }
            StoreEvent::Down { .. } => "down".to_owned(),
            other => panic!("{other:?}"),
        });
    }
    told[..2].sort();
    assert_eq!(told, ["end", "k", "down"]);
    assert!(registry.up().await);
    // Asked for again it is confirmed again.
    won(&registry.outcome("k", attempt(1)).await);
}

#[tokio::test]
async fn an_answer_that_does_not_come_is_not_waited_for() {
    on_a_steady_machine(async || {
        const TIMEOUT: Duration = Duration::from_millis(300);
        let fake = Fake::start(|request| match confirms(request) {
            true => Some(OURS.to_vec()),
            false => request.is("WAIT").then(Vec::new),
        });
        let mut registry = open(&fake, WITHIN, TIMEOUT).await;
        let begun = Instant::now();
        let error = unconfirmed(registry.ask("k", attempt(1)).await);
        let passed = begun.elapsed();
        assert!(error.to_string().contains("did not answer"), "{error}");
        assert!(passed >= WITHIN + TIMEOUT && passed < BOUND, "{passed:?}");
    })
    .await;
}

#[tokio::test]
async fn a_round_that_fails_is_asked_again_until_its_time_is_over() {
    for (failures, within) in [(2, BOUND), (usize::MAX, WITHIN)] {
        let mut asked = 0;
        let fake = Fake::start(move |request| {
            if confirms(request) {
                return Some(OURS.to_vec());
            }
            asked += usize::from(request.is("WAIT"));
            let answer = if asked > failures { b":2\r\n" } else { HANG_UP };
            request.is("WAIT").then(|| answer.to_vec())
        });
        let mut registry = open(&fake, within, BOUND).await;
        let begun = Instant::now();
        let result = registry.ask("k", attempt(1)).await;
        if within == BOUND {
            won(&result.unwrap().outcome);
            continue;
        }
        let error = unconfirmed(result);
        assert!(error.is_retryable() && begun.elapsed() >= WITHIN, "{error}");
    }
}

/// The script goes whole to each new connection, and by its hash after that.
#[tokio::test]
async fn a_script_that_was_forgotten_is_sent_again() {
    let mut flushed = false;
    let fake = Fake::start(move |request| {
        if !confirms(request) {
            return request.is("WAIT").then(|| b":2\r\n".to_vec());
        }
        let is_forgotten = request.is("EVALSHA") && !std::mem::replace(&mut flushed, true);
        Some(match is_forgotten {
            true => b"-NOSCRIPT No matching script.\r\n".to_vec(),
            false => OURS.to_vec(),
        })
    });
    let mut registry = open(&fake, BOUND, BOUND).await;
    for owner in 1..4 {
        won(&registry.outcome("k", attempt(owner)).await);
    }
}
