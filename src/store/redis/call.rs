//! Ops as the words of a script call, and what its reply says about each.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::oneshot;
use redis::{Cmd, Value};

use super::fault::Refusal;
use super::keys::Names;
use super::script::{self, Script};
use crate::StoreError;
use crate::store::contract::{Op, Outcome, Owner, ServerTime, Sight};

/// One wish about one lock, on its way to the server and back.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) key: Arc<str>,
    pub(super) wish: Wish,
}

#[derive(Debug)]
pub(super) enum Wish {
    Op {
        op: Op,
        /// Whether the server has refused it once for coming too late (O5).
        was_stale: bool,
    },
    Look(oneshot::Sender<Result<Sight, StoreError>>),
}

/// Jobs of one lane may share a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Renew,
    Batch,
    Inspect,
}

impl Lane {
    /// In the order in which they are served: leases must survive whatever else is wanted.
    pub(super) const ALL: [Self; 3] = [Self::Renew, Self::Batch, Self::Inspect];

    pub(super) fn of(wish: &Wish) -> Self {
        match wish {
            Wish::Op {
                op: Op::Renew { .. },
                ..
            } => Self::Renew,
            Wish::Op { .. } => Self::Batch,
            Wish::Look(_) => Self::Inspect,
        }
    }

    pub(super) fn script(self) -> &'static Script {
        match self {
            Self::Renew => &script::RENEW,
            Self::Batch => &script::BATCH,
            Self::Inspect => &script::INSPECT,
        }
    }

    /// The call for some jobs of this lane. `of_use` is the last server time at which whoever asks
    /// still waits for an answer (O5).
    pub(super) fn command(
        self,
        names: &Names,
        number: u64,
        of_use: ServerTime,
        jobs: &[Job],
    ) -> Cmd {
        let (keys, words) = match self {
            Self::Renew => (jobs.len(), 1 + 2 * jobs.len()),
            Self::Batch => (1 + 2 * jobs.len(), 3 + 4 * jobs.len()),
            Self::Inspect => (2 * jobs.len(), 1),
        };
        let mut command = self.script().command(keys, words);
        if self == Self::Batch {
            command.arg(names.fence());
        }
        for job in jobs {
            let lock = names.lock(&job.key);
            command.arg(&lock);
            if self != Self::Renew {
                command.arg(Names::queue(&lock));
            }
        }
        command.arg(number);
        if self == Self::Batch {
            command.arg(of_use).arg(names.prefix());
        }
        for job in jobs {
            if let Wish::Op { op, .. } = &job.wish {
                add_words(&mut command, names, op);
            }
        }
        command
    }
}

fn add_words(command: &mut Cmd, names: &Names, op: &Op) {
    let owner = |owner: &Owner| {
        let mut text = String::with_capacity(names.instance().len() + 21);
        write!(text, "{}:{}", names.instance(), owner.0).expect("a String takes everything");
        text
    };
    match op {
        Op::Attempt { owner: of, ttl } => {
            command.arg("A").arg(owner(of)).arg(millis(*ttl));
        }
        Op::Enter {
            owner: of,
            ttl,
            score,
        } => {
            command.arg("E").arg(owner(of)).arg(millis(*ttl));
            match score {
                Some(score) => command.arg(*score),
                None => command.arg(""),
            };
        }
        Op::Withdraw { owner: of } => {
            command.arg("W").arg(owner(of));
        }
        Op::Release { owner: of } => {
            command.arg("R").arg(owner(of));
        }
        Op::Yield { old, new, ttl } => {
            command
                .arg("Y")
                .arg(owner(old))
                .arg(millis(*ttl))
                .arg(owner(new));
        }
        Op::Adopt {
            owner: of,
            from,
            ttl,
        } => {
            command
                .arg("D")
                .arg(owner(of))
                .arg(millis(*ttl))
                .arg(&**from);
        }
        Op::Renew { owner: of, ttl } => {
            command.arg(owner(of)).arg(millis(*ttl));
        }
        Op::Raise {
            owner: of,
            draw,
            age,
        } => {
            command
                .arg("V")
                .arg(owner(of))
                .arg(*draw)
                .arg(u8::from(*age));
        }
    }
}

/// Rounded up: the server must not end a lease before we do (D1).
fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

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
    pub(super) at: ServerTime,
    pub(super) verdicts: Vec<Verdict>,
}

/// Takes the reply to call `number` apart. `None` if it is not the reply to this call about these
/// jobs: then whatever follows on its connection may be another's, too (O4).
pub(super) fn read_reply(number: u64, jobs: &[Job], reply: Value) -> Option<Reply> {
    let (at, answers) = read_head(number, reply)?;
    if answers.len() != jobs.len() {
        return None;
    }
    let verdicts = jobs
        .iter()
        .zip(answers)
        .map(|(job, answer)| read_verdict(&job.wish, answer))
        .collect::<Option<_>>()?;
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
        (Op::Attempt { .. } | Op::Enter { .. } | Op::Adopt { .. }, "stale", []) => {
            return Some(Verdict::Stale);
        }
        (
            Op::Attempt { .. } | Op::Enter { .. } | Op::Yield { .. } | Op::Adopt { .. },
            "won",
            [draw],
        ) => Outcome::Won { draw: int(draw)? },
        (Op::Attempt { .. } | Op::Enter { .. } | Op::Yield { .. }, "busy", [left, score]) => {
            Outcome::Busy {
                left: read_left(left)?,
                score: match score {
                    Value::Nil => None,
                    score => Some(int(score)?),
                },
            }
        }
        (Op::Yield { .. } | Op::Adopt { .. }, "not-old", []) => Outcome::NotOld,
        (Op::Release { .. } | Op::Withdraw { .. }, "gone", [held]) => Outcome::Gone {
            held: int(held)? == 1,
        },
        (Op::Renew { .. }, "renewed", []) => Outcome::Renewed,
        (Op::Raise { .. }, "raised", [Value::Int(age)]) => Outcome::Raised {
            age: u64::try_from(*age).ok().map(Duration::from_secs),
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

/// Milliseconds left; PTTL's negative numbers mean that there is no end, or no lock.
fn read_left(value: &Value) -> Option<Option<Duration>> {
    match value {
        Value::Int(left) => Some(u64::try_from(*left).ok().map(Duration::from_millis)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn job(op: Op) -> Job {
        Job {
            key: "k".into(),
            wish: Wish::Op {
                op,
                was_stale: false,
            },
        }
    }

    /// The words after the script's hash.
    fn words(lane: Lane, jobs: &[Job]) -> String {
        let names = Names::new("lock".into(), "ab".into());
        let command = lane.command(&names, 5, 1000, jobs);
        let words = command.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            _ => panic!("a cursor"),
        });
        words.collect::<Vec<_>>().join("|")
    }

    #[test]
    fn ops_are_spelt_as_the_scripts_read_them() {
        let batch = [
            Op::Attempt {
                owner: Owner(1),
                ttl: TTL,
            },
            Op::Enter {
                owner: Owner(2),
                ttl: TTL,
                score: None,
            },
            Op::Enter {
                owner: Owner(3),
                ttl: TTL,
                score: Some(7),
            },
            Op::Withdraw { owner: Owner(4) },
            Op::Release { owner: Owner(5) },
            Op::Yield {
                old: Owner(6),
                new: Owner(7),
                ttl: TTL,
            },
            Op::Adopt {
                owner: Owner(8),
                from: "cd:9".into(),
                ttl: TTL,
            },
            Op::Raise {
                owner: Owner(9),
                draw: 1_700_000_000_000_001,
                age: true,
            },
        ];
        let keys = "|lock:k|{lock:k}:~queue1".repeat(8);
        let ops = "A|ab:1|30000|E|ab:2|30000||E|ab:3|30000|7|W|ab:4|R|ab:5|Y|ab:6|30000|ab:7\
                   |D|ab:8|30000|cd:9|V|ab:9|1700000000000001|1";
        assert_eq!(
            words(Lane::Batch, &batch.map(job)),
            format!("17|lock:~fence{keys}|5|1000|lock|{ops}")
        );
        let renew = job(Op::Renew {
            owner: Owner(8),
            ttl: TTL,
        });
        assert_eq!(words(Lane::Renew, &[renew]), "1|lock:k|5|ab:8|30000");
    }

    #[test]
    fn d1_a_ttl_is_rounded_up_to_the_millisecond() {
        assert_eq!(millis(Duration::from_millis(10)), 10);
        assert_eq!(millis(Duration::from_nanos(10_000_001)), 11);
        assert_eq!(millis(Duration::MAX), u64::MAX);
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
        assert_eq!((fits.at, fits.verdicts), (9, vec![Verdict::Done(held)]));
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
}
