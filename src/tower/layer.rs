use std::fmt;
use std::time::Duration;

use tower_layer::Layer;

use super::on_error::IntoServiceError;
use super::service::LockService;
use crate::{Lock, LockError, LockRegistry};

/// A layer that lets a service handle one request a key at a time, over all processes that share the store.
///
/// For each request a closure names the key. `None` is handled at once, without a lock. The inner service is called under
/// the lease, exactly as by [`with_lock`](crate::FutureLockExt::with_lock): the lock is held until the service's future
/// has completed.
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
/// Those of [`with_lock`](crate::FutureLockExt::with_lock). By default they are errors of the service, whose error type
/// needs `From<LockError>`. With [`or_else`](Self::or_else) a closure makes each of them a response or an error.
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
/// let layer = LockLayer::new(locks, |pay: &Pay| Some(format!("order:{}", pay.order)))
///     .wait(Duration::ZERO)
///     .or_else(|error: LockError| match error.is_not_acquired() {
///         true => Ok("in progress"),
///         false => Err(error),
///     });
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
#[derive(Clone)]
#[must_use = "a layer does nothing until a service is built with it"]
pub struct LockLayer<K, E = IntoServiceError> {
    locks: LockRegistry,
    key: K,
    wait: Option<Duration>,
    ttl: Option<Duration>,
    pub(super) on_error: E,
}

impl<K> LockLayer<K> {
    /// Locks what `key` names for each request, in this registry. `None`: no lock.
    ///
    /// Name the type of the request in the closure: `|request: &Request<Body>| …`.
    pub fn new<R, Q>(locks: LockRegistry, key: K) -> Self
    where
        K: Fn(&R) -> Option<Q>,
        Q: AsRef<str>,
    {
        Self {
            locks,
            key,
            wait: None,
            ttl: None,
            on_error: IntoServiceError,
        }
    }
}

impl<K, E> LockLayer<K, E> {
    /// How long a request waits for its lock: see [`Lock::wait`]. Default: the registry's, 30 s. [`Duration::ZERO`] refuses
    /// at once what is being handled already.
    pub fn wait(self, wait: Duration) -> Self {
        let wait = Some(wait);
        Self { wait, ..self }
    }

    /// How long a request may be handled: a lease of this length, from 10 ms to 24 h, which is not renewed (see
    /// [`Lock::ttl`]). A call that takes longer is dropped, and its error is [`LockError::Lost`]. Default: the registry's
    /// ttl, renewed as long as the call runs.
    pub fn ttl(self, ttl: Duration) -> Self {
        let ttl = Some(ttl);
        Self { ttl, ..self }
    }

    /// What the caller of the service gets if the lock fails: a response, or an error.
    ///
    /// The closure is given every error of the lock: [`LockError::NotAcquired`] if others had it for the whole wait, but
    /// also a lost lease ([`LockError::Lost`], after the inner service was called), a store that does not answer, a
    /// registry that was shut down. If it makes all of them responses, the error type needs no `From<LockError>`: so it is
    /// in axum.
    pub fn or_else<F, Response, Error>(self, on_error: F) -> LockLayer<K, F>
    where
        F: Fn(LockError) -> Result<Response, Error>,
    {
        LockLayer {
            locks: self.locks,
            key: self.key,
            wait: self.wait,
            ttl: self.ttl,
            on_error,
        }
    }

    /// The lock for a request, if it needs one.
    pub(super) fn lock<R, Q>(&self, request: &R) -> Option<Lock>
    where
        K: Fn(&R) -> Option<Q>,
        Q: AsRef<str>,
    {
        let key = (self.key)(request)?;
        let mut lock = self.locks.obtain(key);
        if let Some(wait) = self.wait {
            lock = lock.wait(wait);
        }
        if let Some(ttl) = self.ttl {
            lock = lock.ttl(ttl);
        }
        Some(lock)
    }
}

impl<S, K: Clone, E: Clone> Layer<S> for LockLayer<K, E> {
    type Service = LockService<S, K, E>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, self.clone())
    }
}

impl<K, E> fmt::Debug for LockLayer<K, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer")
            .field("locks", &self.locks)
            .field("wait", &self.wait)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}
