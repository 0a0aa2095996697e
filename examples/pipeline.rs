//! In order for each key: a Redis stream of account movements, read by three consumers at once, each
//! with several movements under way. First without locks, then with `with_lock` inside
//! `buffer_keyed`.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example pipeline   # it needs a server: streams live there
//! ```
//!
//! **What the lock gives:** of all consumers one works on an account at a time, so that reading a
//! balance, thinking, and writing it is safe. **What it does not give:** order. `XREADGROUP` hands
//! the movements of one account to different consumers, and whoever has the second may well get the
//! lock first. Order is a matter of the numbers that the movements carry: under the lock one that
//! comes too early is put aside, and whoever applies the one before it applies it as well. Putting
//! aside and looking there both happen under the lock, so nothing is left lying. Nor does it give
//! "exactly once": a movement is acknowledged after it was applied, so one that is delivered again
//! (`XAUTOCLAIM`, after a crash) is seen to be old by its number, and skipped. What stops the late
//! write of a consumer that was stopped for longer than its lease, `examples/sql_fence` shows.
//!
//! [`Consumer::run`] and [`Consumer::in_turn`] are the ones to read.

use std::process::ExitCode;
use std::time::Duration;

use async_stream::try_stream;
use futures::future::try_join_all;
use futures::{Stream, StreamExt, TryStreamExt};
use lockstream::prelude::*;
use lockstream::{BuildError, StoreError};
use redis::aio::MultiplexedConnection;
use redis::streams::StreamReadReply;
use redis::{AsyncCommands, RedisError, RedisResult};

/// How many consumers share the stream, each with a registry and connections of its own.
const CONSUMERS: usize = 3;

/// How many movements a consumer has under way at once.
const AT_ONCE: usize = 8;

const ACCOUNTS: u64 = 6;
const MOVEMENTS: u64 = 20;

/// What passes between reading a balance and writing it.
const THINKING: Duration = Duration::from_millis(3);

/// How long the server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(
        "it needs a server: start one (redis-server, or docker run -p 6379:6379 redis), and set REDIS_URL=redis://127.0.0.1/"
    )]
    NoServer,
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("the server failed")]
    Redis(#[from] RedisError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("interrupted; what was held is released")]
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    match compare().await {
        Ok(code) => code,
        Err(error) => {
            let causes =
                std::iter::successors(Some(&error as &dyn std::error::Error), |it| it.source());
            let told: Vec<_> = causes.map(ToString::to_string).collect();
            eprintln!("pipeline: {}", told.join(": "));
            match error {
                Error::Interrupted => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// One change of one account: each is applied to what the one before it has left.
#[derive(Clone, Debug)]
struct Movement {
    /// What the stream calls it, for the acknowledgement.
    id: String,
    account: u64,
    /// 1 for the first of its account.
    number: u64,
}

impl Movement {
    /// Interest and a payment: in another order it comes to another balance.
    fn apply(number: u64, balance: u64) -> u64 {
        (balance * 3 + number) % 1_000_003
    }
}

/// What one consumer works with.
struct Consumer {
    name: String,
    names: Names,
    /// The work, and nothing else, is done on this connection.
    work: MultiplexedConnection,
    reading: MultiplexedConnection,
    locks: Option<LockRegistry>,
}

/// The keys of one run.
#[derive(Clone)]
struct Names {
    prefix: String,
}

impl Names {
    fn stream(&self) -> String {
        format!("{}:movements", self.prefix)
    }

    /// A hash: `last` number applied and `balance`.
    fn account(&self, account: u64) -> String {
        format!("{}:account:{account}", self.prefix)
    }

    /// A hash of what came too early: number to id.
    fn aside(&self, account: u64) -> String {
        format!("{}:aside:{account}", self.prefix)
    }

    /// A list of numbers in the order in which they were applied, for the report.
    fn applied(&self, account: u64) -> String {
        format!("{}:applied:{account}", self.prefix)
    }
}

const GROUP: &str = "consumers";

impl Consumer {
    /// Reads its share of the stream and works it off, several movements at once.
    async fn run(&self) -> Result<(), Error> {
        let movements = self.movements();
        let Some(locks) = &self.locks else {
            let works = movements.map_ok(|movement| self.as_it_comes(movement));
            return works.try_buffer_unordered(AT_ONCE).try_collect().await;
        };
        // A movement whose account another consumer works on stands in no other's way.
        let works = movements.map(|movement| {
            let account = movement.as_ref().map_or(0, |movement| movement.account);
            let lock = locks.obtain(format!("account:{account}"));
            async { self.in_turn(movement?).await }.try_with_lock(lock)
        });
        works.buffer_keyed(AT_ONCE).try_collect().await
    }

    /// Applies a movement when all before it are applied, and with it those that waited for it.
    ///
    /// Runs under the account's lock. Dropped half-way, as when the lease is lost, it leaves movements that are not
    /// acknowledged, and those are delivered again.
    async fn in_turn(&self, movement: Movement) -> Result<(), Error> {
        let mut redis = self.work.clone();
        let Movement {
            account, number, ..
        } = movement;
        let aside = self.names.aside(account);
        let (mut last, mut balance) = self.read(account).await?;
        if number > last + 1 {
            let _: () = redis.hset(&aside, number, &movement.id).await?;
            return Ok(());
        }
        if number <= last {
            return self.acknowledge(&movement.id).await;
        }
        let mut id = movement.id;
        loop {
            (last, balance) = (last + 1, self.apply(account, last + 1, balance).await?);
            self.acknowledge(&id).await?;
            let next: Option<String> = redis.hget(&aside, last + 1).await?;
            let Some(next) = next else {
                return Ok(());
            };
            let _: () = redis.hdel(&aside, last + 1).await?;
            id = next;
        }
    }

    /// What happens without locks.
    async fn as_it_comes(&self, movement: Movement) -> Result<(), Error> {
        let (_, balance) = self.read(movement.account).await?;
        self.apply(movement.account, movement.number, balance)
            .await?;
        self.acknowledge(&movement.id).await
    }

    async fn read(&self, account: u64) -> Result<(u64, u64), Error> {
        let account = self.names.account(account);
        let (last, balance): (Option<u64>, Option<u64>) = self
            .work
            .clone()
            .hmget(account, &["last", "balance"])
            .await?;
        Ok((last.unwrap_or(0), balance.unwrap_or(0)))
    }

    /// Thinks, writes, and gives the new balance.
    async fn apply(&self, account: u64, number: u64, balance: u64) -> Result<u64, Error> {
        // Sometimes longer and sometimes shorter, as others' answers are.
        tokio::time::sleep(THINKING.mul_f64(0.5 + rand::random::<f64>())).await;
        let balance = Movement::apply(number, balance);
        let () = redis::pipe()
            .atomic()
            .hset(self.names.account(account), "last", number)
            .hset(self.names.account(account), "balance", balance)
            .rpush(self.names.applied(account), number)
            .query_async(&mut self.work.clone())
            .await?;
        Ok(balance)
    }

    async fn acknowledge(&self, id: &str) -> Result<(), Error> {
        let stream = self.names.stream();
        let _: () = self.work.clone().xack(stream, GROUP, &[id]).await?;
        Ok(())
    }

    /// This consumer's share of the stream, until there is nothing more. A real one would `BLOCK`, on the connection
    /// that it reads with.
    fn movements(&self) -> impl Stream<Item = Result<Movement, Error>> {
        let (mut redis, stream) = (self.reading.clone(), self.names.stream());
        let name = self.name.clone();
        try_stream! {
            loop {
                let mut read = redis::cmd("XREADGROUP");
                read.arg("GROUP").arg(GROUP).arg(&name).arg("COUNT").arg(4);
                read.arg("STREAMS").arg(&stream).arg(">");
                let read: Option<StreamReadReply> = read.query_async(&mut redis).await?;
                let entries = read.into_iter().flat_map(|read| read.keys).flat_map(|key| key.ids);
                let mut none = true;
                for entry in entries {
                    none = false;
                    yield Movement {
                        account: entry.get("account").unwrap_or_default(),
                        number: entry.get("number").unwrap_or_default(),
                        id: entry.id,
                    };
                }
                if none {
                    return;
                }
            }
        }
    }
}

/// What came of a run.
struct Outcome {
    time: Duration,
    /// Of each account: the numbers in the order in which they were applied, and whether the balance is right.
    accounts: Vec<(Vec<u64>, bool)>,
}

impl Outcome {
    fn applied(&self) -> usize {
        self.accounts.iter().map(|(applied, _)| applied.len()).sum()
    }

    fn out_of_order(&self) -> usize {
        let each = self.accounts.iter();
        each.map(|(applied, _)| out_of_order(applied)).sum()
    }

    fn wrong(&self) -> usize {
        self.accounts.iter().filter(|(_, right)| !right).count()
    }

    /// The account that fared worst.
    fn worst(&self) -> usize {
        let accounts = 0..self.accounts.len();
        let worst = accounts.max_by_key(|at| out_of_order(&self.accounts[*at].0));
        worst.expect("there are accounts")
    }

    fn numbers(&self, account: usize) -> String {
        let numbers = self.accounts[account].0.iter();
        let numbers: Vec<String> = numbers.map(u64::to_string).collect();
        numbers.join(" ")
    }
}

/// How many came right after one that is not the one before them.
fn out_of_order(applied: &[u64]) -> usize {
    let before = std::iter::once(&0).chain(applied);
    before
        .zip(applied)
        .filter(|(before, now)| *before + 1 != **now)
        .count()
}

/// One run on a stream of its own.
async fn run(
    url: &str,
    prefix: &str,
    locks: bool,
    stop: &mut (impl Future<Output = ()> + Unpin),
) -> Result<Outcome, Error> {
    let client = redis::Client::open(url)?;
    let patient = redis::AsyncConnectionConfig::new()
        .set_connection_timeout(Some(PATIENCE))
        .set_response_timeout(Some(PATIENCE));
    let connect = || client.get_multiplexed_async_connection_with_config(&patient);
    let mut redis = connect().await?;
    let names = Names {
        prefix: format!("{prefix}:{locks}"),
    };
    fill(&mut redis, &names).await?;
    let mut consumers = Vec::new();
    for number in 0..CONSUMERS {
        let registry = LockRegistry::builder_for(url)?.prefix(prefix).build()?;
        consumers.push(Consumer {
            name: format!("consumer-{number}"),
            names: names.clone(),
            work: connect().await?,
            reading: connect().await?,
            locks: locks.then_some(registry),
        });
    }
    let began = tokio::time::Instant::now();
    let ended = tokio::select! {
        ended = try_join_all(consumers.iter().map(Consumer::run)) => ended.map(drop),
        () = stop => Err(Error::Interrupted),
    };
    let time = began.elapsed();
    for locks in consumers
        .iter()
        .filter_map(|consumer| consumer.locks.as_ref())
    {
        locks.shutdown().await;
    }
    let outcome = look(&mut redis, &names, time).await;
    tidy(&mut redis, &names, prefix).await?;
    ended?;
    Ok(outcome?)
}

/// All movements: the accounts in turn, each in the order of its numbers.
async fn fill(redis: &mut MultiplexedConnection, names: &Names) -> RedisResult<()> {
    let stream = names.stream();
    let () = redis.xgroup_create_mkstream(&stream, GROUP, "0").await?;
    let mut all = redis::pipe();
    for number in 1..=MOVEMENTS {
        for account in 0..ACCOUNTS {
            all.xadd(&stream, "*", &[("account", account), ("number", number)]);
        }
    }
    all.query_async(redis).await
}

async fn look(
    redis: &mut MultiplexedConnection,
    names: &Names,
    time: Duration,
) -> RedisResult<Outcome> {
    let right = (1..=MOVEMENTS).fold(0, |balance, number| Movement::apply(number, balance));
    let mut accounts = Vec::new();
    for account in 0..ACCOUNTS {
        let applied = redis.lrange(names.applied(account), 0, -1).await?;
        let balance: Option<u64> = redis.hget(names.account(account), "balance").await?;
        accounts.push((applied, balance == Some(right)));
    }
    Ok(Outcome { time, accounts })
}

/// Takes away all that this run has made.
async fn tidy(redis: &mut MultiplexedConnection, names: &Names, prefix: &str) -> RedisResult<()> {
    let mut keys = vec![names.stream(), format!("{prefix}:~fence")];
    for account in 0..ACCOUNTS {
        keys.extend([
            names.account(account),
            names.aside(account),
            names.applied(account),
        ]);
    }
    redis.del(keys).await
}

async fn compare() -> Result<ExitCode, Error> {
    let url = std::env::var("REDIS_URL").ok();
    let url = url.filter(|url| !url.is_empty()).ok_or(Error::NoServer)?;
    // A server that is not there is told before anything begins.
    LockRegistry::connect(&*url).await?.check().await?;
    let prefix = format!("pipeline-{}", std::process::id());
    let mut stop = std::pin::pin!(interrupted());
    let movements = ACCOUNTS * MOVEMENTS;
    println!(
        "{movements} movements of {ACCOUNTS} accounts, {CONSUMERS} consumers, {AT_ONCE} at once in each\n"
    );
    let without = run(&url, &prefix, false, &mut stop).await?;
    let with = run(&url, &prefix, true, &mut stop).await?;
    row("", ["without locks".to_owned(), "with locks".to_owned()]);
    let both = [&without, &with];
    row("movements applied", both.map(|it| it.applied().to_string()));
    row("out of order", both.map(|it| it.out_of_order().to_string()));
    let wrong = |it: &Outcome| format!("{} of {ACCOUNTS}", it.wrong());
    row("wrong balances", both.map(wrong));
    row("time", both.map(|it| format!("{} ms", it.time.as_millis())));
    let account = without.worst();
    println!("\n  account {account}, in the order in which its movements were applied");
    println!("  without  {}", without.numbers(account));
    println!("  with     {}", with.numbers(account));
    let right = with.out_of_order() == 0 && with.wrong() == 0;
    let complete = u64::try_from(with.applied()) == Ok(movements);
    Ok(if right && complete {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// A row of the table: the run without locks, and the one with them.
fn row(name: &str, [without, with]: [String; 2]) {
    println!("  {name:<20}  {without:>13}  {with:>10}");
}

/// Resolves at a Ctrl-C or SIGTERM, and at one that came before it is polled.
fn interrupted() -> impl Future<Output = ()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
        let [mut int, mut term] = kinds.map(|kind| signal(kind).expect("it can be caught"));
        async move {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        }
    }
    #[cfg(not(unix))]
    {
        let heard = tokio::spawn(tokio::signal::ctrl_c());
        async move {
            let _ = heard.await;
        }
    }
}
