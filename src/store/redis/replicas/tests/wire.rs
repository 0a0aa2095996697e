//! What a server may answer, or not, played by a few lines.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::super::ledger::{Round, Seen};
use super::super::rule::Replicas;
use super::super::wire::Wire;
use crate::store::contract::Owner;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::Fault;
use crate::store::redis::keys::Names;

const TIMEOUT: Duration = Duration::from_secs(5);

/// Asks for two locks a server that answers so to a script, and after that so to WAIT; before that it knows all.
async fn ask(script: &'static str, wait: &'static str, timeout: Duration) -> Result<Seen, Fault> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = vec![0; 10_000];
        let mut asked = false;
        loop {
            let count = stream.read(&mut bytes).await.unwrap();
            if count == 0 {
                return;
            }
            let text = String::from_utf8_lossy(&bytes[..count]).into_owned();
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
        }
    });
    let endpoint = Endpoint::parse(&url).unwrap();
    let mut wire = Wire::connect(&endpoint, TIMEOUT).await.unwrap();
    let rule = Replicas::new(2, Duration::from_millis(50))
        .unwrap()
        .unwrap();
    let round = Round {
        number: 1,
        downs: 0,
        locks: vec![("a".into(), Owner(1)), ("b".into(), Owner(2))],
        wait: Duration::from_millis(50),
    };
    let names = Names::new("lock".into(), "ab".into());
    let seen = wire.confirm(&names, &round, rule, timeout).await;
    drop(wire);
    server.await.unwrap();
    seen
}

#[tokio::test]
async fn an_answer_is_read() {
    let seen = ask("*2\r\n:1\r\n:0\r\n", ":2\r\n", TIMEOUT).await.unwrap();
    assert_eq!((&seen.ours[..], seen.replicas), (&[true, false][..], 2));
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
