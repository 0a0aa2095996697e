//! G3: the ticket of a registry in which nobody waits any more.

use super::desk::{Desk, EPOCH, asker, busy, fixed, ms, rules, withdrawal};
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, Refusal, Rules};

/// A waiter has a ticket and gives up. Returns what entered the ticket.
fn unwanted(desk: &mut Desk) -> Op {
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.reply(&enter, busy(60_000, 7));
    desk.leave(a);
    desk.silent();
    assert!(!desk.turnstile.is_idle(), "its withdrawal is to be sent");
    enter
}

/// The waits of thousands of registries end at once, and the server stood still under as many withdrawals. They
/// are spread over half a second.
#[test]
fn g3_a_withdrawal_is_sent_at_a_random_moment_within_half_a_second() {
    let mut desk = Desk::new();
    let mut pauses = Vec::new();
    for _ in 0..50 {
        let enter = unwanted(&mut desk);
        let left = desk.now;
        let withdraw = desk.sent_late();
        assert_eq!(withdraw, withdrawal(&enter));
        pauses.push(desk.now - left);
        assert!(!desk.turnstile.is_idle(), "it is not answered yet");
        desk.reply(&withdraw, Outcome::Gone { held: false });
        desk.silent();
        assert!(desk.turnstile.is_idle());
    }
    let before = |until| pauses.iter().filter(|pause| **pause < until).count();
    assert!((5..25).contains(&before(ms(170))), "{pauses:?}");
    assert!((25..45).contains(&before(ms(340))), "{pauses:?}");
}

/// Its place in the queue is the new waiter's, and the store hears nothing of the change.
#[test]
fn g3_a_new_waiter_takes_the_ticket_over() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    assert_eq!(desk.turnstile.waiters().count(), 0);
    assert_eq!(desk.turnstile.holder(), None);
    // W3: what the ticket says is what its grant gives.
    desk.arrive("b", fixed(800));
    desk.wait_until(8_000);
    desk.silent();
    desk.grant(asker(&enter), 1000, 9);
    assert_eq!(desk.granted("b").0, 9 * 64);
}

/// The withdrawal that was put off for the last waiter is not sent for the next.
#[test]
fn g3_a_ticket_taken_over_is_put_off_anew_when_that_waiter_leaves() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    for _ in 0..20 {
        let b = desk.arrive("b", fixed(1000));
        let now = desk.now.as_millis() as u64;
        desk.wait_until(now + 300);
        desk.leave(b);
        desk.silent();
    }
    assert_eq!(desk.sent_late(), withdrawal(&enter));
}

/// W2: the holder's time is over, and nobody here wants the key.
#[test]
fn g3_nothing_is_asked_for_a_ticket_that_nobody_wants() {
    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.reply(&enter, busy(10, 7));
    desk.leave(a);
    assert_eq!(desk.sent_late(), withdrawal(&enter));

    // Whoever takes it over asks at once if that is due.
    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.reply(&enter, busy(10, 7));
    desk.leave(a);
    desk.stop_until(1100);
    desk.arrive("b", fixed(1000));
    let (owner, ttl, score) = (asker(&enter), ms(1000), Some(7));
    assert_eq!(desk.sent(), Op::Enter { owner, ttl, score });
}

/// The lock must not wait for a withdrawal that takes its time.
#[test]
fn g3_a_grant_that_nobody_waits_for_is_handed_on_at_once() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    let owner = asker(&enter);
    desk.grant(owner, 1000, 9);
    let release = desk.sent();
    assert_eq!(release, Op::Release { owner });
    desk.reply(&release, Outcome::Gone { held: true });
    desk.silent();
    assert!(desk.turnstile.is_idle());
}

/// It does not count, or cannot be believed: what was granted goes back all the same, and the ticket with it.
#[test]
fn g3_a_doubtful_grant_that_nobody_waits_for_is_withdrawn_at_once() {
    for steps in [false, true] {
        let mut desk = Desk::new();
        let enter = unwanted(&mut desk);
        if steps {
            // The server's clock was stepped: a grant from the future.
            desk.ahead = EPOCH as i64 + 60_000;
            desk.grant(asker(&enter), 1000, 9);
        } else {
            desk.grant_in_vain(asker(&enter), 1000, 9);
        }
        assert_eq!(desk.sent(), withdrawal(&enter), "a stepped clock: {steps}");
    }
}

/// It crosses the withdrawal, which sees to it: one op less.
#[test]
fn g3_a_grant_during_the_withdrawal_needs_no_release() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    let withdraw = desk.sent_late();
    desk.grant(asker(&enter), 1000, 9);
    desk.arrive("b", fixed(1000));
    desk.silent();
    desk.reply(&withdraw, Outcome::Gone { held: true });
    desk.untold("b");
    // Too late to take the ticket over: its owner is retired (O1).
    let anew = desk.sent();
    assert!(matches!(anew, Op::Enter { score: None, .. }), "{anew:?}");
    assert_ne!(asker(&anew), asker(&enter));
}

/// One who asks once does not stand in line, not at a place that was left either.
#[test]
fn g3_one_who_asks_once_does_not_take_the_ticket_over() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    desk.arrive("b", fixed(1000).once());
    let withdraw = desk.sent();
    assert_eq!(withdraw, withdrawal(&enter), "this one is waited for");
    desk.reply(&withdraw, Outcome::Gone { held: false });
    let attempt = desk.sent();
    assert!(matches!(attempt, Op::Attempt { .. }), "{attempt:?}");
    assert_ne!(asker(&attempt), asker(&enter));
    desk.reply(
        &attempt,
        Outcome::Busy {
            left: None,
            score: None,
        },
    );
    assert!(matches!(desk.refused("b"), Refusal::Busy));
    assert!(desk.turnstile.is_idle());
}

#[test]
fn g3_one_who_adopts_does_not_wait_for_the_withdrawal() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    desk.adopt("b", "other:9", fixed(1000));
    let withdraw = desk.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    desk.reply(&withdraw, Outcome::Gone { held: false });
    assert!(matches!(desk.sent(), Op::Adopt { .. }));
}

/// A shutdown waits for it.
#[test]
fn g3_a_shutdown_withdraws_at_once() {
    for hangs_up in [false, true] {
        let mut desk = Desk::new();
        let enter = unwanted(&mut desk);
        if hangs_up {
            desk.feed(|turnstile, cx| turnstile.disconnect(cx));
        } else {
            desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
        }
        assert_eq!(desk.sent(), withdrawal(&enter));
    }
    // Whoever stands is told, and its ticket goes.
    let mut desk = Desk::new();
    desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.reply(&enter, busy(60_000, 7));
    desk.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(desk.refused("a"), Refusal::Closed));
    assert_eq!(desk.sent(), withdrawal(&enter));
}

/// Whoever comes while the connection is gone has an owner of its own, and the ticket goes first when it is back.
#[test]
fn g3_a_ticket_that_nobody_wants_is_not_kept_through_an_outage() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    desk.down();
    desk.arrive("b", fixed(1000));
    desk.wait_until(3000);
    desk.silent();
    desk.up(true);
    let withdraw = desk.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    desk.reply(&withdraw, Outcome::Gone { held: false });
    assert_ne!(asker(&desk.sent()), asker(&enter));
}

/// Where grants do not reach us, a ticket stands in everybody's way.
#[test]
fn g3_without_pushes_the_ticket_goes_at_once() {
    let mut desk = Desk::new();
    let enter = unwanted(&mut desk);
    desk.up(false);
    assert_eq!(desk.sent(), withdrawal(&enter));
}

/// The waiter leaves before its ticket is answered for: an enter's, or that of a turn that is yielded.
#[test]
fn g3_a_ticket_that_is_answered_for_when_nobody_waits_is_withdrawn_in_its_time() {
    let mut desk = Desk::new();
    let a = desk.arrive("a", fixed(1000));
    let enter = desk.sent();
    desk.leave(a);
    desk.silent();
    desk.reply(&enter, busy(60_000, 7));
    assert_eq!(desk.sent_late(), withdrawal(&enter));

    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut desk = Desk::with(rules, true);
    let (a, _) = desk.hold("a", fixed(1000), 5);
    let b = desk.arrive("b", fixed(1000));
    desk.finish(a);
    let hand_on = desk.sent();
    desk.leave(b);
    desk.reply(&hand_on, busy(60_000, 7));
    assert!(matches!(desk.ended("a"), LeaseEnd::Released));
    assert_eq!(desk.sent_late(), withdrawal(&hand_on));
}
