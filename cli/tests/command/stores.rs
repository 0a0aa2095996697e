//! Every store by its url: the same command, and what is held is seen.

use crate::authority::Authority;
use crate::program::{Done, LOCKSTREAM, Program, lockstream, patient, run};
use crate::support::{Cluster, PgServer, RedisServer, Watched};

/// A command runs under the lock, others are refused meanwhile, and it is listed and then free.
fn serves(url: &str) {
    let serves = |arguments: &[&str]| run(url, arguments);
    serves_by(url, serves);
}

fn serves_by(url: &str, run: impl Fn(&[&str]) -> Done) {
    let script = "\"$0\" run -n k -- true; echo inner=$?; \"$0\" ls; \"$0\" inspect k";
    // The command itself has no url.
    let script = format!("export LOCKSTREAM_URL='{}'; {script}", patient(url));
    let done = run(&[
        "run", "--name", "tester", "k", "--", "sh", "-c", &script, LOCKSTREAM,
    ]);
    assert_eq!(done.code, Some(0), "{url}: {}", done.err);
    assert!(done.out.contains("inner=75"), "{url}: {done:?}");
    assert!(done.out.contains("k\ttester~"), "{url}: {done:?}");
    assert!(done.out.contains("k: held by tester~"), "{url}: {done:?}");
    let free = run(&["inspect", "k"]);
    assert_eq!(
        (free.code, &*free.out),
        (Some(0), "k: free\n"),
        "{url}: {}",
        free.err
    );
    assert_eq!(run(&["ls"]).out, "", "{url}");
}

#[test]
fn a_redis_server() {
    let server = RedisServer::start();
    serves(&server.url());
    serves(&server.unix_url());
    assert_eq!(server.calls("keys"), 0);
}

#[test]
fn a_redis_server_over_tls() {
    let authority = Authority::new("ours");
    let identity = authority.sign(&["localhost"]);
    let server = RedisServer::builder().tls(identity.serving(None)).start();
    let folder = tempfile::tempdir().unwrap();
    let roots = folder.path().join("roots.pem");
    std::fs::write(&roots, &authority.pem).unwrap();
    let url = server.tls_url("localhost");
    serves_by(&url, |arguments| {
        let mut command = lockstream(&url, arguments);
        command.env("SSL_CERT_FILE", &roots);
        Program::spawn(command).end()
    });
    let unknown = run(&url, ["run", "k", "--", "true"]);
    assert_eq!(unknown.code, Some(69), "{unknown:?}");
}

#[test]
fn a_cluster() {
    let cluster = Cluster::without_replicas();
    let url = cluster.url();
    serves(&url);
    // On all primaries.
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let homes = keys.map(|key| cluster.home(key));
    assert!(homes.iter().any(|home| *home != homes[0]), "{homes:?}");
    let script = format!("LOCKSTREAM_URL='{}' \"$0\" ls", patient(&url));
    let run_all = [
        &["run"],
        &keys[..],
        &["--", "sh", "-c", &script, LOCKSTREAM],
    ]
    .concat();
    let done = run(&url, run_all);
    let mut listed: Vec<_> = done
        .out
        .lines()
        .filter_map(|line| line.split('\t').next())
        .collect();
    listed.sort_unstable();
    assert_eq!(listed, keys, "{done:?}");
}

#[test]
fn a_primary_behind_sentinels() {
    let watched = Watched::lasting();
    serves(&watched.url());
}

#[test]
fn a_postgresql_database() {
    let server = PgServer::start();
    serves(&server.url());
}

/// Looking makes no schema.
#[test]
fn a_postgresql_database_without_a_schema_stays_so() {
    let server = PgServer::start();
    for arguments in [&["ls"][..], &["inspect", "k"], &["free", "k", "--yes"]] {
        let done = run(&server.url(), arguments);
        assert_eq!(done.code, Some(69), "{done:?}");
    }
    let schemas = server.rows("SELECT 1 FROM pg_namespace WHERE nspname = 'lockstream'");
    assert_eq!(schemas.len(), 0);
}
