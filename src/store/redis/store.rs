//! The store, as a user makes it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::backend::{RedisBackend, Times};
#[cfg(feature = "cluster")]
use super::cluster::Seeds;
use super::credentials::Source;
#[cfg(feature = "redis-1")]
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::replicas::{self, MinReplicas};
use super::topology::Topology;
use crate::base::StoreError;
use crate::base::limits::RESPONSE_TIMEOUT;
use crate::base::operation::operation;
use crate::store::contract::{RegistryOptions, Session, SessionConfig};
use crate::store::credentials::Credentials;
use crate::store::driver::DriverSession;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::{Tls, Verify};
use crate::store::url::CONNECT_TIMEOUT;
use crate::store::{LockStore, sealed};

/// When [`RedisStore::connect`] asks another sentinel or node beside one that is silent: the usual `response_timeout` of
/// a registry, which it does not know.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);

/// Leases on a Redis server, from version 6.2 on, or on Valkey; alone, behind sentinels, or in a cluster.
///
/// Each registry on a store has a connection of its own for calls and for the grants that the server pushes. It opens
/// at the first use. It closes after a minute in which the registry sent nothing, held nothing and waited for nothing.
/// On a cluster there is one connection to each primary whose keys are used. [`RedisStoreBuilder::min_replicas`] takes one
/// more. RESP3 is used whatever the url says.
/// With a server or proxy that does not speak it, waiters poll.
///
/// A broken connection is made again as long as it is needed. Each attempt comes after a random pause: up to 250 ms
/// after a lost connection, then up to 1 s and 2 s, and up to 10 s after an outage of a minute. A caller that arrives
/// during a pause waits for its end. After that the leases on that server are renewed, and waiters enter their queues
/// again at their old places.
///
/// Clones share the address and the TLS configuration: the roots of the system are read once, and sessions are
/// resumed. Nothing is installed for the whole process.
///
/// # Examples
///
/// ```no_run
/// use lockstream::store::RedisStore;
/// # async fn f() -> Result<(), lockstream::StoreError> {
/// let store = RedisStore::connect("redis://:password@127.0.0.1:6379/0").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RedisStore {
    topology: Topology,
    min_replicas: Option<MinReplicas>,
    connect_timeout: Duration,
}

impl RedisStore {
    /// Connects once, to check that there is a server and that it accepts the user and password.
    ///
    /// Urls are `redis://[user][:password@]host[:port][/db]`, the same with `rediss://` for TLS
    /// (feature `tls-rustls`), or `unix:///path[?db=0&user=…&pass=…]`.
    ///
    /// With the feature `sentinel` also `redis+sentinel://[user][:password@]host[:port],host[:port]/service[/db]`
    /// (port 26379 by default), and `rediss+sentinel://` for TLS to sentinels and servers. User and password are those
    /// of the servers. Sentinels get those of `?sentinel_user=…&sentinel_password=…`, percent-encoded, or none. Before
    /// each connection the sentinels are asked in turn for the primary, from a random one, each for one `response_timeout`
    /// at most; the one that answered last is asked first. Then the server is asked for its role. The connection ends as
    /// soon as a sentinel names another primary. A fail-over may lose leases: see `docs/operations.md`.
    ///
    /// With the feature `cluster` also `redis+cluster://[user][:password@]host[:port],host[:port]/`, and
    /// `rediss+cluster://`: see `RedisStore::cluster`.
    ///
    /// # Errors
    ///
    /// The future yields an error if the url is invalid, if a server or sentinel does not answer within
    /// [`connect_timeout`](RedisStoreBuilder::connect_timeout), if
    /// the server refuses the user or password, or if no sentinel names a primary. Errors never show the password.
    pub fn connect(url: impl Into<String>) -> ConnectRedis {
        Self::builder(url).connect()
    }

    /// The same without connecting: a service may start before its server, and locks fail until the server is there.
    ///
    /// # Errors
    ///
    /// If the url is invalid, or needs a feature that is not enabled.
    pub fn connect_lazy(url: impl Into<String>) -> Result<Self, StoreError> {
        Self::builder(url).connect_lazy()
    }

    /// For settings that a url cannot express: certificates, and how many replicas must have a lease.
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Topology::parse(&url.into()))
    }

    /// Connects once to a cluster. The urls are some of its nodes: one that answers is enough, and names the others.
    ///
    /// The same as [`RedisStore::connect`] with the one url `redis+cluster://host:port,host:port/`, which
    /// [`RedisStore::connect_lazy`] and [`RedisStore::builder`] take as well. User and password of the first url are
    /// used for all nodes. Each registry has one connection to each primary whose keys it uses. Grants come on it by
    /// sharded pub/sub. It closes after a minute in which it is not needed. Before Redis 7 there is no sharded pub/sub, and
    /// waiters poll.
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`]. Also if there is no url, if no server that answers is part of a cluster, or
    /// if a url has a socket path or a database other than 0. If no node can be used, the error has the reason of
    /// each, of five at most.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use lockstream::store::RedisStore;
    /// # async fn f() -> Result<(), lockstream::StoreError> {
    /// let store = RedisStore::cluster(["redis://10.0.0.1:7000", "redis://10.0.0.2:7000"]).await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
    pub fn cluster<I>(urls: I) -> ConnectRedis
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        let urls = urls.into_iter().map(Into::into);
        // Whoever has the one url for all nodes may well bring it here.
        let urls = urls.flat_map(|url: String| Seeds::split(&url).unwrap_or_else(|| vec![url]));
        let seeds = Seeds::parse(&urls.collect::<Vec<_>>());
        RedisStoreBuilder::new(seeds.map(Topology::Cluster)).connect()
    }

    /// Takes the settings of `client`: address, database, user and password.
    ///
    /// The same as [`RedisStoreBuilder::from_client`], which takes more settings, such as certificates and
    /// `min_replicas`. It ties your version of the `redis` crate to ours, hence the feature.
    ///
    /// The store opens the connections itself, as with a url, and always speaks RESP3 where it can. `TCP_NODELAY`,
    /// keepalive and `TCP_USER_TIMEOUT` are those of `client`; `SO_LINGER` cannot be read from it. With `rediss://` the
    /// authorities of the system are trusted, whatever your `redis` was compiled with.
    ///
    /// # Errors
    ///
    /// If the client has certificates, since those cannot be read from it: give them to the builder. Also if it checks no
    /// certificates, or if it is for `rediss://` and the feature `tls-rustls` is off.
    #[cfg(feature = "redis-1")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-1")))]
    pub fn from_client(client: redis::Client) -> Result<Self, StoreError> {
        RedisStoreBuilder::from_client(client).connect_lazy()
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = self.topology.address();
        f.debug_struct("RedisStore")
            .field("address", address)
            .finish()
    }
}

impl sealed::Sealed for RedisStore {}

impl LockStore for RedisStore {
    fn open(&self, config: SessionConfig) -> Arc<dyn Session> {
        let topology = self.topology.clone();
        #[cfg(feature = "tls-rustls")]
        if topology.server().accepts_anybody() {
            crate::base::user_code::log!(
                warn,
                address = &**topology.address(),
                "the certificates of this server are not verified: whoever answers in its place gets the password"
            );
        }
        let within = self.connect_timeout;
        let backend = RedisBackend::new(topology, self.min_replicas, within, &config);
        Arc::new(DriverSession::new(Arc::new(backend), config))
    }

    fn overhead(&self) -> Duration {
        self.min_replicas.map_or(Duration::ZERO, |rule| rule.within)
    }

    fn registry_options(&self) -> RegistryOptions {
        self.topology.server().said.registry.clone()
    }

    /// Whatever its database.
    fn place(&self) -> Option<String> {
        Some(format!("Redis at {}", self.topology.address()))
    }
}

/// Builds a [`RedisStore`]; made by [`RedisStore::builder`].
///
/// # Examples
///
/// ```no_run
/// # #[cfg(feature = "tls-rustls")]
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// use lockstream::store::RedisStore;
///
/// let store = RedisStore::builder("rediss://user:password@redis.example:6380/0")
///     .root_certificate(std::fs::read("ca.pem")?)
///     .client_certificate(std::fs::read("client.pem")?, std::fs::read("client.key")?)
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct RedisStoreBuilder {
    topology: Result<Topology, Fault>,
    min_replicas: Result<Option<MinReplicas>, Fault>,
    credentials: Option<Source>,
    connect_timeout: Option<Duration>,
    #[cfg(feature = "tls-rustls")]
    tls: Result<Tls, String>,
}

impl RedisStoreBuilder {
    fn new(topology: Result<Topology, Fault>) -> Self {
        Self {
            topology,
            min_replicas: Ok(None),
            credentials: None,
            connect_timeout: None,
            #[cfg(feature = "tls-rustls")]
            tls: Ok(Tls::default()),
        }
    }

    /// Takes the settings of `client`, as [`RedisStore::from_client`] says.
    ///
    /// Certificates cannot be read from a client. `root_certificate` and `client_certificate` stand for all of them, even
    /// if only one of the two is given. Then the server's certificate is always checked: against the given authorities, or
    /// those of the system. The client certificate is the given one, or none.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use lockstream::store::RedisStoreBuilder;
    ///
    /// # fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let client = redis::Client::open("redis://10.0.0.1/")?;
    /// let store = RedisStoreBuilder::from_client(client)
    ///     .min_replicas(1, Duration::from_millis(200))
    ///     .connect_lazy()?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "redis-1")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-1")))]
    pub fn from_client(client: redis::Client) -> Self {
        Self::new(Ok(Topology::Fixed(Endpoint::of(&client))))
    }

    /// Lets an acquisition count only when at least `n` replicas of the server have it.
    ///
    /// `within` is how long the replicas have from when they are asked: from 1 ms to less than the ttl of any lock.
    /// With `n` = 0 replicas are not asked. A lock that the replicas do not have in time is released, and goes to the
    /// next waiter. For the caller it is as if the server had refused: [`acquire_once`](crate::Lock::acquire_once)
    /// yields [`LockError::Store`](crate::LockError::Store) with the number of replicas that had it. A waiter asks
    /// again, behind the others, until its wait is over; then it gets that error.
    ///
    /// A connected replica usually has the lock within a round trip. Acquisitions that come together share one
    /// question. So an acquisition takes that much longer, and twice `within` at worst: once for those before it, and
    /// once for itself. A lease counts from before it was sent to the server, so this time is part of its ttl.
    /// `within` should be well below the ttl, and below the
    /// [`response_timeout`](crate::LockRegistryBuilder::response_timeout), after which `acquire_once` gives up. Passes
    /// within a registry, renewals and releases ask no replica.
    ///
    /// The registry has a second connection to the server for it. It opens at the first acquisition, is made again
    /// when it or the first connection breaks, and closes after a minute without use. The user needs the rights to
    /// `wait` and `eval`.
    ///
    /// On a cluster the replicas of the primary of the lock's slot count, with a second connection to each primary
    /// that is asked. Primaries do not wait for each other. While a slot moves, or a replica takes over, the node that
    /// has the lock by then is asked. If a slot moves later, the replicas of the new primary are not asked.
    ///
    /// # What it promises
    ///
    /// When a holder gets its lease, the lease is on the server and on `n` of its replicas. If one of those is
    /// promoted, the lease is there, and its holder keeps it.
    ///
    /// # What it does not
    ///
    /// This is no consensus. A fail-over may promote a replica that lacks the lease: one that is not among the `n`, or
    /// one that restarted without its data. Then another owner may get the lock while it is held, and only the
    /// [fencing token](crate::Lease::token) tells the two apart. This makes that rare, and does not rule it out; a
    /// [`QuorumStore`](crate::store::QuorumStore) does. Renewals do not wait for replicas. A replica that missed the
    /// last renewal keeps the lock for two thirds of its ttl after it; by then the holder has been renewed at the new
    /// primary, or has not.
    ///
    /// # Errors
    ///
    /// None here: [`connect`](Self::connect) and [`connect_lazy`](Self::connect_lazy) refuse a `within` out of these
    /// bounds. A lock whose ttl is not longer than `within` yields
    /// [`LockError::InvalidSetting`](crate::LockError::InvalidSetting) before anything is sent.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use lockstream::LockRegistry;
    /// use lockstream::store::RedisStore;
    ///
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let store = RedisStore::builder("redis://10.0.0.1/")
    ///     .min_replicas(1, Duration::from_millis(200))
    ///     .connect()
    ///     .await?;
    /// let locks = LockRegistry::builder(store).build()?;
    /// # let _ = locks; Ok(()) }
    /// ```
    pub fn min_replicas(mut self, n: u32, within: Duration) -> Self {
        self.min_replicas = MinReplicas::new(n, within);
        self
    }

    /// Authenticates with the newest of these credentials, in place of a user and password in the url: for passwords and
    /// tokens that rotate.
    ///
    /// Each connection is opened with the value that the channel has then. When it has a new one, all connections that
    /// stand are authenticated anew (`AUTH`), without a break: leases and waiters notice nothing. They are those of the
    /// servers, also of the nodes of a cluster; sentinels keep the user of the url. If the sender is dropped, the last
    /// value stays in use.
    ///
    /// Send a new value before the server refuses the old one. If the server refuses the new one, a warning is logged, with the
    /// code of its error only, and the connection goes on as it is. A new connection that is refused is tried again, after
    /// the usual pauses: a wrong password is no lasting error then
    /// ([`StoreError::is_retryable`](crate::StoreError::is_retryable) is true), since the right one may follow.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use lockstream::store::{Credentials, RedisStore};
    /// use tokio::sync::watch;
    ///
    /// # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let (rotate, newest) = watch::channel(Credentials::new("app", token().await?));
    /// tokio::spawn(async move {
    ///     loop {
    ///         // The tokens are good for an hour.
    ///         tokio::time::sleep(Duration::from_secs(45 * 60)).await;
    ///         match token().await {
    ///             Ok(token) => drop(rotate.send(Credentials::new("app", token))),
    ///             Err(error) => eprintln!("no new token: {error}"),
    ///         }
    ///     }
    /// });
    /// let store = RedisStore::builder("redis://10.0.0.1/").credentials(newest).connect().await?;
    /// # let _ = store; Ok(()) }
    /// ```
    pub fn credentials(self, newest: watch::Receiver<Credentials>) -> Self {
        let credentials = Some(Source::watching(newest));
        Self {
            credentials,
            ..self
        }
    }

    /// The same with a credentials provider of the `redis` crate, such as its `EntraIdCredentialsProvider`.
    ///
    /// Each connection subscribes to it. The first credentials must come within one `response_timeout`, or 5 seconds in
    /// [`connect`](Self::connect).
    #[cfg(feature = "redis-1")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-1")))]
    pub fn credentials_provider(
        self,
        provider: impl redis::StreamingCredentialsProvider + 'static,
    ) -> Self {
        let credentials = Some(Source::provided(provider));
        Self {
            credentials,
            ..self
        }
    }

    /// Trusts servers whose certificate was signed by this authority, in PEM, in place of the authorities of the
    /// system. The text may hold several, and several calls add to each other. It replaces all certificates of a
    /// client (`from_client`), its own certificate as well.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn root_certificate(mut self, pem: impl AsRef<[u8]>) -> Self {
        self.tls = self.tls.and_then(|tls| tls.trusting(pem.as_ref()));
        self
    }

    /// Presents this certificate and its chain to servers that ask for one. Both are in PEM, the key without a
    /// passphrase. It replaces all certificates of a client (`from_client`), its authorities as well.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        let showing = |tls: Tls| tls.showing(&pem.into(), &key.into());
        self.tls = self.tls.and_then(showing);
        self
    }

    /// For servers whose certificate has this name, whatever the host in the url: behind a tunnel, or named by an
    /// address. In a url it is `server_name=`.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn server_name(mut self, name: impl AsRef<str>) -> Self {
        self.tls = self.tls.and_then(|tls| tls.naming(name.as_ref()));
        self
    }

    /// **Trusts whoever answers**, if `accepts`: the connection is encrypted, and anybody between may read and change it,
    /// and learns the password. Each registry on the store logs a warning. For a server with a certificate of its own
    /// there is [`root_certificate`](Self::root_certificate). In a url it is `danger_accept_invalid_certificates=true`.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn danger_accept_invalid_certificates(mut self, accepts: bool) -> Self {
        let verify = match accepts {
            true => Verify::Nothing,
            false => Verify::Full,
        };
        self.tls = self.tls.map(|tls| tls.verifying(verify));
        self
    }

    /// How long connecting may take, from the look-up of the server's name to the proof that it can push: from 1 ms to
    /// 24 h. Default: `?connect_timeout=` of the url, or 5 s.
    ///
    /// A first call waits for as long. While a connection is made again, another attempt is begun beside one that takes
    /// long, at most three in all. What is asked on a connection has the
    /// [`response_timeout`](crate::LockRegistryBuilder::response_timeout).
    pub fn connect_timeout(mut self, within: Duration) -> Self {
        self.connect_timeout = Some(within);
        self
    }

    /// Connects once, to check that there is a server and that it accepts the user and password.
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`]. Also if a certificate or key is invalid, if they do not belong together, or
    /// if the url is not `rediss://`. A certificate that is refused, the server's by us or ours by the server, is an
    /// error that a retry does not help.
    ///
    /// With [`min_replicas`](Self::min_replicas) also if the server is a replica, or the right to `wait` is missing.
    /// The number of replicas does not matter yet. On a cluster all primaries are asked at once, for another 5 seconds
    /// in all, and one that allows it is enough. Otherwise the error is one of theirs.
    pub fn connect(self) -> ConnectRedis {
        let store = self.connect_lazy();
        ConnectRedis::new(async move {
            let store = store?;
            let within = store.connect_timeout;
            let times = Times {
                connect: within,
                answer: within.min(ANSWER_WITHIN),
            };
            store.topology.try_out(times).await?;
            if store.min_replicas.is_some() {
                replicas::try_out(&store.topology, times).await?;
            }
            Ok(store)
        })
    }

    /// The same without connecting, as [`RedisStore::connect_lazy`] does.
    ///
    /// # Errors
    ///
    /// If the url is invalid or needs a feature that is not enabled, if the certificates are invalid or do not go with
    /// the url, if the client cannot be used ([`RedisStore::from_client`]), or if `within` is zero, or a day or more.
    pub fn connect_lazy(self) -> Result<RedisStore, StoreError> {
        let mut topology = self.topology?;
        if let Some(credentials) = &self.credentials {
            topology = topology.with_credentials(credentials);
        }
        #[cfg(feature = "tls-rustls")]
        let topology = topology.secured(self.tls)?;
        // The urls of several servers were read with care.
        if let Topology::Fixed(server) = &topology {
            server.check()?;
        }
        let url = topology.server().said.connect_timeout;
        let connect_timeout = self.connect_timeout.or(url).unwrap_or(CONNECT_TIMEOUT);
        if !RESPONSE_TIMEOUT.contains(&connect_timeout) {
            let reason = "must be from 1 ms to 24 h";
            return Err(Fault::invalid("connect_timeout", reason).into());
        }
        Ok(RedisStore {
            topology,
            min_replicas: self.min_replicas?,
            connect_timeout,
        })
    }
}

impl fmt::Debug for RedisStoreBuilder {
    /// A certificate's key is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder").finish_non_exhaustive()
    }
}

operation! {
    /// Future of [`RedisStore::connect`] and [`RedisStoreBuilder::connect`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ConnectRedis(Operation<Result<RedisStore, StoreError>>);
}
