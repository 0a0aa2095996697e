use std::time::Instant;

use futures::future::try_join_all;
use tokio::time::timeout;

use crate::flock::{Flock, told};
use crate::support::{on_a_steady_machine, wait_until};
use crate::{BOUND, LONG, ms};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acquired_lock_is_on_both_replicas() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(5_000)).await;
    for _ in 0..20 {
        let lease = locks.obtain("k").lease().await.unwrap();
        let owner = flock.primary.get("lock:k");
        assert!(owner.is_some());
        assert_eq!(flock.owners("k"), [owner.clone(), owner]);
        lease.release().await.unwrap();
    }
    flock.wait_until_empty().await;
}

/// A permit counts by its members, and a grant of one is confirmed like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_on_both_replicas() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(5_000)).await;
    let permit = || locks.obtain("p").permits_of(3, 2);
    let taken = || {
        flock
            .replicas
            .iter()
            .map(|it| it.ask::<u64>(&["ZCARD", "lock:p"]))
    };
    for _ in 0..10 {
        let first = permit().lease().await.unwrap();
        assert!(taken().eq([2, 2]));
        let next = tokio::spawn(permit().lease());
        wait_until("it waits", BOUND, || {
            flock.primary.ask::<u64>(&["ZCARD", "{lock:p}:~queue2"]) == 1
        })
        .await;
        first.release().await.unwrap();
        let next = timeout(BOUND, next).await.expect("it is served");
        let next = next.unwrap().unwrap();
        assert!(taken().eq([2, 2]));
        next.release().await.unwrap();
    }
    flock.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_that_one_of_two_replicas_lacks_is_refused_and_released() {
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(3_000)).await;
    flock.replicas[0].stop();
    let (permit, reader) = (locks.obtain("p").permits(3), locks.obtain("p").shared());
    for lock in [permit, reader] {
        let error = told(lock.acquire_once().await);
        assert!(error.to_string().contains(": 1 of 2 replicas"), "{error}");
        wait_until("it is released", BOUND, || !flock.primary.exists("lock:p")).await;
    }
    flock.replicas[0].cont();
    flock.wait_until_empty().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_one_of_two_replicas_lacks_is_refused_in_time_and_released() {
    on_a_steady_machine(async || {
        let flock = Flock::start().await;
        let (both, one) = (
            flock.registry(2, ms(3_000)).await,
            flock.registry(1, ms(5_000)).await,
        );
        flock.replicas[0].stop();
        let lock = both.obtain("k");
        let begun = Instant::now();
        let error = told(lock.acquire_once().await);
        let passed = begun.elapsed();
        // Less than the response time-out.
        assert!(passed >= ms(3_000) && passed < ms(10_000), "{passed:?}");
        assert!(error.is_retryable(), "{error}");
        assert!(error.to_string().contains(": 1 of 2 replicas"), "{error}");
        flock.wait_until_empty().await;

        // A waiter is told the same when its wait is over, and not that others had the lock.
        let error = told(lock.acquire_within(ms(5_000)).await);
        assert!(error.to_string().contains(": 1 of 2 replicas"), "{error}");
        flock.wait_until_empty().await;

        let lease = timeout(BOUND, one.obtain("k").lease()).await;
        let lease = lease.expect("one replica is enough for it").unwrap();
        lease.release().await.unwrap();

        // A waiter outlasts it.
        let waiter = tokio::spawn(lock.lease());
        flock.wait_until_asked().await;
        flock.replicas[0].cont();
        let lease = timeout(BOUND, waiter).await.expect("it is served");
        lease.unwrap().unwrap().release().await.unwrap();
        flock.wait_until_empty().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hand_over_counts_when_both_replicas_have_it() {
    let flock = Flock::start().await;
    let (here, there) = (
        flock.registry(2, ms(5_000)).await,
        flock.registry(2, ms(5_000)).await,
    );
    let mut lease = here.obtain("k").lease().await.unwrap();
    for turn in 0..10 {
        let next = if turn % 2 == 0 { &there } else { &here };
        let waiter = tokio::spawn(next.obtain("k").lease());
        wait_until("it stands in the queue", BOUND, || {
            flock.primary.exists("{lock:k}:~queue2")
        })
        .await;
        let (token, owner) = (lease.token(), flock.primary.get("lock:k"));
        lease.release().await.unwrap();
        lease = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        assert!(lease.token() > token);
        let now = flock.primary.get("lock:k");
        assert_ne!(now, owner);
        assert_eq!(flock.owners("k"), [now.clone(), now]);
    }
    lease.release().await.unwrap();
    flock.wait_until_empty().await;
}

/// The one behind it in the queue, which needs no replicas, is served; and it is served itself when its replicas are
/// there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_that_does_not_count_goes_on_and_its_waiter_is_not_forgotten() {
    on_a_steady_machine(async || {
        let flock = Flock::start().await;
        let (holding, strict, lax) = (
            flock.registry(0, ms(100)).await,
            flock.registry(2, ms(300)).await,
            flock.registry(0, ms(100)).await,
        );
        let stand = async |count: u64| {
            wait_until("they stand in the queue", BOUND, || {
                flock.primary.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]) == count
            })
            .await;
        };
        let lease = holding.obtain("k").lease().await.unwrap();
        let first = tokio::spawn(strict.obtain("k").lease());
        stand(1).await;
        let second = tokio::spawn(lax.obtain("k").lease());
        stand(2).await;
        flock.replicas[1].stop();
        let token = lease.token();
        lease.release().await.unwrap();
        // It asks by itself after 8 s (W2).
        let lease = timeout(ms(7_000), second).await.expect("it is served");
        let lease = lease.unwrap().unwrap();
        assert!(lease.token() > token && !first.is_finished());
        stand(1).await;
        let token = lease.token();
        flock.replicas[1].cont();
        lease.release().await.unwrap();
        let lease = timeout(BOUND, first).await.expect("it is not forgotten");
        let lease = lease.unwrap().unwrap();
        assert!(lease.token() > token);
        lease.release().await.unwrap();
        flock.wait_until_empty().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_acquisitions_share_few_questions() {
    const MANY: u64 = 500;
    let flock = Flock::start().await;
    let locks = flock.registry(2, ms(5_000)).await;
    locks
        .obtain("first")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    flock.primary.reset_stats();
    let leases = (0..MANY).map(|n| locks.obtain(format!("k{n}")).lease());
    let leases = try_join_all(leases).await.unwrap();
    let asked = flock.primary.calls("wait");
    println!("{MANY} acquisitions asked {asked} times");
    assert!((1..=MANY / 5).contains(&asked), "{asked}");
    // Neither renewals nor releases ask.
    for lease in leases {
        lease.release().await.unwrap();
    }
    assert_eq!(flock.primary.calls("wait"), asked);
    flock.wait_until_empty().await;
}

/// However many come while a round is under way, they go in the next: twenty rounds of as long as the replicas have would
/// be too long for those at the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_come_meanwhile_share_one_question() {
    const MANY: u64 = 2_000;
    let flock = Flock::start().await;
    let locks = flock.registry(2, LONG / 2).await;
    flock.replicas[0].stop();
    flock.primary.reset_stats();
    let leases = (0..MANY).map(|n| tokio::spawn(locks.obtain(format!("k{n}")).lease()));
    let leases: Vec<_> = leases.collect();
    wait_until("all are won", BOUND, || {
        flock.primary.keys("lock:k*").len() as u64 == MANY
    })
    .await;
    assert!(leases.iter().all(|lease| !lease.is_finished()));
    flock.replicas[0].cont();
    let leases = timeout(BOUND, try_join_all(leases)).await;
    // The last answers may have come after the first of these rounds began: whoever is told has its lock there.
    for replica in &flock.replicas {
        assert_eq!(replica.keys("lock:k*").len() as u64, MANY);
    }
    let asked = flock.primary.calls("wait");
    assert!(
        (1..=4).contains(&asked),
        "perhaps one to connect, and three rounds at most: {asked}"
    );
    for lease in leases.expect("they are confirmed").unwrap() {
        lease.unwrap().release().await.unwrap();
    }
    flock.wait_until_empty().await;
}

/// The one write of a round is in its first call, and the last call writes nothing: that the replicas have all before the
/// last call would say nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_after_many_calls_counts_the_write_of_each() {
    const MANY: u64 = 1_100;
    let flock = Flock::start().await;
    // All are won while the first round asks.
    let locks = flock.registry(2, ms(6_000)).await;
    flock.replicas[0].stop();
    let first = tokio::spawn(locks.obtain("first").acquire_once());
    flock.wait_until_asked().await;
    let asker = flock.asker();
    let others = (0..MANY).map(|n| tokio::spawn(locks.obtain(format!("k{n}")).acquire_once()));
    let others: Vec<_> = others.collect();
    wait_until("all are won", BOUND, || {
        flock.primary.keys("lock:k*").len() as u64 == MANY
    })
    .await;
    for n in 0..MANY {
        flock.primary.del(&format!("lock:k{n}"));
    }
    // The next round has them all, the first before the others.
    if let Some(asker) = asker {
        flock
            .primary
            .cmd(&["CLIENT", "KILL", "ID", &asker.to_string()]);
    }
    let error = told(timeout(BOUND, first).await.unwrap().unwrap());
    assert!(error.to_string().contains(": 1 of 2 replicas"), "{error}");
    for other in others {
        let error = told(timeout(BOUND, other).await.unwrap().unwrap());
        let said = error.to_string();
        assert!(
            said.contains("it was gone") || said.contains(": 1 of 2"),
            "{error}"
        );
    }
    flock.replicas[0].cont();
    flock.wait_until_empty().await;
}
