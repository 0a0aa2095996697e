//! What a server may answer, or not, played by a few lines.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::super::ledger::{Lock, Round, Said, Seen};
use super::super::rule::Replicas;
use super::super::wire::Wire;
use crate::store::contract::Owner;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::Fault;
use crate::store::redis::keys::Names;

const TIMEOUT: Duration = Duration::from_secs(5);

fn lock(key: &str, owner: u64, slot: u16) -> Lock {
    Lock {
        key: key.into(),
        owner: Owner(owner),
        slot,
        asking: false,
        is_alone: false,
    }
}

/// Asks for two locks a server that answers so to a script, and after that so to WAIT; before that it knows all.
async fn ask(script: &'static str, wait: &'static str, timeout: Duration) -> Result<Seen, Fault> {
    let locks = vec![lock("a", 1, 0), lock("b", 2, 0)];
    let asked = ask_for(locks, false, script, wait, timeout).await;
    asked.map(|(seen, _)| seen)
}

/// Also what it was asked.
async fn ask_for(
    locks: Vec<Lock>,
    is_node: bool,
    script: &'static str,
    wait: &'static str,
    timeout: Duration,
) -> Result<(Seen, String), Fault> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = vec![0; 10_000];
        let mut asked = false;
        let (mut all, mut text) = (String::new(), String::new());
        loop {
            let count = stream.read(&mut bytes).await.unwrap();
            if count == 0 {
                return all;
            }
            text += &String::from_utf8_lossy(&bytes[..count]);
            if text.contains("EVAL") && !text.contains("WAIT") {
                // There is more to come.
                continue;
            }
            all += &text;
            // Whatever else the client says of itself.
            let mut answers = "+OK\r\n".repeat(text.matches("CLIENT\r\n").count());
            asked |= text.contains("EVAL");
            answers += if text.contains("EVAL") { script } else { "" };
            let waits = text.contains("WAIT");
            answers += match asked {
                true if waits => wait,
                false if waits => ":3\r\n",
                _ => "",
            };
            stream.write_all(answers.as_bytes()).await.unwrap();
            text.clear();
        }
    });
    let endpoint = Endpoint::parse(&url).unwrap();
    let mut wire = Wire::connect(&endpoint, is_node, TIMEOUT).await.unwrap();
    let rule = Replicas::new(2, Duration::from_millis(50))
        .unwrap()
        .unwrap();
    let round = Round {
        number: 1,
        downs: 0,
        locks,
        wait: Duration::from_millis(50),
    };
    let names = Names::new("lock".into(), "ab".into());
    let seen = wire.confirm(&names, &round, rule, timeout).await;
    drop(wire);
    let asked = server.await.unwrap();
    seen.map(|seen| (seen, asked))
}

/// In short.
fn said(seen: &Seen) -> Vec<String> {
    let short = |said: &Said| match said {
        Said::Ours => "ours".to_owned(),
        Said::Gone => "gone".to_owned(),
        Said::Elsewhere(hint, error) => {
            assert!(error.is_retryable(), "{error}");
            let to = hint.to.as_deref().unwrap_or("somewhere");
            let to = to.strip_prefix("127.0.0.1").unwrap_or(to);
            format!("{to} {} {}", hint.asking, hint.is_alone)
        }
    };
    seen.said.iter().map(short).collect()
}

#[tokio::test]
async fn an_answer_is_read() {
    let seen = ask("*2\r\n:1\r\n:0\r\n", ":2\r\n", TIMEOUT).await.unwrap();
    assert_eq!(
        (&said(&seen)[..], seen.replicas),
        (&["ours".into(), "gone".into()][..], 2)
    );
}

/// One WAIT after all of them counts for all. Calls hold one slot each, and those that are asked for where their slot is
/// not yet, or alone, have calls of their own.
#[tokio::test]
async fn a_round_is_some_calls_and_one_question() {
    let asking = |key, owner| Lock {
        asking: true,
        ..lock(key, owner, 2)
    };
    let alone = |key, owner| Lock {
        is_alone: true,
        ..lock(key, owner, 1)
    };
    let locks = vec![
        lock("a", 1, 2),
        lock("b", 2, 1),
        asking("c", 3),
        alone("d", 4),
        alone("e", 5),
        lock("f", 6, 2),
    ];
    let answers = "*1\r\n:1\r\n*2\r\n:1\r\n:0\r\n+OK\r\n*1\r\n:0\r\n*1\r\n:1\r\n*1\r\n:0\r\n";
    let (seen, asked) = ask_for(locks, true, answers, ":2\r\n", TIMEOUT)
        .await
        .unwrap();
    assert_eq!(
        said(&seen),
        ["ours", "ours", "gone", "ours", "gone", "gone"]
    );
    assert_eq!(seen.replicas, 2);
    let words: Vec<_> = asked.split("\r\n").collect();
    let count = |word| words.iter().filter(|it| **it == word).count();
    assert_eq!((count("EVAL"), count("EVALSHA")), (1, 4));
    assert_eq!((count("ASKING"), count("WAIT")), (1, 1));
    let keys: Vec<_> = words.iter().filter(|it| it.starts_with("lock:")).collect();
    let expected = ["lock:b", "lock:a", "lock:f", "lock:c", "lock:d", "lock:e"];
    assert!(
        keys.iter().eq(&expected.iter().collect::<Vec<_>>()),
        "{keys:?}"
    );
}

#[tokio::test]
async fn many_locks_do_not_hold_a_server_up_in_one_call() {
    let locks: Vec<_> = (0..1_025).map(|n| lock(&format!("k{n}"), n, 0)).collect();
    let ours = |count: usize| format!("*{count}\r\n{}", ":1\r\n".repeat(count));
    let answers = ours(512) + &ours(512) + &ours(1);
    let (seen, asked) = ask_for(locks, false, answers.leak(), ":2\r\n", TIMEOUT)
        .await
        .unwrap();
    assert!(said(&seen).iter().all(|it| it == "ours") && seen.said.len() == 1_025);
    assert_eq!(asked.matches("EVALSHA\r\n").count(), 2);
    // The first when it connected.
    assert_eq!(asked.matches("WAIT\r\n").count(), 2);
}

/// The rest of the round counts. A replica does not count replicas, and that matters to nobody if it has no lock.
#[tokio::test]
async fn what_a_node_has_not_it_says_where_to_ask_for() {
    let no = "-ERR WAIT cannot be used with replica instances\r\n";
    for (script, wait, expected) in [
        (
            "-MOVED 1 10.0.0.1:7\r\n*1\r\n:1\r\n",
            ":2\r\n",
            ["10.0.0.1:7 false false", "ours"],
        ),
        (
            "*1\r\n:1\r\n-ASK 2 :7\r\n",
            ":2\r\n",
            ["ours", ":7 true true"],
        ),
        (
            "-TRYAGAIN not all\r\n*1\r\n:0\r\n",
            no,
            ["somewhere false true", "gone"],
        ),
        (
            "-CLUSTERDOWN no\r\n-NOSCRIPT no\r\n",
            no,
            ["somewhere false false"; 2],
        ),
        (
            "-MOVED 1 a\tb:7\r\n-MOVED 1 nowhere\r\n",
            no,
            ["somewhere false false"; 2],
        ),
    ] {
        let locks = vec![lock("a", 1, 1), lock("b", 2, 2)];
        let asked = ask_for(locks, true, script, wait, TIMEOUT).await;
        let (seen, _) = asked.unwrap_or_else(|fault| panic!("{script:?}: {fault}"));
        assert_eq!(said(&seen), expected, "{script:?}");
    }
    for script in ["-MOVED 1 10.0.0.1:7\r\n", "-CLUSTERDOWN no\r\n"] {
        let fault = ask(script, ":2\r\n", TIMEOUT).await.unwrap_err();
        assert!(
            matches!(fault, Fault::Refused { .. }),
            "not of a node: {fault}"
        );
    }
}

/// It may have been swallowed on the way.
#[tokio::test]
async fn an_answer_that_does_not_come_is_not_waited_for() {
    for (script, wait) in [("", ""), ("*2\r\n:1\r\n:1\r\n", "")] {
        let begun = Instant::now();
        let fault = ask(script, wait, Duration::from_millis(100))
            .await
            .unwrap_err();
        assert!(matches!(fault, Fault::Silent { .. }), "{fault}");
        let passed = begun.elapsed();
        assert!(passed >= Duration::from_millis(150), "{passed:?}");
        assert!(passed < TIMEOUT, "{passed:?}");
    }
}

#[tokio::test]
async fn what_is_no_answer_is_not_believed() {
    for (script, wait) in [
        ("*1\r\n:1\r\n", ":2\r\n"),
        ("*3\r\n:1\r\n:1\r\n:1\r\n", ":2\r\n"),
        ("*2\r\n:1\r\n:2\r\n", ":2\r\n"),
        ("*2\r\n:1\r\n$1\r\n1\r\n", ":2\r\n"),
        ("$-1\r\n", ":2\r\n"),
        ("*2\r\n:1\r\n:1\r\n", ":-2\r\n"),
        ("*2\r\n:1\r\n:1\r\n", "+OK\r\n"),
    ] {
        let fault = ask(script, wait, TIMEOUT).await.unwrap_err();
        assert!(
            matches!(fault, Fault::Garbled { .. }),
            "{script:?} {wait:?}: {fault}"
        );
    }
}

#[tokio::test]
async fn a_refusal_says_what_was_refused() {
    let no = "-NOPERM User x has no permissions to run the 'wait' command\r\n";
    let ours = "*2\r\n:1\r\n:1\r\n";
    for (script, wait) in [(ours, no), (no, ":2\r\n")] {
        let fault = ask(script, wait, TIMEOUT).await.unwrap_err();
        assert!(
            fault.is_lasting() && fault.to_string().contains("'wait'"),
            "{fault}"
        );
    }
    let busy = ask("-LOADING it is loading\r\n", ":2\r\n", TIMEOUT).await;
    assert!(!busy.unwrap_err().is_lasting());
}
