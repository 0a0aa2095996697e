//! `async-redis-lock`, with the options that it comes with (a ttl of 3 s, prolonged every second,
//! tries 100 ms apart), but for its patience of one second.

use std::time::Duration;

use async_redis_lock::{Lock, Locker, Options};

use super::{Library, Outcome, Passes, told};

pub(crate) struct AsyncRedisLock {
    locker: Locker,
    options: Options,
}

impl Library for AsyncRedisLock {
    type Lock = String;
    type Held = Lock;

    async fn connect(url: &str, _: Passes, _: usize) -> Outcome<Self> {
        let locker = Locker::from_redis_url(url).await;
        Ok(Self {
            locker: locker.map_err(told("connect"))?,
            options: Options::new().timeout(None),
        })
    }

    fn lasting(self, ttl: Duration) -> Self {
        let options = self.options.ttl(ttl).extend(ttl / 3);
        Self { options, ..self }
    }

    fn is_lost(held: &Lock) -> bool {
        held.is_lost()
    }

    fn lock(&self, key: &str) -> String {
        key.to_owned()
    }

    async fn acquire(&self, key: &String) -> Outcome<Lock> {
        let acquiring = self.locker.acquire_with_options(&self.options, key);
        acquiring.await.map_err(told("acquire"))
    }

    async fn release(&self, held: Lock) -> Outcome<()> {
        held.release().await.map_err(told("release"))
    }
}
