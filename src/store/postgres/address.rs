//! Where a server is, as whom to connect, and how the connection is secured.

use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{self, Host, LoadBalanceHosts, SslNegotiation, TargetSessionAttrs};

use super::fault::{Address, Fault};
use super::options::{self, SslMode, StoreOptions, UrlSecurity, Wanted};
use super::secure::{Plain, Security};
use super::socket::Site;
use crate::base::limits::RESPONSE_TIMEOUT;
use crate::store::credentials::Newest;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::{Tls, Verify};
#[cfg(feature = "tls-rustls")]
use crate::store::url::DANGER;
use crate::store::url::{CONNECT_TIMEOUT, UrlOptions};

/// What is refused if it is out of bounds, and the bounds.
pub(super) const CONNECTING: &str = "connect time-out";
pub(super) const CONNECTING_BOUNDS: &str = "must be from 1 ms to 24 h";

/// Where a server is, and as whom to connect.
#[derive(Clone)]
pub(super) struct Endpoint {
    pub(super) address: Address,
    pub(super) sites: Vec<Site>,
    /// User, password, database, what else the server is told when a session begins, and how sockets are probed.
    pub(super) login: Config,
    /// In place of user and password.
    pub(super) credentials: Option<Newest>,
    pub(super) wanted: Option<Wanted>,
    /// How long connecting to each host may take.
    pub(super) connect_within: Duration,
    said: UrlSecurity,
    /// See [`Self::secure`].
    pub(super) security: Security,
}

impl Endpoint {
    /// The same, of whose hosts this one was chosen.
    pub(super) fn only(&self, site: &Site) -> Self {
        let mut only = self.clone();
        if self.sites.len() > 1 {
            only.wanted = self.wanted.or(Some(Wanted::Writable));
        }
        only.sites = vec![site.clone()];
        only
    }

    /// Reads `postgres://[user[:password]@]host[:port][,host[:port]][/database][?options]`.
    pub(super) fn parse(url: &str) -> Result<(Self, StoreOptions), Fault> {
        let (base, query) = url.split_once('?').unwrap_or((url, ""));
        let (scheme, rest) = base.split_once("://").unwrap_or(("", base));
        if !["postgres", "postgresql"].contains(&&*scheme.to_ascii_lowercase()) {
            let hint = match scheme {
                "jdbc:postgresql" | "jdbc:pgsql" => " (leave out jdbc:)",
                _ if scheme.contains('+') => " (leave out what follows the +)",
                _ => "",
            };
            return Err(Fault::url(format!(
                "it must begin with postgres:// or postgresql://{hint}"
            )));
        }
        let mut options = UrlOptions::parse(query)?;
        let settings = StoreOptions {
            registry: options.take_registry()?,
            schema: options.take(&["lock_schema"])?,
            schema_owner: options.take(&["schema_owner"])?,
            pooled: options.take(&["pooled"])?,
            is_pooler: options.take_switch(&["pgbouncer"])? == Some(true),
        };
        let within = options.take_time(&["connect_timeout"])?;
        let wanted = Wanted::take(&mut options)?;
        let said = UrlSecurity::take(&mut options)?;
        let login = options::login(&format!("postgres://{rest}"), &mut options)?;
        options::finish(options)?;
        Ok((Self::with(login, within, wanted, said)?, settings))
    }

    /// The same for the url of a pooler, which says nothing of the store.
    pub(super) fn parse_pooler(url: &str) -> Result<Self, Fault> {
        let (pooler, said) = Self::parse(url)?;
        if said.is_of_a_store() {
            let why = "prefix, name, response_timeout, lock_schema, schema_owner and pooled belong into the url of the \
                       store";
            return Err(Fault::invalid("url of the pooler", why));
        }
        Ok(pooler)
    }

    /// With the settings of a `Config`, as they are.
    pub(super) fn new(config: Config) -> Result<Self, Fault> {
        let wanted = match config.get_target_session_attrs() {
            TargetSessionAttrs::ReadWrite => Some(Wanted::Writable),
            TargetSessionAttrs::ReadOnly => return Err(Fault::url(options::STANDBY)),
            _ => None,
        };
        let said = UrlSecurity::new(match config.get_ssl_mode() {
            config::SslMode::Disable => SslMode::Disable,
            config::SslMode::Prefer => SslMode::Opportunistic,
            _ => SslMode::Unsaid,
        });
        #[cfg(feature = "tls-rustls")]
        let said = UrlSecurity {
            is_direct: config.get_ssl_negotiation() == SslNegotiation::Direct,
            ..said
        };
        let within = config.get_connect_timeout().copied();
        if within.is_some_and(|within| !RESPONSE_TIMEOUT.contains(&within)) {
            return Err(Fault::invalid(CONNECTING, CONNECTING_BOUNDS));
        }
        Self::with(config, within, wanted, said)
    }

    fn with(
        mut login: Config,
        within: Option<Duration>,
        wanted: Option<Wanted>,
        said: UrlSecurity,
    ) -> Result<Self, Fault> {
        let sites = Site::all(&login)?;
        // We have made the stream secure, or not, when the client library gets it.
        login
            .ssl_mode(config::SslMode::Require)
            .ssl_negotiation(SslNegotiation::Direct);
        Ok(Self {
            address: address(&sites).into(),
            sites,
            login,
            credentials: None,
            wanted,
            connect_within: within.unwrap_or(CONNECT_TIMEOUT),
            said,
            security: Security::default(),
        })
    }

    /// What the url says of certificates.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn tls(&self) -> &Tls {
        &self.said.tls
    }

    /// Takes certificates in place of those of the url.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn set_tls(&mut self, tls: Tls) {
        self.said.tls = tls;
    }

    /// Decides how connections are secured. Returns whether whoever answers is trusted.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secure(&mut self) -> Result<bool, Fault> {
        use Verify::{Chain, Full, Nothing};
        let (mode, tls) = (self.said.mode, self.said.tls.clone());
        let has_certificates = tls.is_set();
        let has_tcp = self.sites.iter().any(|site| !site.is_socket());
        if mode == SslMode::Disable || !has_tcp {
            self.security.plain = Plain::Everywhere;
            return match mode {
                _ if !has_certificates => Ok(false),
                SslMode::Disable => Err(Fault::certificates("the url says that there is no TLS")),
                _ => Err(Fault::certificates("a unix socket has no TLS")),
            };
        }
        let unverified = match tls.has_roots() {
            true => Chain,
            false => Nothing,
        };
        let (is_required, verify) = match mode {
            SslMode::Opportunistic => (has_certificates, Full),
            SslMode::Prefer => (has_certificates, unverified),
            SslMode::Require => (true, unverified),
            SslMode::VerifyCa if tls.has_roots() => (true, Chain),
            SslMode::VerifyCa => {
                return Err(Fault::url(
                    "sslmode=verify-ca needs ca_file (or sslrootcert): with the authorities of the system write \
                     verify-full",
                ));
            }
            SslMode::Unsaid | SslMode::Disable | SslMode::VerifyFull => (true, Full),
        };
        let verify = match tls.accepts_anybody() {
            true if matches!(mode, SslMode::VerifyCa | SslMode::VerifyFull) => {
                return Err(Fault::url(format!("{DANGER} contradicts sslmode")));
            }
            true => Nothing,
            false => verify,
        };
        self.security = Security {
            plain: match is_required {
                true => Plain::Nowhere,
                false => Plain::AtHome,
            },
            is_direct: self.said.is_direct,
            tls: tls.verifying(verify).into(),
        };
        let is_abroad = self.sites.iter().any(|site| !site.is_local());
        Ok(verify == Nothing && is_abroad)
    }

    /// The same without TLS.
    #[cfg(not(feature = "tls-rustls"))]
    pub(super) fn secure(&mut self) -> Result<bool, Fault> {
        self.security.plain = match self.said.mode {
            SslMode::Disable => Plain::Everywhere,
            SslMode::Opportunistic | SslMode::Prefer => Plain::AtHome,
            _ => return Err(Fault::url("TLS needs the feature `tls-rustls`")),
        };
        Ok(false)
    }

    /// Says in the server's list of connections what this is.
    pub(super) fn name(&mut self, name: &str) {
        if self.login.get_application_name().is_none() {
            self.login.application_name(name);
        }
    }

    pub(super) fn shuffles(&self) -> bool {
        self.login.get_load_balance_hosts() == LoadBalanceHosts::Random
    }

    /// As whom to connect now.
    pub(super) fn login(&self) -> Config {
        let mut login = self.login.clone();
        if let Some(newest) = &self.credentials {
            let newest = newest.borrow();
            if !newest.user().is_empty() {
                login.user(newest.user());
            }
            login.password(newest.password());
        }
        login
    }
}

impl Site {
    /// The hosts of a `Config`, each with its address and port.
    fn all(config: &Config) -> Result<Vec<Self>, String> {
        let (hosts, addresses, ports) = (
            config.get_hosts(),
            config.get_hostaddrs(),
            config.get_ports(),
        );
        let count = hosts.len().max(addresses.len());
        if count == 0 {
            return Err("it has no host".to_owned());
        }
        // What follows the first @ is the host to the client library, and hosts are shown.
        let is_torn = |host: &Host| matches!(host, Host::Tcp(name) if name.contains('@'));
        if hosts.iter().any(is_torn) {
            let reason = "an @ of the user or password must be percent-encoded (%40)";
            return Err(reason.to_owned());
        }
        if !hosts.is_empty() && !addresses.is_empty() && hosts.len() != addresses.len() {
            let (hosts, addresses) = (hosts.len(), addresses.len());
            return Err(format!("it has {hosts} hosts, and {addresses} hostaddrs"));
        }
        if ports.len() > 1 && ports.len() != count {
            return Err(format!("it has {count} hosts, and {} ports", ports.len()));
        }
        let one = |index| Self {
            host: hosts.get(index).cloned(),
            address: addresses.get(index).copied(),
            port: *ports.get(index).or(ports.first()).unwrap_or(&5432),
        };
        Ok((0..count).map(one).collect())
    }
}

/// Hosts and ports, for errors.
fn address(sites: &[Site]) -> String {
    let names = sites.iter().map(|site| {
        let host = match (&site.host, &site.address) {
            (Some(Host::Tcp(host)), _) => host.clone(),
            #[cfg(unix)]
            (Some(Host::Unix(folder)), _) => folder.display().to_string(),
            (None, Some(address)) => address.to_string(),
            (None, None) => String::new(),
        };
        // An IPv6 address has colons of its own.
        match host.contains(':') && !host.starts_with('/') {
            true => format!("[{host}]:{}", site.port),
            false => format!("{host}:{}", site.port),
        }
    });
    names.collect::<Vec<_>>().join(",")
}
