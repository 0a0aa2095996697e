//! What a registry would be to its session: somebody who asks, listens and remembers.
#![allow(
    clippy::result_large_err,
    reason = "an event that does not match is handed back"
)]

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::support::RedisServer;
use crate::base::StoreError;
use crate::store::contract::{
    Answer, Grant, KeyScope, Op, OpError, Outcome, Owner, Session, SessionConfig, StoreEvent,
    StoreEvents, SubmittedOp,
};
use crate::store::{LockStore, RedisStore};

/// Every wait of a test ends by then, one way or the other.
pub(super) const BOUND: Duration = Duration::from_secs(30);

pub(super) const TTL: Duration = Duration::from_secs(30);

type Replied = (Arc<str>, Op, Result<Answer, OpError>);

/// Passes the events on.
struct Recorder(UnboundedSender<StoreEvent>);

impl StoreEvents for Recorder {
    fn on_events(&self, events: Vec<StoreEvent>) {
        for event in events {
            // A test that has ended does not listen any more.
            let _ = self.0.send(event);
        }
    }

    fn uses(&self, _: &KeyScope) -> bool {
        true
    }

    fn waits(&self, _: &str) -> bool {
        true
    }

    fn failed(&self, _: &(dyn std::any::Any + Send)) {
        unreachable!("no task panics here")
    }
}

/// A session, and all that it said.
pub(super) struct Registry {
    pub(super) session: Option<Arc<dyn Session>>,
    instance: &'static str,
    event: UnboundedReceiver<StoreEvent>,
    heard: VecDeque<StoreEvent>,
    _listener: Arc<dyn StoreEvents>,
}

/// How a session is opened.
pub(super) struct Settings {
    pub(super) url: String,
    pub(super) instance: &'static str,
    pub(super) response_timeout: Duration,
    /// How many must have what is acquired, and within which time.
    pub(super) replicas: (u32, Duration),
}

impl Settings {
    pub(super) fn new(server: &RedisServer, instance: &'static str) -> Self {
        Self::url(server.url(), instance)
    }

    pub(super) fn url(url: String, instance: &'static str) -> Self {
        Self {
            url,
            instance,
            response_timeout: BOUND,
            replicas: (0, BOUND),
        }
    }

    pub(super) fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    pub(super) fn replicas(mut self, least: u32, within: Duration) -> Self {
        self.replicas = (least, within);
        self
    }

    /// Opens the session, and starts nothing.
    pub(super) fn open(self) -> Registry {
        LazyLock::force(&EVERYBODY_LISTENS);
        let (sender, event) = unbounded_channel();
        let listener: Arc<dyn StoreEvents> = Arc::new(Recorder(sender));
        let (least, within) = self.replicas;
        let builder = RedisStore::builder(&self.url).min_replicas(least, within);
        let store = builder.connect_lazy().unwrap();
        let session = store.open(SessionConfig {
            prefix: "lock".into(),
            instance: self.instance.into(),
            ttl: Duration::from_secs(30),
            response_timeout: self.response_timeout,
            listener: Arc::downgrade(&listener),
            tasks: Arc::default(),
        });
        Registry {
            session: Some(session),
            instance: self.instance,
            event,
            heard: VecDeque::new(),
            _listener: listener,
        }
    }

    /// Opens and starts the session, and waits until its connection stands.
    pub(super) async fn up(self) -> Registry {
        let mut registry = self.open();
        registry.session().start();
        assert!(registry.up().await, "the server pushes");
        registry
    }
}

impl Registry {
    pub(super) async fn on(server: &RedisServer, instance: &'static str) -> Self {
        Settings::new(server, instance).up().await
    }

    pub(super) fn session(&self) -> &dyn Session {
        &**self.session.as_ref().expect("not dropped by the test")
    }

    /// The owner's text on the server.
    pub(super) fn text(&self, owner: u64) -> String {
        format!("{}:{owner}", self.instance)
    }

    /// The ticket's text on the server.
    pub(super) fn ticket(&self, owner: u64) -> String {
        format!("{}:{owner} {}", self.instance, TTL.as_millis())
    }

    pub(super) fn channel(&self) -> String {
        format!("lock:~grant:{}", self.instance)
    }

    pub(super) fn submit(&self, key: &str, op: Op) {
        self.session().submit(SubmittedOp::unattended(key, op));
    }

    /// Submits an op and waits for its reply.
    pub(super) async fn ask(&mut self, key: &str, op: Op) -> Result<Answer, OpError> {
        self.submit(key, op.clone());
        self.reply(key, &op).await
    }

    /// The same for an op that the server must do.
    pub(super) async fn outcome(&mut self, key: &str, op: Op) -> Outcome {
        self.ask(key, op).await.expect("an outcome").outcome
    }

    pub(super) async fn reply(&mut self, key: &str, op: &Op) -> Result<Answer, OpError> {
        let (_, _, result) = self.replied(|of, asked| of == key && asked == op).await;
        result
    }

    pub(super) async fn replied(&mut self, mut wanted: impl FnMut(&str, &Op) -> bool) -> Replied {
        self.hear(|event| match event {
            StoreEvent::Replied { submitted, result } if wanted(&submitted.key, &submitted.op) => {
                Ok((submitted.key.clone(), submitted.op.clone(), result))
            }
            other => Err(other),
        })
        .await
    }

    pub(super) async fn granted(&mut self) -> (Arc<str>, Grant) {
        self.hear(|event| match event {
            StoreEvent::Granted { key, grant } => Ok((key, grant)),
            other => Err(other),
        })
        .await
    }

    /// Waits until a connection stands; whether it carries grants.
    pub(super) async fn up(&mut self) -> bool {
        self.hear(|event| match event {
            StoreEvent::Up { queue, .. } => Ok(queue),
            other => Err(other),
        })
        .await
    }

    pub(super) async fn down(&mut self) -> StoreError {
        self.hear(|event| match event {
            StoreEvent::Down { error, .. } => Ok(error),
            other => Err(other),
        })
        .await
    }

    /// The next event of any kind.
    pub(super) async fn next(&mut self) -> StoreEvent {
        self.hear(Ok).await
    }

    /// Something that was told already, and not yet asked about.
    pub(super) fn heard_by_now(&mut self) -> Option<StoreEvent> {
        self.heard
            .pop_front()
            .or_else(|| self.event.try_recv().ok())
    }

    /// Nothing that `unwanted` knows is told before the server has answered one more question.
    pub(super) async fn has_not_heard(&mut self, unwanted: impl Fn(&StoreEvent) -> bool) {
        let answer = self.session().inspect("nothing".into());
        let answer = tokio::time::timeout(BOUND, answer).await.expect("in time");
        answer.expect("an answer");
        while let Some(event) = self.heard_by_now() {
            assert!(!unwanted(&event), "{event:?}");
        }
    }

    /// The first event that matches; the others stay for later.
    async fn hear<T>(&mut self, mut fits: impl FnMut(StoreEvent) -> Result<T, StoreEvent>) -> T {
        let mut passed = VecDeque::new();
        let until = tokio::time::Instant::now() + BOUND;
        let found = loop {
            let event = match self.heard.pop_front() {
                Some(event) => event,
                None => match tokio::time::timeout_at(until, self.event.recv()).await {
                    Ok(event) => event.expect("the recorder lives"),
                    Err(_) => panic!("not heard within {BOUND:?}; heard {passed:?}"),
                },
            };
            match fits(event) {
                Ok(found) => break found,
                Err(event) => passed.push_back(event),
            }
        };
        passed.append(&mut self.heard);
        self.heard = passed;
        found
    }
}

pub(super) fn attempt(owner: u64) -> Op {
    Op::Attempt {
        owner: Owner::exclusive(owner),
        ttl: TTL,
    }
}

pub(super) fn enter(owner: u64) -> Op {
    Op::Enter {
        owner: Owner::exclusive(owner),
        ttl: TTL,
        score: None,
    }
}

pub(super) fn enter_at(owner: u64, score: u64) -> Op {
    Op::Enter {
        owner: Owner::exclusive(owner),
        ttl: TTL,
        score: Some(score),
    }
}

pub(super) fn withdraw(owner: u64) -> Op {
    Op::Withdraw {
        owner: Owner::exclusive(owner),
        ttl: TTL,
    }
}

pub(super) fn release(owner: u64) -> Op {
    Op::Release {
        owner: Owner::exclusive(owner),
    }
}

pub(super) fn yield_turn(old: u64, new: u64) -> Op {
    Op::Yield {
        old: Owner::exclusive(old),
        new: Owner::exclusive(new),
        ttl: TTL,
    }
}

pub(super) fn renew(owner: u64, ttl: Duration) -> Op {
    Op::Renew {
        owner: Owner::exclusive(owner),
        ttl,
        within: ttl,
    }
}

pub(super) const HELD: Outcome = Outcome::Gone { held: true };
pub(super) const NOT_HELD: Outcome = Outcome::Gone { held: false };

/// The epoch of a win.
#[track_caller]
pub(super) fn won(outcome: &Outcome) -> u64 {
    match outcome {
        Outcome::Won { epoch } => *epoch,
        other => panic!("not won: {other:?}"),
    }
}

/// The place of a ticket.
#[track_caller]
pub(super) fn place(outcome: &Outcome) -> u64 {
    match outcome {
        Outcome::Busy {
            score: Some(score), ..
        } => *score,
        other => panic!("no place: {other:?}"),
    }
}

/// What a refusal says, and whether asking again may help.
#[track_caller]
pub(super) fn refused(result: Result<Answer, OpError>) -> (String, bool) {
    match result {
        Err(OpError::Refused(error)) => (error.to_string(), error.is_retryable()),
        other => panic!("not refused: {other:?}"),
    }
}

#[track_caller]
pub(super) fn unknown(result: Result<Answer, OpError>) -> StoreError {
    match result {
        Err(OpError::Unknown(error)) => error,
        other => panic!("not unknown: {other:?}"),
    }
}

#[track_caller]
pub(super) fn unsent(result: Result<Answer, OpError>) -> StoreError {
    match result {
        Err(OpError::Unsent(error)) => error,
        other => panic!("not unsent: {other:?}"),
    }
}

/// Members and scores of a lock's queue, in order.
pub(super) fn queue(server: &RedisServer, lock: &str) -> Vec<(String, u64)> {
    server.ask(&[
        "ZRANGE",
        &format!("{{{lock}}}:~queue2"),
        "0",
        "-1",
        "WITHSCORES",
    ])
}

/// Never asked for anything. An event that nobody listens to when it is met first is switched off
/// for the whole process, and a collector that another test's thread makes just then misses it.
static EVERYBODY_LISTENS: LazyLock<tracing::Dispatch> = LazyLock::new(|| {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(std::io::sink)
        .finish();
    tracing::Dispatch::new(subscriber)
});
