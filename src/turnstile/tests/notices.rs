//! W7: where no grants come, a notice that the key is free cuts a pause short.

use super::harness::{Harness, asker, broken, fixed, ms, rules};
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::NotGranted;

const BUSY: Outcome = Outcome::Busy {
    left: None,
    score: Some(0),
    entered: false,
    holder: None,
};

/// The answer to one that did not subscribe, or of a store where nobody can.
const BUSY_WITHOUT_A_PLACE: Outcome = Outcome::Busy {
    left: None,
    score: None,
    entered: false,
    holder: None,
};

/// Somebody waits, pauses for five seconds each time, and was told once that it is busy.
fn waiting(harness: &mut Harness) {
    harness.pause = Some(ms(5000));
    harness.arrive("a", fixed(1000).until(60_000));
    let listen = harness.sent();
    assert!(matches!(listen, Op::Listen { .. }), "{listen:?}");
    harness.reply(&listen, BUSY);
    harness.silent();
}

#[test]
fn w7_a_notified_waiter_asks_at_once() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.wait_until(1500);
    harness.silent();
    harness.freed();
    let listen = harness.sent();
    harness.reply(&listen, Outcome::Won { epoch: 7 });
    harness.granted("a");
}

/// A notice that is lost, or of nothing, leaves the policy's questions where they are: none of them
/// comes later, or is counted twice.
#[test]
fn w7_a_false_notice_does_not_delay_the_policys_question() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.wait_until(2000);
    harness.freed();
    let early = harness.sent();
    harness.reply(&early, BUSY);
    assert_eq!(harness.asked, ["a"]);
    harness.wait_until(5999);
    harness.silent();
    harness.wait_until(6000);
    let regular = harness.sent();
    assert_eq!(
        asker(&regular),
        asker(&early),
        "its subscription stays where it is"
    );
    harness.reply(&regular, BUSY);
    assert_eq!(harness.asked, ["a", "a"]);
    harness.wait_until(10_999);
    harness.silent();
    harness.wait_until(11_000);
    harness.sent();
}

/// A node that tells of nothing, all the time.
#[test]
fn w7_a_flood_of_notices_makes_a_handful_of_questions() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    let mut questions = 0;
    for now in 1000..31_000 {
        harness.wait_until(now);
        harness.freed();
        while let Some(op) = harness.sent_if_any() {
            questions += 1;
            harness.freed();
            harness.reply(&op, BUSY);
        }
    }
    // Six pauses of five seconds, in each of which the next early question is twice as late.
    assert!((12..=66).contains(&questions), "{questions} in 30 s");
}

/// Several nodes tell of one release, and the question for it has its moment already. They do not count, so the one after
/// the next release comes no later.
#[test]
fn w7_a_notice_that_moves_no_question_does_not_count() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.freed();
    let first = harness.sent();
    harness.reply(&first, BUSY);
    for _ in 0..8 {
        harness.freed();
    }
    harness.wait_until(1030);
    let second = harness.sent();
    harness.reply(&second, BUSY);
    harness.freed();
    harness.wait_until(1090);
    harness.sent();
    assert_eq!(harness.asked, ["a"], "its pause goes on");
}

/// A notice has interrupted the pause of one that has left since. Whoever asks once does not wait for the rest of it.
#[test]
fn w7_one_that_asks_once_does_not_wait_for_the_rest_of_a_pause() {
    let mut harness = Harness::with(rules(), false);
    harness.pause = Some(ms(5000));
    let id = harness.arrive("a", fixed(1000));
    let listen = harness.sent();
    harness.reply(&listen, BUSY);
    harness.freed();
    let early = harness.sent();
    harness.leave(id);
    harness.arrive("once", fixed(1000).once());
    harness.reply(&early, BUSY);
    harness.untold("once");
    let attempt = harness.sent();
    assert!(matches!(attempt, Op::Attempt { .. }), "{attempt:?}");
    harness.reply(&attempt, BUSY);
    assert!(matches!(harness.refused("once"), NotGranted::Busy(_)));
}

/// It may be seen before the answer that says who has the key, and be newer than that.
#[test]
fn w7_a_notice_that_comes_before_the_answer_counts() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.wait_until(6000);
    let regular = harness.sent();
    harness.freed();
    harness.silent();
    harness.reply(&regular, BUSY);
    harness.sent();
}

/// Several nodes tell of one release, and some of them late.
#[test]
fn w7_the_next_notices_wait_longer_and_part_those_that_split_their_votes() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.freed();
    let first = harness.sent();
    harness.reply(&first, BUSY);
    harness.freed();
    harness.silent();
    harness.wait_until(1009);
    harness.silent();
    harness.wait_until(1030);
    harness.sent();
}

/// Nobody is to be told for nothing while others wait.
#[test]
fn w7_an_owner_that_leaves_is_unsubscribed() {
    let mut harness = Harness::with(rules(), false);
    let id = harness.arrive("a", fixed(1000));
    let listen = harness.sent();
    harness.reply(&listen, BUSY);
    harness.leave(id);
    let owner = asker(&listen);
    assert_eq!(harness.sent(), Op::Unlisten { owner });
    // Also if the answer never came.
    let id = harness.arrive("b", fixed(1000));
    let withdraw = Op::Unlisten { owner };
    harness.reply(&withdraw, Outcome::Gone { held: false });
    let listen = harness.sent();
    harness.lose(&listen);
    harness.leave(id);
    harness.up(false);
    let owner = asker(&listen);
    assert_eq!(harness.sent(), Op::Unlisten { owner });
    // Not so where the store has no place for it, as it has answered since.
    let mut harness = Harness::with(rules(), false);
    let id = harness.arrive("c", fixed(1000));
    let listen = harness.sent();
    harness.lose(&listen);
    harness.up(false);
    let again = harness.sent();
    assert_eq!(again, listen);
    harness.reply(&again, BUSY_WITHOUT_A_PLACE);
    harness.leave(id);
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// Its owner asked once more since, for a caller that needs no subscription, and that answer is lost, or says nothing of it.
#[test]
fn w7_an_owner_whose_last_answer_is_lost_is_unsubscribed() {
    for is_lost in [true, false] {
        let mut harness = Harness::with(rules(), false);
        let id = harness.arrive("a", fixed(1000));
        let listen = harness.sent();
        let owner = asker(&listen);
        harness.leave(id);
        harness.arrive("b", fixed(1000).once());
        harness.reply(&listen, BUSY);
        let attempt = harness.sent();
        let ttl = ms(1000);
        assert_eq!(attempt, Op::Attempt { owner, ttl });
        if is_lost {
            harness.lose(&attempt);
            harness.up(false);
        } else {
            harness.reply(&attempt, BUSY_WITHOUT_A_PLACE);
        }
        assert_eq!(harness.sent(), Op::Unlisten { owner });
    }
}

/// A caller that asks once is not to be told: it has gone by then, and others wait.
#[test]
fn w7_a_caller_that_asks_once_does_not_subscribe() {
    let mut harness = Harness::with(rules(), false);
    harness.arrive("a", fixed(1000).once());
    let attempt = harness.sent();
    assert!(matches!(attempt, Op::Attempt { .. }), "{attempt:?}");
    let score = None;
    harness.reply(
        &attempt,
        Outcome::Busy {
            left: None,
            score,
            entered: false,
            holder: None,
        },
    );
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
    harness.freed();
    harness.silent();
}

/// While the store is away nothing is sent.
#[test]
fn w7_a_notice_of_no_use_changes_nothing() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    harness.down();
    harness.freed();
    harness.silent();
    harness.up(false);
    let listen = harness.sent();
    harness.freed();
    harness.fail(&listen, OpError::Refused(broken()));
    harness.silent();
}

/// However long it waits: the early questions count again in each pause of the policy.
#[test]
fn w7_the_first_notice_of_each_pause_is_followed_at_once() {
    let mut harness = Harness::with(rules(), false);
    waiting(&mut harness);
    for pause in 0..10 {
        let begun = 1000 + pause * 5000;
        harness.wait_until(begun + 2000);
        harness.freed();
        let early = harness.sent();
        harness.reply(&early, BUSY);
        harness.wait_until(begun + 5000);
        let regular = harness.sent();
        harness.reply(&regular, BUSY);
    }
}

/// A connection with pushes comes after one without, where it only listened: nothing of that is left beside its ticket.
#[test]
fn w7_an_owner_that_enters_the_queue_is_unsubscribed() {
    let mut harness = Harness::with(rules(), false);
    harness.arrive("a", fixed(1000));
    let listen = harness.sent();
    harness.reply(&listen, BUSY);
    harness.down();
    harness.up(true);
    let owner = asker(&listen);
    let withdraw = harness.sent();
    assert_eq!(withdraw, Op::Unlisten { owner });
    harness.reply(&withdraw, Outcome::Gone { held: false });
    let enter = harness.sent();
    assert!(matches!(enter, Op::Enter { .. }), "{enter:?}");
    assert_ne!(asker(&enter), owner);
}
