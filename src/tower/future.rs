use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project::pin_project;
use tower_service::Service;

use super::layer::RequestLock;
use super::on_error::OnLockError;
use crate::FutureLockExt;
use crate::future::WithLock;

/// Future of [`LockService`](super::LockService).
///
/// `Send` if the service, its future, the request, the response and the error are.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<S: Service<R>, R, E> {
    #[pin]
    state: State<S, R>,
    on_error: E,
}

#[pin_project(project = StateProj)]
#[allow(
    clippy::large_enum_variant,
    reason = "requests with a lock are the usual ones, and cost no allocation"
)]
enum State<S: Service<R>, R> {
    Unlocked(#[pin] Call<S, R>),
    Locked(#[pin] WithLock<Call<S, R>>),
}

/// Makes a service ready and then calls it.
#[pin_project(project = CallProj)]
enum Call<S: Service<R>, R> {
    Unready { service: S, request: Option<R> },
    Called(#[pin] S::Future),
}

impl<S: Service<R>, R, E> ResponseFuture<S, R, E> {
    pub(super) fn new(lock: RequestLock, service: S, request: R, on_error: E) -> Self {
        let request = Some(request);
        let call = Call::Unready { service, request };
        let state = match lock {
            RequestLock::Locked(lock) => State::Locked(call.with_lock(lock)),
            RequestLock::Unlocked => State::Unlocked(call),
        };
        Self { state, on_error }
    }
}

impl<S, R, E> Future for ResponseFuture<S, R, E>
where
    S: Service<R>,
    E: OnLockError<S::Response, S::Error>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        match this.state.project() {
            StateProj::Unlocked(call) => call.poll(cx),
            StateProj::Locked(call) => {
                let outcome = ready!(call.poll(cx));
                Poll::Ready(outcome.unwrap_or_else(|error| this.on_error.on_lock_error(error)))
            }
        }
    }
}

impl<S: Service<R>, R> Future for Call<S, R> {
    type Output = Result<S::Response, S::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        loop {
            let future = match self.as_mut().project() {
                CallProj::Unready { service, request } => {
                    ready!(service.poll_ready(cx))?;
                    let request = request.take();
                    service.call(request.expect("a call is not polled after it has failed"))
                }
                CallProj::Called(future) => return future.poll(cx),
            };
            self.set(Self::Called(future));
        }
    }
}

impl<S: Service<R>, R, E> fmt::Debug for ResponseFuture<S, R, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock: &dyn fmt::Debug = match &self.state {
            State::Locked(call) => call,
            State::Unlocked(_) => &"no lock",
        };
        f.debug_tuple("ResponseFuture").field(lock).finish()
    }
}
