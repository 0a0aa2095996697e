//! The functions in the database, as our code calls them.

mod model;
use crate::store::support;
