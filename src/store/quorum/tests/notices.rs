//! A waiter is told when the key is free, and asks before its pause is over (W7).

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::nodes::{Node, ms};
use crate::base::Repeat;
use crate::handle::{Lease, LockRegistry};
use crate::store::QuorumStore;
use crate::store::contract::Op;

/// So long that nobody asks by itself while a test looks.
const PAUSE: Duration = Duration::from_secs(5);

/// Messages take up to so long, each way.
const WAY: Duration = ms(3);

fn nodes(size: usize) -> Vec<Node> {
    let nodes = Node::many(size);
    for (seed, node) in nodes.iter().enumerate() {
        node.set_faults(seed as u64, 0, 0);
        node.set_delay(WAY);
    }
    nodes
}

fn registry(nodes: &[Node]) -> LockRegistry {
    let store = QuorumStore::new(nodes.iter().cloned()).unwrap();
    LockRegistry::builder(store)
        .repeat(Repeat::fixed(PAUSE))
        .wait(Duration::from_secs(100))
        .build()
        .unwrap()
}

async fn lease(registry: &LockRegistry) -> Lease {
    registry.obtain("k").lease().await.unwrap()
}

/// Somebody holds, another waits, and has been told that it is busy.
async fn held_and_waited_for(
    nodes: &[Node],
    there: &LockRegistry,
) -> (Lease, tokio::task::JoinHandle<Lease>) {
    let held = lease(&registry(nodes)).await;
    let there = there.clone();
    let waiter = tokio::spawn(async move { lease(&there).await });
    sleep(ms(100)).await;
    (held, waiter)
}

async fn nothing_left(nodes: &[Node], registries: &[&LockRegistry]) {
    for _ in 0..100 {
        if nodes.iter().all(|node| node.keys() == 0)
            && registries.iter().all(|registry| registry.in_use() == 0)
        {
            return;
        }
        sleep(ms(10)).await;
    }
    panic!("{:?} keys are left", nodes.iter().map(Node::keys));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_has_the_lock_as_soon_as_it_is_released() {
    for size in 1..=5 {
        let (nodes, there) = (nodes(size), LockRegistry::clone);
        let registry = there(&registry(&nodes));
        let (held, waiter) = held_and_waited_for(&nodes, &registry).await;
        let begin = Instant::now();
        held.release().await.unwrap();
        let next = waiter.await.unwrap();
        // The release, the notice, the vote and the raising of fences; and once more, if the first
        // question came before the release had reached the others.
        assert!(begin.elapsed() < ms(100), "{:?} of {size}", begin.elapsed());
        next.release().await.unwrap();
        nothing_left(&nodes, &[&registry]).await;
    }
}

/// One node that tells is enough; the others cannot, or theirs are lost.
#[tokio::test(start_paused = true)]
async fn any_node_may_tell() {
    for teller in 0..3 {
        let nodes = nodes(3);
        for (at, node) in nodes.iter().enumerate() {
            node.set_mute(at != teller);
        }
        let registry = registry(&nodes);
        let (held, waiter) = held_and_waited_for(&nodes, &registry).await;
        let begin = Instant::now();
        held.release().await.unwrap();
        // What it asks at once may come before the release has reached the others, which do not tell.
        if let Ok(next) = timeout(ms(100), waiter).await {
            next.unwrap().release().await.unwrap();
        } else {
            sleep(PAUSE).await;
        }
        assert!(begin.elapsed() < 2 * PAUSE);
        nothing_left(&nodes, &[&registry]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_notices_are_lost_has_the_lock_by_its_policy() {
    let nodes = nodes(3);
    nodes.iter().for_each(|node| node.set_mute(true));
    let registry = registry(&nodes);
    let (held, waiter) = held_and_waited_for(&nodes, &registry).await;
    let begin = Instant::now();
    held.release().await.unwrap();
    let next = waiter.await.unwrap();
    let took = begin.elapsed();
    assert!(took > ms(4000) && took < ms(5600), "{took:?}");
    next.release().await.unwrap();
    nothing_left(&nodes, &[&registry]).await;
}

/// A node that tells of nothing all the time, be it one that lies, makes a waiter ask a few times more.
#[tokio::test(start_paused = true)]
async fn a_node_that_lies_makes_no_storm() {
    let nodes = nodes(3);
    let registry = registry(&nodes);
    let (held, waiter) = held_and_waited_for(&nodes, &registry).await;
    nodes[1].done();
    for _ in 0..20_000 {
        nodes[0].lie("k");
        nodes[0].lie("another");
        sleep(ms(1)).await;
    }
    let asked = nodes[1].done();
    let asked = asked.iter().filter(|op| matches!(op, Op::Listen { .. }));
    let asked = asked.count();
    assert!((4..=44).contains(&asked), "{asked} questions in 20 s");
    held.release().await.unwrap();
    drop(waiter.await.unwrap());
    nothing_left(&nodes, &[&registry]).await;
}

/// Twenty waiters in four registries: who waits longest is told, the others sleep on. In turns that take as long
/// as the messages do, not as the pauses.
#[tokio::test(start_paused = true)]
async fn all_of_many_are_served_without_a_pause() {
    let nodes = nodes(5);
    let held = lease(&registry(&nodes)).await;
    let registries: Vec<_> = (0..4).map(|_| registry(&nodes)).collect();
    let mut waiters = tokio::task::JoinSet::new();
    for registry in registries.iter().cycle().take(20) {
        let registry = registry.clone();
        waiters.spawn(async move {
            let lease = lease(&registry).await;
            sleep(ms(10)).await;
            lease.release().await.unwrap();
        });
    }
    sleep(ms(200)).await;
    let begin = Instant::now();
    held.release().await.unwrap();
    while let Some(waiter) = waiters.join_next().await {
        waiter.unwrap();
    }
    assert!(begin.elapsed() < PAUSE, "{:?}", begin.elapsed());
    nothing_left(&nodes, &registries.iter().collect::<Vec<_>>()).await;
}

/// However many wait, one of them is told of a release by each node.
#[tokio::test(start_paused = true)]
async fn the_first_is_told_and_no_other() {
    let nodes = nodes(3);
    let held = lease(&registry(&nodes)).await;
    let registries: Vec<_> = (0..10).map(|_| registry(&nodes)).collect();
    let mut waiters = Vec::new();
    for registry in registries.clone() {
        waiters.push(tokio::spawn(async move { lease(&registry).await }));
        sleep(ms(50)).await;
    }
    held.release().await.unwrap();
    sleep(ms(100)).await;
    assert!(waiters[0].is_finished(), "who came first is told first");
    assert_eq!(waiters.iter().filter(|it| it.is_finished()).count(), 1);
    assert_eq!(nodes.iter().map(Node::told).sum::<u64>(), 3);
    for waiter in waiters {
        waiter.abort();
        if let Ok(lease) = waiter.await {
            lease.release().await.unwrap();
        }
    }
    nothing_left(&nodes, &registries.iter().collect::<Vec<_>>()).await;
}

/// Each node frees the key, and tells of it, while the connection to it of the one who waits is gone. Never two of them
/// are gone at once, so that the store is never down, which would make it ask as well.
#[tokio::test(start_paused = true)]
async fn a_waiter_that_one_node_after_the_other_cannot_reach_does_not_sit_out_its_pause() {
    let nodes = nodes(3);
    let holder = registry(&nodes);
    let held = lease(&holder).await;
    let before = nodes[0].instances();
    let registry = registry(&nodes);
    let waiter = tokio::spawn({
        let registry = registry.clone();
        async move { lease(&registry).await }
    });
    sleep(ms(100)).await;
    let instances = nodes[0].instances();
    let instance = instances.difference(&before).next().unwrap();
    // They free it at once, 250 ms later, and 500 ms later.
    nodes[1].refuse_release();
    nodes[2].refuse_release();
    nodes[2].refuse_release();
    let begin = Instant::now();
    let release = tokio::spawn(held.release());
    for node in &nodes {
        node.part_from(instance);
        sleep(ms(150)).await;
        node.rejoin(instance);
        sleep(ms(75)).await;
    }
    release.await.unwrap().unwrap();
    let next = waiter.await.unwrap();
    assert!(begin.elapsed() < ms(1000), "{:?}", begin.elapsed());
    next.release().await.unwrap();
    nothing_left(&nodes, &[&holder, &registry]).await;
}

/// Nobody is told for nothing while another waits: who gave up listens no more, on no node.
#[tokio::test(start_paused = true)]
async fn a_caller_that_gave_up_is_not_subscribed() {
    let nodes = nodes(3);
    let (one, two) = (registry(&nodes), registry(&nodes));
    let (held, first) = held_and_waited_for(&nodes, &one).await;
    let second = tokio::spawn({
        let two = two.clone();
        async move { lease(&two).await }
    });
    sleep(ms(100)).await;
    first.abort();
    sleep(ms(100)).await;
    let begin = Instant::now();
    held.release().await.unwrap();
    let next = second.await.unwrap();
    assert!(begin.elapsed() < ms(100), "{:?}", begin.elapsed());
    next.release().await.unwrap();
    nothing_left(&nodes, &[&one, &two]).await;
}

/// The process of the first was killed: it is there no more, but its place is.
#[tokio::test(start_paused = true)]
async fn nodes_that_go_away_while_somebody_listens_leave_nothing_behind() {
    let nodes = nodes(3);
    let registry = registry(&nodes);
    let (held, waiter) = held_and_waited_for(&nodes, &registry).await;
    nodes[0].go_away();
    waiter.abort();
    sleep(ms(100)).await;
    held.release().await.unwrap();
    sleep(ms(100)).await;
    nodes[0].come_back();
    sleep(Duration::from_secs(120)).await;
    nothing_left(&nodes, &[&registry]).await;
}

/// Too few nodes took the question, which is told as refused, so as if nothing were left of it; but one has a place for
/// whoever asked. Left there it would be told of the next release, and keep the key from others, when nobody waits.
#[tokio::test(start_paused = true)]
async fn a_question_that_too_few_have_taken_leaves_no_subscription() {
    let nodes = nodes(3);
    let (one, two) = (registry(&nodes), registry(&nodes));
    let held = lease(&one).await;
    for node in &nodes[1..] {
        node.set_faults(7, 0, 1000);
        node.set_delay(Duration::ZERO);
    }
    let waiter = tokio::spawn({
        let two = two.clone();
        async move { lease(&two).await }
    });
    // So long that it has asked again after the first refusal, by when it knows that there is no queue.
    sleep(ms(400)).await;
    waiter.abort();
    sleep(ms(100)).await;
    for node in &nodes[1..] {
        node.set_faults(7, 0, 0);
    }
    sleep(ms(1000)).await;
    held.release().await.unwrap();
    sleep(ms(20)).await;
    assert_eq!(nodes.iter().map(Node::told).sum::<u64>(), 0);
    nothing_left(&nodes, &[&one, &two]).await;
}
