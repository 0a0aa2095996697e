//! A contended key, seen: turns the events of four processes into one picture.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example timeline                # four processes on that server
//! cargo run --example timeline                                             # four registries in this process
//! cargo run --example timeline -- docs/timeline.svg                        # the picture goes there
//! ```
//!
//! They all want the same lock, again and again. Half-way the second is killed while it holds it
//! (SIGKILL; in one process: its lease is forgotten, and it never comes back), and the others wait
//! until its lease has run out. The last is now and then too slow for its lease, and loses it.
//!
//! | file | question it answers |
//! |---|---|
//! | `part.rs` | what does each of them do, and what does it tell? **Read this one.** |
//! | `process.rs` | how is one a process of its own? |
//! | `story.rs` | what happened, put together from what all of them told? |
//! | `picture.rs` | how is that drawn? |

mod part;
mod picture;
mod process;
mod story;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use lockstream::{BuildError, LockError, StoreError};

use self::story::Story;

/// How many take part.
const PARTS: usize = 4;

/// Which of them is killed while it holds the lock, the first time it has it after [`KILL_AFTER`].
const VICTIM: usize = 1;
const KILL_AFTER: Duration = Duration::from_millis(1100);

/// It has hardly begun its work then.
const INTO_ITS_WORK: Duration = Duration::from_millis(60);

/// After this nobody begins again.
const LASTS: Duration = Duration::from_millis(2800);

/// What can end a run early.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("usage: timeline [FILE.svg]")]
    Usage,
    #[error("the server in REDIS_URL cannot be used")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Process(#[from] std::io::Error),
    #[error("process {0} said what nobody understands: {1:?}")]
    Unheard(usize, String),
    #[error("process {0} failed")]
    Failed(usize),
    #[error("{}: {fault}", .path.display())]
    File {
        path: PathBuf,
        fault: std::io::Error,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments[..] {
        ["--part", number, prefix] => process::be(number, prefix).await,
        [] => show(Path::new("timeline.svg")).await,
        [file] if !file.starts_with('-') => show(Path::new(file)).await,
        _ => Err(Error::Usage),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let causes =
                std::iter::successors(Some(&error as &dyn std::error::Error), |it| it.source());
            let told: Vec<_> = causes.map(ToString::to_string).collect();
            eprintln!("timeline: {}", told.join(": "));
            ExitCode::from(if matches!(error, Error::Usage) { 2 } else { 1 })
        }
    }
}

async fn show(file: &Path) -> Result<(), Error> {
    let url = std::env::var("REDIS_URL").ok();
    let (heard, place) = match url.filter(|url| !url.is_empty()) {
        Some(url) => (process::run_all(&url).await?, "processes on one server"),
        None => (part::run_all().await?, "registries in one process"),
    };
    let story = Story::of(&heard);
    let picture = picture::draw(&story, place);
    std::fs::write(file, picture).map_err(|fault| Error::File {
        path: file.to_owned(),
        fault,
    })?;
    println!("{}", story.summary());
    println!("wrote {}", file.display());
    Ok(())
}
