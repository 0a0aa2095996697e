//! How unused rows are deleted.

use std::sync::atomic::Ordering;

use tokio::time::Instant;

use super::backend::PostgresBackend;
use super::fault::{Fault, ends_connection};
use crate::base::user_code::log;
use crate::roaming::time::sleep;

impl PostgresBackend {
    /// Deletes what nobody uses. If that fails, the next sweep tries it again.
    pub(super) async fn sweep(&self) {
        let address = &*self.settings.endpoint.address;
        match self.try_sweep().await {
            Ok(Ok(())) => {}
            Ok(Err(error)) if !self.has_warned_of_sweep.swap(true, Ordering::Relaxed) => {
                log!(warn, address, %error, "unused rows cannot be deleted, and the tables grow");
            }
            Ok(Err(error)) | Err(error) => {
                log!(debug, address, %error, "unused rows were not deleted");
            }
        }
    }

    /// Deletes a short piece at a time, on a connection of its own: no call waits for that. It runs for half of the time
    /// at most. If another registry sweeps, or has swept a moment ago, there is nothing to do. The inner error says that
    /// the server refuses, the outer one that it cannot be reached, or does not answer.
    ///
    /// Cancel safe: each piece is a transaction, and the next sweep goes on behind the last one.
    async fn try_sweep(&self) -> Result<Result<(), Fault>, Fault> {
        let endpoint = &self.settings.endpoint;
        let mut connection = endpoint.connect().await?;
        connection.begin_calls(self.within);
        // Somebody may have made the schema anew since the session checked it.
        match self.check_schema(&mut connection).await {
            Ok(()) => {}
            Err(fault) if fault.is_passing() => return Err(fault),
            Err(fault) => return Ok(Err(fault)),
        }
        let caller = connection.caller.clone();
        loop {
            let began = Instant::now();
            let sweeping = caller.call(&self.names, "sweep_1()", &[]);
            match connection.ask(sweeping).await? {
                // There is nothing more to sweep, or another registry sweeps.
                Ok(rows) if rows.first().is_none_or(|row| row.get(0)) => return Ok(Ok(())),
                Ok(_) => sleep(began.elapsed()).await,
                Err(error) if ends_connection(&error) => {
                    return Err(Fault::broken(&endpoint.address, &error));
                }
                Err(error) => return Ok(Err(Fault::broken(&endpoint.address, &error))),
            }
        }
    }
}
