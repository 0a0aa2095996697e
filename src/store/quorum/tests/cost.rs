//! What an event about one key costs, however many others are in use.

use tokio::time::{Duration, advance};

use super::harness::{Harness, attempt, listen, release, store};
use super::nodes::{Node, ms};
use super::subscriptions::counted;
use crate::store::contract::{Op, Owner, Session, SubmittedOp};
use crate::store::quorum::node_queue::LOOKS;

fn looks(work: impl FnOnce()) -> u64 {
    let before = LOOKS.get();
    work();
    LOOKS.get() - before
}

/// Each event looked at every key, to see whether anything was under way.
#[tokio::test(start_paused = true)]
async fn an_event_of_one_key_looks_at_no_other() {
    let mut costs = Vec::new();
    for others in [0, 2000] {
        let nodes = Node::many(3);
        let holder = Harness::new(&store(&nodes), "h");
        holder.wins(1).await;
        let (harness, session) = counted(&nodes, "a");
        for number in 0..others {
            let (owner, ttl) = (Owner::exclusive(1000 + number), Duration::from_secs(3600));
            let key = format!("other {number}");
            harness
                .session
                .submit(SubmittedOp::unattended(key, Op::Attempt { owner, ttl }));
        }
        advance(ms(10)).await;
        assert_eq!(session.keys() as u64, others);
        costs.push([
            looks(|| {
                harness
                    .session
                    .submit(SubmittedOp::unattended("mine", attempt(1)))
            }),
            looks(|| {
                harness
                    .session
                    .submit(SubmittedOp::unattended("mine", release(1)))
            }),
            looks(|| {
                harness
                    .session
                    .submit(SubmittedOp::unattended("k", listen(2)))
            }),
            looks(|| nodes[0].lie("k")),
            looks(|| nodes[1].break_all()),
            looks(|| nodes[1].come_back()),
        ]);
    }
    assert_eq!(costs[0], costs[1]);
    // A node that is back is asked about the key for which it is listened to.
    assert!(costs[0].iter().sum::<u64>() > 0, "{costs:?}");
}

/// Every arrival starts the session: with nothing due that looks at no key at all.
#[tokio::test(start_paused = true)]
async fn a_start_with_nothing_due_looks_at_no_key() {
    let nodes = Node::many(3);
    let (harness, session) = counted(&nodes, "a");
    for number in 0..100 {
        let (owner, ttl) = (Owner::exclusive(number), ms(60_000));
        let key = format!("k{number}");
        harness
            .session
            .submit(SubmittedOp::unattended(key, Op::Attempt { owner, ttl }));
    }
    for _ in 0..20 {
        assert_eq!(looks(|| session.start()), 0);
        advance(ms(1000)).await;
    }
    assert_eq!(session.keys(), 100);
}

/// The runtime that the timer was on has gone: what is due is done by whoever arrives next.
#[test]
fn a_start_does_the_work_of_a_timer_whose_runtime_ended() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap()
    };
    let (first, second) = (runtime(), runtime());
    let nodes = first.block_on(async { Node::many(3) });
    let (harness, session) = first.block_on(async { counted(&nodes, "a") });
    let ttl = ms(10);
    let op = Op::Attempt {
        owner: Owner::exclusive(1),
        ttl,
    };
    first.block_on(async { harness.session.submit(SubmittedOp::unattended("k", op)) });
    drop(first);
    assert_eq!(session.keys(), 1);
    second.block_on(async {
        advance(Duration::from_secs(60)).await;
        session.start();
    });
    assert_eq!(session.keys(), 0);
}
