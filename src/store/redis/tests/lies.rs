//! A server that lies: whatever it says, nothing panics, nobody has a lease that it did not give in
//! so many words, everything ends in time, and nothing piles up.

use std::cell::Cell;
use std::sync::Once;
use std::time::{Duration, Instant};

use futures::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::time::timeout;

use super::fake::{Fake, NOW, push};
use super::liar::{Answer, Forced, KEYS, Liar, Lie, Number, Push, Said, Whose};
use crate::LockRegistry;
use crate::store::RedisStore;

/// Short, for a release that nobody answers is tried until then.
const TTL: Duration = Duration::from_millis(300);
const WAIT: Duration = Duration::from_millis(120);
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(40);
/// After the end of its wait, or of a release, everything is over by then.
pub(super) const SLACK: Duration = Duration::from_secs(3);

thread_local! {
    pub(super) static PANICS: Cell<usize> = const { Cell::new(0) };
}

/// Counts the panics of this thread, those too that a task of its runtime swallows.
pub(super) fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.set(PANICS.get() + 1);
            before(info);
        }));
    });
    PANICS.set(0);
}

fn number() -> impl Strategy<Value = Number> {
    let odd = select(vec![
        -1,
        0,
        1,
        7,
        NOW as i64,
        i64::MAX / 64,
        i64::MAX / 64 + 1,
        i64::MAX,
        i64::MIN,
    ]);
    prop_oneof![2 => Just(Number::Next), 1 => odd.prop_map(Number::Exactly)]
}

/// What no parser should take: lengths out of all proportion, halves, and what nothing begins with.
pub(super) fn raw() -> impl Strategy<Value = Vec<u8>> {
    let known = select(vec![
        "*1000000\r\n",
        "*2147483647\r\n:1\r\n",
        "*-2\r\n",
        "*9223372036854775807\r\n",
        "%4611686018427387904\r\n",
        "~1000000000\r\n",
        ">1000000000\r\n",
        "$2147483647\r\nx",
        "$9223372036854775807\r\nx",
        "$-7\r\n",
        "$99999999999999999999\r\n",
        "$536870912\r\nabc",
        "=5\r\nabcde\r\n",
        "!2147483647\r\nERR",
        "|1\r\n+a\r\n",
        "#x\r\n",
        ",inf\r\n",
        "(123456789012345678901234567890\r\n",
        "_\r\n",
        "*-1\r\n",
        "$-1\r\n",
        "+\r\n",
        "-\r\n",
        "-ERR\r\n",
        "-NOSCRIPT no\r\n",
        "-MOVED 1 127.0.0.1:1\r\n",
        "-ASK 1 x\r\n",
        "-LOADING\r\n",
        "-READONLY x\r\n",
        "-NOPERM x\r\n",
        "-EXECABORT\r\n",
        ":\r\n",
        ":9223372036854775808\r\n",
        "\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n",
        "*3\r\n:1\r\n",
        ">0\r\n",
        ">1\r\n*0\r\n",
        ">2\r\n:1\r\n:2\r\n",
        "%1\r\n",
        "*?\r\n",
        "$?\r\n;4\r\nabcd\r\n;0\r\n",
    ]);
    prop_oneof![
        4 => known.prop_map(|text| text.as_bytes().to_vec()),
        1 => vec(any::<u8>(), 0..40),
        1 => (1..300_usize).prop_map(|depth| b"*1\r\n".repeat(depth)),
        1 => (1..200_000_usize).prop_map(|many| { let mut bytes = format!("*{many}\r\n").into_bytes(); bytes.extend(b":1\r\n".repeat(many)); bytes }),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let words = select(vec![
        "busy",
        "not-old",
        "gone",
        "renewed",
        "raised",
        "lost",
        "stale",
        "sight",
        "published",
        "",
        "Won",
        "granted",
    ]);
    let errors = select(vec![
        "WRONGTYPE x",
        "NOPERM no",
        "READONLY x",
        "MOVED 3 x",
        "OOM x",
        "ERR x",
        "",
        "\u{fffd}",
        "LOADING",
        "TRYAGAIN",
    ]);
    let numbers = vec(
        select(vec![-2, -1, 0, 1, 50, 30_000, i64::MAX, i64::MIN]),
        0..4,
    );
    prop_oneof![
        3 => number().prop_map(Answer::Won),
        2 => number().prop_map(Answer::Short),
        4 => (words, numbers.clone()).prop_map(|(word, numbers)| Answer::Words(word, numbers)),
        2 => select(vec![1, 50, 20_000]).prop_map(|left| Answer::Words("busy", vec![left, NOW as i64])),
        1 => errors.prop_map(Answer::Error),
        1 => raw().prop_map(Answer::Raw),
    ]
}

pub(super) fn any_push() -> impl Strategy<Value = Push> {
    let whose = prop_oneof![
        4 => Just(Whose::Standing),
        2 => select(vec![0, 1, 2, 3, 5, 1000, u64::MAX]).prop_map(Whose::Number),
        1 => Just(Whose::Foreign),
    ];
    let ttls = select(vec![30_000, 30_000, 0, 1, 86_400_000, 86_400_001, u64::MAX]);
    let times = select(vec![NOW, NOW, 0, NOW + 1_000_000_000, u64::MAX]);
    let formats = select(vec!["1", "1", "1", "2", "", "probe"]);
    let keys = select(vec!["a", "b c", "unknown", "", "~fence"]);
    let kinds = select(vec![
        "message",
        "pmessage",
        "smessage",
        "subscribe",
        "unsubscribe",
        "psubscribe",
        "punsubscribe",
        "ssubscribe",
        "sunsubscribe",
        "invalidate",
        "disconnection",
        "server-cpu-usage",
        "",
    ]);
    let words = vec(
        select(vec!["lock:~grant:x", "", "1", "probe 0", "1 x:1 1 1 1 a"]),
        0..4,
    );
    prop_oneof![
        6 => (whose, keys, ttls, number(), times, formats).prop_map(|(whose, key, ttl, draw, at, format)| Push::Grant { whose, key, ttl, draw, at, format }),
        2 => (kinds, words).prop_map(|(kind, words)| Push::Kind(kind, words)),
        1 => raw().prop_map(Push::Raw),
    ]
}

/// A grant that would be one, were it not for its owner.
fn for_others() -> impl Strategy<Value = Push> {
    let whose = prop_oneof![
        4 => (0..9_u64).prop_map(Whose::Number),
        1 => Just(Whose::Foreign),
    ];
    (whose, select(KEYS.to_vec())).prop_map(|(whose, key)| Push::Grant {
        whose,
        key,
        ttl: 30_000,
        draw: Number::Next,
        at: NOW,
        format: "1",
    })
}

/// To everybody who asks.
#[cfg(feature = "cluster")]
pub(super) fn busy() -> Lie {
    let busy = Answer::Words("busy", vec![20_000, NOW as i64]);
    Lie::Answers {
        answers: vec![busy],
        at: NOW as i64,
        more: 0,
        number: 0,
    }
}

pub(super) fn said() -> impl Strategy<Value = Said> {
    let answers = (
        vec(answer(), 1..4),
        select(vec![NOW as i64, NOW as i64, 0, -1, i64::MAX]),
        select(vec![0, 0, 0, 1]),
        select(vec![0, 0, 0, 1, u64::MAX]),
    )
        .prop_map(|(answers, at, more, number)| Lie::Answers {
            answers,
            at,
            more,
            number,
        });
    let plain = (number(), select(vec!["", "", " ", " x", " 1", "\r\n"]))
        .prop_map(|(at, more)| Lie::Plain(at, more));
    let lie = prop_oneof![
        8 => answers,
        3 => plain,
        2 => raw().prop_map(Lie::Raw),
        1 => (0..60_usize).prop_map(Lie::Half),
        1 => Just(Lie::Later),
        1 => Just(Lie::Twice),
        1 => Just(Lie::Silence),
        1 => Just(Lie::HangUp),
        3 => Just(Lie::Truth),
    ];
    let pushes = || prop_oneof![3 => Just(Vec::new()), 2 => vec(any_push(), 1..4)];
    (pushes(), lie, pushes()).prop_map(|(before, lie, after)| Said { before, lie, after })
}

/// One who asks for a key in every way there is, and how many leases that makes; `Err`: what it should not have been
/// told.
pub(super) async fn asks(
    locks: &LockRegistry,
    key: &str,
    wait: Duration,
    forced: &Forced,
) -> Result<usize, String> {
    let begin = Instant::now();
    let late = |what: &str| format!("{what} of {key:?} ended only after {:?}", begin.elapsed());
    let bound = wait + SLACK;
    let mut leases = 0;
    let fixed = locks.obtain(key).ttl(TTL);
    for round in 0..2 {
        let lease = match round {
            0 => timeout(bound, fixed.lease_within(wait))
                .await
                .map_err(|_| late("lease_within"))?
                .ok(),
            _ => timeout(bound, fixed.lease_once())
                .await
                .map_err(|_| late("lease_once"))?
                .ok()
                .flatten(),
        };
        let Some(lease) = lease else { continue };
        leases += 1;
        let draw = lease.token() / 64;
        if !forced.lock().unwrap().contains(&(key.to_owned(), draw)) {
            return Err(format!(
                "a lease of {key:?} with draw {draw}, which nobody was told"
            ));
        }
        if lease.deadline() > tokio::time::Instant::now() + TTL {
            return Err(format!("a lease of {key:?} longer than was asked for"));
        }
        // May be confirmed, refused or lost; not longer than this one's deadline.
        let _ = timeout(wait, lease.extend(TTL)).await;
        timeout(bound + TTL, lease.release())
            .await
            .map_err(|_| late("a release"))?
            .ok();
    }
    let looking = fixed.inspect();
    let _ = timeout(bound, looking).await.map_err(|_| late("inspect"))?;
    Ok(leases)
}

fn lies_to_everybody(calls: Vec<Said>, steps: Vec<Option<Lie>>) -> Result<(), TestCaseError> {
    count_panics();
    let forced = Forced::default();
    let mut liar = Liar::new(calls, steps, forced.clone());
    let fake = Fake::start(move |request| liar.answer(request));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let result = runtime.block_on(async {
        let store = RedisStore::connect_lazy(fake.url()).unwrap();
        let locks = LockRegistry::builder(store)
            .response_timeout(RESPONSE_TIMEOUT)
            .build();
        let callers = KEYS
            .iter()
            .cycle()
            .take(4)
            .map(|key| asks(&locks, key, WAIT, &forced));
        for told in join_all(callers).await {
            told?;
        }
        if locks.in_use() > KEYS.len() + 8 {
            return Err(format!("{} keys in use", locks.in_use()));
        }
        timeout(SLACK, locks.shutdown())
            .await
            .map_err(|_| "the shutdown hangs".to_owned())?;
        match locks.in_use() {
            0 => Ok(()),
            left => Err(format!("{left} keys in use after the shutdown")),
        }
    });
    drop(runtime);
    prop_assert!(result.is_ok(), "{}", result.unwrap_err());
    prop_assert_eq!(PANICS.get(), 0, "something panicked");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_server_says_to_calls(calls in vec(said(), 1..12)) {
        lies_to_everybody(calls, vec![None])?;
    }

    /// Those who wait in the queue are told of turns that are not theirs.
    #[test]
    fn whatever_is_pushed_to_those_who_wait(pushes in vec(vec(for_others(), 1..5), 1..4)) {
        let calls = pushes.into_iter().map(|after| {
            let busy = Answer::Words("busy", vec![20_000, NOW as i64]);
            let lie = Lie::Answers { answers: vec![busy], at: NOW as i64, more: 0, number: 0 };
            Said { before: Vec::new(), lie, after }
        });
        lies_to_everybody(calls.collect(), vec![None])?;
    }

    #[test]
    fn whatever_a_server_says_while_a_connection_is_made(
        calls in vec(said(), 1..4),
        steps in vec(prop_oneof![
            4 => Just(None),
            2 => raw().prop_map(|raw| Some(Lie::Raw(raw))),
            1 => (0..80_usize).prop_map(|length| Some(Lie::Half(length))),
            1 => Just(Some(Lie::HangUp)),
            1 => Just(Some(Lie::Silence)),
        ], 1..10),
    ) {
        lies_to_everybody(calls, steps)?;
    }
}

/// Were each of them kept until it is given back, a server that never answers that could fill us.
#[tokio::test]
async fn a_flood_of_grants_is_not_kept() {
    const MANY: u64 = 20_000;
    let mut channel = String::new();
    let fake = Fake::start(move |request| {
        if request.is("SUBSCRIBE") {
            channel = request.words[1].clone();
        }
        if !request.is_call() {
            return None;
        }
        if !matches!(request.letters(), "A" | "E") {
            return Some(Vec::new());
        }
        let mut bytes = Vec::new();
        let instance = channel.rsplit(':').next().unwrap();
        for number in 0..MANY {
            for key in [format!("unknown {number}"), "k".to_owned()] {
                let message = format!(
                    "1 {instance}:{} 86400000 {number} {NOW} {key}",
                    1000 + number
                );
                bytes.extend(push(&["message", &channel, &message], ""));
            }
        }
        bytes.extend(request.reply(NOW, b"*3\r\n$4\r\nbusy\r\n:20000\r\n:7\r\n"));
        Some(bytes)
    });
    let store = RedisStore::connect_lazy(fake.url()).unwrap();
    let locks = LockRegistry::builder(store)
        .response_timeout(Duration::from_secs(2))
        .build();
    let told = locks.obtain("k").lease_within(Duration::from_secs(1)).await;
    assert!(told.is_err(), "{told:?}");
    let kept = locks.in_use();
    assert!(
        (100..400).contains(&kept),
        "{kept} keys: some are given back, and no flood is kept"
    );
    timeout(Duration::from_secs(10), locks.shutdown())
        .await
        .expect("it ends");
    assert_eq!(locks.in_use(), 0);
}

/// A grant of an unknown key is given back by a call of its own, while the first is still open: the answer to that
/// second one names the first, and so answers it.
#[test]
fn an_answer_that_names_an_earlier_call_is_that_calls() {
    let grant = Push::Grant {
        whose: Whose::Standing,
        key: "unknown",
        ttl: 30_000,
        draw: Number::Next,
        at: NOW,
        format: "1",
    };
    let silence = Said {
        before: vec![grant],
        lie: Lie::Silence,
        after: Vec::new(),
    };
    let crossed = Said {
        before: Vec::new(),
        lie: Lie::Answers {
            answers: vec![Answer::Won(Number::Next)],
            at: NOW as i64,
            more: 1,
            number: u64::MAX,
        },
        after: Vec::new(),
    };
    lies_to_everybody(vec![silence, crossed], vec![None]).unwrap();
}
