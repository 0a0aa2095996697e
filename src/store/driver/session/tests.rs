use std::future::pending;
use std::ops::RangeInclusive;
use std::sync::Weak;
use std::task::{Context, Poll};
use std::time::Duration;

use super::super::backend::{Address, Call, Hello, Incoming, Link, Replies, Reply, Slot};
use super::*;
use crate::base::CheckedServer;
use crate::store::attempts::SetUps;
use crate::store::contract::{
    Answer, DroppedOps, Grant, Op, Outcome, Owner, StoreEvent, StoreEvents, SubmittedOp,
};
use crate::store::driver::ServerClock;
use crate::store::send_window::{Limits, SendWindow};
use futures::StreamExt;

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

/// Servers that have half of the keys each, and never answer.
struct Halves {
    address: Address,
    confirms: bool,
}

const SLOTS: usize = 16_384;

impl Backend for Halves {
    type Link = Silent;

    fn address(&self) -> &Address {
        &self.address
    }

    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    fn slots(&self) -> usize {
        SLOTS
    }

    fn slot(&self, key: &str) -> Slot {
        key.bytes().map(Slot::from).sum()
    }

    fn confirms(&self) -> bool {
        self.confirms
    }

    fn connect<'a>(
        self: &'a Arc<Self>,
        _: Hello<'a, ()>,
        _: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<Silent>, StoreError>> {
        pending().boxed()
    }

    fn connect_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn find_map(&self, _: Vec<Address>) -> BoxFuture<'_, Result<SlotMap, StoreError>> {
        pending().boxed()
    }

    fn error(&self, _: &Address, trouble: Trouble<'_>) -> StoreError {
        StoreError::new(format!("{trouble:?}"))
    }

    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>> {
        pending().boxed()
    }

    fn scan(
        self: &Arc<Self>,
        _: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        futures::stream::pending().boxed()
    }
}

struct Silent;

impl Link for Silent {
    type Answer = ();
    type Trace = ();

    fn send(&mut self, _: Call<'_>) {}

    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Result<Incoming<()>, StoreError>> {
        Poll::Pending
    }

    fn read(&mut self, _: usize, (): (), _: &mut [Request]) -> Result<Replies, StoreError> {
        unreachable!("it never answers")
    }

    fn is_quiet(&self) -> bool {
        true
    }

    fn trace(&self) -> Option<()> {
        None
    }
}

fn session() -> DriverSession<Halves> {
    session_that(false)
}

fn session_that(confirms: bool) -> DriverSession<Halves> {
    let config = SessionConfig {
        prefix: "lock".into(),
        instance: "a1".into(),
        ttl: Duration::from_secs(30),
        response_timeout: Duration::from_secs(1),
        listener: Weak::<Nobody>::new(),
        tasks: Arc::default(),
    };
    let address = "a:1".into();
    DriverSession::new(Arc::new(Halves { address, confirms }), config)
}

const FIRST: RangeInclusive<Slot> = 0..=8_191;
const SECOND: RangeInclusive<Slot> = 8_192..=16_383;

/// Without a runtime, so that nobody connects.
fn install(session: &DriverSession<Halves>, map: [(&str, RangeInclusive<Slot>); 2]) -> Vec<String> {
    let map: SlotMap = map.map(|(node, slots)| (node.into(), slots)).into();
    session.shared.change(|change| {
        change.state.unsettled.clear();
        change.install(map);
        let nodes = change.state.nodes.iter();
        nodes.map(|node| node.address.to_string()).collect()
    })
}

fn unsettled(session: &DriverSession<Halves>) -> SlotSet {
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

/// G1: else it would be connected to again without a pause, if it came back into the map.
#[test]
fn g1_a_node_that_has_left_the_map_keeps_its_pause() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    session.shared.change(|change| {
        let later = Instant::now() + Duration::from_secs(3600);
        change.state.nodes[1].backoff.failed(later, None);
    });
    assert_eq!(
        install(&session, [("a:1", FIRST), ("c:1", SECOND)]),
        ["a:1", "b:1", "c:1"]
    );
}

/// On a runtime that nobody drives: what is started there does nothing.
fn on_a_runtime(run: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let _guard = runtime.enter();
    run();
}

fn has_task(session: &DriverSession<Halves>, id: NodeId) -> bool {
    session.shared.lock().nodes[id].has_task
}

/// A ticket waits for the subscription to its grants. The node's task may sleep, or have ended.
#[test]
fn a_ticket_wakes_the_node_that_is_to_push_its_grants() {
    let session = session();
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    let wake = session.shared.lock().nodes[0].wake.clone();
    assert!(wake.notified().now_or_never().is_none());
    let (old, new) = (Owner::exclusive(1), Owner::exclusive(2));
    let ttl = Duration::from_secs(30);
    let turn = || SubmittedOp::unattended("k", Op::Yield { old, new, ttl });
    on_a_runtime(|| {
        session.submit(turn());
        assert!(has_task(&session, 0), "it is started");
    });
    assert!(wake.notified().now_or_never().is_some(), "it is woken");

    // W5: if the node cannot push, somebody must tell the registry so, or its key is not asked for any more.
    let reason = "no right to subscribe".to_owned();
    session.shared.lock().nodes[0].no_push = Some(reason);
    on_a_runtime(|| {
        let mut request = Request::new(RequestKind::Op(turn()));
        request.slot = session.shared.backend.slot("k");
        let told = session.shared.change(|change| {
            change.route(request);
            std::mem::take(&mut change.effects.events)
        });
        let [StoreEvent::Replied { result, .. }] = &told[..] else {
            panic!("{told:?}");
        };
        assert!(matches!(result, Err(OpError::Unsent(_))), "{result:?}");
        assert!(session.shared.lock().search.is_running);
    });
}

/// The registry asks again for a key, and renews a lease, when it is told that the key's node is connected. So a node to
/// which slots have moved is connected to, and after the end of a runtime somebody tells of the nodes that stand.
#[test]
fn keys_that_wait_for_a_connection_have_somebody_who_makes_it_or_tells_of_it() {
    let moved = session();
    install(&moved, [("a:1", FIRST), ("a:1", SECOND)]);
    on_a_runtime(|| {
        install(&moved, [("a:1", FIRST), ("b:1", SECOND)]);
        assert!(has_task(&moved, 1));
    });

    for waits in [false, true] {
        let left = session();
        install(&left, [("a:1", FIRST), ("a:1", SECOND)]);
        left.shared.lock().unsettled = waits.then_some(7).into_iter().collect();
        on_a_runtime(|| {
            left.shared.lack_task();
            left.start();
            assert_eq!(left.shared.lock().search.is_running, waits);
        });
    }
}

/// What a change tells: `None` of an outage, and of each connection whether the whole store is back.
fn told(
    session: &DriverSession<Halves>,
    change: impl FnOnce(&mut Change<'_, Halves>),
) -> Vec<Option<bool>> {
    let complete = |event: StoreEvent| match event {
        StoreEvent::Up { complete, .. } => Some(complete),
        StoreEvent::Down { .. } => None,
        other => panic!("{other:?}"),
    };
    session.shared.change(|it| {
        change(it);
        it.effects.events.drain(..).map(complete).collect()
    })
}

/// The registry hears once that an outage is over, when all servers are back that are needed. If nobody needs a server
/// that was lost, no connection tells it so.
#[test]
fn the_end_of_an_outage_is_told_once_also_if_nobody_needs_the_server() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let settles = || told(&session, |change| change.settle());
    let loses_b = || {
        told(&session, |change| {
            change.state.nodes[1].is_lost = true;
            change.give_up(1, Vec::new(), Vec::new(), StoreError::new("gone"));
        })
    };
    // Its slots are nobody's any more.
    let needs_no_b = || {
        session.shared.change(|change| {
            change.state.unsettled.clear();
            change.state.nodes[1].is_lost = false;
        });
    };
    session.shared.change(|change| {
        for node in &mut change.state.nodes {
            node.is_connected = true;
        }
    });
    assert_eq!(settles(), [Some(true), Some(true)]);
    assert!(settles().is_empty(), "it is told once");

    assert_eq!(loses_b(), [None]);
    assert!(settles().is_empty(), "it is not over");
    needs_no_b();
    assert_eq!(settles(), [Some(true)]);
    assert!(settles().is_empty(), "it is told once");

    // A key of the other server is told of before.
    assert_eq!(loses_b(), [None]);
    session.shared.lock().unsettled.insert(*FIRST.start());
    assert_eq!(settles(), [Some(false)]);
    needs_no_b();
    assert_eq!(settles(), [Some(true)]);
    assert!(settles().is_empty(), "it is told once");
}

/// Nobody is to rely on a connection that has gone with its runtime: neither the keys of the node, nor who asks it for the
/// map.
#[test]
fn a_node_whose_task_has_gone_is_not_connected_any_more() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let (asks, mut asked) = oneshot::channel();
    session.shared.change(|change| {
        let node = &mut change.state.nodes[0];
        node.is_connected = true;
        node.maps.push(asks);
    });
    session.shared.abandoned(0, true, Vec::new(), Vec::new());
    assert!(asked.try_recv().is_err(), "it has no answer");
    let is_up = session.shared.change(|change| {
        change.settle();
        let mut told = change.effects.events.drain(..);
        told.any(|event| matches!(event, StoreEvent::Up { scope, .. } if scope.contains("k")))
    });
    assert!(!is_up);
}

/// Whoever asked for something that was not sent hears why; and the key is told of when its node is connected.
#[test]
fn what_was_not_sent_is_told_with_its_reason() {
    let session = session();
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    session.shared.lock().unsettled.clear();
    let (owner, ttl) = (Owner::exclusive(1), Duration::from_secs(30));
    let mut attempted = session.ask("k".into(), Op::Attempt { owner, ttl });
    let mut seen = session.inspect("k".into());
    assert!((&mut attempted).now_or_never().is_none());
    assert!((&mut seen).now_or_never().is_none());

    // It has waited too long for a connection.
    let within = Duration::ZERO;
    session.shared.change(|change| change.answer_old(0, within));
    match attempted.now_or_never().expect("it is told") {
        Err(OpError::Unsent(error)) => assert!(error.to_string().contains("Silent"), "{error}"),
        other => panic!("{other:?}"),
    }
    let slot = session.shared.backend.slot("k");
    assert_eq!(unsettled(&session), SlotSet::from([slot]));

    let error = StoreError::new("no such server");
    session.shared.lost(0, error, Vec::new(), Vec::new(), None);
    let error = seen.now_or_never().expect("it is told").unwrap_err();
    assert_eq!(error.to_string(), "no such server");
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
    request.slot = session.shared.backend.slot("k");
    session.shared.change(|change| change.route(request));
    assert!(lost.is_empty(), "it waits for its subscription");
    session.shared.lock().subscriptions = Default::default();
    expect_lost("k", &enter);

    let mut window = SendWindow::new(Limits::USUAL);
    submit("window", &release);
    let mut taken = Vec::new();
    session.shared.take(0, &mut taken);
    window.add(taken);
    let (_, sent) = window.next_call().expect("it may go");
    window.sent(sent);
    drop(window);
    expect_lost("window", &release);
}

/// Nobody hears of it but by the request that asks the replicas.
#[test]
fn an_acquisition_that_is_lost_on_its_way_to_the_replicas_is_told_as_lost() {
    let lost = Arc::<DroppedOps>::default();
    let session = session_that(true);
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

/// M4: the call that found the lock busy has served others, and more may fit. The ticket that is entered next may come too
/// late to say so.
#[test]
fn m4_an_attempt_that_becomes_a_ticket_tells_what_was_not_served() {
    let session = session();
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    let (owner, ttl, score) = (Owner::exclusive(1), Duration::from_secs(30), None);
    let enter = Op::Enter { owner, ttl, score };
    session.submit(SubmittedOp::unattended("k", enter));
    let told = session.shared.change(|change| {
        let request = change.state.nodes[0].inbox.pop().expect("it is sent");
        assert!(request.attempts_first);
        let outcome = Outcome::Busy {
            left: None,
            score: None,
            entered: false,
            holder: None,
        };
        let reply = Reply::Done {
            at: 1,
            outcome,
            unserved: true,
        };
        change.on_reply(0, request, reply);
        change.effects.events.len()
    });
    assert_eq!(told, 1, "and the answer is still to come");
}

/// The time for a first connection is each node's own: that the first node was quick says nothing of the others.
#[test]
fn g2_each_node_has_a_first_connection() {
    let session = session();
    let (first, usual) = (Duration::from_secs(5), Duration::ZERO);
    assert_eq!(session.connects_within(), first);
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let connected = || Connected {
        link: Silent,
        no_push: None,
        clock: ServerClock::told(0, Instant::now()),
        identity: None,
    };
    let fail = |id, stood_since| {
        let error = StoreError::new("gone");
        let (sent, unsent) = (Vec::new(), Vec::new());
        session.shared.lost(id, error, sent, unsent, stood_since);
    };
    session.shared.connected(0, "a:1", &connected());
    assert_eq!(session.connects_within(), first, "b was not tried");
    fail(1, None);
    assert_eq!(session.connects_within(), usual, "b cannot be reached");
    session.shared.connected(1, "b:1", &connected());
    assert_eq!(session.connects_within(), usual);
    // A connection ends while nobody uses it.
    fail(1, Some(Instant::now()));
    assert_eq!(session.connects_within(), usual, "it may be used");
    assert_eq!(session.shared.next_attempt(1), None, "nobody uses it");
    assert_eq!(session.connects_within(), first);
    // The server cannot be reached, and nobody waits for it any more.
    fail(1, None);
    assert_eq!(session.shared.next_attempt(1), None);
    assert_eq!(session.connects_within(), usual);
    install(&session, [("a:1", FIRST), ("c:1", SECOND)]);
    assert_eq!(session.connects_within(), first, "c was not tried");
}

/// Else it would be refused there, once the node is connected.
#[test]
fn a_request_that_waits_goes_with_its_slot() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let owner = Owner::exclusive(1);
    session.submit(SubmittedOp::unattended("k", Op::Release { owner }));
    let waiting = || {
        let state = session.shared.lock();
        let waiting = state.nodes.iter().map(|node| node.inbox.len());
        waiting.collect::<Vec<_>>()
    };
    assert_eq!(waiting(), [1, 0]);
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    assert_eq!(waiting(), [1, 0], "its slot stays");
    install(&session, [("b:1", FIRST), ("a:1", SECOND)]);
    assert_eq!(waiting(), [0, 1]);
}

/// One server that answers each call when its connection is polled next.
struct Prompt {
    address: Address,
}

struct PromptLink {
    calls: std::collections::VecDeque<(usize, tokio::time::Instant)>,
}

impl Backend for Prompt {
    type Link = PromptLink;

    fn address(&self) -> &Address {
        &self.address
    }

    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    fn connect<'a>(
        self: &'a Arc<Self>,
        _: Hello<'a, ()>,
        _: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<PromptLink>, StoreError>> {
        let link = PromptLink {
            calls: Default::default(),
        };
        let connected = Connected {
            link,
            no_push: None,
            clock: ServerClock::told(0, tokio::time::Instant::now()),
            identity: None,
        };
        std::future::ready(Ok(connected)).boxed()
    }

    fn connect_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    fn error(&self, _: &Address, trouble: Trouble<'_>) -> StoreError {
        StoreError::new(format!("{trouble:?}"))
    }

    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>> {
        pending().boxed()
    }

    fn scan(
        self: &Arc<Self>,
        _: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        futures::stream::pending().boxed()
    }
}

impl Link for PromptLink {
    type Answer = ();
    type Trace = ();

    fn send(&mut self, call: Call<'_>) {
        self.calls.push_back((call.lane, call.now));
    }

    fn poll_next(&mut self, _: &mut Context<'_>) -> Poll<Result<Incoming<()>, StoreError>> {
        crate::base::model::step();
        let Some((lane, sent_at)) = self.calls.pop_front() else {
            return Poll::Pending;
        };
        Poll::Ready(Ok(Incoming::Answer {
            lane,
            sent_at,
            answer: (),
        }))
    }

    fn read(&mut self, _: usize, (): (), requests: &mut [Request]) -> Result<Replies, StoreError> {
        let done = Reply::Done {
            at: 1,
            outcome: Outcome::Gone { held: true },
            unserved: false,
        };
        let list = vec![done; requests.len()];
        Ok(Replies {
            at: Some(1),
            list,
            end: None,
        })
    }

    fn is_quiet(&self) -> bool {
        self.calls.is_empty()
    }

    fn trace(&self) -> Option<()> {
        None
    }
}

fn prompt_session() -> DriverSession<Prompt> {
    let config = SessionConfig {
        prefix: "lock".into(),
        instance: "a1".into(),
        ttl: Duration::from_secs(30),
        response_timeout: Duration::from_secs(1),
        listener: Weak::<Nobody>::new(),
        tasks: Arc::default(),
    };
    let address = "a:1".into();
    DriverSession::new(Arc::new(Prompt { address }), config)
}

/// Two callers ask for something at the same time, while the first task of the node begins. It ends if it finds nothing to do,
/// and another one is started for what comes then. Each of them is answered.
///
/// Finds: the task is notified with `notify_waiters`, which one does not hear that is about to sleep; or the task finds
/// its inbox empty and notes that it has ended under two locks.
#[test]
fn model_each_request_is_taken_and_answered() {
    crate::base::model::check_with_tasks(|| {
        let session = Arc::new(prompt_session());
        session.start();
        let ask = |key: &'static str| {
            let session = session.clone();
            move || {
                let owner = Owner::exclusive(1);
                for _ in 0..2 {
                    let answered = session.ask(key.into(), Op::Release { owner });
                    let answer = shuttle::future::block_on(answered).unwrap();
                    assert_eq!(answer.outcome, Outcome::Gone { held: true });
                }
            }
        };
        let other = shuttle::thread::spawn(ask("a"));
        ask("b")();
        other.join().unwrap();
    });
}

/// The session is dropped while a caller asks something. The caller is answered, or hears that nobody answers, and the
/// node's task ends.
///
/// Finds: `closed` waits for a change after it has subscribed, so a task that begins after the drop never ends.
#[test]
fn model_a_session_that_is_dropped_leaves_nobody_waiting() {
    crate::base::model::check_with_tasks(|| {
        let session = prompt_session();
        session.start();
        let shared = Arc::downgrade(&session.shared);
        let owner = Owner::exclusive(1);
        let answered = session.ask("a".into(), Op::Release { owner });
        let end = shuttle::thread::spawn(move || drop(session));
        let _answer_or_error = shuttle::future::block_on(answered);
        end.join().unwrap();
        while shared.strong_count() > 0 {
            shuttle::thread::yield_now();
        }
    });
}

/// Nobody waits for keys of a node that nobody needs. For those of others somebody does.
#[test]
fn a_node_that_nobody_needs_has_no_key_that_waits_for_it() {
    let session = session();
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    assert_eq!(unsettled(&session).len(), SLOTS);
    assert_eq!(session.shared.next_attempt(1), None);
    assert_eq!(unsettled(&session), FIRST.collect());
}

/// The node may have its task on another runtime, which goes on. The key is told of when somebody starts what is lacking.
#[test]
fn a_request_that_is_delayed_on_a_runtime_that_ends_leaves_no_key_waiting() {
    let session = session();
    install(&session, [("a:1", FIRST), ("a:1", SECOND)]);
    session.shared.lock().unsettled.clear();
    session.shared.lacks_task.store(false, Ordering::Relaxed);
    on_a_runtime(|| {
        let owner = Owner::exclusive(1);
        let op = Op::Release { owner };
        let mut request = Request::new(RequestKind::Op(SubmittedOp::unattended("k", op)));
        request.slot = session.shared.backend.slot("k");
        let error = StoreError::new("not now");
        session.shared.change(|change| change.delay(request, error));
    });
    assert_eq!(unsettled(&session).len(), 1);
    assert!(session.shared.lacks_task.load(Ordering::Relaxed));
}

#[test]
fn a_grant_is_confirmed_at_the_node_that_has_its_key() {
    let session = session_that(true);
    install(&session, [("a:1", FIRST), ("b:1", SECOND)]);
    let key = "z".repeat(100);
    assert!(SECOND.contains(&session.shared.backend.slot(&key)));
    let grant = Grant {
        owner: Owner::exclusive(1),
        ttl: Duration::from_secs(30),
        epoch: 1,
        at: 1,
    };
    let key = key.into();
    let heard = Received::Heard(StoreEvent::Granted { key, grant });
    session.shared.received(1, &mut vec![heard]);
    let state = session.shared.lock();
    let waiting = state.nodes.iter().map(|node| node.inbox.len());
    assert!(waiting.eq([0, 1]));
}

/// Else users would be given SQL that fences nothing.
#[test]
fn a_store_without_transactions_has_no_fence() {
    assert_eq!(session().fence(), None);
}
