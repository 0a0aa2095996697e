//! What a registry says of its store.

use std::fmt;
use std::time::Duration;

use crate::base::StoreError;

/// What [`LockRegistry::check`](crate::LockRegistry::check) has found. Its `Display` is a line for each server, and for
/// each remark.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Check {
    /// The servers that can be used: of a cluster its primaries, of a quorum at least a majority.
    pub servers: Vec<CheckedServer>,
    /// Why others of a quorum cannot be used.
    pub failed: Vec<StoreError>,
    /// Whether the store has [shared](crate::Lock::shared) locks and [permits](crate::Lock::permits). A quorum has none.
    pub shares: bool,
}

/// A server that was asked. It takes writes, and accepts our user.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct CheckedServer {
    /// Host and port, or the path of its socket.
    pub address: String,
    /// The product and its version, as in `Redis 7.0.15`, if it says so.
    pub version: Option<String>,
    /// How long a small question took: the best of three.
    pub round_trip: Duration,
    /// Why it cannot push grants, if it cannot. Then waiters poll, by their [`Repeat`](crate::Repeat).
    pub no_push: Option<String>,
    /// The rights that our user lacks, and that not everybody needs: `docs/operations.md` says what each is for.
    pub missing_rights: Vec<String>,
    /// What the operator should mend, such as a server that may evict locks.
    pub warnings: Vec<String>,
}

impl Check {
    /// How far away the farthest server is.
    #[must_use]
    pub fn round_trip(&self) -> Duration {
        let each = self.servers.iter().map(|server| server.round_trip);
        each.max().unwrap_or_default()
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, server) in self.servers.iter().enumerate() {
            let end = if index == 0 { "" } else { "\n" };
            write!(f, "{end}{server}")?;
        }
        for error in &self.failed {
            write!(f, "\nnot used: {error}")?;
        }
        if !self.shares {
            f.write_str("\nexclusive locks only: no shared locks, no permits")?;
        }
        Ok(())
    }
}

impl fmt::Display for CheckedServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version.as_deref().unwrap_or("a server");
        let millis = self.round_trip.as_secs_f64() * 1e3;
        let told = match self.no_push {
            None => "it tells waiters at once",
            Some(_) => "waiters poll",
        };
        write!(
            f,
            "{version} at {}: takes writes, {millis:.2} ms away, {told}",
            self.address
        )?;
        if let Some(reason) = &self.no_push {
            write!(f, " ({reason})")?;
        }
        if !self.missing_rights.is_empty() {
            write!(
                f,
                "\nrights that are missing: {}",
                self.missing_rights.join(", ")
            )?;
        }
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}
