//! A url is read as it was written, whatever its parts are.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use redis::ConnectionAddr;

use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::sentinel::Sentinels;

fn escaped(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(escape).collect()
}

/// As it stands in a url, and as it is.
fn hosts() -> impl Strategy<Value = (String, String)> {
    prop_oneof![
        "[a-z][a-z0-9-]{0,8}(\\.[a-z]{1,5}){0,2}".prop_map(|name| (name.clone(), name)),
        [1..=223_u8, 0..=255, 0..=255, 1..=254].prop_map(|bytes| {
            let host = bytes.map(|byte| byte.to_string()).join(".");
            (host.clone(), host)
        }),
        select(vec!["::1", "2001:db8::7"]).prop_map(|host| (format!("[{host}]"), host.to_owned())),
    ]
}

/// A user, and a password of any characters.
fn users() -> impl Strategy<Value = (Option<String>, String)> {
    (option::of(".{1,8}"), ".{1,12}")
}

/// An IPv6 address has colons of its own.
fn shown(host: &str, port: u16) -> String {
    match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    }
}

fn port_of(port: Option<u16>) -> String {
    port.map_or_else(String::new, |port| format!(":{port}"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_server_is_read_as_it_was_written(
        scheme in select(vec!["redis", "rediss", "valkey", "valkeys", "REDIS", "Rediss"]),
        (written, host) in hosts(),
        port in option::of(1..=65535_u16),
        user in option::of(users()),
        db in option::of(0..16_i64),
    ) {
        let at = user.as_ref().map_or_else(String::new, |(name, password)| {
            format!("{}:{}@", escaped(name.as_deref().unwrap_or("")), escaped(password))
        });
        let path = db.map_or_else(String::new, |db| format!("/{db}"));
        let endpoint = Endpoint::parse(&format!("{scheme}://{at}{written}{}{path}", port_of(port)));
        let endpoint = endpoint.map_err(|fault| TestCaseError::fail(fault.to_string()))?;
        let info = &endpoint.info;
        let port = port.unwrap_or(6379);
        let is_tls = ["rediss", "valkeys"].contains(&&*scheme.to_ascii_lowercase());
        match info.addr() {
            ConnectionAddr::Tcp(there, at) => {
                prop_assert!(!is_tls);
                prop_assert_eq!((there, *at), (&host, port));
            }
            ConnectionAddr::TcpTls { host: there, port: at, insecure, .. } => {
                prop_assert!(is_tls && !insecure);
                prop_assert_eq!((there, *at), (&host, port));
            }
            other => prop_assert!(false, "{other}"),
        }
        let settings = info.redis_settings();
        let (name, password) = user.map_or((None, None), |(name, password)| (name, Some(password)));
        prop_assert_eq!(settings.username(), name.as_deref());
        prop_assert_eq!(settings.password(), password.as_deref());
        prop_assert_eq!(settings.db(), db.unwrap_or(0));
        prop_assert_eq!(format!("{endpoint:?}"), format!("Endpoint(\"{}\")", shown(&host, port)));
    }

    #[test]
    fn sentinels_are_read_as_they_were_written(
        scheme in select(vec!["redis+sentinel", "rediss+sentinel", "Valkey+Sentinel"]),
        all in vec((hosts(), option::of(1..=65535_u16)), 1..5),
        user in option::of(users()),
        service in "[a-z][a-zA-Z0-9 ._-]{0,20}",
        db in option::of(0..16_i64),
        watcher in option::of(users()),
    ) {
        let at = user.as_ref().map_or_else(String::new, |(name, password)| {
            format!("{}:{}@", escaped(name.as_deref().unwrap_or("")), escaped(password))
        });
        let hosts: Vec<_> = all.iter().map(|((host, _), port)| format!("{host}{}", port_of(*port))).collect();
        let path = db.map_or_else(String::new, |db| format!("/{db}"));
        let query = watcher.as_ref().map_or_else(String::new, |(name, password)| {
            let name = name.as_ref().map_or_else(String::new, |name| format!("sentinel_user={}&", escaped(name)));
            format!("?{name}sentinel_password={}", escaped(password))
        });
        let url = format!("{scheme}://{at}{}/{}{path}{query}", hosts.join(","), escaped(&service));
        let sentinels = Sentinels::parse(&url).map_err(|fault| TestCaseError::fail(fault.to_string()))?;
        let settings = sentinels.server.info.redis_settings().clone();
        let (name, password) = user.map_or((None, None), |(name, password)| (name, Some(password)));
        prop_assert_eq!(settings.username(), name.as_deref());
        prop_assert_eq!(settings.password(), password.as_deref());
        prop_assert_eq!(settings.db(), db.unwrap_or(0));
        let all: Vec<_> = all.iter().map(|((_, host), port)| shown(host, port.unwrap_or(26379))).collect();
        let told = format!("{}/{service}", all.join(","));
        prop_assert_eq!(&*sentinels.server.address, &told);
    }
}
