//! Leases that cannot be renewed, or are lost.

use std::time::Duration;

use rustix::process::Signal;

use crate::program::{Program, SOON};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

/// Writes the time of each beat, whatever it is asked. When it is asked to end it writes that time, too, which on a busy
/// machine takes more than a second.
fn stubborn(beats: &std::path::Path) -> String {
    let beats = beats.display();
    format!(
        "trap 'echo term=$(date +%s%N)' TERM; echo up; while :; do date +%s%N >>{beats}; sleep 0.01; done"
    )
}

/// The server is silent, and back when the lease is over: the next holder begins after the last beat.
#[test]
fn two_never_work_at_once() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let beats = folder.path().join("beats");
        let script = stubborn(&beats);
        let arguments = [
            "run",
            "--ttl",
            "18s",
            "--kill-after",
            "6s",
            "k",
            "--",
            "sh",
            "-c",
            &script,
        ];
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        let next = Program::start(&server.url(), ["run", "k", "--", "date", "+now=%s%N"]);
        let queue = ["ZCARD", "{lock:k}:~queue2"];
        wait_until_blocking("it waits", SOON, || server.ask::<u64>(&queue) == 1);
        server.stop();
        let term = program.number("term");
        server.cont();
        let now = next.number("now");
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
        assert!(done.err.contains("stopping the command"), "{}", done.err);
        let beats = std::fs::read_to_string(&beats).unwrap();
        let last: i64 = beats.lines().next_back().unwrap().parse().unwrap();
        assert!(term < last && last < now, "{term} {last} {now}");
        assert_eq!(next.end().code, Some(0));
    });
}

/// A server that is gone for good: the command gets SIGTERM, and time to clean up.
#[test]
fn a_command_may_clean_up_before_the_lease_is_over() {
    on_a_steady_machine_blocking(|| {
        let mut server = RedisServer::start();
        let script = "trap 'echo cleaning; exit 0' TERM; echo up; while :; do sleep 0.01; done";
        let arguments = [
            "run",
            "--json",
            "--ttl",
            "18s",
            "--kill-after",
            "6s",
            "k",
            "--",
            "sh",
            "-c",
            script,
        ];
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        server.kill();
        program.expect("cleaning");
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
        for event in ["store-down", "stopping"] {
            assert!(
                done.err.contains(&format!("\"event\":\"{event}\"")),
                "{}",
                done.err
            );
        }
        assert!(!done.err.contains("\"event\":\"killed\""), "{}", done.err);
    });
}

/// Outages that end in time are no losses.
#[test]
fn a_command_outlives_an_outage() {
    let mut server = RedisServer::builder().keep_data().start();
    let script = "echo up; sleep 4; echo over";
    let arguments = [
        "run",
        "--ttl",
        "9s",
        "--kill-after",
        "1s",
        "k",
        "--",
        "sh",
        "-c",
        script,
    ];
    let program = Program::start(&server.url(), arguments);
    program.expect("up");
    server.restart();
    let done = program.end();
    assert_eq!(
        (done.code, &*done.out),
        (Some(0), "up\nover\n"),
        "{}",
        done.err
    );
}

/// The next renewal finds the key gone.
#[test]
fn a_deleted_key_stops_the_command() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
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
            "echo up; sleep 600",
        ];
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        assert!(server.del("lock:k"));
        let done = program.end();
        assert_eq!(done.code, Some(76), "{}", done.err);
        assert!(done.err.contains("lease on \"k\" lost"), "{}", done.err);
    });
}

/// The command has ended before anybody knew: its work was not protected to its end.
#[test]
fn a_loss_that_the_release_finds_is_one() {
    let server = RedisServer::start();
    let script = "echo up; while [ -e \"$0\" ]; do sleep 0.01; done";
    let folder = tempfile::tempdir().unwrap();
    let flag = folder.path().join("flag");
    std::fs::write(&flag, "").unwrap();
    for (on_lost, code) in [("term", 76), ("run-on", 0)] {
        std::fs::write(&flag, "").unwrap();
        let path = flag.to_str().unwrap();
        let arguments = [
            "run",
            "--ttl",
            "1h",
            "--on-lost",
            on_lost,
            "k",
            "--",
            "sh",
            "-c",
            script,
            path,
        ];
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        assert!(server.del("lock:k"));
        std::fs::remove_file(&flag).unwrap();
        let done = program.end();
        assert_eq!(done.code, Some(code), "{}", done.err);
    }
}

#[test]
fn a_command_may_run_on_without_its_lease() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let script =
            "trap 'echo termed' TERM; echo up; while [ -e \"$0\" ]; do sleep 0.01; done; exit 4";
        let folder = tempfile::tempdir().unwrap();
        let flag = folder.path().join("flag");
        std::fs::write(&flag, "").unwrap();
        let path = flag.to_str().unwrap();
        let arguments = [
            "run",
            "--ttl",
            "1500ms",
            "--kill-after",
            "100ms",
            "--on-lost",
            "run-on",
            "k",
            "--",
            "sh",
            "-c",
            script,
            path,
        ];
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        assert!(server.del("lock:k"));
        program.expect_said("lost");
        // Longer than a ttl, which would be long enough to be stopped.
        std::thread::sleep(Duration::from_secs(2));
        std::fs::remove_file(&flag).unwrap();
        let done = program.end();
        assert_eq!((done.code, &*done.out), (Some(4), "up\n"), "{}", done.err);
    });
}

/// Whoever stops the command by hand does not stop the clock.
#[test]
fn a_stopped_command_is_ended_all_the_same() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let script = "echo shell=$$; while :; do sleep 0.01; done";
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
        let shell = i32::try_from(program.number("shell")).unwrap();
        rustix::process::kill_process(rustix::process::Pid::from_raw(shell).unwrap(), Signal::STOP)
            .unwrap();
        server.stop();
        let done = program.end();
        server.cont();
        assert_eq!(done.code, Some(76), "{}", done.err);
    });
}
