//! Operations as the words of a script call.

use std::time::Duration;

use super::keys::Names;
use crate::base::Mode;
use crate::base::holder::KEPT;
use crate::store::contract::{Op, Owner, ServerTime};
use crate::store::driver::Request;

/// Writes the call for these requests. They are all renewals, all bare, all inspections, or all others. `script`: the
/// command, and the script's name or text. `of_use`: the last server time at which the caller still waits for an answer
/// (O5).
pub(super) fn write(
    out: &mut Vec<u8>,
    script: [&str; 2],
    names: &Names,
    number: u64,
    of_use: ServerTime,
    requests: &[Request],
) {
    let ops: Vec<_> = requests.iter().map(spell).collect();
    // The numbers of locks, queues, subscriptions and fences that follow, in this order.
    let sets = match ops.first() {
        Some((b'N' | b'F', _)) => 1,
        Some((b'K', _)) if requests.iter().all(|it| it.is_bare) => 1,
        Some((b'I', _)) => 2,
        _ => 4,
    };
    let keys = sets.min(3) * ops.len() + sets / 4;
    let is_said = |index: &usize| ops.iter().any(|(_, words)| words[*index] != Word::None);
    let said = (0..4).rev().find(is_said).map_or(0, |last| last + 1);
    begin(out, 3 + keys + 3 + said * ops.len());
    for it in script {
        add(out, [it]);
    }
    add(out, [Digits::new().format(keys)]);
    for request in requests {
        add(out, names.lock(request.key()));
    }
    for request in requests.iter().filter(|_| sets > 1) {
        add(out, names.queue(request.key()));
    }
    for request in requests.iter().filter(|_| sets > 2) {
        add(out, names.listeners(request.key()));
    }
    for request in requests.iter().take(sets / 4) {
        add(out, names.fence(request.key()));
    }
    add(out, [Digits::new().format(number)]);
    let mut letters = String::with_capacity(ops.len());
    letters.extend(ops.iter().map(|(letter, _)| char::from(*letter)));
    add(out, [&letters]);
    let is_of_use_for_a_time = letters.contains(['A', 'E', 'L', 'D']);
    // As long as the number that the script compares it with (O5).
    let of_use = is_of_use_for_a_time.then(|| format!("{of_use:016}"));
    add(out, [of_use.as_deref().unwrap_or("")]);
    let instance = names.instance();
    for index in 0..said {
        for (_, words) in &ops {
            let (mut one, mut two) = (Digits::new(), Digits::new());
            match words[index] {
                Word::None | Word::Mode(Mode::Exclusive) => add(out, []),
                Word::Number(number) => add(out, [one.format(number)]),
                Word::Text(text) => add(out, [text]),
                Word::Owner(owner) => add(out, [instance, ":", one.format(owner.sequence)]),
                Word::Kept(owner) => add(out, [instance, KEPT, ":", one.format(owner.sequence)]),
                Word::Mode(Mode::Shared) => add(out, [READER]),
                Word::Mode(Mode::Permits { limit, weight }) => {
                    add(out, [one.format(weight), "/", two.format(limit)]);
                }
            }
        }
    }
}

type Digits = itoa::Buffer;

/// Begins a command of so many words.
fn begin(out: &mut Vec<u8>, words: usize) {
    out.push(b'*');
    out.extend_from_slice(Digits::new().format(words).as_bytes());
    out.extend_from_slice(b"\r\n");
}

/// Adds one word that is given in pieces.
fn add<const N: usize>(out: &mut Vec<u8>, pieces: [&str; N]) {
    let length: usize = pieces.iter().map(|piece| piece.len()).sum();
    // Room for all of it, and for the length before it.
    out.reserve(length + 32);
    out.push(b'$');
    out.extend_from_slice(Digits::new().format(length).as_bytes());
    out.extend_from_slice(b"\r\n");
    for piece in pieces {
        out.extend_from_slice(piece.as_bytes());
    }
    out.extend_from_slice(b"\r\n");
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
    let Some(op) = request.op() else {
        return (b'I', [None; 4]);
    };
    let mode = match op.owner().mode {
        Mode::Exclusive => None,
        mode => Word::Mode(mode),
    };
    let owned = |owner: &Owner| Word::Owner(*owner);
    let ms = |ttl: &Duration| Number(millis(*ttl));
    let letter = match op {
        Op::Enter { .. } if request.attempts_first => b'A',
        Op::Release { .. } if request.is_bare => b'F',
        _ => op.letter(),
    };
    let [one, two, three] = match op {
        Op::Enter { owner, ttl, score } if !request.attempts_first => {
            [owned(owner), ms(ttl), score.map_or(None, Number)]
        }
        Op::Attempt { owner, ttl }
        | Op::Enter { owner, ttl, .. }
        | Op::Listen { owner, ttl }
        | Op::Withdraw { owner, ttl }
        | Op::Renew { owner, ttl, .. } => [owned(owner), ms(ttl), None],
        Op::Unlisten { owner }
        | Op::Release { owner }
        | Op::Verify { owner }
        | Op::Serve { owner } => [owned(owner), None, None],
        Op::Keep { owner, left } => [owned(owner), ms(left), Word::Kept(*owner)],
        Op::Yield { old, new, ttl } => [owned(old), ms(ttl), owned(new)],
        Op::Evict { whose } => [Text(whose), None, None],
        Op::Adopt {
            owner, from, ttl, ..
        } => [owned(owner), ms(ttl), Text(from)],
        Op::Raise { owner, epoch, age } => [owned(owner), Number(*epoch), Number(u64::from(*age))],
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
    use crate::store::contract::SubmittedOp;
    use crate::store::driver::RequestKind;
    use crate::store::redis::script;

    const TTL: Duration = Duration::from_secs(30);

    fn request(op: Op) -> Request {
        Request::new(RequestKind::Op(SubmittedOp::unattended("k", op)))
    }

    /// The words after the script's hash.
    fn batch(requests: &[Request]) -> String {
        let mut call = Vec::new();
        let script = script::SERVER.named();
        write(&mut call, script, &names(), 5, 1000, requests);
        let words: Vec<String> =
            redis::from_redis_value(redis::parse_redis_value(&call).unwrap()).unwrap();
        words[2..].join("|")
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
                within: ttl,
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
