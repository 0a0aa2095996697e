//! Sends events to those who read them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use tokio::sync::broadcast::Sender;
use tokio::time::Instant;

use crate::base::clock::Moment;
use crate::base::mutex::Mutex;
use crate::base::sync::{AtomicBool, AtomicWaker};
use crate::base::{Clock, Holder, user_code};
use crate::engine::settings::Settings;
use crate::observe::{Events, LockEvent};
use crate::turnstile::Holding;

/// How many events are kept for a slow reader.
const CAPACITY: usize = 1024;

/// The events of one registry, in the order in which they happen: they are sent under the engine's
/// lock. [`flush`](Self::flush) wakes the readers once that lock is released.
pub(crate) struct EventBus {
    clock: Arc<Clock>,
    /// The registry's id.
    instance: Arc<str>,
    /// The limit that `QueueFull` names.
    max_waiters: usize,
    #[cfg(feature = "metrics")]
    prefix: Arc<str>,
    /// Whether there may be a reader. Without one no event is built.
    is_read: AtomicBool,
    state: Mutex<BusState>,
}

#[derive(Default)]
struct BusState {
    /// Made for the first reader, as a channel allocates its whole ring, and dropped with the last.
    channel: Option<Sender<LockEvent>>,
    /// The wakers of the readers. The broadcast channel does not store wakers. It would call them under the engine's
    /// lock, and one panic would skip the rest.
    readers: Vec<Weak<AtomicWaker>>,
    #[cfg(feature = "test-util")]
    unbounded: Vec<std::sync::mpsc::Sender<LockEvent>>,
    /// Whether there is anything to flush.
    unflushed: bool,
    #[cfg(feature = "metrics")]
    unrecorded: Vec<LockEvent>,
    /// No event follows.
    ended: bool,
}

impl EventBus {
    pub(super) fn new(settings: &Settings, instance: Arc<str>, clock: Arc<Clock>) -> Self {
        #[cfg(feature = "metrics")]
        user_code::run("a metrics recorder", crate::observe::metrics::describe);
        Self {
            clock,
            instance,
            max_waiters: settings.max_waiters,
            #[cfg(feature = "metrics")]
            prefix: settings.prefix.clone(),
            is_read: AtomicBool::new(false),
            state: Mutex::default(),
        }
    }

    /// Whether anybody reads events. Readers subscribe under the engine's lock, under which this is
    /// called, so a relaxed load is enough.
    pub(super) fn is_read(&self) -> bool {
        cfg!(feature = "metrics") || self.is_read.load(Ordering::Relaxed)
    }

    /// Sends an event, under the engine's lock.
    pub(super) fn send(&self, event: impl FnOnce() -> LockEvent) {
        if !self.is_read() {
            return;
        }
        let event = event();
        let mut state = self.state.lock();
        state.unflushed = true;
        #[cfg(feature = "metrics")]
        state.unrecorded.push(event.clone());
        #[cfg(feature = "test-util")]
        state
            .unbounded
            .retain(|reader| reader.send(event.clone()).is_ok());
        if let Some(channel) = &state.channel {
            // It fails when the last reader is gone, which the flush notices, too.
            let _ = channel.send(event);
        }
    }

    pub(super) fn instant(&self, moment: Moment) -> Instant {
        self.clock.instant(moment)
    }

    /// Who has a key, as its callers are told.
    pub(super) fn holder(&self, holding: &Holding) -> Holder {
        holding.holder(&self.instance)
    }

    pub(super) fn max_waiters(&self) -> usize {
        self.max_waiters
    }

    /// No event follows. Called under the engine's lock, or when the engine is dropped.
    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        state.unflushed = true;
        state.ended = true;
        state.channel = None;
        #[cfg(feature = "test-util")]
        state.unbounded.clear();
    }

    /// Wakes the readers and records metrics. Both are the user's code: no lock may be held.
    pub(super) fn flush(&self) {
        if !self.is_read() {
            return;
        }
        let mut state = self.state.lock();
        if !std::mem::take(&mut state.unflushed) {
            return;
        }
        let mut wakers = Vec::new();
        state.readers.retain(|reader| {
            let reader = reader.upgrade();
            wakers.extend(reader.iter().filter_map(|reader| reader.take()));
            reader.is_some()
        });
        if state.readers.is_empty() {
            state.channel = None;
        }
        self.is_read.store(state.is_read(), Ordering::Relaxed);
        #[cfg(feature = "metrics")]
        let unrecorded = std::mem::take(&mut state.unrecorded);
        drop(state);
        for waker in wakers {
            user_code::run("a waker", || waker.wake());
        }
        #[cfg(feature = "metrics")]
        for event in unrecorded {
            user_code::run("a metrics recorder", || {
                crate::observe::metrics::record(&event, &self.prefix);
            });
        }
    }

    /// A reader of the events that follow. Called under the engine's lock.
    pub(super) fn subscribe(&self) -> Events {
        let mut state = self.state.lock();
        if state.ended {
            return Events::new(&Sender::new(1), Arc::default());
        }
        let waker = Arc::default();
        state.readers.push(Arc::downgrade(&waker));
        self.is_read.store(true, Ordering::Relaxed);
        let channel = &mut state.channel;
        let channel = channel.get_or_insert_with(|| Sender::new(CAPACITY));
        Events::new(channel, waker)
    }

    /// A reader without a limit, which is not woken.
    #[cfg(feature = "test-util")]
    pub(super) fn subscribe_unbounded(&self) -> std::sync::mpsc::Receiver<LockEvent> {
        let (sender, reader) = std::sync::mpsc::channel();
        let mut state = self.state.lock();
        if !state.ended {
            state.unbounded.push(sender);
            self.is_read.store(true, Ordering::Relaxed);
        }
        reader
    }
}

impl BusState {
    fn is_read(&self) -> bool {
        #[cfg(feature = "test-util")]
        if !self.unbounded.is_empty() {
            return true;
        }
        self.channel.is_some()
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt};
    use shuttle::future::block_on;
    use shuttle::thread;

    use super::*;
    use crate::base::model::check;

    fn bus() -> EventBus {
        EventBus::new(&Settings::default(), "1f".into(), Arc::new(Clock::system()))
    }

    fn waiting(waiter: u64) -> LockEvent {
        LockEvent::Waiting {
            key: "k".into(),
            waiter,
            mode: crate::base::Mode::Exclusive,
        }
    }

    fn tell(bus: &EventBus, waiters: std::ops::Range<u64>) {
        for waiter in waiters {
            bus.send(|| waiting(waiter));
        }
        bus.flush();
    }

    /// Reads up to so many events: the waiters, or how many were missed as a negative number.
    fn read(events: &mut Events, most: usize) -> Vec<i64> {
        let next = || match events.next().now_or_never() {
            Some(Some(LockEvent::Waiting { waiter, .. })) => i64::try_from(waiter).ok(),
            Some(Some(LockEvent::Missed { count })) => i64::try_from(count).ok().map(|n| -n),
            _ => None,
        };
        std::iter::from_fn(next).take(most).collect()
    }

    #[test]
    fn nothing_is_kept_where_nobody_reads() {
        let bus = bus();
        let has_channel = || bus.state.lock().channel.is_some();
        tell(&bus, 0..10);
        assert!(!has_channel());
        let mut events = [bus.subscribe(), bus.subscribe()];
        assert!(bus.is_read() && has_channel());
        tell(&bus, 10..20);
        let [one, two] = &mut events;
        assert_eq!(read(one, 2), [10, 11]);
        assert_eq!(read(two, usize::MAX).len(), 10);
        drop(events);
        tell(&bus, 20..21);
        assert!(!has_channel() && bus.state.lock().readers.is_empty());
        assert_eq!(bus.is_read(), cfg!(feature = "metrics"));
        // Nor is anything built.
        #[cfg(not(feature = "metrics"))]
        bus.send(|| unreachable!("nobody reads it"));
        #[cfg(feature = "metrics")]
        assert!(bus.state.lock().unrecorded.is_empty());
        // Whoever reads next begins anew.
        let mut events = bus.subscribe();
        tell(&bus, 30..31);
        assert_eq!(read(&mut events, usize::MAX), [30]);
    }

    /// Each by itself: the slow one is told of its loss once, also if another keeps everything.
    #[test]
    fn a_reader_misses_what_it_falls_behind_and_no_more() {
        let bus = bus();
        let mut slow = bus.subscribe();
        #[cfg(feature = "test-util")]
        let unbounded = bus.subscribe_unbounded();
        tell(&bus, 0..1024);
        assert_eq!(read(&mut slow, 2), [0, 1], "nothing is missed yet");
        tell(&bus, 1024..2000);
        let mut late = bus.subscribe();
        assert_eq!(read(&mut slow, 3), [-974, 976, 977]);
        tell(&bus, 2000..2001);
        let rest = read(&mut slow, usize::MAX);
        assert_eq!((rest[0], rest.len()), (978, 1023));
        #[cfg(feature = "test-util")]
        assert_eq!(unbounded.try_iter().count(), 2001);
        assert_eq!(read(&mut late, usize::MAX), [2000]);
        tell(&bus, 0..5000);
        assert_eq!(read(&mut slow, 1), [-3976]);
    }

    /// Two threads send, and then one ends the registry. The reader, which sleeps whenever there is nothing to read, sees all
    /// events in the order in which they were sent, and then the end.
    ///
    /// Finds: `Events` does not look again once its waker is registered, or `flush` notes that everything is flushed after
    /// it took the wakers, and under another lock.
    #[test]
    fn model_a_reader_sleeps_through_nothing() {
        check(|| {
            let bus = Arc::new(bus());
            let mut events = bus.subscribe();
            // As the engine's lock.
            let sent = Arc::new(Mutex::new(Vec::new()));
            let senders = [0..2, 2..4].map(|waiters| {
                let (bus, sent) = (bus.clone(), sent.clone());
                thread::spawn(move || {
                    for waiter in waiters {
                        let mut sent = sent.lock();
                        sent.push(waiter);
                        bus.send(|| waiting(waiter));
                        drop(sent);
                        bus.flush();
                    }
                })
            });
            let waiter = |event| match event {
                LockEvent::Waiting { waiter, .. } => waiter,
                other => unreachable!("{other:?}"),
            };
            let read = block_on(events.by_ref().take(4).map(waiter).collect::<Vec<_>>());
            for sender in senders {
                sender.join().unwrap();
            }
            assert_eq!(read, *sent.lock());
            let end = thread::spawn(move || {
                bus.end();
                bus.flush();
            });
            assert!(block_on(events.next()).is_none());
            end.join().unwrap();
        });
    }

    #[test]
    fn the_end_comes_once_after_all_events() {
        let bus = bus();
        let mut events = bus.subscribe();
        tell(&bus, 0..2);
        bus.end();
        tell(&bus, 2..4);
        assert_eq!(read(&mut events, usize::MAX), [0, 1]);
        let mut late = bus.subscribe();
        for events in [&mut events, &mut late] {
            for _ in 0..2 {
                assert!(matches!(events.next().now_or_never(), Some(None)));
            }
        }
    }
}
