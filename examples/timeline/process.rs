//! How one is a process of its own: this very program, run again.
//!
//! Each begins when it reads `go`, and prints a line an event. One that sees its input end stops, so
//! that none outlives the parent.

use std::io::{BufRead, Write};
use std::process::Stdio;
use std::time::Duration;

use lockstream::LockRegistry;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep};

use crate::part::{is_time_to_kill, registry, take_part};
use crate::story::{Heard, What};
use crate::{Error, INTO_ITS_WORK, PARTS, VICTIM};

/// All of them as child processes, on the server of this url.
pub(crate) async fn run_all(url: &str) -> Result<Vec<Heard>, Error> {
    // A server that is not there is told before anything begins.
    LockRegistry::connect(url).await?.check().await?;
    let prefix = format!("timeline-{}", std::process::id());
    let (teller, mut told) = mpsc::unbounded_channel();
    let mut children = Vec::new();
    for number in 0..PARTS {
        children.push(spawn(number, &prefix, teller.clone())?);
    }
    drop(teller);
    for (_, _, ready) in &mut children {
        // One that ends instead tells why on the same standard error as we.
        let _ = ready.await;
    }
    for (_, input, _) in &mut children {
        input.write_all(b"go\n").await?;
    }
    let begin = Instant::now();
    let mut heard = Vec::new();
    let mut killed = false;
    while let Some(said) = told.recv().await {
        let said: Heard = said?;
        let kills = !killed && is_time_to_kill(&said, begin);
        heard.push(said);
        if kills {
            killed = true;
            sleep(INTO_ITS_WORK).await;
            children[VICTIM].0.start_kill()?;
            heard.push(Heard::killed_now(VICTIM));
        }
    }
    let mut failed = None;
    for (number, (child, _, _)) in children.iter_mut().enumerate() {
        if !child.wait().await?.success() && number != VICTIM {
            failed = Some(Error::Failed(number + 1));
        }
    }
    tidy(url, &prefix).await;
    failed.map_or(Ok(heard), Err)
}

type Spawned = (Child, ChildStdin, oneshot::Receiver<()>);

/// Starts one, and passes on what it prints.
fn spawn(
    number: usize,
    prefix: &str,
    teller: mpsc::UnboundedSender<Result<Heard, Error>>,
) -> Result<Spawned, Error> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--part", &number.to_string(), prefix])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let input = child.stdin.take().expect("piped");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let (says_ready, ready) = oneshot::channel();
    tokio::spawn(async move {
        let mut says_ready = Some(says_ready);
        while let Ok(Some(line)) = lines.next_line().await {
            if line == "ready" {
                // Nobody waits for that any more when the run has failed.
                let _ = says_ready.take().map(|says| says.send(()));
                continue;
            }
            let heard = Heard::parse(number, &line);
            // Half a line is what a killed process may leave.
            if heard.is_some() || number != VICTIM {
                let _ = teller.send(heard.ok_or(Error::Unheard(number + 1, line)));
            }
        }
    });
    Ok((child, input, ready))
}

/// What a child does.
pub(crate) async fn be(number: &str, prefix: &str) -> Result<(), Error> {
    let number = number.parse().ok().filter(|number| *number < PARTS);
    let number = number.ok_or(Error::Usage)?;
    let url = std::env::var("REDIS_URL").unwrap_or_default();
    let locks = registry(LockRegistry::builder_for(url)?, prefix)?;
    // The line to the server stands before anything is timed.
    locks.obtain("contended").inspect().await?;
    let mut orders = orders();
    say("ready");
    if orders.recv().await.is_none() {
        return Ok(());
    }
    let (_, never) = watch::channel(false);
    let part = take_part(number, locks, never, |at, what: What| {
        say(format_args!("{at} {what}"));
    });
    tokio::select! {
        ended = part => Ok(ended?),
        _ = orders.recv() => Ok(()),
    }
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

/// How long the server may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Takes away the one key that locks leave behind: the counter of fencing tokens.
async fn tidy(url: &str, prefix: &str) {
    let fence = format!("{prefix}:~fence");
    let delete = async {
        let client = redis::Client::open(url)?;
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
        eprintln!("timeline: the key {fence} stays behind: {error}");
    }
}
