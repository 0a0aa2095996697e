//! Who waits for which confirmation. Pure: times come in, news goes out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::rule::Replicas;
use crate::StoreError;
use crate::store::contract::{Answer, Grant, News, Op, OpError, Outcome, Owner};
use crate::store::redis::fault::Fault;

/// So many locks are asked for in one round at most.
const MOST_IN_ROUND: usize = 512;

/// So many grants wait at most. Nobody asked for a grant, so a server that makes them up must not make us keep them; an
/// honest one has one for each ticket that stands.
const MOST_GRANTS: usize = 16_384;

/// What waits, what is being asked for, and what is to be told.
///
/// `hear` takes what the session tells; `begin` a round, and one of `seen` and `failed` ends it. After each of them `told`
/// is to be drained, in order.
#[derive(Debug)]
pub(super) struct Ledger {
    rule: Replicas,
    waiting: VecDeque<Entry>,
    round: Vec<Entry>,
    /// The last round's; an answer to another one is of no use.
    number: u64,
    /// How often the session's connection has gone: what was found by way of an earlier one leads to the server of
    /// that time.
    downs: u64,
    grants: usize,
    pub(super) told: VecDeque<News>,
}

#[derive(Debug)]
struct Entry {
    key: Arc<str>,
    owner: Owner,
    held: Held,
    /// When it is given up: counted from when it was first asked for.
    until: Option<Instant>,
}

/// What is held back.
#[derive(Debug)]
enum Held {
    Won { op: Op, answer: Answer },
    Granted(Grant),
}

/// What the replicas are to be asked for.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) downs: u64,
    pub(super) locks: Vec<(Arc<str>, Owner)>,
    /// How long they have.
    pub(super) wait: Duration,
}

/// What became of a round.
#[derive(Debug)]
pub(super) struct Seen {
    /// Which of the locks were their owners'.
    pub(super) ours: Vec<bool>,
    /// How many replicas have all of them.
    pub(super) replicas: u64,
}

/// For whom an answer wins the lock.
fn winner(op: &Op) -> Option<Owner> {
    match *op {
        Op::Attempt { owner, .. }
        | Op::Listen { owner, .. }
        | Op::Enter { owner, .. }
        | Op::Adopt { owner, .. }
        | Op::Yield { new: owner, .. } => Some(owner),
        Op::Withdraw { .. } | Op::Release { .. } | Op::Renew { .. } | Op::Raise { .. } => None,
    }
}

impl Ledger {
    pub(super) fn new(rule: Replicas) -> Self {
        Self {
            rule,
            waiting: VecDeque::new(),
            round: Vec::new(),
            number: 0,
            downs: 0,
            grants: 0,
            told: VecDeque::new(),
        }
    }

    /// The session told something.
    pub(super) fn hear(&mut self, news: News) {
        match news {
            News::Replied {
                key,
                op,
                result: Ok(answer),
            } => match (&answer.outcome, winner(&op)) {
                (Outcome::Won { .. }, Some(owner)) => {
                    self.wait(key, owner, Held::Won { op, answer });
                }
                _ => self.told.push_back(News::Replied {
                    key,
                    op,
                    result: Ok(answer),
                }),
            },
            News::Granted { key, grant } if self.grants < MOST_GRANTS => {
                self.grants += 1;
                self.wait(key, grant.owner, Held::Granted(grant));
            }
            News::Granted { key, grant } => {
                let error = Fault::TooMany.into();
                self.told.push_back(News::Unconfirmed { key, grant, error });
            }
            News::Down(error) => {
                self.downs += 1;
                self.forget(&error);
                self.told.push_back(News::Down(error));
            }
            other => self.told.push_back(other),
        }
    }

    fn wait(&mut self, key: Arc<str>, owner: Owner, held: Held) {
        self.waiting.push_back(Entry {
            key,
            owner,
            held,
            until: None,
        });
    }

    /// The connection is gone by which they were won: they are Unknown, as if the answer had been lost with it, and
    /// grants are dropped (O3). Asked for again they are proved, and confirmed, anew (S3).
    fn forget(&mut self, error: &StoreError) {
        self.number += 1;
        self.grants = 0;
        for entry in self.round.drain(..).chain(self.waiting.drain(..)) {
            if let Held::Won { op, .. } = entry.held {
                let (key, result) = (entry.key, Err(OpError::Unknown(error.clone())));
                self.told.push_back(News::Replied { key, op, result });
            }
        }
    }

    /// Whether anybody waits for a round.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Begins a round with all that waits, if anything does.
    pub(super) fn begin(&mut self, now: Instant) -> Option<Round> {
        debug_assert!(self.round.is_empty(), "one round at a time");
        let count = self.waiting.len().min(MOST_IN_ROUND);
        if count == 0 {
            return None;
        }
        self.round.extend(self.waiting.drain(..count));
        let mut last = now;
        for entry in &mut self.round {
            last = last.max(*entry.until.get_or_insert(now + self.rule.within));
        }
        self.number += 1;
        let lock = |entry: &Entry| (entry.key.clone(), entry.owner);
        Some(Round {
            number: self.number,
            downs: self.downs,
            locks: self.round.iter().map(lock).collect(),
            wait: last.duration_since(now),
        })
    }

    /// Whether the answer to a round is still waited for.
    pub(super) fn is_wanted(&self, number: u64) -> bool {
        self.number == number
    }

    /// A round was answered.
    pub(super) fn seen(&mut self, number: u64, seen: &Seen, address: &Arc<str>) {
        if !self.is_wanted(number) {
            return;
        }
        debug_assert_eq!(self.round.len(), seen.ours.len(), "an answer for each");
        let Replicas { least, within } = self.rule;
        let enough = seen.replicas >= u64::from(least);
        let round = std::mem::take(&mut self.round);
        for (entry, ours) in round.into_iter().zip(&seen.ours) {
            let address = address.clone();
            if !ours {
                // Perhaps it was given back meanwhile; perhaps another server is asked than gave it.
                self.refuse(entry, &Fault::Gone { address }.into());
            } else if enough {
                self.confirm(entry);
            } else {
                let fault = Fault::TooFew {
                    address,
                    had: seen.replicas,
                    least,
                    within,
                };
                self.refuse(entry, &fault.into());
            }
        }
    }

    /// A round could not be asked, or was not answered. What has time left goes with the next one.
    pub(super) fn failed(&mut self, now: Instant, number: u64, error: &StoreError) {
        if !self.is_wanted(number) {
            return;
        }
        let has_time =
            |entry: &Entry| error.is_retryable() && entry.until.is_some_and(|until| now < until);
        let round = std::mem::take(&mut self.round).into_iter();
        let (again, over): (Vec<_>, Vec<_>) = round.partition(has_time);
        for entry in over {
            self.refuse(entry, error);
        }
        for entry in again.into_iter().rev() {
            self.waiting.push_front(entry);
        }
    }

    /// Nobody will ask the replicas any more.
    pub(super) fn give_up(&mut self, error: &StoreError) {
        self.number += 1;
        let all: Vec<_> = self.round.drain(..).chain(self.waiting.drain(..)).collect();
        for entry in all {
            self.refuse(entry, error);
        }
    }

    fn confirm(&mut self, entry: Entry) {
        let key = entry.key;
        self.told.push_back(match entry.held {
            Held::Won { op, answer } => News::Replied {
                key,
                op,
                result: Ok(answer),
            },
            Held::Granted(grant) => {
                self.grants -= 1;
                News::Granted { key, grant }
            }
        });
    }

    fn refuse(&mut self, entry: Entry, error: &StoreError) {
        let (key, error) = (entry.key, error.clone());
        self.told.push_back(match entry.held {
            Held::Won { op, .. } => News::Replied {
                key,
                op,
                result: Err(OpError::Unconfirmed(error)),
            },
            Held::Granted(grant) => {
                self.grants -= 1;
                News::Unconfirmed { key, grant, error }
            }
        });
    }
}
