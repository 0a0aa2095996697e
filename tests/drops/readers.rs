//! Wakers of those who read events are the user's code: they may panic, and use the registry.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures::{FutureExt, Stream, StreamExt};
use lockstream::stream::Events;
use lockstream::{LockEvent, LockRegistry};

use crate::stories::{does_not_hang, runtime};

/// Counts how often it is called, and then does something.
struct Called<F>(AtomicUsize, F);

impl<F: Fn() + Send + Sync + 'static> Called<F> {
    fn new(then: F) -> Arc<Self> {
        Arc::new(Self(AtomicUsize::new(0), then))
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl<F: Fn() + Send + Sync + 'static> Wake for Called<F> {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        (self.1)();
    }
}

/// A reader that has read everything, and is to be woken for the next event.
fn waits(events: &mut Events, waker: Waker) {
    let next = pin!(events).poll_next(&mut Context::from_waker(&waker));
    assert!(matches!(next, Poll::Pending), "{next:?}");
}

fn next(events: &mut Events) -> LockEvent {
    let next = events.next().now_or_never();
    next.expect("there is one").expect("it has not ended")
}

/// Each of many readers is woken for the next event, although every other waker panics, and for the end.
#[tokio::test(start_paused = true)]
async fn a_readers_waker_that_panics_harms_no_other() {
    const READERS: usize = 100;
    let locks = LockRegistry::in_memory();
    let mut readers: Vec<_> = (0..READERS).map(|_| locks.events()).collect();
    let faulty = Called::new(|| panic!("a user's fault"));
    let sound = Called::new(|| ());
    for (n, reader) in readers.iter_mut().enumerate() {
        match n % 2 {
            0 => waits(reader, faulty.clone().into()),
            _ => waits(reader, sound.clone().into()),
        }
    }
    let lease = locks.obtain("k").lease().await.unwrap();
    assert_eq!((faulty.count(), sound.count()), (READERS / 2, READERS / 2));
    lease.release().await.unwrap();
    for reader in &mut readers {
        assert!(matches!(next(reader), LockEvent::Waiting { .. }));
        assert!(matches!(next(reader), LockEvent::Acquired { .. }));
        assert!(matches!(next(reader), LockEvent::Released { .. }));
    }
    // Nobody waits: nobody is woken again.
    assert_eq!((faulty.count(), sound.count()), (READERS / 2, READERS / 2));
    for reader in &mut readers[..2] {
        waits(reader, faulty.clone().into());
    }
    waits(&mut readers[2], sound.clone().into());
    locks.shutdown().await;
    assert_eq!(faulty.count(), READERS / 2 + 2);
    assert_eq!(sound.count(), READERS / 2 + 1);
    for mut reader in readers {
        assert!(matches!(reader.next().now_or_never(), Some(None)));
    }
}

#[test]
fn a_readers_waker_may_use_the_registry() {
    does_not_hang(|| {
        runtime().block_on(async {
            let locks = LockRegistry::in_memory();
            let mut events = locks.events();
            let others = std::sync::Mutex::new(Vec::new());
            let registry = locks.clone();
            let curious = Called::new(move || {
                assert_eq!(registry.snapshot().keys.len(), 1);
                others.lock().unwrap().push(registry.events());
                // Tells of a wait that begins, and of its end, while another event is told of.
                drop(registry.obtain("k").acquire().now_or_never());
            });
            waits(&mut events, curious.clone().into());
            let lease = locks.obtain("k").lease().await.unwrap();
            assert_eq!(curious.count(), 1);
            lease.release().await.unwrap();
            let mut told: Vec<_> = std::iter::from_fn(|| events.next().now_or_never()?).collect();
            let last = told.pop();
            assert!(
                matches!(last, Some(LockEvent::Released { .. })),
                "{last:?} after {told:?}"
            );
            let waits = |event: &&LockEvent| matches!(event, LockEvent::Waiting { .. });
            assert_eq!(told.iter().filter(waits).count(), 2, "{told:?}");
            assert_eq!(told.len(), 4, "{told:?}");
        });
    });
}

/// A reader that is dropped while it waits keeps its task's waker no longer.
#[tokio::test(start_paused = true)]
async fn a_dropped_reader_keeps_no_waker() {
    let locks = LockRegistry::in_memory();
    let waker = Called::new(|| ());
    let mut events = locks.events();
    waits(&mut events, waker.clone().into());
    assert_eq!(Arc::strong_count(&waker), 2);
    drop(events);
    assert_eq!(Arc::strong_count(&waker), 1);
    drop(locks.obtain("k").lease().await.unwrap());
    assert_eq!(waker.count(), 0);
}
