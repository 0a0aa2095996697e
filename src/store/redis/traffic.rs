//! Which jobs go out in which call, and which calls are under way.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use super::call::{Job, Lane};

/// How many jobs share a call at most. A longer script would hold up everybody else's.
const JOBS_A_CALL: usize = 64;

/// How many calls of a lane are under way at most. Within that a lone job goes out at once; what
/// comes while the window is full shares the next call.
fn window(lane: Lane) -> usize {
    match lane {
        Lane::Renew => 2,
        Lane::Batch => 4,
        Lane::Inspect => 1,
    }
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Flight {
    number: u64,
    lane: Lane,
    pub(super) jobs: Vec<Job>,
    sent_at: Instant,
}

/// Keeps the order: the jobs of one key (renewals and looks aside) go one at a time, in the order
/// in which they came, also when one has to go again (O2).
#[derive(Debug, Default)]
pub(super) struct Traffic {
    waiting: [VecDeque<Job>; Lane::ALL.len()],
    /// The first is the oldest. So few that looking through them is the quickest.
    flying: VecDeque<Flight>,
    flying_of: [usize; Lane::ALL.len()],
    /// The keys of the jobs under way in the batch lane.
    busy: HashSet<Arc<str>>,
}

impl Traffic {
    pub(super) fn add(&mut self, jobs: impl IntoIterator<Item = Job>) {
        for job in jobs {
            self.waiting[Lane::of(&job.wish) as usize].push_back(job);
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.iter().any(|jobs| !jobs.is_empty())
    }

    /// The jobs of the next call that may go, with the first of the lanes that has any.
    pub(super) fn next_call(&mut self) -> Option<(Lane, Vec<Job>)> {
        Lane::ALL.into_iter().find_map(|lane| {
            if self.flying_of[lane as usize] == window(lane) {
                return None;
            }
            let jobs = self.gather(lane);
            (!jobs.is_empty()).then_some((lane, jobs))
        })
    }

    fn gather(&mut self, lane: Lane) -> Vec<Job> {
        let waiting = &mut self.waiting[lane as usize];
        if lane != Lane::Batch {
            let count = waiting.len().min(JOBS_A_CALL);
            return waiting.drain(..count).collect();
        }
        let mut jobs = Vec::with_capacity(waiting.len().min(JOBS_A_CALL));
        let mut held_back = Vec::new();
        while jobs.len() < JOBS_A_CALL
            && let Some(job) = waiting.pop_front()
        {
            if self.busy.insert(job.key.clone()) {
                jobs.push(job);
            } else {
                held_back.push(job);
            }
        }
        for job in held_back.into_iter().rev() {
            waiting.push_front(job);
        }
        jobs
    }

    /// The call is on its way.
    pub(super) fn take_off(&mut self, number: u64, lane: Lane, jobs: Vec<Job>, now: Instant) {
        self.flying_of[lane as usize] += 1;
        self.flying.push_back(Flight {
            number,
            lane,
            jobs,
            sent_at: now,
        });
    }

    /// The call's reply is here.
    pub(super) fn land(&mut self, number: u64) -> Option<Flight> {
        let index = self
            .flying
            .iter()
            .position(|flight| flight.number == number)?;
        let flight = self.flying.remove(index)?;
        self.flying_of[flight.lane as usize] -= 1;
        if flight.lane == Lane::Batch {
            for job in &flight.jobs {
                self.busy.remove(&job.key);
            }
        }
        Some(flight)
    }

    /// Sends a job again, before whatever else waits for its key.
    pub(super) fn add_again(&mut self, job: Job) {
        self.waiting[Lane::of(&job.wish) as usize].push_front(job);
    }

    pub(super) fn oldest(&self) -> Option<Instant> {
        self.flying.front().map(|flight| flight.sent_at)
    }

    /// No reply will come any more: all jobs under way, oldest first.
    pub(super) fn crash(&mut self) -> impl Iterator<Item = Job> + use<> {
        self.flying_of = Default::default();
        self.busy.clear();
        std::mem::take(&mut self.flying)
            .into_iter()
            .flat_map(|flight| flight.jobs)
    }

    /// All jobs that were not sent.
    pub(super) fn cancel(&mut self) -> impl Iterator<Item = Job> + use<> {
        std::mem::take(&mut self.waiting).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::contract::{Op, Owner};
    use crate::store::redis::call::Wish;
    use std::time::Duration;

    fn release(key: &str, owner: u64) -> Job {
        let op = Op::Release {
            owner: Owner(owner),
        };
        Job {
            key: key.into(),
            wish: Wish::Op {
                op,
                was_stale: false,
            },
        }
    }

    fn renew(key: &str) -> Job {
        let op = Op::Renew {
            owner: Owner(1),
            ttl: Duration::from_secs(1),
        };
        Job {
            key: key.into(),
            wish: Wish::Op {
                op,
                was_stale: false,
            },
        }
    }

    fn owners(jobs: &[Job]) -> Vec<u64> {
        let owner = |job: &Job| match &job.wish {
            Wish::Op {
                op: Op::Release { owner },
                ..
            } => owner.0,
            other => panic!("{other:?}"),
        };
        jobs.iter().map(owner).collect()
    }

    #[test]
    fn o2_jobs_of_one_key_go_one_after_the_other() {
        let mut traffic = Traffic::default();
        traffic.add([
            release("a", 1),
            release("a", 2),
            release("b", 3),
            release("a", 4),
        ]);
        let (lane, jobs) = traffic.next_call().unwrap();
        assert_eq!(owners(&jobs), [1, 3], "one job a key");
        traffic.take_off(1, lane, jobs, Instant::now());
        assert!(traffic.next_call().is_none(), "the key is busy");

        // The job has to go again: it stays in front of the key's others.
        let again = traffic.land(1).unwrap().jobs.swap_remove(0);
        traffic.add_again(again);
        assert_eq!(owners(&traffic.next_call().unwrap().1), [1]);
    }

    #[test]
    fn renewals_go_first_and_whatever_their_keys_wait_for() {
        let mut traffic = Traffic::default();
        traffic.add([release("a", 1), renew("a"), renew("b")]);
        let (lane, jobs) = traffic.next_call().unwrap();
        assert_eq!((lane, jobs.len()), (Lane::Renew, 2));
        traffic.take_off(1, lane, jobs, Instant::now());
        assert_eq!(traffic.next_call().unwrap().0, Lane::Batch);
    }

    #[test]
    fn what_comes_while_the_window_is_full_shares_a_call() {
        let mut traffic = Traffic::default();
        for number in 0..4 {
            traffic.add([release(&format!("key {number}"), number)]);
            let (lane, jobs) = traffic.next_call().expect("a lone job goes out at once");
            traffic.take_off(number, lane, jobs, Instant::now());
        }
        traffic.add((10..110).map(|number| release(&format!("key {number}"), number)));
        assert!(traffic.next_call().is_none());
        traffic.land(2).unwrap();
        assert_eq!(traffic.next_call().unwrap().1.len(), JOBS_A_CALL);
    }

    #[test]
    fn a_crash_frees_the_keys_and_gives_the_jobs_back_in_order() {
        let mut traffic = Traffic::default();
        for number in 1..=2 {
            traffic.add([release(&format!("key {number}"), number)]);
            let (lane, jobs) = traffic.next_call().unwrap();
            traffic.take_off(number, lane, jobs, Instant::now());
        }
        traffic.add([release("key 1", 3)]);
        assert_eq!(owners(&traffic.crash().collect::<Vec<_>>()), [1, 2]);
        assert_eq!(traffic.oldest(), None);
        assert_eq!(owners(&traffic.next_call().unwrap().1), [3]);
    }
}
