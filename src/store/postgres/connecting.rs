//! Opens a connection: host after host, and of each all addresses, until a server answers that may write.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
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
use crate::roaming::time::{sleep, timeout_at};

/// A further address of a host is tried after this part of the time for connecting, beside those before.
const PARTS: u32 = 8;

/// What a server tells of itself and of the session.
const ABOUT: &str = "SELECT pg_catalog.pg_backend_pid(), pg_catalog.current_setting('transaction_read_only'), \
                     pg_catalog.pg_is_in_recovery()";

impl Endpoint {
    /// Each host has the time for connecting, to which belongs what is asked next on this connection.
    pub(super) async fn connect(&self) -> Result<Connection, Fault> {
        let mut sites: Vec<_> = self.sites.iter().collect();
        if self.shuffles() {
            sites.shuffle(&mut rand::rng());
        }
        let mut end = Err(Fault::url("it has no host"));
        for site in sites {
            let within = self.connect_within;
            let until = Instant::now() + within;
            let opening = self.open(site, Patience::Until { until, within });
            let silent = |_| Err(Fault::silent(&self.address, within));
            end = timeout_at(until, opening).await.unwrap_or_else(silent);
            if end.is_ok() {
                break;
            }
        }
        end
    }

    /// Tries the addresses of a host: a further one if one fails, or is silent for a while. The first that will do is taken.
    async fn open(&self, site: &Site, patience: Patience) -> Result<Connection, Fault> {
        let found = site.destinations(self.shuffles()).await;
        let found = found.map_err(|error| Fault::unreachable(&self.address, &error))?;
        let many = u32::try_from(found.len()).unwrap_or(u32::MAX);
        let wanted = match self.wanted {
            None if many > 1 || self.sites.len() > 1 => Some(Wanted::Writable),
            wanted => wanted,
        };
        let pause = self.connect_within / PARTS.max(many.saturating_add(1));
        let mut tried: Vec<BoxFuture<'_, Result<Connection, Fault>>> = Vec::new();
        let mut end = Err(Fault::url("it has no host"));
        for destination in found {
            tried.push(self.open_at(site, destination, wanted, patience).boxed());
            // All of them are polled each time: so their sockets move with us.
            if let Some(opened) = first(&mut tried, &mut end, Some(pause)).await {
                return Ok(opened);
            }
        }
        match first(&mut tried, &mut end, None).await {
            Some(opened) => Ok(opened),
            None => end,
        }
    }

    async fn open_at(
        &self,
        site: &Site,
        destination: Destination,
        wanted: Option<Wanted>,
        patience: Patience,
    ) -> Result<Connection, Fault> {
        let address = &self.address;
        let socket = destination.connect(&self.probing).await;
        let socket = socket.map_err(|error| Fault::unreachable(address, &error))?;
        let securing = self.security.secure(socket, site, &destination, address);
        let stream = securing.await?;
        let opened = self.login().connect_raw(stream, AsItIs).await;
        let (client, connection) = opened.map_err(|error| {
            let fault = Fault::connect(address, &error);
            // The next credentials may be accepted.
            fault.passing_if(self.credentials.is_some() && Fault::is_of_login(&error))
        })?;
        let told = told_process(&client).await;
        let mut connection = Connection::new(address.clone(), patience, client, connection);
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

/// Waits for the first of them that succeeds; or, for as long as this, until all have failed. `end` becomes the last error.
async fn first(
    tried: &mut Vec<BoxFuture<'_, Result<Connection, Fault>>>,
    end: &mut Result<Connection, Fault>,
    pause: Option<Duration>,
) -> Option<Connection> {
    let mut pause = pause.map(|pause| Box::pin(sleep(pause)));
    poll_fn(|cx| {
        let mut opened = None;
        tried.retain_mut(|trying| match trying.poll_unpin(cx) {
            Poll::Pending => true,
            Poll::Ready(Ok(connection)) => {
                opened.get_or_insert(connection);
                false
            }
            Poll::Ready(Err(fault)) => {
                *end = Err(fault);
                false
            }
        });
        let mut is_over = |cx| {
            pause
                .as_mut()
                .is_some_and(|pause| pause.poll_unpin(cx).is_ready())
        };
        if opened.is_some() || tried.is_empty() || is_over(cx) {
            return Poll::Ready(opened);
        }
        Poll::Pending
    })
    .await
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
