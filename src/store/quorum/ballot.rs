//! One open operation: the nodes' replies to it as votes, and the result as its answer. It knows neither nodes nor
//! time.

use std::sync::Arc;
use std::time::Duration;

use super::fault::Fault;
use crate::base::StoreError;
use crate::store::contract::{Occupant, Op, Outcome, SubmittedOp};

/// The number of nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quorum {
    pub(super) size: usize,
}

impl Quorum {
    /// The least number for which any two majorities share a node.
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
    /// Do we get the lock?
    Acquire,
    /// The same for an adoption. An absent node may have the lock that is adopted, so its absence is no refusal.
    Adopt,
    /// Do we still have the lock?
    Renew,
    /// Did we have the lock until the release?
    Release,
}

impl Question {
    /// The question that an op asks the nodes. `None`: not an op for a quorum.
    pub(super) fn of(op: &Op) -> Option<Self> {
        match op {
            Op::Attempt { .. } | Op::Enter { .. } | Op::Listen { .. } => Some(Self::Acquire),
            Op::Adopt { .. } => Some(Self::Adopt),
            Op::Renew { .. } | Op::Raise { .. } => Some(Self::Renew),
            Op::Release { .. } | Op::Keep { .. } | Op::Withdraw { .. } | Op::Unlisten { .. } => {
                Some(Self::Release)
            }
            Op::Yield { .. } | Op::Serve { .. } | Op::Verify { .. } | Op::Evict { .. } => None,
        }
    }
}

/// The reply of one node.
#[derive(Debug)]
pub(super) enum NodeReply {
    Said(Outcome),
    /// A release was not done yet; it will be sent again.
    Later,
    /// There is no answer, and none will come.
    Never(StoreError),
}

/// The vote of one node, or of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Vote {
    Yes,
    No,
    /// For one node: it gave no valid vote. For all nodes: too few gave a valid vote.
    Unknown,
}

#[derive(Debug)]
pub(super) struct Ballot {
    pub(super) id: u64,
    pub(super) submitted: SubmittedOp,
    pub(super) question: Question,
    /// How old a node must be for its vote to count.
    pub(super) quarantine: Option<Duration>,
    quorum: Quorum,
    /// `None`: the node's reply is outstanding.
    replies: Vec<Option<NodeReply>>,
    /// The highest epoch of the first majority.
    epoch: Option<u64>,
}

impl Ballot {
    pub(super) fn new(id: u64, submitted: SubmittedOp, question: Question, quorum: Quorum) -> Self {
        Self {
            id,
            submitted,
            question,
            quarantine: None,
            quorum,
            replies: (0..quorum.size).map(|_| None).collect(),
            epoch: None,
        }
    }

    pub(super) fn count(&mut self, node: usize, reply: NodeReply) {
        self.replies[node] = Some(match reply {
            // The lock was lost before the fence was raised.
            NodeReply::Said(Outcome::Lost) if self.question != Question::Renew => {
                NodeReply::Never(Fault::Forgot.into())
            }
            _ => reply,
        });
    }

    /// Once a majority has given us the lock: the epoch to which fences must be raised, and the nodes whose fence is
    /// lower or whose age is unknown. Each node is returned once.
    pub(super) fn raises(&mut self) -> Option<(u64, Vec<usize>)> {
        let won = self.replies.iter().filter_map(|reply| match reply {
            Some(NodeReply::Said(Outcome::Won { epoch })) => Some(*epoch),
            _ => None,
        });
        if self.epoch.is_none() && won.clone().count() >= self.quorum.majority() {
            self.epoch = won.max();
        }
        let to = self.epoch?;
        let mut nodes = Vec::new();
        for (node, reply) in self.replies.iter_mut().enumerate() {
            if let Some(NodeReply::Said(Outcome::Won { epoch })) = *reply
                && (epoch < to || self.quarantine.is_some())
            {
                *reply = None;
                nodes.push(node);
            }
        }
        (!nodes.is_empty()).then_some((to, nodes))
    }

    /// The vote in a node's reply, if it has come.
    fn vote(&self, reply: &NodeReply) -> Option<Vote> {
        match reply {
            NodeReply::Said(outcome) => match outcome {
                // This is a yes vote once the node's next epoch is certain to exceed ours.
                Outcome::Won { epoch } => {
                    let is_sure = |to: &u64| epoch >= to && self.quarantine.is_none();
                    self.epoch.filter(is_sure).map(|_| Vote::Yes)
                }
                Outcome::Renewed | Outcome::Raised { .. } | Outcome::Gone { held: true } => {
                    Some(Vote::Yes)
                }
                Outcome::Busy { .. }
                | Outcome::NotOld
                | Outcome::Lost
                | Outcome::Gone { held: false } => Some(Vote::No),
            },
            NodeReply::Later => None,
            NodeReply::Never(_) => Some(Vote::Unknown),
        }
    }

    /// The result, as soon as no other vote can change it: it does not wait for slow nodes.
    pub(super) fn result(&self) -> Option<Vote> {
        let (majority, spare) = (self.quorum.majority(), self.quorum.spare());
        let votes = self.replies.iter().flatten();
        let votes = votes.filter_map(|reply| self.vote(reply));
        let count = |which| votes.clone().filter(|vote| *vote == which).count();
        let (yes, no, absent) = (count(Vote::Yes), count(Vote::No), count(Vote::Unknown));
        let have_all_replied = self.replies.iter().all(Option::is_some);
        match self.question {
            _ if yes >= majority => Some(Vote::Yes),
            _ if no > spare => Some(Vote::No),
            Question::Acquire | Question::Adopt if absent > spare => Some(Vote::Unknown),
            Question::Acquire if no + absent > spare => Some(Vote::No),
            // The lock was ours until the release, unless a majority says no. A node that did not answer may have had
            // it.
            Question::Release if have_all_replied && yes + no >= majority => Some(Vote::Yes),
            // Some nodes will get the release later. Wait for them.
            Question::Release if absent <= spare => None,
            _ => have_all_replied.then_some(Vote::Unknown),
        }
    }

    /// The result as an outcome for the registry; `None` if too few nodes have a vote. `score` is the place of a
    /// subscription.
    pub(super) fn outcome(&self, score: Option<u64>) -> Option<Outcome> {
        match (self.question, self.result()?) {
            (_, Vote::Unknown) => None,
            (Question::Acquire | Question::Adopt, Vote::Yes) => {
                self.epoch.map(|epoch| Outcome::Won { epoch })
            }
            (Question::Acquire, Vote::No) => {
                let left = self.left();
                let entered = false;
                Some(Outcome::Busy {
                    left,
                    score,
                    entered,
                    holder: self.holder(),
                })
            }
            (Question::Adopt, Vote::No) => Some(Outcome::NotOld),
            (Question::Renew, Vote::Yes) => Some(match self.submitted.op {
                // A nested quorum has checked the ages of its nodes itself.
                Op::Raise { age, .. } => Outcome::Raised {
                    age: age.then_some(Duration::MAX),
                },
                _ => Outcome::Renewed,
            }),
            (Question::Renew, Vote::No) => Some(Outcome::Lost),
            (Question::Release, vote) => Some(Outcome::Gone {
                held: vote == Vote::Yes,
            }),
        }
    }

    /// The longest of the locks that exclude us; `None` if one has no end.
    fn left(&self) -> Option<Duration> {
        let mut lefts = self.replies.iter().filter_map(|reply| match reply {
            Some(NodeReply::Said(Outcome::Busy { left, .. })) => Some(*left),
            _ => None,
        });
        lefts.try_fold(Duration::ZERO, |longest, left| Some(longest.max(left?)))
    }

    /// The holder that the most nodes name.
    fn holder(&self) -> Option<Arc<Occupant>> {
        let named = || {
            self.replies.iter().filter_map(|reply| match reply {
                Some(NodeReply::Said(Outcome::Busy { holder, .. })) => holder.as_ref(),
                _ => None,
            })
        };
        let count = |owner: &str| named().filter(|it| *it.owner == *owner).count();
        // The first of those, and not the last as `max_by_key` would have it.
        let most = named().map(|holder| count(&holder.owner)).max()?;
        named().find(|it| count(&it.owner) == most).cloned()
    }

    /// Why nodes have no vote.
    pub(super) fn errors(&self) -> impl Iterator<Item = &StoreError> + Clone {
        self.replies.iter().filter_map(|reply| match reply {
            Some(NodeReply::Never(error)) => Some(error),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Mode;
    use crate::store::contract::Owner;

    const S: Duration = Duration::from_secs(1);

    fn quorum(size: usize) -> Quorum {
        Quorum { size }
    }

    fn ballot(size: usize, question: Question) -> Ballot {
        let (owner, ttl) = (Owner::exclusive(1), S);
        let submitted = SubmittedOp::unattended("k", Op::Attempt { owner, ttl });
        Ballot::new(1, submitted, question, quorum(size))
    }

    fn won(epoch: u64) -> NodeReply {
        NodeReply::Said(Outcome::Won { epoch })
    }

    fn raised() -> NodeReply {
        NodeReply::Said(Outcome::Raised { age: None })
    }

    fn busy(left: Option<Duration>) -> NodeReply {
        let score = None;
        NodeReply::Said(Outcome::Busy {
            left,
            score,
            entered: false,
            holder: None,
        })
    }

    fn absent() -> NodeReply {
        NodeReply::Never(StoreError::new("it is away"))
    }

    fn gone(held: bool) -> NodeReply {
        NodeReply::Said(Outcome::Gone { held })
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
                    let mut result = None;
                    let (mut given, mut counts) = (0, [0; 3]);
                    for node in (0..size).map(|i| (i + first) % size) {
                        match votes[node] {
                            0 => election.count(node, won(7)),
                            1 => election.count(node, busy(Some(S))),
                            _ => election.count(node, absent()),
                        }
                        counts[votes[node]] += 1;
                        given += 1;
                        assert_eq!(election.raises(), None, "all drew alike");
                        result = election.result();
                        if result.is_some() {
                            break;
                        }
                    }
                    let [won, against, absent] = counts;
                    let possible = won + size - given;
                    match result.expect("a full vote has a result") {
                        Vote::Yes => {
                            assert_eq!((won * 2 > size, election.epoch), (true, Some(7)));
                            seen[0] += 1;
                        }
                        Vote::No => {
                            assert!(possible * 2 <= size && against > 0);
                            assert_eq!(election.left(), Some(S));
                            seen[1] += 1;
                        }
                        Vote::Unknown => {
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
    fn a_win_is_told_when_a_majority_gives_no_lower_epoch() {
        let mut election = ballot(5, Question::Acquire);
        election.count(0, won(5));
        election.count(1, won(9));
        assert_eq!(election.raises(), None, "no majority yet");
        election.count(2, won(7));
        assert_eq!(election.raises(), Some((9, vec![0, 2])));
        assert_eq!(election.raises(), None, "each once");
        assert_eq!(election.result(), None);
        election.count(0, raised());
        assert_eq!(election.result(), None);
        // One that comes late is raised, too, and one that is higher needs it not.
        election.count(3, won(8));
        assert_eq!(election.raises(), Some((9, vec![3])));
        election.count(4, won(12));
        assert_eq!(election.raises(), None);
        assert_eq!(election.result(), Some(Vote::Yes));
        assert_eq!(election.epoch, Some(9));
    }

    #[test]
    fn a_node_that_cannot_be_raised_does_not_count() {
        let mut election = ballot(3, Question::Acquire);
        election.count(0, won(5));
        election.count(1, won(9));
        assert_eq!(election.raises(), Some((9, vec![0])));
        election.count(0, absent());
        assert_eq!(election.result(), None, "the third may still win");
        election.count(2, won(6));
        assert_eq!(election.raises(), Some((9, vec![2])));
        election.count(2, absent());
        assert_eq!(election.result(), Some(Vote::Unknown));
    }

    #[test]
    fn with_ages_every_vote_is_asked_for_its_own() {
        let mut election = ballot(1, Question::Acquire);
        election.quarantine = Some(S);
        election.count(0, won(5));
        assert_eq!(election.raises(), Some((5, vec![0])));
        assert_eq!(election.result(), None);
        election.count(0, raised());
        assert_eq!(election.result(), Some(Vote::Yes));
        assert_eq!(election.epoch, Some(5));
    }

    #[test]
    fn an_adoption_is_not_refused_while_an_absent_node_may_have_the_lease() {
        let mut adoption = ballot(3, Question::Adopt);
        adoption.count(0, absent());
        adoption.count(1, busy(None));
        assert_eq!(adoption.result(), None);
        adoption.count(2, won(5));
        assert_eq!(adoption.raises(), None);
        assert_eq!(adoption.result(), Some(Vote::Unknown), "not now");
        let mut adoption = ballot(3, Question::Adopt);
        adoption.count(0, busy(Some(S)));
        adoption.count(1, busy(None));
        assert_eq!(adoption.result(), Some(Vote::No));
        assert_eq!(adoption.left(), None);
    }

    /// G8. Some nodes may have given their vote to others who get no majority.
    #[test]
    fn g8_a_busy_answer_names_whom_most_nodes_name() {
        let by = |owner: Option<&str>| {
            NodeReply::Said(Outcome::Busy {
                left: Some(S),
                score: None,
                entered: false,
                holder: owner.map(|owner| {
                    Arc::new(Occupant {
                        owner: owner.into(),
                        mode: Mode::Exclusive,
                        others: 0,
                    })
                }),
            })
        };
        for (replies, expected) in [
            (
                [by(Some("x:1")), by(Some("y:1")), by(Some("y:1"))],
                Some("y:1"),
            ),
            ([by(Some("x:1")), by(Some("y:1")), absent()], Some("x:1")),
            ([by(None), by(Some("y:1")), by(None)], Some("y:1")),
            ([by(None), by(None), absent()], None),
        ] {
            let mut election = ballot(3, Question::Acquire);
            for (node, reply) in replies.into_iter().enumerate() {
                election.count(node, reply);
            }
            let Some(Outcome::Busy { holder, .. }) = election.outcome(None) else {
                panic!("{election:?}")
            };
            assert_eq!(holder.as_deref().map(|it| &*it.owner), expected);
        }
    }

    #[test]
    fn a_lease_is_lost_by_a_majority_and_by_nothing_less() {
        let mut roll = ballot(4, Question::Renew);
        roll.count(0, NodeReply::Said(Outcome::Renewed));
        roll.count(1, NodeReply::Said(Outcome::Renewed));
        roll.count(2, NodeReply::Said(Outcome::Lost));
        assert_eq!(roll.result(), None);
        roll.count(3, absent());
        assert_eq!(roll.result(), Some(Vote::Unknown));
        roll.count(3, NodeReply::Said(Outcome::Lost));
        assert_eq!(roll.result(), Some(Vote::No), "two of four are no majority");
        roll.count(3, NodeReply::Said(Outcome::Renewed));
        assert_eq!(roll.result(), Some(Vote::Yes));
    }

    #[test]
    fn a_release_is_told_when_a_majority_has_confirmed_it() {
        let mut back = ballot(3, Question::Release);
        back.count(0, gone(true));
        assert_eq!(back.result(), None);
        back.count(1, gone(false));
        assert_eq!(back.result(), None, "the third knows");
        back.count(2, NodeReply::Later);
        assert_eq!(back.result(), Some(Vote::Yes));
        back.count(2, gone(false));
        assert_eq!(back.result(), Some(Vote::No));

        let mut back = ballot(3, Question::Release);
        back.count(0, gone(true));
        back.count(1, NodeReply::Later);
        back.count(2, NodeReply::Later);
        assert_eq!(back.result(), None, "they will be told");
        back.count(1, absent());
        back.count(2, absent());
        assert_eq!(back.result(), Some(Vote::Unknown));
    }
}
