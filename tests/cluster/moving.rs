//! Slots that go from one primary to another.

use std::time::Instant;

use futures::future::join_all;
use lockstream::Lease;
use tokio::time::{sleep, timeout};

use crate::load::Load;
use crate::support::{Cluster, RedisServer, chain, on_a_steady_machine, wait_until};
use crate::{BOUND, BY_GRANT, builder, ms, nothing_left, queued};

/// How often the primaries have answered so.
pub(crate) fn errors(cluster: &Cluster, word: &str) -> u64 {
    let count = |server: &RedisServer| {
        let stats: String = server.ask(&["INFO", "errorstats"]);
        let begin = format!("errorstat_{word}:count=");
        let count = stats.lines().find_map(|line| line.strip_prefix(&begin));
        count.map_or(0, |count| count.trim().parse().unwrap())
    };
    cluster.primaries().iter().map(count).sum()
}

/// `MOVED`, `ASK` and `TRYAGAIN`, all of which a slot on its way answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_under_load() {
    let cluster = Cluster::without_replicas();
    let registries = [
        builder(&cluster).build().unwrap(),
        builder(&cluster).build().unwrap(),
    ];
    let (slot, from) = (cluster.slot("m"), cluster.home("m"));
    let to = (from + 1) % 3;
    let load = Load::on(
        &[&registries[0], &registries[1]],
        &["{m}:1", "{m}:2", "{m}:3", "{m}:4", "elsewhere"],
    );
    load.goes_on("locks are had").await;
    for (from, to) in [(from, to), (to, from), (from, to)] {
        cluster.begin_move(slot, from, to);
        // One by one, with all that is done meanwhile.
        for _ in 0..5 {
            cluster.move_keys(slot, from, to, 1);
            sleep(ms(20)).await;
        }
        while cluster.move_keys(slot, from, to, 100) > 0 {}
        cluster.end_move(slot, from, to);
        load.goes_on("locks are had again").await;
    }
    load.end().await;
    for word in ["MOVED", "TRYAGAIN"] {
        assert!(errors(&cluster, word) > 0, "nobody was answered {word}");
    }
    nothing_left(&cluster, &[&registries[0], &registries[1]]).await;
}

/// A lease is renewed and released, and a waiter served, wherever their slot is meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slot_moves_while_a_lock_is_held_and_waited_for() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let short = || builder(&cluster).ttl(ms(6000)).build().unwrap();
        let (here, there) = (short(), short());
        let (slot, from) = (cluster.slot("m"), cluster.home("m"));
        let to = (from + 1) % 3;
        let lease = here.obtain("{m}:k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("{m}:k").lease());
        queued(&here, "{m}:k").await;

        cluster.begin_move(slot, from, to);
        while cluster.move_keys(slot, from, to, 1) > 0 {}
        // All is there, but the slot: renewals are sent on by ASK.
        for _ in 0..3 {
            let before = lease.deadline();
            wait_until("it is renewed there", BOUND, || lease.deadline() > before).await;
        }
        assert!(errors(&cluster, "ASK") > 0, "nobody was answered ASK");
        cluster.end_move(slot, from, to);
        wait_until("the waiter listens there", BOUND, || {
            let channels: Vec<String> = cluster.server(to).ask(&["PUBSUB", "SHARDCHANNELS"]);
            !channels.is_empty()
        })
        .await;
        queued(&here, "{m}:k").await;
        lease.release().await.unwrap();
        let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
        next.unwrap().unwrap().release().await.unwrap();
        nothing_left(&cluster, &[&here, &there]).await;
    })
    .await;
}

/// A new connection proves itself by a script in some slot of its node. One that is being moved away has no place for
/// new names, and a node's first slots are what is moved first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_first_slot_is_being_moved_is_connected_to() {
    let cluster = Cluster::without_replicas();
    for (from, first) in [(0, 0), (1, 5462), (2, 10_923)] {
        cluster.begin_move(first, from, (from + 1) % 3);
    }
    let registry = builder(&cluster).build().unwrap();
    let mut seen = [false; 3];
    for key in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        let lease = registry.obtain(key).lease().await.unwrap();
        seen[cluster.home(&format!("lock:{key}"))] = true;
        lease.release().await.unwrap();
    }
    assert_eq!(seen, [true; 3], "each node has one of the locks");
    nothing_left(&cluster, &[&registry]).await;
}

/// While a slot stays half-way every script of several keys is refused there: a release frees the lock alone, and
/// who waits finds it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_released_while_its_slot_is_half_way() {
    on_a_steady_machine(async || {
        let answer_within = ms(8000);
        let cluster = Cluster::without_replicas();
        let registry = builder(&cluster)
            .response_timeout(answer_within)
            .build()
            .unwrap();
        let (slot, from) = (cluster.slot("m"), cluster.home("m"));
        let to = (from + 1) % 3;
        let lease = registry.obtain("{m}:k").lease().await.unwrap();
        cluster.begin_move(slot, from, to);
        cluster.move_key("lock:{m}:k", from, to);
        assert_eq!(cluster.server(to).keys("lock:{m}*").len(), 1, "it is there");

        let begin = Instant::now();
        lease.release().await.unwrap();
        // For half of that time the release is sent in full, and refused. Then it names the lock alone.
        assert!(begin.elapsed() < answer_within, "{:?}", begin.elapsed());
        assert_eq!(cluster.server(to).keys("lock:{m}*").len(), 0);
        // Which lasts, so that asking once does not help, and waiting does.
        let error = registry.obtain("{m}:k").acquire_once().await.unwrap_err();
        assert!(chain(&error).contains("TRYAGAIN"), "{error:?}");
        let refuses = cluster.server(from).port().to_string();
        assert!(chain(&error).contains(&refuses), "{error:?}");
        let refused = errors(&cluster, "TRYAGAIN");
        let patient = tokio::spawn(registry.obtain("{m}:k").lease());
        wait_until("it asks again and again", BOUND, || {
            errors(&cluster, "TRYAGAIN") > refused + 5
        })
        .await;
        assert!(!patient.is_finished());
        while cluster.move_keys(slot, from, to, 1) > 0 {}
        cluster.end_move(slot, from, to);
        let lease = timeout(BOUND, patient).await.unwrap().unwrap().unwrap();
        lease.release().await.unwrap();
        nothing_left(&cluster, &[&registry]).await;
    })
    .await;
}

/// Renewals share calls, and a call that names keys of both halves of the slot is refused as a whole: each then goes by
/// itself to where its key is, and no lease of many is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_leases_are_renewed_while_their_slot_is_half_way() {
    on_a_steady_machine(async || {
        const LEASES: usize = 200;
        let cluster = Cluster::without_replicas();
        // After a third of it there is time for all of them, one by one, also if a node stands still for 2 s.
        let ttl = ms(4500);
        let registry = builder(&cluster).ttl(ttl).build().unwrap();
        let (slot, from) = (cluster.slot("m"), cluster.home("m"));
        let to = (from + 1) % 3;
        let locks = (0..LEASES).map(|number| registry.obtain(format!("{{m}}:{number}")));
        let leases = join_all(locks.map(|lock| lock.lease())).await;
        let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();

        cluster.begin_move(slot, from, to);
        for number in (0..LEASES).step_by(2) {
            cluster.move_key(&format!("lock:{{m}}:{number}"), from, to);
        }
        let half_way = Instant::now();
        // A lease that is lost keeps its deadline.
        wait_until("all were renewed, twice at least", BOUND, || {
            let until = half_way + 2 * ttl;
            let is_renewed = |lease: &Lease| lease.deadline().into_std() > until;
            leases.iter().all(is_renewed) || !leases.iter().all(Lease::is_valid)
        })
        .await;
        let lost = leases.iter().filter(|lease| !lease.is_valid()).count();
        assert_eq!(lost, 0, "leases are lost");
        for word in ["TRYAGAIN", "ASK"] {
            assert!(errors(&cluster, word) > 0, "nobody was answered {word}");
        }
        for (at, count) in [(from, LEASES / 2), (to, LEASES / 2)] {
            assert_eq!(cluster.server(at).keys("lock:{m}:*").len(), count);
        }

        while cluster.move_keys(slot, from, to, 100) > 0 {}
        cluster.end_move(slot, from, to);
        for released in join_all(leases.into_iter().map(Lease::release)).await {
            released.unwrap();
        }
        nothing_left(&cluster, &[&registry]).await;
    })
    .await;
}
