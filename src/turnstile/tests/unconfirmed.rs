//! What was won or granted and does not count: it is given on, nobody is forgotten, and no owner is revived.

use super::desk::{Desk, asker, busy, fixed, ms, rules, too_few, withdrawal};
use crate::StoreError;
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::{LeaseEnd, Refusal, Rules};

fn unconfirmed() -> OpError {
    OpError::Unconfirmed(too_few())
}

/// A release of the first owner that comes late, by a connection that is given up, would free the lock of whoever it
/// was won for next if that were the same owner.
#[test]
fn o1_a_win_that_does_not_count_is_released_and_asked_for_by_another_owner() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.fail(&enter, unconfirmed());
    let owner = asker(&enter);
    let release = desk.sent();
    assert_eq!(release, Op::Release { owner });
    desk.reply(&release, Outcome::Gone { held: true });
    desk.wait_until(1049);
    desk.silent();
    desk.wait_until(1101);
    let again = desk.sent();
    assert!(matches!(again, Op::Enter { score: None, .. }), "{again:?}");
    assert_ne!(asker(&again), owner);
    desk.untold("a");
    desk.reply(&again, Outcome::Won { epoch: 7 });
    desk.granted("a");
}

/// The pauses grow as those after refusals do, and that it could be given back in between changes nothing: neither do
/// waiters whose wait ends then hear that others have the lock.
#[test]
fn a_wait_that_ends_without_a_win_that_counts_ends_with_the_reason() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000).until(1500));
    let mut asked = 0;
    while desk.now < ms(1500) {
        let op = desk.sent();
        match op {
            Op::Enter { .. } => {
                asked += 1;
                desk.fail(&op, unconfirmed());
            }
            _ => {
                desk.reply(&op, Outcome::Gone { held: true });
                let next = desk.turnstile.next_timeout().expect("somebody waits");
                desk.wait_until(next.as_millis() as u64 + 1);
            }
        }
    }
    match desk.refused("a") {
        Refusal::Failed(error) => assert_eq!(error.to_string(), too_few().to_string()),
        other => panic!("{other:?}"),
    }
    assert!(
        (3..=4).contains(&asked),
        "at 0, 50, 150 and 350 ms: {asked}"
    );
    assert!(desk.turnstile.is_idle());
}

/// Those who ask once are told at once; so are all if waiting does not mend it.
#[test]
fn who_does_not_wait_is_told_why_it_does_not_count() {
    let mut desk = Desk::new();
    desk.arrive("once", fixed(1000).once());
    let attempt = desk.sent();
    desk.fail(&attempt, unconfirmed());
    assert!(matches!(desk.refused("once"), Refusal::Failed(_)));
    let owner = asker(&attempt);
    assert_eq!(desk.sent(), Op::Release { owner });
    desk.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    assert!(desk.turnstile.is_idle());

    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000));
    desk.arrive("b", fixed(1000));
    let enter = desk.sent();
    let never = StoreError::lasting("no right to ask");
    desk.fail(&enter, OpError::Unconfirmed(never));
    for who in ["a", "b"] {
        assert!(matches!(desk.refused(who), Refusal::Failed(error) if !error.is_retryable()));
    }
    let owner = asker(&enter);
    assert_eq!(desk.sent(), Op::Release { owner });
}

/// The store has taken the ticket out of its queue: who waits would hear of nothing until it asks by itself, some 10 s later.
#[test]
fn w1_a_grant_that_does_not_count_is_given_on_and_its_waiter_stands_again() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    let owner = asker(&enter);
    desk.reply(&enter, busy(9000, 3));
    desk.wait_until(1200);
    desk.grant_in_vain(owner, 1000, 7);
    desk.untold("a");
    let withdraw = desk.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    desk.reply(&withdraw, Outcome::Gone { held: true });
    desk.wait_until(1301);
    let again = desk.sent();
    // Behind those who stand there: at its old place it would be served before them again.
    assert!(matches!(again, Op::Enter { score: None, .. }), "{again:?}");
    assert_ne!(asker(&again), owner);
    desk.reply(&again, busy(9000, 4));
    desk.grant(asker(&again), 1000, 8);
    desk.granted("a");
}

/// It came before the answer to the yield that it follows: forgotten, the lock would be nobody's for a ttl.
#[test]
fn o3_a_grant_that_does_not_count_waits_for_the_reply() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut desk = Desk::with(rules, true);
    let (a, _) = desk.hold("a", fixed(1000), 5);
    desk.arrive("b", fixed(1000));
    desk.finish(a);
    let hand_on = desk.sent();
    let owner = asker(&hand_on);
    desk.wait_until(1010);
    desk.grant_in_vain(owner, 1000, 7);
    desk.silent();
    desk.reply_at(&hand_on, 1005, busy(1000, 4));
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    assert_eq!(desk.sent(), withdrawal(&hand_on));
}

/// Nobody knows its owner any more: what is given back is given back once.
#[test]
fn o1_a_grant_that_does_not_count_for_nobody_is_given_back() {
    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    let owner = asker(&enter);
    desk.reply(&enter, busy(9000, 3));
    desk.leave(a);
    let withdraw = desk.sent_late();
    desk.grant_in_vain(owner, 1000, 7);
    desk.reply(&withdraw, Outcome::Gone { held: true });
    desk.silent();
    assert!(desk.turnstile.is_idle());
    desk.grant_in_vain(owner, 1000, 7);
    assert_eq!(desk.sent(), Op::Release { owner });
}

/// A lease of ours proves that the store's answers counted since.
#[test]
fn a_grant_that_does_not_count_takes_no_lease_away() {
    let mut desk = Desk::new();
    let (_, owner) = desk.hold("a", fixed(1000), 5);
    desk.grant_in_vain(owner, 1000, 5);
    desk.untold("a");
    desk.silent();
}

/// The yielder has let go, whoever has the lock now.
#[test]
fn a_yield_whose_win_does_not_count_ends_its_lease_well() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut desk = Desk::with(rules, true);
    let (a, _) = desk.hold("a", fixed(1000), 5);
    desk.arrive("b", fixed(1000));
    desk.finish(a);
    let hand_on = desk.sent();
    desk.fail(&hand_on, unconfirmed());
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    let owner = asker(&hand_on);
    assert_eq!(desk.sent(), Op::Release { owner });
    desk.untold("b");
    desk.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    desk.wait_until(1101);
    assert_ne!(asker(&desk.sent()), owner);
}

/// Its caller is dropped while it is being confirmed.
#[test]
fn what_does_not_count_for_nobody_is_released_and_not_asked_for_again() {
    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.leave(a);
    desk.silent();
    desk.fail(&enter, unconfirmed());
    let owner = asker(&enter);
    assert_eq!(desk.sent(), Op::Release { owner });
    desk.reply(&Op::Release { owner }, Outcome::Gone { held: true });
    assert!(desk.turnstile.is_idle());
}

/// Given back, a lease that somebody left for another would be lost to both.
#[test]
fn s3_what_is_adopted_is_not_given_back_for_want_of_a_confirmation() {
    let mut desk = Desk::new();
    desk.adopt("a", "other:1", fixed(1000).until(2000));
    let adopt = desk.sent();
    desk.fail(&adopt, unconfirmed());
    desk.silent();
    desk.wait_until(1101);
    let again = desk.sent();
    assert_eq!(again, adopt);
    desk.reply(&again, Outcome::Won { epoch: 9 });
    desk.granted("a");
}
