//! `lockstream`: runs commands under distributed locks, and shows and frees locks.
//!
//! | file | question it answers |
//! |---|---|
//! | `args.rs` | what can be said on the command line? |
//! | `tip.rs` | what was meant by a line that was refused? |
//! | `duration.rs` | how is a time written there? |
//! | `url.rs` | where is the store, and who may see its password? |
//! | `store.rs` | how is a registry made? |
//! | `exit.rs` | what does each exit code mean? |
//! | `messages.rs` | what is said on standard error, and how? |
//! | `acquire.rs` | how is the store waited for, and then the lock? |
//! | `nested.rs` | which locks are held around this process? |
//! | `run.rs` | how does a command get its lock, and give it back? |
//! | `supervise.rs` | what happens while the command runs? |
//! | `child.rs` | how is the command started, signalled and ended? |
//! | `guardian.rs` | who ends the command if this process is killed or stopped? |
//! | `launch.rs` | what does the command inherit? |
//! | `tree.rs` | which processes belong to the command? |
//! | `lead.rs` | how does a command run wherever the leader is? |
//! | `hold.rs` | how is a lock held over several commands? |
//! | `show.rs`, `watch.rs` | how are locks shown and freed? |
//! | `dashboard/` | how are locks shown on a page? |
//! | `check.rs` | what is the store, and is it ready? |
//! | `pages.rs` | where do completions and manual pages come from? |
//! | `signals.rs` | which signals are caught, blocked or ignored? |
//! | `terminal.rs` | which process group has the terminal? |

#[cfg(unix)]
mod acquire;
#[cfg(unix)]
mod args;
#[cfg(unix)]
mod check;
#[cfg(unix)]
mod child;
#[cfg(all(unix, feature = "dashboard"))]
mod dashboard;
#[cfg(unix)]
mod duration;
#[cfg(unix)]
mod exit;
#[cfg(unix)]
mod guardian;
#[cfg(unix)]
mod hold;
#[cfg(unix)]
mod launch;
#[cfg(unix)]
mod lead;
#[cfg(unix)]
mod messages;
#[cfg(unix)]
mod nested;
#[cfg(unix)]
mod pages;
#[cfg(unix)]
mod run;
#[cfg(unix)]
mod show;
#[cfg(unix)]
mod signals;
#[cfg(unix)]
mod store;
#[cfg(unix)]
mod supervise;
#[cfg(unix)]
mod terminal;
#[cfg(unix)]
mod tip;
#[cfg(unix)]
mod tree;
#[cfg(unix)]
mod url;
#[cfg(unix)]
mod watch;

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    args::main()
}

#[cfg(not(unix))]
fn main() -> std::process::ExitCode {
    eprintln!("lockstream: this command runs on Unix only");
    std::process::ExitCode::from(69)
}
