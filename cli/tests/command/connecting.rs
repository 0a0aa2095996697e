//! What is said of the connection beside the url, or in it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::authority::Authority;
use crate::program::{LOCKSTREAM, patient, run};
use crate::support::{PgBouncer, PgServer, RedisServer, on_a_steady_machine_blocking};

/// Files of PEM in a folder.
struct Pems(tempfile::TempDir);

impl Pems {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Writes one, and yields its path.
    fn write(&self, name: &str, pem: &str) -> String {
        let path: PathBuf = self.0.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

/// The exit code of a command under a lock.
fn code(url: &str, options: &[&str]) -> Option<i32> {
    run(url, [&["run"], options, &["k", "--", "true"]].concat()).code
}

#[test]
fn authorities_and_certificates_are_files() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let tls = ours.sign(&["localhost"]).serving(Some(&theirs));
    let server = RedisServer::builder().tls(tls).start();
    let url = server.tls_url("localhost");
    let pems = Pems::new();
    let (ca, other) = (
        pems.write("ca", &ours.pem),
        pems.write("other", &theirs.pem),
    );
    let shown = theirs.sign(&["client"]);
    let (cert, key) = (
        pems.write("cert", &shown.certificate),
        pems.write("key", &shown.key),
    );
    let identity = ["--cert-file", &cert, "--key-file", &key];
    let trusting = ["--ca-file", &ca];
    assert_eq!(code(&url, &[&trusting[..], &identity].concat()), Some(0));
    assert_eq!(code(&url, &identity), Some(69));
    assert_eq!(code(&url, &trusting), Some(69));
    assert_eq!(
        code(&url, &[&["--ca-file", &other][..], &identity].concat()),
        Some(69)
    );
    // Half of it, what is no file, and where there is no TLS.
    assert_eq!(
        code(&url, &["--ca-file", &ca, "--cert-file", &cert]),
        Some(64)
    );
    assert_eq!(code(&url, &["--ca-file", "/no/such/file"]), Some(64));
    assert_eq!(code("redis://127.0.0.1:1/", &trusting), Some(64));
}

#[test]
fn the_name_of_the_server_may_be_another() {
    let authority = Authority::new("ours");
    let tls = authority.sign(&["locks.example"]).serving(None);
    let server = RedisServer::builder().tls(tls).start();
    let url = server.tls_url("localhost");
    let ca = Pems::new();
    let ca = ca.write("ca", &authority.pem);
    assert_eq!(code(&url, &["--ca-file", &ca]), Some(69));
    let named = ["--ca-file", &ca, "--server-name", "locks.example"];
    assert_eq!(code(&url, &named), Some(0));
}

/// Each time it is said that nobody is verified, wherever that was asked for.
#[test]
fn who_trusts_everybody_is_warned() {
    let tls = Authority::new("ours").sign(&["localhost"]).serving(None);
    let server = RedisServer::builder().tls(tls).start();
    let url = server.tls_url("localhost");
    assert_eq!(code(&url, &[]), Some(69));
    let flag = ["ls", "--danger-accept-invalid-certificates"];
    let by_url = format!("{url}?danger_accept_invalid_certificates=true");
    for (url, arguments) in [(&url, &flag[..]), (&url, &flag), (&by_url, &["ls"])] {
        let done = run(url, arguments);
        assert_eq!(done.code, Some(0), "{}", done.err);
        assert!(
            done.err.contains("warning: the certificate"),
            "{}",
            done.err
        );
    }
}

/// A command in another folder finds the same files, and has the same locks.
#[test]
fn a_command_gets_the_url_with_all_that_was_said_beside_it() {
    let authority = Authority::new("ours");
    let tls = authority.sign(&["localhost"]).serving(None);
    let server = RedisServer::builder().tls(tls).start();
    let pems = Pems::new();
    pems.write("ca", &authority.pem);
    let script = "cd /; \"$0\" inspect a; \"$0\" run --pass-url b -- \"$0\" ls";
    let mut command = std::process::Command::new(LOCKSTREAM);
    command
        .current_dir(pems.0.path())
        .args([
            "run",
            "--ca-file",
            "ca",
            "--prefix",
            "shop",
            "--name",
            "outer",
            "--pass-url",
        ])
        .args(["a", "--", "sh", "-c", script, LOCKSTREAM])
        .env("LOCKSTREAM_URL", patient(&server.tls_url("localhost")));
    let done = crate::program::Program::spawn(command).end();
    assert_eq!((done.code, &*done.err), (Some(0), ""));
    for told in ["a: held by outer~", "a\touter~", "b\touter~"] {
        assert!(done.out.contains(told), "{}", done.out);
    }
}

#[test]
fn what_is_said_twice_must_be_the_same() {
    let server = RedisServer::start();
    let url = format!("{}?prefix=shop&name=web-1", server.url());
    let held = run(&url, ["run", "k", "--pass-url", "--", LOCKSTREAM, "ls"]);
    assert!(held.out.starts_with("k\tweb-1~"), "{held:?}");
    let same = ["--prefix", "shop", "--name", "web-1"];
    assert_eq!(code(&url, &same), Some(0));
    for other in [
        ["--prefix", "lock"],
        ["--name", "web-2"],
        ["--connect-timeout", "3s"],
    ] {
        let url = format!("{url}&connect_timeout=2s");
        let done = run(&url, [&["ls"], &other[..]].concat());
        assert_eq!(done.code, Some(64), "{}", done.err);
        assert!(done.err.contains("of the url differ"), "{}", done.err);
        assert!(done.err.contains(other[0]), "{}", done.err);
    }
}

#[test]
fn a_server_has_as_long_as_was_said() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        server.stop();
        let begin = Instant::now();
        let done = code(&server.url(), &["--connect-timeout", ".3"]);
        let took = begin.elapsed();
        server.cont();
        assert_eq!(done, Some(69));
        // It would have five seconds.
        assert!(took < Duration::from_millis(4_500), "{took:?}");
    });
    assert_eq!(
        code("redis://127.0.0.1:1/", &["--connect-timeout", "0"]),
        Some(64)
    );
    assert_eq!(
        code("redis://127.0.0.1:1/", &["--response-timeout", "2d"]),
        Some(64)
    );
}

#[test]
fn a_pooler_is_of_postgresql_and_its_password_is_no_argument() {
    let pooler = ["--pooled", "postgres://me:sesame@h/db"];
    let done = run("postgres://me@h/db", [&["ls"], &pooler[..]].concat());
    assert_eq!(done.code, Some(64));
    assert!(!done.err.contains("sesame"), "{}", done.err);
    assert_eq!(
        code("redis://127.0.0.1:1/", &["--pooled", "postgres://h/"]),
        Some(64)
    );
}

/// The same flags, whatever the server is.
#[test]
fn postgresql_takes_the_same_flags() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let tls = ours.sign(&["locks.example"]).serving(None);
    let server = PgServer::builder().tls(tls).start();
    let url = format!("postgres://postgres@localhost:{}/postgres", server.port());
    let pems = Pems::new();
    let (ca, other) = (
        pems.write("ca", &ours.pem),
        pems.write("other", &theirs.pem),
    );
    let named = ["--ca-file", &ca, "--server-name", "locks.example"];
    assert_eq!(code(&url, &named), Some(0));
    assert_eq!(code(&url, &["--ca-file", &ca]), Some(69));
    let foreign = ["--ca-file", &other, "--server-name", "locks.example"];
    assert_eq!(code(&url, &foreign), Some(69));
    let done = run(&url, ["ls", "--danger-accept-invalid-certificates"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(
        done.err.contains("warning: the certificate"),
        "{}",
        done.err
    );

    // Through a pooler, and all of it handed on.
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let flags = ["--prefix", "shop", "--name", "outer", "--pooled"];
    let (pooled, flags) = (pooler.url(), &flags[..]);
    let held = [&["run", "--pass-url", "k"], flags, &[&pooled]].concat();
    let held = [&held[..], &["--", LOCKSTREAM, "ls"]].concat();
    let done = run(&server.url(), held);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(done.out.starts_with("k\touter~"), "{}", done.out);
}
