//! The watchdog: who is prolonged, when, and how often.

use super::desk::{Desk, broken, deadline, fixed, ms};
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::Verdict;

fn prolonged(desk: &mut Desk, who: &'static str) -> u64 {
    let Verdict::Prolonged { deadline, .. } = desk.told(who) else {
        panic!("not prolonged")
    };
    deadline.as_micros() as u64
}

/// At every third of its ttl, to the whole of it, counted from the sending (D1).
#[test]
fn a_held_lease_is_renewed_at_every_third() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed(), 5);
    for third in 1..=9 {
        desk.wait_until(1000 + third * 300 - 1);
        desk.silent();
        desk.wait_until(1000 + third * 300);
        let renew = desk.sent();
        assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
        desk.reply(&renew, Outcome::Renewed);
        assert_eq!(prolonged(&mut desk, "a"), deadline(1000 + third * 300, 900));
    }
}

/// W4: a lease that nobody took is not kept alive.
#[test]
fn w4_the_watchdog_starts_when_the_lease_is_taken() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(900).renewed());
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { draw: 5 });
    desk.seated("a");
    desk.wait_until(1299);
    desk.silent();
    desk.wait_until(1300);
    assert!(matches!(desk.told("a"), Verdict::TurnLost));
    assert!(matches!(desk.sent(), Op::Release { .. }));
}

/// A renewal that nobody answered changes nothing; while the connection is gone none is sent, and
/// the deadline decides.
#[test]
fn unknown_neither_loses_nor_prolongs() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.lose(&renew);
    desk.down();
    assert!(matches!(desk.told("a"), Verdict::Unrenewed(_)));
    desk.wait_until(1888);
    desk.silent();
    desk.untold("a");
    desk.wait_until(1889);
    assert!(matches!(desk.told("a"), Verdict::Lost));
}

/// A new connection renews at once, and the watchdog goes on a third of the ttl after that.
#[test]
fn o4_a_new_connection_renews_at_once_and_the_watchdog_goes_on() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.lose(&renew);
    desk.down();
    assert!(matches!(desk.told("a"), Verdict::Unrenewed(_)));
    desk.wait_until(1700);
    desk.up(true);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    assert_eq!(prolonged(&mut desk, "a"), deadline(1700, 900));
    desk.wait_until(1999);
    desk.silent();
    desk.wait_until(2000);
    assert!(matches!(desk.sent(), Op::Renew { .. }));
}

/// A server that says no is asked again, before the deadline.
#[test]
fn a_refused_renewal_is_tried_again() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.fail(&renew, OpError::Refused(broken()));
    assert!(matches!(desk.told("a"), Verdict::Unrenewed(_)));
    desk.wait_until(1360);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    assert!(prolonged(&mut desk, "a") > deadline(1300, 900));
}

/// After the last it lasts its ttl, and no longer.
#[test]
fn at_most_so_many_renewals() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed_at_most(2), 5);
    for third in 1..=2 {
        desk.wait_until(1000 + third * 300);
        let renew = desk.sent();
        desk.reply(&renew, Outcome::Renewed);
        let told = desk.told("a");
        assert!(matches!(told, Verdict::Prolonged { last, .. } if last == (third == 2)));
    }
    desk.wait_until(2488);
    desk.silent();
    desk.untold("a");
    desk.wait_until(2489);
    assert!(matches!(desk.told("a"), Verdict::Lost));
}

/// The renewal of a new connection (O4) was refused, and that gave the watchdog one more than it was
/// allowed, and started it for a lease that nobody had taken yet (W4).
#[test]
fn a_refusal_gives_back_no_more_than_was_counted() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed_at_most(1), 5);
    desk.wait_until(1100);
    desk.up(true);
    let renew = desk.sent();
    desk.fail(&renew, OpError::Refused(broken()));
    assert!(matches!(desk.told("a"), Verdict::Unrenewed(_)));
    desk.wait_until(1200);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Renewed);
    prolonged(&mut desk, "a");
    desk.wait_until(1900);
    desk.silent();

    let mut desk = Desk::new();
    desk.arrive("b", fixed(900).renewed());
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { draw: 5 });
    desk.seated("b");
    desk.up(true);
    let renew = desk.sent();
    desk.fail(&renew, OpError::Refused(broken()));
    desk.wait_until(1299);
    desk.silent();
}

/// Somebody else has the key: the holder is told at once, not at its deadline.
#[test]
fn a_renewal_that_finds_another_loses_the_lease() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Lost);
    assert!(matches!(desk.told("a"), Verdict::Lost));
    // O6: after Lost nothing is sent.
    desk.silent();
}

/// The watchdogs of other libraries outlived their locks: one that is under way when its lease is
/// given back renews nothing, and is the last.
#[test]
fn a_watchdog_does_not_outlive_its_lease() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed(), 5);
    desk.wait_until(1300);
    let renew = desk.sent();
    desk.finish(a);
    let release = desk.sent();
    assert!(matches!(release, Op::Release { .. }));
    desk.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(desk.told("a"), Verdict::Released));
    desk.reply(&renew, Outcome::Renewed);
    desk.wait_until(10_000);
    desk.silent();
    assert!(desk.turnstile.is_idle());
}
