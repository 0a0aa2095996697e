//! `rslock` on one server, with the retries that it comes with: three tries, up to 200 ms apart,
//! which its `acquire` begins again for as long as it takes.

use std::time::Duration;

use rslock::{LockGuard, LockManager};

use super::{Library, Outcome, Passes, TTL, told};

pub(crate) struct Rslock {
    manager: LockManager,
    ttl: Duration,
}

impl Library for Rslock {
    type Lock = String;
    type Held = LockGuard;

    async fn connect(url: &str, _: Passes, _: usize) -> Outcome<Self> {
        let client = redis::Client::open(url).map_err(told("open"))?;
        let manager = LockManager::from_clients(vec![client]);
        let ttl = TTL;
        Ok(Self { manager, ttl })
    }

    fn lasting(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    fn lock(&self, key: &str) -> String {
        key.to_owned()
    }

    async fn acquire(&self, key: &String) -> Outcome<LockGuard> {
        let acquired = self.manager.acquire(key.as_str(), self.ttl).await;
        acquired.map_err(told("acquire"))
    }

    async fn release(&self, held: LockGuard) -> Outcome<()> {
        held.release().await;
        Ok(())
    }
}
