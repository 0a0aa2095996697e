//! What callers and leases ask of their registry.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;

use super::caller::{Caller, Peers};
use super::core::Engine;
use super::failure::CallerHandle;
use crate::base::clock::Moment;
use crate::base::{Clock, Holder, LossCause, OnFinish, Pauses, StoreError, Token};
use crate::roaming::time::timeout;
use crate::store::contract::{Answer, Op, Outcome, Owner};
use crate::turnstile::{EndMode, Holding, Waiter};

/// A caller's request for a lease.
pub(crate) struct Arrival {
    pub(crate) ttl: Duration,
    pub(crate) renewals: u32,
    pub(crate) on_finish: OnFinish,
    /// Whether that is only for work that succeeds.
    pub(crate) is_conditional: bool,
    /// Whether it is refused if the key is busy.
    pub(crate) asks_once: bool,
    /// Whether it wants to know when it waits for others.
    pub(crate) hears_of_others: bool,
    /// How long the turnstile tries. For a caller that enters the queue this counts from its first
    /// arrival, for others from each attempt.
    pub(crate) wait: Duration,
    pub(crate) repeats: Pauses,
    /// The owner whose lease in the store it takes over, if it does not want the key itself.
    pub(crate) adopts: Option<Arc<str>>,
}

impl Engine {
    /// A caller wants a lease, in a poll of its future. Returns the token if it has it by the end of that.
    pub(crate) fn arrive(&self, caller: &Arc<Caller>, arrival: Arrival) -> Option<Token> {
        self.view_context.timer.note_runtime();
        let handle = CallerHandle::new(caller.clone());
        caller.set_repeats(arrival.repeats);
        let (ttl, is_renewed) = (arrival.ttl, arrival.renewals > 0);
        self.at_once(|state, at| {
            at.deferred.arrived = true;
            let since = match arrival.asks_once {
                true => at.now,
                false => caller.since().unwrap_or(at.now),
            };
            let session = state.session.as_ref();
            let connects = session.map_or(Duration::ZERO, |it| it.connects_within());
            let waiter = Waiter {
                caller: handle,
                ttl: arrival.ttl,
                renewals: arrival.renewals,
                adopts: arrival.adopts,
                on_finish: arrival.on_finish,
                is_conditional: arrival.is_conditional,
                asks_once: arrival.asks_once,
                hears_of_others: arrival.hears_of_others,
                until: Clock::after(since, arrival.wait),
                answer_by: Clock::after(at.now, self.settings.response_timeout + connects),
            };
            let (key, events) = (caller.key(), at.events);
            state.feed(at, key, true, |lines, cx| {
                let id = lines.arrive(cx, caller.mode(), waiter);
                // Before the verdict, which follows when this returns.
                caller.arrive(id, cx.now, events);
            });
        });
        self.heartbeat.need(ttl, is_renewed);
        caller.end_arrival()
    }

    /// A caller gave up before it held anything.
    pub(crate) fn leave(&self, caller: &Caller) {
        if let Some(id) = caller.id() {
            // Also if its key is not in use any more: it may have lost its turn.
            self.at_once(|state, at| {
                caller.leave(at.now, at.events);
                state.feed(at, caller.key(), false, |lines, cx| {
                    lines.feed(cx, id, |turnstile, cx| turnstile.leave(cx, id));
                });
            });
        }
    }

    /// A caller takes the lease that it was granted. Returns its token, unless the turn is over.
    pub(crate) fn take(&self, caller: &Caller) -> Option<Token> {
        self.view_context.timer.note_runtime();
        let taken = self.feed_caller(caller, |turnstile, cx, id| {
            // The turnstile first: the grant may have expired meanwhile.
            if turnstile.take(cx, id) {
                caller.begin_lease(cx.now, &self.events)
            } else {
                None
            }
        })?;
        taken.map(|(token, _waker)| token)
    }

    /// The holder ends its lease. Returns false if it was not held any more.
    pub(crate) fn finish(&self, caller: &Caller, on_finish: OnFinish) -> bool {
        let end_mode = match on_finish {
            OnFinish::LetExpire | OnFinish::KeepFor(_) if !caller.awaits_success() => EndMode::Keep,
            _ => EndMode::Release,
        };
        self.end(caller, end_mode).is_some()
    }

    /// The leases of a group are complete. From now on the first loss of one ends all (H4).
    pub(crate) fn unite(&self, callers: &[Arc<Caller>], on_finish: OnFinish) {
        let peers = Peers::of(callers, on_finish);
        let mut is_whole = true;
        for caller in callers {
            is_whole &= caller.unite(peers.clone());
        }
        if !is_whole {
            // One was lost before it knew of the others.
            for caller in callers {
                self.revoke(caller, on_finish);
            }
        }
    }

    /// Ends a lease under its holder: another one of its group is gone.
    pub(super) fn revoke(&self, caller: &Caller, on_finish: OnFinish) {
        // Before the look at the group, which its guard leaves before it leaves the lease.
        let is_shared = caller.is_shared();
        if !caller.has_left_group() && self.finish(caller, on_finish) && is_shared {
            self.forfeit(caller);
        }
    }

    /// Those who share a lease that was ended lose it, and with it those of its group.
    fn forfeit(&self, caller: &Caller) {
        for (peer, on_finish) in caller.forfeit() {
            self.revoke(&peer, on_finish);
        }
    }

    /// The holder leaves its lease in the store. Returns the owner under which it is stored; `None` if it was not held any
    /// more.
    pub(crate) fn detach(&self, caller: &Caller) -> Option<String> {
        let shared = caller.is_shared();
        let owner = self.end(caller, EndMode::Detach).flatten()?;
        if shared {
            self.forfeit(caller);
        }
        Some(format!("{}:{}", self.instance, owner.sequence))
    }

    /// The owner under which the store has the lease, as it is and as text. `None` if it is not held any more.
    pub(crate) fn owner_of(&self, caller: &Caller) -> Option<(Owner, String)> {
        let id = caller.id()?;
        let state = self.state.lock();
        let lines = &state.entries.get(caller.key())?.lines;
        let owner = lines.turnstile_of(id).owner_of(id)?;
        Some((owner, format!("{}:{}", self.instance, owner.sequence)))
    }

    /// Whether this registry holds the key under this owner.
    pub(crate) fn holds(&self, key: &str, owner: &str) -> bool {
        let sequence = owner.strip_prefix(&*self.instance);
        let sequence = sequence.and_then(|rest| rest.strip_prefix(':')?.parse().ok());
        let state = self.state.lock();
        let entry = state.entries.get(key);
        sequence.is_some_and(|sequence| entry.is_some_and(|entry| entry.lines.holds(sequence)))
    }

    /// The store says that this owner has the key no more: as a renewal would have found out.
    pub(crate) fn found_lost(&self, key: &Arc<str>, owner: Owner) {
        let (ttl, within) = (Duration::ZERO, Duration::ZERO);
        let renewal = Op::Renew { owner, ttl, within };
        let outcome = Outcome::Lost;
        self.feed(key, |lines, cx| {
            lines.replied(cx, &renewal, Ok(Answer { at: 0, outcome }));
        });
    }

    /// Returns `None` if the lease was not held any more, else the owner that was left in the store, if any.
    fn end(&self, caller: &Caller, wanted: EndMode) -> Option<Option<Owner>> {
        self.feed_caller(caller, |turnstile, cx, id| {
            let end_mode = match wanted {
                EndMode::Keep if !turnstile.is_kept(cx, id) => EndMode::Release,
                wanted => wanted,
            };
            let finishes = caller.begin_release(cx.now, end_mode);
            finishes.then(|| turnstile.finish(cx, id, end_mode))
        })?
    }

    /// Who has a key, as its callers are told.
    pub(crate) fn holder(&self, holding: &Holding) -> Holder {
        self.events.holder(holding)
    }

    /// A lease begins anew, with this many renewals at most: its group is complete. From now on its key is kept.
    pub(crate) fn restart(&self, caller: &Caller, renewals: u32, on_finish: OnFinish) {
        self.feed_caller(caller, |turnstile, cx, id| {
            turnstile.restart(cx, id, renewals, on_finish);
        });
    }

    /// Its holder sees the token, on a store that fences by it. Returns whether that was first done while it held the
    /// lease: then no later caller works under the same epoch (F4).
    pub(crate) fn see_token(&self, caller: &Caller) -> bool {
        caller.has_seen_token() || {
            let forbid = self.feed_caller(caller, |turnstile, _, id| turnstile.forbid_passes(id));
            let is_held = forbid.unwrap_or(false);
            if is_held {
                caller.note_seen_token();
            }
            is_held
        }
    }

    /// What the store answers to `asked` within the response time-out.
    pub(crate) async fn in_time<T>(&self, asked: impl Future<Output = T>) -> Result<T, StoreError> {
        let mut asked = pin!(asked);
        // A store that answers at once needs no timer.
        if let Some(answer) = asked.as_mut().now_or_never() {
            return Ok(answer);
        }
        let answer = timeout(self.settings.response_timeout, asked).await;
        answer.map_err(|_| StoreError::new("no answer in time"))
    }

    /// Extends a lease to `ttl` from now. Returns the deadline that was asked for, if it is still held.
    pub(crate) fn extend(&self, caller: &Caller, ttl: Duration) -> Option<Moment> {
        self.feed_caller(caller, |turnstile, cx, id| turnstile.extend(cx, id, ttl))?
    }

    /// Why the lease of a caller is over. Its deadline has passed, and perhaps nobody has told it yet.
    pub(crate) fn cause_of_expiry(&self, caller: &Caller) -> LossCause {
        let now = self.view_context.clock.now();
        let state = self.state.lock();
        let untold = caller.id().and_then(|id| {
            let lines = &state.entries.get(caller.key())?.lines;
            lines.turnstile_of(id).cause_of_expiry(now, id)
        });
        // Under the lock, since it is told under the lock.
        let told = || caller.phase().loss_cause();
        untold.or_else(told).unwrap_or(LossCause::NotRenewed)
    }

    /// The last handle of a held lock is dropped. The lease is released after this, which wakes the readers of events.
    pub(crate) fn dropped_while_held(&self, caller: &Caller) {
        let _state = self.state.lock();
        caller.report_drop(&self.events);
    }
}
