use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::time::Duration;
use std::{iter, mem};

use super::time::Point;
use crate::base::OnFinish;
use crate::base::clock::{FOREVER, Moment};

/// One arrival of one waiter; later arrivals have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaiterId(pub(crate) u64);

impl WaiterId {
    /// No earlier than any arrival.
    pub(super) const LAST: Self = Self(u64::MAX);
}

/// Until when the key stays if it was acquired at `since`. `FOREVER`: until its ttl is over.
pub(super) fn kept_until(on_finish: OnFinish, since: Point) -> Point {
    match on_finish {
        OnFinish::Release => Point::FIRST,
        OnFinish::LetExpire => Point::FOREVER,
        OnFinish::KeepFor(time) => since + time,
    }
}

/// What a local caller wants. `Caller` is the engine's reference to it, which comes back with each verdict.
#[derive(Clone, Debug)]
pub(crate) struct Waiter<Caller> {
    pub(crate) caller: Caller,
    pub(crate) ttl: Duration,
    /// How often its lease is prolonged at most while it is held; 0: it ends `ttl` after it began.
    pub(crate) renewals: u32,
    /// The owner whose lease it adopts, as the store has it. Such a waiter is not in the wait queue: nobody else can be
    /// given that lease.
    pub(crate) adopts: Option<Arc<str>>,
    /// What happens to the key when the lease ends, unless the holder releases it.
    pub(crate) on_finish: OnFinish,
    /// Whether that counts only if the holder ends the lease. If it is lost, or ended by a shutdown, the key is released.
    pub(crate) is_conditional: bool,
    /// If the key is busy, it is refused. Any other waits in the queue.
    pub(crate) asks_once: bool,
    /// Whether it wants to know when it waits: for others, or for a store that has failed.
    pub(crate) hears_of_others: bool,
    /// Until when it waits for others.
    pub(crate) until: Moment,
    /// Until when it waits for the store's first answer, even if that is later than `until`.
    pub(crate) answer_by: Moment,
}

impl<Caller> Waiter<Caller> {
    /// Whether the watchdog prolongs its lease.
    pub(super) fn is_renewed(&self) -> bool {
        self.renewals > 0
    }

    /// When its wait is over. The store's first answer is awaited for longer.
    pub(super) fn end(&self, is_answered: bool) -> Moment {
        match is_answered {
            true => self.until,
            false => self.until.max(self.answer_by),
        }
    }
}

/// The waiters of one key in order of arrival.
///
/// Boxed: most keys in use have none.
#[derive(Clone, Debug)]
pub(super) struct WaitQueue<Caller>(Option<Box<Waiters<Caller>>>);

/// The first waiter is kept outside of the trees: most queues have no other.
#[derive(Clone, Debug)]
struct Waiters<Caller> {
    first: (WaiterId, Waiter<Caller>),
    others: BTreeMap<WaiterId, Waiter<Caller>>,
    /// When the waits of the others are over.
    by_end: BTreeSet<(Point, WaiterId)>,
    /// Those of the others that ask once.
    once: BTreeSet<WaiterId>,
    /// The newest waiter for which the store's first answer has come.
    answered: WaiterId,
    /// The newest waiter that is known to wait for others, which hold the key.
    busy: WaiterId,
    /// The newest waiter that was told that it waits, if it wanted to know.
    told: WaiterId,
}

impl<Caller> WaitQueue<Caller> {
    pub(super) const fn new() -> Self {
        Self(None)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn len(&self) -> usize {
        let waiters = self.0.as_ref();
        waiters.map_or(0, |waiters| 1 + waiters.others.len())
    }

    /// Whether any waiter wants a place in the store's queue.
    pub(super) fn has_patient(&self) -> bool {
        self.0.as_ref().is_some_and(|waiters| {
            !waiters.first.1.asks_once || waiters.once.len() < waiters.others.len()
        })
    }

    /// Adds the newest arrival.
    pub(super) fn push(&mut self, id: WaiterId, waiter: Waiter<Caller>) {
        debug_assert!(id > self.last_id(), "{id:?} is not the newest");
        match &mut self.0 {
            Some(waiters) => {
                waiters.by_end.extend(waiters.end(id, &waiter));
                waiters.once.extend(waiter.asks_once.then_some(id));
                waiters.others.insert(id, waiter);
            }
            None => {
                self.0 = Some(Box::new(Waiters {
                    first: (id, waiter),
                    others: BTreeMap::new(),
                    by_end: BTreeSet::new(),
                    once: BTreeSet::new(),
                    answered: WaiterId(0),
                    busy: WaiterId(0),
                    told: WaiterId(0),
                }));
            }
        }
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waiter<Caller>> {
        let waiters = self.0.as_mut()?;
        if id != waiters.first.0 {
            return waiters.remove_other(id);
        }
        let Some(next) = waiters.others.keys().next().copied() else {
            return self.0.take().map(|waiters| waiters.first.1);
        };
        let waiter = waiters.remove_other(next)?;
        let (_, first) = mem::replace(&mut waiters.first, (next, waiter));
        Some(first)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (WaiterId, &Waiter<Caller>)> {
        self.0.iter().flat_map(|waiters| {
            let (id, first) = &waiters.first;
            let others = waiters.others.iter().map(|(id, waiter)| (*id, waiter));
            iter::once((*id, first)).chain(others)
        })
    }

    pub(super) fn first(&self) -> Option<&Waiter<Caller>> {
        self.0.as_ref().map(|waiters| &waiters.first.1)
    }

    pub(super) fn first_id(&self) -> Option<WaiterId> {
        self.0.as_ref().map(|waiters| waiters.first.0)
    }

    /// The newest arrival.
    pub(super) fn last_id(&self) -> WaiterId {
        self.0.as_ref().map_or(WaiterId(0), |waiters| {
            let last = waiters.others.last_key_value();
            last.map_or(waiters.first.0, |(id, _)| *id)
        })
    }

    pub(super) fn pop_first(&mut self) -> Option<(WaiterId, Waiter<Caller>)> {
        let id = self.first_id()?;
        self.remove(id).map(|waiter| (id, waiter))
    }

    /// Removes waiters that ask once and arrived no later than `newest_waiter`.
    pub(super) fn take_once(&mut self, newest_waiter: WaiterId) -> Vec<Waiter<Caller>> {
        let Some(waiters) = &self.0 else {
            return Vec::new();
        };
        let (id, first) = &waiters.first;
        let first = (first.asks_once && *id <= newest_waiter).then_some(*id);
        let others = waiters.once.range(..=newest_waiter).copied();
        let ids: Vec<_> = first.into_iter().chain(others).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Removes waiters that arrived no later than `newest_waiter` and want no longer ttl.
    pub(super) fn take_within(
        &mut self,
        newest_waiter: WaiterId,
        ttl: Duration,
    ) -> Vec<Waiter<Caller>> {
        let until_then = self.iter().take_while(|(id, _)| *id <= newest_waiter);
        let within = until_then.filter(|(_, waiter)| waiter.ttl <= ttl);
        let ids: Vec<_> = within.map(|(id, _)| id).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    /// Others hold the key, as the store has said or as a local holder shows.
    pub(super) fn mark_busy(&mut self) {
        self.mark_answered();
        if let Some(waiters) = &mut self.0 {
            waiters.busy = waiters.answered;
        }
    }

    /// The callers that want to know when they wait, and have not been told. Each is returned once.
    pub(super) fn take_untold(&mut self) -> Vec<Caller>
    where
        Caller: Clone,
    {
        let last = self.last_id();
        let Some(waiters) = &mut self.0 else {
            return Vec::new();
        };
        let told = mem::replace(&mut waiters.told, last);
        let first = Some(&waiters.first.1).filter(|_| waiters.first.0 > told);
        let others = waiters.others.range((Excluded(told), Unbounded));
        let newer = first.into_iter().chain(others.map(|(_, waiter)| waiter));
        let hearing = newer.filter(|waiter| waiter.hears_of_others);
        hearing.map(|waiter| waiter.caller.clone()).collect()
    }

    /// The store has answered: that is the first answer for all present waiters.
    pub(super) fn mark_answered(&mut self) {
        let last = self.last_id();
        let Some(waiters) = &mut self.0 else {
            return;
        };
        let newer = waiters
            .others
            .range((Excluded(waiters.answered), Unbounded));
        for (id, waiter) in newer {
            if let Some(before) = waiters.end(*id, waiter) {
                waiters.by_end.remove(&before);
                waiters.by_end.insert((waiter.until.into(), *id));
            }
        }
        waiters.answered = last;
    }

    pub(super) fn next_end(&self) -> Option<Point> {
        self.0.as_ref()?.next_end().map(|(end, _)| end)
    }

    /// Removes a waiter whose wait is over. Also returns whether others are known to hold the key.
    pub(super) fn pop_ended(&mut self, now: Point) -> Option<(Waiter<Caller>, bool)> {
        let waiters = self.0.as_ref()?;
        let (end, id) = waiters.next_end()?;
        let busy = id <= waiters.busy;
        let ended = (end <= now).then(|| self.remove(id)).flatten();
        ended.map(|waiter| (waiter, busy))
    }
}

impl<Caller> Waiters<Caller> {
    /// When a wait is over, if ever.
    fn end(&self, id: WaiterId, waiter: &Waiter<Caller>) -> Option<(Point, WaiterId)> {
        let end = waiter.end(id <= self.answered);
        (waiter.until != FOREVER).then(|| (end.into(), id))
    }

    /// When the next wait is over, and whose.
    fn next_end(&self) -> Option<(Point, WaiterId)> {
        let first = self.end(self.first.0, &self.first.1);
        first.into_iter().chain(self.by_end.first().copied()).min()
    }

    fn remove_other(&mut self, id: WaiterId) -> Option<Waiter<Caller>> {
        let waiter = self.others.remove(&id)?;
        if let Some(end) = self.end(id, &waiter) {
            self.by_end.remove(&end);
        }
        self.once.remove(&id);
        Some(waiter)
    }
}
