//! The harness keeps its own promises: a test that breaks a server or the connection must break just that, and leave nothing.
#![cfg(feature = "redis")]

mod support;

use std::cell::{Cell, RefCell};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process};
use support::{
    Proxy, RedisServer, Role, Watch, Way, Worker, on_a_steady_machine_blocking, wait_until,
    wait_until_blocking,
};

const BOUND: Duration = Duration::from_secs(30);

/// A worker waits so long, and is stopped for twice as long.
const UNSTOPPED: Duration = Duration::from_secs(2);

/// Long enough that what was to come would have come on an idle machine; only for things that must not happen.
const NOTHING_COMES: Duration = Duration::from_millis(100);

fn exists(pid: u32) -> bool {
    test_kill_process(Pid::from_raw(pid as i32).unwrap()).is_ok()
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(BOUND)).unwrap();
    stream
}

/// Sends an inline command, which any server takes, and reads a reply as long as the expected one.
fn talk(stream: &mut TcpStream, line: &str, expected: &str) {
    write!(stream, "{line}\r\n").unwrap();
    hear(stream, expected);
}

fn hear(stream: &mut TcpStream, expected: &str) {
    let mut reply = vec![0; expected.len()];
    stream.read_exact(&mut reply).unwrap();
    assert_eq!(String::from_utf8_lossy(&reply), expected);
}

/// A read with a time-out is not begun again by the kernel when the process was stopped for a moment.
fn read_byte(stream: &mut TcpStream) -> std::io::Result<usize> {
    loop {
        match stream.read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

fn assert_silent(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(NOTHING_COMES)).unwrap();
    let read = read_byte(stream);
    let silent = matches!(&read, Err(error) if error.kind() == ErrorKind::WouldBlock);
    assert!(silent, "something came: {read:?}");
    stream.set_read_timeout(Some(BOUND)).unwrap();
}

fn assert_closed(stream: &mut TcpStream) {
    // An end or a reset, but not a time-out.
    match read_byte(stream) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("still open: {other:?}"),
    }
}

/// Every worker process of this file; in the test process itself it does nothing.
#[test]
fn worker() {
    let Some(mut role) = Role::of_this_process() else {
        return;
    };
    match role.name() {
        "echo" => loop {
            let line = role.hear_blocking();
            role.say(format!("heard {line}"));
        },
        "server" => {
            let server = RedisServer::start();
            role.say(format!("pid {}", server.pid()));
            role.say(format!("folder {}", server.folder().display()));
            if role.hear_blocking() == "stop" {
                server.stop();
                role.say("stopped");
                role.hear_blocking();
            }
            panic!("a test that fails");
        }
        "measures" => {
            let (runs, role) = (Cell::new(0), RefCell::new(role));
            on_a_steady_machine_blocking(|| {
                runs.set(runs.get() + 1);
                role.borrow().say(format!("run {}", runs.get()));
                // The first one only fails when it is told.
                if runs.get() == 1 {
                    role.borrow_mut().hear_blocking();
                }
                panic!("too late");
            });
        }
        "waits" => {
            let mut has_heard = false;
            wait_until_blocking("it goes on", UNSTOPPED, || {
                if has_heard {
                    return true;
                }
                role.say("waits");
                role.hear_blocking();
                has_heard = true;
                false
            });
            role.say("has waited");
        }
        other => panic!("no such role: {other}"),
    }
}

#[test]
fn a_server_is_there_until_it_is_dropped() {
    let server = RedisServer::start();
    let (pid, folder) = (server.pid(), server.folder().to_owned());
    talk(&mut connect(server.port()), "PING", "+PONG\r\n");
    assert!(server.unix_url().len() < 100, "{}", server.unix_url());

    drop(server);
    assert!(!exists(pid), "the server outlived its handle");
    assert!(!folder.exists(), "the folder outlived its server");
}

#[test]
fn a_server_is_gone_after_a_panic_and_after_a_kill_of_the_test() {
    for (order, end) in [("panic", "panic"), ("go on", "kill"), ("stop", "kill")] {
        let mut worker = Worker::spawn("worker", "server", &[]);
        let pid = worker.expect_line_blocking("pid ", BOUND).parse().unwrap();
        let folder = worker.expect_line_blocking("folder ", BOUND);
        assert!(exists(pid) && Path::new(&folder).exists());

        if order == "stop" {
            worker.tell("stop");
            worker.expect_line_blocking("stopped", BOUND);
        }
        match end {
            "panic" => {
                worker.tell("panic");
                assert!(!worker.exit(BOUND).success());
            }
            _ => worker.sigkill(),
        }
        let what = format!("server {pid} ends after {order}, {end}");
        wait_until_blocking(what, BOUND, || !exists(pid) && !Path::new(&folder).exists());
    }
}

#[test]
fn a_restart_keeps_the_port_and_data_only_if_asked_to() {
    for (mut server, kept) in [
        (RedisServer::start(), None),
        (RedisServer::builder().keep_data().start(), Some("1")),
    ] {
        server.set("a", "1");
        let (port, pid) = (server.port(), server.pid());

        server.kill();
        assert!(!exists(pid));
        let refused = TcpStream::connect(("127.0.0.1", port)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);

        server.restart();
        assert_eq!((server.port(), server.get("a").as_deref()), (port, kept));
        assert_ne!(server.pid(), pid);

        server.shutdown_nosave();
        server.restart();
        assert_eq!(server.get("a").as_deref(), kept);
    }
}

#[test]
fn two_servers_share_nothing() {
    let (one, two) = (RedisServer::start(), RedisServer::start());
    assert_ne!(one.port(), two.port());
    one.set("a", "1");
    assert_eq!((one.get("a").as_deref(), two.get("a")), (Some("1"), None));
}

#[test]
fn a_stopped_server_answers_when_it_goes_on() {
    let server = RedisServer::start();
    let mut stream = connect(server.port());
    server.stop();
    stream.write_all(b"PING\r\n").unwrap();
    assert_silent(&mut stream);
    server.cont();
    hear(&mut stream, "+PONG\r\n");
}

#[test]
fn the_harness_looks_in_whatever_the_default_user_may_do() {
    let server = RedisServer::builder()
        .config("requirepass secret")
        .config("user guest on >guest ~a* &* +get +auth")
        .start();
    let refused = "-NOAUTH Authentication required.\r\n";
    talk(&mut connect(server.port()), "GET a", refused);
    server.set("a", "1");

    for url in [
        server.url_with("", "secret", 0),
        server.url_with("guest", "guest", 0),
        format!("{}?user=guest&pass=guest", server.unix_url()),
    ] {
        let client = redis::Client::open(url).unwrap();
        let mut connection = client.get_connection().unwrap();
        let value: String = redis::cmd("GET").arg("a").query(&mut connection).unwrap();
        assert_eq!(value, "1");
    }
}

#[test]
fn the_harness_sees_keys_clients_channels_and_calls_but_not_itself() {
    let server = RedisServer::start();
    server.cmd(&["SET", "b", "1", "PX", "60000"]);
    server.set("a", "1");
    assert_eq!(server.keys("*"), ["a", "b"]);
    assert!((1..=60_000).contains(&server.pttl("b")));
    assert_eq!((server.pttl("a"), server.pttl("c")), (-1, -2));
    assert!(server.del("a") && !server.exists("a"));
    assert!(server.try_cmd(&["LPUSH", "b", "1"]).is_err());

    assert_eq!(server.all_calls().len(), 0, "{:?}", server.all_calls());
    let mut stream = connect(server.port());
    talk(&mut stream, "CLIENT SETNAME me", "+OK\r\n");
    talk(&mut stream, "GET b", "$1\r\n1\r\n");
    let script = r#"EVAL "return redis.call('get', 'b')" 0"#;
    talk(&mut stream, script, "$1\r\n1\r\n");
    assert_eq!((server.calls("GET"), server.calls("set")), (2, 0));
    assert_eq!(
        (server.calls("client"), server.calls("client|list")),
        (1, 0)
    );
    server.reset_stats();
    assert_eq!(server.all_calls().len(), 0, "{:?}", server.all_calls());

    let mut listener = connect(server.port());
    talk(
        &mut listener,
        "SUBSCRIBE c",
        "*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n",
    );
    assert_eq!(server.channels(), ["c"]);
    assert_eq!((server.subscribers("c"), server.subscribers("d")), (1, 0));
    let clients = server.clients();
    let seen: Vec<_> = clients
        .iter()
        .map(|client| (client.name(), client.last_command(), client.subscriptions()))
        .collect();
    assert_eq!(seen, [("me", "eval", 0), ("", "subscribe", 1)]);

    assert_eq!(server.client_kill_all(), 2);
    assert_closed(&mut listener);
    server.flushall();
    assert_eq!(server.keys("*").len(), 0);
}

#[test]
fn a_proxy_passes_everything_on_and_its_cut_ends_all_connections() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let long = "x".repeat(300_000);
    let mut streams: Vec<_> = (0..3).map(|_| connect(proxy.port())).collect();
    for stream in &mut streams {
        let set = format!("*3\r\n$3\r\nSET\r\n$1\r\na\r\n$300000\r\n{long}");
        talk(stream, &set, "+OK\r\n");
        talk(stream, "GET a", &format!("$300000\r\n{long}\r\n"));
    }
    assert_eq!((proxy.connections(), proxy.accepted()), (3, 3));
    let (to_server, to_client) = proxy.bytes();
    assert!(to_server > 900_000 && to_client > 900_000);

    // Also one that the proxy has not even accepted.
    streams.push(connect(proxy.port()));
    proxy.cut();
    assert_eq!(proxy.connections(), 0);
    streams.iter_mut().for_each(assert_closed);
    wait_until_blocking("the server sees it", BOUND, || server.clients().is_empty());
    talk(&mut connect(proxy.port()), "PING", "+PONG\r\n");
}

#[test]
fn a_refusing_proxy_leaves_standing_connections_alone() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut stream = connect(proxy.port());
    proxy.refuse();
    let refused = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
    talk(&mut stream, "PING", "+PONG\r\n");
    proxy.accept();
    talk(&mut connect(proxy.port()), "PING", "+PONG\r\n");
}

/// A process that is forked at that moment has the listening socket too, until it runs its own program.
#[test]
fn a_proxy_refuses_also_while_processes_are_started() {
    let proxy = Proxy::to_port(0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    std::process::Command::new("true").status().unwrap();
                }
            });
        }
        let accepted = (0..300).find(|_| {
            proxy.refuse();
            let accepted = TcpStream::connect(("127.0.0.1", proxy.port()));
            proxy.accept();
            accepted.is_ok()
        });
        is_over.store(true, Ordering::SeqCst);
        assert_eq!(accepted, None);
    });
}

#[test]
fn a_blackhole_swallows_each_way_for_itself() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut stream = connect(proxy.port());
    talk(&mut stream, "PING", "+PONG\r\n");

    proxy.blackhole(Way::ToServer, true);
    stream.write_all(b"SET a 1\r\n").unwrap();
    assert_silent(&mut stream);
    assert_eq!(server.get("a"), None);
    proxy.blackhole(Way::ToServer, false);
    talk(&mut stream, "PING", "+PONG\r\n");

    proxy.blackhole(Way::ToClient, true);
    stream.write_all(b"SET b 1\r\n").unwrap();
    wait_until_blocking("it arrives", BOUND, || server.get("b").is_some());
    assert_silent(&mut stream);
    proxy.blackhole(Way::ToClient, false);
    talk(&mut stream, "PING", "+PONG\r\n");

    proxy.blackhole(Way::Both, true);
    assert_silent(&mut stream);
    let mut fresh = connect(proxy.port());
    fresh.write_all(b"PING\r\n").unwrap();
    assert_silent(&mut fresh);
    wait_until_blocking("both are connected", BOUND, || server.clients().len() == 2);
    // Not even that the client is gone gets through.
    drop((stream, fresh));
    std::thread::sleep(NOTHING_COMES);
    assert_eq!(server.clients().len(), 2);
}

#[test]
fn delayed_bytes_arrive_even_from_a_closed_connection() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut stream = connect(proxy.port());
    talk(&mut stream, "PING", "+PONG\r\n");
    proxy.hold(Way::ToServer, true);
    stream.write_all(b"SET a 1\r\nINCR a\r\n").unwrap();
    drop(stream);
    std::thread::sleep(NOTHING_COMES);
    assert_eq!((server.get("a"), server.clients().len()), (None, 1));

    proxy.hold(Way::ToServer, false);
    wait_until_blocking("it arrives", BOUND, || {
        server.get("a").as_deref() == Some("2")
    });
    wait_until_blocking("the end follows", BOUND, || proxy.connections() == 0);
}

#[test]
fn a_delay_is_that_long_each_way_and_keeps_the_order() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let mut stream = connect(proxy.port());
        talk(&mut stream, "PING", "+PONG\r\n");
        let delay = Duration::from_millis(50);

        for (way, least) in [(Way::ToClient, delay), (Way::Both, delay * 2)] {
            proxy.delay(way, delay);
            let begin = Instant::now();
            for number in 0..50 {
                write!(stream, "ECHO {number:02}\r\n").unwrap();
            }
            for number in 0..50 {
                hear(&mut stream, &format!("$2\r\n{number:02}\r\n"));
            }
            let took = begin.elapsed();
            assert!(took >= least, "{way:?}: {took:?}");
            // One by one it would be fifty times.
            assert!(took < least * 25, "{way:?}: one by one, {took:?}");
        }
        // What is no longer delayed still comes after what is.
        stream.write_all(b"ECHO 1\r\n").unwrap();
        proxy.delay(Way::Both, Duration::ZERO);
        stream.write_all(b"ECHO 2\r\n").unwrap();
        hear(&mut stream, "$1\r\n1\r\n$1\r\n2\r\n");
    });
}

#[test]
fn what_was_sent_before_a_word_does_not_count() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    proxy.count_from(b"ECHO");
    let streams = &mut [connect(proxy.port()), connect(proxy.port())];
    for stream in streams.iter_mut() {
        talk(stream, "PING", "+PONG\r\n");
    }
    assert_eq!(proxy.bytes().0, 0);
    talk(&mut streams[0], "ECHO 7", "$1\r\n7\r\n");
    for stream in streams {
        talk(stream, "PING", "+PONG\r\n");
    }
    assert_eq!(proxy.bytes().0, "ECHO 7\r\nPING\r\n".len() as u64);
}

#[test]
fn a_half_close_ends_one_way_and_leaves_the_other() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut stream = connect(proxy.port());
    talk(&mut stream, "PING", "+PONG\r\n");
    proxy.half_close(Way::ToClient);
    assert_eq!(read_byte(&mut stream).unwrap(), 0);
    stream.write_all(b"SET a 1\r\n").unwrap();
    wait_until_blocking("it arrives", BOUND, || server.exists("a"));
    assert_eq!(proxy.connections(), 1);

    let mut fresh = connect(proxy.port());
    talk(&mut fresh, "PING", "+PONG\r\n");
}

/// A client of a test that has ended would find the server of the next one at the address of its own.
#[test]
fn a_server_has_another_port_than_the_one_before() {
    let ended = RedisServer::start();
    let port = ended.port();
    drop(ended);
    assert_ne!(RedisServer::start().port(), port);
}

/// As a sentinel, a node and a redirect tell it, and nowhere else; also where the network has cut it in two.
#[test]
fn clients_are_told_the_ports_of_proxies() {
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::to_port(server.local_addr().unwrap().port());
    proxy.redirect(vec![(20_001, 29_991), (20_002, 29_992)]);
    let mut client = connect(proxy.port());
    let (mut stream, _) = server.accept().unwrap();
    for (sent, heard) in [
        (
            &["*2\r\n$9\r\n127.0.0.1\r\n$5\r\n20001\r\n"][..],
            "*2\r\n$9\r\n127.0.0.1\r\n$5\r\n29991\r\n",
        ),
        (
            &["$4\r\nport\r\n:20002\r\n$4\r\nhost\r\n"],
            "$4\r\nport\r\n:29992\r\n$4\r\nhost\r\n",
        ),
        (
            &["-MOVED 77 127.0.0.1:2", "0001\r", "\n"],
            "-MOVED 77 127.0.0.1:29991\r\n",
        ),
        (&["$5\r\n", "200", "02\r\n"], "$5\r\n29992\r\n"),
        // Others' ports, and other numbers.
        (
            &["-ASK 1 127.0.0.1:20003\r\n"],
            "-ASK 1 127.0.0.1:20003\r\n",
        ),
        (
            &[":20001\r\n$6\r\n200011\r\n"],
            ":20001\r\n$6\r\n200011\r\n",
        ),
    ] {
        for piece in sent {
            stream.write_all(piece.as_bytes()).unwrap();
            std::thread::yield_now();
        }
        hear(&mut client, heard);
    }
    // What clients say is left alone.
    client.write_all(b"$5\r\n20001\r\n").unwrap();
    hear(&mut stream, "$5\r\n20001\r\n");
}

#[test]
fn a_proxy_can_be_aimed_at_another_server() {
    let (one, two) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::to(&one);
    let mut old = connect(proxy.port());
    proxy.aim_at(&two);
    talk(&mut connect(proxy.port()), "SET a 2", "+OK\r\n");
    talk(&mut old, "SET a 1", "+OK\r\n");
    assert_eq!(one.get("a").as_deref(), Some("1"));
    assert_eq!(two.get("a").as_deref(), Some("2"));
}

#[test]
fn a_worker_stops_goes_on_and_is_gone_when_dropped() {
    let mut worker = Worker::spawn("worker", "echo", &[]);
    worker.tell("one");
    assert_eq!(worker.expect_line_blocking("heard ", BOUND), "one");

    worker.sigstop();
    worker.tell("two");
    std::thread::sleep(NOTHING_COMES);
    assert_eq!(worker.said().len(), 0);
    worker.sigcont();
    assert_eq!(worker.expect_line_blocking("heard t", BOUND), "wo");

    let pid = worker.pid();
    worker.sigstop();
    drop(worker);
    assert!(!exists(pid), "the worker outlived its handle");
}

#[test]
#[should_panic(expected = "ended without saying \"pid \"")]
fn a_worker_that_ends_early_is_told_apart() {
    Worker::spawn("no such entry", "server", &[]).expect_line_blocking("pid ", BOUND);
}

/// A failure is told in the end, also by a test that is run again.
#[test]
fn a_test_in_which_the_machine_stood_still_is_run_again() {
    let mut worker = Worker::spawn("worker", "measures", &[]);
    worker.expect_line_blocking("run 1", BOUND);
    worker.sigstop();
    worker.tell("fail");
    std::thread::sleep(Duration::from_millis(500));
    worker.sigcont();
    worker.expect_line_blocking("run 2", BOUND);
    assert!(!worker.exit(BOUND).success(), "the test passed");
    let words = worker.last_words();
    let told = ["the machine stood still for", "too late"];
    assert!(told.iter().all(|told| words.contains(told)), "{words}");
}

/// The bound of a wait is over when so much time has passed in which the process could go on.
#[test]
fn time_in_which_the_machine_stood_still_is_not_waited() {
    on_a_steady_machine_blocking(|| {
        let mut worker = Worker::spawn("worker", "waits", &[]);
        worker.expect_line_blocking("waits", BOUND);
        worker.sigstop();
        worker.tell("go on");
        std::thread::sleep(2 * UNSTOPPED);
        worker.sigcont();
        worker.expect_line_blocking("has waited", BOUND);
    });
}

/// One processor may stand still while another goes on, for seconds. A thread that may run on either sees less than half of
/// that, and a process whose timer is on the first is late by all of it.
#[cfg(target_os = "linux")]
#[test]
fn each_processor_is_looked_at() {
    let _watch = Watch::start();
    let here = rustix::thread::sched_getaffinity(None).unwrap();
    let processors = 0..rustix::thread::CpuSet::MAX_CPU;
    for processor in processors.filter(|it| here.is_set(*it)) {
        let mut alone = rustix::thread::CpuSet::new();
        alone.set(processor);
        wait_until_blocking(format!("a thread is on {processor} alone"), BOUND, || {
            let threads = std::fs::read_dir("/proc/self/task").unwrap();
            let ids = threads.map(|it| it.unwrap().file_name().into_string().unwrap());
            let mut ids = ids.map(|it| Pid::from_raw(it.parse().unwrap()));
            // A thread may end meanwhile.
            ids.any(|id| rustix::thread::sched_getaffinity(id).is_ok_and(|it| it == alone))
        });
    }
}

#[test]
#[should_panic(expected = "not within 100ms: it never comes")]
fn a_wait_ends_on_a_machine_that_goes_on() {
    wait_until_blocking("it never comes", NOTHING_COMES, || false);
}

#[test]
fn a_missing_server_fails_the_test_and_says_what_to_do() {
    let nowhere = tempfile::tempdir().unwrap();
    let nowhere = nowhere.path().to_str().unwrap();
    for env in [
        [
            ("LOCKSTREAM_REDIS_SERVER", "/nonexistent"),
            ("PATH", "/usr/bin"),
        ],
        [("LOCKSTREAM_REDIS_SERVER", ""), ("PATH", nowhere)],
    ] {
        let mut worker = Worker::spawn("worker", "server", &env);
        assert!(!worker.exit(BOUND).success(), "the test passed");
        let words = worker.last_words();
        for remedy in ["apt-get install redis-server", "brew", "./tests/run"] {
            assert!(words.contains(remedy), "no word of {remedy} in {words}");
        }
    }
}

/// The pauses of a wait are real, so virtual time stands still meanwhile and other tasks go on.
#[tokio::test(start_paused = true)]
async fn waiting_works_under_paused_time() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let begin = tokio::time::Instant::now();
    let client = tokio::task::spawn_blocking({
        let port = proxy.port();
        move || talk(&mut connect(port), "SET a 1", "+OK\r\n")
    });
    wait_until("the key is set", BOUND, || server.exists("a")).await;
    client.await.unwrap();

    let mut worker = Worker::spawn("worker", "echo", &[]);
    worker.tell("one");
    assert_eq!(worker.expect_line("heard ", BOUND).await, "one");
    assert_eq!(begin.elapsed(), Duration::ZERO);
}
