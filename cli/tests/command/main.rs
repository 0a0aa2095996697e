//! The command line, as real processes on real servers.
//!
//! | file | question it answers |
//! |---|---|
//! | `program.rs` | how does a test run the command? |
//! | `codes.rs` | which exit code says what? |
//! | `secrets.rs` | who sees the password? |
//! | `signals.rs` | what do signals do at each stage? |
//! | `guardian.rs` | what if the command line itself is killed or stopped? |
//! | `losses.rs` | what if the lease cannot be renewed, or is lost? |
//! | `terminal.rs` | what happens on a terminal? |
#![cfg(unix)]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod codes;
mod guardian;
mod losses;
mod program;
mod secrets;
mod signals;
// Elsewhere no terminal can be opened safely: its name has no reentrant form.
#[cfg(target_os = "linux")]
mod terminal;
