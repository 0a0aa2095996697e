use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame, SizeHint};
use pin_project::pin_project;

use crate::combinator::{LockedWork, WorkLock};
use crate::handle::LeaseView;

/// The body of a response that is handled under a lock until the body ends; see
/// [`LockLayer::hold_through_body`](super::LockLayer::hold_through_body).
///
/// If the lease is lost, the body ends with that error ([`LockError::Lost`](crate::LockError::Lost)).
#[pin_project]
#[must_use = "the lock is held until the body is dropped"]
pub struct LockedBody<B>(#[pin] BodyState<B>);

#[pin_project(project = StateProj)]
#[allow(
    clippy::large_enum_variant,
    reason = "bodies under a lock are the usual ones, and cost no allocation"
)]
enum BodyState<B> {
    Unlocked(#[pin] B),
    Locked(#[pin] LockedWork<B, ()>),
}

impl<B> LockedBody<B> {
    pub(super) fn new(body: B, work_lock: Option<WorkLock>) -> Self {
        Self(match work_lock {
            Some(work_lock) => BodyState::Locked(LockedWork::new(work_lock, Some(body))),
            None => BodyState::Unlocked(body),
        })
    }
}

impl<B> Body for LockedBody<B>
where
    B: Body,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Data = B::Data;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Self::Error>>> {
        let locked_work = match self.project().0.project() {
            StateProj::Unlocked(body) => {
                let frame = ready!(body.poll_frame(cx));
                return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
            }
            StateProj::Locked(locked_work) => locked_work,
        };
        let begun = &mut None::<fn(LeaseView) -> B>;
        let frame = ready!(locked_work.poll_items(cx, begun, B::poll_frame));
        Poll::Ready(frame.map(|frame| frame?.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.0 {
            BodyState::Unlocked(body) => body.is_end_stream(),
            // A server drops what says so without another poll, and then nobody waits for the release.
            BodyState::Locked(locked_work) => locked_work.is_done(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0 {
            BodyState::Unlocked(body) => body.size_hint(),
            BodyState::Locked(locked_work) => locked_work
                .work()
                .map_or_else(|| SizeHint::with_exact(0), Body::size_hint),
        }
    }
}

impl<B> fmt::Debug for LockedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lock: &dyn fmt::Debug = match &self.0 {
            BodyState::Locked(locked_work) => &locked_work.work_lock,
            BodyState::Unlocked(_) => &"no lock",
        };
        f.debug_tuple("LockedBody").field(lock).finish()
    }
}
