//! A lock alone does not stop a late write; a fencing token does.
//!
//! A holder reads a balance under its lease, is stopped for longer than that lasts, goes on, and writes what it has
//! computed. Meanwhile another has held the lock and written twice. First the table takes every write, and then only
//! those whose token is not older than the last: `UPDATE … WHERE id = ? AND token <= ?`.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run -p lockstream-sql-fence   # the holder is a process, stopped by SIGSTOP
//! cargo run -p lockstream-sql-fence                                # the holder is a task, which waits
//! DATABASE_URL=postgres://… cargo run -p lockstream-sql-fence      # lock and account are in PostgreSQL
//! ```
//!
//! | file | question it answers |
//! |---|---|
//! | `main.rs` | what happens, in which order, and what came of it? |
//! | `accounts.rs` | how does a table refuse an old token? **Read this one.** |
//! | `slow.rs` | who is stopped, and how? |
//! | `database.rs` | how does a transaction commit only while its lease holds? |

mod accounts;
mod database;
mod slow;

use std::process::ExitCode;
use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{BuildError, LockError, LockRegistry, Renewal, StoreError};
use tempfile::TempDir;
use tokio::time::Instant;

use self::accounts::Accounts;
use self::slow::{DEPOSIT, Said, Slow};

/// What is locked.
const KEY: &str = "account:1";

/// How long a lease lasts; none is renewed here.
const TTL: Duration = Duration::from_millis(500);

const OPENING: i64 = 100;
const PAYMENT: i64 = 50;
const FEE: i64 = 1;

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("usage: sql-fence")]
    Usage,
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("PostgreSQL failed")]
    Database(#[from] tokio_postgres::Error),
    #[error("the holder cannot be stopped")]
    Signal(#[from] rustix::io::Errno),
    #[error("SQLite failed")]
    Sql(#[from] rusqlite::Error),
    #[error("the holder cannot be run")]
    Process(#[from] std::io::Error),
    #[error("the holder did not do what it is there for")]
    Slow,
    #[error("interrupted; a lease that is left runs out by itself")]
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments[..] {
        [] => tokio::select! {
            ended = compare() => ended,
            // A child is killed as it is dropped, also one that is stopped.
            _ = tokio::signal::ctrl_c() => Err(Error::Interrupted),
        },
        ["--slow", file, fenced, prefix] => {
            let ended = slow::be(file, fenced, prefix).await;
            ended.map(|()| ExitCode::SUCCESS)
        }
        [database::HOLDER, url, schema, guard] => {
            let ended = database::hold(url, schema, guard).await;
            ended.map(|()| ExitCode::SUCCESS)
        }
        _ => Err(Error::Usage),
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            let causes =
                std::iter::successors(Some(&error as &dyn std::error::Error), |it| it.source());
            let told: Vec<_> = causes.map(ToString::to_string).collect();
            eprintln!("sql-fence: {}", told.join(": "));
            match error {
                Error::Usage => ExitCode::from(2),
                Error::Interrupted => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Where the two lock.
enum Place {
    Here,
    Server { url: String, prefix: String },
}

impl Place {
    /// A server that is not there is told before anything begins.
    async fn find() -> Result<Self, Error> {
        let url = std::env::var("REDIS_URL").ok();
        let Some(url) = url.filter(|url| !url.is_empty()) else {
            return Ok(Self::Here);
        };
        LockRegistry::connect(&*url).await?.check().await?;
        let prefix = format!("sql-fence-{}", std::process::id());
        Ok(Self::Server { url, prefix })
    }

    /// The one who is quick, and the one who is stopped.
    async fn both(&self, folder: &TempDir, fenced: bool) -> Result<(LockRegistry, Slow), Error> {
        let file = folder.path().join("accounts.sqlite");
        Ok(match self {
            Self::Here => {
                let store = MemoryStore::new();
                let locks = LockRegistry::builder(store.clone()).build()?;
                (locks, Slow::task(&file, fenced, store))
            }
            Self::Server { url, prefix } => {
                let locks = LockRegistry::builder_for(url)?.prefix(prefix).build()?;
                (locks, Slow::process(&file, fenced, prefix)?)
            }
        })
    }

    /// Takes away the one key that locks leave behind: the counter of fencing tokens.
    async fn tidy(&self) {
        let Self::Server { url, prefix } = self else {
            return;
        };
        let fence = format!("{prefix}:~fence");
        let delete = async {
            let client = redis::Client::open(&**url)?;
            let mut connection = client.get_multiplexed_async_connection().await?;
            redis::cmd("DEL")
                .arg(&fence)
                .exec_async(&mut connection)
                .await
        };
        if let Err(error) = delete.await {
            eprintln!("sql-fence: the key {fence} stays behind: {error}");
        }
    }
}

async fn compare() -> Result<ExitCode, Error> {
    let database = std::env::var("DATABASE_URL").ok();
    if let Some(url) = database.filter(|url| !url.is_empty()) {
        return database::compare(&url).await;
    }
    let place = Place::find().await?;
    let how = match place {
        Place::Here => "a task, which waits (set REDIS_URL for a process, stopped by SIGSTOP)",
        Place::Server { .. } => "a process, stopped by SIGSTOP",
    };
    println!("slow is {how}; a lease lasts {TTL:?}");
    let right = OPENING - PAYMENT - FEE + DEPOSIT;
    let mut balances = Vec::new();
    for fenced in [false, true] {
        println!("\n{} the token", if fenced { "with" } else { "without" });
        println!("  who    under token           does                    verdict");
        let ended = run(&place, fenced).await;
        if ended.is_err() {
            place.tidy().await;
        }
        let balance = ended?;
        let verdict = if balance == right {
            "right".to_owned()
        } else {
            format!("and should be {right}")
        };
        println!("  the balance is {balance}: {verdict}");
        balances.push(balance);
    }
    place.tidy().await;
    Ok(if balances[0] != right && balances[1] == right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One run on a fresh table; gives the balance in the end.
async fn run(place: &Place, fenced: bool) -> Result<i64, Error> {
    let folder = TempDir::with_prefix("sql-fence-")?;
    let file = folder.path().join("accounts.sqlite");
    let accounts = Accounts::create(&file, fenced, OPENING)?;
    let (locks, mut slow) = place.both(&folder, fenced).await?;

    let first = read(&mut slow).await?;
    slow.stop()?;
    let began = Instant::now();
    let quick = locks.obtain(KEY).renewal(Renewal::off());
    let quick = quick.with_lease(async |lease| {
        let (token, stopped) = (lease.token(), began.elapsed());
        row(
            "slow",
            first,
            "is stopped",
            &format!("its lease is over after {} ms", stopped.as_millis()),
        );
        let balance = accounts.balance()? - PAYMENT;
        let taken = accounts.write(balance, token)?;
        row(
            "quick",
            token.get(),
            &format!("pays {PAYMENT}, writes {balance}"),
            verdict(taken),
        );
        let balance = balance - FEE;
        let taken = accounts.write(balance, token)?;
        row(
            "quick",
            token.get(),
            &format!("a fee, writes {balance}"),
            &format!("{}, under the same token", verdict(taken)),
        );
        Ok::<(), Error>(())
    });
    quick.await??;

    slow.go().await?;
    if !wrote(&mut slow, first).await? {
        let token = read(&mut slow).await?;
        slow.go().await?;
        wrote(&mut slow, token).await?;
    }
    slow.part().await?;
    locks.shutdown().await;
    Ok(accounts.balance()?)
}

async fn read(slow: &mut Slow) -> Result<u64, Error> {
    let Said::Read { token, balance } = slow.hear().await? else {
        return Err(Error::Slow);
    };
    row("slow", token, &format!("reads {balance}"), "");
    Ok(token)
}

async fn wrote(slow: &mut Slow, token: u64) -> Result<bool, Error> {
    let Said::Wrote { balance, taken } = slow.hear().await? else {
        return Err(Error::Slow);
    };
    let does = format!("adds {DEPOSIT}, writes {balance}");
    row("slow", token, &does, verdict(taken));
    Ok(taken)
}

fn verdict(taken: bool) -> &'static str {
    if taken {
        "written"
    } else {
        "refused: its token is old"
    }
}

fn row(who: &str, token: u64, does: &str, verdict: &str) {
    let row = format!("  {who:<5}  {token:<20}  {does:<22}  {verdict}");
    println!("{}", row.trim_end());
}
