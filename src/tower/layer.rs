use std::fmt;

use tower_layer::Layer;

use super::on_error::IntoServiceError;
use super::service::LockService;
use crate::{Lock, LockError};

/// A layer that lets a service handle one request a key at a time, over all processes that share the store.
///
/// For each request a closure makes the [`Lock`], with whatever wait, ttl, mode and renewal it is to have. For a
/// request without a lock it returns [`RequestLock::Unlocked`]. The inner service is called under the lease, exactly as
/// by [`with_lock`](crate::FutureLockExt::with_lock): the lock is held until the service's future has completed. A
/// fixed [`ttl`](Lock::ttl) bounds the call: one that takes longer is dropped, and its error is [`LockError::Lost`].
///
/// # What the lock covers
///
/// The lock ends when the response's head is there: **it does not cover a body that is streamed after that**. A handler
/// that must finish writing under the lock has to build the whole body before it returns.
///
/// A lock is no idempotency: a request that is sent again after the first was handled is handled again. Store what must
/// happen once under a unique key.
///
/// # Readiness
///
/// The service is always ready. The inner service is cloned for each request, and the clone is made ready only when the
/// lock is held. So a limit of the inner service is not used up by requests that wait for a lock, and its readiness is
/// not told to the outside. Bound the callers that wait with
/// [`max_waiters`](crate::LockRegistryBuilder::max_waiters), or with a limit outside of this layer.
///
/// # The lease in the handler
///
/// Inside the call, [`reentrant`](Lock::reentrant) locks of the same registry and key share its lease: with
/// `locks.obtain(key).reentrant().lease()` a handler has the fencing token. That does not reach into tasks that it spawns.
///
/// # Errors
///
/// Those of [`with_lock`](crate::FutureLockExt::with_lock): also [`LockError::InvalidKey`] for a request whose key
/// cannot name a lock. By default they are errors of the service, whose error type needs `From<LockError>`. With
/// [`or_else`](Self::or_else) a closure makes each of them a response or an error.
///
/// # Cancel safety
///
/// A response future that is dropped leaves the queue, or drops the inner call and then releases the lock in the
/// background. So a client that hangs up takes its request out of the queue, if the server drops the future then.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use lockstream::tower::LockLayer;
/// use lockstream::{LockError, LockRegistry};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// struct Pay {
///     order: u64,
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// let locks = LockRegistry::in_memory();
/// let one_at_a_time = move |pay: &Pay| locks.obtain(format!("order:{}", pay.order)).wait(Duration::ZERO);
/// let layer = LockLayer::new(one_at_a_time).or_else(|error: LockError| match error.is_not_acquired() {
///     true => Ok("in progress"),
///     false => Err(error),
/// });
/// let service = layer.layer(service_fn(async |_: Pay| {
///     tokio::time::sleep(Duration::from_millis(10)).await;
///     Ok("paid")
/// }));
///
/// let (one, two) = tokio::join!(
///     service.clone().oneshot(Pay { order: 42 }),
///     service.clone().oneshot(Pay { order: 42 }),
/// );
/// assert_eq!((one?, two?), ("paid", "in progress"));
/// # Ok(()) }
/// ```
///
/// Requests that only read need no lock:
///
/// ```
/// use lockstream::LockRegistry;
/// use lockstream::tower::{LockLayer, RequestLock};
///
/// enum Order {
///     Look(u64),
///     Pay(u64),
/// }
///
/// # fn layer(locks: LockRegistry) -> LockLayer<impl Fn(&Order) -> RequestLock> {
/// LockLayer::new(move |order: &Order| match order {
///     Order::Look(_) => RequestLock::Unlocked,
///     Order::Pay(id) => locks.obtain(format!("order:{id}")).into(),
/// })
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a layer does nothing until a service is built with it"]
pub struct LockLayer<F, E = IntoServiceError> {
    lock: F,
    pub(super) on_error: E,
}

/// What a request is handled under.
///
/// A closure that always returns a [`Lock`] does not need this type: a lock converts into it. An `Option<Lock>` does
/// not: a request whose key is missing must not be handled without a lock by oversight.
#[derive(Debug)]
#[non_exhaustive]
#[allow(
    clippy::large_enum_variant,
    reason = "requests with a lock are the usual ones, and cost no allocation"
)]
pub enum RequestLock {
    /// This lock is held while the request is handled.
    Locked(Lock),
    /// No lock: any number of such requests are handled at once.
    Unlocked,
}

impl From<Lock> for RequestLock {
    fn from(lock: Lock) -> Self {
        Self::Locked(lock)
    }
}

impl<F> LockLayer<F> {
    /// Handles each request under the lock that `lock` returns for it: a [`Lock`], or a [`RequestLock`].
    ///
    /// Name the type of the request in the closure: `move |request: &Request<Body>| …`.
    pub fn new<R, L>(lock: F) -> Self
    where
        F: Fn(&R) -> L,
        L: Into<RequestLock>,
    {
        Self {
            lock,
            on_error: IntoServiceError,
        }
    }
}

impl<F, E> LockLayer<F, E> {
    /// What the caller of the service gets if the lock fails: a response, or an error.
    ///
    /// The closure is given every error of the lock: [`LockError::NotAcquired`] if others had it for the whole wait, but
    /// also a lost lease ([`LockError::Lost`], after the inner service was called), a store that does not answer, a
    /// registry that was shut down. If it makes all of them responses, the error type needs no `From<LockError>`: so it is
    /// in axum.
    pub fn or_else<O, Response, Error>(self, on_error: O) -> LockLayer<F, O>
    where
        O: Fn(LockError) -> Result<Response, Error>,
    {
        LockLayer {
            lock: self.lock,
            on_error,
        }
    }

    pub(super) fn lock<R, L>(&self, request: &R) -> RequestLock
    where
        F: Fn(&R) -> L,
        L: Into<RequestLock>,
    {
        (self.lock)(request).into()
    }
}

impl<S, F: Clone, E: Clone> Layer<S> for LockLayer<F, E> {
    type Service = LockService<S, F, E>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, self.clone())
    }
}

impl<F, E> fmt::Debug for LockLayer<F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer").finish_non_exhaustive()
    }
}
