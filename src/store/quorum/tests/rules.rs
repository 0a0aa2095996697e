//! What a session does, op by op.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, advance, sleep};

use super::nodes::{Node, ms, owners};
use crate::store::contract::{Listener, News, Op, OpError, Opening, Outcome, Owner, Session};
use crate::store::quorum::session::QuorumSession;
use crate::store::{LockStore, MemoryStore, QuorumStore};
use crate::{LockRegistry, Repeat};

const TTL: Duration = Duration::from_secs(30);

/// A registry that only listens.
#[derive(Default)]
struct Recorder(Mutex<Vec<News>>);

impl Listener for Recorder {
    fn news(&self, news: News) {
        self.0.lock().unwrap().push(news);
    }
}

struct Desk {
    session: Arc<dyn Session>,
    heard: Arc<Recorder>,
}

fn store(nodes: &[Node]) -> QuorumStore {
    QuorumStore::new(nodes.iter().cloned()).unwrap()
}

fn opening(instance: &str, heard: &Arc<Recorder>) -> Opening {
    let listener: Arc<dyn Listener> = heard.clone();
    Opening {
        prefix: "lock".into(),
        instance: instance.into(),
        response_timeout: ms(1000),
        listener: Arc::downgrade(&listener),
    }
}

impl Desk {
    fn new(store: &QuorumStore, instance: &str) -> Self {
        let heard = Arc::<Recorder>::default();
        let session = store.open(opening(instance, &heard));
        session.start();
        Self { session, heard }
    }

    fn take(&self) -> Vec<News> {
        std::mem::take(&mut *self.heard.0.lock().unwrap())
    }

    /// Asks, and waits for the answer, but not for what is behind it.
    async fn ask(&self, op: Op) -> Result<Outcome, OpError> {
        self.session.submit("k".into(), op);
        self.answer().await
    }

    async fn answer(&self) -> Result<Outcome, OpError> {
        let patience = Instant::now() + Duration::from_secs(100);
        loop {
            let reply = {
                let mut heard = self.heard.0.lock().unwrap();
                let at = heard
                    .iter()
                    .position(|it| matches!(it, News::Replied { .. }));
                at.map(|at| heard.remove(at))
            };
            if let Some(News::Replied { result, .. }) = reply {
                return result.map(|answer| answer.outcome);
            }
            assert!(Instant::now() < patience, "no answer");
            sleep(ms(1)).await;
        }
    }

    async fn attempt(&self, owner: u64) -> Outcome {
        self.ask(attempt(owner)).await.unwrap()
    }

    async fn wins(&self, owner: u64) -> u64 {
        match self.attempt(owner).await {
            Outcome::Won { draw } => draw,
            other => panic!("{other:?}"),
        }
    }
}

fn attempt(owner: u64) -> Op {
    let (owner, ttl) = (Owner(owner), TTL);
    Op::Attempt { owner, ttl }
}

fn release(owner: u64) -> Op {
    let owner = Owner(owner);
    Op::Release { owner }
}

fn renew(owner: u64) -> Op {
    let (owner, ttl) = (Owner(owner), TTL);
    Op::Renew { owner, ttl }
}

fn keys(nodes: &[Node]) -> Vec<usize> {
    nodes.iter().map(Node::keys).collect()
}

const GONE: Outcome = Outcome::Gone { held: true };

fn is_busy(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Busy { score: None, .. })
}

#[test]
fn a_quorum_of_nothing_is_none() {
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
        let (one, two) = (Desk::new(&store, "a"), Desk::new(&store, "b"));
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
    let one = Desk::new(&store(&nodes), "a");
    let (owner, ttl, score) = (Owner(1), TTL, None);
    one.session
        .submit("k".into(), Op::Enter { owner, ttl, score });
    let news = one.take();
    assert!(matches!(news[0], News::Up { queue: false }), "{news:?}");
    let News::Replied { result, .. } = &news[1] else {
        panic!("{news:?}")
    };
    assert!(is_busy(&result.as_ref().unwrap().outcome));
    assert_eq!(
        one.ask(Op::Withdraw { owner }).await.unwrap(),
        Outcome::Gone { held: false }
    );
    let yields = Op::Yield {
        old: Owner(1),
        new: Owner(2),
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
            let one = Desk::new(&store(&nodes), "a");
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
    let one = Desk::new(&store(&nodes), "a");
    nodes[0].go_away();
    assert!(one.take().is_empty());
    nodes[1].go_away();
    assert!(matches!(one.take()[..], [News::Down(_)]));
    nodes[2].go_away();
    nodes[0].come_back();
    assert!(one.take().is_empty());
    nodes[1].come_back();
    assert!(matches!(one.take()[..], [News::Up { queue: false }]));
    nodes[2].come_back();
    assert!(one.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_slow_node_is_not_waited_for_and_its_late_vote_is_given_back() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
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
    let one = Desk::new(&store(&nodes), "a");
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
        let one = Desk::new(&store(&nodes), "a");
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
async fn a_release_that_is_owed_does_not_take_the_next_attempt_away() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(100));
    }
    let one = Desk::new(&store(&nodes), "a");
    nodes[2].set_delay(ms(20));
    one.session.submit("k".into(), attempt(1));
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
/// took away the vote of one who held by then (found by simulation).
#[tokio::test(start_paused = true)]
async fn a_release_that_is_refused_before_the_next_attempt_is_not_owed() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(1));
    }
    nodes[2].set_delay(ms(50));
    let one = Desk::new(&store(&nodes), "a");
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
    let one = Desk::new(&store(&nodes), "a");
    one.wins(1).await;
    for node in &nodes[..2] {
        node.set_faults(1, 0, 1000);
    }
    one.session.submit("k".into(), release(1));
    sleep(ms(600)).await;
    assert!(
        one.take()
            .iter()
            .all(|news| !matches!(news, News::Replied { .. }))
    );
    for node in &nodes {
        node.set_faults(1, 0, 0);
    }
    assert_eq!(one.answer().await.unwrap(), GONE);
    sleep(ms(600)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}

/// It runs in the midst of what the store's answers change, on the task that brings them all.
#[tokio::test(start_paused = true)]
async fn a_policy_that_panics_ends_its_own_wait_and_nothing_else() {
    let nodes = Node::many(1);
    nodes[0].set_delay(ms(1));
    let store = store(&nodes);
    let registry = || LockRegistry::builder(store.clone()).build();
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

/// Neither will ever tell: one is away, the other says no. The registry waits for an answer before
/// it asks for the key again.
#[tokio::test(start_paused = true)]
async fn a_release_that_no_majority_will_confirm_is_answered_once_all_has_run_out() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[0].go_away();
    nodes[1].refuse_releases_for_good();
    assert!(one.ask(release(1)).await.is_err());
}

/// A majority that is won in part from a node whose clock is far behind, and then in part from
/// others: without the raising of its fence the second would draw lower.
#[tokio::test(start_paused = true)]
async fn tokens_grow_whatever_majority_gives_them() {
    let nodes = Node::many(3);
    nodes[0].jump(Duration::from_secs(3600));
    let one = Desk::new(&store(&nodes), "a");
    let mut last = 0;
    for round in 0..30 {
        // Which one is away changes: any two majorities share one node alone.
        let away = &nodes[round % 3];
        away.go_away();
        let draw = one.wins(round as u64 + 1).await;
        assert!(draw > last, "round {round}");
        last = draw;
        one.ask(release(round as u64 + 1)).await.unwrap();
        away.come_back();
    }
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_lost_when_a_majority_has_lost_it_and_not_before() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
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
    // What the others still had is given back, and nobody gets it by a renewal.
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
    let one = Desk::new(&store(&nodes), "a");
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

    // Nor does a majority of them win it, and all of it is given back.
    nodes[1..].iter().for_each(|node| node.set_lonely(true));
    assert!(one.ask(attempt(2)).await.is_err());
    sleep(ms(10)).await;
    assert_eq!(keys(&nodes), [0; 3]);
}

/// One node has released it already when the other confirms the renewal: it was given to the first
/// once more, and to nobody's use (found by simulation).
#[tokio::test(start_paused = true)]
async fn a_renewal_that_a_release_overtakes_gives_nothing_to_anybody() {
    let nodes = Node::many(2);
    let one = Desk::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[1].set_delay(ms(100));
    one.session.submit("k".into(), renew(1));
    one.session.submit("k".into(), release(1));
    assert_eq!(one.answer().await.unwrap(), Outcome::Renewed);
    assert_eq!(one.answer().await.unwrap(), GONE);
    sleep(ms(500)).await;
    assert_eq!(keys(&nodes), [0; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_can_be_told_neither_way_changes_nothing() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[0].jump(TTL);
    nodes[1].set_faults(1, 0, 1000);
    assert!(matches!(one.ask(renew(1)).await, Err(OpError::Refused(_))));
    nodes[1].set_faults(1, 0, 0);
    assert_eq!(one.ask(renew(1)).await.unwrap(), Outcome::Renewed);
}

fn adopt(owner: u64, from: &str) -> Op {
    Op::Adopt {
        owner: Owner(owner),
        from: from.into(),
        ttl: TTL,
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_majority_has_is_adopted_and_what_an_absent_node_may_have_is_asked_for_again() {
    let nodes = Node::many(3);
    let store = store(&nodes);
    let (one, two) = (Desk::new(&store, "a"), Desk::new(&store, "b"));
    nodes[1].go_away();
    let first = one.wins(1).await;
    nodes[1].come_back();
    nodes[0].go_away();
    assert!(matches!(
        two.ask(adopt(1, "a:1")).await,
        Err(OpError::Refused(_))
    ));
    nodes[0].come_back();
    let Outcome::Won { draw } = two.ask(adopt(1, "a:1")).await.unwrap() else {
        panic!("the majority has it")
    };
    assert!(draw > first);
    assert_eq!(one.ask(adopt(2, "a:1")).await.unwrap(), Outcome::NotOld);
    assert_eq!(owners(&nodes, "k").into_iter().collect::<Vec<_>>(), ["b:1"]);
    assert_eq!(two.ask(release(1)).await.unwrap(), GONE);
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn whom_a_majority_names_is_seen_as_the_owner() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
    let look = async || one.session.inspect("k".into()).await;
    assert_eq!(look().await.unwrap().owner, None);
    one.wins(1).await;
    nodes[0].jump(ms(10_000));
    nodes[1].jump(ms(20_000));
    let sight = look().await.unwrap();
    assert_eq!(sight.owner.as_deref(), Some("a:1"));
    assert_eq!(
        sight.left,
        Some(ms(10_000)),
        "as long as the two that were seen have it"
    );
    nodes[1].jump(ms(20_000));
    nodes[2].get_stuck();
    let begin = Instant::now();
    // One has it, one has not, and one does not answer.
    assert_eq!(look().await.unwrap().owner.as_deref(), Some("a:1"));
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
    for quarantine in [None, Some(TTL)] {
        let nodes = Node::many(3);
        // Long since they were started.
        for node in &nodes {
            node.jump(Duration::from_secs(3600));
        }
        let mut store = store(&nodes);
        if let Some(time) = quarantine {
            store = store.quarantine(time);
        }
        let one = Desk::new(&store, "a");
        nodes[2].go_away();
        one.wins(1).await;
        nodes[2].come_back();
        nodes[0].go_away();
        nodes[1].forget();
        // Also for one who comes only now, and has not seen it.
        let two = Desk::new(&store, "b");
        let second = two.ask(attempt(1)).await;
        match quarantine {
            None => assert!(matches!(second, Ok(Outcome::Won { .. }))),
            Some(_) => {
                let error = second.unwrap_err().store_error().to_string();
                assert!(error.contains("started again"), "{error}");
                advance(TTL).await;
                two.wins(2).await;
                assert_eq!(two.ask(release(2)).await.unwrap(), GONE);
            }
        }
    }
}

/// Its connection is gone, and the votes that it gave meanwhile go as soon as they come in.
#[tokio::test(start_paused = true)]
async fn a_session_that_is_dropped_gives_back_what_comes_late() {
    let nodes = Node::many(3);
    for node in &nodes[..2] {
        node.seize("k", ms(10));
    }
    nodes[2].set_delay(ms(400));
    let one = Desk::new(&store(&nodes), "a");
    assert!(is_busy(&one.attempt(1).await));
    drop(one);
    sleep(ms(2500)).await;
    assert_eq!(keys(&nodes), [0; 3]);
    assert_eq!(nodes[2].done(), [attempt(1), release(1)]);
}

/// The same where the connection to the node is being made again just then (found by simulation).
#[tokio::test(start_paused = true)]
async fn a_session_that_is_dropped_waits_a_while_for_a_node_that_is_away() {
    let nodes = Node::many(3);
    let one = Desk::new(&store(&nodes), "a");
    one.wins(1).await;
    nodes[2].go_away();
    assert_eq!(one.ask(release(1)).await.unwrap(), GONE);
    drop(one);
    sleep(ms(1000)).await;
    assert_eq!(keys(&nodes), [0, 0, 1]);
    nodes[2].come_back();
    assert_eq!(keys(&nodes), [0; 3]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_kept_of_keys_that_are_not_in_use() {
    let nodes = Node::many(3);
    let heard = Arc::<Recorder>::default();
    let stores: Vec<Arc<dyn LockStore>> = nodes
        .iter()
        .map(|node| -> Arc<dyn LockStore> { Arc::new(node.clone()) })
        .collect();
    let session = QuorumSession::new(&stores, None, opening("a", &heard));
    for number in 0..100 {
        let key: Arc<str> = format!("k{number}").into();
        session.submit(key.clone(), attempt(number + 1));
        assert_eq!(session.keys(), 1);
        session.submit(key, release(number + 1));
        assert_eq!(session.keys(), 0);
    }
    // Left to run out, as `OnFinish::LetExpire` does: swept up later.
    let ttl = ms(10);
    for number in 0..3000 {
        let owner = Owner(1000 + number);
        session.submit(format!("k{number}").into(), Op::Attempt { owner, ttl });
        advance(ms(1)).await;
    }
    assert!(session.keys() < 1500, "{}", session.keys());
}

fn listen(owner: u64) -> Op {
    let (owner, ttl) = (Owner(owner), TTL);
    Op::Listen { owner, ttl }
}

fn withdraw(owner: u64) -> Op {
    let owner = Owner(owner);
    Op::Withdraw { owner }
}

/// Each node keeps the key for the one that it has told; who gives up just then keeps it from nobody.
#[tokio::test(start_paused = true)]
async fn w7_who_is_told_and_gives_up_leaves_the_key_free() {
    let nodes = Node::many(3);
    let store = store(&nodes);
    let [a, b, c] = ["a", "b", "c"].map(|name| Desk::new(&store, name));
    a.wins(1).await;
    assert!(matches!(
        b.ask(listen(1)).await,
        Ok(Outcome::Busy { score: Some(_), .. })
    ));
    a.ask(release(1)).await.unwrap();
    sleep(ms(10)).await;
    assert!(b.take().iter().any(|it| matches!(it, News::Freed { .. })));
    assert_eq!(owners(&nodes, "k"), HashSet::from(["b:1".to_owned()]));
    b.ask(withdraw(1)).await.unwrap();
    sleep(ms(10)).await;
    c.wins(1).await;
}

/// A node was away while somebody gave up: it is told when it is back, and not asked for ever if it never is.
#[tokio::test(start_paused = true)]
async fn w7_an_ear_on_a_node_that_was_away_is_withdrawn_or_forgotten() {
    for is_back in [true, false] {
        let nodes = Node::many(3);
        let stores: Vec<_> = nodes
            .iter()
            .map(|node| -> Arc<dyn LockStore> { Arc::new(node.clone()) })
            .collect();
        let holder = Desk::new(&store(&nodes), "a");
        holder.wins(1).await;
        let heard = Arc::<Recorder>::default();
        let session = Arc::new(QuorumSession::new(&stores, None, opening("b", &heard)));
        session.start();
        let other = Desk {
            session: session.clone(),
            heard,
        };
        other.ask(listen(1)).await.unwrap();
        nodes[0].go_away();
        other.ask(withdraw(1)).await.unwrap();
        if is_back {
            nodes[0].come_back();
        }
        sleep(ms(10)).await;
        assert_eq!(session.keys(), usize::from(!is_back));
        sleep(Duration::from_secs(61)).await;
        assert_eq!(session.keys(), 0);
        if is_back {
            holder.ask(release(1)).await.unwrap();
            assert_eq!(nodes.iter().map(Node::told).sum::<u64>(), 0);
        }
    }
}
