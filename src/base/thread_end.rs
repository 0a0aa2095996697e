//! What also works on a thread that ends, when its locals are gone: a thread-local of the user may drop a lease then
//! (H6).

use std::panic::catch_unwind;

use tokio::time::Instant;

/// The time on tokio's clock. With tokio's feature `test-util` that is read by way of a local of the thread.
pub(crate) fn now() -> Instant {
    catch_unwind(Instant::now).unwrap_or_else(|_| Instant::from_std(std::time::Instant::now()))
}

/// Anything from 0 to 1. The generator is a local of the thread.
pub(crate) fn random() -> f64 {
    catch_unwind(rand::random).unwrap_or(0.5)
}
