//! Commands that use locks themselves, under `--pass-url`.

use crate::program::{Done, LOCKSTREAM, run};
use crate::support::{PgServer, RedisServer};

/// What the inner one does inside of the outer one.
fn nested(url: &str, outer: &[&str], inner: &[&str]) -> Done {
    let command = ["--pass-url", "--", LOCKSTREAM];
    run(url, [outer, &command, inner].concat())
}

/// The inner one waited for itself for ever.
#[test]
fn who_would_wait_for_itself_is_refused_at_once() {
    let (redis, postgres) = (RedisServer::start(), PgServer::start());
    for url in [redis.url(), postgres.url()] {
        for outer in [&["run", "a"][..], &["run", "b", "a"], &["run", "-s", "a"]] {
            for inner in [
                &["run", "a", "--", "echo", "ran"][..],
                &["run", "c", "a", "--", "echo", "ran"],
                &["run", "--wait", "60s", "a", "--", "echo", "ran"],
                &["lead", "a", "--", "echo", "ran"],
                &["hold", "a"],
            ] {
                let done = nested(&url, outer, inner);
                assert_eq!(
                    (done.code, &*done.out),
                    (Some(64), ""),
                    "{inner:?}: {}",
                    done.err
                );
                assert!(done.err.contains("wait for itself"), "{}", done.err);
            }
        }
        // At any depth.
        let deep = [
            "run",
            "b",
            "--pass-url",
            "--",
            LOCKSTREAM,
            "run",
            "a",
            "--",
            "true",
        ];
        assert_eq!(nested(&url, &["run", "a"], &deep).code, Some(64));
        // One that does not wait finds it busy, as ever.
        let done = nested(&url, &["run", "a"], &["run", "-n", "a", "--", "true"]);
        assert_eq!(done.code, Some(75), "{}", done.err);
    }
}

#[test]
fn what_is_not_held_around_it_is_had() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let url = server.url();
    let here = ["run", "b", "--", "echo", "ran"];
    assert_eq!(nested(&url, &["run", "a"], &here).out, "ran\n");
    // The same key of another store, and of another prefix.
    let elsewhere = ["run", "--url", &other.url(), "a", "--", "echo", "ran"];
    assert_eq!(nested(&url, &["run", "a"], &elsewhere).out, "ran\n");
    let prefix = ["run", "--prefix", "other", "a", "--", "echo", "ran"];
    assert_eq!(nested(&url, &["run", "a"], &prefix).out, "ran\n");
    // A reader in a reader, and a permit in a permit, if there is one left.
    for mode in [&["-s"][..], &["--permits", "2"]] {
        let outer = [&["run", "a"], mode].concat();
        let inner = [&["run", "a"], mode, &["--", "echo", "ran"]].concat();
        assert_eq!(nested(&url, &outer, &inner).out, "ran\n", "{mode:?}");
    }
    let last = ["run", "a", "--permits", "1"];
    let inner = [&last[..], &["--", "true"]].concat();
    assert_eq!(nested(&url, &last, &inner).code, Some(64));
}

/// The lock was taken away: who waits for it then does not wait for itself.
#[test]
fn a_lock_that_was_lost_is_waited_for() {
    let server = RedisServer::start();
    let url = server.url();
    let script = "\"$0\" free --yes a; exec \"$0\" run --wait 20s a -- echo ran";
    let outer = ["run", "--on-lost", "run-on", "a", "--pass-url", "--"];
    let done = run(
        &url,
        [&outer[..], &["sh", "-c", script, LOCKSTREAM]].concat(),
    );
    assert_eq!((done.code, &*done.out), (Some(0), "ran\n"), "{}", done.err);
}
