use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::time::{FOREVER, Moment, Point};

/// One arrival of one waiter; later arrivals have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaiterId(pub(crate) u64);

/// How a waiter takes "busy".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Wants to be told.
    Once,
    /// Stands in line until its time is over.
    Queue,
}

/// One local caller that waits for the key. `C` is whatever the shell wants back with a verdict.
#[derive(Debug)]
pub(crate) struct Waiter<C> {
    pub(crate) who: C,
    pub(crate) ttl: Duration,
    /// How often its lease is prolonged at most while it is held; 0: it ends `ttl` after it began.
    pub(crate) renewals: u32,
    /// Whether the key stays in the store when its lease ends, until its ttl is over.
    pub(crate) lets_expire: bool,
    pub(crate) patience: Patience,
    pub(crate) until: Moment,
}

impl<C> Waiter<C> {
    pub(super) fn is_patient(&self) -> bool {
        self.patience == Patience::Queue
    }

    /// When its wait is over, if ever.
    pub(super) fn end(&self) -> Option<Point> {
        (self.until != FOREVER).then(|| self.until.into())
    }

    /// Whether the watchdog prolongs its lease.
    pub(super) fn is_renewed(&self) -> bool {
        self.renewals > 0
    }
}

/// One local caller that wants the lease which another owner left in the store. It does not stand in
/// line: nobody else can be given what it wants.
#[derive(Debug)]
pub(super) struct Adopter<C> {
    pub(super) id: WaiterId,
    /// The owner that left it, as the store has it.
    pub(super) from: Arc<str>,
    pub(super) waiter: Waiter<C>,
}

/// The waiters of one key in order of arrival.
#[derive(Debug)]
pub(super) struct WaitQueue<C> {
    /// Later arrivals have greater ids.
    waiters: BTreeMap<WaiterId, Waiter<C>>,
    /// When waits are over.
    ends: BTreeSet<(Point, WaiterId)>,
    /// How many want a place in the store's queue.
    standing: usize,
}

impl<C> WaitQueue<C> {
    pub(super) const fn new() -> Self {
        Self {
            waiters: BTreeMap::new(),
            ends: BTreeSet::new(),
            standing: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether anybody wants a place in the store's queue.
    pub(super) fn has_patient(&self) -> bool {
        self.standing > 0
    }

    /// The newest arrival.
    pub(super) fn push(&mut self, id: WaiterId, waiter: Waiter<C>) {
        debug_assert!(id > self.last_id(), "{id:?} is not the newest");
        self.ends.extend(waiter.end().map(|end| (end, id)));
        self.standing += usize::from(waiter.is_patient());
        self.waiters.insert(id, waiter);
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waiter<C>> {
        let waiter = self.waiters.remove(&id)?;
        if let Some(end) = waiter.end() {
            self.ends.remove(&(end, id));
        }
        self.standing -= usize::from(waiter.is_patient());
        if self.waiters.is_empty() {
            // An emptied map keeps a node with room for eleven, and most keys that are held have no waiters.
            *self = Self::new();
        }
        Some(waiter)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter<C>> {
        self.waiters.values()
    }

    pub(super) fn first(&self) -> Option<&Waiter<C>> {
        self.waiters.first_key_value().map(|(_, waiter)| waiter)
    }

    pub(super) fn first_id(&self) -> Option<WaiterId> {
        self.waiters.first_key_value().map(|(id, _)| *id)
    }

    pub(super) fn pop_first(&mut self) -> Option<(WaiterId, Waiter<C>)> {
        let id = self.first_id()?;
        self.remove(id).map(|waiter| (id, waiter))
    }

    /// Takes out those who will not stand in line and arrived no later than `upto`.
    pub(super) fn take_once(&mut self, upto: WaiterId) -> Vec<Waiter<C>> {
        let impatient = self.len() - self.standing;
        let arrived = self.waiters.range(..=upto);
        let once = arrived.filter(|(_, waiter)| !waiter.is_patient());
        let ids: Vec<_> = once.map(|(id, _)| *id).take(impatient).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// The newest arrival.
    pub(super) fn last_id(&self) -> WaiterId {
        let last = self.waiters.last_key_value();
        last.map_or(WaiterId(0), |(id, _)| *id)
    }

    pub(super) fn next_end(&self) -> Option<Point> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// Takes out one whose time is over.
    pub(super) fn pop_ended(&mut self, now: Point) -> Option<Waiter<C>> {
        let (end, id) = *self.ends.first()?;
        (end <= now).then(|| self.remove(id))?
    }
}
