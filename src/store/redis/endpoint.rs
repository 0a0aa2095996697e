//! A server's address, and how to connect to it.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use redis::io::tcp::TcpSettings;
use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion, RedisError,
    Value, cmd,
};

use super::credentials::{Renewal, Source};
use super::fault::{ErrorReply, Fault};
use super::link::Link;
use super::login;
use super::stream::Opener;
use crate::roaming::time::timeout;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;

const EXPECTED: &str = "redis://[[user:]password@]host[:port][/db], redis+cluster://host:port,host:port/, \
     redis+sentinel://host,host/service or unix:///path[?db=&user=&pass=]";

/// Why a user's own client cannot be taken.
const UNVERIFIED: &str = "TLS without verification is not supported";
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
    /// In place of user and password in `info`.
    pub(super) credentials: Option<Source>,
    /// Named by sentinels, which may be wrong: its role is checked at each connection.
    pub(super) must_be_primary: bool,
}

impl Endpoint {
    /// Reads `redis://`, `rediss://` and `unix://` urls, and their `valkey` variants.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        let (scheme, _, hosts, tail) = split_url(url);
        // Otherwise the rest of a password could be taken for a host, which is shown.
        if !scheme.contains("unix") && tail.contains('@') {
            let reason = "a user or password with / ? or # must be percent-encoded (%2F %3F %23)";
            return Err(Fault::url(reason));
        }
        let missing = match &*scheme {
            it if it.ends_with("+cluster") && cfg!(not(feature = "cluster")) => "cluster",
            it if it.ends_with("+sentinel") && cfg!(not(feature = "sentinel")) => "sentinel",
            "rediss" | "valkeys" if cfg!(not(feature = "tls-rustls")) => "tls-rustls",
            _ => "",
        };
        if !missing.is_empty() {
            let reason = format!("it needs lockstream's feature `{missing}`");
            return Err(Fault::url(reason));
        }
        // The client library reads the url. TLS is ours, and so it need not know it.
        let is_tls = matches!(&*scheme, "rediss" | "valkeys");
        let plain = match is_tls {
            true => format!("redis{}", &url[scheme.len()..]),
            false => url.to_owned(),
        };
        let mut info = plain.into_connection_info().map_err(|error| {
            // The client library's errors about urls do not show the password.
            let text = error.to_string();
            let text = text.trim_end_matches("- InvalidClientConfig").trim_end();
            Fault::url(format!("{text}; expected {EXPECTED}"))
        })?;
        if hosts.contains(',') {
            let reason = "it names several hosts, as redis+cluster:// and redis+sentinel:// do";
            return Err(Fault::url(reason));
        }
        if is_tls {
            let fragment = tail.split_once('#').map(|(_, fragment)| fragment);
            match fragment {
                Some(it) if it.trim() == "insecure" => return Err(Fault::url(UNVERIFIED)),
                Some(_) => return Err(Fault::url("what follows the # has no meaning")),
                None => {}
            }
            if let ConnectionAddr::Tcp(host, port) = info.addr() {
                let addr = over_tls(host.clone(), *port);
                info = info.set_addr(addr);
            }
        }
        // By default a second call would wait in the kernel for the reply to the first.
        let settings = TcpSettings::default().set_nodelay(true);
        Ok(Self::new(info.set_tcp_settings(settings)))
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
            address: info.addr().to_string().into(),
            info,
            opener,
            credentials: None,
            must_be_primary: false,
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
        if tls.is_set() && !self.is_tls() {
            return Err(Fault::invalid("certificates", "they need a rediss:// url"));
        }
        if tls.is_set() || matches!(self.opener, Opener::Tls(_)) {
            self.opener = Opener::Tls(tls.clone());
        }
        Ok(())
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
            address: addr.to_string().into(),
            info: self.info.clone().set_addr(addr),
            ..self.clone()
        }
    }

    /// Connects, and returns whether pushes are possible. They are not if the server, or a proxy before it, speaks
    /// only RESP2.
    pub(super) async fn connect<T>(&self, within: Duration) -> Result<(Link<T>, bool), Fault> {
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
        let opening = async {
            let stream = self.opener.open(&self.info).await?;
            let mut link = Link::new(stream, self.address.clone(), within);
            login::log_in(&mut link, &settings).await?;
            Ok(link)
        };
        let began = std::time::Instant::now();
        let opened = timeout(within, opening).await.unwrap_or_else(|_| {
            let reason = match began.elapsed() < within / 2 {
                true => "timed out: tokio's clock is paused",
                false => "timed out",
            };
            Err(io::Error::new(io::ErrorKind::TimedOut, reason).into())
        });
        let mut link = opened.map_err(|source| Fault::Connect {
            address: self.address.clone(),
            is_tls: self.is_tls(),
            rotates: newer.is_some(),
            source,
        })?;
        if let Some(newer) = newer {
            link.follow(Renewal::new(newer, self.address.clone()));
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
            Ok(_) => Err(Fault::NotPrimary {
                address: self.address.clone(),
            }),
        }
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

/// Whether a name from a server may be a host name or an IP address: it is stored and logged.
pub(super) fn is_host(text: &str) -> bool {
    let may_be = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:%[]".contains(&byte);
    // No host name is longer.
    (1..=253).contains(&text.len()) && text.bytes().all(may_be)
}
