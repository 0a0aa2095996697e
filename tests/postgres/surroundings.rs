//! What do the settings of a role, and a database, change?

use std::time::Duration;

use futures::TryStreamExt;
use lockstream::LockRegistry;
use lockstream::store::PostgresStore;

use crate::support::{PgBouncer, PgServer};
use crate::{BOUND, builder, eventually, patient, registry, told};

/// One releases, and the other gets the lock before it would ask by itself.
async fn hand_over(one: &LockRegistry, other: &LockRegistry, key: &str) {
    let ttl = Duration::from_secs(60);
    let lease = one.obtain(key).ttl(ttl).lease().await.unwrap();
    let lock = other.obtain(key);
    let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
    let lock = one.obtain(key);
    eventually("it waits", async || {
        lock.inspect().await.unwrap().waiting == 1
    })
    .await;
    let token = lease.token();
    lease.release().await.unwrap();
    let next = waiting.await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
}

/// Settings of the role that would break what we do. A trigger makes our calls slower than the role's statements may be.
const SETTINGS: &str = "
    CREATE SCHEMA decoy;
    CREATE VIEW decoy.pg_stat_activity AS SELECT 1 / 0 AS pid, now() AS backend_start;
    CREATE FUNCTION decoy.pg_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT 1 / 0';
    CREATE FUNCTION decoy.pg_has_role(oid, name, text) RETURNS boolean LANGUAGE sql AS 'SELECT 1 / 0 = 1';
    CREATE TABLE decoy.lock (key text);
    GRANT USAGE ON SCHEMA decoy TO PUBLIC;
    GRANT SELECT ON ALL TABLES IN SCHEMA decoy TO PUBLIC;
    CREATE FUNCTION decoy.slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_catalog.pg_sleep(1.5); RETURN NEW; END $$;
    CREATE TRIGGER slow BEFORE INSERT ON lockstream.lock FOR EACH ROW EXECUTE FUNCTION decoy.slow();
    ALTER ROLE app SET search_path = decoy, pg_catalog, public;
    ALTER ROLE app SET statement_timeout = '1s';
    ALTER ROLE app SET lock_timeout = '1ms';
    ALTER ROLE app SET idle_in_transaction_session_timeout = '200ms';
    ALTER ROLE app SET default_transaction_isolation = 'serializable';
    ALTER ROLE app SET default_transaction_deferrable = on";

#[tokio::test]
async fn a_role_whose_settings_are_in_the_way() {
    let server = PgServer::start();
    server.run("CREATE ROLE app LOGIN SUPERUSER");
    drop(registry(&server.url()).await);
    server.run(SETTINGS);
    let pooler = PgBouncer::as_user(&server, 2, "app");
    let url = PgServer::url_of("app", server.port());
    for pooled in [None, Some(pooler.url())] {
        let registry = async || {
            let mut store = patient(&url);
            if let Some(pooled) = &pooled {
                store = store.pooled(pooled);
            }
            let locks = builder(store.connect().await.unwrap()).response_timeout(BOUND);
            locks.build().unwrap()
        };
        let (one, other) = (registry().await, registry().await);
        let key = if pooled.is_some() { "pooled" } else { "direct" };
        hand_over(&one, &other, key).await;
        let keys: Vec<_> = one.scan("").try_collect().await.unwrap();
        assert!(keys.is_empty(), "{keys:?}");
    }
}

/// The role makes the schema itself.
#[tokio::test]
async fn a_role_whose_settings_are_in_the_way_of_a_migration() {
    let server = PgServer::start();
    server.run(
        "CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app; \
         ALTER ROLE app SET search_path = nowhere; ALTER ROLE app SET lock_timeout = '1ms'; \
         ALTER ROLE app SET idle_in_transaction_session_timeout = '200ms'; \
         ALTER ROLE app SET default_transaction_isolation = 'repeatable read'",
    );
    let url = PgServer::url_of("app", server.port());
    // Each waits for those before it.
    let connect = async || patient(&url).connect().await.map(drop);
    let connected = futures::future::join_all((0..4).map(|_| connect())).await;
    assert!(connected.iter().all(Result::is_ok), "{connected:?}");
    let (one, other) = (registry(&url).await, registry(&url).await);
    hand_over(&one, &other, "k").await;
}

/// Somebody wants that this role does not write. That is told, and not overridden.
#[tokio::test]
async fn a_role_that_is_read_only_by_default_is_told_so() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    server.run(
        "CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA lockstream TO app; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app; \
         ALTER ROLE app SET default_transaction_read_only = on",
    );
    let pooler = PgBouncer::as_user(&server, 2, "app");
    let url = PgServer::url_of("app", server.port());
    let stores = [
        PostgresStore::builder(&url),
        PostgresStore::builder(&url).pooled(pooler.url()),
    ];
    for store in stores {
        let locks = builder(store.connect_lazy().unwrap()).build().unwrap();
        let error = locks.obtain("k").acquire_once().await.unwrap_err();
        let told = told(&error);
        assert!(
            told.contains("25006") && told.contains("default_transaction_read_only"),
            "{told}"
        );
    }
    server.run("ALTER ROLE app RESET default_transaction_read_only");
    let locks = builder(PostgresStore::connect(&url).await.unwrap());
    drop(locks.build().unwrap().obtain("k").lease().await.unwrap());
}

/// A database in another encoding: all goes on, but for keys that it cannot write.
#[tokio::test]
async fn a_database_that_is_not_in_utf8() {
    let server = PgServer::start();
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let name = encoding.to_lowercase();
        server.run(&format!(
            "CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        ));
        let url = server.url().replace("/postgres?", &format!("/{name}?"));
        let (one, other) = (registry(&url).await, registry(&url).await);
        let outside = "\u{43a}\u{43b}\u{44e}\u{447}";
        for key in ["k", "caf\u{e9} 1", outside] {
            if key == outside && encoding == "LATIN1" {
                continue;
            }
            hand_over(&one, &other, key).await;
            let lease = one.obtain(key).lease().await.unwrap();
            let mut client = crate::client(&url).await;
            let transaction = client.transaction().await.unwrap();
            lease.view().fence(&transaction).await.unwrap();
            transaction.commit().await.unwrap();
            let keys: Vec<_> = other.scan("").try_collect().await.unwrap();
            assert_eq!(keys.iter().map(|it| &*it.key).collect::<Vec<_>>(), [key]);
            lease.release().await.unwrap();
        }
        if encoding == "LATIN1" {
            let lease = one.obtain("k").lease().await.unwrap();
            // Those that share its call are not refused with it.
            let turn = async |key: String| one.obtain(key).lease().await.map(drop);
            let keys = (0..8).map(|n| match n {
                3 => outside.to_owned(),
                _ => format!("k{n}"),
            });
            let turns = futures::future::join_all(keys.map(turn)).await;
            for (n, turn) in turns.into_iter().enumerate() {
                match turn {
                    Ok(()) => assert_ne!(n, 3),
                    Err(error) => {
                        let told = told(&error);
                        assert!(
                            n == 3
                                && told.contains("22P05")
                                && told.contains("encoding of the database"),
                            "{n}: {told}"
                        );
                        assert!(!error.is_retryable());
                    }
                }
            }
            let error = one.obtain(outside).inspect().await.unwrap_err();
            assert!(told(&error).contains("22P05"), "{error:?}");
            lease.release().await.unwrap();
        }
    }
}

/// With logical replication an update or a delete needs the table's primary key.
#[tokio::test]
async fn a_publication_of_all_tables() {
    let server = PgServer::builder().config("wal_level = logical").start();
    server.run("CREATE PUBLICATION everything FOR ALL TABLES");
    let store = patient(server.url()).quiet_time(Duration::from_secs(1));
    let store = store.connect().await.unwrap();
    let locks = builder(store).build().unwrap();
    let lease = locks.obtain("k").lease_within(BOUND).await.unwrap();
    lease.release().await.unwrap();
    server.run("UPDATE lockstream.lock SET expires_at = 1");
    // However soon after another.
    assert!(server.one::<bool>("SELECT lockstream.sweep_1(3600000000, 0)"));
    let swept = "SELECT (SELECT count(*) FROM lockstream.lock) = 0 AND (SELECT epoch FROM lockstream.state) > 0";
    assert!(server.one::<bool>(swept));
    let without = "SELECT coalesce(string_agg(c.relname, ' '), '') FROM pg_class c \
        WHERE c.relnamespace = 'lockstream'::regnamespace AND c.relkind = 'r' \
        AND NOT EXISTS (SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary)";
    assert_eq!(server.one::<String>(without), "", "without a primary key");
}
