//! F2: an epoch whose tokens would not fit an `i64` counts for nothing, since those of later leases would not be greater.

use super::harness::{Harness, asker, busy, fixed, rules};
use crate::store::contract::{Op, Outcome, Owner};
use crate::turnstile::{LeaseEnd, NotGranted, Rules};

/// The greatest whose tokens fit, and the least whose do not.
const LAST: u64 = i64::MAX as u64 / 64;
const FIRST_OUT: u64 = LAST + 1;

/// The caller reads why, asking again is of no use, and the key is free again.
#[track_caller]
fn assert_refused(harness: &mut Harness, caller: &'static str, owner: Owner) {
    match harness.refused(caller) {
        NotGranted::Failed(error) => {
            assert!(!error.is_retryable());
            assert!(error.to_string().contains("out of range"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let given_back = harness.sent();
    match given_back {
        Op::Release { owner: of } | Op::Withdraw { owner: of, .. } => assert_eq!(of, owner),
        other => panic!("{other:?}"),
    }
    harness.reply(&given_back, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
}

#[test]
fn f2_the_last_epoch_has_tokens() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: LAST });
    harness.granted("a");
}

/// Tokens stopped at the greatest number there is: all later leases had the same.
#[test]
fn f2_a_win_out_of_range_is_given_back() {
    for epoch in [FIRST_OUT, u64::MAX] {
        let mut harness = Harness::new();
        harness.arrive("a", fixed(1000));
        let enter = harness.sent();
        harness.reply(&enter, Outcome::Won { epoch });
        assert_refused(&mut harness, "a", asker(&enter));
    }
}

#[test]
fn f2_a_grant_out_of_range_is_given_back() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let owner = asker(&enter);
    harness.reply(&enter, busy(9000, 3));
    harness.grant(owner, 1000, FIRST_OUT);
    assert_refused(&mut harness, "a", owner);
}

/// The holder before has let go.
#[test]
fn f2_a_yield_that_wins_out_of_range_is_given_back() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (a, _) = harness.hold("a", fixed(1000), LAST);
    harness.arrive("b", fixed(1000));
    harness.finish(a);
    let hand_on = harness.sent();
    harness.reply(&hand_on, Outcome::Won { epoch: FIRST_OUT });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_refused(&mut harness, "b", asker(&hand_on));
}

#[test]
fn f2_a_lease_adopted_out_of_range_is_given_back() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:1", fixed(1000));
    let adopt = harness.sent();
    harness.reply(&adopt, Outcome::Won { epoch: FIRST_OUT });
    let Op::Adopt { owner, .. } = adopt else {
        panic!("{adopt:?}");
    };
    assert_refused(&mut harness, "a", owner);
}
