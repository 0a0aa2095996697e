//! What one node is asked about one key: one op at a time, so that a release is done after whatever
//! it is to undo, however late that is answered.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::fault::Fault;
use crate::StoreError;
use crate::settings::TTL;
use crate::store::contract::{Answer, Op, OpError, Outcome, Owner};

/// After a refusal a release is sent again.
const RETRY: Duration = Duration::from_millis(250);

/// So much longer than the lock a node keeps those that listen for it (K3). Others that come to listen
/// prolong that: then one may be told whom we have forgotten, if the node was away for longer.
const LISTENS: Duration = Duration::from_secs(60);

/// So long at most, and longer, it keeps a key for the one that it tells of it.
const RESERVED: Duration = Duration::from_secs(1);

#[cfg(test)]
thread_local! {
    /// How often any was looked at, on this thread.
    pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// One op, and the ballot that its answer is a vote in.
#[derive(Debug)]
struct Job {
    op: Op,
    tally: Option<u64>,
    /// Whether nothing of its owner's was here before it was sent.
    first: bool,
}

/// A release that waits.
#[derive(Debug)]
struct PendingRelease {
    owner: Owner,
    tally: Option<u64>,
    /// When it is sent again; else once the node is back.
    due: Option<Instant>,
}

/// What the node may have under an owner, until that has run out by itself.
#[derive(Debug)]
struct ResidualHold {
    owner: Owner,
    until: Instant,
}

/// What becomes known of a job, for its ballot.
#[derive(Debug)]
pub(super) struct Cast {
    pub(super) tally: u64,
    pub(super) vote: Vote,
}

#[derive(Debug)]
pub(super) enum Vote {
    Said(Outcome),
    /// No answer, perhaps later.
    Later(StoreError),
    /// No answer, and none will come.
    Never(StoreError),
}

#[derive(Debug)]
pub(super) enum Step {
    Send(Op),
    Cast(Cast),
}

#[derive(Debug, Default)]
pub(super) struct NodeQueue {
    in_flight: Option<Job>,
    queue: VecDeque<Job>,
    pending: Vec<PendingRelease>,
    residuals: Vec<ResidualHold>,
    /// Who listens on the node, or may.
    subscriptions: Vec<ResidualHold>,
    /// Who has the lock on the node, or may, and too few know it who were to: what was said of that.
    unsure: Vec<(Owner, StoreError)>,
}

/// By when a lock of `ttl` that is set now has run out on any node whose clock is right.
fn outlasted(now: Instant, ttl: Duration) -> Instant {
    now + ttl + ttl / 50 + Duration::from_millis(10)
}

/// By when a node has forgotten who listens, if it has forgotten nothing else, for a lock that has
/// `left` to go.
fn unheard(now: Instant, left: Duration) -> Instant {
    outlasted(now, left.min(*TTL.end()) + LISTENS)
}

fn put(marks: &mut Vec<ResidualHold>, owner: Owner, until: Instant) {
    match marks.iter_mut().find(|mark| mark.owner == owner) {
        Some(mark) => mark.until = mark.until.max(until),
        None => marks.push(ResidualHold { owner, until }),
    }
}

fn taking(op: &Op) -> Option<(Owner, Duration)> {
    match *op {
        Op::Attempt { owner, ttl } | Op::Listen { owner, ttl } | Op::Adopt { owner, ttl, .. } => {
            Some((owner, ttl))
        }
        _ => None,
    }
}

impl NodeQueue {
    pub(super) fn ask(&mut self, op: Op, tally: Option<u64>) {
        if let Some((owner, _)) = taking(&op) {
            // It would take away what is asked for now.
            self.pending.retain(|pending| pending.owner != owner);
        }
        self.push(op, tally);
    }

    fn push(&mut self, op: Op, tally: Option<u64>) {
        let first = false;
        self.queue.push_back(Job { op, tally, first });
    }

    /// Sees to it that nothing of an owner's stays here, not even a subscription. What was not sent yet will
    /// not be, and comes back as votes.
    pub(super) fn leave(&mut self, owner: Owner, tally: Option<u64>) -> Vec<Cast> {
        let op = self.parting(owner);
        self.part(owner, op, tally)
    }

    /// The same, but whoever listens does so still.
    pub(super) fn let_go(&mut self, owner: Owner) -> Vec<Cast> {
        self.part(owner, Op::Release { owner }, None)
    }

    /// Whether an owner is told when the key is free on the node, or may be.
    pub(super) fn listens(&self, owner: Owner) -> bool {
        self.subscriptions
            .iter()
            .any(|subscription| subscription.owner == owner)
    }

    /// Whether anybody is, or may be.
    pub(super) fn has_subscriptions(&self) -> bool {
        !self.subscriptions.is_empty()
    }

    fn parting(&self, owner: Owner) -> Op {
        if self.listens(owner) {
            Op::Unlisten { owner }
        } else {
            Op::Release { owner }
        }
    }

    fn part(&mut self, owner: Owner, release: Op, tally: Option<u64>) -> Vec<Cast> {
        let is_taking = |op: &Op| taking(op).is_some_and(|(of, _)| of == owner);
        let mut casts = Vec::new();
        self.queue.retain(|job| {
            let unsent = is_taking(&job.op);
            if unsent && let Some(tally) = job.tally {
                let vote = Vote::Never(Fault::Away.into());
                casts.push(Cast { tally, vote });
            }
            !unsent
        });
        let pending = self.in_flight.iter_mut().chain(&mut self.queue);
        let mut pending = pending.filter(|job| job.op == release);
        if let Some(job) = pending.next() {
            job.tally = tally.or(job.tally);
        } else if let Some(pending) = self
            .pending
            .iter_mut()
            .find(|pending| pending.owner == owner)
        {
            pending.tally = tally.or(pending.tally);
        } else {
            self.push(release, tally);
        }
        casts
    }

    /// What to do next, until there is nothing. `away`: why the node is not asked; `gives_back`: but for
    /// releases.
    pub(super) fn step(
        &mut self,
        now: Instant,
        away: Option<&StoreError>,
        gives_back: bool,
    ) -> Option<Step> {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        if self.in_flight.is_some() {
            return None;
        }
        loop {
            let mut job = self.queue.pop_front()?;
            let is_release = matches!(job.op, Op::Release { .. } | Op::Unlisten { .. });
            let away = away.filter(|_| !(gives_back && is_release));
            if let Some(error) = away {
                if let Op::Release { owner } | Op::Unlisten { owner } = job.op
                    && (self.is_residual(owner) || self.listens(owner))
                {
                    let vote = self.add_pending(owner, job.tally, None, error);
                    if let Some(tally) = job.tally {
                        return Some(Step::Cast(Cast { tally, vote }));
                    }
                    continue;
                }
                if let Some(tally) = job.tally
                    && self.known(&job.op).is_none()
                {
                    let vote = Vote::Never(error.clone());
                    return Some(Step::Cast(Cast { tally, vote }));
                }
            }
            if let Some(outcome) = self.known(&job.op) {
                if let Some(tally) = job.tally {
                    let vote = Vote::Said(outcome);
                    return Some(Step::Cast(Cast { tally, vote }));
                }
                continue;
            }
            if away.is_some() {
                continue;
            }
            if let Op::Renew { owner, ttl, .. } = job.op
                && let Some((_, error)) = self.unsure.iter().find(|(of, _)| *of == owner)
            {
                // It would make up a majority of votes one of which a fail-over may forget. Instead it is asked
                // once more whether enough know of it, for the next renewal.
                let vote = Vote::Never(error.clone());
                let (op, first) = (Op::Attempt { owner, ttl }, false);
                self.queue.push_front(Job {
                    op,
                    tally: None,
                    first,
                });
                if let Some(tally) = job.tally {
                    return Some(Step::Cast(Cast { tally, vote }));
                }
                continue;
            }
            if let Some((owner, ttl)) = taking(&job.op) {
                job.first = !self.is_residual(owner);
                self.residual(owner, outlasted(now, ttl));
            } else if let Op::Renew { owner, ttl, .. } = job.op {
                self.residual(owner, outlasted(now, ttl));
            }
            if let Op::Listen { owner, ttl } = job.op {
                // Who has the lock is taken to have it for as long as we would, until the node says.
                put(&mut self.subscriptions, owner, unheard(now, ttl));
            }
            let op = job.op.clone();
            self.in_flight = Some(job);
            return Some(Step::Send(op));
        }
    }

    /// What the node would say to one of whom it has nothing.
    fn known(&self, op: &Op) -> Option<Outcome> {
        let (owner, outcome) = match *op {
            Op::Unlisten { owner } if self.listens(owner) => return None,
            Op::Release { owner } | Op::Unlisten { owner } => {
                (owner, Outcome::Gone { held: false })
            }
            Op::Renew { owner, .. } | Op::Raise { owner, .. } => (owner, Outcome::Lost),
            _ => return None,
        };
        (!self.is_residual(owner)).then_some(outcome)
    }

    /// The node answered what is in flight.
    pub(super) fn answered(
        &mut self,
        now: Instant,
        result: Result<Answer, OpError>,
    ) -> Option<Cast> {
        let job = self.in_flight.take()?;
        let vote = match result {
            Ok(answer) => {
                match (&job.op, &answer.outcome) {
                    // A notice that came meanwhile may be of an earlier time.
                    (
                        Op::Listen { owner, .. },
                        Outcome::Busy {
                            score: Some(_),
                            left,
                        },
                    ) => put(
                        &mut self.subscriptions,
                        *owner,
                        unheard(now, left.unwrap_or_default()),
                    ),
                    (Op::Listen { owner, .. } | Op::Unlisten { owner }, _) => {
                        self.subscriptions
                            .retain(|subscription| subscription.owner != *owner);
                    }
                    _ => {}
                }
                if let (Some((owner, _)), Outcome::Won { .. }) = (taking(&job.op), &answer.outcome)
                {
                    self.unsure.retain(|(of, _)| *of != owner);
                }
                match (&job.op, &answer.outcome) {
                    (
                        Op::Attempt { .. } | Op::Listen { .. } | Op::Adopt { .. },
                        Outcome::Won { .. },
                    )
                    | (Op::Renew { .. }, Outcome::Renewed) => self.renew_residual(now, &job.op),
                    (Op::Raise { .. }, Outcome::Raised { .. }) => {}
                    (
                        Op::Attempt { owner, .. }
                        | Op::Listen { owner, .. }
                        | Op::Adopt { owner, .. }
                        | Op::Renew { owner, .. }
                        | Op::Raise { owner, .. }
                        | Op::Unlisten { owner }
                        | Op::Release { owner },
                        _,
                    ) => self.clean(*owner),
                    _ => {}
                }
                Vote::Said(answer.outcome)
            }
            Err(error) => self.failed(now, &job, error),
        };
        let tally = job.tally?;
        Some(Cast { tally, vote })
    }

    fn failed(&mut self, now: Instant, job: &Job, error: OpError) -> Vote {
        if let Op::Release { owner } | Op::Unlisten { owner } = job.op {
            let due = match &error {
                OpError::Unknown(_) | OpError::Unsent(_) | OpError::Unconfirmed(_) => None,
                OpError::Refused(error) | OpError::TooLate(error) if error.is_retryable() => {
                    Some(now + RETRY)
                }
                OpError::Refused(error) | OpError::TooLate(error) => {
                    // It runs out by itself.
                    self.clean(owner);
                    return Vote::Never(error.clone());
                }
            };
            let is_wanted = |job: &Job| taking(&job.op).is_some_and(|(of, _)| of == owner);
            if self.queue.iter().any(is_wanted) {
                return Vote::Later(error.store_error().clone());
            }
            return self.add_pending(owner, job.tally, due, error.store_error());
        }
        match &error {
            // Of an answer that was lost nobody knows whether it was the other.
            OpError::Unknown(error) | OpError::Unconfirmed(error) => {
                self.renew_residual(now, &job.op);
                if let Some((owner, _)) = taking(&job.op) {
                    self.unsure.retain(|(of, _)| *of != owner);
                    self.unsure.push((owner, error.clone()));
                }
            }
            // It was not done.
            OpError::Unsent(_) | OpError::Refused(_) | OpError::TooLate(_) => {
                if job.first
                    && let Some((owner, _)) = taking(&job.op)
                {
                    self.clean(owner);
                }
            }
        }
        Vote::Never(error.store_error().clone())
    }

    /// What is given back is so later. Nobody is kept waiting for one that only listens.
    fn add_pending(
        &mut self,
        owner: Owner,
        tally: Option<u64>,
        due: Option<Instant>,
        error: &StoreError,
    ) -> Vote {
        let (tally, vote) = if self.is_residual(owner) {
            (tally, Vote::Later(error.clone()))
        } else {
            (None, Vote::Said(Outcome::Gone { held: false }))
        };
        self.pending.push(PendingRelease { owner, tally, due });
        vote
    }

    /// The node is back.
    pub(super) fn node_is_back(&mut self) {
        for pending in std::mem::take(&mut self.pending).into_iter().rev() {
            self.queue.push_front(Job {
                op: self.parting(pending.owner),
                tally: pending.tally,
                first: false,
            });
        }
    }

    /// Releases that are due again are sent again; those that are not worth it any more are not.
    pub(super) fn tick(&mut self, now: Instant) -> Vec<Cast> {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        self.residuals.retain(|residual| now < residual.until);
        let residuals = &self.residuals;
        let is_residual = |owner: Owner| residuals.iter().any(|residual| residual.owner == owner);
        self.unsure.retain(|(owner, _)| is_residual(*owner));
        self.subscriptions
            .retain(|subscription| now < subscription.until);
        let mut casts = Vec::new();
        for pending in std::mem::take(&mut self.pending) {
            if self.until(pending.owner).is_none() {
                let vote = Vote::Never(Fault::RunOut.into());
                casts.extend(pending.tally.map(|tally| Cast { tally, vote }));
            } else if pending.due.is_some_and(|due| due <= now) {
                let op = self.parting(pending.owner);
                self.push(op, pending.tally);
            } else {
                self.pending.push(pending);
            }
        }
        casts
    }

    /// When a release is to be sent again, or is not worth it any more.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let due =
            |pending: &PendingRelease| pending.due.or(self.until(pending.owner)).unwrap_or(now);
        self.pending.iter().map(due).min()
    }

    /// When all that the node may have of ours has run out by itself.
    pub(super) fn over(&self) -> Option<Instant> {
        let marks = self.residuals.iter().chain(&self.subscriptions);
        marks.map(|mark| mark.until).max()
    }

    /// Whether the node may have something of the owner's.
    pub(super) fn is_residual(&self, owner: Owner) -> bool {
        self.residuals
            .iter()
            .any(|residual| residual.owner == owner)
    }

    /// When that, and a subscription of its, has run out by itself.
    fn until(&self, owner: Owner) -> Option<Instant> {
        let marks = self.residuals.iter().chain(&self.subscriptions);
        let marks = marks.filter(|mark| mark.owner == owner);
        marks.map(|mark| mark.until).max()
    }

    /// Whether anything is under way, or owed.
    pub(super) fn is_busy(&self) -> bool {
        #[cfg(test)]
        LOOKS.set(LOOKS.get() + 1);
        self.in_flight.is_some() || !self.queue.is_empty() || !self.pending.is_empty()
    }

    /// Nor is anything left: it may be forgotten.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_busy() && self.residuals.is_empty() && self.subscriptions.is_empty()
    }

    /// The node says that the key is free, and keeps it for the one that it tells for a moment:
    /// whether anybody listens for that. Once for each time, and the first of ours first, as they
    /// stand on the node (W7): one that is told on its way out must not cost another its place.
    pub(super) fn hears(&mut self, now: Instant) -> bool {
        if self.subscriptions.is_empty() {
            return false;
        }
        let subscription = self.subscriptions.remove(0);
        self.residual(subscription.owner, now + RESERVED);
        true
    }

    fn renew_residual(&mut self, now: Instant, op: &Op) {
        if let Some((owner, ttl)) = taking(op) {
            self.residual(owner, outlasted(now, ttl));
        } else if let Op::Renew { owner, ttl, .. } = *op {
            self.residual(owner, outlasted(now, ttl));
        }
    }

    fn residual(&mut self, owner: Owner, until: Instant) {
        put(&mut self.residuals, owner, until);
    }

    fn clean(&mut self, owner: Owner) {
        self.residuals.retain(|residual| residual.owner != owner);
        self.unsure.retain(|(of, _)| *of != owner);
    }
}
