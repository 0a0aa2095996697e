use std::fmt;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::runtime::Id;

use super::aftermath::Aftermath;
use super::journal::Journal;
use super::progress::{End, Parting, Progress};
use super::watchers::Watchers;
use crate::events::LockEvent;
use crate::key::Key;
use crate::repeat::Repeats;
use crate::snapshot::{LeaseSnapshot, WaiterSnapshot};
use crate::turnstile::{Moment, Verdict, WaiterId};
use crate::user_code;

/// One caller from its arrival to the end of its lease: what its future and the driver share.
pub(crate) struct Contender {
    key: Key,
    /// The number of its latest arrival, 0 before the first. Written under the driver's lock.
    id: AtomicU64,
    /// How many share its lease: whoever leaves last gives it back.
    shares: AtomicU32,
    state: Mutex<State>,
}

struct State {
    progress: Progress,
    /// Who waits for the next verdict: the caller, or later its release.
    waker: Option<Waker>,
    /// Who watches for the end of a held lease before its holder releases it: as a rule nobody, and
    /// there may be very many leases.
    watchers: Option<Box<Watchers>>,
    /// The first of its ids: by this others know it.
    waiter: u64,
    /// When it was first in line; once it has a lease, when it took that; and when it has given
    /// that back, how long it had it.
    since: Moment,
    /// What becomes of the lease that it holds no more.
    parting: Parting,
    /// The pauses between its attempts, while it waits.
    repeats: Option<Repeats>,
    /// Whether that was because of a shutdown.
    closing: bool,
    /// Whether it is to look once more before it takes the key.
    leads: bool,
    deadline: Moment,
    /// Where it arrived; once it has a lease, where it took that.
    runtime: Option<Id>,
}

impl Contender {
    pub(crate) fn new(key: Key) -> Self {
        Self {
            key,
            id: AtomicU64::new(0),
            shares: AtomicU32::new(1),
            state: Mutex::new(State {
                progress: Progress::Waiting,
                waker: None,
                watchers: None,
                waiter: 0,
                since: Moment::ZERO,
                parting: Parting::Release,
                repeats: None,
                closing: false,
                leads: false,
                deadline: Moment::ZERO,
                runtime: None,
            }),
        }
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        self.key.name()
    }

    pub(super) fn hashed_key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    /// How far it has come; while it waits, the waker is told of the next verdict.
    ///
    /// Whoever leads a tenure has to look twice. A tenure is a chain of tasks that wake each other, and
    /// the third task of such a chain has tokio wake another of its threads, if one sleeps. Where no
    /// processor is idle, Linux mostly runs that one in place of the thread that woke it: in the
    /// middle of a release, so that this task was not in line again before the tenure was over, and
    /// of two tasks one had 1.2 times the turns of the other. A task that asks to be polled again
    /// has another thread woken just so, but nothing passes it by in that time: it has the key.
    pub(crate) fn progress_or_wake(&self, waker: &Waker) -> Progress {
        // Wakers are the user's code: they are cloned and dropped where nothing is locked.
        let clone = waker.clone();
        let mut state = self.lock();
        if matches!(state.progress, Progress::Seated { .. }) && std::mem::take(&mut state.leads) {
            drop(state);
            waker.wake_by_ref();
            return Progress::Waiting;
        }
        if let Progress::Seated { .. }
        | Progress::TurnLost
        | Progress::Refused(_)
        | Progress::Ended { .. }
        | Progress::Finished { .. } = state.progress
        {
            return state.progress.clone();
        }
        let before = state.waker.replace(clone);
        let progress = state.progress.clone();
        drop(state);
        drop(before);
        progress
    }

    /// The deadline of the lease it holds.
    pub(crate) fn deadline(&self) -> Moment {
        self.lock().deadline
    }

    /// Whether it holds its lease, and the deadline is still to come.
    pub(crate) fn is_held(&self, now: Moment) -> bool {
        let state = self.lock();
        matches!(state.progress, Progress::Held { .. }) && now < state.deadline
    }

    /// One more shares the lease, if it is still held: its token. Only for who is inside of it: the
    /// lease around, which has not left yet, keeps the count from having been down to nothing.
    pub(crate) fn join(&self, now: Moment) -> Option<u64> {
        // Under the lock, or another that shares it could take it away after the look.
        let state = self.lock();
        let Progress::Held { token } = state.progress else {
            return None;
        };
        if now >= state.deadline {
            return None;
        }
        let before = self.shares.fetch_add(1, Ordering::Relaxed);
        debug_assert_ne!(before, 0, "a lease that was given back is not to be shared");
        Some(token)
    }

    /// One leaves the lease; true for the last, alone, who gives it back.
    pub(crate) fn part(&self) -> bool {
        self.shares.fetch_sub(1, Ordering::AcqRel) == 1
    }

    /// Whether the lease stays if one leaves now.
    pub(crate) fn is_shared(&self) -> bool {
        self.shares.load(Ordering::Acquire) > 1
    }

    /// The waker is told when the lease ends under its holder, or for good if it is `of_deadlines`,
    /// which is also told of each new one; in place of the one that was given
    /// for this `watch` before. Whoever watches looks again after this, or it may have ended
    /// between the look and the watching; and [unwatches](Self::unwatch).
    pub(crate) fn watch(&self, watch: &mut Option<u64>, of_deadlines: bool, waker: &Waker) {
        let clone = waker.clone();
        let mut state = self.lock();
        let watchers = state.watchers.get_or_insert_default();
        let before = watchers.add(watch, of_deadlines, clone);
        drop(state);
        drop(before);
    }

    /// Whether anybody would hear that the lease ends.
    pub(super) fn is_watched(&self) -> bool {
        let state = self.lock();
        let watchers = state.watchers.as_ref();
        watchers.is_some_and(|watchers| !watchers.is_empty())
    }

    pub(crate) fn unwatch(&self, watch: u64) {
        let mut state = self.lock();
        let watchers = state.watchers.as_mut();
        let waker = watchers.and_then(|watchers| watchers.remove(watch));
        drop(state);
        drop(waker);
    }

    pub(super) fn id(&self) -> Option<WaiterId> {
        // Whoever has arrived, or was told so, has it from there.
        let id = self.id.load(Ordering::Relaxed);
        (id != 0).then_some(WaiterId(id))
    }

    /// Since when it waits, if it has arrived before.
    pub(super) fn since(&self) -> Option<Moment> {
        self.id().map(|_| self.lock().since)
    }

    /// How long it has waited by now.
    pub(crate) fn waited(&self, now: Moment) -> Duration {
        now.saturating_sub(self.lock().since)
    }

    /// Whether it belongs to one of these runtimes.
    pub(super) fn is_of(&self, runtimes: &[Id]) -> bool {
        let runtime = self.lock().runtime;
        runtime.is_some_and(|runtime| runtimes.contains(&runtime))
    }

    /// Sets the pauses of the wait that is about to begin.
    pub(super) fn set_repeats(&self, repeats: Repeats) {
        let before = self.lock().repeats.replace(repeats);
        user_code::discard(before);
    }

    /// Asks the policy of this arrival, the user's code, for the next pause. `None`: another thread is asking it, and
    /// tells the turnstile.
    pub(super) fn next_pause(&self, id: WaiterId) -> Option<Option<Duration>> {
        let mut state = self.lock();
        if !matches!(state.progress, Progress::Waiting) || self.id() != Some(id) {
            // It does not wait any more. The turnstile is to ask the next in line.
            return Some(None);
        }
        let mut repeats = state.repeats.take()?;
        drop(state);
        let pause = repeats.next();
        let mut state = self.lock();
        // It may have been served meanwhile, or wait anew.
        let is_over = !matches!(state.progress, Progress::Waiting) || state.repeats.is_some();
        let over = match is_over {
            true => Some(repeats),
            false => state.repeats.replace(repeats),
        };
        drop(state);
        user_code::discard(over);
        Some(pause)
    }

    /// Stands in line (again).
    pub(super) fn arrived(
        &self,
        id: WaiterId,
        runtime: Option<Id>,
        now: Moment,
        journal: &Journal,
    ) {
        self.id.store(id.0, Ordering::Relaxed);
        let mut state = self.lock();
        state.progress = Progress::Waiting;
        state.runtime = runtime;
        // One that lost its turn is waiting still.
        if state.waiter == 0 {
            state.waiter = id.0;
            state.since = now;
            journal.tell(|| LockEvent::Waiting {
                key: self.key().clone(),
                waiter: id.0,
            });
        }
    }

    /// Gives up, unless its wait is over already.
    pub(super) fn leaves(&self, now: Moment, journal: &Journal) {
        let mut state = self.lock();
        if let Progress::Waiting | Progress::Seated { .. } | Progress::TurnLost = state.progress {
            state.progress = Progress::Left;
            journal.tell(|| state.gave_up(self.key(), now));
        }
    }

    /// The lease is seen, and held from here on. Its holder need not be the task that acquired
    /// it, whose waker is given back: it may be the last that keeps that task alive, so it is to be
    /// dropped where no lock is held.
    pub(super) fn takes(
        &self,
        runtime: Option<Id>,
        now: Moment,
        journal: &Journal,
    ) -> Option<(u64, Option<Waker>)> {
        let mut state = self.lock();
        let Progress::Seated { token } = state.progress else {
            return None;
        };
        let waited = now.saturating_sub(state.since);
        state.progress = Progress::Held { token };
        state.runtime = runtime;
        state.since = now;
        if is_passed(token) {
            journal.tell(|| LockEvent::Passed {
                key: self.key().clone(),
                token,
            });
        }
        journal.tell(|| LockEvent::Acquired {
            key: self.key().clone(),
            waiter: state.waiter,
            token,
            waited,
        });
        Some((token, state.waker.take()))
    }

    /// The lease is given back; false if it is not held any more.
    pub(super) fn finishes(&self, now: Moment, parting: Parting) -> bool {
        let mut state = self.lock();
        let (Progress::Held { token } | Progress::Closing { token }) = state.progress else {
            return false;
        };
        state.progress = Progress::Finishing { token };
        state.since = now.saturating_sub(state.since);
        state.parting = parting;
        true
    }

    /// One of those who shared the lease took it away: to the others it is lost.
    pub(super) fn forfeits(&self) {
        let mut state = self.lock();
        let (Progress::Finishing { token } | Progress::Finished { token, .. }) = state.progress
        else {
            return;
        };
        state.progress = Progress::Ended {
            token,
            end: End::Lost,
        };
        let mut aftermath = Aftermath::default();
        state.take_watchers(&mut aftermath);
        aftermath.wakers.extend(state.waker.take());
        drop(state);
        aftermath.come();
    }

    /// The last handle of its lock is dropped while it holds.
    pub(super) fn is_dropped(&self, journal: &Journal) {
        if let Progress::Held { token } = self.progress() {
            journal.tell(|| LockEvent::DroppedWhileHeld {
                key: self.key().clone(),
                token,
            });
        }
    }

    /// The lease that it holds.
    pub(super) fn lease(&self, journal: &Journal) -> Option<LeaseSnapshot> {
        let state = self.lock();
        let (Progress::Held { token } | Progress::Closing { token }) = state.progress else {
            return None;
        };
        Some(LeaseSnapshot {
            waiter: state.waiter,
            token,
            since: journal.instant(state.since),
            deadline: journal.instant(state.deadline),
        })
    }

    /// Its wait.
    pub(super) fn wait(&self, journal: &Journal) -> WaiterSnapshot {
        let state = self.lock();
        WaiterSnapshot {
            waiter: state.waiter,
            since: journal.instant(state.since),
        }
    }

    /// Takes a verdict of the turnstile.
    pub(super) fn tell(
        &self,
        verdict: Verdict,
        now: Moment,
        journal: &Journal,
        aftermath: &mut Aftermath,
    ) {
        let mut state = self.lock();
        if journal.is_heard() {
            state.report(self.key(), &verdict, now, journal);
        }
        let progress = match (&state.progress, verdict) {
            (
                Progress::Waiting,
                Verdict::Seated {
                    token,
                    deadline,
                    leads,
                },
            ) => {
                state.leads = leads;
                state.deadline = deadline;
                Progress::Seated { token }
            }
            (_, Verdict::Prolonged { deadline, .. }) => {
                state.deadline = deadline;
                aftermath.wakers.extend(state.watchers_of_deadlines());
                return;
            }
            (_, Verdict::Unrenewed(_)) => return,
            (_, Verdict::RenewalLate) => {
                if let Progress::Held { token } | Progress::Closing { token } = state.progress {
                    let left = state.deadline.saturating_sub(now);
                    aftermath.late.push((self.key().clone(), token, left));
                }
                return;
            }
            (Progress::Seated { .. }, Verdict::TurnLost) => Progress::TurnLost,
            (Progress::Waiting | Progress::Seated { .. }, verdict) => Progress::Refused(verdict),
            (Progress::Held { token }, Verdict::Closing) => Progress::Closing { token: *token },
            // It was told so, and work that runs on when its lease is lost is to end all the same.
            (Progress::Closing { token }, _) => Progress::Ended {
                token: *token,
                end: End::Closed,
            },
            (Progress::Held { token }, verdict) => Progress::Ended {
                token: *token,
                end: End::from(verdict),
            },
            (Progress::Finishing { token }, verdict) => Progress::Finished {
                token: *token,
                end: state.end(verdict),
            },
            (Progress::Left, _) => return,
            // It had its last word; the turnstile gives none after that.
            (other, verdict) => {
                debug_assert!(false, "{verdict:?} after {other:?}");
                return;
            }
        };
        // What the release finds is a loss as any other: where work may run on, nobody else is told of it.
        let lost = match &progress {
            Progress::Ended { token, end } | Progress::Finished { token, end } => {
                matches!(end, End::Lost).then_some(*token)
            }
            _ => None,
        };
        if let Some(token) = lost {
            let is_over = now >= state.deadline;
            aftermath.lost.push((self.key().clone(), token, is_over));
        }
        if matches!(state.progress, Progress::Waiting) {
            aftermath.policies.extend(state.repeats.take());
        }
        state.closing |= matches!(progress, Progress::Closing { .. });
        if lost.is_some() || matches!(progress, Progress::Ended { .. } | Progress::Closing { .. }) {
            state.take_watchers(aftermath);
        } else if let Progress::Finished { .. } = &progress {
            aftermath.wakers.extend(state.watchers_of_deadlines());
        }
        state.progress = progress;
        aftermath.wakers.extend(state.waker.take());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Contender {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let state = state.unwrap_or_else(PoisonError::into_inner);
        user_code::discard(state.repeats.take());
        user_code::discard(state.waker.take());
        user_code::discard(state.watchers.take());
    }
}

/// F2: the first lease of a tenure has none of the six bits that count the passes.
fn is_passed(token: u64) -> bool {
    !token.is_multiple_of(64)
}

impl State {
    /// Tells what a verdict means to those who read of it.
    fn report(&self, key: &Arc<str>, verdict: &Verdict, now: Moment, journal: &Journal) {
        let key = key.clone();
        let event = match (&self.progress, verdict) {
            (Progress::Waiting, Verdict::QueueFull) => LockEvent::QueueFull {
                key,
                waiter: self.waiter,
                limit: journal.max_waiters(),
            },
            // It waits on: as one who may look now, or as one who may come again.
            (Progress::Waiting, Verdict::Seated { .. })
            | (Progress::Seated { .. }, Verdict::TurnLost | Verdict::Prolonged { .. }) => return,
            (Progress::Waiting | Progress::Seated { .. }, _) => self.gave_up(&key, now),
            (Progress::Held { .. }, Verdict::Closing) => return,
            (
                Progress::Held { token } | Progress::Closing { token },
                Verdict::Prolonged { deadline, last },
            ) => {
                let (token, deadline) = (*token, journal.instant(*deadline));
                let renewed = LockEvent::Renewed {
                    key: key.clone(),
                    token,
                    deadline,
                };
                if *last {
                    journal.tell(|| renewed);
                    LockEvent::LastRenewal {
                        key,
                        token,
                        deadline,
                    }
                } else {
                    renewed
                }
            }
            (Progress::Held { token } | Progress::Closing { token }, Verdict::Unrenewed(error)) => {
                LockEvent::RenewalUnknown {
                    key,
                    token: *token,
                    error: error.clone(),
                }
            }
            (Progress::Held { token } | Progress::Closing { token }, Verdict::RenewalLate) => {
                LockEvent::RenewalLate {
                    key,
                    token: *token,
                    deadline: journal.instant(self.deadline),
                }
            }
            (Progress::Held { token } | Progress::Closing { token }, verdict) => {
                let held = now.saturating_sub(self.since);
                End::from(verdict.clone()).event(key, *token, held)
            }
            (Progress::Finishing { token }, verdict) => {
                let (token, held) = (*token, self.since);
                match (self.end(verdict.clone()), self.parting) {
                    (End::Released, Parting::Keep) => LockEvent::LeftToExpire { key, token, held },
                    (End::Released, Parting::Detach) => LockEvent::Detached { key, token, held },
                    (end, _) => end.event(key, token, held),
                }
            }
            _ => return,
        };
        journal.tell(|| event);
    }

    fn gave_up(&self, key: &Arc<str>, now: Moment) -> LockEvent {
        LockEvent::GaveUp {
            key: key.clone(),
            waiter: self.waiter,
            waited: now.saturating_sub(self.since),
        }
    }

    /// How a lease has ended that its holder gave back.
    fn end(&self, verdict: Verdict) -> End {
        match End::from(verdict) {
            End::Released if self.closing && self.parting == Parting::Release => End::Closed,
            end => end,
        }
    }

    /// All who watch are told, and watch no more.
    fn take_watchers(&mut self, aftermath: &mut Aftermath) {
        if let Some(watchers) = &mut self.watchers {
            aftermath.wakers.extend(watchers.take());
        }
    }

    fn watchers_of_deadlines(&mut self) -> impl Iterator<Item = Waker> {
        let watchers = self.watchers.iter_mut();
        watchers.flat_map(|watchers| watchers.of_deadlines())
    }
}

impl fmt::Debug for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contender")
            .field("key", self.key())
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
