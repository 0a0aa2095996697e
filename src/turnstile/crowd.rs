use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::time::Point;
use super::wait_queue::{Waiter, WaiterId};

/// Below that nobody counts what those who left have left behind.
const FEW: usize = 32;

/// More than one waiter, in order of arrival.
///
/// Whoever leaves takes everything along but a place, which is cleared away once as many are empty as are taken (and
/// some): each step costs a logarithm of their number at most, all in all, and two flat buffers hold ten thousand
/// waiters. The first place and the last are never empty, and the earliest end is always that of one who is there.
#[derive(Debug)]
pub(super) struct Crowd<C> {
    /// By id.
    places: VecDeque<(WaiterId, Option<Waiter<C>>)>,
    ends: BinaryHeap<Reverse<(Point, WaiterId)>>,
    waiting: usize,
    standing: usize,
}

impl<C> Crowd<C> {
    pub(super) fn new() -> Self {
        Self {
            places: VecDeque::new(),
            ends: BinaryHeap::new(),
            waiting: 0,
            standing: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn has_patient(&self) -> bool {
        self.standing > 0
    }

    pub(super) fn push(&mut self, id: WaiterId, waiter: Waiter<C>) {
        if let Some(end) = waiter.end() {
            self.ends.push(Reverse((end, id)));
        }
        self.waiting += 1;
        self.standing += usize::from(waiter.is_patient());
        self.places.push_back((id, Some(waiter)));
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter<C>> {
        self.places.iter().filter_map(|(_, place)| place.as_ref())
    }

    pub(super) fn first(&self) -> Option<&Waiter<C>> {
        self.places.front()?.1.as_ref()
    }

    pub(super) fn first_id(&self) -> Option<WaiterId> {
        self.places.front().map(|(id, _)| *id)
    }

    pub(super) fn last_id(&self) -> WaiterId {
        self.places.back().map_or(WaiterId(0), |(id, _)| *id)
    }

    pub(super) fn next_end(&self) -> Option<Point> {
        self.ends.peek().map(|Reverse((end, _))| *end)
    }

    pub(super) fn pop_first(&mut self) -> Option<(WaiterId, Waiter<C>)> {
        let id = self.places.front()?.0;
        self.remove(id).map(|waiter| (id, waiter))
    }

    pub(super) fn pop_next_end(&mut self) -> Option<Waiter<C>> {
        let Reverse((_, id)) = *self.ends.peek()?;
        self.remove(id)
    }

    pub(super) fn take_once(&mut self, upto: WaiterId) -> Vec<Waiter<C>> {
        let impatient = self.waiting - self.standing;
        if impatient == 0 {
            return Vec::new();
        }
        let places = self.places.iter().take_while(|(id, _)| *id <= upto);
        let once = places.filter(|(_, place)| place.as_ref().is_some_and(|one| !one.is_patient()));
        let ids: Vec<_> = once.map(|(id, _)| *id).take(impatient).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waiter<C>> {
        let at = self.find(id)?;
        let waiter = self.places[at].1.take()?;
        self.waiting -= 1;
        self.standing -= usize::from(waiter.is_patient());
        self.tidy();
        Some(waiter)
    }

    /// Those who are served first, and mostly asked for, are at the front.
    fn find(&self, id: WaiterId) -> Option<usize> {
        if self.places.front()?.0 == id {
            return Some(0);
        }
        self.places.binary_search_by_key(&id, |(id, _)| *id).ok()
    }

    fn is_there(&self, id: WaiterId) -> bool {
        self.find(id).is_some_and(|at| self.places[at].1.is_some())
    }

    fn tidy(&mut self) {
        while let Some((_, None)) = self.places.front() {
            self.places.pop_front();
        }
        while let Some((_, None)) = self.places.back() {
            self.places.pop_back();
        }
        while let Some(Reverse((_, id))) = self.ends.peek()
            && !self.is_there(*id)
        {
            self.ends.pop();
        }
        let most = FEW + 2 * self.waiting;
        if self.places.len() > most || self.ends.len() > most {
            let mut ends = std::mem::take(&mut self.ends);
            ends.retain(|Reverse((_, id))| self.is_there(*id));
            self.ends = ends;
            self.places.retain(|(_, place)| place.is_some());
        }
        if self.places.capacity().max(self.ends.capacity()) > 4 * most {
            self.places.shrink_to(most);
            self.ends.shrink_to(most);
        }
    }

    /// How many places and ends it keeps, and for how many it has room.
    #[cfg(test)]
    pub(super) fn kept(&self) -> (usize, usize) {
        let kept = self.places.len().max(self.ends.len());
        let buffer = self.places.capacity().max(self.ends.capacity());
        (kept, buffer)
    }
}
