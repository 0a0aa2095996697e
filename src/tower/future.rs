use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project::pin_project;
use tower_service::Service;

use super::layer::{RequestLock, UntilHead};
use super::on_error::OnLockError;
use super::on_lease::{IgnoreLease, OnLease};
use crate::combinator::{LockedWork, WorkLock};
use crate::handle::LeaseView;

/// Future of [`LockService`](super::LockService).
///
/// `Send` if the service, its future, the request, the response and the error are.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<S: Service<R>, R, E, H = IgnoreLease, U = UntilHead> {
    #[pin]
    state: ResponseState<S, R>,
    /// What is called when the lock is held.
    uncalled: Option<(S, R)>,
    on_error: E,
    on_lease: H,
    until: PhantomData<U>,
}

/// What a service has answered.
type Answer<S, R> = Result<<S as Service<R>>::Response, <S as Service<R>>::Error>;

#[pin_project(project = StateProj)]
#[allow(
    clippy::large_enum_variant,
    reason = "requests with a lock are the usual ones, and cost no allocation"
)]
enum ResponseState<S: Service<R>, R> {
    Unlocked(#[pin] Call<S, R>),
    Locked(#[pin] LockedWork<Call<S, R>, Answer<S, R>>),
}

/// Makes a service ready and then calls it.
#[pin_project(project = CallProj)]
enum Call<S: Service<R>, R> {
    Unready { service: S, request: Option<R> },
    Called(#[pin] S::Future),
}

impl<S: Service<R>, R> Call<S, R> {
    fn new((service, request): (S, R)) -> Self {
        let request = Some(request);
        Self::Unready { service, request }
    }
}

impl<S: Service<R>, R, E, H, U> ResponseFuture<S, R, E, H, U> {
    pub(super) fn new(lock: RequestLock, uncalled: (S, R), on_error: E, on_lease: H) -> Self {
        let (state, uncalled) = match lock {
            RequestLock::Locked(lock) => {
                let work_lock = WorkLock::new(lock.into_options());
                (
                    ResponseState::Locked(LockedWork::new(work_lock, None)),
                    Some(uncalled),
                )
            }
            RequestLock::Unlocked => (ResponseState::Unlocked(Call::new(uncalled)), None),
        };
        Self {
            state,
            uncalled,
            on_error,
            on_lease,
            until: PhantomData,
        }
    }
}

/// Calls the service with the request, to which the lease was shown.
fn begin<'a, S: Service<R>, R, H: OnLease<R>>(
    uncalled: &'a mut Option<(S, R)>,
    on_lease: &'a H,
) -> impl FnOnce(LeaseView) -> Call<S, R> + 'a {
    |lease| {
        let uncalled = uncalled.take();
        let (service, mut request) = uncalled.expect("a lock is acquired once");
        on_lease.on_lease(&mut request, lease);
        Call::new((service, request))
    }
}

impl<S, R, E, H> Future for ResponseFuture<S, R, E, H>
where
    S: Service<R>,
    E: OnLockError<S::Response, S::Error>,
    H: OnLease<R>,
{
    type Output = Result<S::Response, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        match this.state.project() {
            StateProj::Unlocked(call) => call.poll(cx),
            StateProj::Locked(locked_work) => {
                let begin = &mut Some(begin(this.uncalled, this.on_lease));
                let answer = ready!(locked_work.poll_future(cx, begin));
                Poll::Ready(answer.unwrap_or_else(|error| this.on_error.on_lock_error(error)))
            }
        }
    }
}

#[cfg(feature = "http")]
impl<S, R, E, H, B> Future for ResponseFuture<S, R, E, H, super::UntilBodyEnd>
where
    S: Service<R, Response = http::Response<B>>,
    E: OnLockError<S::Response, S::Error>,
    H: OnLease<R>,
    B: http_body::Body,
{
    type Output = Result<http::Response<super::LockedBody<B>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let (answer, work_lock) = match this.state.project() {
            StateProj::Unlocked(call) => (ready!(call.poll(cx)), None),
            StateProj::Locked(locked_work) => {
                let begin = &mut Some(begin(this.uncalled, this.on_lease));
                // One without a body is at its end.
                let stays = |answer: &Answer<S, R>| {
                    let response = answer.as_ref();
                    response.is_ok_and(|response| !response.body().is_end_stream())
                };
                let outcome = ready!(locked_work.poll_handing_over(cx, begin, stays));
                outcome.unwrap_or_else(|error| (this.on_error.on_lock_error(error), None))
            }
        };
        let held = |body| super::LockedBody::new(body, work_lock);
        Poll::Ready(answer.map(|response| response.map(held)))
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

impl<S: Service<R>, R, E, H, U> fmt::Debug for ResponseFuture<S, R, E, H, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock: &dyn fmt::Debug = match &self.state {
            ResponseState::Locked(locked_work) => &locked_work.work_lock,
            ResponseState::Unlocked(_) => &"no lock",
        };
        f.debug_tuple("ResponseFuture").field(lock).finish()
    }
}
