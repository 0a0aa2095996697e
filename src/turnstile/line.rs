use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::time::{FOREVER, Moment};

/// One arrival of one waiter; later arrivals have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaiterId(pub(crate) u64);

/// How a waiter takes "busy".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Wants to be told.
    Once,
    /// Stands in line until its time is over.
    Stand,
}

/// The pauses between attempts where no grants come; `None` ends them.
pub(crate) struct Repeats(pub(crate) Box<dyn FnMut() -> Option<Duration> + Send>);

impl fmt::Debug for Repeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Repeats")
    }
}

/// One local caller that waits for the key. `C` is whatever the shell wants back with a verdict.
#[derive(Debug)]
pub(crate) struct Waiter<C> {
    pub(crate) who: C,
    pub(crate) ttl: Duration,
    /// How often its lease is prolonged at most while it is held; 0: it ends `ttl` after it began.
    pub(crate) renewals: u32,
    /// Whether the key stays in the store when its lease ends, until its ttl is over.
    pub(crate) keeps: bool,
    pub(crate) patience: Patience,
    pub(crate) until: Moment,
    pub(crate) repeats: Repeats,
}

impl<C> Waiter<C> {
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
pub(super) struct Line<C> {
    waiters: BTreeMap<WaiterId, Waiter<C>>,
    ends: BTreeSet<(Moment, WaiterId)>,
    standing: usize,
}

impl<C> Line<C> {
    pub(super) fn new() -> Self {
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
    pub(super) fn has_standing(&self) -> bool {
        self.standing > 0
    }

    pub(super) fn push(&mut self, id: WaiterId, waiter: Waiter<C>) {
        if waiter.until != FOREVER {
            self.ends.insert((waiter.until, id));
        }
        self.standing += usize::from(waiter.patience == Patience::Stand);
        self.waiters.insert(id, waiter);
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waiter<C>> {
        let waiter = self.waiters.remove(&id)?;
        self.ends.remove(&(waiter.until, id));
        self.standing -= usize::from(waiter.patience == Patience::Stand);
        Some(waiter)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter<C>> {
        self.waiters.values()
    }

    pub(super) fn first(&mut self) -> Option<&mut Waiter<C>> {
        self.waiters.values_mut().next()
    }

    pub(super) fn pop_first(&mut self) -> Option<(WaiterId, Waiter<C>)> {
        let id = *self.waiters.keys().next()?;
        self.remove(id).map(|waiter| (id, waiter))
    }

    /// Takes out those who will not stand in line and arrived no later than `upto`.
    pub(super) fn take_once(&mut self, upto: WaiterId) -> Vec<Waiter<C>> {
        if self.standing == self.waiters.len() {
            return Vec::new();
        }
        let ids: Vec<_> = self
            .waiters
            .range(..=upto)
            .filter(|(_, waiter)| waiter.patience == Patience::Once)
            .map(|(id, _)| *id)
            .collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// The newest arrival.
    pub(super) fn last_id(&self) -> WaiterId {
        self.waiters
            .keys()
            .next_back()
            .copied()
            .unwrap_or(WaiterId(0))
    }

    pub(super) fn next_end(&self) -> Option<Moment> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// Takes out one whose time is over.
    pub(super) fn pop_ended(&mut self, now: Moment) -> Option<Waiter<C>> {
        let (end, id) = *self.ends.first()?;
        if end > now { None } else { self.remove(id) }
    }
}
