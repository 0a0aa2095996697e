//! Counts the votes of the nodes on one operation. It knows neither nodes nor time.

use std::time::Duration;

use crate::StoreError;

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

/// The vote of one node.
#[derive(Debug)]
pub(super) enum Vote {
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
    /// It could not be asked yet; it will be.
    Later,
    /// It has no vote, and will have none.
    Absent(StoreError),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Yes,
    No,
    /// Too few nodes have a vote.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Tally {
    quorum: Quorum,
    question: Question,
    /// The highest epoch of the first majority.
    epoch: Option<u64>,
    votes: Vec<Vote>,
}

impl Tally {
    pub(super) fn new(quorum: Quorum, question: Question) -> Self {
        let votes = std::iter::repeat_with(|| Vote::Asked);
        Self {
            quorum,
            question,
            epoch: None,
            votes: votes.take(quorum.size).collect(),
        }
    }

    pub(super) fn question(&self) -> Question {
        self.question
    }

    pub(super) fn epoch(&self) -> Option<u64> {
        self.epoch
    }

    pub(super) fn vote(&mut self, node: usize, vote: Vote) {
        self.votes[node] = vote;
    }

    /// Once a majority has given us the lock: the epoch that fences are to be raised to, and the nodes whose
    /// fences are behind, or of `all` nodes. Each node is named once.
    pub(super) fn raises(&mut self, all: bool) -> Option<(u64, Vec<usize>)> {
        let ours = |vote: &Vote| matches!(vote, Vote::Won(_) | Vote::Raising | Vote::Yes);
        if self.count(ours) < self.quorum.majority() {
            return None;
        }
        let drawn = self.votes.iter().filter_map(|vote| match vote {
            Vote::Won(epoch) => Some(*epoch),
            _ => None,
        });
        let epoch = self.epoch.or(drawn.max())?;
        self.epoch = Some(epoch);
        let mut raised = Vec::new();
        for (node, vote) in self.votes.iter_mut().enumerate() {
            if let Vote::Won(drawn) = *vote {
                let is_behind = all || drawn < epoch;
                *vote = if is_behind { Vote::Raising } else { Vote::Yes };
                raised.extend(is_behind.then_some(node));
            }
        }
        (!raised.is_empty()).then_some((epoch, raised))
    }

    /// The verdict, as soon as no vote can change it: slow nodes are not waited for.
    pub(super) fn verdict(&self) -> Option<Verdict> {
        let (majority, spare) = (self.quorum.majority(), self.quorum.spare());
        let yes = self.count(|vote| matches!(vote, Vote::Yes));
        let no = self.count(|vote| matches!(vote, Vote::No(_)));
        let absent = self.count(|vote| matches!(vote, Vote::Absent(_)));
        let all_voted = self.count(|vote| matches!(vote, Vote::Asked | Vote::Raising)) == 0;
        match self.question {
            _ if yes >= majority => Some(Verdict::Yes),
            _ if no > spare => Some(Verdict::No),
            Question::Acquire | Question::Adopt if absent > spare => Some(Verdict::Unknown),
            Question::Acquire if no + absent > spare => Some(Verdict::No),
            // Ours to the end unless a majority lacked it: a node that cannot tell may have had it.
            Question::Release if all_voted && yes + no >= majority => Some(Verdict::Yes),
            // The others will be asked again.
            Question::Release if absent <= spare => None,
            _ => all_voted.then_some(Verdict::Unknown),
        }
    }

    /// How long the longest lasts of the locks in our way; `None` if one has no end.
    pub(super) fn left(&self) -> Option<Duration> {
        let mut lefts = self.votes.iter().filter_map(|vote| match vote {
            Vote::No(left) => Some(*left),
            _ => None,
        });
        lefts.try_fold(Duration::ZERO, |longest, left| Some(longest.max(left?)))
    }

    /// Why nodes have no vote.
    pub(super) fn errors(&self) -> Vec<StoreError> {
        let errors = self.votes.iter().filter_map(|vote| match vote {
            Vote::Absent(error) => Some(error.clone()),
            _ => None,
        });
        errors.collect()
    }

    fn count(&self, which: fn(&Vote) -> bool) -> usize {
        self.votes.iter().filter(|vote| which(vote)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn quorum(size: usize) -> Quorum {
        Quorum { size }
    }

    fn tally(size: usize, question: Question) -> Tally {
        Tally::new(quorum(size), question)
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
                    let mut election = tally(size, Question::Acquire);
                    let mut verdict = None;
                    let (mut given, mut counts) = (0, [0; 3]);
                    for node in (0..size).map(|i| (i + first) % size) {
                        match votes[node] {
                            0 => election.vote(node, Vote::Won(7)),
                            1 => election.vote(node, Vote::No(Some(S))),
                            _ => election.vote(node, absent()),
                        }
                        counts[votes[node]] += 1;
                        given += 1;
                        assert_eq!(election.raises(false), None, "all drew alike");
                        verdict = election.verdict();
                        if verdict.is_some() {
                            break;
                        }
                    }
                    let [won, against, absent] = counts;
                    let possible = won + size - given;
                    match verdict.expect("a full vote has a verdict") {
                        Verdict::Yes => {
                            assert_eq!((won * 2 > size, election.epoch()), (true, Some(7)));
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
        let mut election = tally(5, Question::Acquire);
        election.vote(0, Vote::Won(5));
        election.vote(1, Vote::Won(9));
        assert_eq!(election.raises(false), None, "no majority yet");
        election.vote(2, Vote::Won(7));
        assert_eq!(election.raises(false), Some((9, vec![0, 2])));
        assert_eq!(election.raises(false), None, "each once");
        assert_eq!(election.verdict(), None);
        election.vote(0, Vote::Yes);
        assert_eq!(election.verdict(), None);
        // One that comes late is raised, too, and one that is higher needs it not.
        election.vote(3, Vote::Won(8));
        assert_eq!(election.raises(false), Some((9, vec![3])));
        election.vote(4, Vote::Won(12));
        assert_eq!(election.raises(false), None);
        assert_eq!(election.verdict(), Some(Verdict::Yes));
        assert_eq!(election.epoch(), Some(9));
    }

    #[test]
    fn a_node_that_cannot_be_raised_does_not_count() {
        let mut election = tally(3, Question::Acquire);
        election.vote(0, Vote::Won(5));
        election.vote(1, Vote::Won(9));
        assert_eq!(election.raises(false), Some((9, vec![0])));
        election.vote(0, absent());
        assert_eq!(election.verdict(), None, "the third may still win");
        election.vote(2, Vote::Won(6));
        assert_eq!(election.raises(false), Some((9, vec![2])));
        election.vote(2, absent());
        assert_eq!(election.verdict(), Some(Verdict::Unknown));
    }

    #[test]
    fn with_ages_every_vote_is_asked_for_its_own() {
        let mut election = tally(1, Question::Acquire);
        election.vote(0, Vote::Won(5));
        assert_eq!(election.raises(true), Some((5, vec![0])));
        assert_eq!(election.verdict(), None);
        election.vote(0, Vote::Yes);
        assert_eq!(election.verdict(), Some(Verdict::Yes));
        assert_eq!(election.epoch(), Some(5));
    }

    #[test]
    fn what_an_absent_node_may_have_is_not_given_up_for_good() {
        let mut adoption = tally(3, Question::Adopt);
        adoption.vote(0, absent());
        adoption.vote(1, Vote::No(None));
        assert_eq!(adoption.verdict(), None);
        adoption.vote(2, Vote::Won(5));
        assert_eq!(adoption.raises(false), None);
        assert_eq!(adoption.verdict(), Some(Verdict::Unknown), "not now");
        let mut adoption = tally(3, Question::Adopt);
        adoption.vote(0, Vote::No(Some(S)));
        adoption.vote(1, Vote::No(None));
        assert_eq!(adoption.verdict(), Some(Verdict::No));
        assert_eq!(adoption.left(), None);
    }

    #[test]
    fn a_lease_is_lost_by_a_majority_and_by_nothing_less() {
        let mut roll = tally(4, Question::Renew);
        roll.vote(0, Vote::Yes);
        roll.vote(1, Vote::Yes);
        roll.vote(2, Vote::No(None));
        assert_eq!(roll.verdict(), None);
        roll.vote(3, absent());
        assert_eq!(roll.verdict(), Some(Verdict::Unknown));
        roll.vote(3, Vote::No(None));
        assert_eq!(
            roll.verdict(),
            Some(Verdict::No),
            "two of four are no majority"
        );
        roll.vote(3, Vote::Yes);
        assert_eq!(roll.verdict(), Some(Verdict::Yes));
    }

    #[test]
    fn a_release_is_told_when_a_majority_has_confirmed_it() {
        let mut back = tally(3, Question::Release);
        back.vote(0, Vote::Yes);
        assert_eq!(back.verdict(), None);
        back.vote(1, Vote::No(None));
        assert_eq!(back.verdict(), None, "the third knows");
        back.vote(2, Vote::Later);
        assert_eq!(back.verdict(), Some(Verdict::Yes));
        back.vote(2, Vote::No(None));
        assert_eq!(back.verdict(), Some(Verdict::No));

        let mut back = tally(3, Question::Release);
        back.vote(0, Vote::Yes);
        back.vote(1, Vote::Later);
        back.vote(2, Vote::Later);
        assert_eq!(back.verdict(), None, "they will be told");
        back.vote(1, absent());
        back.vote(2, absent());
        assert_eq!(back.verdict(), Some(Verdict::Unknown));
    }
}
