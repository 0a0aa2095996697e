//! What a turnstile knows of its key in the store, and the op that is in flight.

use super::acquisition::{Acquisition, Footprint};
use super::pending::PendingOp;
use super::tenure::Tenure;
use super::time::Point;
use super::wait_queue::WaiterId;
use crate::StoreError;
use crate::store::contract::{Grant, Op};
use crate::token::is_epoch;

/// How this registry stands to the key in the store.
#[derive(Debug)]
pub(super) enum KeyState<C> {
    Idle,
    /// An owner of ours is on its way to a tenure; the store is asked again at `ask_at`.
    Acquiring {
        acquisition: Acquisition,
        ask_at: Point,
    },
    Held(Tenure<C>),
}

/// The op in flight (O2).
#[derive(Debug)]
pub(super) struct InFlight<C> {
    /// Itself, until the shell has taken it.
    pub(super) unsent: Option<Op>,
    pub(super) sent: Point,
    /// The newest arrival that its answer speaks to.
    pub(super) upto: WaiterId,
    pub(super) what: Sent<C>,
    /// A grant that came before the reply that may have caused it (O3).
    pub(super) grant: Option<Received>,
}

/// A grant that came.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) at: Point,
    pub(super) grant: Grant,
    /// Why it does not count, if it does not.
    pub(super) doubt: Option<StoreError>,
}

#[derive(Debug)]
pub(super) enum Sent<C> {
    /// An attempt or enter for the acquisition that we seek with.
    Ask {
        /// What the store may have of ours if its answer never comes.
        footprint: Footprint,
    },
    Pending(PendingOp<C>),
}

impl<C> Sent<C> {
    /// Whether it asks for nothing.
    pub(super) fn gives_back(&self) -> bool {
        matches!(self, Self::Pending(pending) if !matches!(pending.op, Op::Yield { .. }))
    }
}

/// F2: why a tenure with this epoch would not count, which gives the key back. Its tokens would not grow.
pub(super) fn epoch_fault(epoch: u64) -> Option<StoreError> {
    let fault = || format!("epoch {epoch} out of range: its fencing tokens would not fit an i64");
    (!is_epoch(epoch)).then(|| StoreError::lasting(fault()))
}
