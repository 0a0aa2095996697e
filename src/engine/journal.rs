//! What has happened, for those who read it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use tokio::time::Instant;

use crate::clock::Clock;
use crate::events::LockEvent;
use crate::settings::Settings;
use crate::turnstile::Moment;
use crate::user_code;

/// How many events are kept for a reader that does not come.
const CAPACITY: u64 = 1024;

/// The events of one registry, in the order in which they came about: they are told under the
/// engine's lock. Who reads is woken by [`flush`](Self::flush), once that lock is released.
pub(crate) struct Journal {
    clock: Arc<Clock>,
    /// What `QueueFull` tells.
    max_waiters: usize,
    #[cfg(feature = "metrics")]
    prefix: Arc<str>,
    /// How many read: where nobody does, nothing is told, and that must cost next to nothing.
    readers: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    events: VecDeque<LockEvent>,
    /// The number of the first of them: so many came before it.
    first: u64,
    readers: BTreeMap<u64, Reader>,
    /// How many have read so far.
    known: u64,
    /// Nothing follows.
    ended: bool,
    #[cfg(feature = "metrics")]
    unrecorded: Vec<LockEvent>,
}

struct Reader {
    /// The number of the event that it reads next.
    next: u64,
    /// Everything is kept for it.
    patient: bool,
    waker: Option<Waker>,
}

impl Journal {
    pub(super) fn new(settings: &Settings, clock: Arc<Clock>) -> Arc<Self> {
        #[cfg(feature = "metrics")]
        user_code::run("a metrics recorder", crate::metrics::describe);
        Arc::new(Self {
            clock,
            max_waiters: settings.max_waiters,
            #[cfg(feature = "metrics")]
            prefix: settings.prefix.clone(),
            readers: AtomicUsize::new(0),
            state: Mutex::default(),
        })
    }

    /// Whether anybody wants to know. To be asked under the engine's lock, which whoever begins to
    /// read has held: so a relaxed look is enough.
    pub(super) fn is_heard(&self) -> bool {
        cfg!(feature = "metrics") || self.readers.load(Ordering::Relaxed) > 0
    }

    /// Tells an event, under the engine's lock.
    pub(super) fn tell(&self, event: impl FnOnce() -> LockEvent) {
        if !self.is_heard() {
            return;
        }
        let event = event();
        let mut state = self.lock();
        #[cfg(feature = "metrics")]
        state.unrecorded.push(event.clone());
        if !state.ended && !state.readers.is_empty() {
            state.events.push_back(event);
            state.trim();
        }
    }

    pub(super) fn instant(&self, moment: Moment) -> Instant {
        self.clock.instant(moment)
    }

    pub(super) fn max_waiters(&self) -> usize {
        self.max_waiters
    }

    /// Nothing follows; under the engine's lock, but when the engine itself goes.
    pub(super) fn end(&self) {
        self.lock().ended = true;
    }

    /// Wakes those who have something to read, and records what was told: other people's code, so
    /// no lock may be held.
    pub(super) fn flush(&self) {
        if !self.is_heard() {
            return;
        }
        let mut state = self.lock();
        let (end, ended) = (state.end(), state.ended);
        let wakers: Vec<_> = state
            .readers
            .values_mut()
            .filter(|reader| ended || reader.next < end)
            .filter_map(|reader| reader.waker.take())
            .collect();
        #[cfg(feature = "metrics")]
        let unrecorded = std::mem::take(&mut state.unrecorded);
        drop(state);
        for waker in wakers {
            user_code::run("a waker", || waker.wake());
        }
        #[cfg(feature = "metrics")]
        for event in unrecorded {
            user_code::run("a metrics recorder", || {
                crate::metrics::record(&event, &self.prefix);
            });
        }
    }

    /// Somebody begins to read; under the engine's lock. `patient`: however far it falls behind,
    /// it misses nothing.
    pub(super) fn open(&self, patient: bool) -> u64 {
        let mut state = self.lock();
        state.known += 1;
        let (id, next) = (state.known, state.end());
        let reader = Reader {
            next,
            patient,
            waker: None,
        };
        state.readers.insert(id, reader);
        self.readers.store(state.readers.len(), Ordering::Relaxed);
        id
    }

    /// The next event for a reader, or else its waker is told of it.
    pub(crate) fn read(&self, reader: u64, waker: &Waker) -> Poll<Option<LockEvent>> {
        // Wakers are the user's code: they are cloned and dropped where nothing is locked.
        let clone = waker.clone();
        let mut guard = self.lock();
        let state = &mut *guard;
        let (end, ended) = (state.end(), state.ended);
        let reader = state.readers.get_mut(&reader);
        let reader = reader.expect("it reads until it is forgotten");
        let kept = reader.kept(end);
        if kept > reader.next {
            let count = kept - reader.next;
            reader.next = kept;
            return Poll::Ready(Some(LockEvent::Missed { count }));
        }
        if reader.next < end {
            let at = usize::try_from(reader.next - state.first).expect("as many as are kept");
            let event = state.events[at].clone();
            reader.next += 1;
            state.trim();
            return Poll::Ready(Some(event));
        }
        if ended {
            return Poll::Ready(None);
        }
        let before = reader.waker.replace(clone);
        drop(guard);
        drop(before);
        Poll::Pending
    }

    /// A reader has gone.
    pub(crate) fn forget(&self, reader: u64) {
        let mut state = self.lock();
        let reader = state.readers.remove(&reader);
        self.readers.store(state.readers.len(), Ordering::Relaxed);
        state.trim();
        drop(state);
        drop(reader);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The number of the event to come.
    fn end(&self) -> u64 {
        self.first + self.events.len() as u64
    }

    /// Drops what nobody will read any more.
    fn trim(&mut self) {
        let end = self.end();
        let kept = self.readers.values().map(|reader| reader.kept(end)).min();
        while self.first < kept.unwrap_or(end) {
            self.events.pop_front();
            self.first += 1;
        }
    }
}

impl Reader {
    /// The number of the first event that it can still read.
    fn kept(&self, end: u64) -> u64 {
        if self.patient {
            self.next
        } else {
            self.next.max(end.saturating_sub(CAPACITY))
        }
    }
}

impl fmt::Debug for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Journal").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures::task::noop_waker;

    use super::*;

    fn journal() -> Arc<Journal> {
        Journal::new(&Settings::default(), Arc::new(Clock::system()))
    }

    fn tell(journal: &Journal, waiters: std::ops::Range<u64>) {
        for waiter in waiters {
            let key: Arc<str> = "k".into();
            journal.tell(|| LockEvent::Waiting { key, waiter });
        }
        journal.flush();
    }

    fn kept(journal: &Journal) -> usize {
        journal.lock().events.len()
    }

    /// Reads up to so many events: the waiters, or how many were missed as a negative number.
    fn read(journal: &Journal, reader: u64, most: usize) -> Vec<i64> {
        let next = || match journal.read(reader, &noop_waker()) {
            Poll::Ready(Some(LockEvent::Waiting { waiter, .. })) => i64::try_from(waiter).ok(),
            Poll::Ready(Some(LockEvent::Missed { count })) => i64::try_from(count).ok().map(|n| -n),
            _ => None,
        };
        std::iter::from_fn(next).take(most).collect()
    }

    #[test]
    fn nothing_is_kept_where_nobody_reads() {
        let journal = journal();
        tell(&journal, 0..10);
        assert_eq!(kept(&journal), 0);
        let reader = journal.open(false);
        assert!(journal.is_heard());
        tell(&journal, 10..20);
        assert_eq!(kept(&journal), 10);
        journal.forget(reader);
        assert_eq!(kept(&journal), 0);
        assert_eq!(journal.is_heard(), cfg!(feature = "metrics"));
        // Nor is anything built.
        #[cfg(not(feature = "metrics"))]
        journal.tell(|| unreachable!("nobody reads it"));
        #[cfg(feature = "metrics")]
        assert!(journal.lock().unrecorded.is_empty());
    }

    #[test]
    fn what_all_have_read_is_dropped() {
        let journal = journal();
        let (one, two) = (journal.open(false), journal.open(false));
        tell(&journal, 0..10);
        assert_eq!(read(&journal, one, 6).len(), 6);
        assert_eq!(kept(&journal), 10);
        assert_eq!(read(&journal, two, 4).len(), 4);
        assert_eq!(kept(&journal), 6);
        journal.forget(two);
        assert_eq!(kept(&journal), 4);
        assert_eq!(read(&journal, one, 10), [6, 7, 8, 9]);
        assert_eq!(kept(&journal), 0);
    }

    /// Each by itself: the slow one is told of its loss once, also if another keeps everything.
    #[test]
    fn a_reader_misses_what_it_falls_behind_and_no_more() {
        let journal = journal();
        let (slow, patient) = (journal.open(false), journal.open(true));
        tell(&journal, 0..1024);
        assert_eq!(read(&journal, slow, 2), [0, 1], "nothing is missed yet");
        tell(&journal, 1024..2000);
        assert_eq!(kept(&journal), 2000);
        let late = journal.open(false);
        assert_eq!(read(&journal, slow, 3), [-974, 976, 977]);
        tell(&journal, 2000..2001);
        let rest = read(&journal, slow, usize::MAX);
        assert_eq!((rest[0], rest.len()), (978, 1023));
        assert_eq!(read(&journal, patient, usize::MAX).len(), 2001);
        assert_eq!(read(&journal, late, usize::MAX), [2000]);
        assert_eq!(kept(&journal), 0);
        tell(&journal, 0..5000);
        assert_eq!(read(&journal, slow, 1), [-3976]);
    }

    #[test]
    fn the_end_comes_after_what_was_told_and_once() {
        let journal = journal();
        let reader = journal.open(false);
        tell(&journal, 0..2);
        journal.end();
        tell(&journal, 2..4);
        assert_eq!(read(&journal, reader, usize::MAX), [0, 1]);
        for reader in [reader, reader, journal.open(false)] {
            let end = journal.read(reader, &noop_waker());
            assert!(matches!(end, Poll::Ready(None)));
        }
    }
}
