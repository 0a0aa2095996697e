//! What ends a connection, and what only seems to.

use std::time::{Duration, Instant};

use super::fake::{Fake, HANG_UP, NOW, Request, push};
use super::registry::{BOUND, Registry, Settings, attempt, refused, unknown, unsent, won};
use super::support::{Proxy, RedisServer, Way, on_a_steady_machine, wait_until};
use crate::store::contract::{Answer, OpError, StoreEvent};

#[tokio::test]
async fn o4_a_server_that_does_not_answer_is_given_up() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let timeout = Duration::from_millis(300);
        let mut one = Settings::new(&server, "a1")
            .response_timeout(timeout)
            .up()
            .await;
        server.stop();
        let began = Instant::now();
        let error = unknown(one.ask("k", attempt(1)).await);
        assert!(began.elapsed() >= timeout, "{:?}", began.elapsed());
        assert!(
            error.to_string().contains("did not answer within 300ms"),
            "{error}"
        );
        one.down().await;
        // The kernel still takes connections for it.
        assert!(unsent(one.ask("k", attempt(2)).await).is_retryable());
        server.cont();
        assert!(one.up().await);
        // Its answer may take longer than that again.
        let back = Instant::now();
        let won_at_last = loop {
            let asked = Instant::now();
            match one.ask("other", attempt(3)).await {
                Ok(answer) => break answer.outcome,
                Err(OpError::Unknown(error)) => assert!(asked.elapsed() >= timeout, "{error}"),
                Err(OpError::Unsent(_)) => {}
                Err(error) => panic!("{error:?}"),
            }
            assert!(back.elapsed() < BOUND, "it is there again");
        };
        won(&won_at_last);
    })
    .await;
}

/// The first connection answers the first call wrongly, and nothing else does. The op must be
/// Unknown, and the connection must not live on.
async fn ends_the_connection(mut wrong: impl FnMut(&Request) -> Vec<u8> + Send + 'static) {
    let fake = Fake::start(move |request| {
        (request.is_call() && request.connection == 1).then(|| wrong(request))
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    unknown(one.ask("k", attempt(1)).await);
    assert!(one.down().await.is_retryable());
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}

#[tokio::test]
async fn o4_a_reply_with_another_calls_number_ends_the_connection() {
    ends_the_connection(|request| {
        let reply = String::from_utf8(request.usual()).unwrap();
        let number = request.number();
        reply
            .replacen(
                &format!("\r\n{number}\r\n"),
                &format!("\r\n{}\r\n", number - 1),
                1,
            )
            .into_bytes()
    })
    .await;
}

#[tokio::test]
async fn o4_an_invalid_reply_ends_the_connection() {
    for wrong in [
        "+OK\r\n",
        "_\r\n",
        "*0\r\n",
        ":7\r\n",
        "*2\r\n:3\r\n:4\r\n",
        "?\r\n",
    ] {
        ends_the_connection(|_| wrong.as_bytes().to_vec()).await;
    }
    for wrong in [
        "$4\r\nlost\r\n",
        "*1\r\n$1\r\n7\r\n",
        ":7\r\n",
        "*0\r\n",
        "_\r\n",
    ] {
        ends_the_connection(|request| request.reply(NOW, wrong.as_bytes())).await;
    }
}

/// Two calls are under way on the first connection, and `said` is all that comes.
async fn ends_with_both_unknown(said: impl Fn(&Request, &Request) -> Vec<u8> + Send + 'static) {
    let mut first = None;
    let fake = Fake::start(move |request| {
        if !request.is_call() || request.connection != 1 {
            return None;
        }
        let Some(first) = &first else {
            first = Some(request.clone());
            return Some(Vec::new());
        };
        Some(said(first, request))
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    one.submit("k", attempt(1));
    // Lets the task send it, so that the second has a call of its own.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    one.submit("other", attempt(2));
    unknown(one.reply("k", &attempt(1)).await);
    unknown(one.reply("other", &attempt(2)).await);
    assert!(one.down().await.is_retryable());
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}

/// The client takes the push for the answer to the first call, and gives the second the first's.
#[tokio::test]
async fn o4_an_unasked_change_of_subscription_ends_the_connection() {
    for kind in ["unsubscribe", "sunsubscribe", "subscribe"] {
        ends_with_both_unknown(move |first, second| {
            let mut bytes = push(&[kind, "lock:~grant:a1"], ":0\r\n");
            bytes.extend(first.usual());
            bytes.extend(second.usual());
            bytes
        })
        .await;
    }
}

/// The worst of it: an error names no call. Taken for the second call's it would say that this was
/// not done, when it was.
#[tokio::test]
async fn o4_a_shifted_error_is_not_taken_for_a_refusal() {
    ends_with_both_unknown(|_, second| {
        let mut bytes = push(&["unsubscribe", "lock:~grant:a1"], ":0\r\n");
        bytes.extend(b"-TRYAGAIN the first call's\r\n");
        bytes.extend(second.usual());
        bytes
    })
    .await;
}

#[tokio::test]
async fn an_idle_connection_ends_at_an_unasked_change_of_subscription_too() {
    let fake = Fake::start(|request| {
        let is_first = request.is_call() && request.connection == 1;
        is_first.then(|| {
            let mut bytes = request.usual();
            bytes.extend(push(&["sunsubscribe", "lock:~grant:a1"], ":0\r\n"));
            bytes
        })
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    let _ = one.ask("k", attempt(1)).await;
    one.down().await;
    assert!(one.up().await);
}

#[tokio::test]
async fn refusals_of_a_whole_call_are_each_ops_own() {
    let fake = Fake::start(|request| {
        request
            .is_call()
            .then(|| b"-BUSY Redis is busy running a script.\r\n".to_vec())
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    let (why, retryable) = refused(one.ask("k", attempt(1)).await);
    assert!(why.contains("BUSY") && retryable, "{why}");
    while let Some(event) = one.heard_by_now() {
        assert!(!matches!(event, StoreEvent::Down { .. }), "{event:?}");
    }
}

#[tokio::test]
async fn a_loss_is_told_after_the_ops_that_it_took_along() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    // So that the server knows the script.
    won(&one.outcome("other", attempt(9)).await);
    proxy.hold(Way::ToClient, true);
    for owner in 0..3 {
        one.submit(&format!("k{owner}"), attempt(owner));
    }
    wait_until("sent", BOUND, || server.exists("lock:k2")).await;
    proxy.cut();
    for _ in 0..3 {
        let event = one.next().await;
        let is_unknown = matches!(
            event,
            StoreEvent::Replied {
                result: Err(OpError::Unknown(_)),
                ..
            }
        );
        assert!(is_unknown, "{event:?}");
    }
    assert!(matches!(one.next().await, StoreEvent::Down { .. }));
}

#[tokio::test]
async fn refused_writes_do_not_end_the_connection() {
    let server = RedisServer::builder()
        .config("min-replicas-to-write 1")
        .start();
    let mut one = Registry::on(&server, "a1").await;
    let (why, retryable) = refused(one.ask("k", attempt(1)).await);
    assert!(why.contains("NOREPLICAS") && retryable, "{why}");
    server.cmd(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    won(&one.outcome("k", attempt(1)).await);
    one.has_not_heard(|event| matches!(event, StoreEvent::Down { .. }))
        .await;
}

/// Also if it is more than tokio lets a task take in at a time.
#[tokio::test]
async fn pushes_before_a_reply_are_handled_before_it() {
    let fake = Fake::start(move |request| {
        if !request.is_call() {
            return None;
        }
        let said = |text: &str| push(&["message", "lock:~grant:a1", text], "");
        let mut bytes = said("no grant").repeat(300);
        bytes.extend(said("1 a1:9 30000 7 1700000000000000 other"));
        bytes.extend(request.usual());
        Some(bytes)
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    one.submit("k", attempt(1));
    let first = one.next().await;
    assert!(matches!(first, StoreEvent::Granted { .. }), "{first:?}");
    won(&one.reply("k", &attempt(1)).await.unwrap().outcome);
}

/// More than is told at once: what the connection's end came with must not go down with it.
#[tokio::test]
async fn events_are_delivered_before_the_end_of_their_connection() {
    let (mut one, reply) = hear_a_crowd(HANG_UP).await;
    // The client may tell of the end before it gives the reply: then that is lost, and said to be.
    assert!(
        matches!(&reply, Ok(_) | Err(OpError::Unknown(_))),
        "{reply:?}"
    );
    let end = one.next().await;
    assert!(matches!(end, StoreEvent::Down { .. }), "{end:?}");
}

/// More than is told at once: the rest waits for the next turn, and its turn comes.
#[tokio::test]
async fn events_of_one_moment_keep_their_order() {
    let (_one, reply) = hear_a_crowd(b"").await;
    won(&reply.unwrap().outcome);
}

/// Has heard forty grants, and the reply behind them, all of which the server sent at once.
async fn hear_a_crowd(end: &'static [u8]) -> (Registry, Result<Answer, OpError>) {
    const GRANTS: u64 = 40;
    let fake = Fake::start(move |request| {
        if !request.is_call() {
            return None;
        }
        let mut bytes = Vec::new();
        for number in 1..=GRANTS {
            let grant = format!("1 a1:{number} 30000 7 1700000000000000 other{number}");
            bytes.extend(push(&["message", "lock:~grant:a1", &grant], ""));
        }
        bytes.extend(request.usual());
        bytes.extend(end);
        Some(bytes)
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    one.submit("k", attempt(1));
    for number in 1..=GRANTS {
        let event = one.next().await;
        assert!(
            matches!(&event, StoreEvent::Granted { key, .. } if **key == *format!("other{number}")),
            "{event:?} for grant {number}"
        );
    }
    let reply = one.reply("k", &attempt(1)).await.clone();
    (one, reply)
}
