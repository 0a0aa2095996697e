//! What becomes of the command when the program that holds its lock is killed, or stopped.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{Program, SOON, run, until_gone};
use crate::support::{Proxy, RedisServer, Way, on_a_steady_machine_blocking, wait_until_blocking};

const ARGUMENTS: [&str; 8] = ["run", "--ttl", "10s", "--kill-after", "3s", "k", "--", "sh"];

/// Under a short lease, a command that cannot be run.
const NOTHING: [&str; 8] = [
    "run",
    "--ttl",
    "1s",
    "--kill-after",
    "100ms",
    "k",
    "--",
    "no-such-command",
];

/// A script that notes the time every 10 ms, and ignores SIGTERM.
fn beating(beats: &Path) -> String {
    let beats = beats.display();
    format!("trap '' TERM; echo shell=$$; while :; do date +%s%N >>{beats}; sleep 0.01; done")
}

/// The last time that it noted.
fn last_beat(beats: &Path) -> i64 {
    let beats = std::fs::read_to_string(beats).unwrap();
    beats.lines().next_back().unwrap().parse().unwrap()
}

/// A script that ends when the file is there.
fn until_there(flag: &Path) -> String {
    let flag = flag.display();
    format!("echo shell=$$; while [ ! -e {flag} ]; do sleep 0.01; done")
}

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
        "trap '' TERM; echo shell=$$; sleep 600 & echo sleeper=$!; while :; do sleep 0.01; done";
    let mut program = Program::start(&server.url(), [&ARGUMENTS[..], &["-c", script]].concat());
    let pids = [program.number("shell"), program.number("sleeper")];
    program.kill();
    pids.into_iter().for_each(until_gone);
    assert!(server.exists("lock:k"), "it has ended before its lease");
}

/// We cannot renew, and the command must not outlive the lease.
#[test]
fn a_stopped_program_does_not_work_without_its_lease() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let beats = folder.path().join("beats");
        let script = beating(&beats);
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
        let last = last_beat(&beats);
        assert!(last < now, "{last} {now}");
        program.signal(Signal::CONT);
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}

/// We cannot renew, and are killed shortly before the end of the lease. `--kill-after` would let the command go on for longer.
#[test]
fn the_command_of_a_dead_program_does_not_outlive_the_lease() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let folder = tempfile::tempdir().unwrap();
        let beats = folder.path().join("beats");
        let script = beating(&beats);
        let arguments = [
            "run",
            "--ttl",
            "6s",
            "--kill-after",
            "2s",
            "k",
            "--",
            "sh",
            "-c",
            &script,
        ];
        let mut program = Program::start(&proxy.url(), arguments);
        let shell = program.number("shell");
        let next = Program::start(&server.url(), ["run", "k", "--", "date", "+now=%s%N"]);
        proxy.blackhole(Way::Both, true);
        wait_until_blocking("its lease is almost over", SOON, || {
            server.pttl("lock:k") < 500
        });
        program.kill();
        until_gone(shell);
        let now = next.number("now");
        let last = last_beat(&beats);
        assert!(last < now, "{last} {now}");
    });
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
    on_a_steady_machine_blocking(|| {
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
    });
}

/// The guardian is ended by somebody. We notice the loss of the lease by ourselves.
#[test]
fn without_a_guardian_we_stop_the_command() {
    on_a_steady_machine_blocking(|| {
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
        let guardian = group_of(shell);
        assert_ne!(
            i64::from(guardian.as_raw_pid()),
            shell,
            "it leads the group"
        );
        kill_process(guardian, Signal::KILL).unwrap();
        server.stop();
        until_gone(shell);
        let done = program.end();
        server.cont();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}

/// The process group of a process, whose id is that of the guardian.
fn group_of(pid: i64) -> Pid {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let group = fields.split_whitespace().nth(2).unwrap().parse().unwrap();
    Pid::from_raw(group).unwrap()
}

/// A program that waits for its guardian, which was stopped before it could say that it is ready.
fn with_a_slow_guardian(url: &str, arguments: &[&str]) -> (Program, Pid) {
    let begin = Instant::now();
    loop {
        assert!(begin.elapsed() < SOON, "no guardian was caught in time");
        let program = Program::start(url, arguments);
        let pid = program.pid().as_raw_pid();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let first = || {
            let children = std::fs::read_to_string(&children).ok()?;
            let first = children.split_whitespace().next()?;
            Pid::from_raw(first.parse().ok()?)
        };
        let started = || program.err().contains("cannot run") || program.out().contains('=');
        wait_until_blocking("it has a guardian", SOON, || first().is_some() || started());
        // It may have done its work, and be gone, before we come.
        let stopped = first().filter(|it| kill_process(*it, Signal::STOP).is_ok());
        std::thread::sleep(Duration::from_millis(200));
        if let Some(guardian) = stopped {
            if !started() {
                return (program, guardian);
            }
            let _ = kill_process(guardian, Signal::CONT);
        }
    }
}

/// However long the guardian takes to start, its deadline is that of the lease.
#[test]
fn a_guardian_that_starts_slowly_knows_the_deadline() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let beats = folder.path().join("beats");
        let script = beating(&beats);
        let arguments = [
            "run",
            "--ttl",
            "6s",
            "--kill-after",
            "1s",
            "k",
            "--",
            "sh",
            "-c",
            &script,
        ];
        let (program, guardian) = with_a_slow_guardian(&server.url(), &arguments);
        let next = Program::start(&server.url(), ["run", "k", "--", "date", "+now=%s%N"]);
        std::thread::sleep(Duration::from_secs(1));
        kill_process(guardian, Signal::CONT).unwrap();
        let shell = program.number("shell");
        // Before its first renewal.
        program.signal(Signal::STOP);
        until_gone(shell);
        let now = next.number("now");
        let last = last_beat(&beats);
        assert!(last < now, "{last} {now}");
        program.signal(Signal::CONT);
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}

/// If the guardian is ready only when the lease is over, the command is not started.
#[test]
fn no_command_starts_after_its_lease() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let (program, guardian) = with_a_slow_guardian(&server.url(), &NOTHING);
        assert!(server.del("lock:k"));
        // No renewal can have proved it since.
        std::thread::sleep(Duration::from_secs(1));
        kill_process(guardian, Signal::CONT).unwrap();
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}

/// The wait for it blocks all else, and the lease is renewed all the same.
#[test]
fn a_guardian_that_starts_slowly_costs_no_lease() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let (program, guardian) = with_a_slow_guardian(&server.url(), &NOTHING);
        std::thread::sleep(Duration::from_secs(3));
        assert!(server.exists("lock:k"));
        kill_process(guardian, Signal::CONT).unwrap();
        let done = program.end();
        assert_eq!(done.code, Some(127), "{}", done.err);
    });
}

/// When the command has ended, a guardian that is stopped is not waited for.
#[test]
fn a_guardian_that_is_stopped_holds_up_nothing() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let flag = folder.path().join("flag");
    let script = until_there(&flag);
    let arguments = ["run", "--ttl", "10m", "k", "--", "sh", "-c", &script];
    let program = Program::start(&server.url(), arguments);
    let guardian = group_of(program.number("shell"));
    kill_process(guardian, Signal::STOP).unwrap();
    std::fs::write(&flag, "").unwrap();
    let done = program.end();
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert!(!server.exists("lock:k"));
}

/// Deadlines pile up while the guardian is stopped. When it goes on, only the newest of them counts.
#[test]
fn a_guardian_that_was_stopped_spares_a_renewed_command() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let flag = folder.path().join("flag");
        let script = format!("{}; exit 5", until_there(&flag));
        let arguments = [
            "run",
            "--json",
            "--ttl",
            "1s",
            "--kill-after",
            "0",
            "k",
            "--",
            "sh",
            "-c",
            &script,
        ];
        let program = Program::start(&server.url(), arguments);
        let guardian = group_of(program.number("shell"));
        kill_process(guardian, Signal::STOP).unwrap();
        wait_until_blocking("it is renewed more often than a read tells", SOON, || {
            program.err().matches("\"renewed\"").count() >= 42
        });
        kill_process(guardian, Signal::CONT).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        std::fs::write(&flag, "").unwrap();
        let done = program.end();
        assert_eq!(done.code, Some(5), "{}", done.err);
    });
}
