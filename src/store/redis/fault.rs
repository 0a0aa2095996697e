//! What goes wrong between us and a server, and whether asking again may help.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use redis::{ErrorKind, RedisError, ServerError};

use super::keys::Names;
use crate::StoreError;

/// Everything that a [`StoreError`] of this store may hold. No variant shows a password: the
/// address is host and port alone, and servers do not send passwords back.
///
/// Each says all of it in its own line. What it stands on is therefore no `source()`: whoever follows those would
/// read it twice. (`r#source` is the same name, and one that the derive passes over.)
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("not a Redis url: {reason}")]
    Url { reason: String },
    /// Nothing of them is shown.
    #[cfg(feature = "tls-rustls")]
    #[error("the certificates cannot be used: {reason}")]
    Certificates { reason: String },
    #[error(
        "cannot connect to Redis at {address}: {}{}{}",
        explained(r#source),
        brief(r#source.to_string()),
        supposed(r#source, *is_tls)
    )]
    Connect {
        address: Arc<str>,
        is_tls: bool,
        r#source: RedisError,
    },
    #[error(
        "cannot connect to Redis at {address}: tokio's clock is paused, so connecting timed out at \
         once; a Redis store needs real time, use MemoryStore under a paused clock"
    )]
    PausedClock { address: Arc<str> },
    #[error("Redis at {address} did not answer within {within:?}")]
    Silent { address: Arc<str>, within: Duration },
    #[error("the connection to Redis at {address} broke: {}", brief(r#source.to_string()))]
    Broken {
        address: Arc<str>,
        r#source: RedisError,
    },
    #[error("the connection to Redis at {address} was closed")]
    Closed { address: Arc<str> },
    #[error("the connection to Redis at {address} was given up: {what}")]
    Garbled {
        address: Arc<str>,
        what: &'static str,
    },
    /// None of them says where the primary is.
    #[cfg(feature = "sentinel")]
    #[error("no sentinel says where the primary of service {service:?} is: {told}")]
    Sentinels {
        service: Arc<str>,
        told: String,
        is_lasting: bool,
    },
    /// None of them says where the slots are.
    #[cfg(feature = "cluster")]
    #[error("no node of the cluster says where its slots are: {told}")]
    Nodes { told: String, is_lasting: bool },
    /// A sentinel said that it was.
    #[cfg(feature = "sentinel")]
    #[error("Redis at {address} is no primary, or no more")]
    NotPrimary { address: Arc<str> },
    /// What [`RedisStoreBuilder::min_replicas`](super::RedisStoreBuilder::min_replicas) was given.
    #[error("min_replicas cannot be as it is: {reason}")]
    Replicas { reason: String },
    #[error("busy_poll cannot be {within:?}: it is 1 ms at most")]
    BusyPoll { within: Duration },
    #[error(
        "the lock was given back: {had} of the {least} replicas of Redis at {address} that are to have it \
         had it within {within:?}"
    )]
    TooFew {
        address: Arc<str>,
        had: u64,
        least: u32,
        within: Duration,
    },
    #[error("the lock was gone before the replicas of Redis at {address} could be asked for it")]
    Gone { address: Arc<str> },
    #[error(
        "the lock was given back: its replicas could not be asked: {}",
        r#source
    )]
    Unasked { r#source: Box<Fault> },
    #[error("the lock was given back: too many wait for their replicas")]
    TooMany,
    #[error("Redis at {address} refused: {refusal}")]
    Refused { address: Arc<str>, refusal: Refusal },
    #[error(
        "Redis at {address} is a node of a cluster, or stands before one, and was taken for a server of its own: \
         RedisStore::cluster and redis+cluster:// find all nodes ({refusal})"
    )]
    Clustered { address: Arc<str>, refusal: Refusal },
    #[error(
        "the connection to Redis at {address} was given up: its registry or its runtime has gone"
    )]
    Abandoned { address: Arc<str> },
}

impl Fault {
    /// A server's no to a script, where it is taken for one server. A cluster's node says it of some keys
    /// only, and of any that are not all in one slot: never is it enough, but under a prefix that keeps all
    /// in one, whose owner may change.
    pub(super) fn refused(address: Arc<str>, refusal: Refusal, names: &Names) -> Self {
        let is_clusters = matches!(&*refusal.code, "MOVED" | "ASK" | "CROSSSLOT");
        if is_clusters && !crate::key::has_hash_tag(names.prefix()) {
            Self::Clustered { address, refusal }
        } else {
            Self::Refused { address, refusal }
        }
    }

    pub(super) fn is_lasting(&self) -> bool {
        match self {
            Self::Url { .. } | Self::Replicas { .. } | Self::BusyPoll { .. } => true,
            Self::Clustered { .. } => true,
            Self::Unasked { source } => source.is_lasting(),
            #[cfg(feature = "sentinel")]
            Self::Sentinels { is_lasting, .. } => *is_lasting,
            #[cfg(feature = "cluster")]
            Self::Nodes { is_lasting, .. } => *is_lasting,
            #[cfg(feature = "tls-rustls")]
            Self::Certificates { .. } => true,
            Self::Refused { refusal, .. } => refusal.is_lasting(),
            Self::Connect { source, .. } => match source.kind() {
                ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => true,
                _ if disbelief(source).is_some() => true,
                _ => Refusal::of(source).is_some_and(|refusal| refusal.is_lasting()),
            },
            _ => false,
        }
    }
}

#[cfg(feature = "tls-rustls")]
use super::tls::disbelief;

/// Without TLS nobody asks for a certificate.
#[cfg(not(feature = "tls-rustls"))]
fn disbelief(_: &RedisError) -> Option<&'static str> {
    None
}

/// So many of several errors are told in one.
#[cfg(any(feature = "cluster", feature = "sentinel"))]
const TOLD: usize = 5;

/// The first of these, and how many there are besides.
#[cfg(any(feature = "cluster", feature = "sentinel"))]
pub(super) fn listed(all: &[String], between: &str) -> String {
    let mut told = all[..all.len().min(TOLD)].join(between);
    if let Some(more @ 1..) = all.len().checked_sub(TOLD) {
        write!(told, "{between}and {more} more").expect("a String takes everything");
    }
    told
}

/// So many characters of a server's words are told, and kept.
const WORDS: usize = 400;

/// What a server says, in one line of a length that a log can take.
fn brief(mut text: String) -> String {
    if let Some((end, _)) = text.char_indices().nth(WORDS) {
        text.truncate(end);
        text.push('…');
    }
    if text.contains(char::is_control) {
        text = text.replace(char::is_control, " ");
    }
    text
}

/// What the error is about, where its own words do not say what to do.
fn explained(error: &RedisError) -> String {
    let no_password = "the server wants a password, as in redis://[user:]password@host";
    let wants_one = Refusal::of(error).is_some_and(|refusal| refusal.code == "NOAUTH");
    let why = disbelief(error).or(wants_one.then_some(no_password));
    why.map_or_else(String::new, |why| format!("{why}: "))
}

/// What it may come of, where that cannot be seen.
fn supposed(error: &RedisError, is_tls: bool) -> &'static str {
    if is_tls && error.is_timeout() {
        " (as when what listens there speaks no TLS)"
    } else if !is_tls && error.is_connection_dropped() && !error.is_connection_refusal() {
        " (as when what listens there wants TLS, rediss://)"
    } else {
        ""
    }
}

impl From<Fault> for StoreError {
    fn from(fault: Fault) -> Self {
        if fault.is_lasting() {
            Self::lasting(fault)
        } else {
            Self::new(fault)
        }
    }
}

/// How servers say within scripts that a right is missing: Redis to 7.2, and all others.
const IN_SCRIPTS: [&str; 2] = [
    "The user executing the script can't",
    "ACL failure in script",
];

/// The same of a command in the making of a connection, whose code the client drops.
const NO_PERMISSIONS: &str = "no permissions to run";

/// A server's no, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{code} {text}")]
pub(super) struct Refusal {
    code: String,
    text: String,
}

impl Refusal {
    /// Reads an error as a script caught it.
    pub(super) fn parse(message: &str) -> Self {
        // Servers before 7 begin with the place in the script: "@user_script: 12: -READONLY …".
        let message = match message.strip_prefix('@') {
            Some(rest) => rest.splitn(3, ": ").nth(2).unwrap_or(rest),
            None => message,
        };
        let message = message.trim().trim_start_matches('-');
        // In scripts a missing right comes as a plain ERR, and before 7 without any code.
        let plain = message.strip_prefix("ERR ").unwrap_or(message);
        let (code, text) = if IN_SCRIPTS
            .iter()
            .any(|no_right| plain.starts_with(no_right))
        {
            ("NOPERM", plain)
        } else {
            message.split_once(' ').unwrap_or((message, ""))
        };
        Self::new(code, text)
    }

    fn new(code: &str, text: &str) -> Self {
        Self {
            code: brief(code.to_owned()),
            text: brief(text.to_owned()),
        }
    }

    /// The refusal in an error that the client made of a server's reply; `None` if there is none.
    pub(super) fn of(error: &RedisError) -> Option<Self> {
        match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension => {
                let text = error
                    .detail()
                    .map_or_else(|| error.to_string(), str::to_owned);
                let code = match error.code().unwrap_or("ERR") {
                    "ERR" if text.contains(NO_PERMISSIONS) => "NOPERM",
                    code => code,
                };
                Some(Self::new(code, &text))
            }
            _ => None,
        }
    }

    pub(super) fn code(&self) -> &str {
        &self.code
    }

    /// What follows the code.
    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Names the keys or channels that a right is missing to, which no server does.
    pub(super) fn naming(mut self, names: &Names) -> Self {
        if self.code == "NOPERM" {
            let prefix = names.prefix();
            if self.text.contains("key") {
                write!(self.text, " (it takes ~{prefix}:* and ~{{{prefix}:*)")
            } else if self.text.contains("channel") {
                write!(self.text, " (it takes &{prefix}:~grant:*)")
            } else {
                Ok(())
            }
            .expect("a String takes everything");
        }
        self
    }

    /// A missing right, a wrong password, a foreign key in our place, a cluster, a server without
    /// scripts or databases: no reason to ask again.
    pub(super) fn is_lasting(&self) -> bool {
        match self.code.as_str() {
            "NOPERM" | "NOAUTH" | "WRONGPASS" | "WRONGTYPE" | "CROSSSLOT" => true,
            "ERR" => [
                "unknown command",
                "DB index",
                "This instance has cluster support disabled",
            ]
            .iter()
            .any(|begin| self.text.starts_with(begin)),
            _ => false,
        }
    }

    /// Whether a whole call may have been refused for the sake of one of its keys.
    pub(super) fn may_be_one_keys(&self) -> bool {
        matches!(self.code.as_str(), "NOPERM" | "CROSSSLOT")
    }

    /// Whether this is what HELLO is answered where nobody knows it, or its third version. (A full
    /// server says ERR to it as well, and would say that to anything.)
    pub(super) fn is_about_hello(&self) -> bool {
        let text = self.text.to_ascii_lowercase();
        self.code == "NOPROTO"
            || self.code == "ERR" && (text.contains("command") || text.contains("hello"))
    }

    /// Whether the server is no longer the one that we knew: this counts as a reconnect (O4).
    pub(super) fn ends_connection(&self) -> bool {
        matches!(self.code.as_str(), "READONLY" | "LOADING" | "MOVED")
    }
}

impl From<&ServerError> for Refusal {
    fn from(error: &ServerError) -> Self {
        Self::parse(&format!(
            "{} {}",
            error.code(),
            error.details().unwrap_or_default()
        ))
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
            source,
        };
        let unasked = Fault::Unasked {
            source: Box::new(broken.clone()),
        };
        for fault in [broken, refused, unasked] {
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
            "é".repeat(WORDS / 2),
            "x".repeat(1 << 20)
        );
        let refusal = Refusal::parse(&long);
        assert_eq!(refusal.code, "OOM");
        assert_eq!(refusal.text.chars().count(), WORDS + 1);
        assert!(!refusal.text.contains(char::is_control), "{refusal}");
        let code = "x".repeat(1 << 20);
        assert!(Refusal::parse(&code).to_string().len() < 2 * WORDS);
        let short = "READONLY You can't write against a read only replica.";
        assert_eq!(Refusal::parse(short).to_string(), short);
        let source = RedisError::from((ErrorKind::Client, "no", code));
        let address = Arc::from("a:1");
        let broken = Fault::Broken { address, source };
        assert!(broken.to_string().len() < 2 * WORDS);
    }

    #[cfg(any(feature = "cluster", feature = "sentinel"))]
    #[test]
    fn of_many_some_are_named_and_the_others_counted() {
        let all: Vec<_> = (1..=8).map(|number| number.to_string()).collect();
        assert_eq!(listed(&all, "; "), "1; 2; 3; 4; 5; and 3 more");
        assert_eq!(listed(&all[..5], "; "), "1; 2; 3; 4; 5");
        assert_eq!(listed(&all[..1], "; "), "1");
    }

    #[test]
    fn refusals_are_read_as_every_server_writes_them() {
        for message in [
            "READONLY You can't write against a read only replica.",
            "-READONLY You can't write against a read only replica.\r\n",
            "@user_script: 12: -READONLY You can't write against a read only replica.\r\n",
        ] {
            let refusal = Refusal::parse(message);
            assert_eq!(refusal.code, "READONLY", "{message}");
            assert!(refusal.ends_connection() && !refusal.is_lasting());
        }
        for right in [
            "ERR The user executing the script can't run this command or subcommand",
            "@user_script: 1: The user executing the script can't run this command or subcommand",
            "ERR ACL failure in script: User x has no permissions to run the 'del' command",
            "ERR ACL failure in script: No permissions to access a key",
        ] {
            let refusal = Refusal::parse(right);
            assert!(refusal.is_lasting() && refusal.code == "NOPERM", "{right}");
        }
        assert!(Refusal::parse("WRONGTYPE Operation against a key").is_lasting());
        assert!(Refusal::parse("ERR unknown command 'EVALSHA', with args").is_lasting());
        assert!(Refusal::parse("ERR unknown command 'HELLO'").is_about_hello());
        assert!(!Refusal::parse("ERR max number of clients reached").is_about_hello());
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
            let refusal = Refusal::parse(code);
            assert!(
                !refusal.is_lasting() && !refusal.ends_connection(),
                "{code}"
            );
        }
    }
}
