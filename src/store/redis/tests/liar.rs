//! One that answers with what it was told to say, and notes for what there may be a lease after that.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::fake::{HANG_UP, NOW, Request, push};

pub(super) const KEYS: [&str; 2] = ["a", "b c"];

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
        // A yield's own win is not in short; what is too much here says that it is, and when.
        if ops == "Y"
            && let Ok(draw) = more.trim().parse()
        {
            self.force(&request.keys()[1..2], draw);
        }
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
