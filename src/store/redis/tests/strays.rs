//! Subscriptions at nodes of a cluster at which nobody wants them any more.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::ring::{BOUND, Cluster, NODES};
use super::support::wait_until;
use crate::{Lease, LockError, LockRegistry};

/// For as long as a busy machine may take.
const LONG: Duration = Duration::from_secs(20);

type Waiter = JoinHandle<Result<Lease, LockError>>;

/// The lock is another's, who gives it to whoever stands for it when he is told to.
fn is_held(cluster: &Cluster, key: &str) {
    let lock = format!("lock:{key}");
    cluster.ring().locks.insert(lock, "other:1".to_owned());
}

fn waits(locks: &LockRegistry, key: &str) -> Waiter {
    tokio::spawn(locks.obtain(key).wait(LONG).lease())
}

async fn has_its_turn(cluster: &Cluster, key: &str, waiter: Waiter) {
    wait_until("it stands", LONG, || cluster.ring().is_waited_for(key)).await;
    assert!(cluster.ring().grant(key));
    let lease = timeout(LONG, waiter).await.expect("it is granted");
    lease.unwrap().unwrap().release().await.unwrap();
}

/// One in the same slot as `k`.
async fn has_another(locks: &LockRegistry) {
    let lease = timeout(LONG, locks.obtain("{lock:k}other").lease()).await;
    lease.unwrap().unwrap().release().await.unwrap();
}

/// A key and the node that has it. Somebody waited for it while its slot went on, and has had it there; now the slot is
/// back, and the node, which was slow, has yet to hear that its grants were wanted once.
async fn forgotten(cluster: &Cluster, locks: &LockRegistry) -> (&'static str, usize) {
    let key = "k";
    // All connections stand.
    let lease = timeout(LONG, locks.obtain(key).lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
    let home = cluster.ring().home_of(key);
    is_held(cluster, key);
    cluster.ring().slow = Some(home);
    let waiter = waits(locks, key);
    let is_asked = || cluster.ring().unheard() == ["SSUBSCRIBE"];
    wait_until("it wants to listen", LONG, is_asked).await;
    cluster.ring().move_slots(1);
    // Somebody else is told so.
    has_another(locks).await;
    has_its_turn(cluster, key, waiter).await;
    cluster.ring().move_slots(0);
    (key, home)
}

/// It was confirmed when nobody wanted it any more, and stayed for as long as the connection did: whoever has left was
/// taken for somebody who is there.
#[tokio::test]
async fn a_subscription_that_nobody_wants_when_it_is_confirmed_is_left() {
    let cluster = Cluster::start();
    let locks = cluster.registry();
    let (key, home) = forgotten(&cluster, &locks).await;
    cluster.ring().catch_up();
    assert_eq!(cluster.ring().ears(key), [home]);
    let is_left = || cluster.ring().ears(key).is_empty();
    wait_until("it is left", BOUND, is_left).await;
}

/// Who has left wants to listen again before the node has heard that it has: the one does not undo the other, and
/// neither costs the connection.
#[tokio::test]
async fn who_wants_it_again_before_it_is_left_hears() {
    let cluster = Cluster::start();
    let locks = cluster.registry();
    let (key, home) = forgotten(&cluster, &locks).await;
    let is_leaving = || cluster.ring().unheard() == ["SSUBSCRIBE", "SUNSUBSCRIBE"];
    wait_until("it leaves", BOUND, is_leaving).await;
    is_held(&cluster, key);
    let waiter = waits(&locks, key);
    let wants = || cluster.ring().unheard().last() == Some(&"SSUBSCRIBE");
    wait_until("it wants to listen again", LONG, wants).await;
    assert!(!cluster.ring().is_waited_for(key), "nothing is confirmed");
    cluster.ring().catch_up();
    has_its_turn(&cluster, key, waiter).await;
    assert_eq!(cluster.ring().ears(key), [home]);
    assert_eq!(cluster.ring().callers_of(home), 1, "none is made anew");
}

/// Somebody was told wrongly that its slot is elsewhere: the node that has it all the time ends nothing of itself.
#[tokio::test]
async fn a_subscription_that_a_wrong_map_made_us_forget_is_left() {
    let cluster = Cluster::start();
    let locks = cluster.registry();
    let key = "k";
    is_held(&cluster, key);
    let waiter = waits(&locks, key);
    has_its_turn(&cluster, key, waiter).await;
    let home = cluster.ring().home_of(key);
    assert_eq!(cluster.ring().ears(key), [home]);
    cluster.ring().lie = 1;
    // Whoever loses a connection asks where all is.
    cluster.ring().hang_up_at((home + 1) % NODES);
    while cluster.ring().astray == 0 {
        has_another(&locks).await;
    }
    cluster.ring().lie = 0;
    let is_left = || cluster.ring().ears(key).is_empty();
    wait_until("it is left", BOUND, is_left).await;
}

/// Whoever waited for that to be confirmed would have waited for ever, had it been taken for an answer.
#[tokio::test]
async fn an_answer_that_confirms_nothing_is_none() {
    let cluster = Cluster::start();
    let locks = cluster.registry();
    let key = "k";
    has_another(&locks).await;
    is_held(&cluster, key);
    cluster.ring().shrugs = true;
    let waiter = waits(&locks, key);
    has_its_turn(&cluster, key, waiter).await;
    assert!(!cluster.ring().shrugs);
}
