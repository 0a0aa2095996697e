//! What people write by hand: `SET NX PX`, and compare-and-delete, over one multiplexed connection.
//! No queue, no fence, no renewal, no notice; whoever finds the key taken looks again after 100 ms.
//!
//! A permit is a member of a sorted set, by the end of its time: remove those whose time is over, add
//! your own, count, and take it back if there are too many. Then look again, at one of sixteen moments
//! within 100 ms: those who collide would collide again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

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
    ttl: Duration,
}

pub(crate) struct Held {
    wanted: Wanted,
    owner: String,
}

/// A key, and how many may hold it: `None` for a lock.
#[derive(Clone)]
pub(crate) struct Wanted {
    key: Arc<str>,
    permits: Option<u32>,
}

impl Library for Bare {
    type Lock = Wanted;
    type Held = Held;

    async fn connect(url: &str, _: Passes, _: usize) -> Outcome<Self> {
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
            ttl: TTL,
        })
    }

    fn lasting(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    fn lock(&self, key: &str) -> Wanted {
        let key = Arc::from(key);
        let permits = None;
        Wanted { key, permits }
    }

    fn permit(&self, key: &str, limit: u32) -> Wanted {
        let permits = Some(limit);
        let key = Arc::from(key);
        Wanted { key, permits }
    }

    async fn acquire(&self, wanted: &Wanted) -> Outcome<Held> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let owner = format!("{}:{number}", std::process::id());
        let mut connection = self.connection.clone();
        let wanted = wanted.clone();
        while !is_taken(&mut connection, &wanted, &owner, self.ttl).await? {
            let pause = match wanted.permits {
                None => LOOK_AGAIN,
                Some(_) => LOOK_AGAIN / 16 * (number * 7 % 16 + 1) as u32,
            };
            tokio::time::sleep(pause).await;
        }
        Ok(Held { wanted, owner })
    }

    async fn release(&self, held: Held) -> Outcome<()> {
        let mut connection = self.connection.clone();
        let Wanted { key, permits } = held.wanted;
        let deleted: u64 = match permits {
            None => {
                let mut call = self.release.key(&*key);
                let deleted = call.arg(held.owner).invoke_async(&mut connection).await;
                deleted.map_err(told("compare-and-delete"))?
            }
            Some(_) => {
                let mut rem = redis::cmd("ZREM");
                rem.arg(&*key).arg(held.owner);
                let removed = rem.query_async(&mut connection).await;
                removed.map_err(told("ZREM"))?
            }
        };
        match deleted {
            1 => Ok(()),
            _ => Err(format!("{key} was not ours any more")),
        }
    }
}

async fn is_taken(
    connection: &mut MultiplexedConnection,
    wanted: &Wanted,
    owner: &str,
    ttl: Duration,
) -> Outcome<bool> {
    let (key, ttl) = (&*wanted.key, ttl.as_millis() as u64);
    let Some(limit) = wanted.permits else {
        let mut set = redis::cmd("SET");
        set.arg(key).arg(owner).arg("NX").arg("PX").arg(ttl);
        let won: Option<String> = set.query_async(connection).await.map_err(told("SET"))?;
        return Ok(won.is_some());
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.map_err(told("the clock"))?.as_millis() as u64;
    let mut pipe = redis::pipe();
    pipe.atomic();
    pipe.cmd("ZREMRANGEBYSCORE")
        .arg(key)
        .arg("-inf")
        .arg(now)
        .ignore();
    pipe.cmd("ZADD").arg(key).arg(now + ttl).arg(owner).ignore();
    pipe.cmd("ZCARD").arg(key);
    let (count,): (u32,) = pipe.query_async(connection).await.map_err(told("ZADD"))?;
    if count <= limit {
        return Ok(true);
    }
    let mut rem = redis::cmd("ZREM");
    let removed: Result<u64, _> = rem.arg(key).arg(owner).query_async(connection).await;
    removed.map_err(told("ZREM"))?;
    Ok(false)
}
