//! W7: where no grants come, a notice that the key is free cuts a pause short.

use super::desk::{Desk, asker, broken, fixed, ms, rules};
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::Refusal;

const BUSY: Outcome = Outcome::Busy {
    left: None,
    score: Some(0),
};

/// Somebody waits, pauses for five seconds each time, and was told once that it is busy.
fn waiting(desk: &mut Desk) {
    desk.pause = Some(ms(5000));
    desk.arrive("a", fixed(1000).until(60_000));
    let listen = desk.sent();
    assert!(matches!(listen, Op::Listen { .. }), "{listen:?}");
    desk.reply(&listen, BUSY);
    desk.silent();
}

#[test]
fn w7_whoever_waits_asks_as_soon_as_it_is_told() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    desk.wait_until(1500);
    desk.silent();
    desk.freed();
    let listen = desk.sent();
    desk.reply(&listen, Outcome::Won { epoch: 7 });
    desk.granted("a");
}

/// A notice that is lost, or of nothing, leaves the policy's questions where they are: none of them
/// comes later, or is counted twice.
#[test]
fn w7_a_notice_in_vain_moves_no_question_of_the_policy() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    desk.wait_until(2000);
    desk.freed();
    let early = desk.sent();
    desk.reply(&early, BUSY);
    assert_eq!(desk.asked, ["a"]);
    desk.wait_until(5999);
    desk.silent();
    desk.wait_until(6000);
    let regular = desk.sent();
    assert_eq!(asker(&regular), asker(&early), "its ear stays where it is");
    desk.reply(&regular, BUSY);
    assert_eq!(desk.asked, ["a", "a"]);
    desk.wait_until(10_999);
    desk.silent();
    desk.wait_until(11_000);
    desk.sent();
}

/// A node that tells of nothing, all the time.
#[test]
fn w7_a_flood_of_notices_makes_a_handful_of_questions() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    let mut questions = 0;
    for now in 1000..31_000 {
        desk.wait_until(now);
        desk.freed();
        while let Some(op) = desk.sent_if_any() {
            questions += 1;
            desk.freed();
            desk.reply(&op, BUSY);
        }
    }
    // Six pauses of five seconds, in each of which the next early question is twice as late.
    assert!((12..=66).contains(&questions), "{questions} in 30 s");
}

/// It may be seen before the answer that says who has the key, and be newer than that.
#[test]
fn w7_a_notice_that_comes_before_the_answer_counts() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    desk.wait_until(6000);
    let regular = desk.sent();
    desk.freed();
    desk.silent();
    desk.reply(&regular, BUSY);
    desk.sent();
}

/// Several nodes tell of one release, and some of them late.
#[test]
fn w7_the_next_notices_wait_longer_and_part_those_that_split_their_votes() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    desk.freed();
    let first = desk.sent();
    desk.reply(&first, BUSY);
    desk.freed();
    desk.silent();
    desk.wait_until(1009);
    desk.silent();
    desk.wait_until(1030);
    desk.sent();
}

/// Nobody is to be told in vain while others wait.
#[test]
fn w7_whoever_leaves_listens_no_more() {
    let mut desk = Desk::with(rules(), false);
    let id = desk.arrive("a", fixed(1000));
    let listen = desk.sent();
    desk.reply(&listen, BUSY);
    desk.leave(id);
    let owner = asker(&listen);
    assert_eq!(desk.sent(), Op::Unlisten { owner });
    // Also if the answer never came.
    let id = desk.arrive("b", fixed(1000));
    let withdraw = Op::Unlisten { owner };
    desk.reply(&withdraw, Outcome::Gone { held: false });
    let listen = desk.sent();
    desk.lose(&listen);
    desk.leave(id);
    desk.up(false);
    let owner = asker(&listen);
    assert_eq!(desk.sent(), Op::Unlisten { owner });
}

/// One who asks once is not to be told: it has gone by then, and others wait.
#[test]
fn w7_who_asks_once_does_not_listen() {
    let mut desk = Desk::with(rules(), false);
    desk.arrive("a", fixed(1000).once());
    let attempt = desk.sent();
    assert!(matches!(attempt, Op::Attempt { .. }), "{attempt:?}");
    let score = None;
    desk.reply(&attempt, Outcome::Busy { left: None, score });
    assert!(matches!(desk.refused("a"), Refusal::Busy));
    desk.freed();
    desk.silent();
}

/// Where grants come a notice says nothing, and while the store is away nothing is sent.
#[test]
fn w7_a_notice_of_no_use_changes_nothing() {
    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.freed();
    desk.reply(&enter, BUSY);
    desk.freed();
    desk.silent();

    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    desk.down();
    desk.freed();
    desk.silent();
    desk.up(false);
    let listen = desk.sent();
    desk.freed();
    desk.fail(&listen, OpError::Refused(broken()));
    desk.silent();
}

/// However long it waits: the early questions count anew in each pause of the policy.
#[test]
fn w7_the_first_notice_of_each_pause_is_followed_at_once() {
    let mut desk = Desk::with(rules(), false);
    waiting(&mut desk);
    for pause in 0..10 {
        let begun = 1000 + pause * 5000;
        desk.wait_until(begun + 2000);
        desk.freed();
        let early = desk.sent();
        desk.reply(&early, BUSY);
        desk.wait_until(begun + 5000);
        let regular = desk.sent();
        desk.reply(&regular, BUSY);
    }
}

/// A connection with pushes comes after one without, where it only listened: nothing of that is left beside its ticket.
#[test]
fn w7_whoever_comes_to_stand_in_the_queue_listens_no_more() {
    let mut desk = Desk::with(rules(), false);
    desk.arrive("a", fixed(1000));
    let listen = desk.sent();
    desk.reply(&listen, BUSY);
    desk.down();
    desk.up(true);
    let owner = asker(&listen);
    let withdraw = desk.sent();
    assert_eq!(withdraw, Op::Unlisten { owner });
    desk.reply(&withdraw, Outcome::Gone { held: false });
    let enter = desk.sent();
    assert!(matches!(enter, Op::Enter { .. }), "{enter:?}");
    assert_ne!(asker(&enter), owner);
}
