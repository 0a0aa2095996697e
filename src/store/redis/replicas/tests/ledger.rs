use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::super::ledger::{Hint, Ledger, Round, Said, Seen};
use super::super::rule::Replicas;
use crate::StoreError;
use crate::store::contract::{Answer, Grant, News, Op, OpError, Outcome, Owner};

const TTL: Duration = Duration::from_secs(30);
const WITHIN: Duration = Duration::from_millis(100);

fn ledger(least: u32) -> Ledger {
    let rule = Replicas::new(least, WITHIN).unwrap();
    Ledger::new(rule.expect("more than none"))
}

fn attempt(owner: u64) -> Op {
    let (owner, ttl) = (Owner(owner), TTL);
    Op::Attempt { owner, ttl }
}

fn replied(key: &str, op: Op, outcome: Outcome) -> News {
    let (key, at) = (key.into(), 1);
    let result = Ok(Answer { at, outcome });
    News::Replied { key, op, result }
}

fn won(key: &str, owner: u64) -> News {
    replied(key, attempt(owner), Outcome::Won { draw: 7 })
}

fn granted(key: &str, owner: u64) -> News {
    let grant = Grant {
        owner: Owner(owner),
        ttl: TTL,
        draw: 9,
        at: 1,
    };
    let key = key.into();
    News::Granted { key, grant }
}

fn seen(ours: &[bool], replicas: u64) -> Seen {
    let said = |ours: &bool| if *ours { Said::Ours } else { Said::Gone };
    let said = ours.iter().map(said).collect();
    Seen { said, replicas }
}

/// A round at the one server that there is.
fn begin(ledger: &mut Ledger, now: Instant) -> Option<Round> {
    let mut rounds = ledger.begin(now, |_, _| Some((here(), 0)));
    assert!(rounds.len() <= 1);
    rounds.pop().map(|(_, round)| round)
}

fn keys(round: &Round) -> Vec<&str> {
    round.locks.iter().map(|lock| &*lock.key).collect()
}

fn here() -> Arc<str> {
    "here".into()
}

fn broken() -> StoreError {
    StoreError::new("it broke")
}

/// What is told, in short.
fn told(ledger: &mut Ledger) -> Vec<String> {
    let short = |news| match news {
        News::Replied { key, result, .. } => match result {
            Ok(answer) => match answer.outcome {
                Outcome::Won { .. } => format!("{key} won"),
                other => format!("{key} {other:?}"),
            },
            Err(OpError::Unconfirmed(error)) => format!("{key} unconfirmed: {error}"),
            Err(OpError::Unknown(_)) => format!("{key} unknown"),
            Err(other) => format!("{key} {other:?}"),
        },
        News::Granted { key, .. } => format!("{key} granted"),
        News::Unconfirmed { key, error, .. } => format!("{key} granted in vain: {error}"),
        News::Freed { key } => format!("{key} freed"),
        News::Up { .. } => "up".to_owned(),
        News::Down(_) => "down".to_owned(),
    };
    ledger.told.drain(..).map(short).collect()
}

const TOO_FEW: &str = "the lock was given back: 1 of the 2 replicas of Redis at here that are to have it had it within \
                       100ms";

#[test]
fn what_wins_nothing_is_told_at_once() {
    let mut ledger = ledger(1);
    let (key, left, score) = ("k", None, None);
    ledger.hear(News::Up { queue: true });
    ledger.hear(replied(key, attempt(1), Outcome::Busy { left, score }));
    let owner = Owner(1);
    ledger.hear(replied(
        key,
        Op::Release { owner },
        Outcome::Gone { held: true },
    ));
    ledger.hear(replied(
        key,
        Op::Renew { owner, ttl: TTL },
        Outcome::Renewed,
    ));
    let yields = Op::Yield {
        old: owner,
        new: Owner(2),
        ttl: TTL,
    };
    ledger.hear(replied(key, yields, Outcome::NotOld));
    assert_eq!(told(&mut ledger).len(), 5);
    assert!(begin(&mut ledger, Instant::now()).is_none());
}

#[test]
fn a_win_is_told_when_enough_replicas_have_it() {
    for (replicas, expected) in [(2, "k won"), (5, "k won"), (1, "k unconfirmed: ")] {
        let mut ledger = ledger(2);
        ledger.hear(won("k", 1));
        assert!(told(&mut ledger).is_empty());
        let round = begin(&mut ledger, Instant::now()).unwrap();
        assert_eq!((keys(&round), round.locks[0].owner), (vec!["k"], Owner(1)));
        assert_eq!(round.wait, WITHIN);
        assert!(told(&mut ledger).is_empty());
        ledger.seen(
            Instant::now(),
            round.number,
            &seen(&[true], replicas),
            &here(),
        );
        let told = told(&mut ledger);
        assert!(told.len() == 1 && told[0].starts_with(expected), "{told:?}");
    }
}

/// Whoever comes while a round is under way came after its write: the round says nothing of it.
#[test]
fn what_comes_meanwhile_shares_the_next_round() {
    let mut ledger = ledger(2);
    ledger.hear(won("a", 1));
    let first = begin(&mut ledger, Instant::now()).unwrap();
    for (key, owner) in [("b", 2), ("c", 3)] {
        ledger.hear(won(key, owner));
    }
    ledger.hear(granted("d", 4));
    ledger.seen(Instant::now(), first.number, &seen(&[true], 2), &here());
    assert_eq!(told(&mut ledger), ["a won"]);
    let second = begin(&mut ledger, Instant::now()).unwrap();
    assert_eq!(keys(&second), ["b", "c", "d"]);
    ledger.seen(
        Instant::now(),
        second.number,
        &seen(&[true, false, true], 1),
        &here(),
    );
    let gone = "c unconfirmed: the lock was gone before the replicas of Redis at here could be asked for it";
    assert_eq!(
        told(&mut ledger),
        [
            format!("b unconfirmed: {TOO_FEW}"),
            gone.to_owned(),
            format!("d granted in vain: {TOO_FEW}")
        ]
    );
}

/// Each part of a call's answers is of another key: they wait for nobody else's confirmation.
#[test]
fn others_are_not_held_up() {
    let mut ledger = ledger(1);
    ledger.hear(won("a", 1));
    ledger.hear(replied(
        "b",
        Op::Withdraw { owner: Owner(2) },
        Outcome::Gone { held: false },
    ));
    assert_eq!(told(&mut ledger).len(), 1);
}

/// Told after the `Down`, or the next `Up`, an answer would be taken for one of the new connection: its op is sent again
/// there (O4). A grant that is told then might be over.
#[test]
fn o4_nothing_outlives_its_connection() {
    let mut ledger = ledger(1);
    ledger.hear(won("a", 1));
    ledger.hear(granted("b", 2));
    let round = begin(&mut ledger, Instant::now()).unwrap();
    ledger.hear(won("c", 3));
    ledger.hear(News::Down(broken()));
    assert_eq!(told(&mut ledger), ["a unknown", "c unknown", "down"]);
    assert!(!ledger.is_wanted(round.number));
    ledger.seen(
        Instant::now(),
        round.number,
        &seen(&[true, true], 2),
        &here(),
    );
    ledger.failed(Instant::now(), round.number, &broken());
    assert!(told(&mut ledger).is_empty());

    ledger.hear(News::Up { queue: true });
    ledger.hear(won("a", 1));
    let next = begin(&mut ledger, Instant::now()).unwrap();
    assert_ne!(next.downs, round.downs, "it is to be asked for elsewhere");
    // A late answer to the round before is none to this one.
    ledger.seen(
        Instant::now(),
        round.number,
        &seen(&[false, false], 0),
        &here(),
    );
    assert_eq!(told(&mut ledger), ["up"]);
    ledger.seen(Instant::now(), next.number, &seen(&[true], 1), &here());
    assert_eq!(told(&mut ledger), ["a won"]);
}

/// Who comes while a round is under way waits for that one and the next, however many they are.
#[test]
fn nobody_waits_for_more_than_two_rounds() {
    let mut ledger = ledger(2);
    let begun = Instant::now();
    ledger.hear(won("first", 0));
    let first = begin(&mut ledger, begun).unwrap();
    for owner in 1..=10_000 {
        ledger.hear(won("k", owner));
    }
    assert!(first.wait <= WITHIN);
    let then = begun + first.wait;
    ledger.seen(then, first.number, &seen(&[true], 1), &here());
    let second = begin(&mut ledger, then).unwrap();
    assert_eq!((second.locks.len(), second.wait), (10_000, WITHIN));
    assert!(!ledger.is_waiting());
    let none = seen(&[true; 10_000], 1);
    ledger.seen(then + WITHIN, second.number, &none, &here());
    let told = told(&mut ledger);
    assert_eq!(told.len(), 10_001);
    assert!(told[1..].iter().all(|it| it.starts_with("k unconfirmed")));
}

/// One that is slow holds up nobody who waits for another.
#[test]
fn each_primary_has_rounds_of_its_own() {
    let mut ledger = ledger(1);
    let now = Instant::now();
    let place = |key: &str, _: &Hint| Some((key[..1].into(), 7));
    for (owner, key) in (1..).zip(["a1", "b1", "a2"]) {
        ledger.hear(won(key, owner));
    }
    let rounds = ledger.begin(now, place);
    let [(a, slow), (b, quick)] = &rounds[..] else {
        panic!("{rounds:?}")
    };
    assert_eq!((&**a, keys(slow)), ("a", vec!["a1", "a2"]));
    assert_eq!((&**b, keys(quick)), ("b", vec!["b1"]));
    assert!(slow.locks.iter().all(|lock| lock.slot == 7));
    for (owner, key) in (4..).zip(["a3", "b2"]) {
        ledger.hear(won(key, owner));
    }
    ledger.seen(now, quick.number, &seen(&[true], 1), b);
    let next = ledger.begin(now, |key, hint| place(key, hint).filter(|(to, _)| to == b));
    let [(_, next)] = &next[..] else {
        panic!("{next:?}")
    };
    assert_eq!(keys(next), ["b2"]);
    ledger.seen(now, next.number, &seen(&[true], 1), b);
    assert_eq!(told(&mut ledger), ["b1 won", "b2 won"]);
    assert!(ledger.is_wanted(slow.number) && ledger.is_waiting());
    ledger.seen(now, slow.number, &seen(&[true, true], 1), a);
    assert_eq!(told(&mut ledger), ["a1 won", "a2 won"]);
    // What still waits goes with the connection, as what is asked for does.
    ledger.hear(News::Down(broken()));
    assert_eq!(told(&mut ledger), ["a3 unknown", "down"]);
}

/// Sent on at once a few times, then after pauses, and not when its time is over.
#[test]
fn what_is_elsewhere_is_asked_for_there_until_its_time_is_over() {
    let mut ledger = ledger(1);
    let mut now = Instant::now();
    let begun = now;
    ledger.hear(won("a", 1));
    ledger.hear(won("b", 2));
    let hint = Hint {
        to: Some("there".into()),
        asking: true,
        is_alone: false,
    };
    let place = |_: &str, hint: &Hint| Some((hint.to.clone().unwrap_or_else(here), 0));
    let (_, round) = ledger.begin(now, place).pop().unwrap();
    let elsewhere = || Said::Elsewhere(hint.clone(), broken());
    let said = vec![elsewhere(), Said::Ours];
    let some = Seen { said, replicas: 1 };
    ledger.seen(now, round.number, &some, &here());
    assert_eq!(told(&mut ledger), ["b won"]);
    let mut hops = 0;
    while ledger.is_waiting() {
        now = ledger.due().unwrap_or(now);
        let (to, round) = ledger.begin(now, place).pop().expect("it is due");
        assert_eq!((&*to, round.locks[0].asking), ("there", true));
        let said = vec![elsewhere()];
        ledger.seen(now, round.number, &Seen { said, replicas: 1 }, &to);
        hops += 1;
        if let Some(due) = ledger.due() {
            assert!(
                ledger.begin(now, place).is_empty(),
                "it pauses until {due:?}"
            );
        }
    }
    assert_eq!(told(&mut ledger), ["a unconfirmed: it broke"]);
    assert!((5..20).contains(&hops), "{hops}");
    assert!(now >= begun + WITHIN && now < begun + 2 * WITHIN);

    // A round that fails says nothing of where it is.
    ledger.hear(won("c", 3));
    let (_, round) = ledger.begin(now, place).pop().unwrap();
    let said = vec![elsewhere()];
    ledger.seen(now, round.number, &Seen { said, replicas: 0 }, &here());
    let (to, round) = ledger.begin(now, place).pop().unwrap();
    assert_eq!(&*to, "there");
    ledger.failed(now, round.number, &broken());
    let (to, _) = ledger.begin(now, place).pop().unwrap();
    assert_eq!(to, here());
}

/// As long as nobody knows where the primaries are.
#[cfg(feature = "cluster")]
#[test]
fn what_nobody_can_be_asked_for_is_given_back_when_its_time_is_over() {
    let mut ledger = ledger(1);
    let begun = Instant::now();
    ledger.hear(won("a", 1));
    ledger.hear(granted("b", 2));
    ledger.adrift(begun, &broken());
    ledger.adrift(begun + WITHIN / 2, &broken());
    assert!(told(&mut ledger).is_empty());
    ledger.adrift(begun + WITHIN, &broken());
    let expected = ["a unconfirmed: it broke", "b granted in vain: it broke"];
    assert_eq!(told(&mut ledger), expected);
    ledger.hear(won("c", 3));
    ledger.adrift(begun, &StoreError::lasting("no right"));
    assert_eq!(told(&mut ledger), ["c unconfirmed: no right"]);
}

#[test]
fn a_round_that_fails_is_asked_again_until_its_time_is_over() {
    let mut ledger = ledger(1);
    let begun = Instant::now();
    ledger.hear(won("a", 1));
    let round = begin(&mut ledger, begun).unwrap();
    ledger.hear(won("b", 2));
    let then = begun + WITHIN / 2;
    ledger.failed(then, round.number, &broken());
    assert!(told(&mut ledger).is_empty());
    // With those who came meanwhile, in order of arrival; the younger ones have longer.
    let round = begin(&mut ledger, then).unwrap();
    assert_eq!((keys(&round), round.wait), (vec!["a", "b"], WITHIN));
    ledger.failed(begun + WITHIN, round.number, &broken());
    assert_eq!(told(&mut ledger), ["a unconfirmed: it broke"]);
    let round = begin(&mut ledger, begun + WITHIN).unwrap();
    assert_eq!(round.wait, WITHIN / 2);
    ledger.failed(begun + 2 * WITHIN, round.number, &broken());
    assert_eq!(told(&mut ledger), ["b unconfirmed: it broke"]);
}

#[test]
fn what_asking_again_will_not_mend_is_told_at_once() {
    let mut ledger = ledger(1);
    ledger.hear(won("a", 1));
    ledger.hear(granted("b", 2));
    let round = begin(&mut ledger, Instant::now()).unwrap();
    let never = StoreError::lasting("no right");
    ledger.failed(Instant::now(), round.number, &never);
    let expected = ["a unconfirmed: no right", "b granted in vain: no right"];
    assert_eq!(told(&mut ledger), expected);
}

#[test]
fn the_end_of_its_task_tells_all() {
    let mut ledger = ledger(1);
    ledger.hear(won("a", 1));
    begin(&mut ledger, Instant::now()).unwrap();
    ledger.hear(granted("b", 2));
    ledger.give_up(&broken());
    let expected = ["a unconfirmed: it broke", "b granted in vain: it broke"];
    assert_eq!(told(&mut ledger), expected);
    assert!(!ledger.is_waiting());
}

/// A server that makes grants up does not fill our memory. What it gave in earnest is given back.
#[test]
fn a_flood_of_grants_is_not_kept() {
    let mut ledger = ledger(1);
    for owner in 0..20_000 {
        ledger.hear(granted("k", owner));
    }
    let first = told(&mut ledger);
    assert_eq!(first.len(), 20_000 - 16_384);
    assert!(first.iter().all(|it| it.starts_with("k granted in vain")));
    // They go in one round, and make room for others.
    let round = begin(&mut ledger, Instant::now()).unwrap();
    let ours = vec![true; round.locks.len()];
    ledger.seen(Instant::now(), round.number, &seen(&ours, 1), &here());
    assert_eq!((ours.len(), told(&mut ledger).len()), (16_384, 16_384));
    ledger.hear(granted("k", 1));
    assert!(told(&mut ledger).is_empty() && ledger.is_waiting());
}

/// Counted for ever, a few thousand of them would have every later grant told as in vain.
#[test]
fn whatever_becomes_of_a_grant_makes_room_for_another() {
    let ends: [fn(&mut Ledger, u64); 4] = [
        |ledger, number| ledger.seen(Instant::now(), number, &seen(&[true], 0), &here()),
        |ledger, number| ledger.seen(Instant::now(), number, &seen(&[false], 1), &here()),
        |ledger, _| ledger.give_up(&broken()),
        |ledger, _| ledger.hear(News::Down(broken())),
    ];
    for end in ends {
        let mut ledger = ledger(1);
        for owner in 0..20_000 {
            ledger.hear(granted("k", owner));
            let round = begin(&mut ledger, Instant::now()).expect("there is room");
            end(&mut ledger, round.number);
            told(&mut ledger);
        }
    }
}

#[test]
fn replicas_have_some_time_and_not_a_day() {
    let day = Duration::from_secs(24 * 60 * 60);
    for within in [
        Duration::ZERO,
        Duration::from_micros(999),
        day,
        Duration::MAX,
    ] {
        for least in [0, 1] {
            let error = StoreError::from(Replicas::new(least, within).unwrap_err());
            assert!(!error.is_retryable(), "{error}");
            assert!(error.to_string().contains("min_replicas"), "{error}");
        }
    }
    assert_eq!(Replicas::new(0, WITHIN).unwrap(), None);
    assert!(
        Replicas::new(u32::MAX, Duration::from_millis(1))
            .unwrap()
            .is_some()
    );
}
