//! A server that connects and answers as a test says. Its clock is paused.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex as StdMutex, PoisonError};
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::channel::{mpsc, oneshot};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use tokio::time::sleep;

use super::super::super::backend::{Next, Refusal, Replies, Slot, SlotMap};
use super::super::*;
use crate::base::CheckedServer;
use crate::store::contract::{
    KeyScope, Op, Outcome, Owner, ServerTime, Session, SessionConfig, StoreEvents,
};
use crate::store::driver::{DriverSession, Order};
use crate::store::send_window::Limits;

pub(super) const CONNECTS_WITHIN: Duration = Duration::from_secs(5);

pub(super) const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

pub(super) const TTL: Duration = Duration::from_secs(30);

pub(super) fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// What becomes of an attempt to connect.
pub(super) enum Plan {
    Stands,
    /// It stands, and cannot push.
    Mute,
    Fails(Duration, StoreError),
    Hangs,
}

pub(super) fn fails(text: &str) -> Plan {
    Plan::Fails(Duration::ZERO, StoreError::new(text))
}

/// An attempt to connect, as the server saw it.
pub(super) struct Attempt {
    pub(super) at: Instant,
    pub(super) is_beside: bool,
}

/// A call, as the server saw it.
pub(super) struct Asked {
    pub(super) at: Instant,
    pub(super) of_use: ServerTime,
    pub(super) ops: Vec<Op>,
    /// Whether the first of them names the lock alone.
    pub(super) is_bare: bool,
    /// Whether the server is asked though it has not its slot yet.
    pub(super) is_asking: bool,
}

/// What the server and the registry have seen.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) plans: VecDeque<Plan>,
    pub(super) attempts: Vec<Attempt>,
    pub(super) calls: Vec<Asked>,
    pub(super) orders: Vec<(String, bool)>,
    pub(super) to_confirm: Vec<Request>,
    /// When connections were closed.
    pub(super) closed: Vec<Instant>,
    /// What is said on each connection.
    pub(super) links: Vec<mpsc::UnboundedSender<Result<Said, StoreError>>>,
    /// To which node each of them is.
    pub(super) nodes: Vec<Address>,
    /// When it was asked for the map.
    pub(super) maps: Vec<Instant>,
    /// How often nobody is found who has the map.
    pub(super) no_maps: usize,
    /// The nodes that were known when the map was asked for last.
    pub(super) known: Vec<Address>,
    /// What those are sent who ask for the map on the connection.
    pub(super) map: Option<SlotMap>,
    pub(super) events: Vec<(Instant, StoreEvent)>,
}

pub(super) enum Said {
    Replies(Replies),
    Other(Received),
}

/// What the server is.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Alone,
    /// Its acquisitions are to be confirmed.
    Confirms,
    /// It has most slots of a cluster. One is nobody's.
    Node,
}

pub(super) struct Fake {
    pub(super) address: Address,
    pub(super) kind: Kind,
    /// Whether node b has a slot. Else that is this one's, too.
    pub(super) has_b: AtomicBool,
    /// Whether the registry needs its connections.
    pub(super) is_used: AtomicBool,
    pub(super) seen: StdMutex<Seen>,
}

impl Fake {
    pub(super) fn map(&self) -> SlotMap {
        let own = |slots| (self.address.clone(), slots);
        match self.has_b.load(Ordering::Relaxed) {
            true => vec![own(0..=1), ("b:1".into(), 2..=2)],
            false => vec![own(0..=2)],
        }
    }

    pub(super) fn see<R>(&self, look: impl FnOnce(&mut Seen) -> R) -> R {
        look(&mut self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says something on the last connection, and lets the task hear it.
    pub(super) async fn says(&self, said: Result<Said, StoreError>) {
        self.see(|seen| {
            let link = seen.links.last().expect("one stands");
            link.unbounded_send(said).expect("it is read");
        });
        sleep(ms(1)).await;
    }

    /// One reply to each request of the oldest call.
    pub(super) async fn replies<const N: usize>(&self, list: [Reply; N]) {
        let list = list.into();
        let replies = Replies {
            list,
            ..Replies::default()
        };
        self.says(Ok(Said::Replies(replies))).await;
    }

    pub(super) fn calls(&self) -> usize {
        self.see(|seen| seen.calls.len())
    }

    /// The answers that the registry got, in its words.
    pub(super) fn answers(&self) -> Vec<String> {
        let answer = |event: &StoreEvent| match event {
            StoreEvent::Replied { submitted, result } => {
                let letter = char::from(submitted.op.letter());
                Some(match result {
                    Ok(answer) => format!("{letter} {:?}", answer.outcome),
                    Err(OpError::Unknown(error)) => format!("{letter} unknown: {error}"),
                    Err(OpError::Refused(error)) => format!("{letter} refused: {error}"),
                    Err(error) => format!("{letter} {error:?}"),
                })
            }
            _ => None,
        };
        self.see(|seen| {
            seen.events
                .iter()
                .filter_map(|(_, it)| answer(it))
                .collect()
        })
    }
}

impl StoreEvents for Fake {
    fn on_events(&self, events: Vec<StoreEvent>) {
        let now = Instant::now();
        self.see(|seen| seen.events.extend(events.into_iter().map(|it| (now, it))));
    }

    fn uses(&self, scope: &KeyScope) -> bool {
        let is_used = self.is_used.load(Ordering::Relaxed);
        is_used && ["k", "of b"].iter().any(|key| scope.contains(key))
    }

    fn waits(&self, _: &str) -> bool {
        false
    }

    fn failed(&self, _: &(dyn std::any::Any + Send)) {
        unreachable!("no task panics here")
    }
}

impl Backend for Fake {
    type Link = FakeLink;

    fn address(&self) -> &Address {
        &self.address
    }

    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    fn slots(&self) -> usize {
        if self.kind == Kind::Node { 4 } else { 1 }
    }

    fn slot(&self, key: &str) -> Slot {
        match key {
            "of b" | "ping 100" => 2,
            "of nobody" => 3,
            _ => 0,
        }
    }

    fn confirms(&self) -> bool {
        self.kind == Kind::Confirms
    }

    fn connect<'a>(
        self: &'a Arc<Self>,
        hello: Hello<'a, ()>,
        _: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<FakeLink>, StoreError>> {
        let attempt = Attempt {
            at: Instant::now(),
            is_beside: hello.is_beside,
        };
        let address = hello.address.clone();
        let plan = self.see(|seen| {
            seen.attempts.push(attempt);
            seen.plans.pop_front()
        });
        async move {
            let no_push = match plan {
                Some(Plan::Stands) => None,
                Some(Plan::Mute) => Some("no right".to_owned()),
                Some(Plan::Fails(after, error)) => {
                    sleep(after).await;
                    return Err(error);
                }
                Some(Plan::Hangs) | None => std::future::pending().await,
            };
            let (says, said) = mpsc::unbounded();
            self.see(|seen| {
                seen.links.push(says);
                seen.nodes.push(address);
            });
            Ok(Connected {
                link: FakeLink {
                    fake: self.clone(),
                    unanswered: VecDeque::new(),
                    told: VecDeque::new(),
                    said,
                },
                no_push,
                clock: ServerClock::told(0, Instant::now()),
                identity: None,
            })
        }
        .boxed()
    }

    fn connect_timeout(&self) -> Duration {
        CONNECTS_WITHIN
    }

    fn find_map(&self, known: Vec<Address>) -> BoxFuture<'_, Result<SlotMap, StoreError>> {
        let has_failed = self.see(|seen| {
            seen.maps.push(Instant::now());
            seen.known = known;
            let has_failed = seen.no_maps > 0;
            seen.no_maps -= usize::from(has_failed);
            has_failed
        });
        let map = match has_failed {
            true => Err(StoreError::new("no map")),
            false => Ok(self.map()),
        };
        sleep(ms(10)).map(|()| map).boxed()
    }

    fn error(&self, _: &Address, trouble: Trouble<'_>) -> StoreError {
        StoreError::new(format!("{trouble:?}"))
    }

    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>> {
        std::future::pending().boxed()
    }

    fn scan(
        self: &Arc<Self>,
        _: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        futures::stream::pending().boxed()
    }
}

pub(super) struct FakeLink {
    fake: Arc<Fake>,
    unanswered: VecDeque<(usize, Instant)>,
    /// Orders are followed at once. To leave a key there is no right.
    told: VecDeque<Order>,
    said: mpsc::UnboundedReceiver<Result<Said, StoreError>>,
}

impl Link for FakeLink {
    type Answer = Replies;
    type Trace = ();

    fn send(&mut self, call: Call<'_>) {
        let ops = call.requests.iter().filter_map(Request::op).cloned();
        let asked = Asked {
            at: call.now,
            of_use: call.of_use,
            ops: ops.collect(),
            is_bare: call.requests[0].is_bare,
            is_asking: call.requests[0].asking.is_some(),
        };
        self.fake.see(|seen| seen.calls.push(asked));
        self.unanswered.push_back((call.lane, call.now));
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Incoming<Self::Answer>, StoreError>> {
        if let Some(order) = self.told.pop_front() {
            let told = match order.number {
                Some(_) => Ok(()),
                None => Err(Refusal {
                    error: StoreError::lasting("no right"),
                    text: String::new(),
                    next: Next::Nothing,
                }),
            };
            return Poll::Ready(Ok(Incoming::Told(order, told)));
        }
        let Poll::Ready(Some(said)) = self.said.poll_next_unpin(cx) else {
            return Poll::Pending;
        };
        Poll::Ready(said.map(|said| match said {
            Said::Replies(answer) => {
                let (lane, sent_at) = self.unanswered.pop_front().expect("a call");
                Incoming::Answer {
                    lane,
                    sent_at,
                    answer,
                }
            }
            Said::Other(received) => Incoming::Other(received),
        }))
    }

    fn read(
        &mut self,
        _: usize,
        answer: Replies,
        _: &mut [Request],
    ) -> Result<Replies, StoreError> {
        Ok(answer)
    }

    fn is_quiet(&self) -> bool {
        self.unanswered.is_empty()
    }

    fn trace(&self) -> Option<()> {
        None
    }

    fn ask_map(&mut self, asked: oneshot::Sender<SlotMap>) {
        if let Some(map) = self.fake.see(|seen| seen.map.take()) {
            let _ = asked.send(map);
        }
    }

    fn confirm(&mut self, request: Request) {
        self.fake.see(|seen| seen.to_confirm.push(request));
    }

    fn subscribe(&mut self, order: Order) {
        let seen = (order.key.to_string(), order.number.is_some());
        self.fake.see(|it| it.orders.push(seen));
        self.told.push_back(order);
    }
}

impl Drop for FakeLink {
    fn drop(&mut self) {
        self.fake.see(|seen| seen.closed.push(Instant::now()));
    }
}

pub(super) fn server(plans: impl IntoIterator<Item = Plan>) -> (Arc<Fake>, DriverSession<Fake>) {
    server_of(Kind::Alone, plans)
}

pub(super) fn server_of(
    kind: Kind,
    plans: impl IntoIterator<Item = Plan>,
) -> (Arc<Fake>, DriverSession<Fake>) {
    let seen = Seen {
        plans: plans.into_iter().collect(),
        ..Seen::default()
    };
    let fake = Arc::new(Fake {
        address: "a:1".into(),
        kind,
        has_b: AtomicBool::new(false),
        is_used: AtomicBool::new(true),
        seen: StdMutex::new(seen),
    });
    let listener: Arc<dyn StoreEvents> = fake.clone();
    let config = SessionConfig {
        prefix: "lock".into(),
        instance: "a1".into(),
        ttl: TTL,
        response_timeout: ANSWERS_WITHIN,
        listener: Arc::downgrade(&listener),
        tasks: Arc::default(),
    };
    let session = DriverSession::new(fake.clone(), config);
    session.start();
    (fake, session)
}

pub(super) fn done(outcome: Outcome) -> Reply {
    Reply::Done {
        at: 1,
        outcome,
        unserved: false,
    }
}

pub(super) fn refused(next: Next) -> Reply {
    Reply::Refused(Refusal {
        error: StoreError::new("not here"),
        text: String::new(),
        next,
    })
}

pub(super) fn release(owner: u64) -> Op {
    let owner = Owner::exclusive(owner);
    Op::Release { owner }
}

pub(super) fn adopt(within: Duration) -> Op {
    Op::Adopt {
        owner: Owner::exclusive(1),
        from: "b1:1".into(),
        ttl: TTL,
        within,
    }
}

pub(super) fn turn(number: u64) -> Op {
    Op::Yield {
        old: Owner::exclusive(2 * number),
        new: Owner::exclusive(2 * number + 1),
        ttl: TTL,
    }
}
