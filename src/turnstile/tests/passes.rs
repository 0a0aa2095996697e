//! Passes: the next waiter inside a tenure, and when it is another registry's turn (W6).

use super::harness::{Harness, asker, busy, fixed, rules};
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, LeaseVerdict, Rules, Verdict, WaiterId};

/// Seats "a" in a fresh tenure of `ttl`, lets `next` come, and finishes "a" at `at`.
fn after_one(rules: Rules, ttl: u64, next: super::harness::Wish, at: u64) -> Harness {
    let mut harness = Harness::with(rules, true);
    let (a, _) = harness.hold("a", fixed(ttl), 5);
    harness.arrive("b", next);
    harness.wait_until(at);
    harness.finish(a);
    harness
}

/// Inside the bounds the next waiter has the key at once, with the next token, and the store is
/// not asked (F2).
#[test]
fn f2_a_pass_has_the_next_token_and_no_call() {
    let mut harness = after_one(rules(), 1000, fixed(1000), 1010);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    let (token, deadline) = harness.granted("b");
    assert_eq!(token, 5 * 64 + 1);
    // It has what the tenure has, and that is nearly all it wants: no renewal.
    assert_eq!(deadline, super::harness::deadline(1000, 1000));
    harness.silent();
}

/// So many passes and no more, or a registry with a thousand waiters would never let go.
#[test]
fn w6_passes_end_at_local_passes() {
    let rules = Rules {
        local_passes: 3,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (mut id, _) = harness.hold("a", fixed(1000), 5);
    for pass in 1..=3 {
        let next = harness.arrive("b", fixed(1000));
        harness.finish(id);
        assert!(matches!(
            harness.told_any(),
            Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released))
        ));
        assert_eq!(harness.granted("b").0, 5 * 64 + pass);
        assert!(harness.take(next));
        id = next;
    }
    harness.arrive("c", fixed(1000));
    harness.finish(id);
    harness.untold("c");
    assert!(matches!(harness.sent(), Op::Yield { .. }));
}

/// A fence does not tell the holders of a tenure apart.
#[test]
fn f4_a_tenure_whose_token_was_seen_is_not_passed_on() {
    let mut harness = Harness::with(rules(), true);
    let (a, _) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.forbid_passes(a);
    harness.finish(a);
    harness.untold("b");
    assert!(matches!(harness.sent(), Op::Yield { .. }));
}

/// Nor when its holder's own time is over.
#[test]
fn f4_a_fixed_lease_whose_token_was_seen_ends_its_tenure() {
    let mut harness = Harness::with(rules(), true);
    let (a, _) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(300));
    harness.finish(a);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.granted("b");
    harness.take(b);
    harness.forbid_passes(b);
    harness.arrive("c", fixed(300));
    harness.wait_until(1400);
    assert!(matches!(harness.ended("b"), LeaseEnd::Lost(_)));
    harness.untold("c");
    assert!(matches!(harness.sent(), Op::Yield { .. }));
}

/// The first turn of a tenure is the first of several if other waiters can have the key from it; nobody who
/// has it by a pass does.
#[test]
fn only_the_first_of_several_turns_leads() {
    let needs_another_poll = |passes: u32, behind: &[super::harness::Wish]| {
        let rules = Rules {
            local_passes: passes,
            ..rules()
        };
        let mut harness = Harness::with(rules, true);
        let a = harness.arrive("a", fixed(1000));
        let op = harness.sent();
        for wish in behind {
            harness.arrive("b", *wish);
        }
        harness.reply(&op, Outcome::Won { epoch: 5 });
        let (_, _, needs_another_poll) = harness.granted_leading("a");
        (harness, a, needs_another_poll)
    };
    let (mut harness, a, first) = needs_another_poll(16, &[fixed(1000); 2]);
    assert!(first, "two stand behind it");
    assert!(harness.take(a));
    harness.finish(a);
    let (token, _, passed) = harness.granted_leading("b");
    assert_eq!(token, 5 * 64 + 1);
    assert!(!passed, "one more stands behind it, but it was passed to");

    assert!(!needs_another_poll(16, &[]).2, "nobody stands behind it");
    assert!(
        !needs_another_poll(0, &[fixed(1000); 2]).2,
        "there are no passes"
    );
    assert!(
        !needs_another_poll(16, &[fixed(1000).once()]).2,
        "who does not stand is refused"
    );
}

/// 63 passes leave a token below the next epoch's.
#[test]
fn f2_the_last_pass_stays_below_the_next_epoch() {
    let rules = Rules {
        local_passes: 63,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (mut id, _) = harness.hold("a", fixed(1000), 5);
    let mut last = 0;
    for _ in 0..63 {
        let next = harness.arrive("b", fixed(1000));
        harness.finish(id);
        assert!(matches!(
            harness.told_any(),
            Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released))
        ));
        last = harness.granted("b").0;
        assert!(harness.take(next));
        id = next;
    }
    assert_eq!(last, 5 * 64 + 63);
    harness.arrive("c", fixed(1000));
    harness.finish(id);
    let hand_on = harness.sent();
    harness.reply(&hand_on, Outcome::Won { epoch: 6 });
    assert!(harness.granted("c").0 > last);
}

/// A tenure that is older than `local_span` is over for the others' sake.
#[test]
fn w6_passes_end_with_the_local_span() {
    let mut harness = after_one(rules(), 1000, fixed(900), 1019);
    harness.granted("b");
    let mut harness = after_one(rules(), 1000, fixed(900), 1020);
    harness.untold("b");
    assert!(matches!(harness.sent(), Op::Yield { .. }));
}

/// A fixed lease needs 95 % of its ttl left in the tenure, a renewed one half, and renews at once if it
/// has no more than that.
#[test]
fn w6_a_pass_needs_enough_of_the_ttl() {
    let mut harness = after_one(rules(), 1000, fixed(1030), 1005);
    harness.granted("b");
    let mut harness = after_one(rules(), 1000, fixed(1040), 1005);
    harness.untold("b");
    assert!(matches!(harness.sent(), Op::Yield { .. }));

    let mut harness = after_one(rules(), 1000, fixed(1980).renewed(), 1003);
    harness.untold("b");
    assert!(matches!(harness.sent(), Op::Yield { .. }));
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(1900).renewed());
    harness.finish(a);
    harness.granted("b");
    assert!(harness.take(b));
    let ttl = super::harness::ms(1900);
    assert!(
        matches!(harness.sent(), Op::Renew { owner: of, ttl: to, .. } if (of, to) == (owner, ttl))
    );
}

/// To renew at each pass would cost a busy key more calls than its turns do.
#[test]
fn w6_a_lease_that_was_passed_most_of_its_ttl_waits_for_its_watchdog() {
    for (taken_at, at_once) in [(1010, false), (1037, false), (1039, true)] {
        let mut harness = Harness::new();
        let (a, owner) = harness.hold("a", fixed(1000), 5);
        let b = harness.arrive("b", fixed(1000).renewed());
        harness.finish(a);
        harness.granted("b");
        harness.wait_until(taken_at);
        assert!(harness.take(b));
        if !at_once {
            harness.silent();
            harness.wait_until(taken_at + 333);
            harness.silent();
            harness.wait_until(taken_at + 334);
        }
        let ttl = super::harness::ms(1000);
        let renew = harness.sent();
        assert!(
            matches!(renew, Op::Renew { owner: of, ttl: to, .. } if (of, to) == (owner, ttl)),
            "{renew:?}, taken at {taken_at}"
        );
    }
}

/// The renewal of the lease before is still under way when the next takes over and wants more:
/// it has to ask for itself, or it would end when the other would have.
#[test]
fn w3_a_renewal_under_way_is_followed_by_ones_own() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(1000).renewed(), 5);
    harness.up(true);
    let first = harness.sent();
    let b = harness.arrive("b", fixed(1900).renewed());
    harness.finish(a);
    harness.granted("b");
    assert!(harness.take(b));
    harness.silent();
    harness.reply(&first, Outcome::Renewed);
    let second = harness.sent();
    let Op::Renew { ttl, .. } = second else {
        panic!("not {second:?}")
    };
    assert_eq!(ttl, super::harness::ms(1900));
    harness.reply(&second, Outcome::Renewed);
    harness.silent();
}

/// A yield that finds nobody else comes back as a win, with an epoch of its own.
#[test]
fn w6_a_yield_with_nobody_else_goes_on_here() {
    let mut harness = after_one(rules(), 1000, fixed(1000), 1500);
    let hand_on = harness.sent();
    harness.reply(&hand_on, Outcome::Won { epoch: 9 });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_eq!(harness.granted("b").0, 9 * 64);
}

/// Has one after the other come until the registry asks the store: how many passes there were, and what is asked.
#[track_caller]
fn passes_in_a_tenure(harness: &mut Harness, holder: &mut WaiterId) -> (u32, Op) {
    for passes in 0..100 {
        let next = harness.arrive("next", fixed(1000));
        harness.finish(*holder);
        *holder = next;
        if let Some(op) = harness.sent_if_any() {
            return (passes, op);
        }
        assert!(matches!(
            harness.told_any(),
            Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released))
        ));
        harness.granted("next");
        assert!(harness.take(next));
    }
    panic!("it never asks")
}

/// The next tenure of one who waits begins, by what the store says.
#[track_caller]
fn begin_tenure(harness: &mut Harness, holder: WaiterId, says: impl FnOnce(&mut Harness)) -> u64 {
    says(harness);
    assert!(matches!(
        harness.told_any(),
        Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released))
    ));
    let (token, _) = harness.granted("next");
    assert!(harness.take(holder));
    token
}

/// Where two tenures in a row found nobody else in the queue, a third is four times as long: to ask takes as long as a
/// dozen turns. One who comes meanwhile is served after it, and those behind are as long as always.
#[test]
fn w6_passes_are_four_times_as_many_where_nobody_else_has_asked_for_long() {
    for (local_passes, alone) in [(16, 63), (3, 12), (0, 0), (63, 63)] {
        let rules = Rules {
            local_passes,
            ..rules()
        };
        let mut harness = Harness::with(rules, true);
        let (mut holder, _) = harness.hold("a", fixed(1000), 1);
        let mut last = 0;
        let mut epoch = 1;
        let mut tenure = |harness: &mut Harness, holder: &mut WaiterId, others: bool| {
            let (passes, op) = passes_in_a_tenure(harness, holder);
            assert!(matches!(op, Op::Yield { .. }), "{op:?}");
            epoch += 1;
            let token = begin_tenure(harness, *holder, |harness| {
                if others {
                    let left = Some(super::harness::ms(1000));
                    harness.reply(
                        &op,
                        Outcome::Busy {
                            left,
                            score: Some(1),
                            entered: false,
                            holder: None,
                        },
                    );
                    harness.grant(asker(&op), 1000, epoch);
                } else {
                    harness.reply(&op, Outcome::Won { epoch });
                }
            });
            assert!(token > last, "F2");
            assert_eq!(token, epoch * 64);
            last = token;
            passes
        };
        let few = local_passes;
        let (none, some) = (false, true);
        let others_at_its_end = [none, none, none, none, some, none, none, none];
        let passes = others_at_its_end.map(|others| tenure(&mut harness, &mut holder, others));
        assert_eq!(passes, [few, few, alone, alone, alone, few, few, alone]);
    }
}

/// The others' lease has ended without a grant, and our ticket finds the key free when it asks.
#[test]
fn w6_a_key_that_was_busy_in_between_is_passed_as_seldom_as_always() {
    let mut harness = Harness::new();
    let (mut holder, _) = harness.hold("a", fixed(1000), 1);
    for epoch in 2..4 {
        let (_, op) = passes_in_a_tenure(&mut harness, &mut holder);
        begin_tenure(&mut harness, holder, |harness| {
            harness.reply(&op, Outcome::Won { epoch });
        });
    }
    let (passes, op) = passes_in_a_tenure(&mut harness, &mut holder);
    assert_eq!(passes, 63);
    begin_tenure(&mut harness, holder, |harness| {
        harness.reply(&op, busy(1000, 1));
        let next = harness.turnstile.next_timeout().expect("it asks again");
        harness.wait_until(next.as_millis() as u64 + 1);
        let again = harness.sent();
        assert!(matches!(again, Op::Enter { .. }), "{again:?}");
        harness.reply(&again, Outcome::Won { epoch: 4 });
    });
    let (passes, _) = passes_in_a_tenure(&mut harness, &mut holder);
    assert_eq!(passes, 16);
}

/// However many there may be, they end with the span.
#[test]
fn w6_a_long_tenure_ends_with_the_local_span() {
    let mut harness = Harness::new();
    let (mut holder, _) = harness.hold("a", fixed(1000), 1);
    for epoch in 2..4 {
        let (_, op) = passes_in_a_tenure(&mut harness, &mut holder);
        begin_tenure(&mut harness, holder, |harness| {
            harness.reply(&op, Outcome::Won { epoch });
        });
    }
    for _ in 0..20 {
        let next = harness.arrive("next", fixed(1000));
        harness.finish(holder);
        harness.silent();
        assert!(matches!(
            harness.told_any(),
            Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released))
        ));
        harness.granted("next");
        assert!(harness.take(next));
        holder = next;
    }
    harness.wait_until(1020);
    harness.arrive("next", fixed(1000));
    harness.finish(holder);
    assert!(matches!(harness.sent(), Op::Yield { .. }));
}

/// Nobody waits here: released, and the turnstile may be forgotten.
#[test]
fn w6_with_nobody_in_the_queue_the_key_is_released() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    harness.finish(a);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.untold("a");
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert!(harness.turnstile.is_idle());
}

/// Those who wait here are served in the order in which they came.
#[test]
fn w6_within_a_registry_turns_go_in_order_of_arrival() {
    let mut harness = Harness::new();
    let (mut id, _) = harness.hold("a", fixed(1000), 5);
    let line = ["b", "c", "d"].map(|caller| (caller, harness.arrive(caller, fixed(1000))));
    for (caller, next) in line {
        harness.finish(id);
        harness.granted(caller);
        assert!(harness.take(next));
        id = next;
    }
}

/// "Pass as long as `local_passes` allows": a span without end. The sum of the tenure's beginning and the span was
/// too much for a `Duration`, and the panic came with the registry locked.
#[test]
fn a_span_without_end_is_no_fault() {
    let rules = Rules {
        local_span: std::time::Duration::MAX,
        ..rules()
    };
    let mut harness = after_one(rules, 1000, fixed(1000), 1030);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_eq!(harness.granted("b").0, 5 * 64 + 1);
}
