//! The store, as a user makes it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::address::{CONNECTING, CONNECTING_BOUNDS, Endpoint};
use super::backend::PostgresBackend;
use super::call;
use super::fault::Fault;
use super::options::StoreOptions;
use super::schema;
use crate::base::StoreError;
use crate::base::limits::RESPONSE_TIMEOUT;
use crate::base::operation::operation;
use crate::base::user_code::log;
use crate::store::attempts::SetUps;
use crate::store::contract::{RegistryOptions, Session, SessionConfig};
use crate::store::credentials::{Credentials, Newest};
use crate::store::driver::DriverSession;
#[cfg(feature = "tls-rustls")]
use crate::store::tls::{Tls, Verify};
use crate::store::{LockStore, sealed};

/// How many connections for calls a registry may have.
const MOST_LANES: usize = 16;

/// Leases in a PostgreSQL database, from version 14 on.
///
/// Each registry has one connection, over which it sends calls and hears of grants. It opens at the first use, and
/// closes after a minute in which the registry sent nothing, held nothing and waited for nothing. Waiting costs no
/// further connection. A registry that waits looks every 0.4 to 0.75 s for grants that it was not told of, whatever the
/// number of keys and callers. A look that finds none writes nothing. Now and then a registry deletes rows that nobody
/// has used for an hour, on a connection that it opens for that. A broken connection is made again as long as it is
/// needed, after the same pauses as that of a [`RedisStore`](crate::store::RedisStore).
///
/// A lock in the database of the data can do what no other lock can: a transaction that calls the function `fence`
/// commits only if the lease still has the lock, and nobody else gets the lock before it has ended. See
/// [`LeaseView::fence`](crate::LeaseView::fence), and `docs/postgres.md`.
///
/// The tables and functions are in a schema of their own, `lockstream`. They are made at the first connection if the role
/// may create them; else run [`PostgresStore::SQL`] by hand.
///
/// # Examples
///
/// ```no_run
/// use lockstream::LockRegistry;
/// use lockstream::store::PostgresStore;
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// let store = PostgresStore::connect("postgres://app:password@db.example/shop").await?;
/// let locks = LockRegistry::builder(store).build()?;
/// # let _ = locks; Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresStore {
    pub(super) settings: Settings,
}

/// What the builder was told.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) endpoint: Endpoint,
    /// Where calls go, if a pooler is between.
    pub(super) pooled: Option<Endpoint>,
    /// What the url says, or the builder in its place.
    pub(super) said: StoreOptions,
    /// How many connections carry calls.
    pub(super) lanes: usize,
    pub(super) is_durable: bool,
    /// Whether the schema is made if it is not there.
    pub(super) migrates: bool,
    pub(super) quiet: Option<Duration>,
}

impl Settings {
    /// The schema of the tables and functions.
    pub(super) fn schema(&self) -> &str {
        self.said.schema.as_deref().unwrap_or(schema::USUAL)
    }
}

impl PostgresStore {
    /// The statements that make the schema `lockstream`, for those whose application may not: run them once, as the owner
    /// of the tables to be.
    pub const SQL: &str = schema::SQL;

    /// [`SQL`](Self::SQL) for the [schema](PostgresStoreBuilder::schema) of this store.
    pub fn sql(&self) -> String {
        schema::sql(self.settings.schema())
    }

    /// Connects once, to check that there is a server, that it accepts the user and password, and that the schema is
    /// there or can be made.
    ///
    /// Urls are `postgres://[user[:password]@]host[:port][,host[:port]][/database][?options]`. Of several hosts, and of
    /// all addresses of a name, the first that takes writes is used. With the feature `tls-rustls` a connection over TCP
    /// is encrypted and the server's certificate is checked, unless `sslmode` says something else, in the words of libpq.
    /// `docs/urls.md` lists the options; what is not there is refused.
    ///
    /// # Errors
    ///
    /// The future yields an error if the url is invalid, if no host answers within the
    /// [time for connecting](PostgresStoreBuilder::connect_timeout), if it refuses the user or password, or if the schema
    /// is missing and cannot be made, lacks a table, or belongs to a role that is not
    /// [trusted](PostgresStoreBuilder::schema_owner). Errors never show the password.
    pub fn connect(url: impl AsRef<str>) -> ConnectPostgres {
        Self::builder(url).connect()
    }

    /// The same without connecting: a service may start before its server, and locks fail until the server is there.
    ///
    /// # Errors
    ///
    /// If the url is invalid.
    pub fn connect_lazy(url: impl AsRef<str>) -> Result<Self, StoreError> {
        Self::builder(url).connect_lazy()
    }

    /// For settings that a url cannot express.
    pub fn builder(url: impl AsRef<str>) -> PostgresStoreBuilder {
        PostgresStoreBuilder::new(Endpoint::parse(url.as_ref()))
    }

    /// Opens its connections with these settings, as they are. Over TLS it trusts the authorities of the system, or those
    /// of [`root_certificate`](PostgresStoreBuilder::root_certificate). With the driver's default, `SslMode::Prefer`, a
    /// connection is in plain text only if the server has no TLS, is on this machine, and no certificate was given. It
    /// ties your version of `tokio-postgres` to ours.
    pub fn from_config(config: tokio_postgres::Config) -> PostgresStoreBuilder {
        let endpoint = Endpoint::new(config);
        PostgresStoreBuilder::new(endpoint.map(|endpoint| (endpoint, StoreOptions::default())))
    }

    /// Makes the schema if it is not there, and sets the quiet time if the builder was told one. Idempotent; of several
    /// at a time one does it.
    ///
    /// # Errors
    ///
    /// If no host can be reached within the [time for connecting](PostgresStoreBuilder::connect_timeout), the server
    /// refuses, or the schema belongs to a role that is not [trusted](PostgresStoreBuilder::schema_owner).
    pub fn migrate(&self) -> Migrate {
        let settings = self.settings.clone();
        Migrate::new(async move {
            let mut connection = settings.endpoint.connect().await?;
            let begin = call::begin(settings.endpoint.connect_within);
            Ok(schema::migrate(&mut connection, &settings, &begin).await?)
        })
    }

    /// Checks that calls would be answered.
    async fn try_out(&self) -> Result<(), Fault> {
        let settings = self.settings.clone();
        let within = settings.endpoint.connect_within;
        let backend = PostgresBackend::new(settings, "lock".into(), "".into(), within);
        let trying = Arc::new(backend).set_up(&[], &SetUps::default()).await;
        trying.map(drop)
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.settings.endpoint.address;
        f.debug_struct("PostgresStore")
            .field("address", address)
            .finish()
    }
}

impl sealed::Sealed for PostgresStore {}

impl LockStore for PostgresStore {
    fn open(&self, config: SessionConfig) -> Arc<dyn Session> {
        let mut settings = self.settings.clone();
        let name = match config.instance.split_once('~') {
            Some((name, _)) => format!("lockstream:{name}"),
            None => "lockstream".to_owned(),
        };
        settings.endpoint.name(&name);
        if let Some(pooled) = &mut settings.pooled {
            pooled.name(&name);
        }
        let (prefix, instance) = (config.prefix.clone(), config.instance.clone());
        let backend = PostgresBackend::new(settings, prefix, instance, config.response_timeout);
        Arc::new(DriverSession::new(Arc::new(backend), config))
    }

    fn registry_options(&self) -> RegistryOptions {
        self.settings.said.registry.clone()
    }

    fn place(&self) -> Option<String> {
        Some(format!("PostgreSQL at {}", self.settings.endpoint.address))
    }
}

/// Builds a [`PostgresStore`]; made by [`PostgresStore::builder`].
///
/// # Examples
///
/// ```no_run
/// use std::time::Duration;
/// use lockstream::store::PostgresStore;
/// # async fn f() -> Result<(), lockstream::StoreError> {
/// // Half the time of a call, and for a minute after a crash nobody gets a lock.
/// let store = PostgresStore::builder("postgres://app@db.example/shop")
///     .synchronous_commit(false)
///     .quiet_time(Duration::from_secs(60))
///     .connect()
///     .await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a builder does nothing until it connects"]
pub struct PostgresStoreBuilder {
    settings: Result<Settings, Fault>,
    connect_within: Option<Duration>,
    credentials: Option<Newest>,
}

impl PostgresStoreBuilder {
    fn new(parsed: Result<(Endpoint, StoreOptions), Fault>) -> Self {
        let settings = parsed.map(|(endpoint, said)| Settings {
            endpoint,
            pooled: None,
            said,
            lanes: 1,
            is_durable: true,
            migrates: true,
            quiet: None,
        });
        Self {
            settings,
            connect_within: None,
            credentials: None,
        }
    }

    fn set(mut self, set: impl FnOnce(&mut Settings)) -> Self {
        if let Ok(settings) = &mut self.settings {
            set(settings);
        }
        self
    }

    /// The first setting that is not allowed is the one that is told.
    fn check(mut self, is_allowed: bool, what: &str, reason: impl fmt::Display) -> Self {
        if !is_allowed && self.settings.is_ok() {
            self.settings = Err(Fault::invalid(what, reason));
        }
        self
    }

    /// The schema of the tables and functions: `lockstream` by default. Registries of different schemas do not exclude
    /// each other. In a url it is `lock_schema=name`.
    pub fn schema(self, schema: impl Into<String>) -> Self {
        self.set(|settings| settings.said.schema = Some(schema.into()))
    }

    /// Trusts a schema of this role. The functions of the schema run with the rights of whoever calls them, so a
    /// stranger's schema is refused: whoever may create schemas could make one before the service does. Trusted without
    /// this are the owner of the database and its members, superusers, the store's own role and its members, and,
    /// unless the store's role is a superuser, each role whose rights it has. A role that only runs migrations may be
    /// none of these. In a url it is `schema_owner=role`.
    pub fn schema_owner(self, role: impl Into<String>) -> Self {
        self.set(|settings| settings.said.schema_owner = Some(role.into()))
    }

    /// How many connections of a registry carry calls: 1 to 16, by default 1. A connection has one call in flight, with
    /// up to 256 operations, and waits until the server has it on disk. More connections help a registry of many busy
    /// keys.
    pub fn lanes(self, lanes: usize) -> Self {
        let is_allowed = (1..=MOST_LANES).contains(&lanes);
        let reason = format_args!("must be from 1 to {MOST_LANES}");
        let checked = self.check(is_allowed, "lanes", reason);
        checked.set(|settings| settings.lanes = lanes)
    }

    /// Sends calls to a pooler in transaction mode, such as PgBouncer. The url of the store must still be the server's
    /// own: one connection of each registry listens there. In a url it is `pooled=`, with the pooler's url
    /// percent-encoded.
    ///
    /// If only the pooler can be reached, its url is that of the store: then a registry that waits asks again and again,
    /// by its [`Repeat`](crate::Repeat), and there is no queue. A pooler is noticed, or told by `pgbouncer=true`.
    pub fn pooled(self, url: impl AsRef<str>) -> Self {
        self.set(|settings| settings.said.pooled = Some(url.as_ref().to_owned()))
    }

    /// How long connecting to each host may take: from the look-up of its name until it is shown that grants arrive. From
    /// 1 ms to 24 h, by default 5 s, or what the url says by `connect_timeout=`. The response time-out of a registry is
    /// for calls. Of a host with several addresses a further one is tried after an eighth of the time, beside those
    /// before.
    pub fn connect_timeout(self, timeout: Duration) -> Self {
        let is_allowed = RESPONSE_TIMEOUT.contains(&timeout);
        let checked = self.check(is_allowed, CONNECTING, CONNECTING_BOUNDS);
        Self {
            connect_within: Some(timeout),
            ..checked
        }
    }

    /// User and password that change, such as tokens that expire. Each connection is opened with the newest; those that
    /// stand go on. The url needs neither. Credentials that the server refuses are an error that may pass: the next
    /// connection asks for the newest again. Once the sender is gone, the last ones stay good.
    ///
    /// # Examples
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use lockstream::store::{Credentials, PostgresStore};
    /// use tokio::sync::watch;
    ///
    /// # async fn token() -> Result<String, std::io::Error> { Ok(String::new()) }
    /// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
    /// let (rotate, newest) = watch::channel(Credentials::new("app", token().await?));
    /// tokio::spawn(async move {
    ///     loop {
    ///         tokio::time::sleep(Duration::from_secs(600)).await;
    ///         match token().await {
    ///             Ok(token) => drop(rotate.send(Credentials::new("app", token))),
    ///             Err(error) => eprintln!("no new token: {error}"),
    ///         }
    ///     }
    /// });
    /// let store = PostgresStore::builder("postgres://db.example/shop")
    ///     .credentials(newest)
    ///     .connect()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn credentials(self, newest: watch::Receiver<Credentials>) -> Self {
        Self {
            credentials: Some(newest),
            ..self
        }
    }

    /// Whether the server has a lease on disk before it answers: true by default. With `false` it answers sooner, and a
    /// crash of the server may lose leases of the last moments. Then somebody else may get a lock that is held, unless
    /// there is a [quiet time](Self::quiet_time). Tokens and fences hold either way.
    pub fn synchronous_commit(self, is_durable: bool) -> Self {
        self.set(|settings| settings.is_durable = is_durable)
    }

    /// For how long nobody gets a free lock after the server has lost data, or may have: after a crash, a fail-over, a
    /// restore. It must be at least the longest ttl and the longest `KeepFor` in use. It is a setting of the schema, for
    /// all registries, and is stored by [`PostgresStore::migrate`] and by [`connect`](Self::connect).
    pub fn quiet_time(self, quiet: Duration) -> Self {
        let is_allowed = quiet <= *crate::base::limits::KEEP.end();
        let checked = self.check(is_allowed, "quiet time", "must be at most a year");
        checked.set(|settings| settings.quiet = Some(quiet))
    }

    /// Whether the schema is made if it is not there: true by default.
    pub fn migrate(self, migrates: bool) -> Self {
        self.set(|settings| settings.migrates = migrates)
    }

    /// Trusts servers whose certificate was signed by this authority, in PEM, in place of the authorities of the system.
    /// Several calls add to each other.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn root_certificate(self, pem: impl AsRef<[u8]>) -> Self {
        self.change_tls(|tls| tls.trusting(pem.as_ref()))
    }

    /// Presents this certificate and its chain to servers that ask for one. Both are in PEM, the key without a
    /// passphrase.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn client_certificate(self, pem: impl AsRef<[u8]>, key: impl AsRef<[u8]>) -> Self {
        self.change_tls(|tls| tls.showing(pem.as_ref(), key.as_ref()))
    }

    /// For servers whose certificate has this name, whatever the host in the url: behind a tunnel, or named by an
    /// address. In a url it is `server_name=`.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn server_name(self, name: impl AsRef<str>) -> Self {
        self.change_tls(|tls| tls.naming(name.as_ref()))
    }

    /// **Trusts whoever answers**, if `accepts`: the connection is encrypted, and anybody between may read and change it,
    /// and learns the password. The store logs a warning. For a server with a certificate of its own there is
    /// [`root_certificate`](Self::root_certificate). In a url it is `danger_accept_invalid_certificates=true`.
    #[cfg(feature = "tls-rustls")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tls-rustls")))]
    pub fn danger_accept_invalid_certificates(self, accepts: bool) -> Self {
        let verify = match accepts {
            true => Verify::Nothing,
            false => Verify::Full,
        };
        self.change_tls(|tls| Ok(tls.verifying(verify)))
    }

    #[cfg(feature = "tls-rustls")]
    fn change_tls(mut self, change: impl FnOnce(Tls) -> Result<Tls, String>) -> Self {
        self.settings = self.settings.and_then(|mut settings| {
            let tls = change(settings.endpoint.tls().clone());
            settings.endpoint.set_tls(tls.map_err(Fault::certificates)?);
            Ok(settings)
        });
        self
    }

    /// Connects once, as [`PostgresStore::connect`] does, and stores the quiet time if one was set.
    ///
    /// # Errors
    ///
    /// Those of [`PostgresStore::connect`]. Also if a setting is out of range, or a certificate is invalid.
    pub fn connect(self) -> ConnectPostgres {
        let store = self.connect_lazy();
        ConnectPostgres::new(async move {
            let store = store?;
            if store.settings.quiet.is_some() {
                store.migrate().await?;
            }
            store.try_out().await?;
            Ok(store)
        })
    }

    /// The same without connecting. A quiet time is not stored: call [`PostgresStore::migrate`] once.
    ///
    /// # Errors
    ///
    /// If the url or a setting is invalid.
    pub fn connect_lazy(self) -> Result<PostgresStore, StoreError> {
        let mut settings = self.settings?;
        let schema = settings.schema();
        if let Some(fault) = schema::fault(schema) {
            return Err(Fault::invalid("schema", format_args!("{schema:?} {fault}")).into());
        }
        if let Some(url) = &settings.said.pooled {
            settings.pooled = Some(Endpoint::parse_pooler(url)?);
        }
        if settings.pooled.is_some() && settings.said.is_pooler {
            let why = "pgbouncer=true says that the url of the store is one, too";
            return Err(Fault::invalid("url of the pooler", why).into());
        }
        // The url of the pooler may have certificates of its own.
        #[cfg(feature = "tls-rustls")]
        if let Some(pooled) = &mut settings.pooled
            && !pooled.tls().is_set()
        {
            pooled.set_tls(settings.endpoint.tls().clone());
        }
        let endpoints = [Some(&mut settings.endpoint), settings.pooled.as_mut()];
        for endpoint in endpoints.into_iter().flatten() {
            endpoint.credentials.clone_from(&self.credentials);
            if let Some(within) = self.connect_within {
                endpoint.connect_within = within;
            }
            if endpoint.secure()? {
                let address = &*endpoint.address;
                log!(
                    warn,
                    address,
                    "the server's certificate is not verified: whoever answers is trusted"
                );
            }
        }
        Ok(PostgresStore { settings })
    }
}

impl fmt::Debug for PostgresStoreBuilder {
    /// A certificate's key is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStoreBuilder")
            .finish_non_exhaustive()
    }
}

operation! {
    /// Future of [`PostgresStore::connect`] and [`PostgresStoreBuilder::connect`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ConnectPostgres(Operation<Result<PostgresStore, StoreError>>);
}

operation! {
    /// Future of [`PostgresStore::migrate`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Migrate(Operation<Result<(), StoreError>>);
}
