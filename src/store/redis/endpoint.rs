//! A server's address, and how to connect to it.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "sentinel")]
use futures::FutureExt;
use futures::future::BoxFuture;
use redis::aio::AsyncPushSender;
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, ErrorKind, ProtocolVersion,
    RedisError, Value,
};

use super::busy_poll::BusyPoll;
use super::fault::{Fault, Refusal};
#[cfg(feature = "sentinel")]
use super::sentinel::{self, Sentinels};
#[cfg(feature = "redis-1")]
use super::socket::Pump;
use super::socket::{self, Socket};
#[cfg(feature = "tls-rustls")]
use super::tls::{Certificates, Tls};

/// What a url looks like, for those who wrote another.
const EXPECTED: &str = "redis://[[user:]password@]host[:port][/db], redis+cluster://host:port,host:port/, \
     redis+sentinel://host,host/service or unix:///path[?db=&user=&pass=]";

/// Where a server is and who we are there. Shows neither user nor password.
#[derive(Clone)]
pub(super) struct Endpoint {
    resp3: Client,
    resp2: Client,
    address: Arc<str>,
    opener: Opener,
    busy_poll: Duration,
    /// Who is asked before each connection where the server is.
    #[cfg(feature = "sentinel")]
    sentinels: Option<Arc<Sentinels>>,
}

/// Who opens the sockets.
#[derive(Clone)]
pub(super) enum Opener {
    /// We do, and so no more is kept of what comes on them than a server has reason to say.
    Us,
    /// The same, over TLS.
    #[cfg(feature = "tls-rustls")]
    UsOverTls(Tls),
    /// The client does: how, was told to nobody else.
    #[cfg(feature = "redis-1")]
    Client,
}

/// The client's default would have a second call wait in the kernel for the reply to the first.
pub(super) fn at_once() -> TcpSettings {
    TcpSettings::default().set_nodelay(true)
}

impl Opener {
    /// Trusts whom the system trusts.
    pub(super) fn of(addr: &ConnectionAddr) -> Self {
        #[cfg(feature = "tls-rustls")]
        if let ConnectionAddr::TcpTls { .. } = addr {
            return Self::UsOverTls(Tls::default());
        }
        let _ = addr;
        Self::Us
    }
}

impl Endpoint {
    /// Reads `redis://`, `rediss://`, `unix://` and their `valkey` likenesses.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        let invalid = |reason: &str| Fault::Url {
            reason: reason.to_owned(),
        };
        let scheme = url.split_once(':').map_or("", |(scheme, _)| scheme);
        let scheme = scheme.to_ascii_lowercase();
        let is_tls = matches!(&*scheme, "rediss" | "valkeys");
        if !scheme.contains("unix") && has_unescaped(url) {
            return Err(invalid(
                "a user or password that holds / ? or # must have them percent-encoded (%2F %3F %23)",
            ));
        }
        // With the feature a cluster's url is taken apart before it comes here.
        if scheme.ends_with("+cluster") && cfg!(not(feature = "cluster")) {
            return Err(invalid(
                "redis+cluster:// needs lockstream's feature `cluster`",
            ));
        }
        if scheme.ends_with("+sentinel") {
            #[cfg(feature = "sentinel")]
            return Sentinels::parse(url).map(Self::told_by);
            #[cfg(not(feature = "sentinel"))]
            return Err(invalid(
                "redis+sentinel:// needs lockstream's feature `sentinel`",
            ));
        }
        // Whatever the client can: another crate may have given it what it takes.
        if is_tls && cfg!(not(feature = "tls-rustls")) {
            return Err(invalid("rediss:// needs lockstream's feature `tls-rustls`"));
        }
        let client = Client::open(url).map_err(|error| {
            // The client's errors about urls show a part of it at most, and never the password.
            let text = error.to_string();
            let text = text.trim_end_matches("- InvalidClientConfig").trim_end();
            invalid(&format!("{text}; expected {EXPECTED}"))
        })?;
        if let ConnectionAddr::TcpTls { insecure: true, .. } = client.get_connection_info().addr() {
            return Err(invalid(
                "TLS without a check of the server's certificate is not offered",
            ));
        }
        let info = client.get_connection_info().clone();
        if let ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } = info.addr()
            && host.contains(',')
        {
            return Err(invalid(&format!(
                "it names several hosts; expected {EXPECTED}"
            )));
        }
        let opener = Opener::of(info.addr());
        Ok(Self::new(info.set_tcp_settings(at_once()), opener))
    }

    /// The same with certificates.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secured(self, certificates: &Certificates) -> Result<Self, Fault> {
        #[cfg(feature = "sentinel")]
        if let Some(sentinels) = &self.sentinels {
            return sentinels.secured(certificates).map(Self::told_by);
        }
        let tls = certificates.read(self.info())?;
        Ok(Self::new(self.info().clone(), Opener::UsOverTls(tls)))
    }

    /// The server and user of a client, whatever protocol it was made for.
    #[cfg(feature = "redis-1")]
    pub(super) fn of(client: &Client) -> Self {
        let info = client.get_connection_info().clone();
        let opener = match info.addr() {
            addr @ (ConnectionAddr::Tcp(..) | ConnectionAddr::Unix(_)) => Opener::of(addr),
            #[cfg(feature = "tls-rustls")]
            addr @ ConnectionAddr::TcpTls {
                insecure: false,
                tls_params: None,
                ..
            } => Opener::of(addr),
            // Its certificates cannot be read from it.
            _ => Opener::Client,
        };
        Self::new(info, opener)
    }

    pub(super) fn new(info: ConnectionInfo, opener: Opener) -> Self {
        #[cfg(feature = "tls-rustls")]
        if let ConnectionAddr::TcpTls { .. } = info.addr() {
            choose_crypto();
        }
        let with = |protocol| {
            let settings = info.redis_settings().clone().set_protocol(protocol);
            Client::open(info.clone().set_redis_settings(settings))
                .expect("what was a client's address is one")
        };
        let address = match info.addr() {
            ConnectionAddr::Unix(path) => path.display().to_string(),
            address => address.to_string(),
        };
        Self {
            resp3: with(ProtocolVersion::RESP3),
            resp2: with(ProtocolVersion::RESP2),
            address: address.into(),
            opener,
            busy_poll: BusyPoll::DEFAULT,
            #[cfg(feature = "sentinel")]
            sentinels: None,
        }
    }

    /// Wherever the sentinels say; nowhere yet.
    #[cfg(feature = "sentinel")]
    fn told_by(sentinels: Sentinels) -> Self {
        let nowhere = sentinels.nowhere();
        Self {
            sentinels: Some(Arc::new(sentinels)),
            ..nowhere
        }
    }

    /// Shown under another name.
    #[cfg(feature = "sentinel")]
    pub(super) fn named(self, address: String) -> Self {
        Self {
            address: address.into(),
            ..self
        }
    }

    #[cfg(any(feature = "sentinel", feature = "tls-rustls"))]
    pub(super) fn info(&self) -> &ConnectionInfo {
        self.resp3.get_connection_info()
    }

    /// Where the server is now, if it is for the sentinels to say. To be asked before each
    /// connection, and [`Self::doubt`] to be told when that came to nothing.
    pub(super) async fn resolve(&self, within: Duration) -> Result<Option<Self>, Fault> {
        #[cfg(feature = "sentinel")]
        if let Some(sentinels) = &self.sentinels {
            let primary = sentinels.primary(within).await?;
            let primary = primary.with_busy_poll(self.busy_poll);
            return Ok(Some(Self {
                sentinels: Some(sentinels.clone()),
                ..primary
            }));
        }
        let _ = within;
        Ok(None)
    }

    /// For where the sentinels may say one day that it is elsewhere: returns when they do.
    pub(super) fn moved(&self, within: Duration) -> Option<BoxFuture<'static, Fault>> {
        #[cfg(feature = "sentinel")]
        if let Some(sentinels) = self.sentinels.clone() {
            let here = self.clone();
            let moving = async move {
                let there = sentinels.moved(&here, within).await;
                tracing::debug!(
                    from = &*here.address,
                    to = &*there.address,
                    "the primary is another"
                );
                let address = here.address;
                Fault::NotPrimary { address }
            };
            return Some(moving.boxed());
        }
        let _ = within;
        None
    }

    /// Whether a server answers there that is one.
    #[cfg(feature = "sentinel")]
    pub(super) async fn is_primary(&self, within: Duration) -> bool {
        let Ok(mut socket) = self.connect_resp2(within).await else {
            return false;
        };
        self.see_primary(&mut socket, within).await.is_ok()
    }

    /// What was resolved is not it, or is not there.
    pub(super) fn doubt(&self) {
        #[cfg(feature = "sentinel")]
        if let Some(sentinels) = &self.sentinels {
            sentinels.doubt();
        }
    }

    /// How long to look for replies before the task that awaits them sleeps.
    pub(super) fn busy_poll(&self) -> Duration {
        self.busy_poll
    }

    pub(super) fn with_busy_poll(self, busy_poll: Duration) -> Self {
        Self { busy_poll, ..self }
    }

    /// Host and port, or the socket's path.
    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// `None` for a socket's path.
    #[cfg(feature = "cluster")]
    pub(super) fn host(&self) -> Option<&str> {
        match self.resp3.get_connection_info().addr() {
            ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => Some(host),
            _ => None,
        }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn db(&self) -> i64 {
        self.resp3.get_connection_info().redis_settings().db()
    }

    #[cfg(feature = "cluster")]
    pub(super) fn is_tls(&self) -> bool {
        let info = self.resp3.get_connection_info();
        matches!(info.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// Another server that takes us in just so.
    #[cfg(feature = "cluster")]
    pub(super) fn elsewhere(&self, host: &str, port: u16) -> Self {
        let info = self.resp3.get_connection_info().clone();
        let mut addr = info.addr().clone();
        if let ConnectionAddr::Tcp(old_host, old_port)
        | ConnectionAddr::TcpTls {
            host: old_host,
            port: old_port,
            ..
        } = &mut addr
        {
            host.clone_into(old_host);
            *old_port = port;
        }
        Self::new(info.set_addr(addr), self.opener.clone())
    }

    /// Connects for pushes. `Ok(None)`: the server, or what stands before it, speaks RESP2 only.
    pub(super) async fn connect(
        &self,
        within: Duration,
        pushes: impl AsyncPushSender,
    ) -> Result<Option<Socket>, Fault> {
        let config = config(within).set_push_sender(pushes);
        match self.open(&self.resp3, within, config).await {
            Err(Fault::Connect { source, .. }) if speaks_no_resp3(&source) => Ok(None),
            result => result.map(Some),
        }
    }

    /// Connects without pushes.
    pub(super) async fn connect_resp2(&self, within: Duration) -> Result<Socket, Fault> {
        self.open(&self.resp2, within, config(within)).await
    }

    /// Connects and hangs up: whether somebody answers, and takes us in.
    pub(super) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        match self.resolve(within).await? {
            Some(found) => found
                .try_out_here(within)
                .await
                .inspect_err(|_| found.doubt()),
            None => self.try_out_here(within).await,
        }
    }

    async fn try_out_here(&self, within: Duration) -> Result<(), Fault> {
        let Socket {
            mut connection,
            mut pump,
        } = match self.connect(within, |_| Ok::<_, Infallible>(())).await? {
            Some(socket) => socket,
            None => self.connect_resp2(within).await?,
        };
        let address = self.address.clone();
        // RESP2 lets anybody connect, and only then says that a password is missing.
        let ping = redis::cmd("PING");
        let asking = pump.run(connection.send_packed_command(&ping));
        match tokio::time::timeout(within, asking).await {
            Err(_) => Err(Fault::Silent { address, within }),
            Ok(Err(source)) => Err(Fault::Broken { address, source }),
            Ok(Ok(Value::ServerError(error))) if error.code() != "NOPERM" => {
                let refusal = (&error).into();
                Err(Fault::Refused { address, refusal })
            }
            Ok(Ok(_)) => Ok(()),
        }
    }

    async fn open(
        &self,
        client: &Client,
        within: Duration,
        config: AsyncConnectionConfig,
    ) -> Result<Socket, Fault> {
        let (began, clock_began) = (std::time::Instant::now(), tokio::time::Instant::now());
        let info = client.get_connection_info();
        let opened = match &self.opener {
            #[cfg(feature = "redis-1")]
            Opener::Client => {
                let connecting = client.get_multiplexed_async_connection_with_config(&config);
                connecting.await.map(|connection| Socket {
                    connection,
                    pump: Pump::elsewhere(),
                })
            }
            opener => socket::open(info, opener, within, config).await,
        };
        let opened = opened.map_err(|source| {
            let address = self.address.clone();
            let clock_leapt = clock_began.elapsed() >= within && began.elapsed() < within / 2;
            if source.is_timeout() && clock_leapt {
                Fault::PausedClock { address }
            } else {
                let is_tls = matches!(
                    client.get_connection_info().addr(),
                    ConnectionAddr::TcpTls { .. }
                );
                Fault::Connect {
                    address,
                    is_tls,
                    source,
                }
            }
        });
        #[cfg(feature = "sentinel")]
        if self.sentinels.is_some() {
            let mut socket = opened?;
            self.see_primary(&mut socket, within).await?;
            return Ok(socket);
        }
        opened
    }

    /// Sentinels may be late to learn of a fail-over, so the server is asked itself.
    #[cfg(feature = "sentinel")]
    async fn see_primary(&self, socket: &mut Socket, within: Duration) -> Result<(), Fault> {
        let Socket { connection, pump } = socket;
        let address = self.address.clone();
        let role = redis::cmd("ROLE");
        let asking = pump.run(connection.send_packed_command(&role));
        match tokio::time::timeout(within, asking).await {
            Err(_) => Err(Fault::Silent { address, within }),
            Ok(Err(source)) => Err(Fault::Broken { address, source }),
            // Without the right to ask, the probe sees that the server takes writes.
            Ok(Ok(Value::ServerError(error))) if matches!(error.code(), "NOPERM" | "ERR") => Ok(()),
            Ok(Ok(Value::ServerError(error))) => {
                let refusal = (&error).into();
                Err(Fault::Refused { address, refusal })
            }
            Ok(Ok(role)) if sentinel::is_primary(&role) => Ok(()),
            Ok(Ok(_)) => Err(Fault::NotPrimary { address }),
        }
    }
}

/// Whether the part before the `@` ends too early: the rest of a password would be taken for something that is shown,
/// such as a host.
fn has_unescaped(url: &str) -> bool {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let end = authority.find(['/', '?', '#']);
    end.is_some_and(|end| authority[end..].contains('@'))
}

/// Of the client's own time-outs only connecting is on; the link watches all the rest (O4).
fn config(within: Duration) -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(Some(within))
        .set_response_timeout(None)
}

fn speaks_no_resp3(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || Refusal::of(error).is_some_and(|refusal| refusal.is_about_hello())
}

/// Without this the client panics at its first connection wherever another crate of the program
/// has brought a second provider in. One that was installed before is left alone.
#[cfg(feature = "tls-rustls")]
fn choose_crypto() {
    let _ = rustls::crypto::ring::default_provider().install_default();
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Endpoint").field(&self.address).finish()
    }
}

/// A name has no more bytes.
const LONGEST_HOST: usize = 253;

/// Whether what a server names may be a host's name or number: it is shown in logs, and kept.
pub(super) fn is_host(text: &str) -> bool {
    let may_be = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%[]".contains(&byte);
    (1..=LONGEST_HOST).contains(&text.len()) && text.bytes().all(may_be)
}
