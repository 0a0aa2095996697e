//! The functions in the database, as our code calls them.

mod ending;
mod model;
mod sweep;

use crate::store::{hearing, support};
