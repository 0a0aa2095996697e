//! Streams of locked items, and a stream that leads, while the server is killed and comes back.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use tokio::time::{sleep, timeout};

use crate::support::{PATIENCE, RedisServer};
use crate::{BOUND, LONG, builder, ms, nothing_left};

const KEYS: usize = 6;
const ITEMS: usize = 240;

/// In each of two processes: no item is left without a result, and of one key one works at a time.
async fn pipelines_go_on(keeps_data: bool) {
    let mut server = match keeps_data {
        true => RedisServer::builder().keep_data().start(),
        false => RedisServer::start(),
    };
    let (here, there) = (locks(&server).await, locks(&server).await);
    let at_work = &[const { AtomicBool::new(false) }; KEYS];
    let begun = &AtomicUsize::new(0);
    let consume = async |locks: &LockRegistry| {
        let items = stream::iter(0..ITEMS).map(|item| {
            let key = item * item % KEYS;
            let work = async move {
                begun.fetch_add(1, Ordering::Relaxed);
                // Without its data the server gives a key away whose holder does not know it yet.
                let is_alone = !at_work[key].swap(true, Ordering::Relaxed);
                assert!(is_alone || !keeps_data, "two work on {key}");
                let _leaves = Leaves(&at_work[key]);
                sleep(ms(5)).await;
            };
            let lock = locks.obtain(format!("k{key}"));
            work.with_lock(lock.wait(Duration::MAX))
        });
        let results: Vec<_> = items.buffer_keyed(4).collect().await;
        assert_eq!(results.len(), ITEMS);
        for result in results {
            assert!(
                matches!(result, Ok(()) | Err(LockError::Lost { .. })),
                "{result:?}"
            );
        }
    };
    let breaks = async {
        for part in 1..=3 {
            while begun.load(Ordering::Relaxed) < part * ITEMS / 3 {
                sleep(ms(1)).await;
            }
            tokio::task::block_in_place(|| server.restart());
        }
        server
    };
    let all = async { tokio::join!(breaks, consume(&here), consume(&there)) };
    let (server, ..) = timeout(2 * PATIENCE, all).await.expect("all end");
    nothing_left(&server, &[&here, &there]).await;
}

/// An item at work, which may be dropped at any time.
struct Leaves<'a>(&'a AtomicBool);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

async fn locks(server: &RedisServer) -> LockRegistry {
    // What is lost to all is lost to the end of the test.
    builder(&server.url()).await.ttl(LONG).build().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_go_on_when_the_server_comes_back() {
    pipelines_go_on(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelines_go_on_when_the_server_comes_back_without_its_data() {
    pipelines_go_on(false).await;
}

/// The lead is lost with the data. The source is dropped, and made again at the next term.
#[tokio::test]
async fn a_stream_that_leads_is_made_again_when_the_lead_is_lost_with_the_data() {
    let mut server = RedisServer::start();
    let locks = locks(&server).await;
    let source = |lease: lockstream::LeaseView| stream::repeat(lease.token());
    let mut led = pin!(locks.obtain("k").lead_stream(source));
    let first = timeout(BOUND, led.next()).await.unwrap().unwrap().unwrap();
    server.restart();
    let another = async {
        loop {
            let token = led.next().await.unwrap().unwrap();
            if token != first {
                return token;
            }
            tokio::task::yield_now().await;
        }
    };
    let next = timeout(PATIENCE, another).await.expect("it leads again");
    assert!(next > first);
    assert!(server.exists("lock:k"));
}
