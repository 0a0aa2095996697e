//! A server's address, and how to connect to it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::aio::AsyncPushSender;
use redis::io::tcp::TcpSettings;
use redis::{
    ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, ProtocolVersion, PushInfo,
    RedisError, Value, cmd,
};

use super::credentials::Source;
use super::fault::{ErrorReply, Fault};
use super::stream::{Link, Opener};
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;

const EXPECTED: &str = "redis://[[user:]password@]host[:port][/db], redis+cluster://host:port,host:port/, \
     redis+sentinel://host,host/service or unix:///path[?db=&user=&pass=]";

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
        let info = url.into_connection_info().map_err(|error| {
            // The client library's errors about urls do not show the password.
            let text = error.to_string();
            let text = text.trim_end_matches("- InvalidClientConfig").trim_end();
            Fault::url(format!("{text}; expected {EXPECTED}"))
        })?;
        if hosts.contains(',') {
            let reason = "it names several hosts, as redis+cluster:// and redis+sentinel:// do";
            return Err(Fault::url(reason));
        }
        if let ConnectionAddr::TcpTls { insecure: true, .. } = info.addr() {
            return Err(Fault::url("TLS without verification is not supported"));
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

    /// Over TLS it trusts the roots of the system and has no client certificate, unless the client was made with
    /// certificates, which cannot be read.
    fn new(info: ConnectionInfo) -> Self {
        let opener = match info.addr() {
            #[cfg(feature = "redis-1")]
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } if *insecure || tls_params.is_some() || cfg!(not(feature = "tls-rustls")) => {
                Opener::Client
            }
            #[cfg(feature = "tls-rustls")]
            ConnectionAddr::TcpTls { .. } => Opener::Tls(Arc::default()),
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

    /// Takes the TLS configuration of its store, if it needs one.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secure(&mut self, tls: &Arc<Tls>) -> Result<(), Fault> {
        if tls.has_certificates() && !self.is_tls() {
            return Err(Fault::invalid("certificates", "they need a rediss:// url"));
        }
        if tls.has_certificates() || matches!(self.opener, Opener::Tls(_)) {
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
            true => ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            },
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
    pub(super) async fn connect(
        &self,
        within: Duration,
        pushes: impl AsyncPushSender,
    ) -> Result<(Link, bool), Fault> {
        match self.open(ProtocolVersion::RESP3, within, pushes).await {
            Err(Fault::Connect { source, .. }) if speaks_no_resp3(&source) => {
                Ok((self.connect_resp2(within).await?, false))
            }
            link => Ok((link?, true)),
        }
    }

    /// Connects without pushes.
    pub(super) async fn connect_resp2(&self, within: Duration) -> Result<Link, Fault> {
        self.open(ProtocolVersion::RESP2, within, ignore).await
    }

    /// Connects and disconnects: checks that the server answers and accepts this user.
    pub(super) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        let (mut link, _) = self.connect(within, ignore).await?;
        // With RESP2, connecting does not show whether a password is missing.
        match link.ask(&cmd("PING"), &self.address, within).await {
            Err(Fault::Refused { refusal, .. }) if refusal.code() == "NOPERM" => Ok(()),
            answer => answer.map(drop),
        }
    }

    async fn open(
        &self,
        protocol: ProtocolVersion,
        within: Duration,
        pushes: impl AsyncPushSender,
    ) -> Result<Link, Fault> {
        let mut settings = self.info.redis_settings().clone().set_protocol(protocol);
        let mut newer = None;
        if let Some(source) = &self.credentials {
            let (credentials, following) = source.current(&self.address, within).await?;
            settings = credentials.login(settings);
            newer = Some(following);
        }
        let info = self.info.clone().set_redis_settings(settings);
        let opened = Link::open(&info, &self.opener, within, pushes).await;
        let mut link = opened.map_err(|source| Fault::Connect {
            address: self.address.clone(),
            is_tls: self.is_tls(),
            rotates: newer.is_some(),
            source,
        })?;
        if let Some(newer) = newer {
            link.follow(newer, &self.address);
        }
        if !self.must_be_primary {
            return Ok(link);
        }
        // Asks the server itself: sentinels may learn of a fail-over late.
        let master = Value::BulkString("master".into());
        match link.ask(&cmd("ROLE"), &self.address, within).await {
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

/// For connections on which no pushes matter.
pub(super) fn ignore(_: PushInfo) -> Result<(), ()> {
    Ok(())
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
