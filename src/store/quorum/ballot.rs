//! One operation that the registry waits for: the nodes' replies to it as votes, and the verdict as its
//! answer. It knows neither nodes nor time.

use std::time::Duration;

use super::fault::Fault;
use crate::StoreError;
use crate::store::contract::{Op, Outcome, ServerTime, SubmittedOp};

/// How many nodes there are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quorum {
    pub(super) size: usize,
}

impl Quorum {
    /// So many that any two majorities share a node.
    pub(super) fn majority(self) -> usize {
        self.size / 2 + 1
    }

    /// How many nodes may be missing.
    pub(super) fn spare(self) -> usize {
        self.size - self.majority()
    }
}

/// What the nodes vote on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// Whether we get the lock.
    Acquire,
    /// The same, but the lock may be ours to adopt on a node that is absent: then that is no refusal.
    Adopt,
    /// Whether we still have the lock.
    Renew,
    /// Whether we had the lock until we released it.
    Release,
}

impl Question {
    /// What an op asks the nodes; `None`: no quorum does it.
    pub(super) fn of(op: &Op) -> Option<Self> {
        match op {
            Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } => Some(Self::Acquire),
            Op::Adopt { .. } => Some(Self::Adopt),
            Op::Renew { .. } | Op::Raise { .. } => Some(Self::Renew),
            Op::Release { .. } | Op::Withdraw { .. } | Op::Unlisten { .. } => Some(Self::Release),
            Op::Yield { .. } => None,
        }
    }
}

/// What one node says to a ballot.
#[derive(Debug)]
pub(super) enum Reply {
    Said(Outcome),
    /// A release was not done yet; it will be sent again.
    Later,
    /// There is no answer, and none will come.
    Never(StoreError),
}

/// The vote of one node.
#[derive(Debug)]
enum Vote {
    /// The node has not answered yet.
    Asked,
    /// It gave us the lock with this epoch; its fence may be behind.
    Won(u64),
    /// It gave us the lock, and its fence is being raised.
    Raising,
    /// For us. After a win, its next epoch is higher than ours.
    Yes,
    /// Against us. After an attempt, how long the other's lock lasts.
    No(Option<Duration>),
    /// It will vote, but is not waited for.
    Later,
    /// It has no vote, and will have none.
    Absent(StoreError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Yes,
    No,
    /// Too few nodes have a vote.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Ballot {
    pub(super) id: u64,
    pub(super) submitted: SubmittedOp,
    pub(super) question: Question,
    /// How old a node must be for its vote to count.
    pub(super) quarantine: Option<Duration>,
    /// The latest time that a node named.
    pub(super) at: ServerTime,
    quorum: Quorum,
    votes: Vec<Vote>,
    /// The highest epoch of the first majority.
    epoch: Option<u64>,
}

impl Ballot {
    pub(super) fn new(
        id: u64,
        submitted: SubmittedOp,
        question: Question,
        quarantine: Option<Duration>,
        quorum: Quorum,
    ) -> Self {
        let votes = std::iter::repeat_with(|| Vote::Asked);
        Self {
            id,
            submitted,
            question,
            quarantine,
            at: 0,
            quorum,
            votes: votes.take(quorum.size).collect(),
            epoch: None,
        }
    }

    /// Counts a reply.
    pub(super) fn count(&mut self, node: usize, reply: Reply) {
        self.votes[node] = match reply {
            Reply::Said(outcome) => match outcome {
                Outcome::Won { epoch } => Vote::Won(epoch),
                Outcome::Renewed | Outcome::Raised { .. } => Vote::Yes,
                Outcome::Gone { held: true } => Vote::Yes,
                Outcome::Busy { left, .. } => Vote::No(left),
                Outcome::NotOld | Outcome::Gone { held: false } => Vote::No(None),
                Outcome::Lost if self.question == Question::Renew => Vote::No(None),
                // The node had lost the lock before its fence was raised.
                Outcome::Lost => Vote::Absent(Fault::Forgot.into()),
            },
            Reply::Later => Vote::Later,
            Reply::Never(error) => Vote::Absent(error),
        };
    }

    /// Once a majority has given us the lock: the epoch that fences are to be raised to, and the nodes whose
    /// fences are behind, or which are to tell their age. Each node is named once.
    pub(super) fn raises(&mut self) -> Option<(u64, Vec<usize>)> {
        let is_ours = |vote: &Vote| matches!(vote, Vote::Won(_) | Vote::Raising | Vote::Yes);
        if self.votes(is_ours) < self.quorum.majority() {
            return None;
        }
        let drawn = self.votes.iter().filter_map(|vote| match vote {
            Vote::Won(epoch) => Some(*epoch),
            _ => None,
        });
        let epoch = self.epoch.or(drawn.max())?;
        self.epoch = Some(epoch);
        let mut nodes = Vec::new();
        for (node, vote) in self.votes.iter_mut().enumerate() {
            match *vote {
                Vote::Won(drawn) if drawn < epoch || self.quarantine.is_some() => {
                    *vote = Vote::Raising;
                    nodes.push(node);
                }
                Vote::Won(_) => *vote = Vote::Yes,
                _ => {}
            }
        }
        (!nodes.is_empty()).then_some((epoch, nodes))
    }

    pub(super) fn is_decided(&self) -> bool {
        self.verdict().is_some()
    }

    /// The verdict, as soon as no vote can change it: slow nodes are not waited for.
    fn verdict(&self) -> Option<Verdict> {
        let (majority, spare) = (self.quorum.majority(), self.quorum.spare());
        let yes = self.votes(|vote| matches!(vote, Vote::Yes));
        let no = self.votes(|vote| matches!(vote, Vote::No(_)));
        let absent = self.votes(|vote| matches!(vote, Vote::Absent(_)));
        let all_voted = self.votes(|vote| matches!(vote, Vote::Asked | Vote::Raising)) == 0;
        match self.question {
            _ if yes >= majority => Some(Verdict::Yes),
            _ if no > spare => Some(Verdict::No),
            Question::Acquire | Question::Adopt if absent > spare => Some(Verdict::Unknown),
            Question::Acquire if no + absent > spare => Some(Verdict::No),
            // It was ours to the end unless a majority lacked it: a node that cannot tell may have had it.
            Question::Release if all_voted && yes + no >= majority => Some(Verdict::Yes),
            // Those that were not asked yet will be.
            Question::Release if absent <= spare => None,
            _ => all_voted.then_some(Verdict::Unknown),
        }
    }

    /// The verdict as the registry is to hear it; `None` if too few nodes have a vote.
    pub(super) fn outcome(&self) -> Option<Outcome> {
        match (self.question, self.verdict()?) {
            (_, Verdict::Unknown) => None,
            (Question::Acquire | Question::Adopt, Verdict::Yes) => {
                self.epoch.map(|epoch| Outcome::Won { epoch })
            }
            (Question::Acquire, Verdict::No) => {
                let (left, score) = (self.left(), None);
                Some(Outcome::Busy { left, score })
            }
            (Question::Adopt, Verdict::No) => Some(Outcome::NotOld),
            (Question::Renew, Verdict::Yes) => Some(match self.submitted.op {
                // In a quorum of quorums each has asked its nodes for their age already.
                Op::Raise { .. } => Outcome::Raised { age: None },
                _ => Outcome::Renewed,
            }),
            (Question::Renew, Verdict::No) => Some(Outcome::Lost),
            (Question::Release, Verdict::Yes) => Some(Outcome::Gone { held: true }),
            (Question::Release, Verdict::No) => Some(Outcome::Gone { held: false }),
        }
    }

    /// How long the longest lasts of the locks in our way; `None` if one has no end.
    fn left(&self) -> Option<Duration> {
        let mut lefts = self.votes.iter().filter_map(|vote| match vote {
            Vote::No(left) => Some(*left),
            _ => None,
        });
        lefts.try_fold(Duration::ZERO, |longest, left| Some(longest.max(left?)))
    }

    /// Why nodes have no vote.
    pub(super) fn errors(&self) -> impl Iterator<Item = &StoreError> + Clone {
        self.votes.iter().filter_map(|vote| match vote {
            Vote::Absent(error) => Some(error),
            _ => None,
        })
    }

    /// How many votes are such.
    fn votes(&self, is_such: fn(&Vote) -> bool) -> usize {
        self.votes.iter().filter(|vote| is_such(vote)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::contract::Owner;

    const S: Duration = Duration::from_secs(1);

    fn quorum(size: usize) -> Quorum {
        Quorum { size }
    }

    fn ballot(size: usize, question: Question) -> Ballot {
        let (owner, ttl) = (Owner(1), S);
        let submitted = SubmittedOp::unattended("k", Op::Attempt { owner, ttl });
        Ballot::new(1, submitted, question, None, quorum(size))
    }

    fn absent() -> Vote {
        Vote::Absent(StoreError::new("it is away"))
    }

    #[test]
    fn two_majorities_share_a_node() {
        for (size, majority) in [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (7, 4)] {
            let quorum = quorum(size);
            assert_eq!(quorum.majority(), majority);
            assert!(2 * majority > size);
            assert_eq!(quorum.spare() + majority, size);
        }
    }

    /// For every number of nodes up to five and every way in which they may vote: won exactly by a
    /// majority, and told as soon as it is certain, in whatever order the votes come.
    #[test]
    fn every_vote_of_up_to_five_nodes() {
        let mut seen = [0_u32; 3];
        for size in 1..=5_usize {
            for way in 0..3_usize.pow(size as u32) {
                for first in 0..size {
                    let votes: Vec<_> =
                        (0..size).map(|i| way / 3_usize.pow(i as u32) % 3).collect();
                    let mut election = ballot(size, Question::Acquire);
                    let mut verdict = None;
                    let (mut given, mut counts) = (0, [0; 3]);
                    for node in (0..size).map(|i| (i + first) % size) {
                        match votes[node] {
                            0 => election.votes[node] = Vote::Won(7),
                            1 => election.votes[node] = Vote::No(Some(S)),
                            _ => election.votes[node] = absent(),
                        }
                        counts[votes[node]] += 1;
                        given += 1;
                        assert_eq!(election.raises(), None, "all drew alike");
                        verdict = election.verdict();
                        if verdict.is_some() {
                            break;
                        }
                    }
                    let [won, against, absent] = counts;
                    let possible = won + size - given;
                    match verdict.expect("a full vote has a verdict") {
                        Verdict::Yes => {
                            assert_eq!((won * 2 > size, election.epoch), (true, Some(7)));
                            seen[0] += 1;
                        }
                        Verdict::No => {
                            assert!(possible * 2 <= size && against > 0);
                            assert_eq!(election.left(), Some(S));
                            seen[1] += 1;
                        }
                        Verdict::Unknown => {
                            assert!((size - absent) * 2 <= size, "{votes:?}");
                            seen[2] += 1;
                        }
                    }
                }
            }
        }
        assert!(seen.iter().all(|seen| *seen > 100), "{seen:?}");
    }

    #[test]
    fn a_win_is_told_when_a_majority_cannot_epoch_below_it() {
        let mut election = ballot(5, Question::Acquire);
        election.votes[0] = Vote::Won(5);
        election.votes[1] = Vote::Won(9);
        assert_eq!(election.raises(), None, "no majority yet");
        election.votes[2] = Vote::Won(7);
        assert_eq!(election.raises(), Some((9, vec![0, 2])));
        assert_eq!(election.raises(), None, "each once");
        assert_eq!(election.verdict(), None);
        election.votes[0] = Vote::Yes;
        assert_eq!(election.verdict(), None);
        // One that comes late is raised, too, and one that is higher needs it not.
        election.votes[3] = Vote::Won(8);
        assert_eq!(election.raises(), Some((9, vec![3])));
        election.votes[4] = Vote::Won(12);
        assert_eq!(election.raises(), None);
        assert_eq!(election.verdict(), Some(Verdict::Yes));
        assert_eq!(election.epoch, Some(9));
    }

    #[test]
    fn a_node_that_cannot_be_raised_does_not_count() {
        let mut election = ballot(3, Question::Acquire);
        election.votes[0] = Vote::Won(5);
        election.votes[1] = Vote::Won(9);
        assert_eq!(election.raises(), Some((9, vec![0])));
        election.votes[0] = absent();
        assert_eq!(election.verdict(), None, "the third may still win");
        election.votes[2] = Vote::Won(6);
        assert_eq!(election.raises(), Some((9, vec![2])));
        election.votes[2] = absent();
        assert_eq!(election.verdict(), Some(Verdict::Unknown));
    }

    #[test]
    fn with_ages_every_vote_is_asked_for_its_own() {
        let mut election = ballot(1, Question::Acquire);
        election.quarantine = Some(S);
        election.votes[0] = Vote::Won(5);
        assert_eq!(election.raises(), Some((5, vec![0])));
        assert_eq!(election.verdict(), None);
        election.votes[0] = Vote::Yes;
        assert_eq!(election.verdict(), Some(Verdict::Yes));
        assert_eq!(election.epoch, Some(5));
    }

    #[test]
    fn what_an_absent_node_may_have_is_not_given_up_for_good() {
        let mut adoption = ballot(3, Question::Adopt);
        adoption.votes[0] = absent();
        adoption.votes[1] = Vote::No(None);
        assert_eq!(adoption.verdict(), None);
        adoption.votes[2] = Vote::Won(5);
        assert_eq!(adoption.raises(), None);
        assert_eq!(adoption.verdict(), Some(Verdict::Unknown), "not now");
        let mut adoption = ballot(3, Question::Adopt);
        adoption.votes[0] = Vote::No(Some(S));
        adoption.votes[1] = Vote::No(None);
        assert_eq!(adoption.verdict(), Some(Verdict::No));
        assert_eq!(adoption.left(), None);
    }

    #[test]
    fn a_lease_is_lost_by_a_majority_and_by_nothing_less() {
        let mut roll = ballot(4, Question::Renew);
        roll.votes[0] = Vote::Yes;
        roll.votes[1] = Vote::Yes;
        roll.votes[2] = Vote::No(None);
        assert_eq!(roll.verdict(), None);
        roll.votes[3] = absent();
        assert_eq!(roll.verdict(), Some(Verdict::Unknown));
        roll.votes[3] = Vote::No(None);
        assert_eq!(
            roll.verdict(),
            Some(Verdict::No),
            "two of four are no majority"
        );
        roll.votes[3] = Vote::Yes;
        assert_eq!(roll.verdict(), Some(Verdict::Yes));
    }

    #[test]
    fn a_release_is_told_when_a_majority_has_confirmed_it() {
        let mut back = ballot(3, Question::Release);
        back.votes[0] = Vote::Yes;
        assert_eq!(back.verdict(), None);
        back.votes[1] = Vote::No(None);
        assert_eq!(back.verdict(), None, "the third knows");
        back.votes[2] = Vote::Later;
        assert_eq!(back.verdict(), Some(Verdict::Yes));
        back.votes[2] = Vote::No(None);
        assert_eq!(back.verdict(), Some(Verdict::No));

        let mut back = ballot(3, Question::Release);
        back.votes[0] = Vote::Yes;
        back.votes[1] = Vote::Later;
        back.votes[2] = Vote::Later;
        assert_eq!(back.verdict(), None, "they will be told");
        back.votes[1] = absent();
        back.votes[2] = absent();
        assert_eq!(back.verdict(), Some(Verdict::Unknown));
    }
}
