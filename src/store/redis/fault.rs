//! Errors between a session and a server, and whether a retry may help.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerError};

use super::keys::Names;
use crate::base::StoreError;
use crate::store::attempts::Failed;

/// The content of a [`StoreError`] of this store. No variant shows a password: an address is host and port, and
/// servers do not send passwords back.
///
/// A message includes its cause, so the cause is no `source()`. (`r#source` is a name that the derive ignores.)
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    /// Errors that nobody matches on.
    #[error("{text}")]
    Told { text: String, is_lasting: bool },
    #[error(
        "cannot connect to Redis at {address}: {}{}",
        brief(&r#source.to_string()),
        hint(r#source, *is_tls).map_or_else(String::new, |hint| format!(" ({hint})"))
    )]
    Connect {
        address: Arc<str>,
        is_tls: bool,
        /// Whether other credentials may follow those that were used.
        rotates: bool,
        r#source: RedisError,
    },
    #[error("Redis at {address} did not answer within {within:?}")]
    Silent { address: Arc<str>, within: Duration },
    #[error("connection to Redis at {address} broke: {}", brief(&r#source.to_string()))]
    Broken {
        address: Arc<str>,
        r#source: RedisError,
    },
    #[error("connection to Redis at {address} was closed")]
    Closed { address: Arc<str> },
    /// The session ends the connection.
    #[error("connection to Redis at {address} was given up: {what}")]
    Garbled {
        address: Arc<str>,
        what: &'static str,
    },
    #[error("Redis at {address} refused: {refusal}")]
    Refused {
        address: Arc<str>,
        refusal: ErrorReply,
    },
}

impl Fault {
    /// The configuration cannot be used.
    pub(super) fn invalid(what: &str, reason: impl fmt::Display) -> Self {
        Self::told(format!("invalid {what}: {reason}"), true)
    }

    pub(super) fn url(reason: impl fmt::Display) -> Self {
        Self::invalid("Redis url", reason)
    }

    /// The session ends the connection, because the server is not what it should be.
    pub(super) fn garbled(address: &Arc<str>, what: &'static str) -> Self {
        let address = address.clone();
        Self::Garbled { address, what }
    }

    pub(super) fn refused(address: &Arc<str>, refusal: impl Into<ErrorReply>) -> Self {
        let (address, refusal) = (address.clone(), refusal.into());
        Self::Refused { address, refusal }
    }

    pub(super) fn not_primary(address: &Arc<str>) -> Self {
        Self::told(format!("Redis at {address} is not a primary"), false)
    }

    /// Too few replicas are known to have a lock.
    pub(super) fn unconfirmed(reason: impl fmt::Display, is_lasting: bool) -> Self {
        let text = format!("lock not confirmed by replicas: {reason}");
        Self::told(text, is_lasting)
    }

    pub(super) fn no_credentials(address: &Arc<str>, reason: impl fmt::Display) -> Self {
        let text = format!("no credentials for Redis at {address}: {reason}");
        Self::told(text, false)
    }

    pub(super) fn silent(address: &Arc<str>, within: Duration) -> Self {
        let address = address.clone();
        Self::Silent { address, within }
    }

    /// A proxy sends keys to several servers, and one call to the server of its first key.
    pub(super) fn spread(address: &Arc<str>) -> Self {
        let text = format!(
            "Redis at {address} cannot be used: it is a proxy that spreads keys over several servers. Give the url of \
             one server, or of a cluster: redis+cluster://host:port,host:port/"
        );
        Self::told(text, true)
    }

    pub(super) fn told(text: String, is_lasting: bool) -> Self {
        Self::Told { text, is_lasting }
    }

    /// All attempts have failed, or `late` says why those that did not were given up. `told` is about several.
    pub(super) fn of_attempts(
        failed: Failed<Self>,
        late: impl FnOnce() -> Self,
        told: impl fmt::Display,
    ) -> Self {
        let mut faults = failed.errors;
        if failed.is_late {
            faults.insert(0, late());
        }
        match &faults[..] {
            [_] => faults.swap_remove(0),
            faults => Self::listing(told, faults),
        }
    }

    /// Several that were asked have failed, and why.
    pub(super) fn listing(told: impl fmt::Display, faults: &[Self]) -> Self {
        let mut answers: Vec<_> = faults.iter().take(LISTED).map(Self::to_string).collect();
        if let Some(more @ 1..) = faults.len().checked_sub(LISTED) {
            answers.push(format!("and {more} more"));
        }
        let text = format!("{told}: {}", answers.join("; "));
        // Those that are down may know it.
        Self::told(text, faults.iter().all(Self::is_lasting))
    }

    /// Whether a retry cannot help.
    pub(super) fn is_lasting(&self) -> bool {
        match self {
            Self::Told { is_lasting, .. } => *is_lasting,
            Self::Refused { refusal, .. } => refusal.is_lasting(),
            Self::Connect {
                source,
                rotates: true,
                ..
            } if is_about_login(source) => false,
            Self::Connect { source, .. } => match source.kind() {
                ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => true,
                _ if rejection(source).is_some() => true,
                _ => ErrorReply::of(source).is_some_and(|refusal| refusal.is_lasting()),
            },
            _ => false,
        }
    }
}

/// Whether the server wants another user or password.
fn is_about_login(error: &RedisError) -> bool {
    let code = ErrorReply::of(error).map(|refusal| refusal.code);
    error.kind() == ErrorKind::AuthenticationFailed
        || code.is_some_and(|code| matches!(&*code, "NOAUTH" | "WRONGPASS"))
}

#[cfg(feature = "tls-rustls")]
fn rejection(error: &RedisError) -> Option<&'static str> {
    // The client library keeps the source in an `Arc` which is an error itself.
    let source = std::error::Error::source(error)?;
    let source = source.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>()?;
    crate::store::tls::rejection(&**source)
}

#[cfg(not(feature = "tls-rustls"))]
fn rejection(_: &RedisError) -> Option<&'static str> {
    None
}

/// Connected, and then no answer.
pub(super) const SILENT: &str = "timed out after it accepted the connection";

/// The cause of a failed attempt to connect, if the error itself does not name it.
fn hint(error: &RedisError, is_tls: bool) -> Option<&'static str> {
    if ErrorReply::of(error).is_some_and(|refusal| refusal.code == "NOAUTH") {
        Some("the server requires a password")
    } else if is_tls && (error.is_timeout() || error.to_string().contains("handshake eof")) {
        Some("the server may not speak TLS")
    } else if error.to_string().contains(SILENT) {
        Some("it hangs, is no Redis server, or expects TLS: rediss://")
    } else if !is_tls && error.is_connection_dropped() && !error.is_connection_refusal() {
        Some("the server may require TLS")
    } else {
        rejection(error)
    }
}

/// How many of several errors are reported in one.
const LISTED: usize = 5;

/// How many characters of a server's text are kept.
const LONGEST_TEXT: usize = 400;

/// One line of a length that fits a log.
fn brief(text: &str) -> String {
    let text = match text.char_indices().nth(LONGEST_TEXT) {
        Some((end, _)) => &format!("{}…", &text[..end]),
        None => text,
    };
    text.replace(char::is_control, " ")
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        match fault.is_lasting() {
            true => Self::lasting(fault),
            false => Self::new(fault),
        }
    }
}

/// How servers report a missing right without an error code: in scripts, Redis up to 7.2 and all others; and for a
/// command that sets up a connection, whose code the client library drops.
const NO_RIGHT: [&str; 3] = [
    "The user executing the script can't",
    "ACL failure in script",
    "no permissions to run",
];

/// The error that a server answered with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code} {text}")]
pub(super) struct ErrorReply {
    code: String,
    text: String,
}

impl ErrorReply {
    /// Reads an error as a server sent it, or as a script caught it.
    pub(super) fn parse(message: &str) -> Self {
        // Servers before 7 begin with the place in the script: "@user_script: 12: -READONLY …".
        let message = match message.strip_prefix('@') {
            Some(rest) => rest.splitn(3, ": ").nth(2).unwrap_or(rest),
            None => message,
        };
        let message = message.trim().trim_start_matches('-');
        // A missing right may come as a plain ERR, and in scripts before 7 without any code.
        let plain = message.strip_prefix("ERR ").unwrap_or(message);
        let lacks_right = NO_RIGHT.iter().any(|it| plain.contains(it));
        let (code, text) = match message.split_once(' ').unwrap_or((message, "")) {
            ("ERR" | "The" | "ACL", _) if lacks_right => ("NOPERM", plain),
            known => known,
        };
        let (code, text) = (brief(code), brief(text));
        Self { code, text }
    }

    /// The error reply inside an error of the client library.
    pub(super) fn of(error: &RedisError) -> Option<Self> {
        let is_servers = matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension);
        let code = error.code().unwrap_or("ERR");
        let text = error.detail().map_or_else(|| error.to_string(), Into::into);
        is_servers.then(|| Self::parse(&format!("{code} {text}")))
    }

    pub(super) fn code(&self) -> &str {
        &self.code
    }

    /// What follows the code.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Adds the keys or channels to which a right is missing. No server names them.
    pub(super) fn naming(mut self, names: &Names) -> Self {
        let prefix = names.prefix();
        if self.code == "NOPERM" && self.text.contains("key") {
            self.text += &format!(" (it takes ~{prefix}:* and ~{{{prefix}:*)");
        } else if self.code == "NOPERM" && self.text.contains("channel") {
            self.text += &format!(" (it takes &{prefix}:~grant:*)");
        }
        self
    }

    /// A missing right, a wrong password, a key of another type, a cluster, a server without scripts or databases: a
    /// retry does not help.
    pub(super) fn is_lasting(&self) -> bool {
        match self.code.as_str() {
            "NOPERM" | "NOAUTH" | "WRONGPASS" | "WRONGTYPE" | "CROSSSLOT" => true,
            "ERR" => {
                let lasting = [
                    "unknown command",
                    "DB index",
                    "This instance has cluster support disabled",
                ];
                lasting.iter().any(|begin| self.text.starts_with(begin))
            }
            _ => false,
        }
    }

    /// Whether the server does not know HELLO, or its version 3. (A full server also answers ERR to it, and would to
    /// any command.)
    pub(super) fn is_about_hello(&self) -> bool {
        let text = self.text.to_ascii_lowercase();
        self.code == "NOPROTO"
            || self.code == "ERR" && (text.contains("command") || text.contains("hello"))
    }

    /// Whether the server has changed its role or identity: this counts as a reconnect (O4).
    pub(super) fn ends_connection(&self) -> bool {
        matches!(self.code.as_str(), "READONLY" | "LOADING" | "MOVED")
    }
}

impl From<&ServerError> for ErrorReply {
    fn from(error: &ServerError) -> Self {
        let details = error.details().unwrap_or_default();
        Self::parse(&format!("{} {details}", error.code()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        use std::error::Error;
        let io = std::io::Error::other("the cable is cut");
        let (address, source) = (Arc::<str>::from("a:1"), RedisError::from(io));
        let broken = Fault::Broken {
            address: address.clone(),
            source: source.clone(),
        };
        let refused = Fault::Connect {
            address,
            is_tls: false,
            rotates: false,
            source,
        };
        let unconfirmed = Fault::unconfirmed(&broken, false);
        for fault in [broken, refused, unconfirmed] {
            let error = StoreError::from(fault);
            let told = error.to_string();
            assert_eq!(told.matches("the cable is cut").count(), 1, "{told}");
            assert!(error.source().is_none(), "{:?}", error.source());
        }
    }

    #[test]
    fn a_server_s_words_are_one_line_that_a_log_can_take() {
        let long = format!(
            "OOM {}\r\n\u{1b}[2J{}",
            "é".repeat(LONGEST_TEXT / 2),
            "x".repeat(1 << 20)
        );
        let refusal = ErrorReply::parse(&long);
        assert_eq!(refusal.code, "OOM");
        assert_eq!(refusal.text.chars().count(), LONGEST_TEXT + 1);
        assert!(!refusal.text.contains(char::is_control), "{refusal}");
        let code = "x".repeat(1 << 20);
        assert!(ErrorReply::parse(&code).to_string().len() < 2 * LONGEST_TEXT);
        let short = "READONLY You can't write against a read only replica.";
        assert_eq!(ErrorReply::parse(short).to_string(), short);
        let source = RedisError::from((ErrorKind::Client, "no", code));
        let address = Arc::from("a:1");
        let broken = Fault::Broken { address, source };
        assert!(broken.to_string().len() < 2 * LONGEST_TEXT);
    }

    #[test]
    fn of_many_some_are_named_and_the_others_counted() {
        let fault = |what: usize| Fault::url(what);
        let told =
            |count| Fault::listing("it not found", &(1..=count).map(fault).collect::<Vec<_>>());
        let told = |count| told(count).to_string().replace("invalid Redis url: ", "");
        assert_eq!(told(8), "it not found: 1; 2; 3; 4; 5; and 3 more");
        assert_eq!(told(5), "it not found: 1; 2; 3; 4; 5");
        assert_eq!(told(1), "it not found: 1");
    }

    #[test]
    fn refusals_are_read_as_every_server_writes_them() {
        for message in [
            "READONLY You can't write against a read only replica.",
            "-READONLY You can't write against a read only replica.\r\n",
            "@user_script: 12: -READONLY You can't write against a read only replica.\r\n",
        ] {
            let refusal = ErrorReply::parse(message);
            assert_eq!(refusal.code, "READONLY", "{message}");
            assert!(refusal.ends_connection() && !refusal.is_lasting());
        }
        for right in [
            "ERR The user executing the script can't run this command or subcommand",
            "@user_script: 1: The user executing the script can't run this command or subcommand",
            "ACL failure in script: No permissions to access a key",
            "ERR ACL failure in script: User x has no permissions to run the 'del' command",
            "ERR ACL failure in script: No permissions to access a key",
        ] {
            let refusal = ErrorReply::parse(right);
            assert!(refusal.is_lasting() && refusal.code == "NOPERM", "{right}");
        }
        assert!(ErrorReply::parse("WRONGTYPE Operation against a key").is_lasting());
        assert!(ErrorReply::parse("ERR unknown command 'EVALSHA', with args").is_lasting());
        assert!(ErrorReply::parse("ERR unknown command 'HELLO'").is_about_hello());
        assert!(!ErrorReply::parse("ERR max number of clients reached").is_about_hello());
        for code in [
            "BUSY",
            "TRYAGAIN",
            "CLUSTERDOWN",
            "NOREPLICAS",
            "OOM",
            "MISCONF",
            "MASTERDOWN",
            "ERR",
            "",
        ] {
            let refusal = ErrorReply::parse(code);
            assert!(
                !refusal.is_lasting() && !refusal.ends_connection(),
                "{code}"
            );
        }
    }
}
