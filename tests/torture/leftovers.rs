//! What the judge finds in a cluster, wherever it lies.

use crate::deployments::Leftovers;
use crate::deployments::cluster::leftovers_in;
use crate::support::{Cluster, PATIENCE, wait_until_blocking};

const QUEUE: &str = "{torture:any-0}:~queue2";

/// A cluster with one entry in a queue, where the queue is, its replica, and another primary.
fn queued() -> (Cluster, u16, [usize; 3]) {
    let cluster = Cluster::start();
    cluster.let_replicas_stand_in(false);
    cluster.cmd(QUEUE, &["ZADD", QUEUE, "1", "ticket"]);
    let home = cluster.home(QUEUE);
    let places = [home, Cluster::other_of(home), (home + 1) % 3];
    wait_until_blocking("the replica has it", PATIENCE, || {
        cluster.server(places[1]).keys("*") == [QUEUE]
    });
    let slot = cluster.slot(QUEUE);
    (cluster, slot, places)
}

fn found(cluster: &Cluster) -> Leftovers {
    let mut found = leftovers_in(cluster);
    // Of the harness's own.
    found.connections.clear();
    found
}

fn one_entry() -> Leftovers {
    Leftovers {
        queue_entries: vec![format!("{QUEUE}: ticket")],
        ..Leftovers::default()
    }
}

/// It asked the replica for the queue that it saw there, and died of being sent on to the primary.
#[test]
fn a_queue_that_a_replica_has_too_is_found_once() {
    let (cluster, _, [_, replica, _]) = queued();
    let asked = cluster
        .server(replica)
        .try_cmd(&["ZRANGE", QUEUE, "0", "-1"]);
    assert_eq!(asked.unwrap_err().code(), Some("MOVED"));
    assert_eq!(found(&cluster), one_entry());
}

#[test]
fn a_queue_is_found_wherever_its_slot_goes() {
    let (cluster, slot, [from, _, to]) = queued();
    cluster.begin_move(slot, from, to);
    assert_eq!(found(&cluster), one_entry());
    // From now on `from` sends us on, for this once.
    cluster.move_key(QUEUE, from, to);
    assert_eq!(found(&cluster), one_entry());
    cluster.end_move(slot, from, to);
    assert_eq!(found(&cluster), one_entry());
}

/// Its slot stays where it was, or is served elsewhere: nobody will see the key there.
#[test]
fn a_key_that_a_slot_has_left_behind_is_told_as_such() {
    let (cluster, slot, [from, _, to]) = queued();
    cluster.begin_move(slot, from, to);
    cluster.move_key(QUEUE, from, to);
    for server in [to, from] {
        let slot = slot.to_string();
        let stable = ["CLUSTER", "SETSLOT", &slot, "STABLE"];
        cluster.server(server).cmd(&stable);
    }
    let text = format!("{QUEUE}: lies on server {to}, and server {from} serves it");
    let left = Leftovers {
        misplaced: vec![text],
        ..Leftovers::default()
    };
    assert_eq!(found(&cluster), left);
}
