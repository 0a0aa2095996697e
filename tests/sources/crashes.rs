//! What a process leaves that is killed.

use lockstream::{LockRegistry, Renewal};
use tokio::time::{Instant, sleep};

use crate::support::{RedisServer, Role, Worker, on_a_steady_machine, wait_until};
use crate::{BOUND, builder, ms, process, queued, released, secs, within};

/// What the other processes do: hold `k`, renewed, until they are told otherwise or killed.
pub(crate) async fn run(mut role: Role) {
    let locks = builder(&role.env("URL")).await.build().unwrap();
    let ttl = role.env("TTL").parse().unwrap();
    let lock = locks.obtain("k").ttl(ms(ttl)).wait(secs(60));
    let lock = lock.renewal(Renewal::watchdog());
    assert_eq!(role.name(), "holder");
    role.say("asks");
    let lease = lock.lease().await.unwrap();
    role.say(format!("holds {}", lease.token()));
    role.hear().await;
    lease.release().await.unwrap();
    role.say("released");
    role.hear().await;
}

fn spawn(server: &RedisServer, ttl: &str) -> Worker {
    let url = server.url();
    Worker::spawn("worker", "holder", &[("URL", &url), ("TTL", ttl)])
}

/// A holder whose watchdog would have kept the lock for ever is killed: the watchdog dies with it, and the lock is the
/// next one's when the ttl is over, not before and hardly later.
#[tokio::test]
async fn crashed_holder() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let here = process(&server).await;
        let ttl = ms(1_500);
        let mut holder = spawn(&server, "1500");
        let token: u64 = holder.expect_line("holds ", BOUND).await.parse().unwrap();
        let waiter = tokio::spawn(here.obtain("k").ttl(secs(60)).lease());
        queued(&server, 1).await;
        // Twice its ttl it lives, and so long the lock is its own.
        sleep(2 * ttl).await;
        assert!(!waiter.is_finished() && server.exists("lock:k"));
        holder.sigkill();
        let killed = Instant::now();
        let left = server.pttl("lock:k");
        assert!(left > 0 && left <= 1_500, "{left}");
        let lease = within(ttl + ms(700), "it has run out", waiter).await;
        let lease = lease.unwrap().unwrap();
        let took = killed.elapsed();
        assert!(took + ms(50) >= ms(left as u64), "{took:?} of {left} ms");
        assert!(
            lease.token().get() > token,
            "{} after {token}",
            lease.token()
        );
        // The dead one's watchdog does not come back.
        sleep(ttl).await;
        assert!(lease.is_valid() && server.exists("lock:k"));
        released(lease).await;
        assert_eq!(server.keys("*"), ["lock:~fence"]);
    })
    .await;
}

/// Waiters that are killed leave their tickets at the front of the queue. The release passes them by, all at once: the
/// first that lives is next, and nobody waits for a ttl of the dead.
#[tokio::test]
async fn crashed_waiter() {
    let server = RedisServer::start();
    let here = process(&server).await;
    let there: LockRegistry = process(&server).await;
    let held = here.obtain("k").ttl(secs(60)).lease().await.unwrap();
    let mut dead = Vec::new();
    for n in 1..=3 {
        dead.push(spawn(&server, "60000"));
        queued(&server, n).await;
    }
    let living = tokio::spawn(there.obtain("k").ttl(secs(60)).lease());
    queued(&server, 4).await;
    let mut last = spawn(&server, "60000");
    queued(&server, 5).await;
    let connections = server.clients().len();
    for worker in &mut dead {
        worker.sigkill();
    }
    wait_until("the server sees it", BOUND, || {
        server.clients().len() == connections - 3
    })
    .await;
    assert_eq!(server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]), 5);
    let begin = Instant::now();
    let token = held.token();
    released(held).await;
    let lease = within(BOUND, "the first that lives has it", living).await;
    let lease = lease.unwrap().unwrap();
    assert!(begin.elapsed() < secs(2), "{:?}", begin.elapsed());
    assert!(lease.token() > token);
    assert_eq!(server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]), 1);
    let token = lease.token().get();
    released(lease).await;
    let next: u64 = last.expect_line("holds ", BOUND).await.parse().unwrap();
    assert!(next > token);
    last.tell("release");
    last.expect_line("released", BOUND).await;
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}
