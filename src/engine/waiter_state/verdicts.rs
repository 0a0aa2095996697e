//! What the turnstile's verdicts change in the state of a caller, and which events they are.

use std::sync::Arc;
use std::time::Duration;

use super::State;
use crate::Token;
use crate::engine::callbacks::Callbacks;
use crate::engine::event_bus::EventBus;
use crate::engine::phase::{EndMode, Phase};
use crate::events::LockEvent;
use crate::turnstile::{LeaseEnd, LeaseVerdict, Moment, Refusal, WaiterVerdict};

impl State {
    /// The phase that follows a wait.
    pub(super) fn after_wait(&mut self, verdict: WaiterVerdict) -> Phase {
        let (Phase::Waiting | Phase::Granted { .. }) = self.phase else {
            unreachable!("{verdict:?} to a waiter that is {:?}", self.phase)
        };
        match verdict {
            WaiterVerdict::Granted {
                token,
                deadline,
                leads,
            } => {
                self.leads = leads;
                self.deadline = deadline;
                Phase::Granted { token }
            }
            WaiterVerdict::TurnLost => Phase::TurnLost,
            WaiterVerdict::Refused(refusal) => Phase::Refused(refusal),
        }
    }

    /// The phase that follows one of a lease, if that changes.
    pub(super) fn after_holding(
        &mut self,
        key: &Arc<str>,
        verdict: LeaseVerdict,
        now: Moment,
        callbacks: &mut Callbacks,
    ) -> Option<Phase> {
        let end = match verdict {
            LeaseVerdict::Prolonged { deadline, .. } => {
                self.deadline = deadline;
                self.wake_watchers(false, callbacks);
                return None;
            }
            LeaseVerdict::Unrenewed(_) => return None,
            LeaseVerdict::RenewalLate => {
                if let Phase::Held { token } | Phase::Closing { token } = self.phase {
                    let left = self.deadline.saturating_sub(now);
                    callbacks.late.push((key.clone(), token, left));
                }
                return None;
            }
            LeaseVerdict::Closing => {
                let Phase::Held { token } = self.phase else {
                    unreachable!("a shutdown told to a holder that is {:?}", self.phase)
                };
                self.closing = true;
                self.wake_watchers(true, callbacks);
                return Some(Phase::Closing { token });
            }
            LeaseVerdict::Ended(end) => end,
        };
        let phase = match self.phase {
            Phase::Held { token } => Phase::Ended { token, end },
            // It was told to end, and work that runs on when its lease is lost is to end all the same.
            Phase::Closing { token } => Phase::Ended {
                token,
                end: LeaseEnd::Closed,
            },
            Phase::Finishing { token } => Phase::Finished {
                token,
                end: self.own_end(end),
            },
            ref other => unreachable!("{end:?} to a holder that is {other:?}"),
        };
        // What the release finds is a loss like any other. Where work may run on, nobody else is told of it.
        let lost = match phase {
            Phase::Ended {
                token,
                end: LeaseEnd::Lost,
            }
            | Phase::Finished {
                token,
                end: LeaseEnd::Lost,
            } => Some(token),
            _ => None,
        };
        if let Some(token) = lost {
            let is_over = now >= self.deadline;
            callbacks.lost.push((key.clone(), token, is_over));
        }
        let is_told = lost.is_some() || matches!(phase, Phase::Ended { .. });
        self.wake_watchers(is_told, callbacks);
        Some(phase)
    }

    /// Tells those who read events what became of a wait.
    pub(super) fn report_to_waiter(
        &self,
        key: &Arc<str>,
        verdict: &WaiterVerdict,
        now: Moment,
        events: &EventBus,
    ) {
        match verdict {
            // It waits on: as one who may look now, or as one who may come again.
            WaiterVerdict::Granted { .. } | WaiterVerdict::TurnLost => {}
            WaiterVerdict::Refused(Refusal::QueueFull) => {
                events.send(|| LockEvent::QueueFull {
                    key: key.clone(),
                    waiter: self.waiter,
                    limit: events.max_waiters(),
                });
            }
            WaiterVerdict::Refused(
                Refusal::Busy | Refusal::NothingToAdopt | Refusal::Failed(_) | Refusal::Closed,
            ) => events.send(|| self.gave_up(key, now)),
        }
    }

    /// Tells those who read events what became of a lease.
    pub(super) fn report_to_holder(
        &self,
        key: &Arc<str>,
        verdict: &LeaseVerdict,
        now: Moment,
        events: &EventBus,
    ) {
        let (token, held) = match self.phase {
            Phase::Held { token } | Phase::Closing { token } => {
                (token, now.saturating_sub(self.since))
            }
            Phase::Finishing { token } => (token, self.since),
            // A lease that was not taken is not told of.
            _ => return,
        };
        let key = || key.clone();
        match verdict {
            LeaseVerdict::Prolonged { deadline, last } => {
                let deadline = events.instant(*deadline);
                events.send(|| LockEvent::Renewed {
                    key: key(),
                    token,
                    deadline,
                });
                if *last {
                    events.send(|| LockEvent::LastRenewal {
                        key: key(),
                        token,
                        deadline,
                    });
                }
            }
            LeaseVerdict::Unrenewed(error) => events.send(|| LockEvent::RenewalUnknown {
                key: key(),
                token,
                error: error.clone(),
            }),
            LeaseVerdict::RenewalLate => events.send(|| LockEvent::RenewalLate {
                key: key(),
                token,
                deadline: events.instant(self.deadline),
            }),
            LeaseVerdict::Closing => {}
            LeaseVerdict::Ended(end) => events.send(|| self.end_event(end, key(), token, held)),
        }
    }

    pub(super) fn end_event(
        &self,
        end: &LeaseEnd,
        key: Arc<str>,
        token: Token,
        held: Duration,
    ) -> LockEvent {
        let end = match self.phase {
            Phase::Finishing { .. } => self.own_end(end.clone()),
            _ => end.clone(),
        };
        match (end, self.end_mode) {
            (LeaseEnd::Released, EndMode::Release) => LockEvent::Released { key, token, held },
            (LeaseEnd::Released, EndMode::Keep) => LockEvent::LeftToExpire { key, token, held },
            (LeaseEnd::Released, EndMode::Detach) => LockEvent::Detached { key, token, held },
            (LeaseEnd::Lost, _) => LockEvent::Lost { key, token, held },
            (LeaseEnd::Closed, _) => LockEvent::Closed { key, token, held },
            (LeaseEnd::Failed(_), _) => LockEvent::Unreleased { key, token, held },
        }
    }

    pub(super) fn gave_up(&self, key: &Arc<str>, now: Moment) -> LockEvent {
        LockEvent::GaveUp {
            key: key.clone(),
            waiter: self.waiter,
            waited: now.saturating_sub(self.since),
        }
    }

    /// How a lease has ended that its holder gave back.
    pub(super) fn own_end(&self, end: LeaseEnd) -> LeaseEnd {
        match end {
            LeaseEnd::Released if self.closing && self.end_mode == EndMode::Release => {
                LeaseEnd::Closed
            }
            end => end,
        }
    }
}
