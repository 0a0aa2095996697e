use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use event_listener::Event;

use crate::StoreError;
use crate::turnstile::{Moment, Verdict, WaiterId};

/// One caller from its arrival to the end of its lease: what its future and the driver share.
pub(crate) struct Contender {
    key: Arc<str>,
    state: Mutex<State>,
    /// Told when a held lease ends before its holder released it.
    ended: Event,
}

struct State {
    progress: Progress,
    /// Who waits for the next verdict: the caller, or later its release.
    waker: Option<Waker>,
    id: Option<WaiterId>,
    deadline: Moment,
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
                id: None,
                deadline: Moment::ZERO,
            }),
            ended: Event::new(),
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

    /// Tells when the lease ends under its holder.
    pub(crate) fn ended(&self) -> &Event {
        &self.ended
    }

    pub(super) fn id(&self) -> Option<WaiterId> {
        self.lock().id
    }

    /// Stands in line (again).
    pub(super) fn arrives(&self) {
        let mut state = self.lock();
        state.progress = Progress::Waiting;
        state.id = None;
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

    /// Takes a verdict of the turnstile; returns whom to wake once no lock is held.
    pub(super) fn tell(&self, verdict: Verdict) -> Option<Waker> {
        let mut state = self.lock();
        let progress = match (&state.progress, verdict) {
            (Progress::Waiting, Verdict::Seated { token, deadline }) => {
                state.deadline = deadline;
                Progress::Seated { token }
            }
            (_, Verdict::Prolonged { deadline }) => {
                state.deadline = deadline;
                return None;
            }
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
                return None;
            }
        };
        let lost = matches!(progress, Progress::Ended { .. });
        if let Progress::Ended {
            token,
            end: End::Lost,
        } = &progress
        {
            tracing::warn!(
                key = &*self.key,
                token,
                "lease lost: its ttl was over before its work"
            );
        }
        state.progress = progress;
        let waker = state.waker.take();
        drop(state);
        if lost {
            self.ended.notify(usize::MAX);
        }
        waker
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change leaves the state whole, so a panic elsewhere is no reason to stop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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
