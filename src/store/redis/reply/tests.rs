use futures::channel::oneshot;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::store::contract::{Op, Owner, SubmittedOp};

const TTL: Duration = Duration::from_secs(30);

fn job(op: Op) -> Request {
    Request::new(RequestKind::Op(SubmittedOp::unattended("k", op)))
}

fn word(word: &str) -> Value {
    Value::BulkString(word.into())
}

/// Op by op.
fn read(jobs: &[Request], reply: &str) -> Option<Vec<RequestReply>> {
    let told = read_reply(5, jobs, word(reply))?;
    assert_eq!(told.at, Some(9));
    let array = reply.split(' ').map(word).collect();
    assert_eq!(
        read_reply(5, jobs, Value::Array(array)).as_ref(),
        Some(&told)
    );
    Some(told.replies)
}

/// A server that was started at 10.9 s and asked at 11.1 says that it has been up for 1 s: taken at its word it
/// was let into the vote up to a second before the leases were over that it had forgotten.
#[test]
fn an_age_in_whole_seconds_is_not_believed_to_the_last() {
    let raise = || {
        job(Op::Raise {
            owner: Owner::exclusive(1),
            epoch: 5,
            age: true,
        })
    };
    for (told, age) in [
        ("1", Some(0)),
        ("31", Some(30)),
        ("0", Some(0)),
        ("-1", None),
    ] {
        let age = age.map(Duration::from_secs);
        let raised = RequestReply::Done(Outcome::Raised { age });
        assert_eq!(read(&[raise()], &format!("5 9 {told}")), Some(vec![raised]));
    }
}

#[test]
fn a_reply_is_read_op_by_op() {
    let (owner, ttl) = (Owner::exclusive(1), TTL);
    let take = || job(Op::Attempt { owner, ttl });
    let release = || job(Op::Release { owner });
    let enter = || {
        job(Op::Enter {
            owner,
            ttl,
            score: None,
        })
    };
    let won = |epoch| RequestReply::Done(Outcome::Won { epoch });
    let gone = |held| RequestReply::Done(Outcome::Gone { held });
    let busy = |left: Option<u64>, score| {
        let left = left.map(Duration::from_millis);
        RequestReply::Done(Outcome::Busy {
            left,
            score,
            entered: false,
            holder: Some(exclusive("a1:7")),
        })
    };
    // Plain wins follow each other from the server's time on.
    let jobs = [take(), release(), enter(), release(), enter(), take()];
    assert_eq!(
        read(&jobs, "5 9 + 1 + 0 busy:29:42::::a1:7 77"),
        Some(vec![
            won(9),
            gone(true),
            won(10),
            gone(false),
            busy(Some(29), Some(42)),
            won(77)
        ])
    );
    let jobs = [take(), enter(), release(), take()];
    assert_eq!(
        read(&jobs, "5 9 busy:-1:::::a1:7 more more stale"),
        Some(vec![
            busy(None, None),
            RequestReply::More,
            RequestReply::More,
            RequestReply::Stale
        ])
    );
    // A call of releases alone need not ask for the time.
    let told = read_reply(5, &[release()], word("5  1")).unwrap();
    assert_eq!((told.at, told.replies), (None, vec![gone(true)]));
    // What is no word makes an array of the whole.
    let refused = Value::Array(vec![word("error"), word("OOM full")]);
    let reply = Value::Array(vec![word("5"), word("9"), refused, word("1")]);
    let told = read_reply(5, &[take(), release()], reply).unwrap();
    assert!(
        matches!(&told.replies[..], [RequestReply::Refused(why), RequestReply::Done(_)] if why.code() == "OOM")
    );
}

fn exclusive(owner: &str) -> Arc<Occupant> {
    occupant(owner, Mode::Exclusive, 0)
}

fn occupant(owner: &str, mode: Mode, others: u64) -> Arc<Occupant> {
    Arc::new(Occupant {
        owner: owner.into(),
        mode,
        others,
    })
}

/// G8. What a foreign lock has in it comes beside the words, since it need not be a text.
#[test]
fn g8_a_busy_answer_names_the_holder() {
    let (owner, ttl) = (Owner::exclusive(1), TTL);
    let take = || [job(Op::Attempt { owner, ttl })];
    let named = |reply: Value| {
        let told = read_reply(5, &take(), reply).expect("a reply to this call");
        match &told.replies[..] {
            [
                RequestReply::Done(Outcome::Busy { holder, .. })
                | RequestReply::DoneUnserved(Outcome::Busy { holder, .. }),
            ] => holder.clone(),
            other => panic!("{other:?}"),
        }
    };
    let permits = Mode::Permits {
        limit: 8,
        weight: 2,
    };
    for (text, expected) in [
        ("busy:9:::::a:b~c:7", Some(exclusive("a:b~c:7"))),
        ("busy:9:::r:3:a1:7", Some(occupant("a1:7", Mode::Shared, 3))),
        ("busy:9:1:+:2/8:5:a1:7&", Some(occupant("a1:7", permits, 5))),
        // Nobody has it yet, or what a foreign lock has in it is empty.
        ("busy:9:1:+:::", None),
    ] {
        assert_eq!(named(word(&format!("5 9 {text}"))), expected, "{text}");
    }
    let beside = |owner: &[u8]| {
        let fields = vec![
            word("busy"),
            word("busy:9:::::"),
            Value::BulkString(owner.to_vec()),
        ];
        named(Value::Array(vec![
            word("5"),
            word("9"),
            Value::Array(fields),
        ]))
    };
    assert_eq!(beside(b"by hand & foot"), Some(exclusive("by hand & foot")));
    assert_eq!(beside(b"\xff\0x"), Some(exclusive("\u{fffd}\0x")));
}

#[test]
fn a_reply_that_does_not_fit_its_call_is_rejected() {
    let (owner, ttl, within) = (Owner::exclusive(1), TTL, TTL);
    let take = || job(Op::Attempt { owner, ttl });
    let release = || job(Op::Release { owner });
    for wrong in [
        "5",
        "5 9",
        "6 9 +",
        "5 x +",
        "5 -9 +",
        "5  +",
        "5 9 + +",
        "5 9 1 1",
        "5 9 x",
        "5 9 -1",
        "5 9 busy:1",
        "5 9 busy:1:1",
        "5 9 busy:1:1:::",
        "5 9 busy:x:::::a1:7",
        "5 9 busy:1:x::::a1:7",
        "5 9 busy:1:-1::::a1:7",
        "5 9 busy:1:1:x:::a1:7",
        "5 9 busy:1:1::x::a1:7",
        "5 9 busy:1:1::1/::a1:7",
        "5 9 busy:1:1:::-1:a1:7",
        "5 9 not-old",
        "5 9 lost",
        "x 9 +",
        "",
        " ",
    ] {
        assert_eq!(read_reply(5, &[take()], word(wrong)), None, "{wrong:?}");
    }
    for wrong in [
        "5 9 2",
        "5 9 +",
        "5 9 stale",
        "5 9 77",
        "5 9 busy:1:1::::a1:7",
        "5 9 lost",
    ] {
        assert_eq!(read_reply(5, &[release()], word(wrong)), None, "{wrong:?}");
    }
    let renew = job(Op::Renew { owner, ttl, within });
    let adopt = job(Op::Adopt {
        owner,
        from: "x".into(),
        ttl,
        within,
    });
    let r#yield = job(Op::Yield {
        old: owner,
        new: Owner::exclusive(2),
        ttl,
    });
    for (job, wrong) in [
        (&renew, "0"),
        (&renew, "more"),
        (&adopt, "+"),
        (&adopt, "busy:1:::::a1:7"),
        (&adopt, "more"),
        (&r#yield, "+"),
        (&r#yield, "stale"),
    ] {
        let reply = word(&format!("5 9 {wrong}"));
        assert_eq!(
            read_reply(5, std::slice::from_ref(job), reply),
            None,
            "{wrong:?}"
        );
    }
    for wrong in [
        Value::Nil,
        Value::Int(5),
        Value::Array(vec![]),
        Value::Array(vec![Value::Int(5), Value::Int(9), Value::Int(1)]),
    ] {
        assert_eq!(
            read_reply(5, &[release()], wrong.clone()),
            None,
            "{wrong:?}"
        );
    }
}

#[test]
fn a_probes_reply_has_the_time_and_the_refusal() {
    let reply = |answer| Value::Array(vec![word("5"), word("9"), answer]);
    assert_eq!(read_probe(5, &reply(word("1"))), Some((9, None)));
    let refused = Value::Array(vec![word("error"), word("NOPERM no")]);
    let (at, refusal) = read_probe(5, &reply(refused)).unwrap();
    assert_eq!((at, refusal.unwrap().code()), (9, "NOPERM"));
    assert_eq!(read_probe(6, &reply(word("1"))), None);
    assert_eq!(read_probe(5, &reply(word("2"))), None);
    assert_eq!(read_probe(5, &word("5  1")), None, "without a time");
}

/// F2: tokens fit an i64, and those of a tenure are different.
#[test]
fn f2_an_epoch_whose_tokens_do_not_fit_is_refused() {
    let most = i64::MAX as u64 / 64;
    let take = |owner| {
        job(Op::Attempt {
            owner: Owner::exclusive(owner),
            ttl: TTL,
        })
    };
    for (epoch, fits) in [(most, true), (most + 1, false), (u64::MAX, false)] {
        let told = read_reply(5, &[take(1)], word(&format!("5 9 {epoch}")));
        assert_eq!(told.is_some(), fits, "{epoch}");
    }
    for (at, fits) in [(most - 1, true), (most, false), (u64::MAX, false)] {
        let told = read_reply(5, &[take(1), take(2)], word(&format!("5 {at} + +")));
        assert_eq!(told.is_some(), fits, "{at}");
    }
}

/// Ops of every kind; a look is none of them, and has a test of its own below.
fn ops() -> impl Strategy<Value = Vec<Op>> {
    let owner = Owner::exclusive(1);
    vec(
        select(vec![
            Op::Attempt { owner, ttl: TTL },
            Op::Listen { owner, ttl: TTL },
            Op::Enter {
                owner,
                ttl: TTL,
                score: None,
            },
            Op::Withdraw { owner, ttl: TTL },
            Op::Unlisten { owner },
            Op::Release { owner },
            Op::Yield {
                old: owner,
                new: Owner::exclusive(2),
                ttl: TTL,
            },
            Op::Renew {
                owner,
                ttl: TTL,
                within: TTL,
            },
            Op::Adopt {
                owner,
                from: "x".into(),
                ttl: TTL,
                within: TTL,
            },
            Op::Raise {
                owner,
                epoch: 1,
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
        "0",
        "1",
        "5",
        "77",
        "+",
        "busy:1:2:+:r:3:a1:7",
        "busy:-1::::::",
        "busy::",
        "busy",
        "not-old",
        "lost",
        "stale",
        "more",
        "key_status",
        "error",
        "5 9 +",
        "5 9 1",
        "5  1",
        "",
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
    let words = select(vec!["busy", "key_status", "error"]);
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

/// What is read is about these very ops, and an epoch makes tokens that grow.
fn is_sound(ops: &[Op], reply: Option<&Reply>) {
    let Some(reply) = reply else { return };
    assert_eq!(reply.replies.len(), ops.len());
    for (op, reply) in ops.iter().zip(&reply.replies) {
        match reply {
            RequestReply::Done(Outcome::Won { epoch }) => {
                let wins = matches!(
                    op,
                    Op::Attempt { .. }
                        | Op::Listen { .. }
                        | Op::Enter { .. }
                        | Op::Yield { .. }
                        | Op::Adopt { .. }
                );
                assert!(wins, "{op:?}");
                assert!(i64::try_from(epoch.checked_mul(64).unwrap() + 63).is_ok());
            }
            RequestReply::Done(Outcome::Renewed) => assert!(matches!(op, Op::Renew { .. })),
            RequestReply::Done(Outcome::Gone { .. }) => {
                assert!(matches!(
                    op,
                    Op::Release { .. } | Op::Withdraw { .. } | Op::Unlisten { .. }
                ));
            }
            RequestReply::Seen(_) => panic!("{op:?} is no look"),
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
        let mut values = vec![word(&echo.to_string()), word(&at.to_string())];
        values.extend(answers.into_iter().take(count));
        let read = read_reply(5, &jobs, Value::Array(values));
        prop_assert!(fits || read.is_none(), "{read:?}");
        is_sound(&ops, read.as_ref());
    }

    #[test]
    fn nothing_like_a_reply_in_one_text_panics(ops in ops(), text in "(5|6|) [0-9]{0,20}( -?[0-9]{1,20}| \\+| busy:[0-9-]{0,20}:[0-9]{0,20}(:\\+?:(r|2/3|x)?:[0-9]{0,20}:[a:1&]{0,4})?| x|  ){0,5}") {
        let jobs: Vec<_> = ops.iter().cloned().map(job).collect();
        let read = read_reply(5, &jobs, Value::BulkString(text.clone().into()));
        prop_assert!(read.is_none() || text.starts_with("5"), "{text}");
        is_sound(&ops, read.as_ref());
    }

    #[test]
    fn no_value_shows_a_lock_that_it_does_not_name(reply in value()) {
        let look = Request::new(RequestKind::Look("k".into(), oneshot::channel().0));
        if let Some(reply) = read_reply(5, &[look], reply) {
            let [RequestReply::Seen(_) | RequestReply::Refused(_)] = &reply.replies[..] else {
                panic!("{reply:?}")
            };
        }
    }
}
