//! What the guide says of axum, as it is there, over real HTTP.

// [guide]
use std::convert::Infallible;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Router, extract::Request, routing::put};
use lockstream::tower::{LockLayer, RequestLock};
use lockstream::{LeaseView, prelude::*};

/// Which row a request is about: a path can be written in several ways, and a number has one lock.
fn row_of(request: &Request) -> Option<u64> {
    let row = request.uri().path().strip_prefix("/rows/")?;
    row.parse().ok()
}

async fn write(lease: Option<Extension<LeaseView>>) -> Result<String, StatusCode> {
    let Extension(lease) = lease.ok_or(StatusCode::NOT_FOUND)?;
    // UPDATE … SET …, token = $2 WHERE id = $1 AND token <= $2
    Ok(format!("written under {}", lease.token()))
}

fn refused(error: LockError) -> Result<Response, Infallible> {
    Ok((StatusCode::SERVICE_UNAVAILABLE, error.to_string()).into_response())
}

fn app(locks: LockRegistry) -> Router {
    let one_at_a_time = LockLayer::new(move |request: &Request| match row_of(request) {
        Some(row) => locks.obtain(format!("row:{row}")).into(),
        None => RequestLock::Unlocked, // it is answered with 404
    });
    let one_at_a_time = one_at_a_time.lease_in_extensions().or_else(refused);
    Router::new().route("/rows/{id}", put(write).layer(one_at_a_time))
}
// [/guide]

use std::io::Read;
use std::time::Duration;

use axum::body::Body;
use axum::routing::get;
use futures::stream;
use tokio::sync::mpsc;

/// Serves until the test ends. Returns its address.
async fn serve(app: Router) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    format!("http://{address}")
}

fn agent() -> ureq::Agent {
    let bound = Some(Duration::from_secs(20));
    let config = ureq::Agent::config_builder().timeout_global(bound);
    config.http_status_as_error(false).build().into()
}

#[test]
fn the_guide_has_this_block() {
    let here = include_str!("guide.rs");
    let (_, block) = here.split_once("// [guide]\n").unwrap();
    let (block, _) = block.split_once("// [/guide]").unwrap();
    let guide = include_str!("../../../docs/guide.md");
    let block = format!("```rust,ignore\n{block}```\n");
    assert!(guide.contains(&block), "docs/guide.md has another block");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_writes_under_the_token_of_its_request() {
    let locks = LockRegistry::in_memory();
    let url = serve(app(locks.clone())).await;
    let written = tokio::task::spawn_blocking(move || {
        let write = || {
            let mut answer = agent().put(format!("{url}/rows/7")).send_empty().unwrap();
            let text = answer.body_mut().read_to_string().unwrap();
            let token = text.strip_prefix("written under ");
            token
                .unwrap_or_else(|| panic!("{text}"))
                .parse::<u64>()
                .unwrap()
        };
        // Axum reads this path as that of row 7, too: a second lock of it would be none.
        let other = agent().put(format!("{url}/rows/%37")).send_empty();
        assert_eq!(other.unwrap().status(), 404);
        (write(), write())
    });
    let (first, second) = written.await.unwrap();
    assert!(first < second);
}

/// A row a second from the test, under the lock of the path.
fn export(locks: LockRegistry, rows: mpsc::UnboundedReceiver<&'static str>) -> Router {
    let rows = std::sync::Arc::new(std::sync::Mutex::new(Some(rows)));
    let handler = async move || {
        let rows = rows.lock().unwrap().take().unwrap();
        let rows = stream::unfold(rows, async |mut rows| {
            let row = rows.recv().await?;
            Some((Ok::<_, Infallible>(row), rows))
        });
        Body::from_stream(rows)
    };
    let layer = LockLayer::new(move |request: &Request| locks.obtain(request.uri().path()));
    let layer = layer.hold_through_body().or_else(refused);
    Router::new().route("/export", get(handler).layer(layer))
}

/// The lock is held while a client reads. If it is lost meanwhile, the client is not told that it has read all.
#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_response_is_sent_under_the_lock() {
    for is_lost in [false, true] {
        let locks = LockRegistry::in_memory();
        let (sender, rows) = mpsc::unbounded_channel();
        let url = serve(export(locks.clone(), rows)).await;
        sender.send("row 1\n").unwrap();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let reading = tokio::task::spawn_blocking(move || {
            let answer = agent().get(format!("{url}/export")).call().unwrap();
            let mut body = answer.into_body().into_reader();
            let mut row = [0; 6];
            body.read_exact(&mut row).unwrap();
            begun.send(row).unwrap();
            let mut rest = String::new();
            body.read_to_string(&mut rest).map(|_| rest)
        });
        assert_eq!(&has_begun.await.unwrap(), b"row 1\n");
        let other = locks.obtain("/export");
        assert!(!other.acquire_once().await.unwrap());
        if is_lost {
            locks.shutdown().await;
            let told = reading.await.unwrap();
            assert!(told.is_err(), "{told:?}");
            continue;
        }
        sender.send("row 2\n").unwrap();
        drop(sender);
        assert_eq!(reading.await.unwrap().unwrap(), "row 2\n");
        assert!(other.acquire_within(Duration::from_secs(10)).await.unwrap());
        other.release().await.unwrap();
    }
}
