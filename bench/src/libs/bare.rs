//! What people write by hand: `SET NX PX`, and compare-and-delete, over one multiplexed connection.
//! No queue, no fence, no renewal, no notice; whoever finds the key taken looks again after 100 ms.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::Script;
use redis::aio::MultiplexedConnection;

use super::{Library, Outcome, Passes, TTL, told};

const LOOK_AGAIN: Duration = Duration::from_millis(100);

const COMPARE_AND_DELETE: &str = r#"
if redis.call("GET", KEYS[1]) == ARGV[1] then
  return redis.call("DEL", KEYS[1])
end
return 0
"#;

pub(crate) struct Bare {
    connection: MultiplexedConnection,
    release: Script,
    next: AtomicU64,
}

pub(crate) struct Held {
    key: Arc<str>,
    owner: String,
}

impl Library for Bare {
    type Lock = Arc<str>;
    type Held = Held;

    async fn connect(url: &str, _: Passes) -> Outcome<Self> {
        let client = redis::Client::open(url).map_err(told("open"))?;
        let connection = client
            .get_multiplexed_async_connection()
            .await
            .map_err(told("connect"))?;
        let release = Script::new(COMPARE_AND_DELETE);
        let mut loading = connection.clone();
        let loaded = release.load_async(&mut loading).await;
        loaded.map_err(told("load the script"))?;
        Ok(Self {
            connection,
            release,
            next: AtomicU64::new(0),
        })
    }

    fn lock(&self, key: &str) -> Arc<str> {
        Arc::from(key)
    }

    async fn acquire(&self, key: &Arc<str>) -> Outcome<Held> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let owner = format!("{}:{number}", std::process::id());
        let ttl = TTL.as_millis() as u64;
        let mut connection = self.connection.clone();
        loop {
            let mut set = redis::cmd("SET");
            set.arg(&**key).arg(&owner).arg("NX").arg("PX").arg(ttl);
            let won: Option<String> = set
                .query_async(&mut connection)
                .await
                .map_err(told("SET"))?;
            if won.is_some() {
                let key = Arc::clone(key);
                return Ok(Held { key, owner });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn release(&self, held: Held) -> Outcome<()> {
        let mut connection = self.connection.clone();
        let mut call = self.release.key(&*held.key);
        let deleted: u64 = call
            .arg(held.owner)
            .invoke_async(&mut connection)
            .await
            .map_err(told("compare-and-delete"))?;
        match deleted {
            1 => Ok(()),
            _ => Err(format!("{} was not ours any more", held.key)),
        }
    }
}
