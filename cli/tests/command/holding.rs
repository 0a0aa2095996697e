//! One lease over several commands: `hold`, `renew`, `release`, and `hold --foreground`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::program::{Done, LOCKSTREAM, Program, SOON, lockstream, run};
use crate::support::{PgServer, RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

/// The line of a lease on `k`.
fn hold(url: &str, options: &[&str]) -> String {
    let done = run(url, [&["hold"], options, &["k"]].concat());
    assert_eq!((done.code, &*done.err), (Some(0), ""));
    assert_eq!(done.out.lines().count(), 1, "{}", done.out);
    done.out
}

fn is_free(url: &str) -> bool {
    match run(url, ["run", "-n", "k", "--", "true"]).code {
        Some(0) => true,
        Some(75) => false,
        code => panic!("{code:?}"),
    }
}

/// With this on standard input.
fn with_input(url: &str, arguments: &[&str], input: &str) -> Output {
    let mut child = lockstream(url, arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap()
}

/// With this in LOCKSTREAM_LEASE.
fn with_variable(url: &str, arguments: &[&str], line: &str) -> Done {
    let mut command = lockstream(url, arguments);
    command.env("LOCKSTREAM_LEASE", line);
    Program::spawn(command).end()
}

#[test]
fn a_lease_goes_from_command_to_command() {
    let (redis, postgres) = (RedisServer::start(), PgServer::start());
    for url in [redis.url(), postgres.url()] {
        let first = hold(&url, &["--ttl", "5m"]);
        assert!(!is_free(&url));
        let renewed = with_input(&url, &["renew", "--ttl", "10m", "-"], &first);
        assert_eq!(renewed.status.code(), Some(0), "{renewed:?}");
        let second = String::from_utf8(renewed.stdout).unwrap();
        assert!(second != first && !is_free(&url));
        // The line before stands for nothing any more.
        for command in ["renew", "release"] {
            let done = with_variable(&url, &[command], &first);
            assert_eq!((done.code, &*done.out), (Some(76), ""), "{}", done.err);
            assert!(done.err.contains("is over"), "{}", done.err);
        }
        assert!(!is_free(&url));
        let released = with_variable(&url, &["release"], &second);
        assert_eq!((released.code, &*released.err), (Some(0), ""));
        assert!(is_free(&url));
        let again = run(&url, ["release", second.trim_end()]);
        assert_eq!(again.code, Some(76), "{}", again.err);
    }
}

#[test]
fn a_lease_lasts_as_long_as_was_said() {
    let server = RedisServer::start();
    let url = server.url();
    let line = hold(&url, &["--ttl", "1h"]);
    assert!(server.pttl("lock:k") > 3_500_000);
    assert_eq!(with_variable(&url, &["renew"], &line).code, Some(0));
    let left = server.pttl("lock:k");
    assert!(left > 550_000 && left <= 600_000, "{left}");
    let busy = run(&url, ["hold", "-w", "3s", "-E", "9", "k"]);
    assert_eq!((busy.code, &*busy.out), (Some(9), ""));
}

/// Neither creates the lock again.
#[test]
fn a_line_that_has_expired_creates_nothing() {
    let server = RedisServer::start();
    let url = server.url();
    let line = hold(&url, &[]);
    server.cmd(&["PEXPIRE", "lock:k", "1"]);
    wait_until_blocking("it has expired", SOON, || !server.exists("lock:k"));
    for command in ["renew", "release"] {
        let done = with_variable(&url, &[command], &line);
        assert_eq!((done.code, &*done.out), (Some(76), ""), "{}", done.err);
        assert!(!server.exists("lock:k"));
    }
    // Nor takes it from the next one.
    let next = hold(&url, &[]);
    assert_eq!(with_variable(&url, &["release"], &line).code, Some(76));
    assert_eq!(with_variable(&url, &["release"], &next).code, Some(0));
}

#[test]
fn a_file_has_the_line_and_nobody_else_reads_it() {
    let server = RedisServer::start();
    let url = server.url();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lease");
    let file = path.to_str().unwrap();
    let done = run(&url, ["hold", "--lease-file", file, "k"]);
    assert_eq!((done.code, &*done.out, &*done.err), (Some(0), "", ""));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let first = std::fs::read_to_string(&path).unwrap();
    assert_eq!(run(&url, ["renew", "--lease-file", file]).code, Some(0));
    assert_ne!(std::fs::read_to_string(&path).unwrap(), first);
    assert_eq!(run(&url, ["release", "--lease-file", file]).code, Some(0));
    assert!(is_free(&url));
    // What fails leaves the file as it was, and nothing beside it.
    assert_eq!(run(&url, ["renew", "--lease-file", file]).code, Some(76));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// Nobody could release it.
#[test]
fn a_lease_whose_line_cannot_be_written_is_given_back() {
    let server = RedisServer::start();
    let url = server.url();
    let done = run(&url, ["hold", "--lease-file", "/no/such/file", "k"]);
    assert_eq!(done.code, Some(64), "{}", done.err);
    assert!(is_free(&url));
    for options in [&["hold", "k"][..], &["hold", "--foreground", "k"]] {
        let full = std::fs::File::options()
            .write(true)
            .open("/dev/full")
            .unwrap();
        let done = lockstream(&url, options).stdout(full).output().unwrap();
        assert!(matches!(done.status.code(), Some(126 | 141)), "{done:?}");
        assert!(is_free(&url), "{done:?}");
    }
}

/// The commands between two renewals work under the lease: the next deployment began in the midst of them.
#[test]
fn a_renewal_whose_line_cannot_be_written_frees_nothing() {
    let server = RedisServer::start();
    let url = server.url();
    let line = hold(&url, &[]);
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let done = lockstream(&url, ["renew", "--ttl", "1h", line.trim()])
        .stdout(full)
        .output()
        .unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(76), "{said}");
    assert!(said.contains("its new line cannot be written"), "{said}");
    assert!(server.pttl("lock:k") > 3_500_000);
    assert!(!is_free(&url));
}

/// The line before stays good. A limit for files stands in for a disk that is full.
#[test]
fn a_full_disk_is_told_before_the_lease_is_renewed() {
    let server = RedisServer::start();
    let url = server.url();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lease");
    let file = path.to_str().unwrap();
    let done = run(&url, ["hold", "--lease-file", file, "k"]);
    assert_eq!(done.code, Some(0), "{}", done.err);
    let line = std::fs::read_to_string(&path).unwrap();
    let mut command = Command::new("sh");
    let script = "trap '' XFSZ; ulimit -f 0; exec \"$0\" renew --lease-file \"$1\"";
    command
        .args(["-c", script, LOCKSTREAM, file])
        .env("LOCKSTREAM_URL", &url);
    let done = Program::spawn(command).end();
    assert_eq!(done.code, Some(64), "{}", done.err);
    assert!(done.err.contains("cannot write"), "{}", done.err);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), line);
    assert_eq!(run(&url, ["release", "--lease-file", file]).code, Some(0));
}

#[test]
fn programs_get_json() {
    let server = RedisServer::start();
    let url = server.url();
    let json = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let held = json(&run(&url, ["hold", "--json", "-q", "k"]).out);
    let line = held["lease"].as_str().unwrap();
    assert_eq!(held["key"], "k");
    assert!(held["deadline_ms"].as_u64().unwrap() > 1_600_000_000_000);
    let renewed = json(&with_variable(&url, &["renew", "--json", "-q"], line).out);
    assert!(renewed["token"].as_u64() > held["token"].as_u64());
}

#[test]
fn what_is_no_lease_is_refused_and_not_shown() {
    let server = RedisServer::start();
    let url = server.url();
    for line in ["lockstream-lease-1 sesame", "sesame", ""] {
        for command in ["renew", "release"] {
            let done = with_variable(&url, &[command], line);
            assert_eq!(done.code, Some(64), "{}", done.err);
            assert!(!done.err.contains("sesame"), "{}", done.err);
        }
    }
    let none = run(&url, ["release"]);
    assert_eq!(none.code, Some(64));
    assert!(none.err.contains("LOCKSTREAM_LEASE"), "{}", none.err);
    let absent = run(&url, ["release", "--lease-file", "/no/such/file"]);
    assert_eq!(absent.code, Some(64));
    assert_eq!(run("redis://127.0.0.1:1/", ["hold", "k"]).code, Some(69));
}

/// `etcdctl lock`: held and renewed until a signal.
#[test]
fn a_lock_is_held_in_the_foreground_until_a_signal() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let url = server.url();
        let holder = || {
            let options = ["hold", "--foreground", "--ttl", "2s", "--json", "k"];
            let holder = Program::start(&url, options);
            holder.expect("\"token\":");
            holder
        };
        holder().expect_said("\"renewed\"");
        wait_until_blocking("its lease is over", SOON, || is_free(&url));
        for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
            let held = holder();
            assert!(!is_free(&url));
            held.signal(signal);
            let done = held.end();
            assert_eq!(done.code, Some(0), "{}", done.err);
            assert!(is_free(&url));
        }
        let lost = holder();
        server.del("lock:k");
        let done = lost.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}

/// A script that is killed takes its lock along.
#[test]
fn a_lock_is_held_until_the_input_ends() {
    let server = RedisServer::start();
    let url = server.url();
    let mut holder = lockstream(&url, ["hold", "--foreground", "--until-eof", "k"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut out = BufReader::new(holder.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    let token = line.strip_prefix("k\t").unwrap().trim_end();
    assert!(token.parse::<u64>().is_ok(), "{line:?}");
    assert!(!is_free(&url));
    let mut stdin = holder.stdin.take().unwrap();
    stdin.write_all(b"what it says does not matter\n").unwrap();
    assert!(!is_free(&url));
    drop(stdin);
    assert_eq!(holder.wait().unwrap().code(), Some(0));
    assert!(is_free(&url));
}

#[test]
fn who_waits_to_hold_gives_up_its_place_at_a_signal() {
    let server = RedisServer::start();
    let url = server.url();
    hold(&url, &[]);
    for options in [&["hold", "k"][..], &["hold", "--foreground", "k"]] {
        let waiter = Program::start(&url, options);
        let waiting = || server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]);
        wait_until_blocking("it waits", SOON, || waiting() == 1);
        waiter.signal(Signal::TERM);
        let done = waiter.end();
        assert_eq!((done.code, &*done.out), (Some(128 + 15), ""));
        assert_eq!(waiting(), 0);
    }
}

#[test]
fn a_reader_is_held_in_the_foreground() {
    let server = RedisServer::start();
    let url = server.url();
    let reader = || Program::start(&url, ["hold", "--foreground", "-s", "k"]);
    let both = [reader(), reader()];
    both.iter().for_each(|reader| reader.expect("k\t"));
    assert!(!is_free(&url));
}

/// Readers and permits are left as exclusive leases are.
#[test]
fn who_shares_a_lock_may_leave_it_too() {
    let (redis, postgres) = (RedisServer::start(), PgServer::start());
    for url in [redis.url(), postgres.url()] {
        let one_of_two = ["--permits", "2"];
        let (first, second) = (hold(&url, &one_of_two), hold(&url, &one_of_two));
        let another = ["run", "-n", "--permits", "2", "k", "--", "true"];
        assert_eq!(run(&url, another).code, Some(75));
        let renewed = run(&url, ["renew", first.trim()]);
        assert_eq!(renewed.code, Some(0), "{}", renewed.err);
        assert_eq!(run(&url, ["release", renewed.out.trim()]).code, Some(0));
        assert_eq!(run(&url, another).code, Some(0));
        // The line before the renewal stands for nothing.
        assert_eq!(run(&url, ["release", first.trim()]).code, Some(76));
        assert_eq!(run(&url, ["release", second.trim()]).code, Some(0));

        let reader = hold(&url, &["--shared"]);
        assert!(!is_free(&url));
        let beside = ["run", "-n", "--shared", "k", "--", "true"];
        assert_eq!(run(&url, beside).code, Some(0));
        assert_eq!(run(&url, ["release", reader.trim()]).code, Some(0));
        assert!(is_free(&url));
    }
}
