//! User and password, which may change while a store is in use.

use std::fmt;

use tokio::sync::watch;

/// The newest credentials: each new connection looks at them.
pub(in crate::store) type Newest = watch::Receiver<Credentials>;

/// User and password at a server. Its `Debug` hides the password.
///
/// # Examples
///
#[cfg_attr(
    feature = "redis",
    doc = "See [`RedisStoreBuilder::credentials`](super::RedisStoreBuilder::credentials)."
)]
#[cfg_attr(
    feature = "postgres",
    doc = "See [`PostgresStoreBuilder::credentials`](super::PostgresStoreBuilder::credentials)."
)]
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    user: String,
    password: String,
}

impl Credentials {
    /// Those of this user. No user, `""`, is the default user of a Redis server, and on PostgreSQL the user of the url.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Self {
        let (user, password) = (user.into(), password.into());
        Self { user, password }
    }

    pub(in crate::store) fn user(&self) -> &str {
        &self.user
    }

    /// The user, as Redis names it.
    pub(in crate::store) fn user_or_default(&self) -> &str {
        match &*self.user {
            "" => "default",
            user => user,
        }
    }

    pub(in crate::store) fn password(&self) -> &str {
        &self.password
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("user", &self.user_or_default())
            .finish_non_exhaustive()
    }
}
