//! A service that ends well: at SIGTERM it ends what it has begun under a lock, begins nothing more, and releases the lock,
//! so that others need not wait until the ttl is over.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example service   # in two terminals; end one with Ctrl-C or kill
//! ```

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use lockstream::prelude::*;

#[tokio::main]
async fn main() -> ExitCode {
    let locks = match std::env::var("REDIS_URL") {
        Ok(url) => match LockRegistry::connect(url).await {
            Ok(locks) => locks,
            Err(error) => {
                eprintln!("service: the server in REDIS_URL cannot be used: {error}");
                return ExitCode::FAILURE;
            }
        },
        // To try it out. A real service ends here: two instances of it would not know of each other.
        Err(_) => {
            eprintln!("service: there is no REDIS_URL: the locks are in this process alone");
            LockRegistry::in_memory()
        }
    };
    // Before a lock is taken: a signal must not end the process while it holds one.
    let asked = asked_to_end();
    let working = tokio::spawn(serve(locks.clone()));
    asked.await;
    println!("ending: what is held may end");
    // Less than what is left before a kill: 30 s in Kubernetes, 90 s in systemd. Then the rest is cut off.
    locks.drain(Duration::from_secs(20)).await;
    // The next turn was refused with `Closed`.
    let ended = working.await.expect("serving does not panic");
    println!("ended: {ended}");
    ExitCode::SUCCESS
}

/// Sweeps for ever, at most one process at a time, until the registry is drained.
async fn serve(locks: LockRegistry) -> LockError {
    let lock = locks.obtain("service:sweep").wait(Duration::MAX);
    loop {
        match sweep().with_lock(&lock).await {
            Ok(()) => {}
            Err(closed @ LockError::Closed { .. }) => return closed,
            Err(error) => {
                let cause = error.source().map(|cause| format!(": {cause}"));
                eprintln!("service: {error}{}", cause.unwrap_or_default());
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        }
    }
}

async fn sweep() {
    println!("sweeping");
    tokio::time::sleep(Duration::from_secs(2)).await;
    println!("swept");
}

/// Resolves at a Ctrl-C or SIGTERM, and at one that came before it is polled.
fn asked_to_end() -> impl Future<Output = ()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
        let [mut int, mut term] = kinds.map(|kind| signal(kind).expect("it can be caught"));
        async move {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        }
    }
    #[cfg(not(unix))]
    {
        let heard = tokio::spawn(tokio::signal::ctrl_c());
        async move {
            let _ = heard.await;
        }
    }
}
