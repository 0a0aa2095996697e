//! Ops that the session of a node loses.

use std::time::Duration;

use tokio::time::{sleep, timeout};

use super::harness::{GONE, Harness, attempt, keys, listen, release, renew, store};
use super::nodes::{Node, ms};
use crate::base::Renewal;
use crate::handle::LockRegistry;
use crate::store::contract::{Op, OpError, Outcome, SubmittedOp, dropped_error};

/// Asks, while the sessions of so many nodes lose an op each.
async fn ask(harness: &Harness, nodes: &[Node], op: Op) -> Result<Outcome, OpError> {
    nodes.iter().for_each(|node| node.set_drops(1));
    harness.session.submit(SubmittedOp::unattended("k", op));
    // As its registry's timer does.
    harness.session.start();
    timeout(ms(1000), harness.answer())
        .await
        .expect("an answer")
}

#[tokio::test(start_paused = true)]
async fn a_majority_of_lost_questions_is_an_answer() {
    let nodes = Node::many(3);
    let harness = Harness::new(&store(&nodes), "a");
    match ask(&harness, &nodes[..2], attempt(1)).await {
        Err(OpError::Refused(error)) => {
            assert!(
                error.to_string().contains(&dropped_error().to_string()),
                "{error}"
            );
        }
        other => panic!("{other:?}"),
    }
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0; 3], "what one node gave is given back");
    // No node is taken to be away.
    harness.wins(2).await;
    assert_eq!(keys(&nodes), [1; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_minority_of_lost_ops_costs_nothing() {
    let nodes = Node::many(3);
    let harness = Harness::new(&store(&nodes), "a");
    let won = ask(&harness, &nodes[..1], attempt(1)).await;
    assert!(matches!(won, Ok(Outcome::Won { .. })), "{won:?}");
    // The first node is asked once more whether it has the lock.
    assert_eq!(harness.ask(renew(1)).await.unwrap(), Outcome::Renewed);
    let renewed = ask(&harness, &nodes[1..2], renew(1)).await;
    assert_eq!(renewed.unwrap(), Outcome::Renewed);
    assert_eq!(ask(&harness, &nodes[2..], release(1)).await.unwrap(), GONE);
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0; 3]);
    let listens = ask(&harness, &nodes[..1], listen(2)).await;
    assert!(matches!(listens, Ok(Outcome::Won { .. })), "{listens:?}");
    harness.ask(release(2)).await.unwrap();
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_lost_release_is_sent_again_whatever_the_connection_does() {
    let nodes = Node::many(3);
    let harness = Harness::new(&store(&nodes), "a");
    harness.wins(1).await;
    assert_eq!(ask(&harness, &nodes, release(1)).await.unwrap(), GONE);
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_registry_goes_on_whatever_its_nodes_sessions_lose() {
    let nodes = Node::many(3);
    let locks = LockRegistry::builder(store(&nodes));
    let locks = locks.renewal(Renewal::watchdog()).build().unwrap();
    let lose = |drops| nodes.iter().for_each(|node| node.set_drops(drops));
    for _ in 0..3 {
        lose(2);
        let lease = locks.obtain("k").lease().await.expect("it is free");
        let deadline = lease.deadline();
        lose(1);
        sleep(Duration::from_secs(13)).await;
        assert!(lease.deadline() > deadline);
        lose(1);
        lease.release().await.expect("it was held");
    }
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}
