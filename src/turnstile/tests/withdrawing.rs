//! G3: the ticket of a registry in which nobody waits any more.

use super::harness::{EPOCH, Harness, asker, busy, fixed, rules, withdrawal};
use crate::store::contract::{Op, Outcome};
use crate::turnstile::{LeaseEnd, NotGranted, Rules};

/// A waiter has a ticket and gives up. Returns what withdraws the ticket.
fn withdrawn(harness: &mut Harness) -> Op {
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.leave(a);
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    withdraw
}

/// A waiter gives up before its enter is answered. Returns that.
fn unanswered(harness: &mut Harness) -> Op {
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.leave(a);
    harness.silent();
    enter
}

/// A ticket that nobody needed stood for up to half a second. A release in that time went to it, and whoever asked once
/// found the lock busy, though nobody wanted it.
#[test]
fn g3_a_withdrawal_is_sent_at_once() {
    let mut harness = Harness::new();
    let withdraw = withdrawn(&mut harness);
    assert!(!harness.turnstile.is_idle(), "it is not answered yet");
    assert_eq!(harness.turnstile.waiters().count(), 0);
    harness.reply(&withdraw, Outcome::Gone { held: false });
    harness.silent();
    assert!(harness.turnstile.is_idle());

    // The same at the end of a wait.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1500));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.wait_until(1500);
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
    assert_eq!(harness.sent(), withdrawal(&enter));
}

/// Others here still wait: the ticket is theirs, whoever of them leaves.
#[test]
fn g3_a_ticket_stays_as_long_as_anybody_waits_with_it() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(800));
    harness.reply(&enter, busy(60_000, 7));
    let c = harness.arrive("c", fixed(1000));
    harness.leave(a);
    harness.leave(c);
    harness.silent();
    // W3: what the ticket says is what its grant gives.
    harness.grant(asker(&enter), 1000, 9);
    assert_eq!(harness.granted("b").0, 9 * 64);
    assert!(harness.take(b));
}

/// Until its enter is answered, nothing else is sent (O2). Whoever comes meanwhile has its place in the queue.
#[test]
fn g3_a_waiter_that_comes_before_the_answer_takes_the_ticket_over() {
    let mut harness = Harness::new();
    let enter = unanswered(&mut harness);
    let b = harness.arrive("b", fixed(800));
    harness.reply(&enter, busy(60_000, 7));
    harness.wait_until(8_000);
    harness.silent();
    harness.leave(b);
    assert_eq!(harness.sent(), withdrawal(&enter));
}

/// A lock that was granted to nobody is not kept until the withdrawal.
#[test]
fn g3_a_grant_that_nobody_waits_for_is_handed_on_at_once() {
    let mut harness = Harness::new();
    let enter = unanswered(&mut harness);
    let owner = asker(&enter);
    harness.grant(owner, 1000, 9);
    harness.silent();
    harness.reply(&enter, busy(60_000, 7));
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
        let enter = unanswered(&mut harness);
        if steps {
            // The server's clock was stepped: a grant from the future.
            harness.ahead = EPOCH as i64 + 60_000;
            harness.grant(asker(&enter), 1000, 9);
            harness.ahead = EPOCH as i64;
        } else {
            harness.grant_in_vain(asker(&enter), 1000, 9);
        }
        harness.reply(&enter, busy(60_000, 7));
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
    let withdraw = withdrawn(&mut harness);
    harness.grant(withdraw.owner(), 1000, 9);
    harness.arrive("b", fixed(1000));
    harness.silent();
    harness.reply(&withdraw, Outcome::Gone { held: true });
    harness.untold("b");
    // Too late to take the ticket over: its owner is retired (O1).
    let anew = harness.sent();
    assert!(matches!(anew, Op::Enter { score: None, .. }), "{anew:?}");
    assert_ne!(asker(&anew), withdraw.owner());
}

/// A caller that asks once does not wait in the queue, not at a place that was left either.
#[test]
fn g3_a_caller_that_asks_once_does_not_take_over_the_ticket() {
    let mut harness = Harness::new();
    let enter = unanswered(&mut harness);
    harness.arrive("b", fixed(1000).once());
    harness.reply(&enter, busy(60_000, 7));
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
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
            holder: None,
        },
    );
    assert!(matches!(harness.refused("b"), NotGranted::Busy(_)));
    assert!(harness.turnstile.is_idle());
}

#[test]
fn g3_an_adoption_follows_the_withdrawal() {
    let mut harness = Harness::new();
    let withdraw = withdrawn(&mut harness);
    harness.adopt("b", "other:9", fixed(1000));
    harness.silent();
    harness.reply(&withdraw, Outcome::Gone { held: false });
    assert!(matches!(harness.sent(), Op::Adopt { .. }));
}

#[test]
fn g3_a_shutdown_withdraws_at_once() {
    for hangs_up in [false, true] {
        let mut harness = Harness::new();
        let enter = unanswered(&mut harness);
        if hangs_up {
            harness.feed(|turnstile, cx| turnstile.disconnect(cx));
        } else {
            harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
        }
        harness.reply(&enter, busy(60_000, 7));
        assert_eq!(harness.sent(), withdrawal(&enter));
    }
    // Whoever stands is told, and its ticket goes.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.refused("a"), NotGranted::Closed));
    assert_eq!(harness.sent(), withdrawal(&enter));
}

/// Whoever comes while the connection is gone has an owner of its own, and the ticket goes first when it is back.
#[test]
fn g3_a_ticket_that_nobody_wants_is_not_kept_through_an_outage() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(60_000, 7));
    harness.down();
    harness.leave(a);
    harness.arrive("b", fixed(1000));
    harness.wait_until(3000);
    harness.silent();
    harness.up(true);
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: false });
    assert_ne!(asker(&harness.sent()), asker(&enter));
}

/// The waiter leaves before its ticket is answered for: an enter's, or that of a turn that is yielded.
#[test]
fn g3_a_ticket_that_is_answered_for_when_nobody_waits_is_withdrawn() {
    let mut harness = Harness::new();
    let enter = unanswered(&mut harness);
    harness.reply(&enter, busy(60_000, 7));
    assert_eq!(harness.sent(), withdrawal(&enter));

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
    assert_eq!(harness.sent(), withdrawal(&hand_on));
}
