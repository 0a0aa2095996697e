use std::fmt;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::ResponseFuture;
use super::layer::{LockLayer, RequestLock, UntilHead};
use super::on_error::OnLockError;
use super::on_lease::{IgnoreLease, OnLease};

/// Handles one request a key at a time; made by [`LockLayer`], which says how.
#[derive(Clone)]
pub struct LockService<S, F, E, H = IgnoreLease, U = UntilHead> {
    inner: S,
    layer: LockLayer<F, E, H, U>,
}

impl<S, F, E, H, U> LockService<S, F, E, H, U> {
    pub(super) fn new(inner: S, layer: LockLayer<F, E, H, U>) -> Self {
        Self { inner, layer }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    fn future<R, L>(&self, request: R) -> ResponseFuture<S, R, E, H, U>
    where
        S: Service<R> + Clone,
        F: Fn(&R) -> L,
        L: Into<RequestLock>,
        E: Clone,
        H: Clone,
    {
        let lock = self.layer.lock(&request);
        let (on_error, on_lease) = (self.layer.on_error.clone(), self.layer.on_lease.clone());
        ResponseFuture::new(lock, (self.inner.clone(), request), on_error, on_lease)
    }
}

impl<S, F, E, H, R, L> Service<R> for LockService<S, F, E, H>
where
    S: Service<R> + Clone,
    F: Fn(&R) -> L,
    L: Into<RequestLock>,
    E: OnLockError<S::Response, S::Error> + Clone,
    H: OnLease<R> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, R, E, H>;

    /// The inner service is made ready under the lock.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.future(request)
    }
}

#[cfg(feature = "http")]
impl<S, F, E, H, R, L, B> Service<R> for LockService<S, F, E, H, super::UntilBodyEnd>
where
    S: Service<R, Response = http::Response<B>> + Clone,
    F: Fn(&R) -> L,
    L: Into<RequestLock>,
    E: OnLockError<S::Response, S::Error> + Clone,
    H: OnLease<R> + Clone,
    B: http_body::Body,
{
    type Response = http::Response<super::LockedBody<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, R, E, H, super::UntilBodyEnd>;

    /// The inner service is made ready under the lock.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.future(request)
    }
}

impl<S: fmt::Debug, F, E, H, U> fmt::Debug for LockService<S, F, E, H, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}
