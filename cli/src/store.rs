//! A registry on the store that the url names.

use std::future::Future;
use std::time::Duration;

use lockstream::store::{MemoryStore, PostgresStore, PostgresStoreBuilder, RedisStore};
use lockstream::{Lease, Lock, LockError, LockRegistry, LockRegistryBuilder, StoreError};
use serde_json::json;

use crate::args::StoreArgs;
use crate::exit;
use crate::messages::chain;
use crate::url;

/// Why there is no registry, and with which exit code the program ends.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) text: String,
    /// Whether the store is away, and may come back.
    pub(crate) is_passing: bool,
}

impl Failure {
    pub(crate) fn new(code: u8, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
            is_passing: false,
        }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(exit::USAGE, text)
    }

    pub(crate) fn store(error: &StoreError) -> Self {
        Self {
            is_passing: error.is_retryable(),
            ..Self::new(exit::STORE, chain(error))
        }
    }

    pub(crate) fn lock(error: &LockError, busy: u8) -> Self {
        let source = match error {
            LockError::Store { source, .. } => Some(source),
            _ => None,
        };
        Self {
            is_passing: source.is_some_and(StoreError::is_retryable),
            ..Self::new(exit::of_error(error, busy), chain(error))
        }
    }
}

/// A store whose url is valid. Nothing was sent yet.
#[derive(Debug)]
pub(crate) struct Store {
    /// With what options of the command line have added to it.
    url: String,
    prefix: Option<String>,
    name: Option<String>,
}

impl Store {
    /// Reads the url.
    pub(crate) fn find(args: &StoreArgs) -> Result<Self, Failure> {
        let variable = std::env::var_os(url::VARIABLE);
        let url = url::find(args.url.as_deref(), args.url_file.as_ref(), variable);
        let url = url.and_then(|url| {
            url::check_scheme(&url)?;
            url::with_options(url, &args.options()?)
        });
        let url = url.map_err(Failure::usage)?;
        let setting = |name: &str, flag: Option<&String>| match (url::option(&url, name), flag) {
            (Some(said), Some(flag)) if said != *flag => {
                let text = format!("--{name} and the option {name} of the url differ");
                Err(Failure::usage(text))
            }
            (said, flag) => Ok(flag.cloned().or(said)),
        };
        let (prefix, name) = (
            setting("prefix", args.prefix.as_ref())?,
            setting("name", args.name.as_ref())?,
        );
        if url::is_unverified(&url) {
            let text = "warning: the certificate of the server is not verified: whoever answers in its place gets the password";
            args.messages().say("unverified", text, json!({}));
        }
        let store = Self { url, prefix, name };
        drop(store.builder()?);
        Ok(store)
    }

    fn builder(&self) -> Result<LockRegistryBuilder, Failure> {
        let builder = LockRegistry::builder_for(&self.url);
        builder.map_err(|error| Failure::usage(chain(&error)))
    }

    /// The database, if it is one.
    pub(crate) fn postgres(&self) -> Option<PostgresStoreBuilder> {
        let is_postgres = self.url.starts_with("postgres");
        is_postgres.then(|| PostgresStore::builder(&self.url))
    }

    /// Connects once, so that a server that is not there is told at once. A missing schema is made if `migrates`.
    pub(crate) fn try_out(
        &self,
        migrates: bool,
    ) -> impl Future<Output = Result<(), Failure>> + use<> {
        let (url, postgres) = (self.url.clone(), self.postgres());
        async move {
            let tried = match postgres {
                Some(postgres) => postgres.migrate(migrates).connect().await.map(drop),
                None => RedisStore::connect(url).await.map(drop),
            };
            tried.map_err(|error| Failure::store(&error))
        }
    }

    /// A registry with the prefix and the name of the arguments or the url.
    pub(crate) fn registry(&self) -> Result<LockRegistry, Failure> {
        self.registry_of(self.builder()?)
    }

    /// The same with settings of its own.
    pub(crate) fn registry_with(
        &self,
        set: impl FnOnce(LockRegistryBuilder) -> LockRegistryBuilder,
    ) -> Result<LockRegistry, Failure> {
        self.registry_of(set(self.builder()?))
    }

    /// The same that makes no schema where there is none.
    pub(crate) fn looking_registry(&self) -> Result<LockRegistry, Failure> {
        let builder = match self.postgres() {
            Some(postgres) => {
                let store = postgres.migrate(false).connect_lazy();
                LockRegistry::builder(store.map_err(|error| Failure::usage(chain(&error)))?)
            }
            None => self.builder()?,
        };
        self.registry_of(builder)
    }

    fn registry_of(&self, mut builder: LockRegistryBuilder) -> Result<LockRegistry, Failure> {
        if let Some(prefix) = &self.prefix {
            builder = builder.prefix(prefix);
        }
        let name = self.name.clone().unwrap_or_else(name_of_host);
        let built = builder.name(name).build();
        built.map_err(|error| Failure::usage(error.to_string()))
    }

    /// Acquires the lock in memory, and yields that lease: keys and settings that no store takes are told before one is
    /// asked.
    pub(crate) async fn check(
        &self,
        lock: impl FnOnce(&LockRegistry) -> Lock,
    ) -> Result<Lease, Failure> {
        let registry = self.registry_of(LockRegistry::builder(MemoryStore::new()))?;
        let lease = lock(&registry).lease_within(Duration::ZERO).await;
        lease.map_err(|error| Failure::lock(&error, exit::BUSY))
    }

    /// The url for others who are to use the same locks.
    pub(crate) fn url_to_pass(&self) -> Result<String, Failure> {
        let settings = [("prefix", &self.prefix), ("name", &self.name)];
        let added = settings.into_iter().filter_map(|(name, value)| {
            let is_new = url::option(&self.url, name).is_none();
            Some((name, value.clone().filter(|_| is_new)?))
        });
        let added: Vec<_> = added.collect();
        url::with_options(self.url.clone(), &added).map_err(Failure::usage)
    }
}

/// As much of it as a name can hold.
fn name_of_host() -> String {
    let host = nix::unistd::gethostname().unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
    let name: String = host
        .to_string_lossy()
        .chars()
        .filter(is_plain)
        .take(64)
        .collect();
    if name.is_empty() {
        "lockstream".to_owned()
    } else {
        name
    }
}
