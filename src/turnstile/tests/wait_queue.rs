//! The wait queue against a naive one.

use std::sync::Arc;

use proptest::prelude::*;

use super::harness::ms;
use crate::base::OnFinish;
use crate::base::clock::{FOREVER, Moment};
use crate::turnstile::machine::Turnstile;
use crate::turnstile::time::Point;
use crate::turnstile::wait_queue::WaitQueue;
use crate::turnstile::{Waiter, WaiterId};

/// A key that is held is a turnstile and little else, and there may be a hundred thousand of them at 1 KiB each for
/// everything: whoever makes it larger makes each of them larger.
#[test]
fn a_turnstile_is_small() {
    let size = size_of::<Turnstile<Arc<()>>>();
    assert!(size <= 368, "{size} bytes");
}

#[derive(Clone, Debug)]
enum Step {
    Push {
        until: Option<u64>,
        answer_by: u64,
        once: bool,
    },
    MarkAnswered,
    MarkBusy,
    Remove(prop::sample::Index),
    PopFirst,
    PopEnded(u64),
    TakeOnce(prop::sample::Index),
}

fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let until = proptest::option::weighted(0.8, 0_u64..1000);
    let once = proptest::bool::weighted(0.2);
    let index = any::<prop::sample::Index>();
    let step = prop_oneof![
        8 => (until, 0_u64..1000, once).prop_map(|(until, answer_by, once)| Step::Push {
            until,
            answer_by,
            once,
        }),
        1 => Just(Step::MarkAnswered),
        1 => Just(Step::MarkBusy),
        5 => index.clone().prop_map(Step::Remove),
        1 => Just(Step::PopFirst),
        1 => (0_u64..1000).prop_map(Step::PopEnded),
        1 => index.prop_map(Step::TakeOnce),
    ];
    proptest::collection::vec(step, 1..most)
}

fn waiter(
    caller: &Arc<u64>,
    asks_once: bool,
    until: Moment,
    answer_by: Moment,
) -> Waiter<Arc<u64>> {
    Waiter {
        caller: caller.clone(),
        ttl: ms(1000),
        renewals: 0,
        adopts: None,
        on_finish: OnFinish::Release,
        is_conditional: false,
        asks_once,
        hears_of_others: false,
        until,
        answer_by,
    }
}

struct Naive {
    caller: Arc<u64>,
    once: bool,
    until: Moment,
    answer_by: Moment,
    answered: bool,
    busy: bool,
}

impl Naive {
    fn end(&self) -> Moment {
        match self.answered {
            true => self.until,
            false => self.until.max(self.answer_by),
        }
    }
}

#[derive(Default)]
struct Both {
    line: Option<WaitQueue<Arc<u64>>>,
    naive: Vec<Naive>,
    gone: Vec<Arc<u64>>,
    last: u64,
}

impl Both {
    fn line(&mut self) -> &mut WaitQueue<Arc<u64>> {
        self.line.get_or_insert_with(WaitQueue::new)
    }

    fn push(&mut self, until: Option<u64>, answer_by: u64, once: bool) {
        // Other keys draw from the same sequence.
        self.last += 1 + self.last % 3;
        let caller = Arc::new(self.last);
        let until = until.map_or(FOREVER, ms);
        let answer_by = ms(answer_by);
        let waiter = waiter(&caller, once, until, answer_by);
        let id = WaiterId(self.last);
        self.line().push(id, waiter);
        self.naive.push(Naive {
            caller,
            once,
            until,
            answer_by,
            answered: false,
            busy: false,
        });
    }

    /// Whoever the naive line says must be who the queue took out.
    fn took(&mut self, taken: Option<Waiter<Arc<u64>>>, at: Option<usize>) {
        let naive = at.map(|at| self.naive.remove(at).caller);
        assert_eq!(taken.map(|taken| taken.caller), naive);
        self.gone.extend(naive);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Push {
                until,
                answer_by,
                once,
            } => self.push(until, answer_by, once),
            Step::MarkAnswered => {
                self.line().mark_answered();
                self.naive.iter_mut().for_each(|one| one.answered = true);
            }
            Step::MarkBusy => {
                self.line().mark_busy();
                for one in &mut self.naive {
                    (one.answered, one.busy) = (true, true);
                }
            }
            Step::Remove(index) => {
                // Perhaps one who has gone, or never was.
                let id = index.index(self.last as usize + 2) as u64;
                let removed = self.line().remove(WaiterId(id));
                let at = self.naive.iter().position(|one| *one.caller == id);
                self.took(removed, at);
            }
            Step::PopFirst => {
                let first = self.line().pop_first();
                let at = (!self.naive.is_empty()).then_some(0);
                if let Some((id, waiter)) = &first {
                    assert_eq!(id.0, *waiter.caller);
                }
                self.took(first.map(|(_, waiter)| waiter), at);
            }
            Step::PopEnded(now) => {
                let ended = self.line().pop_ended(Point::from(ms(now)));
                let over = self.naive.iter().filter(|one| one.end() <= ms(now));
                let first = over.map(|one| (one.end(), *one.caller)).min();
                let at =
                    first.and_then(|(_, id)| self.naive.iter().position(|one| *one.caller == id));
                let busy = at.map(|at| self.naive[at].busy);
                assert_eq!(ended.as_ref().map(|(_, busy)| *busy), busy);
                self.took(ended.map(|(waiter, _)| waiter), at);
            }
            Step::TakeOnce(index) => {
                let newest_waiter = index.index(self.last as usize + 2) as u64;
                for taken in self.line().take_once(WaiterId(newest_waiter)) {
                    let meant = |one: &Naive| one.once && *one.caller <= newest_waiter;
                    let at = self.naive.iter().position(meant);
                    self.took(Some(taken), at);
                }
                let left = self
                    .naive
                    .iter()
                    .any(|one| one.once && *one.caller <= newest_waiter);
                assert!(!left);
            }
        }
        self.check();
    }

    fn check(&mut self) {
        let Self {
            line, naive, gone, ..
        } = self;
        let line = line.get_or_insert_with(WaitQueue::new);
        assert_eq!(line.len(), naive.len());
        assert_eq!(line.is_empty(), naive.is_empty());
        assert_eq!(line.has_patient(), naive.iter().any(|one| !one.once));
        let last = naive.last().map_or(0, |one| *one.caller);
        assert_eq!(line.last_id(), WaiterId(last));
        let first = line.first().map(|first| first.caller.clone());
        assert_eq!(first.as_ref(), naive.first().map(|one| &one.caller));
        let end = naive.iter().map(Naive::end).min();
        let end = end.filter(|end| *end != FOREVER).map(Point::from);
        assert_eq!(line.next_end(), end);
        let there = naive.iter().map(|one| &one.caller);
        assert!(line.iter().map(|(_, waiter)| &waiter.caller).eq(there));
        // Nothing of one who has gone is kept alive.
        assert!(gone.iter().all(|caller| Arc::strong_count(caller) == 1));
        gone.clear();
    }
}

proptest! {
    #[test]
    fn a_queue_is_who_arrived_and_has_not_left(steps in steps(400)) {
        let mut both = Both::default();
        for step in steps {
            both.step(step);
        }
    }
}

/// Ten thousand come and go, those first who came first, last, or anyhow: it takes no thousands of steps each.
#[test]
fn ten_thousand_leave_in_any_order() {
    const MANY: u64 = 10_000;
    let caller = Arc::new(0);
    let orders: [fn(u64) -> u64; 4] = [
        |n| n,
        |n| MANY - 1 - n,
        |n| n * 7919 % MANY,
        // All but a few at the two ends first.
        |n| (n + 5) % MANY,
    ];
    for order in orders {
        let mut line = WaitQueue::new();
        for id in 0..MANY {
            let until = ms(if id % 3 == 0 { 1000 + id } else { 20_000 - id });
            line.push(WaiterId(id + 1), waiter(&caller, false, until, ms(0)));
        }
        for n in 0..MANY {
            assert!(line.remove(WaiterId(order(n) + 1)).is_some());
            assert_eq!(Arc::strong_count(&caller) as u64, MANY - n);
        }
        assert!(line.is_empty());
        assert_eq!(line.next_end(), None);
    }
}
