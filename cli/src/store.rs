//! A registry on the store that the url names.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lockstream::store::{LockStore, MemoryStore, PostgresStore, RedisStore};
use lockstream::{Lease, Lock, LockError, LockRegistry, LockRegistryBuilder, StoreError};

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
    url: String,
    store: Arc<dyn LockStore>,
}

impl Store {
    /// Reads the url.
    pub(crate) fn find(args: &StoreArgs) -> Result<Self, Failure> {
        let variable = std::env::var_os(url::VARIABLE);
        let url = url::find(args.url.as_deref(), args.url_file.as_ref(), variable);
        let url = url.map_err(Failure::usage)?;
        url::check_scheme(&url).map_err(Failure::usage)?;
        let store = if is_postgres(&url) {
            PostgresStore::connect_lazy(&url).map(|store| Arc::new(store) as Arc<dyn LockStore>)
        } else {
            RedisStore::connect_lazy(&url).map(|store| Arc::new(store) as Arc<dyn LockStore>)
        };
        let store = store.map_err(|error| Failure::usage(chain(&error)))?;
        Ok(Self { url, store })
    }

    /// Connects once, so that a server that is not there is told at once. A missing schema is made if `migrates`.
    pub(crate) fn try_out(
        &self,
        migrates: bool,
    ) -> impl Future<Output = Result<(), Failure>> + use<> {
        let url = self.url.clone();
        async move {
            let tried = if is_postgres(&url) {
                let store = PostgresStore::builder(&url).migrate(migrates);
                store.connect().await.map(drop)
            } else {
                RedisStore::connect(url).await.map(drop)
            };
            tried.map_err(|error| Failure::store(&error))
        }
    }

    /// A registry with the prefix and the name of the arguments.
    pub(crate) fn registry(&self, args: &StoreArgs) -> Result<LockRegistry, Failure> {
        self.registry_of(args, |builder| builder)
    }

    /// The same with settings of its own.
    pub(crate) fn registry_of(
        &self,
        args: &StoreArgs,
        set: impl FnOnce(LockRegistryBuilder) -> LockRegistryBuilder,
    ) -> Result<LockRegistry, Failure> {
        build(set(LockRegistry::builder(self.store.clone())), args)
    }

    /// The url, with what options of the command line have added to it.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}

fn is_postgres(url: &str) -> bool {
    url.starts_with("postgres")
}

fn build(builder: LockRegistryBuilder, args: &StoreArgs) -> Result<LockRegistry, Failure> {
    let builder = builder.prefix(&args.prefix).name(args.name());
    builder
        .build()
        .map_err(|error| Failure::usage(error.to_string()))
}

/// Acquires the lock in memory: keys and settings that no store takes are told before one is asked. Yields that lease.
pub(crate) async fn check(
    args: &StoreArgs,
    lock: impl FnOnce(&LockRegistry) -> Lock,
) -> Result<Lease, Failure> {
    let registry = build(LockRegistry::builder(MemoryStore::new()), args)?;
    let lease = lock(&registry).lease_within(Duration::ZERO).await;
    lease.map_err(|error| Failure::lock(&error, exit::BUSY))
}
