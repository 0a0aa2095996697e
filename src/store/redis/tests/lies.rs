//! A server that lies: whatever it says, nothing panics, nobody has a lease that it did not give in
//! so many words, everything ends in time, and nothing piles up.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use futures::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::time::timeout;

use super::fake::{Fake, HANG_UP, NOW, Request, push};
use crate::LockRegistry;
use crate::store::RedisStore;

/// Short, for a release that nobody answers is tried until then.
const TTL: Duration = Duration::from_millis(300);
const WAIT: Duration = Duration::from_millis(120);
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(40);
/// After the end of its wait, or of a release, everything is over by then.
pub(super) const SLACK: Duration = Duration::from_secs(3);
pub(super) const KEYS: [&str; 2] = ["a", "b c"];

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

/// A number where a draw or a time is to be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Number {
    /// The next in order: what an honest server would say.
    Next,
    Exactly(i64),
}

/// What one op is answered.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Won(Number),
    /// A number instead of an array.
    Short(Number),
    /// Words that some op or other is answered with, and numbers.
    Words(&'static str, Vec<i64>),
    Error(&'static str),
    Raw(Vec<u8>),
}

/// Whose a grant is said to be.
#[derive(Clone, Copy, Debug)]
pub(super) enum Whose {
    /// The last owner that entered.
    Standing,
    /// Another of this registry's, long gone or never there.
    Number(u64),
    /// Another registry's.
    Foreign,
}

#[derive(Clone, Debug)]
pub(super) enum Push {
    Grant {
        whose: Whose,
        key: &'static str,
        ttl: u64,
        draw: Number,
        at: u64,
        format: &'static str,
    },
    /// A push of any kind, with any words.
    Kind(&'static str, Vec<&'static str>),
    Raw(Vec<u8>),
}

#[derive(Clone, Debug)]
pub(super) enum Lie {
    /// The answers go round if there are more ops.
    Answers {
        answers: Vec<Answer>,
        at: i64,
        /// Added to the number of answers and to the call's number.
        more: usize,
        number: u64,
    },
    /// The short reply, perhaps with words that are too many or none.
    Plain(Number, &'static str),
    Raw(Vec<u8>),
    /// The truth up to there, and then no more.
    Half(usize),
    /// Said when the next call is answered, and after that.
    Later,
    Twice,
    Silence,
    HangUp,
    Truth,
}

/// What a call, or a step of connecting, is answered.
#[derive(Clone, Debug)]
pub(super) struct Said {
    pub(super) before: Vec<Push>,
    pub(super) lie: Lie,
    pub(super) after: Vec<Push>,
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

/// Says it all, over and over, and notes for what there may be a lease.
pub(super) struct Liar {
    /// To calls, one after the other.
    pub(super) calls: Vec<Said>,
    /// To the steps of connecting; `None`: the truth.
    pub(super) steps: Vec<Option<Lie>>,
    pub(super) called: usize,
    pub(super) stepped: usize,
    pub(super) next: u64,
    pub(super) later: Vec<u8>,
    pub(super) channel: String,
    /// The last owner that entered for a key.
    pub(super) standing: HashMap<String, String>,
    /// What each call is about, by its connection and number: ops, and the key of each. Who names an earlier call's
    /// answers that one, which may still be open.
    pub(super) asked: HashMap<(usize, u64), (String, Vec<String>)>,
    pub(super) forced: Forced,
}

/// Keys and draws that a lie has named for one of those who asked.
pub(super) type Forced = Arc<Mutex<HashSet<(String, u64)>>>;

fn name_of(lock: &str) -> &str {
    lock.strip_prefix("lock:").unwrap_or(lock)
}

impl Liar {
    pub(super) fn new(calls: Vec<Said>, steps: Vec<Option<Lie>>, forced: Forced) -> Self {
        Self {
            calls,
            steps,
            called: 0,
            stepped: 0,
            next: NOW,
            later: Vec::new(),
            channel: String::new(),
            standing: HashMap::new(),
            asked: HashMap::new(),
            forced,
        }
    }

    fn draw(&mut self, number: Number) -> i64 {
        match number {
            Number::Next => {
                self.next += 100;
                self.next as i64
            }
            Number::Exactly(number) => number,
        }
    }

    fn force(&self, keys: &[String], draw: i64) {
        let Ok(draw) = u64::try_from(draw) else {
            return;
        };
        let named = keys.iter().map(|key| (name_of(key).to_owned(), draw));
        self.forced.lock().unwrap().extend(named);
    }

    pub(super) fn answer(&mut self, request: &Request) -> Option<Vec<u8>> {
        if let Some(channel) = request.is("SUBSCRIBE").then(|| request.words[1].clone()) {
            self.channel = channel;
        }
        if !request.is_call() {
            let lie = self.steps[self.stepped % self.steps.len()].clone();
            self.stepped += 1;
            return match lie? {
                Lie::Raw(bytes) => Some(bytes),
                Lie::Half(length) => Some(cut(request.usual(), length)),
                Lie::Silence => Some(Vec::new()),
                _ => Some(HANG_UP.to_vec()),
            };
        }
        let Said { before, lie, after } = self.calls[self.called % self.calls.len()].clone();
        self.called += 1;
        // A batch's first key is the fence, and its letters say what it is about.
        let ops = request.keys()[0]
            .starts_with("lock:~fence")
            .then(|| request.letters().to_owned());
        let ops = ops.unwrap_or_default();
        for (index, op) in ops.chars().enumerate() {
            if op == 'E' {
                let (key, owner) = (&request.keys()[1 + index], &request.arguments()[1 + index]);
                self.standing.insert(name_of(key).to_owned(), owner.clone());
            }
        }
        let keys = request.keys().iter().skip(1).cloned().collect();
        let call = (request.connection, request.number());
        self.asked.insert(call, (ops.clone(), keys));
        let mut bytes = self.pushes("message", &before);
        let mut hangs_up = false;
        let told = match lie {
            Lie::Answers {
                answers,
                at,
                more,
                number,
            } => self.answers(request, &ops, &answers, at, more, number),
            Lie::Plain(at, more) => self.plain(request, &ops, at, more),
            Lie::Raw(bytes) => bytes,
            Lie::Half(length) => {
                hangs_up = true;
                let mut half = self.plain(request, &ops, Number::Next, "");
                half.truncate(length);
                half
            }
            Lie::Later => {
                self.later = self.plain(request, &ops, Number::Next, "");
                Vec::new()
            }
            Lie::Twice => self.plain(request, &ops, Number::Next, "").repeat(2),
            Lie::Silence => Vec::new(),
            Lie::HangUp => {
                hangs_up = true;
                Vec::new()
            }
            Lie::Truth => self.plain(request, &ops, Number::Next, ""),
        };
        let is_later = matches!(
            self.calls[(self.called - 1) % self.calls.len()].lie,
            Lie::Later
        );
        bytes.extend(told);
        if !is_later {
            bytes.append(&mut self.later);
        }
        bytes.extend(self.pushes("message", &after));
        if hangs_up {
            bytes.extend(HANG_UP);
        }
        Some(bytes)
    }

    fn answers(
        &mut self,
        request: &Request,
        ops: &str,
        answers: &[Answer],
        at: i64,
        more: usize,
        number: u64,
    ) -> Vec<u8> {
        let count = if ops.is_empty() {
            request.keys().len()
        } else {
            ops.len()
        };
        let echo = request.number().wrapping_add(number);
        let mut bytes = format!("*{}\r\n:{echo}\r\n:{at}\r\n", 2 + count + more).into_bytes();
        let asked = self.asked.get(&(request.connection, echo)).cloned();
        for index in 0..count + more {
            // A call that is on its way, perhaps, and was not read yet: it may be about anything.
            let about = |(ops, keys): (String, Vec<String>)| {
                let op = ops.chars().nth(index).unwrap_or(' ');
                (op, keys.into_iter().skip(index).take(1).collect())
            };
            let anything = || ('A', KEYS.map(str::to_owned).to_vec());
            let (op, keys) = asked.clone().map_or_else(anything, about);
            match answers[index % answers.len()].clone() {
                Answer::Won(draw) => {
                    let draw = self.draw(draw);
                    if "AEYD".contains(op) {
                        self.force(&keys, draw);
                    }
                    bytes.extend(format!("*2\r\n$3\r\nwon\r\n:{draw}\r\n").bytes());
                }
                Answer::Short(draw) => {
                    let draw = self.draw(draw);
                    if "AE".contains(op) {
                        self.force(&keys, draw);
                    }
                    bytes.extend(format!(":{draw}\r\n").bytes());
                }
                Answer::Words(word, numbers) => {
                    bytes.extend(
                        format!("*{}\r\n${}\r\n{word}\r\n", 1 + numbers.len(), word.len()).bytes(),
                    );
                    for number in numbers {
                        bytes.extend(format!(":{number}\r\n").bytes());
                    }
                }
                Answer::Error(text) => bytes
                    .extend(format!("*2\r\n$5\r\nerror\r\n${}\r\n{text}\r\n", text.len()).bytes()),
                Answer::Raw(raw) => bytes.extend(raw),
            }
        }
        bytes
    }

    /// The short reply, which is the truth if `at` is the next and there is no more.
    fn plain(&mut self, request: &Request, ops: &str, at: Number, more: &str) -> Vec<u8> {
        let wins: Vec<_> = (0..ops.len())
            .filter(|index| "AE".contains(&ops[*index..=*index]))
            .collect();
        let at = self.draw(at);
        let mut text = request.arguments()[0].clone();
        if !wins.is_empty() {
            text.push_str(&format!(" {at}"));
        }
        for (place, index) in wins.into_iter().enumerate() {
            let key = &request.keys()[1 + index..][..1];
            self.force(key, at.saturating_add(place as i64));
        }
        text.push_str(more);
        format!("${}\r\n{text}\r\n", text.len()).into_bytes()
    }

    pub(super) fn pushes(&mut self, kind: &str, pushes: &[Push]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for one in pushes {
            match one {
                Push::Grant {
                    whose,
                    key,
                    ttl,
                    draw,
                    at,
                    format,
                } => {
                    let draw = self.draw(*draw);
                    let instance = self.channel.rsplit(':').next().unwrap_or_default();
                    let owner = match whose {
                        Whose::Standing => self
                            .standing
                            .get(*key)
                            .cloned()
                            .unwrap_or_else(|| format!("{instance}:1")),
                        Whose::Number(number) => format!("{instance}:{number}"),
                        Whose::Foreign => "ffff:1".to_owned(),
                    };
                    if self.standing.get(*key) == Some(&owner) {
                        self.force(&[(*key).to_owned()], draw);
                    }
                    let message = format!("{format} {owner} {ttl} {draw} {at} {key}");
                    bytes.extend(push(&[kind, &self.channel, &message], ""));
                }
                Push::Kind(kind, words) => {
                    let words: Vec<_> = [*kind].into_iter().chain(words.iter().copied()).collect();
                    bytes.extend(push(&words, ""));
                }
                Push::Raw(raw) => bytes.extend(raw),
            }
        }
        bytes
    }
}

fn cut(mut bytes: Vec<u8>, length: usize) -> Vec<u8> {
    bytes.truncate(length);
    bytes.extend(HANG_UP);
    bytes
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
