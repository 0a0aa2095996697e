use std::pin::Pin;

use super::guarded::{Begin, Guarded, Kind, OfFuture};
use super::outcome::{Flatten, OrSkip, Try};
use crate::base::LockError;

/// A future that has a lock of its own: what [`with_lock`](crate::FutureLockExt::with_lock),
/// [`try_with_lock`](crate::FutureLockExt::try_with_lock), [`with_lease`](crate::Lock::with_lease),
/// [`try_with_lease`](crate::Lock::try_with_lease) and their `or_skip` return.
///
/// Sealed: [`buffer_keyed`](crate::StreamLockExt::buffer_keyed) looks at the lock before the work begins.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no lock of its own",
    label = "not a future of `with_lock`",
    note = "each item must be the future itself, not boxed and not in an `async` block: `stream.map(|order| charge(order).with_lock(locks.obtain(key)))`"
)]
pub trait LockedFuture: Future + sealed::HasWorkLock {
    /// What it yields, if it is not left out.
    type Item;

    /// `None`: it was [skipped](crate::future::Guarded::or_skip).
    #[doc(hidden)]
    fn item(output: Self::Output) -> Option<Self::Item>;
}

pub(super) mod sealed {
    use std::pin::Pin;

    use crate::combinator::work_lock::WorkLock;

    pub trait HasWorkLock {
        #[doc(hidden)]
        fn work_lock(self: Pin<&mut Self>) -> Access<'_>;
    }

    /// What nobody outside of the crate can use.
    #[derive(Debug)]
    pub struct Access<'a>(pub(in crate::combinator) &'a mut WorkLock);
}

impl<B: Begin, K: Kind<B::Work>> sealed::HasWorkLock for Guarded<B, K> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        sealed::Access(self.work_lock_mut())
    }
}

impl<W: sealed::HasWorkLock> sealed::HasWorkLock for Try<W> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        self.project().inner.work_lock()
    }
}

impl<W: sealed::HasWorkLock> sealed::HasWorkLock for OrSkip<W> {
    fn work_lock(self: Pin<&mut Self>) -> sealed::Access<'_> {
        self.project().inner.work_lock()
    }
}

impl<B: Begin> LockedFuture for Guarded<B, OfFuture>
where
    B::Work: Future,
{
    type Item = Result<<B::Work as Future>::Output, LockError>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        Some(output)
    }
}

impl<W, T> LockedFuture for OrSkip<W>
where
    W: LockedFuture<Output = Result<T, LockError>>,
{
    type Item = Result<T, LockError>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        output.transpose()
    }
}

impl<B: Begin> LockedFuture for Try<Guarded<B, OfFuture>>
where
    B::Work: Future<Output: Flatten>,
{
    type Item = <<B::Work as Future>::Output as Flatten>::Flat;

    fn item(output: Self::Output) -> Option<Self::Item> {
        Some(output)
    }
}

impl<B: Begin, T, E> LockedFuture for Try<OrSkip<Guarded<B, OfFuture>>>
where
    B::Work: Future<Output = Result<T, E>>,
    E: From<LockError>,
{
    type Item = Result<T, E>;

    fn item(output: Self::Output) -> Option<Self::Item> {
        output.transpose()
    }
}
