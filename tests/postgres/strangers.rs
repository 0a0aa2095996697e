//! What may another role of the database hear, pretend and make?

use futures::StreamExt;
use lockstream::store::PostgresStore;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_postgres::{AsyncMessage, NoTls};

use crate::faults::Pair;
use crate::support::PgServer;
use crate::{BOUND, builder, eventually};

/// A session that keeps all that it hears.
async fn listener(url: &str) -> (tokio_postgres::Client, UnboundedReceiver<String>) {
    let (client, mut connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    let (sender, heard) = unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(notice) = message {
                let _ = sender.send(notice.payload().to_owned());
            }
        }
    });
    (client, heard)
}

/// The names of the locks that our sessions hold are for all to see. A stranger listens wherever these could lead, and
/// tells whoever waits that it has the lock.
#[tokio::test]
async fn a_stranger_hears_no_grant_and_forges_none() {
    let server = PgServer::start();
    let pair = Pair::new(&server.url()).await;
    server.run("CREATE ROLE stranger LOGIN");
    let (stranger, mut heard) = listener(&PgServer::url_of("stranger", server.port())).await;
    let seen = "SELECT 'lockstream:' || (classid::bigint << 32 | objid::bigint) FROM pg_locks WHERE locktype = 'advisory'";
    // A sweep has a lock, too, for a moment.
    let mut rows = Vec::new();
    eventually("the lines of both", async || {
        rows = stranger.query(seen, &[]).await.unwrap();
        rows.len() == 2
    })
    .await;
    let forged = server.one::<String>(
        "SELECT concat_ws(' ', 1, t.owner, 'x', t.ttl, l.epoch + 1, lockstream.now_1(), l.key) \
         FROM lockstream.ticket t JOIN lockstream.lock l USING (key)",
    );
    let forged_token: i64 = server.one("SELECT (epoch + 1) * 64 FROM lockstream.lock");
    for row in rows {
        let channel: String = row.get(0);
        stranger
            .batch_execute(&format!("LISTEN \"{channel}\""))
            .await
            .unwrap();
        let sql = "SELECT pg_notify($1, $2)";
        stranger.query(sql, &[&channel, &forged]).await.unwrap();
    }
    for secret in [
        "SELECT secret FROM lockstream.state",
        "SELECT lockstream.channel_1(gen_random_uuid(), 1)",
        "SELECT lockstream.hello_1(0)",
    ] {
        let error = stranger.query(secret, &[]).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), "42501", "{secret}");
    }
    pair.lease.release().await.unwrap();
    let next = pair.waiting.await.unwrap().unwrap();
    assert_ne!(
        i64::try_from(next.token().get()).unwrap(),
        forged_token,
        "the stranger's word was believed"
    );
    next.release().await.unwrap();
    // All that came before this has been heard by then.
    stranger
        .batch_execute("LISTEN own; NOTIFY own, 'end'")
        .await
        .unwrap();
    let mut others = Vec::new();
    loop {
        match heard.recv().await.unwrap() {
            end if end == "end" => break,
            own if own == forged => {}
            other => others.push(other),
        }
    }
    assert_eq!(others, Vec::<String>::new(), "the stranger heard it");
}

/// The schema of a role, in which any call makes that role a superuser if the caller may do that.
fn make_trap(server: &PgServer, role: &str) {
    let trap = "CREATE OR REPLACE FUNCTION lockstream.hello_1(
        own_line bigint, OUT version integer, OUT quiet bigint, OUT now bigint, OUT is_standby boolean, OUT server text,
        OUT channel text, OUT missing text
    ) LANGUAGE plpgsql SECURITY INVOKER AS $$ BEGIN ALTER ROLE mallory SUPERUSER; END $$";
    server.run(&format!(
        "SET ROLE {role}; {}; {trap}; GRANT USAGE ON SCHEMA lockstream TO PUBLIC; \
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO PUBLIC",
        PostgresStore::SQL
    ));
}

#[tokio::test]
async fn the_schema_of_a_stranger_is_refused_by_name() {
    let server = PgServer::start();
    server.run(
        "CREATE ROLE app LOGIN; CREATE ROLE mallory; GRANT CREATE ON DATABASE postgres TO app, mallory",
    );
    make_trap(&server, "mallory");
    for url in [
        server.url(),
        PgServer::url_of("app", server.port()),
        PgServer::url_of("app", server.port()) + "&schema_owner=app",
    ] {
        let store = PostgresStore::connect_lazy(&url).unwrap();
        let locks = builder(store.clone()).build().unwrap();
        // A scan has a connection of its own.
        let of_scanning = locks.scan("").next().await.unwrap().unwrap_err();
        let of_a_call = locks.obtain("k").acquire_once().await.unwrap_err();
        let of_migrating = store.migrate().await.unwrap_err();
        let of_connecting = PostgresStore::connect(&url).await.unwrap_err();
        assert!(!of_a_call.is_retryable() && !of_migrating.is_retryable());
        for told in [
            crate::told(&of_scanning),
            crate::told(&of_a_call),
            of_migrating.to_string(),
            of_connecting.to_string(),
        ] {
            assert!(
                told.contains("\"lockstream\" belongs to the role \"mallory\"")
                    && told.contains("`schema_owner`"),
                "{told}"
            );
        }
    }
    let is_caught = "SELECT rolsuper FROM pg_roles WHERE rolname = 'mallory'";
    assert!(!server.one::<bool>(is_caught), "its function was called");
    // Nor in a schema that is trusted.
    server.run("ALTER SCHEMA lockstream OWNER TO postgres");
    let error = PostgresStore::connect(server.url()).await.unwrap_err();
    assert!(error.to_string().contains("mallory"), "{error}");
    assert!(!server.one::<bool>(is_caught), "its function was called");
}

/// Who may own the schema that a role uses, and who must be named first.
#[tokio::test]
async fn whose_schema_is_trusted() {
    let server = PgServer::start();
    server.run(
        "CREATE ROLE app LOGIN; CREATE ROLE dba; CREATE ROLE of_dba IN ROLE dba; CREATE ROLE team; GRANT team TO app; \
         CREATE ROLE master IN ROLE app; CREATE ROLE migrator",
    );
    for (owner, is_trusted) in [
        ("app", true),
        ("postgres", true),
        ("dba", true),
        ("of_dba", true),
        ("team", true),
        ("master", true),
        ("migrator", false),
    ] {
        server.run("CREATE DATABASE shop OWNER dba");
        let of = |url: String| url.replace("/postgres?", "/shop?");
        server.run(&format!("GRANT CREATE ON DATABASE shop TO {owner}"));
        let admin = crate::client(&of(server.url())).await;
        admin
            .batch_execute(&format!(
                "SET ROLE {owner}; {}; GRANT USAGE ON SCHEMA lockstream TO app; \
                 GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app",
                PostgresStore::SQL
            ))
            .await
            .unwrap();
        let url = of(PgServer::url_of("app", server.port()));
        let connected = PostgresStore::connect(&url).await;
        assert_eq!(connected.is_ok(), is_trusted, "{owner}: {connected:?}");
        let named = PostgresStore::builder(&url).schema_owner(owner);
        let locks = builder(named.connect().await.unwrap()).build().unwrap();
        let lease = locks.obtain("k").lease_within(BOUND).await.unwrap();
        lease.release().await.unwrap();
        locks.shutdown().await;
        let named = format!("{url}&schema_owner={owner}");
        PostgresStore::connect(&named).await.unwrap();
        // A superuser does not have to trust those whose rights it has: it has all.
        let connected = PostgresStore::connect(of(server.url())).await;
        let is_trusted = ["postgres", "dba", "of_dba"].contains(&owner);
        assert_eq!(connected.is_ok(), is_trusted, "{owner}: {connected:?}");
        drop(admin);
        server.run("DROP DATABASE shop WITH (FORCE)");
    }
}

/// Whoever may write to the tables could write to the terminal of whoever lists the locks.
#[tokio::test]
async fn a_scan_lists_no_name_that_cannot_be_a_key() {
    let server = PgServer::start();
    let locks = crate::registry(&server.url()).await;
    let lease = locks.obtain("k").lease().await.unwrap();
    server.run(
        "INSERT INTO lockstream.lock (key, owner, epoch, expires_at) \
         SELECT 'lock:' || name, 'x~1:1', 1, lockstream.now_1() + 60000000 \
         FROM unnest(ARRAY[E'\\x1b[31mred', E'a\\nb', '~x', 'a:~fence', '', repeat('k', 600)]) name",
    );
    let scanned: Vec<_> = locks.scan("").map(|lock| lock.unwrap().key).collect().await;
    assert_eq!(scanned.iter().map(|key| &**key).collect::<Vec<_>>(), ["k"]);
    lease.release().await.unwrap();
}
