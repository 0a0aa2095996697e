//! The one timer task of a registry: it serves every deadline, wait and pause.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use futures::future::{self, Either};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use super::core::Driver;

/// Starts the task, starts it again when the runtime that it ran on has gone, and rings when an
/// earlier deadline came up.
#[derive(Debug, Default)]
pub(super) struct Timer {
    bell: Arc<Notify>,
    running: Arc<AtomicBool>,
    /// Where it ran last, for those who come without a runtime: a drop on a plain thread.
    runtime: Mutex<Option<Handle>>,
}

impl Timer {
    /// Sees to it that the task runs.
    pub(super) fn ensure(&self, driver: &Weak<Driver>) {
        if self.running.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut known = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(current) = Handle::try_current() {
            *known = Some(current);
        }
        let runtime = known.clone();
        drop(known);
        let running = Running(self.running.clone());
        if let Some(runtime) = runtime {
            let (driver, bell) = (driver.clone(), self.bell.clone());
            runtime.spawn(run(driver, bell, running));
        }
    }

    pub(super) fn ring(&self) {
        self.bell.notify_one();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.ring();
    }
}

/// Goes with the task, also when its runtime ends.
#[derive(Debug)]
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

async fn run(driver: Weak<Driver>, bell: Arc<Notify>, running: Running) {
    let _running = running;
    loop {
        let next = match driver.upgrade() {
            Some(driver) => driver.run_due(),
            None => return,
        };
        let rung = pin!(bell.notified());
        match next {
            None => rung.await,
            // The clock is compared before the sleep is polled: a runtime's budget can leave an
            // elapsed sleep pending.
            Some(at) => {
                let sleep = pin!(tokio::time::sleep_until(at));
                match future::select(rung, sleep).await {
                    Either::Left(_) | Either::Right(_) => {}
                }
            }
        }
    }
}
