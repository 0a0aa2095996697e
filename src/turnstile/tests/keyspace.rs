//! K, S and F: the modelled store, rule by rule.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::harness::ms;
use crate::base::Mode;
use crate::store::contract::{Answer, Occupant, Op, Outcome, Owner};
use crate::store::memory::{Asking, Delivery, Keyspace};

const SECOND: u64 = 1_000_000;

/// One key, and registries by name.
struct Shop {
    keyspace: Keyspace,
    now: u64,
    dead: BTreeSet<&'static str>,
}

const PREFIX: &str = "P";
const KEY: &str = "k";

impl Shop {
    fn new() -> Self {
        Self {
            keyspace: Keyspace::default(),
            now: 1_700_000_000 * SECOND,
            dead: BTreeSet::new(),
        }
    }

    fn pass(&mut self, millis: u64) {
        self.now += millis * 1000;
    }

    fn with<R>(&mut self, caller: &str, what: impl FnOnce(&mut Keyspace, Asking<'_>) -> R) -> R {
        let (prefix, instance, key): (Arc<str>, Arc<str>, Arc<str>) =
            (PREFIX.into(), caller.into(), KEY.into());
        let asking = Asking {
            prefix: &prefix,
            instance: &instance,
            key: &key,
            now: self.now,
        };
        what(&mut self.keyspace, asking)
    }

    fn apply(&mut self, caller: &str, op: &Op) -> (Outcome, Option<Delivery>) {
        let dead = self.dead.clone();
        let live = |instance: &Arc<str>| !dead.contains(&**instance);
        let now = self.now;
        let applied = self.with(caller, |keyspace, asking| keyspace.apply(asking, op, &live));
        let Answer { at, outcome } = applied.answer;
        let mut deliveries = applied.deliveries.into_iter();
        let granted = deliveries.next();
        assert_eq!(deliveries.len(), 0);
        assert_eq!(at, now);
        (outcome, granted)
    }

    fn enter(&mut self, caller: &str, owner: u64, ttl: u64) -> Outcome {
        let (owner, ttl) = (Owner::exclusive(owner), ms(ttl));
        let score = None;
        self.apply(caller, &Op::Enter { owner, ttl, score }).0
    }

    /// The tickets, and the subscribers.
    fn tickets(&mut self) -> Vec<String> {
        let tickets = self.with("nobody", Keyspace::tickets);
        tickets
            .iter()
            .map(|(caller, _)| caller.to_string())
            .collect()
    }

    fn listeners(&mut self) -> Vec<String> {
        let listeners = self.with("nobody", Keyspace::listeners);
        listeners
            .iter()
            .map(|(caller, _)| caller.to_string())
            .collect()
    }

    fn attempt(&mut self, caller: &str, owner: u64, ttl: u64) -> Outcome {
        let (owner, ttl) = (Owner::exclusive(owner), ms(ttl));
        self.apply(caller, &Op::Attempt { owner, ttl }).0
    }

    fn release(&mut self, caller: &str, owner: u64) -> (Outcome, Option<Delivery>) {
        let owner = Owner::exclusive(owner);
        self.apply(caller, &Op::Release { owner })
    }

    fn hand_on(
        &mut self,
        caller: &str,
        old: u64,
        new: u64,
        ttl: u64,
    ) -> (Outcome, Option<Delivery>) {
        let (old, new, ttl) = (Owner::exclusive(old), Owner::exclusive(new), ms(ttl));
        self.apply(caller, &Op::Yield { old, new, ttl })
    }

    fn renew(&mut self, caller: &str, owner: u64, ttl: u64) -> Outcome {
        let (owner, ttl) = (Owner::exclusive(owner), ms(ttl));
        self.apply(
            caller,
            &Op::Renew {
                owner,
                ttl,
                within: ttl,
            },
        )
        .0
    }

    fn adopt(&mut self, caller: &str, owner: u64, from: &str, ttl: u64) -> Outcome {
        let op = Op::Adopt {
            owner: Owner::exclusive(owner),
            from: from.into(),
            ttl: ms(ttl),
            within: ms(ttl),
        };
        self.apply(caller, &op).0
    }

    fn key_status(&mut self) -> (Option<String>, Option<Duration>, u64) {
        let now = self.now;
        let key_status = self
            .keyspace
            .inspect(&PREFIX.into(), &KEY.into(), now, &|_| true);
        (key_status.owner(), key_status.left(), key_status.tickets)
    }
}

fn epoch(outcome: &Outcome) -> u64 {
    match outcome {
        Outcome::Won { epoch } => *epoch,
        other => panic!("not won: {other:?}"),
    }
}

fn score(outcome: &Outcome) -> u64 {
    match outcome {
        Outcome::Busy { score, .. } => score.expect("a ticket"),
        other => panic!("not busy: {other:?}"),
    }
}

/// A ticket is `owner ttl`; entered again it stays what it was, so that one owner has one ticket,
/// and its grant gives what its registry counts with (D2).
#[test]
fn k1_a_ticket_keeps_its_text() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    let first = score(&shop.enter("b", 1, 500));
    shop.pass(10);
    assert_eq!(score(&shop.enter("b", 1, 900)), first);
    assert_eq!(shop.key_status().2, 1);
    let (_, granted) = shop.release("a", 1);
    let grant = granted.expect("b stands").grant.expect("a grant");
    assert_eq!((grant.owner, grant.ttl), (Owner::exclusive(1), ms(500)));
}

/// The clock was set back by a minute: who comes now still stands behind those who came before.
#[test]
fn k2_a_clock_set_back_lets_nobody_overtake() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 600_000);
    let first = score(&shop.enter("b", 1, 500));
    shop.now -= 5 * SECOND;
    let second = score(&shop.enter("c", 1, 500));
    assert_eq!(second, first + 1);
}

/// A ticket that was dropped while its registry was not connected comes back to its old place,
/// as the first answer named it; not to one in the future, which no answer has named.
#[test]
fn k2_a_ticket_entered_again_has_its_old_place() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 60_000);
    let place = score(&shop.enter("b", 1, 500));
    shop.pass(10);
    shop.enter("c", 1, 500);
    shop.pass(10);
    let withdraw = Op::Withdraw {
        owner: Owner::exclusive(1),
        ttl: ms(500),
    };
    shop.apply("b", &withdraw);
    let (owner, ttl) = (Owner::exclusive(1), ms(500));
    for (named, wanted) in [(place, place), (shop.now + 9 * SECOND, shop.now)] {
        shop.apply("b", &withdraw);
        let score = Some(named);
        let (outcome, _) = shop.apply("b", &Op::Enter { owner, ttl, score });
        assert_eq!(self::score(&outcome), wanted);
    }
    let (outcome, _) = shop.apply(
        "b",
        &Op::Enter {
            owner,
            ttl,
            score: Some(place),
        },
    );
    assert_eq!(score(&outcome), shop.now, "a ticket keeps its place");
}

/// A queue whose registries crashed goes by itself, a minute after the lock; and does not go
/// while its lock lasts. Taking the last ticket takes the expiry along, so a yield, which takes
/// one and puts one in, has to set it too: else its ticket would stand for ever.
#[test]
fn k3_a_queue_runs_out_a_minute_after_its_lock() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 100_000);
    shop.enter("b", 1, 500);
    shop.pass(159_000);
    assert_eq!(shop.key_status().2, 1);
    shop.pass(2_000);
    assert_eq!(shop.key_status().2, 0);

    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 100_000);
    let (outcome, granted) = shop.hand_on("a", 1, 2, 500);
    assert!(matches!(outcome, Outcome::Busy { .. }) && granted.is_some());
    shop.pass(159_000);
    assert_eq!(shop.key_status(), (None, None, 1));
    shop.pass(2_000);
    let now = shop.now;
    assert_eq!(shop.keyspace.len(now), 0);
}

/// The longer lock of before is over, its queue's expiry is not brought forward by a shorter one.
#[test]
fn k3_an_expiry_is_never_brought_forward() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 100_000);
    shop.enter("b", 1, 1000);
    shop.enter("c", 1, 1000);
    shop.release("a", 1);
    shop.enter("c", 1, 1000);
    shop.pass(120_000);
    assert_eq!(shop.key_status().2, 1);
}

/// Draws grow though the fence was lost, and though the clock was set back.
#[test]
fn f1_epochs_grow_through_a_lost_fence_and_a_slow_clock() {
    let mut shop = Shop::new();
    let mut last = epoch(&shop.attempt("a", 1, 1000));
    for owner in 2..6 {
        shop.release("a", owner - 1);
        match owner {
            2 => shop.keyspace.forget_fences(),
            3 => shop.now -= 2 * SECOND,
            4 => {}
            _ => shop.now += 3 * SECOND,
        }
        // A moment goes by at least: one server makes fewer than a million tenures a second.
        shop.now += 1;
        let next = epoch(&shop.attempt("a", owner, 1000));
        assert!(next > last, "{next} after {last}");
        last = next;
    }
}

/// One fence serves a prefix: a key locked once leaves nothing behind.
#[test]
fn f1_a_free_key_leaves_nothing() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.release("a", 1);
    let now = shop.now;
    assert_eq!(shop.keyspace.len(now), 0);
}

/// The first in the queue is dead: published to, its grant would be lost and the lock nobody's
/// for a ttl. It is dropped, and the next one is served; one grant a script.
#[test]
fn s2_a_hand_over_goes_to_the_first_live_ticket() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    for caller in ["b", "c", "d"] {
        shop.enter(caller, 1, 500);
        shop.pass(1);
    }
    shop.dead.insert("b");
    let (outcome, granted) = shop.release("a", 1);
    assert_eq!(outcome, Outcome::Gone { held: true });
    let granted = granted.expect("c is alive");
    assert_eq!(&*granted.instance, "c");
    assert_eq!(shop.key_status(), (Some("c:1".into()), Some(ms(500)), 1));
}

/// A lock that ran out with tickets standing: the release that comes late serves them, and says
/// that the lock was not the releaser's.
#[test]
fn s2_a_release_too_late_serves_the_queue() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 500);
    shop.pass(1001);
    let (outcome, granted) = shop.release("a", 1);
    assert_eq!(outcome, Outcome::Gone { held: false });
    assert!(granted.is_some());
    // And one that finds another's lock leaves it alone.
    let (outcome, granted) = shop.release("a", 1);
    assert_eq!(outcome, Outcome::Gone { held: false });
    assert!(granted.is_none());
    assert_eq!(shop.key_status().0, Some("b:1".into()));
}

fn occupant(owner: &str) -> Arc<Occupant> {
    Arc::new(Occupant {
        owner: owner.into(),
        mode: Mode::Exclusive,
        others: 0,
    })
}

/// An attempt on a free lock with somebody in the queue does not barge in.
#[test]
fn s2_a_free_lock_is_the_first_tickets() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 500);
    shop.pass(1001);
    let (owner, ttl) = (Owner::exclusive(1), ms(500));
    let (outcome, granted) = shop.apply("c", &Op::Attempt { owner, ttl });
    let score = None;
    let left = Some(ms(500));
    assert_eq!(
        outcome,
        Outcome::Busy {
            left,
            score,
            entered: false,
            holder: Some(occupant("b:1")),
        }
    );
    assert_eq!(&*granted.expect("b stands").instance, "b");
}

/// A grant was lost with its connection; the enter that makes it good finds the lock its own. The
/// win is proved by this command, so the ttl counts from it, and the epoch is its own.
#[test]
fn s3_a_win_sets_a_new_ttl_and_a_new_epoch() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 500);
    let (_, granted) = shop.release("a", 1);
    let granted = granted.expect("b stands").grant.expect("a grant").epoch;
    shop.pass(400);
    assert!(epoch(&shop.enter("b", 1, 500)) > granted);
    assert_eq!(shop.key_status().1, Some(ms(500)));
    // Never shorter: a renewal may have come in between.
    assert_eq!(shop.renew("b", 1, 9000), Outcome::Renewed);
    epoch(&shop.enter("b", 1, 500));
    assert_eq!(shop.key_status().1, Some(ms(9000)));
}

/// Whoever wins has no ticket any more: it would be granted the lock after its own tenure.
#[test]
fn s3_a_winner_has_left_the_queue() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 500);
    shop.pass(1001);
    epoch(&shop.enter("b", 1, 500));
    assert_eq!(shop.key_status().2, 0);
}

/// A yield by one that has lost the lock writes nothing.
#[test]
fn s2_a_yield_of_a_lock_that_is_not_ours_writes_nothing() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    let before = shop.key_status();
    assert!(matches!(
        shop.hand_on("b", 1, 2, 500),
        (Outcome::NotOld, None)
    ));
    assert_eq!(shop.key_status(), before);
}

/// A yield with nobody else keeps the lock, under the new owner; with others it goes to the end,
/// and is never granted to the yielder itself.
#[test]
fn s2_a_yield_goes_round() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    let (outcome, granted) = shop.hand_on("a", 1, 2, 500);
    assert!(granted.is_none());
    epoch(&outcome);
    assert_eq!(shop.key_status(), (Some("a:2".into()), Some(ms(500)), 0));
    shop.enter("b", 1, 500);
    let (outcome, granted) = shop.hand_on("a", 2, 3, 500);
    score(&outcome);
    assert_eq!(&*granted.expect("b stands").instance, "b");
    assert_eq!(shop.key_status(), (Some("b:1".into()), Some(ms(500)), 1));
}

/// A withdrawal that crosses its grant gives the lock to the next.
#[test]
fn s2_a_withdrawal_takes_the_lock_along() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    shop.enter("b", 1, 500);
    shop.pass(1);
    shop.enter("c", 1, 500);
    shop.release("a", 1);
    let (outcome, granted) = shop.apply(
        "b",
        &Op::Withdraw {
            owner: Owner::exclusive(1),
            ttl: ms(500),
        },
    );
    assert_eq!(outcome, Outcome::Gone { held: true });
    assert_eq!(&*granted.expect("c stands").instance, "c");
}

/// A renewal lengthens or does nothing, and never touches another's lock.
#[test]
fn s2_a_renewal_only_lengthens() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    assert_eq!(shop.renew("a", 1, 500), Outcome::Renewed);
    assert_eq!(shop.key_status().1, Some(ms(1000)));
    assert_eq!(shop.renew("b", 1, 5000), Outcome::Lost);
    assert_eq!(shop.key_status().1, Some(ms(1000)));
    shop.pass(1001);
    assert_eq!(shop.renew("a", 1, 500), Outcome::Lost);
    assert_eq!(shop.key_status().0, None);
}

/// The lock goes to a new owner, with a ttl and an epoch of its own, past the queue; asked again after
/// a lost reply, it is that owner's already, and the win is proved again.
#[test]
fn s3_an_adoption_moves_the_lock_and_may_be_asked_again() {
    let mut shop = Shop::new();
    let left = epoch(&shop.attempt("a", 1, 1000));
    shop.enter("c", 1, 500);
    shop.pass(400);
    let first = epoch(&shop.adopt("b", 7, "a:1", 800));
    assert!(first > left);
    assert_eq!(shop.key_status(), (Some("b:7".into()), Some(ms(800)), 1));
    shop.pass(100);
    assert!(epoch(&shop.adopt("b", 7, "a:1", 800)) > first);
    assert_eq!(shop.key_status().1, Some(ms(800)));
    // What the first owner still sends harms nothing.
    let (outcome, granted) = shop.release("a", 1);
    assert_eq!(outcome, Outcome::Gone { held: false });
    assert!(granted.is_none());
    assert_eq!(shop.renew("a", 1, 9000), Outcome::Lost);
    assert_eq!(shop.key_status().1, Some(ms(800)));
}

/// It ran out, or is another's: of two that adopt one comes too late, and nothing is written.
#[test]
fn s3_an_adoption_of_a_missing_lease_writes_nothing() {
    let mut shop = Shop::new();
    assert_eq!(shop.adopt("b", 7, "a:1", 800), Outcome::NotOld);
    assert_eq!(shop.key_status().0, None);
    shop.attempt("a", 1, 1000);
    epoch(&shop.adopt("b", 7, "a:1", 800));
    assert_eq!(shop.adopt("c", 3, "a:1", 800), Outcome::NotOld);
    shop.pass(801);
    assert_eq!(shop.adopt("b", 7, "a:1", 800), Outcome::NotOld);
    assert_eq!(shop.key_status().0, None);
}

/// A stranger's lock without a ttl is busy, for nobody knows how long.
#[test]
fn w2_a_strangers_lock_has_no_ttl() {
    let mut shop = Shop::new();
    assert!(shop.with("stranger", |keyspace, asking| keyspace.seize(asking, None)));
    let left = None;
    let outcome = shop.enter("b", 1, 500);
    let score = Some(score(&outcome));
    assert_eq!(
        outcome,
        Outcome::Busy {
            left,
            score,
            entered: true,
            holder: Some(occupant("stranger:0")),
        }
    );
    shop.with("stranger", Keyspace::unseize);
    epoch(&shop.enter("b", 1, 500));
}

/// A subscriber stands beside the queue: neither a withdrawal nor a ticket that is dropped touches it, and no ticket goes
/// with it.
#[test]
fn w7_subscribers_are_not_in_the_queue() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 60_000);
    let ttl = ms(500);
    let (one, two) = (Owner::exclusive(1), Owner::exclusive(2));
    shop.apply("b", &Op::Listen { owner: one, ttl });
    shop.enter("b", 2, 500);
    shop.apply("b", &Op::Withdraw { owner: one, ttl });
    assert_eq!(shop.listeners(), ["b"]);
    shop.apply("b", &Op::Unlisten { owner: two });
    assert_eq!(shop.tickets(), ["b"]);
    shop.apply("b", &Op::Unlisten { owner: one });
    assert_eq!((shop.listeners().len(), shop.tickets().len()), (0, 1));

    // A dead ticket is dropped on the way; a subscriber is looked at when it is its turn to be told.
    shop.apply("c", &Op::Listen { owner: one, ttl });
    shop.apply("d", &Op::Listen { owner: one, ttl });
    shop.dead = ["b", "c"].into();
    assert_eq!(shop.listeners(), ["c", "d"]);
    let (_, told) = shop.apply("a", &Op::Release { owner: one });
    assert_eq!(&*told.expect("somebody listens").instance, "d");
    assert_eq!((shop.listeners().len(), shop.tickets().len()), (0, 0));
}

/// K3: each of the two sets runs out by itself, a minute after the lock that its last member stood behind.
#[test]
fn k3_subscriptions_expire() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 1000);
    let (owner, ttl) = (Owner::exclusive(1), ms(500));
    shop.apply("b", &Op::Listen { owner, ttl });
    shop.pass(50_000);
    shop.enter("c", 1, 500);
    shop.enter("d", 1, 500);
    shop.pass(10_999);
    assert_eq!(shop.listeners(), ["b"]);
    shop.pass(1);
    assert_eq!(shop.listeners().len(), 0);
    assert_eq!(shop.tickets().len(), 1);
}

/// The lease is over, and the key is nobody's: neither a renewal that comes late nor the same op again moves its end.
#[test]
fn m8_a_kept_key_is_nobodys_until_its_time_is_over() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 30_000);
    let keep = |left| Op::Keep {
        owner: Owner::exclusive(1),
        left: ms(left),
    };
    assert_eq!(
        shop.apply("a", &keep(5000)).0,
        Outcome::Gone { held: true },
        "shorter than its ttl"
    );
    shop.pass(1000);
    for again in [keep(5000), keep(60_000)] {
        assert_eq!(shop.apply("a", &again).0, Outcome::Gone { held: false });
    }
    assert_eq!(shop.renew("a", 1, 60_000), Outcome::Lost);
    let (released, told) = shop.release("a", 1);
    assert_eq!(released, Outcome::Gone { held: false });
    assert!(told.is_none());
    assert_eq!(shop.adopt("b", 2, "a:1", 30_000), Outcome::NotOld);
    let Outcome::Busy { left, .. } = shop.enter("b", 2, 900) else {
        panic!("it is kept");
    };
    assert_eq!(left, Some(ms(4000)));
    shop.pass(3999);
    assert!(matches!(shop.enter("b", 2, 900), Outcome::Busy { .. }));
    shop.pass(1);
    assert!(matches!(shop.enter("b", 2, 900), Outcome::Won { .. }));
    assert_eq!(
        shop.apply("a", &keep(5000)).0,
        Outcome::Gone { held: false }
    );
}

/// Longer than its ttl. And whoever knows under which name it is kept may take it, as `lockstream free` does.
#[test]
fn m8_a_key_may_be_kept_for_longer_than_its_ttl() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 900);
    let (owner, left) = (Owner::exclusive(1), ms(5000));
    shop.apply("a", &Op::Keep { owner, left });
    shop.pass(4999);
    assert!(matches!(shop.attempt("b", 2, 900), Outcome::Busy { .. }));
    assert!(matches!(
        shop.adopt("b", 3, "a+kept:1", 900),
        Outcome::Won { .. }
    ));
}

/// It is told, and stays where it is.
#[test]
fn m8_the_first_ticket_that_is_alive_is_told() {
    let mut shop = Shop::new();
    shop.attempt("a", 1, 900);
    for caller in ["b", "c", "d"] {
        shop.enter(caller, 1, 900);
    }
    shop.dead.insert("b");
    let (owner, left) = (Owner::exclusive(1), ms(5000));
    let (_, told) = shop.apply("a", &Op::Keep { owner, left });
    let told = told.expect("somebody waits");
    assert_eq!((&*told.instance, told.grant), ("c", None));
    assert_eq!(shop.tickets(), ["c", "d"]);
    assert!(shop.apply("a", &Op::Keep { owner, left }).1.is_none());
}
