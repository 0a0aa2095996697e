//! A cluster whose nodes send on whoever asks what replicas have: in turns, for ever, and to somebody else each time.
//! Whoever waits for that is told in time, what is not proved is given back, and nothing is asked for after that.

use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::time::timeout;

use super::ring::Proof::{self, Ask, Down, Forgotten, Moved, Silence, Truth, TryAgain};
use super::ring::To::{Elsewhere, Next, Nobody, Own};
use super::ring::{Asked, BOUND, Cluster, NODES};
use super::support::wait_until;
use crate::store::redis::cluster::{STRANGERS, Seeds};
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::replicas;
use crate::store::redis::session::Place;

/// How long the replicas of one that lies have.
const WITHIN: Duration = Duration::from_millis(150);
/// And where they have it all in the end, for as long as a busy machine may take.
const LONG: Duration = Duration::from_secs(20);

/// Sent on, put off and sent back it is proved nevertheless, at each place as that place wants to be asked.
#[tokio::test]
async fn what_is_sent_on_in_turns_is_proved_in_the_end() {
    let cluster = Cluster::start();
    let locks = cluster.locks(LONG, BOUND);
    let cases: [(&[Proof], &[Asked]); 7] = [
        (
            &[Ask(Next), TryAgain, Moved(Next), Truth],
            &[(0, false), (1, true), (0, false), (1, false)],
        ),
        (
            &[Moved(Next), Moved(Next), Ask(Next), Truth],
            &[(0, false), (1, false), (2, false), (0, true)],
        ),
        (
            &[Down, Forgotten, TryAgain, Ask(Own), Truth],
            &[(0, false), (0, false), (0, false), (0, false), (0, true)],
        ),
        (&[Moved(Nobody), Truth], &[(0, false); 2]),
        (&[Ask(Nobody), Truth], &[(0, false); 2]),
        (&[Ask(Elsewhere), Truth], &[(0, false), (0, true)]),
        // Longer than it is sent on at once.
        (
            &[
                Moved(Next),
                Ask(Next),
                Moved(Next),
                Ask(Next),
                Moved(Next),
                Ask(Next),
                Truth,
            ],
            &[
                (0, false),
                (1, false),
                (2, true),
                (0, false),
                (1, true),
                (2, false),
                (0, true),
            ],
        ),
    ];
    let all = cases
        .iter()
        .zip(0..)
        .map(async |((proofs, expected), number)| {
            let key = format!("k{number}");
            cluster.lies(&key, proofs);
            let lease = timeout(LONG, locks.obtain(&key).lease()).await.unwrap();
            let lease = lease.unwrap_or_else(|error| panic!("{proofs:?}: {error}"));
            assert_eq!(cluster.asked(&key), *expected, "{proofs:?}");
            assert!(cluster.is_held(&key), "{proofs:?}");
            lease.release().await.unwrap();
            assert_eq!(cluster.given_back(&key), 1, "{proofs:?}");
        });
    join_all(all).await;
    cluster.is_quiet(&locks).await;
}

/// Its caller is told in time and why, others have theirs meanwhile, and it is given back once.
#[tokio::test]
async fn what_is_sent_on_for_ever_is_given_back_in_time() {
    let cases: [(&[Proof], &str); 10] = [
        (&[Moved(Next)], "MOVED"),
        (&[Moved(Own)], "MOVED"),
        (&[Moved(Elsewhere)], "MOVED"),
        (&[Moved(Nobody)], ""),
        (&[Ask(Next)], "ASK"),
        (&[Ask(Own)], "ASK"),
        (&[TryAgain], "TRYAGAIN"),
        (&[Down], "CLUSTERDOWN"),
        (&[Forgotten], "NOSCRIPT"),
        (&[Ask(Next), TryAgain, Moved(Next)], ""),
    ];
    let all = cases.map(async |(proofs, reason)| {
        let cluster = Cluster::start();
        let locks = cluster.locks(WITHIN, BOUND);
        // All connections stand.
        let others: Vec<_> = (0..6).map(|number| format!("other{number}")).collect();
        let leases = async || {
            let leases = others.iter().map(|key| locks.obtain(key).lease());
            for lease in join_all(leases).await {
                lease.unwrap().release().await.unwrap();
            }
        };
        timeout(BOUND, leases()).await.unwrap();
        cluster.lies("k", proofs);
        let begun = Instant::now();
        let asks = async {
            let told = locks.obtain("k").lease_once().await;
            (told, begun.elapsed())
        };
        let ((told, passed), ()) = futures::join!(asks, leases());
        let error = told.expect_err("nobody proves it").to_string();
        assert!(error.contains("given back"), "{proofs:?}: {error}");
        assert!(error.contains(reason), "{proofs:?}: {error}");
        assert!(passed >= WITHIN && passed < BOUND, "{proofs:?}: {passed:?}");
        cluster.is_quiet(&locks).await;
        assert_eq!(cluster.given_back("k"), 1, "{proofs:?}");
        // A few times at once, and then every 20 ms.
        let asked = cluster.asked("k").len();
        assert!((1..=14).contains(&asked), "{proofs:?}: asked {asked} times");
    });
    join_all(all).await;
}

/// A node that has gone mute: nobody waits for it alone, and what was asked of it is given back.
#[tokio::test]
async fn what_nobody_answers_is_given_back() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, Duration::from_millis(300));
    let warm = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    warm.unwrap().release().await.unwrap();
    cluster.lies("k", &[Silence]);
    let told = timeout(BOUND, locks.obtain("k").lease_once()).await;
    assert!(told.unwrap().is_err());
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 2);
    cluster.lies("k", &[Truth]);
    let lease = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
}

/// Nobody says whom to ask: what was won is given back, and had as soon as somebody says it.
#[tokio::test]
async fn what_nobody_can_be_asked_for_does_not_wait_for_ever() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, Duration::from_millis(200));
    cluster.ring().hides = true;
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is given back", BOUND, || cluster.given_back("k") > 0).await;
    assert_eq!(cluster.asked("k"), []);
    cluster.ring().hides = false;
    let lease = timeout(BOUND, asking).await.expect("it ends").unwrap();
    lease.unwrap().release().await.unwrap();
    cluster.is_quiet(&locks).await;
}

/// Each names another that nobody has heard of, with each answer: they are not all connected to, and those that no map
/// names are forgotten, and make room for others.
#[tokio::test]
async fn no_more_strangers_are_asked_for_proofs_than_a_few() {
    const MANY: usize = 200;
    let all = [Moved(Elsewhere), Ask(Elsewhere)].map(async |proof| {
        let cluster = Cluster::start();
        let locks = cluster.locks(2 * WITHIN, BOUND);
        let keys: Vec<_> = (0..MANY).map(|number| number.to_string()).collect();
        keys.iter().for_each(|key| cluster.lies(key, &[proof]));
        // On a busy machine they may have no time to make room.
        for round in 1..20 {
            let told = keys.iter().map(|key| locks.obtain(key).lease_once());
            for told in timeout(BOUND, join_all(told)).await.unwrap() {
                assert!(told.is_err(), "{proof:?}: {told:?}");
            }
            cluster.is_quiet(&locks).await;
            let ring = cluster.ring();
            assert_eq!(ring.given_back.len(), round * MANY);
            if ring.all_strangers > 2 * STRANGERS {
                break;
            }
        }
        let ring = cluster.ring();
        let (most, all) = (ring.most_strangers, ring.all_strangers);
        assert!(all > 2 * STRANGERS, "{proof:?}: {all} connections in all");
        // Those that end just now are counted with those that are made for the next.
        assert!(most <= 3 * STRANGERS, "{proof:?}: {most} at once");
    });
    join_all(all).await;
}

/// A turn that was granted is proved like any other: in vain it goes to whoever is next, and whoever waited asks again.
#[tokio::test]
async fn a_grant_that_is_sent_on_for_ever_is_given_back() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    let held = (String::from("lock:k"), String::from("other:1"));
    cluster.ring().locks.extend([held]);
    cluster.lies("k", &[Ask(Next), TryAgain, Moved(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is granted", BOUND, || cluster.ring().grant("k")).await;
    wait_until("it is given back", BOUND, || cluster.given_back("k") > 0).await;
    wait_until("and again", BOUND, || cluster.given_back("k") > 1).await;
    cluster.lies("k", &[Truth]);
    let lease = timeout(BOUND, asking).await.expect("it ends").unwrap();
    lease.unwrap().release().await.unwrap();
    cluster.is_quiet(&locks).await;
}

/// What goes with the connection by which it was won is not asked for any more, and proved anew by the next.
#[tokio::test]
async fn what_is_sent_on_while_the_connection_breaks_is_proved_by_the_next() {
    let cluster = Cluster::start();
    let locks = cluster.locks(LONG, BOUND);
    cluster.lies("k", &[Moved(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || cluster.asked("k").len() > 4).await;
    {
        let mut ring = cluster.ring();
        ring.proofs.clear();
        ring.hang_up();
    }
    let lease = timeout(BOUND, asking).await.expect("it ends").unwrap();
    lease.unwrap().release().await.unwrap();
    assert_eq!(cluster.given_back("k"), 1);
    cluster.is_quiet(&locks).await;
}

#[tokio::test]
async fn whoever_goes_while_it_is_sent_on_leaves_nothing() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    cluster.lies("k", &[Ask(Next), Moved(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || !cluster.asked("k").is_empty()).await;
    asking.abort();
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 1);
}

#[tokio::test]
async fn a_shutdown_ends_what_is_sent_on_for_ever() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    cluster.lies("k", &[Moved(Next), Ask(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || !cluster.asked("k").is_empty()).await;
    timeout(BOUND, locks.shutdown()).await.expect("it ends");
    assert!(asking.await.unwrap().is_err());
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 1);
}

fn place(cluster: &Cluster) -> Place {
    let urls = Seeds::split(&cluster.url()).expect("it is a cluster's");
    let endpoints = urls.iter().map(|url| Endpoint::parse(url).unwrap());
    Place::Cluster(Seeds::new(endpoints.collect()).unwrap())
}

/// One primary that lets us wait is enough, whoever is mute, or lets nobody: none is waited for before another.
#[tokio::test]
async fn a_primary_that_never_answers_holds_up_no_connect() {
    for able in 0..NODES {
        let cluster = Cluster::start();
        for (index, answer) in [(1, ""), (2, NO_RIGHT)] {
            let node = (able + index) % NODES;
            cluster.ring().waits.insert(node, answer);
        }
        let place = place(&cluster);
        let told = timeout(BOUND, replicas::try_out(&place, 10 * BOUND)).await;
        assert!(matches!(told, Ok(Ok(()))), "{able}: {told:?}");
    }
}

const NO_RIGHT: &str = "-NOPERM User x has no permissions to run the 'wait' command\r\n";

/// As long as it was told, and no longer for each of them; who said why is named, before those who said nothing.
#[tokio::test]
async fn if_no_primary_lets_us_wait_it_is_told_in_time() {
    let within = Duration::from_millis(800);
    let try_out = async |waits: [&'static str; NODES]| {
        let cluster = Cluster::start();
        cluster.ring().waits.extend((0..).zip(waits));
        let begun = Instant::now();
        let fault = replicas::try_out(&place(&cluster), within).await;
        let passed = begun.elapsed();
        let fault = fault.expect_err("nobody lets us");
        assert_eq!(cluster.ring().told_to_wait.len(), NODES, "all are asked");
        let ports: Vec<_> = cluster.ports();
        let node = ports
            .iter()
            .position(|port| fault.to_string().contains(&format!(":{port} ")));
        (fault, node, passed)
    };
    let loading = "-LOADING Redis is loading the dataset in memory\r\n";
    let all = [
        (["", "", ""], None, "within 800ms"),
        (["", NO_RIGHT, ""], Some(1), "'wait'"),
        ([loading, "", NO_RIGHT], Some(2), "'wait'"),
        (["", "", loading], Some(2), "loading"),
        ([NO_RIGHT, loading, loading], Some(0), "'wait'"),
    ];
    let all = all.map(async |(waits, expected, reason)| {
        let (fault, node, passed) = try_out(waits).await;
        assert!(fault.to_string().contains(reason), "{waits:?}: {fault}");
        assert_eq!(fault.is_lasting(), waits.contains(&NO_RIGHT), "{fault}");
        assert!(node.is_some(), "{fault}");
        assert!(expected.is_none() || node == expected, "{node:?}: {fault}");
        let is_mute = waits.contains(&"");
        assert!(!is_mute || passed >= within, "{waits:?}: {passed:?}");
        assert!(passed < 2 * within + within / 2, "{waits:?}: {passed:?}");
    });
    join_all(all).await;
}
