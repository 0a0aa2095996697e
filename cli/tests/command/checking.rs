//! `check` and `migrate`: what is the store, and is it ready?

use std::net::TcpListener;
use std::thread;

use serde_json::Value;

use crate::program::run;
use crate::support::{Cluster, PgServer, RedisServer, Watched};

#[test]
fn a_store_that_can_be_used_says_what_it_is() {
    let redis = RedisServer::start();
    let postgres = PgServer::start();
    assert_eq!(run(&postgres.url(), ["migrate"]).code, Some(0));
    let watched = Watched::lasting();
    for (url, product) in [
        (redis.url(), "Redis "),
        (redis.unix_url(), "Redis "),
        (postgres.url(), "PostgreSQL "),
        (watched.url(), "Redis "),
    ] {
        let done = run(&url, ["check"]);
        assert_eq!((done.code, &*done.err), (Some(0), ""), "{url}");
        for told in [product, "takes writes", " ms away", "tells waiters at once"] {
            assert!(done.out.contains(told), "{url}: {}", done.out);
        }
        let quiet = run(&url, ["check", "-q"]);
        assert_eq!((quiet.code, &*quiet.out), (Some(0), ""));
        let lines = run(&url, ["check", "--json"]).out;
        let check: Value = serde_json::from_str(&lines).unwrap();
        let server = &check["servers"][0];
        assert!(server["version"].as_str().unwrap().starts_with(product));
        assert!(server["round_trip_ms"].as_f64().unwrap() > 0.0);
        assert_eq!(
            (&server["no_push"], &check["shares"]),
            (&Value::Null, &Value::Bool(true))
        );
    }
    // It touches nothing.
    assert_eq!(redis.keys("*"), Vec::<String>::new());
}

#[test]
fn each_primary_of_a_cluster_is_told() {
    let cluster = Cluster::without_replicas();
    let done = run(&cluster.url(), ["check"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    for server in cluster.primaries() {
        let port = format!(":{}:", server.port());
        assert!(done.out.contains(&port), "{port} {}", done.out);
    }
}

#[test]
fn a_store_that_cannot_be_used_is_69() {
    let server = RedisServer::builder()
        .config("user nobody on >pw ~* &* +@all -eval -evalsha")
        .start();
    let replica = RedisServer::start();
    replica.cmd(&["REPLICAOF", "127.0.0.1", &server.port().to_string()]);
    for url in [
        "redis://127.0.0.1:1/".to_owned(),
        "postgres://127.0.0.1:1/db?sslmode=disable".to_owned(),
        server.url_with("stranger", "pw", 0),
        server.url_with("nobody", "pw", 0),
        replica.url(),
    ] {
        let done = run(&url, ["check"]);
        assert_eq!(
            (done.code, &*done.out),
            (Some(69), ""),
            "{url}: {}",
            done.err
        );
        assert!(done.err.starts_with("lockstream: "), "{url}: {}", done.err);
    }
    assert_eq!(run("http://h/", ["check"]).code, Some(64));
}

/// They are what not everybody needs, so the store can be used.
#[test]
fn missing_rights_are_told() {
    let rights = "user looker on >pw ~* &* +@all -scan";
    let server = RedisServer::builder().config(rights).start();
    let done = run(&server.url_with("looker", "pw", 0), ["check"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(
        done.out.contains("rights that are missing: scan\n"),
        "{}",
        done.out
    );
    let looked = run(&server.url_with("looker", "pw", 0), ["ls"]);
    assert_eq!(looked.code, Some(69), "{}", looked.err);
    assert!(
        looked
            .err
            .starts_with("lockstream: store request failed: Redis at"),
        "{}",
        looked.err
    );
}

/// The first contact with a database: what is missing is told by the name that the command has for it.
#[test]
fn a_missing_schema_is_made_by_migrate() {
    let server = PgServer::start();
    let url = server.url();
    for arguments in [&["check"][..], &["ls"], &["inspect", "k"]] {
        let done = run(&url, arguments);
        assert_eq!(done.code, Some(69), "{}", done.err);
        assert!(done.err.contains("run lockstream migrate"), "{}", done.err);
        assert!(!done.err.contains("PostgresStore"), "{}", done.err);
    }
    for _ in 0..2 {
        let done = run(&url, ["migrate"]);
        assert_eq!(done.code, Some(0), "{}", done.err);
        assert!(done.err.contains("the schema is there"), "{}", done.err);
    }
    for arguments in [&["check"][..], &["run", "k", "--", "true"]] {
        let done = run(&url, arguments);
        assert_eq!(done.code, Some(0), "{}", done.err);
    }
}

/// For a role that may not make schemas: whoever may runs what is printed.
#[test]
fn the_sql_of_the_schema_is_printed() {
    let server = PgServer::start();
    server.run("CREATE ROLE app LOGIN");
    server.run("REVOKE CREATE ON DATABASE postgres FROM PUBLIC, app");
    let url = PgServer::url_of("app", server.port());
    let refused = run(&url, ["migrate"]);
    assert_eq!(refused.code, Some(69), "{}", refused.err);
    assert!(refused.err.contains("migrate --print"), "{}", refused.err);
    let printed = run("", ["migrate", "--print"]);
    assert_eq!((printed.code, &*printed.err), (Some(0), ""));
    server.run(&printed.out);
    server.run("GRANT USAGE ON SCHEMA lockstream TO app");
    server.run("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA lockstream TO app");
    let done = run(&url, ["check"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert_eq!(run(&url, ["run", "k", "--", "true"]).code, Some(0));
}

/// It was printed for the usual schema, and the next command missed its own.
#[test]
fn the_sql_is_that_of_the_schema_of_the_url() {
    let server = PgServer::start();
    let url = format!("{}&lock_schema=shop", server.url());
    let printed = run(&url, ["migrate", "--print"]);
    assert_eq!((printed.code, &*printed.err), (Some(0), ""));
    server.run(&printed.out);
    assert_eq!(run(&url, ["check"]).code, Some(0));
    let schemas = "SELECT nspname FROM pg_namespace WHERE nspname = 'lockstream'";
    assert_eq!(server.rows(schemas).len(), 0);
}

/// Such as that of another service. It was told that it did not answer, and nothing more.
#[test]
fn a_silent_port_is_told_with_what_may_be_wrong() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let silent = [
        (
            "redis://127.0.0.1:PORT/",
            "is no Redis server, or expects TLS: rediss://",
        ),
        ("postgres://me@127.0.0.1:PORT/db", "is no PostgreSQL server"),
        (
            "postgres://me@127.0.0.1:PORT/db?sslmode=disable",
            "is no PostgreSQL server",
        ),
    ];
    thread::scope(|all| {
        for (url, told) in silent {
            let url = url.replace("PORT", &port.to_string());
            for command in [&["check"][..], &["run", "k", "--", "true"]] {
                let url = url.clone();
                all.spawn(move || {
                    // Longer than a machine stands still: who has not connected by then knows less.
                    let within = ["--connect-timeout", "15s"];
                    let done = run(&url, [&command[..1], &within, &command[1..]].concat());
                    assert_eq!(done.code, Some(69), "{}", done.err);
                    assert!(done.err.contains("accepted the connection"), "{}", done.err);
                    assert!(done.err.contains(told), "{}", done.err);
                });
            }
        }
    });
}

#[test]
fn other_stores_have_no_schema() {
    let server = RedisServer::start();
    let done = run(&server.url(), ["migrate"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.err.contains("no schema"), "{}", done.err);
}
