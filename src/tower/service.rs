use std::fmt;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::ResponseFuture;
use super::layer::{LockLayer, RequestLock};
use super::on_error::OnLockError;

/// Handles one request a key at a time; made by [`LockLayer`], which says how.
#[derive(Clone)]
pub struct LockService<S, F, E> {
    inner: S,
    layer: LockLayer<F, E>,
}

impl<S, F, E> LockService<S, F, E> {
    pub(super) fn new(inner: S, layer: LockLayer<F, E>) -> Self {
        Self { inner, layer }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, F, E, R, L> Service<R> for LockService<S, F, E>
where
    S: Service<R> + Clone,
    F: Fn(&R) -> L,
    L: Into<RequestLock>,
    E: OnLockError<S::Response, S::Error> + Clone,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = ResponseFuture<S, R, E>;

    /// The inner service is made ready under the lock.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Self::Future {
        let lock = self.layer.lock(&request);
        let on_error = self.layer.on_error.clone();
        ResponseFuture::new(lock, self.inner.clone(), request, on_error)
    }
}

impl<S: fmt::Debug, F, E> fmt::Debug for LockService<S, F, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}
