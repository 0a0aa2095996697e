//! What a majority has given: tokens, renewals, adoption.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::harness::{GONE, Harness, TTL, adopt, attempt, is_busy, keys, release, renew, store};
use super::nodes::{Node, ms, owners};
use crate::store::contract::{Op, OpError, Outcome, Owner, SubmittedOp};

/// A majority that is won in part from a node whose clock is far behind, and then in part from
/// others: without the raising of its fence the second would draw lower.
#[tokio::test(start_paused = true)]
async fn tokens_grow_whatever_majority_gives_them() {
    let nodes = Node::many(3);
    nodes[0].jump(Duration::from_secs(3600));
    let one = Harness::new(&store(&nodes), "a");
    let mut last = 0;
    for round in 0..30 {
        // Which one is away changes: any two majorities share one node alone.
        let away = &nodes[round % 3];
        away.go_away();
        let epoch = one.wins(round as u64 + 1).await;
        assert!(epoch > last, "round {round}");
        last = epoch;
        one.ask(release(round as u64 + 1)).await.unwrap();
        away.come_back();
    }
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_lost_when_a_majority_has_lost_it_and_not_before() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[0].jump(TTL);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
    // The first was given it again.
    assert_eq!(keys(&nodes), [1; 3]);
    nodes[1].jump(TTL);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
    nodes[0].jump(TTL);
    nodes[2].jump(TTL);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Lost);
    // What the others still had is released, and nobody gets it by a renewal.
    assert_eq!(keys(&nodes), [0; 3]);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Lost);
    assert_eq!(keys(&nodes), [0; 3]);
}

/// A node that has the lock on too few of its replicas may forget it by a fail-over, so it renews no lease: with another
/// away that had been a majority. At each renewal it is asked again whether they have it.
#[tokio::test(start_paused = true)]
async fn a_vote_that_too_few_replicas_know_counts_in_no_renewal() {
    let nodes = Node::many(3);
    nodes[2].set_lonely(true);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    sleep(ms(10)).await;
    assert_eq!(keys(&nodes), [1; 3]);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
    nodes[0].go_away();
    sleep(ms(10)).await;
    let error = one.ask(renew(1)).await.unwrap_err();
    assert!(matches!(error, OpError::Refused(_)), "{error:?}");
    assert!(
        error.store_error().to_string().contains("too few know it"),
        "{error:?}"
    );
    // They have it now.
    nodes[2].set_lonely(false);
    assert!(one.ask(renew(1)).await.is_err());
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
    assert!(nodes[2].done().contains(&renew(1)));
    nodes[0].come_back();
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
    sleep(ms(2_000)).await;
    assert_eq!(keys(&nodes), [0; 3]);

    // Nor does a majority of them win it, and all of it is released.
    nodes[1..].iter().for_each(|node| node.set_lonely(true));
    assert!(one.ask(attempt(2)).await.is_err());
    sleep(ms(10)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}

/// The answer of one was lost: whether its replicas have the lock nobody has heard, so it counts no sooner than they do.
#[tokio::test(start_paused = true)]
async fn a_vote_whose_reply_was_lost_counts_in_no_renewal_until_it_is_confirmed() {
    let nodes = Node::many(3);
    nodes[2].set_lonely(true);
    let one = Harness::new(&store(&nodes), "a");
    nodes[2].set_faults(1, 1000, 0);
    one.wins(1).await;
    sleep(ms(10)).await;
    nodes[2].set_faults(1, 0, 0);
    nodes[2].come_back();
    sleep(ms(10)).await;
    nodes[0].go_away();
    sleep(ms(10)).await;
    assert!(one.ask(renew(1)).await.is_err());
    assert!(one.ask(renew(1)).await.is_err());
    nodes[2].set_lonely(false);
    assert!(one.ask(renew(1)).await.is_err(), "they are asked by it");
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
}

/// One node has released it already when the other confirms the renewal: it was given to the first
/// once more, and to nobody's use (found by the simulator).
#[tokio::test(start_paused = true)]
async fn a_renewal_that_a_release_overtakes_gives_nothing_to_anybody() {
    let nodes = Node::many(2);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[1].set_delay(ms(100));
    one.session.submit(SubmittedOp::unattended("k", renew(1)));
    one.session.submit(SubmittedOp::unattended("k", release(1)));
    assert_eq!(one.answer().await.unwrap(), Outcome::Renewed);
    assert_eq!(one.answer().await.unwrap(), GONE);
    sleep(ms(500)).await;
    assert_eq!(keys(&nodes), [0; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_can_be_told_neither_way_changes_nothing() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[0].jump(TTL);
    nodes[1].set_faults(1, 0, 1000);
    assert!(matches!(one.ask(renew(1)).await, Err(OpError::Refused(_))));
    nodes[1].set_faults(1, 0, 0);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
}

#[tokio::test(start_paused = true)]
async fn an_adoption_needs_a_majority_and_is_retried_while_an_absent_node_may_decide() {
    let nodes = Node::many(3);
    let store = store(&nodes);
    let (one, two) = (Harness::new(&store, "a"), Harness::new(&store, "b"));
    nodes[1].go_away();
    let first = one.wins(1).await;
    nodes[1].come_back();
    nodes[0].go_away();
    assert!(matches!(
        two.ask(adopt(1, "a:1")).await,
        Err(OpError::Refused(_))
    ));
    nodes[0].come_back();
    let Outcome::Won { epoch } = two.ask(adopt(1, "a:1")).await.unwrap() else {
        panic!("the majority has it")
    };
    assert!(epoch > first);
    assert_eq!(one.ask(adopt(2, "a:1")).await.unwrap(), Outcome::NotOld);
    assert_eq!(owners(&nodes, "k").into_iter().collect::<Vec<_>>(), ["b:1"]);
    assert_eq!(two.ask(release(1)).await.unwrap(), GONE);
    assert_eq!(keys(&nodes), [0; 3]);
}

/// A node that is away is told when it is back, of what is left by then. With the other two it has kept the key until
/// then; none of them keeps it longer.
#[tokio::test(start_paused = true)]
async fn m8_a_majority_keeps_a_key() {
    let nodes = Node::many(3);
    let (one, two) = (
        Harness::new(&store(&nodes), "a"),
        Harness::new(&store(&nodes), "b"),
    );
    one.wins(1).await;
    sleep(ms(10)).await;
    nodes[2].go_away();
    let keep = |left| Op::Keep {
        owner: Owner::exclusive(1),
        left: ms(left),
    };
    let begin = Instant::now();
    assert_eq!(one.ask(keep(6000)).await.unwrap(), GONE);
    sleep(ms(2000)).await;
    nodes[2].come_back();
    sleep(ms(100)).await;
    let told = nodes[2].done().into_iter().rev();
    let mut told = told.filter_map(|op| match op {
        Op::Keep { left, .. } => Some(left),
        _ => None,
    });
    let left = told.next().expect("it is told");
    assert!(left <= ms(4000) && left > ms(3800), "{left:?}");
    assert_eq!(keys(&nodes), [1; 3]);
    // The answer was lost: asked again it is nobody's, and its end stays.
    assert_eq!(
        one.ask(keep(60_000)).await.unwrap(),
        Outcome::Gone { held: false }
    );
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Lost);
    assert!(is_busy(&two.attempt(1).await));
    sleep(ms(5990).saturating_sub(begin.elapsed())).await;
    assert!(is_busy(&two.attempt(2).await));
    sleep(ms(50)).await;
    two.wins(3).await;
}
