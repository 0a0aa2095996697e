//! How leases end but by a release: kept keys, longer leases, adopted ones.

use super::desk::{Desk, asker, broken, busy, deadline, fixed, ms, rules};
use crate::store::contract::{Op, OpError, Outcome, Owner};
use crate::turnstile::{LeaseEnd, LeaseVerdict, Refusal, Rules, WaiterVerdict};

fn prolonged(desk: &mut Desk, who: &'static str) -> u64 {
    match desk.lease_told(who) {
        LeaseVerdict::Prolonged { deadline, .. } => deadline.as_micros() as u64,
        other => panic!("{who} was to be prolonged, not told {other:?}"),
    }
}

/// Nothing is sent, and nothing is owed: the key runs out by itself.
#[test]
fn a_kept_key_is_left_alone() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(900).kept(), 5);
    assert_eq!(desk.keep(a), Some(owner));
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    desk.silent();
    assert!(desk.turnstile.is_idle());
}

/// A watchdog that was due just then prolonged the key in the moment in which it was left.
#[test]
fn a_watchdog_that_is_due_at_the_end_does_not_prolong_what_is_kept() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed().kept(), 5);
    // The timer is late.
    desk.stop_until(1500);
    desk.keep(a).expect("it was held");
    desk.silent();

    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed().kept(), 5);
    desk.stop_until(1500);
    desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    desk.silent();
}

/// Whoever is next in line here has the key no sooner than anybody else: when it has run out.
#[test]
fn w2_a_kept_key_is_not_passed_on() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(900).kept(), 5);
    desk.arrive("b", fixed(900));
    desk.keep(a);
    desk.untold("b");
    let enter = desk.sent();
    assert!(matches!(enter, Op::Enter { .. }));
    assert_ne!(asker(&enter), owner, "O1: its owner is retired");
    desk.reply(&enter, busy(890, 7));
    desk.wait_until(1889);
    desk.silent();
    desk.wait_until(1940);
    let again = desk.sent();
    desk.reply(&again, Outcome::Won { epoch: 6 });
    desk.granted("b");
}

/// A pass brings what is left of the tenure. A key that is to stay for its ttl wants all of it.
#[test]
fn w6_one_whose_key_is_kept_is_given_no_pass() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    desk.arrive("b", fixed(900).kept());
    desk.wait_until(1005);
    desk.finish(a);
    let op = desk.sent();
    assert!(matches!(op, Op::Yield { ttl, .. } if ttl == ms(900)));
    desk.reply(&op, Outcome::Won { epoch: 6 });
    assert_eq!(desk.granted("b").1, deadline(1005, 900));
}

/// The registry shuts down while it is held: the key stays, and nobody waits for an answer.
#[test]
fn o6_a_shutdown_leaves_what_is_to_be_kept() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).kept(), 5);
    desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(desk.ended("a"), LeaseEnd::Closed));
    desk.silent();
    assert!(desk.turnstile.is_idle());

    // One that nobody has seen yet was not used: it is given back.
    let mut desk = Desk::new();
    desk.arrive("b", fixed(900).kept());
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { epoch: 5 });
    desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(desk.sent(), Op::Release { .. }));
}

/// An explicit wish goes before: a job that failed gives its turn back.
#[test]
fn what_was_to_be_kept_can_be_released() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(900).kept(), 5);
    desk.finish(a);
    assert!(matches!(desk.sent(), Op::Release { owner: of } if of == owner));
}

/// At the deadline it is lost, as ever, and a release is sent (D5).
#[test]
fn d5_what_was_to_be_kept_is_lost_at_its_deadline() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).kept(), 5);
    desk.wait_until(1889);
    assert!(matches!(desk.ended("a"), LeaseEnd::Lost));
    assert!(matches!(desk.sent(), Op::Release { .. }));
}

/// The push was slower than the reply that told of the same win (O3). By O1 the grant of a retired
/// owner is given back at once: that freed a key that was to stay. The turnstile that left it may
/// be forgotten by then.
#[test]
fn o1_a_late_grant_does_not_free_what_is_kept() {
    let mut desk = Desk::new();
    let id = desk.arrive("a", fixed(900).kept());
    let enter = desk.sent();
    let owner = asker(&enter);
    desk.reply(&enter, busy(500, 7));
    desk.up(true);
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { epoch: 6 });
    desk.granted("a");
    assert!(desk.take(id));
    assert_eq!(desk.keep(id), Some(owner));
    desk.forget();
    desk.grant(owner, 900, 5);
    desk.silent();
    // Once it has run out, a grant is worth what any other is.
    desk.stop_until(5000);
    desk.grant(owner, 900, 5);
    assert!(matches!(desk.sent(), Op::Release { owner: of } if of == owner));
}

/// A renewal was under way when the key was left, and the store was slow to do it: the key lived on for longer than could
/// be told at the end. A grant that was slower still found its owner forgotten, and was given back: that freed the key
/// that was to stay. (Found by simulation.)
#[test]
fn o1_a_late_grant_does_not_free_what_a_late_renewal_keeps() {
    let mut desk = Desk::new();
    let id = desk.arrive("a", fixed(900).renewed().kept());
    let enter = desk.sent();
    let owner = asker(&enter);
    desk.reply(&enter, busy(500, 7));
    desk.up(true);
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { epoch: 6 });
    desk.granted("a");
    assert!(desk.take(id));
    desk.wait_until(1300);
    assert!(matches!(desk.sent(), Op::Renew { .. }));
    assert_eq!(desk.keep(id), Some(owner));
    desk.forget();
    // Done by the store at 2000, after which it has the key until 2900.
    desk.stop_until(2500);
    desk.grant(owner, 900, 5);
    desk.silent();
}

/// A renewal that was under way when the key was left changes nothing here.
#[test]
fn a_renewal_under_way_at_the_end_is_heard_by_nobody() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed().kept(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.keep(a);
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    desk.reply(&renew, Outcome::Renewed);
    desk.wait_until(10_000);
    desk.silent();
    desk.untold("a");
    assert!(desk.turnstile.is_idle());
}

/// A fixed lease lasts what was asked for, counted from the asking; and no longer.
#[test]
fn d1_an_extension_counts_from_when_it_was_asked_for() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(900), 5);
    desk.wait_until(1400);
    assert_eq!(desk.extend(a, 2000), Some(deadline(1400, 2000)));
    let renew = desk.sent();
    assert!(matches!(renew, Op::Renew { owner: of, ttl, .. } if of == owner && ttl == ms(2000)));
    desk.untold("a");
    desk.wait_until(1450);
    desk.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut desk, "a"), deadline(1400, 2000));
    desk.wait_until(3377);
    desk.silent();
    desk.untold("a");
    desk.wait_until(3378);
    assert!(matches!(desk.ended("a"), LeaseEnd::Lost));
}

/// Never shorter; and what is proved already costs no call.
#[test]
fn an_extension_to_less_changes_nothing() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    assert_eq!(desk.extend(a, 300), Some(deadline(1000, 300)));
    desk.silent();
    desk.untold("a");
    desk.wait_until(1888);
    desk.untold("a");
}

/// The ticket brought more than its fixed lease is meant to last: an extension within that is had
/// at once.
#[test]
fn w3_an_extension_within_the_tenure_is_had_at_once() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(3000).until(1100));
    let b = desk.arrive("b", fixed(900));
    let enter = desk.sent();
    desk.reply(&enter, busy(60_000, 7));
    desk.wait_until(1200);
    assert!(matches!(desk.refused("a"), Refusal::Busy));
    desk.grant(asker(&enter), 3000, 5);
    assert_eq!(desk.granted("b").1, deadline(1200, 900));
    assert!(desk.take(b));
    assert_eq!(desk.extend(b, 2000), Some(deadline(1200, 2000)));
    assert_eq!(prolonged(&mut desk, "b"), deadline(1200, 2000));
    desk.silent();
}

/// A renewed lease goes on being renewed; the watchdog's own ttl does not shorten it.
#[test]
fn the_watchdog_goes_on_after_an_extension() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed(), 5);
    desk.extend(a, 5000);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut desk, "a"), deadline(1000, 5000));
    desk.wait_until(1300);
    let renew = desk.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    desk.reply(&renew, Outcome::Renewed);
    desk.untold("a");
    desk.wait_until(5000);
    // The next, which has no answer.
    assert!(matches!(desk.lease_told("a"), LeaseVerdict::RenewalLate));
    desk.untold("a");
}

/// The watchdog's last renewal moved no deadline, since its holder had extended the lease past it: that it was the
/// last was never told, and the lease ended without that word.
#[test]
fn the_last_renewal_of_an_extended_lease_is_told() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed_at_most(2), 5);
    desk.extend(a, 5000);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    prolonged(&mut desk, "a");
    for (at, told) in [(1300, false), (1600, true)] {
        desk.wait_until(at);
        let renew = desk.sent();
        desk.reply(&renew, Outcome::Renewed);
        if told {
            let verdict = desk.lease_told("a");
            let until = deadline(1000, 5000);
            assert!(
                matches!(verdict, LeaseVerdict::Prolonged { deadline, last: true } if deadline.as_micros() as u64 == until),
                "{verdict:?}"
            );
        }
        desk.untold("a");
    }
    desk.wait_until(5947);
    desk.untold("a");
    desk.silent();
}

/// One in flight may ask for less: it is followed by another.
#[test]
fn a_renewal_under_way_is_followed_by_what_was_asked_for() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let first = desk.sent();
    desk.extend(a, 5000);
    desk.silent();
    desk.wait_until(1310);
    desk.reply(&first, Outcome::Renewed);
    prolonged(&mut desk, "a");
    let second = desk.sent();
    assert!(matches!(second, Op::Renew { ttl, .. } if ttl == ms(5000)));
    desk.reply(&second, Outcome::Renewed);
    assert!(prolonged(&mut desk, "a") >= deadline(1300, 5000));
    desk.wait_until(1320);
    desk.silent();
}

/// The server says no, the connection breaks: the wish stands until it is met, also for a lease that
/// no watchdog renews.
#[test]
fn o4_a_wish_that_is_not_met_is_tried_again() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    desk.extend(a, 2000);
    let renew = desk.sent();
    desk.fail(&renew, OpError::Refused(broken()));
    desk.wait_until(1100);
    let renew = desk.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(2000)));
    desk.lose(&renew);
    desk.wait_until(1400);
    desk.silent();
    desk.up(true);
    let renew = desk.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(2000)));
    desk.reply(&renew, Outcome::Renewed);
    // Unrenewed twice before.
    while !matches!(desk.lease_told("a"), LeaseVerdict::Prolonged { .. }) {}
    desk.wait_until(2900);
    desk.silent();
    desk.untold("a");
}

/// It was asked for while the connection was gone: the new one brings it.
#[test]
fn o4_a_wish_of_an_outage_is_met_after_it() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    desk.down();
    desk.wait_until(1300);
    desk.extend(a, 2000).expect("it is held");
    desk.wait_until(1500);
    desk.silent();
    desk.up(true);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut desk, "a"), deadline(1300, 2000));
}

/// Two wishes: the longer one, and the later one.
#[test]
fn two_wishes_are_both_met() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    let long = desk.extend(a, 5000).expect("it is held");
    let short = desk.extend(a, 1000).expect("it is held");
    let first = desk.sent();
    desk.wait_until(1010);
    desk.reply(&first, Outcome::Renewed);
    assert_eq!(prolonged(&mut desk, "a"), long.max(short));
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
            let mut desk = Desk::new();
            let (a, owner) = desk.hold("a", fixed(900), 5);
            desk.arrive("b", next);
            desk.extend(a, 3_600_000);
            let renew = desk.sent();
            if confirmed {
                desk.reply(&renew, Outcome::Renewed);
                prolonged(&mut desk, "a");
            }
            desk.wait_until(1005);
            desk.finish(a);
            desk.untold("b");
            let hand_on = desk.sent();
            assert!(
                matches!(hand_on, Op::Yield { old, ttl, .. } if old == owner && ttl == ms(900))
            );
            desk.reply(&hand_on, Outcome::Won { epoch: 6 });
            assert_eq!(desk.granted("b"), (6 * 64, deadline(1005, 900)));
        }
    }

    // To no more than the next one wants anyway, it is a tenure like any other.
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    desk.arrive("b", fixed(2000));
    desk.extend(a, 2000);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    desk.finish(a);
    assert_eq!(desk.granted("b"), (5 * 64 + 1, deadline(1000, 2000)));
}

/// A lease that is over is not extended, and nothing is sent for it.
#[test]
fn a_lease_that_is_over_is_not_extended() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900), 5);
    desk.finish(a);
    desk.sent();
    assert_eq!(desk.extend(a, 2000), None);
    desk.silent();

    let mut desk = Desk::new();
    let (b, _) = desk.hold("b", fixed(900), 5);
    desk.stop_until(1889);
    assert_eq!(desk.extend(b, 2000), None);
    assert!(matches!(desk.ended("b"), LeaseEnd::Lost));
    assert!(matches!(desk.sent(), Op::Release { .. }));
}

/// The one who adopts has a lease of its own, proved by the command that reports it (D1).
#[test]
fn d1_an_adopted_lease_counts_from_its_command() {
    let mut desk = Desk::new();
    let a = desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    assert!(
        matches!(&adopt, Op::Adopt { from, ttl, .. } if &**from == "other:9" && *ttl == ms(900))
    );
    desk.wait_until(1040);
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    assert_eq!(desk.granted("a"), (9 * 64, deadline(1000, 900)));
    assert!(desk.take(a));
    desk.finish(a);
    assert!(matches!(desk.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// It is another's, or nobody's: told once, and nothing is left to settle.
#[test]
fn an_adoption_that_comes_too_late_is_lost() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.reply(&adopt, Outcome::NotOld);
    assert!(matches!(desk.refused("a"), Refusal::NothingToAdopt));
    desk.silent();
    assert!(desk.turnstile.is_idle());
}

/// Our own tenure shows that the store has the key for us, not for one that left it.
#[test]
fn what_we_hold_cannot_be_adopted() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900), 5);
    desk.adopt("b", "other:9", fixed(900));
    assert!(matches!(desk.refused("b"), Refusal::NothingToAdopt));
    desk.silent();

    // Nor what comes while somebody waits for it to be.
    let mut desk = Desk::new();
    desk.arrive("a", fixed(900));
    let enter = desk.sent();
    desk.adopt("b", "other:9", fixed(900));
    desk.silent();
    desk.reply(&enter, Outcome::Won { epoch: 5 });
    desk.granted("a");
    assert!(matches!(desk.refused("b"), Refusal::NothingToAdopt));
}

/// The store gave us the key so long ago that it may be another's by now, and nobody waits for it any more: that is no
/// reason to refuse one who adopts. (Found by simulation.)
#[test]
fn d4_a_win_that_is_over_on_arrival_refuses_no_adoption() {
    let mut desk = Desk::new();
    let waiting = desk.arrive("a", fixed(100));
    let enter = desk.sent();
    desk.wait_until(1200);
    desk.leave(waiting);
    desk.adopt("b", "other:9", fixed(900));
    desk.reply_at(&enter, 1010, Outcome::Won { epoch: 5 });
    desk.untold("b");
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
    desk.reply(&release, Outcome::Gone { held: false });
    let adopt = desk.sent();
    assert!(matches!(adopt, Op::Adopt { .. }), "{adopt:?}");
}

/// O6: a ticket that stands for the line is withdrawn first, since one op is in flight (O2); the
/// line asks anew behind it.
#[test]
fn o6_an_adoption_takes_the_place_of_the_lines_acquisition() {
    let mut desk = Desk::new();
    let waiting = desk.arrive("a", fixed(900));
    let enter = desk.sent();
    desk.reply(&enter, busy(60_000, 7));
    let b = desk.adopt("b", "other:9", fixed(900));
    let withdraw = desk.sent();
    assert!(matches!(withdraw, Op::Withdraw { owner, .. } if owner == asker(&enter)));
    desk.silent();
    desk.reply(&withdraw, Outcome::Gone { held: false });
    let adopt = desk.sent();
    assert!(matches!(adopt, Op::Adopt { .. }));
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    desk.granted("b");
    desk.untold("a");
    assert!(desk.take(b));
    desk.finish(b);
    // Its tenure is one like any other: the line may have a pass.
    assert_eq!(desk.granted("a").0, 9 * 64 + 1);
    assert!(desk.take(waiting));
}

/// After one that came too late, the line asks at once.
#[test]
fn i6_the_line_goes_on_after_an_adoption_that_failed() {
    let mut desk = Desk::new();
    desk.adopt("b", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.arrive("a", fixed(900));
    desk.reply(&adopt, Outcome::NotOld);
    let enter = desk.sent();
    assert!(matches!(enter, Op::Enter { .. }));
    assert_ne!(asker(&enter), asker(&adopt));
}

/// The reply was lost: the same owner asks again, and S3 makes it good.
#[test]
fn o6_an_adoption_whose_reply_is_lost_is_asked_again_under_its_owner() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900).until(5000));
    let adopt = desk.sent();
    desk.lose(&adopt);
    desk.untold("a");
    desk.wait_until(1300);
    desk.silent();
    desk.up(true);
    assert_eq!(desk.sent(), adopt);
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    assert_eq!(desk.granted("a").1, deadline(1300, 900));
}

/// Whoever wanted it is gone, and its op may have been done: what it brought is given back. The line
/// has no right to it before others.
#[test]
fn o6_an_adoption_for_nobody_is_released() {
    let mut desk = Desk::new();
    let a = desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.arrive("b", fixed(900));
    desk.leave(a);
    desk.silent();
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    desk.untold("b");

    let mut desk = Desk::new();
    let a = desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.lose(&adopt);
    desk.leave(a);
    desk.up(true);
    assert!(matches!(desk.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// No answer in time is told as such, and what comes later is given back.
#[test]
fn an_adoption_without_an_answer_fails_in_time() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900).until(2000));
    let adopt = desk.sent();
    desk.wait_until(1999);
    desk.untold("a");
    desk.wait_until(2000);
    assert!(matches!(desk.refused("a"), Refusal::Failed(_)));
    desk.reply(&adopt, Outcome::NotOld);
    desk.silent();
    assert!(desk.turnstile.is_idle());
}

/// The reply took longer than the lease: the same owner asks again (S3), and is told that what it
/// had is over.
#[test]
fn d4_an_adopted_lease_that_is_over_on_arrival_is_not_used() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(100).until(5000));
    let adopt = desk.sent();
    desk.wait_until(1200);
    desk.reply_at(&adopt, 1010, Outcome::Won { epoch: 9 });
    desk.untold("a");
    assert_eq!(desk.sent(), adopt);
    desk.reply(&adopt, Outcome::NotOld);
    assert!(matches!(desk.refused("a"), Refusal::NothingToAdopt));
    assert!(desk.turnstile.is_idle());
}

/// W4: adopted, and nobody looks.
#[test]
fn w4_an_adopted_lease_that_nobody_takes_is_released() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    desk.granted("a");
    desk.wait_until(1300);
    assert!(matches!(desk.waiter_told("a"), WaiterVerdict::TurnLost));
    assert!(matches!(desk.sent(), Op::Release { owner } if owner == asker(&adopt)));
}

/// Two want the same: the second is refused by the first one's tenure, without a question.
#[test]
fn i1_of_two_that_adopt_one_is_served() {
    let mut desk = Desk::with(
        Rules {
            max_waiters: 1,
            ..rules()
        },
        true,
    );
    desk.adopt("a", "other:9", fixed(900));
    desk.adopt("b", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.silent();
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    desk.granted("a");
    assert!(matches!(desk.refused("b"), Refusal::NothingToAdopt));
    desk.silent();
}

/// A server that refuses is asked again, one that will never do it is not.
#[test]
fn a_refused_adoption_is_tried_again_if_that_may_help() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900).until(5000));
    let adopt = desk.sent();
    desk.fail(&adopt, OpError::Refused(broken()));
    desk.untold("a");
    desk.wait_until(1200);
    assert_eq!(desk.sent(), adopt);
    let never = crate::StoreError::lasting("no right");
    desk.fail(&adopt, OpError::Refused(never));
    assert!(matches!(desk.refused("a"), Refusal::Failed(_)));
    // Some nodes of a quorum may have done it.
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    desk.reply(&release, Outcome::Gone { held: false });
    desk.silent();
    assert!(desk.turnstile.is_idle());
}

/// The end of the registry: it is told, and what may have come is given back.
#[test]
fn o6_a_shutdown_settles_an_adoption() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:9", fixed(900));
    let adopt = desk.sent();
    desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(desk.refused("a"), Refusal::Closed));
    desk.reply(&adopt, Outcome::Won { epoch: 9 });
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&adopt)));
    desk.reply(&release, Outcome::Gone { held: true });
    assert!(desk.turnstile.is_idle());
    desk.adopt("b", "other:9", fixed(900));
    assert!(matches!(desk.refused("b"), Refusal::Closed));
}

/// O1: an owner names one tenure. What this registry left it may take up again, under another.
#[test]
fn o1_what_we_left_we_may_adopt_under_a_new_owner() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(900), 5);
    let left = desk.keep(a).expect("it was held");
    assert_eq!(left, owner);
    let Owner(sequence) = left;
    let b = desk.adopt("b", &format!("us:{sequence}"), fixed(900));
    let adopt = desk.sent();
    assert_ne!(asker(&adopt), owner);
    desk.reply(&adopt, Outcome::Won { epoch: 6 });
    desk.granted("b");
    assert!(desk.take(b));
}
