//! What the driver asks of a kind of server, and of one connection to it.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::channel::oneshot;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use tokio::time::Instant;

use super::node::Received;
use super::request::Request;
use super::server_clock::ServerClock;
use super::subscriptions::Order;
use crate::base::{CheckedServer, StoreError};
use crate::store::attempts::SetUps;
use crate::store::contract::{KeyStatus, Outcome, ServerTime};
use crate::store::send_window::Limits;

/// `host:port` of a server, or the path of its socket.
pub(crate) type Address = Arc<str>;

/// A part of the keys: all keys of a slot are on one server.
pub(crate) type Slot = u16;

pub(crate) type SlotSet = BTreeSet<Slot>;

/// The slots of each server, as one of them saw it.
pub(crate) type SlotMap = Vec<(Address, RangeInclusive<Slot>)>;

/// A kind of server that can hold locks, as one registry uses it.
pub(crate) trait Backend: Send + Sync + Sized + 'static {
    type Link: Link;

    /// Where its server is. It may be another one at each connection. Of several servers, one of them.
    fn address(&self) -> &Address;

    /// How much is in flight on one connection of a link.
    fn limits(&self) -> Limits;

    /// On how many connections a link carries calls. All calls about a key go by one of them.
    fn lanes(&self) -> usize {
        1
    }

    /// How many parts the keys have. If there are several, each server has some of them, [`Backend::find_map`] tells
    /// which, and the grants of each key need a subscription of its own.
    fn slots(&self) -> usize {
        1
    }

    fn slot(&self, _key: &str) -> Slot {
        0
    }

    /// Whether an acquisition counts only once [`Link::confirm`] says so.
    fn confirms(&self) -> bool {
        false
    }

    /// Connects, and learns whether pushes arrive (O4). Is counted in `set_ups` from when a server has accepted the
    /// connection. Cancel safe: no step touches a lock.
    fn connect<'a>(
        self: &'a Arc<Self>,
        hello: Hello<'a, <Self::Link as Link>::Trace>,
        set_ups: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<Self::Link>, StoreError>>;

    /// How long that may take.
    fn connect_timeout(&self) -> Duration;

    /// How long connecting to one host may take, where a url names several.
    fn host_timeout(&self) -> Duration {
        self.connect_timeout()
    }

    /// Which server has which slot; these servers may know it, and others.
    fn find_map(&self, _known: Vec<Address>) -> BoxFuture<'_, Result<SlotMap, StoreError>> {
        unreachable!("all keys are on one server")
    }

    /// An error of ours, in this store's words.
    fn error(&self, address: &Address, trouble: Trouble<'_>) -> StoreError;

    /// The SQL that fences a transaction by a lease.
    fn fence(&self) -> Option<Arc<str>> {
        None
    }

    /// Connects to each server, and looks at it, as [`Session::check`](crate::store::contract::Session::check) says.
    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>>;

    /// Lists the keys that begin with `start`, as [`Session::scan`](crate::store::contract::Session::scan) says.
    fn scan(
        self: &Arc<Self>,
        start: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>>;
}

/// To which server a connection is made, and what is known of it.
#[derive(Clone, Debug)]
pub(crate) struct Hello<'a, T> {
    pub(crate) address: &'a Address,
    /// What this server has, as far as is known.
    pub(crate) slots: SlotSet,
    /// Whether no connection to it was made before by this task.
    pub(crate) is_first: bool,
    /// Whether another attempt hangs, beside which this one is made.
    pub(crate) is_beside: bool,
    /// The connection before, if it ended with calls in flight: the server should end it before it does anything for us.
    pub(crate) predecessor: Option<&'a T>,
}

/// A connection that is ready for calls.
pub(crate) struct Connected<L> {
    pub(crate) link: L,
    /// Why the server cannot push grants to us, if it cannot.
    pub(crate) no_push: Option<String>,
    pub(crate) clock: ServerClock,
    /// The server's own name, if it has one.
    pub(crate) identity: Option<Arc<str>>,
}

/// A connection to a server, or several that stand and fall together. Whoever owns it polls it: it has no task of its
/// own. Dropping it closes it; what is not written by then is never sent (O4).
pub(crate) trait Link: Send {
    /// The answer to a call, as it came.
    type Answer: Send;
    /// What a later connection needs to end this one on the server.
    type Trace: Send + Sync;

    /// Sends a call, which is written when the link is polled next. Never waits.
    fn send(&mut self, call: Call<'_>);

    /// Writes what is to be sent, and reads. Fails when the connection has ended, or a call is not answered in time.
    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Incoming<Self::Answer>, StoreError>>;

    /// What an answer says about each request of its call. Fails if it makes no sense: they may be done or not.
    fn read(
        &mut self,
        lane: usize,
        answer: Self::Answer,
        requests: &mut [Request],
    ) -> Result<Replies, StoreError>;

    /// Whether no answer is awaited.
    fn is_quiet(&self) -> bool;

    fn trace(&self) -> Option<Self::Trace>;

    /// Asks for the map of the slots.
    fn ask_map(&mut self, _asked: oneshot::Sender<SlotMap>) {}

    /// Begins or ends the subscription to the grants of a key. [`Incoming::Told`] follows.
    fn subscribe(&mut self, _order: Order) {}

    /// Takes an acquisition that is to be confirmed. [`Received::Confirmed`], [`Received::Failed`] or the answer that the
    /// question was refused follows.
    fn confirm(&mut self, _request: Request) {}

    /// Returns the acquisitions that are not confirmed yet.
    fn unconfirmed(&mut self) -> Vec<Request> {
        Vec::new()
    }
}

/// Requests of one priority and slot.
pub(crate) struct Call<'a> {
    pub(crate) lane: usize,
    pub(crate) now: Instant,
    /// The last time of the server at which the callers still wait for an answer (O5).
    pub(crate) of_use: ServerTime,
    /// The link may put them in another order.
    pub(crate) requests: &'a mut [Request],
}

/// What comes on a connection.
pub(crate) enum Incoming<A> {
    /// The answer to the oldest call of a lane, which was sent at that time.
    Answer {
        lane: usize,
        sent_at: Instant,
        answer: A,
    },
    /// A subscription has begun or ended as it was ordered, or was refused.
    Told(Order, Result<(), Refusal>),
    Other(Received),
}

/// What an answer says.
#[derive(Debug, Default)]
pub(crate) struct Replies {
    /// The server's time; not every call asks for it.
    pub(crate) at: Option<ServerTime>,
    /// One for each request.
    pub(crate) list: Vec<Reply>,
    /// Why the connection must not be used any more.
    pub(crate) end: Option<StoreError>,
}

/// What an answer says about one request.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Done {
        at: ServerTime,
        outcome: Outcome,
        /// Whether more tickets may fit than were served (M4).
        unserved: bool,
    },
    Seen(KeyStatus),
    /// The request came too late to be of use, and the server did nothing (O5).
    Stale,
    /// To be sent again at once.
    Again,
    /// To be sent again, behind what waits: its whole call was refused, perhaps because of another request.
    InParts,
    /// To be sent again after a pause, and nothing of its line before it.
    Later(Duration),
    Refused(Refusal),
}

/// Why the server did nothing of a request.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) error: StoreError,
    /// The server's own words.
    pub(crate) text: String,
    pub(crate) next: Next,
}

/// What is to be done after a refusal.
#[derive(Clone, Debug)]
pub(crate) enum Next {
    /// The registry is told.
    Nothing,
    /// The slot is at this node now.
    Moved(Address),
    /// The key is at this node, while its slot is being moved.
    Ask(Address),
    /// Nobody has the slot for now.
    Search,
    /// Some names of the request are there, and some not yet.
    Wait,
}

/// What can be wrong with a server.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trouble<'a> {
    /// It could not be asked, or did not answer, within this time.
    Silent(Duration),
    /// Our own task has ended, with its registry or its runtime.
    Abandoned,
    /// A renewal was not sent: its answer could not come in time.
    TooLate,
    /// An adoption waits for a transaction that is fenced by the lease.
    Fenced,
    /// It cannot push, for this reason.
    NoPush(&'a str),
    /// It is not what it should be.
    Garbled(&'static str),
    /// No server has the slot.
    NoOwner,
    /// A won lock was not confirmed.
    Unconfirmed(&'a StoreError),
}
