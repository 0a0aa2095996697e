//! `lockstream hold`, `renew` and `release`: one lease over several commands, as a line of text.
//!
//! `hold --foreground` has no line: it holds the lock for as long as it runs.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use lockstream::{DetachedLease, Lease, LockError, LockRegistry, Renewal};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::acquire::{Asking, LEAVE_WITHIN};
use crate::args::{HoldArgs, LineArgs, ReleaseArgs, RenewArgs, StoreArgs};
use crate::exit;
use crate::messages::Messages;
use crate::run::{catch_signals, give_back, impatience, waited};
use crate::signals::Signals;
use crate::store::{Failure, Store};
use crate::supervise::{Held, tell};

/// The environment variable that has the line.
const VARIABLE: &str = "LOCKSTREAM_LEASE";

/// How long a lease lasts that nobody renews, and one that is renewed in the foreground.
const DETACHED_TTL: Duration = Duration::from_secs(10 * 60);
const FOREGROUND_TTL: Duration = Duration::from_secs(30);

/// Acquires the lock and leaves its lease as a line, or holds it in the foreground.
pub(crate) async fn hold(args: HoldArgs) -> Result<u8, Failure> {
    let messages = args.store.messages();
    let (ttl, renewal) = match args.foreground {
        true => (FOREGROUND_TTL, Renewal::watchdog()),
        false => (DETACHED_TTL, Renewal::off()),
    };
    let ttl = args.ttl.unwrap_or(ttl);
    let lock = |registry: &LockRegistry| {
        let lock = registry.obtain(&args.key).ttl(ttl).renewal(renewal);
        args.mode.set(lock)
    };
    let store = Store::find(&args.store)?;
    let trial = store.check(lock).await?;
    if !args.foreground {
        // Which leases can be left is told before one is taken.
        let left = trial.detach();
        let _ = left.map_err(|refused| Failure::lock(refused.error(), exit::BUSY))?;
    }
    let output = Output::open(args.lease_file.as_deref())?;
    let mut signals = catch_signals()?;
    let registry = store.registry()?;
    let mut events = registry.events();
    let lock = lock(&registry);
    let began = tokio::time::Instant::now();
    let asking = Asking {
        registry: &registry,
        lock: &lock,
        keys: std::slice::from_ref(&args.key),
        wait: &args.wait,
        longest: ttl,
        messages,
    };
    let lease = tokio::select! {
        lease = asking.acquire() => lease?,
        signal = signals.end() => {
            registry.shutdown().await;
            return Ok(exit::of_signal(signal as i32));
        }
    };
    let fields = Held::new(std::slice::from_ref(&args.key), &lease.view()).fields();
    let text = format!("lock {:?} acquired", lease.key());
    messages.note("acquired", text, waited(fields, began));
    if !args.foreground {
        let Some((left, error)) = leave(lease, output, args.store.json)? else {
            return Ok(0);
        };
        // A lease without its line is of no use.
        let given_back = match registry.adopt(left).await {
            Ok(lease) => lease.release().await,
            Err(error) => Err(error),
        };
        let text = match given_back {
            Ok(()) => "the lock is given back, since its line cannot be written".to_owned(),
            Err(failed) => format!(
                "the line of the lock cannot be written, and the lock lasts for {ttl:?}, since it cannot be given back \
                 ({failed})"
            ),
        };
        return Err(Failure::new(exit::CANNOT_RUN, format!("{text}: {error}")));
    }
    let line = match args.store.json {
        true => json!({ "key": lease.key(), "token": lease.token().get() }).to_string(),
        false => format!("{}\t{}", lease.key(), lease.token()),
    };
    if output.write(&line).is_err() {
        give_back(&registry, lease, false, messages).await;
        return Ok(exit::of_signal(nix::libc::SIGPIPE));
    }
    let is_lost = stay(&lease, args.until_eof, &mut signals, &mut events, messages).await;
    let is_lost = tokio::select! {
        was_lost = give_back(&registry, lease, false, messages) => was_lost || is_lost,
        _ = impatience(&mut signals) => is_lost,
    };
    Ok(if is_lost { exit::LOST } else { 0 })
}

/// Holds the lease until a signal, the end of the input if it counts, or its loss. Returns whether it was lost.
async fn stay(
    lease: &Lease,
    until_eof: bool,
    signals: &mut Signals,
    events: &mut lockstream::stream::Events,
    messages: Messages,
) -> bool {
    let view = lease.view();
    let mut lost = view.lost();
    let mut input_end = until_eof.then(input_end);
    loop {
        let ended = async {
            match &mut input_end {
                Some(end) => drop(end.await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            error = &mut lost => {
                messages.say("lost", &error, json!({ "key": lease.key() }));
                return true;
            }
            _ = signals.end() => return false,
            () = ended => return false,
            Some(event) = events.next() => tell(messages, &event),
        }
    }
}

/// Resolves at the end of standard input. The thread that reads ends with the process.
fn input_end() -> oneshot::Receiver<()> {
    let (sender, receiver) = oneshot::channel();
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
        let _ = sender.send(());
    });
    receiver
}

/// Prolongs the lease of a line, and yields the line that stands for it from now on.
pub(crate) async fn renew(args: RenewArgs) -> Result<u8, Failure> {
    let line = args.line.find()?;
    let output = Output::open(args.line.lease_file.as_deref())?;
    let ttl = args.ttl.unwrap_or(DETACHED_TTL);
    // A signal waits until the new line is written: the old one is no good by then. What is waited for has an end.
    let _signals = catch_signals()?;
    let (_, lease) = adopt(&args.store, line, ttl).await?;
    let Some((left, error)) = leave(lease, output, args.store.json)? else {
        return Ok(0);
    };
    // Commands work under it: nobody else gets it before its end.
    let text = format!(
        "the lease on {:?} is renewed and lasts for {ttl:?}, and no longer, since its new line cannot be written: {error}",
        left.key()
    );
    Err(Failure::new(exit::LOST, text))
}

/// Ends the lease of a line.
pub(crate) async fn release(args: ReleaseArgs) -> Result<u8, Failure> {
    let messages = args.store.messages();
    let line = args.line.find()?;
    let key = line.key().to_owned();
    let (registry, lease) = adopt(&args.store, line, FOREGROUND_TTL).await?;
    let released = lease.release().await;
    // A release whose answer was lost is sent again.
    let _ = timeout(LEAVE_WITHIN, registry.shutdown()).await;
    released.map_err(|error| Failure::lock(&error, exit::BUSY))?;
    let text = format!("lock {key:?} released");
    messages.note("released", text, json!({ "key": key }));
    Ok(0)
}

async fn adopt(
    args: &StoreArgs,
    line: DetachedLease,
    ttl: Duration,
) -> Result<(LockRegistry, Lease), Failure> {
    let store = Store::for_looking(args)?;
    let registry = store.registry()?;
    let (key, token) = (line.key().to_owned(), line.token());
    match registry.adopt(line).ttl(ttl).await {
        Ok(lease) => Ok((registry, lease)),
        Err(LockError::Lost { .. }) => {
            let text = format!(
                "the lease on {key:?} is over, or this line of it is: it was renewed, released or taken (token {token})"
            );
            Err(Failure::new(exit::LOST, text))
        }
        Err(error) => Err(Failure::lock(&error, exit::BUSY)),
    }
}

/// Leaves the lease in the store, and writes its line. Yields the lease, and why, if that cannot be written.
fn leave(
    lease: Lease,
    output: Output,
    json: bool,
) -> Result<Option<(DetachedLease, io::Error)>, Failure> {
    let left = lease.detach();
    let left = left.map_err(|refused| Failure::lock(refused.error(), exit::BUSY))?;
    let line = match json && output.is_standard() {
        true => to_json(&left),
        false => left.to_string(),
    };
    let written = output.write(&line);
    Ok(written.err().map(|error| (left, error)))
}

fn to_json(left: &DetachedLease) -> String {
    let deadline = left.deadline().duration_since(SystemTime::UNIX_EPOCH);
    let millis = u64::try_from(deadline.unwrap_or_default().as_millis()).unwrap_or(u64::MAX);
    json!({
        "key": left.key(),
        "token": left.token().get(),
        "deadline_ms": millis,
        "lease": left.to_string(),
    })
    .to_string()
}

impl LineArgs {
    /// The line, from the argument, the file or the environment. No error shows it.
    fn find(&self) -> Result<DetachedLease, Failure> {
        let read = |name: &str, read: io::Result<String>| {
            read.map_err(|error| Failure::usage(format!("cannot read {name}: {error}")))
        };
        let text = match (&self.lease, &self.lease_file) {
            (Some(it), _) if it == "-" => read("standard input", io::read_to_string(io::stdin()))?,
            (Some(line), _) => line.clone(),
            (None, Some(path)) => read(&path.display().to_string(), fs::read_to_string(path))?,
            (None, None) => std::env::var(VARIABLE).map_err(|_| {
                let text =
                    format!("no lease: set {VARIABLE}, or give --lease-file, or - to read it");
                Failure::usage(text)
            })?,
        };
        let line = text.parse::<DetachedLease>();
        line.map_err(|error| Failure::usage(error.to_string()))
    }
}

/// How many drafts of others with the same id may be in the way.
const MOST_LEFT: u32 = 1000;

/// No line is longer: a key has 512 bytes at most, and an owner 200.
const LONGEST_LINE: usize = 1024;

/// Where a line goes. A file is written beside its place and moved there, so that it always has a whole line.
#[derive(Debug)]
struct Output(Option<Draft>);

#[derive(Debug)]
struct Draft {
    file: File,
    path: PathBuf,
    place: PathBuf,
}

impl Output {
    /// What cannot be written is told before a lock is taken.
    fn open(place: Option<&Path>) -> Result<Self, Failure> {
        let Some(place) = place else {
            return Ok(Self(None));
        };
        let (id, mut left) = (std::process::id(), 0);
        loop {
            let mut path = place.as_os_str().to_owned();
            path.push(format!(".{id}.{left}"));
            // Nobody else may read it.
            let mut options = OpenOptions::new();
            let refused =
                |error| Failure::usage(format!("cannot write {}: {error}", place.display()));
            match options.write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    let mut draft = Draft {
                        file,
                        path: path.into(),
                        place: place.to_owned(),
                    };
                    draft.reserve().map_err(refused)?;
                    return Ok(Self(Some(draft)));
                }
                // Of one that was killed. In containers the ids are the same each time.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && left < MOST_LEFT => {
                    left += 1;
                }
                Err(error) => return Err(refused(error)),
            }
        }
    }

    fn is_standard(&self) -> bool {
        self.0.is_none()
    }

    fn write(self, line: &str) -> io::Result<()> {
        match self.0 {
            Some(mut draft) => {
                writeln!(draft.file, "{line}")?;
                let length = draft.file.stream_position()?;
                draft.file.set_len(length)?;
                fs::rename(&draft.path, &draft.place)
            }
            None => {
                let mut out = io::stdout().lock();
                writeln!(out, "{line}").and_then(|()| out.flush())
            }
        }
    }
}

impl Draft {
    /// Takes the room on the disk: if it is full, that is told before the line that was good is so no more.
    fn reserve(&mut self) -> io::Result<()> {
        self.file.write_all(&[b' '; LONGEST_LINE])?;
        self.file.rewind()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // It is not there if it was moved.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The draft of a process that was killed, whose id we have: no lease could be written there any more.
    #[test]
    fn a_draft_that_was_left_is_in_nobodys_way() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("lease");
        std::mem::forget(Output::open(Some(&place)).unwrap());
        let output = Output::open(Some(&place)).unwrap();
        output.write("line").unwrap();
        assert_eq!(fs::read_to_string(&place).unwrap(), "line\n");
    }
}
