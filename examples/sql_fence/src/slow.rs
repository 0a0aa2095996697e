//! The holder that is stopped: a child process, or a task of this one.

use std::fmt;
use std::io::{BufRead, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{LockRegistry, OnLost, Renewal};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::accounts::Accounts;
use crate::{Error, KEY, TTL};

/// What the holder pays in.
pub(crate) const DEPOSIT: i64 = 30;

/// How long it may take to say something, or to go.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the holder tells of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Read { token: u64, balance: i64 },
    Wrote { balance: i64, taken: bool },
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read { token, balance } => write!(f, "read {token} {balance}"),
            Self::Wrote { balance, taken } => write!(f, "wrote {balance} {taken}"),
        }
    }
}

impl Said {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split(' ').collect();
        Some(match words[..] {
            ["read", token, balance] => Self::Read {
                token: token.parse().ok()?,
                balance: balance.parse().ok()?,
            },
            ["wrote", balance, taken] => Self::Wrote {
                balance: balance.parse().ok()?,
                taken: taken.parse().ok()?,
            },
            _ => return None,
        })
    }
}

/// Reads, waits for the word to go on, and writes what it has read plus the deposit; and again, if that was refused.
async fn pay_in(
    locks: &LockRegistry,
    accounts: Accounts<'_>,
    mut orders: mpsc::UnboundedReceiver<()>,
    say: impl Fn(Said),
) -> Result<(), Error> {
    // A lost lease drops the work before its next poll. But a write that is on its way to the database is nothing that
    // can be dropped, and `RunOn` stands for it here.
    let lock = locks.obtain(KEY).ttl(TTL);
    let lock = lock.renewal(Renewal::off()).on_lost(OnLost::RunOn);
    loop {
        let orders = &mut orders;
        let taken = lock.with_lease(async |lease| {
            let balance = accounts.balance()?;
            say(Said::Read {
                token: lease.token().get(),
                balance,
            });
            orders.recv().await.ok_or(Error::Interrupted)?;
            let balance = balance + DEPOSIT;
            let taken = accounts.write(balance, lease.token())?;
            say(Said::Wrote { balance, taken });
            Ok::<bool, Error>(taken)
        });
        if taken.await?? {
            return Ok(());
        }
    }
}

/// What the child process does.
pub(crate) async fn be(file: &str, fenced: &str, prefix: &str) -> Result<(), Error> {
    let url = std::env::var("REDIS_URL").unwrap_or_default();
    let locks = LockRegistry::builder_for(url)?.prefix(prefix).build()?;
    let (sender, orders) = mpsc::unbounded_channel();
    // A thread of its own: one that waits for a line must not keep the process from ending.
    std::thread::spawn(move || {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(()).is_err() {
                return;
            }
        }
    });
    let accounts = Accounts::open(Path::new(file), fenced == "fenced");
    let say = |said| {
        // The parent may be gone, which shows at the input.
        let _ = writeln!(std::io::stdout(), "{said}");
    };
    let ended = pay_in(&locks, accounts, orders, say).await;
    locks.shutdown().await;
    ended
}

/// The holder, as the one who stops it sees it.
pub(crate) enum Slow {
    Process {
        child: Box<Child>,
        input: ChildStdin,
        output: Lines<BufReader<ChildStdout>>,
    },
    Task {
        task: JoinHandle<Result<(), Error>>,
        orders: mpsc::UnboundedSender<()>,
        said: mpsc::UnboundedReceiver<Said>,
    },
}

impl Slow {
    pub(crate) fn process(file: &Path, fenced: bool, prefix: &str) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("--slow")
            .arg(file)
            .args([if fenced { "fenced" } else { "open" }, prefix])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A Ctrl-C is the parent's, whose end is the end of the child's input.
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        Ok(Self::Process {
            input: child.stdin.take().expect("piped"),
            output: BufReader::new(child.stdout.take().expect("piped")).lines(),
            child: Box::new(child),
        })
    }

    /// With a registry of its own on the store, which to others is another process.
    pub(crate) fn task(file: &Path, fenced: bool, store: MemoryStore) -> Self {
        let (orders, receiver) = mpsc::unbounded_channel();
        let (say, said) = mpsc::unbounded_channel();
        let file = file.to_owned();
        let task = tokio::spawn(async move {
            let locks = LockRegistry::builder(store)
                .build()
                .expect("the defaults are valid");
            let accounts = Accounts::open(&file, fenced);
            let say = |said| {
                // Nobody listens when the other has failed.
                let _ = say.send(said);
            };
            let ended = pay_in(&locks, accounts, receiver, say).await;
            locks.shutdown().await;
            ended
        });
        Self::Task { task, orders, said }
    }

    pub(crate) async fn hear(&mut self) -> Result<Said, Error> {
        let said = async {
            match self {
                Self::Process { output, .. } => {
                    let line = output.next_line().await.ok()??;
                    Said::parse(&line)
                }
                Self::Task { said, .. } => said.recv().await,
            }
        };
        let said = timeout(PATIENCE, said).await;
        said.ok().flatten().ok_or(Error::Slow)
    }

    /// From now on it does nothing; a task waits for its word anyway.
    pub(crate) fn stop(&self) -> Result<(), Error> {
        self.signal(Signal::STOP)
    }

    /// It goes on, and finds the word to do so.
    pub(crate) async fn go(&mut self) -> Result<(), Error> {
        match self {
            Self::Process { input, .. } => {
                input.write_all(b"go\n").await?;
                self.signal(Signal::CONT)
            }
            // One that has ended shows when it is to say something.
            Self::Task { orders, .. } => {
                let _ = orders.send(());
                Ok(())
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        let Self::Process { child, .. } = self else {
            return Ok(());
        };
        let pid = child.id().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.and_then(Pid::from_raw).ok_or(Error::Slow)?;
        Ok(kill_process(pid, signal).map_err(std::io::Error::from)?)
    }

    /// It has nothing more to do.
    pub(crate) async fn part(self) -> Result<(), Error> {
        match self {
            Self::Process { mut child, .. } => match timeout(PATIENCE, child.wait()).await {
                Ok(Ok(status)) if status.success() => Ok(()),
                // One that does not go is killed when it is dropped.
                _ => Err(Error::Slow),
            },
            Self::Task { task, .. } => task.await.map_err(|_| Error::Slow)?,
        }
    }
}
