//! Sentinels, which say where the primary of a service is.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::FutureExt;
use percent_encoding::percent_decode_str;
use redis::{RedisConnectionInfo, Value, cmd};

use tokio::time::Instant;

use super::backend::Times;
use super::endpoint::{Endpoint, is_host, split_url};
use super::fault::Fault;
use super::link::Link;
use crate::roaming::time::{sleep, timeout};
use crate::store::attempts::{Pace, first_success};
use crate::store::url::UrlOptions;

const EXPECTED: &str = "redis+sentinel://[[user:]password@]host[:port],host[:port]/service[/db]\
                        [?sentinel_user=&sentinel_password=]";

/// Where a sentinel tells of a fail-over: when it names another primary than before; and, if it leads
/// the fail-over itself, when that one is promoted. From then on it names it, and so do the others,
/// but what it tells at the first channel comes when the other replicas follow: seconds later, or
/// minutes. A session that stayed at the old primary until then would lock what others lock at the
/// new one.
const CHANNELS: [&str; 2] = ["+switch-master", "+failover-state-reconf-slaves"];

/// How often a sentinel is asked again that tells of fail-overs by itself.
const SELDOM: Duration = Duration::from_secs(10);

/// The same of one that does not, and before the next is asked when one fails.
const OFTEN: Duration = Duration::from_secs(1);

/// The same while it names a server that is no primary yet.
const SOON: Duration = Duration::from_millis(100);

/// Where sentinels listen by default.
const PORT: &str = ":26379";

/// The sentinels of one service.
#[derive(Clone, Debug)]
pub(super) struct Sentinels {
    service: Arc<str>,
    pub(super) all: Vec<Endpoint>,
    /// Which one is asked first, counted round and round: the one that answered last. Clones of a store
    /// share it.
    first: Arc<AtomicUsize>,
    /// The user at the service's servers. Its address names the sentinels: it is for show.
    pub(super) server: Endpoint,
}

impl Sentinels {
    /// Takes a url apart, into those of servers. Nothing of it may be shown.
    pub(super) fn parse(url: &str) -> Result<Self, Fault> {
        let invalid = |reason| Fault::url(format!("{reason}; expected {EXPECTED}"));
        let (scheme, user, hosts, tail) = split_url(url);
        let scheme = match scheme.strip_suffix("+sentinel") {
            Some(scheme @ ("redis" | "valkey" | "rediss" | "valkeys")) => scheme,
            _ => return Err(invalid("unknown scheme")),
        };
        // Else the rest of a password would be taken for something that is shown.
        if tail.contains(['@', '#']) {
            return Err(invalid("/ ? # and @ must be percent-encoded"));
        }
        let (path, query) = tail.split_once('?').unwrap_or((tail, ""));
        let path = path.trim_start_matches('/');
        let (service, db) = path.split_once('/').unwrap_or((path, ""));
        let service = decoded(service)
            .filter(|it| !it.is_empty())
            .ok_or_else(|| invalid("no service"))?;
        let mut options = UrlOptions::parse(query).map_err(Fault::url)?;
        let login = sentinel_login(&mut options).map_err(Fault::url)?;

        let url = |user: &str, host: &str, db: &str| {
            let after_ipv6 = host.rsplit_once(']').map_or(host, |(_, port)| port);
            let port = if after_ipv6.contains(':') { "" } else { PORT };
            format!("{scheme}://{user}{host}{port}/{db}")
        };
        let first = hosts.split(',').next().unwrap_or("");
        let mut server = Endpoint::read(&url(user, first, db), options)?;
        server.must_be_primary = true;
        let (mut all, mut addresses) = (Vec::new(), Vec::new());
        for host in hosts.split(',') {
            let mut sentinel = Endpoint::read(&url("", host, ""), UrlOptions::default())?;
            sentinel.secure_as(&server);
            sentinel.info = sentinel.info.set_redis_settings(login.clone());
            addresses.push(sentinel.address.to_string());
            sentinel.address = format!("{} (sentinel)", sentinel.address).into();
            all.push(sentinel);
        }
        server.address = format!("{}/{service}", addresses.join(",")).into();
        Ok(Self {
            service: service.into(),
            // At random, so that a fleet does not ask the same one.
            first: Arc::new(rand::random_range(0..all.len()).into()),
            all,
            server,
        })
    }

    /// Asks one after the other, and the next beside those that are slow, until one says where the primary is.
    ///
    /// What it says may be out of date: the endpoint asks the server for its role when it connects.
    pub(super) async fn primary(&self, times: Times) -> Result<Endpoint, Fault> {
        let (first, within) = (self.first.load(Ordering::Relaxed), times.connect);
        let attempts = (first..first + self.all.len()).map(|index| {
            let sentinel = &self.all[index % self.all.len()];
            async move {
                let mut link = sentinel.connect_resp2(within).await?;
                let primary = self.ask(sentinel, &mut link, within).await?;
                Ok((index, primary))
            }
            .boxed()
        });
        let until = Instant::now() + within;
        let pace = Pace::regular(times.turn(self.all.len()));
        match first_success(attempts, pace, until).await {
            Ok((index, primary)) => {
                self.first.store(index, Ordering::Relaxed);
                Ok(primary)
            }
            Err(mut failed) => {
                if failed.is_late {
                    failed
                        .errors
                        .push(Fault::silent(&self.server.address, within));
                }
                let told = format!("primary of service {:?} not found", self.service);
                Err(Fault::listing(told, &failed.errors))
            }
        }
    }

    /// The server that was named is no primary: another sentinel is asked first. One that is cut off
    /// from the others would name it for ever.
    pub(super) fn doubt(&self) {
        // Sessions that doubt the same answer may come round to that sentinel again: they are then
        // sent there once more.
        self.first.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the primary when it is another server than `here`.
    ///
    /// A primary that sentinels have replaced goes on as one for some ten seconds: a session that
    /// stays there locks what others lock elsewhere.
    pub(super) async fn moved(&self, here: &Endpoint, times: Times) -> Endpoint {
        let mut index = self.first.load(Ordering::Relaxed);
        loop {
            let sentinel = &self.all[index % self.all.len()];
            if let Ok(primary) = self.follow(sentinel, here, times).await {
                self.first.store(index, Ordering::Relaxed);
                return primary;
            }
            index += 1;
            sleep(about(OFTEN)).await;
        }
    }

    async fn follow(
        &self,
        sentinel: &Endpoint,
        here: &Endpoint,
        times: Times,
    ) -> Result<Endpoint, Fault> {
        let within = times.answer;
        let (mut link, has_pushes) = sentinel.connect(times.connect).await?;
        let mut pause = if has_pushes { SELDOM } else { OFTEN };
        for channel in CHANNELS.iter().filter(|_| has_pushes) {
            let subscribe = cmd("SUBSCRIBE").arg(channel).take();
            match link.ask(&subscribe, within).await {
                Err(Fault::Refused { .. }) => pause = OFTEN,
                answer => drop(answer?),
            }
        }
        loop {
            let there = self.ask(sentinel, &mut link, within).await?;
            let is_another = there.info.addr() != here.info.addr();
            // A sentinel that is late or cut off must not send everybody back.
            if is_another && there.connect_resp2::<()>(times.connect).await.is_ok() {
                return Ok(there);
            }
            let pause = about(if is_another { SOON } else { pause });
            // A message, or the end of the connection.
            if let Ok(told) = timeout(pause, link.next()).await {
                told?;
                // The whole fleet is told at the same moment.
                sleep(SOON.mul_f64(rand::random())).await;
                // The next question covers every message that is here by now.
                while let Some(told) = link.next().now_or_never() {
                    told?;
                }
            }
        }
    }

    async fn ask(
        &self,
        sentinel: &Endpoint,
        link: &mut Link,
        within: Duration,
    ) -> Result<Endpoint, Fault> {
        let mut question = cmd("SENTINEL");
        question.arg(&["GET-MASTER-ADDR-BY-NAME", &*self.service]);
        let address = &sentinel.address;
        let answer = link.ask(&question, within).await?;
        if answer == Value::Nil {
            return Err(Fault::invalid("service", format!("unknown to {address}")));
        }
        let garbled = || Fault::garbled(address, "its answer is no address");
        let (host, port) = read(answer).ok_or_else(garbled)?;
        Ok(self.at(&host, port, sentinel))
    }

    fn at(&self, host: &str, port: u16, sentinel: &Endpoint) -> Endpoint {
        let mut server = self.server.elsewhere(host, port);
        let (address, service, sentinel) = (&server.address, &self.service, sentinel.info.addr());
        server.address = format!("{address} (primary of {service:?}, says {sentinel})").into();
        server
    }
}

/// The user at the sentinels, which know other users than the servers do.
fn sentinel_login(options: &mut UrlOptions) -> Result<RedisConnectionInfo, String> {
    let mut login = RedisConnectionInfo::default();
    if let Some(user) = options.take(&["sentinel_user", "sentinel_username"])? {
        login = login.set_username(user);
    }
    if let Some(password) = options.take(&["sentinel_password"])? {
        login = login.set_password(password);
    } else if login.username().is_some() {
        // It would not be told to the sentinel.
        return Err("sentinel_user needs sentinel_password".to_owned());
    }
    Ok(login)
}

fn decoded(text: &str) -> Option<String> {
    Some(percent_decode_str(text).decode_utf8().ok()?.into_owned())
}

/// With jitter, so that the sessions of a fleet do not ask at the same moment.
fn about(pause: Duration) -> Duration {
    pause.mul_f64(rand::random_range(0.5..1.5))
}

fn read(answer: Value) -> Option<(String, u16)> {
    let (host, port): (String, u16) = redis::from_redis_value(answer).ok()?;
    (is_host(&host) && port != 0).then_some((host, port))
}

#[cfg(test)]
mod tests;
