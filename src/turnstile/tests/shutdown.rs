//! O6: a shutdown gives nothing back that somebody still works under who has been told to end.

use super::desk::{Desk, asker, deadline, fixed, ms};
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, LeaseVerdict, Moment, Refusal};

/// Until when work may end.
const GRACE: u64 = 2000;

impl Desk {
    fn close(&mut self, grace: impl FnOnce(&&'static str) -> Option<Moment>) {
        self.feed(|turnstile, cx| turnstile.close(cx, grace));
    }
}

#[test]
fn o6_who_hears_of_a_shutdown_holds_until_its_work_has_ended() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(9000), 5);
    desk.arrive("b", fixed(9000));
    desk.close(|_| Some(ms(GRACE)));
    assert!(matches!(desk.lease_told("a"), LeaseVerdict::Closing));
    assert!(matches!(desk.refused("b"), Refusal::Closed));
    desk.wait_until(GRACE - 1);
    desk.untold("a");
    desk.silent();
    desk.finish(a);
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    desk.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    assert!(desk.turnstile.is_idle());
}

/// A task that nobody polls must not keep a registry from ending.
#[test]
fn o6_who_does_not_end_its_work_in_time_holds_no_more() {
    for kept in [false, true] {
        let mut desk = Desk::new();
        let wish = if kept {
            fixed(9000).kept()
        } else {
            fixed(9000)
        };
        let (a, owner) = desk.hold("a", wish, 5);
        desk.close(|_| Some(ms(GRACE)));
        desk.told("a");
        desk.wait_until(1500);
        // A second shutdown gives nobody more time, nor less.
        desk.close(|_| Some(ms(2 * GRACE)));
        desk.close(|_| None);
        desk.wait_until(GRACE - 1);
        desk.untold("a");
        desk.silent();
        desk.wait_until(GRACE);
        assert!(matches!(desk.ended("a"), LeaseEnd::Closed));
        if !kept {
            let release = desk.sent();
            assert!(matches!(release, Op::Release { owner: of } if of == owner));
            desk.reply(&release, Outcome::Gone { held: true });
        }
        desk.silent();
        assert!(desk.turnstile.is_idle());
        desk.finish(a);
        desk.untold("a");
    }
}

/// A process that stood still may end its work before anybody has seen the time pass: the lease is
/// given back once, and the answer to that is nobody's.
#[test]
fn o6_who_ends_its_work_when_its_time_is_over_is_told_closed() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(9000), 5);
    desk.close(|_| Some(ms(GRACE)));
    desk.told("a");
    desk.now = ms(GRACE);
    desk.finish(a);
    assert!(matches!(desk.ended("a"), LeaseEnd::Closed));
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    desk.silent();
    desk.reply(&release, Outcome::Gone { held: true });
    desk.untold("a");
    assert!(desk.turnstile.is_idle());
}

/// A process that stood still may hang up before anybody has seen the time pass.
#[test]
fn o6_nobody_holds_when_the_registry_has_hung_up() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(9000), 5);
    desk.close(|_| Some(ms(GRACE)));
    desk.told("a");
    desk.feed(|turnstile, cx| turnstile.disconnect(cx));
    assert!(matches!(desk.ended("a"), LeaseEnd::Closed));
    assert!(matches!(desk.sent(), Op::Release { owner: of } if of == owner));
    desk.finish(a);
    desk.untold("a");
    desk.silent();
}

#[test]
fn o6_who_does_not_hear_of_a_shutdown_or_has_not_looked_has_no_time() {
    let mut desk = Desk::new();
    desk.hold("a", fixed(9000), 5);
    desk.close(|_| None);
    assert!(matches!(desk.ended("a"), LeaseEnd::Closed));
    assert!(matches!(desk.sent(), Op::Release { .. }));

    let mut desk = Desk::new();
    desk.arrive("a", fixed(9000));
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { epoch: 5 });
    desk.granted("a");
    desk.close(|_| panic!("it does not hold"));
    assert!(matches!(desk.refused("a"), Refusal::Closed));
    assert!(matches!(desk.sent(), Op::Release { owner } if owner == asker(&enter)));
}

/// What it has to end is still to be proved: a short lease is prolonged meanwhile. It asks for no more.
#[test]
fn o6_a_lease_whose_work_is_to_end_is_renewed_until_then() {
    let mut desk = Desk::new();
    let (a, _) = desk.hold("a", fixed(900).renewed(), 5);
    desk.close(|_| Some(ms(GRACE)));
    desk.told("a");
    assert_eq!(desk.extend(a, 60_000), None);
    desk.silent();
    desk.wait_until(1300);
    let renew = desk.sent();
    assert!(matches!(renew, Op::Renew { .. }));
    desk.reply(&renew, Outcome::Renewed);
    match desk.lease_told("a") {
        LeaseVerdict::Prolonged {
            deadline: until, ..
        } => {
            assert_eq!(until.as_micros() as u64, deadline(1300, 900));
        }
        other => panic!("{other:?}"),
    }
    // Lost is lost.
    desk.wait_until(1600);
    let renew = desk.sent();
    desk.reply(&renew, Outcome::Lost);
    assert!(matches!(desk.ended("a"), LeaseEnd::Lost));
    assert!(desk.turnstile.is_idle());
}

/// A drain: the holder is not told, and is renewed, while all others are turned away.
#[test]
fn o6_who_holds_goes_on_in_a_registry_that_takes_nobody() {
    let mut desk = Desk::new();
    let (a, owner) = desk.hold("a", fixed(9000).renewed(), 5);
    desk.arrive("b", fixed(9000));
    desk.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(desk.refused("b"), Refusal::Closed));
    desk.arrive("c", fixed(9000));
    assert!(matches!(desk.refused("c"), Refusal::Closed));
    desk.wait_until(5000);
    let renewal = desk.sent();
    assert!(matches!(renewal, Op::Renew { owner: of, .. } if of == owner));
    desk.reply(&renewal, Outcome::Renewed);
    assert!(matches!(
        desk.lease_told("a"),
        LeaseVerdict::Prolonged { .. }
    ));
    desk.finish(a);
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    desk.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    assert!(desk.turnstile.is_idle());
}

/// A grant for a ticket that is being withdrawn, and a turn that nobody has looked at.
#[test]
fn o6_no_turn_begins_in_a_registry_that_takes_nobody() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(9000));
    let enter = desk.sent();
    desk.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(desk.refused("a"), Refusal::Closed));
    desk.reply(&enter, Outcome::Won { epoch: 5 });
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
    desk.reply(&release, Outcome::Gone { held: true });
    assert!(desk.turnstile.is_idle());

    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(9000));
    let enter = desk.sent();
    desk.reply(&enter, Outcome::Won { epoch: 5 });
    desk.granted("a");
    desk.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(desk.refused("a"), Refusal::Closed));
    assert!(!desk.take(a));
    let release = desk.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
}
