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
mod tests;
