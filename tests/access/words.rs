use lockstream::store::RedisStore;
use lockstream::{LockError, LockRegistry};
use proptest::prelude::*;
use tokio::time::timeout;

use crate::BOUND;
use crate::support::{RedisServer, again_if_it_stood_still};

/// Anything, and what looks like a url at first.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "unix",
        "redis+unix",
        "redis+sentinel",
        "rediss+sentinel",
        "redis+cluster",
        "http",
        "REDIS",
        "://",
        ":",
        "//",
        "/",
        "@",
        "?",
        "&",
        "#",
        "=",
        "[",
        "]",
        "%",
        "%zz",
        "%00",
        "\\",
        " ",
        "\n",
        "\0",
        "é",
        "🔒",
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "localhost",
        "0",
        "-1",
        "6379",
        "65536",
        "99999999999999999999",
        "db",
        "user",
        "pass",
        "protocol",
        "insecure",
        ",",
        "service",
        "sentinel_user",
        "sentinel_password",
        "2",
        "3",
    ]);
    prop_oneof![
        any::<String>(),
        "(redis|rediss|unix|valkey|redis\\+unix|rediss?\\+(sentinel|cluster)):(//)?\\PC{0,40}",
        "rediss?\\+sentinel://[a-z@:,\\[\\]0-9/?&=%#]{0,40}",
        prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat()),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4096, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any text is an address, or an error that lasts and says what was expected; nothing panics.
    #[test]
    fn any_text_may_be_a_url(text in texts()) {
        match RedisStore::connect_lazy(&text) {
            Ok(store) => {
                let shown = format!("{store:?}");
                prop_assert!(shown.contains("address"));
            }
            Err(error) => {
                prop_assert!(!error.is_retryable());
                let said = error.to_string();
                prop_assert!(said.starts_with("invalid Redis url: "), "{}", said);
                prop_assert!(said.len() > "invalid Redis url: ".len() + 10, "{}", said);
            }
        }
    }
}

/// A slip in a url is told as what it is.
#[test]
fn slips_in_urls_are_told() {
    let cases = [
        ("", "expected redis://"),
        ("localhost:6379", "write redis://localhost:6379"),
        ("http://localhost", "write redis://"),
        ("redis://", "expected redis://"),
        ("redis://localhost:port", "the port of localhost must"),
        ("redis://[::1]:63790/x", "database"),
        ("redis://[::1]:637900/", "the port of [::1] must"),
        #[cfg(feature = "cluster")]
        ("redis+cluster://one:1,two:x/", "the port of two must"),
        #[cfg(feature = "sentinel")]
        ("redis+sentinel://one:x/main", "the port of one must"),
        ("redis://localhost/first", "database"),
        ("redis://0.0.0.0", "wildcard"),
        ("unix://relative/path", "path"),
        ("redis://:a/b@localhost", "percent-encoded"),
        ("redis://user:a#b@localhost", "percent-encoded"),
        ("redis://a?b@localhost", "percent-encoded"),
        #[cfg(feature = "tls-rustls")]
        ("rediss://localhost/#insecure", "in place of #insecure"),
        // The client reads both as the one above.
        #[cfg(feature = "tls-rustls")]
        ("REDISS://localhost/#insecure", "in place of #insecure"),
        #[cfg(feature = "tls-rustls")]
        ("rediss://localhost/#insecure ", "in place of #insecure"),
        #[cfg(not(feature = "tls-rustls"))]
        ("rediss://localhost/", "tls-rustls"),
        ("redis://one,two/", "redis+cluster://"),
        #[cfg(feature = "cluster")]
        ("redis+cluster://one,,two/", "redis+cluster://"),
        #[cfg(not(feature = "cluster"))]
        ("redis+cluster://one,two/", "feature `cluster`"),
        #[cfg(not(feature = "cluster"))]
        ("rediss+cluster://one,two/", "feature `cluster`"),
    ];
    for (url, reason) in cases {
        let error = RedisStore::connect_lazy(url).unwrap_err();
        assert!(error.to_string().contains(reason), "{url}: {error}");
        assert!(!error.is_retryable());
    }
}

/// What a key may be is the same on every store, and whatever it may be is locked, waited for and handed over, and
/// leaves nothing behind.
#[test]
fn any_text_may_be_a_key() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (one, two, memory) = runtime.block_on(async {
        let url = format!("{}?response_timeout=10&connect_timeout=60", server.url());
        (
            LockRegistry::connect(&url).await.unwrap(),
            LockRegistry::connect(&url).await.unwrap(),
            LockRegistry::in_memory(),
        )
    });
    let keys = prop_oneof![
        any::<String>(),
        "[ -~]{1,40}",
        "[{}:~*? a-c]{1,12}",
        "\\PC{1,200}",
        "(a|é|🔒){300,600}",
    ];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let tried = runner.run(&keys, |key| {
        runtime.block_on(again_if_it_stood_still(async || {
            let here = memory.obtain(&key).lease_once().await;
            match one.obtain(&key).lease_once().await {
                Ok(lease) => {
                    let lease = lease.expect("nobody else wants it");
                    here.unwrap()
                        .expect("nobody else wants it")
                        .release()
                        .await
                        .unwrap();
                    let waiter = tokio::spawn(two.obtain(&key).lease());
                    while one.obtain(&key).inspect().await.unwrap().waiting == 0 {
                        tokio::task::yield_now().await;
                    }
                    lease.release().await.unwrap();
                    let next = timeout(BOUND, waiter).await.expect("it is served").unwrap();
                    next.unwrap().release().await.unwrap();
                }
                Err(LockError::InvalidKey { .. }) => {
                    assert!(
                        matches!(here, Err(LockError::InvalidKey { .. })),
                        "{here:?}"
                    );
                }
                other => panic!("{other:?}"),
            }
        }));
        Ok(())
    });
    tried.unwrap();
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}
