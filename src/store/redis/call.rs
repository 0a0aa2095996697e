//! Ops as the words of a script call.

use std::borrow::Borrow;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use futures::channel::oneshot;
use redis::{Cmd, RedisWrite};

use super::keys::Names;
use super::script::{self, Script};
use crate::StoreError;
use crate::store::contract::{Op, Owner, ServerTime, Sight};
use crate::store::traffic::{Cargo, Lane};

/// One wish about one lock, on its way to the server and back.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) key: Arc<str>,
    pub(super) wish: Wish,
    /// Whether it was refused with the whole of a call, perhaps for a neighbour's sake (S1).
    pub(super) alone: bool,
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

impl Job {
    pub(super) fn new(key: impl Into<Arc<str>>, op: Op) -> Self {
        let was_stale = false;
        Self::of(key.into(), Wish::Op { op, was_stale })
    }

    pub(super) fn of(key: Arc<str>, wish: Wish) -> Self {
        let alone = false;
        Self { key, wish, alone }
    }

    /// Who cannot be told is not to be.
    pub(super) fn listen_to_nothing(&mut self) {
        if let Wish::Op { op, .. } = &mut self.wish
            && let Op::Listen { owner, ttl } = *op
        {
            *op = Op::Attempt { owner, ttl };
        }
    }
}

impl Cargo for Job {
    type Key = Arc<str>;

    fn key(&self) -> &Arc<str> {
        &self.key
    }

    fn lane(&self) -> Lane {
        Lane::of(&self.wish)
    }

    fn is_alone(&self) -> bool {
        self.alone
    }
}

impl Lane {
    fn of(wish: &Wish) -> Self {
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

    /// [`Self::command_of`] with the lane's own script.
    pub(super) fn command(
        self,
        names: &Names,
        number: u64,
        of_use: ServerTime,
        jobs: &[impl Borrow<Job>],
    ) -> Cmd {
        self.command_of(self.script(), names, number, of_use, jobs)
    }

    /// The call for some jobs of this lane. `of_use` is the last server time at which whoever asks
    /// still waits for an answer (O5).
    pub(super) fn command_of(
        self,
        script: &Script,
        names: &Names,
        number: u64,
        of_use: ServerTime,
        jobs: &[impl Borrow<Job>],
    ) -> Cmd {
        let count = jobs.len();
        let (keys, words) = match self {
            Self::Renew => (count, 1 + 2 * count),
            Self::Batch => (1 + 2 * count, 2 + 3 * count),
            Self::Inspect => (2 * count, 1),
        };
        let mut command = script.command(keys, words);
        let jobs = jobs.iter().map(Borrow::borrow);
        if self == Self::Batch
            && let Some(first) = jobs.clone().next()
        {
            add(&mut command, &names.fence(&first.key));
        }
        for job in jobs.clone() {
            add(&mut command, &names.lock(&job.key));
        }
        if self != Self::Renew {
            for job in jobs.clone() {
                add(&mut command, &names.queue(&job.key));
            }
        }
        let ops = jobs.filter_map(|job| match &job.wish {
            Wish::Op { op, .. } => Some(op),
            Wish::Look(_) => None,
        });
        match self {
            Self::Renew => {
                command.arg(number);
                for op in ops {
                    add_owner(&mut command, names, op);
                    add_more(&mut command, names, op, false);
                }
            }
            Self::Batch => {
                let mut word = command.writer_for_next_arg();
                write!(word, "{number}").expect(TAKES_ALL);
                for letter in ops.clone().filter_map(letter) {
                    word.write_all(&[letter]).expect(TAKES_ALL);
                }
                drop(word);
                for op in ops.clone() {
                    add_owner(&mut command, names, op);
                }
                // Each word takes the server nearly half as long as a look at a key does, so none is
                // sent that says nothing.
                if ops.clone().any(is_of_use_for_a_time) {
                    command.arg(of_use);
                } else if ops.clone().any(says_more) {
                    command.arg("");
                }
                for (index, op) in ops.enumerate() {
                    add_more(&mut command, names, op, index + 1 == count);
                }
            }
            Self::Inspect => {
                command.arg(number);
            }
        }
        command
    }
}

/// The call for some releases that are about the locks alone.
#[cfg(feature = "cluster")]
pub(super) fn free_command(names: &Names, number: u64, jobs: &[impl Borrow<Job>]) -> Cmd {
    let count = jobs.len();
    let mut command = script::CLUSTER_FREE.command(count, 1 + count);
    for job in jobs {
        add(&mut command, &names.lock(&job.borrow().key));
    }
    command.arg(number);
    for job in jobs {
        if let Wish::Op { op, .. } = &job.borrow().wish {
            add_owner(&mut command, names, op);
        }
    }
    command
}

const TAKES_ALL: &str = "a command takes everything";

/// Adds one word that comes in pieces.
fn add(command: &mut Cmd, pieces: &[&str]) {
    let mut word = command.writer_for_next_arg();
    for piece in pieces {
        word.write_all(piece.as_bytes()).expect(TAKES_ALL);
    }
}

fn add_text_of(command: &mut Cmd, names: &Names, owner: Owner) {
    let mut word = command.writer_for_next_arg();
    write!(word, "{}:{}", names.instance(), owner.0).expect(TAKES_ALL);
}

/// What `batch.lua` calls the op; a renewal goes in a lane of its own.
pub(super) fn letter(op: &Op) -> Option<u8> {
    Some(match op {
        Op::Attempt { .. } => b'A',
        Op::Listen { .. } | Op::Enter { .. } => b'E',
        Op::Withdraw { .. } => b'W',
        Op::Release { .. } => b'R',
        Op::Yield { .. } => b'Y',
        Op::Adopt { .. } => b'D',
        Op::Raise { .. } => b'V',
        Op::Renew { .. } => return None,
    })
}

/// Whose op it is.
fn add_owner(command: &mut Cmd, names: &Names, op: &Op) {
    match op {
        Op::Attempt { owner, .. }
        | Op::Listen { owner, .. }
        | Op::Enter { owner, .. }
        | Op::Withdraw { owner }
        | Op::Release { owner }
        | Op::Yield { old: owner, .. }
        | Op::Adopt { owner, .. }
        | Op::Raise { owner, .. }
        | Op::Renew { owner, .. } => add_text_of(command, names, *owner),
    }
}

/// Whether the call is to name the last time at which the op is of use (O5).
fn is_of_use_for_a_time(op: &Op) -> bool {
    match op {
        Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Adopt { .. } => true,
        Op::Withdraw { .. }
        | Op::Release { .. }
        | Op::Yield { .. }
        | Op::Renew { .. }
        | Op::Raise { .. } => false,
    }
}

/// Whether there is more to say of it than whose it is.
fn says_more(op: &Op) -> bool {
    !matches!(op, Op::Withdraw { .. } | Op::Release { .. })
}

/// What else there is to say of it. `is_last`: nothing is to follow.
fn add_more(command: &mut Cmd, names: &Names, op: &Op, is_last: bool) {
    match op {
        Op::Withdraw { .. } | Op::Release { .. } => {}
        Op::Attempt { ttl, .. } | Op::Renew { ttl, .. } => {
            command.arg(millis(*ttl));
        }
        Op::Listen { ttl, .. } => {
            command.arg(millis(*ttl)).arg(LISTENS);
        }
        Op::Enter { ttl, score, .. } => {
            command.arg(millis(*ttl));
            if let Some(score) = score {
                command.arg(*score);
            } else if !is_last {
                command.arg("");
            }
        }
        Op::Yield { ttl, new, .. } => {
            command.arg(millis(*ttl));
            add_text_of(command, names, *new);
        }
        Op::Adopt { ttl, from, .. } => {
            command.arg(millis(*ttl)).arg(&**from);
        }
        Op::Raise { draw, age, .. } => {
            command.arg(*draw).arg(u8::from(*age));
        }
    }
}

/// In the place of a score: not to stand for the lock, but to be told when it is free.
const LISTENS: &str = "ear";

/// Rounded up: the server must not end a lease before we do (D1).
fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    fn job(op: Op) -> Job {
        Job::new("k", op)
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
        let (locks, queues) = ("|lock:k".repeat(8), "|{lock:k}:~queue1".repeat(8));
        let owners = "ab:1|ab:2|ab:3|ab:4|ab:5|ab:6|ab:8|ab:9";
        let more = "30000|30000||30000|7|30000|ab:7|30000|cd:9|1700000000000001|1";
        assert_eq!(
            words(Lane::Batch, &batch.clone().map(job)),
            format!("17|lock:~fence{locks}{queues}|5AEEWRYDV|{owners}|1000|{more}")
        );
        for (at, alone) in [
            (0, "5A|ab:1|1000|30000"),
            (1, "5E|ab:2|1000|30000"),
            (2, "5E|ab:3|1000|30000|7"),
            (3, "5W|ab:4"),
            (4, "5R|ab:5"),
            (5, "5Y|ab:6||30000|ab:7"),
        ] {
            assert_eq!(
                words(Lane::Batch, &[job(batch[at].clone())]),
                format!("3|lock:~fence|lock:k|{{lock:k}}:~queue1|{alone}"),
                "no word at the end that says nothing"
            );
        }
        let renew = job(Op::Renew {
            owner: Owner(8),
            ttl: TTL,
        });
        assert_eq!(words(Lane::Renew, &[renew]), "1|lock:k|5|ab:8|30000");
        let (owner, ttl) = (Owner(5), TTL);
        let mut listen = job(Op::Listen { owner, ttl });
        let key = "3|lock:~fence|lock:k|{lock:k}:~queue1";
        assert_eq!(
            words(Lane::Batch, std::slice::from_ref(&listen)),
            format!("{key}|5E|ab:5|1000|30000|ear")
        );
        listen.listen_to_nothing();
        assert_eq!(
            words(Lane::Batch, &[listen]),
            format!("{key}|5A|ab:5|1000|30000")
        );
    }

    #[test]
    fn d1_a_ttl_is_rounded_up_to_the_millisecond() {
        assert_eq!(millis(Duration::from_millis(10)), 10);
        assert_eq!(millis(Duration::from_nanos(10_000_001)), 11);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }
}
