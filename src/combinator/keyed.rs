use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::{fmt, mem};

use futures::Stream;
use futures::stream::{Fuse, FusedStream, StreamExt};
use pin_project::pin_project;
use smallvec::SmallVec;

use super::guarded::{Begin, Guarded, Kind, OfFuture};
use super::outcome::{Flatten, OrSkip, Try};
use super::ready_queue::{ReadyQueue, ReadyWaker};
use crate::base::{LockError, Mode};
use crate::handle::acquire::Acquiring;

/// How many items wait for their locks, for each that works, unless [`waiting`](BufferKeyed::waiting) says otherwise.
const WAITING_EACH: usize = 16;

/// After so many polls of items the task lets others run.
const POLLS: usize = 256;

/// A future that has a lock of its own: what [`with_lock`](crate::FutureLockExt::with_lock),
/// [`try_with_lock`](crate::FutureLockExt::try_with_lock), [`with_lease`](crate::Lock::with_lease),
/// [`try_with_lease`](crate::Lock::try_with_lease) and their `or_skip` return.
///
/// Sealed: [`buffer_keyed`](crate::StreamLockExt::buffer_keyed) looks at the lock before the work begins.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no lock of its own",
    label = "not a future of `with_lock`",
    note = "each item must be the future itself, not boxed and not in an `async` block: `stream.map(|order| charge(order).with_lock(locks.obtain(key)))`"
)]
pub trait LockedFuture: Future + sealed::HasWorkLock {
    /// What it yields, if it is not left out.
    type Item;

    /// `None`: it was [skipped](crate::future::Guarded::or_skip).
    #[doc(hidden)]
    fn item(output: Self::Output) -> Option<Self::Item>;
}

mod sealed {
    use std::pin::Pin;

    use crate::combinator::work_lock::WorkLock;

    pub trait HasWorkLock {
        #[doc(hidden)]
        fn work_lock(self: Pin<&mut Self>) -> Access<'_>;
    }

    /// What nobody outside of the crate can use.
    #[derive(Debug)]
    pub struct Access<'a>(pub(super) &'a mut WorkLock);
}

impl<B: Begin, K: Kind<B::Work>> sealed::HasWorkLock for Guarded<B, K> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        sealed::Access(self.work_lock_mut())
    }
}

impl<W: sealed::HasWorkLock> sealed::HasWorkLock for Try<W> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        self.project().inner.work_lock()
    }
}

impl<W: sealed::HasWorkLock> sealed::HasWorkLock for OrSkip<W> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        self.project().inner.work_lock()
    }
}

impl<B: Begin> LockedFuture for Guarded<B, OfFuture>
where
    B::Work: Future,
{
    type Item = Result<<B::Work as Future>::Output, LockError>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        Some(output)
    }
}

impl<W, T> LockedFuture for OrSkip<W>
where
    W: LockedFuture<Output = Result<T, LockError>>,
{
    type Item = Result<T, LockError>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        output.transpose()
    }
}

impl<B: Begin> LockedFuture for Try<Guarded<B, OfFuture>>
where
    B::Work: Future<Output: Flatten>,
{
    type Item = <<B::Work as Future>::Output as Flatten>::Flat;

    fn item(output: Self::Output) -> Option<Self::Item> {
        Some(output)
    }
}

impl<B: Begin, T, E> LockedFuture for Try<OrSkip<Guarded<B, OfFuture>>>
where
    B::Work: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        output.transpose()
    }
}

/// A key, and the address of its registry. That stays there as long as an item uses it.
type Key = (usize, Arc<str>);

/// Stream of [`buffer_keyed`](crate::StreamLockExt::buffer_keyed).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    #[pin]
    source: Fuse<S>,
    items: Items<S::Item>,
}

impl<S> BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    pub(super) fn new(source: S, working: usize) -> Self {
        Self {
            source: source.fuse(),
            items: Items::new(working),
        }
    }

    /// At most `most` items do not work: those that wait for their locks, for an earlier item of their key or for a place, that
    /// release their locks, and [in order](Self::in_order) those that are done and not yielded. Then the source is asked for no
    /// more. 0 counts as 1, since an item waits at least until it was looked at. Default: 16 times as many as may work.
    pub fn waiting(mut self, most: usize) -> Self {
        self.items.waiting = most.max(1);
        self
    }

    /// Yields the results in the order of the source. The work is done in the same order as without. So when a result
    /// comes, all items before it have ended, and their results have come: a consumer of a log can commit its place after each
    /// `Ok`, up to the first error.
    ///
    /// An item that `or_skip` leaves out has no result, and one whose panic was caught outside has none: do without either
    /// where the place is committed.
    ///
    /// ```
    /// use futures::{StreamExt, TryStreamExt, stream};
    /// use lockstream::prelude::*;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// # fn commit(_: u64) {}
    /// let locks = LockRegistry::in_memory();
    /// let items = stream::iter(1..=100_u64).map(|offset| {
    ///     let key = format!("account:{}", offset % 7);
    ///     async move { offset }.with_lock(locks.obtain(key))
    /// });
    /// let mut done = items.buffer_keyed(16).in_order();
    /// while let Some(offset) = done.try_next().await? {
    ///     commit(offset); // all up to here are done
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// An item that takes long holds up the results behind it, but not their work, as long as there is
    /// [room](Self::waiting).
    pub fn in_order(mut self) -> Self {
        self.items.results.keep_order();
        self
    }
}

impl<S> Stream for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    type Item = <S::Item as LockedFuture>::Item;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        let items = this.items;
        items.ready.register(cx.waker());
        // An item that wakes itself must not keep the others, or the task, from their turn.
        let mut woken = items.ready.len();
        for _ in 0..POLLS {
            if let Some(result) = items.results.pop() {
                return Poll::Ready(Some(result));
            }
            if let Some(id) = items.next_to_poll(&mut woken) {
                items.poll(id);
            } else if items.has_room()
                && let Poll::Ready(Some(item)) = this.source.as_mut().poll_next(cx)
            {
                items.push(item);
            } else if items.ready.len() == 0 {
                return match this.source.is_done() && items.by_id.is_empty() {
                    true => Poll::Ready(None),
                    false => Poll::Pending,
                };
            } else {
                break;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let within = self.items.len();
        let most = self.source.size_hint().1;
        // Any may be left out.
        (0, most.and_then(|most| most.checked_add(within)))
    }
}

impl<S> FusedStream for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    fn is_terminated(&self) -> bool {
        self.source.is_terminated() && self.items.len() == 0
    }
}

impl<S> fmt::Debug for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferKeyed")
            .field("working", &self.items.places)
            .field("items", &self.items.len())
            .finish_non_exhaustive()
    }
}

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
struct Items<F: LockedFuture> {
    by_id: HashMap<u64, Item<F>>,
    /// The items of each key, in the order of the source.
    lines: HashMap<Key, VecDeque<u64>>,
    /// Those that are to enter the queue of a key which an earlier item has, before that releases it.
    early: VecDeque<u64>,
    /// Those that have their locks and wait for a place.
    holding: VecDeque<u64>,
    /// Those that wait for a place to ask for their locks.
    next: VecDeque<u64>,
    ready: Arc<ReadyQueue>,
    results: Results<F::Item>,
    last_id: u64,
    /// How many work now.
    places: usize,
    /// How many may work.
    working: usize,
    /// How many may wait.
    waiting: usize,
}

impl<F: LockedFuture> Items<F> {
    fn new(working: usize) -> Self {
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
    fn len(&self) -> usize {
        self.by_id.len() + self.results.len()
    }

    /// Whether the source is asked for another item: if that can work at once, as far as is known.
    fn has_room(&self) -> bool {
        self.places < self.working && self.len() - self.places < self.waiting
    }

    fn push(&mut self, future: F) {
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
    fn next_to_poll(&mut self, woken: &mut usize) -> Option<u64> {
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

    fn poll(&mut self, id: u64) {
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
enum Results<T> {
    Ready(VecDeque<T>),
    /// By id. `None`: left out.
    InOrder {
        results: BTreeMap<u64, Option<T>>,
        next: u64,
    },
}

impl<T> Results<T> {
    /// Before the first.
    fn keep_order(&mut self) {
        *self = Self::InOrder {
            results: BTreeMap::new(),
            next: 1,
        };
    }

    fn len(&self) -> usize {
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

    fn pop(&mut self) -> Option<T> {
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

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::pin::pin;
    use std::time::Duration;

    use futures::{FutureExt, stream};

    use crate::store::MemoryStore;
    use crate::{FutureLockExt, LockRegistry, StreamLockExt};

    /// A thousand items wait, each for a key of its own. When one key comes, no other item is polled.
    #[tokio::test(start_paused = true)]
    async fn one_that_wakes_is_polled_alone() {
        let soon = || tokio::time::sleep(Duration::from_millis(10));
        let store = MemoryStore::new();
        let registry = || LockRegistry::builder(store.clone()).build().unwrap();
        let (here, there) = (registry(), registry());
        let key = |item: usize| format!("k{item}");
        let mut held = Vec::new();
        for item in 0..1000 {
            held.push(there.obtain(key(item)).lease().await.unwrap());
        }
        let items = futures::StreamExt::map(stream::iter(0..1000), |item| {
            ready(item).with_lock(here.obtain(key(item)))
        });
        let mut items = pin!(items.buffer_keyed(1).waiting(1000));
        for _ in 0..20 {
            let next = futures::StreamExt::next(&mut items);
            assert!(next.now_or_never().is_none());
            soon().await;
        }
        assert_eq!((items.items.len(), items.items.places), (1000, 0));
        assert_eq!(items.items.ready.len(), 0);
        held.remove(500).release().await.unwrap();
        soon().await;
        assert_eq!(items.items.ready.len(), 1);
        let next = futures::StreamExt::next(&mut items).await;
        assert_eq!(next.unwrap().unwrap(), 500);
        assert_eq!(items.items.lines.len(), 999, "nothing is kept of its key");
    }
}
