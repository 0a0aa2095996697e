//! Exit codes.

use lockstream::LockError;

/// A usage error: of the parser, of a value, or of the url.
pub(crate) const USAGE: u8 = 64;
/// The store cannot be reached, or refuses.
pub(crate) const STORE: u8 = 69;
/// Others held the lock for the whole wait; `-E` sets another code.
pub(crate) const BUSY: u8 = 75;
/// The lease was lost, or could not be renewed, and the command was stopped.
pub(crate) const LOST: u8 = 76;
/// The command ran for longer than `--timeout`, and was stopped: as coreutils' `timeout` has it.
pub(crate) const TIMED_OUT: u8 = 124;
/// The command was found and could not be run.
pub(crate) const CANNOT_RUN: u8 = 126;
/// The command was not found.
pub(crate) const NOT_FOUND: u8 = 127;

/// The code of a process that a signal ended.
pub(crate) fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// The code of an error of a lock.
pub(crate) fn of_error(error: &LockError, busy: u8) -> u8 {
    match error {
        LockError::NotAcquired { .. } | LockError::QueueFull { .. } => busy,
        LockError::Lost { .. } => LOST,
        LockError::InvalidKey { .. }
        | LockError::InvalidTtl { .. }
        | LockError::InvalidSetting { .. } => USAGE,
        _ => STORE,
    }
}
