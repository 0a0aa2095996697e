//! Which requests are answered.
//!
//! Whoever reaches the port may look. So a page of somebody else must not reach it by the browser of who may: it asks for
//! data as another origin, or as a name of its own that it has made to lead here (DNS rebinding). Such a name is none that
//! this server has, while an address in digits cannot be made to lead elsewhere.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, HeaderName, ORIGIN, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

const CROSS_ORIGIN_RESOURCE_POLICY: HeaderName =
    HeaderName::from_static("cross-origin-resource-policy");
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The names of this server, besides `localhost` and addresses.
#[derive(Clone, Debug)]
pub(crate) struct Admission {
    hosts: Arc<[String]>,
}

impl Admission {
    pub(crate) fn new(hosts: Vec<String>) -> Self {
        Self {
            hosts: hosts.into(),
        }
    }

    /// Why a request for this path is refused, if it is.
    fn fault(&self, path: &str, headers: &HeaderMap) -> Option<&'static str> {
        let text = |name: HeaderName| {
            let value = headers.get(name)?;
            Some(value.to_str().unwrap_or("?"))
        };
        let Some(host) = text(HOST).filter(|host| self.is_ours(host)) else {
            return Some(
                "this server does not have that name: ask for its address, or start it with --allow-host",
            );
        };
        let is_of_host = |origin: &str| {
            let rest = origin
                .strip_prefix("http://")
                .or(origin.strip_prefix("https://"));
            rest.is_some_and(|it| it.eq_ignore_ascii_case(host))
        };
        if text(ORIGIN).is_some_and(|origin| !is_of_host(origin)) {
            return Some("other origins get nothing");
        }
        // A link on another page may lead to the page, and nothing else.
        let is_elsewhere = |site: &str| !["same-origin", "none"].contains(&site);
        if path != "/" && text(SEC_FETCH_SITE).is_some_and(is_elsewhere) {
            return Some("other origins get nothing");
        }
        None
    }

    /// Whether the host, with its port, leads here whoever resolves it, or is a name of this server.
    fn is_ours(&self, host: &str) -> bool {
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
            _ => host,
        };
        let address = name.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        let name = name.to_ascii_lowercase();
        address.unwrap_or(&name).parse::<IpAddr>().is_ok()
            || name == "localhost"
            || self
                .hosts
                .iter()
                .any(|ours| ours.eq_ignore_ascii_case(&name))
    }
}

/// Answers what is admitted. No other page may show or read the answers.
pub(crate) async fn admit(
    State(admission): State<Admission>,
    request: Request,
    next: Next,
) -> Response {
    let mut response = match admission.fault(request.uri().path(), request.headers()) {
        Some(fault) => (StatusCode::FORBIDDEN, format!("{fault}\n")).into_response(),
        None => next.run(request).await,
    };
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, "frame-ancestors 'none'"),
        (CROSS_ORIGIN_RESOURCE_POLICY, "same-origin"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
    ] {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(path: &str, headers: &[(&'static str, &'static str)]) -> bool {
        let headers = headers.iter().map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        });
        let admission = Admission::new(vec!["Locks.example".to_owned()]);
        admission.fault(path, &headers.collect()).is_none()
    }

    #[test]
    fn addresses_localhost_and_names_that_were_given_are_hosts() {
        for host in [
            "127.0.0.1:8080",
            "127.0.0.1",
            "[::1]:8080",
            "[::1]",
            "10.1.2.3:80",
            "localhost:8080",
            "LOCALHOST",
            "locks.example:8080",
        ] {
            assert!(admits("/", &[("host", host)]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "evil.example:8080",
            "127.0.0.1.evil.example:8080",
            "localhost.evil.example",
            "localhost:evil.example",
            "locks.example.",
            "[::1]evil.example",
            "\u{e9}",
        ] {
            assert!(!admits("/", &[("host", host)]), "{host}");
        }
        assert!(!admits("/", &[]));
    }

    #[test]
    fn other_origins_get_nothing() {
        let host = ("host", "127.0.0.1:8080");
        for path in ["/", "/events"] {
            assert!(admits(path, &[host, ("origin", "http://127.0.0.1:8080")]));
            for origin in ["http://127.0.0.1:8081", "http://evil.example", "null", ""] {
                assert!(!admits(path, &[host, ("origin", origin)]), "{origin}");
            }
            for site in ["same-origin", "none"] {
                assert!(admits(path, &[host, ("sec-fetch-site", site)]));
            }
        }
        for site in ["cross-site", "same-site"] {
            assert!(!admits("/events", &[host, ("sec-fetch-site", site)]));
            assert!(admits("/", &[host, ("sec-fetch-site", site)]), "a link");
        }
    }
}
