//! The end of a registry.

use std::mem;
use std::time::Duration;

use tokio::time::Instant;

use super::core::Engine;
use super::state::{EventCx, Turnstile};
use crate::base::{Clock, user_code};

/// How long work has to end at a shutdown before its lease is released, if it can hear of the shutdown. Work
/// that is polled needs less.
const GRACE: Duration = Duration::from_millis(100);

impl Engine {
    /// Tells everybody that the registry is shut down, and releases all leases. Returns two deadlines: for the work to
    /// end, and for the store's answers (O6). A second call after the first deadline releases the remaining leases.
    pub(crate) fn close(&self) -> (Instant, Instant) {
        let (clock, timeout) = (&self.view_context.clock, self.settings.response_timeout);
        let now = clock.now();
        let until = Clock::after(now, GRACE.min(timeout));
        let close = |turnstile: &mut Turnstile, cx: &mut EventCx<'_>| {
            turnstile.close(cx, |holder| holder.is_watched().then_some(until));
        };
        self.feed_all(|state| state.closed = true, &[&close]);
        let answered = Clock::after(now, timeout.saturating_mul(3));
        (clock.instant(until), clock.instant(answered))
    }

    /// Ends the session. What is still pending expires on the server, and callers that wait for it are told.
    pub(crate) fn disconnect(&self) {
        self.feed_all(|_| (), &[&Turnstile::disconnect]);
        let mut state = self.state.lock();
        let entries = mem::take(&mut state.entries);
        state.timeouts.clear();
        let (session, kept) = (state.session.take(), state.keep_alive.take());
        self.events.end();
        drop(state);
        self.events.flush();
        // Wakes concurrent `shutdown` and `drain` calls.
        self.tell_idle();
        drop((entries, session, kept));
    }

    /// Resolves when nothing is in use.
    pub(crate) async fn idle(&self) {
        loop {
            // Made before the look, so that no notification is missed in between.
            let idle = self.idle.notified();
            if self.state.lock().entries.is_empty() {
                return;
            }
            idle.await;
        }
    }

    pub(super) fn tell_idle(&self) {
        user_code::run("a waker", || self.idle.notify_waiters());
    }
}
