//! The lines of the README: work that at most one process does at a time.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example lock_it   # without a url: locks in this process alone
//! ```

use lockstream::prelude::*;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let locks = match std::env::var("REDIS_URL") {
        Ok(url) => LockRegistry::connect(url).await?,
        Err(_) => LockRegistry::in_memory(),
    };
    let charge = async { "charged once" };
    let receipt = charge.with_lock(locks.obtain("order:42")).await?;
    println!("{receipt}");
    Ok(())
}
