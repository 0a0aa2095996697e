//! What also works on a thread that ends, whose locals are gone: a lease in a local of the user's may be dropped there (H6).

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
