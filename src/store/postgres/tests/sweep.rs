//! Sweeps as a session does them.

use std::time::{Duration, Instant};

use tracing::Level;

use super::hearing::Log;
use super::support::{PgServer, wait_until};
use crate::store::PostgresStore;
use crate::store::postgres::backend::PostgresBackend;

/// For a sweep, with those before it that were interrupted.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a session knows that has no connection.
async fn session(url: &str) -> PostgresBackend {
    // It makes the schema, which takes a slow machine seconds.
    let store = PostgresStore::builder(url).connect_timeout(PATIENCE);
    let store = store.connect().await.unwrap();
    let within = Duration::from_secs(5);
    PostgresBackend::new(store.settings, "lock".into(), "a1".into(), within)
}

/// It deletes what nobody has used for an hour, and leaves the others, on a connection of its own. It prints the rate: a
/// million keys in an hour are 280 in a second.
#[tokio::test]
async fn a_sweep_deletes_what_nobody_uses() {
    let rows = std::env::var("LOCKSTREAM_ROWS").ok();
    let rows: i64 = rows.map_or(20_000, |rows| rows.parse().expect("a number"));
    let server = PgServer::start();
    let session = session(&server.url()).await;
    server.run(&format!(
        "INSERT INTO lockstream.lock SELECT 'lock:idle:' || i, NULL, i, 1 FROM generate_series(1, {rows}) i; \
         INSERT INTO lockstream.guard SELECT key, '' FROM lockstream.lock; \
         INSERT INTO lockstream.lock SELECT 'lock:used:' || i, NULL, i, lockstream.now_1() FROM generate_series(1, {rows}) i"
    ));
    let log = Log::default();
    let _hearing = log.hear(Level::DEBUG);
    let begin = Instant::now();
    let count = || server.one::<i64>("SELECT count(*) FROM lockstream.lock");
    // One that a slow machine interrupts is made good by the next.
    loop {
        session.sweep().await;
        let told = log.take();
        if !told.iter().any(|it| it.contains("were not deleted")) {
            break;
        }
        assert!(begin.elapsed() < PATIENCE, "{told:?}");
    }
    let took = begin.elapsed();
    assert_eq!(count(), rows, "those in use");
    assert_eq!(
        server.one::<i64>("SELECT count(*) FROM lockstream.guard"),
        0
    );
    let rate = rows as f64 / took.as_secs_f64();
    println!(
        "{rows} rows of {} deleted in {took:?}: {rate:.0} a second",
        2 * rows
    );
    let connections =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'lockstream%'";
    wait_until("the connection is closed", PATIENCE, || {
        server.one::<i64>(connections) == 0
    })
    .await;
}

/// The schema was dropped since its session checked it, and a stranger made one of that name. What is in it would run with
/// our rights.
#[tokio::test]
async fn a_sweep_calls_nothing_of_a_stranger() {
    let server = PgServer::start();
    let session = session(&server.url()).await;
    server.run(
        "DROP SCHEMA lockstream CASCADE; CREATE ROLE stranger; GRANT CREATE ON DATABASE postgres TO stranger; \
         SET ROLE stranger; CREATE SCHEMA lockstream; CREATE TABLE lockstream.called (by_whom text); \
         CREATE FUNCTION lockstream.sweep_1() RETURNS boolean LANGUAGE sql AS \
         'INSERT INTO lockstream.called VALUES (current_user) RETURNING true'; RESET ROLE",
    );
    let log = Log::default();
    let _hearing = log.hear(Level::WARN);
    session.sweep().await;
    assert_eq!(
        server.one::<i64>("SELECT count(*) FROM lockstream.called"),
        0
    );
    let told = log.take();
    assert!(
        told.len() == 1 && told[0].contains("belongs to the role \"stranger\""),
        "{told:?}"
    );
}

#[tokio::test]
async fn a_sweep_that_is_refused_is_told_once() {
    let server = PgServer::start();
    let session = session(&server.url()).await;
    let log = Log::default();
    let _hearing = log.hear(Level::WARN);
    server.run("ALTER FUNCTION lockstream.sweep_1 RENAME TO hidden");
    for _ in 0..2 {
        session.sweep().await;
    }
    let told = log.take();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(
        told[0].contains("unused rows cannot be deleted") && told[0].contains("sweep_1"),
        "{told:?}"
    );
    // A server that is gone is told of by calls.
    drop(server);
    session.sweep().await;
    assert!(log.take().is_empty());
}
