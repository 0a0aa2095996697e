//! Many leases of one registry: their renewals have moments of their own, whatever they have met together (G5).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::harness::{Harness, broken, fixed, ms, rules};
use crate::base::clock::{FOREVER, Moment};
use crate::base::{Mode, OnFinish};
use crate::store::contract::{Answer, Op, OpError, Outcome};
use crate::turnstile::machine::Turnstile;
use crate::turnstile::{
    Effect, EventCx, Ids, LeaseVerdict, Verdict, Waiter, WaiterId, WaiterVerdict,
};

const TTL: Duration = Duration::from_secs(30);

/// In so much time each lease is renewed once.
const PERIOD: Duration = Duration::from_secs(10);

const LEASES: usize = 40_000;

/// So many renewals fall into a tenth of a second, if they are spread evenly.
const SHARE: usize = LEASES / 100;

/// A registry whose store answers at once.
struct Registry {
    turnstiles: Vec<Turnstile<usize>>,
    holders: Vec<WaiterId>,
    ids: Ids,
    now: Moment,
    timeouts: BTreeSet<(Moment, usize)>,
    /// When each renewal was sent.
    renewals: Vec<Moment>,
    lost: usize,
}

impl Registry {
    /// Takes all leases at one moment.
    fn with_leases() -> Self {
        let turnstile = || Turnstile::new(Mode::Exclusive, true);
        let mut registry = Self {
            turnstiles: std::iter::repeat_with(turnstile).take(LEASES).collect(),
            holders: Vec::new(),
            ids: Ids::new(rules(), 1),
            now: ms(1000),
            timeouts: BTreeSet::new(),
            renewals: Vec::new(),
            lost: 0,
        };
        for caller in 0..LEASES {
            let waiter = Waiter {
                caller,
                ttl: TTL,
                renewals: u32::MAX,
                adopts: None,
                on_finish: OnFinish::Release,
                is_conditional: false,
                asks_once: false,
                hears_of_others: false,
                until: FOREVER,
                answer_by: FOREVER,
            };
            let id = registry.feed(caller, |turnstile, cx| turnstile.arrive(cx, waiter, 0));
            assert!(registry.feed(caller, |turnstile, cx| turnstile.take(cx, id)));
            registry.holders.push(id);
        }
        registry
    }

    fn feed<R>(
        &mut self,
        caller: usize,
        event: impl FnOnce(&mut Turnstile<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> R {
        let turnstile = &mut self.turnstiles[caller];
        let before = turnstile.next_timeout();
        let mut effects = VecDeque::new();
        let mut cx = EventCx::new(self.now, &mut self.ids, &mut effects);
        cx.leases = LEASES;
        let result = event(turnstile, &mut cx);
        while let Some(effect) = cx.effects.pop_front() {
            let op = match effect {
                Effect::Send(op) => op,
                Effect::Wake(_, Verdict::Lease(LeaseVerdict::Ended(_)))
                | Effect::Wake(_, Verdict::Waiter(WaiterVerdict::TurnLost)) => {
                    self.lost += 1;
                    continue;
                }
                _ => continue,
            };
            let outcome = match op {
                Op::Renew { .. } => {
                    self.renewals.push(self.now);
                    Outcome::Renewed
                }
                _ => Outcome::Won { epoch: 7 },
            };
            turnstile.replied(&mut cx, &op, Ok(Answer { at: 0, outcome }));
        }
        let after = turnstile.next_timeout();
        self.timeouts.extend(after.map(|at| (at, caller)));
        if before != after {
            before.map(|at| self.timeouts.remove(&(at, caller)));
        }
        result
    }

    fn feed_all(&mut self, event: impl Fn(&mut Turnstile<usize>, &mut EventCx<'_, usize>)) {
        for caller in 0..LEASES {
            self.feed(caller, &event);
        }
    }

    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some((at, caller)) = self.timeouts.first().copied().filter(|(at, _)| *at <= end) {
            self.now = self.now.max(at);
            self.feed(caller, |turnstile, cx| turnstile.tick(cx));
        }
        self.now = end;
    }

    /// Fails if, from now on for three periods, a tenth of a second has more than twice its share, or a lease is not
    /// renewed in each period.
    #[track_caller]
    fn assert_spread(&mut self, what: &str) {
        let begin = self.now;
        self.renewals.clear();
        self.run(3 * PERIOD);
        let mut tenths = vec![0; 300];
        for at in &self.renewals {
            let tenth = (*at - begin).as_millis() / 100;
            tenths[tenth.min(299) as usize] += 1;
        }
        let fullest = *tenths.iter().max().unwrap();
        assert!(fullest <= 2 * SHARE, "{what}: {fullest} instead of {SHARE}");
        let renewed = self.renewals.len();
        assert!(renewed >= 2 * LEASES, "{what}: {renewed} renewals");
        assert_eq!(self.lost, 0, "{what}");
    }
}

/// All were renewed at one moment, and at every third of their ttl again: after they had been taken together, after a new
/// connection, and when a process that was stopped went on.
#[test]
fn g5_no_tenth_of_a_second_has_more_than_twice_its_share_of_renewals() {
    let mut registry = Registry::with_leases();
    registry.assert_spread("taken together");

    registry.feed_all(|turnstile, cx| turnstile.down(cx, &broken()));
    registry.run(ms(800));
    registry.feed_all(|turnstile, cx| turnstile.up_renew(cx, false));
    registry.feed_all(|turnstile, cx| turnstile.up(cx, true));
    registry.assert_spread("a new connection");

    registry.now += PERIOD;
    registry.assert_spread("a process that was stopped");

    // As in a group: each is renewed at once, for it has little time left.
    for caller in 0..LEASES {
        let id = registry.holders[caller];
        registry.feed(caller, |turnstile, cx| {
            turnstile.restart(cx, id, u32::MAX, OnFinish::Release);
        });
    }
    registry.assert_spread("begun anew together");
}

/// Each connection lasts for a fiftieth of the span. A moment that had passed in an outage was chosen anew at each
/// connection. So some leases were lost, while others were renewed again and again.
#[test]
fn g5_no_lease_is_forgotten_if_connections_are_shorter_than_the_span() {
    let mut registry = Registry::with_leases();
    for up in 0..40 {
        registry.run(ms(200));
        registry.feed_all(|turnstile, cx| turnstile.down(cx, &broken()));
        registry.run(ms(1000));
        registry.feed_all(|turnstile, cx| turnstile.up_renew(cx, false));
        registry.feed_all(|turnstile, cx| turnstile.up(cx, true));
        assert_eq!(registry.lost, 0, "at connection {up}");
    }
    let mut tenths = BTreeMap::new();
    for at in &registry.renewals {
        *tenths.entry(at.as_millis() / 100).or_insert(0) += 1;
    }
    // They have a sixth of the time, and each connection begins a new span.
    let fullest = *tenths.values().max().unwrap();
    assert!(fullest <= 10 * SHARE, "{fullest} instead of {SHARE}");
}

/// The same for those that a server refuses to renew: all were sent again after 50 to 55 ms.
#[test]
fn g5_refused_renewals_are_spread() {
    let next = |seed| {
        let mut harness = Harness::new();
        harness.seed(seed);
        harness.leases = LEASES;
        harness.hold("a", fixed(30_000).renewed(), 5);
        harness.wait_until(11_000);
        let renew = harness.sent();
        harness.fail(&renew, OpError::Refused(broken()));
        harness.turnstile.next_timeout().unwrap()
    };
    let moments: BTreeSet<_> = (0..100).map(next).collect();
    let (first, last) = (moments.first().unwrap(), moments.last().unwrap());
    assert!(*last - *first > PERIOD / 2, "{first:?} to {last:?}");
}

/// However often the connection breaks: each new one planned the renewal anew, and the last plan counted.
#[test]
fn g5_a_planned_renewal_is_not_put_off_by_the_next_connection() {
    let mut harness = Harness::new();
    harness.leases = LEASES;
    harness.hold("a", fixed(30_000).renewed(), 5);
    harness.down();
    harness.up(true);
    let planned = harness.turnstile.next_timeout().unwrap();
    assert!(planned > harness.now && planned <= harness.now + PERIOD);
    // Other leases have the same moments.
    assert_eq!(planned.as_nanos() % 25_000_000, 0);
    while harness.now < planned - ms(20) {
        let next = harness.now.as_millis() as u64 + 10;
        harness.wait_until(next);
        harness.down();
        harness.up(true);
        if harness.sent_if_any().is_some() {
            return;
        }
        assert!(harness.turnstile.next_timeout().unwrap() <= planned);
    }
    harness.wait_until(planned.as_millis() as u64 + 1);
    assert!(matches!(harness.sent(), Op::Renew { .. }));
}

/// The renewal comes as long after the new connection as it would have come after the end of the last one.
#[test]
fn g5_a_planned_renewal_that_an_outage_passed_over_keeps_its_order() {
    for seed in 0..50 {
        let mut harness = Harness::new();
        harness.seed(seed);
        harness.leases = LEASES;
        harness.hold("a", fixed(30_000).renewed(), 5);
        harness.down();
        harness.up(true);
        let planned = harness.turnstile.next_timeout().unwrap();
        let breaks = planned.as_millis() as u64 - 30;
        harness.wait_until(breaks);
        harness.down();
        let up = planned.as_millis() as u64 + 300;
        for again in [breaks + 1, up] {
            harness.wait_until(again);
            harness.down();
        }
        harness.up(true);
        let expected = ms(up) + (planned - ms(breaks));
        let expected = expected - ms(expected.as_millis() as u64 % 25);
        harness.wait_until(expected.as_millis() as u64 - 1);
        assert!(harness.sent_if_any().is_none(), "seed {seed}: early");
        harness.wait_until(expected.as_millis() as u64 + 1);
        assert!(matches!(harness.sent(), Op::Renew { .. }), "seed {seed}");
    }
}

/// The process stood still past the moment that was planned: the renewal is sent now, and not planned once more.
#[test]
fn g5_a_planned_renewal_that_is_missed_is_sent_at_once() {
    let mut harness = Harness::new();
    harness.leases = LEASES;
    harness.hold("a", fixed(30_000).renewed(), 5);
    harness.down();
    harness.up(true);
    let planned = harness.turnstile.next_timeout().unwrap();
    harness.silent();
    harness.wait_until((planned + ms(2000)).as_millis() as u64);
    assert!(matches!(harness.sent(), Op::Renew { .. }));

    let mut harness = Harness::new();
    harness.leases = LEASES;
    harness.hold("a", fixed(30_000).renewed(), 5);
    harness.down();
    harness.up(true);
    harness.stop_until((planned + ms(2000)).as_millis() as u64);
    harness.feed(|turnstile, cx| turnstile.tick(cx));
    assert!(matches!(harness.sent(), Op::Renew { .. }));
}

/// A lease with little time left is renewed within half of it, and few leases at once.
#[test]
fn g5_a_lease_near_its_deadline_is_not_kept_waiting() {
    // Whichever place in the span it gets.
    for seed in 0..50 {
        let mut harness = Harness::new();
        harness.seed(seed);
        harness.leases = LEASES;
        harness.hold("a", fixed(9_000).renewed(), 5);
        harness.down();
        harness.wait_until(9_500);
        harness.up(true);
        // It ends at 9908.
        harness.wait_until(9_705);
        assert!(matches!(harness.sent(), Op::Renew { .. }), "{seed}");
    }

    // The process went on an instant before the end.
    let mut harness = Harness::new();
    harness.leases = LEASES;
    harness.hold("a", fixed(9_000).renewed(), 5);
    harness.now = ms(9_908) - Duration::from_micros(2);
    harness.feed(|turnstile, cx| turnstile.tick(cx));
    assert!(matches!(harness.sent(), Op::Renew { .. }));

    let mut harness = Harness::new();
    harness.leases = 63;
    harness.hold("a", fixed(9_000).renewed(), 5);
    harness.down();
    harness.up(true);
    assert!(matches!(harness.sent(), Op::Renew { .. }));
}
