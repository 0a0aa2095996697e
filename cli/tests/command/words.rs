//! What may be said on the command line: times, the options of `flock`, and tips.

use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::program::{LOCKSTREAM, Program, SOON, run};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

fn hold(server: &RedisServer, options: &[&str]) -> Program {
    let arguments = [&["run"], options, &["k", "-c", "echo up; sleep 600"]].concat();
    let program = Program::start(&server.url(), arguments);
    program.expect("up");
    program
}

/// As `sleep`, `timeout` and `flock` take them.
#[test]
fn a_time_may_be_a_fraction() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let _holder = hold(&server, &[]);
        for wait in ["0.2", ".2", "0.2s", "0.1s100ms", "200ms"] {
            let is_told = || {
                let done = run(&server.url(), ["run", "--wait", wait, "k", "--", "true"]);
                assert_eq!(done.code, Some(75), "{}", done.err);
                let told = done.err.split_once("not acquired within ").unwrap().1;
                let waited = told.split_once("ms:").and_then(|told| told.0.parse().ok());
                assert!(
                    waited.is_none_or(|waited: u64| waited >= 200),
                    "{wait}: {told}"
                );
                // A machine that is busy waits longer.
                waited.is_some_and(|waited| waited < 300)
            };
            wait_until_blocking(format!("{wait} is 200 ms"), SOON, is_told);
        }
    });
    for command in ["run", "lead", "watch"] {
        let help = run("", [command, "--help"]).out;
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(help.contains("A TIME is a number of seconds"), "{help}");
    }
}

/// `flock -w 1 -x file -c script`, and `-s` for readers.
#[test]
fn the_options_of_flock_mean_the_same() {
    let server = RedisServer::start();
    let reader = hold(&server, &["-s"]);
    let code = |options: &[&str]| {
        let arguments = [
            &["run"],
            options,
            &["k", "-c", "echo \"$LOCKSTREAM_KEY\"; exit 7"],
        ];
        let done = run(&server.url(), arguments.concat());
        (done.code, done.out)
    };
    assert_eq!(code(&["-s", "-n"]), (Some(7), "k\n".to_owned()));
    assert_eq!(code(&["-x", "-w", "3"]).0, Some(75));
    assert_eq!(code(&["-n"]).0, Some(75));
    reader.signal(Signal::TERM);
    reader.end();
    assert_eq!(code(&["-x", "-w", "20"]).0, Some(7));
    let dash = run(
        &server.url(),
        ["run", "-c", "echo \"$LOCKSTREAM_KEY\"", "--", "-x"],
    );
    assert_eq!((dash.code, &*dash.out), (Some(0), "-x\n"), "{}", dash.err);
}

#[test]
fn a_command_without_dashes_before_it_gets_the_right_line() {
    for (line, right) in [
        (&["run", "key", "true"][..], "lockstream run key -- true\n"),
        (
            &["run", "--name", "key", "key", "ls", "-l", "a b"],
            "lockstream run --name key key -- ls -l 'a b'\n",
        ),
        (&["lead", "key", "true"], "lockstream lead key -- true\n"),
        (
            &["lead", "--ttl", "1m", "key", "ls", "-l"],
            "lockstream lead --ttl 1m key -- ls -l\n",
        ),
    ] {
        // As it is: `run` adds an option, which the right line would have, too.
        let mut command = Command::new(LOCKSTREAM);
        command
            .args(line)
            .env("LOCKSTREAM_URL", "redis://127.0.0.1:1/");
        let done = Program::spawn(command).end();
        assert_eq!(done.code, Some(64), "{}", done.err);
        assert!(done.err.contains(right), "{}", done.err);
    }
    // Where `--` is, something else is wrong; and so it is without a command.
    for line in [
        &["run", "key"][..],
        &["run", "--no-such", "key", "--", "ls"],
        &["inspect", "a", "b"],
    ] {
        let done = run("redis://127.0.0.1:1/", line);
        assert_eq!(done.code, Some(64), "{}", done.err);
        assert!(!done.err.contains("stands behind"), "{}", done.err);
    }
}

#[test]
fn an_acquisition_says_how_long_it_waited() {
    let server = RedisServer::start();
    let waited = |text: &str| -> Option<u64> {
        let mut events = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        events.find_map(|event| event["waited_ms"].as_u64())
    };
    for waiter in [
        &["run", "--json", "k", "--", "true"][..],
        &["lead", "--json", "k", "--", "sleep", "600"],
    ] {
        let holder = hold(&server, &["--ttl", "10m"]);
        let waiter = Program::start(&server.url(), waiter);
        // That is told after half a second.
        waiter.expect_said("\"waiting\"");
        holder.signal(Signal::TERM);
        wait_until_blocking("it is told", SOON, || waited(&waiter.err()).is_some());
        waiter.signal(Signal::TERM);
        let done = waiter.end();
        assert!(waited(&done.err).unwrap() >= 500, "{}", done.err);
    }
}

#[test]
fn an_ipv6_address_has_brackets() {
    for url in [
        "redis://[::1]:1/",
        "redis+cluster://[::1]:1/",
        "postgres://me@[::1]:1/db?sslmode=disable",
    ] {
        let done = run(url, ["run", "k", "--", "true"]);
        assert_eq!(done.code, Some(69), "{}", done.err);
        assert!(done.err.contains("[::1]:1"), "{}", done.err);
    }
}

#[test]
fn an_unknown_url_is_told_of_every_kind() {
    for url in [
        "localhost:6379",
        "http://127.0.0.1/",
        "127.0.0.1",
        "mysql://h/",
    ] {
        let done = run(url, ["run", "k", "--", "true"]);
        assert_eq!(done.code, Some(64), "{}", done.err);
        for kind in ["redis://", "unix://", "postgres://"] {
            assert!(done.err.contains(kind), "{}", done.err);
        }
    }
    assert!(run(LOCKSTREAM, ["ls"]).err.contains("expected redis://"));
    let bare = run("localhost:6379", ["ls"]);
    assert!(bare.err.contains("it has no scheme"), "{}", bare.err);
}
