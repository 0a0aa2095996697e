//! A registry on the store that the url names.

use std::time::Duration;

use lockstream::store::{MemoryStore, PostgresStore, RedisStore};
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
        match error {
            // About the store, and not about the lock.
            LockError::Store { source, .. } if source.is_retryable() => Self::store(source),
            _ => Self::new(exit::of_error(error, busy), chain(error)),
        }
    }
}

/// A store whose url is valid. Nothing was sent yet.
#[derive(Debug)]
pub(crate) struct Store {
    /// With what options of the command line have added to it.
    url: String,
    kind: Kind,
    prefix: Option<String>,
    name: Option<String>,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one in the process")]
enum Kind {
    Redis(RedisStore),
    Postgres(PostgresStore),
}

impl Store {
    /// Reads the url. A missing schema is made when somebody connects.
    pub(crate) fn find(args: &StoreArgs) -> Result<Self, Failure> {
        Self::read(args, true)
    }

    /// The same that makes no schema where there is none.
    pub(crate) fn for_looking(args: &StoreArgs) -> Result<Self, Failure> {
        Self::read(args, false)
    }

    fn read(args: &StoreArgs, migrates: bool) -> Result<Self, Failure> {
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
        let kind = match url.to_ascii_lowercase().starts_with("postgres") {
            true => {
                let builder = PostgresStore::builder(&url).migrate(migrates);
                builder.connect_lazy().map(Kind::Postgres)
            }
            false => RedisStore::connect_lazy(&url).map(Kind::Redis),
        };
        Ok(Self {
            kind: kind.map_err(|error| Failure::usage(chain(&error)))?,
            url,
            prefix,
            name,
        })
    }

    /// The database, if it is one.
    pub(crate) fn postgres(&self) -> Option<&PostgresStore> {
        match &self.kind {
            Kind::Postgres(store) => Some(store),
            Kind::Redis(_) => None,
        }
    }

    /// A registry with the prefix and the name of the arguments or the url.
    pub(crate) fn registry(&self) -> Result<LockRegistry, Failure> {
        self.registry_of(match &self.kind {
            Kind::Redis(store) => LockRegistry::builder(store.clone()),
            Kind::Postgres(store) => LockRegistry::builder(store.clone()),
        })
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
