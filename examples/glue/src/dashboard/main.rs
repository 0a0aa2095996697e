//! A page that shows the locks of a store live: who holds them, who waits, and who hands over to whom.
//!
//! ```sh
//! cargo run -p lockstream-glue --bin dashboard                 # a demo in memory
//! export REDIS_URL=redis://127.0.0.1/                          # or DATABASE_URL=postgres://…
//! PORT=8080 cargo run -p lockstream-glue --bin dashboard -- shop   # the locks of registries with the prefix `shop`
//! ```
//!
//! `events()` tells a registry of its own locks. This looks into the store instead, by `scan`, and so sees those of all
//! registries. It takes no lock and writes nothing. On Redis it needs the right to `scan`, in PostgreSQL that to `scan_1`.
//!
//! One task looks twice a second while a page is open, however many pages there are, and they are sent what it saw as
//! server-sent events. What comes and goes between two looks is not seen: this is for people, and counts nothing exactly.
//!
//! It listens on 127.0.0.1 alone and asks for no password. Whoever can reach it sees all keys.

mod board;
mod demo;

use std::convert::Infallible;
use std::env::{self, VarError};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::response::Html;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use futures::Stream;
use futures::stream::unfold;
use lockstream::store::{LockStore, MemoryStore, PostgresStore, RedisStore};
use lockstream::{LockError, LockRegistry};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::board::{Board, look};

/// From the end of a look to the next.
const PAUSE: Duration = Duration::from_millis(500);

/// What was seen last, as JSON. Each page subscribes.
type Updates = watch::Sender<Arc<str>>;

/// The store that the environment names, and what the page calls it. Nothing is connected yet: the server may come later.
fn store() -> Result<(Arc<dyn LockStore>, &'static str), String> {
    let redis = variable("REDIS_URL")?;
    let postgres = variable("DATABASE_URL")?;
    if let Some(url) = redis {
        let store = RedisStore::connect_lazy(url).map_err(|error| named("REDIS_URL", &error))?;
        return Ok((Arc::new(store), "Redis"));
    }
    if let Some(url) = postgres {
        // Who only looks makes no tables.
        let store = PostgresStore::builder(url).migrate(false).connect_lazy();
        let store = store.map_err(|error| named("DATABASE_URL", &error))?;
        return Ok((Arc::new(store), "PostgreSQL"));
    }
    let store = MemoryStore::new();
    demo::start(&store).map_err(|error| error.to_string())?;
    Ok((Arc::new(store), "a demo in memory"))
}

fn variable(name: &str) -> Result<Option<String>, String> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(named(name, &error)),
    }
}

fn named(name: &str, error: &(dyn Error + 'static)) -> String {
    format!("{name}: {}", chain(error))
}

/// What an error says, and each of its causes.
fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| (**error).source());
    let causes: Vec<_> = causes.map(ToString::to_string).collect();
    causes.join(": ")
}

/// Looks again and again while somebody wants to see it.
async fn keep_looking(registry: LockRegistry, store: &'static str, updates: Arc<Updates>) {
    let mut board = Board::default();
    let mut looks: u64 = 0;
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if updates.receiver_count() == 0 {
            continue;
        }
        let found = look(&registry).await;
        looks += 1;
        let now = Instant::now();
        // While the store is away the page shows what was seen last.
        let away = match found {
            Ok(found) => {
                board.update(found, now);
                None
            }
            Err(error) => Some(reason(&error)),
        };
        let mut json = board.to_json(now);
        json["store"] = json!(store);
        json["looks"] = json!(looks);
        json["away"] = json!(away);
        updates.send_replace(json.to_string().into());
    }
}

/// Without the key of the error, which is none: it was the list of all that failed.
fn reason(error: &LockError) -> String {
    error.source().map_or_else(|| error.to_string(), chain)
}

/// A page is sent what is seen from now on. If it is slow it misses some of it, and holds up nobody.
async fn events(
    State(updates): State<Arc<Updates>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let received = unfold(updates.subscribe(), async |mut received| {
        received.changed().await.ok()?;
        let event = Event::default().data(&*received.borrow_and_update().clone());
        Some((Ok(event), received))
    });
    Sse::new(received).keep_alive(KeepAlive::default())
}

async fn serve() -> Result<(), Box<dyn Error>> {
    let port: u16 = match variable("PORT")? {
        Some(port) => port.parse().map_err(|error| named("PORT", &error))?,
        None => 8080,
    };
    let (store, name) = store()?;
    let prefix = env::args().nth(1).unwrap_or_else(|| "lock".to_owned());
    let registry = LockRegistry::builder(store)
        .prefix(prefix)
        .name("dashboard")
        .build()?;
    let updates = Arc::new(watch::Sender::default());
    tokio::spawn(keep_looking(registry, name, Arc::clone(&updates)));

    let app = Router::new()
        .route("/", get(async || Html(include_str!("page.html"))))
        .route("/events", get(events))
        .with_state(updates);
    let listener = TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("127.0.0.1:{port}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app).await?)
}

#[tokio::main]
async fn main() -> ExitCode {
    match serve().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("dashboard: {error}");
            ExitCode::FAILURE
        }
    }
}
