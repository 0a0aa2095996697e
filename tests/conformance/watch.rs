//! Every registry of every case is watched: what it tells must be in order, and complete.

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use lockstream::stream::Events;
use lockstream::{
    BuildError, LockEvent, LockRegistry, LockRegistryBuilder, Mode, Renewal, Repeat, Token,
};
use tokio::time::Instant;

use crate::world::{EVENTUALLY, ms};

/// The events of all registries of a case, each from its beginning.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    began: Instant,
    events: Arc<Mutex<Vec<Receiver<LockEvent>>>>,
}

/// A registry to be, which will be watched.
#[derive(Debug)]
pub(crate) struct Builder {
    builder: LockRegistryBuilder,
    watch: Watch,
}

impl Watch {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            events: Arc::default(),
        }
    }

    pub(crate) fn over(&self, builder: LockRegistryBuilder) -> Builder {
        let watch = self.clone();
        Builder { builder, watch }
    }

    /// Everything that was told, once all registries have gone, in order and complete: a list a registry.
    pub(crate) async fn all(&self) -> Vec<Vec<LockEvent>> {
        let watched = std::mem::take(&mut *self.events.lock().unwrap());
        let mut all = Vec::new();
        for events in watched {
            let (told, ended) = all_of(&events, EVENTUALLY).await;
            assert!(ended, "it does not end: {told:#?}");
            assert_in_order_and_complete(&told, self.began.elapsed());
            all.push(told);
        }
        all
    }

    /// [`all`](Self::all) for cases whose runtimes have gone: where nobody is left to hear the store's word on a release
    /// nothing more is told of it, and only the order can be looked at.
    pub(crate) async fn all_without_runtime(&self) {
        let watched = std::mem::take(&mut *self.events.lock().unwrap());
        for events in watched {
            let (told, ended) = all_of(&events, ms(200)).await;
            if ended {
                assert_in_order_and_complete(&told, self.began.elapsed());
            } else {
                assert_in_order(&told, self.began.elapsed());
            }
        }
    }
}

impl Builder {
    pub(crate) fn build(self) -> Result<LockRegistry, BuildError> {
        let registry = self.builder.build()?;
        let events = registry.every_event();
        self.watch.events.lock().unwrap().push(events);
        Ok(registry)
    }
}

macro_rules! setters {
    ($($name:ident: $type:ty),* $(,)?) => {
        #[allow(dead_code, reason = "for whatever a case may want")]
        impl Builder {
            $(pub(crate) fn $name(mut self, value: $type) -> Self {
                self.builder = self.builder.$name(value);
                self
            })*
        }
    };
}
setters! {
    prefix: &str,
    name: &str,
    ttl: Duration,
    wait: Duration,
    repeat: Repeat,
    renewal: Renewal,
    max_waiters: usize,
    local_passes: u32,
    local_span: Duration,
    response_timeout: Duration,
    renew_while_busy: Duration,
}

/// Every wait ends once: acquired, given up, or refused. Every lease ends once, before the next of its key begins,
/// and tells nothing afterwards. Tokens grow. Nothing took longer than the case.
#[track_caller]
pub(crate) fn assert_in_order_and_complete(told: &[LockEvent], most: Duration) {
    if let Err(fault) = assert_in_order(told, most).end() {
        panic!("{fault}, after {told:#?}");
    }
}

#[track_caller]
fn assert_in_order(told: &[LockEvent], most: Duration) -> Grammar {
    let mut grammar = Grammar::default();
    for (at, event) in told.iter().enumerate() {
        if let Err(fault) = grammar.hear(event, most) {
            let before = &told[at.saturating_sub(20)..=at];
            panic!("{fault}, as the last of {before:#?}");
        }
    }
    grammar
}

/// What is told until the end, if that comes in time.
async fn all_of(events: &Receiver<LockEvent>, within: Duration) -> (Vec<LockEvent>, bool) {
    let mut told = Vec::new();
    let mut until = Instant::now() + within;
    loop {
        match events.try_recv() {
            Ok(event) => {
                told.push(event);
                until = Instant::now() + within;
            }
            Err(TryRecvError::Disconnected) => return (told, true),
            Err(TryRecvError::Empty) if Instant::now() >= until => return (told, false),
            Err(TryRecvError::Empty) => tokio::time::sleep(ms(1)).await,
        }
    }
}

#[derive(Default)]
struct Grammar {
    waiting: HashMap<u64, String>,
    known: HashSet<u64>,
    held: HashMap<(String, Token), Held>,
    newest: HashMap<String, Token>,
    /// What must come next.
    due: Option<Due>,
    up: Option<bool>,
}

struct Held {
    mode: Mode,
    /// Its last renewal was told.
    last: bool,
    /// Its handle was dropped.
    dropped: bool,
}

#[derive(Debug, PartialEq)]
enum Due {
    Acquired(String, Token),
    LastRenewal(String, Token),
}

type Heard = Result<(), String>;

fn must(holds: bool, fault: &str) -> Heard {
    if holds { Ok(()) } else { Err(fault.to_owned()) }
}

impl Grammar {
    fn hear(&mut self, event: &LockEvent, most: Duration) -> Heard {
        let due = self.due.take();
        match (&due, event) {
            (None, _) => {}
            (Some(Due::Acquired(of, due)), LockEvent::Acquired { key, token, .. }) => {
                must((&**key, token) == (of, due), "a pass to another lease")?;
            }
            (Some(Due::LastRenewal(of, due)), LockEvent::LastRenewal { key, token, .. }) => {
                must((&**key, token) == (of, due), "the last renewal of another")?;
            }
            (Some(due), _) => return Err(format!("not {due:?}")),
        }
        match event {
            LockEvent::Waiting { key, waiter, .. } => {
                must(self.known.insert(*waiter), "a waiter waits twice")?;
                self.waiting.insert(*waiter, key.to_string());
            }
            LockEvent::GaveUp {
                key,
                waiter,
                waited,
                ..
            } => {
                must(*waited <= most, "waited for longer than there was time")?;
                self.end_wait(key, *waiter)?;
            }
            LockEvent::QueueFull { key, waiter, .. } => self.end_wait(key, *waiter)?,
            LockEvent::Passed { key, token, .. } => {
                must(token.get() % 64 > 0, "a pass at the beginning of a tenure")?;
                self.due = Some(Due::Acquired(key.to_string(), *token));
            }
            LockEvent::Acquired {
                key,
                waiter,
                token,
                waited,
                mode,
                ..
            } => {
                must(
                    due.is_some() == (token.get() % 64 > 0),
                    "a pass that was not told",
                )?;
                must(*waited <= most, "waited for longer than there was time")?;
                self.end_wait(key, *waiter)?;
                // Shared leases may be told in another order than they were given.
                let newest = self.newest.entry(key.to_string()).or_insert(*token);
                let is_old = *mode == Mode::Exclusive && *token < *newest;
                must(!is_old, "an old token")?;
                *newest = *token.max(newest);
                let held = Held {
                    mode: *mode,
                    last: false,
                    dropped: false,
                };
                let mut others = self.held.iter();
                let meets = others.any(|((other, _), held)| {
                    *other == **key && held.mode == Mode::Exclusive && *mode == Mode::Exclusive
                });
                must(!meets, "two leases on a key")?;
                let before = self.held.insert((key.to_string(), *token), held);
                must(before.is_none(), "two leases with one token")?;
            }
            LockEvent::Renewed { key, token, .. } => {
                let held = self.held(key, *token)?;
                must(!held.dropped, "renewed after it was dropped")?;
                // A new connection renews once more, and that is the last again.
                if held.last {
                    self.due = Some(Due::LastRenewal(key.to_string(), *token));
                }
            }
            LockEvent::LastRenewal { key, token, .. } => self.held(key, *token)?.last = true,
            LockEvent::RenewalUnknown { key, token, .. }
            | LockEvent::RenewalLate { key, token, .. } => {
                self.held(key, *token)?;
            }
            LockEvent::DroppedWhileHeld { key, token, .. } => {
                let held = self.held(key, *token)?;
                must(!held.dropped, "dropped twice")?;
                held.dropped = true;
            }
            LockEvent::Lost {
                key, token, held, ..
            }
            | LockEvent::Released {
                key, token, held, ..
            }
            | LockEvent::Unreleased {
                key, token, held, ..
            }
            | LockEvent::LeftToExpire {
                key, token, held, ..
            }
            | LockEvent::Detached {
                key, token, held, ..
            }
            | LockEvent::Closed {
                key, token, held, ..
            } => {
                must(*held <= most, "held for longer than there was time")?;
                self.held(key, *token)?;
                self.held.remove(&(key.to_string(), *token));
            }
            LockEvent::StoreUp { .. } => {
                must(self.up.replace(true) != Some(true), "up, and up again")?;
            }
            LockEvent::StoreDown { .. } => {
                let up = self.up.replace(false);
                must(up != Some(false), "down, and down again")?;
            }
            LockEvent::RuntimeBusy { .. } => {}
            other => return Err(format!("not expected here: {other:?}")),
        }
        Ok(())
    }

    fn end_wait(&mut self, key: &str, waiter: u64) -> Heard {
        let waited = self.waiting.remove(&waiter);
        must(
            waited.as_deref() == Some(key),
            "the end of a wait that is none",
        )
    }

    fn held(&mut self, key: &str, token: Token) -> Result<&mut Held, String> {
        let held = self.held.get_mut(&(key.to_owned(), token));
        held.ok_or_else(|| "of a lease that is not held".to_owned())
    }

    fn end(self) -> Heard {
        must(self.due.is_none(), "a pass to nobody")?;
        must(self.waiting.is_empty(), "a wait without an end")?;
        must(self.held.is_empty(), "a lease without an end")
    }
}

/// What an event is called, for sequences of them.
pub(crate) fn name(event: &LockEvent) -> &'static str {
    match event {
        LockEvent::Waiting { .. } => "waiting",
        LockEvent::Acquired { .. } => "acquired",
        LockEvent::Passed { .. } => "passed",
        LockEvent::Renewed { .. } => "renewed",
        LockEvent::RenewalUnknown { .. } => "renewal unknown",
        LockEvent::RenewalLate { .. } => "renewal late",
        LockEvent::LastRenewal { .. } => "last renewal",
        LockEvent::Lost { .. } => "lost",
        LockEvent::Released { .. } => "released",
        LockEvent::Unreleased { .. } => "unreleased",
        LockEvent::LeftToExpire { .. } => "left to expire",
        LockEvent::Detached { .. } => "detached",
        LockEvent::Closed { .. } => "closed",
        LockEvent::GaveUp { .. } => "gave up",
        LockEvent::QueueFull { .. } => "queue full",
        LockEvent::DroppedWhileHeld { .. } => "dropped while held",
        LockEvent::StoreDown { .. } => "store down",
        LockEvent::StoreUp { .. } => "store up",
        LockEvent::RuntimeBusy { .. } => "runtime busy",
        LockEvent::Missed { .. } => "missed",
        _ => "something new",
    }
}

/// What was told until now.
pub(crate) async fn told_so_far(events: &mut Events) -> Vec<LockEvent> {
    let mut told = Vec::new();
    while let std::task::Poll::Ready(Some(event)) = futures::poll!(events.next()) {
        told.push(event);
        assert!(
            told.len() < 100_000,
            "there is no end to it: {:?}",
            told.last()
        );
    }
    told
}

/// Reads until an event of that name, which is the last of what it gives.
#[track_caller]
pub(crate) fn told_until<'a>(
    events: &'a mut Events,
    last: &'a str,
) -> impl Future<Output = Vec<LockEvent>> + 'a {
    let place = std::panic::Location::caller();
    async move {
        let mut told = Vec::new();
        loop {
            match tokio::time::timeout(EVENTUALLY, events.next()).await {
                Ok(Some(event)) => told.push(event),
                other => panic!("{place}: {other:?} before {last:?}: {told:#?}"),
            }
            if told.last().map(name) == Some(last) {
                return told;
            }
        }
    }
}

/// Whether it tells of a renewal, answered or not. A lease that was long in coming is renewed at once, to last as long as was
/// asked for (W3): a busy machine may see that.
pub(crate) fn may_be_late_renewal(name: &str) -> bool {
    ["renewed", "renewal unknown"].contains(&name)
}

/// Fails unless these are the events, by name. That the store is up is told at one time or another, and left out. So is the
/// renewal of a lease that was long in coming.
#[track_caller]
pub(crate) fn assert_names<'a>(told: impl IntoIterator<Item = &'a LockEvent>, expected: &[&str]) {
    let names: Vec<_> = told.into_iter().map(name).collect();
    let mut names: Vec<_> = names
        .into_iter()
        .filter(|name| *name != "store up")
        .collect();
    let begins = names.iter().position(|name| *name == "acquired");
    if let Some(at) = begins.map(|at| at + 1)
        && names.get(at).is_some_and(|name| may_be_late_renewal(name))
        && expected.get(at) != names.get(at)
    {
        names.remove(at);
    }
    assert_eq!(names, expected);
}

/// How long the wait was that this event ends, or the lease was held.
#[track_caller]
pub(crate) fn time_of(event: &LockEvent) -> Duration {
    match event {
        LockEvent::Acquired { waited, .. } | LockEvent::GaveUp { waited, .. } => *waited,
        LockEvent::Lost { held, .. }
        | LockEvent::Released { held, .. }
        | LockEvent::Unreleased { held, .. }
        | LockEvent::LeftToExpire { held, .. }
        | LockEvent::Detached { held, .. }
        | LockEvent::Closed { held, .. } => *held,
        other => panic!("{other:?} tells of no time"),
    }
}

/// Fails unless a time is what it should be, or up to `late` more.
#[track_caller]
pub(crate) fn assert_time(event: &LockEvent, expected: Duration, late: Duration) {
    let time = time_of(event);
    assert!(
        time + ms(2) >= expected && time <= expected + late + ms(2),
        "{event:?} instead of {expected:?}, at most {late:?} late"
    );
}
