//! Who waits for which confirmation. Pure: times come in, news goes out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::rule::Replicas;
use crate::StoreError;
use crate::store::contract::{Answer, Grant, News, Op, OpError, Outcome, Owner};
use crate::store::redis::fault::Fault;

/// So many grants wait at most. Nobody asked for a grant, so a server that makes them up must not make us keep them; an
/// honest one has one for each ticket that stands.
const MOST_GRANTS: usize = 16_384;

/// So often a lock may be sent on at once; after that only after a pause each time, so that two nodes that name each other
/// are not kept busy.
const HOPS: u32 = 4;

/// That pause.
const HOP_PAUSE: Duration = Duration::from_millis(20);

/// What waits, what is being asked for, and what is to be told.
///
/// `hear` takes what the session tells; `begin` starts rounds, and one of `seen` and `failed` ends each. After each of
/// them `told` is to be drained, in order.
#[derive(Debug)]
pub(super) struct Ledger {
    rule: Replicas,
    waiting: VecDeque<Entry>,
    /// One a primary at most.
    rounds: Vec<(u64, Vec<Entry>)>,
    /// The last round's; an answer to one that is not among the rounds is of no use.
    number: u64,
    /// How often the session's connection has gone: what was found by way of an earlier one leads to the server of
    /// that time.
    downs: u64,
    grants: usize,
    /// How much was ever held back.
    pub(super) arrivals: u64,
    pub(super) told: VecDeque<News>,
}

#[derive(Debug)]
struct Entry {
    key: Arc<str>,
    owner: Owner,
    held: Held,
    /// When it is given up: counted from when it was first asked for.
    until: Option<Instant>,
    hint: Hint,
    /// How often it was sent on.
    hops: u32,
    /// When it may go again.
    not_before: Option<Instant>,
}

/// What is held back.
#[derive(Debug)]
enum Held {
    Won { op: Op, answer: Answer },
    Granted(Grant),
}

/// Where a cluster's node has said that a lock is to be asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Hint {
    /// Where it is to go, whatever the map says.
    pub(super) to: Option<Arc<str>>,
    /// Whether its slot is not there yet.
    pub(super) asking: bool,
    /// Whether others of its slot may be elsewhere, so that it has a call of its own.
    pub(super) is_alone: bool,
}

impl Entry {
    /// Whether it is to be asked for again after such an error.
    fn has_time(&self, now: Instant, error: &StoreError) -> bool {
        error.is_retryable() && self.until.is_some_and(|until| now < until)
    }
}

/// What the replicas of one primary are to be asked for.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) downs: u64,
    pub(super) locks: Vec<Lock>,
    /// How long they have.
    pub(super) wait: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lock {
    pub(super) key: Arc<str>,
    pub(super) owner: Owner,
    /// Locks of different slots do not share a call; 0 where there are none.
    pub(super) slot: u16,
    /// Whether the slot is not there yet.
    pub(super) asking: bool,
    pub(super) is_alone: bool,
}

/// What became of a round.
#[derive(Debug)]
pub(super) struct Seen {
    /// One of each lock.
    pub(super) said: Vec<Said>,
    /// How many replicas have all that are their owners'.
    pub(super) replicas: u64,
}

#[derive(Clone, Debug)]
pub(super) enum Said {
    /// It is its owner's.
    Ours,
    /// It is not.
    Gone,
    /// It is to be asked for elsewhere, or once more.
    Elsewhere(Hint, StoreError),
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
            rounds: Vec::new(),
            number: 0,
            downs: 0,
            grants: 0,
            arrivals: 0,
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
        self.arrivals += 1;
        self.waiting.push_back(Entry {
            key,
            owner,
            held,
            until: None,
            hint: Hint::default(),
            hops: 0,
            not_before: None,
        });
    }

    /// The connection is gone by which they were won: they are Unknown, as if the answer had been lost with it, and
    /// grants are dropped (O3). Asked for again they are proved, and confirmed, anew (S3).
    fn forget(&mut self, error: &StoreError) {
        self.grants = 0;
        for entry in self.drain() {
            if let Held::Won { op, .. } = entry.held {
                let (key, result) = (entry.key, Err(OpError::Unknown(error.clone())));
                self.told.push_back(News::Replied { key, op, result });
            }
        }
    }

    /// All that is held back, the oldest first.
    fn drain(&mut self) -> Vec<Entry> {
        let rounds = std::mem::take(&mut self.rounds);
        let asked = rounds.into_iter().flat_map(|(_, entries)| entries);
        asked.chain(self.waiting.drain(..)).collect()
    }

    /// Whether anybody waits for a round.
    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When the first of those may go that were told to pause.
    pub(super) fn due(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|it| it.not_before).min()
    }

    /// Begins a round at each place that `place` names, with all that waits for it: however much that is, the next round
    /// there takes all that comes meanwhile, so nobody waits for more than two. `place` names no place that is under way;
    /// and with it the lock's slot.
    pub(super) fn begin(
        &mut self,
        now: Instant,
        mut place: impl FnMut(&str, &Hint) -> Option<(Arc<str>, u16)>,
    ) -> Vec<(Arc<str>, Round)> {
        let mut begun: Vec<(Arc<str>, Round, Vec<Entry>)> = Vec::new();
        for mut entry in std::mem::take(&mut self.waiting) {
            let may_go = entry.not_before.is_none_or(|due| due <= now);
            let to = may_go.then(|| place(&entry.key, &entry.hint)).flatten();
            let Some((address, slot)) = to else {
                self.waiting.push_back(entry);
                continue;
            };
            let index = begun.iter().position(|(other, ..)| *other == address);
            let index = index.unwrap_or_else(|| {
                self.number += 1;
                let round = Round {
                    number: self.number,
                    downs: self.downs,
                    locks: Vec::new(),
                    wait: Duration::ZERO,
                };
                begun.push((address, round, Vec::new()));
                begun.len() - 1
            });
            let (_, round, entries) = &mut begun[index];
            let until = *entry.until.get_or_insert(now + self.rule.within);
            round.wait = round.wait.max(until.duration_since(now));
            round.locks.push(Lock {
                key: entry.key.clone(),
                owner: entry.owner,
                slot,
                asking: entry.hint.asking,
                is_alone: entry.hint.is_alone,
            });
            entry.not_before = None;
            entries.push(entry);
        }
        let begun = begun.into_iter().map(|(address, round, entries)| {
            self.rounds.push((round.number, entries));
            (address, round)
        });
        begun.collect()
    }

    /// Whether the answer to a round is still waited for.
    pub(super) fn is_wanted(&self, number: u64) -> bool {
        self.rounds.iter().any(|(other, _)| *other == number)
    }

    fn end(&mut self, number: u64) -> Option<Vec<Entry>> {
        let index = self.rounds.iter().position(|(other, _)| *other == number)?;
        Some(self.rounds.swap_remove(index).1)
    }

    /// A round was answered.
    pub(super) fn seen(&mut self, now: Instant, number: u64, seen: &Seen, address: &Arc<str>) {
        let Some(round) = self.end(number) else {
            return;
        };
        debug_assert_eq!(round.len(), seen.said.len(), "an answer for each");
        let Replicas { least, within } = self.rule;
        let enough = seen.replicas >= u64::from(least);
        let mut again = Vec::new();
        for (mut entry, said) in round.into_iter().zip(&seen.said) {
            let address = address.clone();
            match said {
                Said::Ours if enough => self.confirm(entry),
                Said::Ours => {
                    let fault = Fault::TooFew {
                        address,
                        had: seen.replicas,
                        least,
                        within,
                    };
                    self.refuse(entry, &fault.into());
                }
                // Perhaps it was given back meanwhile; perhaps another server is asked than gave it.
                Said::Gone => self.refuse(entry, &Fault::Gone { address }.into()),
                Said::Elsewhere(hint, error) if entry.has_time(now, error) => {
                    entry.hint = hint.clone();
                    entry.hops += 1;
                    entry.not_before = (entry.hops > HOPS).then(|| now + HOP_PAUSE);
                    again.push(entry);
                }
                Said::Elsewhere(_, error) => self.refuse(entry, error),
            }
        }
        self.put_back(again);
    }

    /// A round could not be asked, or was not answered. What has time left goes with the next one.
    pub(super) fn failed(&mut self, now: Instant, number: u64, error: &StoreError) {
        let Some(round) = self.end(number) else {
            return;
        };
        let has_time = |entry: &Entry| entry.has_time(now, error);
        let (mut again, over): (Vec<_>, Vec<_>) = round.into_iter().partition(has_time);
        for entry in over {
            self.refuse(entry, error);
        }
        for entry in &mut again {
            entry.hint = Hint::default();
        }
        self.put_back(again);
    }

    /// Nobody knows whom to ask for what waits.
    #[cfg(feature = "cluster")]
    pub(super) fn adrift(&mut self, now: Instant, error: &StoreError) {
        for mut entry in std::mem::take(&mut self.waiting) {
            entry.until.get_or_insert(now + self.rule.within);
            if entry.has_time(now, error) {
                self.waiting.push_back(entry);
            } else {
                self.refuse(entry, error);
            }
        }
    }

    fn put_back(&mut self, entries: Vec<Entry>) {
        for entry in entries.into_iter().rev() {
            self.waiting.push_front(entry);
        }
    }

    /// Nobody will ask the replicas any more.
    pub(super) fn give_up(&mut self, error: &StoreError) {
        for entry in self.drain() {
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
