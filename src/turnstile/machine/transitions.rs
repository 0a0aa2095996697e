//! The states of a turnstile, and all the transitions between them. No other file changes the state.
//!
//! | from | to | by | because |
//! |---|---|---|---|
//! | `Idle` | `Acquiring` | `begin_acquisition` | a caller wants the key |
//! | `Acquiring` | `Held` | `become_held` | the store gave us the key |
//! | `Acquiring` | `Idle` | `abandon` | nobody wants the key, or not under this owner |
//! | `Held` | `Idle` | `end_tenure` | the key is released, kept, left to expire, or lost |
//! | `Held` | `Acquiring` | `end_tenure` | the key is yielded, and our waiters queue again |

use std::time::Duration;

use super::Turnstile;
use super::acquisition::Acquisition;
use super::pending::{Ending, PendingOp};
use crate::store::contract::Op;
use crate::turnstile::event_cx::EventCx;
use crate::turnstile::tenure::{Tenure, Win};
use crate::turnstile::time::Point;
use crate::turnstile::wait_queue::WaiterId;

/// How long a renewal may be in flight: as long as the longest response time-out.
const LONGEST_FLIGHT: Duration = Duration::from_secs(24 * 60 * 60);

/// What this registry has of the key in the store.
#[derive(Clone, Debug)]
pub(super) struct KeyState<Caller>(State<Caller>);

#[derive(Clone, Debug)]
enum State<Caller> {
    Idle,
    Acquiring(Acquisition),
    Held(Tenure<Caller>),
}

/// How a tenure ends, and the lease that ends with it, if its holder waits for the store's answer.
pub(super) enum TenureEnd<Caller> {
    /// The store gives the key to the first of its queue.
    Release(Option<Ending<Caller>>),
    /// The same, and a new owner of ours queues again, with this ttl.
    Yield(Duration, Option<Ending<Caller>>),
    /// The store keeps the key until then, for nobody (M8).
    Keep(Point, Option<Ending<Caller>>),
    /// The key stays in the store until it expires.
    LetExpire,
    /// The store has found that the key is not ours. Nothing is sent for its owner (O6).
    Lost,
}

impl<Caller> KeyState<Caller> {
    pub(super) const fn new() -> Self {
        Self(State::Idle)
    }

    pub(super) fn is_idle(&self) -> bool {
        matches!(self.0, State::Idle)
    }

    pub(super) fn acquisition(&self) -> Option<&Acquisition> {
        match &self.0 {
            State::Acquiring(acquisition) => Some(acquisition),
            State::Idle | State::Held(_) => None,
        }
    }

    pub(super) fn acquisition_mut(&mut self) -> Option<&mut Acquisition> {
        match &mut self.0 {
            State::Acquiring(acquisition) => Some(acquisition),
            State::Idle | State::Held(_) => None,
        }
    }

    pub(super) fn tenure(&self) -> Option<&Tenure<Caller>> {
        match &self.0 {
            State::Held(tenure) => Some(tenure),
            State::Idle | State::Acquiring(_) => None,
        }
    }

    pub(super) fn tenure_mut(&mut self) -> Option<&mut Tenure<Caller>> {
        match &mut self.0 {
            State::Held(tenure) => Some(tenure),
            State::Idle | State::Acquiring(_) => None,
        }
    }
}

impl<Caller: Clone> Turnstile<Caller> {
    /// A new owner asks for the key at `ask_at`. `adopter`: the caller that adopts a lease with it.
    pub(super) fn begin_acquisition(
        &mut self,
        cx: &mut EventCx<'_, Caller>,
        ttl: Duration,
        ask_at: Point,
        adopter: Option<WaiterId>,
    ) {
        let owner = cx.ids.owner(self.mode);
        let acquisition = Acquisition::new(owner, ttl, ask_at, adopter, 0);
        self.state.0 = State::Acquiring(acquisition);
    }

    /// The store gave us the key.
    pub(super) fn become_held(&mut self, win: Win, now: Point) {
        debug_assert!(self.is_acquiring(), "{win:?} is nobody's");
        self.state.0 = State::Held(Tenure::new(win, now));
    }

    /// Ends an acquisition that is not needed, and removes it from the store.
    pub(super) fn abandon(&mut self, cx: &EventCx<'_, Caller>) {
        let State::Acquiring(acquisition) = &self.state.0 else {
            return;
        };
        if let Some((op, lasts)) = acquisition.settlement() {
            // O5: if no answer came, the store may still do the last op for as long as that.
            let until = cx.at() + cx.ids.rules.response_timeout + lasts;
            self.pending.push_back(PendingOp::new(op, None, until));
        }
        self.state.0 = State::Idle;
    }

    pub(super) fn end_tenure(&mut self, cx: &mut EventCx<'_, Caller>, end: TenureEnd<Caller>) {
        let State::Held(tenure) = &self.state.0 else {
            return;
        };
        let now = cx.at();
        let (old, expires) = (tenure.owner(), tenure.expires_by(now));
        let mut next = State::Idle;
        let pending = match end {
            TenureEnd::Release(ending) => Some(PendingOp::release(old, ending, expires)),
            TenureEnd::Yield(ttl, ending) => {
                let new = cx.ids.owner(self.mode);
                let uncontended = tenure.uncontended_after_yield();
                let acquisition = Acquisition::new(new, ttl, now, None, uncontended);
                next = State::Acquiring(acquisition);
                Some(PendingOp::new(Op::Yield { old, new, ttl }, ending, expires))
            }
            TenureEnd::Keep(until, ending) => {
                Some(PendingOp::release(old, ending, expires).kept(until))
            }
            TenureEnd::LetExpire => {
                if tenure.had_ticket() {
                    // I7: the store may have sent both a reply and a grant for this tenure (O3). The grant may arrive
                    // later. Remember the owner, so that the late grant is not released (O1).
                    let until = match tenure.is_renewing() {
                        // The renewal may be done at any time until its connection is given up. Remembering the owner
                        // for too long costs only memory: the key expires by itself.
                        true => expires + LONGEST_FLIGHT,
                        false => expires,
                    };
                    cx.ids.remember(old, now, until);
                }
                None
            }
            TenureEnd::Lost => None,
        };
        self.state.0 = next;
        self.pending.extend(pending);
    }
}
