//! A server that is not there yet, restarts or reads its data.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::program::{Program, SOON, run};
use crate::support::{
    PgServer, Proxy, RedisServer, Way, on_a_steady_machine_blocking, wait_until_blocking,
};

/// It waits for longer than a test does.
const PATIENT: [&str; 7] = ["run", "--wait", "600s", "k", "--", "echo", "ran"];

/// A job of `@reboot` was skipped.
#[test]
fn a_wait_goes_on_until_the_server_is_there() {
    let mut redis = RedisServer::start();
    let mut postgres = PgServer::start();
    let urls = [redis.url(), postgres.url()];
    redis.kill();
    postgres.kill();
    let waiters = urls.map(|url| Program::start(&url, PATIENT));
    for waiter in &waiters {
        waiter.expect_said("waiting for the store: ");
    }
    redis.restart();
    postgres.restart();
    for waiter in waiters {
        let done = waiter.end();
        assert_eq!((done.code, &*done.out), (Some(0), "ran\n"), "{}", done.err);
        assert_eq!(done.err.matches("waiting for the store").count(), 1);
    }
}

/// It answers `LOADING` meanwhile, which ends the wait of nobody who said how long it is.
#[test]
fn a_wait_goes_on_while_the_server_reads_its_data() {
    let mut server = RedisServer::builder()
        .keep_data()
        // In µs, for each write. It looks at its clients every 1024 of them.
        .config("key-load-delay 200")
        .start();
    let url = server.url();
    let writes =
        "for _ = 1, 30000 do redis.call('SET', 'filler', '') end redis.call('DEL', 'filler')";
    server.cmd(&["EVAL", writes, "0"]);
    let restarting = std::thread::spawn(move || {
        server.restart();
        server
    });
    let begin = Instant::now();
    loop {
        let done = run(&url, ["run", "-n", "k", "--", "true"]);
        if done.err.contains("LOADING") {
            assert_eq!(done.code, Some(69), "{}", done.err);
            break;
        }
        assert!(
            begin.elapsed() < SOON && !restarting.is_finished(),
            "{done:?}"
        );
    }
    let waiter = Program::start(&url, PATIENT);
    waiter.expect_said("waiting for the store: ");
    let done = waiter.end();
    assert_eq!((done.code, &*done.out), (Some(0), "ran\n"), "{}", done.err);
    assert!(done.err.contains("LOADING"), "{}", done.err);
    restarting.join().unwrap();
}

/// Only a wait that was given waits for a store, and not for one that refuses.
#[test]
fn an_absence_ends_with_the_wait() {
    let mut server = RedisServer::builder().config("requirepass secret").start();
    let url = server.url();
    let refused = run(&url, PATIENT);
    assert_eq!(refused.code, Some(69), "{}", refused.err);
    assert!(!refused.err.contains("waiting for"), "{}", refused.err);
    server.kill();
    for options in [&["run", "k"][..], &["run", "-n", "k"]] {
        let done = run(&url, [options, &["--", "true"]].concat());
        assert_eq!(done.code, Some(69), "{}", done.err);
        assert!(!done.err.contains("waiting for"), "{}", done.err);
    }
    on_a_steady_machine_blocking(|| {
        let begin = Instant::now();
        let done = run(&url, ["run", "--wait", "1.2s", "k", "--", "true"]);
        assert_eq!(done.code, Some(69), "{}", done.err);
        assert!(begin.elapsed() >= Duration::from_millis(1200));
        assert!(done.err.contains("waiting for the store"), "{}", done.err);
    });
    // One that accepts connections and says nothing has the wait, too, and not all the time for connecting.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port();
    let url = format!("redis://127.0.0.1:{port}/?connect_timeout=60s");
    on_a_steady_machine_blocking(|| {
        let begin = Instant::now();
        let done = run(&url, ["run", "--wait", "1s", "k", "--", "true"]);
        assert_eq!(done.code, Some(69), "{}", done.err);
        let told = "did not answer within 1s";
        assert!(done.err.contains(told), "{}", done.err);
        assert!(begin.elapsed() < Duration::from_secs(30));
    });
}

/// It was half a second, the same for all: a fleet came back in step, and each built its store anew. Something that hangs
/// up on whoever connects stands in for the server.
#[test]
fn attempts_have_random_pauses() {
    on_a_steady_machine_blocking(|| {
        let waiting = [
            &["run", "--wait", "600s", "k", "--", "true"][..],
            &["hold", "--wait", "600s", "k"],
            &["lead", "k", "--", "true"],
        ];
        let waiting = waiting.map(|arguments| {
            std::thread::spawn(move || {
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                listener.set_nonblocking(true).unwrap();
                let port = listener.local_addr().unwrap().port();
                let _program = Program::start(&format!("redis://127.0.0.1:{port}/"), arguments);
                let begin = Instant::now();
                let mut attempts = Vec::<Duration>::new();
                // From the first on: a program may take long to start.
                let end = |first: &Duration| *first + Duration::from_secs(12);
                while begin.elapsed() < attempts.first().map_or(SOON, end) {
                    if listener.accept().is_ok() {
                        attempts.push(begin.elapsed());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                attempts
            })
        });
        for attempts in waiting {
            let attempts = attempts.join().unwrap();
            assert!((6..=18).contains(&attempts.len()), "{attempts:?}");
            let pauses: Vec<_> = attempts.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let (shortest, longest) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
            // Of five random ones it happens once in a million that all are so close.
            assert!(
                *longest - *shortest > Duration::from_millis(20),
                "{pauses:?}"
            );
        }
    });
}

/// It was one to see whether the server is there, and another one for the lock.
#[test]
fn a_command_connects_once() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let url = server.url();
        let connections = || {
            let info: String = server.ask(&["INFO", "stats"]);
            let found = info
                .lines()
                .find_map(|line| line.strip_prefix("total_connections_received:"));
            found.unwrap().parse::<u64>().unwrap()
        };
        let line = run(&url, ["hold", "l"]).out;
        for arguments in [
            &["run", "k", "--", "true"][..],
            &["hold", "k2"],
            &["renew", line.trim()],
            &["inspect", "k"],
        ] {
            let before = connections();
            let done = run(&url, arguments);
            assert_eq!(done.code, Some(0), "{}", done.err);
            assert_eq!(connections() - before, 1, "{arguments:?}");
        }
    });
}

/// What is left of the wait is for the lock, and a busy lock is told as such.
#[test]
fn the_lock_is_waited_for_after_the_store() {
    let mut server = RedisServer::builder().keep_data().start();
    server.cmd(&["SET", "lock:k", "somebody~0:1", "PX", "60000"]);
    server.kill();
    let waiter = Program::start(&server.url(), ["run", "--wait", "8s", "k", "--", "true"]);
    waiter.expect_said("waiting for the store");
    server.restart();
    let done = waiter.end();
    assert_eq!(done.code, Some(75), "{}", done.err);
}

/// The wait for the lock began when the store had answered, so with a far store it ended too late. Then it told that the
/// store had been away before.
#[test]
fn the_time_to_a_far_store_is_part_of_the_wait() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        server.cmd(&["SET", "lock:k", "somebody~0:1", "PX", "60000"]);
        let proxy = Proxy::to(&server);
        proxy.refuse();
        let waiter = Program::start(&proxy.url(), ["run", "--wait", "8s", "k", "--", "true"]);
        waiter.expect_said("waiting for the store");
        proxy.delay(Way::ToServer, Duration::from_millis(600));
        proxy.accept();
        let done = waiter.end();
        assert_eq!(done.code, Some(75), "{}", done.err);
        // The time in which the store was away is told as well.
        let (_, told) = done.err.split_once("not acquired within ").unwrap();
        let (waited, _) = told.split_once("s:").unwrap();
        assert!(waited.parse::<f64>().unwrap() >= 8.0, "{}", done.err);
    });
}

#[test]
fn a_leader_keeps_trying() {
    let mut server = RedisServer::start();
    server.kill();
    let script = "echo up $LOCKSTREAM_TOKEN; sleep 600";
    let leads = ["lead", "--ttl", "9s", "--kill-after", "3s", "k"];
    let leader = Program::start(
        &server.url(),
        [&leads[..], &["--", "sh", "-c", script]].concat(),
    );
    leader.expect_said("waiting for the store: ");
    server.restart();
    leader.expect("up ");
    server.kill();
    leader.expect_said("stopping the command");
    server.restart();
    let ups = || leader.out().matches("up ").count();
    wait_until_blocking("it leads again", SOON, || ups() >= 2);
    leader.signal(Signal::TERM);
    assert_eq!(leader.end().code, Some(128 + 15));
}
