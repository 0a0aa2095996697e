//! The watchdog: who is prolonged, when, and how often.

use super::harness::{Harness, asker, broken, busy, deadline, fixed, ms};
use crate::base::OnFinish;
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::{LeaseEnd, LeaseVerdict, WaiterVerdict};

fn prolonged(harness: &mut Harness, caller: &'static str) -> u64 {
    let LeaseVerdict::Prolonged { deadline, .. } = harness.lease_told(caller) else {
        panic!("not prolonged")
    };
    deadline.as_micros() as u64
}

/// At every third of its ttl, to the whole of it, counted from the sending (D1).
#[test]
fn a_held_lease_is_renewed_at_every_third() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    for third in 1..=9 {
        harness.wait_until(1000 + third * 300 - 1);
        harness.silent();
        harness.wait_until(1000 + third * 300);
        let renew = harness.sent();
        assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
        harness.reply(&renew, Outcome::Renewed);
        assert_eq!(
            prolonged(&mut harness, "a"),
            deadline(1000 + third * 300, 900)
        );
    }
}

/// W4: a lease that nobody took is not kept alive.
#[test]
fn w4_the_watchdog_starts_when_the_lease_is_taken() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(900).renewed());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.wait_until(1299);
    harness.silent();
    harness.wait_until(1300);
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::TurnLost));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// A renewal that nobody answered changes nothing; while the connection is gone none is sent, and
/// the deadline decides.
#[test]
fn unknown_neither_loses_nor_prolongs() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.lose(&renew);
    harness.down();
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Unrenewed(_)
    ));
    harness.wait_until(1888);
    harness.silent();
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
    harness.untold("a");
    harness.wait_until(1889);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
}

/// A new connection renews at once, and the watchdog goes on a third of the ttl after that.
#[test]
fn o4_a_new_connection_renews_at_once_and_the_watchdog_goes_on() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.lose(&renew);
    harness.down();
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Unrenewed(_)
    ));
    harness.wait_until(1700);
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
    harness.up(true);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "a"), deadline(1700, 900));
    harness.wait_until(1999);
    harness.silent();
    harness.wait_until(2000);
    assert!(matches!(harness.sent(), Op::Renew { .. }));
}

/// Connections that come and go put the watchdog off, and nothing is confirmed. The renewal that was due at 1300 is late
/// two thirds of the remaining time after that all the same.
#[test]
fn a_renewal_is_late_however_often_connections_break() {
    for ups in [&[1680][..], &[1290, 1680], &[1260, 1290, 1560, 1620, 1680]] {
        let mut harness = Harness::new();
        harness.hold("a", fixed(900).renewed(), 5);
        harness.wait_until(1250);
        harness.down();
        for at in ups {
            harness.wait_until(*at);
            harness.up(true);
            let renew = harness.sent();
            assert!(matches!(renew, Op::Renew { .. }), "{renew:?}");
            harness.lose(&renew);
            harness.down();
            let told = harness.lease_told("a");
            assert!(matches!(told, LeaseVerdict::Unrenewed(_)), "{told:?}");
        }
        harness.wait_until(1692);
        harness.untold("a");
        harness.wait_until(1693);
        assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
        harness.wait_until(1888);
        harness.untold("a");
    }
}

/// With many leases a new connection plans renewals (G5). What was due at 11,000 is late at its own time all the same.
#[test]
fn a_planned_renewal_is_late_however_often_connections_break() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(30_000).renewed(), 5);
    harness.leases = 10_000;
    harness.wait_until(10_000);
    harness.down();
    for at in [12_000, 15_000, 23_000] {
        harness.wait_until(at);
        harness.up(true);
        harness.down();
        assert!(harness.sent_if_any().is_none());
    }
    // Two thirds of the way from 11,000 to 30,698.
    harness.wait_until(24_131);
    harness.untold("a");
    harness.wait_until(24_132);
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
}

/// An extension that is asked for again and again in an outage is late since the first.
#[test]
fn an_extension_that_is_asked_for_again_is_due_since_the_first() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.wait_until(1100);
    harness.down();
    for at in [1150, 1300, 1450, 1600] {
        harness.wait_until(at);
        harness.extend(a, 2000);
    }
    // Two thirds of the way from 1150 to 1889.
    harness.wait_until(1642);
    harness.untold("a");
    harness.wait_until(1643);
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
}

/// The last of a group is acquired while the renewal of the first is unanswered: its lease begins anew, and what is due
/// since 1300 is late at its time, once.
#[test]
fn a_lease_that_begins_anew_is_late_once() {
    for is_told in [false, true] {
        let mut harness = Harness::new();
        let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
        harness.wait_until(1300);
        assert!(matches!(harness.sent(), Op::Renew { .. }));
        if !is_told {
            harness.wait_until(1500);
            harness.restart(a, u32::MAX, OnFinish::Release);
        }
        harness.wait_until(1692);
        harness.untold("a");
        harness.wait_until(1693);
        assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
        if is_told {
            harness.restart(a, u32::MAX, OnFinish::Release);
        }
        harness.wait_until(1888);
        harness.untold("a");
    }
}

/// A server that says no is asked again, before the deadline.
#[test]
fn a_refused_renewal_is_tried_again() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.fail(&renew, OpError::Refused(broken()));
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Unrenewed(_)
    ));
    harness.wait_until(1360);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert!(prolonged(&mut harness, "a") > deadline(1300, 900));
}

/// After the last it lasts its ttl, and no longer.
#[test]
fn at_most_so_many_renewals() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(2), 5);
    for third in 1..=2 {
        harness.wait_until(1000 + third * 300);
        let renew = harness.sent();
        harness.reply(&renew, Outcome::Renewed);
        let told = harness.lease_told("a");
        assert!(matches!(told, LeaseVerdict::Prolonged { last, .. } if last == (third == 2)));
    }
    harness.wait_until(2488);
    harness.silent();
    harness.untold("a");
    harness.wait_until(2489);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
}

/// The renewal of a new connection (O4) was refused, and that gave the watchdog one more than it was
/// allowed, and started it for a lease that nobody had taken yet (W4).
#[test]
fn a_refusal_gives_back_no_more_than_was_counted() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(1), 5);
    harness.wait_until(1100);
    harness.up(true);
    let renew = harness.sent();
    harness.fail(&renew, OpError::Refused(broken()));
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Unrenewed(_)
    ));
    harness.wait_until(1200);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    prolonged(&mut harness, "a");
    harness.wait_until(1900);
    harness.silent();

    let mut harness = Harness::new();
    harness.arrive("b", fixed(900).renewed());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("b");
    harness.up(true);
    let renew = harness.sent();
    harness.fail(&renew, OpError::Refused(broken()));
    harness.wait_until(1299);
    harness.silent();
}

/// W3: a fixed lease of 5 s came by a ticket of 1 s, and the one renewal that it is owed was refused. It was tried
/// again at a reconnect only, and so the lease ended after a fifth of what it was promised. Now it is tried again as
/// the watchdog's are; and it stays the only one.
#[test]
fn w3_a_fixed_lease_that_was_refused_its_renewal_asks_again() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(5000));
    harness.reply(&enter, busy(700, 1));
    harness.leave(a);
    harness.grant(asker(&enter), 1000, 6);
    harness.granted("b");
    assert!(harness.take(b));
    for round in 1..=3 {
        let renew = harness.sent();
        harness.fail(&renew, OpError::Refused(broken()));
        assert!(matches!(
            harness.lease_told("b"),
            LeaseVerdict::Unrenewed(_)
        ));
        harness.silent();
        harness.wait_until(1000 + round * 60);
    }
    let renew = harness.sent();
    let Op::Renew { ttl, .. } = renew else {
        panic!("not {renew:?}")
    };
    assert!(
        ttl > ms(4500) && ttl < ms(4900),
        "what is left of it, not {ttl:?}"
    );
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "b"), deadline(1000, 5000));
    harness.wait_until(5947);
    harness.silent();
    harness.wait_until(5948);
    assert!(matches!(harness.ended("b"), LeaseEnd::Lost(_)));

    // A new connection renews before that, and once is enough.
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(5000));
    harness.reply(&enter, busy(700, 1));
    harness.leave(a);
    harness.grant(asker(&enter), 1000, 6);
    harness.granted("b");
    assert!(harness.take(b));
    let renew = harness.sent();
    harness.fail(&renew, OpError::Refused(broken()));
    assert!(matches!(
        harness.lease_told("b"),
        LeaseVerdict::Unrenewed(_)
    ));
    harness.up(true);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut harness, "b"), deadline(1000, 5000));
    harness.wait_until(5947);
    harness.silent();
}

/// A connection that broke again and again prolonged a bounded lease without end: each new connection renews, and those
/// renewals were not counted. Now they ask for no more than the watchdog did, so that a leaked lease of at most one
/// renewal ends a ttl after that, whatever the connection does.
#[test]
fn a_wire_that_breaks_often_prolongs_no_bounded_lease() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(1), 5);
    for at in [1100, 1200] {
        harness.wait_until(at);
        harness.down();
        harness.up(true);
        let look = harness.sent();
        assert!(matches!(look, Op::Renew { ttl, .. } if ttl == ms(1900 - at)));
        harness.reply(&look, Outcome::Renewed);
    }
    // The watchdog comes in its own time: it was put off at each new connection, and so for ever.
    harness.wait_until(1299);
    harness.silent();
    harness.wait_until(1300);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    // Nobody knows whether it was done: the next connection asks for the rest of just that.
    harness.lose(&renew);
    for at in [1400, 1700, 2100] {
        harness.wait_until(at);
        harness.down();
        harness.up(true);
        let look = harness.sent();
        assert!(matches!(look, Op::Renew { ttl, .. } if ttl == ms(2200 - at)));
        harness.reply(&look, Outcome::Renewed);
    }
    // A shorter ttl has less drift: the lease ends between 2189, as it was meant to, and 2200.
    harness.wait_until(2188);
    harness.silent();
    harness.wait_until(2200);
    while !matches!(
        harness.lease_told("a"),
        LeaseVerdict::Ended(LeaseEnd::Lost(_))
    ) {}
}

/// Somebody else has the key: the holder is told at once, not at its deadline.
#[test]
fn a_renewal_that_finds_another_loses_the_lease() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Lost);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    // O6: after Lost nothing is sent.
    harness.silent();
}

/// The watchdogs of other libraries outlived their locks: one that is under way when its lease is
/// released renews nothing, and is the last.
#[test]
fn a_watchdog_does_not_outlive_its_lease() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.finish(a);
    let release = harness.sent();
    assert!(matches!(release, Op::Release { .. }));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    harness.reply(&renew, Outcome::Renewed);
    harness.wait_until(10_000);
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// Found by the simulator (seed 6): a lease that was released just when its renewal was due was renewed
/// first.
#[test]
fn a_lease_released_when_its_renewal_is_due_is_not_renewed() {
    for shut_down in [false, true] {
        let mut harness = Harness::new();
        let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
        harness.stop_until(1310);
        if shut_down {
            harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
        } else {
            harness.finish(a);
        }
        assert!(matches!(harness.sent(), Op::Release { .. }));
        harness.silent();
    }
}

/// The store answers nothing, and the connection stands. The holder is told before it loses its lease: when a third
/// is left of the time that it had when the renewal was due. Once, whatever else becomes of the renewal.
#[test]
fn a_late_renewal_is_told_once_and_before_the_deadline() {
    // Due at 1300, and the lease ends at 1889.
    for (fails, breaks) in [(false, false), (true, false), (false, true)] {
        let mut harness = Harness::new();
        harness.hold("a", fixed(900).renewed(), 5);
        harness.wait_until(1300);
        let renew = harness.sent();
        if fails {
            harness.fail(&renew, OpError::Refused(broken()));
            assert!(matches!(
                harness.lease_told("a"),
                LeaseVerdict::Unrenewed(_)
            ));
        }
        if breaks {
            harness.lose(&renew);
            assert!(matches!(
                harness.lease_told("a"),
                LeaseVerdict::Unrenewed(_)
            ));
        }
        for at in 1301..1692 {
            harness.wait_until(at);
            while let Some(renew) = harness.sent_if_any() {
                harness.fail(&renew, OpError::Refused(broken()));
                assert!(matches!(
                    harness.lease_told("a"),
                    LeaseVerdict::Unrenewed(_)
                ));
            }
        }
        harness.untold("a");
        harness.wait_until(1693);
        assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
        harness.wait_until(1888);
        harness.untold("a");
        harness.wait_until(1889);
        assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    }
}

/// The next renewal may be late as well.
#[test]
fn each_late_renewal_is_told() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    for _ in 0..3 {
        let now = harness.now.as_millis() as u64;
        harness.wait_until(now + 700);
        assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
        // It was sent 400 ms ago, so that the next is due.
        for _ in 0..2 {
            let renew = harness.sent();
            harness.reply(&renew, Outcome::Renewed);
            prolonged(&mut harness, "a");
            harness.wait_until(now + 700);
        }
        harness.untold("a");
    }
}

/// No connection stands when the renewal is due: it is late all the same.
#[test]
fn a_renewal_that_cannot_be_sent_is_late() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1100);
    harness.down();
    harness.wait_until(1692);
    harness.untold("a");
    harness.wait_until(1693);
    harness.silent();
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
}

/// What is not to be renewed has no late renewals: a fixed lease, one whose last renewal is confirmed, and one that
/// was not taken.
#[test]
fn a_lease_that_just_ends_is_not_told_of_a_late_renewal() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900), 5);
    harness.down();
    harness.wait_until(1889);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));

    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(1), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    prolonged(&mut harness, "a");
    harness.wait_until(2189);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
}

/// W3: what is renewed as soon as it is taken is late by what its ticket brought, and not by its own ttl.
#[test]
fn a_short_ticket_is_told_late_by_its_own_time() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(900));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(9000).renewed());
    harness.reply(&enter, busy(700, 1));
    harness.leave(a);
    harness.grant(asker(&enter), 900, 6);
    harness.granted("b");
    assert!(harness.take(b));
    harness.sent();
    // It has 889 ms.
    harness.wait_until(1592);
    harness.untold("b");
    harness.wait_until(1593);
    assert!(matches!(harness.lease_told("b"), LeaseVerdict::RenewalLate));
}

/// An extension that is not confirmed is a renewal that is due.
#[test]
fn an_extension_that_is_not_confirmed_is_late() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900), 5);
    harness.wait_until(1289);
    harness.extend(a, 5000);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { within, .. } if within == ms(600)));
    harness.wait_until(1688);
    harness.untold("a");
    harness.wait_until(1689);
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::RenewalLate));
    harness.reply(&renew, Outcome::Renewed);
    prolonged(&mut harness, "a");
    harness.wait_until(6000);
    harness.untold("a");
}

/// G4: each renewal says for how long its lease still lasts.
#[test]
fn a_renewal_names_what_is_left_of_its_lease() {
    let within = |op: &Op| match op {
        Op::Renew { within, .. } => within.as_millis(),
        op => panic!("{op:?}"),
    };
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    assert_eq!(within(&renew), 1889 - 1300);
    harness.stop_until(1400);
    harness.lose(&renew);
    harness.up(true);
    assert_eq!(within(&harness.sent()), 1889 - 1400);
}

/// The session has more to do than it can, and did not send a renewal: the connection is well, so nothing is down, and
/// whoever comes is served. The next try is not sooner than half of what is left, and none comes after the deadline.
#[test]
fn g4_a_renewal_that_was_too_late_to_send_is_not_hammered() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let mut tries = 0;
    while let Some(renew) = harness.sent_if_any() {
        tries += 1;
        assert!(matches!(renew, Op::Renew { .. }));
        let left = ms(1889) - harness.now;
        harness.fail(&renew, OpError::TooLate(broken()));
        harness.silent();
        let next = (harness.now + left / 2).as_millis() as u64;
        harness.wait_until(next);
        harness.silent();
        harness.wait_until(1888.min(next + 60));
        while !matches!(harness.lease_told("a"), LeaseVerdict::Unrenewed(_)) {}
    }
    assert!((3..=6).contains(&tries), "{tries}");
    harness.wait_until(1889);
    while !matches!(harness.ended("a"), LeaseEnd::Lost(_)) {}

    // It is served all the same, as soon as it can.
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).renewed_at_most(1), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.fail(&renew, OpError::TooLate(broken()));
    harness.told("a");
    harness.wait_until(1600);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    // That was the one that it may have.
    let told = harness.lease_told("a");
    assert!(
        matches!(told, LeaseVerdict::Prolonged { last: true, .. }),
        "{told:?}"
    );
    let renew = {
        harness.extend(a, 5000);
        harness.sent()
    };
    harness.fail(&renew, OpError::TooLate(broken()));
    harness.finish(a);
    assert_eq!(harness.sent(), Op::Release { owner }, "nothing is down");
}
