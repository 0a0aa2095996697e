//! The lines of the README: work that at most one process does at a time.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example lock_it   # without a url: locks in this process alone
//! ```

use futures::{StreamExt, TryStreamExt, stream};
use lockstream::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = match std::env::var("REDIS_URL") {
        Ok(url) => LockRegistry::connect(url).await?,
        Err(_) => LockRegistry::in_memory(), // in this process alone: a service should end here
    };
    let charge = async { "charged" };
    let receipt = charge.with_lock(locks.obtain("order:42")).await?;

    // Items with locks of their own: sixteen at work, in order for each customer. A busy customer holds up no other.
    let orders = stream::iter(1..=100).map(|order| {
        let lock = locks.obtain(format!("customer:{}", order % 7));
        async move { order }.with_lock(lock)
    });
    let orders: Vec<u32> = orders.buffer_keyed(16).try_collect().await?;
    println!("{receipt}, then {} orders", orders.len());
    Ok(())
}
