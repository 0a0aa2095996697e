//! Opens a connection: host after host, and of each all addresses, until a server answers that may write.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::FutureExt;
use rand::seq::SliceRandom;
use tokio::io::AsyncReadExt;
use tokio::time::Instant;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::address::Endpoint;
use super::connection::Connection;
use super::fault::Fault;
use super::options::Wanted;
use super::secure::{AsItIs, Channel};
use super::socket::{Destination, Site};
use crate::roaming::time::timeout_at;
use crate::store::attempts::{Pace, SetUps, first_success};

/// What a server tells of itself and of the session.
const ABOUT: &str = "SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('transaction_read_only'), \
                     pg_catalog.pg_is_in_recovery()";

impl Endpoint {
    /// Each host has the time for connecting, to which belongs what is asked next on this connection. A further host is
    /// tried when one fails, or beside those that are silent for a while.
    pub(super) async fn connect(&self) -> Result<Connection, Fault> {
        self.connect_among(&SetUps::default()).await
    }

    /// The same, where other attempts may go on.
    pub(super) async fn connect_among(&self, set_ups: &SetUps) -> Result<Connection, Fault> {
        let mut sites: Vec<_> = self.sites.iter().collect();
        if self.shuffles() {
            sites.shuffle(&mut rand::rng());
        }
        let (within, many) = (self.connect_within, sites.len());
        let pace = Pace::of_addresses(set_ups, many, within);
        // Each ends by itself.
        let until = Instant::now() + within * u32::try_from(many + 1).unwrap_or(u32::MAX);
        let attempts = sites.into_iter();
        let attempts = attempts.map(|site| self.connect_to(site, set_ups).boxed());
        let connected = first_success(attempts, pace, until).await;
        connected.map_err(|failed| told(failed.errors).unwrap_or(Fault::url("it has no host")))
    }

    /// Tries the addresses of a host. The first that will do is taken.
    async fn connect_to(&self, site: &Site, set_ups: &SetUps) -> Result<Connection, Fault> {
        let (address, within) = (&self.address, self.connect_within);
        let until = Instant::now() + within;
        let finding = timeout_at(until, site.destinations(self.shuffles()));
        let found = finding.await.map_err(|_| Fault::silent(address, within))?;
        let found = found.map_err(|error| Fault::unreachable(address, &error))?;
        let wanted = match self.wanted {
            None if found.len() > 1 || self.sites.len() > 1 => Some(Wanted::Writable),
            wanted => wanted,
        };
        let pace = Pace::of_addresses(set_ups, found.len(), within);
        // Whether one of them has taken a connection.
        let accepts = &AtomicBool::new(false);
        let attempts = found.into_iter().map(|destination| {
            self.open_at(site, destination, wanted, until, set_ups, accepts)
                .boxed()
        });
        let opened = first_success(attempts, pace, until).await;
        opened.map_err(|failed| {
            let silent = || Fault::silent(address, within);
            if !failed.is_late {
                told(failed.errors).unwrap_or_else(silent)
            } else if accepts.load(Ordering::Relaxed) {
                Fault::mute(address, within)
            } else {
                silent()
            }
        })
    }

    async fn open_at(
        &self,
        site: &Site,
        destination: Destination,
        wanted: Option<Wanted>,
        until: Instant,
        set_ups: &SetUps,
        accepts: &AtomicBool,
    ) -> Result<Connection, Fault> {
        let address = &self.address;
        let socket = destination.connect(&self.login).await;
        let socket = socket.map_err(|error| Fault::unreachable(address, &error))?;
        accepts.store(true, Ordering::Relaxed);
        let set_up = set_ups.begin().await;
        let securing = self.security.secure(socket, site, &destination, address);
        let stream = securing.await?;
        let opened = self.login().connect_raw(stream, AsItIs).await;
        let (client, connection) = opened.map_err(|error| {
            let fault = Fault::connect(address, &error);
            // The next credentials may be accepted.
            fault.passing_if(self.credentials.is_some() && Fault::is_of_login(&error))
        })?;
        let told = told_process(&client).await;
        let within = self.connect_within;
        let mut connection =
            Connection::new(address.clone(), within, until, set_up, client, connection);
        connection.site = Some(site.clone());
        let client = connection.caller.client.clone();
        let about = connection.get(client.simple_query(ABOUT)).await?;
        let row = about.iter().find_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let garbled = || Fault::given_up(address, "unexpected answer to the first query");
        let row = row.ok_or_else(garbled)?;
        let real = row.get(0).and_then(|pid| pid.parse().ok());
        connection.process = real.filter(|real| Some(*real) == told);
        let refusal = match wanted {
            Some(Wanted::Writable) if row.get(1) != Some("off") => "database does not allow writes",
            Some(Wanted::Primary) if row.get(2) != Some("f") => "it is a standby",
            _ => return Ok(connection),
        };
        Err(Fault::unreachable(address, &std::io::Error::other(refusal)))
    }
}

/// Of several failures the last, unless only another may pass: one host may be wrong, and the other not ready yet.
fn told(mut errors: Vec<Fault>) -> Option<Fault> {
    let last = errors.pop()?;
    let passing = errors.into_iter().find(Fault::is_passing);
    passing.filter(|_| !last.is_passing()).or(Some(last))
}

/// The number of the server process, as it was told when the session began. A server tells its own; a pooler, which has
/// no process yet, makes one up. The client library shows it in the request that cancels a statement, and nowhere else:
/// so that request is written to memory.
async fn told_process(client: &Client) -> Option<i32> {
    let (request, mut written) = tokio::io::duplex(64);
    let token = client.cancel_token();
    let cancelling = token.cancel_query_raw(Channel::plain(request), AsItIs);
    cancelling.await.ok()?;
    let (_length, _code) = (
        written.read_i32().await.ok()?,
        written.read_i32().await.ok()?,
    );
    written.read_i32().await.ok()
}
