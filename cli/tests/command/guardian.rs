//! What becomes of the command when the program that holds its lock is killed, or stopped.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{Program, SOON, run, until_gone};
use crate::support::{RedisServer, wait_until_blocking};

const ARGUMENTS: [&str; 8] = ["run", "--ttl", "10s", "--kill-after", "1s", "k", "--", "sh"];

/// It may clean up, and the key is free when its ttl is over, and not before.
#[test]
fn the_command_ends_with_us() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let clean = folder.path().join("clean");
    let script = format!(
        "trap 'echo done >{}; exit' TERM; echo shell=$$; while :; do sleep 0.01; done",
        clean.display()
    );
    let mut program = Program::start(&server.url(), [&ARGUMENTS[..], &["-c", &script]].concat());
    let shell = program.number("shell");
    program.kill();
    until_gone(shell);
    assert_eq!(std::fs::read_to_string(&clean).unwrap(), "done\n");
    let left = server.pttl("lock:k");
    assert!(
        (1..=10_000).contains(&left),
        "nobody has freed it, nobody renews it: {left}"
    );
    assert_eq!(
        run(&server.url(), ["run", "-n", "k", "--", "true"]).code,
        Some(75)
    );
    wait_until_blocking("its ttl is over", SOON, || !server.exists("lock:k"));
}

/// A command that ignores SIGTERM, with a child that does, too.
#[test]
fn a_stubborn_command_is_killed() {
    let server = RedisServer::start();
    let script =
        "trap '' TERM; echo shell=$$; sleep 60 & echo sleeper=$!; while :; do sleep 0.01; done";
    let mut program = Program::start(&server.url(), [&ARGUMENTS[..], &["-c", script]].concat());
    let pids = [program.number("shell"), program.number("sleeper")];
    program.kill();
    pids.into_iter().for_each(until_gone);
    assert!(server.exists("lock:k"), "it has ended before its lease");
}

/// We cannot renew, and the command must not outlive the lease.
#[test]
fn a_stopped_program_does_not_work_without_its_lease() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let beats = folder.path().join("beats");
    let script = format!(
        "trap '' TERM; echo shell=$$; while :; do date +%s%N >>{}; sleep 0.01; done",
        beats.display()
    );
    let arguments = [
        "run",
        "--ttl",
        "3s",
        "--kill-after",
        "1s",
        "k",
        "--",
        "sh",
        "-c",
        &script,
    ];
    let program = Program::start(&server.url(), arguments);
    let shell = program.number("shell");
    let next = Program::start(&server.url(), ["run", "k", "--", "date", "+now=%s%N"]);
    program.signal(Signal::STOP);
    until_gone(shell);
    let now = next.number("now");
    let beats = std::fs::read_to_string(&beats).unwrap();
    let last: i64 = beats.lines().next_back().unwrap().parse().unwrap();
    assert!(last < now, "{last} {now}");
    program.signal(Signal::CONT);
    let done = program.end();
    assert_eq!(done.code, Some(76), "{}", done.err);
}

/// What the command sends to its own group does not end the guardian.
#[test]
fn signals_for_the_group_leave_the_guardian_alone() {
    let server = RedisServer::start();
    let script = "for s in HUP INT QUIT TERM USR1 USR2; do trap : $s; kill -$s 0; done; \
                  trap - TERM; echo shell=$$; while :; do sleep 0.01; done";
    let mut program = Program::start(&server.url(), [&ARGUMENTS[..], &["-c", script]].concat());
    let shell = program.number("shell");
    program.kill();
    until_gone(shell);
}

/// A renewal moves the deadline of the guardian, too: the command outlives many ttls.
#[test]
fn a_renewed_command_is_left_alone() {
    let server = RedisServer::start();
    let arguments = [
        "run",
        "--ttl",
        "1500ms",
        "--kill-after",
        "300ms",
        "k",
        "--",
        "sleep",
        "5",
    ];
    let begin = Instant::now();
    let done = run(&server.url(), arguments);
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(begin.elapsed() >= Duration::from_secs(5));
}

/// The guardian is ended by somebody. We notice the loss of the lease by ourselves.
#[test]
fn without_a_guardian_we_stop_the_command() {
    let server = RedisServer::start();
    let script = "trap '' TERM; echo shell=$$; while :; do sleep 0.01; done";
    let arguments = [
        "run",
        "--ttl",
        "3s",
        "--kill-after",
        "1s",
        "k",
        "--",
        "sh",
        "-c",
        script,
    ];
    let program = Program::start(&server.url(), arguments);
    let shell = program.number("shell");
    let stat = std::fs::read_to_string(format!("/proc/{shell}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let group: i32 = fields.split_whitespace().nth(2).unwrap().parse().unwrap();
    assert_ne!(i64::from(group), shell, "the guardian leads the group");
    kill_process(Pid::from_raw(group).unwrap(), Signal::KILL).unwrap();
    server.stop();
    until_gone(shell);
    let done = program.end();
    server.cont();
    assert_eq!(done.code, Some(76), "{}", done.err);
}
