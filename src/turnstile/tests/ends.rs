//! How leases end but by a release: kept keys, longer leases, adopted ones.

use super::harness::{Harness, asker, broken, busy, deadline, fixed, ms, rules};
use crate::base::{LossCause, OnFinish};
use crate::store::contract::{Op, OpError, Outcome, Owner};
use crate::turnstile::{LeaseEnd, LeaseVerdict, NotGranted, Rules, Verdict, WaiterVerdict};

fn prolonged(harness: &mut Harness, caller: &'static str) -> u64 {
    match harness.lease_told(caller) {
        LeaseVerdict::Prolonged { deadline, .. } => deadline.as_micros() as u64,
        other => panic!("{caller} was to be prolonged, not told {other:?}"),
    }
}

/// Nothing is sent, and nothing is owed: the key runs out by itself.
#[test]
fn a_kept_key_is_left_alone() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).kept(), 5);
    assert_eq!(harness.keep(a), Some(owner));
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// A watchdog that was due just then prolonged the key in the moment in which it was left.
#[test]
fn a_watchdog_that_is_due_at_the_end_does_not_prolong_a_kept_key() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed().kept(), 5);
    // The timer is late.
    harness.stop_until(1500);
    harness.keep(a).expect("it was held");
    harness.silent();

    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed().kept(), 5);
    harness.stop_until(1500);
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    harness.silent();
}

/// Whoever is next in the queue here has the key no sooner than anybody else: when it has run out.
#[test]
fn w2_a_kept_key_is_not_passed_on() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).kept(), 5);
    harness.arrive("b", fixed(900));
    harness.keep(a);
    harness.untold("b");
    let enter = harness.sent();
    assert!(matches!(enter, Op::Enter { .. }));
    assert_ne!(asker(&enter), owner, "O1: its owner is retired");
    harness.reply(&enter, busy(890, 7));
    harness.wait_until(1889);
    harness.silent();
    harness.wait_until(1940);
    let again = harness.sent();
    harness.reply(&again, Outcome::Won { epoch: 6 });
    harness.granted("b");
}

/// Twenty thousand leases were left to expire since: the grant of the first one is late all the same, and its key stays.
#[test]
fn i7_a_late_grant_frees_no_kept_key_however_many_were_kept_since() {
    let mut harness = Harness::new();
    let mut first = None;
    for epoch in 1..=20_000 {
        let a = harness.arrive("a", fixed(30_000).kept());
        let enter = harness.sent();
        harness.reply(&enter, busy(10, 7));
        harness.grant(asker(&enter), 30_000, epoch);
        harness.granted("a");
        assert!(harness.take(a));
        harness.keep(a).expect("it was held");
        assert!(matches!(harness.ended("a"), LeaseEnd::Released));
        first.get_or_insert(asker(&enter));
    }
    let first = first.expect("there were many");
    harness.wait_until(30_000);
    harness.grant(first, 30_000, 1);
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// The store grants the key to tickets only. An owner that never had one needs no memory: that is how nearly all keys are
/// had, a hundred thousand in a second.
#[test]
fn i7_an_owner_that_had_no_ticket_is_not_remembered() {
    let mut harness = Harness::new();
    for wish in [fixed(900).kept(), fixed(900).kept().once()] {
        let (a, _) = harness.hold("a", wish, 5);
        harness.keep(a).expect("it was held");
        harness.ended("a");
    }
    assert_eq!(harness.remembered(), 0);

    // The answer was lost, and the ticket may have been entered.
    let a = harness.arrive("a", fixed(900).kept());
    let enter = harness.sent();
    harness.lose(&enter);
    harness.up(true);
    let again = harness.sent();
    harness.reply(&again, Outcome::Won { epoch: 6 });
    harness.granted("a");
    assert!(harness.take(a));
    let owner = harness.keep(a).expect("it was held");
    assert_eq!(harness.remembered(), 1);
    harness.ended("a");
    harness.grant(owner, 900, 6);
    harness.silent();
}

/// A pass brings what is left of the tenure. A key that is to stay for its ttl wants all of it.
#[test]
fn w6_one_whose_key_is_kept_is_given_no_pass() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.arrive("b", fixed(900).kept());
    harness.wait_until(1005);
    harness.finish(a);
    let op = harness.sent();
    assert!(matches!(op, Op::Yield { ttl, .. } if ttl == ms(900)));
    harness.reply(&op, Outcome::Won { epoch: 6 });
    assert_eq!(harness.granted("b").1, deadline(1005, 900));
}

/// The registry shuts down while it is held: the key stays, and nobody waits for an answer.
#[test]
fn o6_a_shutdown_leaves_keys_that_are_to_stay() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).kept(), 5);
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    harness.silent();
    assert!(harness.turnstile.is_idle());

    // One that nobody has seen yet was not used: it is released.
    let mut harness = Harness::new();
    harness.arrive("b", fixed(900).kept());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// An explicit wish goes before: a job that failed gives its turn back.
#[test]
fn a_lease_whose_key_is_to_stay_can_be_released() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).kept(), 5);
    harness.finish(a);
    assert!(matches!(harness.sent(), Op::Release { owner: of } if of == owner));
}

/// At the deadline it is lost, as always, and a release is sent (D5).
#[test]
fn d5_a_lease_whose_key_is_to_stay_is_lost_at_its_deadline() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).kept(), 5);
    harness.wait_until(1889);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// The push was slower than the reply that told of the same win (O3). By O1 the grant of a retired
/// owner is released at once: that freed a key that was to stay. The turnstile that left it may
/// be forgotten by then.
#[test]
fn o1_a_late_grant_does_not_free_a_kept_key() {
    let mut harness = Harness::new();
    let id = harness.arrive("a", fixed(900).kept());
    let enter = harness.sent();
    let owner = asker(&enter);
    harness.reply(&enter, busy(500, 7));
    harness.up(true);
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 6 });
    harness.granted("a");
    assert!(harness.take(id));
    assert_eq!(harness.keep(id), Some(owner));
    harness.forget();
    harness.grant(owner, 900, 5);
    harness.silent();
    // Once it has run out, a grant is worth what any other is.
    harness.stop_until(5000);
    harness.grant(owner, 900, 5);
    assert!(matches!(harness.sent(), Op::Release { owner: of } if of == owner));
}

/// A renewal was under way when the key was left, and the store was slow to do it: the key lived on for longer than could
/// be told at the end. A grant that was slower still found its owner forgotten, and was released: that freed the key
/// that was to stay. (Found by the simulator.)
#[test]
fn o1_a_late_grant_does_not_free_a_key_that_a_late_renewal_keeps() {
    let mut harness = Harness::new();
    let id = harness.arrive("a", fixed(900).renewed().kept());
    let enter = harness.sent();
    let owner = asker(&enter);
    harness.reply(&enter, busy(500, 7));
    harness.up(true);
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 6 });
    harness.granted("a");
    assert!(harness.take(id));
    harness.wait_until(1300);
    assert!(matches!(harness.sent(), Op::Renew { .. }));
    assert_eq!(harness.keep(id), Some(owner));
    harness.forget();
    // Done by the store at 2000, after which it has the key until 2900.
    harness.stop_until(2500);
    harness.grant(owner, 900, 5);
    harness.silent();
}

/// A renewal that was under way when the key was left changes nothing here.
#[test]
fn a_renewal_under_way_at_the_end_is_heard_by_nobody() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed().kept(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.keep(a);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.reply(&renew, Outcome::Renewed);
    harness.wait_until(10_000);
    harness.silent();
    harness.untold("a");
    assert!(harness.turnstile.is_idle());
}

/// A fixed lease lasts what was asked for, counted from the asking; and no longer.
#[test]
fn d1_an_extension_counts_from_when_it_was_asked_for() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900), 5);
    harness.wait_until(1400);
    assert_eq!(harness.extend(a, 2000), Some(deadline(1400, 2000)));
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { owner: of, ttl, .. } if of == owner && ttl == ms(2000)));
    harness.untold("a");
    harness.wait_until(1450);
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), deadline(1400, 2000));
    harness.wait_until(3377);
    harness.silent();
    harness.untold("a");
    harness.wait_until(3378);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
}

/// Never shorter; and what is proved already costs no call.
#[test]
fn an_extension_to_less_changes_nothing() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    assert_eq!(harness.extend(a, 300), Some(deadline(1000, 300)));
    harness.silent();
    harness.untold("a");
    harness.wait_until(1888);
    harness.untold("a");
}

/// The ticket brought more than its fixed lease is meant to last: an extension within that is acquired
/// at once.
#[test]
fn w3_an_extension_within_the_tenure_succeeds_at_once() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(3000).until(1100));
    let b = harness.arrive("b", fixed(900));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.wait_until(1200);
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
    harness.grant(asker(&enter), 3000, 5);
    assert_eq!(harness.granted("b").1, deadline(1200, 900));
    assert!(harness.take(b));
    assert_eq!(harness.extend(b, 2000), Some(deadline(1200, 2000)));
    assert_eq!(prolonged(&mut harness, "b"), deadline(1200, 2000));
    harness.silent();
}

/// A renewed lease goes on being renewed; the watchdog's own ttl does not shorten it.
#[test]
fn the_watchdog_goes_on_after_an_extension() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.extend(a, 5000);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), deadline(1000, 5000));
    harness.wait_until(1300);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    harness.reply(&renew, Outcome::Renewed);
    harness.untold("a");
    harness.wait_until(5000);
    // The next, which has no answer.
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
    harness.untold("a");
}

/// The watchdog's last renewal moved no deadline, since its holder had extended the lease past it: that it was the
/// last was never told, and the lease ended without that word.
#[test]
fn the_last_renewal_of_an_extended_lease_is_told() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed_at_most(2), 5);
    harness.extend(a, 5000);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    prolonged(&mut harness, "a");
    for (at, told) in [(1300, false), (1600, true)] {
        harness.wait_until(at);
        let renew = harness.sent();
        harness.reply(&renew, Outcome::Renewed);
        if told {
            let verdict = harness.lease_told("a");
            let until = deadline(1000, 5000);
            assert!(
                matches!(verdict, LeaseVerdict::Prolonged { deadline, last: true } if deadline.as_micros() as u64 == until),
                "{verdict:?}"
            );
        }
        harness.untold("a");
    }
    harness.wait_until(5947);
    harness.untold("a");
    harness.silent();
}

/// One in flight may ask for less: it is followed by another.
#[test]
fn an_extension_follows_the_renewal_in_flight() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let first = harness.sent();
    harness.extend(a, 5000);
    harness.silent();
    harness.wait_until(1310);
    harness.reply(&first, Outcome::Renewed);
    prolonged(&mut harness, "a");
    let second = harness.sent();
    assert!(matches!(second, Op::Renew { ttl, .. } if ttl == ms(5000)));
    harness.reply(&second, Outcome::Renewed);
    assert!(prolonged(&mut harness, "a") >= deadline(1300, 5000));
    harness.wait_until(1320);
    harness.silent();
}

/// The server says no, the connection breaks: the wish stands until it is met, also for a lease that
/// no watchdog renews.
#[test]
fn o4_an_extension_that_is_not_met_is_tried_again() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.extend(a, 2000);
    let renew = harness.sent();
    harness.fail(&renew, OpError::Refused(broken()));
    harness.wait_until(1100);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(2000)));
    harness.lose(&renew);
    harness.wait_until(1400);
    harness.silent();
    harness.up(true);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(2000)));
    harness.reply(&renew, Outcome::Renewed);
    // Unrenewed twice before.
    while !matches!(harness.lease_told("a"), LeaseVerdict::Prolonged { .. }) {}
    harness.wait_until(2900);
    harness.silent();
    harness.untold("a");
}

/// It was asked for while the connection was gone: the new one brings it.
#[test]
fn o4_an_extension_during_an_outage_is_met_after_it() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.down();
    harness.wait_until(1300);
    harness.extend(a, 2000).expect("it is held");
    harness.wait_until(1500);
    harness.silent();
    harness.up(true);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), deadline(1300, 2000));
}

/// Two wishes: the longer one, and the later one.
#[test]
fn two_extensions_are_both_met() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    let long = harness.extend(a, 5000).expect("it is held");
    let short = harness.extend(a, 1000).expect("it is held");
    let first = harness.sent();
    harness.wait_until(1010);
    harness.reply(&first, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), long.max(short));

    // Also if the store refuses the first renewal, or a watchdog's is in flight.
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.extend(a, 5000);
    harness.extend(a, 1000);
    let first = harness.sent();
    harness.fail(&first, OpError::Refused(broken()));
    harness.wait_until(1200);
    assert!(matches!(harness.sent(), Op::Renew { ttl, .. } if ttl >= ms(5000)));

    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let watchdog = harness.sent();
    harness.extend(a, 5000);
    harness.wait_until(1305);
    // This one the watchdog's renewal meets.
    harness.wait_until(1500);
    harness.extend(a, 650);
    harness.reply(&watchdog, Outcome::Renewed);
    assert!(matches!(harness.sent(), Op::Renew { ttl, .. } if ttl >= ms(5000)));
}

/// A holder extended its lease to an hour, and was done at once. The next waiter here had the key by a
/// pass: had it crashed then, the key would have been gone for that hour, not for its ttl; and one
/// that was to be renewed twice at most held for the hour. It gets a tenure of its own.
#[test]
fn w6_a_tenure_that_was_extended_is_not_passed_on() {
    for next in [
        fixed(900),
        fixed(900).renewed(),
        fixed(900).renewed_at_most(2),
    ] {
        // Whether or not the store has confirmed it.
        for confirmed in [true, false] {
            let mut harness = Harness::new();
            let (a, owner) = harness.hold("a", fixed(900), 5);
            harness.arrive("b", next);
            harness.extend(a, 3_600_000);
            let renew = harness.sent();
            if confirmed {
                harness.reply(&renew, Outcome::Renewed);
                prolonged(&mut harness, "a");
            }
            harness.wait_until(1005);
            // A shorter one that follows does not undo it.
            harness.extend(a, 900);
            harness.finish(a);
            harness.untold("b");
            let hand_on = harness.sent();
            assert!(
                matches!(hand_on, Op::Yield { old, ttl, .. } if old == owner && ttl == ms(900))
            );
            harness.reply(&hand_on, Outcome::Won { epoch: 6 });
            assert_eq!(harness.granted("b"), (6 * 64, deadline(1005, 900)));
        }
    }

    // To no more than the next one wants anyway, it is a tenure like any other.
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.arrive("b", fixed(2000));
    harness.extend(a, 2000);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    harness.finish(a);
    assert_eq!(harness.granted("b"), (5 * 64 + 1, deadline(1000, 2000)));
}

/// A lease that is over is not extended, and nothing is sent for it.
#[test]
fn a_lease_that_is_over_is_not_extended() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.finish(a);
    harness.sent();
    assert_eq!(harness.extend(a, 2000), None);
    harness.silent();

    let mut harness = Harness::new();
    let (b, _) = harness.hold("b", fixed(900), 5);
    harness.stop_until(1889);
    assert_eq!(harness.extend(b, 2000), None);
    assert!(matches!(harness.ended("b"), LeaseEnd::Lost(_)));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// The one who adopts has a lease of its own, proved by the command that reports it (D1).
#[test]
fn d1_an_adopted_lease_counts_from_its_command() {
    let mut harness = Harness::new();
    let a = harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    assert!(
        matches!(&adopt, Op::Adopt { from, ttl, .. } if &**from == "other:9" && *ttl == ms(900))
    );
    harness.wait_until(1030);
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    assert_eq!(harness.granted("a"), (9 * 64, deadline(1000, 900)));
    assert!(harness.take(a));
    harness.finish(a);
    assert!(matches!(harness.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// It is another's, or nobody's: told once, and nothing is left to settle.
#[test]
fn an_adoption_that_comes_too_late_is_lost() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.reply(&adopt, Outcome::NotOld);
    assert!(matches!(harness.refused("a"), NotGranted::NothingToAdopt));
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// Our own tenure shows that the store has the key for us, not for one that left it.
#[test]
fn a_held_lease_cannot_be_adopted_here() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900), 5);
    harness.adopt("b", "other:9", fixed(900));
    assert!(matches!(harness.refused("b"), NotGranted::NothingToAdopt));
    harness.silent();

    // Nor what comes while somebody waits for it to be.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(900));
    let enter = harness.sent();
    harness.adopt("b", "other:9", fixed(900));
    harness.silent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    assert!(matches!(harness.refused("b"), NotGranted::NothingToAdopt));
}

/// The store gave us the key so long ago that it may be another's by now, and nobody waits for it any more: that is no
/// reason to refuse one who adopts. (Found by the simulator.)
#[test]
fn d4_a_win_that_is_over_on_arrival_refuses_no_adoption() {
    let mut harness = Harness::new();
    let waiting = harness.arrive("a", fixed(100));
    let enter = harness.sent();
    harness.wait_until(1200);
    harness.leave(waiting);
    harness.adopt("b", "other:9", fixed(900));
    harness.reply_at(&enter, 1010, Outcome::Won { epoch: 5 });
    harness.untold("b");
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
    harness.reply(&release, Outcome::Gone { held: false });
    let adopt = harness.sent();
    assert!(matches!(adopt, Op::Adopt { .. }), "{adopt:?}");
}

/// O6: a ticket that stands for the queue is withdrawn first, since one op is in flight (O2); the
/// line asks again behind it.
#[test]
fn o6_an_adoption_takes_the_place_of_the_lines_acquisition() {
    let mut harness = Harness::new();
    let waiting = harness.arrive("a", fixed(900));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    let b = harness.adopt("b", "other:9", fixed(900));
    let withdraw = harness.sent();
    assert!(matches!(withdraw, Op::Withdraw { owner, .. } if owner == asker(&enter)));
    harness.silent();
    harness.reply(&withdraw, Outcome::Gone { held: false });
    let adopt = harness.sent();
    assert!(matches!(adopt, Op::Adopt { .. }));
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    harness.granted("b");
    harness.untold("a");
    assert!(harness.take(b));
    harness.finish(b);
    // Its tenure is one like any other: the queue may have a pass.
    assert_eq!(harness.granted("a").0, 9 * 64 + 1);
    assert!(harness.take(waiting));
}

/// After one that came too late, the queue asks at once.
#[test]
fn i6_the_queue_goes_on_after_an_adoption_that_failed() {
    let mut harness = Harness::new();
    harness.adopt("b", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.arrive("a", fixed(900));
    harness.reply(&adopt, Outcome::NotOld);
    let enter = harness.sent();
    assert!(matches!(enter, Op::Enter { .. }));
    assert_ne!(asker(&enter), asker(&adopt));
}

/// The reply was lost: the same owner asks again, and S3 makes it good.
#[test]
fn o6_an_adoption_whose_reply_is_lost_is_asked_again_under_its_owner() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900).until(5000));
    let adopt = harness.sent();
    harness.lose(&adopt);
    harness.untold("a");
    harness.wait_until(1300);
    harness.silent();
    harness.up(true);
    harness.sent_again(&adopt);
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    assert_eq!(harness.granted("a").1, deadline(1300, 900));
}

/// Whoever wanted it is gone, and its op may have been done: what it brought is released. The line
/// has no right to it before others.
#[test]
fn o6_an_adoption_for_nobody_is_released() {
    let mut harness = Harness::new();
    let a = harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.arrive("b", fixed(900));
    harness.leave(a);
    harness.silent();
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    harness.untold("b");

    let mut harness = Harness::new();
    let a = harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.lose(&adopt);
    harness.leave(a);
    harness.up(true);
    assert!(matches!(harness.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// No answer in time is told as such, and what comes later is released.
#[test]
fn an_adoption_without_an_answer_fails_in_time() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900).until(2000));
    let adopt = harness.sent();
    harness.wait_until(1999);
    harness.untold("a");
    harness.wait_until(2000);
    assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
    harness.reply(&adopt, Outcome::NotOld);
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// The reply took longer than the lease: the same owner asks again (S3), and is told that what it
/// had is over.
#[test]
fn d4_an_adopted_lease_that_is_over_on_arrival_is_not_used() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(100).until(5000));
    let adopt = harness.sent();
    harness.wait_until(1200);
    harness.reply_at(&adopt, 1010, Outcome::Won { epoch: 9 });
    harness.untold("a");
    harness.sent_again(&adopt);
    harness.reply(&adopt, Outcome::NotOld);
    assert!(matches!(harness.refused("a"), NotGranted::NothingToAdopt));
    assert!(harness.turnstile.is_idle());
}

/// W4: adopted, and nobody looks.
#[test]
fn w4_an_adopted_lease_that_nobody_takes_is_released() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    harness.granted("a");
    harness.wait_until(1300);
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::TurnLost));
    assert!(matches!(harness.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// Two want the same: the second is refused by the first one's tenure, without a question.
#[test]
fn i1_of_two_that_adopt_one_is_served() {
    let mut harness = Harness::with(
        Rules {
            max_waiters: 1,
            ..rules()
        },
        true,
    );
    harness.adopt("a", "other:9", fixed(900));
    harness.adopt("b", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.silent();
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    harness.granted("a");
    assert!(matches!(harness.refused("b"), NotGranted::NothingToAdopt));
    harness.silent();
}

/// A server that refuses is asked again, one that will never do it is not.
#[test]
fn a_refused_adoption_is_tried_again_if_that_may_help() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900).until(5000));
    let adopt = harness.sent();
    harness.fail(&adopt, OpError::Refused(broken()));
    harness.untold("a");
    harness.wait_until(1200);
    let again = harness.sent_again(&adopt);
    let left = |op: &Op| match op {
        Op::Adopt { within, .. } => *within,
        other => panic!("{other:?}"),
    };
    assert_eq!(left(&adopt), ms(4000));
    let since = left(&adopt) - left(&again);
    assert!(since >= ms(50) && since <= ms(200), "{since:?}");
    let never = crate::base::StoreError::lasting("no right");
    harness.fail(&adopt, OpError::Refused(never));
    assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
    // Some nodes of a quorum may have done it.
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    harness.reply(&release, Outcome::Gone { held: false });
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// M8: it might be done when its caller has given up, and then the lease would be nobody's.
#[test]
fn m8_an_adoption_is_not_tried_again_in_the_last_eighth_of_its_time() {
    for (fails_at, again) in [(1800, true), (1850, false)] {
        let mut harness = Harness::new();
        harness.adopt("a", "other:9", fixed(900).until(2000));
        let adopt = harness.sent();
        harness.wait_until(fails_at);
        // It is asked again after a tenth of a second at the most.
        harness.fail(&adopt, OpError::Refused(broken()));
        harness.wait_until(1999);
        if again {
            let adopt = harness.sent();
            harness.fail(&adopt, OpError::Refused(broken()));
        }
        harness.silent();
        harness.untold("a");
        harness.wait_until(2000);
        assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
        assert!(matches!(harness.sent(), Op::Release { .. }));
    }
}

/// The end of the registry: it is told, and what may have come is released.
#[test]
fn o6_a_shutdown_settles_an_adoption() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:9", fixed(900));
    let adopt = harness.sent();
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.refused("a"), NotGranted::Closed));
    harness.reply(&adopt, Outcome::Won { epoch: 9 });
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
    harness.adopt("b", "other:9", fixed(900));
    assert!(matches!(harness.refused("b"), NotGranted::Closed));
}

/// O1: an owner names one tenure. What this registry left it may take up again, under another.
#[test]
fn o1_our_own_detached_lease_can_be_adopted_under_a_new_owner() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900), 5);
    let left = harness.detach(a).expect("it was held");
    assert_eq!(left, owner);
    let Owner { sequence, .. } = left;
    let b = harness.adopt("b", &format!("us:{sequence}"), fixed(900));
    let adopt = harness.sent();
    assert_ne!(asker(&adopt), owner);
    harness.reply(&adopt, Outcome::Won { epoch: 6 });
    harness.granted("b");
    assert!(harness.take(b));
}

// ---- M8: keys that stay for a time of their own

/// The lease has its own ttl. One call at its end says how long the key stays, be that more than is left of the ttl or
/// less.
#[test]
fn m8_the_end_of_a_lease_keeps_its_key_by_one_call() {
    let mut harness = Harness::new();
    let id = harness.arrive("a", fixed(900).renewed().kept_for(5000));
    let enter = harness.sent();
    let owner = asker(&enter);
    assert!(matches!(enter, Op::Enter { ttl, .. } if ttl == ms(900)));
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    assert_eq!(harness.granted("a").1, deadline(1000, 900));
    assert!(harness.take(id));
    harness.wait_until(1300);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    harness.reply(&renew, Outcome::Renewed);
    prolonged(&mut harness, "a");
    harness.wait_until(1500);
    assert!(harness.is_kept(id));
    harness.keep(id);
    let (keep, left) = (harness.sent(), ms(4500));
    assert_eq!(keep, Op::Keep { owner, left });
    harness.untold("a");
    harness.reply(&keep, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert!(harness.turnstile.is_idle());

    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(30_000).kept_for(2000), 5);
    harness.keep(a);
    let left = ms(2000);
    assert_eq!(harness.sent(), Op::Keep { owner, left });
}

/// A lease that lasts longer is renewed, and released at its end.
#[test]
fn m8_a_lease_that_lasts_longer_is_released() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(6000).kept_for(5000), 5);
    harness.stop_until(5999);
    assert!(harness.is_kept(a));
    harness.stop_until(6000);
    assert!(!harness.is_kept(a));
    harness.keep(a);
    assert_eq!(harness.sent(), Op::Release { owner });
}

/// The store was away. What is left is counted anew each time that it is told; when nothing is left, it is told to
/// release the key.
#[test]
fn m8_what_is_left_is_counted_when_it_is_sent() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(6000).kept_for(5000), 5);
    harness.keep(a);
    let keep = harness.sent();
    harness.lose(&keep);
    harness.stop_until(4000);
    harness.up(true);
    let (keep, left) = (harness.sent(), ms(2000));
    assert_eq!(keep, Op::Keep { owner, left });
    harness.lose(&keep);
    harness.stop_until(6500);
    harness.up(true);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    // One of the first two was done.
    harness.reply(&release, Outcome::Gone { held: false });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.silent();
}

/// The key had gone: its holder is told.
#[test]
fn m8_a_lease_that_is_gone_keeps_nothing() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).kept_for(5000), 5);
    harness.keep(a);
    let keep = harness.sent();
    harness.reply(&keep, Outcome::Gone { held: false });
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    harness.silent();
}

/// Its work was stopped in the midst of the period: others are kept out for the rest of it.
#[test]
fn m8_a_lease_that_is_lost_at_its_deadline_keeps_its_key() {
    for ttl in [900, 5000] {
        let mut harness = Harness::new();
        let (_, owner) = harness.hold("a", fixed(ttl).kept_for(6000), 5);
        harness.arrive("b", fixed(900));
        let end = ttl - ttl / 100 - 2 + 1000;
        harness.wait_until(end);
        assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
        let (keep, left) = (harness.sent(), ms(7000 - end));
        assert_eq!(keep, Op::Keep { owner, left }, "nothing is passed on");
        harness.reply(&keep, Outcome::Gone { held: true });
        assert!(matches!(harness.sent(), Op::Enter { .. }));
    }
}

/// Whoever was granted it and did not look has not done the work.
#[test]
fn m8_a_turn_that_nobody_takes_keeps_nothing() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(900).kept_for(1000));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.wait_until(1400);
    assert!(matches!(
        harness.told("a"),
        Verdict::Waiter(WaiterVerdict::TurnLost)
    ));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// Whoever waits here gets the key no sooner than others: it asks when that is over.
#[test]
fn m8_a_kept_key_is_not_passed_on() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).kept_for(3000), 5);
    harness.arrive("b", fixed(900));
    harness.keep(a);
    let keep = harness.sent();
    assert!(matches!(keep, Op::Keep { owner: of, .. } if of == owner));
    harness.reply(&keep, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    let enter = harness.sent();
    assert_ne!(asker(&enter), owner, "O1: its owner is retired");
    harness.reply(&enter, busy(3000, 7));
    harness.wait_until(3999);
    harness.silent();
    harness.wait_until(4050);
    let again = harness.sent();
    harness.reply(&again, Outcome::Won { epoch: 6 });
    harness.granted("b");
}

/// A pass is an acquisition, too.
#[test]
fn m8_a_key_that_was_passed_is_kept_from_the_pass_on() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900), 5);
    let b = harness.arrive("b", fixed(100).kept_for(5000));
    harness.wait_until(1010);
    harness.finish(a);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.granted("b");
    assert!(harness.take(b));
    harness.wait_until(1030);
    harness.keep(b);
    let left = ms(4980);
    assert_eq!(harness.sent(), Op::Keep { owner, left });
}

/// The registry shuts down while it is held: the key stays for the rest of its time.
#[test]
fn m8_a_shutdown_keeps_the_key() {
    let mut harness = Harness::new();
    let (_, owner) = harness.hold("a", fixed(900).kept_for(5000), 5);
    harness.stop_until(1400);
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    let (keep, left) = (harness.sent(), ms(4600));
    assert_eq!(keep, Op::Keep { owner, left });
    harness.reply(&keep, Outcome::Gone { held: true });
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// Only work that succeeds keeps the key: neither a loss nor a shutdown is that.
#[test]
fn m8_on_condition_a_lease_that_ends_by_itself_keeps_nothing() {
    let wish = fixed(900).kept_for(5000).on_condition();
    for closes in [false, true] {
        let mut harness = Harness::new();
        let (_, owner) = harness.hold("a", wish, 5);
        match closes {
            true => harness.feed(|turnstile, cx| turnstile.close(cx, |_| None)),
            false => harness.wait_until(1889),
        }
        assert_eq!(harness.sent(), Op::Release { owner });
    }
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", wish, 5);
    harness.keep(a);
    let left = ms(5000);
    assert_eq!(harness.sent(), Op::Keep { owner, left });
}

/// The grant of a tenure that has ended may come late. Its release finds nobody of that name (O1).
#[test]
fn m8_a_late_grant_is_released_under_its_own_name() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).kept_for(5000), 5);
    harness.keep(a);
    let keep = harness.sent();
    harness.grant(owner, 900, 5);
    harness.silent();
    harness.reply(&keep, Outcome::Gone { held: true });
    harness.silent();
    harness.grant(owner, 900, 5);
    assert_eq!(harness.sent(), Op::Release { owner });
}

/// Its ticket has heard when a lease ends that was kept for longer, or for less. It is told, and asks anew: after the
/// answer on its way, which may be older.
#[test]
fn m8_a_ticket_that_is_told_asks_when_the_key_is_free() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(900));
    let enter = harness.sent();
    harness.reply(&enter, busy(30_000, 7));
    harness.wait_until(2000);
    harness.freed();
    let again = harness.sent();
    assert_eq!(asker(&again), asker(&enter));
    harness.freed();
    harness.silent();
    harness.reply(&again, busy(29_000, 7));
    let again = harness.sent();
    harness.reply(&again, busy(500, 7));
    harness.wait_until(2500);
    harness.silent();
    harness.wait_until(2550);
    let again = harness.sent();
    harness.reply(&again, Outcome::Won { epoch: 6 });
    harness.granted("a");
}

// ---- M9: leases that begin anew when their group is complete

/// Its key was renewed while the last one was waited for. A fixed lease lasts for its ttl from now on, and is not renewed any
/// more; and its key is kept from now on (M8). One that may be renewed once has that renewal still: the one that was under
/// way was not its own, and gives it no second if the store refuses it.
#[test]
fn m9_a_lease_that_begins_anew_is_as_if_it_were_acquired_now() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1200);
    assert!(!harness.is_kept(a));
    harness.restart(a, 0, OnFinish::KeepFor(ms(5000)));
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), deadline(1200, 900));
    assert!(harness.is_kept(a));
    harness.wait_until(2088);
    harness.silent();
    harness.untold("a");
    harness.wait_until(2089);
    assert_eq!(harness.lost("a"), LossCause::FixedTtl);
    let left = ms(1200 + 5000 - 2089);
    assert_eq!(harness.sent(), Op::Keep { owner, left });

    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let before = harness.sent();
    harness.restart(a, 1, OnFinish::Release);
    harness.silent();
    harness.fail(&before, OpError::Refused(broken()));
    let told = harness.lease_told("a");
    assert!(matches!(told, LeaseVerdict::Unrenewed(_)), "{told:?}");
    harness.wait_until(1360);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    harness.reply(&renew, Outcome::Renewed);
    let told = harness.lease_told("a");
    assert!(
        matches!(told, LeaseVerdict::Prolonged { last: true, .. }),
        "{told:?}"
    );
}
