//! Distributed locks as future and stream combinators.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod clock;
mod driver;
mod error;
mod handle;
mod inspect;
mod into_lock;
mod key;
mod lease;
mod lock;
mod plan;
mod registry;
mod repeat;
mod settings;
pub mod store;
mod turnstile;
#[cfg(feature = "test-util")]
pub mod verify;
mod with_lock;

pub use self::error::{LockError, StoreError};
pub use self::inspect::Inspection;
pub use self::into_lock::IntoLock;
pub use self::lease::{Lease, LeaseView};
pub use self::lock::Lock;
pub use self::registry::{AlreadyInstalled, LockRegistry, LockRegistryBuilder};
pub use self::repeat::Repeat;
pub use self::settings::OnLost;
pub use self::with_lock::{FutureLockExt, StreamLockExt, future, stream};

/// What most programs use, in one line: `use lockstream::prelude::*;`.
pub mod prelude {
    pub use crate::{FutureLockExt, IntoLock, Lease, Lock, LockError, LockRegistry, StreamLockExt};
}
