//! How the loss of a lease reaches tasks that do not poll it.

use tokio_util::sync::CancellationToken;

use super::lease_view::LeaseView;
use crate::engine::Cancellation;

impl LeaseView {
    /// A token that is cancelled when the lease is lost, or its registry is shut down: what [`lost`](Self::lost) tells,
    /// for spawned tasks and for code that takes a [`CancellationToken`].
    ///
    /// If the lease is over already, the token is cancelled from the start. A release does not cancel it, nor does a
    /// lease that is dropped, detached or left to expire; only a release that finds the lease lost does. So tasks that may
    /// outlive the lock must be awaited before it is released. A lease of several keys cancels nothing once it is dropped,
    /// unless you keep a view of it.
    ///
    /// Each call returns a token of its own: cancelling one cancels neither the lease nor the tokens of other calls.
    ///
    /// A task is stopped where it awaits the token, and not before. At a shutdown the lease is released 100 ms after the
    /// token was cancelled, at the latest.
    ///
    /// # Examples
    ///
    /// ```
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # async fn copy(_part: u32) {}
    /// let locks = LockRegistry::in_memory();
    /// let lock = locks.obtain("backup");
    /// lock.with_lease(async |lease| {
    ///     let mut parts = tokio::task::JoinSet::new();
    ///     for part in 0..3 {
    ///         let lost = lease.cancellation_token();
    ///         parts.spawn(async move { lost.run_until_cancelled(copy(part)).await });
    ///     }
    ///     // All of them have ended before the lock is released.
    ///     parts.join_all().await
    /// })
    /// .await?;
    /// # Ok(()) }
    /// ```
    #[cfg_attr(docsrs, doc(cfg(feature = "tokio-util")))]
    pub fn cancellation_token(&self) -> CancellationToken {
        self.note_runtime();
        let callers = self.members().iter().map(LeaseView::caller);
        let cancellation = self
            .cancellation()
            .get_or_init(|| Cancellation::of(callers));
        // The loss is looked for after the watch was registered, so that none falls between the two.
        cancellation.child(self.loss().is_some())
    }
}
