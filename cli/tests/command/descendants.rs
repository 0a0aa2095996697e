//! Processes of the command that have left its process group or session, or lost their parent: `timeout`, `setsid` and
//! the job control of a shell made them unreachable, and two worked at once.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{Program, SOON, is_gone, patient, run, until_gone, write_program};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

/// How a command starts the worker, whose path is the last word.
const WAYS: [&[&str]; 6] = [
    // A group of its own.
    &["timeout", "2h"],
    // A session of its own, in place.
    &["setsid"],
    &["nohup"],
    // A job in a group of its own.
    &["bash", "-m", "-c", "\"$0\" & wait"],
    // As `sudo` does it with a terminal of its own: a wrapper that waits for a process in another session.
    &["setsid", "--fork", "--wait"],
    // A daemon: its parent is gone.
    &["sh", "-c", "(setsid \"$0\" &); sleep 600"],
];

/// A program that notes the time every few ms.
struct Worker {
    _folder: tempfile::TempDir,
    path: PathBuf,
    beats: PathBuf,
}

impl Worker {
    /// `begin`: how it begins, such as with traps.
    fn new(begin: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (path, beats) = (folder.path().join("worker"), folder.path().join("beats"));
        let script = format!(
            "#!/bin/sh\n{begin}\necho worker=$$\nwhile :; do date +%s%N >>{}; sleep 0.02; done\n",
            beats.display()
        );
        write_program(&path, &script);
        let _folder = folder;
        Self {
            _folder,
            path,
            beats,
        }
    }

    fn stubborn() -> Self {
        Self::new("trap '' TERM INT")
    }

    fn start(&self, server: &RedisServer, options: &[&str], way: &[&str]) -> (Program, i64) {
        let path = self.path.to_str().unwrap();
        let arguments = [&["run"][..], options, &["--"], way, &[path]].concat();
        let program = Program::start(&server.url(), arguments);
        let worker = program.number("worker");
        (program, worker)
    }

    fn last_beat(&self) -> i64 {
        let beats = std::fs::read_to_string(&self.beats).unwrap();
        beats.lines().next_back().unwrap().parse().unwrap()
    }
}

/// Sends a signal until the program has ended: a shell that is about to start something may miss a SIGINT.
fn ask(program: &mut Program, signal: Signal) {
    let begin = std::time::Instant::now();
    while program.runs() {
        assert!(begin.elapsed() < SOON, "it does not end: {}", program.err());
        program.signal(signal);
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Runs a case for each way to start a worker, all at the same time.
fn in_each_way(case: impl Fn(&RedisServer, &str, &[&str]) + Sync) {
    let server = RedisServer::start();
    std::thread::scope(|scope| {
        for (number, way) in WAYS.into_iter().enumerate() {
            let (case, server) = (&case, &server);
            scope.spawn(move || case(server, &format!("k{number}"), way));
        }
    });
}

#[test]
fn a_lost_lease_ends_every_process() {
    in_each_way(|server, key, way| {
        let worker = Worker::stubborn();
        let options = ["--ttl", "6s", "--kill-after", "500ms", key];
        let (program, pid) = worker.start(server, &options, way);
        assert!(server.del(&format!("lock:{key}")));
        let done = program.end();
        assert!(is_gone(pid), "{way:?}: {}", done.err);
        assert_eq!(done.code, Some(76), "{way:?}: {}", done.err);
        assert!(done.err.contains("command killed"), "{way:?}: {}", done.err);
    });
}

/// The server is away: whoever is next begins after the last beat.
#[test]
fn no_process_works_beyond_the_lease() {
    for way in [WAYS[0], WAYS[5]] {
        let server = RedisServer::start();
        let worker = Worker::stubborn();
        let options = ["--ttl", "6s", "--kill-after", "1s", "k"];
        let (program, pid) = worker.start(&server, &options, way);
        let next = Program::start(&server.url(), ["run", "k", "--", "date", "+now=%s%N"]);
        let queue = ["ZCARD", "{lock:k}:~queue2"];
        wait_until_blocking("it waits", SOON, || server.ask::<u64>(&queue) == 1);
        server.stop();
        until_gone(pid);
        server.cont();
        let now = next.number("now");
        assert!(worker.last_beat() < now, "{way:?}");
        assert_eq!(program.end().code, Some(76), "{way:?}");
    }
}

/// The lock is held until all of them have ended.
#[test]
fn signals_reach_every_process() {
    for signal in [Signal::TERM, Signal::INT] {
        in_each_way(|server, key, way| {
            let worker = Worker::new("");
            let (mut program, pid) = worker.start(server, &[key], way);
            ask(&mut program, signal);
            let done = program.end();
            assert!(is_gone(pid), "{way:?}: {}", done.err);
            assert!(!server.exists(&format!("lock:{key}")), "{way:?}");
        });
    }
}

/// The command itself ends, and what it has started does not: that is killed, after the time that it had to clean up.
#[test]
fn what_outlives_a_command_that_was_asked_to_end_is_killed() {
    let server = RedisServer::start();
    for way in [WAYS[4], WAYS[5]] {
        for signal in [Signal::TERM, Signal::INT] {
            let worker = Worker::stubborn();
            let options = ["--kill-after", "500ms", "k"];
            let (mut program, pid) = worker.start(&server, &options, way);
            ask(&mut program, signal);
            let done = program.end();
            assert!(is_gone(pid), "{way:?}: {}", done.err);
            assert!(done.err.contains("command killed"), "{way:?}: {}", done.err);
            let code = 128 + signal.as_raw();
            assert_eq!(done.code, Some(code), "{way:?}: {}", done.err);
            assert!(!server.exists("lock:k"), "{way:?}");
        }
    }
}

/// A shell ends at once when it gets SIGTERM, and what it has started cleans up meanwhile.
#[test]
fn every_process_may_clean_up() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let clean = folder.path().join("clean");
    let begin = format!(
        "trap 'sleep 0.5; echo done >{}; exit' TERM",
        clean.display()
    );
    let worker = Worker::new(&begin);
    let options = ["--ttl", "45s", "--kill-after", "15s", "k"];
    let (program, pid) = worker.start(&server, &options, WAYS[5]);
    program.signal(Signal::TERM);
    let done = program.end();
    assert!(is_gone(pid), "{}", done.err);
    assert_eq!(std::fs::read_to_string(&clean).unwrap(), "done\n");
    assert!(!done.err.contains("killed"), "{}", done.err);
}

/// The guardian has every process below it.
#[test]
fn every_process_ends_with_us() {
    in_each_way(|server, key, way| {
        let worker = Worker::stubborn();
        let options = ["--ttl", "20s", "--kill-after", "500ms", key];
        let (mut program, pid) = worker.start(server, &options, way);
        program.kill();
        until_gone(pid);
        assert!(server.exists(&format!("lock:{key}")), "{way:?}");
    });
}

/// We cannot renew: the guardian ends what runs beyond the lease.
#[test]
fn no_process_works_without_its_lease_while_we_are_stopped() {
    on_a_steady_machine_blocking(|| {
        in_each_way(|server, key, way| {
            let worker = Worker::stubborn();
            let options = ["--ttl", "4s", "--kill-after", "1s", key];
            let (program, pid) = worker.start(server, &options, way);
            let next = Program::start(&server.url(), ["run", key, "--", "date", "+now=%s%N"]);
            program.signal(Signal::STOP);
            until_gone(pid);
            let now = next.number("now");
            assert!(worker.last_beat() < now, "{way:?}");
            program.signal(Signal::CONT);
            let done = program.end();
            assert_eq!(done.code, Some(76), "{way:?}: {}", done.err);
        });
    });
}

/// Without a guardian they are below us.
#[test]
fn every_process_is_reached_without_a_guardian() {
    let server = RedisServer::start();
    for way in [WAYS[0], WAYS[5]] {
        let worker = Worker::stubborn();
        let options = ["--ttl", "6s", "--kill-after", "500ms", "k"];
        let (program, pid) = worker.start(&server, &options, way);
        let us = program.pid().as_raw_pid();
        let children = std::fs::read_to_string(format!("/proc/{us}/task/{us}/children")).unwrap();
        let guardian: i32 = children.trim().parse().unwrap();
        kill_process(Pid::from_raw(guardian).unwrap(), Signal::KILL).unwrap();
        assert!(server.del("lock:k"));
        let done = program.end();
        assert!(is_gone(pid), "{way:?}: {}", done.err);
        assert_eq!(done.code, Some(76), "{way:?}: {}", done.err);
    }
}

/// Processes that multiply and ignore SIGTERM.
#[test]
fn whatever_is_forked_meanwhile_is_killed() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let (path, alive) = (folder.path().join("chain"), folder.path().join("alive"));
    // Each starts the next in a session of its own, and ends.
    let script = format!(
        "#!/bin/sh\ntrap '' TERM\necho $$ >{}\nsetsid --fork \"$0\"\n",
        alive.display()
    );
    write_program(&path, &script);
    let arguments = [
        "run",
        "--ttl",
        "6s",
        "--kill-after",
        "500ms",
        "k",
        "--",
        "sh",
        "-c",
    ];
    let script = format!("trap '' TERM; {}; echo up; sleep 600", path.display());
    let program = Program::start(&server.url(), [&arguments[..], &[&script]].concat());
    program.expect("up");
    assert!(server.del("lock:k"));
    let done = program.end();
    assert_eq!(done.code, Some(76), "{}", done.err);
    assert!(done.err.contains("command killed"), "{}", done.err);
    std::fs::remove_file(&alive).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(!alive.exists(), "one has outlived it");
}

/// Daemons are left behind on purpose.
#[test]
fn what_a_command_leaves_behind_is_left_alone() {
    let server = RedisServer::start();
    let worker = Worker::new("");
    let script =
        "\"$0\" & (setsid \"$0\" &); while [ ! -e \"$0.over\" ]; do sleep 0.01; done; exit 3";
    let (program, pid) = worker.start(&server, &["k"], &["sh", "-c", script]);
    wait_until_blocking("both work", SOON, || {
        program.out().matches('\n').count() == 2
    });
    std::fs::write(worker.path.with_extension("over"), "").unwrap();
    let done = program.end();
    assert_eq!(done.code, Some(3), "{}", done.err);
    assert!(!server.exists("lock:k"));
    let pids: Vec<i64> = done
        .out
        .lines()
        .map(|line| line.strip_prefix("worker=").unwrap().parse().unwrap())
        .collect();
    assert!(pids.len() == 2 && pids.contains(&pid), "{pids:?}");
    for pid in pids {
        assert!(!is_gone(pid), "{}", done.err);
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }
}

/// What the caller had started before it became `lockstream` is no part of the command.
#[test]
fn children_of_the_caller_are_left_alone() {
    let server = RedisServer::start();
    let worker = Worker::new("");
    let script = "\"$0\" & exec \"$1\" run --ttl 6s --kill-after 500ms k -- \
                  sh -c 'echo up; sleep 600'";
    let mut command = std::process::Command::new("sh");
    command
        .args(["-c", script, worker.path.to_str().unwrap()])
        .arg(crate::program::LOCKSTREAM)
        .env("LOCKSTREAM_URL", patient(&server.url()));
    let program = Program::spawn(command);
    let pid = program.number("worker");
    program.expect("up");
    assert!(server.del("lock:k"));
    assert_eq!(program.end().code, Some(76));
    assert!(!is_gone(pid));
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

#[test]
fn a_command_that_runs_for_too_long_is_ended() {
    let server = RedisServer::start();
    for (begin, is_killed) in [
        ("", false),
        ("trap '' TERM", true),
        ("trap 'exit 0' TERM", false),
    ] {
        let worker = Worker::new(begin);
        let path = worker.path.to_str().unwrap();
        // However slowly it starts, it has some time then.
        for timeout in ["500ms", "5s", "15s"] {
            let kill_after = if is_killed { "300ms" } else { "10s" };
            let options = ["--timeout", timeout, "--kill-after", kill_after, "k", "--"];
            let arguments = [&["run"][..], &options, WAYS[4], &[path]].concat();
            let program = Program::start(&server.url(), arguments);
            let done = program.end();
            assert_eq!(done.code, Some(124), "{begin}: {}", done.err);
            assert!(done.err.contains("--timeout"), "{begin}: {}", done.err);
            assert!(!server.exists("lock:k"), "{begin}");
            let Some(pid) = done.out.strip_prefix("worker=") else {
                continue;
            };
            // One that is forked while the others are asked to end may be missed, and has to be killed.
            if !is_killed && timeout != "15s" && done.err.contains("killed") {
                continue;
            }
            assert!(
                is_gone(pid.trim().parse().unwrap()),
                "{begin}: {}",
                done.err
            );
            assert_eq!(
                done.err.contains("killed"),
                is_killed,
                "{begin}: {}",
                done.err
            );
            break;
        }
    }
    let brief = ["run", "--timeout", "1h", "k", "--", "sh", "-c", "exit 4"];
    assert_eq!(run(&server.url(), brief).code, Some(4));
}
