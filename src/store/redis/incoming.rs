//! What has come on a connection, message by message.
//!
//! The client library's parser takes a message apart once the whole of it is there. Given a part of one, it may pass over
//! a byte that cannot be where it is.

use std::io;

use redis::{Parser, RedisError, RedisResult, Value};

/// The longest message in bytes: far more than any reply to a session.
const LONGEST: usize = 16 << 20;

/// How deep replies nest at most: as deep as the client library takes them.
const DEEPEST: usize = 100;

/// The first byte of each value says what it is.
const KINDS: &[u8] = b"+-:_,#($!=*~>%|";

/// A buffer of less than this is not made smaller.
const KEPT: usize = 64 << 10;

#[derive(Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    /// Where the first message begins.
    start: usize,
    /// Where the next of its parts begins, or the end of a line has to be looked for.
    part: usize,
    searched: usize,
    /// How many values are missing of each list that is open, the innermost last.
    open: Vec<u64>,
    parser: Parser,
}

impl Incoming {
    pub(super) fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The first message, if the whole of it is there. After an error nothing more can be read.
    pub(super) fn next(&mut self) -> RedisResult<Option<Value>> {
        if !self.finds_end()? {
            return match self.bytes.len() - self.start > LONGEST {
                true => Err(too_long()),
                false => Ok(None),
            };
        }
        let message = &self.bytes[self.start..self.part];
        let value = match string(message) {
            Some(text) => Value::BulkString(text.to_vec()),
            None => self.parser.parse_value(message)?,
        };
        self.start = self.part;
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.bytes.shrink_to(KEPT);
            (self.start, self.part) = (0, 0);
        } else if self.start > KEPT {
            self.bytes.drain(..self.start);
            self.part -= self.start;
            self.start = 0;
        }
        self.searched = self.part;
        Ok(Some(value))
    }

    /// Goes through the parts of the first message that are there. True: its last part ends at `part`.
    fn finds_end(&mut self) -> RedisResult<bool> {
        while let Some(&kind) = self.bytes.get(self.part) {
            if !KINDS.contains(&kind) {
                let text = &self.bytes[self.part..];
                // Some answer what they do not understand with a page alone.
                let is_http = text.starts_with(b"HTTP") || text.starts_with(b"<");
                return Err(garbled(match is_http {
                    true => "HTTP: another service has this port",
                    false => "an unknown kind of value",
                }));
            }
            let Some(end) = self.end_of_line() else {
                return Ok(false);
            };
            let (rest, next) = (&self.bytes[self.part + 1..end], end + 2);
            let mut values = 0;
            match kind {
                b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => self.part = next,
                b'$' | b'!' | b'=' => match length(rest)? {
                    None => self.part = next,
                    Some(length) if length > LONGEST => return Err(too_long()),
                    Some(length) => {
                        let end = next.saturating_add(length).saturating_add(2);
                        if self.bytes.len() < end {
                            return Ok(false);
                        }
                        self.part = end;
                    }
                },
                _ => {
                    let length = length(rest)?.unwrap_or(0) as u64;
                    values = match kind {
                        b'%' => length.saturating_mul(2),
                        b'|' => length.saturating_mul(2).saturating_add(1),
                        _ => length,
                    };
                    self.part = next;
                }
            }
            self.searched = self.part;
            if values > 0 {
                if self.open.len() == DEEPEST {
                    return Err(garbled("a reply that is nested too deep"));
                }
                self.open.push(values);
            } else if self.ends_message() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A value is complete, and so may be the lists whose last one it is. True: so is the message.
    fn ends_message(&mut self) -> bool {
        while let Some(missing) = self.open.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                return false;
            }
            self.open.pop();
        }
        true
    }

    /// Where the line ends that begins at `part`, before its line break.
    fn end_of_line(&mut self) -> Option<usize> {
        let unseen = &self.bytes[self.searched..];
        match unseen.windows(2).position(|two| two == b"\r\n") {
            Some(at) => Some(self.searched + at),
            None => {
                // The last byte may be the first of a line break.
                self.searched += unseen.len().saturating_sub(1);
                None
            }
        }
    }
}

/// The text of a message that is one string, as nearly every reply is. The parser has a buffer that it clears for each
/// message.
fn string(message: &[u8]) -> Option<&[u8]> {
    let rest = message.strip_prefix(b"$")?.strip_suffix(b"\r\n")?;
    let end = rest.windows(2).position(|two| two == b"\r\n")?;
    let (digits, text) = (&rest[..end], &rest[end + 2..]);
    let is_number = digits.iter().all(u8::is_ascii_digit);
    (is_number && length(digits).ok()? == Some(text.len())).then_some(text)
}

/// `None` for a value that is not there.
fn length(digits: &[u8]) -> RedisResult<Option<usize>> {
    let text = std::str::from_utf8(digits).ok();
    let length = text.and_then(|text| text.parse::<i64>().ok());
    match length {
        Some(-1) => Ok(None),
        Some(length) if length >= 0 => {
            let length =
                usize::try_from(length).map_err(|_| garbled("a length that is too large"))?;
            Ok(Some(length))
        }
        _ => Err(garbled("a length that is no number")),
    }
}

fn too_long() -> RedisError {
    garbled("a message of more than 16 MiB")
}

fn garbled(what: &str) -> RedisError {
    let text = format!("the server sent {what}");
    io::Error::new(io::ErrorKind::InvalidData, text).into()
}
