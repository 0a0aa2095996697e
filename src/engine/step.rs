//! One change of a registry: the state is locked, changed and unlocked. What follows from the change is done after that.

use super::core::Engine;
use super::failure;
use super::state::{ChangeCx, Deferred, EngineState};
use crate::base::mutex::MutexGuard;
use crate::base::user_code;
use crate::base::user_code::log;
use crate::store::contract::SubmittedOp;

impl Engine {
    /// Makes a change with the state locked, and then does what follows from it. Returns `None` if it panicked, which
    /// closes the registry.
    pub(super) fn at_once<R>(
        &self,
        change: impl FnOnce(&mut EngineState, &mut ChangeCx<'_>) -> R,
    ) -> Option<R> {
        let mut deferred = Deferred::default();
        let result = self.locked(&mut deferred, change);
        self.deliver(&mut deferred);
        result
    }

    pub(super) fn locked<R>(
        &self,
        deferred: &mut Deferred,
        change: impl FnOnce(&mut EngineState, &mut ChangeCx<'_>) -> R,
    ) -> Option<R> {
        let mut locked: Option<MutexGuard<'_, EngineState>> = None;
        let (result, dropped) = failure::catch(|| {
            // Read before the lock is taken, to hold it for a shorter time.
            let now = self.view_context.clock.now();
            let state = &mut **locked.insert(self.state.lock());
            let now = state.no_earlier(now);
            let events = &self.events;
            let at = &mut ChangeCx {
                now,
                events,
                deferred,
            };
            let result = change(state, at);
            self.end_change(state, deferred);
            result
        });
        match result {
            Ok(result) => {
                if !dropped.is_empty() {
                    // A panic of the user's code unwinds.
                    deferred.remains.get_or_insert_default().dropped = dropped;
                }
                Some(result)
            }
            Err(panicked) => {
                let state = locked.get_or_insert_with(|| self.state.lock());
                self.close_broken(state, deferred, dropped, &*panicked);
                None
            }
        }
    }

    /// The end of a change, still under the lock: notes what must be done after it.
    fn end_change(&self, state: &mut EngineState, deferred: &mut Deferred) {
        if deferred.arrived || !deferred.sends.is_empty() {
            deferred.session.clone_from(&state.session);
        }
        let first = state.timeouts.first().map(|(moment, _)| *moment);
        // The timer task must also run while an op is in flight. It handles ops that the session drops.
        deferred.needs_timer = first.is_some() || !deferred.sends.is_empty();
        if let Some(first) = first
            && state.armed.is_none_or(|armed| first < armed)
        {
            state.armed = Some(first);
            deferred.wakes_timer = true;
        }
        if state.entries.is_empty() {
            deferred.became_idle = true;
            deferred.released_engine = state.keep_alive.take();
            if state.closed {
                // Also if nobody awaited the shutdown to its end.
                self.events.end();
            }
        } else if state.keep_alive.is_none() {
            state.keep_alive = self.view_context.engine.upgrade();
        }
    }

    /// Does what follows from a change, with nothing locked. Policies are asked here, and their answers fed.
    pub(super) fn deliver(&self, deferred: &mut Deferred) {
        self.guarded(|| self.deliver_all(deferred));
    }

    fn deliver_all(&self, deferred: &mut Deferred) {
        self.deliver_once(deferred);
        while !deferred.policies.is_empty() {
            let mut pauses = Vec::new();
            for (caller, id) in deferred.policies.drain(..) {
                if let Some(pause) = caller.next_pause(id, &self.settings.repeat) {
                    pauses.push((caller, id, pause));
                }
            }
            *deferred = Deferred::default();
            self.locked(deferred, |state, at| {
                for (caller, id, pause) in &pauses {
                    state.feed(at, caller.key(), false, |lines, cx| {
                        lines.feed(cx, *id, |turnstile, cx| turnstile.on_pause(cx, *id, *pause));
                    });
                }
            });
            self.deliver_once(deferred);
        }
    }

    pub(super) fn deliver_once(&self, deferred: &mut Deferred) {
        if deferred.needs_timer {
            self.view_context.ensure_timer();
        }
        if deferred.wakes_timer {
            self.view_context.timer.wake();
        }
        if let Some(session) = deferred.session.take() {
            if deferred.arrived {
                session.start();
            }
            for (key, op) in deferred.sends.drain(..) {
                session.submit(SubmittedOp::new(key, op, &self.lost));
            }
        }
        for (caller, on_finish) in deferred.callbacks.take_given_up() {
            self.revoke(&caller, on_finish);
        }
        // Last, since it is the user's code: it must not delay a release.
        deferred.callbacks.run(&self.lease_log);
        let remains = deferred.remains.take();
        if let Some(failure) = remains.as_ref().and_then(|it| it.failure.as_ref()) {
            log!(error, "internal error, registry closed: {failure}");
        }
        if deferred.became_idle {
            self.tell_idle();
        }
        self.events.flush();
        drop(deferred.released_engine.take());
        if let Some(remains) = remains {
            user_code::discard((
                remains.dropped,
                remains.entries,
                remains.effects,
                remains.session,
            ));
        }
    }
}
