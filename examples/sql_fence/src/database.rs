//! The same in PostgreSQL, where lock and account are in one database and the holder is stopped in the midst of its
//! transaction. First each only looks at the lock's token in its transaction, and then each fences its transaction by its
//! lease.

use std::process::ExitCode;
use std::time::Duration;

use lockstream::store::PostgresStore;
use lockstream::{LeaseView, LockRegistry, OnLost, Renewal};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::Command;
use tokio::sync::Notify;
use tokio_postgres::{Client, NoTls, Transaction};

use crate::slow::DEPOSIT;
use crate::{Error, FEE, KEY, OPENING, PAYMENT};

/// How long a lease lasts; the holder's is not renewed. In this time it has begun its transaction, and fenced it.
const TTL: Duration = Duration::from_millis(1_200);

/// For how long the holder is stopped where nobody gets the lock meanwhile: its lease is over by then.
const STOP: Duration = Duration::from_millis(2_200);

/// How a transaction finds out whether its lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guard {
    /// It looks who has the lock. That was true when it looked.
    Look,
    /// It takes part in the lock: nobody else gets it before the transaction has ended.
    Fence,
}

impl Guard {
    fn name(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::Fence => "fence",
        }
    }

    async fn check(
        self,
        transaction: &Transaction<'_>,
        lease: &LeaseView,
        schema: &str,
    ) -> Result<(), Error> {
        match self {
            Self::Fence => Ok(lease.fence(transaction).await?),
            Self::Look => {
                let sql = format!(
                    "SELECT 1 FROM {schema}.lock WHERE epoch = $1::bigint / 64 AND owner IS NOT NULL"
                );
                let token = i64::try_from(lease.token().get()).unwrap_or(i64::MAX);
                let seen = transaction.query_opt(&sql, &[&token]).await?;
                seen.map(drop).ok_or(Error::Slow)
            }
        }
    }
}

/// The database, and a schema of this run's own.
struct Bank<'a> {
    url: &'a str,
    schema: String,
}

impl Bank<'_> {
    async fn client(&self) -> Result<Client, Error> {
        let (client, connection) = tokio_postgres::connect(self.url, NoTls).await?;
        tokio::spawn(connection);
        Ok(client)
    }

    async fn locks(&self) -> Result<LockRegistry, Error> {
        let store = PostgresStore::builder(self.url)
            .schema(&self.schema)
            .connect()
            .await?;
        Ok(LockRegistry::builder(store).build()?)
    }

    /// Adds to the balance, in one transaction. `pause`: what the holder does between its read and its write.
    async fn add(
        &self,
        client: &mut Client,
        lease: &LeaseView,
        guard: Guard,
        amount: i64,
        pause: impl AsyncFnOnce(i64),
    ) -> Result<i64, Error> {
        let transaction = client.transaction().await?;
        guard.check(&transaction, lease, &self.schema).await?;
        let sql = format!("SELECT balance FROM {}.account", self.schema);
        let balance: i64 = transaction.query_one(&sql, &[]).await?.get(0);
        pause(balance).await;
        let sql = format!("UPDATE {}.account SET balance = $1", self.schema);
        transaction.execute(&sql, &[&(balance + amount)]).await?;
        transaction.commit().await?;
        Ok(balance + amount)
    }
}

/// What stands before the arguments of the holder.
pub(crate) const HOLDER: &str = "--holder";

/// The holder: says what it has read, goes on when it gets a line, and says what it has written.
pub(crate) async fn hold(url: &str, schema: &str, guard: &str) -> Result<(), Error> {
    let bank = Bank {
        url,
        schema: schema.to_owned(),
    };
    let guard = [Guard::Look, Guard::Fence]
        .into_iter()
        .find(|it| it.name() == guard)
        .ok_or(Error::Usage)?;
    let lock = bank.locks().await?.obtain(KEY).ttl(TTL);
    let lock = lock.renewal(Renewal::off()).on_lost(OnLost::RunOn);
    let bank = &bank;
    let client = &mut bank.client().await?;
    let held = lock.with_lease(async |lease| {
        let thinks = async |balance| {
            println!("read {balance}");
            // It is stopped here, and goes on when it gets a line, or when its input ends because the parent has ended.
            let _ = BufReader::new(tokio::io::stdin()).lines().next_line().await;
        };
        let balance = bank.add(client, &lease, guard, DEPOSIT, thinks).await?;
        println!("wrote {balance}");
        Ok::<(), Error>(())
    });
    // The lease is lost. Whether the write counts, the database has said.
    held.await.unwrap_or(Ok(()))
}

pub(crate) async fn compare(url: &str) -> Result<ExitCode, Error> {
    println!(
        "slow is a process, stopped by SIGSTOP in the midst of its transaction; a lease lasts {TTL:?}"
    );
    let right = OPENING - PAYMENT - FEE + DEPOSIT;
    let mut balances = Vec::new();
    for (guard, told) in [
        (Guard::Look, "a look at the token"),
        (Guard::Fence, "a fence"),
    ] {
        println!("\nwith {told}");
        let bank = Bank {
            url,
            schema: format!("sql_fence_{}", std::process::id()),
        };
        let ran = run(&bank, guard).await;
        let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", bank.schema);
        bank.client().await?.batch_execute(&drop).await?;
        let balance = ran?;
        match balance == right {
            true => println!("  the balance is {balance}: right"),
            false => println!("  the balance is {balance}: and should be {right}"),
        }
        balances.push(balance);
    }
    Ok(match balances[0] != right && balances[1] == right {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

async fn run(bank: &Bank<'_>, guard: Guard) -> Result<i64, Error> {
    let locks = bank.locks().await?;
    let schema = &bank.schema;
    let mut client = bank.client().await?;
    let table = format!(
        "CREATE TABLE {schema}.account (balance bigint); INSERT INTO {schema}.account VALUES ({OPENING})"
    );
    client.batch_execute(&table).await?;

    let mut holder = Command::new(std::env::current_exe()?)
        .args([HOLDER, bank.url, schema, guard.name()])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut input = holder.stdin.take().ok_or(Error::Slow)?;
    let mut says = BufReader::new(holder.stdout.take().ok_or(Error::Slow)?).lines();
    let read = says.next_line().await?.ok_or(Error::Slow)?;
    println!("  slow   {read}");
    let pid = holder
        .id()
        .and_then(|pid| Pid::from_raw(pid.cast_signed()))
        .ok_or(Error::Slow)?;
    kill_process(pid, Signal::STOP)?;
    println!("  slow   is stopped");
    let has_paid = Notify::new();
    let goes_on = async {
        match guard {
            // Another has the lock by then, and has written.
            Guard::Look => has_paid.notified().await,
            // Nobody else has the lock before it has gone on.
            Guard::Fence => tokio::time::sleep(STOP).await,
        }
        println!("  slow   goes on");
        kill_process(pid, Signal::CONT)?;
        input.write_all(b"\n").await?;
        let wrote = says.next_line().await?.ok_or(Error::Slow)?;
        println!("  slow   {wrote}");
        holder.wait().await?;
        Ok::<(), Error>(())
    };
    let pays = async {
        let begin = tokio::time::Instant::now();
        let lease = locks.obtain(KEY).lease().await?;
        println!(
            "  quick  has the lock after {} ms",
            begin.elapsed().as_millis()
        );
        let view = lease.view();
        for amount in [-PAYMENT, -FEE] {
            let add = bank.add(&mut client, &view, guard, amount, async |_| ());
            println!("  quick  wrote {}", add.await?);
        }
        has_paid.notify_one();
        lease.release().await?;
        Ok::<(), Error>(())
    };
    tokio::try_join!(goes_on, pays)?;
    let sql = format!("SELECT balance FROM {schema}.account");
    Ok(client.query_one(&sql, &[]).await?.get(0))
}
