//! Three consumers of one Redis stream, in a consumer group, of which one is killed again and again: every entry is done,
//! and none of one key at the same time.
//!
//! `MESSAGES=100000 cargo test --all-features --test processes a_consumer_group -- --nocapture` tells how long it took.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt};
use lockstream::{FutureLockExt, LockError, LockRegistry, Renewal, StreamLockExt};
use redis::AsyncCommands;
use redis::aio::MultiplexedConnection;
use redis::streams::{
    StreamAutoClaimOptions, StreamAutoClaimReply, StreamId, StreamReadOptions, StreamReadReply,
};
use tokio::time::{sleep, timeout};

use crate::spawn;
use crate::support::{PATIENCE, RedisServer, Role, ms};

const KEYS: u64 = 50;
const STREAM: &str = "messages";
const GROUP: &str = "consumers";
const JOURNAL: &str = "journal";

/// A killed consumer's keys are free after so long.
const TTL: u64 = 600;

/// Whoever has had an entry for so long without a word of it has died.
const IDLE: usize = 1_500;

/// Acknowledges an entry and says so, unless another has.
const DONE: &str = "
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[3])
end";

/// Says that an entry is begun, and tells whether that is to be: it is not if somebody has acknowledged it.
const BEGIN: &str = "
if #redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[2], ARGV[2], 1) == 0 then
    return 0
end
redis.call('RPUSH', KEYS[2], ARGV[3])
return 1";

/// The key of a message: of 1, 4, 9, … to 2,500 steps each key has those between the last square and its own.
fn key_of(message: u64) -> u64 {
    KEYS - 1 - (message * 7 % (KEYS * KEYS)).isqrt()
}

async fn connect(url: &str) -> MultiplexedConnection {
    let client = redis::Client::open(url).unwrap();
    // Half a second by default, for which a machine may stand still.
    let config = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    let connection = client.get_multiplexed_async_connection_with_config(&config);
    connection.await.unwrap()
}

/// New entries, and those that a dead consumer has left, until all are acknowledged.
fn entries(mut redis: MultiplexedConnection, me: String) -> impl Stream<Item = StreamId> {
    async_stream::stream! {
        let mut claimed_at = Instant::now();
        loop {
            let read = StreamReadOptions::default().group(GROUP, &me).count(64);
            let new: Option<StreamReadReply> =
                redis.xread_options(&[STREAM], &[">"], &read).await.unwrap();
            let new: Vec<_> = new.into_iter().flat_map(|read| read.keys).flat_map(|key| key.ids).collect();
            let none = new.is_empty();
            for entry in new {
                yield entry;
            }
            if none || claimed_at.elapsed() > ms(500) {
                claimed_at = Instant::now();
                let claim = StreamAutoClaimOptions::default().count(1_000);
                let left: StreamAutoClaimReply =
                    redis.xautoclaim_options(STREAM, GROUP, &me, IDLE, "0", claim).await.unwrap();
                for entry in left.claimed {
                    yield entry;
                }
            }
            if none {
                let pending: (u64, Option<String>, Option<String>, redis::Value) =
                    redis::cmd("XPENDING").arg(STREAM).arg(GROUP).query_async(&mut redis).await.unwrap();
                if pending.0 == 0 {
                    return;
                }
                sleep(ms(50)).await;
            }
        }
    }
}

pub(crate) async fn consume(role: Role, locks: &LockRegistry) {
    let url = role.env("URL");
    let me = std::process::id().to_string();
    let redis = connect(&url).await;
    let (begin, done) = (&redis::Script::new(BEGIN), &redis::Script::new(DONE));
    let items = entries(connect(&url).await, me.clone()).map(|entry| {
        let key: u64 = entry.get("key").unwrap();
        let lock = locks.obtain(format!("k{key}")).ttl(ms(TTL));
        let lock = lock.renewal(Renewal::watchdog()).wait(Duration::MAX);
        let (mut redis, me) = (redis.clone(), me.clone());
        let work = async move {
            let say = |what: &str| format!("{what} {key} {} {me}", entry.id);
            let mut asked = begin.key(STREAM);
            asked
                .key(JOURNAL)
                .arg(GROUP)
                .arg(&entry.id)
                .arg(say("begin"));
            let is_to_be: bool = asked.invoke_async(&mut redis).await.unwrap();
            if is_to_be {
                tokio::task::yield_now().await;
                let mut told = done.key(STREAM);
                told.key(JOURNAL).arg(GROUP).arg(&entry.id).arg(say("end"));
                let () = told.invoke_async(&mut redis).await.unwrap();
            }
        };
        work.with_lock(lock)
    });
    let mut items = pin!(items.buffer_keyed(16));
    role.say("consumes");
    while let Some(item) = items.next().await {
        match item {
            Ok(()) => {}
            // The machine stood still. The entry is claimed once more.
            Err(LockError::Lost { .. }) => {
                let lost = format!("lost 0 0 {me}");
                let () = redis.clone().rpush(JOURNAL, lost).await.unwrap();
            }
            // Answers took longer than the ttl. It is claimed once more, too.
            Err(LockError::TooSlow { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    role.say("done");
}

#[tokio::test]
async fn a_consumer_group_that_loses_one_every_second_does_all() {
    let messages: u64 = std::env::var("MESSAGES").map_or(20_000, |count| count.parse().unwrap());
    let server = RedisServer::start();
    let mut redis = connect(&server.url()).await;
    let () = redis
        .xgroup_create_mkstream(STREAM, GROUP, "0")
        .await
        .unwrap();
    for some in (0..messages).collect::<Vec<_>>().chunks(1_000) {
        let mut all = redis::pipe();
        for message in some {
            all.xadd(STREAM, "*", &[("key", key_of(*message))]).ignore();
        }
        let () = all.query_async(&mut redis).await.unwrap();
    }
    let hire = async || {
        let consumer = spawn(&server, "group", &[]);
        consumer.expect_line("consumes", PATIENCE).await;
        consumer
    };
    // About ten of them die: of 100,000 messages one every second.
    let life = ms(messages / 100);
    let began = Instant::now();
    let (mut first, second, third) = (hire().await, hire().await, hire().await);
    let mut killed = HashSet::new();
    let mut others = pin!(async {
        second.expect_line("done", 10 * PATIENCE).await;
        third.expect_line("done", PATIENCE).await;
    });
    // The first is always a new one, and ends in the middle of its work.
    while timeout(life, &mut others).await.is_err() {
        killed.insert(first.pid().to_string());
        first.sigkill();
        first = hire().await;
    }
    let took = began.elapsed();
    first.expect_line("done", PATIENCE).await;
    let length: isize = redis.llen(JOURNAL).await.unwrap();
    let mut journal: Vec<String> = Vec::new();
    for from in (0..length).step_by(10_000) {
        let some: Vec<String> = redis.lrange(JOURNAL, from, from + 9_999).await.unwrap();
        journal.extend(some);
    }
    let losses = check(&journal, messages, &killed);
    println!(
        "{messages} messages in {took:?}, {} consumers killed, {} begun anew, {losses} leases lost",
        killed.len(),
        journal.len() as u64 - losses - 2 * messages,
    );
}

/// Each entry ends once, and nobody begins one of a key while another that lives and has its lease is at it. Gives the
/// number of leases that were lost.
fn check(journal: &[String], messages: u64, killed: &HashSet<String>) -> u64 {
    let lost: Vec<&str> = journal
        .iter()
        .filter_map(|line| line.strip_prefix("lost 0 0 "))
        .collect();
    let is_over = |consumer: &str| killed.contains(consumer) || lost.contains(&consumer);
    let mut done = HashSet::new();
    let mut working: HashMap<&str, (&str, &str)> = HashMap::new();
    for line in journal.iter().filter(|line| !line.starts_with("lost")) {
        let words: Vec<_> = line.split(' ').collect();
        let [what, key, id, by] = words[..] else {
            panic!("{line}");
        };
        match what {
            "begin" => {
                if let Some((other, _)) = working.insert(key, (by, id)) {
                    assert!(is_over(other), "{line}: {other} works on it");
                }
            }
            "end" => {
                if working.get(key) == Some(&(by, id)) {
                    working.remove(key);
                } else {
                    assert!(is_over(by), "{line}: late");
                }
                assert!(done.insert(id), "{line}: once more");
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(done.len() as u64, messages);
    lost.len() as u64
}
