//! Delivers the events of a session to its registry.

use std::sync::Weak;

use super::contract::{StoreEvent, StoreEvents};
use crate::base::mutex::Mutex;

/// Delivers events in the order in which they were queued, by any thread. More may be queued meanwhile.
pub(super) struct OrderedNotifier {
    listener: Weak<dyn StoreEvents>,
    events: Mutex<Vec<StoreEvent>>,
    /// Held while events are delivered. It is only tried: other threads leave their events to the one that delivers,
    /// which keeps the order.
    telling: Mutex<()>,
}

impl OrderedNotifier {
    pub(super) fn new(listener: Weak<dyn StoreEvents>) -> Self {
        Self {
            listener,
            events: Mutex::default(),
            telling: Mutex::default(),
        }
    }

    /// Queues the events of a change. Called while the lock of that change is held, so events keep the order of the
    /// changes.
    pub(super) fn put(&self, events: impl IntoIterator<Item = StoreEvent>) {
        self.events.lock().extend(events);
    }

    /// Delivers the queued events, unless another thread does.
    pub(super) fn tell(&self) {
        // Checks again after each batch: another thread may have left its events to us.
        while !self.events.lock().is_empty()
            && let Some(_telling) = self.telling.try_lock()
        {
            let events = std::mem::take(&mut *self.events.lock());
            if let Some(listener) = self.listener.upgrade() {
                listener.on_events(events);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, OnceLock};

    use shuttle::thread;

    use super::*;
    use crate::base::model::check;
    use crate::store::contract::KeyScope;

    /// Puts more in while it hears some, as a registry does that sends an op at once.
    #[derive(Default)]
    struct EventSink {
        notifier: OnceLock<OrderedNotifier>,
        heard: Mutex<Vec<String>>,
    }

    impl StoreEvents for EventSink {
        fn uses(&self, _: &KeyScope) -> bool {
            true
        }

        fn waits(&self, _: &str) -> bool {
            true
        }

        fn failed(&self, _: &(dyn std::any::Any + Send)) {
            unreachable!("no task panics here")
        }

        fn on_events(&self, events: Vec<StoreEvent>) {
            for event in events {
                let StoreEvent::Freed { key } = event else {
                    unreachable!("nothing else was put in")
                };
                assert!(&*key != "panic", "as it was told to");
                if &*key == "more" {
                    self.tells(&["then"]);
                }
                self.heard.lock().push(key.to_string());
            }
        }
    }

    impl EventSink {
        fn new() -> Arc<Self> {
            let sink = Arc::new(Self::default());
            let listener: Arc<dyn StoreEvents> = sink.clone();
            assert!(
                sink.notifier
                    .set(OrderedNotifier::new(Arc::downgrade(&listener)))
                    .is_ok()
            );
            sink
        }

        fn tells(&self, keys: &[&str]) {
            let notifier = self.notifier.get().unwrap();
            notifier.put(
                keys.iter()
                    .map(|&key| StoreEvent::Freed { key: key.into() }),
            );
            notifier.tell();
        }

        fn heard(&self) -> Vec<String> {
            std::mem::take(&mut *self.heard.lock())
        }
    }

    #[test]
    fn events_queued_during_delivery_are_delivered_after_it() {
        let sink = EventSink::new();
        sink.tells(&["more", "a", "b"]);
        assert_eq!(sink.heard(), ["more", "a", "b", "then"]);
    }

    /// Two threads change something and tell of it: each event is delivered, in the order of the changes.
    ///
    /// Finds: `tell` looks at the queue only once (an event stays there whose thread came while the other delivered), or
    /// takes the events before it has the turn to deliver them (their order changes).
    #[test]
    fn model_every_event_is_delivered_in_order() {
        check(|| {
            let sink = EventSink::new();
            let changes = Arc::new(Mutex::new(Vec::new()));
            let threads = [["a", "b"], ["c", "d"]].map(|keys| {
                let (sink, changes) = (sink.clone(), changes.clone());
                thread::spawn(move || {
                    for key in keys {
                        let mut changes = changes.lock();
                        changes.push(key.to_owned());
                        let notifier = sink.notifier.get().unwrap();
                        notifier.put([StoreEvent::Freed { key: key.into() }]);
                        drop(changes);
                        notifier.tell();
                    }
                })
            });
            threads
                .into_iter()
                .for_each(|thread| thread.join().unwrap());
            assert_eq!(sink.heard(), *changes.lock());
        });
    }

    #[test]
    fn a_listener_that_panics_is_told_the_next_all_the_same() {
        let sink = EventSink::new();
        let told = catch_unwind(AssertUnwindSafe(|| sink.tells(&["a", "panic"])));
        assert!(told.is_err());
        sink.tells(&["b"]);
        assert_eq!(sink.heard(), ["a", "b"]);
    }
}
