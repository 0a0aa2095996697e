//! How an instance is a process of its own: this very program, run again.
//!
//! The parent writes `go` to each child's standard input when all are `ready`; a child that sees its
//! input end before it is done stops and releases what it holds, so that none outlives the parent.

use std::io::{BufRead, Write};
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use lockstream::LockRegistry;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;

use crate::instance::{apply_share, registry};
use crate::ledger::{Ledger, Tally};
use crate::report::Bar;
use crate::transfers::Transfers;
use crate::{Error, INSTANCES, Stop};

/// What a child is told instead of a prefix when it is to work without locks.
const NO_LOCKS: &str = "-";

/// The name of the file in a run's folder.
const FILE: &str = "transfers.csv";

/// How long the server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long children may take to release what they hold and go.
const PARTING: Duration = Duration::from_secs(5);

/// The server that all processes lock on.
pub(crate) struct Server {
    url: String,
    /// Apart from whatever else is there.
    prefix: String,
}

impl Server {
    /// Connects once, so that a wrong url or an absent server is told before anything begins.
    pub(crate) async fn find(url: String) -> Result<Self, Error> {
        LockRegistry::connect(&*url).await?.check().await?;
        let prefix = format!("quickstart-{}", std::process::id());
        Ok(Self { url, prefix })
    }

    /// All instances as child processes; gives the time from `go` until the last is done.
    pub(crate) async fn run_all(
        &self,
        transfers: &Transfers,
        folder: &Path,
        locks: bool,
        bar: &Bar,
        stop: &Stop,
    ) -> Result<(Duration, Tally), Error> {
        tokio::fs::write(folder.join(FILE), &transfers.bytes).await?;
        let prefix = if locks { &self.prefix } else { NO_LOCKS };
        let mut children = Vec::new();
        for instance in 0..INSTANCES {
            children.push(Instance::spawn(instance, folder, prefix)?);
        }
        let run = async {
            try_join_all(children.iter_mut().map(Instance::ready)).await?;
            let began = Instant::now();
            try_join_all(children.iter_mut().map(|child| child.work(bar))).await?;
            Ok(began.elapsed())
        };
        let ended = tokio::select! {
            ended = run => ended,
            () = stop.clone() => Err(Error::Interrupted),
        };
        // Those that were not done see their input end, and release what they hold.
        let partings = children.into_iter().map(Instance::part);
        futures::future::join_all(partings).await;
        Ok((ended?, bar.tally()))
    }

    /// Takes away the one key that locks leave behind: the counter of fencing tokens.
    pub(crate) async fn tidy(&self) {
        let fence = format!("{}:~fence", self.prefix);
        let delete = async {
            let client = redis::Client::open(&*self.url)?;
            let patient = redis::AsyncConnectionConfig::new()
                .set_connection_timeout(Some(PATIENCE))
                .set_response_timeout(Some(PATIENCE));
            let connecting = client.get_multiplexed_async_connection_with_config(&patient);
            redis::cmd("DEL")
                .arg(&fence)
                .exec_async(&mut connecting.await?)
                .await
        };
        if let Err(error) = delete.await {
            eprintln!("quickstart: the key {fence} stays behind: {error}");
        }
    }
}

/// A child, as the parent sees it.
struct Instance {
    number: usize,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Instance {
    fn spawn(number: usize, folder: &Path, prefix: &str) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["--instance", &number.to_string()])
            .args([folder.as_os_str(), prefix.as_ref()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        // A Ctrl-C is the parent's, which ends its children in good order.
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command.spawn()?;
        Ok(Self {
            number,
            input: child.stdin.take().expect("piped"),
            output: BufReader::new(child.stdout.take().expect("piped")).lines(),
            child,
        })
    }

    async fn ready(&mut self) -> Result<(), Error> {
        match &*self.hear().await? {
            "ready" => Ok(()),
            other => Err(self.failed(other)),
        }
    }

    async fn work(&mut self, bar: &Bar) -> Result<(), Error> {
        self.input.write_all(b"go\n").await?;
        loop {
            let line = self.hear().await?;
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["applied", overlaps, hand_overs] => bar.add(Tally {
                    overlaps: overlaps.parse().map_err(|_| self.failed(&line))?,
                    hand_overs: hand_overs.parse().map_err(|_| self.failed(&line))?,
                }),
                ["done"] => return Ok(()),
                _ => return Err(self.failed(&line)),
            }
        }
    }

    async fn hear(&mut self) -> Result<String, Error> {
        let line = self.output.next_line().await?;
        line.ok_or_else(|| self.failed("it ended early"))
    }

    fn failed(&self, what: &str) -> Error {
        Error::Instance(format!("instance {}: {what}", self.number))
    }

    async fn part(mut self) {
        drop(self.input);
        // One that does not go is killed when it is dropped.
        let _ = tokio::time::timeout(PARTING, self.child.wait()).await;
    }
}

/// What a child does.
pub(crate) async fn be(number: &str, folder: &str, prefix: &str) -> Result<ExitCode, Error> {
    let ended = share(number, folder, prefix).await;
    say(match &ended {
        Ok(()) => "done".to_owned(),
        Err(error) => crate::told(error),
    });
    Ok(ExitCode::from(u8::from(ended.is_err())))
}

async fn share(number: &str, folder: &str, prefix: &str) -> Result<(), Error> {
    let number = number
        .parse()
        .map_err(|_| Error::Usage(format!("no such instance: {number}")))?;
    let folder = Path::new(folder);
    let transfers = Transfers::read(&folder.join(FILE)).await?;
    let ledger = Ledger::open(folder, &transfers);
    let locks = match prefix {
        NO_LOCKS => None,
        prefix => {
            let url = std::env::var("REDIS_URL").unwrap_or_default();
            Some(registry(LockRegistry::builder_for(url)?, prefix)?)
        }
    };
    let mut orders = orders();
    say("ready");
    if orders.recv().await.is_none() {
        return Err(Error::Interrupted);
    }
    let share = transfers.share(number);
    let ended = tokio::select! {
        ended = apply_share(number, share, &ledger, locks.as_ref(), |tally| {
            say(format_args!("applied {} {}", tally.overlaps, tally.hand_overs));
        }) => ended,
        _ = orders.recv() => Err(Error::Interrupted),
    };
    if let Some(locks) = &locks {
        locks.shutdown().await;
    }
    ended
}

/// The lines of standard input, from a thread of their own: one that waits for a line must not keep
/// the process from ending.
fn orders() -> mpsc::UnboundedReceiver<String> {
    let (sender, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    orders
}

/// Tells the parent; it may be gone, which shows at the input.
fn say(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
