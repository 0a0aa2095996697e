//! Looks at every server all the time: which of them is a primary?

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use redis::{Client, Connection, RedisResult, Value};

use crate::judge::Span;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::support::RedisServer;

/// Between two looks at one server.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a server may be silent; then it is asked again.
const PATIENCE: Duration = Duration::from_millis(100);

/// One thread a server, for as long as this lives.
pub(super) struct Watch {
    reigns: Arc<Mutex<Reigns>>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Over these servers, each with the shard that it is in.
    pub(super) fn over<'a>(servers: impl Iterator<Item = (&'a RedisServer, usize)>) -> Self {
        let (servers, shards): (Vec<_>, Vec<_>) = servers.unzip();
        let reigns = Arc::new(Mutex::new(Reigns::of(shards)));
        let over = Arc::new(AtomicBool::new(false));
        let watch = |(number, server): (usize, &RedisServer)| {
            let client = Client::open(server.harness_url()).expect("a url of ours");
            let (reigns, over) = (reigns.clone(), over.clone());
            std::thread::spawn(move || {
                let mut connection = None;
                while !over.load(Ordering::Relaxed) {
                    let from = now();
                    match is_primary(&client, &mut connection) {
                        Ok(is_primary) => {
                            let asked = Span { from, to: now() };
                            lock(&reigns).answered(number, asked, is_primary);
                        }
                        // Away, silent, or just now somebody else: asked again.
                        Err(_) => connection = None,
                    }
                    std::thread::sleep(PAUSE);
                }
            })
        };
        let threads = servers.into_iter().enumerate().map(watch).collect();
        Self {
            reigns,
            over,
            threads,
        }
    }

    pub(super) fn reigns(&self) -> MutexGuard<'_, Reigns> {
        lock(&self.reigns)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic there has been printed.
            let _ = thread.join();
        }
    }
}

fn lock(reigns: &Mutex<Reigns>) -> MutexGuard<'_, Reigns> {
    reigns.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_primary(client: &Client, connection: &mut Option<Connection>) -> RedisResult<bool> {
    let connection = match connection {
        Some(connection) => connection,
        None => {
            let fresh = client.get_connection_with_timeout(PATIENCE)?;
            fresh.set_read_timeout(Some(PATIENCE))?;
            connection.insert(fresh)
        }
    };
    let role: Vec<Value> = redis::cmd("ROLE").query(connection)?;
    Ok(role.first() == Some(&Value::BulkString(b"master".to_vec())))
}
