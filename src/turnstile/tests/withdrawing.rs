//! G3: the ticket of a registry in which nobody waits any more.

use super::harness::{EPOCH, Harness, asker, busy, fixed, ms, rules, withdrawal};
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, Refusal, Rules};

/// A waiter has a ticket and gives up. Returns what entered the ticket.
fn unwanted(harness: &mut Harness) -> Op {
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.leave(a);
    harness.silent();
    assert!(!harness.turnstile.is_idle(), "its withdrawal is to be sent");
    enter
}

/// The waits of thousands of registries end at once, and the server stood still under as many withdrawals. They
/// are spread over half a second.
#[test]
fn g3_a_withdrawal_is_sent_at_a_random_moment_within_half_a_second() {
    let mut harness = Harness::new();
    let mut pauses = Vec::new();
    for _ in 0..50 {
        let enter = unwanted(&mut harness);
        let left = harness.now;
        let withdraw = harness.sent_late();
        assert_eq!(withdraw, withdrawal(&enter));
        pauses.push(harness.now - left);
        assert!(!harness.turnstile.is_idle(), "it is not answered yet");
        harness.reply(&withdraw, Outcome::Gone { held: false });
        harness.silent();
        assert!(harness.turnstile.is_idle());
    }
    let before = |until| pauses.iter().filter(|pause| **pause < until).count();
    assert!((5..25).contains(&before(ms(170))), "{pauses:?}");
    assert!((25..45).contains(&before(ms(340))), "{pauses:?}");
}

/// Its place in the queue is the new waiter's, and the store hears nothing of the change.
#[test]
fn g3_a_new_waiter_takes_the_ticket_over() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    assert_eq!(harness.turnstile.waiters().count(), 0);
    assert_eq!(harness.turnstile.holder(), None);
    // W3: what the ticket says is what its grant gives.
    harness.arrive("b", fixed(800));
    harness.wait_until(8_000);
    harness.silent();
    harness.grant(asker(&enter), 1000, 9);
    assert_eq!(harness.granted("b").0, 9 * 64);
}

/// The withdrawal that was put off for the last waiter is not sent for the next.
#[test]
fn g3_a_ticket_that_was_taken_over_is_withdrawn_later_when_that_waiter_leaves() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    for _ in 0..20 {
        let b = harness.arrive("b", fixed(1000));
        let now = harness.now.as_millis() as u64;
        harness.wait_until(now + 300);
        harness.leave(b);
        harness.silent();
    }
    assert_eq!(harness.sent_late(), withdrawal(&enter));
}

/// W2: the holder's time is over, and nobody here wants the key.
#[test]
fn g3_nothing_is_asked_for_a_ticket_that_nobody_wants() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(10, 7));
    harness.leave(a);
    assert_eq!(harness.sent_late(), withdrawal(&enter));

    // Whoever takes it over asks at once if that is due.
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(10, 7));
    harness.leave(a);
    harness.stop_until(1100);
    harness.arrive("b", fixed(1000));
    let (owner, ttl, score) = (asker(&enter), ms(1000), Some(7));
    assert_eq!(harness.sent(), Op::Enter { owner, ttl, score });
}

/// The lock must not wait for a withdrawal that takes its time.
#[test]
fn g3_a_grant_that_nobody_waits_for_is_handed_on_at_once() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    let owner = asker(&enter);
    harness.grant(owner, 1000, 9);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.reply(&release, Outcome::Gone { held: true });
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// It does not count, or cannot be believed: what was granted goes back all the same, and the ticket with it.
#[test]
fn g3_a_doubtful_grant_that_nobody_waits_for_is_withdrawn_at_once() {
    for steps in [false, true] {
        let mut harness = Harness::new();
        let enter = unwanted(&mut harness);
        if steps {
            // The server's clock was stepped: a grant from the future.
            harness.ahead = EPOCH as i64 + 60_000;
            harness.grant(asker(&enter), 1000, 9);
        } else {
            harness.grant_in_vain(asker(&enter), 1000, 9);
        }
        assert_eq!(
            harness.sent(),
            withdrawal(&enter),
            "a stepped clock: {steps}"
        );
    }
}

/// It crosses the withdrawal, which sees to it: one op less.
#[test]
fn g3_a_grant_during_the_withdrawal_needs_no_release() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    let withdraw = harness.sent_late();
    harness.grant(asker(&enter), 1000, 9);
    harness.arrive("b", fixed(1000));
    harness.silent();
    harness.reply(&withdraw, Outcome::Gone { held: true });
    harness.untold("b");
    // Too late to take the ticket over: its owner is retired (O1).
    let anew = harness.sent();
    assert!(matches!(anew, Op::Enter { score: None, .. }), "{anew:?}");
    assert_ne!(asker(&anew), asker(&enter));
}

/// A caller that asks once does not wait in the queue, not at a place that was left either.
#[test]
fn g3_a_caller_that_asks_once_does_not_take_over_the_ticket() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    harness.arrive("b", fixed(1000).once());
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter), "this one is waited for");
    harness.reply(&withdraw, Outcome::Gone { held: false });
    let attempt = harness.sent();
    assert!(matches!(attempt, Op::Attempt { .. }), "{attempt:?}");
    assert_ne!(asker(&attempt), asker(&enter));
    harness.reply(
        &attempt,
        Outcome::Busy {
            left: None,
            score: None,
            entered: false,
        },
    );
    assert!(matches!(harness.refused("b"), Refusal::Busy));
    assert!(harness.turnstile.is_idle());
}

#[test]
fn g3_an_adoption_does_not_wait_for_the_withdrawal() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    harness.adopt("b", "other:9", fixed(1000));
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: false });
    assert!(matches!(harness.sent(), Op::Adopt { .. }));
}

/// A shutdown waits for it.
#[test]
fn g3_a_shutdown_withdraws_at_once() {
    for hangs_up in [false, true] {
        let mut harness = Harness::new();
        let enter = unwanted(&mut harness);
        if hangs_up {
            harness.feed(|turnstile, cx| turnstile.disconnect(cx));
        } else {
            harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
        }
        assert_eq!(harness.sent(), withdrawal(&enter));
    }
    // Whoever stands is told, and its ticket goes.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.refused("a"), Refusal::Closed));
    assert_eq!(harness.sent(), withdrawal(&enter));
}

/// Whoever comes while the connection is gone has an owner of its own, and the ticket goes first when it is back.
#[test]
fn g3_a_ticket_that_nobody_wants_is_not_kept_through_an_outage() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    harness.down();
    harness.arrive("b", fixed(1000));
    harness.wait_until(3000);
    harness.silent();
    harness.up(true);
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: false });
    assert_ne!(asker(&harness.sent()), asker(&enter));
}

/// Where grants do not reach us, a ticket stands in everybody's way.
#[test]
fn g3_without_pushes_the_ticket_goes_at_once() {
    let mut harness = Harness::new();
    let enter = unwanted(&mut harness);
    harness.up(false);
    assert_eq!(harness.sent(), withdrawal(&enter));
}

/// The waiter leaves before its ticket is answered for: an enter's, or that of a turn that is yielded.
#[test]
fn g3_a_ticket_that_is_answered_for_when_nobody_waits_is_withdrawn_in_its_time() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.leave(a);
    harness.silent();
    harness.reply(&enter, busy(60_000, 7));
    assert_eq!(harness.sent_late(), withdrawal(&enter));

    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (a, _) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(1000));
    harness.finish(a);
    let hand_on = harness.sent();
    harness.leave(b);
    harness.reply(&hand_on, busy(60_000, 7));
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_eq!(harness.sent_late(), withdrawal(&hand_on));
}
