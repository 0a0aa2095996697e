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
        "won", "busy", "gone", "not-old", "renewed", "raised", "lost", "stale", "sight", "error",
        "5R", "5AR 12", "",
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
