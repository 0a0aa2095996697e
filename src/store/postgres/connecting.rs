//! Opens a connection: host after host, and of each all addresses, until a server answers that may write.

use futures::FutureExt;
use rand::seq::SliceRandom;
use tokio::io::AsyncReadExt;
use tokio::time::Instant;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::address::Endpoint;
use super::connection::{Connection, Patience};
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
    /// Each host has the time for connecting, to which belongs what is asked next on this connection.
    pub(super) async fn connect(&self) -> Result<Connection, Fault> {
        self.connect_among(&SetUps::default()).await
    }

    /// The same, where other attempts may go on.
    pub(super) async fn connect_among(&self, set_ups: &SetUps) -> Result<Connection, Fault> {
        let mut sites: Vec<_> = self.sites.iter().collect();
        if self.shuffles() {
            sites.shuffle(&mut rand::rng());
        }
        let mut end = Err(Fault::url("it has no host"));
        for site in sites {
            let within = self.connect_within;
            let until = Instant::now() + within;
            let opening = self.open(site, until, set_ups);
            let silent = |_| Err(Fault::silent(&self.address, within));
            end = timeout_at(until, opening).await.unwrap_or_else(silent);
            if end.is_ok() {
                break;
            }
        }
        end
    }

    /// Tries the addresses of a host. The first that will do is taken.
    async fn open(
        &self,
        site: &Site,
        until: Instant,
        set_ups: &SetUps,
    ) -> Result<Connection, Fault> {
        let (address, within) = (&self.address, self.connect_within);
        let found = site.destinations(self.shuffles()).await;
        let found = found.map_err(|error| Fault::unreachable(address, &error))?;
        let wanted = match self.wanted {
            None if found.len() > 1 || self.sites.len() > 1 => Some(Wanted::Writable),
            wanted => wanted,
        };
        let pace = Pace::of_addresses(set_ups, found.len(), within);
        let patience = Patience::Until { until, within };
        let attempts = found.into_iter().map(|destination| {
            self.open_at(site, destination, wanted, patience, set_ups)
                .boxed()
        });
        let opened = first_success(attempts, pace, until).await;
        opened.map_err(|mut failed| match failed.errors.pop() {
            // What may pass counts: another address may be right, and only silent or not ready yet.
            Some(last) if !failed.is_late => {
                let passing = failed.errors.into_iter().find(Fault::is_passing);
                passing.filter(|_| !last.is_passing()).unwrap_or(last)
            }
            _ => Fault::silent(address, within),
        })
    }

    async fn open_at(
        &self,
        site: &Site,
        destination: Destination,
        wanted: Option<Wanted>,
        patience: Patience,
        set_ups: &SetUps,
    ) -> Result<Connection, Fault> {
        let address = &self.address;
        let socket = destination.connect(&self.probing).await;
        let socket = socket.map_err(|error| Fault::unreachable(address, &error))?;
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
        let mut connection = Connection::new(address.clone(), patience, set_up, client, connection);
        connection.site = Some(site.clone());
        let client = connection.client.clone();
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
