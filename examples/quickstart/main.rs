//! What a lock brings: the transfers of a file, applied by four instances at once, first without
//! locks and then with them.
//!
//! ```sh
//! cargo run --example quickstart                                      # four registries in this process
//! REDIS_URL=redis://127.0.0.1/ cargo run --example quickstart         # four processes on that server
//! cargo run --example quickstart -- my.csv                            # another file: id,from,to,amount
//! cargo run --example quickstart -- --generate 7                      # prints a file made from the seed 7
//! ```
//!
//! | file | question it answers |
//! |---|---|
//! | `transfers.rs` | what is to be done? (the file, as a stream of rows) |
//! | `ledger.rs` | where do the balances live, and what does a race do to them? |
//! | `instance.rs` | how does one instance do its share, with and without locks? **Read this one.** |
//! | `process.rs` | how is an instance a process of its own? |
//! | `report.rs` | what came out? |

mod instance;
mod ledger;
mod process;
mod report;
mod transfers;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use lockstream::{BuildError, LockError, StoreError};
use tempfile::TempDir;

use self::ledger::Ledger;
use self::report::{Bar, Outcome};
use self::transfers::Transfers;

/// How many instances share the work.
const INSTANCES: usize = 4;

/// What passes between reading and writing, as for a bank's answer: the gap in which a race loses
/// money.
const ANSWER: Duration = Duration::from_millis(4);

/// What can end a run early.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("{0}")]
    Usage(String),
    #[error("{}: {fault}", .path.display())]
    File { path: PathBuf, fault: String },
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the ledger cannot be read or written")]
    Ledger(#[from] std::io::Error),
    #[error("{0}")]
    Instance(String),
    #[error("interrupted; what was held is released")]
    Interrupted,
}

/// An error and its causes, in one line.
fn told(error: &Error) -> String {
    let causes = std::iter::successors(Some(error as &dyn std::error::Error), |it| it.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments[..] {
        ["--generate", seed] => generate(seed),
        ["--instance", number, folder, locks] => process::be(number, folder, locks).await,
        [] => compare(&default_file()).await,
        [file] if !file.starts_with('-') => compare(Path::new(file)).await,
        _ => Err(Error::Usage(
            "usage: quickstart [FILE] | quickstart --generate SEED".to_owned(),
        )),
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("quickstart: {}", told(&error));
            match error {
                Error::Usage(_) => ExitCode::from(2),
                Error::Interrupted => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn default_file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/transfers.csv")
}

fn generate(seed: &str) -> Result<ExitCode, Error> {
    let Ok(number) = seed.parse() else {
        return Err(Error::Usage(format!("a seed is a number, not {seed:?}")));
    };
    print!("{}", transfers::generate(number));
    Ok(ExitCode::SUCCESS)
}

/// Where the instances of a run live.
enum Place {
    /// In this process, on one memory store.
    Here,
    /// In processes of their own, on the server of this url.
    Processes(process::Server),
}

impl Place {
    /// A server that is not there is told before anything begins.
    async fn find() -> Result<Self, Error> {
        let url = std::env::var("REDIS_URL").ok();
        match url.filter(|url| !url.is_empty()) {
            None => Ok(Self::Here),
            Some(url) => Ok(Self::Processes(process::Server::find(url).await?)),
        }
    }
}

/// Both runs, and what came out of them.
async fn compare(file: &Path) -> Result<ExitCode, Error> {
    let transfers = Transfers::read(file).await?;
    let place = Place::find().await?;
    // From here on a signal is kept until somebody looks, also between the runs.
    let stop: Stop = interrupted().boxed().shared();
    report::opening(&transfers, &place);
    let without = run(&transfers, &place, false, &stop).await?;
    let with = run(&transfers, &place, true, &stop).await;
    if let Place::Processes(server) = &place {
        server.tidy().await;
    }
    let with = with?;
    report::closing(&transfers, &without, &with);
    Ok(if with.is_right() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// One run on a fresh ledger.
async fn run(
    transfers: &Transfers,
    place: &Place,
    locks: bool,
    stop: &Stop,
) -> Result<Outcome, Error> {
    let folder = TempDir::with_prefix("quickstart-")?;
    let ledger = Ledger::create(folder.path(), transfers).await?;
    let bar = Bar::new(locks, transfers.rows.len());
    let began = Instant::now();
    let (time, tally) = match place {
        Place::Here => {
            let tally = instance::run_all(transfers, &ledger, locks, &bar, stop).await?;
            (began.elapsed(), tally)
        }
        Place::Processes(server) => {
            server
                .run_all(transfers, folder.path(), locks, &bar, stop)
                .await?
        }
    };
    let balances = ledger.balances().await?;
    let outcome = Outcome::new(transfers, &balances, tally, time);
    bar.done(&outcome);
    Ok(outcome)
}

/// Resolves when the user wants it to end.
type Stop = Shared<BoxFuture<'static, ()>>;

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
