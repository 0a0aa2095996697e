use std::fmt;
use std::marker::PhantomData;

use tower_layer::Layer;

use super::on_error::IntoServiceError;
use super::on_lease::IgnoreLease;
use super::service::LockService;
use crate::base::LockError;
use crate::handle::{LeaseView, Lock};

/// A layer that lets a service handle one request a key at a time, over all processes that share the store.
///
/// For each request a closure makes the [`Lock`], with whatever wait, ttl, mode and renewal it is to have. For a
/// request without a lock it returns [`RequestLock::Unlocked`]. The inner service is called under the lease, exactly as
/// by [`with_lock`](crate::FutureLockExt::with_lock): the lock is held until the service's future has completed. A
/// fixed [`ttl`](Lock::ttl) bounds the call: one that takes longer is dropped, and its error is [`LockError::Lost`].
///
/// # What the lock covers
///
/// The lock ends when the response's head is there: **it does not cover a body that is streamed after that**, unless the
/// layer says [`hold_through_body`](Self::hold_through_body) (feature `http`).
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
/// With [`lease_in_extensions`](Self::lease_in_extensions) (feature `http`) the request has a [`LeaseView`] among its
/// extensions, with the fencing token, the deadline and the loss. For requests of another protocol
/// [`on_lease`](Self::on_lease) puts it wherever it belongs. Inside the call, [`reentrant`](Lock::reentrant) locks of the
/// same registry and key share the lease; that does not reach into tasks that the handler spawns.
///
/// # Requests
///
/// Requests should own what they hold. The closure is for one type of request, `Fn(&R)`, so a service of requests that
/// borrow, such as `Service<&'a str>`, is one of a single lifetime. Its calls do not compile in a spawned task.
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
pub struct LockLayer<F, E = IntoServiceError, H = IgnoreLease, U = UntilHead> {
    lock: F,
    pub(super) on_error: E,
    pub(super) on_lease: H,
    until: PhantomData<U>,
}

/// The lock is held until the response's head is there: the default of a [`LockLayer`].
#[derive(Clone, Copy, Debug)]
pub struct UntilHead;

/// The lock is held until the response's body has ended; see
/// [`hold_through_body`](LockLayer::hold_through_body).
#[cfg(feature = "http")]
#[cfg_attr(docsrs, doc(cfg(feature = "http")))]
#[derive(Clone, Copy, Debug)]
pub struct UntilBodyEnd;

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
        Self::of(lock, IntoServiceError, IgnoreLease)
    }
}

impl<F, E, H, U> LockLayer<F, E, H, U> {
    fn of(lock: F, on_error: E, on_lease: H) -> Self {
        Self {
            lock,
            on_error,
            on_lease,
            until: PhantomData,
        }
    }

    /// What the caller of the service gets if the lock fails: a response, or an error.
    ///
    /// The closure is given every error of the lock: [`LockError::NotAcquired`] if others had it for the whole wait, but
    /// also a lost lease ([`LockError::Lost`], after the inner service was called), a store that does not answer, a
    /// registry that was shut down. If it makes all of them responses, the error type needs no `From<LockError>`: so it is
    /// in axum.
    pub fn or_else<O, Response, Error>(self, on_error: O) -> LockLayer<F, O, H, U>
    where
        O: Fn(LockError) -> Result<Response, Error>,
    {
        LockLayer::of(self.lock, on_error, self.on_lease)
    }

    /// Shows each request its lease before the inner service is called: for requests of any protocol.
    ///
    /// The closure is not called for a request without a lock.
    ///
    /// ```
    /// use lockstream::tower::LockLayer;
    /// use lockstream::{LockError, LockRegistry, Token};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// struct Write {
    ///     row: u64,
    ///     token: Option<Token>,
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let layer = LockLayer::new(move |write: &Write| locks.obtain(format!("row:{}", write.row)))
    ///     .on_lease(|write: &mut Write, lease| write.token = Some(lease.token()));
    /// let service = layer.layer(service_fn(async |write: Write| Ok::<_, LockError>(write.token)));
    /// assert!(service.oneshot(Write { row: 7, token: None }).await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn on_lease<O, R>(self, on_lease: O) -> LockLayer<F, E, O, U>
    where
        O: Fn(&mut R, LeaseView),
    {
        LockLayer::of(self.lock, self.on_error, on_lease)
    }

    /// Puts a [`LeaseView`] into the extensions of each HTTP request that has a lock: with the fencing token for what the
    /// handler writes.
    ///
    /// In axum, `Extension(lease): Extension<LeaseView>` is its extractor; where some requests have no lock, it is
    /// `Option<Extension<LeaseView>>`.
    ///
    /// ```
    /// use http::{Request, Response};
    /// use lockstream::tower::LockLayer;
    /// use lockstream::{LeaseView, LockError, LockRegistry};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let layer = LockLayer::new(move |request: &Request<String>| locks.obtain(request.uri().path()));
    /// let service = layer.lease_in_extensions().layer(service_fn(async |request: Request<String>| {
    ///     let lease = request.extensions().get::<LeaseView>().expect("each request has a lock");
    ///     Ok::<_, LockError>(Response::new(format!("token {}", lease.token())))
    /// }));
    /// let response = service.oneshot(Request::new(String::new())).await?;
    /// assert!(response.body().starts_with("token "));
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn lease_in_extensions(self) -> LockLayer<F, E, super::LeaseInExtensions, U> {
        LockLayer::of(self.lock, self.on_error, super::LeaseInExtensions)
    }

    /// Holds the lock until the body of the response has ended, or is dropped: for responses that are streamed.
    ///
    /// The service's responses must be [`http::Response`]s with a body of `http-body`. Theirs becomes a
    /// [`LockedBody`](super::LockedBody), whose error is a box, and whose end waits until the release is confirmed, for
    /// one response time-out at most. A body of a known length may be sent in whole, and so be read, a moment before the
    /// release: a server does not ask it for its end. A response without a body, and an error, are delivered when the
    /// lock is released, as without this option.
    ///
    /// **A client that reads slowly holds the lock for as long**, since the lease is renewed while the body is there. A
    /// fixed [`ttl`](Lock::ttl) bounds it.
    ///
    /// # Errors
    ///
    /// If the lease is lost in mid-body, the inner body is dropped, and the next frame is the error:
    /// [`LockError::Lost`], or [`LockError::Closed`] after a shutdown. [`or_else`](Self::or_else) is not asked, since the
    /// head was sent already. A server breaks off such a response, so that the client does not take it for a whole one.
    ///
    /// # Examples
    ///
    /// ```
    /// use http::{Request, Response};
    /// use lockstream::tower::LockLayer;
    /// use lockstream::{LockError, LockRegistry};
    /// use tower::{Layer, ServiceExt, service_fn};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let other = locks.obtain("/export").wait(std::time::Duration::ZERO);
    /// let layer = LockLayer::new(move |request: &Request<String>| locks.obtain(request.uri().path()));
    /// let export = service_fn(async |_: Request<String>| Ok::<_, LockError>(Response::new("rows".to_owned())));
    /// let service = layer.hold_through_body().layer(export);
    ///
    /// let request = Request::get("/export").body(String::new()).expect("a path");
    /// let response = service.oneshot(request).await?;
    /// assert!(!other.acquire().await?, "the body is still there");
    /// drop(response); // or read to its end
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "http")]
    #[cfg_attr(docsrs, doc(cfg(feature = "http")))]
    pub fn hold_through_body(self) -> LockLayer<F, E, H, UntilBodyEnd> {
        LockLayer::of(self.lock, self.on_error, self.on_lease)
    }

    pub(super) fn lock<R, L>(&self, request: &R) -> RequestLock
    where
        F: Fn(&R) -> L,
        L: Into<RequestLock>,
    {
        (self.lock)(request).into()
    }
}

impl<S, F: Clone, E: Clone, H: Clone, U: Clone> Layer<S> for LockLayer<F, E, H, U> {
    type Service = LockService<S, F, E, H, U>;

    fn layer(&self, inner: S) -> Self::Service {
        LockService::new(inner, self.clone())
    }
}

impl<F, E, H, U> fmt::Debug for LockLayer<F, E, H, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockLayer").finish_non_exhaustive()
    }
}
