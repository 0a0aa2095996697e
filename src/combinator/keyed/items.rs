//! The items of a stream that have locks of their own, from when the source yields them until they are done.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use smallvec::SmallVec;

use crate::base::Mode;
use crate::combinator::LockedFuture;
use crate::combinator::ready_queue::{ReadyQueue, ReadyWaker};
use crate::handle::acquire::Acquiring;

/// How many items wait for their locks, for each that works, unless [`waiting`](super::BufferKeyed::waiting) says otherwise.
const WAITING_EACH: usize = 16;

/// A key, and the address of its registry. That stays there as long as an item uses it.
type Key = (usize, Arc<str>);

/// How far an item has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Earlier items of its key ask first.
    Behind,
    /// It waits for a place: to ask for its lock, or to work if it has it.
    Next,
    /// It asks for its lock. It has a place.
    Asks,
    /// It waits for its lock, without a place: others have it, or an earlier item.
    Waits,
    /// It has its lock, and an earlier item still works: that lost its lease, and does not know it.
    Holds,
    /// It has a place.
    Works,
    Releases,
}

impl Stage {
    /// Whether it counts among those that work.
    fn has_place(self) -> bool {
        matches!(self, Self::Asks | Self::Works)
    }
}

struct Item<F> {
    /// `None` while it is polled.
    future: Option<Pin<Box<F>>>,
    stage: Stage,
    /// Whether it has had its lock. Then the next item of its key may ask.
    has_begun: bool,
    wish: Wish,
    ready: Arc<ReadyWaker>,
    waker: Waker,
}

/// What an item locks.
#[derive(Default)]
struct Wish {
    /// None: it is an error.
    keys: SmallVec<[Key; 1]>,
    is_exclusive: bool,
    /// Whether it may wait for a key that an earlier item has: it is passed the key then, without a call.
    queues_early: bool,
}

impl Wish {
    fn of(acquiring: &Acquiring) -> Option<Self> {
        let options = acquiring.options();
        let engine = options.engine().ok()?;
        let keys = options.keys().iter();
        let keys = keys.map(|key| (Arc::as_ptr(engine) as usize, key.clone()));
        Some(Self {
            keys: keys.collect(),
            is_exclusive: options.mode == Mode::Exclusive,
            queues_early: !options.is_group() && !options.reentrant && !options.wait().is_zero(),
        })
    }
}

/// When an item may ask for its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Now,
    /// Now, but it waits for an earlier item.
    Early,
    Later,
}

/// All items that the source has yielded and that are not done.
pub(super) struct Items<F: LockedFuture> {
    by_id: HashMap<u64, Item<F>>,
    /// The items of each key, in the order of the source.
    pub(super) lines: HashMap<Key, VecDeque<u64>>,
    /// Those that are to enter the queue of a key which an earlier item has, before that releases it.
    early: VecDeque<u64>,
    /// Those that have their locks and wait for a place.
    holding: VecDeque<u64>,
    /// Those that wait for a place to ask for their locks.
    next: VecDeque<u64>,
    pub(super) ready: Arc<ReadyQueue>,
    pub(super) results: Results<F::Item>,
    last_id: u64,
    /// How many work now.
    pub(super) places: usize,
    /// How many may work.
    working: usize,
    /// How many may wait.
    pub(super) waiting: usize,
}

impl<F: LockedFuture> Items<F> {
    pub(super) fn new(working: usize) -> Self {
        Self {
            by_id: HashMap::new(),
            lines: HashMap::new(),
            early: VecDeque::new(),
            holding: VecDeque::new(),
            next: VecDeque::new(),
            ready: Arc::default(),
            results: Results::Ready(VecDeque::new()),
            last_id: 0,
            places: 0,
            working,
            waiting: working.saturating_mul(WAITING_EACH),
        }
    }

    /// With the results that were not yielded yet.
    pub(super) fn len(&self) -> usize {
        self.by_id.len() + self.results.len()
    }

    /// Whether the source is asked for another item: if that can work at once, as far as is known.
    pub(super) fn has_room(&self) -> bool {
        self.places < self.working && self.len() - self.places < self.waiting
    }

    pub(super) fn push(&mut self, future: F) {
        self.last_id += 1;
        let id = self.last_id;
        let mut future = Box::pin(future);
        let work_lock = future.as_mut().work_lock().0;
        work_lock.hear_of_others();
        let wish = work_lock.acquiring().and_then(Wish::of).unwrap_or_default();
        for key in &wish.keys {
            self.lines.entry(key.clone()).or_default().push_back(id);
        }
        let ready = ReadyWaker::new(id, &self.ready);
        let item = Item {
            future: Some(future),
            stage: Stage::Behind,
            has_begun: false,
            wish,
            waker: ready.clone().into(),
            ready,
        };
        self.by_id.insert(id, item);
        self.advance(id);
    }

    /// Lets an item ask for its lock, if it is its turn.
    fn advance(&mut self, id: u64) {
        let turn = self.turn(id);
        let Some(item) = self.by_id.get_mut(&id) else {
            return;
        };
        match turn {
            Turn::Now => {
                item.stage = Stage::Next;
                self.next.push_back(id);
            }
            Turn::Early => {
                item.stage = Stage::Waits;
                self.early.push_back(id);
            }
            Turn::Later => {}
        }
    }

    fn turn(&self, id: u64) -> Turn {
        let wish = &self.by_id[&id].wish;
        if wish
            .keys
            .iter()
            .any(|key| self.ahead(id, key).any(|ahead| !ahead.has_begun))
        {
            return Turn::Later;
        }
        match self.is_alone(id, |_| true) {
            true => Turn::Now,
            false if wish.queues_early => Turn::Early,
            false => Turn::Later,
        }
    }

    /// The items before this one in the line of a key.
    fn ahead(&self, id: u64, key: &Key) -> impl Iterator<Item = &Item<F>> {
        let line = self.lines[key]
            .iter()
            .take_while(move |ahead| **ahead != id);
        line.map(|ahead| &self.by_id[ahead])
    }

    /// Whether this item may work beside all earlier ones of its keys, of which those count that `is_such` is true of.
    fn is_alone(&self, id: u64, is_such: impl Fn(&Item<F>) -> bool) -> bool {
        let wish = &self.by_id[&id].wish;
        wish.keys.iter().all(|key| {
            let mut ahead = self.ahead(id, key).filter(|ahead| is_such(ahead));
            !ahead.any(|ahead| wish.is_exclusive || ahead.wish.is_exclusive)
        })
    }

    /// An item has its lock: it works as soon as there is a place, and no earlier item of its key works any more.
    fn enter(&mut self, id: u64) {
        let is_alone = self.is_alone(id, |ahead| ahead.stage != Stage::Releases);
        let item = self.by_id.get_mut(&id);
        if let Some(item) = item.filter(|item| is_alone && item.stage == Stage::Holds) {
            item.stage = Stage::Next;
            self.holding.push_back(id);
        }
    }

    /// An item has begun, or is done: others of its keys may go on.
    fn advance_lines(&mut self, keys: &[Key]) {
        for key in keys {
            let line = self.lines.get(key).into_iter().flatten();
            let known = line.map(|id| (*id, &self.by_id[id]));
            let (mut held, mut first) = (SmallVec::<[u64; 2]>::new(), None);
            for (id, item) in known {
                match item.stage {
                    Stage::Holds => held.push(id),
                    Stage::Behind => first = Some(id),
                    _ => {}
                }
                if !item.has_begun {
                    break;
                }
            }
            for id in held {
                self.enter(id);
            }
            if let Some(first) = first {
                self.advance(first);
            }
        }
    }

    /// The next item to poll, after it was given a place if it needs one. `woken`: so many that have woken may follow.
    pub(super) fn next_to_poll(&mut self, woken: &mut usize) -> Option<u64> {
        if let Some(id) = self.early.pop_front() {
            return Some(id);
        }
        if self.places < self.working
            && let Some(id) = self.holding.pop_front().or_else(|| self.next.pop_front())
            && let Some(item) = self.by_id.get_mut(&id)
        {
            item.stage = match item.has_begun {
                true => Stage::Works,
                false => Stage::Asks,
            };
            self.places += 1;
            return Some(id);
        }
        *woken = woken.checked_sub(1)?;
        self.ready.pop()
    }

    pub(super) fn poll(&mut self, id: u64) {
        let Some(item) = self.by_id.get_mut(&id) else {
            // It has woken, and was done.
            return;
        };
        let before = item.stage;
        if let Stage::Behind | Stage::Next | Stage::Holds = before {
            // Woken by what it was before.
            return item.ready.begin_poll();
        }
        let Some(mut future) = item.future.take() else {
            return;
        };
        item.ready.begin_poll();
        let waker = item.waker.clone();
        let cx = &mut Context::from_waker(&waker);
        // If it panics, it is gone as if it were done.
        let guard = Polling { items: self, id };
        if before == Stage::Waits {
            let is_over = future.as_mut().work_lock().0.poll_ahead(cx);
            if is_over.is_pending() || future.as_mut().work_lock().0.is_holding() {
                mem::forget(guard);
                let after = match is_over {
                    Poll::Ready(()) => Stage::Holds,
                    Poll::Pending => Stage::Waits,
                };
                return self.put(id, future, after);
            }
            // The next poll tells why it does not get the lock.
        }
        let output = future.as_mut().poll(cx);
        mem::forget(guard);
        match output {
            Poll::Ready(output) => {
                self.results.push(id, F::item(output));
                // Whatever it drops was dropped before its key is anybody else's.
                drop(future);
                self.remove(id);
            }
            Poll::Pending => {
                let work_lock = future.as_mut().work_lock().0;
                let after = if work_lock.is_releasing() {
                    Stage::Releases
                } else if work_lock.is_holding() {
                    Stage::Works
                } else if work_lock
                    .acquiring()
                    .is_some_and(Acquiring::waits_for_others)
                {
                    Stage::Waits
                } else {
                    before
                };
                self.put(id, future, after);
            }
        }
    }

    /// It was polled, and is not done.
    fn put(&mut self, id: u64, future: Pin<Box<F>>, after: Stage) {
        let Some(item) = self.by_id.get_mut(&id) else {
            return;
        };
        item.future = Some(future);
        let before = mem::replace(&mut item.stage, after);
        if before.has_place() && !after.has_place() {
            self.places -= 1;
        }
        let has_lock = matches!(after, Stage::Holds | Stage::Works | Stage::Releases);
        if has_lock && !mem::replace(&mut item.has_begun, has_lock) {
            let keys = item.wish.keys.clone();
            self.advance_lines(&keys);
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(item) = self.by_id.remove(&id) else {
            return;
        };
        if item.stage.has_place() {
            self.places -= 1;
        }
        for key in &item.wish.keys {
            if let Some(line) = self.lines.get_mut(key) {
                // Near the front: those before it have begun.
                let place = line.iter().position(|other| *other == id);
                place.and_then(|place| line.remove(place));
                if line.is_empty() {
                    self.lines.remove(key);
                }
            }
        }
        self.advance_lines(&item.wish.keys);
    }
}

/// Dropped by a panic of the item that is polled.
struct Polling<'a, F: LockedFuture> {
    items: &'a mut Items<F>,
    id: u64,
}

impl<F: LockedFuture> Drop for Polling<'_, F> {
    fn drop(&mut self) {
        self.items.results.push(self.id, None);
        self.items.remove(self.id);
    }
}

/// Results that were not yielded yet.
pub(super) enum Results<T> {
    Ready(VecDeque<T>),
    /// By id. `None`: left out.
    InOrder {
        results: BTreeMap<u64, Option<T>>,
        next: u64,
    },
}

impl<T> Results<T> {
    /// Before the first.
    pub(super) fn keep_order(&mut self) {
        *self = Self::InOrder {
            results: BTreeMap::new(),
            next: 1,
        };
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Ready(results) => results.len(),
            Self::InOrder { results, .. } => results.len(),
        }
    }

    fn push(&mut self, id: u64, result: Option<T>) {
        match self {
            Self::Ready(results) => results.extend(result),
            Self::InOrder { results, .. } => {
                results.insert(id, result);
            }
        }
    }

    pub(super) fn pop(&mut self) -> Option<T> {
        match self {
            Self::Ready(results) => results.pop_front(),
            Self::InOrder { results, next } => loop {
                let result = results.remove(next)?;
                *next += 1;
                if result.is_some() {
                    return result;
                }
            },
        }
    }
}
