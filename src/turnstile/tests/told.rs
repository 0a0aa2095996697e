//! What a verdict says: who has the key, and why a lease was lost.

use super::harness::{Harness, broken, busy_by, fixed, ms};
use crate::base::LossCause;
use crate::store::contract::{Op, OpError, Outcome, Owner};

/// Whom the store has named last, and what is left of the time that it named.
#[test]
fn g8_a_wait_that_is_over_names_who_has_the_key() {
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(3000));
    let enter = harness.sent();
    harness.reply(&enter, busy_by("x:1", Some(ms(700)), Some(1)));
    harness.wait_until(1750);
    let again = harness.sent();
    harness.reply(&again, busy_by("y:1", Some(ms(5000)), Some(1)));
    harness.wait_until(3000);
    let told = harness.refused_for("a");
    assert_eq!(told, Some(("y:1".to_owned(), Some(ms(3750)))));

    // Who asks once is told at once, and so is one that has no more pauses.
    let mut harness = Harness::with(super::rules(), false);
    harness.arrive("once", fixed(1000).once());
    let attempt = harness.sent();
    harness.reply(&attempt, busy_by("x:1", None, None));
    assert_eq!(harness.refused_for("once"), Some(("x:1".to_owned(), None)));
    harness.pause = None;
    harness.arrive("a", fixed(1000));
    let listen = harness.sent();
    harness.reply(&listen, busy_by("x:1", Some(ms(700)), Some(0)));
    let told = harness.refused_for("a");
    assert_eq!(told, Some(("x:1".to_owned(), Some(ms(700)))));
}

/// The store does not answer any more: the lease that it has named is over, and nobody knows who has the key now.
#[test]
fn g8_nobody_is_named_whose_lease_is_over() {
    for (until, expected) in [
        (1600, Some(("x:1".to_owned(), Some(ms(100))))),
        (1700, None),
        (2500, None),
    ] {
        let mut harness = Harness::new();
        harness.arrive("a", fixed(1000).until(until));
        let enter = harness.sent();
        harness.reply(&enter, busy_by("x:1", Some(ms(700)), Some(1)));
        harness.wait_until(until);
        assert_eq!(harness.refused_for("a"), expected, "{until}");
    }
    // One without an end is named as long as its waiter waits.
    let mut harness = Harness::new();
    harness.arrive("a", fixed(1000).until(8000));
    let enter = harness.sent();
    harness.reply(&enter, busy_by("x:1", None, Some(1)));
    harness.wait_until(8000);
    assert_eq!(harness.refused_for("a"), Some(("x:1".to_owned(), None)));
}

/// Another caller of this registry has it.
#[test]
fn g8_a_holder_of_the_same_registry_is_named() {
    let mut harness = Harness::new();
    let (id, owner) = harness.hold("a", fixed(1000), 5);
    let ours = format!("ours {}", owner.sequence);
    let left = |millis| Some((ours.clone(), Some(ms(millis) - ms(12))));
    harness.arrive("waits", fixed(1000).until(1600));
    harness.arrive("once", fixed(1000).once());
    assert_eq!(harness.refused_for("once"), left(1000));
    harness.wait_until(1600);
    assert_eq!(harness.refused_for("waits"), left(400));
    harness.finish(id);
    // After that one is not named any more, nor is who has it by then before the store has said so.
    let mut harness = Harness::new();
    let (id, _) = harness.hold("a", fixed(1000), 5);
    harness.arrive("waits", fixed(1000).until(1600));
    harness.forbid_passes(id);
    harness.finish(id);
    assert!(matches!(harness.sent(), Op::Yield { .. }));
    harness.wait_until(1600);
    assert_eq!(harness.refused_for("waits"), None);
}

/// Nobody renews it.
#[test]
fn a_fixed_lease_is_lost_because_it_is_fixed() {
    for ttl in [900, 300] {
        let mut harness = Harness::new();
        harness.hold("a", fixed(ttl), 5);
        // Whatever happens to the store meanwhile.
        harness.down();
        harness.wait_until(3000);
        assert_eq!(harness.lost("a"), LossCause::FixedTtl);
    }
    // Also one that ends before the tenure.
    let mut harness = Harness::new();
    let first = harness.arrive("first", fixed(1000));
    let enter = harness.sent();
    let id = harness.arrive("a", fixed(200));
    harness.leave(first);
    harness.reply(&enter, Outcome::Won { epoch: 5 });
    harness.granted("a");
    assert!(harness.take(id));
    harness.wait_until(1200);
    assert_eq!(harness.lost("a"), LossCause::FixedTtl);
}

#[test]
fn a_lease_that_may_not_be_renewed_again_says_so() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(1), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Renewed);
    harness.wait_until(3000);
    assert_eq!(harness.lost("a"), LossCause::LastRenewal);

    // Not if that last renewal had no answer.
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed_at_most(1), 5);
    harness.wait_until(1889);
    assert_eq!(harness.lost("a"), LossCause::NotRenewed);
}

/// Since the connection broke, and not since the last renewal.
#[test]
fn a_lease_that_the_store_was_away_for_says_for_how_long() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1200);
    harness.down();
    harness.wait_until(1400);
    // Another attempt to connect fails.
    harness.down();
    harness.wait_until(1889);
    let lasted = ms(689);
    assert_eq!(harness.lost("a"), LossCause::StoreUnreachable { lasted });

    // What the store has refused before that is no outage.
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.grant(Owner::exclusive(77), 1000, 7);
    let release = harness.sent();
    harness.wait_until(1100);
    harness.fail(&release, OpError::Refused(broken()));
    harness.wait_until(1150);
    harness.down();
    harness.wait_until(1889);
    let lasted = ms(739);
    assert_eq!(harness.lost("a"), LossCause::StoreUnreachable { lasted });
}

/// On a connection that stands.
#[test]
fn a_lease_whose_renewals_are_refused_says_so() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    while harness.now < ms(1880) {
        let next = harness.turnstile.next_timeout().unwrap();
        harness.wait_until(next.as_millis() as u64 + 1);
        if let Some(renew @ Op::Renew { .. }) = harness.sent_if_any() {
            harness.fail(&renew, OpError::Refused(broken()));
        }
    }
    harness.wait_until(1889);
    assert_eq!(harness.lost("a"), LossCause::NotRenewed);
    // Or not answered.
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1889);
    assert_eq!(harness.lost("a"), LossCause::NotRenewed);
    // An extension counts, too.
    let mut harness = Harness::new();
    let (id, _) = harness.hold("a", fixed(900), 5);
    harness.extend(id, 5000);
    harness.wait_until(1889);
    assert_eq!(harness.lost("a"), LossCause::NotRenewed);
}

/// Nothing was looked at when the renewal was due, or when its answer must have come. Whoever looks first is told the same.
#[test]
fn a_lease_that_ended_while_the_process_stood_still_says_so() {
    for (seen_until, since) in [(1100, 1300), (1301, 1300)] {
        let mut harness = Harness::new();
        let (id, _) = harness.hold("a", fixed(900).renewed(), 5);
        let other = harness.arrive("b", fixed(900));
        harness.wait_until(seen_until);
        harness.stop_until(61_000);
        let lasted = ms(61_000 - since);
        let expected = LossCause::StoodStill { lasted };
        let turnstile = &harness.turnstile;
        assert_eq!(turnstile.cause_of_expiry(harness.now, id), Some(expected));
        assert_eq!(turnstile.cause_of_expiry(harness.now, other), None);
        harness.feed(|turnstile, cx| turnstile.tick(cx));
        assert_eq!(harness.lost("a"), expected);
        assert_eq!(harness.turnstile.cause_of_expiry(harness.now, id), None);
    }
}

/// With many leases a renewal that came due in an outage is planned (G5). The process stood still since that moment.
#[test]
fn a_lease_whose_planned_renewal_was_never_sent_says_so() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(30_000).renewed(), 5);
    harness.leases = 10_000;
    harness.wait_until(10_000);
    harness.down();
    harness.wait_until(12_000);
    harness.up(true);
    let planned = harness.turnstile.next_timeout().unwrap();
    harness.stop_until(61_000);
    harness.feed(|turnstile, cx| turnstile.tick(cx));
    let lasted = ms(61_000) - planned;
    assert_eq!(harness.lost("a"), LossCause::StoodStill { lasted });
}

/// By a renewal or a release that finds it gone.
#[test]
fn a_lease_that_the_store_does_not_have_says_so() {
    let mut harness = Harness::new();
    harness.hold("a", fixed(900).renewed(), 5);
    harness.wait_until(1300);
    let renew = harness.sent();
    harness.reply(&renew, Outcome::Lost);
    assert_eq!(harness.lost("a"), LossCause::Taken);

    let mut harness = Harness::new();
    let (id, _) = harness.hold("a", fixed(900), 5);
    harness.finish(id);
    let release = harness.sent();
    harness.reply(&release, Outcome::Gone { held: false });
    assert_eq!(harness.lost("a"), LossCause::Taken);
}

/// The connection leads to another server, which does not have it; or has it, and what comes later is another matter.
#[test]
fn a_lease_that_another_server_does_not_have_says_so() {
    for (has_it, expected) in [(false, LossCause::ServerChanged), (true, LossCause::Taken)] {
        let mut harness = Harness::new();
        harness.hold("a", fixed(900).renewed(), 5);
        harness.down();
        harness.feed(|turnstile, cx| {
            turnstile.up_renew(cx, true);
            turnstile.up(cx, true);
        });
        let mut renew = harness.sent();
        if has_it {
            harness.reply(&renew, Outcome::Renewed);
            harness.wait_until(1300);
            renew = harness.sent();
        }
        harness.reply(&renew, Outcome::Lost);
        assert_eq!(harness.lost("a"), expected);
    }
}
