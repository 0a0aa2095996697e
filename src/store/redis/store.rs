//! The store, as a user makes it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "cluster")]
use super::cluster::Seeds;
#[cfg(feature = "redis-1")]
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::replicas::{self, MinReplicas};
use super::session::RedisSession;
#[cfg(feature = "tls-rustls")]
use super::tls::Tls;
use super::topology::Topology;
use crate::StoreError;
use crate::operation::Operation;
use crate::store::contract::{Session, SessionConfig};
use crate::store::{LockStore, sealed};

/// How long [`RedisStore::connect`] waits for a server. Longer than a registry's usual
/// `response_timeout`, which it does not know.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Leases on a Redis server, from version 6.2 on, or on Valkey; alone, behind sentinels, or in a cluster.
///
/// Each registry that is built on a store has a connection of its own, which carries its calls and the grants that the
/// server pushes. It is opened at the registry's first use, and closed after a minute in which nothing was asked, held or
/// waited for. (On a cluster there is one to each primary whose keys are used, and a second one while a key of that
/// primary is waited for. [`RedisStoreBuilder::min_replicas`] takes one more.) RESP3 is used whatever the url says; a
/// server or proxy that does not speak it still works, but then waiting costs a question every now and then.
///
/// A connection that breaks is made again for as long as it is needed. Each attempt comes after a random pause: of up to
/// 250 ms after a lost connection, then up to 1 s and 2 s, and up to 10 s once the outage has lasted a minute. A caller
/// who comes during a pause waits for its end. Then the leases on that server are renewed, and waiters enter their queues
/// again at the place that they had.
///
/// Clones share what TLS needs: the roots of the system are read once, and sessions are resumed. Nothing is installed for
/// the whole process.
///
/// Otherwise clones share nothing but the address.
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
}

impl RedisStore {
    /// Connects once, to prove that there is a server that takes us in.
    ///
    /// Urls are `redis://[user][:password@]host[:port][/db]`, the same with `rediss://` for TLS
    /// (feature `tls-rustls`), or `unix:///path[?db=0&user=…&pass=…]`.
    ///
    /// With the feature `sentinel` also `redis+sentinel://[user][:password@]host[:port],host[:port]/service[/db]`
    /// (port 26379 unless told), and `rediss+sentinel://` for TLS to sentinels and servers alike. User and password are
    /// those of the servers. Sentinels get none, or those of `?sentinel_user=…&sentinel_password=…`, percent-encoded.
    /// Before each connection the sentinels are asked in turn where the primary of that service is, each for one
    /// `response_timeout` at most, the one that answered last first; the server is then asked for its role. A connection
    /// ends as soon as a sentinel names another primary. A fail-over may forget leases: `docs/operations.md` says which.
    ///
    /// With the feature `cluster` also `redis+cluster://[user][:password@]host[:port],host[:port]/`, and
    /// `rediss+cluster://`: see `RedisStore::cluster`.
    ///
    /// # Errors
    ///
    /// The future yields an error if the url is no such thing, nobody answers within 5 seconds (each sentinel, and the
    /// server), the server does not let us in, or no sentinel says where it is. Errors never show the password.
    pub fn connect(url: impl Into<String>) -> ConnectStore {
        Self::builder(url).connect()
    }

    /// The same without connecting: a service boots while its server is away, and locks fail until
    /// it is there.
    ///
    /// # Errors
    ///
    /// If the url is not one, or needs a feature that is not there.
    pub fn connect_lazy(url: impl Into<String>) -> Result<Self, StoreError> {
        Self::builder(url).connect_lazy()
    }

    /// For what a url cannot say: certificates, and how many replicas must have a lease.
    pub fn builder(url: impl Into<String>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Topology::parse(&url.into()))
    }

    /// Connects once to a cluster, of which these are some nodes: one that answers is enough, and the
    /// cluster names the others.
    ///
    /// The same as [`RedisStore::connect`] with the one url `redis+cluster://host:port,host:port/`, which
    /// [`RedisStore::connect_lazy`] and [`RedisStore::builder`] take as well. The first url's user and
    /// password are shown to all nodes. Each registry has one connection to each primary whose keys it uses, opened at the
    /// first of them, and a second one while it waits for a key there: it carries grants, which come by sharded
    /// pub/sub. Both are closed when they are not needed any more, the first after a minute. Clusters before Redis 7, which
    /// have no sharded pub/sub, still work, but waiting there costs a question every now and then.
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`], and if there is no url, no server that answers is part of a cluster,
    /// or a url names a socket's path or a database other than 0. If no node answers as it should, the error says of
    /// each why, of five at most.
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
    pub fn cluster<I>(urls: I) -> ConnectStore
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

    /// Opens its connections as `client` would, but for the protocol, which is RESP3.
    ///
    /// For what neither a url nor [`RedisStore::builder`] can say. Ties your version of the `redis`
    /// crate to ours, hence the feature. [`RedisStoreBuilder::from_client`] does the same and goes on, as with replicas
    /// that must have a lease.
    ///
    /// The store opens the connections itself, as with a url. `TCP_NODELAY`, keepalive and `TCP_USER_TIMEOUT` are as
    /// `client` has them; `SO_LINGER` cannot be read from it.
    ///
    /// With `rediss://` and the feature `tls-rustls` the roots of the system are trusted, whatever your `redis` was
    /// compiled with: its `tls-rustls-webpki-roots` and `tls-native-tls` are not used.
    ///
    /// Certificates cannot be read from a client. One that was built with some, or that checks none, or any with
    /// `rediss://` where the feature is off, opens its connections itself: it makes a TLS configuration for each, resumes
    /// no session, uses the crypto provider of the process (rustls installs one, or panics if it cannot choose), and
    /// a message of any length is read. None of that holds if certificates are given to a builder, also to
    /// [`RedisStoreBuilder::from_client`].
    #[cfg(feature = "redis-1")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis-1")))]
    #[must_use]
    pub fn from_client(client: redis::Client) -> Self {
        Self {
            topology: Topology::Fixed(Endpoint::of(&client)),
            min_replicas: None,
        }
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
        Arc::new(RedisSession::new(topology, self.min_replicas, config))
    }

    fn overhead(&self) -> Duration {
        self.min_replicas.map_or(Duration::ZERO, |rule| rule.within)
    }

    /// Whatever its database.
    fn place(&self) -> Option<String> {
        Some(format!("Redis at {}", self.topology.address()))
    }
}

/// A store to be; made by [`RedisStore::builder`].
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
    #[cfg(feature = "tls-rustls")]
    tls: Result<Tls, Fault>,
}

impl RedisStoreBuilder {
    fn new(topology: Result<Topology, Fault>) -> Self {
        Self {
            topology,
            min_replicas: Ok(None),
            #[cfg(feature = "tls-rustls")]
            tls: Ok(Tls::default()),
        }
    }

    /// For a store that opens its connections as `client` would, as [`RedisStore::from_client`] does; that page says whom
    /// it trusts with `rediss://`.
    ///
    /// Certificates that this builder is given (`root_certificate`, `client_certificate`) replace all that `client` has of
    /// them, whichever of both is given: then the authorities are the builder's, or whom the system trusts if it was given
    /// none; the client certificate is the builder's or none; and the server's is checked, also if `client` checks none.
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
    /// `within`, from 1 ms to less than the ttl of any lock, is how long they have from when they are asked; 0 replicas
    /// are not asked, as without this. Whatever they have not in time is given back, and goes to whoever is next. To the
    /// caller it is as if the server had refused: [`acquire_once`](crate::Lock::acquire_once) yields
    /// [`LockError::Store`](crate::LockError::Store), which says how many had it, and who waits asks again, behind the
    /// others, until its wait is over and it is told the same.
    ///
    /// A replica that hears the primary mostly has it within a round trip, and acquisitions that come together ask
    /// together, however many they are. An acquisition takes that much longer, at worst `within` twice: once for those
    /// before it, and once for itself. Since a lease
    /// counts from before it was sent to the server, this is taken from its ttl. `within` should be well
    /// below the ttl, and below the [`response_timeout`](crate::LockRegistryBuilder::response_timeout), after which
    /// who asks once gives up. Passes within a registry, renewals and releases ask no replica.
    ///
    /// The registry has one more connection to the server for it, which is opened at the first acquisition, made again
    /// when it breaks or the one for calls does, and closed after a minute without use; the user needs the rights to
    /// `wait` and `eval`.
    ///
    /// On a cluster it is the primary that has the lock's slot whose replicas count, and there is one more connection to
    /// each primary that is asked. Primaries do not wait for each other. While a slot moves, or a replica takes over, whoever has the
    /// lock by then is asked. Nobody asks the replicas of a primary to which a slot moves after that.
    ///
    /// # What it promises
    ///
    /// A lease that is told was on the server and on `n` of its replicas. If any of those takes over, the lease is there,
    /// and its holder keeps it.
    ///
    /// # What it does not
    ///
    /// This is no consensus. A fail-over may promote a replica that lacks it: with `n` less than all of them, any but
    /// the `n`; and a replica that is started again without its data. Then another may get the lock while it is held, and
    /// only the [fencing token](crate::Lease::token) tells the two apart. It makes the moment for that rare, and does not
    /// rule it out; a [`QuorumStore`](crate::store::QuorumStore) does. Nor does it ask
    /// for renewals: a replica that missed the last one holds the lock for two thirds of its ttl after that, by
    /// when the holder has been renewed at the new primary, or not.
    ///
    /// # Errors
    ///
    /// None here: [`connect`](Self::connect) and [`connect_lazy`](Self::connect_lazy) refuse a `within` out of these
    /// bounds. A lock whose ttl is not longer than `within` is
    /// [`LockError::InvalidSetting`](crate::LockError::InvalidSetting), before anything is sent.
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

    /// Trusts servers whose certificate comes from this authority, in PEM, instead of those that the system trusts. (The
    /// system's are read once, at the first connection of a store.)
    ///
    /// The text may hold several; so may several calls. Of a client (`from_client`) it
    /// replaces all certificates, its own one too.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn root_certificate(mut self, pem: impl AsRef<[u8]>) -> Self {
        self.tls = self.tls.and_then(|tls| tls.trusting(pem.as_ref()));
        self
    }

    /// Shows this certificate, and whatever stands between it and its authority, to servers that ask for one. Both are
    /// in PEM, the key without a passphrase. Of a client (`from_client`) it
    /// replaces all certificates, its authorities too.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn client_certificate(mut self, pem: impl Into<Vec<u8>>, key: impl Into<Vec<u8>>) -> Self {
        self.tls = self
            .tls
            .and_then(|tls| tls.showing(&pem.into(), &key.into()));
        self
    }

    /// Connects once, to prove that there is a server that takes us in.
    ///
    /// # Errors
    ///
    /// Those of [`RedisStore::connect`], and if a certificate or key is none, they do not belong together, or the url is
    /// not `rediss://`. A server's certificate that is not believed, because it is out of date, for another host, or from
    /// an unknown authority, and a client's that the server does not believe, are errors that asking again will not mend.
    ///
    /// With [`min_replicas`](Self::min_replicas) also if the server is a replica, or does not let us wait for any. How many
    /// there are does not matter yet. On a cluster all primaries are asked at once, for another 5 seconds in all, and one
    /// that lets us wait is enough; else the error is of one that said why it does not, if any did.
    pub fn connect(self) -> ConnectStore {
        let store = self.connect_lazy();
        Operation::new(async move {
            let store = store?;
            store.topology.try_out(CONNECT_WITHIN).await?;
            if store.min_replicas.is_some() {
                replicas::try_out(&store.topology, CONNECT_WITHIN).await?;
            }
            Ok(store)
        })
    }

    /// The same without connecting, as [`RedisStore::connect_lazy`] does.
    ///
    /// # Errors
    ///
    /// If the url is not one, needs a feature that is not there, or does not go with the certificates, those are none, or
    /// replicas are given no time, or a day and more.
    pub fn connect_lazy(self) -> Result<RedisStore, StoreError> {
        let topology = self.topology?;
        #[cfg(feature = "tls-rustls")]
        let topology = topology.secured(self.tls?)?;
        Ok(RedisStore {
            topology,
            min_replicas: self.min_replicas?,
        })
    }
}

impl fmt::Debug for RedisStoreBuilder {
    /// A certificate's key is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder").finish_non_exhaustive()
    }
}

/// Connects to a server; made by [`RedisStore::connect`].
pub type ConnectStore = Operation<Result<RedisStore, StoreError>>;
