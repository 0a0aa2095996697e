//! A payment endpoint of which several instances run. Each order is handled by one request at a time, whichever instance
//! it comes to; what is being handled already is answered with 409.
//!
//! ```sh
//! export REDIS_URL=redis://127.0.0.1/
//! cargo run -p lockstream-glue --bin payments -- 127.0.0.1:3001   # in two terminals, with two ports
//! curl -i -X POST 127.0.0.1:3001/orders/42/payment                 # 201, after half a second
//! curl -i -X POST 127.0.0.1:3002/orders/42/payment                 # 409 meanwhile, and 200 afterwards
//! ```
//!
//! **A lock is no idempotency.** It keeps two requests for an order apart while they are handled. It says nothing of a
//! request that comes a minute later, because a customer pressed the button again or a proxy repeated the request. So a
//! payment is stored under its order, once: the store refuses a second one (`HSETNX`). That also holds where no lock can
//! help: a request whose lease was lost while it was handled, and who is not the only one any more. What the lock adds is
//! that nobody pays twice at once, which would have to be paid back.

use std::convert::Infallible;
use std::process::ExitCode;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use lockstream::tower::{LockLayer, RequestLock};
use lockstream::{LockError, LockRegistry};
use redis::aio::MultiplexedConnection;
use redis::{AsyncCommands, RedisResult};
use tokio::net::TcpListener;

/// For so long an order is locked after a crash of the instance that handled it.
const TTL: Duration = Duration::from_secs(3);

/// Which order a request is about. One function for the key of the lock and for the work: an order that could be written in
/// two ways would have two locks.
fn order_of(uri: &Uri) -> Option<u64> {
    let order = uri.path().strip_prefix("/orders/")?;
    order.strip_suffix("/payment")?.parse().ok()
}

/// What is answered when the lock of an order fails.
fn refused(error: LockError) -> Result<Response, Infallible> {
    let status = match error {
        LockError::NotAcquired { .. } => StatusCode::CONFLICT,
        // The handler was stopped half-way. Whoever asks again learns whether the order is paid.
        LockError::Lost { .. } => StatusCode::INTERNAL_SERVER_ERROR,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    Ok((status, [(header::RETRY_AFTER, "1")], format!("{error}\n")).into_response())
}

#[derive(Clone)]
struct Shop {
    redis: MultiplexedConnection,
    bank_takes: Duration,
}

impl Shop {
    /// Pays an order, unless it is paid. Runs under the order's lock.
    ///
    /// If the client hangs up, this is dropped at any await, and the lock is released. Work that must not be cut off runs in a
    /// task of its own, and the lock with it: `tokio::spawn(pay.with_lock(…))`.
    async fn pay(mut self, order: u64) -> RedisResult<(StatusCode, String)> {
        let paid: Option<String> = self.redis.hget("shop:paid", order).await?;
        if let Some(receipt) = paid {
            return Ok((StatusCode::OK, receipt));
        }
        let receipt = self.charge(order).await?;
        if self.redis.hset_nx("shop:paid", order, &receipt).await? {
            return Ok((StatusCode::CREATED, receipt));
        }
        // Our lease was lost, and somebody else has paid since. The store knows, whatever the lock knew.
        self.refund(order).await?;
        let receipt = self.redis.hget("shop:paid", order).await?;
        Ok((StatusCode::OK, receipt))
    }

    /// The bank charges whatever it is told to, as often as it is told.
    async fn charge(&mut self, order: u64) -> RedisResult<String> {
        tokio::time::sleep(self.bank_takes).await;
        let charges: u64 = self.redis.hincr("shop:charges", order, 1).await?;
        Ok(format!("order {order} paid by charge {charges}"))
    }

    async fn refund(&mut self, order: u64) -> RedisResult<()> {
        self.redis.hincr("shop:charges", order, -1).await
    }
}

async fn pay(State(shop): State<Shop>, uri: Uri) -> Response {
    let Some(order) = order_of(&uri) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    match shop.pay(order).await {
        Ok((status, receipt)) => (status, format!("{receipt}\n")).into_response(),
        Err(error) => (StatusCode::BAD_GATEWAY, format!("{error}\n")).into_response(),
    }
}

fn app(locks: LockRegistry, shop: Shop) -> Router {
    let one_at_a_time = LockLayer::new(move |request: &Request| match order_of(request.uri()) {
        Some(order) => {
            let lock = locks.obtain(format!("order:{order}"));
            lock.wait(Duration::ZERO).into()
        }
        // It is answered with 404.
        None => RequestLock::Unlocked,
    });
    let one_at_a_time = one_at_a_time.or_else(refused);
    Router::new()
        .route("/orders/{order}/payment", post(pay).layer(one_at_a_time))
        .with_state(shop)
}

async fn serve(url: &str, address: &str) -> Result<(), Box<dyn std::error::Error>> {
    let in_redis =
        |error: &dyn std::fmt::Display| format!("the server in REDIS_URL cannot be used: {error}");
    let locks = LockRegistry::builder_for(url).map_err(|error| in_redis(&error))?;
    let locks = locks.ttl(TTL).build()?;
    locks.check().await.map_err(|error| in_redis(&error))?;
    let bank_takes = match std::env::var("BANK_MS") {
        Ok(millis) => Duration::from_millis(millis.parse()?),
        Err(_) => Duration::from_millis(500),
    };
    let redis = redis::Client::open(url)?;
    let redis = redis.get_multiplexed_async_connection().await?;
    let listener = TcpListener::bind(address)
        .await
        .map_err(|error| format!("{address}: {error}"))?;
    println!("listening on http://{}", listener.local_addr()?);
    let shop = Shop { redis, bank_takes };
    // Requests that are being handled end by themselves.
    axum::serve(listener, app(locks.clone(), shop))
        .with_graceful_shutdown(asked_to_end())
        .await?;
    // So does what they have spawned.
    locks.drain(Duration::from_secs(10)).await;
    println!("ended");
    Ok(())
}

async fn asked_to_end() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let mut term = signal(SignalKind::terminate()).expect("SIGTERM can be caught");
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = term.recv() => {}
        }
    }
    #[cfg(not(unix))]
    let _ = tokio::signal::ctrl_c().await;
}

#[tokio::main]
async fn main() -> ExitCode {
    let Ok(url) = std::env::var("REDIS_URL") else {
        eprintln!("payments: it needs a server: start one (redis-server) and name it in REDIS_URL");
        return ExitCode::FAILURE;
    };
    let address = std::env::args().nth(1);
    let address = address.as_deref().unwrap_or("127.0.0.1:3001");
    match serve(&url, address).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("payments: {error}");
            ExitCode::FAILURE
        }
    }
}
