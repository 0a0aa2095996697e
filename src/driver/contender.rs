use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tokio::runtime::{Handle, Id};

use crate::StoreError;
use crate::turnstile::{Moment, Verdict, WaiterId};

/// One caller from its arrival to the end of its lease: what its future and the driver share.
pub(crate) struct Contender {
    key: Arc<str>,
    state: Mutex<State>,
}

struct State {
    progress: Progress,
    /// Who waits for the next verdict: the caller, or later its release.
    waker: Option<Waker>,
    /// Who watches for the end of a held lease before its holder releases it, first come first: few,
    /// as a rule one, and there may be very many leases.
    watchers: Vec<(u64, Waker)>,
    /// How many have watched so far.
    watched: u64,
    id: Option<WaiterId>,
    deadline: Moment,
    /// Where it arrived.
    runtime: Option<Id>,
}

/// What is done about verdicts once no lock is held: wakers and the log run other people's code.
#[derive(Default)]
pub(super) struct Aftermath {
    wakers: Vec<Waker>,
    /// Keys and tokens of lost leases.
    lost: Vec<(Arc<str>, u64)>,
}

/// How far a caller has come.
#[derive(Clone, Debug)]
pub(crate) enum Progress {
    /// In line.
    Waiting,
    /// The key is its, once it looks.
    Seated { token: u64 },
    /// It did not look in time; it may arrive again.
    TurnLost,
    /// It does not get the key: busy, queue full, failed, or closed.
    Refused(Verdict),
    /// It holds a lease.
    Held { token: u64 },
    /// Its lease ended under it: lost, or closed.
    Ended { token: u64, end: End },
    /// It gave the lease back, and waits for the store's word.
    Finishing { token: u64 },
    /// The store's word on that.
    Finished { token: u64, end: End },
}

/// How a lease ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Released,
    Lost,
    Closed,
    Failed(StoreError),
}

impl Contender {
    pub(crate) fn new(key: Arc<str>) -> Self {
        Self {
            key,
            state: Mutex::new(State {
                progress: Progress::Waiting,
                waker: None,
                watchers: Vec::new(),
                watched: 0,
                id: None,
                deadline: Moment::ZERO,
                runtime: None,
            }),
        }
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub(crate) fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    /// How far it has come; the waker is told of the next verdict.
    pub(crate) fn progress_or_wake(&self, waker: &Waker) -> Progress {
        let mut state = self.lock();
        let known = state.waker.as_ref();
        let before = if known.is_some_and(|known| known.will_wake(waker)) {
            None
        } else {
            state.waker.replace(waker.clone())
        };
        let progress = state.progress.clone();
        drop(state);
        drop(before);
        progress
    }

    /// The deadline of the lease it holds.
    pub(crate) fn deadline(&self) -> Moment {
        self.lock().deadline
    }

    /// The waker is told when the lease ends under its holder, in place of the one that was given
    /// for this `watch` before. Whoever watches looks again after this, or it may have ended
    /// between the look and the watching; and [unwatches](Self::unwatch).
    pub(crate) fn watch(&self, watch: &mut Option<u64>, waker: &Waker) {
        let mut state = self.lock();
        let watch = *watch.get_or_insert_with(|| {
            state.watched += 1;
            state.watched
        });
        let before = match state.place_of(watch) {
            Ok(at) if state.watchers[at].1.will_wake(waker) => None,
            Ok(at) => Some(std::mem::replace(&mut state.watchers[at].1, waker.clone())),
            Err(at) => {
                state.watchers.insert(at, (watch, waker.clone()));
                None
            }
        };
        drop(state);
        drop(before);
    }

    pub(crate) fn unwatch(&self, watch: u64) {
        let mut state = self.lock();
        let place = state.place_of(watch).ok();
        let watcher = place.map(|at| state.watchers.remove(at));
        drop(state);
        drop(watcher);
    }

    pub(super) fn id(&self) -> Option<WaiterId> {
        self.lock().id
    }

    /// Stands in line (again).
    pub(super) fn arrives(&self) {
        let mut state = self.lock();
        state.progress = Progress::Waiting;
        state.id = None;
        state.runtime = Handle::try_current().ok().map(|current| current.id());
    }

    /// Whether it arrived on one of these runtimes.
    pub(super) fn is_of(&self, runtimes: &[Id]) -> bool {
        let runtime = self.lock().runtime;
        runtime.is_some_and(|runtime| runtimes.contains(&runtime))
    }

    pub(super) fn arrived(&self, id: WaiterId) {
        self.lock().id = Some(id);
    }

    /// The lease is seen, and held from here on. Its holder need not be the task that acquired
    /// it, whose waker is given back: it may be the last that keeps that task alive, so it is to be
    /// dropped where no lock is held.
    pub(super) fn takes(&self) -> Option<(u64, Option<Waker>)> {
        let mut state = self.lock();
        let Progress::Seated { token } = state.progress else {
            return None;
        };
        state.progress = Progress::Held { token };
        Some((token, state.waker.take()))
    }

    /// The lease is given back; false if it is not held any more.
    pub(super) fn finishes(&self) -> bool {
        let mut state = self.lock();
        let Progress::Held { token } = state.progress else {
            return false;
        };
        state.progress = Progress::Finishing { token };
        true
    }

    /// Takes a verdict of the turnstile.
    pub(super) fn tell(&self, verdict: Verdict, aftermath: &mut Aftermath) {
        let mut state = self.lock();
        let progress = match (&state.progress, verdict) {
            (Progress::Waiting, Verdict::Seated { token, deadline }) => {
                state.deadline = deadline;
                Progress::Seated { token }
            }
            (_, Verdict::Prolonged { deadline, .. }) => {
                state.deadline = deadline;
                return;
            }
            (_, Verdict::Unrenewed(_)) => return,
            (Progress::Seated { .. }, Verdict::TurnLost) => Progress::TurnLost,
            (Progress::Waiting | Progress::Seated { .. }, verdict) => Progress::Refused(verdict),
            (Progress::Held { token }, verdict) => Progress::Ended {
                token: *token,
                end: End::from(verdict),
            },
            (Progress::Finishing { token }, verdict) => Progress::Finished {
                token: *token,
                end: End::from(verdict),
            },
            // It had its last word; the turnstile gives none after that.
            (other, verdict) => {
                debug_assert!(false, "{verdict:?} after {other:?}");
                return;
            }
        };
        if let Progress::Ended { token, end } = &progress {
            if let End::Lost = end {
                aftermath.lost.push((self.key.clone(), *token));
            }
            let watchers = std::mem::take(&mut state.watchers);
            let wakers = watchers.into_iter().map(|(_, waker)| waker);
            aftermath.wakers.extend(wakers);
        }
        state.progress = progress;
        aftermath.wakers.extend(state.waker.take());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn place_of(&self, watch: u64) -> Result<usize, usize> {
        self.watchers
            .binary_search_by_key(&watch, |(known, _)| *known)
    }
}

impl Aftermath {
    pub(super) fn come(self) {
        for (key, token) in self.lost {
            tracing::warn!(
                key = &*key,
                token,
                "lease lost: its ttl was over before its work"
            );
        }
        for waker in self.wakers {
            // One that panics has told so by the panic hook; the others are to be woken all the same.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }
}

impl From<Verdict> for End {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Released => Self::Released,
            Verdict::Closed => Self::Closed,
            Verdict::Failed(error) => Self::Failed(error),
            _ => Self::Lost,
        }
    }
}

impl fmt::Debug for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contender")
            .field("key", &self.key)
            .field("progress", &self.progress())
            .finish_non_exhaustive()
    }
}
