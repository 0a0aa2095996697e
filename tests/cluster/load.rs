//! Locks that are busy all the time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lockstream::LockRegistry;
use tokio::time::timeout;

use crate::BOUND;
use crate::support::{PATIENCE, wait_until};

/// Tasks in two registries that lock the same keys again and again, and see that nobody else is there.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    pub(crate) fn on(registries: &[&LockRegistry], keys: &[&str]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let done = Arc::new(AtomicU64::new(0));
        let mut tasks = Vec::new();
        for key in keys {
            // The last token, or all ones while somebody is in.
            let inside = Arc::new(AtomicU64::new(0));
            for registry in registries {
                for _ in 0..2 {
                    let lock = registry.obtain(*key);
                    let (stop, done, inside) = (stop.clone(), done.clone(), inside.clone());
                    tasks.push(tokio::spawn(async move {
                        while !stop.load(Ordering::Relaxed) {
                            let lease = timeout(PATIENCE, lock.lease()).await.unwrap().unwrap();
                            let before = inside.swap(u64::MAX, Ordering::SeqCst);
                            assert!(before < lease.token().get(), "somebody is in, or was later");
                            tokio::task::yield_now().await;
                            inside.store(lease.token().get(), Ordering::SeqCst);
                            lease.release().await.unwrap();
                            done.fetch_add(1, Ordering::Relaxed);
                        }
                    }));
                }
            }
        }
        Self { stop, done, tasks }
    }

    /// Waits for so many turns more.
    pub(crate) async fn goes_on(&self, what: &str) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until(what, PATIENCE, || {
            self.done.load(Ordering::Relaxed) > before + 200
                || self.tasks.iter().any(tokio::task::JoinHandle::is_finished)
        })
        .await;
    }

    pub(crate) async fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            timeout(BOUND, task).await.unwrap().unwrap();
        }
    }
}
