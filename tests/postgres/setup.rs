//! How the schema comes into a database, and who may use it.

use std::time::{Duration, Instant};

use lockstream::LockRegistry;
use lockstream::store::PostgresStore;

use crate::support::{PgServer, on_a_steady_machine};
use crate::{BOUND, PATIENCE, builder, eventually, ms, patient, told};

#[tokio::test]
async fn the_first_that_connects_makes_the_schema() {
    let server = PgServer::start();
    // A slow machine takes seconds for it.
    let url = format!("{}&connect_timeout=60s&response_timeout=60s", server.url());
    let locks = LockRegistry::connect(url).await.unwrap();
    let lease = locks.obtain("order:42").lease().await.unwrap();
    assert_eq!(
        server
            .one::<String>("SELECT owner FROM lockstream.lock")
            .split(':')
            .count(),
        2
    );
    assert!(lease.is_valid());
}

/// It was said to make nothing, and made the schema where there was none.
#[tokio::test]
async fn a_look_makes_no_schema_and_says_that_it_is_missing() {
    let server = PgServer::start();
    let locks = builder(patient(server.url()).connect_lazy().unwrap());
    let locks = locks.build().unwrap();
    let error = locks.check().await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it has no schema \"lockstream\""),
        "{error}"
    );
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'lockstream'";
    assert_eq!(server.one::<i64>(schemas), 0);
    // Whoever needs it makes it.
    let lease = locks.obtain("k").lease().await.unwrap();
    lease.release().await.unwrap();
    locks.check().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_connect_at_once_one_makes_it() {
    let server = PgServer::start();
    // Each waits for those before it.
    let connect = async || patient(server.url()).connect().await.map(drop);
    let connected = futures::future::join_all((0..8).map(|_| connect())).await;
    assert!(connected.iter().all(Result::is_ok), "{connected:?}");
    patient(server.url())
        .connect_lazy()
        .unwrap()
        .migrate()
        .await
        .unwrap();
    assert_eq!(
        server.one::<i64>("SELECT count(*) FROM lockstream.state"),
        1
    );
}

/// An application with the least rights, in a schema of another name that an administrator has made by hand.
#[tokio::test]
async fn the_rights_of_the_page_are_enough_and_each_is_needed() {
    let server = PgServer::start();
    let sql = PostgresStore::SQL
        .replace("lockstream.", "app_locks.")
        .replace("SCHEMA lockstream ", "SCHEMA app_locks ");
    server.run(&sql.replace("SCHEMA IF NOT EXISTS lockstream", "SCHEMA app_locks"));
    server.run("CREATE ROLE app LOGIN; REVOKE CREATE ON DATABASE postgres FROM PUBLIC");
    let url = PgServer::url_of("app", server.port());
    let connect = || patient(&url).schema("app_locks").connect();
    let error = connect().await.unwrap_err();
    assert!(
        error.to_string().contains("42501") && !error.is_retryable(),
        "{error}"
    );

    let rights = rights_of_the_page();
    assert!(rights.len() > 5, "{rights:?}");
    for right in &rights {
        server.run(&right.replace("lockstream", "app_locks"));
    }
    let missing = async || {
        let locks = builder(connect().await.unwrap()).build().unwrap();
        locks.check().await.unwrap().servers[0]
            .missing_rights
            .clone()
    };
    assert_eq!(missing().await, Vec::<String>::new());
    let one = builder(connect().await.unwrap()).build().unwrap();
    let other = builder(connect().await.unwrap()).build().unwrap();
    let lease = one.obtain("k").lease().await.unwrap();
    let lock = other.obtain("k");
    let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
    let token = lease.token().get();
    let mut client = crate::client(&url).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(token > 0);
    crate::eventually("it waits", async || {
        one.obtain("k").inspect().await.unwrap().waiting == 1
    })
    .await;
    lease.release().await.unwrap();
    drop(waiting.await.unwrap().unwrap());
    let direct = client
        .query("SELECT * FROM app_locks.lock", &[])
        .await
        .unwrap_err();
    assert_eq!(
        direct.code().unwrap().code(),
        "42501",
        "no right to a table"
    );

    // Without one of them nothing works, and the error says which.
    for right in rights.iter().filter(|right| right.contains("FUNCTION")) {
        let revoke = right
            .replace("lockstream", "app_locks")
            .replace("GRANT", "REVOKE")
            .replace(" TO ", " FROM ");
        server.run(&revoke);
        let function = right
            .split_once("lockstream.")
            .unwrap()
            .1
            .split_once('(')
            .unwrap()
            .0
            .to_owned();
        if !["hello_1", "ops_1"].contains(&&*function) {
            assert_eq!(missing().await, [&*function]);
        }
        let fails = match &*function {
            "hello_1" => connect().await.map(drop).map_err(|error| error.to_string()),
            "ops_1" => connect().await.map(drop).map_err(|error| error.to_string()),
            "fence" => {
                let call = client.query("SELECT app_locks.fence('k', 1)", &[]).await;
                call.map(drop).map_err(|error| told(&error))
            }
            "inspect_1" => {
                let locks = builder(connect().await.unwrap()).build().unwrap();
                let seen = locks.obtain("k").inspect().await;
                seen.map(drop).map_err(|error| told(&error))
            }
            // Hand-overs are slower without it.
            "notify_1" => {
                let locks = builder(connect().await.unwrap()).build().unwrap();
                locks
                    .obtain("k")
                    .lease()
                    .await
                    .unwrap()
                    .release()
                    .await
                    .unwrap();
                Err(function.clone())
            }
            // Without these unused rows stay, or old connections: no caller is told.
            _ => Err(function.clone()),
        };
        let error = fails.unwrap_err();
        assert!(error.contains(&function), "{function}: {error}");
        server.run(&right.replace("lockstream", "app_locks"));
    }
}

/// What docs/postgres.md tells an administrator to run.
fn rights_of_the_page() -> Vec<String> {
    let page = include_str!("../../docs/postgres.md");
    let lines = page.lines().filter(|line| line.starts_with("GRANT "));
    lines
        .map(|line| line.replace("app;", "app").trim().to_owned())
        .collect()
}

#[tokio::test]
async fn a_role_that_may_not_make_the_schema_is_told_what_to_do() {
    let server = PgServer::start();
    server.run("CREATE ROLE app LOGIN");
    let error = PostgresStore::connect(PgServer::url_of("app", server.port()))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("PostgresStore::migrate"),
        "{error}"
    );
    assert!(!error.is_retryable());
    let error = PostgresStore::builder(server.url())
        .migrate(false)
        .connect()
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("PostgresStore::migrate"),
        "{error}"
    );
    assert_eq!(
        server
            .rows("SELECT 1 FROM pg_namespace WHERE nspname = 'lockstream'")
            .len(),
        0
    );
}

#[tokio::test]
async fn another_version_of_the_schema_is_refused() {
    let server = PgServer::start();
    patient(server.url()).connect().await.unwrap();
    server.run("UPDATE lockstream.state SET version = 2");
    let error = PostgresStore::connect(server.url()).await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("has version 2, and this crate knows version 1"),
        "{error}"
    );
    assert!(!error.is_retryable());
}

/// A role whose transactions are of another level by default. A pooler hides our setting from the server.
#[tokio::test]
async fn transactions_of_another_level_are_refused_and_ours_are_not() {
    let server = PgServer::start();
    server.run("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'");
    let locks = crate::registry(&server.url()).await;
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let sql = "SELECT * FROM lockstream.ops_1(true, 0, 0, '', '{}', '{}', '{}', '{}', '{}', '{}')";
    let error = server.client().try_rows(sql).unwrap_err();
    assert_eq!(error.code().unwrap().code(), "LS002");
}

#[test]
fn bad_urls_and_settings_are_refused_before_anything_is_sent() {
    let lasting = |store: Result<PostgresStore, lockstream::StoreError>, says: &str| {
        let error = store.unwrap_err();
        assert!(
            error.to_string().contains(says) && !error.is_retryable(),
            "{error}"
        );
    };
    let secret = "hunter2";
    for (url, says) in [
        ("redis://localhost", "must begin with postgres://"),
        ("postgres:///db?sslmode=disable", "no host"),
        ("postgres://app:hunter2@h:port/db", "port"),
        (
            "postgres://app:hunter2@h/db?sslmode=perhaps",
            "sslmode must be disable",
        ),
        ("postgres://app:hunter2@h/db?frobnicate=1", "frobnicate"),
        ("postgres://app:hunter2@a,b/db?port=5432,5433,5434", "ports"),
        (
            "postgres://app:hunter2@a,b/db?hostaddr=127.0.0.1",
            "2 hosts, and 1 hostaddrs",
        ),
        (
            "postgres://app:hunter2@h/db?sslrootcert=/nowhere.pem",
            "/nowhere.pem",
        ),
        (
            "postgres://app:hunter2@h/db?sslcert=/nowhere.pem&sslkey=/nowhere.key",
            "/nowhere.pem",
        ),
    ] {
        let error = PostgresStore::connect_lazy(url).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(secret), "{error:?}");
        lasting(Err(error), says);
    }
    let store = || PostgresStore::builder("postgres://h/db");
    lasting(store().schema("").connect_lazy(), "must not be empty");
    lasting(store().schema("a'b").connect_lazy(), "quotes");
    lasting(store().schema("pg_x").connect_lazy(), "pg_");
    lasting(store().schema("s".repeat(64)).connect_lazy(), "63 bytes");
    lasting(store().lanes(0).connect_lazy(), "from 1 to 16");
    lasting(store().lanes(17).connect_lazy(), "from 1 to 16");
    lasting(
        store().quiet_time(std::time::Duration::MAX).connect_lazy(),
        "a year",
    );
    lasting(
        store().pooled("redis://h").connect_lazy(),
        "must begin with postgres://",
    );
}

#[tokio::test]
async fn errors_of_connecting_say_what_to_do() {
    let server = PgServer::builder()
        .config("password_encryption = 'scram-sha-256'")
        .start();
    let nobody = PostgresStore::connect(PgServer::url_of("nobody", server.port()))
        .await
        .unwrap_err();
    assert!(
        nobody.to_string().contains("28000") && !nobody.is_retryable(),
        "{nobody}"
    );
    let nowhere = server.url().replace("/postgres?", "/nowhere?");
    let nowhere = PostgresStore::connect(nowhere).await.unwrap_err();
    assert!(
        nowhere.to_string().contains("3D000") && !nowhere.is_retryable(),
        "{nowhere}"
    );
    let port = server.port();
    drop(server);
    let down = PostgresStore::connect(PgServer::url_at(port))
        .await
        .unwrap_err();
    assert!(
        down.to_string().contains(&port.to_string()) && down.is_retryable(),
        "{down}"
    );
}

/// A server without TLS, and a url that does not say so.
#[cfg(feature = "tls-rustls")]
#[tokio::test]
async fn a_server_without_tls_is_not_talked_to_in_plain_text() {
    let server = PgServer::start();
    let url = server.url().replace("?sslmode=disable", "");
    let error = PostgresStore::connect(url).await.unwrap_err();
    assert!(error.to_string().contains("sslmode=disable"), "{error}");
    let url = server
        .url()
        .replace("sslmode=disable", "sslmode=verify-full");
    PostgresStore::connect(url).await.unwrap_err();
    // A socket is not encrypted, and need not be.
    patient(server.socket_url()).connect().await.unwrap();
}

#[tokio::test]
async fn registries_of_different_schemas_and_prefixes_do_not_exclude_each_other() {
    let server = PgServer::start();
    let one = builder(patient(server.url()).connect().await.unwrap())
        .build()
        .unwrap();
    let store = patient(server.url()).schema("Other \u{e9}").connect();
    let store = store.await.unwrap();
    let other = builder(store).build().unwrap();
    let third = builder(patient(server.url()).connect().await.unwrap())
        .prefix("jobs")
        .build()
        .unwrap();
    let leases = [one.obtain("k"), other.obtain("k"), third.obtain("k")];
    let leases =
        futures::future::join_all(leases.iter().map(|lock| lock.lease_within(ms(500)))).await;
    let mut client = crate::client(&server.url()).await;
    for lease in leases {
        let lease = lease.unwrap();
        let transaction = client.transaction().await.unwrap();
        lease.view().fence(&transaction).await.unwrap();
        transaction.commit().await.unwrap();
    }
}

#[tokio::test]
async fn a_registrys_connection_bears_its_name() {
    let server = PgServer::start();
    let locks = builder(patient(server.url()).connect().await.unwrap())
        .name("web")
        .build()
        .unwrap();
    locks.obtain("k").inspect().await.unwrap();
    let names = server.rows(
        "SELECT DISTINCT application_name FROM pg_stat_activity WHERE application_name LIKE 'lockstream%'",
    );
    let names: Vec<String> = names.iter().map(|row| row.get(0)).collect();
    assert_eq!(names, ["lockstream:web"]);
}

/// Databases whose system was renewed warn at each connection: of collations, and others.
#[tokio::test]
async fn a_database_that_warns_at_each_connection_is_used() {
    let server = PgServer::start();
    server.run("UPDATE pg_database SET datcollversion = 'old'");
    let locks = builder(patient(server.url()).connect().await.unwrap())
        .build()
        .unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    lease.release().await.unwrap();
    eventually("it was warned", async || server.log().contains("collation")).await;
}

/// Its connection is in a transaction, in which no lock may be taken. The next attempt finds what another has made.
#[tokio::test]
async fn a_migration_that_takes_long_is_given_up_with_its_connection() {
    let server = PgServer::start();
    let mut other = server.client();
    other.run("SELECT pg_advisory_lock(6012214763185741)");
    let locks = builder(PostgresStore::connect_lazy(server.url()).unwrap())
        .response_timeout(ms(1000))
        .build()
        .unwrap();
    let lock = locks.obtain("k");
    let taking = tokio::spawn(async move {
        loop {
            match lock.lease_within(BOUND).await {
                Ok(lease) => break lease,
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
    });
    let waiting = "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    crate::eventually("it migrates", async || server.one::<bool>(waiting)).await;
    // Longer than the response time-out.
    tokio::time::sleep(ms(1200)).await;
    other.run(PostgresStore::SQL);
    other.run("SELECT pg_advisory_unlock_all()");
    let lease = taking.await.unwrap();
    let held = "SELECT count(*) FROM lockstream.lock WHERE key = 'lock:k' AND owner <> ''";
    assert_eq!(server.one::<i64>(held), 1, "it is there for all");
    lease.release().await.unwrap();
}

/// The first host does not even answer to an attempt to connect, or takes it and says nothing.
#[tokio::test]
async fn a_host_that_is_silent_does_not_hide_the_next() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        // Whatever the system does with those whom nobody accepts.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!(
            "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?sslmode=disable",
            silent.local_addr().unwrap().port(),
            server.port()
        );
        let locks = builder(PostgresStore::connect(&url).await.unwrap())
            .build()
            .unwrap();
        let lease = locks.obtain("k").lease().await.unwrap();
        lease.release().await.unwrap();
    })
    .await;
}

/// It was waited for anew by each of several connections. So a reconnect took longer than a lease.
#[tokio::test]
async fn a_host_that_is_silent_is_waited_for_once() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!(
            "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?sslmode=disable&connect_timeout=5",
            silent.local_addr().unwrap().port(),
            server.port()
        );
        let store = PostgresStore::builder(url).lanes(4).connect_lazy().unwrap();
        let locks = builder(store).wait(PATIENCE).build().unwrap();
        let begin = Instant::now();
        let lease = locks.obtain("k").lease().await.unwrap();
        // Four times five seconds it was.
        assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
        lease.release().await.unwrap();
        let connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockstream'";
        eventually("four lanes, and nothing that sweeps", async || {
            server.one::<i64>(connections) == 4
        })
        .await;
    })
    .await;
}

/// It was given all the time for connecting, at each attempt and each look, before the next was tried.
#[tokio::test]
async fn a_host_that_is_silent_has_the_next_beside_it() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // A half of it is soon enough, and the whole is not.
        let url = format!(
            "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres?sslmode=disable&connect_timeout=24s",
            silent.local_addr().unwrap().port(),
            server.port()
        );
        let soon = 2 * BOUND;
        let connecting = tokio::time::timeout(soon, PostgresStore::connect(&url));
        let store = connecting.await.expect("in time").unwrap();
        let locks = builder(store).build().unwrap();
        let checking = tokio::time::timeout(soon, locks.check());
        checking.await.expect("in time").unwrap();
    })
    .await;
}
