//! The page, and the events that it gets.

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Html;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::routing::get;
use axum::{Router, middleware};
use futures::Stream;
use futures::stream::unfold;
use lockstream::store::MemoryStore;
use lockstream::{LockError, LockRegistry};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use super::admission::{Admission, admit};
use super::board::{Board, look};
use super::demo;
use crate::args::DashboardArgs;
use crate::exit;
use crate::messages::chain;
use crate::run::catch_signals;
use crate::show::print;
use crate::store::{Failure, Store};
use crate::watch::pause;

/// What all pages share.
#[derive(Debug, Default)]
struct Pages {
    /// What was seen last, as JSON; empty while nobody looks. Each page subscribes.
    updates: watch::Sender<Arc<str>>,
    opened: Notify,
}

/// A registry for looking, and what the page calls its store. Nothing is connected yet: the server may come later.
fn registry(args: &DashboardArgs) -> Result<(LockRegistry, &'static str), Failure> {
    if args.demo {
        let store = MemoryStore::new();
        let started = demo::start(&store).and_then(|()| LockRegistry::builder(store).build());
        let registry = started.map_err(|error| Failure::usage(error.to_string()))?;
        return Ok((registry, "a demo in memory"));
    }
    let store = Store::for_looking(&args.store)?;
    let name = match store.postgres() {
        Some(_) => "PostgreSQL",
        None => "Redis",
    };
    Ok((store.registry()?, name))
}

/// Looks again and again while somebody wants to see it.
async fn keep_looking(
    registry: LockRegistry,
    store: &'static str,
    every: Duration,
    pages: Arc<Pages>,
) {
    let mut board = Board::default();
    let mut looks: u64 = 0;
    loop {
        while pages.updates.receiver_count() == 0 {
            pages.updates.send_replace(Arc::default());
            pages.opened.notified().await;
        }
        let began = Instant::now();
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
        pages.updates.send_replace(json.to_string().into());
        sleep(pause(every, began.elapsed())).await;
    }
}

/// Without the key of the error, which is none: it was the list of all that failed.
fn reason(error: &LockError) -> String {
    error.source().map_or_else(|| error.to_string(), chain)
}

/// A page is sent what was seen last, if others look, and what is seen from now on. If it is slow it misses some of it,
/// and holds up nobody.
async fn events(
    State(pages): State<Arc<Pages>>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let mut updates = pages.updates.subscribe();
    updates.mark_changed();
    pages.opened.notify_one();
    let received = unfold(updates, async |mut updates| {
        let mut seen = Arc::default();
        while seen == Arc::<str>::default() {
            updates.changed().await.ok()?;
            seen = updates.borrow_and_update().clone();
        }
        Some((Ok(Event::default().data(&*seen)), updates))
    });
    Sse::new(received).keep_alive(KeepAlive::default())
}

/// Serves the page until a signal.
pub(crate) async fn dashboard(args: DashboardArgs) -> Result<u8, Failure> {
    let messages = args.store.messages();
    let mut signals = catch_signals()?;
    let (registry, name) = registry(&args)?;
    let address = args.listen;
    let cannot = |error| {
        let text = format!("cannot listen on {address}: {error}");
        Failure::new(exit::STORE, text)
    };
    let listener = TcpListener::bind(address).await.map_err(cannot)?;
    let address = listener.local_addr().map_err(cannot)?;
    if !address.ip().is_loopback() {
        let text = format!("warning: whoever reaches {address} sees all keys, and who holds them");
        messages.say("exposed", text, json!({}));
    }
    let pages = Arc::new(Pages::default());
    tokio::spawn(keep_looking(registry, name, args.every, pages.clone()));
    let admission = Admission::new(args.allow_host);
    let app = Router::new()
        .route("/", get(async || Html(include_str!("page.html"))))
        .route("/events", get(events))
        .with_state(pages)
        .layer(middleware::from_fn_with_state(admission, admit));
    print(&format!("listening on http://{address}"));
    tokio::select! {
        served = axum::serve(listener, app) => served.map(|()| 0).map_err(cannot),
        _ = signals.end() => Ok(0),
    }
}
