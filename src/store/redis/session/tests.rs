use std::ops::RangeInclusive;
use std::sync::Weak;
use std::time::Duration;

use super::super::cluster::{Seeds, SlotMap};
use super::super::slots::{SLOTS, Slot};
use super::*;
use crate::store::contract::{
    Answer, DroppedOps, Op, Outcome, Owner, StoreEvent, StoreEvents, SubmittedOp,
};
use crate::store::send_window::Limits;

struct Nobody;

impl StoreEvents for Nobody {
    fn on_events(&self, _: Vec<StoreEvent>) {}

    fn uses(&self, _: &KeyScope) -> bool {
        false
    }

    fn waits(&self, _: &str) -> bool {
        false
    }

    fn failed(&self, _: &(dyn std::any::Any + Send)) {
        unreachable!("no task panics here")
    }
}

fn session() -> RedisSession {
    let seeds = Seeds::parse(&["redis://a:1".into()]).unwrap();
    let config = SessionConfig {
        prefix: "lock".into(),
        instance: "a1".into(),
        ttl: Duration::from_secs(30),
        response_timeout: Duration::from_secs(1),
        listener: Weak::<Nobody>::new(),
    };
    RedisSession::new(Topology::Cluster(seeds), None, config)
}

const FIRST: RangeInclusive<Slot> = 0..=8_191;
const SECOND: RangeInclusive<Slot> = 8_192..=16_383;

/// Without a runtime, so that nobody connects.
fn install(session: &RedisSession, map: [(&str, RangeInclusive<Slot>); 2]) -> Vec<String> {
    let map: SlotMap = map.map(|(node, slots)| (node.into(), slots)).into();
    session.shared.change(|change| {
        change.state.unsettled.clear();
        change.install(map);
        let nodes = change.state.nodes.iter();
        nodes.map(|node| node.address.to_string()).collect()
    })
}

fn unsettled(session: &RedisSession) -> SlotSet {
    session.shared.lock().unsettled.clone()
}

/// Else it would be asked for the map for ever, and might say that it has all slots.
#[test]
fn a_node_that_has_left_the_map_is_forgotten() {
    let session = session();
    assert_eq!(
        install(&session, [("a:1", FIRST), ("b:1", SECOND)]),
        ["a:1", "b:1"]
    );
    assert_eq!(unsettled(&session).len(), SLOTS);
    assert_eq!(
        install(&session, [("a:1", FIRST), ("a:1", SECOND)]),
        ["a:1", ""]
    );
    assert_eq!(
        unsettled(&session),
        SECOND.collect(),
        "only what has changed"
    );
    assert_eq!(
        install(&session, [("c:1", FIRST), ("a:1", SECOND)]),
        ["a:1", "c:1"]
    );
    assert_eq!(unsettled(&session), FIRST.collect());
}

/// Its place has no address to connect to, and may be another node's before a task runs.
#[test]
fn a_forgotten_node_has_no_task_on_the_next_runtime() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    session.shared.lack_task();
    session.start();
    let state = session.shared.lock();
    let have_tasks: Vec<_> = state.nodes.iter().map(|node| node.has_task).collect();
    assert_eq!(have_tasks, [true, false]);
}

#[test]
fn a_node_for_which_something_is_pending_is_not_forgotten() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let owner = Owner::exclusive(1);
    let mut request = Request::new(RequestKind::Op(SubmittedOp::unattended(
        "k",
        Op::Release { owner },
    )));
    request.asking = Some(1);
    session.shared.change(|change| change.route(request));
    assert_eq!(
        install(&session, [("a:1", FIRST), ("c:1", SECOND)]),
        ["a:1", "b:1", "c:1"]
    );
    session.shared.lock().nodes[1].inbox.clear();
    assert_eq!(
        install(&session, [("a:1", FIRST), ("c:1", SECOND)]),
        ["a:1", "", "c:1"]
    );
}

/// Each place in which a session keeps requests: none of them is lost there without a word.
#[test]
fn a_request_that_is_lost_inside_is_told_as_lost() {
    let lost = Arc::<DroppedOps>::default();
    let session = session();
    let submit = |key: &str, op: &Op| {
        session.submit(SubmittedOp::new(key.into(), op.clone(), &lost));
        assert!(lost.is_empty(), "the session has it");
    };
    let (owner, ttl, score) = (Owner::exclusive(1), Duration::from_secs(30), None);
    let release = Op::Release { owner };
    let enter = Op::Enter { owner, ttl, score };
    let expect_lost = |key: &str, op: &Op| assert_eq!(lost.take(), [(key.into(), op.clone())]);

    submit("unrouted", &release);
    session.shared.lock().unrouted.clear();
    expect_lost("unrouted", &release);

    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    submit("inbox", &release);
    session.shared.lock().nodes[0].inbox.clear();
    expect_lost("inbox", &release);

    let mut request = Request::new(RequestKind::Op(SubmittedOp::new(
        "k".into(),
        enter.clone(),
        &lost,
    )));
    request.slot = session.shared.names.slot("k");
    session.shared.change(|change| change.route(request));
    assert!(lost.is_empty(), "it waits for its subscription");
    session.shared.lock().subscriptions = Default::default();
    expect_lost("k", &enter);

    let mut window = SendWindow::new(Limits::USUAL);
    submit("window", &release);
    session.shared.take(0, &mut window, &mut Vec::new());
    let (_, sent) = window.next_call().expect("it may go");
    window.sent(sent);
    drop(window);
    expect_lost("window", &release);
}

/// Nobody hears of it but by the request that asks the replicas.
#[test]
fn an_acquisition_that_is_lost_on_its_way_to_the_replicas_is_told_as_lost() {
    let lost = Arc::<DroppedOps>::default();
    let mut session = session();
    let shared = Arc::get_mut(&mut session.shared).expect("it has no tasks");
    shared.min_replicas = MinReplicas::new(1, Duration::from_secs(1)).unwrap();
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    let (owner, ttl) = (Owner::exclusive(1), Duration::from_secs(30));
    let op = Op::Attempt { owner, ttl };
    session.submit(SubmittedOp::new("k".into(), op.clone(), &lost));
    session.shared.change(|change| {
        let request = change.state.nodes[0].inbox.pop().expect("it is sent");
        let outcome = Outcome::Won { epoch: 1 };
        change.answer(request, Ok(Answer { at: 1, outcome }));
    });
    assert!(lost.is_empty(), "it is to be confirmed");
    assert_eq!(session.shared.lock().nodes[0].inbox.len(), 1);
    session.shared.lock().nodes[0].inbox.clear();
    assert_eq!(lost.take(), [("k".into(), op)]);
}
