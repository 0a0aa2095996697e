//! Handles what the store reports.

use std::any::Any;
use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::core::Engine;
use super::state::{ChangeCx, EngineState, Outage, Turnstile};
#[cfg(feature = "metrics")]
use crate::base::user_code;
use crate::base::user_code::log;
use crate::engine::settings::Settings;
use crate::observe::LockEvent;
use crate::store::contract::{KeyScope, Op, StoreEvent, StoreEvents};

impl StoreEvents for Engine {
    fn on_events(&self, events: Vec<StoreEvent>) {
        let count = events.len();
        let mut events = events.into_iter().peekable();
        while events.peek().is_some() {
            // One lock for all of them: a call may have dozens of answers.
            self.at_once(|state, at| {
                at.deferred.callbacks.wakers.reserve(count);
                while let Some(event) = events.next_if(StoreEvent::is_of_a_key) {
                    feed_store_event(state, at, event);
                }
            });
            if let Some(other) = events.next() {
                self.store_changed(other);
            }
        }
    }

    /// The same without a list: a store in memory has one answer at a time.
    fn on_event(&self, event: StoreEvent) {
        if event.is_of_a_key() {
            self.at_once(|state, at| feed_store_event(state, at, event));
        } else {
            self.store_changed(event);
        }
    }

    fn failed(&self, panicked: &(dyn Any + Send)) {
        self.fail(panicked);
    }

    fn uses(&self, scope: &KeyScope) -> bool {
        let state = self.state.lock();
        state.entries.keys().any(|key| scope.contains(key))
    }

    fn waits(&self, key: &str) -> bool {
        let state = self.state.lock();
        let entry = state.entries.get(key);
        entry.is_some_and(|entry| entry.lines.may_have_ticket())
    }
}

impl Engine {
    /// The store, or a part of it, is up or down.
    fn store_changed(&self, event: StoreEvent) {
        match event {
            StoreEvent::Up {
                scope,
                queue,
                complete,
            } => {
                let (mut outage, elsewhere) = (None, self.is_other_server());
                let told = |state: &mut EngineState| {
                    if matches!(scope, KeyScope::All) {
                        state.queue = queue;
                    }
                    if complete {
                        outage = state.outage.take();
                        if !mem::replace(&mut state.was_up, true) || outage.is_some() {
                            self.events.send(|| LockEvent::StoreUp {});
                        }
                    }
                };
                self.feed_scope(
                    &scope,
                    told,
                    &[
                        &|turnstile, cx| turnstile.up_renew(cx, elsewhere),
                        &|turnstile, cx| turnstile.up(cx, queue),
                    ],
                );
                #[cfg(feature = "metrics")]
                user_code::run("a metrics recorder", || {
                    crate::observe::metrics::polls(!queue, &self.settings.prefix);
                });
                if let Some(outage) = outage.filter(|outage| outage.is_told) {
                    let (prefix, name, away_for) = self.about(outage.since);
                    log!(info, prefix, name, ?away_for, "store reachable again");
                }
            }
            StoreEvent::Down { scope, error } => {
                let (mut warns, mut since) = (false, Instant::now());
                let told = |state: &mut EngineState| {
                    // At the end of a program, tasks end in any order. If another runtime is left, its connection
                    // tells how the store is. And where nobody holds or waits, nobody is harmed.
                    let is_used = state.entries.iter().any(|(key, entry)| {
                        let mut callers = entry.lines.holders().chain(entry.lines.waiters());
                        scope.contains(key) && callers.next().is_some()
                    });
                    let outage = state.outage.get_or_insert_with(|| {
                        // Once for each outage, however often the store tries to reconnect.
                        let told = error.clone();
                        self.events.send(|| LockEvent::StoreDown { error: told });
                        Outage::new(error.clone())
                    });
                    outage.error = error.clone();
                    // A connection that is closed while nobody uses it says nothing of the next attempt.
                    if is_used {
                        outage.away = Some((scope.clone(), error.clone()));
                    }
                    warns =
                        !error.is_abandoned() && is_used && outage.log.is_news(&error.to_string());
                    outage.is_told |= warns;
                    since = outage.since;
                };
                self.feed_scope(&scope, told, &[&|turnstile, cx| turnstile.down(cx, &error)]);
                // Losses that follow are logged, so their cause is logged as well.
                let (prefix, name, away_for) = self.about(since);
                if warns {
                    log!(
                        warn,
                        prefix,
                        name,
                        ?away_for,
                        %error,
                        "store unreachable, leases are not renewed"
                    );
                } else {
                    log!(debug, prefix, name, ?away_for, %error, "store unreachable");
                }
                // The session's tasks may have ended with their runtime. The timer's task starts them again.
                self.view_context.timer.wake();
            }
            StoreEvent::Replied { .. }
            | StoreEvent::Granted { .. }
            | StoreEvent::Unconfirmed { .. }
            | StoreEvent::Freed { .. }
            | StoreEvent::Unserved { .. } => unreachable!("those are for one key"),
        }
    }

    /// Which registry this is, and for how long its store was away.
    fn about(&self, since: Instant) -> (&str, Option<&str>, Duration) {
        let Settings { prefix, name, .. } = &self.settings;
        (prefix, name.as_deref(), since.elapsed())
    }

    /// Notes which server the present connection leads to. Returns whether the last one led to another.
    fn is_other_server(&self) -> bool {
        let session = self.state.lock().session.clone();
        let Some(server) = session.and_then(|session| session.identity()) else {
            return false;
        };
        let last = self.state.lock().server.replace(server.clone());
        last.is_some_and(|last| last != server)
    }
}

/// Feeds what the store says of one key.
fn feed_store_event(state: &mut EngineState, at: &mut ChangeCx<'_>, event: StoreEvent) {
    match event {
        StoreEvent::Replied {
            mut submitted,
            result,
        } => {
            submitted.answered();
            let (key, op) = (&submitted.key, &submitted.op);
            state.feed(at, key, false, |lines, cx| lines.replied(cx, op, result));
        }
        // Also for a key that is not in use: then it is released.
        StoreEvent::Granted { key, grant } => {
            state.feed(at, &key, true, |lines, cx| {
                lines.grant_received(cx, grant, None)
            });
        }
        StoreEvent::Unconfirmed { key, grant, error } => {
            state.feed(at, &key, true, |lines, cx| {
                lines.grant_received(cx, grant, Some(error));
            });
        }
        StoreEvent::Freed { key } => {
            state.feed_keys(at, &[key], Turnstile::freed);
        }
        // Nobody waits for the answer: if it is lost, whoever is first in the queue asks soon.
        StoreEvent::Unserved { key, owner } => {
            at.deferred.sends.push((key, Op::Serve { owner }));
        }
        StoreEvent::Up { .. } | StoreEvent::Down { .. } => {
            unreachable!("those are for all keys")
        }
    }
}
