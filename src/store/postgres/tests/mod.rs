//! The functions in the database, as our code calls them.

mod model;
#[path = "../../../../tests/support/mod.rs"]
mod support;
