//! Several callers of one key with shared leases.

use std::collections::VecDeque;
use std::time::Duration;

use super::harness::{EPOCH, busy, busy_by, ms, rules};
use crate::base::clock::{FOREVER, Moment};
use crate::base::{Mode, OnFinish, StoreError};
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, Owner};
use crate::turnstile::{
    Effect, EndMode, EventCx, Ids, LeaseEnd, LeaseVerdict, Lines, NotGranted, Rules, Verdict,
    Waiter, WaiterId, WaiterVerdict,
};

/// The lines of one key, and somebody who plays their callers and their store.
struct Key {
    lines: Lines<&'static str>,
    now: Moment,
    ids: Ids,
    /// By how many milliseconds the store's clock was set back.
    clock_back: u64,
    sent: VecDeque<Op>,
    told: Vec<(&'static str, Verdict)>,
}

impl Key {
    fn new() -> Self {
        Self {
            lines: Lines::new(true),
            now: ms(1000),
            ids: Ids::new(rules(), 1),
            clock_back: 0,
            sent: VecDeque::new(),
            told: Vec::new(),
        }
    }

    fn feed<R>(
        &mut self,
        event: impl FnOnce(&mut Lines<&'static str>, &mut EventCx<'_, &'static str>) -> R,
    ) -> R {
        let mut effects = VecDeque::new();
        let mut cx = EventCx::new(self.now, &mut self.ids, &mut effects);
        let result = event(&mut self.lines, &mut cx);
        for effect in effects {
            match effect {
                Effect::Send(op) => self.sent.push_back(op),
                Effect::Wake(caller, verdict) => self.told.push((caller, verdict)),
                Effect::AskPolicy(..) => unreachable!("the store has a queue"),
            }
        }
        result
    }

    fn arrive(&mut self, caller: &'static str, mode: Mode) -> WaiterId {
        let waiter = self.waiter(caller);
        self.feed(|lines, cx| lines.arrive(cx, mode, waiter))
    }

    fn arrive_until(&mut self, mode: Mode, until: Moment) -> Op {
        let waiter = Waiter {
            until,
            ..self.waiter("any")
        };
        self.feed(|lines, cx| lines.arrive(cx, mode, waiter));
        self.sent().remove(0)
    }

    fn waiter(&self, caller: &'static str) -> Waiter<&'static str> {
        Waiter {
            caller,
            ttl: ms(30_000),
            renewals: 0,
            adopts: None,
            on_finish: OnFinish::Release,
            is_conditional: false,
            asks_once: false,
            hears_of_others: false,
            until: FOREVER,
            answer_by: self.now + ms(1000),
        }
    }

    fn reply(&mut self, op: &Op, outcome: Outcome) {
        let at = (EPOCH + self.now.as_millis() as u64 - self.clock_back) * 1000;
        let answer = Ok(Answer { at, outcome });
        self.feed(|lines, cx| lines.replied(cx, op, answer));
    }

    fn grant(&mut self, owner: Owner, epoch: u64) {
        self.grant_for(owner, epoch, ms(30_000));
    }

    fn grant_for(&mut self, owner: Owner, epoch: u64, ttl: Duration) {
        let grant = Grant {
            owner,
            ttl,
            epoch,
            at: (EPOCH + self.now.as_millis() as u64 - self.clock_back) * 1000,
        };
        self.feed(|lines, cx| lines.grant_received(cx, grant, None));
    }

    fn wait_until(&mut self, millis: u64) {
        while let Some(next) = self.lines.next_timeout()
            && next <= ms(millis)
        {
            self.now = self.now.max(next);
            self.feed(Lines::tick);
        }
        self.now = ms(millis);
    }

    /// The ops that were sent since the last look.
    fn sent(&mut self) -> Vec<Op> {
        self.sent.drain(..).collect()
    }

    /// So many readers that stand in the queue.
    fn readers(&mut self, names: &[&'static str]) -> Vec<(WaiterId, Owner)> {
        let readers = names.iter().enumerate().map(|(place, name)| {
            let id = self.arrive(name, Mode::Shared);
            let enter = self.sent().remove(0);
            self.reply(&enter, entered(place as u64));
            (id, enter.owner())
        });
        readers.collect()
    }

    fn is_granted(&self, caller: &str) -> bool {
        self.told.iter().any(|(told, verdict)| {
            *told == caller && matches!(verdict, Verdict::Waiter(WaiterVerdict::Granted { .. }))
        })
    }
}

fn entered(score: u64) -> Outcome {
    Outcome::Busy {
        left: Some(ms(30_000)),
        score: Some(score),
        entered: true,
        holder: None,
    }
}

/// Each has a ticket, a grant, a lease and a release of its own.
#[test]
fn m6_each_shared_lease_is_its_own_owner() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b"]);
    let (a, b) = (readers[0], readers[1]);
    assert_ne!(a.1, b.1);
    assert_eq!(a.1.mode, Mode::Shared);
    key.grant(b.1, 6);
    assert!(key.is_granted("b") && !key.is_granted("a"));
    key.grant(a.1, 7);
    assert!(key.is_granted("a"));
    for (id, _) in &readers {
        assert!(key.feed(|lines, cx| lines.feed(cx, *id, |line, cx| line.take(cx, *id))));
    }
    assert_eq!(key.lines.holders().count(), 2);
    key.feed(|lines, cx| lines.feed(cx, a.0, |line, cx| line.finish(cx, a.0, EndMode::Release)));
    assert_eq!(key.sent(), [Op::Release { owner: a.1 }]);
    assert_eq!(key.lines.holders().count(), 1, "nothing is passed on");
    // It is found lost, and the other is not.
    key.wait_until(31_000);
    let lost = |key: &Key, caller| {
        let verdict = key.told.iter().rev().find(|(told, _)| *told == caller);
        matches!(
            verdict,
            Some((_, Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Lost(_)))))
        )
    };
    assert!(lost(&key, "b") && !lost(&key, "a"));
}

/// A thousand waiters of one registry cost the server no more than one.
#[test]
fn m5_only_the_first_of_a_registry_asks_again() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.wait_until(13_500);
    let sent = key.sent();
    assert_eq!(sent.len(), 1, "{sent:?}");
    assert_eq!(sent[0].owner(), readers[0].1);
    key.reply(&sent[0], busy(30_000, 0));
    // Once the first has it, the next asks in its turn.
    key.grant(readers[0].1, 6);
    key.wait_until(26_000);
    let sent = key.sent();
    let asks: Vec<_> = sent
        .iter()
        .filter(|op| matches!(op, Op::Enter { .. }))
        .collect();
    assert_eq!(asks.len(), 1, "{sent:?}");
    assert_eq!(asks[0].owner(), readers[1].1);
}

/// The server's clock was set back, so that a grant to the second looks older than its answer (D2). The first finds its
/// ticket when it asks, and learns nothing of that.
#[test]
fn d2_a_clock_that_was_set_back_makes_any_owner_ask() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.clock_back = 5_000;
    key.grant(readers[1].1, 6);
    assert!(!key.is_granted("b"));
    assert_eq!(key.sent(), []);
    key.wait_until(2500);
    let sent = key.sent();
    let asked: Vec<_> = sent.iter().map(Op::owner).collect();
    assert_eq!(asked, [readers[1].1]);
    key.reply(&sent[0], Outcome::Won { epoch: 7 });
    assert!(key.is_granted("b"));
}

/// A refusal leaves it in doubt: it asks again after a pause, and not when it becomes the first.
#[test]
fn d2_an_owner_that_was_refused_is_in_doubt_as_before() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.clock_back = 5_000;
    key.grant(readers[1].1, 6);
    key.wait_until(2500);
    for until in [4_000, 6_000] {
        let sent = key.sent();
        let asked: Vec<_> = sent.iter().map(Op::owner).collect();
        assert_eq!(asked, [readers[1].1]);
        let refused = OpError::Refused(StoreError::new("busy loading"));
        key.feed(|lines, cx| lines.replied(cx, &sent[0], Err(refused)));
        key.wait_until(until);
    }
    let sent = key.sent();
    // Its ticket had been used up by the grant, which says nothing of the others.
    key.reply(&sent[0], entered(9));
    assert_eq!(key.sent(), []);
}

/// A grant of a short ttl would be over within 1.5 s.
#[test]
fn d2_a_short_grant_that_looks_old_is_asked_for_in_time() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b"]);
    key.clock_back = 5_000;
    key.grant_for(readers[1].1, 6, ms(300));
    key.wait_until(1100);
    let sent = key.sent();
    assert_eq!(
        sent.iter().map(Op::owner).collect::<Vec<_>>(),
        [readers[1].1]
    );
}

/// Once the first is served, the next asks soon: nobody else of this registry would notice that a holder has crashed.
#[test]
fn m5_the_next_of_a_registry_asks_soon() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.grant(readers[0].1, 6);
    assert_eq!(key.sent(), []);
    key.wait_until(2500);
    let asked: Vec<_> = key.sent().iter().map(Op::owner).collect();
    assert_eq!(asked, [readers[1].1]);
}

/// A first that gives up leaves that to the next, too.
#[test]
fn m5_the_next_asks_if_the_first_gives_up() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.feed(|lines, cx| lines.feed(cx, readers[0].0, |line, cx| line.leave(cx, readers[0].0)));
    key.wait_until(3100);
    let sent = key.sent();
    let asks = sent.iter().filter(|op| matches!(op, Op::Enter { .. }));
    assert_eq!(asks.map(Op::owner).collect::<Vec<_>>(), [readers[1].1]);
}

/// A lock that is won by asking is no sign that tickets were lost: one more question shows it.
#[test]
fn m5_a_win_makes_one_other_ask() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.wait_until(13_500);
    let first = key.sent().remove(0);
    key.reply(&first, Outcome::Won { epoch: 6 });
    let mut sent = key.sent();
    assert_eq!(sent.len(), 1);
    let second = sent.remove(0);
    assert_eq!(second.owner(), readers[1].1);
    // A process that released, and died before it told anybody, has granted many.
    key.reply(&second, Outcome::Won { epoch: 7 });
    let asked: Vec<_> = key.sent().iter().map(Op::owner).collect();
    assert_eq!(asked, [readers[2].1]);
}

#[test]
fn m5_a_ticket_that_is_there_ends_the_questions() {
    let mut key = Key::new();
    key.readers(&["a", "b", "c"]);
    key.wait_until(13_500);
    let first = key.sent().remove(0);
    key.reply(&first, Outcome::Won { epoch: 6 });
    let second = key.sent().remove(0);
    key.reply(&second, busy(30_000, 0));
    assert!(key.sent().is_empty());
}

/// A ticket that has waited for long was never asked for again, so its grant is proved by an old answer (D2). The
/// watchdog does not wait for a third of the ttl then, and a fixed lease has the rest of its ttl by a renewal, too (W3).
#[test]
fn d2_a_grant_after_a_long_wait_is_renewed_at_once() {
    for renewals in [u32::MAX, 0] {
        let mut key = Key::new();
        key.readers(&["first"]);
        let mut waiter = key.waiter("second");
        (waiter.ttl, waiter.renewals) = (ms(900), renewals);
        let mode = Mode::Shared;
        let second = key.feed(|lines, cx| lines.arrive(cx, mode, waiter));
        let enter = key.sent().remove(0);
        key.reply(&enter, entered(1));
        while key.now < ms(700_000) {
            key.wait_until(key.now.as_millis() as u64 + 1000);
            for op in key.sent() {
                assert_ne!(op.owner(), enter.owner());
                key.reply(&op, busy(30_000, 0));
            }
        }
        key.grant(enter.owner(), 6);
        assert!(key.is_granted("second"));
        assert!(key.feed(|lines, cx| lines.feed(cx, second, |line, cx| line.take(cx, second))));
        let sent = key.sent();
        assert!(matches!(sent[..], [Op::Renew { .. }, ..]), "{sent:?}");
    }
}

/// The store has lost its data, and nobody was told. Whoever finds its ticket gone makes the others ask.
#[test]
fn m5_a_ticket_that_is_gone_makes_all_ask() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b", "c"]);
    key.arrive("writer", Mode::Exclusive);
    let enter = key.sent().remove(0);
    key.reply(&enter, entered(3));
    key.wait_until(13_500);
    let again = key.sent();
    let first = again.iter().find(|op| op.owner() == readers[0].1).unwrap();
    let writers = again.iter().find(|op| op.owner() == enter.owner()).unwrap();
    key.reply(writers, busy(30_000, 3));
    key.reply(first, entered(9));
    let asked: Vec<_> = key.sent().iter().map(Op::owner).collect();
    assert!(asked.contains(&readers[1].1) && asked.contains(&readers[2].1));
    assert!(asked.contains(&enter.owner()));
    // Their answers make nobody ask again.
    for owner in [readers[1].1, readers[2].1] {
        let (ttl, score) = (ms(30_000), Some(1));
        key.reply(&Op::Enter { owner, ttl, score }, entered(10));
    }
    let more: Vec<_> = key.sent().iter().map(Op::owner).collect();
    assert!(!more.contains(&readers[0].1), "{more:?}");
}

/// So does a writer that finds its ticket gone. It does not ask once more itself.
#[test]
fn m5_a_writer_whose_ticket_is_gone_makes_all_readers_ask() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b"]);
    key.arrive("writer", Mode::Exclusive);
    let enter = key.sent().remove(0);
    key.reply(&enter, entered(2));
    key.wait_until(13_500);
    let asked = key.sent();
    assert_eq!(asked.len(), 2, "{asked:?}");
    for again in &asked {
        if again.owner() != enter.owner() {
            key.reply(again, busy(30_000, 0));
        }
    }
    for again in &asked {
        if again.owner() == enter.owner() {
            key.reply(again, entered(9));
        }
    }
    let asked: Vec<_> = key.sent().iter().map(Op::owner).collect();
    assert_eq!(asked, [readers[0].1, readers[1].1]);
}

/// O4: the node of a cluster may have ended a subscription on a connection that stands. Nobody was told that it was down,
/// and a grant may have been missed for each ticket, not just for that of the first.
#[test]
fn o4_every_ticket_of_a_registry_is_entered_again() {
    for is_down in [true, false] {
        let mut key = Key::new();
        let readers = key.readers(&["a", "b", "c"]);
        if is_down {
            let error = crate::base::StoreError::new("the connection is gone");
            key.feed(|lines, cx| lines.feed_all(cx, |line, cx| line.down(cx, &error)));
        }
        key.feed(|lines, cx| lines.feed_all(cx, |line, cx| line.up_renew(cx, false)));
        key.feed(|lines, cx| lines.feed_all(cx, |line, cx| line.up(cx, true)));
        let asked: Vec<_> = key.sent().iter().map(Op::owner).collect();
        assert_eq!(asked, [readers[0].1, readers[1].1, readers[2].1]);
    }
}

/// A grant for a shared owner that nobody knows is given back, in its mode.
#[test]
fn o1_a_shared_grant_for_nobody_is_released() {
    let mut key = Key::new();
    let (limit, weight) = (4, 2);
    let mode = Mode::Permits { limit, weight };
    let owner = Owner { sequence: 99, mode };
    key.grant(owner, 5);
    let sent = key.sent();
    assert_eq!(sent, [Op::Release { owner }]);
    key.reply(&sent[0], Outcome::Gone { held: true });
    assert!(key.lines.is_idle());
}

/// A reader has left, its withdrawal is answered, and only then comes the grant that was on its way to it. It is for nobody,
/// though another reader of this registry still waits.
#[test]
fn o1_a_grant_for_a_line_that_is_over_is_released() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b"]);
    let (a, owner) = readers[0];
    key.feed(|lines, cx| lines.feed(cx, a, |line, cx| line.leave(cx, a)));
    let withdraw = key.sent().remove(0);
    assert!(matches!(withdraw, Op::Withdraw { owner: of, .. } if of == owner));
    key.reply(&withdraw, Outcome::Gone { held: true });
    assert_eq!(key.sent(), []);
    key.grant(owner, 6);
    assert_eq!(key.sent(), [Op::Release { owner }]);
    assert!(!key.is_granted("b"));
}

/// Whoever serves the rest of a queue awaits no answer.
#[test]
fn m4_the_answer_to_a_serve_is_nobodys() {
    let mut key = Key::new();
    let readers = key.readers(&["a"]);
    let owner = readers[0].1;
    key.reply(&Op::Serve { owner }, Outcome::Gone { held: false });
    key.feed(|lines, cx| lines.op_dropped(cx, &Op::Serve { owner }));
    assert_eq!(key.sent(), []);
    key.grant(owner, 6);
    assert!(key.is_granted("a"));
}

/// Readers and writers count for one limit.
#[test]
fn w1_shared_waiters_fill_the_queue() {
    let mut key = Key::new();
    for _ in 0..100 {
        key.arrive("a", Mode::Shared);
    }
    for mode in [Mode::Shared, Mode::Exclusive] {
        key.arrive("late", mode);
        let (caller, verdict) = key.told.pop().unwrap();
        assert_eq!(caller, "late");
        assert!(matches!(
            verdict,
            Verdict::Waiter(WaiterVerdict::Refused(NotGranted::QueueFull))
        ));
    }
}

/// Whoever was refused, has given up or has waited for long enough has no place any more, though others of its kind wait.
#[test]
fn w1_shared_waiters_that_have_gone_make_room() {
    let mut key = Key::new();
    key.readers(&["stays"]);
    for _ in 0..100 {
        let asks = Waiter {
            asks_once: true,
            ..key.waiter("refused")
        };
        key.feed(|lines, cx| lines.arrive(cx, Mode::Shared, asks));
        let attempt = key.sent().remove(0);
        key.reply(&attempt, busy_by("other:1", Some(ms(30_000)), None));
        let [(gone, _)] = key.readers(&["gone"])[..] else {
            unreachable!("one has come")
        };
        key.feed(|lines, cx| lines.feed(cx, gone, |line, cx| line.leave(cx, gone)));
        for op in key.sent() {
            key.reply(&op, Outcome::Gone { held: false });
        }
        let until = key.now + ms(1);
        let enter = key.arrive_until(Mode::Shared, until);
        key.reply(&enter, entered(1));
        key.wait_until(until.as_millis() as u64);
        for op in key.sent() {
            key.reply(&op, Outcome::Gone { held: false });
        }
    }
    for _ in 1..100 {
        key.arrive("fits", Mode::Shared);
    }
    let is_full = |(_, verdict): &(&str, Verdict)| {
        matches!(
            verdict,
            Verdict::Waiter(WaiterVerdict::Refused(NotGranted::QueueFull))
        )
    };
    assert!(!key.told.iter().any(is_full));
    key.arrive("late", Mode::Shared);
    assert!(key.told.last().is_some_and(is_full));
}

/// Also while the store is away, when none of them has asked it.
#[test]
fn w1_shared_waiters_fill_the_queue_while_the_store_is_away() {
    let mut key = Key::new();
    let error = crate::base::StoreError::new("the connection is gone");
    key.arrive("first", Mode::Exclusive);
    key.feed(|lines, cx| lines.feed_all(cx, |line, cx| line.down(cx, &error)));
    for _ in 1..100 {
        key.arrive("a", Mode::Shared);
    }
    assert_eq!(key.told.len(), 0);
    for mode in [Mode::Shared, Mode::Exclusive] {
        key.arrive("late", mode);
        let (_, verdict) = key.told.pop().unwrap();
        assert!(matches!(
            verdict,
            Verdict::Waiter(WaiterVerdict::Refused(NotGranted::QueueFull))
        ));
    }
}

/// The store is known to be away when the first caller of a key comes. It hears at once that it waits. It is not kept for a
/// first answer: at the end of its wait it is told why the store is away.
#[test]
fn w1_a_key_of_a_store_that_is_believed_to_be_away_is_not_waited_for_longer() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut key = Key::new();
        let error = crate::base::StoreError::new("the connection is gone");
        let expected = error.to_string();
        key.feed(|lines, _| lines.assume_down(error));
        let waiter = Waiter {
            until: ms(1100),
            hears_of_others: true,
            ..key.waiter("a")
        };
        key.feed(|lines, cx| lines.arrive(cx, mode, waiter));
        let told = key.told.pop().map(|(_, verdict)| verdict);
        assert!(
            matches!(told, Some(Verdict::Waiter(WaiterVerdict::Waits))),
            "{told:?}"
        );
        key.wait_until(1100);
        match key.told.pop() {
            Some((_, Verdict::Waiter(WaiterVerdict::Refused(NotGranted::Failed(error))))) => {
                assert_eq!(error.to_string(), expected);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// For so long must its grants arrive. A holder expects none.
#[test]
fn a_key_may_have_a_ticket_while_anybody_waits_for_it() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mut key = Key::new();
        assert!(!key.lines.may_have_ticket());
        let a = key.arrive("a", mode);
        assert!(key.lines.may_have_ticket());
        let enter = key.sent().remove(0);
        key.reply(&enter, entered(1));
        assert!(key.lines.may_have_ticket());
        key.grant(enter.owner(), 6);
        assert!(key.feed(|lines, cx| lines.feed(cx, a, |line, cx| line.take(cx, a))));
        assert!(!key.lines.may_have_ticket());
        key.arrive("b", mode);
        assert!(key.lines.may_have_ticket());
    }
}

/// Each attempt that no replica confirms has an owner of its own. Only the last is kept in mind.
#[test]
fn o1_a_line_forgets_its_retired_owners() {
    let mut key = Key::new();
    key.arrive("a", Mode::Shared);
    let mut first = None;
    for _ in 0..20 {
        let sent = key.sent();
        for op in sent {
            let answer = match op {
                Op::Enter { .. } => {
                    first.get_or_insert(op.owner());
                    Err(OpError::Unconfirmed(crate::base::StoreError::new(
                        "no replica",
                    )))
                }
                _ => Ok(Answer {
                    at: 1,
                    outcome: Outcome::Gone { held: true },
                }),
            };
            key.feed(|lines, cx| lines.replied(cx, &op, answer));
        }
        key.wait_until(key.now.as_millis() as u64 + 2000);
    }
    // A grant for the first of them is for nobody, and is given back.
    key.sent();
    key.grant(first.unwrap(), 6);
    let sent = key.sent();
    assert!(!key.is_granted("a"));
    assert!(
        sent.contains(&Op::Release {
            owner: first.unwrap()
        }),
        "{sent:?}"
    );
    assert!(
        key.lines.known_owners() <= 3,
        "{}",
        key.lines.known_owners()
    );
}

/// Nothing stays of a line whose caller has left.
#[test]
fn o6_lines_are_forgotten() {
    let mut key = Key::new();
    let readers = key.readers(&["a", "b"]);
    for (id, _) in &readers {
        key.feed(|lines, cx| lines.feed(cx, *id, |line, cx| line.leave(cx, *id)));
    }
    key.wait_until(2000);
    let sent = key.sent();
    assert_eq!(sent.len(), 2);
    for op in &sent {
        assert!(matches!(op, Op::Withdraw { .. }));
        key.reply(op, Outcome::Gone { held: false });
    }
    assert!(key.lines.is_idle());
    assert_eq!(key.lines.next_timeout(), None);
}

/// The waits of very many end while the process stands still. Each of them leaves the front to the next, whose wait is
/// over as well: each called the next one, until the stack was full.
#[test]
fn m5_very_many_waits_that_end_at_once_need_no_more_stack_than_one() {
    const WAITERS: u64 = 100_000;
    fn waits_end(mode: Mode, is_down: bool) {
        let rules = Rules {
            max_waiters: usize::MAX,
            ..rules()
        };
        let mut key = Key {
            ids: Ids::new(rules, 1),
            ..Key::new()
        };
        for place in 0..WAITERS {
            let enter = key.arrive_until(mode, ms(2000));
            key.reply(&enter, entered(place));
        }
        if is_down {
            let broke = crate::base::StoreError::new("it broke");
            key.feed(|lines, cx| lines.feed_all(cx, |line, cx| line.down(cx, &broke)));
        }
        key.now = ms(3000);
        key.feed(Lines::tick);
        assert_eq!(key.told.len() as u64, WAITERS);
        let withdrawn = key.sent().len() as u64;
        assert_eq!(withdrawn, if is_down { 0 } else { WAITERS });
    }
    let permit = Mode::Permits {
        limit: 8,
        weight: 1,
    };
    for (mode, is_down) in [(permit, true), (Mode::Shared, false)] {
        let thread = std::thread::Builder::new().stack_size(256 * 1024);
        let thread = thread.spawn(move || waits_end(mode, is_down)).unwrap();
        thread.join().unwrap();
    }
}
