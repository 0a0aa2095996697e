//! O6: a shutdown gives nothing back that somebody still works under who has been told to end.

use super::harness::{Harness, asker, deadline, fixed, ms};
use crate::base::clock::Moment;
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, LeaseVerdict, NotGranted};

/// Until when work may end.
const GRACE: u64 = 2000;

impl Harness {
    fn close(&mut self, grace: impl FnOnce(&&'static str) -> Option<Moment>) {
        self.feed(|turnstile, cx| turnstile.close(cx, grace));
    }
}

#[test]
fn o6_a_holder_that_watches_holds_until_its_work_has_ended() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(9000), 5);
    harness.arrive("b", fixed(9000));
    harness.close(|_| Some(ms(GRACE)));
    assert!(matches!(harness.lease_told("a"), LeaseVerdict::Closing));
    assert!(matches!(harness.refused("b"), NotGranted::Closed));
    harness.wait_until(GRACE - 1);
    harness.untold("a");
    harness.silent();
    harness.finish(a);
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert!(harness.turnstile.is_idle());
}

/// A task that nobody polls must not keep a registry from ending.
#[test]
fn o6_a_holder_that_does_not_end_in_time_loses_its_lease() {
    for kept in [false, true] {
        let mut harness = Harness::new();
        let wish = if kept {
            fixed(9000).kept()
        } else {
            fixed(9000)
        };
        let (a, owner) = harness.hold("a", wish, 5);
        harness.close(|_| Some(ms(GRACE)));
        harness.told("a");
        harness.wait_until(1500);
        // A second shutdown gives nobody more time, nor less.
        harness.close(|_| Some(ms(2 * GRACE)));
        harness.close(|_| None);
        harness.wait_until(GRACE - 1);
        harness.untold("a");
        harness.silent();
        harness.wait_until(GRACE);
        assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
        if !kept {
            let release = harness.sent();
            assert!(matches!(release, Op::Release { owner: of } if of == owner));
            harness.reply(&release, Outcome::Gone { held: true });
        }
        harness.silent();
        assert!(harness.turnstile.is_idle());
        harness.finish(a);
        harness.untold("a");
    }
}

/// A process that stood still may end its work before anybody has seen the time pass: the lease is
/// released once, and the answer to that is nobody's.
#[test]
fn o6_a_holder_that_ends_after_its_grace_gets_closed() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(9000), 5);
    harness.close(|_| Some(ms(GRACE)));
    harness.told("a");
    harness.now = ms(GRACE);
    harness.finish(a);
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    harness.silent();
    harness.reply(&release, Outcome::Gone { held: true });
    harness.untold("a");
    assert!(harness.turnstile.is_idle());
}

/// A process that stood still may disconnect before anybody has seen the time pass.
#[test]
fn o6_nobody_holds_when_the_registry_has_hung_up() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(9000), 5);
    harness.close(|_| Some(ms(GRACE)));
    harness.told("a");
    harness.feed(|turnstile, cx| turnstile.disconnect(cx));
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    assert!(matches!(harness.sent(), Op::Release { owner: of } if of == owner));
    harness.finish(a);
    harness.untold("a");
    harness.silent();

    // Nor does anybody wait for an answer that cannot come any more.
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(9000), 5);
    harness.finish(a);
    assert!(matches!(harness.sent(), Op::Release { .. }));
    harness.untold("a");
    harness.feed(|turnstile, cx| turnstile.disconnect(cx));
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
}

#[test]
fn o6_a_holder_that_does_not_watch_or_was_not_polled_gets_no_grace() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(9000), 5);
    harness.close(|_| None);
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    assert!(matches!(harness.sent(), Op::Release { .. }));

    let mut harness = Harness::new();
    harness.arrive("a", fixed(9000));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.close(|_| panic!("it does not hold"));
    assert!(matches!(harness.refused("a"), NotGranted::Closed));
    assert!(matches!(harness.sent(), Op::Release { owner } if owner == asker(&enter)));
}

/// What it has to end is still to be proved: a short lease is prolonged meanwhile. It asks for no more.
#[test]
fn o6_a_lease_whose_work_is_to_end_is_renewed_until_then() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(900).renewed(), 5);
    harness.close(|_| Some(ms(GRACE)));
    harness.told("a");
    assert_eq!(harness.extend(a, 60_000), None);
    harness.silent();
    harness.wait_until(1300);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { .. }));
    harness.reply(&renew, Outcome::Renewed);
    match harness.lease_told("a") {
        LeaseVerdict::Prolonged {
            deadline: until, ..
        } => {
            assert_eq!(until.as_micros() as u64, deadline(1300, 900));
        }
        other => panic!("{other:?}"),
    }
    // Lost is lost.
    harness.wait_until(1600);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Lost);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    assert!(harness.turnstile.is_idle());
}

/// A drain: the holder is not told, and is renewed, while all others are refused.
#[test]
fn o6_holders_go_on_in_a_registry_that_is_drained() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(9000).renewed(), 5);
    harness.arrive("b", fixed(9000));
    harness.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(harness.refused("b"), NotGranted::Closed));
    harness.arrive("c", fixed(9000));
    assert!(matches!(harness.refused("c"), NotGranted::Closed));
    harness.wait_until(5000);
    let renewal = harness.sent();
    assert!(matches!(renewal, Op::Renew { owner: of, .. } if of == owner));
    harness.reply(&renewal, Outcome::Renewed);
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Prolonged { .. }
    ));
    harness.finish(a);
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner: of } if of == owner));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert!(harness.turnstile.is_idle());
}

/// A grant for a ticket that is being withdrawn, and a turn that nobody has looked at.
#[test]
fn o6_no_turn_begins_in_a_registry_that_takes_nobody() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(9000));
    let enter = harness.sent();
    harness.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(harness.refused("a"), NotGranted::Closed));
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());

    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(9000));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.feed(|turnstile, cx| turnstile.drain(cx));
    assert!(matches!(harness.refused("a"), NotGranted::Closed));
    assert!(!harness.take(a));
    let release = harness.sent();
    assert!(matches!(release, Op::Release { owner } if owner == asker(&enter)));
}
