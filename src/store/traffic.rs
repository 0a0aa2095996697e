//! Which jobs go out in which call, and which calls are under way: group commit.
//!
//! Pure, so that the simulator runs this very code.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// Jobs of one lane may share a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Renew,
    Batch,
    Inspect,
}

impl Lane {
    /// In the order in which they are served: leases must survive whatever else is wanted.
    pub(crate) const ALL: [Self; 3] = [Self::Renew, Self::Batch, Self::Inspect];
}

/// What is to be done about one key.
pub(crate) trait Cargo {
    type Key: Clone + Eq + Hash;

    fn key(&self) -> &Self::Key;

    fn lane(&self) -> Lane;

    /// Whether only cargo of one group may share a call.
    const GROUPED: bool = false;

    /// What it may share a call with.
    fn group(&self) -> u16 {
        0
    }

    /// Whether it must not share a call.
    fn is_alone(&self) -> bool {
        false
    }
}

/// How much goes out at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// How many jobs share a call at most. A longer script would hold up everybody else's.
    pub(crate) jobs: usize,
    /// How many calls of the batch lane are under way at most. Within that a lone job goes out at
    /// once; what comes while the window is full shares the next call.
    pub(crate) calls: usize,
}

impl Limits {
    fn window(self, lane: Lane) -> usize {
        match lane {
            Lane::Renew => 2,
            Lane::Batch => self.calls,
            Lane::Inspect => 1,
        }
    }
}

impl Default for Limits {
    /// Thousands of pairs a second at 8, 64 and 256 tasks with 2, 3 and 4 calls, medians of two runs
    /// on 2 cores: 25 68 72, 22 65 90, 24 74 87 (102 at best). To hold a further call back until it
    /// carries as much as is under way gained nothing: 23 68 98.
    fn default() -> Self {
        // With answers told in bursts (`store/redis/serve.rs`) 8 calls did better than 4 in most
        // runs at 64 tasks. Runs differed by more than the settings did: nothing finer is known.
        Self { jobs: 64, calls: 8 }
    }
}

/// A call under way.
#[derive(Debug)]
pub(crate) struct Flight<J, M> {
    number: u64,
    lane: Lane,
    pub(crate) jobs: Vec<J>,
    sent_at: M,
}

/// Keeps the order: the jobs of one key (renewals and looks aside) go one at a time, in the order
/// in which they came, also when one has to go again (O2).
#[derive(Debug)]
pub(crate) struct Traffic<J: Cargo, M> {
    limits: Limits,
    waiting: [VecDeque<J>; Lane::ALL.len()],
    /// The first is the oldest. So few that looking through them is the quickest.
    flying: VecDeque<Flight<J, M>>,
    flying_of: [usize; Lane::ALL.len()],
    /// The keys of the jobs under way in the batch lane.
    busy: HashSet<J::Key>,
}

impl<J: Cargo, M: Copy> Traffic<J, M> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            waiting: Default::default(),
            flying: VecDeque::new(),
            flying_of: Default::default(),
            busy: HashSet::new(),
        }
    }

    pub(crate) fn add(&mut self, jobs: impl IntoIterator<Item = J>) {
        for job in jobs {
            self.waiting[job.lane() as usize].push_back(job);
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.iter().any(|jobs| !jobs.is_empty())
    }

    /// The jobs of the next call that may go, with the first of the lanes that has any.
    pub(crate) fn next_call(&mut self) -> Option<(Lane, Vec<J>)> {
        Lane::ALL.into_iter().find_map(|lane| {
            // Nearly always a lane is empty: looked at four times a call, to gather nothing cost more
            // than to gather.
            if self.waiting[lane as usize].is_empty()
                || self.flying_of[lane as usize] == self.limits.window(lane)
            {
                return None;
            }
            let jobs = self.gather(lane);
            (!jobs.is_empty()).then_some((lane, jobs))
        })
    }

    fn gather(&mut self, lane: Lane) -> Vec<J> {
        if J::GROUPED {
            return self.gather_group(lane);
        }
        let most = self.limits.jobs;
        let waiting = &mut self.waiting[lane as usize];
        if lane != Lane::Batch {
            let alone = waiting.iter().take(most).position(J::is_alone);
            let count = alone.map_or(most, |index| index.max(1));
            return waiting.drain(..count.min(waiting.len())).collect();
        }
        let mut jobs = Vec::with_capacity(waiting.len().min(most));
        let mut held_back = Vec::new();
        while jobs.len() < most
            && let Some(job) = waiting.pop_front()
        {
            if job.is_alone() && !jobs.is_empty() {
                waiting.push_front(job);
                break;
            }
            if self.busy.insert(job.key().clone()) {
                let is_alone = job.is_alone();
                jobs.push(job);
                if is_alone {
                    break;
                }
            } else {
                held_back.push(job);
            }
        }
        for job in held_back.into_iter().rev() {
            waiting.push_front(job);
        }
        jobs
    }

    /// The same of one group, that of the first job that may go. Looks no further than a few calls'
    /// worth of jobs, so that many groups cost no more than few.
    fn gather_group(&mut self, lane: Lane) -> Vec<J> {
        let most = self.limits.jobs;
        let waiting = &mut self.waiting[lane as usize];
        let mut group = None;
        let mut jobs = Vec::new();
        let mut held_back = Vec::new();
        while jobs.len() < most
            && (group.is_none() || held_back.len() < 2 * most)
            && let Some(job) = waiting.pop_front()
        {
            let fits = group.is_none_or(|group| group == job.group());
            if fits && job.is_alone() && !jobs.is_empty() {
                waiting.push_front(job);
                break;
            }
            if fits && (lane != Lane::Batch || self.busy.insert(job.key().clone())) {
                let is_alone = job.is_alone();
                group = Some(job.group());
                jobs.push(job);
                if is_alone {
                    break;
                }
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
    pub(crate) fn take_off(&mut self, number: u64, lane: Lane, jobs: Vec<J>, now: M) {
        self.flying_of[lane as usize] += 1;
        self.flying.push_back(Flight {
            number,
            lane,
            jobs,
            sent_at: now,
        });
    }

    /// The call's reply is here.
    pub(crate) fn land(&mut self, number: u64) -> Option<Flight<J, M>> {
        let index = self
            .flying
            .iter()
            .position(|flight| flight.number == number)?;
        let flight = self.flying.remove(index)?;
        self.flying_of[flight.lane as usize] -= 1;
        if flight.lane == Lane::Batch {
            for job in &flight.jobs {
                self.busy.remove(job.key());
            }
        }
        Some(flight)
    }

    /// Sends a job again, before whatever else waits for its key.
    pub(crate) fn add_again(&mut self, job: J) {
        self.waiting[job.lane() as usize].push_front(job);
    }

    pub(crate) fn oldest(&self) -> Option<M> {
        self.flying.front().map(|flight| flight.sent_at)
    }

    /// How many jobs of a lane are under way.
    pub(crate) fn under_way(&self, lane: Lane) -> usize {
        let flights = self.flying.iter().filter(|flight| flight.lane == lane);
        flights.map(|flight| flight.jobs.len()).sum()
    }

    /// Whether nothing is under way.
    #[cfg(feature = "cluster")]
    pub(crate) fn is_landed(&self) -> bool {
        self.flying.is_empty()
    }

    /// No reply will come any more: all jobs under way, oldest first.
    pub(crate) fn crash(&mut self) -> impl Iterator<Item = J> + use<J, M> {
        self.flying_of = Default::default();
        self.busy.clear();
        std::mem::take(&mut self.flying)
            .into_iter()
            .flat_map(|flight| flight.jobs)
    }

    /// All jobs that were not sent.
    pub(crate) fn cancel(&mut self) -> impl Iterator<Item = J> + use<J, M> {
        std::mem::take(&mut self.waiting).into_iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of jobs that go alone.
    const ALONE: u64 = 99;

    /// Its key, lane and number.
    #[derive(Debug, PartialEq)]
    struct Job(String, Lane, u64);

    impl Cargo for Job {
        type Key = String;

        fn key(&self) -> &String {
            &self.0
        }

        fn lane(&self) -> Lane {
            self.1
        }

        fn is_alone(&self) -> bool {
            self.2 == ALONE
        }
    }

    fn release(key: &str, number: u64) -> Job {
        Job(key.into(), Lane::Batch, number)
    }

    fn renew(key: &str) -> Job {
        Job(key.into(), Lane::Renew, 0)
    }

    fn traffic() -> Traffic<Job, u64> {
        Traffic::new(Limits { jobs: 64, calls: 4 })
    }

    fn numbers(jobs: &[Job]) -> Vec<u64> {
        jobs.iter().map(|job| job.2).collect()
    }

    #[test]
    fn o2_jobs_of_one_key_go_one_after_the_other() {
        let mut traffic = traffic();
        traffic.add([
            release("a", 1),
            release("a", 2),
            release("b", 3),
            release("a", 4),
        ]);
        let (lane, jobs) = traffic.next_call().unwrap();
        assert_eq!(numbers(&jobs), [1, 3], "one job a key");
        traffic.take_off(1, lane, jobs, 0);
        assert!(traffic.next_call().is_none(), "the key is busy");

        // The job has to go again: it stays in front of the key's others.
        let again = traffic.land(1).unwrap().jobs.swap_remove(0);
        traffic.add_again(again);
        assert_eq!(numbers(&traffic.next_call().unwrap().1), [1]);
    }

    #[test]
    fn what_must_not_share_a_call_goes_alone_and_in_order() {
        let mut traffic = traffic();
        for lane in [Lane::Renew, Lane::Batch] {
            let jobs = [("a", 1), ("b", ALONE), ("c", ALONE), ("d", 4), ("e", 5)];
            traffic.add(jobs.map(|(key, number)| Job(key.into(), lane, number)));
            for expected in [&[1][..], &[ALONE], &[ALONE], &[4, 5]] {
                let (_, jobs) = traffic.next_call().unwrap();
                assert_eq!(numbers(&jobs), expected, "{lane:?}");
            }
            assert!(!traffic.is_waiting());
        }
    }

    #[test]
    fn renewals_go_first_and_whatever_their_keys_wait_for() {
        let mut traffic = traffic();
        traffic.add([release("a", 1), renew("a"), renew("b")]);
        let (lane, jobs) = traffic.next_call().unwrap();
        assert_eq!((lane, jobs.len()), (Lane::Renew, 2));
        traffic.take_off(1, lane, jobs, 0);
        assert_eq!(traffic.next_call().unwrap().0, Lane::Batch);
    }

    #[test]
    fn what_comes_while_the_window_is_full_shares_a_call() {
        let mut traffic = traffic();
        for number in 0..4 {
            traffic.add([release(&format!("key {number}"), number)]);
            let (lane, jobs) = traffic.next_call().expect("a lone job goes out at once");
            traffic.take_off(number, lane, jobs, 0);
        }
        traffic.add((10..110).map(|number| release(&format!("key {number}"), number)));
        assert!(traffic.next_call().is_none());
        traffic.land(2).unwrap();
        assert_eq!(traffic.next_call().unwrap().1.len(), 64);
    }

    /// A job that shares calls with those of its group alone.
    #[derive(Debug, PartialEq)]
    struct Grouped(Job, u16);

    impl Cargo for Grouped {
        type Key = String;

        const GROUPED: bool = true;

        fn key(&self) -> &String {
            self.0.key()
        }

        fn lane(&self) -> Lane {
            self.0.lane()
        }

        fn group(&self) -> u16 {
            self.1
        }
    }

    #[test]
    fn o2_a_call_holds_one_group_and_each_key_keeps_its_order() {
        let mut traffic = Traffic::<Grouped, u64>::new(Limits { jobs: 3, calls: 4 });
        let job = |key: &str, number, group| Grouped(release(key, number), group);
        traffic.add([
            job("a", 1, 1),
            job("b", 2, 2),
            job("a", 3, 1),
            job("c", 4, 1),
            job("b", 5, 2),
            job("d", 6, 1),
            job("e", 7, 1),
        ]);
        traffic.add([
            Grouped(renew("a"), 1),
            Grouped(renew("b"), 2),
            Grouped(renew("c"), 1),
        ]);
        let mut calls = Vec::new();
        while let Some((lane, jobs)) = traffic.next_call() {
            calls.push(jobs.iter().map(|job| job.0.2).collect::<Vec<_>>());
            traffic.take_off(calls.len() as u64, lane, jobs, 0);
        }
        let renewals = [vec![0, 0], vec![0]];
        let batches = [vec![1, 4, 6], vec![2], vec![7]];
        assert_eq!(calls, [&renewals[..], &batches].concat());
        traffic.land(3).unwrap();
        traffic.land(4).unwrap();
        let (_, jobs) = traffic.next_call().unwrap();
        assert_eq!(jobs[0].0.2, 3);
        traffic.take_off(6, Lane::Batch, jobs, 0);
        assert_eq!(traffic.next_call().unwrap().1[0].0.2, 5);
    }

    #[test]
    fn a_crash_frees_the_keys_and_gives_the_jobs_back_in_order() {
        let mut traffic = traffic();
        for number in 1..=2 {
            traffic.add([release(&format!("key {number}"), number)]);
            let (lane, jobs) = traffic.next_call().unwrap();
            traffic.take_off(number, lane, jobs, 0);
        }
        traffic.add([release("key 1", 3)]);
        assert_eq!(numbers(&traffic.crash().collect::<Vec<_>>()), [1, 2]);
        assert_eq!(traffic.oldest(), None);
        assert_eq!(numbers(&traffic.next_call().unwrap().1), [3]);
    }
}
