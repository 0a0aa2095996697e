//! What the lock of a caller protects.

use std::sync::{Arc, Weak};
use std::task::Waker;

use super::Caller;
use crate::base::clock::Moment;
use crate::base::sync::AtomicWaker;
use crate::base::{LossCause, OnFinish, Pauses, Token};
use crate::engine::callbacks::Callbacks;
use crate::engine::event_bus::EventBus;
use crate::engine::phase::Phase;
use crate::observe::LockEvent;
use crate::turnstile::{EndMode, LeaseEnd};

/// The state of a caller: one phase, and whom it wakes.
pub(super) struct CallerState {
    pub(super) phase: Phase,
    /// Woken at the next verdict: that of the acquiring future, and after a release that of the future that awaits it.
    pub(super) waker: Option<Waker>,
    /// Watches for the end of a held lease before its holder releases it, in the order in which they came.
    pub(super) watchers: Vec<Watcher>,
    /// The first of its ids, which events and snapshots show.
    pub(super) waiter: u64,
    /// When its present stage began: its wait, or its lease.
    pub(super) since: Moment,
    /// How it ended its lease.
    pub(super) end_mode: EndMode,
    /// The pauses between its attempts, while it waits.
    pub(super) repeats: Option<Pauses>,
    /// Whether a shutdown told it to end its work.
    pub(super) closing: bool,
    /// Whether the poll in which it arrived is going on: it then takes the key as soon as it is granted.
    pub(super) is_arriving: bool,
    /// Whether it was told that others have the key.
    pub(super) waits_for_others: bool,
    /// Whether it must be polled once more before it takes the key.
    pub(super) needs_another_poll: bool,
    /// The leases of its group, if it is one of several keys.
    pub(super) peers: Option<Arc<Peers>>,
    /// Whether the guard of its group is gone. Those who still share the lease hold this key alone.
    pub(super) has_left_group: bool,
    /// Whether its lease was ended under those who share it.
    pub(super) is_forfeited: bool,
    pub(super) deadline: Moment,
}

impl CallerState {
    /// The phase, as those see it who share the lease.
    pub(super) fn told_phase(&self) -> Phase {
        match self.phase {
            Phase::Finishing { token, .. } | Phase::Finished { token, .. } if self.is_forfeited => {
                let end = LeaseEnd::Lost(LossCause::EndedByOther);
                Phase::Ended { token, end }
            }
            ref phase => phase.clone(),
        }
    }

    /// It takes the lease, if it was granted one.
    pub(super) fn begin_lease(
        &mut self,
        caller: &Caller,
        now: Moment,
        events: &EventBus,
    ) -> Option<Token> {
        let Phase::Granted { token } = self.phase else {
            return None;
        };
        let waited = now.saturating_sub(self.since);
        // Its group goes on without one that is lost before the last is held.
        self.peers = None;
        self.phase = Phase::Held { token };
        self.since = now;
        let key = || caller.key().clone();
        if token.is_passed() {
            events.send(|| LockEvent::Passed { key: key(), token });
        }
        events.send(|| LockEvent::Acquired {
            key: key(),
            waiter: self.waiter,
            mode: caller.mode,
            token,
            waited,
        });
        Some(token)
    }

    /// The leases of its group are to be released.
    pub(super) fn give_up_peers(&mut self, callbacks: &mut Callbacks) {
        if let Some(peers) = self.peers.take() {
            let callers = peers.callers.iter().filter_map(Weak::upgrade);
            let given_up = callers.map(|caller| (caller, peers.on_finish));
            callbacks.rare().given_up.extend(given_up);
        }
    }

    /// Wakes those who watch: all of them, or those who watch for deadlines.
    pub(super) fn wake_watchers(&self, all: bool, callbacks: &mut Callbacks) {
        let watchers = self.watchers.iter();
        let watchers = watchers.filter(|watcher| all || watcher.of_deadlines);
        for watcher in watchers.filter_map(|watcher| watcher.waker.upgrade()) {
            callbacks.rare().watchers.push(watcher);
        }
    }
}

/// Leases that are released when one of their group is not acquired, or is lost: also if nobody polls the group (M9, H4).
pub(in crate::engine) struct Peers {
    callers: Vec<Weak<Caller>>,
    on_finish: OnFinish,
}

impl Peers {
    pub(in crate::engine) fn of(callers: &[Arc<Caller>], on_finish: OnFinish) -> Option<Arc<Self>> {
        let callers: Vec<_> = callers.iter().map(Arc::downgrade).collect();
        (!callers.is_empty()).then(|| Arc::new(Self { callers, on_finish }))
    }
}

pub(super) struct Watcher {
    /// Gone when nobody waits with it any more.
    pub(super) waker: Weak<AtomicWaker>,
    pub(super) of_deadlines: bool,
}

impl Watcher {
    pub(super) fn is_alive(&self) -> bool {
        self.waker.strong_count() > 0
    }
}
