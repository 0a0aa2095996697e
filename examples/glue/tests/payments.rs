//! Two instances of the payment endpoint, each a process, over real HTTP, on a real server.

#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};
use ureq::Agent;

/// For what takes some round trips and a busy machine.
const BOUND: Duration = Duration::from_secs(10);

/// Longer than any test: the bank does not answer.
const NEVER: u32 = 600_000;

/// A process of the service, killed when it is dropped.
struct Instance {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    address: String,
}

impl Instance {
    fn start(server: &RedisServer, bank_takes: u32) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_payments"))
            .arg("127.0.0.1:0")
            .env("REDIS_URL", server.url())
            .env("BANK_MS", bank_takes.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().expect("it says where it listens").unwrap();
        let address = first.strip_prefix("listening on http://").unwrap();
        Self {
            child,
            address: address.to_owned(),
            lines,
        }
    }

    /// Status, and what was said without its line end.
    fn post(&self, path: &str) -> (u16, String) {
        let agent: Agent = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(2 * BOUND))
            .build()
            .into();
        let url = format!("http://{}{path}", self.address);
        let mut answer = agent.post(&url).send_empty().unwrap();
        let said = answer.body_mut().read_to_string().unwrap();
        let status = answer.status().as_u16();
        assert_eq!(
            answer.headers().contains_key("retry-after"),
            matches!(status, 409 | 500 | 503)
        );
        (status, said.trim_end().to_owned())
    }

    fn pay(&self, order: u32) -> (u16, String) {
        self.post(&format!("/orders/{order}/payment"))
    }

    /// Asks, and does not wait for the answer.
    fn ask(&self, order: u32) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let host = &self.address;
        write!(
            stream,
            "POST /orders/{order}/payment HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n\r\n"
        )
        .unwrap();
        stream
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until_blocking("it ends", BOUND, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How often the bank has charged for an order.
fn charges(server: &RedisServer, order: u32) -> u32 {
    let charges: Option<u32> = server.ask(&["HGET", "shop:charges", &order.to_string()]);
    charges.unwrap_or(0)
}

fn stored(server: &RedisServer, order: u32) -> Option<String> {
    server.ask(&["HGET", "shop:paid", &order.to_string()])
}

fn is_locked(server: &RedisServer, order: u32) -> bool {
    server.exists(&format!("lock:order:{order}"))
}

fn until_locked(server: &RedisServer, order: u32) {
    wait_until_blocking("the order is handled", BOUND, || {
        is_locked(server, order) || stored(server, order).is_some()
    });
}

/// Sixteen requests for one order, half of them to each instance, at the same time.
#[test]
fn an_order_is_paid_once_by_two_instances() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let instances = [(); 2].map(|()| Instance::start(&server, 1_000));
        let together = Barrier::new(16);
        let answers: Vec<(u16, String)> = thread::scope(|scope| {
            let asking = (0..16).map(|index| {
                let (instance, together) = (&instances[index % 2], &together);
                scope.spawn(move || {
                    together.wait();
                    instance.pay(42)
                })
            });
            let asking: Vec<_> = asking.collect();
            asking.into_iter().map(|it| it.join().unwrap()).collect()
        });
        let of = |wanted: u16| answers.iter().filter(move |(status, _)| *status == wanted);
        assert_eq!(of(201).count(), 1, "{answers:?}");
        assert!(of(409).count() >= 1, "{answers:?}");
        assert!(
            of(409).all(|(_, said)| said.contains("order:42")),
            "{answers:?}"
        );
        let receipt = "order 42 paid by charge 1";
        // Who came when it was paid already has the same receipt.
        assert!(
            of(201).chain(of(200)).all(|(_, said)| said == receipt),
            "{answers:?}"
        );
        assert_eq!(
            of(201).count() + of(409).count() + of(200).count(),
            16,
            "{answers:?}"
        );
        assert_eq!(
            (charges(&server, 42), stored(&server, 42).as_deref()),
            (1, Some(receipt))
        );

        // Later the lock is free, and keeps nobody from paying again. The store does.
        assert!(!is_locked(&server, 42));
        for instance in &instances {
            assert_eq!(instance.pay(42), (200, receipt.to_owned()));
        }
        assert_eq!(charges(&server, 42), 1);
    });
}

/// Whoever holds the lock, as long as it is held, at either instance; other orders are paid meanwhile.
#[test]
fn an_order_that_is_handled_is_a_conflict() {
    let server = RedisServer::start();
    let instances = [(); 2].map(|()| Instance::start(&server, 1));
    server.cmd(&["SET", "lock:order:7", "somebody", "NX", "PX", "600000"]);
    for instance in &instances {
        let begin = Instant::now();
        let (status, said) = instance.pay(7);
        assert_eq!(status, 409);
        assert!(said.starts_with("lock \"order:7\" not acquired"), "{said}");
        assert!(begin.elapsed() < BOUND, "it does not wait");
        assert_eq!(instance.pay(8).1, "order 8 paid by charge 1");
    }
    assert_eq!((charges(&server, 7), stored(&server, 7)), (0, None));
    server.del("lock:order:7");
    assert_eq!(instances[0].pay(7).0, 201);
    assert_eq!(instances[1].pay(7).0, 200);
    assert_eq!((charges(&server, 7), charges(&server, 8)), (1, 1));
}

/// A lease is lost under a request, and another pays meanwhile: the first is stopped before it has paid.
#[test]
fn a_request_whose_lease_is_lost_is_stopped() {
    let server = RedisServer::start();
    let slow = Instance::start(&server, NEVER);
    let quick = Instance::start(&server, 1);
    thread::scope(|scope| {
        let first = scope.spawn(|| slow.pay(5));
        until_locked(&server, 5);
        // By hand, as an operator must not: two are inside now, until the first renewal finds it out.
        server.del("lock:order:5");
        assert_eq!(quick.pay(5), (201, "order 5 paid by charge 1".to_owned()));
        let (status, said) = first.join().unwrap();
        assert_eq!(status, 500, "{said}");
        assert!(said.starts_with("lease on \"order:5\" lost"), "{said}");
    });
    assert_eq!(charges(&server, 5), 1);
    assert_eq!(slow.pay(5), (200, "order 5 paid by charge 1".to_owned()));
}

/// Somebody who heeds no lock has paid meanwhile: that is what counts, and the charge is paid back.
#[test]
fn a_payment_is_stored_once_whatever_the_lock_knows() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let instance = Instance::start(&server, 5_000);
        thread::scope(|scope| {
            let first = scope.spawn(|| instance.pay(6));
            until_locked(&server, 6);
            server.cmd(&["HSET", "shop:paid", "6", "paid in cash"]);
            assert_eq!(first.join().unwrap(), (200, "paid in cash".to_owned()));
        });
        assert_eq!(charges(&server, 6), 0);
        assert_eq!(stored(&server, 6).as_deref(), Some("paid in cash"));
    });
}

/// Its lock is free when the ttl is over, and the other instance pays.
#[test]
fn the_order_of_a_killed_instance_is_paid_by_the_other() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut hangs = Instance::start(&server, NEVER);
        let other = Instance::start(&server, 1);
        let _asking = hangs.ask(9);
        until_locked(&server, 9);
        hangs.child.kill().unwrap();
        hangs.child.wait().unwrap();
        let mut answers = Vec::new();
        wait_until_blocking("the other pays", 2 * BOUND, || {
            let (status, _) = other.pay(9);
            answers.push(status);
            status != 409
        });
        assert_eq!(answers.last(), Some(&201), "{answers:?}");
        assert_eq!(charges(&server, 9), 1);
    });
}

/// A client that hangs up takes its request along: the order is free, and nothing was paid.
#[test]
fn a_client_that_hangs_up_frees_the_order() {
    let server = RedisServer::start();
    let instance = Instance::start(&server, NEVER);
    let asking = instance.ask(11);
    until_locked(&server, 11);
    assert_eq!(instance.pay(11).0, 409);
    drop(asking);
    wait_until_blocking("the order is free", BOUND, || !is_locked(&server, 11));
    assert_eq!((charges(&server, 11), stored(&server, 11)), (0, None));
}

/// At SIGTERM a request that is being handled is answered, and nothing stays locked.
#[test]
fn an_instance_ends_well() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut instance = Instance::start(&server, 1_000);
        let asking = instance.ask(12);
        until_locked(&server, 12);
        instance.signal(Signal::TERM);
        let mut answer = BufReader::new(asking).lines();
        assert_eq!(answer.next().unwrap().unwrap(), "HTTP/1.1 201 Created");
        drop(answer);
        assert!(instance.end().success());
        assert_eq!(instance.lines.next().unwrap().unwrap(), "ended");
        assert!(!is_locked(&server, 12) && stored(&server, 12).is_some());
    });
}

/// An order has one way to be written, and so one lock.
#[test]
fn an_order_has_one_name() {
    let server = RedisServer::start();
    let instance = Instance::start(&server, 1);
    for path in [
        "/orders/%34%32/payment",
        "/orders/x/payment",
        "/orders/-1/payment",
    ] {
        assert_eq!(instance.post(path).0, 404, "{path}");
    }
    assert_eq!(
        instance.post("/orders/0042/payment").1,
        "order 42 paid by charge 1"
    );
    assert_eq!(
        instance.pay(42),
        (200, "order 42 paid by charge 1".to_owned())
    );
}

#[test]
fn without_a_server_there_is_one_sentence() {
    let mut server = RedisServer::start();
    let url = server.url();
    server.kill();
    for url in [None, Some(&*url)] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_payments"));
        match url {
            Some(url) => command.env("REDIS_URL", url),
            None => command.env_remove("REDIS_URL"),
        };
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("REDIS_URL"), "{said}");
        assert_eq!(output.stdout, b"");
    }
}
