//! What a url says beside host and port, and what others write there.

use redis::RedisConnectionInfo;

use super::endpoint::is_host;
use crate::store::url::UrlOptions;

pub(super) const EXPECTED: &str = "redis://[[user:]password@]host[:port][/db], redis+cluster://host:port,host:port/, \
     redis+sentinel://host,host/service or unix:///path[?db=&user=&pass=]";

/// Options of other libraries, and what to write in their place.
pub(super) const INSTEAD: &[(&str, &str)] = &[
    ("ssl_cert_reqs", VERIFY_INSTEAD),
    ("ssl_check_hostname", VERIFY_INSTEAD),
    ("verifyPeer", VERIFY_INSTEAD),
    ("sslmode", SSLMODE_INSTEAD),
    ("ssl-mode", SSLMODE_INSTEAD),
    ("ssl_mode", SSLMODE_INSTEAD),
    ("ssl", "write rediss:// for TLS"),
    ("tls", "write rediss:// for TLS"),
    (
        "timeout",
        "write response_timeout=, connect_timeout=, or both",
    ),
    ("socket_timeout", "write response_timeout="),
    ("read_timeout", "write response_timeout="),
    ("write_timeout", "write response_timeout="),
    ("socket_connect_timeout", "write connect_timeout="),
    ("dial_timeout", "write connect_timeout="),
    ("connectTimeout", "write connect_timeout="),
    ("client_name", "write name="),
    ("clientName", "write name="),
    ("key_prefix", "write prefix="),
    ("keyPrefix", "write prefix="),
    ("master_name", SENTINEL_INSTEAD),
    ("sentinelMasterId", SENTINEL_INSTEAD),
    ("max_connections", ONE_CONNECTION),
    ("pool_size", ONE_CONNECTION),
    ("maxPoolSize", ONE_CONNECTION),
    ("min_idle_conns", ONE_CONNECTION),
    (
        "health_check_interval",
        "leave it out, since a broken connection is noticed and made again",
    ),
    (
        "retry_on_timeout",
        "leave it out, since a broken connection is noticed and made again",
    ),
    (
        "max_retries",
        "leave it out, since a broken connection is noticed and made again",
    ),
    ("decode_responses", "leave it out, it has no meaning here"),
    ("encoding", "leave it out, it has no meaning here"),
    ("virtual_host", "leave it out, it has no meaning here"),
];

const VERIFY_INSTEAD: &str = "certificates are checked, unless danger_accept_invalid_certificates=true; ca_file= names \
     the authorities that are trusted";
const SSLMODE_INSTEAD: &str = "write rediss:// for TLS, and redis:// for none; certificates are checked, unless \
     danger_accept_invalid_certificates=true";
const SENTINEL_INSTEAD: &str = "write redis+sentinel://host,host/service";
const ONE_CONNECTION: &str = "leave it out, since a registry has one connection to each server";

/// Schemes of other libraries, and what to write in their place.
const SCHEMES: &[(&str, &str)] = &[
    ("tcp", "redis://host:port"),
    ("http", "redis://host:port"),
    ("https", "rediss://host:port"),
    ("redis-sentinel", "redis+sentinel://host,host/service"),
    ("rediss-sentinel", "rediss+sentinel://host,host/service"),
    ("sentinel", "redis+sentinel://host,host/service"),
    ("redis-cluster", "redis+cluster://host:port,host:port/"),
    ("rediss-cluster", "rediss+cluster://host:port,host:port/"),
    ("redis-socket", "unix:///path"),
    ("jdbc", "postgres://host/database"),
    (
        "postgres",
        "such urls to the store for PostgreSQL (feature `postgres`)",
    ),
    (
        "postgresql",
        "such urls to the store for PostgreSQL (feature `postgres`)",
    ),
];

/// User, password and database, in the place that urls have for them or among the options.
pub(super) fn settings(
    mut settings: RedisConnectionInfo,
    options: &mut UrlOptions,
) -> Result<RedisConnectionInfo, String> {
    if let Some(db) = options.take(&["db", "database"])? {
        let db: i64 = db.parse().map_err(|_| "db must be a number".to_owned())?;
        if settings.db() != 0 && settings.db() != db {
            return Err("the path and the option db name different databases".to_owned());
        }
        settings = settings.set_db(db);
    }
    if let Some(user) = options.take(&["user", "username"])? {
        if settings.username().is_some() {
            return Err("the user is given twice".to_owned());
        }
        settings = settings.set_username(user);
    }
    if let Some(password) = options.take(&["pass", "password"])? {
        if settings.password().is_some() {
            return Err("the password is given twice".to_owned());
        }
        settings = settings.set_password(password);
    }
    Ok(settings)
}

/// Why urls with this scheme are not taken.
pub(super) fn scheme_fault(url: &str, scheme: &str) -> Option<String> {
    if !url.contains("://") {
        let host = url.split(['/', '?']).next().unwrap_or(url);
        // Anything else may be a password.
        let has_port = |it: &str| {
            it.rsplit_once(':')
                .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
        };
        // `LockRegistry::connect` takes what names no store for Redis.
        let others = match cfg!(feature = "postgres") {
            true => "; PostgreSQL is postgres://",
            false => "",
        };
        return Some(match is_host(host) && has_port(host) {
            true => {
                format!("it has no scheme: write redis://{host}, or rediss:// for TLS{others}")
            }
            false => format!("it has no scheme; expected {EXPECTED}{others}"),
        });
    }
    if let Some((_, instead)) = SCHEMES.iter().find(|(it, _)| *it == scheme) {
        return Some(format!("{scheme}:// is not taken: write {instead}"));
    }
    let missing = match scheme {
        it if it.ends_with("+cluster") && cfg!(not(feature = "cluster")) => "cluster",
        it if it.ends_with("+sentinel") && cfg!(not(feature = "sentinel")) => "sentinel",
        "rediss" | "valkeys" if cfg!(not(feature = "tls-rustls")) => "tls-rustls",
        _ => return None,
    };
    Some(format!("it needs lockstream's feature `{missing}`"))
}
