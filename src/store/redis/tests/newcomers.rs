//! A node that gets its first slots: redirects name it before any map does.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::ring::{BOUND, Cluster, NODES};
use super::support::wait_until;
use crate::{Lease, LockError, LockRegistry};

/// For as long as a busy machine may take.
const LONG: Duration = Duration::from_secs(20);

/// Nobody is waited for longer, so that a search for the map in vain is over soon.
const RESPONSE: Duration = Duration::from_millis(400);

const NEWCOMER: usize = NODES - 1;

/// A key at a node that has its slot all the time.
const OTHER: &str = "other1";

/// A key that will be the newcomer's.
fn key(cluster: &Cluster) -> String {
    let ring = cluster.ring();
    assert_eq!(ring.home_of(OTHER), 0);
    let mut keys = (0..).map(|number| format!("k{number}"));
    keys.find(|key| ring.home_of(key) == NEWCOMER).unwrap()
}

/// All nodes but one are connected to, which has its slots now; no map says so until one is shown. With a key that is
/// there now, and another's.
async fn grown(response: Duration) -> (Cluster, LockRegistry, String) {
    let cluster = Cluster::start();
    let key = key(&cluster);
    cluster.ring().has_spare = true;
    let locks = cluster.registry_within(response);
    has_another(&locks).await;
    let lock = format!("lock:{key}");
    let mut ring = cluster.ring();
    ring.locks.insert(lock, "other:1".to_owned());
    ring.hides = true;
    ring.has_spare = false;
    drop(ring);
    (cluster, locks, key)
}

/// At a node that is there all the time.
async fn has_another(locks: &LockRegistry) {
    let lease = timeout(LONG, locks.obtain(OTHER).lease()).await;
    lease.unwrap().unwrap().release().await.unwrap();
}

fn waits(locks: &LockRegistry, key: &str) -> JoinHandle<Result<Lease, LockError>> {
    tokio::spawn(locks.obtain(key).wait(LONG).lease())
}

async fn has_its_turn(cluster: &Cluster, key: &str, waiter: JoinHandle<Result<Lease, LockError>>) {
    let stands = || waiter.is_finished() || cluster.ring().is_waited_for(key);
    wait_until("it stands", LONG, stands).await;
    assert!(!waiter.is_finished(), "{:?}", waiter.await);
    assert!(cluster.ring().grant(key));
    let lease = timeout(LONG, waiter).await.expect("it is granted");
    lease.unwrap().unwrap().release().await.unwrap();
}

/// It was put off for an hour when it could not be connected to, as nobody had need of it; until somebody came, it was
/// not tried again, and nobody who had lost something elsewhere was told that all is up.
#[tokio::test]
async fn one_that_was_given_up_is_connected_to_when_a_map_names_it() {
    let (cluster, locks, key) = grown(RESPONSE).await;
    cluster.ring().refuses = Some(NEWCOMER);
    let lost = locks.obtain(&*key).wait(RESPONSE / 2).lease().await;
    assert!(lost.is_err());
    // By then its op has ended, too.
    sleep(RESPONSE).await;
    cluster.ring().refuses = None;
    cluster.ring().shows();
    let is_probed = || cluster.ring().probed.contains(&NEWCOMER);
    wait_until("it is connected to", 2 * BOUND, is_probed).await;
}

/// Its connection was made without ears, and was kept when the map came while it was made: whoever waited there asked
/// again and again, for as long as it stood.
#[tokio::test]
async fn one_that_is_connected_to_when_a_map_names_it_gets_ears() {
    let (cluster, locks, key) = grown(4 * BOUND).await;
    cluster.ring().ponders = Some(NEWCOMER);
    let waiter = waits(&locks, &key);
    let is_asked = || cluster.ring().keeps_waiting();
    wait_until("it is connected to", LONG, is_asked).await;
    cluster.ring().shows();
    // The map is there when somebody else has been served since.
    has_another(&locks).await;
    cluster.ring().ponders_no_more();
    has_its_turn(&cluster, &key, waiter).await;
}
