//! The network between clients and servers, which is this machine's loopback made slower.
//!
//! | file | what is in it |
//! |---|---|
//! | `proxy.rs` | TCP proxies that delay, count and cut connections |
//! | `link.rs` | one connection through a proxy |

mod link;
mod proxy;

pub(crate) use proxy::Proxies;
