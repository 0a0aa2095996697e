//! The wire form of a pair's two ops by itself, for the bench that counts its instructions.

use std::sync::LazyLock;
use std::time::Duration;

use redis::Value;

use super::call::Job;
use super::keys::Names;
use super::reply::read_reply;
use super::script;
use crate::store::contract::{Op, Owner};
use crate::store::send_window::Priority;

/// The calls that acquire and then release so many free keys, one call each.
pub(crate) struct Calls {
    names: Names,
    jobs: [Vec<Job>; 2],
    number: u64,
    /// What the server says to each call, the last first: made before anything is counted.
    replies: Vec<Value>,
}

impl Calls {
    pub(crate) fn new(keys: u64, rounds: u64) -> Self {
        let instance = "0123456789abcdef0123456789abcdef".into();
        let jobs = |op: fn(Owner) -> Op| {
            (1..=keys)
                .map(|n| Job::new(format!("order:{n}"), op(Owner(n))))
                .collect()
        };
        let acquired = jobs(|owner| Op::Enter {
            owner,
            ttl: Duration::from_secs(30),
            score: None,
        });
        let released = jobs(|owner| Op::Release { owner });
        // As `script.lua` says it, as long as everything goes as it mostly does.
        let reply = |number: u64| {
            let answers = |answer: &str| answer.repeat(keys as usize);
            let text = match number % 2 {
                1 => format!(
                    "{number} {}{}",
                    1_767_225_600_100_000 + number,
                    answers(" +")
                ),
                _ => format!("{number} {}", answers(" 1")),
            };
            Value::BulkString(text.into())
        };
        // The script is hashed once a process, which is no part of a call.
        LazyLock::force(&script::SERVER);
        Self {
            names: Names::new("lock".into(), instance),
            jobs: [acquired, released],
            number: 0,
            replies: (1..=2 * rounds).rev().map(reply).collect(),
        }
    }

    /// Forms the next two calls, and reads their replies; how many bytes and verdicts those were.
    pub(crate) fn round(&mut self) -> (usize, usize) {
        let (mut bytes, mut verdicts) = (0, 0);
        for jobs in &self.jobs {
            self.number += 1;
            let of_use = 1_767_225_601_000_000;
            let lane = Priority::Change;
            let command = lane.command_of(&script::SERVER, &self.names, self.number, of_use, jobs);
            bytes += command.get_packed_command().len();
            let reply = self.replies.pop().expect("one for each call");
            let reply = read_reply(self.number, jobs, reply).expect("it is the one to this call");
            verdicts += reply.verdicts.len();
        }
        (bytes, verdicts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_has_its_bytes_and_its_verdicts() {
        for keys in [1, 20] {
            let mut calls = Calls::new(keys, 3);
            for _ in 0..3 {
                let (bytes, verdicts) = calls.round();
                assert_eq!(verdicts as u64, 2 * keys);
                // The key twice and the owner, for each op.
                assert!(bytes as u64 > 2 * keys * 50, "{bytes} bytes");
            }
        }
    }
}
