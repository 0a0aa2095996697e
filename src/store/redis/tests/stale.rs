//! O5: what comes too late does nothing.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fake::{Fake, NOW, STALE, WON};
use super::registry::{BOUND, Settings, attempt, enter, queue, unknown, won};
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
        won(&one.outcome("other", attempt(9)).await);
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

#[tokio::test]
async fn o5_a_stale_script_does_nothing_and_tells_its_time() {
    let server = RedisServer::start();
    let script = script::TEXT;
    for op in ["A", "E", "L", "D"] {
        let words = [
            "lock:k",
            "{lock:k}:~queue2",
            "{lock:k}:~listen1",
            "lock:~fence",
            "7",
            op,
            "0000000000001000",
            "a1:1",
            "30000",
        ];
        let mut command = vec!["EVAL", script, "4"];
        command.extend(words);
        let reply: String = server.ask(&command);
        let at = reply.strip_prefix("7 ").unwrap().strip_suffix(" stale");
        assert!(at.unwrap().parse::<u64>().unwrap() > 1_000_000_000_000_000);
        assert_eq!(server.keys("*"), [""; 0]);
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
    let mut one = Settings::url(fake.url(), "a1")
        .response_timeout(Duration::from_secs(2))
        .up()
        .await;
    let answer = one.ask("k", attempt(1)).await.unwrap();
    assert_eq!((answer.at, won(&answer.outcome)), (later, 7));
    let calls = calls.lock().unwrap();
    let [first, second] = calls[..] else {
        panic!("{calls:?}")
    };
    assert!(
        (NOW + 2_000_000..NOW + 12_000_000).contains(&first),
        "{first}"
    );
    assert!(
        (later + 2_000_000..later + 12_000_000).contains(&second),
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
