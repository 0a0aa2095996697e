//! The functions in the database, as our code calls them.

mod ending;
mod model;
mod sweep;
#[cfg(feature = "tls-rustls")]
mod urls;

use crate::store::{hearing, support};
