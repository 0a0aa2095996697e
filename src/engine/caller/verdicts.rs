//! What the turnstile's verdicts change in the state of a caller, and which events they are.

use std::sync::Arc;
use std::time::Duration;

use super::state::CallerState;
use crate::base::clock::Moment;
use crate::base::{Holder, Token};
use crate::engine::callbacks::Callbacks;
use crate::engine::event_bus::EventBus;
use crate::engine::phase::Phase;
use crate::observe::LockEvent;
use crate::turnstile::{EndMode, LeaseEnd, LeaseVerdict, NotGranted, WaiterVerdict};

impl CallerState {
    /// The phase that follows a wait.
    pub(super) fn after_wait(
        &mut self,
        key: &Arc<str>,
        verdict: WaiterVerdict,
        now: Moment,
        events: &EventBus,
    ) -> Phase {
        let (Phase::Waiting | Phase::Granted { .. }) = self.phase else {
            unreachable!("{verdict:?} to a waiter that is {:?}", self.phase)
        };
        match verdict {
            WaiterVerdict::Granted {
                token,
                deadline,
                needs_another_poll,
            } => {
                self.needs_another_poll = needs_another_poll;
                self.deadline = deadline;
                Phase::Granted { token }
            }
            WaiterVerdict::Waits => unreachable!("it changes no phase"),
            WaiterVerdict::TurnLost => Phase::TurnLost,
            WaiterVerdict::Refused(refusal) => {
                events.send(|| match &refusal {
                    NotGranted::QueueFull => LockEvent::QueueFull {
                        key: key.clone(),
                        waiter: self.waiter,
                        limit: events.max_waiters(),
                    },
                    NotGranted::Busy(holding) => {
                        let holding = holding.as_deref();
                        self.gave_up(key, now, holding.map(|it| events.holder(it)))
                    }
                    NotGranted::NothingToAdopt
                    | NotGranted::Failed(_)
                    | NotGranted::TooSlow { .. }
                    | NotGranted::Closed => self.gave_up(key, now, None),
                });
                Phase::Refused(refusal)
            }
        }
    }

    /// The phase that follows a verdict on a lease, if that changes it.
    pub(super) fn after_holding(
        &mut self,
        key: &Arc<str>,
        verdict: LeaseVerdict,
        now: Moment,
        events: &EventBus,
        callbacks: &mut Callbacks,
    ) -> Option<Phase> {
        // A lease that was not taken yet may be renewed as well, but has no events.
        let token = self.held(now).map(|(token, _)| token);
        let key = || key.clone();
        match verdict {
            LeaseVerdict::Prolonged { deadline, last } => {
                self.deadline = deadline;
                self.wake_watchers(false, callbacks);
                if let Some(token) = token {
                    let deadline = events.instant(deadline);
                    events.send(|| LockEvent::Renewed {
                        key: key(),
                        token,
                        deadline,
                    });
                    if last {
                        events.send(|| LockEvent::LastRenewal {
                            key: key(),
                            token,
                            deadline,
                        });
                    }
                }
                None
            }
            LeaseVerdict::Unrenewed(error) => {
                if let Some(token) = token {
                    events.send(|| LockEvent::RenewalUnknown {
                        key: key(),
                        token,
                        error,
                    });
                }
                None
            }
            LeaseVerdict::RenewalLate => {
                if let Some(token) = token {
                    let left = self.deadline.saturating_sub(now);
                    callbacks.rare().late.push((key(), token, left));
                    events.send(|| LockEvent::RenewalLate {
                        key: key(),
                        token,
                        deadline: events.instant(self.deadline),
                    });
                }
                None
            }
            LeaseVerdict::Closing => {
                let Phase::Held { token } = self.phase else {
                    unreachable!("a shutdown told to a holder that is {:?}", self.phase)
                };
                self.closing = true;
                self.wake_watchers(true, callbacks);
                Some(Phase::Closing { token })
            }
            LeaseVerdict::Ended(end) => {
                let Some((token, held)) = self.held(now) else {
                    unreachable!("{end:?} to a holder that is {:?}", self.phase)
                };
                let phase = self.after_end(token, end.clone());
                events.send(|| self.end_event(&phase, end, key(), token, held));
                // A loss that is found at the release counts as well: nobody else would hear of it.
                let cause = phase.loss_cause();
                if let Some(cause) = cause {
                    callbacks.rare().lost.push((key(), token, cause));
                }
                let is_lost = cause.is_some();
                let is_early = matches!(phase, Phase::Ended { .. });
                if is_lost && is_early {
                    self.give_up_peers(callbacks);
                }
                self.wake_watchers(is_lost || is_early, callbacks);
                Some(phase)
            }
        }
    }

    /// The token of a lease that was taken and has not ended, and for how long it was held.
    fn held(&self, now: Moment) -> Option<(Token, Duration)> {
        match self.phase {
            Phase::Held { token } | Phase::Closing { token } => {
                Some((token, now.saturating_sub(self.since)))
            }
            Phase::Finishing { token, held } => Some((token, held)),
            _ => None,
        }
    }

    fn after_end(&self, token: Token, end: LeaseEnd) -> Phase {
        match self.phase {
            Phase::Finishing { .. } => {
                let end = match end {
                    LeaseEnd::Released if self.closing && self.end_mode == EndMode::Release => {
                        LeaseEnd::Closed
                    }
                    end => end,
                };
                Phase::Finished { token, end }
            }
            // The shutdown told the holder to stop. So a later loss still counts as `Closed`, also with
            // `OnLost::RunOn`.
            Phase::Closing { .. } => {
                let end = LeaseEnd::Closed;
                Phase::Ended { token, end }
            }
            _ => Phase::Ended { token, end },
        }
    }

    /// `end`: how the lease has ended in the store.
    fn end_event(
        &self,
        phase: &Phase,
        end: LeaseEnd,
        key: Arc<str>,
        token: Token,
        held: Duration,
    ) -> LockEvent {
        let end = match phase {
            Phase::Finished { end, .. } => end.clone(),
            _ => end,
        };
        match (end, self.end_mode) {
            (LeaseEnd::Released, EndMode::Release) => LockEvent::Released { key, token, held },
            (LeaseEnd::Released, EndMode::Keep) => LockEvent::LeftToExpire { key, token, held },
            (LeaseEnd::Released, EndMode::Detach) => LockEvent::Detached { key, token, held },
            (LeaseEnd::Lost(cause), _) => LockEvent::Lost {
                key,
                token,
                held,
                cause,
            },
            (LeaseEnd::Closed, _) => LockEvent::Closed { key, token, held },
            (LeaseEnd::Failed(_), _) => LockEvent::Unreleased { key, token, held },
        }
    }

    pub(super) fn gave_up(&self, key: &Arc<str>, now: Moment, holder: Option<Holder>) -> LockEvent {
        LockEvent::GaveUp {
            key: key.clone(),
            waiter: self.waiter,
            waited: now.saturating_sub(self.since),
            holder,
        }
    }
}
