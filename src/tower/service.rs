use std::fmt;
use std::task::{Context, Poll};

use tower_service::Service;

use super::future::ResponseFuture;
use super::layer::LockLayer;
use super::on_error::OnLockError;

/// Handles one request a key at a time; made by [`LockLayer`], which says how.
#[derive(Clone)]
pub struct LockService<S, K, E> {
    inner: S,
    layer: LockLayer<K, E>,
}

impl<S, K, E> LockService<S, K, E> {
    pub(super) fn new(inner: S, layer: LockLayer<K, E>) -> Self {
        Self { inner, layer }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }
}

impl<S, K, E, R, Q> Service<R> for LockService<S, K, E>
where
    S: Service<R> + Clone,
    K: Fn(&R) -> Option<Q>,
    Q: AsRef<str>,
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

impl<S: fmt::Debug, K, E> fmt::Debug for LockService<S, K, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockService")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}
