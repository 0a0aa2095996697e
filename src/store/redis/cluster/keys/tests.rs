use super::*;
use crate::StoreError;

const TTL: Duration = Duration::from_secs(30);

fn enter(owner: u64) -> Op {
    Op::Enter {
        owner: Owner(owner),
        ttl: TTL,
        score: None,
    }
}

fn answer(outcome: Outcome) -> Result<Answer, OpError> {
    Ok(Answer { at: 1, outcome })
}

fn grant(owner: u64, at: ServerTime) -> Grant {
    Grant {
        owner: Owner(owner),
        ttl: TTL,
        draw: 1,
        at,
    }
}

fn busy() -> Result<Answer, OpError> {
    answer(Outcome::Busy {
        left: None,
        score: Some(1),
    })
}

/// A key whose grants are heard, with an enter under way.
fn entering(now: Instant) -> (Keys, Arc<str>) {
    let (mut keys, key) = (Keys::default(), Arc::from("k"));
    assert!(!keys.enters(&key, now), "nobody listens yet");
    keys.get(&key).unwrap().hearing = Hearing::Yes;
    (keys, key)
}

#[test]
fn a_key_is_left_when_its_last_ticket_has_been_gone_for_a_while() {
    let now = Instant::now();
    for ended in 0..3 {
        let (mut keys, key) = entering(now);
        assert!(!keys.answered(&key, &enter(1), &busy(), now));
        assert_eq!(keys.deadline(), None, "a ticket stands");
        let held = Outcome::Gone { held: false };
        let ended_at = now + LINGER;
        match ended {
            0 => keys.granted(&key, &grant(1, 1), ended_at),
            1 => {
                let op = Op::Withdraw { owner: Owner(1) };
                keys.answered(&key, &op, &answer(held), ended_at);
            }
            _ => {
                assert!(keys.enters(&key, ended_at));
                keys.answered(&key, &enter(1), &answer(Outcome::Won { draw: 1 }), ended_at);
            }
        }
        assert!(keys.next_to_leave(ended_at + LINGER / 2).is_none());
        assert!(keys.next_to_leave(ended_at + LINGER).is_some());
        assert!(keys.next_to_leave(ended_at + LINGER).is_none(), "once");
        assert!(keys.get(&key).is_none(), "nothing is kept of it");
        assert_eq!(keys.deadline(), None);
    }
}

/// The grant came by one connection before the answer by the other, which is told only now, and tells of no ticket
/// that still stands. Whoever holds then yields to itself: nobody listens for the old one, for ever.
#[test]
fn a_grant_that_is_heard_before_its_enters_answer_took_the_ticket() {
    let now = Instant::now();
    for again in [false, true] {
        let (mut keys, key) = entering(now);
        if again {
            // One that stands, and asks once more.
            keys.answered(&key, &enter(1), &busy(), now);
            assert!(keys.enters(&key, now));
        }
        keys.granted(&key, &grant(1, 1), now);
        assert!(!keys.answered(&key, &enter(1), &busy(), now));
        assert!(!keys.get(&key).unwrap().is_needed());

        // An answer that is the newer one tells of a ticket that does.
        assert!(keys.enters(&key, now));
        keys.granted(&key, &grant(1, 0), now);
        keys.answered(&key, &enter(1), &busy(), now);
        assert!(keys.get(&key).unwrap().is_waited_for());

        // Nor is it another's.
        assert!(keys.enters(&key, now));
        keys.granted(&key, &grant(7, 1), now);
        keys.answered(&key, &enter(1), &busy(), now);
        assert!(keys.get(&key).unwrap().is_waited_for());
        let yields = Op::Yield {
            old: Owner(1),
            new: Owner(2),
            ttl: TTL,
        };
        assert!(keys.enters(&key, now));
        keys.answered(&key, &yields, &answer(Outcome::Won { draw: 2 }), now);
        assert!(!keys.get(&key).unwrap().is_needed());
    }
}

#[test]
fn another_owners_end_and_one_that_is_not_known_leave_the_ticket() {
    let now = Instant::now();
    let (mut keys, key) = entering(now);
    let unknown = Err(OpError::Unknown(StoreError::new("gone")));
    keys.answered(&key, &enter(2), &unknown, now);
    keys.granted(&key, &grant(1, 1), now);
    let op = Op::Withdraw { owner: Owner(2) };
    keys.answered(
        &key,
        &op,
        &Err(OpError::Unknown(StoreError::new("gone"))),
        now,
    );
    assert_eq!(keys.deadline(), None);
    assert!(keys.get(&key).unwrap().is_needed());
}

#[test]
fn a_ticket_that_nobody_hears_for_is_told_of() {
    let now = Instant::now();
    let (mut keys, key) = entering(now);
    // Taken away while the enter was under way.
    assert!(!keys.ended(&key), "no ticket yet");
    assert!(keys.answered(&key, &enter(1), &busy(), now));
    keys.get(&key).unwrap().hearing = Hearing::Yes;
    assert!(keys.ended(&key));
}

fn node(name: &str) -> Address {
    name.into()
}

/// A key that is listened for at `a`, and was needed until now.
fn listened(now: Instant) -> (Keys, Arc<str>) {
    let (mut keys, key) = (Keys::default(), Arc::from("k"));
    keys.enters(&key, now);
    keys.listened_at(&key, &node("a"), now).unwrap().hearing = Hearing::Yes;
    keys.answered(&key, &enter(1), &answer(Outcome::Won { draw: 1 }), now);
    (keys, key)
}

/// It was kept for ever, and looked at once a second.
#[test]
fn a_key_that_nobody_needs_goes_with_its_connection() {
    let now = Instant::now();
    let (mut keys, key) = listened(now);
    assert!(keys.deafen(&node("a")).is_empty());
    assert_eq!(keys.next_to_leave(now + LINGER), None);
    assert!(keys.get(&key).is_none());
    assert_eq!(keys.deadline(), None);
}

/// It may have lost the slot, and will say so; or not.
#[test]
fn the_node_that_a_key_is_not_listened_for_at_any_more_is_left_after_a_while() {
    let now = Instant::now();
    let (a, b) = (node("a"), node("b"));
    let left_at_a = || Some((Arc::from("k"), node("a")));
    for home in [None, Some(&b)] {
        let (mut keys, _) = listened(now);
        let (waiting, are_needed) = keys.move_to(|_| home, now);
        assert!(waiting.is_empty() && !are_needed);
        assert_eq!(keys.next_to_leave(now + LINGER / 2), None);
        assert_eq!(keys.next_to_leave(now + LINGER), left_at_a());
        assert_eq!(keys.next_to_leave(now + LINGER), None);
        assert_eq!(keys.deadline(), None);
    }

    // Who goes on at another.
    let (mut keys, key) = listened(now);
    keys.enters(&key, now);
    let listened_at_b = keys.listened_at(&key, &b, now).unwrap();
    assert_eq!(listened_at_b.hearing, Hearing::Not);
    listened_at_b.hearing = Hearing::Yes;
    assert_eq!(keys.next_to_leave(now + LINGER), left_at_a());
    assert_eq!(keys.next_to_leave(now + LINGER), None, "it is needed there");

    // Who is back by then does not leave.
    let (mut keys, key) = listened(now);
    keys.move_to(|_| None, now);
    keys.enters(&key, now);
    let again = keys.listened_at(&key, &a, now).unwrap();
    assert_eq!(again.hearing, Hearing::Not, "it asks once more");
    again.hearing = Hearing::Soon;
    assert_eq!(keys.next_to_leave(now + LINGER), None);
    // But once its wish is over as well it does.
    keys.answered(&key, &enter(1), &busy(), now);
    keys.move_to(|_| Some(&b), now + LINGER);
    assert_eq!(keys.next_to_leave(now + 2 * LINGER), left_at_a());
}

#[test]
fn a_key_that_is_needed_again_lingers_anew() {
    let now = Instant::now();
    let (mut keys, key) = entering(now);
    let won = || answer(Outcome::Won { draw: 1 });
    keys.answered(&key, &enter(1), &won(), now);
    let later = now + LINGER * 3 / 4;
    assert!(keys.enters(&key, later));
    assert!(keys.next_to_leave(now + LINGER).is_none(), "it is needed");
    keys.answered(&key, &enter(1), &won(), later);
    assert!(keys.next_to_leave(later + LINGER / 2).is_none());
    assert!(keys.next_to_leave(later + 2 * LINGER).is_some());
}
