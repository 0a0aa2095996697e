//! Who is elected, by which nodes, and what a registry hears of them.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, advance, sleep};

use super::harness::{
    GONE, Harness, Recorder, TTL, attempt, config, is_busy, keys, release, renew, store,
};
use super::nodes::{Node, ms};
use crate::base::Repeat;
use crate::handle::LockRegistry;
use crate::store::contract::{Op, OpError, Outcome, Owner, Session, StoreEvent, SubmittedOp};
use crate::store::quorum::quarantine::Quarantine;
use crate::store::quorum::session::QuorumSession;
use crate::store::{LockStore, MemoryStore, QuorumStore};

#[test]
fn a_quorum_without_nodes_is_an_error() {
    let error = QuorumStore::new(Vec::<Node>::new()).unwrap_err();
    assert!(!error.is_retryable());
}

/// It was taken for three nodes, which all voted alike; then one of them gave the lock back, two had none, and every
/// release was told as a loss.
#[test]
fn one_store_is_not_two_nodes() {
    let (one, other) = (MemoryStore::new(), MemoryStore::new());
    for nodes in [
        vec![one.clone(), other.clone(), one.clone()],
        vec![one.clone(); 3],
    ] {
        let error = QuorumStore::new(nodes).unwrap_err();
        assert!(!error.is_retryable() && error.to_string().contains("memory store"));
    }
    assert!(QuorumStore::new([one.clone(), other.clone()]).is_ok());
    let mixed: [Arc<dyn LockStore>; 2] = [Arc::new(one.clone()), Arc::new(one)];
    assert!(QuorumStore::new(mixed).is_err());
}

#[cfg(feature = "redis")]
#[test]
fn one_server_is_not_two_nodes() {
    let quorum = |urls: &[&str]| {
        let nodes = urls
            .iter()
            .map(|url| crate::store::RedisStore::connect_lazy(*url));
        QuorumStore::new(nodes.map(Result::unwrap))
    };
    for urls in [
        [
            "redis://10.0.0.1/",
            "redis://10.0.0.2/",
            "redis://10.0.0.1/",
        ],
        [
            "redis://10.0.0.1/",
            "redis://a:secret@10.0.0.1:6379/3",
            "redis://10.0.0.2/",
        ],
        ["unix:///a?pass=secret", "unix:///b", "unix:///a?db=1"],
    ] {
        let error = quorum(&urls).unwrap_err();
        let text = error.to_string();
        assert!(!error.is_retryable() && text.contains("Redis at"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
    assert!(quorum(&["redis://10.0.0.1/", "redis://10.0.0.1:6380/"]).is_ok());
}

#[tokio::test(start_paused = true)]
async fn any_number_of_nodes_elects_one_holder() {
    for size in 1..=7 {
        let nodes = Node::many(size);
        let store = store(&nodes);
        let (one, two) = (Harness::new(&store, "a"), Harness::new(&store, "b"));
        let first = one.wins(1).await;
        assert!(is_busy(&two.attempt(1).await));
        assert_eq!(keys(&nodes), vec![1; size]);
        assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
        assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
        assert_eq!(keys(&nodes), vec![0; size]);
        assert!(two.wins(1).await > first, "tokens grow");
    }
}

/// The registry learns that there is no queue before it hears that it must wait.
#[tokio::test(start_paused = true)]
async fn that_there_is_no_queue_is_told_first() {
    let nodes = Node::many(3);
    for node in &nodes {
        node.seize("k", TTL);
    }
    let one = Harness::new(&store(&nodes), "a");
    let (owner, ttl, score) = (Owner::exclusive(1), TTL, None);
    one.session.submit(SubmittedOp::unattended(
        "k",
        Op::Enter { owner, ttl, score },
    ));
    let event = one.take();
    assert!(
        matches!(event[0], StoreEvent::Up { queue: false, .. }),
        "{event:?}"
    );
    let StoreEvent::Replied { result, .. } = &event[1] else {
        panic!("{event:?}")
    };
    assert!(is_busy(&result.as_ref().unwrap().outcome));
    assert_eq!(
        one.ask(Op::Unlisten { owner }).await.unwrap(),
        Outcome::Gone { held: false }
    );
    let yields = Op::Yield {
        old: Owner::exclusive(1),
        new: Owner::exclusive(2),
        ttl,
    };
    assert!(matches!(one.ask(yields).await, Err(OpError::Refused(_))));
}

/// Every minority may be away, and no majority.
#[tokio::test(start_paused = true)]
async fn as_many_may_be_away_as_no_majority_needs() {
    for size in 1..=5_usize {
        for away in 0..=size {
            let nodes = Node::many(size);
            let one = Harness::new(&store(&nodes), "a");
            for node in &nodes[..away] {
                node.go_away();
            }
            one.take();
            let result = one.ask(attempt(1)).await;
            if (size - away) * 2 > size {
                assert!(
                    matches!(result, Ok(Outcome::Won { .. })),
                    "{away} of {size}"
                );
                assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
                assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
            } else {
                let error = result.unwrap_err();
                let error = error.store_error();
                assert!(error.is_retryable());
                assert!(
                    error.to_string().contains(&format!("of {size} nodes")),
                    "{error}"
                );
            }
            for node in &nodes {
                node.come_back();
            }
            assert_eq!(keys(&nodes), vec![0; size], "{away} of {size}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn down_is_told_when_no_majority_is_there_and_up_when_one_is() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    nodes[0].go_away();
    assert!(one.take().is_empty());
    nodes[1].go_away();
    assert!(matches!(one.take()[..], [StoreEvent::Down { .. }]));
    nodes[2].go_away();
    nodes[0].come_back();
    assert!(one.take().is_empty());
    nodes[1].come_back();
    assert!(matches!(
        one.take()[..],
        [StoreEvent::Up { queue: false, .. }]
    ));
    nodes[2].come_back();
    assert!(one.take().is_empty());
}

/// It runs in the midst of what the store's answers change, on the task that brings them all.
#[tokio::test(start_paused = true)]
async fn a_policy_that_panics_ends_its_own_wait_and_nothing_else() {
    let nodes = Node::many(1);
    nodes[0].set_delay(ms(1));
    let store = store(&nodes);
    let registry = || LockRegistry::builder(store.clone()).build().unwrap();
    let (one, two) = (registry(), registry());
    let held = one.obtain("k").lease().await.unwrap();
    for policy in [
        Repeat::from_fn(|| || -> Option<Duration> { panic!("asked for a pause") }),
        Repeat::from_fn(|| -> fn() -> Option<Duration> { panic!("asked for pauses") }),
    ] {
        let began = Instant::now();
        let lock = two.obtain("k").repeat(policy).wait(ms(5_000));
        let refused = lock.lease().await.expect_err("it is held");
        assert!(refused.is_not_acquired(), "{refused}");
        assert!(began.elapsed() < ms(1_000), "{:?}", began.elapsed());
    }
    held.release().await.unwrap();
    two.obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
}

#[tokio::test(start_paused = true)]
async fn whom_a_majority_names_is_seen_as_the_owner() {
    let nodes = Node::many(3);
    let one = Harness::new(&store(&nodes), "a");
    let look = async || one.session.inspect("k".into()).await;
    assert_eq!(look().await.unwrap().owner(), None);
    one.wins(1).await;
    nodes[0].jump(ms(10_000));
    nodes[1].jump(ms(20_000));
    let key_status = look().await.unwrap();
    assert_eq!(key_status.owner().as_deref(), Some("a:1"));
    assert_eq!(
        key_status.left(),
        Some(ms(10_000)),
        "as long as the two that were seen have it"
    );
    nodes[1].jump(ms(20_000));
    nodes[2].get_stuck();
    let begin = Instant::now();
    // One has it, one has not, and one does not answer.
    assert_eq!(look().await.unwrap().owner().as_deref(), Some("a:1"));
    assert_eq!(Instant::now() - begin, ms(1000));
    nodes[2].come_back();
    nodes[0].go_away();
    nodes[1].go_away();
    assert!(look().await.is_err());
}

/// The nightmare of every quorum: of the two that elected the holder one forgets it, and elects
/// another with the third.
#[tokio::test(start_paused = true)]
async fn a_node_that_forgets_elects_a_second_holder_unless_it_is_kept_out() {
    for quarantine in [Some(None), Some(Some(TTL)), None] {
        let nodes = Node::many(3);
        // Long since they were started.
        for node in &nodes {
            node.jump(Duration::from_secs(3600));
        }
        let mut store = QuorumStore::new(nodes.clone()).unwrap();
        // Else it is the registry's ttl.
        if let Some(time) = quarantine {
            store = store.quarantine(time);
        }
        let one = Harness::new(&store, "a");
        nodes[2].go_away();
        one.wins(1).await;
        nodes[2].come_back();
        nodes[0].go_away();
        nodes[1].forget();
        // Also for one who comes only now, and has not seen it.
        let two = Harness::new(&store, "b");
        let second = two.ask(attempt(1)).await;
        match quarantine {
            Some(None) => assert!(matches!(second, Ok(Outcome::Won { .. }))),
            Some(Some(_)) | None => {
                let error = second.unwrap_err().store_error().to_string();
                assert!(error.contains("node restarted"), "{error}");
                advance(TTL).await;
                two.wins(2).await;
                assert_eq!(two.ask(release(2)).await.unwrap(), GONE);
            }
        }
    }
}

/// Nobody knows whether it has just restarted: a registry that comes then took its vote, also that of one which had.
#[tokio::test(start_paused = true)]
async fn a_node_of_unknown_age_has_no_vote_before_its_connection_has_stood_for_the_quarantine() {
    let nodes = Node::many(3);
    nodes.iter().for_each(Node::hide_age);
    let store = QuorumStore::new(nodes.clone()).unwrap();
    let refused = async |harness: &Harness| {
        let told = harness.ask(attempt(1)).await.unwrap_err();
        let told = told.store_error().to_string();
        assert!(told.contains("age of the node unknown"), "{told}");
    };
    let connect = |instance: &str| {
        let harness = Harness::new(&store, instance);
        for node in &nodes {
            node.part_from(instance);
            node.rejoin(instance);
        }
        harness
    };
    let one = connect("a");
    refused(&one).await;
    advance(TTL - ms(100)).await;
    refused(&one).await;
    advance(ms(100)).await;
    nodes[2].go_away();
    one.wins(2).await;
    nodes[2].come_back();
    nodes[0].go_away();
    nodes[1].forget();
    let two = connect("b");
    refused(&two).await;
    // Also who has watched it before the restart.
    refused(&one).await;
    advance(TTL).await;
    two.wins(2).await;
}

/// Its nodes are old enough for itself.
#[tokio::test(start_paused = true)]
async fn a_quorum_of_quorums_asks_for_no_age_twice() {
    let nodes = Node::many(3);
    for node in &nodes {
        node.jump(Duration::from_secs(3600));
    }
    let inner = QuorumStore::new(nodes.clone()).unwrap();
    Harness::new(&QuorumStore::new([inner]).unwrap(), "a")
        .wins(1)
        .await;
}

/// Who else uses a lock that lasts longer than most has it for as long.
#[tokio::test(start_paused = true)]
async fn a_node_is_kept_out_for_as_long_as_the_lock_lasts() {
    let nodes = Node::many(1);
    let one = Harness::new(&QuorumStore::new(nodes.clone()).unwrap(), "a");
    nodes[0].forget();
    let (owner, ttl) = (Owner::exclusive(1), 2 * TTL);
    advance(TTL).await;
    assert!(one.ask(Op::Attempt { owner, ttl }).await.is_err());
    one.wins(2).await;
    one.ask(release(2)).await.unwrap();
    advance(TTL).await;
    let owner = Owner::exclusive(3);
    let third = one.ask(Op::Attempt { owner, ttl }).await;
    assert!(matches!(third, Ok(Outcome::Won { .. })));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_of_keys_that_are_not_in_use() {
    let nodes = Node::many(3);
    let heard = Arc::<Recorder>::default();
    let stores: Vec<Arc<dyn LockStore>> = nodes
        .iter()
        .map(|node| -> Arc<dyn LockStore> { Arc::new(node.clone()) })
        .collect();
    let session = QuorumSession::new(&stores, Quarantine::Fixed(None), config("a", &heard));
    for number in 0..100 {
        let key: Arc<str> = format!("k{number}").into();
        session.submit(SubmittedOp::unattended(key.clone(), attempt(number + 1)));
        assert_eq!(session.keys(), 1);
        session.submit(SubmittedOp::unattended(key, release(number + 1)));
        assert_eq!(session.keys(), 0);
    }
    // Left to run out, as `OnFinish::LetExpire` does: forgotten when that is over, without another op.
    let ttl = ms(10);
    for number in 0..300 {
        let owner = Owner::exclusive(1000 + number);
        session.submit(SubmittedOp::unattended(
            format!("k{number}"),
            Op::Attempt { owner, ttl },
        ));
        advance(ms(1)).await;
    }
    assert!(session.keys() < 50, "{}", session.keys());
    sleep(ms(50)).await;
    assert_eq!(session.keys(), 0);
}
