//! Operations as the words of a script call.

use std::io::Write;
use std::time::Duration;

use redis::{Cmd, RedisWrite};

use super::keys::Names;
use super::request::{Request, RequestKind};
use super::script::Script;
use crate::store::contract::{KEPT, Mode, Op, Owner, ServerTime, SubmittedOp};

/// The call for these requests. They are all renewals, all bare, all inspections, or all others. `of_use`:
/// the last server time at which the caller still waits for an answer (O5).
pub(super) fn command(
    script: &Script,
    names: &Names,
    number: u64,
    of_use: ServerTime,
    requests: &[Request],
) -> Cmd {
    let ops: Vec<_> = requests.iter().map(spell).collect();
    // The numbers of locks, queues, subscriptions and fences that follow, in this order.
    let sets = match ops.first() {
        Some((b'N' | b'F', _)) => 1,
        Some((b'K', _)) if requests.iter().all(|it| it.is_bare) => 1,
        Some((b'I', _)) => 2,
        _ => 4,
    };
    let keys = sets.min(3) * ops.len() + sets / 4;
    let mut command = script.command(keys, 3 + 4 * ops.len());
    for request in requests {
        add(&mut command, &names.lock(request.key()));
    }
    for request in requests.iter().filter(|_| sets > 1) {
        add(&mut command, &names.queue(request.key()));
    }
    for request in requests.iter().filter(|_| sets > 2) {
        add(&mut command, &names.listeners(request.key()));
    }
    for request in requests.iter().take(sets / 4) {
        add(&mut command, &names.fence(request.key()));
    }
    let letters: Vec<_> = ops.iter().map(|(letter, _)| *letter).collect();
    let is_of_use_for_a_time = letters.iter().any(|letter| b"AELD".contains(letter));
    command.arg(number).arg(letters);
    // As long as the number that the script compares it with (O5).
    let of_use = is_of_use_for_a_time.then(|| format!("{of_use:016}"));
    command.arg(of_use.as_deref().unwrap_or(""));
    let is_said = |index: &usize| ops.iter().any(|(_, words)| words[*index] != Word::None);
    let said = (0..4).rev().find(is_said).map_or(0, |last| last + 1);
    for index in 0..said {
        for (_, words) in &ops {
            let mut word = command.writer_for_next_arg();
            let written = match words[index] {
                Word::None | Word::Mode(Mode::Exclusive) => Ok(()),
                Word::Number(number) => write!(word, "{number}"),
                Word::Text(text) => write!(word, "{text}"),
                Word::Owner(owner) => write!(word, "{}:{}", names.instance(), owner.sequence),
                Word::Kept(owner) => write!(word, "{}{KEPT}:{}", names.instance(), owner.sequence),
                Word::Mode(Mode::Shared) => write!(word, "{READER}"),
                Word::Mode(Mode::Permits { limit, weight }) => write!(word, "{weight}/{limit}"),
            };
            written.expect(TAKES_ALL);
        }
    }
    command
}

/// The mode of a reader, as the script writes it. That of an exclusive lock is empty.
const READER: &str = "r";

/// Reads a mode as it is in a ticket.
pub(super) fn read_mode(mode: &str) -> Option<Mode> {
    if mode == READER {
        return Some(Mode::Shared);
    }
    let (weight, limit) = mode.split_once('/')?;
    let (weight, limit) = (weight.parse().ok()?, limit.parse().ok()?);
    Some(Mode::Permits { limit, weight })
}

const TAKES_ALL: &str = "a command takes everything";

/// Adds one word that is given in pieces.
fn add(command: &mut Cmd, pieces: &[&str]) {
    let mut word = command.writer_for_next_arg();
    for piece in pieces {
        word.write_all(piece.as_bytes()).expect(TAKES_ALL);
    }
}

/// One argument of an operation.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Word<'a> {
    None,
    Number(u64),
    Text(&'a str),
    Owner(Owner),
    /// The name under which its key is kept (M8).
    Kept(Owner),
    Mode(Mode),
}

/// Its name in `script.lua`, and its arguments.
pub(super) fn spell(request: &Request) -> (u8, [Word<'_>; 4]) {
    use Word::{None, Number, Text};
    let RequestKind::Op(SubmittedOp { op, .. }) = &request.kind else {
        return (b'I', [None; 4]);
    };
    let mode = match op.owner().mode {
        Mode::Exclusive => None,
        mode => Word::Mode(mode),
    };
    let owned = |owner: &Owner| Word::Owner(*owner);
    let ms = |ttl: &Duration| Number(millis(*ttl));
    let (letter, [one, two, three]) = match op {
        Op::Attempt { owner, ttl } => (b'A', [owned(owner), ms(ttl), None]),
        Op::Enter { owner, ttl, .. } if request.attempts_first => {
            (b'A', [owned(owner), ms(ttl), None])
        }
        Op::Enter { owner, ttl, score } => {
            (b'E', [owned(owner), ms(ttl), score.map_or(None, Number)])
        }
        Op::Listen { owner, ttl } => (b'L', [owned(owner), ms(ttl), None]),
        Op::Withdraw { owner, ttl } => (b'W', [owned(owner), ms(ttl), None]),
        Op::Unlisten { owner } => (b'U', [owned(owner), None, None]),
        Op::Release { owner } if request.is_bare => (b'F', [owned(owner), None, None]),
        Op::Release { owner } => (b'R', [owned(owner), None, None]),
        Op::Keep { owner, left } => (b'K', [owned(owner), ms(left), Word::Kept(*owner)]),
        Op::Yield { old, new, ttl } => (b'Y', [owned(old), ms(ttl), owned(new)]),
        Op::Renew { owner, ttl, .. } => (b'N', [owned(owner), ms(ttl), None]),
        Op::Adopt { owner, from, ttl } => (b'D', [owned(owner), ms(ttl), Text(from)]),
        Op::Raise { owner, epoch, age } => {
            let age = Number(u64::from(*age));
            (b'V', [owned(owner), Number(*epoch), age])
        }
        Op::Serve { owner } => (b'S', [owned(owner), None, None]),
    };
    (letter, [one, two, three, mode])
}

/// Rounded up: the server must not end a lease before we do (D1).
fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use futures::channel::oneshot;

    use super::*;
    use crate::store::redis::script;

    const TTL: Duration = Duration::from_secs(30);

    fn request(op: Op) -> Request {
        Request::new(RequestKind::Op(SubmittedOp::unattended("k", op)))
    }

    /// The words after the script's hash.
    fn words(command: &Cmd) -> String {
        let words = command.args_iter().skip(2).map(|arg| match arg {
            redis::Arg::Simple(bytes) => String::from_utf8(bytes.to_vec()).unwrap(),
            _ => panic!("a cursor"),
        });
        words.collect::<Vec<_>>().join("|")
    }

    fn batch(requests: &[Request]) -> String {
        words(&command(&script::SERVER, &names(), 5, 1000, requests))
    }

    fn names() -> Names {
        Names::new("lock".into(), "ab".into())
    }

    #[test]
    fn ops_are_spelt_as_the_script_reads_them() {
        let (owner, ttl) = (Owner::exclusive, TTL);
        let ops = [
            Op::Attempt {
                owner: owner(1),
                ttl,
            },
            Op::Enter {
                owner: owner(2),
                ttl,
                score: None,
            },
            Op::Enter {
                owner: owner(3),
                ttl,
                score: Some(7),
            },
            Op::Listen {
                owner: owner(4),
                ttl,
            },
            Op::Withdraw {
                owner: owner(5),
                ttl,
            },
            Op::Unlisten { owner: owner(6) },
            Op::Release { owner: owner(7) },
            Op::Yield {
                old: owner(8),
                new: owner(9),
                ttl,
            },
            Op::Adopt {
                owner: owner(10),
                from: "cd:9".into(),
                ttl,
            },
            Op::Raise {
                owner: owner(11),
                epoch: 1_700_000_000_000_001,
                age: true,
            },
        ];
        let sets = [
            "lock:k|",
            "{lock:k}:~queue2|",
            "{lock:k}:~listen1|",
            "lock:~fence",
        ];
        let keys = sets[..3].iter().map(|key| key.repeat(10));
        let keys = keys.collect::<String>() + sets[3];
        let owners = "ab:1|ab:2|ab:3|ab:4|ab:5|ab:6|ab:7|ab:8|ab:10|ab:11";
        let ttls = "30000|30000|30000|30000|30000|||30000|30000|1700000000000001";
        assert_eq!(
            batch(&ops.clone().map(request)),
            format!("31|{keys}|5|AEELWURYDV|0000000000001000|{owners}|{ttls}|||7|||||ab:9|cd:9|1")
        );
        for (at, alone) in [
            (0, "A|0000000000001000|ab:1|30000"),
            (1, "E|0000000000001000|ab:2|30000"),
            (2, "E|0000000000001000|ab:3|30000|7"),
            (4, "W||ab:5|30000"),
            (6, "R||ab:7"),
            (7, "Y||ab:8|30000|ab:9"),
        ] {
            let keys = sets.concat();
            let expected = format!("4|{keys}|5|{alone}");
            assert_eq!(batch(&[request(ops[at].clone())]), expected);
        }
    }

    #[test]
    fn ops_without_a_queue_name_the_locks_alone() {
        let (owner, ttl, within) = (Owner::exclusive(8), TTL, TTL);
        let jobs = [request(Op::Renew { owner, ttl, within })];
        assert_eq!(batch(&jobs), "1|lock:k|5|N||ab:8|30000");
        let mut release = request(Op::Release { owner });
        release.is_bare = true;
        assert_eq!(batch(&[release]), "1|lock:k|5|F||ab:8");
        let mut keep = request(Op::Keep { owner, left: TTL });
        keep.is_bare = true;
        assert_eq!(batch(&[keep]), "1|lock:k|5|K||ab:8|30000|ab+kept:8");
        let look = Request::new(RequestKind::Look("k".into(), oneshot::channel().0));
        assert_eq!(batch(&[look]), "2|lock:k|{lock:k}:~queue2|5|I|");
    }

    #[test]
    fn a_waiter_that_cannot_be_notified_polls_without_subscribing() {
        let (owner, ttl) = (Owner::exclusive(5), TTL);
        let mut listen = request(Op::Listen { owner, ttl });
        listen.listen_to_nothing();
        assert_eq!(
            batch(&[listen]),
            batch(&[request(Op::Attempt { owner, ttl })])
        );
    }

    #[test]
    fn d1_a_ttl_is_rounded_up_to_the_millisecond() {
        assert_eq!(millis(Duration::from_millis(10)), 10);
        assert_eq!(millis(Duration::from_nanos(10_000_001)), 11);
        assert_eq!(millis(Duration::MAX), u64::MAX);
    }
}
