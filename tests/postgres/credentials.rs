//! Passwords that change under leases.

use lockstream::store::{Credentials, PostgresStore};
use lockstream::{LockRegistry, Renewal};
use tokio::sync::watch;

use crate::support::{PgBouncer, PgServer};
use crate::{PATIENCE, builder, eventually, ms, patient, told};

fn server() -> PgServer {
    let server = PgServer::builder()
        .client("host all app all scram-sha-256")
        .start();
    server
        .run("CREATE ROLE app LOGIN PASSWORD 's3kret0'; GRANT CREATE ON DATABASE postgres TO app");
    server
}

/// The password changes, and all connections are killed, again and again; leases are held all the time, and others wait.
#[tokio::test]
async fn a_password_that_changes_costs_no_lease() {
    let server = server();
    let (rotate, newest) = watch::channel(Credentials::new("app", "s3kret0"));
    // The url needs neither user nor password.
    let url = format!(
        "postgres://127.0.0.1:{}/postgres?sslmode=disable",
        server.port()
    );
    let registry = async || {
        let store = patient(&url).credentials(newest.clone());
        builder(store.connect().await.unwrap()).build().unwrap()
    };
    let (one, other) = (registry().await, registry().await);
    let held = |locks: &LockRegistry, key: &str| {
        // A round lasts as long as it may on a slow machine.
        let lock = locks.obtain(key).ttl(2 * PATIENCE);
        lock.renewal(Renewal::watchdog()).lease()
    };
    let leases = [
        held(&one, "a").await.unwrap(),
        held(&other, "b").await.unwrap(),
    ];
    for round in 1..=4 {
        let lock = other.obtain("a");
        let waiting = tokio::spawn(async move { lock.lease_within(ms(200)).await });
        let password = format!("s3kret{round}");
        server.run(&format!("ALTER ROLE app PASSWORD '{password}'"));
        // For a moment the new one is not known here.
        server.terminate_all();
        if round % 2 == 0 {
            tokio::time::sleep(ms(300)).await;
        }
        rotate.send(Credentials::new("app", password)).unwrap();
        // Whoever asks in between may be told that the server refuses the password, and that it may pass.
        if let Err(error) = waiting.await.unwrap() {
            assert!(error.is_retryable(), "{error}");
        }
        for locks in [&one, &other] {
            eventually("it is back", async || {
                locks.obtain("c").inspect().await.is_ok()
            })
            .await;
        }
        assert!(leases.iter().all(lockstream::Lease::is_valid));
    }
    // Once nobody sends any more, the last ones stay good.
    drop(rotate);
    server.terminate_all();
    eventually("it is back", async || {
        one.obtain("c").inspect().await.is_ok()
    })
    .await;
    for lease in leases {
        lease.release().await.unwrap();
    }
}

/// Without a newer password an error of the old one lasts; with one to come, it may pass.
#[tokio::test]
async fn a_refused_password_may_pass_if_passwords_change() {
    let server = server();
    let refused = Credentials::new("", "expired");
    let (rotate, newest) = watch::channel(refused);
    let url = PgServer::url_of("app", server.port());
    let error = PostgresStore::builder(&url).connect().await.unwrap_err();
    assert!(!error.is_retryable(), "{error}");
    let wrong = url.replace("app@", "app:expired@");
    let error = PostgresStore::connect(wrong).await.unwrap_err();
    assert!(
        told(&error).contains("28P01") && !error.is_retryable(),
        "{error}"
    );
    let store = patient(&url).credentials(newest);
    let error = store.clone().connect().await.unwrap_err();
    assert!(
        told(&error).contains("28P01") && error.is_retryable(),
        "{error}"
    );
    assert!(!format!("{error:?} {store:?}").contains("expired"));
    let locks = builder(store.connect_lazy().unwrap()).build().unwrap();
    let waiting = tokio::spawn(locks.obtain("k").wait(PATIENCE).lease());
    // The user is still the url's.
    rotate.send(Credentials::new("", "s3kret0")).unwrap();
    let lease = waiting.await.unwrap();
    // A caller that does not try again is told of the first refusal.
    if let Err(error) = lease {
        assert!(error.is_retryable(), "{error}");
        drop(locks.obtain("k").lease_within(PATIENCE).await.unwrap());
    }
}

/// A pooler gets the same.
#[tokio::test]
async fn a_pooler_is_told_the_newest_user() {
    let server = server();
    patient(server.url()).connect().await.unwrap();
    server.run(
        "GRANT USAGE ON SCHEMA lockstream TO app; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app",
    );
    let pooler = PgBouncer::to(&server, 2);
    let (_rotate, newest) = watch::channel(Credentials::new("app", "s3kret0"));
    let bare = |port| format!("postgres://127.0.0.1:{port}/postgres?sslmode=disable");
    let store = patient(bare(server.port()))
        .credentials(newest)
        .pooled(bare(pooler.port()));
    let locks = builder(store.connect().await.unwrap()).build().unwrap();
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}
