//! Sentinels, who say where the primary of a service is just now.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::{
    Client, ConnectionAddr, ConnectionInfo, PushInfo, PushKind, RedisConnectionInfo, Value, cmd,
};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::{sleep, timeout};

use super::endpoint::{Endpoint, Opener, at_once, is_host};
use super::fault::{Fault, listed};
use super::socket::Socket;
#[cfg(feature = "tls-rustls")]
use super::tls::Certificates;

/// What a url looks like, for those who wrote another.
const EXPECTED: &str = "redis+sentinel://[[user:]password@]host[:port],host[:port]/service[/db]\
                        [?sentinel_user=&sentinel_password=]";

/// Where a sentinel tells of a fail-over: when it names another primary than before; and, if it leads the fail-over
/// itself, when that one is promoted. From then on it names it, and so do the others, but what it tells at the first
/// channel comes when the other replicas follow: seconds later, or minutes. Whoever stayed at the old primary until then
/// would lock what others lock at the new one.
const CHANNELS: [&str; 2] = ["+switch-master", "+failover-state-reconf-slaves"];

/// How often a sentinel is asked again that tells of fail-overs by itself.
const SELDOM: Duration = Duration::from_secs(10);

/// The same of one that does not, and before the next is asked when one fails.
const OFTEN: Duration = Duration::from_secs(1);

/// The same while it names another, who is no primary yet.
const SOON: Duration = Duration::from_millis(100);

/// Where sentinels listen unless told otherwise.
const PORT: u16 = 26379;

/// Those who watch over one service. Clones of a store share this, and with it who answered last.
pub(super) struct Sentinels {
    service: Arc<str>,
    all: Vec<Endpoint>,
    /// Who is asked first: the one that answered last.
    first: AtomicUsize,
    /// Who we are at the service's servers, and how they are connected to; where they are says nothing.
    server: ConnectionInfo,
    opener: Opener,
}

/// A url in its parts, of which nothing may be shown.
struct Parts<'a> {
    is_tls: bool,
    user: &'a str,
    hosts: Vec<&'a str>,
    service: &'a str,
    db: &'a str,
    query: &'a str,
}

/// What a sentinel said instead of an address.
enum No {
    /// It watches over no such service.
    Unknown,
    Fault(Fault),
}

/// Whether an answer to ROLE is a primary's.
pub(super) fn is_primary(role: &Value) -> bool {
    let Value::Array(parts) = role else {
        return false;
    };
    matches!(parts.first(), Some(Value::BulkString(role)) if role == b"master")
}

impl<'a> Parts<'a> {
    fn split(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let is_tls = match &*scheme.to_ascii_lowercase() {
            "redis+sentinel" | "valkey+sentinel" => false,
            "rediss+sentinel" | "valkeys+sentinel" => true,
            _ => return None,
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/')?;
        if path.contains('#') || query.contains('#') {
            return None;
        }
        let (user, hosts) = authority.rsplit_once('@').unwrap_or(("", authority));
        let path = path.strip_suffix('/').unwrap_or(path);
        let (service, db) = path.split_once('/').unwrap_or((path, ""));
        Some(Self {
            is_tls,
            user,
            hosts: hosts.split(',').collect(),
            service,
            db,
            query,
        })
    }

    /// As the client reads it.
    fn open(&self, user: &str, host: &str, db: &str) -> Option<ConnectionInfo> {
        let scheme = if self.is_tls { "rediss" } else { "redis" };
        let at = if user.is_empty() { "" } else { "@" };
        let port = match host.rsplit_once(']').map_or(host, |(_, port)| port) {
            with_port if with_port.contains(':') => String::new(),
            _ => format!(":{PORT}"),
        };
        let url = format!("{scheme}://{user}{at}{host}{port}/{db}");
        let info = Client::open(url).ok()?.get_connection_info().clone();
        Some(info.set_tcp_settings(at_once()))
    }

    /// Who we are to the sentinels, which know other users than the servers do.
    fn sentinel_user(&self) -> Option<RedisConnectionInfo> {
        let mut settings = RedisConnectionInfo::default();
        for pair in self.query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=')?;
            let value = decoded(value)?;
            settings = match name {
                "sentinel_user" => settings.set_username(value),
                "sentinel_password" => settings.set_password(value),
                _ => return None,
            };
        }
        // A user is somebody by a password only.
        (settings.username().is_none() || settings.password().is_some()).then_some(settings)
    }
}

fn decoded(text: &str) -> Option<String> {
    let text = percent_decode_str(text).decode_utf8().ok()?;
    Some(text.into_owned())
}

impl Sentinels {
    /// Reads a url whose scheme ends with `+sentinel`.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        let invalid = |reason: &str| Fault::Url {
            reason: format!("{reason}; expected {EXPECTED}"),
        };
        let parts = Parts::split(url)
            .ok_or_else(|| invalid("it does not name sentinels and their service"))?;
        if parts.is_tls && cfg!(not(feature = "tls-rustls")) {
            return Err(invalid(
                "rediss+sentinel:// needs lockstream's feature `tls-rustls`",
            ));
        }
        let service = decoded(parts.service)
            .filter(|service| !service.is_empty())
            .ok_or_else(|| invalid("it names no service"))?;
        let settings = parts.sentinel_user().ok_or_else(|| {
            invalid("what follows the ? is no sentinel_user with its sentinel_password")
        })?;
        let mut all = Vec::with_capacity(parts.hosts.len());
        for host in &parts.hosts {
            let info = parts
                .open("", host, "")
                .ok_or_else(|| invalid("a sentinel's address is no host[:port]"))?;
            let info = info.set_redis_settings(settings.clone());
            let address = format!("{} (sentinel)", info.addr());
            let opener = Opener::of(info.addr());
            all.push(Endpoint::new(info, opener).named(address));
        }
        if !parts.db.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(invalid("the database is no number"));
        }
        let server = parts
            .open(parts.user, parts.hosts[0], parts.db)
            .ok_or_else(|| invalid("the user, the password or the database is none"))?;
        Ok(Self {
            service: service.into(),
            all,
            first: AtomicUsize::new(0),
            opener: Opener::of(server.addr()),
            server,
        })
    }

    /// The same with certificates, for sentinels and servers alike.
    #[cfg(feature = "tls-rustls")]
    pub(super) fn secured(&self, certificates: &Certificates) -> Result<Self, Fault> {
        let all = self
            .all
            .iter()
            .map(|sentinel| {
                let secured = sentinel.clone().secured(certificates)?;
                Ok(secured.named(sentinel.address().to_string()))
            })
            .collect::<Result<_, Fault>>()?;
        let tls = certificates.read(&self.server)?;
        Ok(Self {
            service: self.service.clone(),
            all,
            first: AtomicUsize::new(0),
            server: self.server.clone(),
            opener: Opener::UsOverTls(tls),
        })
    }

    /// The place where nobody was asked yet: it is never connected to.
    pub(super) fn nowhere(&self) -> Endpoint {
        let all: Vec<_> = self
            .all
            .iter()
            .map(|it| it.info().addr().to_string())
            .collect();
        let address = format!("{}/{}", all.join(","), self.service);
        Endpoint::new(self.server.clone(), self.opener.clone()).named(address)
    }

    /// Asks one after the other, each for at most that time, until one says where the primary is.
    ///
    /// What it says may be out of date: whoever connects there asks the server for its role.
    pub(super) async fn primary(&self, within: Duration) -> Result<Endpoint, Fault> {
        let first = self.first.load(Ordering::Relaxed);
        let mut faults = Vec::new();
        let mut unknown = Vec::new();
        for step in 0..self.all.len() {
            let index = (first + step) % self.all.len();
            let sentinel = &self.all[index];
            match self.ask(sentinel, within).await {
                Ok((host, port)) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(self.at(host, port, sentinel));
                }
                Err(No::Unknown) => unknown.push(sentinel.address().to_string()),
                Err(No::Fault(fault)) => faults.push(fault),
            }
        }
        Err(Fault::Sentinels {
            service: self.service.clone(),
            // Those that are silent may know it.
            is_lasting: faults.iter().all(Fault::is_lasting),
            told: told(&unknown, &faults),
        })
    }

    /// Where we were sent there was no primary: the next one is asked first. A sentinel that is cut
    /// off from the others would send us there for ever.
    pub(super) fn doubt(&self) {
        // Many links may doubt the same answer; then some are sent there once more.
        self.first.fetch_add(1, Ordering::Relaxed);
    }

    fn at(&self, host: String, port: u16, sentinel: &Endpoint) -> Endpoint {
        let address = match self.server.addr().clone() {
            ConnectionAddr::TcpTls {
                insecure,
                tls_params,
                ..
            } => ConnectionAddr::TcpTls {
                host,
                port,
                insecure,
                tls_params,
            },
            _ => ConnectionAddr::Tcp(host, port),
        };
        let name = format!(
            "{address} (primary of {:?}, says {})",
            self.service,
            sentinel.info().addr()
        );
        Endpoint::new(self.server.clone().set_addr(address), self.opener.clone()).named(name)
    }

    /// Returns when another than this is the primary, and says which.
    ///
    /// A primary that sentinels have replaced goes on as one for some ten seconds: whoever stays there
    /// locks what others lock elsewhere.
    pub(super) async fn moved(&self, here: &Endpoint, within: Duration) -> Endpoint {
        let mut index = self.first.load(Ordering::Relaxed);
        loop {
            index %= self.all.len();
            if let Ok(primary) = self.follow(&self.all[index], here, within).await {
                self.first.store(index, Ordering::Relaxed);
                return primary;
            }
            index += 1;
            sleep(OFTEN).await;
        }
    }

    async fn follow(
        &self,
        sentinel: &Endpoint,
        here: &Endpoint,
        within: Duration,
    ) -> Result<Endpoint, No> {
        let (sender, mut pushes) = mpsc::unbounded_channel();
        let (mut socket, mut pause) = match sentinel.connect(within, sender).await? {
            Some(mut socket) => {
                let Socket { connection, pump } = &mut socket;
                let mut is_told = true;
                for channel in CHANNELS {
                    let subscribing = pump.run(connection.subscribe(channel));
                    is_told &= timeout(within, subscribing)
                        .await
                        .is_ok_and(|it| it.is_ok());
                }
                (socket, if is_told { SELDOM } else { OFTEN })
            }
            None => (sentinel.connect_resp2(within).await?, OFTEN),
        };
        loop {
            // One answer is newer than all that has been told: a question for each would leave what comes faster than
            // answers do to pile up.
            while pushes.try_recv().is_ok() {}
            let (host, port) = self.question(sentinel, &mut socket, within).await?;
            let there = self.at(host, port, sentinel);
            let mut now = pause;
            if there.info().addr() != here.info().addr() {
                // A sentinel that is late or cut off must not send everybody back.
                if there.is_primary(within).await {
                    return Ok(there);
                }
                now = SOON;
            }
            let told = socket.pump.run(hears(&mut pushes));
            if let Ok(false) = timeout(now, told).await {
                // No news come any more; the next question finds out whether it is there.
                pause = OFTEN;
                sleep(now).await;
            }
        }
    }

    async fn ask(&self, sentinel: &Endpoint, within: Duration) -> Result<(String, u16), No> {
        let mut socket = sentinel.connect_resp2(within).await?;
        self.question(sentinel, &mut socket, within).await
    }

    async fn question(
        &self,
        sentinel: &Endpoint,
        socket: &mut Socket,
        within: Duration,
    ) -> Result<(String, u16), No> {
        let Socket { connection, pump } = socket;
        let mut question = cmd("SENTINEL");
        question
            .arg("GET-MASTER-ADDR-BY-NAME")
            .arg(self.service.as_bytes());
        let asking = pump.run(connection.send_packed_command(&question));
        let address = sentinel.address().clone();
        match timeout(within, asking).await {
            Err(_) => Err(Fault::Silent { address, within }.into()),
            Ok(Err(source)) => Err(Fault::Broken { address, source }.into()),
            Ok(Ok(Value::Nil)) => Err(No::Unknown),
            Ok(Ok(Value::ServerError(error))) => {
                let refusal = (&error).into();
                Err(Fault::Refused { address, refusal }.into())
            }
            Ok(Ok(answer)) => read(&answer).ok_or_else(|| {
                let what = "what it says is no address";
                Fault::Garbled { address, what }.into()
            }),
        }
    }
}

/// Waits for news of a fail-over, of whatever service. False: none will come.
async fn hears(pushes: &mut UnboundedReceiver<PushInfo>) -> bool {
    while let Some(push) = pushes.recv().await {
        match push.kind {
            PushKind::Message => return true,
            PushKind::Disconnection => return false,
            _ => {}
        }
    }
    false
}

impl From<Fault> for No {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

fn read(answer: &Value) -> Option<(String, u16)> {
    let Value::Array(parts) = answer else {
        return None;
    };
    let [Value::BulkString(host), Value::BulkString(port)] = &parts[..] else {
        return None;
    };
    let host = std::str::from_utf8(host).ok().filter(|it| is_host(it))?;
    let port = std::str::from_utf8(port).ok()?.parse().ok()?;
    (port != 0).then(|| (host.to_owned(), port))
}

/// Each one's answer.
fn told(unknown: &[String], faults: &[Fault]) -> String {
    let mut told = Vec::new();
    if !unknown.is_empty() {
        told.push(format!("unknown to {}", listed(unknown, ", ")));
    }
    if !faults.is_empty() {
        let faults: Vec<_> = faults.iter().map(Fault::to_string).collect();
        told.push(listed(&faults, "; "));
    }
    told.join("; ")
}

#[cfg(test)]
mod tests;
