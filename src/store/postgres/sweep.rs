//! How unused rows are deleted.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use super::call::{Names, bounded};
use super::fault::{Fault, ends_connection};
use super::store::Settings;

/// Why a sweep has ended early.
#[derive(Debug)]
pub(super) enum Interrupted {
    /// The server cannot be reached, or does not answer.
    Broken(Fault),
    /// The server refuses.
    Refused(Fault),
}

/// Deletes what nobody uses, a short piece at a time, on a connection of its own: no call waits for that. It runs for
/// half of the time at most. If another registry sweeps, or has swept a moment ago, there is nothing to do.
///
/// Cancel safe: each piece is a transaction, and the next sweep goes on behind the last one.
pub(super) async fn sweep(
    settings: &Settings,
    names: &Names,
    within: Duration,
) -> Result<(), Interrupted> {
    let endpoint = &settings.endpoint;
    let (sender, _heard) = mpsc::unbounded_channel();
    let link = endpoint
        .connect(within, sender)
        .await
        .map_err(Interrupted::Broken)?;
    loop {
        let began = Instant::now();
        let rows = timeout(within, bounded(&link.client, names, &names.sweep, &[])).await;
        let rows =
            rows.map_err(|_| Interrupted::Broken(Fault::silent(&endpoint.address, within)))?;
        let rows = rows.map_err(|error| {
            let fault = Fault::broken(&endpoint.address, &error);
            match error.code() {
                Some(code) if !ends_connection(code) => Interrupted::Refused(fault),
                _ => Interrupted::Broken(fault),
            }
        })?;
        if rows.first().is_none_or(|row| row.get(0)) {
            return Ok(());
        }
        sleep(began.elapsed()).await;
    }
}
