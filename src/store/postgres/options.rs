//! What a url says behind the `?`, in the words of libpq and in ours. Nothing of it is ignored.

use std::net::IpAddr;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{ChannelBinding, Host, LoadBalanceHosts};

use crate::store::contract::RegistryOptions;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::Tls;
use crate::store::url::UrlOptions;

/// What a url says beside where the server is.
#[derive(Clone, Debug, Default)]
pub(super) struct StoreOptions {
    pub(super) registry: RegistryOptions,
    pub(super) schema: Option<String>,
    /// Whose schema is trusted though nothing else speaks for that role.
    pub(super) schema_owner: Option<String>,
    /// The url of a pooler for calls.
    pub(super) pooled: Option<String>,
    /// Whether it is itself the url of a pooler.
    pub(super) is_pooler: bool,
}

impl StoreOptions {
    /// Whether anything is said that is not for the url of a pooler.
    pub(super) fn is_of_a_store(&self) -> bool {
        let is_said = [&self.schema, &self.schema_owner, &self.pooled];
        is_said.iter().any(|it| it.is_some()) || self.registry != RegistryOptions::default()
    }
}

/// How sockets notice that a server is gone: after so many seconds of silence a connection is probed, then so often, and for
/// so many milliseconds may what was sent stay unconfirmed. 0 leaves it to the system.
fn take_probing(options: &mut UrlOptions, config: &mut Config) -> Result<(), String> {
    config.keepalives(options.take_switch(&["keepalives"])? != Some(false));
    let idle = take_number(options, &["keepalives_idle"])?.unwrap_or(5);
    config.keepalives_idle(Duration::from_secs(idle.into()));
    let interval = take_number(options, &["keepalives_interval"])?.unwrap_or(5);
    if interval > 0 {
        config.keepalives_interval(Duration::from_secs(interval.into()));
    }
    let count = take_number(options, &["keepalives_count", "keepalives_retries"])?.unwrap_or(2);
    if count > 0 {
        config.keepalives_retries(count);
    }
    let unconfirmed = take_number(options, &["tcp_user_timeout"])?.unwrap_or(11_000);
    if unconfirmed > 0 {
        config.tcp_user_timeout(Duration::from_millis(unconfirmed.into()));
    }
    Ok(())
}

fn take_number(options: &mut UrlOptions, names: &[&str]) -> Result<Option<u32>, String> {
    let Some(value) = options.take(names)? else {
        return Ok(None);
    };
    let unit = match names[0] {
        "keepalives_count" => "",
        "tcp_user_timeout" => " of milliseconds, as in libpq",
        _ => " of seconds, as in libpq",
    };
    let refused = |_| format!("{} must be a number{unit}", names[0]);
    value.parse().map(Some).map_err(refused)
}

/// Which server is taken, of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// One whose sessions may write.
    Writable,
    /// One that is no standby, whatever else keeps it from writing.
    Primary,
}

impl Wanted {
    pub(super) fn take(options: &mut UrlOptions) -> Result<Option<Self>, String> {
        let value = options.take(&["target_session_attrs"])?;
        match value.as_deref() {
            // Whatever else is there cannot hold a lock.
            None | Some("any") => Ok(None),
            Some("read-write") => Ok(Some(Self::Writable)),
            Some("primary") => Ok(Some(Self::Primary)),
            Some("read-only" | "standby" | "prefer-standby") => Err(STANDBY.to_owned()),
            Some(_) => Err(
                "target_session_attrs must be any, read-write or primary (a lock is written)"
                    .to_owned(),
            ),
        }
    }
}

/// Why a server that cannot write is not looked for.
pub(super) const STANDBY: &str = "target_session_attrs asks for a server that does not write, and a lock is written: \
                                  leave it out, or write read-write";

/// What the url says of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SslMode {
    /// Nothing: the certificate is checked.
    Unsaid,
    /// A `Config` that was not set up by a url, and may use plain text if the server has no TLS.
    Opportunistic,
    Disable,
    /// Or `allow`.
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl SslMode {
    fn take(options: &mut UrlOptions) -> Result<Self, String> {
        let value = options.take(&["sslmode", "ssl-mode"])?;
        Ok(match value.as_deref() {
            None => Self::Unsaid,
            Some("disable") => Self::Disable,
            Some("allow" | "prefer") => Self::Prefer,
            Some("require") => Self::Require,
            Some("verify-ca") => Self::VerifyCa,
            Some("verify-full") => Self::VerifyFull,
            Some("no-verify") => {
                return Err(
                    "sslmode=no-verify is written sslmode=require (encrypted, and the certificate is not checked)"
                        .to_owned(),
                );
            }
            Some(_) => {
                return Err(
                    "sslmode must be disable, allow, prefer, require, verify-ca or verify-full"
                        .to_owned(),
                );
            }
        })
    }
}

/// How connections are secured, as far as the url says it.
#[derive(Clone)]
pub(super) struct UrlSecurity {
    pub(super) mode: SslMode,
    /// TLS begins with the first byte.
    #[cfg(feature = "tls-rustls")]
    pub(super) is_direct: bool,
    #[cfg(feature = "tls-rustls")]
    pub(super) tls: Tls,
}

impl UrlSecurity {
    pub(super) fn new(mode: SslMode) -> Self {
        Self {
            mode,
            #[cfg(feature = "tls-rustls")]
            is_direct: false,
            #[cfg(feature = "tls-rustls")]
            tls: Tls::default(),
        }
    }

    #[cfg(feature = "tls-rustls")]
    pub(super) fn take(options: &mut UrlOptions) -> Result<Self, String> {
        let mut security = Self::new(SslMode::take(options)?);
        let (mode, negotiation) = (&mut security.mode, options.take(&["sslnegotiation"])?);
        security.is_direct = match negotiation.as_deref() {
            None | Some("postgres") => false,
            Some("direct") => true,
            Some(_) => return Err("sslnegotiation must be postgres or direct".to_owned()),
        };
        if security.is_direct && matches!(mode, SslMode::Disable | SslMode::Prefer) {
            let reason = "sslnegotiation=direct needs sslmode=require, verify-ca or verify-full";
            return Err(reason.to_owned());
        }
        // libpq's own name for the authorities of the system, which are the default here.
        if options.take_if("sslrootcert", "system") {
            if !matches!(mode, SslMode::Unsaid | SslMode::VerifyFull) {
                return Err("sslrootcert=system needs sslmode=verify-full".to_owned());
            }
            *mode = SslMode::VerifyFull;
        }
        security.tls = options.take_tls()?;
        if security.mode == SslMode::Disable && security.tls.is_set() {
            let reason = "sslmode=disable contradicts what is said of certificates";
            return Err(reason.to_owned());
        }
        match options.take(&["ssl_min_protocol_version"])?.as_deref() {
            None | Some("TLSv1" | "TLSv1.1" | "TLSv1.2") => {}
            Some(_) => {
                return Err("ssl_min_protocol_version: TLS 1.2 and 1.3 are spoken".to_owned());
            }
        }
        take_only(
            options,
            "sslsni",
            &["1"],
            "the server is always told the host's name",
        )?;
        take_only(
            options,
            "sslcompression",
            &["0"],
            "nothing is compressed here",
        )?;
        Ok(security)
    }

    #[cfg(not(feature = "tls-rustls"))]
    pub(super) fn take(options: &mut UrlOptions) -> Result<Self, String> {
        match SslMode::take(options)? {
            SslMode::Unsaid | SslMode::Disable => Ok(Self::new(SslMode::Disable)),
            SslMode::Prefer => Ok(Self::new(SslMode::Prefer)),
            _ => Err("TLS needs the feature `tls-rustls`".to_owned()),
        }
    }
}

/// Takes an option that may have no other values than these.
fn take_only(
    options: &mut UrlOptions,
    name: &str,
    values: &[&str],
    why: &str,
) -> Result<(), String> {
    match options.take(&[name])? {
        Some(value) if !values.contains(&&*value) => {
            Err(format!("{name} may only be {}: {why}", values.join(" or ")))
        }
        _ => Ok(()),
    }
}

const PORT: &str = "the port must be a number up to 65535";

/// Where the server is and as whom to connect: what stands before the `?`, and libpq's options that say the same.
pub(super) fn login(base: &str, options: &mut UrlOptions) -> Result<Config, String> {
    let of_url: Config = base.parse().map_err(|error: tokio_postgres::Error| {
        // The error names the part of the url, and no value of it.
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        match cause.unwrap_or_else(|| error.to_string()) {
            told if told.contains("`port`") => PORT.to_owned(),
            told => told,
        }
    })?;
    let mut config = Config::new();
    if let Some(user) = options.take(&["user"])?.as_deref().or(of_url.get_user()) {
        config.user(user);
    }
    let password = options.take(&["password"])?.map(String::into_bytes);
    if let Some(password) = password.as_deref().or(of_url.get_password()) {
        config.password(password);
    }
    if let Some(database) = options
        .take(&["dbname"])?
        .as_deref()
        .or(of_url.get_dbname())
    {
        config.dbname(database);
    }
    if let Some(hosts) = options.take(&["host"])? {
        for host in hosts.split(',') {
            config.host(host);
        }
    } else {
        for host in of_url.get_hosts() {
            match host {
                Host::Tcp(name) => config.host(name),
                #[cfg(unix)]
                Host::Unix(folder) => config.host_path(folder),
            };
        }
    }
    if let Some(addresses) = options.take(&["hostaddr"])? {
        for address in addresses.split(',') {
            let address: Result<IpAddr, _> = address.parse();
            config.hostaddr(address.map_err(|_| "hostaddr must be IP addresses".to_owned())?);
        }
    }
    if let Some(ports) = options.take(&["port"])? {
        for port in ports.split(',') {
            let port = port.parse();
            config.port(port.map_err(|_| PORT.to_owned())?);
        }
    } else {
        for port in of_url.get_ports() {
            config.port(*port);
        }
    }
    let fallback = options.take(&["fallback_application_name"])?;
    if let Some(name) = options.take(&["application_name"])?.or(fallback) {
        config.application_name(name);
    }
    if let Some(sent) = options.take(&["options"])? {
        config.options(sent);
    }
    if let Some(binding) = options.take(&["channel_binding"])? {
        config.channel_binding(match &*binding {
            "disable" => ChannelBinding::Disable,
            "prefer" => ChannelBinding::Prefer,
            "require" => ChannelBinding::Require,
            _ => return Err("channel_binding must be disable, prefer or require".to_owned()),
        });
    }
    if let Some(balance) = options.take(&["load_balance_hosts"])? {
        config.load_balance_hosts(match &*balance {
            "disable" => LoadBalanceHosts::Disable,
            "random" => LoadBalanceHosts::Random,
            _ => return Err("load_balance_hosts must be disable or random".to_owned()),
        });
    }
    let is_utf8 = &["utf8", "UTF8", "utf-8", "UTF-8", "unicode", "auto"];
    for name in ["client_encoding", "encoding"] {
        take_only(options, name, is_utf8, "the store speaks UTF8")?;
    }
    take_only(
        options,
        "gssencmode",
        &["disable"],
        "Kerberos is not spoken",
    )?;
    take_probing(options, &mut config)?;
    Ok(config)
}

/// Options of libpq and of other libraries, and what to write in their place.
const INSTEAD: &str = "\
passfile service servicefile: write user and password in the url, or use PostgresStoreBuilder::credentials
require_auth: write channel_binding=require, which only SCRAM can fulfil
channelBinding: write channel_binding
sslpassword: cert_file and key_file are in PEM, the key without a passphrase
sslidentity: write cert_file and key_file, in PEM
sslcertmode: cert_file and key_file decide it: leave it out
sslcrl sslcrldir: revocation lists are not read
ssl_max_protocol_version: TLS 1.2 and 1.3 are spoken: leave it out
requiressl: write sslmode=require
ssl ssl_require sslfactory sslhostnameverifier: write sslmode=verify-full, or another value of libpq's sslmode
uselibpqcompat: sslmode means what libpq says: leave it out
sslaccept: leave it out for strict, and write danger_accept_invalid_certificates=true for accept_invalid_certs
requirepeer: the owner of a socket is not checked: leave it out
krbsrvname gsslib gssdelegation: Kerberos is not spoken
gssEncMode: write gssencmode=disable, or leave it out
replication: leave it out
schema search_path schema_search_path currentSchema: \
it is of the data's schema, and the locks have their own: write lock_schema, or leave it out for the schema lockstream
connection_limit pool_timeout pool_max_conns pool_min_conns pool max_connections min_connections checkout_timeout \
max min: a registry has one connection, or as many lanes as the code says: leave it out
socket_timeout statement_timeout query_timeout lock_timeout command_timeout socketTimeout: \
write response_timeout, for each call of the registry, or leave it out
timeout sslResponseTimeout loginTimeout connectTimeout: write connect_timeout
statement_cache_size statement-cache-capacity statement_cache_capacity description_cache_capacity \
default_query_exec_mode prepared_statement_cache_size prepare_threshold binary_parameters prepared_statements \
statement_limit prepareThreshold preparedStatementCacheQueries preparedStatementCacheSizeMiB preferQueryMode: \
leave it out, or write pgbouncer=true if the url is that of a pooler in transaction mode: then no statement is prepared
idle_in_transaction_session_timeout server_settings timezone TimeZone datestyle min_messages variables: \
the store makes its own settings of the session: leave it out
targetServerType: a server that takes writes is looked for among several: write target_session_attrs=primary
loadBalanceHosts: write load_balance_hosts=random
readOnly: a lock is written: leave it out
reconnect: a broken connection is always made again: leave it out
tcpKeepAlive: write keepalives
ApplicationName: write application_name
max_idle_connection_lifetime pool_max_conn_lifetime pool_max_conn_idle_time adapter reaping_frequency idle_timeout \
advisory_locks conn_max_age conn_health_checks disable_server_side_cursors cancelSignalTimeout hostRecheckSeconds \
autosave stringtype binaryTransfer defaultRowFetchSize reWriteBatchedInserts: it means nothing for locks: leave it out";

/// Refuses what is left, and says what to write in its place.
pub(super) fn finish(options: UrlOptions) -> Result<(), String> {
    options.finish(|name| {
        let mut lines = INSTEAD.lines().filter_map(|line| line.split_once(": "));
        let of_name = |(names, _): &(&str, _)| names.split(' ').any(|it| it == name);
        Some(lines.find(of_name)?.1)
    })
}
