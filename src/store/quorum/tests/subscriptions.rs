//! W7: which node has which subscription, and what a notice causes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::harness::{
    Harness, Recorder, TTL, attempt, config, listen, release, renew, store, unlisten,
};
use super::nodes::{Node, ms, names, owners};
use crate::base::StoreError;
use crate::store::LockStore;
use crate::store::contract::{Answer, Op, OpError, Outcome, Session, StoreEvent, SubmittedOp};
use crate::store::quorum::quarantine::Quarantine;
use crate::store::quorum::session::QuorumSession;
use crate::store::quorum::state::QuorumState;

/// So long one node's notice waits for those of others.
const TOGETHER: Duration = ms(3);

/// The state by itself, whose nodes say what the test has them say.
pub(super) struct Bare {
    pub(super) state: QuorumState,
    pub(super) now: Instant,
}

impl Bare {
    pub(super) fn new(size: usize) -> Self {
        Self {
            state: QuorumState::new(names(size), Quarantine::Fixed(None)),
            now: Instant::now(),
        }
    }

    /// What is sent for an op, each with its node.
    pub(super) fn submit(&mut self, op: Op) -> Vec<(usize, Op)> {
        let submitted = SubmittedOp::unattended("k", op);
        self.state.submit(self.now, submitted);
        self.sent()
    }

    pub(super) fn sent(&mut self) -> Vec<(usize, Op)> {
        let sends = self.state.deferred.sends.drain(..);
        sends.map(|(node, _, op)| (node, op)).collect()
    }

    pub(super) fn answer(&mut self, node: usize, result: Result<Outcome, OpError>) {
        let result = result.map(|outcome| Answer { at: 1, outcome });
        self.state.replied(self.now, node, &"k".into(), result);
    }

    /// Busy, and whoever asked listens there.
    fn hears(&mut self, node: usize) {
        self.answer(node, Ok(busy(Some(7))));
    }

    /// A node's notice: whether the registry is told of it at once.
    fn notice(&mut self, node: usize) -> bool {
        self.state.freed(self.now, node, &"k".into());
        self.told() == 1
    }

    /// How often the registry was told that the key is free since this was asked last.
    fn told(&mut self) -> usize {
        let event = self.state.deferred.events.drain(..);
        event
            .filter(|event| matches!(event, StoreEvent::Freed { .. }))
            .count()
    }

    /// Time goes by.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.state.tick(self.now);
    }

    /// Somebody listens on every node.
    fn listening(size: usize) -> Self {
        let mut bare = Self::new(size);
        assert_eq!(bare.submit(listen(1)).len(), size);
        (0..size).for_each(|node| bare.hears(node));
        assert_eq!(bare.told(), 0);
        // The votes that were not refused are released.
        assert_eq!(bare.sent(), []);
        bare
    }
}

fn busy(score: Option<u64>) -> Outcome {
    let left = Some(TTL);
    Outcome::Busy {
        left,
        score,
        entered: false,
        holder: None,
    }
}

/// Whoever asks when the first is free may find the others not so yet.
#[tokio::test(start_paused = true)]
async fn w7_a_notice_is_told_when_a_majority_says_so_or_a_moment_later() {
    for size in 1..=5 {
        let majority = size / 2 + 1;
        let mut bare = Bare::listening(size);
        for node in 0..majority {
            assert_eq!(bare.notice(node), node + 1 == majority, "{node} of {size}");
        }
        let mut alone = Bare::listening(size);
        if size > 1 {
            assert!(!alone.notice(size - 1));
            assert_eq!(alone.state.next_timeout(), Some(alone.now + TOGETHER));
            alone.pass(TOGETHER - Duration::from_micros(1));
            assert_eq!(alone.told(), 0);
            alone.pass(Duration::from_micros(1));
            assert_eq!(alone.told(), 1);
            alone.pass(10 * TOGETHER);
            assert_eq!(alone.told(), 0, "once");
        }
    }
}

/// A node tells each of those that listen once: what it says again is of nothing.
#[tokio::test(start_paused = true)]
async fn w7_a_notice_that_is_said_again_counts_once() {
    let mut bare = Bare::listening(3);
    assert!(!bare.notice(0));
    assert!(!bare.notice(0), "one node is no majority of three");
    bare.pass(TOGETHER);
    assert_eq!(bare.told(), 1);
    assert!(!bare.notice(0));
    bare.pass(TOGETHER);
    assert_eq!(bare.told(), 0, "nobody listens there any more");
    // The others may tell still.
    assert!(!bare.notice(1));
    assert!(bare.notice(2));
}

/// It was told, and asked, and stands again by the time that the answer comes.
#[tokio::test(start_paused = true)]
async fn w7_a_notice_that_comes_before_the_answer_is_of_an_earlier_time() {
    for (score, listens) in [(Some(9), true), (None, false)] {
        let mut bare = Bare::listening(3);
        assert_eq!(bare.submit(listen(1)).len(), 3);
        assert!(!bare.notice(0));
        bare.pass(TOGETHER);
        assert_eq!(bare.told(), 1);
        bare.answer(0, Ok(busy(score)));
        bare.hears(1);
        bare.hears(2);
        bare.state.deferred.events.clear();
        assert!(!bare.notice(0));
        bare.pass(TOGETHER);
        assert_eq!(bare.told(), usize::from(listens), "{score:?}");
    }
}

/// One whose withdrawal was refused stands before the next of the same registry, on the node as here. The notice was
/// taken for the newest: that one was then no more withdrawn, and the node told it when nobody waited.
#[tokio::test(start_paused = true)]
async fn w7_a_notice_is_for_the_first_of_ours() {
    let mut bare = Bare::listening(3);
    let asked = bare.submit(unlisten(1));
    assert_eq!(asked, [0, 1, 2].map(|node| (node, unlisten(1))));
    let refused = || Err(OpError::Refused(StoreError::new("not now")));
    bare.answer(0, refused());
    for node in [1, 2] {
        bare.answer(node, Ok(Outcome::Gone { held: false }));
    }
    assert_eq!(bare.submit(listen(2)).len(), 3);
    (0..3).for_each(|node| bare.hears(node));
    assert!(!bare.notice(0));
    // What the first was told of is released, when it is tried again.
    bare.pass(ms(250));
    assert_eq!(bare.sent(), [(0, release(1))]);
    bare.answer(0, Ok(Outcome::Gone { held: true }));
    let asked = bare.submit(unlisten(2));
    assert_eq!(asked, [0, 1, 2].map(|node| (node, unlisten(2))));
}

/// Two of one registry may be told by the same node.
#[tokio::test(start_paused = true)]
async fn w7_two_notices_of_one_node_are_no_majority() {
    let mut bare = Bare::listening(3);
    bare.submit(unlisten(1));
    bare.answer(0, Err(OpError::Refused(StoreError::new("not now"))));
    for node in [1, 2] {
        bare.answer(node, Ok(Outcome::Gone { held: false }));
    }
    bare.submit(listen(2));
    (0..3).for_each(|node| bare.hears(node));
    assert!(!bare.notice(0));
    assert!(!bare.notice(0));
    assert!(bare.notice(1));
}

/// A withdrawal came while the release of a lost vote was in flight, and the answer to that was lost, too: the node kept
/// the subscription if the release alone was sent again.
#[tokio::test(start_paused = true)]
async fn w7_a_withdrawal_is_sent_after_a_release_whose_answer_was_lost() {
    let mut bare = Bare::new(3);
    let unknown = || Err(OpError::Unknown(StoreError::new("it broke")));
    let is_back = |bare: &mut Bare| {
        bare.state.came_up(bare.now, 2, None);
        bare.sent()
    };
    bare.submit(listen(1));
    bare.answer(2, unknown());
    (0..2).for_each(|node| bare.hears(node));
    assert_eq!(bare.sent(), []);
    assert_eq!(is_back(&mut bare), [(2, release(1))]);
    let asked = bare.submit(unlisten(1));
    assert_eq!(asked, [0, 1].map(|node| (node, unlisten(1))));
    bare.answer(2, unknown());
    assert_eq!(is_back(&mut bare), [(2, unlisten(1))]);
    for node in 0..3 {
        bare.answer(node, Ok(Outcome::Gone { held: false }));
    }
    bare.pass(TOGETHER);
    assert_eq!(bare.state.keys(), 0);
}

/// Each node keeps the key for the one that it has told; who gives up just then keeps it from nobody.
#[tokio::test(start_paused = true)]
async fn w7_a_notified_waiter_that_gives_up_leaves_the_key_free() {
    let nodes = Node::many(3);
    let store = store(&nodes);
    let [a, b, c] = ["a", "b", "c"].map(|name| Harness::new(&store, name));
    a.wins(1).await;
    assert!(matches!(
        b.ask(listen(1)).await,
        Ok(Outcome::Busy { score: Some(_), .. })
    ));
    a.ask(release(1)).await.unwrap();
    sleep(ms(10)).await;
    assert!(
        b.take()
            .iter()
            .any(|it| matches!(it, StoreEvent::Freed { .. }))
    );
    assert_eq!(owners(&nodes, "k"), HashSet::from(["b:1".to_owned()]));
    b.ask(unlisten(1)).await.unwrap();
    sleep(ms(10)).await;
    c.wins(1).await;
}

/// A harness, and how many keys its session has in use.
pub(super) fn counted(nodes: &[Node], name: &str) -> (Harness, Arc<QuorumSession>) {
    let stores: Vec<_> = nodes
        .iter()
        .map(|node| -> Arc<dyn LockStore> { Arc::new(node.clone()) })
        .collect();
    let heard = Arc::<Recorder>::default();
    let unasked = Quarantine::Fixed(None);
    let session = Arc::new(QuorumSession::new(&stores, unasked, config(name, &heard)));
    session.start();
    let harness = Harness {
        session: session.clone(),
        heard,
    };
    (harness, session)
}

/// Time goes by, and the holder renews.
async fn hold(holder: &Harness, time: Duration) {
    let end = Instant::now() + time;
    while Instant::now() < end {
        holder.ask(renew(1)).await.unwrap();
        sleep(ms(5000).min(end - Instant::now())).await;
    }
}

fn told(nodes: &[Node]) -> u64 {
    nodes.iter().map(Node::told).sum()
}

/// A node was away while somebody gave up: it is told when it is back, and not asked for ever if it never is. It keeps
/// the subscription for the rest of the lock and a minute. For half a minute of that we had forgotten it, and the node notified one that
/// did not wait.
#[tokio::test(start_paused = true)]
async fn w7_a_subscription_on_a_node_that_was_away_is_withdrawn_or_forgotten() {
    for away in [Some(0), Some(70), Some(85), None] {
        let nodes = Node::many(3);
        let holder = Harness::new(&store(&nodes), "a");
        holder.wins(1).await;
        let (other, session) = counted(&nodes, "b");
        other.ask(listen(1)).await.unwrap();
        nodes[0].go_away();
        other.ask(unlisten(1)).await.unwrap();
        let seconds = Duration::from_secs(away.unwrap_or(89));
        hold(&holder, seconds).await;
        assert_eq!(session.keys(), 1, "{away:?}");
        if away.is_some() {
            nodes[0].come_back();
        }
        hold(&holder, ms(10)).await;
        assert_eq!(session.keys(), usize::from(away.is_none()), "{away:?}");
        if away.is_some() {
            holder.ask(release(1)).await.unwrap();
            assert_eq!(told(&nodes), 0);
        } else {
            hold(&holder, ms(5000)).await;
            assert_eq!(session.keys(), 0);
        }
    }
}

/// Others that listen keep the queue alive, and so the place of one that has given up while its connection was gone for
/// long. When that place is told, nobody waits for it: the key is kept for 100 ms on that node, and the others tell
/// the next as always. Where there is but one node, its key is free after that.
#[tokio::test(start_paused = true)]
async fn w7_a_place_that_is_forgotten_costs_100_ms_on_one_node() {
    for size in [1, 3] {
        let nodes = Node::many(size);
        let store = store(&nodes);
        let [holder, next] = ["a", "c"].map(|name| Harness::new(&store, name));
        holder.wins(1).await;
        let (gone, session) = counted(&nodes, "b");
        gone.ask(listen(1)).await.unwrap();
        nodes[0].part_from("b");
        // On one node alone the question of a registry that hears of no majority is answered so, too.
        let _ = gone.ask(unlisten(1)).await;
        for _ in 0..10 {
            next.ask(listen(1)).await.unwrap();
            hold(&holder, ms(20_000)).await;
        }
        assert_eq!(session.keys(), 0);
        nodes[0].rejoin("b");
        next.take();
        holder.ask(release(1)).await.unwrap();
        let begin = Instant::now();
        // The notices are on their way.
        sleep(ms(5)).await;
        let is_told = |event: &StoreEvent| matches!(event, StoreEvent::Freed { .. });
        assert_eq!(next.take().iter().any(is_told), size == 3);
        assert_eq!(nodes[0].owner("k").as_deref(), Some("b:1"));
        if size == 1 {
            let Ok(Outcome::Busy { left, .. }) = next.ask(listen(1)).await else {
                panic!("it is kept for another")
            };
            assert!(left.is_some_and(|left| left <= ms(100)), "{left:?}");
            sleep(ms(101)).await;
        }
        assert!(matches!(next.ask(listen(1)).await, Ok(Outcome::Won { .. })));
        assert!(begin.elapsed() <= ms(110), "{:?}", begin.elapsed());
        next.ask(release(1)).await.unwrap();
        sleep(ms(200)).await;
        assert!(nodes.iter().all(|node| node.keys() == 0));
        assert_eq!(session.keys(), 0);
    }
}

/// The notice came while the connection to that node was gone, and will not come again: the registry is told when the
/// connection stands, so that it asks, and listens there again. One that nobody of ours listens on tells nothing.
#[tokio::test(start_paused = true)]
async fn w7_waiters_ask_when_an_unreachable_node_is_back() {
    for listens in [true, false] {
        let mut bare = if listens {
            Bare::listening(3)
        } else {
            let mut bare = Bare::new(3);
            bare.submit(attempt(1));
            (0..3).for_each(|node| bare.answer(node, Ok(Outcome::Won { epoch: 5 })));
            bare
        };
        let error = StoreError::new("it broke");
        bare.state.went_down(1, error);
        assert_eq!(bare.told(), 0);
        bare.state.came_up(bare.now, 1, None);
        bare.pass(TOGETHER);
        assert_eq!(bare.told(), usize::from(listens));
    }
}
