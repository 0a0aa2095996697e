//! One request a key at a time, for any service of `tower`: see [`LockLayer`].
//!
//! | file | contents |
//! |---|---|
//! | `layer.rs` | the layer, and what a request is handled under |
//! | `service.rs` | the service that locks |
//! | `future.rs` | its future |
//! | `on_error.rs` | what an error of the lock becomes |
//! | `on_lease.rs` | how a request sees its lease |
//! | `body.rs` | the body of a response that is sent under the lock |

#[cfg(feature = "http")]
mod body;
mod future;
mod layer;
mod on_error;
mod on_lease;
mod service;

#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub use self::body::LockedBody;
pub use self::future::ResponseFuture;
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub use self::layer::UntilBodyEnd;
pub use self::layer::{LockLayer, RequestLock, UntilHead};
pub use self::on_error::{IntoServiceError, OnLockError};
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
pub use self::on_lease::LeaseInExtensions;
pub use self::on_lease::{IgnoreLease, OnLease};
pub use self::service::LockService;
