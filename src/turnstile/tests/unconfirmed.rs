//! What was won or granted and does not count: it is given on, nobody is forgotten, and no owner is revived.

use super::harness::{Harness, asker, busy, fixed, ms, rules, too_few, withdrawal};
use crate::base::StoreError;
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::{LeaseEnd, NotGranted, Rules};

fn unconfirmed() -> OpError {
    OpError::Unconfirmed(too_few())
}

/// A release of the first owner that comes late, by a connection that is given up, would free the lock of whoever it
/// was won for next if that were the same owner.
#[test]
fn o1_a_win_that_does_not_count_is_released_and_asked_for_by_another_owner() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.fail(&enter, unconfirmed());
    let owner = asker(&enter);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.reply(&release, Outcome::Gone { held: true });
    harness.wait_until(1049);
    harness.silent();
    harness.wait_until(1101);
    let again = harness.sent();
    assert!(matches!(again, Op::Enter { score: None, .. }), "{again:?}");
    assert_ne!(asker(&again), owner);
    harness.untold("a");
    harness.reply(&again, Outcome::Won { epoch: 7 });
    harness.granted("a");
}

/// The pauses grow as those after refusals do, and that it could be released in between changes nothing: neither do
/// waiters whose wait ends then hear that others have the lock.
#[test]
fn a_wait_that_ends_without_a_win_that_counts_ends_with_the_reason() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1500));
    let mut asked = 0;
    while harness.now < ms(1500) {
        let op = harness.sent();
        match op {
            Op::Enter { .. } => {
                asked += 1;
                harness.fail(&op, unconfirmed());
            }
            _ => {
                harness.reply(&op, Outcome::Gone { held: true });
                let next = harness.turnstile.next_timeout().expect("somebody waits");
                harness.wait_until(next.as_millis() as u64 + 1);
            }
        }
    }
    match harness.refused("a") {
        NotGranted::Failed(error) => assert_eq!(error.to_string(), too_few().to_string()),
        other => panic!("{other:?}"),
    }
    assert!(
        (3..=4).contains(&asked),
        "at 0, 50, 150 and 350 ms: {asked}"
    );
    assert!(harness.turnstile.is_idle());
}

/// Those who ask once are told at once; so are all if waiting does not mend it.
#[test]
fn a_caller_that_asks_once_gets_the_reason_of_an_unconfirmed_grant() {
    let mut harness = Harness::new();
    harness.arrive("once", fixed(1000).once());
    let attempt = harness.sent();
    harness.fail(&attempt, unconfirmed());
    assert!(matches!(harness.refused("once"), NotGranted::Failed(_)));
    let owner = asker(&attempt);
    assert_eq!(harness.sent(), Op::Release { owner });
    harness.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());

    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    harness.arrive("b", fixed(1000));
    let enter = harness.sent();
    let never = StoreError::lasting("no right to ask");
    harness.fail(&enter, OpError::Unconfirmed(never));
    for caller in ["a", "b"] {
        assert!(
            matches!(harness.refused(caller), NotGranted::Failed(error) if !error.is_retryable())
        );
    }
    let owner = asker(&enter);
    assert_eq!(harness.sent(), Op::Release { owner });
}

/// The store has taken the ticket out of its queue: who waits would hear of nothing until it asks by itself, some 10 s later.
#[test]
fn w1_an_unconfirmed_grant_is_passed_on_and_its_waiter_queues_again() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let owner = asker(&enter);
    harness.reply(&enter, busy(9000, 3));
    harness.wait_until(1200);
    harness.grant_in_vain(owner, 1000, 7);
    harness.untold("a");
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: true });
    harness.wait_until(1301);
    let again = harness.sent();
    // Behind those who stand there: at its old place it would be served before them again.
    assert!(matches!(again, Op::Enter { score: None, .. }), "{again:?}");
    assert_ne!(asker(&again), owner);
    harness.reply(&again, busy(9000, 4));
    harness.grant(asker(&again), 1000, 8);
    harness.granted("a");
}

/// It came before the answer to the yield that it follows: forgotten, the lock would be no one's for a ttl.
#[test]
fn o3_a_grant_that_does_not_count_waits_for_the_reply() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (a, _) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.finish(a);
    let hand_on = harness.sent();
    let owner = asker(&hand_on);
    harness.wait_until(1010);
    harness.grant_in_vain(owner, 1000, 7);
    harness.silent();
    harness.reply_at(&hand_on, 1005, busy(1000, 4));
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_eq!(harness.sent(), withdrawal(&hand_on));
}

/// Nobody knows its owner any more: what is released is released once.
#[test]
fn o1_a_grant_that_does_not_count_for_nobody_is_given_back() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let owner = asker(&enter);
    harness.reply(&enter, busy(9000, 3));
    harness.leave(a);
    let withdraw = harness.sent();
    harness.grant_in_vain(owner, 1000, 7);
    harness.reply(&withdraw, Outcome::Gone { held: true });
    harness.silent();
    assert!(harness.turnstile.is_idle());
    harness.grant_in_vain(owner, 1000, 7);
    assert_eq!(harness.sent(), Op::Release { owner });
}

/// A lease of ours proves that the store's answers counted since.
#[test]
fn a_grant_that_does_not_count_takes_no_lease_away() {
    let mut harness = Harness::new();
    let (_, owner) = harness.hold("a", fixed(1000), 5);
    harness.grant_in_vain(owner, 1000, 5);
    harness.untold("a");
    harness.silent();
}

/// The yielder has let go, whoever has the lock now.
#[test]
fn a_yield_whose_win_does_not_count_ends_its_lease_well() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (a, _) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.finish(a);
    let hand_on = harness.sent();
    harness.fail(&hand_on, unconfirmed());
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    let owner = asker(&hand_on);
    assert_eq!(harness.sent(), Op::Release { owner });
    harness.untold("b");
    harness.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    harness.wait_until(1101);
    assert_ne!(asker(&harness.sent()), owner);
}

/// Its caller is dropped while it is being confirmed.
#[test]
fn an_unconfirmed_win_without_waiters_is_released() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.leave(a);
    harness.silent();
    harness.fail(&enter, unconfirmed());
    let owner = asker(&enter);
    assert_eq!(harness.sent(), Op::Release { owner });
    harness.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
}

/// Given back, a lease that somebody left for another would be lost to both.
#[test]
fn s3_an_adopted_lease_is_not_released_if_its_confirmation_fails() {
    let mut harness = Harness::new();
    harness.adopt("a", "other:1", fixed(1000).until(2000));
    let adopt = harness.sent();
    harness.fail(&adopt, unconfirmed());
    harness.silent();
    harness.wait_until(1101);
    let again = harness.sent_again(&adopt);
    harness.reply(&again, Outcome::Won { epoch: 9 });
    harness.granted("a");
}
