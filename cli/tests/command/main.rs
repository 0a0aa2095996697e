//! The command line, as real processes on real servers.
//!
//! | file | question it answers |
//! |---|---|
//! | `program.rs` | how does a test run the command? |
//! | `codes.rs` | which exit code says what? |
//! | `absence.rs` | who waits for a server that is not there? |
//! | `words.rs` | what may be said, and what is told of a line that is refused? |
//! | `secrets.rs` | who sees the password? |
//! | `signals.rs` | what do signals do at each stage? |
//! | `guardian.rs` | what if the command line itself is killed or stopped? |
//! | `descendants.rs` | what if the command's processes leave its group or session? |
//! | `losses.rs` | what if the lease cannot be renewed, or is lost? |
//! | `holding.rs` | how does one lease last over several commands? |
//! | `nesting.rs` | what if a command uses locks itself? |
//! | `checking.rs` | what is the store, and is it ready? |
//! | `connecting.rs` | what may be said of the connection? |
//! | `stores.rs` | which stores are there, by url? |
//! | `looking.rs` | how are locks shown and freed? |
//! | `leading.rs` | when does the command of a leader run? |
//! | `systemd.rs` | what does the command of a service get of what systemd gives? |
//! | `terminal.rs` | what happens on a terminal? |
#![cfg(unix)]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod absence;
#[allow(dead_code, reason = "other tests use the rest of it")]
#[path = "../../../tests/access/authority.rs"]
mod authority;
mod checking;
mod codes;
mod connecting;
// Elsewhere only the process group is reached.
#[cfg(target_os = "linux")]
mod descendants;
mod guardian;
mod holding;
mod leading;
mod looking;
mod losses;
mod nesting;
mod program;
mod secrets;
mod signals;
mod stores;
mod systemd;
// Elsewhere no terminal can be opened safely: its name has no reentrant form.
#[cfg(target_os = "linux")]
mod terminal;
mod words;
