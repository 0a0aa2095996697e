//! `lead`: one command at a time, wherever the leader is.

use std::time::Instant;

use rustix::process::Signal;

use crate::program::{Program, SOON, run};
use crate::support::{RedisServer, wait_until_blocking};

const LOOP: &str = "echo token=$LOCKSTREAM_TOKEN; while :; do sleep 0.01; done";

/// A leader that keeps the lead, and whose command has time to clean up, though all stands still for two seconds.
fn candidate(server: &RedisServer, name: &str, script: &str) -> Program {
    let times = ["--ttl", "9s", "--kill-after", "3s"];
    candidate_with(&times, server, name, script)
}

fn candidate_with(times: &[&str], server: &RedisServer, name: &str, script: &str) -> Program {
    let command = ["k", "--", "sh", "-c", script];
    let arguments = [&["lead", "--name", name][..], times, &command].concat();
    Program::start(&server.url(), arguments)
}

fn tickets(server: &RedisServer) -> u64 {
    server.ask(&["ZCARD", "{lock:k}:~queue2"])
}

#[test]
fn one_leads_and_another_takes_over() {
    let server = RedisServer::start();
    let first = candidate(&server, "first", LOOP);
    let before = first.number("token");
    let second = candidate(&server, "second", LOOP);
    wait_until_blocking("it waits", SOON, || tickets(&server) == 1);
    assert_eq!(second.out(), "");
    first.signal(Signal::TERM);
    let done = first.end();
    assert_eq!(done.code, Some(128 + 15), "{}", done.err);
    assert!(second.number("token") > before);
    second.signal(Signal::INT);
    // A shell ends its loop by the signal.
    assert_eq!(second.end().code, Some(128 + 2));
    assert!(!server.exists("lock:k"));
}

#[test]
fn a_leader_that_is_killed_is_replaced() {
    let server = RedisServer::start();
    let brief = ["--ttl", "3s", "--kill-after", "1s"];
    let mut first = candidate_with(&brief, &server, "first", LOOP);
    first.number("token");
    let second = candidate_with(&brief, &server, "second", LOOP);
    wait_until_blocking("one waits", SOON, || tickets(&server) == 1);
    first.kill();
    second.number("token");
}

/// Its command is stopped, and runs again when it leads again.
#[test]
fn a_leader_that_lost_the_lead_stands_again() {
    let server = RedisServer::start();
    let first = candidate(
        &server,
        "first",
        "trap 'echo stopped; exit' TERM; echo up; while :; do sleep 0.01; done",
    );
    first.expect("up");
    let second = candidate(&server, "second", LOOP);
    wait_until_blocking("it waits", SOON, || tickets(&server) == 1);
    assert_eq!(run(&server.url(), ["free", "--yes", "k"]).code, Some(0));
    second.number("token");
    first.expect("up\nstopped\n");
    wait_until_blocking("it stands again", SOON, || tickets(&server) == 1);
    second.signal(Signal::TERM);
    first.expect("up\nstopped\nup\n");
}

/// Each failure is followed by a longer pause, in which others may lead.
#[test]
fn a_command_that_fails_at_once_runs_again_after_a_pause() {
    let server = RedisServer::start();
    let begin = Instant::now();
    let program = candidate(&server, "first", "echo run; exit 3");
    program.expect("run\nrun\nrun\nrun\n");
    let elapsed = begin.elapsed();
    assert!(
        elapsed.as_millis() >= 3_500,
        "half a second, one and two: {elapsed:?}"
    );
    program.expect_said("ended with code 3");
    wait_until_blocking("it pauses", SOON, || !server.exists("lock:k"));
    program.signal(Signal::TERM);
    assert_eq!(program.end().code, Some(128 + 15));
}

#[test]
fn what_no_pause_mends_ends_it() {
    let server = RedisServer::start();
    let url = server.url();
    assert_eq!(
        run(&url, ["lead", "k", "--", "no-such-command"]).code,
        Some(127)
    );
    assert_eq!(run(&url, ["lead", "a}", "--", "true"]).code, Some(64));
    assert_eq!(
        run(&url, ["lead", "--ttl", "1s", "k", "--", "true"]).code,
        Some(64)
    );
    assert_eq!(run(&url, ["lead", "a", "b", "--", "true"]).code, Some(64));
    // It has no user of that name.
    let refused = server.url_with("nobody", "secret", 0);
    assert_eq!(run(&refused, ["lead", "k", "--", "true"]).code, Some(69));
    assert!(!server.exists("lock:k"));
}

/// The command may take SIGHUP as a wish to read its settings again.
#[test]
fn a_command_that_outlives_a_hang_up_goes_on_leading() {
    let server = RedisServer::start();
    let script = "trap 'echo again' HUP; echo up; while :; do sleep 0.01; done";
    let program = candidate(&server, "first", script);
    program.expect("up");
    program.signal(Signal::HUP);
    program.expect("again");
    assert!(server.del("lock:k"));
    program.expect("up\nagain\nup\n");
}

/// systemd sends SIGHUP after SIGTERM if it is told to, and a terminal that closes may, too.
#[test]
fn a_hang_up_does_not_undo_the_wish_to_end() {
    let server = RedisServer::start();
    let script =
        "trap 'echo term' TERM; trap 'echo hup; exit 7' HUP; echo up; while :; do sleep 0.01; done";
    let program = candidate(&server, "first", script);
    program.expect("up");
    program.signal(Signal::TERM);
    program.expect("term");
    program.signal(Signal::HUP);
    let done = program.end();
    assert_eq!((done.code, &*done.out), (Some(7), "up\nterm\nhup\n"));
}
