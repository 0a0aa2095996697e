//! If our own code panics, the registry closes.
//!
//! A panic may leave the registry's state half changed, so it is never used again. Leases are lost and waiters are
//! refused. The server frees the keys when their ttl is over.

use std::any::Any;
use std::cell::RefCell;
use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use super::caller::Caller;
use super::core::Engine;
use super::state::{Deferred, Effect, EngineState, Remains};

thread_local! {
    /// The callers that a panic has dropped while the registry was locked.
    static DROPPED: RefCell<Option<Vec<Arc<Caller>>>> = const { RefCell::new(None) };
}

/// A turnstile's reference to a caller.
///
/// A panic drops the callers that an event had taken out of their lines. They must be told, or they would wait for
/// ever.
#[derive(Clone, Debug)]
pub(crate) struct CallerHandle(Arc<Caller>);

impl CallerHandle {
    pub(super) fn new(state: Arc<Caller>) -> Self {
        Self(state)
    }
}

impl Deref for CallerHandle {
    type Target = Caller;

    fn deref(&self) -> &Caller {
        &self.0
    }
}

impl Drop for CallerHandle {
    fn drop(&mut self) {
        if thread::panicking() {
            // A thread that ends has no more locals.
            let _ = DROPPED.try_with(|dropped| {
                if let Some(dropped) = dropped.borrow_mut().as_mut() {
                    dropped.push(self.0.clone());
                }
            });
        }
    }
}

/// Runs `code`. Also returns the callers that were dropped during a panic.
pub(super) fn catch<R>(code: impl FnOnce() -> R) -> (thread::Result<R>, Vec<Arc<Caller>>) {
    // A thread that ends has no more locals, but may still drop a lease. There a panic loses the callers that it drops.
    let _ = DROPPED.try_with(|dropped| dropped.replace(Some(Vec::new())));
    let result = catch_unwind(AssertUnwindSafe(code));
    let dropped = DROPPED.try_with(RefCell::take);
    (result, dropped.ok().flatten().unwrap_or_default())
}

impl Engine {
    /// Closes the registry, since its state cannot be trusted. `dropped`: callers that are not in the state any more.
    pub(super) fn close_broken(
        &self,
        state: &mut EngineState,
        deferred: &mut Deferred,
        dropped: Vec<Arc<Caller>>,
        panicked: &(dyn Any + Send),
    ) {
        state.closed = true;
        state.timeouts.clear();
        let (entries, effects) = (mem::take(&mut state.entries), mem::take(&mut state.effects));
        let now = state.latest;
        let callers = entries.values().flat_map(|entry| entry.lines.callers());
        let callers = callers.chain(effects.iter().filter_map(Effect::caller));
        for caller in callers.map(|caller| &caller.0).chain(&dropped) {
            caller.close_broken(now, &self.events, &mut deferred.callbacks);
        }
        deferred.callbacks.forget_losses();
        self.events.end();
        deferred.policies = Default::default();
        // Without a session nothing is sent.
        deferred.session = None;
        deferred.became_idle = true;
        deferred.released_engine = state.keep_alive.take();
        deferred.remains = Some(Box::new(Remains {
            dropped,
            entries,
            effects,
            session: state.session.take(),
            failure: Some(message(panicked)),
        }));
    }

    /// Runs our own code without a lock. If it panics, the registry closes.
    pub(super) fn guarded(&self, code: impl FnOnce()) {
        if let Err(panicked) = catch_unwind(AssertUnwindSafe(code)) {
            self.fail(&*panicked);
        }
    }

    pub(super) fn fail(&self, panicked: &(dyn Any + Send)) {
        let mut deferred = Deferred::default();
        let mut state = self.state.lock();
        self.close_broken(&mut state, &mut deferred, Vec::new(), panicked);
        drop(state);
        self.deliver_once(&mut deferred);
    }
}

fn message(panicked: &(dyn Any + Send)) -> String {
    let text = panicked.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panicked.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without a message").to_owned()
}

#[cfg(test)]
mod tests;
