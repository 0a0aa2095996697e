//! O: owners, and the order of what is sent.

use super::harness::{Harness, asker, broken, busy, fixed, ms, rules, withdrawal};
use crate::store::contract::{Op, OpError, Outcome, Owner};
use crate::turnstile::{LeaseEnd, NotGranted, Rules};

/// A is in the queue and is dropped; its withdrawal and the grant cross. B has come meanwhile
/// with an owner of its own. If the grant of A's owner served B, B would hold a lock that the
/// withdrawal has handed on.
#[test]
fn o1_a_grant_for_a_retired_owner_is_given_back_and_serves_nobody() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 1));
    harness.leave(a);
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: false });
    harness.arrive("b", fixed(1000));
    let second = harness.sent();
    harness.reply(&second, busy(5000, 2));
    harness.grant(asker(&enter), 1000, 7);
    harness.untold("b");
    assert_eq!(
        harness.sent(),
        Op::Release {
            owner: asker(&enter)
        }
    );
}

/// The same before the withdrawal is answered: it sees to the grant by itself, one op less.
#[test]
fn o1_a_grant_that_crosses_its_withdrawal_needs_no_release() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 1));
    harness.leave(a);
    let withdraw = harness.sent();
    harness.grant(asker(&enter), 1000, 7);
    harness.reply(&withdraw, Outcome::Gone { held: true });
    harness.silent();
    assert!(harness.turnstile.is_idle());
}

/// A server that refused an owner its ticket has nothing to grant to it. The lock may be its all the
/// same, by a reply that lied: the next enter tells, and proves it (S3).
#[test]
fn o1_a_grant_without_a_ticket_is_asked_about() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.fail(&enter, OpError::Refused(broken()));
    harness.grant(asker(&enter), 1000, 7);
    harness.untold("a");
    assert_eq!(asker(&harness.sent()), asker(&enter), "at once");
}

/// Each of these is released, once and in turn, however many they are and whatever comes again meanwhile.
#[test]
fn o1_many_grants_for_unknown_owners_are_all_given_back() {
    let mut harness = Harness::new();
    for _ in 0..2 {
        for owner in 1000..1200 {
            harness.grant(Owner::exclusive(owner), 1000, 7);
        }
    }
    for owner in 1000..1200 {
        let owner = Owner::exclusive(owner);
        let release = harness.sent();
        assert_eq!(release, Op::Release { owner });
        harness.reply(&release, Outcome::Gone { held: true });
    }
    assert!(harness.turnstile.is_idle());
}

/// A grant for an owner that this turnstile has never heard of, since it was forgotten in between.
#[test]
fn o1_a_grant_for_an_unknown_owner_is_released_at_once() {
    let mut harness = Harness::new();
    harness.grant(Owner::exclusive(77), 1000, 7);
    let release = harness.sent();
    assert_eq!(
        release,
        Op::Release {
            owner: Owner::exclusive(77)
        }
    );
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
}

/// A release that is not answered is of no use any more once its key has expired. It stays until it is answered, and no
/// timer runs for it.
#[test]
fn o5_an_op_in_flight_that_is_needed_no_more_wakes_nobody() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(1000), 5);
    harness.finish(a);
    let release = harness.sent();
    harness.stop_until(60_000);
    harness.feed(|turnstile, cx| turnstile.tick(cx));
    assert!(matches!(harness.ended("a"), LeaseEnd::Failed(_)));
    assert_eq!(harness.turnstile.next_timeout(), None);
    harness.reply(&release, Outcome::Gone { held: false });
    assert!(harness.turnstile.is_idle());
}

/// The store has confirmed an extension to an hour, and the answer to a shorter renewal never comes: the key is there for
/// the hour, and so its release is sent whenever the connection is back.
#[test]
fn o5_a_release_is_owed_for_as_long_as_the_longest_renewal() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).renewed(), 5);
    harness.extend(a, 3_600_000);
    let hour = harness.sent();
    harness.reply(&hour, Outcome::Renewed);
    harness.wait_until(1300);
    let renew = harness.sent();
    assert!(matches!(renew, Op::Renew { ttl, .. } if ttl == ms(900)));
    harness.finish(a);
    assert_eq!(harness.sent(), Op::Release { owner });
    harness.fail(&renew, OpError::Unknown(broken()));
    harness.lose(&Op::Release { owner });
    harness.wait_until(600_000);
    harness.up(true);
    assert_eq!(harness.sent(), Op::Release { owner });
}

/// The caller is dropped while its attempt is on the way, and the attempt wins: for nobody.
#[test]
fn o1_a_win_for_nobody_is_released() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000).once());
    let attempt = harness.sent();
    harness.leave(a);
    harness.silent();
    harness.reply(&attempt, Outcome::Won { epoch: 5 });
    assert_eq!(
        harness.sent(),
        Op::Release {
            owner: asker(&attempt)
        }
    );
    harness.untold("a");
}

/// While an enter is in flight its caller leaves, another comes, time goes by and a stray grant
/// arrives: none of it may put a second op beside the first, or the store would see them in any
/// order. They go one after the other when the reply is in.
#[test]
fn o2_one_op_is_in_flight_and_the_next_waits_for_its_reply() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.leave(a);
    harness.arrive("b", fixed(1000).once());
    harness.grant(Owner::exclusive(77), 1000, 7);
    harness.wait_until(1100);
    harness.silent();
    harness.reply(&enter, busy(5000, 1));
    let stray = harness.sent();
    assert_eq!(
        stray,
        Op::Release {
            owner: Owner::exclusive(77)
        }
    );
    harness.silent();
    harness.reply(&stray, Outcome::Gone { held: true });
    // B will not wait in the queue: A's ticket is not for it.
    assert_eq!(harness.sent(), withdrawal(&enter));
    harness.silent();
}

/// A release whose reply is lost goes again before the enter that came after it: the other way
/// round the release would hand on what the enter has queued for.
#[test]
fn o2_an_op_sent_again_keeps_its_place() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    harness.finish(a);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.arrive("b", fixed(1000));
    harness.lose(&release);
    harness.silent();
    harness.up(true);
    assert_eq!(harness.sent(), release);
    harness.silent();
    harness.reply(&release, Outcome::Gone { held: false });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert!(matches!(harness.sent(), Op::Enter { .. }));
}

/// The push of the grant is seen before the reply of the enter that went before it. It waits: the
/// reply brings the times that prove the grant (D2).
#[test]
fn o3_a_grant_waits_for_the_reply_in_flight() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.stop_until(1500);
    harness.grant_at(asker(&enter), 1000, 9, 1490);
    harness.untold("a");
    harness.reply_at(&enter, 1000, busy(400, 1));
    let (token, deadline) = harness.granted("a");
    assert_eq!(token, 9 * 64);
    // The enter went at 1000; the grant came 490 ms later by the server's clock.
    assert_eq!(
        deadline,
        super::harness::deadline(1000, 1000) + 490_000 - 490
    );
    harness.silent();
}

/// The push came, its enter's reply did not: the connection broke. The grant is dropped, and the
/// enter that follows the reconnect wins, and so proves it.
#[test]
fn o3_a_grant_whose_reply_never_comes_is_made_good_by_the_next_enter() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.grant(asker(&enter), 1000, 9);
    harness.lose(&enter);
    harness.untold("a");
    harness.up(true);
    let again = harness.sent();
    assert_eq!(asker(&again), asker(&enter));
    harness.reply(&again, Outcome::Won { epoch: 10 });
    assert_eq!(harness.granted("a").0, 10 * 64);
}

/// Found by the simulator (seed 12623): a yield's reply is lost. It was done, and on the
/// new connection its ticket is granted the lock before that connection is said to be up. Were
/// the grant believed then, the yield that is sent again would meet a tenure where it expects a
/// acquisition; with nobody left in the queue it would wipe out a lease.
#[test]
fn o3_a_grant_before_the_connection_is_up_waits_for_the_pending_yield() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.wait_until(1100);
    harness.finish(a);
    let hand_on = harness.sent();
    let Op::Yield { old, new, .. } = hand_on else {
        panic!("not {hand_on:?}")
    };
    assert_eq!(old, owner);
    harness.lose(&hand_on);
    harness.grant(new, 1000, 6);
    harness.untold("b");
    harness.up(true);
    assert_eq!(harness.sent(), hand_on);
    harness.reply(&hand_on, Outcome::NotOld);
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    let enter = harness.sent();
    assert_eq!(asker(&enter), new);
    harness.reply(&enter, Outcome::Won { epoch: 7 });
    assert_eq!(harness.granted("b").0, 7 * 64);
}

/// After a reconnect a holder renews in the first step, and a ticket is entered again in the
/// second: under its owner, and with the place that the first answer named.
#[test]
fn o4_a_new_connection_renews_and_then_enters_again() {
    let mut harness = Harness::new();
    let (_, owner) = harness.hold("a", fixed(1000).renewed(), 5);
    harness.down();
    harness.feed(|turnstile, cx| turnstile.up_renew(cx, false));
    let renew = harness.sent();
    let ttl = ms(1000);
    assert!(matches!(renew, Op::Renew { owner: of, ttl: to, .. } if (of, to) == (owner, ttl)));
    harness.feed(|turnstile, cx| turnstile.up(cx, true));
    harness.silent();

    let mut harness = Harness::new();
    harness.arrive("b", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 42));
    harness.down();
    harness.up(true);
    let owner = asker(&enter);
    let score = Some(42);
    assert_eq!(harness.sent(), Op::Enter { owner, ttl, score });
}

/// The new connection gets no pushes: a ticket would stand in everybody's way, so it goes, and
/// its waiter asks with repeats.
#[test]
fn o4_without_pushes_a_standing_ticket_is_withdrawn() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 42));
    harness.down();
    harness.up(false);
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&enter));
    harness.reply(&withdraw, Outcome::Gone { held: false });
    assert!(matches!(harness.sent(), Op::Listen { .. }));
}

/// Nothing is sent while the connection is known to be gone, and nobody who stands is told.
#[test]
fn o4_nothing_is_sent_while_the_connection_is_gone() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.fail(&enter, OpError::Unsent(broken()));
    harness.down();
    harness.arrive("b", fixed(1000));
    harness.wait_until(60_000);
    harness.silent();
    harness.untold("a");
    harness.up(true);
    assert_eq!(asker(&harness.sent()), asker(&enter));
}

/// What was Unknown when its caller left is settled after the reconnect: an attempt may have won,
/// an enter may stand or have won.
#[test]
fn o6_an_unknown_op_whose_caller_has_gone_is_settled() {
    for once in [true, false] {
        let mut harness = Harness::new();
        let wish = if once {
            fixed(1000).once()
        } else {
            fixed(1000)
        };
        let a = harness.arrive("a", wish);
        let op = harness.sent();
        harness.leave(a);
        harness.lose(&op);
        harness.up(true);
        let owner = asker(&op);
        let settlement = if once {
            Op::Release { owner }
        } else {
            withdrawal(&op)
        };
        assert_eq!(harness.sent(), settlement);
        harness.reply(&settlement, Outcome::Gone { held: true });
        harness.silent();
        assert!(harness.turnstile.is_idle());
    }
}

/// Found by the simulator (seed 8730): an attempt comes to the server after its connection was given up, which it does
/// for as long as the attempt is of use (O5). The next connection stands only when a lock that was won before would be
/// over, and nothing was sent: the lock stayed with nobody.
#[test]
fn o6_an_attempt_is_undone_as_long_as_it_may_be_done() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(300).once());
    let attempt = harness.sent();
    harness.wait_until(1100);
    harness.lose(&attempt);
    assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
    harness.wait_until(2300);
    harness.up(true);
    let owner = asker(&attempt);
    assert_eq!(harness.sent(), Op::Release { owner });
    // The second is not waited for longer.
    harness.lose(&Op::Release { owner });
    harness.wait_until(2500);
    assert!(harness.turnstile.is_idle());
}

/// A renewal whose connection is given up may be done as long as the lock lasts, which it prolongs. The release is
/// pending for as long as that.
#[test]
fn o6_a_release_is_pending_as_long_as_a_lost_renewal_may_keep_the_lock() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1350);
    let renewal = harness.sent();
    assert!(matches!(renewal, Op::Renew { .. }), "{renewal:?}");
    harness.finish(a);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.wait_until(1400);
    harness.lose(&renewal);
    harness.lose(&release);
    harness.wait_until(2800);
    harness.up(true);
    assert_eq!(harness.sent(), release);
    harness.lose(&release);
    harness.wait_until(3300);
    assert!(harness.turnstile.is_idle());
}

/// A server that refuses a release is asked again after a pause, which grows as that after questions does. So is a session
/// that has dropped it.
#[test]
fn o6_a_refused_release_is_sent_again_after_a_pause_that_grows() {
    for is_dropped in [false, true] {
        let mut harness = Harness::new();
        let (a, owner) = harness.hold("a", fixed(30_000), 5);
        harness.finish(a);
        for pause in [50, 100, 200, 400] {
            let release = harness.sent();
            assert_eq!(release, Op::Release { owner });
            match is_dropped {
                true => harness.feed(|turnstile, cx| turnstile.op_dropped(cx, &release)),
                false => harness.fail(&release, OpError::Refused(broken())),
            }
            let now = harness.now.as_millis() as u64;
            harness.wait_until(now + pause);
            harness.silent();
            harness.wait_until(now + pause + 50);
        }
        let release = harness.sent();
        harness.untold("a");
        harness.reply(&release, Outcome::Gone { held: true });
        assert!(matches!(harness.ended("a"), LeaseEnd::Released));
        assert!(harness.turnstile.is_idle());
    }
}

/// A lease that was released, a grant for nobody, and an attempt whose caller has left: the store may have the key for a
/// ttl and the drift of its clock, and an attempt may be done until its connection was given up (O5). So long the release
/// is owed, and no longer.
#[test]
fn o5_a_release_is_owed_as_long_as_its_key_may_be_there() {
    type Begin = fn(&mut Harness) -> (Op, u64);
    let begins: [Begin; 3] = [
        |harness| {
            let (a, _) = harness.hold("a", fixed(1000), 5);
            harness.finish(a);
            let release = harness.sent();
            harness.lose(&release);
            (release, 2012)
        },
        |harness| {
            harness.grant(Owner::exclusive(77), 1000, 7);
            let release = harness.sent();
            harness.lose(&release);
            (release, 2012)
        },
        |harness| {
            harness.arrive("a", fixed(1000).once());
            let attempt = harness.sent();
            harness.lose(&attempt);
            let owner = asker(&attempt);
            (Op::Release { owner }, 3012)
        },
    ];
    for begin in begins {
        let mut harness = Harness::new();
        let (release, until) = begin(&mut harness);
        harness.wait_until(until - 1);
        harness.up(true);
        assert_eq!(harness.sent(), release);

        let mut harness = Harness::new();
        begin(&mut harness);
        harness.wait_until(until);
        harness.up(true);
        harness.silent();
        assert!(harness.turnstile.is_idle());
    }
}

/// A yield whose fate is unknown, and nobody left who wants its new ticket: the old lock first,
/// then the new ticket, or the release might grant the lock to the very ticket that is to go.
#[test]
fn o6_an_unknown_yield_is_settled_old_before_new() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(1000));
    harness.wait_until(1100);
    harness.finish(a);
    let hand_on = harness.sent();
    harness.leave(b);
    harness.lose(&hand_on);
    harness.up(true);
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.reply(&release, Outcome::Gone { held: false });
    // Sent twice, and the first was done: it was ours to the end.
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    let withdraw = harness.sent();
    assert_eq!(withdraw, withdrawal(&hand_on));
    harness.reply(&withdraw, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
}

/// After `Lost` there is nothing to release: a release could only touch what is another's.
#[test]
fn o6_nothing_is_sent_after_lost() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(1000).renewed(), 5);
    harness.up(true);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Lost);
    assert!(matches!(harness.ended("a"), LeaseEnd::Lost(_)));
    harness.silent();
    assert!(harness.turnstile.is_idle());
    harness.finish(a);
    harness.untold("a");
    harness.silent();
}

/// A release that is answered for the first time with "not yours" tells of a loss; sent twice, of
/// the first sending's success.
#[test]
fn o6_a_release_sent_twice_was_done_the_first_time() {
    for twice in [false, true] {
        let mut harness = Harness::new();
        let (a, _) = harness.hold("a", fixed(1000), 5);
        harness.finish(a);
        let mut release = harness.sent();
        if twice {
            harness.lose(&release);
            harness.up(true);
            release = harness.sent();
        }
        harness.reply(&release, Outcome::Gone { held: false });
        let end = harness.ended("a");
        assert_eq!(matches!(end, LeaseEnd::Released), twice, "{end:?}");
        assert_eq!(matches!(end, LeaseEnd::Lost(_)), !twice, "{end:?}");
    }
}

/// A yield that the server refuses becomes a release: the lock must not stay with us for want of
/// memory in the queue.
#[test]
fn s1_a_refused_yield_becomes_a_release() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.wait_until(1100);
    harness.finish(a);
    let hand_on = harness.sent();
    harness.fail(&hand_on, OpError::Refused(broken()));
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
    assert_eq!(asker(&harness.sent()), asker(&hand_on));
}

/// Shut down: waiters and the holder are told, the lock goes back, and nobody comes in any more.
#[test]
fn o6_a_closed_turnstile_gives_everything_back() {
    let mut harness = Harness::new();
    let (_, owner) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
    assert!(matches!(harness.ended("a"), LeaseEnd::Closed));
    assert!(matches!(harness.refused("b"), NotGranted::Closed));
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.arrive("c", fixed(1000));
    assert!(matches!(harness.refused("c"), NotGranted::Closed));
    harness.reply(&release, Outcome::Gone { held: true });
    assert!(harness.turnstile.is_idle());
    harness.silent();
}

/// Found by the simulator (seed 23): a ticket of 60 ms is withdrawn as the connection
/// breaks, and it takes a second to make another. The lock that the ticket might have been
/// granted has long run out; the ticket has not, and would be served before those who wait.
#[test]
fn o6_a_withdrawal_is_pending_as_long_as_its_ticket_may_stand() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(60));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 1));
    harness.leave(a);
    let withdraw = harness.sent();
    harness.lose(&withdraw);
    harness.wait_until(3000);
    harness.up(true);
    assert_eq!(harness.sent(), withdraw);
    harness.lose(&withdraw);
    harness.wait_until(90_000);
    assert!(harness.turnstile.is_idle());
}

/// A yield was done and its reply lost; sent again, it finds the lock another's, and its caller
/// leaves at that moment. "Not old" does not say that the new ticket does not stand.
#[test]
fn o6_not_old_to_a_yield_sent_again_leaves_a_ticket_to_withdraw() {
    let mut harness = Harness::new();
    let (a, _) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(1000));
    harness.wait_until(1100);
    harness.finish(a);
    let hand_on = harness.sent();
    harness.lose(&hand_on);
    harness.up(true);
    assert_eq!(harness.sent(), hand_on);
    harness.leave(b);
    harness.reply(&hand_on, Outcome::NotOld);
    assert_eq!(harness.sent(), withdrawal(&hand_on));
}

/// The same where the second sending is refused: the first may have been done.
#[test]
fn o6_a_refusal_of_a_yield_sent_again_leaves_a_ticket_to_withdraw() {
    let mut harness = Harness::new();
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    let b = harness.arrive("b", fixed(1000));
    harness.wait_until(1100);
    harness.finish(a);
    let hand_on = harness.sent();
    harness.lose(&hand_on);
    harness.up(true);
    assert_eq!(harness.sent(), hand_on);
    harness.fail(&hand_on, OpError::Refused(broken()));
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.leave(b);
    harness.reply(&release, Outcome::Gone { held: false });
    assert_eq!(harness.sent(), withdrawal(&hand_on));
}

/// The right to publish was taken away while a turn was to be yielded: the script had made the next ticket the owner,
/// could not tell it, and let the lock go (S1). The release that follows finds it gone, but that is the yield's
/// doing: the lease was ours to its end, and work that had gone well was told that it had lost the lock.
#[test]
fn s1_a_release_after_a_refused_yield_that_finds_the_lock_gone_tells_no_loss() {
    let rules = Rules {
        local_passes: 0,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    let (a, owner) = harness.hold("a", fixed(1000), 5);
    harness.arrive("b", fixed(1000));
    harness.finish(a);
    let hand_on = harness.sent();
    assert!(matches!(hand_on, Op::Yield { .. }));
    harness.fail(&hand_on, OpError::Refused(broken()));
    let release = harness.sent();
    assert_eq!(release, Op::Release { owner });
    harness.reply(&release, Outcome::Gone { held: false });
    assert!(matches!(harness.ended("a"), LeaseEnd::Released));
}
