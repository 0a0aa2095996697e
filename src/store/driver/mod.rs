//! One engine of connections for every store with a network.
//!
//! A session takes the registry's ops as requests, and gives each to the node that has its key. The node's task owns the
//! connection to one server: it connects, sends calls, and reads answers and grants. What differs between kinds of servers
//! is behind two traits, [`Backend`] and [`Link`].
//!
//! | file | what is in it |
//! |---|---|
//! | `backend` | the two traits, and what is said between them and the session |
//! | `session`, `change` | a registry's session: takes requests to nodes, and answers back |
//! | `node` | the task that owns the connection to one server |
//! | `request` | one request about one key |
//! | `routing` | where a request goes if there are several servers, each with some of the keys |
//! | `subscriptions` | the keys whose grants such a server pushes |
//! | `backoff`, `server_clock` | pauses between attempts to connect; the server's clock |
//! | `../send_window` | which requests share a call, and how many calls are in flight |

mod backend;
mod backoff;
mod change;
mod node;
mod request;
mod routing;
mod server_clock;
mod session;
mod subscriptions;

pub(crate) use self::backend::{
    Address, Backend, Call, Connected, Hello, Incoming, Link, Next, Refusal, Replies, Reply, Slot,
    SlotMap, SlotSet, Trouble,
};
pub(crate) use self::backoff::Backoff;
pub(crate) use self::node::{IDLE, Received};
pub(crate) use self::request::{Request, RequestKind};
pub(crate) use self::server_clock::ServerClock;
pub(crate) use self::session::DriverSession;
pub(crate) use self::subscriptions::Order;
