//! Waking many tasks at once.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

/// Has the runtime wake it together with others that yield: once this worker has nothing else to do,
/// and before it sleeps. Outside of a runtime, at once.
pub(crate) fn wake_soon(waker: &Waker) {
    // Whoever is pending is owed a wake-up, and the runtime has taken a clone of the waker for it.
    let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(waker));
}
