//! A server's address, and how to connect to it.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::BoxFuture;
use redis::io::tcp::TcpSettings;
use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion, RedisError,
    Value, cmd,
};

use tokio::net::lookup_host;
use tokio::time::Instant;

use super::credentials::Source;
use super::fault::{ErrorReply, Fault, SILENT};
use super::link::Link;
use super::login;
use super::options::{EXPECTED, instead, scheme_fault, settings};
use super::stream::Opener;
use crate::roaming::time::timeout;
use crate::store::attempts::{Pace, SetUps, first_success};
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;
use crate::store::url::{UrlOptions, UrlSettings};

const TIMED_OUT: &str = "timed out";

/// Why a user's own client cannot be taken.
const UNVERIFIED: &str = "a client without verification is not taken: use a url with \
     danger_accept_invalid_certificates=true";
const UNREADABLE: &str = "its certificates cannot be read: give them to RedisStoreBuilder::from_client(client) by \
     root_certificate and client_certificate";
#[cfg(not(feature = "tls-rustls"))]
const NO_TLS: &str = "TLS needs lockstream's feature `tls-rustls`";

/// Splits a url and decodes nothing: the scheme in lower case; user and password with the `@` after them; the hosts;
/// and the rest from the first `/`, `?` or `#` on.
pub(super) fn split_url(url: &str) -> (String, &str, &str, &str) {
    let (scheme, rest) = url.split_once(':').unwrap_or(("", url));
    let rest = rest.strip_prefix("//").unwrap_or("");
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let (user, hosts) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    (scheme.to_ascii_lowercase(), user, hosts, tail)
}

/// The address of a server, and the user there. Its `Debug` shows neither user nor password.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub(super) info: ConnectionInfo,
    /// Host and port, or the path of the socket: for errors and logs.
    pub(super) address: Arc<str>,
    opener: Opener,
    /// One of the addresses of the host.
    pub(super) at: Option<SocketAddr>,
    /// Of the connection that is made there, if more than one attempt may go on.
    set_ups: Option<SetUps>,
    /// In place of user and password in `info`.
    pub(super) credentials: Option<Source>,
    /// Named by sentinels, which may be wrong: its role is checked at each connection.
    pub(super) must_be_primary: bool,
    /// Whether the url says that RESP3 is not used.
    speaks_resp2: bool,
    /// What its url says beside that.
    pub(super) said: UrlSettings,
}

impl Endpoint {
    /// Reads `redis://`, `rediss://` and `unix://` urls, and their `valkey` variants.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        let (scheme, _, _, tail) = split_url(url);
        if let Some(reason) = scheme_fault(url, &scheme) {
            return Err(Fault::url(reason));
        }
        // Otherwise the rest of a password could be taken for a host, or for an option, which are shown.
        if !scheme.contains("unix") && tail.contains('@') {
            let reason = "a user or password with / ? or # must be percent-encoded (%2F %3F %23)";
            return Err(Fault::url(reason));
        }
        if let Some((_, fragment)) = url.split_once('#') {
            return Err(Fault::url(match fragment.trim() {
                "insecure" => {
                    "write ?danger_accept_invalid_certificates=true in place of #insecure"
                }
                _ => "what follows the # has no meaning",
            }));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        Self::read(base, UrlOptions::parse(query).map_err(Fault::url)?)
    }

    /// The same for a url without options, and those options.
    pub(super) fn read(url: &str, mut options: UrlOptions) -> Result<Self, Fault> {
        let (scheme, _, hosts, _) = split_url(url);
        // The client library reads the url. TLS is ours, and so it need not know it.
        let is_tls = matches!(&*scheme, "rediss" | "valkeys");
        let plain = match is_tls {
            true => format!("redis{}", &url[scheme.len()..]),
            false => url.to_owned(),
        };
        let mut info = plain.into_connection_info().map_err(|error| {
            if let Some(host) = hosts.split(',').find_map(host_of_faulty_port) {
                return Fault::url(format!("the port of {host} must be a number up to 65535"));
            }
            // The client library's errors about urls do not show the password.
            let text = error.to_string();
            let text = text.trim_end_matches("- InvalidClientConfig").trim_end();
            Fault::url(format!("{text}; expected {EXPECTED}"))
        })?;
        if hosts.contains(',') {
            let reason = "it names several hosts, as redis+cluster:// and redis+sentinel:// do";
            return Err(Fault::url(reason));
        }
        if let (true, ConnectionAddr::Tcp(host, port)) = (is_tls, info.addr()) {
            let addr = over_tls(host.clone(), *port);
            info = info.set_addr(addr);
        }
        let settings = settings(info.redis_settings().clone(), &mut options);
        info = info.set_redis_settings(settings.map_err(Fault::url)?);
        // By default a second call would wait in the kernel for the reply to the first.
        let tcp = TcpSettings::default().set_nodelay(true);
        let mut endpoint = Self::new(info.set_tcp_settings(tcp));
        endpoint.speaks_resp2 = match options.take(&["protocol"]).map_err(Fault::url)?.as_deref() {
            None | Some("3" | "resp3") => false,
            Some("2" | "resp2") => true,
            Some(_) => return Err(Fault::url("protocol must be 2 or 3")),
        };
        endpoint.said = options.take_settings().map_err(Fault::url)?;
        #[cfg(feature = "tls-rustls")]
        {
            let tls = options.take_tls().map_err(Fault::url)?;
            if tls.is_set() {
                endpoint.secure(&Arc::new(tls))?;
            }
        }
        options.finish(instead).map_err(Fault::url)?;
        Ok(endpoint)
    }

    /// The server and user of a client, whatever its protocol version.
    #[cfg(feature = "redis-1")]
    pub(super) fn of(client: &redis::Client) -> Self {
        Self::new(client.get_connection_info().clone())
    }

    /// Over TLS it trusts the roots of the system and has no client certificate.
    fn new(info: ConnectionInfo) -> Self {
        let opener = match info.addr() {
            ConnectionAddr::TcpTls { insecure: true, .. } => Opener::Unusable(UNVERIFIED),
            ConnectionAddr::TcpTls {
                tls_params: Some(_),
                ..
            } => Opener::Unusable(UNREADABLE),
            #[cfg(feature = "tls-rustls")]
            ConnectionAddr::TcpTls { .. } => Opener::Tls(Arc::default()),
            #[cfg(not(feature = "tls-rustls"))]
            ConnectionAddr::TcpTls { .. } => Opener::Unusable(NO_TLS),
            _ => Opener::Plain,
        };
        Self {
            address: told(info.addr()),
            info,
            opener,
            at: None,
            set_ups: None,
            credentials: None,
            must_be_primary: false,
            speaks_resp2: false,
            said: UrlSettings::default(),
        }
    }

    /// Whether it can be connected to, as far as that is known here.
    pub(super) fn check(&self) -> Result<(), Fault> {
        match self.opener {
            Opener::Unusable(reason) => Err(Fault::invalid("client", reason)),
            _ => Ok(()),
        }
    }

    /// Takes the TLS configuration of its store, if it needs one.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secure(&mut self, tls: &Arc<Tls>) -> Result<(), Fault> {
        if !tls.is_set() {
            return Ok(());
        }
        if !self.is_tls() {
            return Err(Fault::invalid("certificates", "they need a rediss:// url"));
        }
        if matches!(&self.opener, Opener::Tls(before) if before.is_set()) {
            let reason = "they are in the url and in the builder: give them once";
            return Err(Fault::invalid("certificates", reason));
        }
        self.opener = Opener::Tls(tls.clone());
        Ok(())
    }

    /// With the configuration of that one, if both are reached over TLS.
    pub(super) fn secure_as(&mut self, other: &Self) {
        if self.is_tls() && other.is_tls() {
            self.opener = other.opener.clone();
        }
    }

    /// Whether whoever answers is trusted.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn accepts_anybody(&self) -> bool {
        matches!(&self.opener, Opener::Tls(tls) if tls.accepts_anybody())
    }

    fn is_tls(&self) -> bool {
        matches!(self.info.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// Another server, with the same user and certificates.
    pub(super) fn elsewhere(&self, host: &str, port: u16) -> Self {
        let host = host.to_owned();
        let addr = match self.is_tls() {
            true => over_tls(host, port),
            false => ConnectionAddr::Tcp(host, port),
        };
        Self {
            address: told(&addr),
            info: self.info.clone().set_addr(addr),
            at: None,
            set_ups: None,
            ..self.clone()
        }
    }

    /// The same at this address.
    pub(super) fn at(self, at: Option<SocketAddr>) -> Self {
        Self { at, ..self }
    }

    /// The same as one of several attempts.
    pub(super) fn among(self, set_ups: &SetUps) -> Self {
        Self {
            set_ups: Some(set_ups.clone()),
            ..self
        }
    }

    /// Connects at each address of the host, one after the other, until one can be used. `within` is for all of it.
    pub(super) async fn at_any_address<'a, T>(
        &self,
        within: Duration,
        set_ups: &SetUps,
        connect: impl Fn(Self) -> BoxFuture<'a, Result<T, Fault>>,
    ) -> Result<T, Fault> {
        // Each attempt knows why it takes so long.
        let until = Instant::now() + within + within / 16;
        let began = std::time::Instant::now();
        let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) =
            self.info.addr()
        else {
            return connect(self.clone()).await;
        };
        let connect = |at| connect(self.clone().at(Some(at)).among(set_ups));
        let found = timeout(within, lookup_host((host.as_str(), *port))).await;
        let found = match found {
            Ok(found) => found.map(|found| found.collect::<Vec<_>>()),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the look-up of its name timed out",
            )),
        };
        let mut addresses = found.map_err(|error| self.fault(error.into(), false))?;
        addresses.dedup();
        let pace = Pace::of_addresses(set_ups, addresses.len(), within);
        let connected = first_success(addresses.into_iter().map(connect), pace, until).await;
        connected.map_err(|failed| {
            let late = || self.fault(timed_out(began, within, TIMED_OUT).into(), false);
            let told = format!("no address of {} can be used", self.address);
            Fault::of_attempts(failed, late, told)
        })
    }

    fn fault(&self, source: RedisError, rotates: bool) -> Fault {
        Fault::Connect {
            address: self.address.clone(),
            is_tls: self.is_tls(),
            rotates,
            source,
        }
    }

    /// Connects, and returns whether pushes are possible. They are not if the server, or a proxy before it, speaks
    /// only RESP2.
    pub(super) async fn connect<T>(&self, within: Duration) -> Result<(Link<T>, bool), Fault> {
        if self.speaks_resp2 {
            return Ok((self.connect_resp2(within).await?, false));
        }
        match self.open(ProtocolVersion::RESP3, within).await {
            Err(Fault::Connect { source, .. }) if speaks_no_resp3(&source) => {
                Ok((self.connect_resp2(within).await?, false))
            }
            link => Ok((link?, true)),
        }
    }

    /// Connects without pushes.
    pub(super) async fn connect_resp2<T>(&self, within: Duration) -> Result<Link<T>, Fault> {
        self.open(ProtocolVersion::RESP2, within).await
    }

    /// Connects and disconnects: checks that the server answers and accepts this user.
    pub(super) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        let (mut link, _) = self.connect::<()>(within).await?;
        // With RESP2, connecting does not show whether a password is missing.
        match link.ask(&cmd("PING"), within).await {
            Err(Fault::Refused { refusal, .. }) if refusal.code() == "NOPERM" => Ok(()),
            answer => answer.map(drop),
        }
    }

    async fn open<T>(&self, protocol: ProtocolVersion, within: Duration) -> Result<Link<T>, Fault> {
        let mut settings = self.info.redis_settings().clone().set_protocol(protocol);
        let mut newer = None;
        if let Some(source) = &self.credentials {
            let (credentials, following) = source.current(&self.address, within).await?;
            settings = credentials.login(settings);
            newer = Some(following);
        }
        let is_open = AtomicBool::new(false);
        let opening = async {
            let opened = self.opener.open(&self.info, self.at, self.set_ups.as_ref());
            let (stream, set_up) = opened.await?;
            is_open.store(true, Ordering::Relaxed);
            let mut link = Link::new(stream, set_up, self.address.clone(), within);
            login::log_in(&mut link, &settings).await?;
            Ok(link)
        };
        let began = std::time::Instant::now();
        let opened = timeout(within, opening).await;
        let opened = opened.unwrap_or_else(|_| {
            let reason = match is_open.load(Ordering::Relaxed) {
                true => SILENT,
                false => TIMED_OUT,
            };
            Err(timed_out(began, within, reason).into())
        });
        let mut link = opened.map_err(|source| self.fault(source, newer.is_some()))?;
        if let Some(newer) = newer {
            link.follow(newer.logins(self.address.clone()));
        }
        if !self.must_be_primary {
            return Ok(link);
        }
        // Asks the server itself: sentinels may learn of a fail-over late.
        let master = Value::BulkString("master".into());
        match link.ask(&cmd("ROLE"), within).await {
            // Without the right to ask, the probe of a session finds out whether the server accepts writes.
            Err(Fault::Refused { refusal, .. }) if matches!(refusal.code(), "NOPERM" | "ERR") => {
                Ok(link)
            }
            Err(fault) => Err(fault),
            Ok(Value::Array(role)) if role.first() == Some(&master) => Ok(link),
            Ok(_) => Err(Fault::not_primary(&self.address)),
        }
    }
}

/// `began`: in real time.
fn timed_out(began: std::time::Instant, within: Duration, reason: &'static str) -> io::Error {
    let reason = match began.elapsed() < within / 2 {
        true => "timed out: tokio's clock is paused",
        false => reason,
    };
    io::Error::new(io::ErrorKind::TimedOut, reason)
}

/// An address as it is told. An IPv6 address has colons of its own, so it has brackets before the port.
fn told(addr: &ConnectionAddr) -> Arc<str> {
    match addr {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }
            if host.contains(':') && !host.starts_with('[') =>
        {
            format!("[{host}]:{port}").into()
        }
        addr => addr.to_string().into(),
    }
}

fn over_tls(host: String, port: u16) -> ConnectionAddr {
    ConnectionAddr::TcpTls {
        host,
        port,
        insecure: false,
        tls_params: None,
    }
}

fn speaks_no_resp3(error: &RedisError) -> bool {
    error.kind() == ErrorKind::RESP3NotSupported
        || ErrorReply::of(error).is_some_and(|refusal| refusal.is_about_hello())
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Endpoint").field(&self.address).finish()
    }
}

/// The host whose port is no number. The port is not shown: in `redis://user:password` it is a password.
fn host_of_faulty_port(host: &str) -> Option<&str> {
    let (name, port) = host.rsplit_once(':')?;
    let is_faulty = !host.ends_with(']') && port.parse::<u16>().is_err();
    (is_faulty && is_host(name)).then_some(name)
}

/// Whether a name from a server may be a host name or an IP address: it is stored and logged.
pub(super) fn is_host(text: &str) -> bool {
    let may_be = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%[]".contains(&byte);
    // No host name is longer.
    (1..=253).contains(&text.len()) && text.bytes().all(may_be)
}
