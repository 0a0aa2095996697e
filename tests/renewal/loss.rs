//! A lease that is gone is known to be gone: early where that can be found out, and at its deadline at the latest.

use std::sync::OnceLock;

use futures::{FutureExt, StreamExt, poll};
use lockstream::{LockError, LockEvent, OnLost, Renewal};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::hearing::Log;
use crate::support::{RedisServer, on_a_steady_machine, wait_until};
use crate::{BOUND, LATE, assert_took, builder, ms, nothing_left, registry, usable};

/// Everything that this binary logs from now on. One for all tests, since a subscriber of one thread's own may miss what
/// another thread was the first to say.
fn log() -> Heard {
    static LOG: OnceLock<Log> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(log.clone())
            .with_max_level(tracing::Level::WARN)
            .with_ansi(false)
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("the first and only");
        log
    });
    Heard {
        log: log.clone(),
        // What a test's run before said is not this one's.
        from: log.text().len(),
    }
}

struct Heard {
    log: Log,
    from: usize,
}

/// The lines with a text.
fn lines_with(heard: &Heard, text: &str) -> Vec<String> {
    let log = heard.log.text();
    let tells = |line: &&str| line.contains(text);
    let lines = log[heard.from..].lines();
    lines.filter(tells).map(str::to_owned).collect()
}

/// The lines that tell of a key.
fn lines_of(heard: &Heard, key: &str) -> Vec<String> {
    lines_with(heard, &format!("key=\"{key}\""))
}

/// A server that says nothing for less than a ttl costs nobody a lease, whether it stood still or was away.
#[tokio::test]
async fn a_server_away_for_less_than_a_ttl_loses_nothing() {
    on_a_steady_machine(async || {
        let mut server = RedisServer::builder().keep_data().start();
        // A third of it, the two seconds that lie between two tries to connect at most, and what a busy machine takes to
        // start a server. One that was only stopped goes on at once.
        for (killed, ttl) in [(false, ms(6000)), (true, ms(9000))] {
            let quick = builder(&server.url(), ttl).await.response_timeout(ms(300));
            let locks = quick.build().unwrap();
            let lease = locks.obtain("k").lease().await.unwrap();
            if killed {
                server.kill();
            } else {
                server.stop();
            }
            let before = lease.deadline();
            sleep(ttl / 3 + ms(100)).await;
            assert!(lease.is_valid() && lease.deadline() == before);
            if killed {
                server.restart();
            } else {
                server.cont();
            }
            for _ in 0..2 {
                let before = lease.deadline();
                // Later it would be lost.
                wait_until("it is renewed", ttl, || lease.deadline() > before).await;
            }
            assert!(lease.is_valid(), "killed: {killed}");
            lease.release().await.unwrap();
            nothing_left(&server, &[&locks]).await;
        }
    })
    .await;
}

/// For more than that it does: at the deadline, while the server is still away.
#[tokio::test]
async fn a_server_away_for_more_than_a_ttl_loses_the_lease_at_its_deadline() {
    on_a_steady_machine(async || {
        let mut server = RedisServer::builder().keep_data().start();
        let ttl = ms(1200);
        for killed in [false, true] {
            let quick = builder(&server.url(), ttl).await.response_timeout(ms(300));
            let locks = quick.build().unwrap();
            let begin = Instant::now();
            let lease = locks.obtain("k").lease().await.unwrap();
            if killed {
                server.kill();
            } else {
                server.stop();
            }
            assert!(lease.lost().await.is_lost());
            assert_took(begin, usable(ttl));
            drop(lease);
            if killed {
                server.restart();
            } else {
                server.cont();
            }
            // What was on its way to the server prolongs nothing.
            wait_until("the key is gone", BOUND, || !server.exists("lock:k")).await;
            let next = timeout(4 * BOUND, locks.obtain("k").lease()).await;
            next.expect("it goes on").unwrap().release().await.unwrap();
            nothing_left(&server, &[&locks]).await;
        }
    })
    .await;
}

/// Why leases are lost, the log says once an outage for each kind of error, however often it is tried again. It said the
/// first alone: that the connection was closed, and not why none could be made since.
#[tokio::test]
async fn an_outage_that_costs_leases_is_in_the_log_once() {
    on_a_steady_machine(async || {
        let log = log();
        let mut server = RedisServer::builder().keep_data().start();
        // No other server of this process has it.
        let address = format!("127.0.0.1:{}", server.port());
        let locks = registry(&server.url(), ms(3000)).await;
        for outage in 1..=2 {
            let before = lines_with(&log, &address).len();
            let lease = locks.obtain("k").lease().await.unwrap();
            server.kill();
            assert!(lease.lost().await.is_lost());
            let told = lines_with(&log, &address).split_off(before);
            assert!(told.iter().all(|line| line.contains("store unreachable")));
            let mut errors: Vec<_> = told
                .iter()
                .map(|line| line.split_once("error=").unwrap().1)
                .collect();
            let is_present = errors
                .iter()
                .any(|error| error.contains("Connection refused"));
            // In the second outage the pause before the next attempt may be longer than the lease lasts (G1).
            assert!(is_present || outage == 2, "{told:?}");
            errors.sort_unstable();
            errors.dedup();
            assert_eq!(errors.len(), told.len(), "{told:?}");
            assert!(!told.is_empty());
            server.restart();
            drop(lease);
            let next = timeout(4 * BOUND, locks.obtain("k").lease()).await;
            next.expect("it goes on").unwrap().release().await.unwrap();
        }
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// 50 ms after any timer of the same deadline would have fired, at the latest; or after twice what the runtime
/// takes for a sleep of a millisecond, where that is longer.
#[tokio::test]
async fn a_loss_is_told_soon_after_the_deadline() {
    on_a_steady_machine(async || {
        const LEASES: usize = 20;
        let server = RedisServer::start();
        let locks = registry(&server.url(), ms(30_000)).await;
        let tasks = (0..LEASES).map(|at| {
            let lock = locks.obtain(format!("k{at}"));
            let renewal = Renewal::watchdog().max_renewals(u32::from(at % 2 == 0));
            let lock = lock.ttl(ms(300 + 10 * at as u64)).renewal(renewal);
            tokio::spawn(async move {
                let lease = lock.lease().await.unwrap();
                let told = async {
                    assert!(lease.lost().await.is_lost());
                    Instant::now()
                };
                let timer = async {
                    // It may be renewed meanwhile.
                    while Instant::now() < lease.deadline() {
                        sleep_until(lease.deadline()).await;
                    }
                    let timer = Instant::now();
                    sleep(ms(1)).await;
                    (timer, timer.elapsed())
                };
                let (now, (timer, turn)) = tokio::join!(told, timer);
                let deadline = lease.deadline();
                assert!(now >= deadline, "{:?} too early", deadline - now);
                (now.saturating_duration_since(timer), turn)
            })
        });
        let (mut late, mut turns) = (Vec::new(), Vec::new());
        for task in tasks.collect::<Vec<_>>() {
            let (told_after, turn) = task.await.unwrap();
            late.push(told_after);
            turns.push(turn);
        }
        late.sort_unstable();
        turns.sort_unstable();
        let soon = ms(50).max(2 * turns[LEASES / 2]);
        assert!(late[LEASES / 2] <= soon, "{late:?} beside {turns:?}");
        assert!(late[LEASES - 1] <= LATE, "{late:?}");
        nothing_left(&server, &[&locks]).await;
    })
    .await;
}

/// The work runs to its end and its value is delivered; that it ran without its lock is told by an event, by the log,
/// and by the view of its lease: whether a renewal found it out, the deadline, or only the release.
#[tokio::test]
async fn run_on_delivers_the_value_and_tells_the_loss() {
    on_a_steady_machine(async || {
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum By {
            Renewal,
            Deadline,
            Release,
        }
        let log = log();
        let server = RedisServer::start();
        let ttl = ms(3000);
        let locks = registry(&server.url(), ttl).await;
        let others = registry(&server.url(), ttl).await;
        for by in [By::Renewal, By::Deadline, By::Release] {
            let key = format!("run on {by:?}");
            let lock = locks.obtain(&*key).on_lost(OnLost::RunOn);
            let lock = match by {
                By::Renewal => lock,
                By::Deadline => lock.ttl(ttl),
                By::Release => lock.ttl(20 * ttl),
            };
            let other = others.obtain(&*key);
            let mut events = locks.events();
            let mut early = None;
            let work = lock.with_lease(async |lease| {
                assert!(lease.is_valid() && lines_of(&log, &key).is_empty());
                early = Some(lease.lost());
                assert!(poll!(early.as_mut().unwrap()).is_pending());
                if by != By::Deadline {
                    assert!(server.del(&format!("lock:{key}")));
                }
                if by != By::Release {
                    assert!(lease.lost().await.is_lost());
                    assert!(!lease.is_valid());
                }
                assert!(other.acquire().await.unwrap(), "it is another's by now");
                if by != By::Release {
                    sleep(ttl).await;
                }
                lease
            });
            let view = work.await.unwrap();
            assert!(other.is_acquired(), "the late end took another's lock");

            let told = lines_of(&log, &key);
            assert_eq!(told.len(), 1, "{by:?}: {told:?}");
            let token = format!("token={}", view.token());
            assert!(told[0].contains("lost") && told[0].contains(&token));
            let why = match by {
                By::Deadline => "its ttl was over",
                By::Renewal | By::Release => "deleted or overwritten",
            };
            assert!(told[0].contains(why), "{told:?}");
            for lost in [early.unwrap(), view.lost()] {
                let lost = timeout(BOUND, lost).await.expect("the view tells it");
                assert!(matches!(lost, LockError::Lost { token, .. } if token == view.token()));
            }
            let mut told = Vec::new();
            while let Some(Some(event)) = events.next().now_or_never() {
                if event.token() == Some(view.token()) {
                    told.push(event);
                }
            }
            // A fixed lease that is long in coming is renewed once (W3).
            if by == By::Deadline && matches!(told.get(1), Some(LockEvent::Renewed { .. })) {
                told.remove(1);
            }
            assert!(
                matches!(
                    &told[..],
                    [LockEvent::Acquired { .. }, LockEvent::Lost { .. }]
                ),
                "{by:?}: {told:?}"
            );
            assert!(other.release().await.unwrap());
        }
        nothing_left(&server, &[&locks, &others]).await;
    })
    .await;
}
