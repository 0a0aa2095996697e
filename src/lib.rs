//! Distributed locks as future and stream combinators.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod acquire;
mod clock;
mod driver;
mod error;
mod key;
mod lease;
mod lock;
mod registry;
mod repeat;
mod settings;
pub mod store;
mod turnstile;
#[cfg(feature = "test-util")]
pub mod verify;
mod with_lock;

pub use self::error::{LockError, StoreError};
pub use self::lease::{Lease, LeaseView};
pub use self::lock::{Inspection, IntoLock, Lock};
pub use self::registry::{AlreadyInstalled, LockRegistry, LockRegistryBuilder};
pub use self::repeat::Repeat;
pub use self::settings::OnLost;
pub use self::with_lock::{FutureLockExt, StreamLockExt, future, stream};

/// What most programs use, in one line: `use lockstream::prelude::*;`.
pub mod prelude {
    pub use crate::{FutureLockExt, IntoLock, Lease, Lock, LockError, LockRegistry, StreamLockExt};
}
