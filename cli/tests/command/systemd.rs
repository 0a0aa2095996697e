//! What systemd gives to a service, and what the command of a service gets of it. systemd itself takes no part: the tests
//! do what it does.

use std::os::unix::net::{UnixDatagram, UnixListener};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;

use crate::program::{LOCKSTREAM, Program, SOON, lockstream, patient};
use crate::support::RedisServer;

/// Runs `lockstream` as systemd runs it: with a socket as descriptor 3, and with its id in the environment.
fn activated(url: &str, listener: &UnixListener, arguments: &[&str]) -> Program {
    let script = "exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_FDNAMES=web LISTEN_PIDFDID=1 LISTEN_PID=$$; \
        export WATCHDOG_PID=$$ WATCHDOG_USEC=1; exec \"$@\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", script, "sh", LOCKSTREAM])
        .args(arguments)
        .env("LOCKSTREAM_URL", patient(url));
    let listener = listener.try_clone().unwrap();
    Program::spawn_with_input(command, Stdio::from(std::os::fd::OwnedFd::from(listener)))
}

/// Which socket the descriptor is.
fn inode(listener: &UnixListener) -> u64 {
    rustix::fs::fstat(listener).unwrap().st_ino
}

/// Services ignore sockets that are meant for another process.
#[test]
fn a_service_gets_the_sockets_of_its_unit() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let script = "echo own=$$; echo listen=$LISTEN_PID; echo watchdog=$WATCHDOG_PID; \
        echo fds=$LISTEN_FDS names=$LISTEN_FDNAMES pidfd=${LISTEN_PIDFDID-none}; readlink /proc/$$/fd/3; sleep 600";
    for begin in [&["run", "k"][..], &["lead", "k"]] {
        let service = activated(
            &server.url(),
            &listener,
            &[begin, &["--", "sh", "-c", script]].concat(),
        );
        let own = service.number("own");
        assert_eq!(
            (service.number("listen"), service.number("watchdog")),
            (own, own)
        );
        service.expect("fds=1 names=web pidfd=none\n");
        if cfg!(target_os = "linux") {
            service.expect(&format!("socket:[{}]\n", inode(&listener)));
        }
        service.signal(Signal::TERM);
        assert_eq!(service.end().code, Some(128 + 15));
    }
}

/// What is meant for somebody else stays so.
#[test]
fn a_socket_of_another_process_stays_its_own() {
    let server = RedisServer::start();
    let script = "echo $LISTEN_PID $WATCHDOG_PID";
    let mut command = lockstream(&server.url(), ["run", "k", "--", "sh", "-c", script]);
    command.env("LISTEN_PID", "1").env("WATCHDOG_PID", "2");
    let done = Program::spawn(command).end();
    assert_eq!((done.code, &*done.out), (Some(0), "1 2\n"), "{}", done.err);
}

/// With `Type=notify`: it is the command that says that it is ready. In the other process of the test, it does.
#[test]
fn the_command_says_that_it_is_ready() {
    const ROLE: &str = "LOCKSTREAM_TEST_SERVICE";
    if std::env::var_os(ROLE).is_some() {
        let path = std::env::var_os("NOTIFY_SOCKET").unwrap();
        let ready = format!("READY=1\nMAINPID={}", std::process::id());
        let socket = UnixDatagram::unbound().unwrap();
        socket.send_to(ready.as_bytes(), path).unwrap();
        return;
    }
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(SOON)).unwrap();
    let mut command = lockstream(&server.url(), ["run", "--json", "k", "--"]);
    command
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "systemd::the_command_says_that_it_is_ready"])
        .env("NOTIFY_SOCKET", &path)
        .env(ROLE, "1");
    let program = Program::spawn(command);
    let mut buffer = [0; 100];
    let length = socket.recv(&mut buffer).unwrap();
    let told = String::from_utf8_lossy(&buffer[..length]).into_owned();
    let pid = told.strip_prefix("READY=1\nMAINPID=").unwrap();
    // So `NotifyAccess=main` would drop it.
    assert_ne!(pid.parse(), Ok(program.pid().as_raw_pid()), "{told}");
    let done = program.end();
    assert_eq!(done.code, Some(0), "{done:?}");
    // Nobody else has said anything.
    socket
        .set_read_timeout(Some(Duration::from_millis(1)))
        .unwrap();
    assert!(socket.recv(&mut buffer).is_err());
}

/// Without a store `run` ends at once. systemd's own pause is 100 ms, and after five starts within ten seconds it starts
/// the unit no more: a service was dead after an outage of a second.
#[test]
fn the_units_of_the_page_outlive_an_outage() {
    const PAGE: &str = include_str!("../../../docs/command-line.md");
    let blocks = PAGE.split("```").skip(1).step_by(2);
    let units: Vec<_> = blocks.filter(|block| block.contains("[Service]")).collect();
    assert!(units.len() >= 3, "{units:?}");
    for unit in units {
        let (head, service) = unit.split_once("[Service]\n").unwrap();
        assert!(head.contains("[Unit]\nStartLimitIntervalSec=0\n"), "{unit}");
        for line in ["Restart=always", "RestartSec=5s"] {
            assert!(service.lines().any(|it| it == line), "{line}: {unit}");
        }
    }
}
