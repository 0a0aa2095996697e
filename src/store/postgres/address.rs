//! A server's url, and how to connect to it.

use std::io;
use std::str::FromStr;
#[cfg(feature = "tls-rustls")]
use std::sync::Arc;
use std::time::Duration;

use rand::seq::SliceRandom;
use tokio_postgres::config::{Host, LoadBalanceHosts, SslMode, TargetSessionAttrs};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{Config, NoTls, SimpleQueryMessage};

use super::connection::Connection;
use super::fault::{Address, Fault};
use super::socket::{self, Destination, Socket};
use crate::roaming::time::timeout;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;

/// A connection that is silent is probed after so long, and then so often.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// For so long may what was sent stay unconfirmed.
const USER_TIMEOUT: Duration = Duration::from_secs(11);

/// What only libpq knows of TLS, and the parameters that tell us whether a user set what we would set.
const PARAMETERS_OF_TLS: [&str; 4] = ["sslmode", "sslrootcert", "sslcert", "sslkey"];

/// Where a server is, and as whom to connect.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub(super) address: Address,
    /// What the url says of it.
    pub(super) schema_owner: Option<String>,
    config: Config,
    #[cfg(feature = "tls-rustls")]
    tls: Arc<Tls>,
}

impl Endpoint {
    /// Reads `postgres://[user[:password]@]host[:port][,host[:port]][/database][?parameters]`.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            let reason = "it must begin with postgres:// or postgresql://";
            return Err(Fault::url(reason));
        }
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let (owners, rest): (Vec<_>, Vec<_>) = query
            .split('&')
            .filter(|parameter| !parameter.is_empty())
            .map(|parameter| parameter.split_once('=').unwrap_or((parameter, "")))
            .partition(|(name, _)| *name == "schema_owner");
        let (ours, theirs): (Vec<_>, Vec<_>) = rest
            .into_iter()
            .partition(|(name, _)| PARAMETERS_OF_TLS.contains(name));
        let others: Vec<_> = theirs
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let config = Config::from_str(&format!("{base}?{}", others.join("&")));
        // The error names the parameter or the part of the url, and no value of it.
        let mut config = config.map_err(|error| {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            Fault::url(cause.unwrap_or_else(|| error.to_string()))
        })?;
        let is_set = |name: &str| theirs.iter().any(|(it, _)| it.starts_with(name));
        if !is_set("keepalives") {
            config
                .keepalives_idle(KEEPALIVE)
                .keepalives_interval(KEEPALIVE)
                .keepalives_retries(2);
        }
        if !is_set("tcp_user_timeout") {
            config.tcp_user_timeout(USER_TIMEOUT);
        }
        if !is_set("target_session_attrs") && config.get_hosts().len() > 1 {
            config.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        let mut endpoint = Self::new(config)?;
        endpoint.set_tls(&ours)?;
        let owner = owners.last().map(|(_, owner)| decode(owner));
        endpoint.schema_owner = owner.transpose()?;
        Ok(endpoint)
    }

    /// With the settings of a `Config`, as they are.
    pub(super) fn new(mut config: Config) -> Result<Self, Fault> {
        let is_local = |host: &Host| !matches!(host, Host::Tcp(_));
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(Fault::url("it has no host"));
        }
        let hosts = (config.get_hosts().len(), config.get_hostaddrs().len());
        if hosts.0 > 0 && hosts.1 > 0 && hosts.0 != hosts.1 {
            let reason = format!("it has {} hosts, and {} hostaddrs", hosts.0, hosts.1);
            return Err(Fault::url(reason));
        }
        let ports = config.get_ports().len();
        if ports > 1 && ports != hosts.0.max(hosts.1) {
            let reason = format!("it has {} hosts, and {ports} ports", hosts.0.max(hosts.1));
            return Err(Fault::url(reason));
        }
        if config.get_hosts().iter().all(is_local) && config.get_hostaddrs().is_empty() {
            config.ssl_mode(SslMode::Disable);
        }
        Ok(Self {
            address: address(&config).into(),
            schema_owner: None,
            config,
            #[cfg(feature = "tls-rustls")]
            tls: Arc::default(),
        })
    }

    /// What libpq's parameters say, or else: TLS with a checked certificate if it can be had.
    #[cfg(feature = "tls-rustls")]
    fn set_tls(&mut self, parameters: &[(&str, &str)]) -> Result<(), Fault> {
        let value = |name| {
            let set = parameters.iter().find(|(it, _)| *it == name);
            set.map(|(_, value)| decode(value)).transpose()
        };
        let is_socket = self.config.get_ssl_mode() == SslMode::Disable;
        let mode = match (value("sslmode")?.as_deref(), is_socket) {
            (Some("disable"), _) | (None, true) => SslMode::Disable,
            (None | Some("require" | "verify-ca" | "verify-full"), _) => SslMode::Require,
            (Some(mode), _) => {
                return Err(Fault::url(format!(
                    "sslmode={mode:?}: it may be disable, or require, verify-ca or verify-full, which all check the \
                     certificate and the name"
                )));
            }
        };
        self.config.ssl_mode(mode);
        let file = |name: &'static str| {
            let read = |path: String| {
                let read = std::fs::read(&path);
                read.map_err(|error| Fault::url(format!("{name}={path:?}: {error}")))
            };
            value(name)?.map(read).transpose()
        };
        let mut tls = Tls::default();
        // libpq's own name for the authorities of the system, which are the default here.
        let is_system = value("sslrootcert")?.is_some_and(|it| it == "system");
        if !is_system && let Some(roots) = file("sslrootcert")? {
            tls = tls.trusting(&roots).map_err(Fault::certificates)?;
        }
        match (file("sslcert")?, file("sslkey")?) {
            (Some(certificate), Some(key)) => {
                let shown = tls.showing(&certificate, &key);
                tls = shown.map_err(Fault::certificates)?;
            }
            (None, None) => {}
            _ => return Err(Fault::url("sslcert and sslkey need each other")),
        }
        self.tls = Arc::new(tls);
        Ok(())
    }

    #[cfg(not(feature = "tls-rustls"))]
    fn set_tls(&mut self, parameters: &[(&str, &str)]) -> Result<(), Fault> {
        let is_plain = |(name, value): &(&str, &str)| *name == "sslmode" && *value == "disable";
        if !parameters.iter().all(is_plain) {
            return Err(Fault::url("TLS needs the feature `tls-rustls`"));
        }
        self.config.ssl_mode(SslMode::Disable);
        Ok(())
    }

    /// Takes the certificates that a builder was given.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secure(&mut self, tls: Tls) -> Result<(), Fault> {
        if tls.is_set() {
            if self.config.get_ssl_mode() == SslMode::Disable {
                return Err(Fault::certificates("the url says that there is no TLS"));
            }
            self.tls = Arc::new(tls);
        }
        Ok(())
    }

    /// Says in the server's list of connections what this is.
    pub(super) fn name(&mut self, name: &str) {
        if self.config.get_application_name().is_none() {
            self.config.application_name(name);
        }
    }

    /// Sets this for the session, unless a pooler is between, which takes no such options.
    pub(super) fn option(&mut self, option: &str) {
        let options = match self.config.get_options() {
            Some(before) => format!("{before} {option}"),
            None => option.to_owned(),
        };
        self.config.options(options);
    }

    /// Each host has that time.
    pub(super) async fn connect(&self, within: Duration) -> Result<Connection, Fault> {
        let mut end = Err(Fault::url("it has no host"));
        for host in hosts(&self.config) {
            let connecting = self.connect_to(&host, within);
            let silent = |_| Err(Fault::silent(&self.address, within));
            end = timeout(within, connecting).await.unwrap_or_else(silent);
            if end.is_ok() {
                break;
            }
        }
        end
    }

    async fn connect_to(&self, host: &Config, within: Duration) -> Result<Connection, Fault> {
        #[cfg(feature = "tls-rustls")]
        if host.get_ssl_mode() != SslMode::Disable {
            let connector = self.tls.connector().await;
            let connector = connector.map_err(Fault::certificates)?;
            return self.open(host, within, secure::Connector(connector)).await;
        }
        self.open(host, within, NoTls).await
    }

    /// Connects to any of the destinations of a host.
    async fn open<T>(
        &self,
        host: &Config,
        within: Duration,
        mut tls: T,
    ) -> Result<Connection, Fault>
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let destinations = socket::destinations(host).await;
        let mut end = Err(Fault::url("it has no host"));
        for destination in destinations.map_err(|error| self.unreachable(&error))? {
            end = self.open_at(destination, host, within, &mut tls).await;
            if end.is_ok() {
                break;
            }
        }
        end
    }

    fn unreachable(&self, error: &io::Error) -> Fault {
        Fault::unreachable(&self.address, error)
    }

    async fn open_at<T>(
        &self,
        destination: Destination,
        host: &Config,
        within: Duration,
        tls: &mut T,
    ) -> Result<Connection, Fault>
    where
        T: MakeTlsConnect<Socket>,
        T::Stream: Send + 'static,
    {
        let name = match host.get_hosts().first() {
            Some(Host::Tcp(name)) => name,
            _ => "",
        };
        let connector = tls.make_tls_connect(name);
        let connector = connector.map_err(|error| self.unreachable(&io::Error::other(error)))?;
        let socket = destination.connect(host).await;
        let socket = socket.map_err(|error| self.unreachable(&error))?;
        let opened = host.connect_raw(socket, connector).await;
        let (client, connection) = opened.map_err(|error| Fault::connect(&self.address, &error))?;
        let mut connection = Connection::new(self.address.clone(), within, client, connection);
        let wanted = match host.get_target_session_attrs() {
            TargetSessionAttrs::ReadWrite => "off",
            TargetSessionAttrs::ReadOnly => "on",
            _ => return Ok(connection),
        };
        let client = connection.client.clone();
        let asked = client.simple_query("SHOW transaction_read_only");
        let is_wanted = connection.get(asked).await?.iter().any(
            |message| matches!(message, SimpleQueryMessage::Row(row) if row.get(0) == Some(wanted)),
        );
        match is_wanted {
            true => Ok(connection),
            false => Err(self.unreachable(&io::Error::other(match wanted {
                "off" => "database does not allow writes",
                _ => "database is not read only",
            }))),
        }
    }
}

/// The same for each of the hosts: the client library would wait for ever for one that is silent, and never ask the next.
fn hosts(all: &Config) -> Vec<Config> {
    let (hosts, addresses, ports) = (all.get_hosts(), all.get_hostaddrs(), all.get_ports());
    let one = |index| {
        let mut one = Config::new();
        one.ssl_mode(all.get_ssl_mode())
            .ssl_negotiation(all.get_ssl_negotiation())
            .channel_binding(all.get_channel_binding())
            .target_session_attrs(all.get_target_session_attrs())
            .load_balance_hosts(all.get_load_balance_hosts())
            .keepalives(all.get_keepalives())
            .keepalives_idle(all.get_keepalives_idle());
        if let Some(interval) = all.get_keepalives_interval() {
            one.keepalives_interval(interval);
        }
        if let Some(retries) = all.get_keepalives_retries() {
            one.keepalives_retries(retries);
        }
        if let Some(timeout) = all.get_connect_timeout() {
            one.connect_timeout(*timeout);
        }
        if let Some(timeout) = all.get_tcp_user_timeout() {
            one.tcp_user_timeout(*timeout);
        }
        if let Some(user) = all.get_user() {
            one.user(user);
        }
        if let Some(password) = all.get_password() {
            one.password(password);
        }
        if let Some(database) = all.get_dbname() {
            one.dbname(database);
        }
        if let Some(options) = all.get_options() {
            one.options(options);
        }
        if let Some(name) = all.get_application_name() {
            one.application_name(name);
        }
        match hosts.get(index) {
            Some(Host::Tcp(host)) => drop(one.host(host)),
            #[cfg(unix)]
            Some(Host::Unix(folder)) => drop(one.host_path(folder)),
            None => {}
        }
        if let Some(address) = addresses.get(index) {
            one.hostaddr(*address);
        }
        if let Some(port) = ports.get(index).or_else(|| ports.first()) {
            one.port(*port);
        }
        one
    };
    let count = hosts.len().max(addresses.len());
    let mut each: Vec<_> = (0..count).map(one).collect();
    if all.get_load_balance_hosts() == LoadBalanceHosts::Random {
        each.shuffle(&mut rand::rng());
    }
    each
}

/// Hosts and ports, for errors.
fn address(config: &Config) -> String {
    let ports = config.get_ports();
    let hosts = config.get_hosts().iter().map(|host| match host {
        Host::Tcp(host) => host.clone(),
        #[cfg(unix)]
        Host::Unix(folder) => folder.display().to_string(),
    });
    let mut names: Vec<_> = hosts.collect();
    if names.is_empty() {
        names.extend(config.get_hostaddrs().iter().map(ToString::to_string));
    }
    for (index, name) in names.iter_mut().enumerate() {
        let port = ports.get(index).or(ports.first()).unwrap_or(&5432);
        *name += &format!(":{port}");
    }
    names.join(",")
}

fn decode(value: &str) -> Result<String, Fault> {
    let decoded = percent_encoding::percent_decode_str(value).decode_utf8();
    let decoded = decoded.map_err(|_| Fault::url("a parameter is no UTF-8"))?;
    Ok(decoded.into_owned())
}

/// TLS as the client library wants it.
#[cfg(feature = "tls-rustls")]
mod secure {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use futures::FutureExt;
    use futures::future::BoxFuture;
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
    use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
    use tokio_rustls::TlsConnector;

    use crate::store::tls::server_name;

    #[derive(Clone)]
    pub(super) struct Connector(pub(super) TlsConnector);

    pub(super) struct ToHost(TlsConnector, String);

    pub(super) struct Secured<S>(tokio_rustls::client::TlsStream<S>);

    impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> MakeTlsConnect<S> for Connector {
        type Stream = Secured<S>;
        type TlsConnect = ToHost;
        type Error = io::Error;

        fn make_tls_connect(&mut self, host: &str) -> io::Result<ToHost> {
            Ok(ToHost(self.0.clone(), host.to_owned()))
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin + Send + 'static> TlsConnect<S> for ToHost {
        type Stream = Secured<S>;
        type Error = io::Error;
        type Future = BoxFuture<'static, io::Result<Secured<S>>>;

        fn connect(self, stream: S) -> Self::Future {
            async move {
                let name = server_name(&self.1)
                    .ok_or_else(|| io::Error::other("the host name cannot be in a certificate"))?;
                Ok(Secured(self.0.connect(name, stream).await?))
            }
            .boxed()
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for Secured<S> {
        fn channel_binding(&self) -> ChannelBinding {
            ChannelBinding::none()
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Secured<S> {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_read(cx, buffer)
        }
    }

    impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Secured<S> {
        fn poll_write(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Pin::new(&mut self.0).poll_write(cx, bytes)
        }

        fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(cx)
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(cx)
        }
    }
}
