//! Signals at every stage: connecting, waiting, running, releasing.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::program::{LOCKSTREAM, Program, SOON, patient, until_gone};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

const ENDING: [(Signal, i32); 4] = [
    (Signal::HUP, 1),
    (Signal::INT, 2),
    (Signal::QUIT, 3),
    (Signal::TERM, 15),
];

/// If nothing cuts them short, a release has five seconds, and connecting and an answer have a minute each.
const CUT_SHORT: Duration = Duration::from_millis(4_900);

fn tickets(server: &RedisServer) -> u64 {
    server.ask(&["ZCARD", "{lock:k}:~queue2"])
}

#[test]
fn a_waiter_gives_up_its_place() {
    let server = RedisServer::start();
    let holder = Program::start(
        &server.url(),
        ["run", "k", "--", "sh", "-c", "echo up; sleep 600"],
    );
    holder.expect("up");
    for (signal, number) in ENDING {
        let waiter = Program::start(&server.url(), ["run", "k", "--", "echo", "ran"]);
        wait_until_blocking("it waits", SOON, || tickets(&server) == 1);
        // These do not end a wait.
        for ignored in [Signal::USR1, Signal::USR2, Signal::WINCH, Signal::CONT] {
            waiter.signal(ignored);
        }
        waiter.expect_said("waiting for lock");
        waiter.signal(signal);
        let done = waiter.end();
        assert_eq!(
            (done.code, &*done.out),
            (Some(128 + number), ""),
            "{}",
            done.err
        );
        assert_eq!(tickets(&server), 0);
    }
}

#[test]
fn connecting_is_cut_short() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        server.stop();
        for (signal, number) in ENDING {
            let program =
                Program::start(&server.url(), ["run", "--json", "k", "--", "echo", "ran"]);
            let caught = || {
                let status = format!("/proc/{}/status", program.pid().as_raw_pid());
                let status = std::fs::read_to_string(status).unwrap_or_default();
                let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
                let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
                // SIGCHLD, the last that is caught.
                mask.is_some_and(|mask| mask & 1 << 16 != 0)
            };
            wait_until_blocking("signals are caught", SOON, caught);
            let begin = Instant::now();
            program.signal(signal);
            let done = program.end();
            assert_eq!(
                (done.code, &*done.out),
                (Some(128 + number), ""),
                "{}",
                done.err
            );
            assert!(begin.elapsed() < CUT_SHORT, "{:?}", begin.elapsed());
        }
    });
}

#[test]
fn the_command_gets_every_signal_once() {
    let server = RedisServer::start();
    let script = "for s in HUP INT QUIT TERM USR1 USR2 WINCH CONT; do trap \"echo got-$s\" $s; done; \
                  echo up; while :; do sleep 0.01; done";
    let program = Program::start(&server.url(), ["run", "k", "--", "sh", "-c", script]);
    program.expect("up");
    for (signal, name) in [
        (Signal::HUP, "HUP"),
        (Signal::INT, "INT"),
        (Signal::QUIT, "QUIT"),
        (Signal::TERM, "TERM"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::WINCH, "WINCH"),
        (Signal::CONT, "CONT"),
    ] {
        program.signal(signal);
        program.expect(&format!("got-{name}\n"));
    }
    let lines: Vec<_> = program.out().lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), 9, "{lines:?}");
    assert!(server.exists("lock:k"));
}

/// All processes of the command get it, and the command's own answer to it is the exit code.
#[test]
fn the_group_of_the_command_is_ended() {
    let server = RedisServer::start();
    // A background process of a shell ignores the signals of the keyboard.
    for (signal, number) in [(Signal::HUP, 1), (Signal::TERM, 15)] {
        let script = "sleep 600 & echo sleeper=$!; wait";
        let program = Program::start(&server.url(), ["run", "k", "--", "sh", "-c", script]);
        let sleeper = program.number("sleeper");
        program.signal(signal);
        let done = program.end();
        assert_eq!(done.code, Some(128 + number), "{}", done.err);
        until_gone(sleeper);
        assert!(!server.exists("lock:k"));
    }
}

#[test]
fn a_command_may_answer_a_signal_with_its_own_code() {
    let server = RedisServer::start();
    let script = "trap 'exit 9' TERM; echo up; while :; do sleep 0.01; done";
    let program = Program::start(&server.url(), ["run", "k", "--", "sh", "-c", script]);
    program.expect("up");
    program.signal(Signal::TERM);
    assert_eq!(program.end().code, Some(9));
}

/// `nohup`, and the `&` of a shell without job control.
#[test]
fn what_was_ignored_stays_ignored() {
    let server = RedisServer::start();
    let script =
        "trap '' HUP INT; exec \"$0\" run k -- sh -c 'echo up; while :; do sleep 0.01; done'";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, LOCKSTREAM])
        .env("LOCKSTREAM_URL", patient(&server.url()));
    let program = Program::spawn(command);
    program.expect("up");
    if std::path::Path::new("/proc/self/status").exists() {
        program.signal(Signal::HUP);
        program.signal(Signal::INT);
    }
    program.signal(Signal::TERM);
    assert_eq!(program.end().code, Some(128 + 15));
}

/// Whoever ends all processes of a unit or a container sends one signal to us and to the command. If the command has ended
/// before we hear of ours, the lock was left to expire.
#[test]
fn a_signal_for_us_and_the_command_leaves_no_lock() {
    let server = RedisServer::start();
    for _ in 0..8 {
        let program = Program::start(
            &server.url(),
            [
                "run",
                "k",
                "--",
                "sh",
                "-c",
                "echo shell=$$; exec sleep 600",
            ],
        );
        let command = i32::try_from(program.number("shell")).unwrap();
        program.signal(Signal::STOP);
        program.signal(Signal::TERM);
        kill_process(Pid::from_raw(command).unwrap(), Signal::TERM).unwrap();
        until_gone(command.into());
        program.signal(Signal::CONT);
        let done = program.end();
        assert_eq!(done.code, Some(128 + 15), "{}", done.err);
        assert!(!server.exists("lock:k"), "{}", done.err);
    }
}

/// A program that blocks SIGCHLD leaves it blocked in those that it starts: the lock of a command that had ended was held
/// for ever.
// Only that of GNU can block a signal.
#[cfg(target_os = "linux")]
#[test]
fn the_end_of_the_command_is_heard_although_its_signal_was_blocked() {
    let server = RedisServer::start();
    let mut command = Command::new("env");
    command
        .args([
            "--block-signal=CHLD",
            LOCKSTREAM,
            "run",
            "k",
            "--",
            "sh",
            "-c",
            "exit 5",
        ])
        .env("LOCKSTREAM_URL", patient(&server.url()));
    let done = Program::spawn(command).end();
    assert_eq!(done.code, Some(5), "{}", done.err);
    assert!(!server.exists("lock:k"));
}

/// What the command blocks and ignores is what our caller does. SIGPIPE was reset, which each unit of systemd ignores; and
/// what was blocked was not, for two signals that we need.
#[cfg(target_os = "linux")]
#[test]
fn masks_and_dispositions_are_the_callers() {
    let server = RedisServer::start();
    let shown = |options: &[&str], through: &[&str]| {
        let mut command = Command::new("env");
        command
            .args(options)
            .args(through)
            .args(["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"])
            .env("LOCKSTREAM_URL", patient(&server.url()));
        let done = Program::spawn(command).end();
        assert_eq!(done.code, Some(0), "{}", done.err);
        done.out
    };
    let mut all = Vec::new();
    for options in [
        &[][..],
        &["--ignore-signal=PIPE"],
        &["--ignore-signal=PIPE,HUP,USR1", "--block-signal=TTOU,CHLD"],
        &["--block-signal=PIPE,TERM,RTMIN", "--ignore-signal=TTOU"],
    ] {
        let direct = shown(options, &[]);
        let under_a_lock = shown(options, &[LOCKSTREAM, "run", "k", "--"]);
        assert_eq!(under_a_lock, direct, "{options:?}");
        assert!(!all.contains(&direct), "it shows no difference");
        all.push(direct);
    }
}

/// The command has ended, and the store does not answer: after a while a signal ends the wait for it.
#[test]
fn a_release_is_cut_short() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = tempfile::tempdir().unwrap();
        let flag = folder.path().join("flag");
        let script = format!(
            "echo up; while [ ! -e {} ]; do sleep 0.01; done; echo over; exit 5",
            flag.display()
        );
        let mut program = Program::start(
            &server.url(),
            ["run", "--ttl", "10m", "k", "--", "sh", "-c", &script],
        );
        program.expect("up");
        server.stop();
        std::fs::write(&flag, "").unwrap();
        program.expect("over");
        // A signal that comes before the command is reaped is the command's, and ends nothing.
        let begin = Instant::now();
        while program.runs() {
            program.signal(Signal::TERM);
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(begin.elapsed() < CUT_SHORT, "{:?}", begin.elapsed());
        let done = program.end();
        assert!(matches!(done.code, Some(5 | 143)), "{done:?}");
        server.cont();
    });
}
