//! What a url says beside host and port, and what others write there.

use redis::RedisConnectionInfo;

use super::endpoint::is_host;
use crate::store::url::UrlOptions;

pub(super) const EXPECTED: &str = "redis://[[user:]password@]host[:port][/db], redis+cluster://host:port,host:port/, \
     redis+sentinel://host,host/service or unix:///path[?db=&user=&pass=]";

/// What to write in place of an option of another library.
pub(super) fn instead(option: &str) -> Option<&'static str> {
    Some(match option {
        "ssl_cert_reqs" | "ssl_check_hostname" | "verifyPeer" => {
            "certificates are checked, unless danger_accept_invalid_certificates=true; ca_file= names the authorities \
             that are trusted"
        }
        "sslmode" | "ssl-mode" | "ssl_mode" => {
            "write rediss:// for TLS, and redis:// for none; certificates are checked, unless \
             danger_accept_invalid_certificates=true"
        }
        "ssl" | "tls" => "write rediss:// for TLS",
        "timeout" => "write response_timeout=, connect_timeout=, or both",
        "socket_timeout" | "read_timeout" | "write_timeout" => "write response_timeout=",
        "socket_connect_timeout" | "dial_timeout" | "connectTimeout" => "write connect_timeout=",
        "client_name" | "clientName" => "write name=",
        "key_prefix" | "keyPrefix" => "write prefix=",
        "master_name" | "sentinelMasterId" => "write redis+sentinel://host,host/service",
        "max_connections" | "pool_size" | "maxPoolSize" | "min_idle_conns" => {
            "leave it out, since a registry has one connection to each server"
        }
        "health_check_interval" | "retry_on_timeout" | "max_retries" => {
            "leave it out, since a broken connection is noticed and made again"
        }
        "decode_responses" | "encoding" | "virtual_host" => "leave it out, it has no meaning here",
        _ => return None,
    })
}

/// What to write in place of a scheme of another library.
fn instead_of_scheme(scheme: &str) -> Option<&'static str> {
    Some(match scheme {
        "tcp" | "http" => "redis://host:port",
        "https" => "rediss://host:port",
        "redis-sentinel" | "sentinel" => "redis+sentinel://host,host/service",
        "rediss-sentinel" => "rediss+sentinel://host,host/service",
        "redis-cluster" => "redis+cluster://host:port,host:port/",
        "rediss-cluster" => "rediss+cluster://host:port,host:port/",
        "redis-socket" => "unix:///path",
        "jdbc" => "postgres://host/database",
        "postgres" | "postgresql" => "such urls to the store for PostgreSQL (feature `postgres`)",
        _ => return None,
    })
}

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
    if let Some(instead) = instead_of_scheme(scheme) {
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
