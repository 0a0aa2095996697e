use std::borrow::{Borrow, Cow};
use std::sync::Arc;

use crate::handle::lock::Lock;
use crate::handle::registry;
use crate::handle::registry::LockRegistry;

/// What can be locked: a [`Lock`], a bare key of the
/// [installed](LockRegistry::install) registry, or a registry and a key.
///
/// Sealed. A bare key with no registry installed is
/// [`LockError::NoRegistry`](crate::LockError::NoRegistry) at the first poll, never a lock that only
/// looks like one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what to lock",
    label = "not something that can be locked",
    note = "a lock can be: `registry.obtain(key)`, `&lock`, `(&registry, key)`, or a bare key (`&str`, `String`, …) once a registry was installed with `install()`"
)]
pub trait IntoLock: sealed::Sealed {
    #[doc(hidden)]
    fn into_lock(self) -> Lock;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Lock {}
impl IntoLock for Lock {
    fn into_lock(self) -> Lock {
        self
    }
}

impl sealed::Sealed for Arc<Lock> {}
impl IntoLock for Arc<Lock> {
    fn into_lock(self) -> Lock {
        (*self).clone()
    }
}

macro_rules! bare_keys {
    ($($key:ty),*) => {$(
        impl sealed::Sealed for $key {}
        impl IntoLock for $key {
            fn into_lock(self) -> Lock {
                registry::obtain_installed(&self)
            }
        }
    )*};
}
bare_keys!(&str, String, Box<str>, Arc<str>, Cow<'_, str>);

impl<T: sealed::Sealed + Clone> sealed::Sealed for &T {}
impl<T: IntoLock + Clone> IntoLock for &T {
    fn into_lock(self) -> Lock {
        self.clone().into_lock()
    }
}

impl<R: Borrow<LockRegistry>, K: AsRef<str>> sealed::Sealed for (R, K) {}
impl<R: Borrow<LockRegistry>, K: AsRef<str>> IntoLock for (R, K) {
    fn into_lock(self) -> Lock {
        self.0.borrow().obtain(self.1)
    }
}
