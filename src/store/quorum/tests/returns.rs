//! What was won for nobody is released, however late it is known.

use tokio::time::{Instant, sleep};

use super::harness::{GONE, Harness, TTL, attempt, is_busy, keys, release, store};
use super::nodes::{Node, ms};
use crate::store::contract::{StoreEvent, SubmittedOp};

#[tokio::test(start_paused = true)]
async fn a_slow_node_is_not_waited_for_and_its_late_vote_is_given_back() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    nodes[2].set_delay(ms(900));
    let begin = Instant::now();
    one.wins(1).await;
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
    assert!(Instant::now() - begin < ms(10));
    sleep(ms(4000)).await;
    assert_eq!(keys(&nodes), [0; 3]);
    assert_eq!(nodes[2].done(), [attempt(1), release(1)]);
}

/// Two against one, and the one answers last: it is busy at once, and the late vote goes.
#[tokio::test(start_paused = true)]
async fn a_vote_that_is_won_after_the_verdict_is_given_back() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", TTL);
    }
    nodes[2].set_delay(ms(900));
    let one = Harness::new(&store(&nodes), "a");
    let begin = Instant::now();
    assert!(is_busy(&one.attempt(1).await));
    assert_eq!(Instant::now(), begin);
    sleep(ms(4000)).await;
    assert_eq!(keys(&nodes), [1, 1, 0]);
    // What has refused is not asked again.
    assert_eq!(nodes[0].done(), [attempt(1)]);
    assert_eq!(nodes[2].done(), [attempt(1), release(1)]);
}

/// The connection breaks under the vote, and the node is away for a while.
#[tokio::test(start_paused = true)]
async fn a_vote_whose_reply_was_lost_is_given_back_when_the_node_is_back() {
    let mut kept = 0;
    for seed in 0..20 {
        let nodes = Node::many(3);
        for node in &nodes[..2] {
            node.seize("k", ms(500));
        }
        nodes[2].set_faults(seed, 0, 0);
        nodes[2].set_delay(ms(100));
        let one = Harness::new(&store(&nodes), "a");
        assert!(is_busy(&one.attempt(1).await));
        sleep(ms(40)).await;
        nodes[2].go_away();
        sleep(ms(2000)).await;
        kept += nodes[2].keys();
        nodes[2].come_back();
        sleep(ms(300)).await;
        assert_eq!(keys(&nodes), [0; 3]);
    }
    assert!((1..20).contains(&kept), "{kept} of 20 were done");
}

/// After which a new attempt of the same owner stands for it: the old release must not take it away.
#[tokio::test(start_paused = true)]
async fn a_pending_release_does_not_take_the_next_attempt_away() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(100));
    }
    let one = Harness::new(&store(&nodes), "a");
    nodes[2].set_delay(ms(20));
    one.session.submit(SubmittedOp::unattended("k", attempt(1)));
    assert!(is_busy(&one.answer().await.unwrap()));
    while nodes[2].keys() == 0 {
        sleep(ms(1)).await;
    }
    nodes[2].set_faults(1, 0, 1000);
    sleep(ms(100)).await;
    assert_eq!(nodes[2].keys(), 1, "the release was refused");
    nodes[2].set_faults(1, 0, 0);
    nodes[2].set_delay(ms(0));
    one.wins(1).await;
    sleep(ms(2000)).await;
    assert_eq!(keys(&nodes), [1; 3]);
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
}

/// The same where the attempt stands behind the release when that is refused: it was sent again, and
/// took away the vote of one who held by then (found by the simulator).
#[tokio::test(start_paused = true)]
async fn a_release_that_is_refused_before_the_next_attempt_is_not_pending() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(1));
    }
    nodes[2].set_delay(ms(50));
    let one = Harness::new(&store(&nodes), "a");
    nodes[2].refuse_release();
    assert!(is_busy(&one.attempt(1).await));
    while nodes[2].keys() == 0 {
        sleep(ms(1)).await;
    }
    one.wins(1).await;
    sleep(ms(2000)).await;
    assert_eq!(keys(&nodes), [1; 3]);
    assert_eq!(nodes[2].done()[1], attempt(1));
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_is_refused_is_sent_again() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    for node in &nodes[..2] {
        node.set_faults(1, 0, 1000);
    }
    one.session.submit(SubmittedOp::unattended("k", release(1)));
    sleep(ms(600)).await;
    assert!(
        one.take()
            .iter()
            .all(|event| !matches!(event, StoreEvent::Replied { .. }))
    );
    for node in &nodes {
        node.set_faults(1, 0, 0);
    }
    assert_eq!(one.answer().await.unwrap(), GONE);
    sleep(ms(600)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}

/// Neither will ever tell: one is away, the other says no. The registry waits for an answer before
/// it asks for the key again.
#[tokio::test(start_paused = true)]
async fn a_release_that_no_majority_will_confirm_is_answered_once_all_has_run_out() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[0].go_away();
    nodes[1].refuse_releases_for_good();
    assert!(one.ask(release(1)).await.is_err());
}

/// Its connection is gone, and the votes that it gave meanwhile go as soon as they come in.
#[tokio::test(start_paused = true)]
async fn a_dropped_session_releases_late_votes() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(10));
    }
    nodes[2].set_delay(ms(400));
    let one = Harness::new(&store(&nodes), "a");
    assert!(is_busy(&one.attempt(1).await));
    drop(one);
    sleep(ms(2500)).await;
    assert_eq!(keys(&nodes), [0; 3]);
    assert_eq!(nodes[2].done(), [attempt(1), release(1)]);
}

/// The same where the connection to the node is being made again just then (found by the simulator).
#[tokio::test(start_paused = true)]
async fn a_session_that_is_dropped_waits_a_while_for_a_node_that_is_away() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[2].go_away();
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
    drop(one);
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0, 0, 1]);
    nodes[2].come_back();
    assert_eq!(keys(&nodes), [0; 3]);
}
