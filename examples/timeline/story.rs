//! What happened, put together from what all of them told.

use std::collections::HashMap;
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::part::micros;
use crate::{PARTS, VICTIM};

/// One thing that one of them told.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) part: usize,
    /// Microseconds since 1970.
    pub(crate) at: u64,
    pub(crate) what: What,
}

/// By the numbers of waiters, and the tokens of leases; and for how many microseconds a lease was held.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Waits(u64),
    Acquires(u64, u64, bool),
    Renews(u64),
    Releases(u64, u64),
    Loses(u64, u64),
    GivesUp(u64),
    IsKilled,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Waits(waiter) => write!(f, "waits {waiter}"),
            Self::Acquires(waiter, token, false) => write!(f, "acquires {waiter} {token}"),
            Self::Acquires(waiter, token, true) => write!(f, "is-passed {waiter} {token}"),
            Self::Renews(token) => write!(f, "renews {token}"),
            Self::Releases(token, held) => write!(f, "releases {token} {held}"),
            Self::Loses(token, held) => write!(f, "loses {token} {held}"),
            Self::GivesUp(waiter) => write!(f, "gives-up {waiter}"),
            Self::IsKilled => write!(f, "is-killed"),
        }
    }
}

impl Heard {
    /// What a child printed: the time, and then [`What`].
    pub(crate) fn parse(part: usize, line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        let (at, words) = words.split_first()?;
        let what = match words[..] {
            ["waits", waiter] => What::Waits(waiter.parse().ok()?),
            ["acquires", waiter, token] => {
                What::Acquires(waiter.parse().ok()?, token.parse().ok()?, false)
            }
            ["is-passed", waiter, token] => {
                What::Acquires(waiter.parse().ok()?, token.parse().ok()?, true)
            }
            ["renews", token] => What::Renews(token.parse().ok()?),
            ["releases", token, held] => What::Releases(token.parse().ok()?, held.parse().ok()?),
            ["loses", token, held] => What::Loses(token.parse().ok()?, held.parse().ok()?),
            ["gives-up", waiter] => What::GivesUp(waiter.parse().ok()?),
            _ => return None,
        };
        let at = at.parse().ok()?;
        Some(Self { part, at, what })
    }

    pub(crate) fn killed_now(part: usize) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let at = micros(now.unwrap_or_default());
        let what = What::IsKilled;
        Self { part, at, what }
    }
}

/// All times in milliseconds since the first event.
#[derive(Debug, Default)]
pub(crate) struct Story {
    pub(crate) waits: Vec<Wait>,
    /// In the order of their tokens.
    pub(crate) holds: Vec<Hold>,
    /// When the victim was killed.
    pub(crate) killed: Option<f64>,
    pub(crate) lasts: f64,
}

#[derive(Debug)]
pub(crate) struct Wait {
    pub(crate) part: usize,
    /// Which of those that wait at one time in one process.
    pub(crate) row: usize,
    pub(crate) from: f64,
    pub(crate) to: f64,
}

#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) part: usize,
    pub(crate) token: u64,
    pub(crate) passed: bool,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) renewed: Vec<f64>,
    pub(crate) end: End,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Released,
    Lost,
    /// Its holder was killed; nobody has told an end.
    Killed,
}

/// A lease, and its place in the order of tokens.
type Placed<'a> = (usize, &'a Hold);

impl Story {
    pub(crate) fn of(heard: &[Heard]) -> Self {
        let begin = heard.iter().map(|heard| heard.at).min().unwrap_or(0);
        let mut story = Self::default();
        let mut rows: [Vec<Option<u64>>; PARTS] = Default::default();
        let mut waiting = HashMap::new();
        for Heard { part, at, what } in heard {
            let part = *part;
            #[allow(clippy::cast_precision_loss, reason = "some seconds at most")]
            let millis = |micros: u64| micros as f64 / 1000.0;
            let at = millis(at - begin);
            story.lasts = story.lasts.max(at);
            match *what {
                What::Waits(waiter) => {
                    let rows = &mut rows[part];
                    let row = rows.iter().position(Option::is_none);
                    let row = row.unwrap_or(rows.len());
                    rows.resize(rows.len().max(row + 1), None);
                    rows[row] = Some(waiter);
                    waiting.insert((part, waiter), (row, at));
                }
                What::Acquires(waiter, ..) | What::GivesUp(waiter) => {
                    if let Some((row, from)) = waiting.remove(&(part, waiter)) {
                        rows[part][row] = None;
                        let to = at;
                        story.waits.push(Wait {
                            part,
                            row,
                            from,
                            to,
                        });
                    }
                    if let What::Acquires(_, token, passed) = *what {
                        story.holds.push(Hold {
                            part,
                            token,
                            passed,
                            from: at,
                            to: at,
                            renewed: Vec::new(),
                            end: End::Killed,
                        });
                    }
                }
                What::Renews(token) => {
                    if let Some(hold) = story.hold(part, token) {
                        hold.renewed.push(at);
                    }
                }
                What::Releases(token, held) | What::Loses(token, held) => {
                    let lost = matches!(what, What::Loses(..));
                    if let Some(hold) = story.hold(part, token) {
                        // An end is told when the store has confirmed it. By then another may have begun.
                        hold.to = at.min(hold.from + millis(held));
                        hold.end = if lost { End::Lost } else { End::Released };
                    }
                }
                What::IsKilled => story.killed = Some(at),
            }
        }
        let killed = story.killed.unwrap_or(story.lasts);
        for ((part, _), (row, from)) in waiting {
            let to = killed;
            story.waits.push(Wait {
                part,
                row,
                from,
                to,
            });
        }
        for hold in &mut story.holds {
            if hold.end == End::Killed {
                hold.to = killed.max(hold.from);
            }
        }
        story.holds.sort_by_key(|hold| hold.token);
        story
    }

    fn hold(&mut self, part: usize, token: u64) -> Option<&mut Hold> {
        let mut holds = self.holds.iter_mut().rev();
        holds.find(|hold| (hold.part, hold.token) == (part, token))
    }

    /// The lease that the victim died with, and the one after it.
    pub(crate) fn takeover(&self) -> Option<(Placed<'_>, Placed<'_>)> {
        let mut holds = (1..).zip(&self.holds);
        let dead = holds.find(|(_, hold)| hold.part == VICTIM && hold.end == End::Killed)?;
        Some((dead, holds.next()?))
    }

    pub(crate) fn summary(&self) -> String {
        let count = |of: fn(&Hold) -> bool| self.holds.iter().filter(|hold| of(hold)).count();
        let (passed, lost) = (
            count(|hold| hold.passed),
            count(|hold| hold.end == End::Lost),
        );
        let leases = self.holds.len();
        let mut summary = format!(
            "{leases} leases in {:.0} ms: {passed} passed on within a process, {lost} lost",
            self.lasts
        );
        if let Some(((dead, hold), (next, after))) = self.takeover() {
            summary.push_str(&format!(
                "\nprocess {} was killed at {:.0} ms with lease {dead}; lease {next} began {:.0} ms later in process {}",
                VICTIM + 1,
                hold.to,
                after.from - hold.to,
                after.part + 1,
            ));
        }
        summary
    }
}
