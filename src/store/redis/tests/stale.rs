//! O5: what comes too late does nothing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake::{Fake, NOW, STALE, WON};
use super::registry::{BOUND, Registry, Settings, attempt, enter, queue, unknown, won};
use super::support::{RedisServer, on_a_steady_machine, wait_until};
use crate::store::redis::script;

/// The command waited in the server's socket, whoever sent it
/// has given it up, and no connection is left to kill.
#[tokio::test]
async fn o5_a_command_of_a_dead_connection_wins_for_nobody() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let timeout = Duration::from_millis(300);
        let mut one = Settings::new(&server, "a1")
            .response_timeout(timeout)
            .up()
            .await;
        server.set("lock:busy", "foreign");
        // So that the server knows the script.
        let mut other = Registry::on(&server, "b2").await;
        won(&other.outcome("other", attempt(9)).await);
        server.reset_stats();
        server.stop();
        one.submit("k", attempt(1));
        one.submit("busy", enter(2));
        unknown(one.reply("k", &attempt(1)).await);
        unknown(one.reply("busy", &enter(2)).await);
        server.cont();
        assert!(one.up().await);
        // The new probe, and the call that is of no use any more.
        wait_until("it has run", BOUND, || server.calls("evalsha") >= 2).await;
        assert!(!server.exists("lock:k"));
        assert_eq!(queue(&server, "lock:busy"), []);
    })
    .await;
}

/// In each mode.
#[tokio::test]
async fn o5_a_stale_script_does_nothing_and_tells_its_time() {
    const LATE: &str = "0000000000001000";
    const IN_TIME: &str = "9000000000000000";
    let server = RedisServer::start();
    let run = |op: &str, of_use: &str, owner: &str, more: &str, mode: &str| -> String {
        server.ask(&[
            "EVAL",
            script::TEXT,
            "4",
            "lock:k",
            "{lock:k}:~queue2",
            "{lock:k}:~listen1",
            "lock:~fence",
            "7",
            op,
            of_use,
            owner,
            "30000",
            more,
            mode,
        ])
    };
    let assert_stale = |reply: String| {
        let at = reply.strip_prefix("7 ").unwrap().strip_suffix(" stale");
        let at = at.unwrap_or_else(|| panic!("{reply}"));
        assert!(at.parse::<u64>().unwrap() > 1_000_000_000_000_000);
    };
    for mode in ["", "r", "1/2"] {
        for op in ["A", "E", "L"] {
            assert_stale(run(op, LATE, "a1:1", "", mode));
            assert_eq!(server.keys("*"), [""; 0], "{op} {mode:?}");
        }
        let has_won = |reply: String| reply.split(' ').nth(2).unwrap().parse::<u64>().is_ok();
        assert!(has_won(run("A", IN_TIME, "a1:1", "", mode)), "{mode:?}");
        assert_stale(run("D", LATE, "b1:1", "a1:1", mode));
        // The first still has it.
        assert!(has_won(run("D", IN_TIME, "c1:1", "a1:1", mode)), "{mode:?}");
        server.flushall();
    }
}

#[tokio::test]
async fn o5_a_stale_op_goes_again_with_the_new_time() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    let later = NOW + 3_600_000_000;
    let fake = Fake::start(move |request| {
        let mut seen = seen.lock().unwrap();
        request.is_call().then(|| {
            seen.push(request.of_use());
            request.reply(later, if seen.len() == 1 { STALE } else { WON })
        })
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    let answer = one.ask("k", attempt(1)).await.unwrap();
    assert_eq!((answer.at, won(&answer.outcome)), (later, 7));
    let calls = calls.lock().unwrap();
    let [first, second] = calls[..] else {
        panic!("{calls:?}")
    };
    // An answer may take so long, and the way to the call as long at most.
    let bound = u64::try_from(BOUND.as_micros()).unwrap();
    assert!((NOW + bound..NOW + 2 * bound).contains(&first), "{first}");
    assert!(
        (later + bound..later + 2 * bound).contains(&second),
        "{second}"
    );
}

#[tokio::test]
async fn o5_a_second_refusal_ends_the_connection() {
    let fake = Fake::start(|request| {
        (request.is_call() && request.connection == 1).then(|| request.reply(NOW, STALE))
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    unknown(one.ask("k", attempt(1)).await);
    one.down().await;
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}
