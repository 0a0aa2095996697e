//! What the workspace's benches reach of the insides. No part of the crate's face: it may change or go
//! with any version.
#![allow(missing_docs, missing_debug_implementations)]

use std::collections::VecDeque;
use std::time::Duration;

use crate::store::contract::{Answer, Op, Outcome};
use crate::turnstile::{
    Effect, EventCx, FOREVER, Ids, Moment, Patience, Rules, Turnstile, Waiter, WaiterId,
};

const TTL: Duration = Duration::from_secs(30);

/// One key's turnstile under a line that never gets shorter, and a store that gives it everything.
pub struct Turns {
    turnstile: Turnstile<()>,
    ids: Ids,
    now: Moment,
    epochs: u64,
    /// Who holds the key, and then who waits for it, the first first.
    line: VecDeque<WaiterId>,
}

impl Turns {
    /// One holds the key, and so many wait.
    #[must_use]
    pub fn new(waiting: usize, local_passes: u32) -> Self {
        let rules = Rules {
            local_passes,
            local_span: FOREVER,
            max_waiters: usize::MAX,
        };
        let mut turns = Self {
            turnstile: Turnstile::new(rules, true),
            ids: Ids::new(1),
            now: TTL,
            epochs: 0,
            line: VecDeque::with_capacity(waiting + 2),
        };
        turns.arrive();
        turns.take();
        (0..waiting).for_each(|_| turns.arrive());
        turns
    }

    /// One turn, in three steps: the holder finishes, the next takes the key, and another arrives.
    pub fn turn(&mut self) {
        let holder = self.line.pop_front().expect("it is held");
        self.feed(|turnstile, cx| turnstile.finish(cx, holder, false));
        self.take();
        self.arrive();
    }

    /// How often the store gave the key: all other turns were passes.
    #[must_use]
    pub fn epochs(&self) -> u64 {
        self.epochs
    }

    fn arrive(&mut self) {
        let waiter = Waiter {
            who: (),
            ttl: TTL,
            renewals: u32::MAX,
            lets_expire: false,
            patience: Patience::Queue,
            until: FOREVER,
        };
        let id = self.feed(|turnstile, cx| turnstile.arrive(cx, waiter));
        self.line.push_back(id);
    }

    fn take(&mut self) {
        let first = *self.line.front().expect("somebody waits");
        let taken = self.feed(|turnstile, cx| turnstile.take(cx, first));
        assert!(taken, "the first in line was not the next");
    }

    fn feed<R>(&mut self, event: impl FnOnce(&mut Turnstile<()>, &mut EventCx<'_>) -> R) -> R {
        // So little that no timeout comes due.
        self.now += Duration::from_nanos(1);
        let now = self.now;
        let ids = &mut self.ids;
        let result = event(&mut self.turnstile, &mut EventCx { now, ids });
        while let Some(effect) = self.turnstile.next_effect() {
            let Effect::Send(op) = effect else { continue };
            let outcome = match op {
                Op::Release { .. } | Op::Withdraw { .. } | Op::Unlisten { .. } => {
                    Outcome::Gone { held: true }
                }
                Op::Renew { .. } => Outcome::Renewed,
                _ => {
                    self.epochs += 1;
                    Outcome::Won { epoch: self.epochs }
                }
            };
            let answer = Answer {
                at: self.epochs,
                outcome,
            };
            let ids = &mut self.ids;
            self.turnstile
                .replied(&mut EventCx { now, ids }, &op, Ok(answer));
        }
        result
    }
}
