//! What the reply to a script call says about each of its ops.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use super::call::{read_mode, spell};
use super::fault::ErrorReply;
use crate::base::Mode;
use crate::base::token::is_epoch;
use crate::store::contract::{Holder, KeyStatus, Occupant, Outcome, ServerTime};
use crate::store::driver::{Request, RequestKind};

/// What a reply says about one request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RequestReply {
    Done(Outcome),
    /// The same, and more tickets may fit than were served (M4).
    DoneUnserved(Outcome),
    Seen(KeyStatus),
    /// The script ran too late for it to be of use (O5).
    Stale,
    /// To be sent again at once: dead tickets were cleared and others stand behind them, the lock is as
    /// it was (G3); or the call was refused as a whole, for a reason that is seen to.
    More,
    Refused(ErrorReply),
}

/// A reply, taken apart.
#[derive(Debug, PartialEq)]
pub(super) struct Reply {
    /// The server's time; a call of releases alone does not ask for it.
    pub(super) at: Option<ServerTime>,
    pub(super) replies: Vec<RequestReply>,
}

/// Takes the reply to call `number` apart. `None` if it is not the reply to this call about these
/// requests: then whatever follows on its connection may be another's, too (O4).
pub(super) fn read_reply(number: u64, requests: &[Request], reply: Value) -> Option<Reply> {
    let (at, answers) = read_head(number, requests.len(), &reply)?;
    if answers.len() != requests.len() {
        return None;
    }
    // The epochs of plain wins follow each other, from the server's time on.
    let mut epochs = at.into_iter().flat_map(|at| at..u64::MAX);
    let mut replies = Vec::with_capacity(requests.len());
    for (request, answer) in requests.iter().zip(answers) {
        replies.push(match answer {
            RawReply::Word(word) => read_word(request, word, &mut epochs)?,
            RawReply::Table(fields) => read_table(request, at, fields)?,
        });
    }
    Some(Reply { at, replies })
}

/// Reads the reply to a probe: the server's time, and why nothing was published.
pub(super) fn read_probe(number: u64, reply: &Value) -> Option<(ServerTime, Option<ErrorReply>)> {
    let (at, answers) = read_head(number, 1, reply)?;
    let refusal = match answers[..] {
        [RawReply::Word("1")] => None,
        [RawReply::Table(fields)] => Some(read_error(fields)?),
        _ => return None,
    };
    Some((at?, refusal))
}

/// One op's part of a reply.
enum RawReply<'a> {
    Word(&'a str),
    Table(&'a [Value]),
}

/// The server's time and the answers, if the reply names this call. `count`: how many are expected.
fn read_head(
    number: u64,
    count: usize,
    reply: &Value,
) -> Option<(Option<ServerTime>, Vec<RawReply<'_>>)> {
    let mut answers = Vec::with_capacity(2 + count);
    match reply {
        Value::Array(values) => {
            for value in values {
                answers.push(match value {
                    Value::Array(fields) => RawReply::Table(fields),
                    value => RawReply::Word(text(value)?),
                });
            }
        }
        value => answers.extend(text(value)?.split(' ').map(RawReply::Word)),
    }
    let mut answers = answers.into_iter();
    let (RawReply::Word(echo), RawReply::Word(at)) = (answers.next()?, answers.next()?) else {
        return None;
    };
    let at = match at {
        "" => None,
        at => Some(at.parse().ok()?),
    };
    (echo.parse() == Ok(number)).then(|| (at, answers.collect()))
}

fn read_word(
    request: &Request,
    word: &str,
    epochs: &mut impl Iterator<Item = u64>,
) -> Option<RequestReply> {
    if let Some(word) = word.strip_suffix('&') {
        return match read_word(request, word, epochs)? {
            RequestReply::Done(outcome) => Some(RequestReply::DoneUnserved(outcome)),
            _ => None,
        };
    }
    let outcome = match (spell(request).0, word) {
        (b'A' | b'E' | b'L' | b'D', "stale") => return Some(RequestReply::Stale),
        (b'A' | b'E' | b'L' | b'Y' | b'R' | b'W' | b'U' | b'S' | b'T', "more") => {
            return Some(RequestReply::More);
        }
        (b'Y' | b'D', "not-old") => Outcome::NotOld,
        (b'N' | b'V', "lost") => Outcome::Lost,
        (b'N', "1") => Outcome::Renewed,
        (b'R' | b'F' | b'K' | b'W' | b'U' | b'S' | b'T', "0" | "1") => {
            Outcome::Gone { held: word == "1" }
        }
        (b'V', "-1") => Outcome::Raised { age: None },
        // Servers tell whole seconds, and take the whole seconds of two times from each other: one that
        // says 1 may be up for a moment.
        (b'V', age) => Outcome::Raised {
            age: Some(Duration::from_secs(
                age.parse::<u64>().ok()?.saturating_sub(1),
            )),
        },
        (b'A' | b'E' | b'L', "+") => won(epochs.next()?)?,
        (letter @ (b'A' | b'E' | b'L' | b'Y' | b'D'), word) => match word.strip_prefix("busy:") {
            Some(words) if letter != b'D' => read_busy(words, None)?,
            _ => won(word.parse().ok()?)?,
        },
        _ => return None,
    };
    Some(RequestReply::Done(outcome))
}

fn won(epoch: u64) -> Option<Outcome> {
    is_epoch(epoch).then_some(Outcome::Won { epoch })
}

/// What follows `busy:`. `owner`: of the holder, if it stands beside that.
fn read_busy(words: &str, owner: Option<&[u8]>) -> Option<Outcome> {
    let mut words = words.splitn(6, ':');
    let mut next = || words.next();
    let [left, score, entered, mode, others, word] =
        [next()?, next()?, next()?, next()?, next()?, next()?];
    let score = match score {
        "" => None,
        score => Some(score.parse().ok()?),
    };
    let owner = owner.map_or(word.into(), String::from_utf8_lossy);
    let holder = Occupant {
        owner: owner.into(),
        mode: match mode {
            "" => Mode::Exclusive,
            mode => read_mode(mode)?,
        },
        others: match others {
            "" => 0,
            others => others.parse().ok()?,
        },
    };
    Some(Outcome::Busy {
        left: read_left(left.parse().ok()?),
        score,
        entered: match entered {
            "" => false,
            "+" => true,
            _ => return None,
        },
        // A lock that nobody has may be busy for a moment (M4), and a foreign one may be empty.
        holder: (!holder.owner.is_empty()).then(|| Arc::new(holder)),
    })
}

fn read_table(request: &Request, at: Option<ServerTime>, fields: &[Value]) -> Option<RequestReply> {
    if let Some(refusal) = read_error(fields) {
        return Some(RequestReply::Refused(refusal));
    }
    if let [tag, words, Value::BulkString(owner)] = fields
        && text(tag)? == "busy"
        && matches!(spell(request).0, b'A' | b'E' | b'L' | b'Y')
    {
        let words = text(words)?.strip_prefix("busy:")?;
        return read_busy(words, Some(owner)).map(RequestReply::Done);
    }
    let (
        RequestKind::Look(..),
        [
            tag,
            value,
            Value::Int(left),
            Value::Int(tickets),
            Value::Array(queue),
            Value::Int(taken),
            Value::Array(members),
        ],
    ) = (&request.kind, fields)
    else {
        return None;
    };
    let value: Option<Vec<u8>> = redis::from_redis_value_ref(value).ok()?;
    let mut holders: Vec<Holder> = Vec::new();
    holders.extend(value.map(|value| Holder {
        name: String::from_utf8_lossy(&value).into_owned(),
        mode: Mode::Exclusive,
        left: read_left(*left),
    }));
    for member in members.chunks_exact(4) {
        let [name, Value::Int(weight), limit, end] = member else {
            return None;
        };
        // What another version has written is left out.
        let (name, Ok(end)) = (text(name)?, text(end)?.parse::<u64>()) else {
            continue;
        };
        let mode = match text(limit)? {
            "" if name.contains(' ') => continue,
            "" => Mode::Shared,
            limit => {
                let (limit, weight) = (limit.parse().ok()?, u8::try_from(*weight).ok()?);
                Mode::Permits { limit, weight }
            }
        };
        holders.push(Holder {
            name: name.to_owned(),
            mode,
            left: Some(Duration::from_micros(end.saturating_sub(at?))),
        });
    }
    let queue = queue.iter();
    let key_status = KeyStatus {
        holders,
        taken: u64::try_from(*taken).ok()?,
        tickets: u64::try_from(*tickets).ok()?,
        queue: queue
            .filter_map(|ticket| read_ticket(text(ticket)?))
            .collect(),
    };
    (text(tag)? == "key_status").then_some(RequestReply::Seen(key_status))
}

/// A ticket: `<owner> <ttl>`, and the mode of a shared one.
fn read_ticket(ticket: &str) -> Option<(String, Mode)> {
    let mut words = ticket.split(' ');
    let (owner, _ttl) = (words.next()?, words.next()?);
    let mode = words.next().map_or(Some(Mode::Exclusive), read_mode)?;
    Some((owner.to_owned(), mode))
}

fn read_error(fields: &[Value]) -> Option<ErrorReply> {
    match fields {
        [tag, message] if text(tag)? == "error" => Some(ErrorReply::parse(text(message)?)),
        _ => None,
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        _ => None,
    }
}

/// Milliseconds left; PTTL's negative numbers mean that there is no end, or no lock.
fn read_left(left: i64) -> Option<Duration> {
    u64::try_from(left).ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests;
