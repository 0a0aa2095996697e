//! Whether the link's task looks for a reply again at once, or sleeps until it is woken.

use std::time::{Duration, Instant};

use super::fault::Fault;

/// A call that follows what was last heard within so long is one of a run of calls.
const RUN: Duration = Duration::from_millis(1);

/// After a look that was in vain for the whole time, two sends and replies pass before the next, and
/// twice as many each time, up to `2^MOST_MISSES`: a server that is a network away costs next to
/// nothing.
const MOST_MISSES: u32 = 10;

/// So many replies that were found make up for one that was not.
const HITS_A_MISS: u32 = 2;

/// How the task waits for replies: for a short while it yields to the runtime's other tasks and looks
/// again, before it lets its worker sleep.
///
/// A reply from a server on the same machine comes within some 50 µs, and to put a thread to sleep and
/// to wake it again takes as long, of the server's time too: a write to a socket for which somebody
/// sleeps wakes them. Looking again made 23, 23, 13 and 16 % more pairs a second with 1, 8, 64 and 256
/// tasks; a pair took 8 % more of the client's processor with one task and hardly more or less with
/// several, and 16, 28, 5 and 5 % less of the server's (`scenarios free-1 free-8 free-64 free-256 --libs
/// lockstream,lockstream-asleep,bare --secs 1 --rounds 5`, on 2 virtual cores).
///
/// Only in a run of calls: one that is made now and then finds the server asleep as well, and then
/// the processor is better left to it, and to whomever it wakes. With 60 µs for the release of a lock
/// that somebody waits for, the other had it 20 µs later (`handover`).
///
/// A runtime of several threads takes a thread that looks for one that searches for work, and wakes
/// another each time that it finds the task: with one caller 2.3 to 2.9 wake-ups a pair where sleeping
/// takes 2, and with 100 µs nearly 5. On a runtime of one thread there are next to none.
#[derive(Debug)]
pub(super) struct BusyPoll {
    within: Duration,
    /// How much was sent and heard when it was last asked, and when that was new.
    seen: (u64, u64),
    changed: Option<Instant>,
    /// Since when it looks.
    since: Option<Instant>,
    /// Of those that were not made up for, in hits.
    misses: u32,
    skip: u32,
}

impl BusyPoll {
    /// How long it looks for a lone op's reply after the last that was sent or heard, unless something
    /// else is said.
    pub(super) const DEFAULT: Duration = Duration::from_micros(50);

    /// And at most, whatever is said.
    const LONGEST: Duration = Duration::from_millis(1);

    /// A task that looks for longer than a runtime's timers are fine keeps its thread for itself.
    pub(super) fn check(within: Duration) -> Result<(), Fault> {
        if within > Self::LONGEST {
            return Err(Fault::BusyPoll { within });
        }
        Ok(())
    }

    /// `within`: zero, not to look at all.
    pub(super) fn new(within: Duration) -> Self {
        Self {
            within,
            seen: (0, 0),
            changed: None,
            since: None,
            misses: 0,
            skip: 0,
        }
    }

    /// To be asked when there is nothing else to do: true, look again once others have had their turn.
    /// `sent` and `heard` only ever grow; `awaited`: so many ops that somebody waits for are under
    /// way, the oldest call of all for so long. `now` is asked for the time, which must go on while a
    /// runtime's clock stands still.
    pub(super) fn looks_again(
        &mut self,
        sent: u64,
        heard: u64,
        awaited: usize,
        oldest: Duration,
        now: impl FnOnce() -> Instant,
    ) -> bool {
        let is_new = self.seen != (sent, heard);
        if self.within.is_zero() || !is_new && self.since.is_none() {
            return false;
        }
        let now = now();
        if let Some(since) = self.since {
            let has_heard = heard > self.seen.1;
            let is_late = now.saturating_duration_since(since) >= self.patience(awaited);
            if self.is_far(awaited, oldest) || is_late && !has_heard {
                self.misses = (self.misses + HITS_A_MISS).min(MOST_MISSES * HITS_A_MISS);
                self.skip = 1 << (self.misses / HITS_A_MISS);
                self.since = None;
            } else if has_heard {
                self.misses = self.misses.saturating_sub(1);
            }
        }
        if is_new {
            let last = self.changed.replace(now);
            let is_run = last.is_some_and(|last| now.saturating_duration_since(last) < RUN);
            self.seen = (sent, heard);
            self.since = None;
            if self.skip > 0 {
                self.skip -= 1;
            } else if is_run && awaited > 0 {
                self.since = Some(now);
            }
        }
        self.since.is_some()
    }

    /// Whether replies have been found, by looking for them, of late.
    pub(super) fn pays(&self) -> bool {
        !self.within.is_zero() && self.skip == 0
    }

    /// The server takes its time for each op: a fifth more for each, up to four times as long.
    fn patience(&self, awaited: usize) -> Duration {
        let ops = u32::try_from(awaited).unwrap_or(u32::MAX).clamp(1, 16);
        (self.within + self.within / 5 * (ops - 1)).min(Self::LONGEST)
    }

    /// With several calls under way a reply is heard soon after another, wherever the server is: what
    /// tells is how long each call takes. Without this, eight callers of a server 1 ms away keep a
    /// whole thread awake.
    fn is_far(&self, awaited: usize, oldest: Duration) -> bool {
        let ops = u32::try_from(awaited).unwrap_or(u32::MAX);
        oldest > self.within * 4 + self.within / 10 * ops
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = BusyPoll::DEFAULT;
    const LOOK: Duration = Duration::from_micros(10);

    /// One caller, one call at a time, and how often somebody looked.
    struct Caller {
        polls: BusyPoll,
        now: Instant,
        called: Instant,
        calls: u64,
        looks: u64,
    }

    impl Caller {
        fn new() -> Self {
            let now = Instant::now();
            Self {
                polls: BusyPoll::new(WITHIN),
                now,
                called: now,
                calls: 0,
                looks: 0,
            }
        }

        fn asks(&mut self, heard: u64, awaited: usize) -> bool {
            let now = self.now;
            let oldest = now - self.called;
            self.polls
                .looks_again(self.calls, heard, awaited, oldest, || now)
        }

        /// Calls after a pause, and is answered after a while: how often was looked in vain?
        fn call(&mut self, pause: Duration, answer: Duration) -> u64 {
            self.now += pause;
            self.called = self.now;
            self.calls += 1;
            let answered = self.now + answer;
            let before = self.looks;
            while self.asks(self.calls - 1, 1) {
                if self.now + LOOK >= answered {
                    break;
                }
                self.looks += 1;
                self.now += LOOK;
            }
            self.now = answered;
            assert!(!self.asks(self.calls, 0), "there is nothing to look for");
            assert!(!self.asks(self.calls, 0));
            self.looks - before
        }

        fn run(&mut self, calls: u32, pause: Duration, answer: Duration) -> u64 {
            (0..calls).map(|_| self.call(pause, answer)).sum()
        }
    }

    const AT_ONCE: Duration = Duration::from_micros(5);

    #[test]
    fn what_comes_soon_is_looked_for_in_a_run_of_calls() {
        let mut caller = Caller::new();
        let soon = 3 * LOOK;
        assert_eq!(caller.call(AT_ONCE, soon), 0, "there was none before it");
        assert_eq!(caller.run(100, AT_ONCE, soon), 200);
        assert_eq!(caller.call(RUN, soon), 0, "the run was over");
        assert_eq!(caller.call(AT_ONCE, soon), 2);
    }

    #[test]
    fn what_is_far_away_is_hardly_looked_for() {
        let mut caller = Caller::new();
        let calls = 100_000;
        let looks = caller.run(calls, AT_ONCE, 10 * WITHIN);
        // 5 looks a time, the ten first times, and then once for 2^10 sends and replies.
        let times = 10 + 2 * u64::from(calls) / 1024 + 1;
        assert!(looks <= 5 * times, "{looks}");
        assert!(looks >= 2 * times, "it is tried again: {looks}");

        // The server has moved to this machine.
        caller.run(4096, AT_ONCE, 2 * LOOK);
        assert_eq!(caller.run(100, AT_ONCE, 2 * LOOK), 100);
    }

    #[test]
    fn one_that_is_late_now_and_then_changes_little() {
        let mut caller = Caller::new();
        let mut looks = 0;
        for _ in 0..100 {
            caller.call(AT_ONCE, 10 * WITHIN);
            looks += caller.run(30, AT_ONCE, 2 * LOOK);
        }
        assert!(looks > 100 * 25, "{looks}");
    }

    #[test]
    fn one_in_two_that_is_late_is_not_looked_for() {
        let mut caller = Caller::new();
        let mut looks = 0;
        for _ in 0..10_000 {
            looks += caller.call(AT_ONCE, 2 * LOOK);
            looks += caller.call(AT_ONCE, 10 * WITHIN);
        }
        assert!(looks < 10_000, "{looks}");
    }

    /// The share of the time that it looks, with so many calls under way, evenly spread, that take so
    /// many microseconds each: each reply is followed by the next call.
    fn share(calls: u32, answer: u64) -> f64 {
        let mut polls = BusyPoll::new(WITHIN);
        let gap = Duration::from_micros(answer) / calls;
        let began = Instant::now();
        let mut now = began;
        let mut awake = Duration::ZERO;
        for heard in 0..20_000 {
            let sent = heard + u64::from(calls);
            let (mut oldest, next) = (gap * (calls - 1), now + gap);
            while now < next && polls.looks_again(sent, heard, calls as usize, oldest, || now) {
                now += LOOK;
                oldest += LOOK;
                awake += LOOK;
            }
            now = next;
        }
        awake.as_secs_f64() / (now - began).as_secs_f64()
    }

    #[test]
    fn what_is_far_away_is_hardly_looked_for_however_much_is_under_way() {
        for (calls, answer) in [(4, 300), (8, 400), (8, 1_000)] {
            let share = share(calls, answer);
            assert!(share < 0.01, "{calls} calls of {answer} us: {share}");
        }
        for (calls, answer) in [(2, 50), (4, 100), (8, 100), (8, 200), (64, 400)] {
            let share = share(calls, answer);
            assert!(share > 0.9, "{calls} calls of {answer} us: {share}");
        }
    }

    #[test]
    fn it_pays_where_replies_are_found() {
        let mut caller = Caller::new();
        caller.run(100, AT_ONCE, 2 * LOOK);
        assert!(caller.polls.pays());
        caller.run(100, AT_ONCE, 10 * WITHIN);
        assert!(!caller.polls.pays());
        assert!(!BusyPoll::new(Duration::ZERO).pays());
    }

    #[test]
    fn more_ops_have_more_time_and_none_has_more_than_a_millisecond() {
        let patience = |within, ops| BusyPoll::new(within).patience(ops);
        assert_eq!(patience(WITHIN, 1), WITHIN);
        assert_eq!(patience(WITHIN, 6), 2 * WITHIN);
        assert_eq!(patience(WITHIN, 16), 4 * WITHIN);
        assert_eq!(patience(WITHIN, usize::MAX), 4 * WITHIN);
        assert_eq!(patience(RUN, 64), RUN);
    }

    #[test]
    fn what_nobody_waits_for_is_not_looked_for_nor_is_the_clock() {
        let mut polls = BusyPoll::new(WITHIN);
        let now = Instant::now();
        let young = Duration::ZERO;
        for number in 1..10 {
            let mut asks = |heard, now: &dyn Fn() -> Instant| {
                assert!(!polls.looks_again(number, heard, 0, young, now));
            };
            asks(number - 1, &|| now);
            asks(number - 1, &|| panic!("nothing is new"));
            asks(number, &|| now);
        }
        let mut polls = BusyPoll::new(Duration::ZERO);
        for number in 1..10 {
            for heard in [number - 1, number] {
                assert!(!polls.looks_again(number, heard, 1, young, || panic!("it is off")));
            }
        }
    }
}
