//! Counts votes: no node, no time; answers in, a verdict out.

use std::time::Duration;

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

/// Who gets the lock: the count of an attempt or an adoption.
#[derive(Debug)]
pub(super) struct AcquireTally {
    quorum: Quorum,
    /// So old must each node be for its vote to count.
    quarantine: Option<Duration>,
    /// Whether only a majority against it is a refusal, however many nodes are absent.
    strict: bool,
    /// The highest epoch of the majority that was reached first.
    epoch: Option<u64>,
    votes: Vec<Vote>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Vote {
    Asked,
    /// For us, with this epoch; its fence may be behind.
    Won(u64),
    /// For us, and its fence is being raised.
    Raising,
    /// For us, and whoever is next on this node draws higher.
    Sure,
    Against(Option<Duration>),
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AcquireVerdict {
    Won {
        epoch: u64,
    },
    /// `left`: how long the longest lasts of those that stand against it.
    Refused {
        left: Option<Duration>,
    },
    /// Too few nodes could be asked.
    Failed,
}

impl AcquireTally {
    pub(super) fn new(quorum: Quorum, quarantine: Option<Duration>, strict: bool) -> Self {
        Self {
            quorum,
            quarantine,
            strict,
            epoch: None,
            votes: vec![Vote::Asked; quorum.size],
        }
    }

    pub(super) fn quarantine(&self) -> Option<Duration> {
        self.quarantine
    }

    pub(super) fn won(&mut self, node: usize, epoch: u64) {
        self.votes[node] = Vote::Won(epoch);
    }

    pub(super) fn against(&mut self, node: usize, left: Option<Duration>) {
        self.votes[node] = Vote::Against(left);
    }

    pub(super) fn raised(&mut self, node: usize) {
        self.votes[node] = Vote::Sure;
    }

    pub(super) fn absent(&mut self, node: usize) {
        self.votes[node] = Vote::Absent;
    }

    /// Once a majority is for us: the fences that are behind, or whose nodes are to tell their age,
    /// and what they are to be raised to. Each is named once.
    pub(super) fn raises(&mut self) -> Option<(u64, Vec<usize>)> {
        let ours = |vote: &&Vote| matches!(vote, Vote::Won(_) | Vote::Raising | Vote::Sure);
        if self.votes.iter().filter(ours).count() < self.quorum.majority() {
            return None;
        }
        let epochs = self.votes.iter().filter_map(|vote| match vote {
            Vote::Won(epoch) => Some(*epoch),
            _ => None,
        });
        let epoch = self.epoch.or(epochs.max())?;
        self.epoch = Some(epoch);
        let mut behind = Vec::new();
        for (node, vote) in self.votes.iter_mut().enumerate() {
            if let Vote::Won(drawn) = *vote {
                if drawn < epoch || self.quarantine.is_some() {
                    *vote = Vote::Raising;
                    behind.push(node);
                } else {
                    *vote = Vote::Sure;
                }
            }
        }
        (!behind.is_empty()).then_some((epoch, behind))
    }

    /// As soon as it cannot change any more; slow nodes are not waited for.
    pub(super) fn verdict(&self) -> Option<AcquireVerdict> {
        let count = |which: fn(&Vote) -> bool| self.votes.iter().filter(|vote| which(vote)).count();
        let sure = count(|vote| matches!(vote, Vote::Sure));
        let against = count(|vote| matches!(vote, Vote::Against(_)));
        let absent = count(|vote| matches!(vote, Vote::Absent));
        let spare = self.quorum.spare();
        if sure >= self.quorum.majority() {
            let epoch = self
                .epoch
                .expect("nobody is sure before the epoch is known");
            return Some(AcquireVerdict::Won { epoch });
        }
        if absent > spare {
            return Some(AcquireVerdict::Failed);
        }
        if against > spare || (against + absent > spare && !self.strict) {
            let mut lefts = self.votes.iter().filter_map(|vote| match vote {
                Vote::Against(left) => Some(*left),
                _ => None,
            });
            let longest = lefts.try_fold(Duration::ZERO, |longest, left| Some(longest.max(left?)));
            return Some(AcquireVerdict::Refused { left: longest });
        }
        let open = count(|vote| matches!(vote, Vote::Asked | Vote::Raising));
        (open == 0).then_some(AcquireVerdict::Failed)
    }
}

/// Whether a majority still has it: the count of a renewal.
#[derive(Debug)]
pub(super) struct RenewTally {
    quorum: Quorum,
    answers: Vec<Option<Answer>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Has,
    Lacks,
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RenewVerdict {
    /// A majority has it.
    Has,
    /// A majority lacks it.
    Lacks,
    /// Neither can be told.
    Unknown,
}

impl RenewTally {
    pub(super) fn new(quorum: Quorum) -> Self {
        Self {
            quorum,
            answers: vec![None; quorum.size],
        }
    }

    pub(super) fn has(&mut self, node: usize) {
        self.answers[node] = Some(Answer::Has);
    }

    pub(super) fn lacks(&mut self, node: usize) {
        self.answers[node] = Some(Answer::Lacks);
    }

    pub(super) fn absent(&mut self, node: usize) {
        self.answers[node] = Some(Answer::Absent);
    }

    pub(super) fn verdict(&self) -> Option<RenewVerdict> {
        let count = |which| self.answers.iter().filter(|it| **it == which).count();
        if count(Some(Answer::Has)) >= self.quorum.majority() {
            Some(RenewVerdict::Has)
        } else if count(Some(Answer::Lacks)) > self.quorum.spare() {
            Some(RenewVerdict::Lacks)
        } else {
            (count(None) == 0).then_some(RenewVerdict::Unknown)
        }
    }
}

/// What became of what is given back: the count of a release.
#[derive(Debug)]
pub(super) struct ReleaseTally {
    quorum: Quorum,
    nodes: Vec<Returned>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Returned {
    Asked,
    Had,
    Lacked,
    /// Could not be told yet; it will be.
    Later,
    /// Will not be told.
    Never,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReleaseVerdict {
    Gone { held: bool },
    Failed,
}

impl ReleaseTally {
    pub(super) fn new(quorum: Quorum) -> Self {
        Self {
            quorum,
            nodes: vec![Returned::Asked; quorum.size],
        }
    }

    pub(super) fn gone(&mut self, node: usize, held: bool) {
        self.nodes[node] = if held {
            Returned::Had
        } else {
            Returned::Lacked
        };
    }

    pub(super) fn later(&mut self, node: usize) {
        self.nodes[node] = Returned::Later;
    }

    pub(super) fn never(&mut self, node: usize) {
        self.nodes[node] = Returned::Never;
    }

    /// Once a majority has confirmed it. It was ours to the end unless a majority lacked it: a node
    /// that cannot tell may have had it.
    pub(super) fn verdict(&self) -> Option<ReleaseVerdict> {
        let count = |which| self.nodes.iter().filter(|it| **it == which).count();
        let (had, lacked) = (count(Returned::Had), count(Returned::Lacked));
        let majority = self.quorum.majority();
        if had >= majority {
            Some(ReleaseVerdict::Gone { held: true })
        } else if lacked > self.quorum.spare() {
            Some(ReleaseVerdict::Gone { held: false })
        } else if count(Returned::Asked) > 0 {
            None
        } else if had + lacked >= majority {
            Some(ReleaseVerdict::Gone { held: true })
        } else {
            let never = count(Returned::Never);
            (never > self.quorum.spare()).then_some(ReleaseVerdict::Failed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn quorum(size: usize) -> Quorum {
        Quorum { size }
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
                    let mut election = AcquireTally::new(quorum(size), None, false);
                    let mut verdict = None;
                    let (mut given, mut counts) = (0, [0; 3]);
                    for node in (0..size).map(|i| (i + first) % size) {
                        match votes[node] {
                            0 => election.won(node, 7),
                            1 => election.against(node, Some(S)),
                            _ => election.absent(node),
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
                        AcquireVerdict::Won { epoch } => {
                            assert_eq!((won * 2 > size, epoch), (true, 7));
                            seen[0] += 1;
                        }
                        AcquireVerdict::Refused { left } => {
                            assert!(possible * 2 <= size && against > 0);
                            assert_eq!(left, Some(S));
                            seen[1] += 1;
                        }
                        AcquireVerdict::Failed => {
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
        let mut election = AcquireTally::new(quorum(5), None, false);
        election.won(0, 5);
        election.won(1, 9);
        assert_eq!(election.raises(), None, "no majority yet");
        election.won(2, 7);
        assert_eq!(election.raises(), Some((9, vec![0, 2])));
        assert_eq!(election.raises(), None, "each once");
        assert_eq!(election.verdict(), None);
        election.raised(0);
        assert_eq!(election.verdict(), None);
        // One that comes late is raised, too, and one that is higher needs it not.
        election.won(3, 8);
        assert_eq!(election.raises(), Some((9, vec![3])));
        election.won(4, 12);
        assert_eq!(election.raises(), None);
        assert_eq!(election.verdict(), Some(AcquireVerdict::Won { epoch: 9 }));
    }

    #[test]
    fn a_node_that_cannot_be_raised_does_not_count() {
        let mut election = AcquireTally::new(quorum(3), None, false);
        election.won(0, 5);
        election.won(1, 9);
        assert_eq!(election.raises(), Some((9, vec![0])));
        election.absent(0);
        assert_eq!(election.verdict(), None, "the third may still win");
        election.won(2, 6);
        assert_eq!(election.raises(), Some((9, vec![2])));
        election.absent(2);
        assert_eq!(election.verdict(), Some(AcquireVerdict::Failed));
    }

    #[test]
    fn with_ages_every_vote_is_asked_for_its_own() {
        let mut election = AcquireTally::new(quorum(1), Some(S), false);
        election.won(0, 5);
        assert_eq!(election.raises(), Some((5, vec![0])));
        assert_eq!(election.verdict(), None);
        election.raised(0);
        assert_eq!(election.verdict(), Some(AcquireVerdict::Won { epoch: 5 }));
    }

    #[test]
    fn what_an_absent_node_may_have_is_not_given_up_for_good() {
        let mut adoption = AcquireTally::new(quorum(3), None, true);
        adoption.absent(0);
        adoption.against(1, None);
        assert_eq!(adoption.verdict(), None);
        adoption.won(2, 5);
        assert_eq!(adoption.raises(), None);
        assert_eq!(adoption.verdict(), Some(AcquireVerdict::Failed), "not now");
        let mut adoption = AcquireTally::new(quorum(3), None, true);
        adoption.against(0, Some(S));
        adoption.against(1, None);
        let refused = AcquireVerdict::Refused { left: None };
        assert_eq!(adoption.verdict(), Some(refused));
    }

    #[test]
    fn a_lease_is_lost_by_a_majority_and_by_nothing_less() {
        let mut roll = RenewTally::new(quorum(4));
        roll.has(0);
        roll.has(1);
        roll.lacks(2);
        assert_eq!(roll.verdict(), None);
        roll.absent(3);
        assert_eq!(roll.verdict(), Some(RenewVerdict::Unknown));
        roll.lacks(3);
        assert_eq!(
            roll.verdict(),
            Some(RenewVerdict::Lacks),
            "two of four are no majority"
        );
        roll.has(3);
        assert_eq!(roll.verdict(), Some(RenewVerdict::Has));
    }

    #[test]
    fn a_release_is_told_when_a_majority_has_confirmed_it() {
        let mut back = ReleaseTally::new(quorum(3));
        back.gone(0, true);
        assert_eq!(back.verdict(), None);
        back.gone(1, false);
        assert_eq!(back.verdict(), None, "the third knows");
        back.later(2);
        assert_eq!(back.verdict(), Some(ReleaseVerdict::Gone { held: true }));
        back.gone(2, false);
        assert_eq!(back.verdict(), Some(ReleaseVerdict::Gone { held: false }));

        let mut back = ReleaseTally::new(quorum(3));
        back.gone(0, true);
        back.later(1);
        back.later(2);
        assert_eq!(back.verdict(), None, "they will be told");
        back.never(1);
        back.never(2);
        assert_eq!(back.verdict(), Some(ReleaseVerdict::Failed));
    }
}
