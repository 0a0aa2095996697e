//! What hangs on minutes and round trips, on a clock that moves only when the test says so.

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use tokio::time::{Instant, advance, pause};

use super::fake::{Fake, NOW};
use super::registry::{BOUND, Settings, TTL, renew};
use super::support::{RedisServer, wait_until};
use crate::handle::LockRegistry;
use crate::store::RedisStore;
use crate::store::contract::{Op, OpError, Outcome, Owner};
use crate::store::driver::IDLE;

/// A paused clock goes on by itself while all tasks wait, but not while a thread works for one: so what waits for
/// another process has all the time it needs.
pub(super) async fn in_real_time<T>(work: impl Future<Output = T>) -> T {
    let (done, is_done) = mpsc::channel::<()>();
    let blocking = tokio::task::spawn_blocking(move || {
        // Nothing is ever sent. After that time what the work waits for times out.
        let _ = is_done.recv_timeout(BOUND);
    });
    let result = work.await;
    drop(done);
    blocking.await.expect("it does not panic");
    result
}

/// As long as a connection may go unused, and all tasks have seen it.
async fn let_it_idle() {
    advance(IDLE + Duration::from_secs(1)).await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_connection_is_closed_when_nobody_needs_it_and_made_again_without_a_pause() {
    let server = RedisServer::start();
    let store = RedisStore::connect_lazy(server.url()).unwrap();
    let locks = LockRegistry::builder(store).ttl(IDLE * 60).build().unwrap();
    let clients = || {
        let clients = server.clients().into_iter();
        clients.map(|client| client.id()).collect::<Vec<_>>()
    };
    pause();
    in_real_time(async {
        let lease = locks.obtain("k").lease().await.unwrap();
        let before = clients();
        assert_eq!(before.len(), 1);
        for _ in 0..3 {
            let_it_idle().await;
        }
        locks.obtain("other").inspect().await.unwrap();
        assert_eq!(clients(), before, "closed while a lease is held");
        lease.release().await.unwrap();

        for _ in 0..3 {
            let_it_idle().await;
            wait_until("closed", BOUND, || clients().is_empty()).await;
            let begin = Instant::now();
            let lease = locks.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
            assert_eq!(begin.elapsed(), Duration::ZERO, "a pause");
        }
    })
    .await;
}

fn renew_within(owner: u64, within: Duration) -> Op {
    Op::Renew {
        owner: Owner::exclusive(owner),
        ttl: TTL,
        within,
    }
}

/// A server that has more to do than it can is not sent what would come too late anyway, and what is left comes in
/// time.
#[tokio::test]
async fn g4_a_renewal_that_cannot_be_in_time_is_not_sent() {
    let sent = Arc::new(Mutex::new(Vec::new()));
    let (go, gate) = mpsc::channel();
    let record = sent.clone();
    let fake = Fake::start(move |request| {
        request.is_call().then(|| {
            assert!(request.letters().bytes().all(|letter| letter == b'N'));
            let keys = &request.words[3..][..request.letters().len()];
            record.lock().unwrap().push(keys.join(" "));
            // An error is the end of the test.
            let _ = gate.recv_timeout(BOUND);
            request.reply(NOW, b"$1\r\n1\r\n")
        })
    });
    let calls = || sent.lock().unwrap().len();
    let seconds = Duration::from_secs;
    let mut one = Settings::url(fake.url(), "a1").up().await;
    pause();
    in_real_time(async {
        one.submit("first", renew(1, TTL));
        wait_until("sent", BOUND, || calls() == 1).await;
        let late = renew_within(2, Duration::from_millis(8_500));
        let timely = renew_within(3, seconds(10));
        one.submit("late", late.clone());
        one.submit("timely", timely.clone());
        // An eighth of it is what a call is expected to take from then on.
        advance(seconds(8)).await;
        go.send(()).unwrap();
        one.reply("first", &renew(1, TTL)).await.unwrap();
        let result = one.reply("late", &late).await;
        assert!(matches!(result, Err(OpError::TooLate(_))), "{result:?}");
        go.send(()).unwrap();
        one.reply("timely", &timely).await.unwrap();

        // That was a stall, and it is over.
        go.send(()).unwrap();
        let outcome = one.outcome("short", renew_within(4, seconds(1) / 2)).await;
        assert_eq!(outcome, Outcome::Renewed);
    })
    .await;
    let expected = ["lock:first", "lock:timely", "lock:short"];
    assert_eq!(*sent.lock().unwrap(), expected);
}
