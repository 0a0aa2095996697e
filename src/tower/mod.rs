//! One request a key at a time, for any service of `tower`: see [`LockLayer`].
//!
//! | file | contents |
//! |---|---|
//! | `layer.rs` | the layer, and what a request is handled under |
//! | `service.rs` | the service that locks |
//! | `future.rs` | its future |
//! | `on_error.rs` | what an error of the lock becomes |

mod future;
mod layer;
mod on_error;
mod service;

pub use self::future::ResponseFuture;
pub use self::layer::{LockLayer, RequestLock};
pub use self::on_error::{IntoServiceError, OnLockError};
pub use self::service::LockService;
