//! Each judge finds what it is there to find, and does not cry wolf.

use std::collections::HashMap;
use std::sync::mpsc;
use std::time::Duration;

use crate::deployments::{Leftovers, StoredLock};
use crate::judge::holds::{Hold, Holds, Verdict};
use crate::judge::linear::{self, Op, Register, Ret, Step, Window};
use crate::judge::recovery::{Struck, recoveries};
use crate::judge::reigns::{Cause, Loss, Reigns};
use crate::judge::standstill::Standstills;
use crate::judge::votes::Votes;
use crate::judge::waits::Waits;
use crate::judge::{Child, Mode, Span};
use crate::plan::Kind;
use crate::torture::log::Line;
use crate::torture::resource::Resource;

const TTL: u64 = 100;

fn child(slot: usize) -> Child {
    Child {
        slot,
        generation: 0,
    }
}

/// Holds of one key: which child, token, taken, ended, deadline.
fn holds(all: &[(usize, u64, u64, u64, u64)]) -> Holds {
    let mut holds = Holds::default();
    for (number, &(slot, token, from, to, deadline)) in all.iter().enumerate() {
        let hold = Hold::new(child(slot), token, from, deadline);
        holds.taken(number as u64, "key".to_owned(), hold);
        holds.ended(child(slot), number as u64, to);
    }
    holds
}

fn judge(all: &[(usize, u64, u64, u64, u64)], accepted: &[u64], losses: &[Loss]) -> Verdict {
    let accepted = HashMap::from([("key".to_owned(), accepted.to_vec())]);
    holds(all).judge(&accepted, losses, TTL)
}

fn span(from: u64, to: u64) -> Span {
    Span { from, to }
}

/// All that the only server knew was deleted in this time.
fn flushed(from: u64, to: u64) -> Vec<Loss> {
    let mut reigns = Reigns::of_the_only_ones(1);
    reigns.flushed(0, span(from, to));
    reigns.losses(TTL)
}

fn explained(verdict: &Verdict) -> u64 {
    verdict.explained.values().map(|it| it.times).sum()
}

fn clean(verdict: &Verdict) -> bool {
    verdict.overlaps.is_empty() && verdict.tokens.is_empty() && verdict.stale_writes.is_empty()
}

#[test]
fn turns_one_after_another_are_clean() {
    let turns = [
        (0, 1, 0, 10, 100),
        (1, 2, 11, 20, 110),
        (0, 3, 21, 25, 120),
        (0, 4, 25, 30, 120),
    ];
    let verdict = judge(&turns, &[1, 2, 3, 4], &[]);
    assert!(clean(&verdict), "{verdict:?}");
    assert_eq!(
        (verdict.leases, verdict.hand_overs, explained(&verdict)),
        (4, 2, 0)
    );
}

#[test]
fn two_holds_at_once_are_an_overlap() {
    let verdict = judge(&[(0, 1, 0, 20, 100), (1, 2, 19, 30, 120)], &[1, 2], &[]);
    assert_eq!(verdict.overlaps.len(), 1, "{verdict:?}");
    assert_eq!(explained(&verdict), 0);
    // One that lasts through several of another is one each.
    let verdict = judge(
        &[(0, 1, 0, 50, 100), (1, 2, 10, 20, 110), (1, 3, 30, 40, 130)],
        &[],
        &[],
    );
    assert_eq!(verdict.overlaps.len(), 2, "{verdict:?}");
}

/// A process that was stopped past its deadline releases late: what is beyond the deadline is no hold.
#[test]
fn beyond_its_deadline_nobody_holds() {
    let verdict = judge(&[(0, 1, 0, 500, 100), (1, 2, 101, 130, 200)], &[1, 2], &[]);
    assert!(clean(&verdict), "{verdict:?}");
    // As long as it was prolonged it does.
    let mut holds = Holds::default();
    holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 0, 100));
    holds.until(child(0), 1, 99, 200);
    holds.taken(1, "key".to_owned(), Hold::new(child(1), 2, 150, 250));
    holds.ended(child(0), 1, 500);
    holds.died(child(1), 160);
    let verdict = holds.judge(&HashMap::new(), &[], TTL);
    assert_eq!(verdict.overlaps.len(), 1, "{verdict:?}");
}

#[test]
fn dead_and_closed_processes_hold_nothing() {
    let mut holds = Holds::default();
    holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 0, 100));
    holds.died(child(0), 10);
    holds.taken(2, "key".to_owned(), Hold::new(child(1), 2, 11, 111));
    holds.closing(child(1), 20);
    holds.ended(child(1), 2, 30);
    holds.taken(3, "key".to_owned(), Hold::new(child(2), 3, 21, 121));
    holds.ended(child(2), 3, 22);
    let verdict = holds.judge(&HashMap::new(), &[], TTL);
    assert!(clean(&verdict), "{verdict:?}");
    assert_eq!((verdict.leases, verdict.after_shutdown), (3, 1));
}

#[test]
fn a_loss_explains_only_overlaps_of_leases_held_at_that_moment() {
    let loss = flushed(10, 11);
    let verdict = judge(&[(0, 1, 0, 50, 100), (1, 2, 12, 30, 112)], &[1, 2], &loss);
    assert!(clean(&verdict), "{verdict:?}");
    let told = verdict.explained[&Cause::Flushed];
    assert_eq!((told.times, told.leases, told.longest), (1, 1, 18));
    // Won before the loss, and taken after it.
    let verdict = judge(&[(1, 2, 12, 30, 112), (0, 1, 13, 50, 105)], &[2], &loss);
    assert_eq!((verdict.overlaps.len(), explained(&verdict)), (0, 1));
    for (turns, why) in [
        (
            [(0, 1, 200, 250, 300), (1, 2, 212, 230, 320)],
            "both won long after it",
        ),
        (
            [(0, 1, 12, 50, 112), (1, 2, 14, 30, 114)],
            "both won just after it",
        ),
        (
            [(0, 1, 0, 9, 100), (1, 2, 5, 30, 105)],
            "both won before it, and at once before it",
        ),
        (
            [(0, 1, 0, 50, 100), (1, 2, 5, 30, 105)],
            "both won before it, and at once also after it",
        ),
    ] {
        let verdict = judge(&turns, &[], &loss);
        let found = (verdict.overlaps.len(), explained(&verdict));
        assert_eq!(found, (1, 0), "{why}: {verdict:?}");
    }
    // Two losses: what was won between them the one does not explain, nor the other.
    let mut reigns = Reigns::of_the_only_ones(1);
    reigns.flushed(0, span(10, 11));
    reigns.flushed(0, span(300, 301));
    let turns = [(0, 1, 150, 200, 250), (1, 2, 160, 170, 260)];
    let verdict = judge(&turns, &[], &reigns.losses(TTL));
    assert_eq!((verdict.overlaps.len(), explained(&verdict)), (1, 0));
}

/// A lease that was renewed after a loss is known to the server as it is now: from then on nobody else is to have it.
#[test]
fn a_lease_that_was_proved_again_after_a_loss_is_no_forgotten_one() {
    for (proved, breaches) in [(9, 0), (20, 1)] {
        let mut holds = Holds::default();
        holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 0, 100));
        holds.until(child(0), 1, proved, proved + 99);
        holds.taken(1, "key".to_owned(), Hold::new(child(1), 2, 102, 200));
        holds.ended(child(0), 1, 106);
        holds.ended(child(1), 1, 110);
        let verdict = holds.judge(&HashMap::new(), &flushed(10, 11), TTL);
        let found = (verdict.overlaps.len() as u64, explained(&verdict));
        assert_eq!(found, (breaches, 1 - breaches), "{proved}: {verdict:?}");
    }
}

/// Each proof by which it stood counts: that it was renewed elsewhere later excuses nothing. And one by which it stood no
/// more counts no longer.
#[test]
fn every_proof_by_which_a_lease_stood_is_to_be_explained() {
    for (renewed, taken, breaches) in [(150, 140, 1), (100, 210, 0)] {
        // Won before the loss, the other one between two.
        let mut reigns = Reigns::of_the_only_ones(1);
        reigns.flushed(0, span(180, 181));
        let mut holds = Holds::default();
        holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 100, 200));
        holds.until(child(0), 1, renewed + 90, renewed + 150);
        let other = Hold::new(child(1), 2, taken, taken + 100);
        holds.taken(1, "key".to_owned(), other);
        holds.ended(child(0), 1, 245);
        holds.ended(child(1), 1, 260);
        let verdict = holds.judge(&HashMap::new(), &reigns.losses(TTL), TTL);
        let found = (verdict.overlaps.len() as u64, explained(&verdict));
        assert_eq!(found, (breaches, 1 - breaches), "{renewed}: {verdict:?}");
    }
}

/// Its work looked when the first deadline had passed, and found the next: it was renewed before, nobody saw when.
#[test]
fn a_renewal_that_was_seen_late_is_explained_by_a_loss_as_one_that_was_seen() {
    for (lost, breaches) in [(Some(150), 0), (Some(20), 1), (None, 1)] {
        let mut holds = Holds::default();
        holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 0, 100));
        holds.taken(1, "key".to_owned(), Hold::new(child(1), 2, 160, 260));
        holds.ended(child(1), 1, 165);
        holds.until(child(0), 1, 166, 200);
        holds.ended(child(0), 1, 190);
        let losses = lost.map_or(Vec::new(), |at| flushed(at, at + 1));
        let verdict = holds.judge(&HashMap::new(), &losses, TTL);
        let found = (verdict.overlaps.len() as u64, explained(&verdict));
        assert_eq!(found, (breaches, 1 - breaches), "{lost:?}: {verdict:?}");
    }
}

/// However many prolong it: what the one knew is over a ttl after it gave the last lease.
#[test]
fn no_overlap_is_explained_by_a_loss_that_is_longer_ago_than_a_ttl() {
    let mut holds = Holds::default();
    holds.taken(1, "key".to_owned(), Hold::new(child(0), 1, 0, 100));
    // A deadline beyond every ttl since the loss was proved after it, whenever it was seen.
    holds.until(child(0), 1, 10, 115);
    holds.taken(1, "key".to_owned(), Hold::new(child(1), 2, 112, 210));
    holds.ended(child(0), 1, 500);
    holds.ended(child(1), 1, 500);
    let verdict = holds.judge(&HashMap::new(), &flushed(10, 11), TTL);
    assert_eq!((verdict.overlaps.len(), explained(&verdict)), (1, 0));
}

/// Two servers of one shard, and what their roles were seen to be: which server, when it was asked and answered, whether
/// it said that it is a primary.
fn seen(roles: &[(usize, u64, u64, bool)]) -> Reigns {
    let mut reigns = Reigns::of(vec![0, 0]);
    for &(server, from, to, is_primary) in roles {
        reigns.answered(server, span(from, to), is_primary);
    }
    reigns
}

#[test]
fn two_primaries_explain_one_lease_of_each_and_no_two_of_one() {
    // The second is one from somewhere between 50 and 55, and the first until 80 to 85.
    let reigns = seen(&[
        (0, 0, 1, true),
        (1, 0, 1, false),
        (1, 50, 51, false),
        (1, 54, 55, true),
        (0, 79, 80, true),
        (0, 84, 85, false),
        (0, 200, 201, false),
    ]);
    assert_eq!(reigns.changes(), 1);
    let losses = reigns.losses(TTL);
    assert_eq!(losses.len(), 1, "{losses:?}");
    assert_eq!(losses[0].cause, Cause::TwoPrimaries);
    assert_eq!(losses[0].border(), span(50, 85));
    for (turns, breaches, why) in [
        (
            [(0, 1, 30, 70, 130), (1, 2, 60, 65, 160)],
            0,
            "one of each, at the same time",
        ),
        (
            [(1, 2, 60, 140, 160), (0, 1, 70, 130, 170)],
            0,
            "the later one perhaps of the old",
        ),
        (
            [(0, 1, 30, 130, 130), (1, 2, 120, 125, 220)],
            0,
            "the last of the old, while it lasts",
        ),
        (
            [(0, 1, 30, 49, 130), (1, 2, 40, 45, 140)],
            1,
            "both before there was another",
        ),
        (
            [(0, 1, 190, 230, 290), (1, 2, 200, 220, 300)],
            1,
            "both after there was one alone again",
        ),
    ] {
        let verdict = judge(&turns, &[], &losses);
        let found = (verdict.overlaps.len() as u64, explained(&verdict));
        assert_eq!(found, (breaches, 1 - breaches), "{why}: {verdict:?}");
    }
    // Within the same microsecond both give the same token.
    for (taken, breaches) in [(60, 0), (30, 1)] {
        let turns = [0, 1].map(|child| (child, 7, taken, taken + 10, 130));
        let verdict = judge(&turns, &[], &losses);
        assert_eq!(verdict.tokens.len(), breaches, "{taken}: {verdict:?}");
    }
}

/// Where the next is there only when all leases of the dead one are over, nothing overlaps.
#[test]
fn a_primary_that_is_dead_for_longer_than_a_ttl_explains_nothing() {
    let mut reigns = seen(&[(0, 0, 1, true), (1, 0, 1, false)]);
    reigns.killed(0, 50);
    // Too late: it was asked when it still lived.
    reigns.answered(0, span(49, 51), true);
    reigns.answered(1, span(180, 181), false);
    reigns.answered(1, span(185, 186), true);
    reigns.answered(0, span(190, 191), false);
    assert_eq!(reigns.changes(), 1);
    assert_eq!(reigns.losses(TTL), []);
    // Were it faster, the cause would be told.
    reigns = seen(&[(0, 0, 1, true), (1, 0, 1, false)]);
    reigns.killed(0, 50);
    reigns.answered(1, span(60, 61), false);
    reigns.answered(1, span(65, 66), true);
    let causes: Vec<_> = reigns.losses(TTL).iter().map(|it| it.cause).collect();
    assert_eq!(causes, [Cause::Replaced]);
}

#[test]
fn a_server_that_comes_back_has_its_data() {
    let again = |empty: bool| {
        let mut reigns = seen(&[(0, 0, 1, true), (1, 0, 1, false)]);
        reigns.killed(0, 50);
        if empty {
            reigns.emptied(0);
        }
        reigns.answered(0, span(60, 61), true);
        assert_eq!(reigns.changes(), 0);
        reigns.losses(TTL)
    };
    assert_eq!(again(false), []);
    let lost = again(true);
    let causes: Vec<_> = lost.iter().map(|it| it.cause).collect();
    assert_eq!(causes, [Cause::Emptied]);
    let turns = [(0, 1, 40, 90, 140), (1, 2, 62, 70, 162)];
    assert_eq!(explained(&judge(&turns, &[], &lost)), 1);
    assert_eq!(judge(&turns, &[], &again(false)).overlaps.len(), 1);
    // And can be made to forget it as before.
    let mut reigns = Reigns::of_the_only_ones(1);
    reigns.killed(0, 50);
    reigns.answered(0, span(60, 60), true);
    reigns.flushed(0, span(61, 62));
    assert_eq!(explained(&judge(&turns, &[], &reigns.losses(TTL))), 1);
}

/// Asked to, a node waits until the next has all: there two at a time are never explained. Nor is it by what befalls
/// another shard, or a key that is elsewhere.
#[test]
fn an_orderly_fail_over_or_another_key_explains_nothing() {
    let roles = [
        (0, 0, 1, true),
        (1, 40, 41, false),
        (1, 45, 46, true),
        (0, 50, 51, false),
    ];
    let turns = [(0, 1, 30, 70, 130), (1, 2, 60, 65, 160)];
    let mut reigns = seen(&roles);
    assert_eq!(explained(&judge(&turns, &[], &reigns.losses(TTL))), 1);
    reigns.housed(0, vec![vec!["another".to_owned()]]);
    assert_eq!(judge(&turns, &[], &reigns.losses(TTL)).overlaps.len(), 1);
    reigns.housed(35, vec![vec!["key".to_owned()]]);
    assert_eq!(explained(&judge(&turns, &[], &reigns.losses(TTL))), 1);
    reigns.handed_over(0, span(30, 55));
    assert_eq!(reigns.losses(TTL), []);
    assert_eq!(reigns.changes(), 1);
    // Its memory goes on: the next loss is one of its own.
    reigns.answered(0, span(70, 71), false);
    reigns.answered(0, span(75, 76), true);
    reigns.answered(1, span(80, 81), false);
    let verdict = judge(&turns, &[], &reigns.losses(TTL));
    assert_eq!(verdict.overlaps.len(), 1, "{verdict:?}");
    let mut reigns = Reigns::of(vec![0, 1]);
    for (server, from, to, is_primary) in roles {
        reigns.answered(server, span(from, to), is_primary);
    }
    assert_eq!(reigns.losses(TTL), []);
}

#[test]
fn a_token_that_goes_back_is_found_whatever_was_lost_in_between() {
    let turns = [(0, 7, 0, 10, 100), (1, 6, 120, 130, 220)];
    for losses in [Vec::new(), flushed(15, 16)] {
        let verdict = judge(&turns, &[], &losses);
        assert_eq!(verdict.tokens.len(), 1, "{verdict:?}");
    }
    // Behind one that ended earlier than the last.
    let turns = [
        (0, 7, 0, 10, 100),
        (1, 5, 1, 12, 101),
        (2, 6, 200, 210, 300),
    ];
    assert_eq!(judge(&turns, &[], &[]).tokens.len(), 1);
}

/// Of several keys that are taken together the first may be won, and its token drawn, long before. One who is served by
/// another primary may have a later token meanwhile, and lose the key before they are taken.
#[test]
fn the_key_of_a_group_may_have_been_won_long_before_it_was_taken() {
    let losses = flushed(100, 101);
    for (since, losses, breaches) in [(90, &losses[..], 0), (290, &losses[..], 1), (90, &[], 1)] {
        let mut holds = Holds::default();
        holds.taken(1, "key".to_owned(), Hold::new(child(0), 7, 105, 205));
        holds.ended(child(0), 1, 110);
        let group = Hold::new(child(1), 6, 300, 390).of(Mode::Group);
        holds.taken(1, "key".to_owned(), group.since(since));
        holds.ended(child(1), 1, 310);
        let verdict = holds.judge(&HashMap::new(), losses, TTL);
        assert_eq!(verdict.tokens.len(), breaches, "{since}: {verdict:?}");
    }
}

/// It was won before a loss and taken after it; meanwhile another was served out of the new memory. It may be renewed, and
/// passed on, with the next token of its tenure.
#[test]
fn a_tenure_that_was_forgotten_is_so_for_all_of_its_leases() {
    let forgotten = flushed(50, 51);
    for (next, losses, breaches) in [
        (131, &forgotten, 0),
        (100, &forgotten, 1),
        (131, &vec![], 2),
    ] {
        let turns = [
            (1, 200, 60, 70, 160),
            (0, 130, 71, 75, 145),
            (0, next, 90, 95, 190),
        ];
        let verdict = judge(&turns, &[], losses);
        assert_eq!(verdict.tokens.len(), breaches, "{next}: {verdict:?}");
    }
}

#[test]
fn a_token_given_twice_is_found_whatever_was_lost() {
    let verdict = judge(
        &[(0, 7, 0, 10, 100), (1, 7, 12, 13, 105)],
        &[],
        &flushed(5, 6),
    );
    assert_eq!(verdict.tokens.len(), 1, "{verdict:?}");
}

#[test]
fn a_stale_write_that_was_let_through_is_found() {
    let turns = [(0, 1, 0, 10, 100), (1, 2, 11, 20, 110)];
    assert_eq!(judge(&turns, &[2, 1], &[]).stale_writes.len(), 2);
    // By a token that nobody was given.
    assert_eq!(judge(&turns, &[1, 2, 3], &[]).stale_writes.len(), 1);
    // By a token that ought not to have been greater: the order in time tells.
    let turns = [(0, 9, 0, 10, 100), (1, 2, 11, 20, 110)];
    assert_eq!(judge(&turns, &[2, 9], &[]).stale_writes.len(), 1);
    // A late write after which nobody came is none.
    let turns = [(0, 1, 0, 10, 100), (1, 2, 11, 20, 110)];
    assert!(clean(&judge(&turns, &[1, 2], &[])));
    assert!(!clean(&holds(&[]).judge(
        &HashMap::from([("key".to_owned(), vec![1])]),
        &[],
        TTL
    )));
}

#[test]
fn a_lease_taken_after_its_end_is_counted_and_proves_nothing() {
    let verdict = judge(&[(1, 2, 110, 130, 210), (0, 1, 140, 150, 100)], &[2], &[]);
    assert!(clean(&verdict), "{verdict:?}");
    assert_eq!(verdict.dead_on_arrival, 1);
}

/// Holds of one key in their modes: which child, token, taken, ended.
fn shared(all: &[(Mode, usize, u64, u64, u64)], losses: &[Loss]) -> Verdict {
    let mut holds = Holds::default();
    for (number, &(mode, slot, token, from, to)) in all.iter().enumerate() {
        let hold = Hold::new(child(slot), token, from, from + TTL).of(mode);
        holds.taken(number as u64, "key".to_owned(), hold);
        holds.ended(child(slot), number as u64, to);
    }
    holds.judge(&HashMap::new(), losses, TTL)
}

const fn permit(weight: u64, limit: u64) -> Mode {
    Mode::Permit { weight, limit }
}

#[test]
fn readers_share_a_key_with_readers_alone() {
    let readers = [
        (Mode::Reader, 0, 1, 0, 20),
        (Mode::Reader, 1, 2, 5, 30),
        (Mode::Exclusive, 2, 3, 31, 40),
    ];
    let verdict = shared(&readers, &[]);
    assert!(clean(&verdict), "{verdict:?}");
    assert_eq!(verdict.modes["reader"], 2);
    for other in [Mode::Exclusive, Mode::Group, Mode::Kept, permit(1, 9)] {
        for modes in [[Mode::Reader, other], [other, Mode::Reader]] {
            let both = [(modes[0], 0, 1, 0, 20), (modes[1], 1, 2, 19, 30)];
            assert_eq!(shared(&both, &[]).overlaps.len(), 1, "{modes:?}");
        }
    }
}

#[test]
fn permits_beyond_their_limit_are_found() {
    let full = [
        (permit(2, 4), 0, 1, 0, 20),
        (permit(1, 4), 1, 2, 5, 30),
        (permit(1, 4), 2, 3, 6, 30),
        // The first has left.
        (permit(2, 4), 3, 4, 20, 30),
    ];
    assert!(clean(&shared(&full, &[])));
    let mut crowd = full.to_vec();
    crowd[3] = (permit(2, 4), 3, 4, 19, 30);
    let verdict = shared(&crowd, &[]);
    assert_eq!(
        (verdict.overlaps.len(), verdict.crowds),
        (1, 0),
        "{verdict:?}"
    );
    // Those that the server was made to forget do not count.
    let verdict = shared(&crowd, &flushed(8, 9));
    assert_eq!(
        (verdict.overlaps.len(), verdict.crowds),
        (0, 1),
        "{verdict:?}"
    );
    // The others do.
    crowd.push((permit(3, 4), 4, 5, 25, 40));
    assert_eq!(shared(&crowd, &flushed(8, 9)).overlaps.len(), 1);
}

/// Whoever comes counts what is taken, under whatever limit, against its own. Which came first is known only of those that
/// were held before the other's wait began.
#[test]
fn permits_of_another_limit_count_too() {
    let (small, great) = (permit(1, 2), permit(1, 4));
    let crowded = |holds: &[(Mode, usize, u64, u64, u64)], since: u64| {
        let mut all = Holds::default();
        for (number, &(mode, slot, token, from, to)) in holds.iter().enumerate() {
            let hold = Hold::new(child(slot), token, from, from + TTL).of(mode);
            // The last has waited.
            let hold = match number + 1 == holds.len() {
                true => hold.since(since),
                false => hold,
            };
            all.taken(number as u64, "key".to_owned(), hold);
            all.ended(child(slot), number as u64, to);
        }
        all.judge(&HashMap::new(), &[], TTL).overlaps.len()
    };
    // From 2 to 4 there is room for two more, and for no third.
    let mut rising = vec![
        (small, 0, 1, 0, 90),
        (small, 1, 2, 1, 90),
        (great, 2, 3, 10, 90),
        (great, 3, 4, 11, 90),
    ];
    assert_eq!(crowded(&rising, 11), 0);
    rising.push((great, 4, 5, 12, 90));
    assert_eq!(crowded(&rising, 12), 1);
    assert_eq!(crowded(&rising, 0), 1, "whichever came last");
    // From 4 to 2: not before one is left.
    let falling = |ends| {
        vec![
            (great, 0, 1, 0, ends),
            (great, 1, 2, 1, 90),
            (small, 2, 3, 20, 90),
        ]
    };
    assert_eq!(crowded(&falling(20), 15), 0);
    assert_eq!(crowded(&falling(21), 15), 1);
    // It may have come before the second.
    assert_eq!(crowded(&falling(21), 0), 0);
}

/// Its child tells of its end when its time is over: until then nobody else has the key.
#[test]
fn a_kept_key_that_another_takes_too_early_is_found() {
    for (taken, breaches) in [(99, 1), (100, 0)] {
        let turns = [
            (Mode::Kept, 0, 1, 0, 100),
            (Mode::Exclusive, 1, 2, taken, 120),
        ];
        assert_eq!(shared(&turns, &[]).overlaps.len(), breaches, "{taken}");
        let verdict = shared(&turns, &flushed(20, 21));
        assert_eq!(explained(&verdict), breaches as u64, "{taken}");
    }
}

/// Of two readers the one that was granted first may look last. With anybody else that cannot be.
#[test]
fn tokens_of_readers_are_in_order_with_those_of_writers() {
    let readers = [(Mode::Reader, 0, 5, 0, 10), (Mode::Reader, 1, 4, 11, 20)];
    assert!(clean(&shared(&readers, &[])));
    for modes in [
        [Mode::Reader, Mode::Exclusive],
        [Mode::Exclusive, Mode::Reader],
    ] {
        let both = [(modes[0], 0, 5, 0, 10), (modes[1], 1, 4, 11, 20)];
        assert_eq!(shared(&both, &[]).tokens.len(), 1, "{modes:?}");
    }
    let same = [(Mode::Reader, 0, 5, 0, 10), (Mode::Reader, 1, 5, 1, 20)];
    assert_eq!(shared(&same, &[]).tokens.len(), 1);
}

#[test]
fn a_forgotten_waiter_is_found() {
    let mut waits = Waits::new(50);
    waits.begins(child(0), 1, 0, 100);
    waits.begins(child(0), 2, 0, 100);
    waits.begins(child(0), 3, 0, 100);
    waits.begins(child(1), 1, 0, 100);
    waits.ends(child(0), 1, 150, "busy");
    assert_eq!((waits.forgotten.len(), waits.latest), (0, 50));
    waits.ends(child(0), 2, 151, "got");
    assert_eq!(waits.forgotten.len(), 1);
    // One that never ended at all.
    waits.died(child(0), 500);
    assert_eq!(waits.forgotten.len(), 2);
    // One whose process died in its time.
    waits.died(child(1), 90);
    assert_eq!(waits.forgotten.len(), 2);
    assert_eq!(waits.ends["died"], 2);
}

#[test]
fn while_its_process_is_stopped_nobody_is_late() {
    let mut waits = Waits::new(50);
    for wait in 1..=2 {
        waits.begins(child(0), wait, 0, 100);
    }
    waits.stopped(child(0), Span { from: 80, to: 280 });
    waits.stopped(child(1), Span { from: 300, to: 900 });
    waits.ends(child(0), 1, 340, "busy");
    assert_eq!(waits.forgotten, [""; 0]);
    waits.ends(child(0), 2, 351, "busy");
    assert_eq!(waits.forgotten.len(), 1);
}

/// Its runtime tells so when it goes on, perhaps after it has told of the wait.
#[test]
fn on_a_slow_machine_waits_end_later_and_not_at_any_time() {
    let mut waits = Waits::new(50);
    for wait in 1..=2 {
        waits.begins(child(0), wait, 0, 100);
    }
    waits.ends(child(0), 1, 300, "busy");
    assert_eq!(waits.forgotten().len(), 1);
    waits.slow(child(0), Span { from: 90, to: 160 });
    waits.slow(child(0), Span { from: 170, to: 250 });
    assert_eq!((waits.slowest(), waits.forgotten().len()), (150, 0));
    // What a stop has done is no part of it.
    waits.stopped(child(0), Span { from: 400, to: 600 });
    waits.slow(child(0), Span { from: 410, to: 610 });
    assert_eq!(waits.slowest(), 160);
    // What a shutdown took is counted without both.
    assert_eq!(
        waits.slow_within(child(0), Span { from: 150, to: 420 }),
        100
    );
    assert_eq!(waits.slow_within(child(1), Span { from: 150, to: 420 }), 0);
    waits.ends(child(0), 2, 611, "busy");
    assert_eq!(waits.forgotten().len(), 2);
}

fn window(steps: Vec<Step>) -> Window {
    Window {
        key: "key".to_owned(),
        origin: Register::default(),
        steps,
    }
}

#[test]
fn a_lost_update_is_no_history_of_a_register() {
    use Step::{Invoked, Returned};
    let add = |token| Op::Add { token };
    let one_after_another = vec![
        Invoked(0, add(1)),
        Returned(0, Ret::Added(0)),
        Invoked(1, add(2)),
        Returned(1, Ret::Added(1)),
    ];
    assert_eq!(window(one_after_another).is_linearizable(), Ok(true));
    let both_read_the_same = vec![
        Invoked(0, add(1)),
        Invoked(1, add(2)),
        Returned(1, Ret::Added(0)),
        Returned(0, Ret::Added(0)),
    ];
    assert_eq!(
        window(both_read_the_same.clone()).is_linearizable(),
        Ok(false)
    );
    let mut verdict = linear::Verdict::default();
    verdict.judge(&window(both_read_the_same));
    assert_eq!((verdict.breaches.len(), verdict.concurrent), (1, 1));
    // What began when the other had returned cannot have come before it.
    let in_the_wrong_order = vec![
        Invoked(0, add(2)),
        Returned(0, Ret::Added(1)),
        Invoked(1, add(2)),
        Returned(1, Ret::Added(0)),
    ];
    assert_eq!(window(in_the_wrong_order).is_linearizable(), Ok(false));
    // A stale one that was not refused.
    let stale = vec![
        Invoked(0, add(2)),
        Returned(0, Ret::Added(0)),
        Invoked(1, Op::Write { token: 1, value: 5 }),
        Returned(1, Ret::Written),
    ];
    assert_eq!(window(stale).is_linearizable(), Ok(false));
}

#[test]
fn readers_and_permits_have_a_model_of_their_own() {
    use Step::{Invoked, Returned};
    let enter_of = |limit, token, weight| Op::Enter {
        token,
        weight,
        limit,
    };
    let enter = |token, weight| enter_of(3, token, weight);
    let histories = [
        // A reader sees what was written before it came.
        (vec![(Op::Read { token: 2 }, Ret::Value(0))], true),
        (vec![(Op::Read { token: 2 }, Ret::Value(1))], false),
        // A writer that an earlier token lets in after a reader would change what it reads.
        (
            vec![
                (Op::Read { token: 2 }, Ret::Value(0)),
                (Op::Write { token: 1, value: 5 }, Ret::Written),
            ],
            false,
        ),
        // There is room for three.
        (
            vec![
                (enter(1, 2), Ret::Entered),
                (enter(2, 1), Ret::Entered),
                (Op::Leave { token: 1 }, Ret::Left),
                (enter(3, 2), Ret::Entered),
                (Op::Leave { token: 2 }, Ret::Left),
            ],
            true,
        ),
        // If there is no more room, the oldest is thrown out: it cannot have been inside until the end.
        (
            vec![
                (enter(1, 2), Ret::Entered),
                (enter(2, 2), Ret::Entered),
                (Op::Leave { token: 1 }, Ret::Left),
            ],
            false,
        ),
        // Each limit counts those that came before: a late one with a small token takes nobody's place.
        (
            vec![
                (enter_of(3, 2, 1), Ret::Entered),
                (enter_of(3, 3, 1), Ret::Entered),
                (enter_of(1, 1, 1), Ret::Entered),
                (Op::Leave { token: 2 }, Ret::Left),
                (Op::Leave { token: 3 }, Ret::Left),
                (Op::Leave { token: 1 }, Ret::Left),
            ],
            true,
        ),
        (
            vec![
                (enter_of(3, 1, 1), Ret::Entered),
                (enter_of(1, 2, 1), Ret::Entered),
                (Op::Leave { token: 1 }, Ret::Left),
            ],
            false,
        ),
        // Nor beside one who has the key alone.
        (
            vec![
                (enter(1, 2), Ret::Entered),
                (Op::Add { token: 2 }, Ret::Added(0)),
                (Op::Leave { token: 1 }, Ret::Left),
            ],
            false,
        ),
    ];
    for (history, is_true) in histories {
        let steps = history
            .iter()
            .cloned()
            .flat_map(|(op, ret)| [Invoked(0, op), Returned(0, ret)]);
        let found = window(steps.collect()).is_linearizable();
        assert_eq!(found, Ok(is_true), "{history:?}");
    }
}

/// Shared leases are fenced by exclusive ones, and exclusive ones by shared ones.
#[test]
fn the_resource_refuses_whoever_comes_after_another_kind() {
    let (windows, history) = mpsc::channel();
    let mut resource = Resource::new(windows);
    let read = |token| Op::Read { token };
    let enter = |token, weight| Op::Enter {
        token,
        weight,
        limit: 2,
    };
    assert_eq!(resource.read(1, "key", 10), Some(0));
    assert_eq!(
        resource.share(2, "key", read(12)),
        Some(Ret::Value(0)),
        "the writer is late"
    );
    assert!(!resource.write(1, "key", 10, 1));
    assert_eq!(resource.share(3, "key", read(11)), Some(Ret::Value(0)));
    assert_eq!(resource.read(4, "key", 13), Some(0));
    assert!(resource.write(4, "key", 13, 1));
    assert_eq!(resource.share(2, "key", read(12)), None);
    // Who is gone is inside no longer.
    assert_eq!(resource.share(5, "key", enter(14, 2)), Some(Ret::Entered));
    resource.gone(5);
    assert_eq!(resource.share(6, "key", enter(15, 1)), Some(Ret::Entered));
    assert_eq!(resource.share(7, "key", enter(16, 2)), Some(Ret::Entered));
    assert_eq!(resource.share(6, "key", Op::Leave { token: 15 }), None);
    resource.finish();
    let history: Vec<Window> = history.iter().collect();
    assert_eq!(history[0].is_linearizable(), Ok(true), "{history:?}");
}

/// The resource's own history of everything that can happen at it is one of a register, and nothing stale gets in.
#[test]
fn the_resource_refuses_stale_writes_and_keeps_a_true_history() {
    let (windows, history) = mpsc::channel();
    let mut resource = Resource::new(windows);
    assert_eq!(resource.read(1, "key", 10), Some(0));
    assert!(resource.write(1, "key", 10, 1));
    // Stopped in the middle, while another comes and goes.
    assert_eq!(resource.read(2, "key", 11), Some(1));
    assert_eq!(resource.read(3, "key", 12), Some(1));
    assert!(!resource.write(2, "key", 11, 2));
    assert!(resource.write(3, "key", 12, 2));
    assert_eq!(resource.read(2, "key", 11), None);
    // Killed in the middle.
    assert_eq!(resource.read(4, "key", 13), Some(2));
    resource.gone(4);
    // Late, and the last; late, and not.
    assert!(resource.write(5, "key", 13, 2));
    assert!(!resource.write(6, "key", 12, 7));
    assert_eq!(resource.read(7, "key", 14), Some(2));
    assert_eq!((resource.writes, resource.refused), (3, 3));
    assert_eq!(resource.finish()["key"], [10, 12, 13]);
    let history: Vec<Window> = history.iter().collect();
    assert_eq!(history.len(), 1);
    assert_eq!(history[0].is_linearizable(), Ok(true), "{history:?}");
    // Were one value of it another, the checker would see it.
    let mut forged = history[0].clone();
    for step in &mut forged.steps {
        if let Step::Returned(_, Ret::Added(value)) = step {
            *value = 0;
        }
    }
    assert_eq!(forged.is_linearizable(), Ok(false), "{forged:?}");
}

/// However long somebody is stopped in the middle, what the checker gets stays short, and joins on.
#[test]
fn windows_of_the_history_stay_short() {
    let (windows, history) = mpsc::channel();
    let mut resource = Resource::new(windows);
    resource.read(0, "key", 1);
    for token in 2..1_000 {
        let value = resource.read(token, "key", token).unwrap();
        assert!(resource.write(token, "key", token, value + 1));
    }
    assert!(!resource.write(0, "key", 1, 1));
    resource.finish();
    let history: Vec<Window> = history.iter().collect();
    assert!(history.len() > 10);
    assert!(history.iter().all(|window| window.steps.len() < 410));
    assert!(
        history
            .iter()
            .all(|window| window.is_linearizable() == Ok(true))
    );
    for pair in history.windows(2) {
        let seen = Ret::Seen(pair[1].origin.clone());
        assert_eq!(pair[0].steps.last(), Some(&Step::Returned(0, seen)));
    }
}

#[test]
fn the_longest_way_back_is_told_by_kind() {
    let struck = |kind, slot, to| Struck {
        kind,
        slot,
        lasted: span(to, to),
    };
    let leases = [(10, 0), (20, 1), (55, 1), (70, 0)];
    let found = recoveries(
        &[
            struck(Kind::Cut, 0, 12),
            struck(Kind::Cut, 1, 20),
            struck(Kind::FlushAll, 4, 21),
            struck(Kind::Kill, 1, 60),
        ],
        &leases,
        &[],
    );
    let cut = found[&Kind::Cut];
    assert_eq!((cut.times, cut.anybody, cut.hit), (2, Some(8), Some(58)));
    assert_eq!(found[&Kind::FlushAll].hit, Some(34));
    assert_eq!(
        (found[&Kind::Kill].anybody, found[&Kind::Kill].hit),
        (Some(10), None)
    );
}

/// Sentinels took 47 s to replace a primary, and every child was told off for that.
#[test]
fn no_recovery_counts_the_time_without_a_primary() {
    const SECOND: u64 = 1_000_000_000;
    let mut reigns = Reigns::of(vec![0, 0]);
    let mut say = |server, second: u64, is_primary| {
        let at = second * SECOND;
        reigns.answered(server, span(at, at + 1), is_primary);
    };
    // A stopped primary that nobody has replaced says nothing; the other says that it is none.
    say(0, 10, true);
    say(1, 11, false);
    say(1, 57, true);
    say(0, 57, false);
    let vacancies = reigns.vacancies();
    assert_eq!(vacancies, [span(10 * SECOND + 1, 57 * SECOND)]);

    let struck = |to| Struck {
        kind: Kind::Cut,
        slot: 0,
        lasted: span(to, to),
    };
    let recovery = |to| {
        let leases = [(9 * SECOND, 0), (60 * SECOND, 0)];
        let found = recoveries(&[struck(to)], &leases, vacancies);
        found[&Kind::Cut].hit
    };
    assert_eq!(recovery(8 * SECOND), Some(SECOND));
    assert_eq!(recovery(20 * SECOND), Some(3 * SECOND));
    assert_eq!(recovery(58 * SECOND), Some(2 * SECOND));
    assert_eq!(recovery(61 * SECOND), None);
}

/// A server that is nobody's replica is asked by nobody whether it is there: what is not counted is what was done to it, and
/// no more. All the time before a restart was left out.
#[test]
fn recovery_counts_all_but_what_befell_the_only_server() {
    let mut reigns = Reigns::of_the_only_ones(1);
    reigns.falls_silent(20);
    reigns.killed(0, 20);
    reigns.answered(0, span(50, 50), true);
    reigns.speaks_again(50);
    assert_eq!(reigns.vacancies(), [span(20, 50)]);
    let refused = Struck {
        kind: Kind::Refuse,
        slot: 0,
        lasted: span(5, 15),
    };
    let leases = [(4, 0), (60, 0), (61, 1)];
    let found = recoveries(&[refused], &leases, reigns.vacancies());
    assert_eq!(found[&Kind::Refuse].hit, Some(15));
    const HOUR: u64 = 3_600_000_000_000;
    reigns.answered(0, span(HOUR, HOUR), true);
    assert_eq!(
        reigns.vacancies(),
        [span(20, 50)],
        "and nothing was done to it since"
    );
}

/// A child that was struck just before the end had no lease by then, on a slow machine: the calm goes on until it has.
#[test]
fn who_took_nothing_since_the_last_fault_is_known() {
    let mut holds = holds(&[(0, 1, 10, 20, 100)]);
    holds.taken(7, "other".to_owned(), Hold::new(child(1), 2, 15, 115));
    let slots = |since| [0, 1, 2].map(|slot| holds.took_since(slot, since));
    assert_eq!(slots(10), [true, true, false]);
    assert_eq!(slots(11), [false, true, false]);
    let keys = |since| ["key", "other"].map(|key| holds.taken_since(key, since));
    assert_eq!(keys(10), [true, true]);
    assert_eq!(keys(11), [false, true]);
}

/// A child that was struck nine times in a row had no lease for 18.9 s, between fail-overs and its own stops.
#[test]
fn no_recovery_counts_the_time_in_which_the_child_is_kept_away() {
    let struck = |kind, slot, from, to| Struck {
        kind,
        slot,
        lasted: span(from, to),
    };
    let faults = [
        struck(Kind::Cut, 0, 10, 10),
        struck(Kind::LongStop, 0, 20, 50),
        struck(Kind::Blackhole, 0, 70, 80),
        // Neither keeps this child away.
        struck(Kind::Delay, 0, 85, 95),
        struck(Kind::Blackhole, 1, 82, 98),
    ];
    let vacancies = [span(5, 12), span(40, 60), span(90, 200)];
    let found = recoveries(&faults, &[(95, 1), (100, 0)], &vacancies);
    // 12 to 20, 60 to 70, 80 to 90.
    assert_eq!(found[&Kind::Cut].hit, Some(28));
    assert_eq!(found[&Kind::LongStop].hit, Some(20));
    // 12 to 40, 60 to 90.
    assert_eq!(found[&Kind::Cut].anybody, Some(58));
}

#[test]
fn every_line_of_a_log_can_be_read_again() {
    let what = "panic: two\nlines".to_owned();
    for line in [
        Line::Taken {
            lease: 1,
            key: "any-0".to_owned(),
            token: u64::MAX,
            since: 2,
            at: 3,
            deadline: 4,
            mode: Mode::Permit {
                weight: 2,
                limit: 3,
            },
        },
        Line::Until {
            lease: 1,
            at: 4,
            deadline: 5,
        },
        Line::Ended { lease: 1, at: 6 },
        Line::Waits {
            wait: 2,
            at: 7,
            limit: 8,
        },
        Line::Waited {
            wait: 2,
            at: 9,
            how: "busy".to_owned(),
        },
        Line::Closing { at: 10 },
        Line::ShutDown {
            from: 10,
            to: 11,
            longest: 12,
        },
        Line::Left {
            tasks: 11,
            callers: 12,
        },
        Line::Late { refused: true },
        Line::Slow { from: 13, to: 14 },
    ] {
        assert_eq!(Line::parse(&line.to_string()), Some(line));
    }
    for mode in [Mode::Exclusive, Mode::Group, Mode::Kept, Mode::Reader] {
        assert_eq!(Mode::parse(&mode.to_string()), Some(mode));
    }
    let wrong = Line::parse(&Line::Wrong { what }.to_string());
    let what = "panic: two / lines".to_owned();
    assert_eq!(wrong, Some(Line::Wrong { what }));
    assert_eq!(Line::parse("taken 1 any-0"), None);
}

/// Each entry: on which server who has the key.
fn stored(owners: &[(usize, &str)]) -> Vec<StoredLock> {
    let lock = |(server, owner): &(usize, &str)| StoredLock {
        key: format!("server {server}: torture:any-0"),
        owner: (*owner).to_owned(),
        left: None,
    };
    owners.iter().map(lock).collect()
}

/// Else a key that a dead owner keeps, that goes from one of the dead to the next, or for which votes are split for ever,
/// would pass for one that is had.
#[test]
fn a_key_is_had_only_by_a_majority_and_by_more_than_one_owner() {
    let at_work = [child(0), child(1)];
    let mut votes = Votes::of(3);
    let count = |votes: &mut Votes, owners: &[_]| votes.count(&stored(owners), &at_work);
    let of_all = [(0, "0.0~a:1"), (1, "0.0~a:1"), (2, "0.0~a:1")];
    count(&mut votes, &of_all);
    count(&mut votes, &of_all);
    assert!(!votes.changed("any-0"), "it may have had it before");
    let split = [
        (0, "1.0~b:2"),
        (1, "1.0~b:2"),
        (2, "0.0~a:3"),
        (3, "0.0~a:3"),
        (4, "0.0~a:4"),
    ];
    count(&mut votes, &split);
    assert!(!votes.changed("any-0"), "nobody has a majority");
    let won = [
        (0, "1.0~b:2"),
        (1, "1.0~b:2"),
        (2, "0.0~a:3"),
        (4, "1.0~b:2"),
    ];
    count(&mut votes, &won);
    assert!(votes.changed("any-0") && !votes.changed("any-1"));
    votes.begin();
    assert!(!votes.changed("any-0"), "counted anew");

    let mut votes = Votes::of(1);
    for of_the_dead in ["0.1~c:1", "0.1~c:2", "2.0~d:3", "0.10~e:4"] {
        count(&mut votes, &[(0, of_the_dead)]);
    }
    count(&mut votes, &[(0, "0.0~a:5")]);
    assert!(!votes.changed("any-0"), "by one at work alone");
    count(&mut votes, &[(0, "0.0~a:6")]);
    assert!(votes.changed("any-0"), "a server alone tells as well");
}

#[test]
fn only_who_was_killed_may_be_left_in_a_queue() {
    let of = |generation| Child {
        slot: 3,
        generation,
    };
    for queue in ["{torture:kept}:~listen1", "torture:kept"] {
        let left = Leftovers {
            queue_entries: vec![format!("{queue}: 3.1~71a095dbb74d3f1b2ae0ad5f3e6ef6bb:187")],
            ..Leftovers::default()
        };
        assert!(left.are_places_of_others(&[of(0), of(2), of(11), child(0)]));
        assert!(!left.are_places_of_others(&[of(1)]));
        let more = Leftovers {
            keys: vec!["torture:kept".to_owned()],
            ..left
        };
        assert!(!more.are_places_of_others(&[]), "no key lasts so long");
    }
}

#[test]
fn a_machine_that_stood_still_excuses_what_took_place_meanwhile() {
    let secs = Duration::from_secs;
    let mut seen = Standstills::default();
    assert_eq!(seen.most_within(secs(20)), secs(0));
    for (at, in_all) in [(0, 0), (1, 1), (2, 1), (30, 1), (31, 2), (40, 3), (90, 5)] {
        seen.seen(secs(at).as_nanos() as u64, secs(in_all));
    }
    assert_eq!(seen.most_within(secs(200)), secs(5), "in all");
    assert_eq!(seen.most_within(secs(10)), secs(2), "one and one, and two");
    // When between 40 and 90 it was is not known.
    assert_eq!(seen.most_within(secs(1)), secs(2));
}
