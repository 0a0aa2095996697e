//! Connections to nodes that are lost, and when they are needed again.

use std::sync::atomic::Ordering::Relaxed;

use tokio::time::sleep;

use super::harness::{GONE, Harness, attempt, release, store};
use super::nodes::{Node, ms};
use super::subscriptions::Bare;
use crate::base::StoreError;
use crate::store::contract::{OpError, Outcome};

fn closed() -> StoreError {
    StoreError::new("closed")
}

/// Servers and proxies close connections on which nothing is said. The sessions with the nodes make none before the
/// next op, and no op was sent to a node that was taken for down: no lock was acquired ever again.
#[tokio::test(start_paused = true)]
async fn connections_lost_while_idle_are_made_again() {
    let mut bare = Bare::new(3);
    assert_eq!(bare.submit(attempt(1)).len(), 3);
    (0..3).for_each(|node| bare.answer(node, Ok(Outcome::Won { epoch: 5 })));
    (0..3).for_each(|node| bare.state.went_down(node, closed()));
    assert_eq!(
        bare.submit(attempt(2)),
        [],
        "before a session is started again"
    );
    // The lease of 1 is left to expire: nothing is sent about it.
    bare.state.start(bare.now);
    assert_eq!(bare.submit(attempt(3)).len(), 3);
    // While an operation is open, the sessions are connecting already.
    bare.answer(2, Err(OpError::Unsent(closed())));
    bare.state.start(bare.now);
    bare.submit(attempt(4));
    (0..2).for_each(|node| bare.answer(node, Err(OpError::Unsent(closed()))));
    assert_eq!(
        bare.sent(),
        [],
        "node 2 is down, and so are the others by now"
    );
    bare.state.start(bare.now);
    assert_eq!(bare.submit(attempt(5)).len(), 3);
}

/// O4: nobody of the registry waits for it, but a node that has the lock must hear of its release.
#[tokio::test(start_paused = true)]
async fn a_pending_release_needs_its_connection() {
    let nodes = Node::many(3);
    let harness = Harness::new(&store(&nodes), "a");
    harness.wins(1).await;
    sleep(ms(10)).await;
    harness.heard.is_idle.store(true, Relaxed);
    assert!(!nodes[2].is_used_by("a"));
    nodes[2].get_stuck();
    assert_eq!(harness.ask(release(1)).await.unwrap(), GONE);
    nodes[2].go_away();
    assert!(nodes[2].is_used_by("a"));
    nodes[2].come_back();
    sleep(ms(10)).await;
    assert!(!nodes[2].is_used_by("a"));
    assert_eq!(nodes[2].owner("k"), None);
}
