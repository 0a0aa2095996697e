//! What people write by hand: a row for each lock, taken by an upsert if it is free or over, and deleted by its owner.
//! Each task has a connection; whoever finds the lock taken looks again after 100 ms.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Client, NoTls, Statement};

use super::{Library, Outcome, Passes, TTL, told};

const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// So many connect at a time.
const AT_ONCE: usize = 16;

const TABLE: &str =
    "CREATE TABLE IF NOT EXISTS polled (key text PRIMARY KEY, owner text, until timestamptz)";

const TAKE: &str = "INSERT INTO polled VALUES ($1, $2, now() + $3 * interval '1 second') \
    ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, until = excluded.until WHERE polled.until < now()";

const GIVE_BACK: &str = "DELETE FROM polled WHERE key = $1 AND owner = $2";

pub(crate) struct PolledTable {
    idle: Mutex<VecDeque<Session>>,
    next: AtomicU64,
}

struct Session {
    client: Client,
    take: Statement,
    give_back: Statement,
}

pub(crate) struct Held {
    session: Session,
    key: String,
    owner: String,
}

async fn session(url: &str) -> Outcome<Session> {
    let connected = tokio_postgres::connect(url, NoTls).await;
    let (client, connection) = connected.map_err(told("connect"))?;
    // It ends with the client; what breaks it is told to each call.
    tokio::spawn(connection);
    // Two that create it at once may fail, and then it is there.
    let _ = client.batch_execute(TABLE).await;
    let take = client.prepare(TAKE).await.map_err(told("prepare"))?;
    let give_back = client.prepare(GIVE_BACK).await.map_err(told("prepare"))?;
    Ok(Session {
        client,
        take,
        give_back,
    })
}

impl Library for PolledTable {
    type Lock = String;
    type Held = Held;

    async fn connect(url: &str, _: Passes, callers: usize) -> Outcome<Self> {
        let connecting = (0..callers).map(|_| session(url));
        let connected = futures::stream::iter(connecting).buffer_unordered(AT_ONCE);
        let connected: Vec<_> = connected.collect().await;
        let idle: Outcome<VecDeque<_>> = connected.into_iter().collect();
        Ok(Self {
            idle: Mutex::new(idle?),
            next: AtomicU64::new(0),
        })
    }

    fn lock(&self, key: &str) -> String {
        key.to_owned()
    }

    async fn acquire(&self, key: &String) -> Outcome<Held> {
        let idle = self.idle.lock().expect("no panic").pop_front();
        let session = idle.ok_or("a task has no connection")?;
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let owner = format!("{}:{number}", std::process::id());
        let ttl = TTL.as_secs_f64();
        loop {
            let words: [&(dyn ToSql + Sync); 3] = [key, &owner, &ttl];
            let taking = session.client.execute(&session.take, &words);
            if taking.await.map_err(told("take"))? == 1 {
                let key = key.clone();
                return Ok(Held {
                    session,
                    key,
                    owner,
                });
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    async fn release(&self, held: Held) -> Outcome<()> {
        let session = held.session;
        let words: [&(dyn ToSql + Sync); 2] = [&held.key, &held.owner];
        let deleting = session.client.execute(&session.give_back, &words);
        let deleted = deleting.await.map_err(told("give back"))?;
        self.idle.lock().expect("no panic").push_back(session);
        match deleted {
            1 => Ok(()),
            _ => Err(format!("{} was not ours any more", held.key)),
        }
    }
}
