//! Three consumers of one log, each with `buffer_keyed`: what is done, in which order, and never at the same time.

use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use futures::{StreamExt, stream};
use lockstream::{LeaseView, LockError, LockRegistry, Renewal, StreamLockExt};
use tempfile::TempDir;
use tokio::time::sleep;

use crate::lock_server::LockServer;
use crate::spawn;
use crate::support::{PATIENCE, Role, ms};
use crate::workers::stop_this_process;

const KEYS: usize = 20;
const MESSAGES: usize = 1_500;

/// A stopped or killed consumer's keys are free after so long.
const TTL: u64 = 3_000;

/// The log: the key of each message, and its number within the key. The lower keys have more of them.
fn messages() -> impl Iterator<Item = (usize, usize)> + Clone {
    let mut numbers = [0; KEYS];
    (0..MESSAGES).map(move |at| {
        // Of 1, 4, 9, … to 400 steps each key has those between the last square and its own.
        let step = at * 7 % (KEYS * KEYS);
        let key = KEYS - 1 - step.isqrt();
        numbers[key] += 1;
        (key, numbers[key])
    })
}

/// How many messages of a key are done.
fn progress(folder: &Path, key: usize) -> usize {
    let progress = fs::read_to_string(folder.join(format!("progress-{key}")));
    progress.map_or(0, |number| number.parse().unwrap())
}

/// Does all that is not done. Told to stop, it stops its own process while its items wait.
pub(crate) async fn consume(mut role: Role, locks: &LockRegistry) {
    let folder = role.env("FOLDER");
    let folder = Path::new(&folder);
    let me = std::process::id();
    let journal = folder.join("journal");
    let journal = &OpenOptions::new()
        .append(true)
        .create(true)
        .open(journal)
        .unwrap();
    let say = |line: String| (&*journal).write_all(line.as_bytes()).unwrap();
    let is_to_do = |(key, number): &(usize, usize)| progress(folder, *key) < *number;
    // What has failed is done by whoever comes to its key next, here or elsewhere; or else once more.
    let rounds =
        std::iter::repeat_with(messages).take_while(|all| all.clone().any(|it| is_to_do(&it)));
    let items = stream::iter(rounds.flatten().filter(is_to_do));
    let items = items.map(|(key, number)| {
        let lock = locks
            .obtain(format!("k{key}"))
            .ttl(ms(TTL))
            .renewal(Renewal::watchdog());
        let work = async move |lease: LeaseView| {
            // Also what this consumer has begun and could not end.
            for number in progress(folder, key) + 1..=number {
                say(format!("begin {key} {number} {me}\n"));
                sleep(ms(2)).await;
                assert!(lease.is_valid(), "{me} is polled without its lease");
                let next = folder.join(format!("next-{key}-{me}"));
                fs::write(&next, number.to_string()).unwrap();
                // Nobody can stop what stands still within a poll.
                if !lease.is_valid() {
                    return;
                }
                fs::rename(&next, folder.join(format!("progress-{key}"))).unwrap();
                if !lease.is_valid() {
                    return say(format!("stalled {key} {number} {me}\n"));
                }
                say(format!("end {key} {number} {me}\n"));
            }
        };
        lock.wait(Duration::MAX).with_lease(work)
    });
    let mut items = pin!(items.buffer_keyed(8));
    role.say("consumes");
    loop {
        tokio::select! {
            item = items.next() => match item {
                Some(Ok(())) => {}
                // The machine stood still. Others may have begun before this one could see it.
                Some(Err(LockError::Lost { .. })) => say(format!("lost 0 0 {me}\n")),
                // Answers took longer than the ttl.
                Some(Err(LockError::TooSlow { .. })) => {}
                Some(Err(error)) => panic!("{error}"),
                None => break,
            },
            order = role.hear() => {
                assert_eq!(order, "stop");
                stop_this_process();
            }
        }
    }
    role.say("done");
    role.hear().await;
}

/// One is killed again and again, and one is stopped for longer than its leases last.
pub(crate) async fn consumers_that_are_killed_and_stopped_do_all_in_order<S: LockServer>() {
    let server = S::start();
    let folder = TempDir::new().unwrap();
    let path = folder.path().to_str().unwrap();
    let hire = async || {
        let consumer = spawn(&server, "consumer", &[("FOLDER", path)]);
        consumer.expect_line("consumes", PATIENCE).await;
        consumer
    };
    let mut consumers = [hire().await, hire().await, hire().await];
    let mut ended = Vec::new();
    for round in 0..4 {
        sleep(ms(300)).await;
        ended.push(consumers[0].pid());
        consumers[0].sigkill();
        consumers[0] = hire().await;
        if round == 1 {
            consumers[1].tell("stop");
            consumers[1].until_stopped();
            ended.push(consumers[1].pid());
            sleep(ms(2 * TTL)).await;
            consumers[1].sigcont();
        }
    }
    for consumer in &consumers {
        consumer.expect_line("done", 10 * PATIENCE).await;
    }
    let all = messages().fold(HashMap::new(), |mut all, (key, number)| {
        all.insert(key, number);
        all
    });
    for (key, number) in &all {
        assert_eq!(progress(folder.path(), *key), *number, "of {key}");
    }
    check(
        &fs::read_to_string(folder.path().join("journal")).unwrap(),
        &ended,
    );
}

/// What the consumers say of each key: one works at a time, and what it begins is what follows. Those that were killed or
/// stopped, or have lost a lease, may not have said that they are done. Who stood still in the midst of a poll, until the lease
/// was over, may have done its last step beside another.
fn check(journal: &str, ended: &[u32]) {
    let mut keys: HashMap<usize, (usize, Option<u32>)> = HashMap::new();
    let lost = journal
        .lines()
        .filter_map(|line| line.strip_prefix("lost 0 0 "));
    let lost: Vec<u32> = lost.map(|pid| pid.parse().unwrap()).collect();
    for line in journal.lines().filter(|line| !line.starts_with("lost")) {
        let words: Vec<_> = line.split(' ').collect();
        let (key, number) = (words[1].parse().unwrap(), words[2].parse().unwrap());
        let by: u32 = words[3].parse().unwrap();
        let (last, working) = keys.entry(key).or_default();
        match words[0] {
            "begin" => {
                if let Some(other) = working {
                    let is_over = ended.contains(other) || lost.contains(other);
                    assert!(is_over, "{line}: {other} works on it");
                    assert!(
                        number == *last || number == *last + 1,
                        "{line} after {last}"
                    );
                } else {
                    assert_eq!(number, *last + 1, "{line}");
                }
                (*last, *working) = (number, Some(by));
            }
            "stalled" if *working != Some(by) => {}
            "end" | "stalled" => {
                assert_eq!((*last, *working), (number, Some(by)), "{line}: late");
                *working = None;
            }
            other => panic!("{other}"),
        }
    }
}
