//! A connection at work: order, batches, what ends it, and where its task lives.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::fake::{Fake, NOW, STALE, WON, push};
use super::registry::{
    BOUND, HELD, Registry, Settings, TTL, attempt, enter, refused, release, renew, unknown, unsent,
    won,
};
use super::support::{Proxy, RedisServer, Way, wait_until};
use crate::store::contract::{News, Outcome};

#[tokio::test]
async fn noscript_is_healed_for_each_script() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    server.script_flush();
    won(&one.outcome("k", attempt(1)).await);
    server.script_flush();
    assert_eq!(one.outcome("k", renew(1, 2 * TTL)).await, Outcome::Renewed);
    server.script_flush();
    assert!(
        one.session()
            .inspect("k".into())
            .await
            .unwrap()
            .owner
            .is_some()
    );
    server.script_flush();
    // The probe's, on a new connection.
    server.client_kill_all();
    one.down().await;
    assert!(one.up().await);
    assert_eq!(
        server.calls("eval"),
        5,
        "the first probe's, and one for each flush"
    );
    assert_eq!(one.outcome("k", release(1)).await, HELD);
}

#[tokio::test]
async fn what_piles_up_shares_calls_and_a_lone_op_goes_at_once() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("first", attempt(0)).await);
    server.reset_stats();
    for owner in 1..=640 {
        one.submit(&format!("k{owner}"), attempt(owner));
    }
    for owner in 1..=640 {
        let answer = one.reply(&format!("k{owner}"), &attempt(owner)).await;
        won(&answer.unwrap().outcome);
    }
    let calls = server.calls("evalsha");
    assert!((10..=20).contains(&calls), "{calls} calls for 640 ops");
}

#[tokio::test]
async fn o2_ops_of_one_key_are_done_in_order() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for owner in 1..=50 {
        one.submit("k", attempt(owner));
        one.submit("k", release(owner));
    }
    for owner in 1..=50 {
        won(&one.reply("k", &attempt(owner)).await.unwrap().outcome);
        assert_eq!(one.reply("k", &release(owner)).await.unwrap().outcome, HELD);
    }
}

#[tokio::test]
async fn o2_what_a_broken_connection_carried_is_unknown_op_by_op() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    won(&one.outcome("mine", attempt(9)).await);

    // Done, and the answer is lost.
    proxy.hold(Way::ToClient, true);
    one.submit("a", attempt(1));
    one.submit("b", enter(2));
    one.submit("mine", renew(9, 2 * TTL));
    wait_until("done", BOUND, || {
        server.exists("lock:a") && server.exists("lock:b")
    })
    .await;
    let look = one.session().inspect("a".into());
    proxy.cut();
    proxy.hold(Way::ToClient, false);
    for (key, op) in [
        ("a", attempt(1)),
        ("b", enter(2)),
        ("mine", renew(9, 2 * TTL)),
    ] {
        assert!(unknown(one.reply(key, &op).await).is_retryable());
    }
    let _ = look.await;
    one.down().await;

    // The same wish again gives the same thing.
    assert!(one.up().await);
    won(&one.outcome("a", attempt(1)).await);
    won(&one.outcome("b", enter(2)).await);
}

#[tokio::test]
async fn what_waits_when_a_connection_breaks_goes_out_on_the_next() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    proxy.hold(Way::ToServer, true);
    // As many calls as may be under way, and one op more for one of their keys.
    one.submit("k", attempt(1));
    one.submit("k", release(1));
    wait_until("the first is sent", BOUND, || proxy.connections() == 1).await;
    tokio::task::yield_now().await;
    proxy.cut();
    proxy.hold(Way::ToServer, false);
    let first = one.reply("k", &attempt(1)).await;
    assert!(first.is_err(), "{first:?}");
    let second = one
        .reply("k", &release(1))
        .await
        .expect("was not sent before");
    assert_eq!(second.outcome, super::registry::NOT_HELD);
}

#[tokio::test]
async fn o4_a_server_that_does_not_answer_is_given_up() {
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
    won(&one.outcome("other", attempt(3)).await);
}

/// The same, seen from the other side: the command waited in the server's socket, whoever sent it
/// has given it up, and no connection is left to kill.
#[tokio::test]
async fn o5_a_command_of_a_dead_connection_wins_for_nobody() {
    let server = RedisServer::start();
    let timeout = Duration::from_millis(300);
    let mut one = Settings::new(&server, "a1")
        .response_timeout(timeout)
        .up()
        .await;
    server.set("lock:busy", "foreign");
    server.stop();
    one.submit("k", attempt(1));
    one.submit("busy", enter(2));
    unknown(one.reply("k", &attempt(1)).await);
    unknown(one.reply("busy", &enter(2)).await);
    server.cont();
    assert!(one.up().await);
    // The probe's call, and the two that are of no use any more.
    wait_until("it has run", BOUND, || {
        server.calls("evalsha") + server.calls("eval") >= 4
    })
    .await;
    assert!(!server.exists("lock:k"));
    assert_eq!(super::registry::queue(&server, "lock:busy"), []);
}

#[tokio::test]
async fn o5_a_stale_script_does_nothing_and_tells_its_time() {
    let server = RedisServer::start();
    let script = include_str!("../batch.lua");
    for op in ["A", "E"] {
        let words = [
            "lock:~fence",
            "lock:k",
            "{lock:k}:~queue1",
            "7",
            "1000",
            "lock",
            op,
            "a1:1",
            "30000",
            "",
        ];
        let mut command = vec!["EVAL", script, "3"];
        command.extend(words);
        let (number, at, answers): (u64, u64, (String,)) = server.ask(&command);
        assert_eq!((number, &*answers.0), (7, "stale"));
        assert!(at > 1_000_000_000_000_000);
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
            seen.push(request.arguments()[1].parse::<u64>().unwrap());
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

/// What the first connection answers to the first call, before it answers everything else as a
/// server would. The op must be Unknown, and the connection must not live on.
async fn ends_the_connection(
    mut wrong: impl FnMut(&super::fake::Request) -> Vec<u8> + Send + 'static,
) {
    let fake = Fake::start(move |request| {
        (request.is_call() && request.connection == 1).then(|| wrong(request))
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    one.submit("k", attempt(1));
    one.submit("other", attempt(2));
    unknown(one.reply("k", &attempt(1)).await);
    unknown(one.reply("other", &attempt(2)).await);
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
            .replacen(&format!(":{number}"), &format!(":{}", number - 1), 1)
            .into_bytes()
    })
    .await;
}

#[tokio::test]
async fn o4_a_reply_that_is_none_ends_the_connection() {
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
    ends_the_connection(|request| request.reply(NOW, b"*1\r\n$4\r\nlost\r\n")).await;
    ends_the_connection(|request| request.reply(NOW, b"*2\r\n$3\r\nwon\r\n$1\r\n7\r\n")).await;
}

/// The client takes the push for the answer to the first call, and gives the second the first's.
#[tokio::test]
async fn o4_an_unasked_change_of_subscription_ends_the_connection() {
    for kind in ["unsubscribe", "sunsubscribe", "subscribe"] {
        ends_the_connection(move |request| {
            let mut bytes = push(&[kind, "lock:~grant:a1"], ":0\r\n");
            bytes.extend(request.usual());
            bytes
        })
        .await;
    }
}

/// The worst of it: an error names no call. Taken for the second call's it would say that this was
/// not done, when it was.
#[tokio::test]
async fn o4_a_shifted_error_is_not_taken_for_a_refusal() {
    ends_the_connection(move |_| {
        let mut bytes = push(&["unsubscribe", "lock:~grant:a1"], ":0\r\n");
        bytes.extend(b"-TRYAGAIN the first call's\r\n");
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
    while let Some(news) = one.heard_by_now() {
        assert!(!matches!(news, News::Down(_)), "{news:?}");
    }
}

#[tokio::test]
async fn a_missing_right_to_run_scripts_is_a_lasting_fault() {
    let server = RedisServer::builder()
        .config("user bare on nopass ~* &* +@all -eval -evalsha")
        .start();
    let mut one = Settings::url(server.url_with("bare", "x", 0), "a1").open();
    one.session().start();
    let error = unsent(one.ask("k", attempt(1)).await);
    assert!(
        !error.is_retryable() && error.to_string().contains("NOPERM"),
        "{error}"
    );
}

#[tokio::test]
async fn a_dropped_session_closes_its_connection() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    assert_eq!(server.clients().len(), 1);
    one.session = None;
    wait_until("closed", BOUND, || server.clients().is_empty()).await;
    one.down().await;
}

#[tokio::test]
async fn a_session_dropped_while_it_pauses_ends_its_task() {
    let mut server = RedisServer::start();
    server.kill();
    let mut one = Settings::new(&server, "a1").open();
    one.session().start();
    for _ in 0..4 {
        one.down().await;
    }
    one.session = None;
    let alive = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    wait_until("the task ends", BOUND, || alive() == 0).await;
}

#[test]
fn a_session_outlives_the_runtime_that_it_ran_on() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").open();
    one.session().start();
    one.submit("early", attempt(1));

    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let first = runtime();
    first.block_on(async {
        one.session().start();
        assert!(one.up().await);
        won(&one.reply("early", &attempt(1)).await.unwrap().outcome);
        proxy.hold(Way::ToClient, true);
        one.submit("sent", attempt(2));
        wait_until("sent", BOUND, || server.exists("lock:sent")).await;
        one.submit("sent", release(2));
    });
    drop(first);
    proxy.hold(Way::ToClient, false);

    runtime().block_on(async {
        unknown(one.reply("sent", &attempt(2)).await);
        unsent(one.reply("sent", &release(2)).await);
        one.down().await;
        // No task, and nobody has called start: the op sees to it itself.
        one.submit("sent", release(2));
        assert!(one.up().await);
        assert_eq!(one.reply("sent", &release(2)).await.unwrap().outcome, HELD);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_threads_start_one_task() {
    let server = RedisServer::start();
    let mut one = Settings::new(&server, "a1").open();
    std::thread::scope(|scope| {
        let runtime = tokio::runtime::Handle::current();
        for owner in 0..8 {
            let (one, runtime) = (&one, runtime.clone());
            scope.spawn(move || {
                let _guard = runtime.enter();
                one.session().start();
                one.submit(&format!("k{owner}"), attempt(owner));
            });
        }
    });
    for owner in 0..8 {
        won(&one
            .reply(&format!("k{owner}"), &attempt(owner))
            .await
            .unwrap()
            .outcome);
    }
    assert_eq!(server.clients().len(), 1);
}
