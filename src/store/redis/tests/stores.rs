//! Making a store: urls, first contact, and what is said when it fails.

use std::net::TcpListener;
use std::time::Duration;

use super::registry::{Settings, attempt, unsent, won};
use super::support::RedisServer;
use crate::base::StoreError;
use crate::store::RedisStore;

async fn error(url: &str) -> StoreError {
    RedisStore::connect(url).await.expect_err(url)
}

#[tokio::test]
async fn connect_proves_that_the_server_answers() {
    let mut server = RedisServer::start();
    RedisStore::connect(server.url()).await.unwrap();
    RedisStore::connect(server.unix_url()).await.unwrap();
    server.kill();
    let error = error(&server.url()).await;
    assert!(error.is_retryable());
    let address = format!("127.0.0.1:{}", server.port());
    assert!(error.to_string().contains(&address), "{error}");
    RedisStore::connect_lazy(server.url()).expect("nothing is asked");
}

#[tokio::test]
async fn connect_works_where_resp3_does_not() {
    let server = RedisServer::builder()
        .config("rename-command HELLO \"\"")
        .start();
    RedisStore::connect(server.url()).await.unwrap();
}

#[tokio::test]
async fn connect_says_that_a_password_is_missing_or_wrong() {
    for hello in ["", "rename-command HELLO \"\""] {
        let server = RedisServer::builder()
            .config("requirepass open-sesame")
            .config(hello)
            .start();
        let right = server.url_with("", "open-sesame", 0);
        RedisStore::connect(&right).await.unwrap();
        for wrong in [server.url(), server.url_with("", "close-sesame", 0)] {
            let error = error(&wrong).await;
            assert!(!error.is_retryable(), "{error}");
            assert!(
                !format!("{error} {error:?}").contains("sesame"),
                "{error:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_database_that_is_not_there_is_a_lasting_fault() {
    let server = RedisServer::start();
    let error = error(&server.url_with("", "", 99)).await;
    assert!(!error.is_retryable(), "{error}");
}

#[tokio::test]
async fn a_unix_socket_takes_user_password_and_database() {
    let server = RedisServer::builder()
        .config("user joe on >j0e ~* &* +@all")
        .start();
    let url = format!("{}?db=3&user=joe&pass=j0e", server.unix_url());
    let mut one = Settings::url(url, "a1").up().await;
    won(&one.outcome("k", attempt(1)).await);
    let client = server.clients().pop().unwrap();
    assert_eq!(
        (
            client.field("user"),
            client.field("db"),
            client.field("resp")
        ),
        ("joe", "3", "3")
    );
}

#[tokio::test]
async fn resp3_is_spoken_unless_the_url_says_otherwise() {
    for (option, spoken) in [("", "3"), ("?protocol=resp3", "3"), ("?protocol=2", "2")] {
        let server = RedisServer::start();
        let url = format!("{}{option}", server.url());
        let mut one = Settings::url(url, "a1").open();
        one.session().start();
        assert_eq!(one.up().await, spoken == "3", "{option}");
        assert_eq!(server.clients().pop().unwrap().field("resp"), spoken);
    }
}

#[test]
fn a_password_shows_nowhere() {
    let url = "redis://joe:open-sesame@127.0.0.1:1/";
    let store = RedisStore::connect_lazy(url).unwrap();
    let shown = format!("{store:?} {:?}", RedisStore::connect(url));
    assert!(
        shown.contains("127.0.0.1:1") && !shown.contains("sesame"),
        "{shown}"
    );
}

#[test]
fn urls_that_are_none_err_at_once() {
    let secret = "open-sesame";
    for url in [
        String::new(),
        format!("http://:{secret}@host/"),
        format!("joe:{secret}@host"),
        format!("redis://:{secret}@host/database"),
        format!("redis://:{secret}@/"),
        format!("redis://:{secret}@0.0.0.0/"),
        format!("redis://:{secret}@host:port/"),
        format!("rediss://:{secret}@host/#insecure"),
    ] {
        let error = RedisStore::connect_lazy(&url).expect_err(&url);
        assert!(!error.is_retryable(), "{url}");
        assert!(!format!("{error} {error:?}").contains(secret), "{error:?}");
    }
}

#[cfg(not(feature = "tls-rustls"))]
#[test]
fn without_tls_a_rediss_url_names_the_feature() {
    let error = RedisStore::connect_lazy("rediss://127.0.0.1/").unwrap_err();
    assert!(error.to_string().contains("`tls-rustls`"), "{error}");
}

/// The client alone panics here, if no other part of the program has chosen a crypto provider.
#[cfg(feature = "tls-rustls")]
#[tokio::test]
async fn with_tls_a_rediss_url_connects_or_errs_and_never_panics() {
    let server = RedisServer::start();
    let error = error(&format!("rediss://127.0.0.1:{}/", server.port())).await;
    assert!(!error.to_string().contains("tls-rustls"), "{error}");
}

#[cfg(feature = "redis-1")]
#[tokio::test]
async fn a_users_own_client_is_taken() {
    use crate::store::LockStore;
    let server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let store = RedisStore::from_client(client).unwrap();
    assert!(format!("{store:?}").contains(&server.port().to_string()));
    let _: &dyn LockStore = &store;
}

#[tokio::test(start_paused = true)]
async fn under_a_paused_clock_the_error_says_so() {
    // Takes connections, and does not answer.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let connecting = error(&url).await;
    assert!(
        connecting.to_string().contains("clock is paused"),
        "{connecting}"
    );

    let mut one = Settings::url(url, "a1")
        .response_timeout(Duration::from_secs(1))
        .open();
    one.session().start();
    let error = unsent(one.ask("k", attempt(1)).await);
    assert!(error.to_string().contains("clock is paused"), "{error}");
}
