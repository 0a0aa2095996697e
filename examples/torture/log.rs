//! The log of holds and waits: what a child writes, line by line, so that a SIGKILL loses nothing that matters.
//!
//! All times are nanoseconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lockstream::LeaseView;
use tokio::time::Instant;

use crate::judge::Mode;

/// For so long after it was won a key is passed on to other callers of its registry.
const LOCAL_SPAN: Duration = Duration::from_millis(20);

/// Now, on the clock of all processes.
pub(crate) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// A lease was taken; `lease` is its number within the child. `since`: its key may have been won as early as that, and
    /// renewed from then on, whatever the deadline says.
    Taken {
        lease: u64,
        key: String,
        token: u64,
        since: u64,
        at: u64,
        deadline: u64,
        mode: Mode,
    },
    /// Its deadline was seen to have moved.
    Until { lease: u64, at: u64, deadline: u64 },
    /// The work saw its end: it is about to release it, or was told of the loss, or is being dropped.
    Ended { lease: u64, at: u64 },
    /// Somebody begins to wait, for `limit` ns at most.
    Waits { wait: u64, at: u64, limit: u64 },
    /// It ended: `got`, `busy`, `unreachable`, `full`, `closed`, `lost` or `dropped`.
    Waited { wait: u64, at: u64, how: String },
    /// Its registry is about to be shut down: whatever it holds it releases from now on.
    Closing { at: u64 },
    /// The shutdown was under way from then till then, and waits for answers for so long (ns). One that took longer had none
    /// to all that it sent: what it did not get to is left to run out.
    ShutDown { from: u64, to: u64, longest: u64 },
    /// How many tasks the runtime had left after the registry was shut down, and how many callers never came to an end.
    Left { tasks: u64, callers: u64 },
    /// A write with the token of a lease that was over was refused, or let through since nobody had come after it.
    Late { refused: bool },
    /// A task of its runtime was to go on at the first of these times, and did so at the second.
    Slow { from: u64, to: u64 },
    /// What ought not to happen.
    Wrong { what: String },
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken {
                lease,
                key,
                token,
                since,
                at,
                deadline,
                mode,
            } => write!(
                f,
                "taken {lease} {key} {token} {since} {at} {deadline} {mode}"
            ),
            Self::Until {
                lease,
                at,
                deadline,
            } => write!(f, "until {lease} {at} {deadline}"),
            Self::Ended { lease, at } => write!(f, "ended {lease} {at}"),
            Self::Waits { wait, at, limit } => write!(f, "waits {wait} {at} {limit}"),
            Self::Waited { wait, at, how } => write!(f, "waited {wait} {at} {how}"),
            Self::Closing { at } => write!(f, "closing {at}"),
            Self::ShutDown { from, to, longest } => write!(f, "shut-down {from} {to} {longest}"),
            Self::Left { tasks, callers } => write!(f, "left {tasks} {callers}"),
            Self::Late { refused } => write!(f, "late {}", u8::from(*refused)),
            Self::Slow { from, to } => write!(f, "slow {from} {to}"),
            Self::Wrong { what } => write!(f, "wrong {}", what.replace('\n', " / ")),
        }
    }
}

impl Line {
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (name, rest) = line.split_once(' ')?;
        if name == "wrong" {
            let what = rest.to_owned();
            return Some(Self::Wrong { what });
        }
        let fields: Vec<&str> = rest.split(' ').collect();
        let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
        let text = |at: usize| Some((*fields.get(at)?).to_owned());
        Some(match name {
            "taken" => Self::Taken {
                lease: number(0)?,
                key: text(1)?,
                token: number(2)?,
                since: number(3)?,
                at: number(4)?,
                deadline: number(5)?,
                mode: Mode::parse(fields.get(6)?)?,
            },
            "until" => Self::Until {
                lease: number(0)?,
                at: number(1)?,
                deadline: number(2)?,
            },
            "ended" => Self::Ended {
                lease: number(0)?,
                at: number(1)?,
            },
            "waits" => Self::Waits {
                wait: number(0)?,
                at: number(1)?,
                limit: number(2)?,
            },
            "waited" => Self::Waited {
                wait: number(0)?,
                at: number(1)?,
                how: text(2)?,
            },
            "closing" => Self::Closing { at: number(0)? },
            "shut-down" => Self::ShutDown {
                from: number(0)?,
                to: number(1)?,
                longest: number(2)?,
            },
            "left" => Self::Left {
                tasks: number(0)?,
                callers: number(1)?,
            },
            "late" => Self::Late {
                refused: number(0)? == 1,
            },
            "slow" => Self::Slow {
                from: number(0)?,
                to: number(1)?,
            },
            _ => return None,
        })
    }
}

/// A child's own file of lines.
#[derive(Clone, Debug)]
pub(crate) struct Log(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    file: File,
    next: AtomicU64,
    /// One moment on both clocks.
    here: Instant,
    there: u64,
}

impl Log {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().append(true).create_new(true).open(path)?;
        // Stopped between the two looks, it would be seconds out: until they were close together.
        let (here, there) = loop {
            let before = now();
            let here = Instant::now();
            let after = now();
            if after - before < 100_000 {
                break (here, before);
            }
        };
        Ok(Self(Arc::new(Inner {
            file,
            next: AtomicU64::new(0),
            here,
            there,
        })))
    }

    /// In one write, at the end of the file, so lines of different threads do not mix.
    pub(crate) fn write(&self, line: &Line) {
        let line = format!("{line}\n");
        // Without its log a child is of no use, and its silence is told by the parent.
        (&self.0.file)
            .write_all(line.as_bytes())
            .expect("the log can be written");
    }

    fn number(&self) -> u64 {
        self.0.next.fetch_add(1, Ordering::Relaxed)
    }

    fn translate(&self, moment: Instant) -> u64 {
        let since = moment.saturating_duration_since(self.0.here);
        self.0.there + since.as_nanos() as u64
    }

    /// To be called before the wait begins.
    pub(crate) fn wait(&self, limit: Duration) -> Wait {
        let (number, began) = (self.number(), now());
        self.write(&Line::Waits {
            wait: number,
            at: began,
            limit: limit.as_nanos() as u64,
        });
        Wait {
            log: self.clone(),
            number,
            began,
            over: AtomicBool::new(false),
        }
    }
}

/// A wait in the log; dropped before it is over, it was its caller that was dropped.
#[derive(Debug)]
pub(crate) struct Wait {
    log: Log,
    number: u64,
    began: u64,
    over: AtomicBool,
}

impl Wait {
    /// Only the first end counts.
    pub(crate) fn ended(&self, how: &str) {
        if !self.over.swap(true, Ordering::Relaxed) {
            self.log.write(&Line::Waited {
                wait: self.number,
                at: now(),
                how: how.to_owned(),
            });
        }
    }

    /// To be called when the lease of these keys was taken, and dropped before it is released.
    pub(crate) fn hold(&self, lease: &LeaseView, keys: &[&str], mode: Mode) -> Hold {
        let deadline = self.log.translate(lease.deadline());
        let (at, mut numbers) = (now(), Vec::new());
        for (index, key) in keys.iter().enumerate() {
            let token = lease.token_of(key).expect("it has all of its keys");
            let number = self.log.number();
            let is_last = index + 1 == keys.len();
            self.log.write(&Line::Taken {
                lease: number,
                key: (*key).to_owned(),
                token: token.get(),
                since: match mode {
                    // If an answer was lost, the store let it in before it asked again.
                    Mode::Permit { .. } => self.began,
                    // The keys of a group are won one after the other, and renewed until the last is.
                    _ if !is_last => self.began.saturating_sub(LOCAL_SPAN.as_nanos() as u64),
                    _ => at,
                },
                at,
                deadline,
                mode,
            });
            numbers.push(number);
        }
        Hold {
            log: self.log.clone(),
            numbers,
            deadline: AtomicU64::new(deadline),
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        self.ended("dropped");
    }
}

/// A hold in the log; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Hold {
    log: Log,
    /// One for each key.
    numbers: Vec<u64>,
    deadline: AtomicU64,
}

impl Hold {
    /// The work looks how long it may go on.
    pub(crate) fn look(&self, lease: &LeaseView) {
        let deadline = self.log.translate(lease.deadline());
        if lease.is_valid() && self.deadline.swap(deadline, Ordering::Relaxed) != deadline {
            let at = now();
            for &lease in &self.numbers {
                self.log.write(&Line::Until {
                    lease,
                    at,
                    deadline,
                });
            }
        }
    }
}

impl Hold {
    /// The lease ends, and its key is kept until then.
    pub(crate) fn is_kept(&self, until: Instant) {
        let (at, deadline) = (now(), self.log.translate(until));
        for &lease in &self.numbers {
            self.log.write(&Line::Until {
                lease,
                at,
                deadline,
            });
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let at = now();
        for &lease in &self.numbers {
            self.log.write(&Line::Ended { lease, at });
        }
    }
}
