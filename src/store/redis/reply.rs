//! What the reply to a script call says about each of its ops.

use std::borrow::Borrow;
use std::time::Duration;

use redis::Value;

use super::call::{Job, Wish, letter};
use super::fault::Refusal;
use crate::store::contract::{Op, Outcome, ServerTime, Sight};

/// What a reply says about one job.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict {
    Done(Outcome),
    Seen(Sight),
    /// The script ran too late for it to be of use (O5).
    Stale,
    Refused(Refusal),
}

/// A reply, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Reply {
    /// The server's time; a call of releases alone does not ask for it.
    pub(super) at: Option<ServerTime>,
    pub(super) verdicts: Vec<Verdict>,
}

/// Takes the reply to call `number` apart. `None` if it is not the reply to this call about these
/// jobs: then whatever follows on its connection may be another's, too (O4).
pub(super) fn read_reply(number: u64, jobs: &[impl Borrow<Job>], reply: Value) -> Option<Reply> {
    if let Value::BulkString(bytes) = &reply {
        return read_plain(number, jobs, bytes);
    }
    let (at, answers) = read_head(number, reply)?;
    if answers.len() != jobs.len() {
        return None;
    }
    let verdicts = jobs
        .iter()
        .zip(answers)
        .map(|(job, answer)| read_verdict(&job.borrow().wish, answer))
        .collect::<Option<_>>()?;
    let at = Some(at);
    Some(Reply { at, verdicts })
}

/// The short reply of `batch.lua`: everything went as it mostly does.
fn read_plain(number: u64, jobs: &[impl Borrow<Job>], reply: &[u8]) -> Option<Reply> {
    let mut words = std::str::from_utf8(reply).ok()?.split(' ');
    let echo = words.next()?;
    let digits = echo.len().checked_sub(jobs.len())?;
    let (echo, letters) = echo.split_at_checked(digits)?;
    let ops = jobs.iter().map(|job| match &job.borrow().wish {
        Wish::Op { op, .. } => Some(op),
        Wish::Look(_) => None,
    });
    let letters = letters.bytes().map(Some);
    if echo.parse() != Ok(number) || !letters.eq(ops.clone().map(|op| letter(op?))) {
        return None;
    }
    let at = match words.next() {
        None => None,
        Some(at) => {
            let at: ServerTime = at.parse().ok()?;
            // The draws go from there on.
            let last = at.checked_add(u64::try_from(jobs.len()).ok()?)?;
            if !is_draw(last) {
                return None;
            }
            Some(at)
        }
    };
    if let Some(left) = words.next() {
        // A lone op found the lock another's, and stands in the queue from that time on.
        let (score, mut ops) = (at?, ops);
        let (Some(Some(Op::Enter { .. } | Op::Yield { .. })), None) = (ops.next(), ops.next())
        else {
            return None;
        };
        let left = match left {
            "-1" => None,
            left => Some(Duration::from_millis(left.parse().ok()?)),
        };
        let outcome = Outcome::Busy {
            left,
            score: Some(score),
        };
        let verdicts = vec![Verdict::Done(outcome)];
        return words.next().is_none().then_some(Reply { at, verdicts });
    }
    let mut draws = at.into_iter().flat_map(|at| at..);
    let verdicts = ops
        .map(|op| match op? {
            Op::Yield { .. } if jobs.len() > 1 => None,
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Yield { .. } => {
                Some(Outcome::Won {
                    draw: draws.next()?,
                })
            }
            Op::Release { .. } => Some(Outcome::Gone { held: true }),
            _ => None,
        })
        .map(|outcome| outcome.map(Verdict::Done))
        .collect::<Option<_>>()?;
    if at.is_some() && draws.next() == at {
        // Told for no win.
        return None;
    }
    Some(Reply { at, verdicts })
}

/// The server's time and the answers, if the reply names this call.
pub(super) fn read_head(number: u64, reply: Value) -> Option<(ServerTime, Vec<Value>)> {
    let Value::Array(mut values) = reply else {
        return None;
    };
    let [Value::Int(echo), Value::Int(at), ..] = values[..] else {
        return None;
    };
    if u64::try_from(echo) != Ok(number) {
        return None;
    }
    values.drain(..2);
    Some((u64::try_from(at).ok()?, values))
}

/// Why the one answer of a call like the probe's is not what was hoped for.
pub(super) fn read_error(answer: &Value) -> Option<Refusal> {
    match fields(answer)? {
        ("error", [message]) => Some(Refusal::parse(text(message)?)),
        _ => None,
    }
}

fn read_verdict(wish: &Wish, answer: Value) -> Option<Verdict> {
    if let Some(refusal) = read_error(&answer) {
        return Some(Verdict::Refused(refusal));
    }
    if let (Value::Int(number), Wish::Op { op, .. }) = (&answer, wish) {
        // In short, what is most common.
        return match op {
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } => {
                let draw = read_draw(&answer)?;
                Some(Verdict::Done(Outcome::Won { draw }))
            }
            Op::Release { .. } if *number == 1 => Some(Verdict::Done(Outcome::Gone { held: true })),
            _ => None,
        };
    }
    let (tag, values) = fields(&answer)?;
    let op = match wish {
        Wish::Op { op, .. } => op,
        Wish::Look(_) => {
            return match (tag, values) {
                ("sight", [owner, left, tickets]) => Some(Verdict::Seen(Sight {
                    owner: match owner {
                        Value::Nil => None,
                        Value::BulkString(bytes) => {
                            Some(String::from_utf8_lossy(bytes).into_owned())
                        }
                        _ => return None,
                    },
                    left: read_left(left)?,
                    tickets: int(tickets)?,
                })),
                _ => None,
            };
        }
    };
    let outcome = match (op, tag, values) {
        (
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Adopt { .. },
            "stale",
            [],
        ) => {
            return Some(Verdict::Stale);
        }
        (
            Op::Attempt { .. }
            | Op::Listen { .. }
            | Op::Enter { .. }
            | Op::Yield { .. }
            | Op::Adopt { .. },
            "won",
            [draw],
        ) => Outcome::Won {
            draw: read_draw(draw)?,
        },
        (
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Yield { .. },
            "busy",
            [left, score],
        ) => Outcome::Busy {
            left: read_left(left)?,
            score: match score {
                Value::Nil => None,
                score => Some(int(score)?),
            },
        },
        (Op::Yield { .. } | Op::Adopt { .. }, "not-old", []) => Outcome::NotOld,
        (Op::Release { .. } | Op::Withdraw { .. }, "gone", [held]) => Outcome::Gone {
            held: int(held)? == 1,
        },
        (Op::Renew { .. }, "renewed", []) => Outcome::Renewed,
        // Servers tell whole seconds, and take the whole seconds of two times from each other: one that
        // says 1 may be up for a moment.
        (Op::Raise { .. }, "raised", [Value::Int(age)]) => Outcome::Raised {
            age: u64::try_from(*age)
                .ok()
                .map(|age| Duration::from_secs(age.saturating_sub(1))),
        },
        (Op::Renew { .. } | Op::Raise { .. }, "lost", []) => Outcome::Lost,
        _ => return None,
    };
    Some(Verdict::Done(outcome))
}

/// An answer's first word and the rest.
fn fields(answer: &Value) -> Option<(&str, &[Value])> {
    let Value::Array(values) = answer else {
        return None;
    };
    let (tag, rest) = values.split_first()?;
    Some((text(tag)?, rest))
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

fn int(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// Whether tokens made of it fit an i64, as all do for some thousand years (F2). A greater one would
/// make the tokens of a tenure, and of all that follow, the same.
pub(super) fn is_draw(number: u64) -> bool {
    i64::try_from(number).is_ok_and(|number| number <= i64::MAX / 64)
}

fn read_draw(value: &Value) -> Option<u64> {
    int(value).filter(|draw| is_draw(*draw))
}

/// Milliseconds left; PTTL's negative numbers mean that there is no end, or no lock.
fn read_left(value: &Value) -> Option<Option<Duration>> {
    match value {
        Value::Int(left) => Some(u64::try_from(*left).ok().map(Duration::from_millis)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use futures::channel::oneshot;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;
    use crate::store::contract::Owner;

    const TTL: Duration = Duration::from_secs(30);

    fn job(op: Op) -> Job {
        Job::new("k", op)
    }

    /// A server that was started at 10.9 s and asked at 11.1 says that it has been up for 1 s: taken at its word it
    /// was let into the vote up to a second before the leases were over that it had forgotten.
    #[test]
    fn an_age_in_whole_seconds_is_not_believed_to_the_last() {
        let raise = job(Op::Raise {
            owner: Owner(1),
            draw: 5,
            age: true,
        });
        let age = |told: i64| {
            let answer = Value::Array(vec![
                Value::BulkString(b"raised".to_vec()),
                Value::Int(told),
            ]);
            match read_verdict(&raise.wish, answer) {
                Some(Verdict::Done(Outcome::Raised { age })) => age,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(age(1), Some(Duration::ZERO));
        assert_eq!(age(31), Some(Duration::from_secs(30)));
        assert_eq!(age(0), Some(Duration::ZERO));
        assert_eq!(age(-1), None, "no right to ask");
    }

    #[test]
    fn an_answer_that_does_not_fit_its_op_is_none() {
        let reply = |tag: &str, rest: &[i64]| {
            let mut answer = vec![Value::BulkString(tag.into())];
            answer.extend(rest.iter().map(|&number| Value::Int(number)));
            Value::Array(vec![Value::Int(5), Value::Int(9), Value::Array(answer)])
        };
        let release = [job(Op::Release { owner: Owner(1) })];
        let fits = read_reply(5, &release, reply("gone", &[1])).unwrap();
        let held = Outcome::Gone { held: true };
        assert_eq!(
            (fits.at, fits.verdicts),
            (Some(9), vec![Verdict::Done(held)])
        );
        for (number, wrong) in [
            (6, reply("gone", &[1])),
            (5, reply("gone", &[])),
            (5, reply("gone", &[-1])),
            (5, reply("won", &[1])),
            (5, reply("stale", &[])),
            (5, Value::Array(vec![Value::Int(5), Value::Int(9)])),
            (5, Value::Array(vec![Value::Int(5)])),
            (5, Value::Nil),
        ] {
            assert_eq!(
                read_reply(number, &release, wrong.clone()),
                None,
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn a_plain_reply_that_does_not_fit_its_call_is_none() {
        let text = |text: &str| Value::BulkString(text.into());
        let owner = Owner(1);
        let take = || job(Op::Attempt { owner, ttl: TTL });
        let release = || job(Op::Release { owner });

        let freed = read_reply(5, &[release(), release()], text("5RR")).unwrap();
        let held = || Verdict::Done(Outcome::Gone { held: true });
        assert_eq!((freed.at, freed.verdicts), (None, vec![held(), held()]));

        let mixed = read_reply(5, &[take(), release(), take()], text("5ARA 42")).unwrap();
        let won = |draw| Verdict::Done(Outcome::Won { draw });
        assert_eq!(mixed.at, Some(42));
        assert_eq!(mixed.verdicts, [won(42), held(), won(43)]);

        for wrong in [
            "5", "5A", "6A 1", "A 1", "A", "5A 1 2", "5A 1 -1", "5A x", "5A -1", "5E 1", "5AA 1",
            "5R 1", "", " ",
        ] {
            assert_eq!(read_reply(5, &[take()], text(wrong)), None, "{wrong:?}");
        }
        for wrong in ["6R", "5R 1", "5R ", "5R 1 2", "5", "5A", "", "x"] {
            assert_eq!(read_reply(5, &[release()], text(wrong)), None, "{wrong:?}");
        }
        let withdraw = job(Op::Withdraw { owner });
        let r#yield = job(Op::Yield {
            old: owner,
            new: Owner(2),
            ttl: TTL,
        });
        let renew = job(Op::Renew { owner, ttl: TTL });
        for other in [withdraw, r#yield, renew] {
            let jobs = [other, release(), take()];
            for letter in ["W", "Y", "V", ""] {
                for (jobs, more) in [(&jobs[..2], "R"), (&jobs, "RA 1")] {
                    let answer = format!("5{letter}{more}");
                    assert_eq!(read_reply(5, jobs, text(&answer)), None, "{jobs:?}");
                }
            }
        }
    }

    #[test]
    fn a_plain_reply_to_one_that_waits_says_where_it_stands() {
        let text = |text: &str| Value::BulkString(text.into());
        let owner = Owner(1);
        let enter = || {
            job(Op::Enter {
                owner,
                ttl: TTL,
                score: None,
            })
        };
        let r#yield = || {
            job(Op::Yield {
                old: owner,
                new: Owner(2),
                ttl: TTL,
            })
        };
        let read = |job, told: &str| read_reply(5, &[job], text(told));
        let busy = |left: Option<u64>| {
            let outcome = Outcome::Busy {
                left: left.map(Duration::from_millis),
                score: Some(42),
            };
            Some(Reply {
                at: Some(42),
                verdicts: vec![Verdict::Done(outcome)],
            })
        };
        assert_eq!(read(enter(), "5E 42 29999"), busy(Some(29_999)));
        assert_eq!(read(r#yield(), "5Y 42 30000"), busy(Some(30_000)));
        assert_eq!(read(enter(), "5E 42 -1"), busy(None), "no end");
        assert_eq!(read(enter(), "5E 42 0"), busy(Some(0)));
        let won = Reply {
            at: Some(42),
            verdicts: vec![Verdict::Done(Outcome::Won { draw: 42 })],
        };
        assert_eq!(read(r#yield(), "5Y 42"), Some(won));

        for rest in [
            " 42 -2", " 42 x", " 42 ", " 42 1 1", "  1", " x 1", " -1 1", "", " ",
        ] {
            assert_eq!(read(enter(), &format!("5E{rest}")), None, "{rest:?}");
            assert_eq!(read(r#yield(), &format!("5Y{rest}")), None, "{rest:?}");
        }
        // Neither stands in a queue.
        let listen = job(Op::Listen { owner, ttl: TTL });
        assert_eq!(read(listen, "5E 42 1"), None);
        let raise = job(Op::Raise {
            owner,
            draw: 1,
            age: true,
        });
        assert_eq!(read(raise, "5V 42 1"), None);
        // It is told of none but a lone op.
        for told in ["5EE 42 1", "5EY 42 1", "5EY 42"] {
            let second = if told.contains("EE") {
                enter()
            } else {
                r#yield()
            };
            assert_eq!(read_reply(5, &[enter(), second], text(told)), None);
        }
    }

    #[test]
    fn a_short_answer_that_does_not_fit_its_op_is_none() {
        let reply = |short| Value::Array(vec![Value::Int(5), Value::Int(9), Value::Int(short)]);
        let owner = Owner(1);
        let read = |op, short| {
            let reply = read_reply(5, &[job(op)], reply(short))?;
            reply.verdicts.into_iter().next()
        };
        let won = Verdict::Done(Outcome::Won { draw: 7 });
        let held = Verdict::Done(Outcome::Gone { held: true });
        assert_eq!(read(Op::Attempt { owner, ttl: TTL }, 7), Some(won));
        assert_eq!(read(Op::Attempt { owner, ttl: TTL }, -1), None);
        assert_eq!(read(Op::Release { owner }, 1), Some(held));
        assert_eq!(read(Op::Release { owner }, 0), None);
        assert_eq!(read(Op::Withdraw { owner }, 1), None);
        assert_eq!(read(Op::Renew { owner, ttl: TTL }, 1), None);
    }

    /// F2: tokens fit an i64, and those of a tenure are different.
    #[test]
    fn f2_a_draw_whose_tokens_do_not_fit_is_none() {
        let most = i64::MAX / 64;
        for (draw, fits) in [
            (most, true),
            (most + 1, false),
            (i64::MAX, false),
            (-1, false),
        ] {
            let attempt = Op::Attempt {
                owner: Owner(1),
                ttl: TTL,
            };
            let won = Value::Array(vec![Value::BulkString(b"won".to_vec()), Value::Int(draw)]);
            for answer in [won, Value::Int(draw)] {
                let reply = Value::Array(vec![Value::Int(5), Value::Int(7), answer]);
                let read = read_reply(5, &[job(attempt.clone())], reply);
                assert_eq!(read.is_some(), fits, "{draw}");
            }
        }
        for (at, fits) in [(most - 2, true), (most - 1, false), (i64::MAX, false)] {
            let text = format!("5AA {at}");
            let jobs = [1, 2].map(|owner| {
                job(Op::Attempt {
                    owner: Owner(owner),
                    ttl: TTL,
                })
            });
            let read = read_reply(5, &jobs, Value::BulkString(text.into()));
            assert_eq!(read.is_some(), fits, "{at}");
        }
    }

    /// Ops of every kind; a look is none of them, and has a test of its own below.
    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let owner = Owner(1);
        vec(
            select(vec![
                Op::Attempt { owner, ttl: TTL },
                Op::Listen { owner, ttl: TTL },
                Op::Enter {
                    owner,
                    ttl: TTL,
                    score: None,
                },
                Op::Withdraw { owner },
                Op::Release { owner },
                Op::Yield {
                    old: owner,
                    new: Owner(2),
                    ttl: TTL,
                },
                Op::Renew { owner, ttl: TTL },
                Op::Adopt {
                    owner,
                    from: "x".into(),
                    ttl: TTL,
                },
                Op::Raise {
                    owner,
                    draw: 1,
                    age: true,
                },
            ]),
            1..5,
        )
    }

    fn number() -> impl Strategy<Value = i64> {
        prop_oneof![
            select(vec![-1, 0, 1, 5, i64::MAX / 64, i64::MAX, i64::MIN]),
            any::<i64>()
        ]
    }

    fn value() -> impl Strategy<Value = Value> {
        let words = select(vec![
            "won", "busy", "gone", "not-old", "renewed", "raised", "lost", "stale", "sight",
            "error", "5R", "5AR 12", "",
        ]);
        let leaf = prop_oneof![
            3 => words.prop_map(|word| Value::BulkString(word.into())),
            3 => number().prop_map(Value::Int),
            1 => Just(Value::Nil),
            1 => Just(Value::Okay),
            1 => any::<bool>().prop_map(Value::Boolean),
            1 => any::<f64>().prop_map(Value::Double),
            1 => vec(any::<u8>(), 0..9).prop_map(Value::BulkString),
            1 => ".{0,9}".prop_map(Value::SimpleString),
        ];
        let words = select(vec![
            "won", "busy", "gone", "renewed", "raised", "lost", "stale", "sight",
        ]);
        let answer = (words, vec(number(), 0..3)).prop_map(|(word, numbers)| {
            let mut values = vec![Value::BulkString(word.into())];
            values.extend(numbers.into_iter().map(Value::Int));
            Value::Array(values)
        });
        let leaf = prop_oneof![2 => leaf, 1 => answer];
        leaf.prop_recursive(3, 24, 5, |inner| {
            prop_oneof![
                4 => vec(inner.clone(), 0..5).prop_map(Value::Array),
                1 => vec(inner.clone(), 0..3).prop_map(Value::Set),
                1 => vec((inner.clone(), inner), 0..3).prop_map(Value::Map),
            ]
        })
    }

    /// What is read is about these very ops, and a draw makes tokens that grow.
    fn is_sound(ops: &[Op], reply: Option<&Reply>) {
        let Some(reply) = reply else { return };
        assert_eq!(reply.verdicts.len(), ops.len());
        for (op, verdict) in ops.iter().zip(&reply.verdicts) {
            match verdict {
                Verdict::Done(Outcome::Won { draw }) => {
                    let wins = matches!(
                        op,
                        Op::Attempt { .. }
                            | Op::Listen { .. }
                            | Op::Enter { .. }
                            | Op::Yield { .. }
                            | Op::Adopt { .. }
                    );
                    assert!(wins, "{op:?}");
                    assert!(i64::try_from(draw.checked_mul(64).unwrap() + 63).is_ok());
                }
                Verdict::Done(Outcome::Renewed) => assert!(matches!(op, Op::Renew { .. })),
                Verdict::Done(Outcome::Gone { .. }) => {
                    assert!(matches!(op, Op::Release { .. } | Op::Withdraw { .. }));
                }
                Verdict::Seen(_) => panic!("{op:?} is no look"),
                _ => {}
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_value_is_taken_for_more_than_it_says(ops in ops(), reply in value()) {
            let jobs: Vec<_> = ops.iter().cloned().map(job).collect();
            is_sound(&ops, read_reply(5, &jobs, reply).as_ref());
        }

        #[test]
        fn nothing_like_a_reply_panics(ops in ops(), at in number(), echo in select(vec![5, 5, 5, 6, -1]), answers in vec(value(), 5), missing in select(vec![0, 0, 0, 1])) {
            let jobs: Vec<_> = ops.iter().cloned().map(job).collect();
            let count = ops.len() - missing;
            let fits = echo == 5 && at >= 0 && missing == 0;
            let mut values = vec![Value::Int(echo), Value::Int(at)];
            values.extend(answers.into_iter().take(count));
            let read = read_reply(5, &jobs, Value::Array(values));
            prop_assert!(fits || read.is_none(), "{read:?}");
            is_sound(&ops, read.as_ref());
        }

        #[test]
        fn nothing_like_a_short_reply_panics(ops in ops(), text in "(5|6|)[AERWVY]{0,4}( ?-?[0-9]{1,20}| x|  ){0,3}") {
            let jobs: Vec<_> = ops.iter().cloned().map(job).collect();
            let read = read_reply(5, &jobs, Value::BulkString(text.clone().into()));
            prop_assert!(read.is_none() || text.starts_with("5"), "{text}");
            is_sound(&ops, read.as_ref());
        }

        #[test]
        fn no_value_shows_a_lock_that_it_does_not_name(reply in value()) {
            let look = Job::of("k".into(), Wish::Look(oneshot::channel().0));
            if let Some(reply) = read_reply(5, &[look], reply) {
                let [Verdict::Seen(_) | Verdict::Refused(_)] = &reply.verdicts[..] else {
                    panic!("{reply:?}")
                };
            }
        }
    }
}
