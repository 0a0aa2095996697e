//! W: who waits how, and who loses its turn.

use std::time::Duration;

use super::harness::{
    Harness, asker, broken, busy, busy_by, deadline, fixed, ms, rules, withdrawal,
};
use crate::store::contract::{Op, OpError, Outcome};
use crate::turnstile::{LeaseEnd, LeaseVerdict, NotGranted, Rules, WaiterId, WaiterVerdict};

/// A thousand callers on one busy key cost the store one call.
#[test]
fn w1_a_waiting_registry_has_one_ticket_and_sends_nothing() {
    let rules = Rules {
        max_waiters: 5000,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    harness.arrive("a", fixed(9000));
    let enter = harness.sent();
    for _ in 0..1000 {
        harness.arrive("b", fixed(9000));
    }
    harness.reply(&enter, busy(9000, 1));
    harness.wait_until(9000);
    harness.silent();
}

/// The holder crashed: its ttl and a jitter later the ticket asks, and wins.
#[test]
fn w2_when_the_ttl_has_run_out_the_ticket_asks() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(700, 1));
    harness.wait_until(1700);
    harness.silent();
    harness.wait_until(1750);
    let again = harness.sent();
    assert_eq!(asker(&again), asker(&enter));
}

/// A stranger's lock has no ttl at all, or an hour; it may be deleted at any time, and whoever
/// deletes it knows nothing of tickets.
#[test]
fn w2_about_every_ten_seconds_the_ticket_asks() {
    let mut pauses = Vec::new();
    for left in [None, Some(ms(3_600_000))] {
        let mut harness = Harness::new();
        harness.arrive("a", fixed(1000));
        for _ in 0..20 {
            let enter = harness.sent();
            let score = Some(1);
            harness.reply(
                &enter,
                Outcome::Busy {
                    left,
                    score,
                    entered: false,
                    holder: None,
                },
            );
            let asked = harness.now;
            harness.wait_until(asked.as_millis() as u64 + 7_999);
            harness.silent();
            let next = harness.turnstile.next_timeout().unwrap();
            assert!(next <= asked + ms(12_000), "{asked:?}, then {next:?}");
            pauses.push(next - asked);
            harness.now = next;
            harness.feed(|turnstile, cx| turnstile.tick(cx));
        }
    }
    // Those who began together do not ask together.
    let (least, most) = (pauses.iter().min().unwrap(), pauses.iter().max().unwrap());
    assert!(*most - *least > ms(2_000), "{least:?} to {most:?}");
}

/// K1: an answer that names no place, as that of a store that has no queue for a while, does not forget it.
#[test]
fn k1_a_ticket_asks_for_the_place_that_it_had() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.reply(&enter, busy(1000, 7));
    harness.wait_until(2060);
    let again = harness.sent();
    assert!(
        matches!(again, Op::Enter { score: Some(7), .. }),
        "{again:?}"
    );
    harness.reply(&again, busy_by("b", Some(ms(1000)), None));
    harness.wait_until(3200);
    let again = harness.sent();
    assert!(
        matches!(again, Op::Enter { score: Some(7), .. }),
        "{again:?}"
    );
}

/// The ticket says 1 s, since that was the head's wish; the waiter who gets it wants 5 s: it
/// renews as soon as it has taken the lease, for what is left of its wish.
#[test]
fn w3_a_lease_that_wants_longer_than_the_ticket_renews_at_once() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(5000));
    harness.reply(&enter, busy(700, 1));
    harness.leave(a);
    harness.silent();
    harness.grant(asker(&enter), 1000, 6);
    assert_eq!(harness.granted("b").1, deadline(1000, 1000));
    harness.silent();
    assert!(harness.take(b));
    let renew = harness.sent();
    let Op::Renew { ttl, .. } = renew else {
        panic!("not {renew:?}")
    };
    assert_eq!(ttl, ms(5000));
    harness.reply(&renew, Outcome::Renewed);
    let LeaseVerdict::Prolonged {
        deadline: until, ..
    } = harness.lease_told("b")
    else {
        panic!("not prolonged")
    };
    assert_eq!(until.as_micros() as u64, deadline(1000, 5000));
}

/// One who wants less ends at its own deadline, and the next in the queue goes on in the tenure.
#[test]
fn w3_a_fixed_lease_that_wants_less_ends_at_its_own_deadline() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    let b = harness.arrive("b", fixed(200));
    harness.leave(a);
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    assert_eq!(harness.granted("b").1, deadline(1000, 200));
    assert!(harness.take(b));
    harness.silent();
    harness.wait_until(1200);
    assert!(matches!(harness.ended("b"), LeaseEnd::Lost(_)));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// Found by the simulator (seed 260): a win of 180 ms is 100 ms old when it arrives, and
/// the head wants a fixed lease of 60 ms. Counted from the sending, its own end would be over,
/// though the tenure is not.
#[test]
fn w3_a_short_fixed_lease_counts_from_its_grant() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(180));
    let enter = harness.sent();
    harness.arrive("b", fixed(60));
    harness.leave(a);
    harness.stop_until(1100);
    harness.reply_at(&enter, 1001, Outcome::Won { epoch: 5 });
    assert_eq!(harness.granted("b").1, deadline(1100, 60));
}

/// Granted, but not polled: a `select!` arm that nobody looks at must not hold the lock for ever.
/// After a third of the ttl the turn is the next one's, whether of this registry or another.
#[test]
fn w4_a_granted_waiter_that_does_not_look_loses_its_turn() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(900));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    let b = harness.arrive("b", fixed(900));
    harness.wait_until(1299);
    harness.untold("a");
    harness.wait_until(1300);
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::TurnLost));
    let hand_on = harness.sent();
    assert!(matches!(hand_on, Op::Yield { .. }));
    assert!(!harness.take(a));
    harness.untold("a");
    harness.reply(&hand_on, Outcome::Won { epoch: 6 });
    harness.granted("b");
    assert!(harness.take(b));
    // Taken, it is held while its owner lives.
    harness.wait_until(2100);
    harness.untold("b");
}

/// With no other waiter here that is a release, not a yield to itself; and one who looks too late
/// is told so even when the timer was late as well.
#[test]
fn w4_with_nobody_else_the_lost_turn_is_a_release() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(900));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.stop_until(1400);
    assert!(!harness.take(a));
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::TurnLost));
    assert_eq!(
        harness.sent(),
        Op::Release {
            owner: asker(&enter)
        }
    );
}

/// Without pushes nobody enters: every hand-over would drop the ticket. The head's `Repeat` paces
/// the attempts.
#[test]
fn w5_without_pushes_attempts_are_repeated_and_nothing_is_entered() {
    let mut harness = Harness::with(rules(), false);
    harness.arrive("a", fixed(1000));
    harness.arrive("b", fixed(1000));
    for at in [1030, 1060, 1090] {
        let attempt = harness.sent();
        // For what it is worth there.
        assert!(matches!(attempt, Op::Listen { .. }));
        let left = Some(ms(5000));
        harness.reply(
            &attempt,
            Outcome::Busy {
                left,
                score: None,
                entered: false,
                holder: None,
            },
        );
        harness.wait_until(at - 1);
        harness.silent();
        harness.wait_until(at);
    }
    let attempt = harness.sent();
    harness.reply(&attempt, Outcome::Won { epoch: 5 });
    harness.granted("a");
}

/// The policy of the first has ended, and its wait with that. The next one's is asked; after the last nothing is left in
/// the store.
#[test]
fn w5_when_a_policy_ends_the_next_one_is_asked() {
    let mut harness = Harness::with(rules(), false);
    harness.pause = None;
    harness.arrive("a", fixed(1000));
    harness.arrive("b", fixed(1000));
    let listen = harness.sent();
    harness.reply(&listen, busy(5000, 0));
    for caller in ["a", "b"] {
        assert!(matches!(harness.refused(caller), NotGranted::Busy(_)));
    }
    assert_eq!(harness.asked, ["a", "b"]);
    let owner = asker(&listen);
    let unlisten = harness.sent();
    assert_eq!(unlisten, Op::Unlisten { owner });
    harness.reply(&unlisten, Outcome::Gone { held: false });
    assert!(harness.turnstile.is_idle());
}

/// A caller that asks once is told by the answer to an op that went out after it came, not by one
/// that was on its way before: the lock may have come free in between.
#[test]
fn w5_once_is_answered_by_an_attempt_of_its_own() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).once());
    let attempt = harness.sent();
    harness.arrive("b", fixed(1000).once());
    let left = Some(ms(5000));
    harness.reply(
        &attempt,
        Outcome::Busy {
            left,
            score: None,
            entered: false,
            holder: None,
        },
    );
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
    harness.untold("b");
    let second = harness.sent();
    assert!(matches!(second, Op::Attempt { .. }));
    harness.reply(&second, Outcome::Won { epoch: 5 });
    harness.granted("b");

    // If the attempt wins, the other caller's turn is over before it has come.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).once());
    let attempt = harness.sent();
    harness.arrive("b", fixed(1000).once());
    harness.reply(&attempt, Outcome::Won { epoch: 5 });
    harness.granted("a");
    assert!(matches!(harness.refused("b"), NotGranted::Busy(Some(_))));
}

/// A caller that asks once does not overtake those who do.
#[test]
fn w5_once_does_not_overtake_the_line() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.arrive("b", fixed(1000).once());
    assert!(matches!(harness.refused("b"), NotGranted::Busy(_)));
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.arrive("c", fixed(1000).once());
    assert!(matches!(harness.refused("c"), NotGranted::Busy(_)));
}

/// The wait is over: any waiter is told Busy, or what was wrong with the store.
#[test]
fn w1_at_the_end_of_its_wait_a_waiter_is_told() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1500));
    let enter = harness.sent();
    harness.reply(&enter, busy(5000, 1));
    harness.wait_until(1499);
    harness.untold("a");
    harness.wait_until(1500);
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
    assert_eq!(harness.sent(), withdrawal(&enter));

    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1500));
    let enter = harness.sent();
    harness.fail(&enter, OpError::Refused(broken()));
    harness.untold("a");
    harness.wait_until(1049);
    harness.silent();
    harness.wait_until(1500);
    assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
}

/// The process stood still, and nobody has seen the wait end. Whatever comes first then, the waiter is told, and its ticket
/// is withdrawn. Nothing is asked for it any more.
#[test]
fn w1_whatever_comes_first_after_a_wait_finds_it_over() {
    type Event = fn(&mut Harness);
    let events: [(&str, Event); 10] = [
        ("the timer", |harness| {
            harness.feed(|turnstile, cx| turnstile.tick(cx));
        }),
        ("a caller that leaves", |harness| {
            harness.leave(WaiterId(0));
        }),
        ("a notice", |harness| harness.freed()),
        ("a pause", |harness| {
            harness.feed(|turnstile, cx| turnstile.on_pause(cx, WaiterId(0), None));
        }),
        ("a ticket of another that is gone", |harness| {
            harness.feed(|turnstile, cx| turnstile.ask_again(cx, true));
        }),
        ("another that asks no more", |harness| {
            harness.feed(|turnstile, cx| turnstile.ask_soon(cx));
        }),
        ("an outage", |harness| harness.down()),
        ("a new connection", |harness| {
            harness.feed(|turnstile, cx| turnstile.up(cx, true));
        }),
        ("a shutdown", |harness| {
            harness.feed(|turnstile, cx| turnstile.close(cx, |_| None));
        }),
        ("a drain", |harness| {
            harness.feed(|turnstile, cx| turnstile.drain(cx));
        }),
    ];
    for (event, comes) in events {
        let mut harness = Harness::new();
        harness.arrive("a", fixed(1000).until(1500));
        let enter = harness.sent();
        harness.reply(&enter, busy(9000, 1));
        harness.stop_until(2000);
        comes(&mut harness);
        let refusal = harness.refused("a");
        assert!(
            matches!(refusal, NotGranted::Busy(_)),
            "{event}: {refusal:?}"
        );
        if event == "an outage" {
            // Whoever comes next has no use for that ticket.
            harness.arrive("b", fixed(1000));
            harness.silent();
            harness.up(true);
        }
        assert_eq!(harness.sent(), withdrawal(&enter), "{event}");
    }
}

/// "Busy" is what the store, or a holder in this process, has said. A store that does not answer is told as what it is,
/// and its first answer is awaited even by one who waits for others less long.
#[test]
fn a_store_that_does_not_answer_is_not_busy() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1100));
    harness.sent();
    harness.wait_until(1999);
    harness.untold("a");
    harness.wait_until(2000);
    assert!(matches!(harness.refused("a"), NotGranted::Failed(error) if error.is_retryable()));

    // Nor is one that has failed, and is asked anew.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.fail(&enter, OpError::Refused(broken()));
    harness.arrive("b", fixed(1000).until(1100));
    harness.up(true);
    assert_eq!(asker(&harness.sent()), asker(&enter));
    harness.wait_until(1100);
    assert!(matches!(harness.refused("b"), NotGranted::Failed(_)));
}

/// The store refuses so many questions.
fn refuses(harness: &mut Harness, times: u32) {
    for _ in 0..times {
        let enter = harness.sent();
        harness.fail(&enter, OpError::Refused(broken()));
        let next = harness.turnstile.next_timeout().expect("it asks again");
        harness.wait_until(next.as_millis() as u64 + 1);
    }
}

/// What it has refused before does not count any more: neither for what a waiter is told at the end of its wait, nor for
/// the pause after its next refusal. The same after an outage.
#[test]
fn w1_a_store_that_answers_again_has_not_failed() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(8000));
    refuses(&mut harness, 3);
    let enter = harness.sent();
    harness.reply(&enter, busy(500, 1));
    let now = harness.now.as_millis() as u64;
    harness.wait_until(now + 550);
    let enter = harness.sent();
    harness.fail(&enter, OpError::Refused(broken()));
    harness.wait_until(now + 650);
    let enter = harness.sent();
    harness.reply(&enter, busy(30_000, 1));
    harness.wait_until(8000);
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));

    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    refuses(&mut harness, 3);
    let enter = harness.sent();
    harness.lose(&enter);
    harness.up(true);
    let enter = harness.sent();
    let now = harness.now.as_millis() as u64;
    harness.arrive("b", fixed(1000).until(now + 100));
    harness.wait_until(now + 100);
    // The first answer of the new connection is awaited.
    harness.untold("b");
    harness.fail(&enter, OpError::Refused(broken()));
    harness.wait_until(now + 200);
    assert_eq!(asker(&harness.sent()), asker(&enter));
}

/// A store that is known to be away is not awaited for longer than others.
#[test]
fn w1_a_wait_for_a_store_that_is_away_ends_in_time() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1100));
    let enter = harness.sent();
    harness.fail(&enter, OpError::Unsent(broken()));
    harness.arrive("b", fixed(1000).until(1100));
    harness.wait_until(1100);
    for caller in ["a", "b"] {
        let refusal = harness.refused(caller);
        assert!(
            matches!(&refusal, NotGranted::Failed(error) if error.to_string() == broken().to_string()),
            "{refusal:?}"
        );
    }
}

#[test]
fn a_first_answer_that_is_late_counts() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1100));
    let enter = harness.sent();
    harness.wait_until(1500);
    harness.reply(&enter, Outcome::Won { epoch: 1 });
    harness.granted("a");

    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(1100));
    let enter = harness.sent();
    harness.wait_until(1500);
    harness.reply(&enter, busy(5000, 1));
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));

    // So does a win that is over on arrival (D4): the wait for others ends at its own time.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(100).until(1150));
    let enter = harness.sent();
    harness.wait_until(1120);
    harness.reply(&enter, Outcome::Won { epoch: 1 });
    harness.untold("a");
    harness.wait_until(1150);
    assert!(matches!(harness.refused("a"), NotGranted::Failed(_)));
}

/// Nothing is asked for one who comes while a ticket of its registry is in the queue: the answer is known.
#[test]
fn a_waiter_that_joins_others_is_busy_at_the_end_of_its_own_wait() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.arrive("with it", fixed(1000).until(1100));
    harness.reply(&enter, busy(5000, 1));
    harness.arrive("after it", fixed(1000).until(1100));
    harness.silent();
    harness.wait_until(1100);
    assert!(matches!(harness.refused("with it"), NotGranted::Busy(_)));
    assert!(matches!(harness.refused("after it"), NotGranted::Busy(_)));
    // It is asked again, and does not answer any more.
    harness.wait_until(6050);
    harness.sent();
    harness.arrive("late", fixed(1000).until(6100));
    harness.wait_until(6100);
    harness.untold("late");
    harness.wait_until(7050);
    assert!(matches!(harness.refused("late"), NotGranted::Failed(_)));
}

#[test]
fn a_waiter_behind_a_local_holder_is_busy_at_the_end_of_its_wait() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(5000));
    harness.arrive("before", fixed(1000).until(1100));
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 1 });
    harness.granted("a");
    harness.arrive("after", fixed(1000).until(1100));
    harness.wait_until(1100);
    assert!(matches!(harness.refused("before"), NotGranted::Busy(_)));
    assert!(matches!(harness.refused("after"), NotGranted::Busy(_)));

    // It hears that it waits when the other has the key, and not only if somebody comes after it.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(5000));
    harness.arrive("before", fixed(1000).until(1100).hearing());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 1 });
    harness.granted("a");
    assert!(matches!(
        harness.waiter_told("before"),
        WaiterVerdict::Waits
    ));
    harness.wait_until(1100);
    assert!(matches!(harness.refused("before"), NotGranted::Busy(_)));
}

/// From the store, or from a holder here. Whoever does not want to know is not told.
#[test]
fn a_waiter_hears_once_that_it_waits_for_others() {
    let mut harness = Harness::new();
    let a = harness.arrive("a", fixed(1000).hearing());
    let enter = harness.sent();
    harness.untold("a");
    harness.reply(&enter, busy(1000, 7));
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::Waits));
    harness.arrive("b", fixed(1000).hearing());
    assert!(matches!(harness.waiter_told("b"), WaiterVerdict::Waits));
    harness.arrive("c", fixed(1000));
    harness.wait_until(2060);
    let again = harness.sent();
    harness.reply(&again, busy(1000, 7));
    for caller in ["a", "b", "c"] {
        harness.untold(caller);
    }
    harness.grant(asker(&enter), 1000, 9);
    harness.granted("a");
    assert!(harness.take(a));
    harness.untold("b");
    harness.arrive("d", fixed(1000).hearing());
    assert!(matches!(harness.waiter_told("d"), WaiterVerdict::Waits));
    harness.untold("b");

    // Of a store that has failed, too, be that before it came or after.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).hearing());
    let enter = harness.sent();
    harness.lose(&enter);
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::Waits));
    harness.arrive("b", fixed(1000).hearing());
    assert!(matches!(harness.waiter_told("b"), WaiterVerdict::Waits));
    harness.untold("a");

    // One that has the key at once waits for nobody.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).hearing());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.untold("a");
}

/// More than the queue may hold are refused, at once.
#[test]
fn w1_a_full_queue_takes_nobody() {
    let rules = Rules {
        max_waiters: 2,
        ..rules()
    };
    let mut harness = Harness::with(rules, true);
    harness.arrive("a", fixed(1000));
    harness.arrive("b", fixed(1000));
    harness.arrive("c", fixed(1000));
    assert!(matches!(harness.refused("c"), NotGranted::QueueFull));
    harness.untold("a");
}

/// A reconnect renews a lease that is not taken yet as well, to learn whether it is still there
/// (found by the simulator, seed 123878 of its time: a server that had lost its data); the turn of
/// one who does not look ends all the same.
#[test]
fn w4_a_renewed_turn_ends_if_nobody_looks() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(900).renewed());
    let enter = harness.sent();
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    harness.stop_until(1200);
    harness.up(true);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    assert!(matches!(
        harness.lease_told("a"),
        LeaseVerdict::Prolonged { .. }
    ));
    harness.wait_until(1300);
    assert!(matches!(harness.waiter_told("a"), WaiterVerdict::TurnLost));
    assert!(matches!(harness.sent(), Op::Release { .. }));
}

/// A policy of the user's own says "not again", with the longest pause there is: the sum of that and the time was too
/// much for a `Duration`, and the panic came with the registry locked.
#[test]
fn a_pause_without_end_is_no_fault() {
    let mut harness = Harness::with(rules(), false);
    harness.pause = Some(Duration::MAX);
    harness.arrive("a", fixed(1000).until(5000));
    let attempt = harness.sent();
    let busy = Outcome::Busy {
        left: None,
        score: None,
        entered: false,
        holder: None,
    };
    harness.reply(&attempt, busy);
    harness.wait_until(6000);
    harness.silent();
    assert!(matches!(harness.refused("a"), NotGranted::Busy(_)));
}

/// The store was away, and somebody waits in the queue for when it would be back. A caller that asks once heard "busy", as if
/// the lock were known to be another's, and not that the store had failed.
#[test]
fn a_caller_that_asks_once_gets_the_stores_error_even_if_others_wait() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000));
    let enter = harness.sent();
    harness.lose(&enter);
    harness.arrive("b", fixed(1000).once());
    assert!(matches!(harness.refused("b"), NotGranted::Failed(_)));
    harness.untold("a");
}
