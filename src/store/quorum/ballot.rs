//! One operation that the registry waits for, and the nodes' replies to it.

use std::time::Duration;

use super::fault::Fault;
use super::tally::{Question, Tally, Verdict, Vote};
use crate::StoreError;
use crate::store::contract::{Answer, Op, Outcome, ServerTime, SubmittedOp};

/// What one node says to one ballot.
#[derive(Debug)]
pub(super) enum Reply {
    Said(Answer),
    /// A release was not done yet; it will be sent again.
    Later,
    /// There is no answer, and none will come.
    Never(StoreError),
}

#[derive(Debug)]
pub(super) struct Ballot {
    pub(super) id: u64,
    pub(super) submitted: SubmittedOp,
    /// The latest time that a node named.
    pub(super) at: ServerTime,
    /// How old a node must be for its vote to count.
    pub(super) quarantine: Option<Duration>,
    pub(super) tally: Tally,
}

/// What the nodes vote on. `None`: no quorum does this.
pub(super) fn question(op: &Op) -> Option<Question> {
    match op {
        Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } => Some(Question::Acquire),
        Op::Adopt { .. } => Some(Question::Adopt),
        Op::Renew { .. } | Op::Raise { .. } => Some(Question::Renew),
        Op::Release { .. } | Op::Withdraw { .. } | Op::Unlisten { .. } => Some(Question::Release),
        Op::Yield { .. } => None,
    }
}

impl Ballot {
    pub(super) fn op(&self) -> &Op {
        &self.submitted.op
    }

    pub(super) fn count(&mut self, node: usize, reply: Reply) {
        let vote = match reply {
            Reply::Said(answer) => {
                self.at = self.at.max(answer.at);
                self.vote(answer.outcome)
            }
            Reply::Later => Vote::Later,
            Reply::Never(error) => Vote::Absent(error),
        };
        self.tally.vote(node, vote);
    }

    fn vote(&self, outcome: Outcome) -> Vote {
        match outcome {
            Outcome::Won { epoch } => Vote::Won(epoch),
            Outcome::Renewed | Outcome::Raised { .. } | Outcome::Gone { held: true } => Vote::Yes,
            Outcome::Busy { left, .. } => Vote::No(left),
            Outcome::NotOld | Outcome::Gone { held: false } => Vote::No(None),
            Outcome::Lost if self.tally.question() == Question::Renew => Vote::No(None),
            // The node had lost the lock before its fence was raised.
            Outcome::Lost => Vote::Absent(Fault::Forgot.into()),
        }
    }

    /// The verdict as the registry is to hear it; `None` if too few nodes have a vote.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        let (left, score) = (self.tally.left(), None);
        Some(match (self.tally.question(), self.tally.verdict()?) {
            (_, Verdict::Unknown) => return None,
            (Question::Acquire | Question::Adopt, Verdict::Yes) => {
                let epoch = self.tally.epoch()?;
                Outcome::Won { epoch }
            }
            (Question::Acquire, Verdict::No) => Outcome::Busy { left, score },
            (Question::Adopt, Verdict::No) => Outcome::NotOld,
            (Question::Renew, Verdict::Yes) => match self.op() {
                // To raise: a quorum has no age.
                Op::Raise { .. } => Outcome::Raised { age: None },
                _ => Outcome::Renewed,
            },
            (Question::Renew, Verdict::No) => Outcome::Lost,
            (Question::Release, Verdict::Yes) => Outcome::Gone { held: true },
            (Question::Release, Verdict::No) => Outcome::Gone { held: false },
        })
    }
}
