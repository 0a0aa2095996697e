//! Calls into code that is not ours: policies, wakers, log and metric sinks, destructors.
//!
//! Such code is called where none of our locks is held, and its panics end here: they change nothing else.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `code`. `None`: it panicked, which the log is told.
pub(crate) fn run<R>(what: &'static str, code: impl FnOnce() -> R) -> Option<R> {
    let panicked = match catch_unwind(AssertUnwindSafe(code)) {
        Ok(result) => return Some(result),
        Err(panicked) => panicked,
    };
    // What it panicked with may have a destructor that panics, too.
    std::mem::forget(panicked);
    // The log sink may be what has panicked.
    let logged = catch_unwind(|| tracing::error!("{what} panicked"));
    let _ = logged.map_err(std::mem::forget);
    None
}

/// Drops what has a destructor of the user's.
pub(crate) fn discard<T>(theirs: T) {
    run("a destructor", || drop(theirs));
}

/// Tells the log sink, which is the user's code.
macro_rules! log {
    ($level:ident, $($told:tt)+) => {
        $crate::base::user_code::run("a log sink", || tracing::$level!($($told)+)).unwrap_or_default()
    };
}
pub(crate) use log;
