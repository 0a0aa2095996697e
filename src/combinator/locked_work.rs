use std::convert::Infallible;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use pin_project::pin_project;

use super::WorkLock;
use super::guarded::Begin;
use crate::base::LockError;

/// Work under a lock, from the wait for the lock to its release: what every combinator wraps.
///
/// The work `W` is a future or a stream. It is given beforehand, or begun with a view of the lease
/// once the lock is held. `V` is the value of a future; a stream has none.
#[pin_project]
pub(crate) struct LockedWork<W, V> {
    #[pin]
    work: Option<W>,
    /// Whether a value shows that the work has succeeded, if the lock's `on_finish` is only for that.
    succeeds: Option<fn(&V) -> bool>,
    /// The value of completed work, kept while the lock is released.
    value: Option<V>,
    /// The last field: the destructors of work and value run under the lock.
    pub(crate) work_lock: WorkLock,
}

/// What a poll of some work yields: an item after which more may come, or the end.
type Step<I, V> = ControlFlow<V, I>;

/// A value, with the lock if that is still held.
#[cfg(feature = "http")]
type HandedOver<V> = Result<(V, Option<WorkLock>), LockError>;

impl<W, V> LockedWork<W, V> {
    /// `work` is `None` if it is begun when the lock is held.
    pub(crate) fn new(work_lock: WorkLock, work: Option<W>) -> Self {
        Self {
            work,
            succeeds: None,
            value: None,
            work_lock,
        }
    }

    /// The lock's `on_finish` is only for work that succeeds.
    pub(crate) fn keep_if(&mut self, succeeds: fn(&V) -> bool) {
        self.work_lock.make_conditional();
        self.succeeds = Some(succeeds);
    }

    pub(crate) fn is_done(&self) -> bool {
        self.work_lock.is_done()
    }

    /// The work, once it has begun and until it has completed.
    #[cfg(feature = "http")]
    pub(crate) fn work(&self) -> Option<&W> {
        self.work.as_ref()
    }

    /// Waits for the lock again, after an error.
    pub(crate) fn restart(self: Pin<&mut Self>, work_lock: WorkLock) {
        *self.project().work_lock = work_lock;
    }

    /// The poll loop of all combinators: waits for the lock, begins the work, polls it while the
    /// lease is valid, and releases the lock. An error is the lock's, and the end.
    fn poll<F, I>(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
        poll_work: impl FnOnce(Pin<&mut W>, &mut Context<'_>) -> Poll<Step<I, V>>,
    ) -> Poll<Result<Step<I, V>, LockError>>
    where
        F: Begin<Work = W>,
    {
        let outcome = ready!(self.as_mut().poll_step(cx, begin, poll_work));
        if outcome.is_err() {
            *begin = None;
            let mut this = self.project();
            let guard = this.work_lock.enter();
            this.work.set(None);
            *this.value = None;
            drop(guard);
            this.work_lock.end();
        }
        Poll::Ready(outcome)
    }

    fn poll_step<F, I>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
        poll_work: impl FnOnce(Pin<&mut W>, &mut Context<'_>) -> Poll<Step<I, V>>,
    ) -> Poll<Result<Step<I, V>, LockError>>
    where
        F: Begin<Work = W>,
    {
        let mut this = self.project();
        if !this.work_lock.is_releasing() {
            this.work_lock.check_ahead(cx)?;
            if !this.work_lock.is_holding() || this.work.is_none() {
                let lease = ready!(this.work_lock.poll_acquire(cx))?;
                if let Some(begin) = begin.take() {
                    let _guard = this.work_lock.enter();
                    this.work.set(Some(begin.begin(lease)));
                }
            }
            this.work_lock.check(cx)?;
            let guard = this.work_lock.enter();
            let work = this.work.as_mut().as_pin_mut();
            let work = work.expect("work exists from the acquisition to the release");
            let has_succeeded = match ready!(poll_work(work, cx)) {
                Step::Continue(item) => return Poll::Ready(Ok(Step::Continue(item))),
                Step::Break(value) => {
                    let value = this.value.insert(value);
                    this.succeeds.is_some_and(|succeeds| succeeds(value))
                }
            };
            this.work.set(None);
            drop(guard);
            // The lease may have run out during the last poll, which was not protected then.
            this.work_lock.check(cx)?;
            if has_succeeded {
                this.work_lock.succeeded();
            }
            this.work_lock.release();
        }
        ready!(this.work_lock.poll_release(cx))?;
        let value = this.value.take().expect("kept until the release");
        Poll::Ready(Ok(Step::Break(value)))
    }
}

impl<W: Future> LockedWork<W, W::Output> {
    pub(crate) fn poll_future<F>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
    ) -> Poll<Result<W::Output, LockError>>
    where
        F: Begin<Work = W>,
    {
        assert!(!self.is_done(), "{POLLED_LATE}");
        let poll_work = |work: Pin<&mut W>, cx: &mut Context<'_>| work.poll(cx).map(Step::Break);
        let step: Result<Step<Infallible, _>, _> = ready!(self.poll(cx, begin, poll_work));
        Poll::Ready(step.map(|Step::Break(value)| value))
    }

    /// The same, and where `stays` says so of the value the lock is still held when it is returned.
    #[cfg(feature = "http")]
    pub(crate) fn poll_handing_over<F>(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
        stays: impl FnOnce(&W::Output) -> bool,
    ) -> Poll<HandedOver<W::Output>>
    where
        F: Begin<Work = W>,
    {
        assert!(!self.is_done(), "{POLLED_LATE}");
        let poll_work = |work: Pin<&mut W>, cx: &mut Context<'_>| {
            let value = ready!(work.poll(cx));
            Poll::Ready(match stays(&value) {
                true => Step::Continue(value),
                false => Step::Break(value),
            })
        };
        let step = ready!(self.as_mut().poll(cx, begin, poll_work))?;
        let value = match step {
            Step::Break(value) => return Poll::Ready(Ok((value, None))),
            Step::Continue(value) => value,
        };
        let mut this = self.project();
        let mut work_lock = std::mem::replace(this.work_lock, WorkLock::done());
        let guard = work_lock.enter();
        this.work.set(None);
        drop(guard);
        // The lease may have run out during the last poll, which was not protected then.
        if let Err(loss) = work_lock.check(cx) {
            let _guard = work_lock.enter();
            drop(value);
            return Poll::Ready(Err(loss));
        }
        Poll::Ready(Ok((value, Some(work_lock))))
    }
}

const POLLED_LATE: &str = "a future under a lock polled after it was done";

impl<W> LockedWork<W, ()> {
    /// Polls work that yields items, whatever it calls them. The lock is released at their end.
    pub(crate) fn poll_items<F, I>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
        poll_item: impl FnOnce(Pin<&mut W>, &mut Context<'_>) -> Poll<Option<I>>,
    ) -> Poll<Option<Result<I, LockError>>>
    where
        F: Begin<Work = W>,
    {
        if self.is_done() {
            return Poll::Ready(None);
        }
        let poll_work = |work: Pin<&mut W>, cx: &mut Context<'_>| {
            let item = ready!(poll_item(work, cx));
            Poll::Ready(item.map_or(Step::Break(()), Step::Continue))
        };
        let step = ready!(self.poll(cx, begin, poll_work));
        Poll::Ready(step.map(Step::continue_value).transpose())
    }
}

impl<W: Stream> LockedWork<W, ()> {
    pub(super) fn poll_next<F>(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        begin: &mut Option<F>,
    ) -> Poll<Option<Result<W::Item, LockError>>>
    where
        F: Begin<Work = W>,
    {
        self.poll_items(cx, begin, W::poll_next)
    }

    pub(super) fn size_hint(&self) -> (usize, Option<usize>) {
        if self.is_done() {
            return (0, Some(0));
        }
        let most = match &self.work {
            Some(work) => work.size_hint().1,
            None if self.work_lock.is_releasing() => Some(0),
            None => None,
        };
        // One more: an error of the lock.
        (0, most.and_then(|most| most.checked_add(1)))
    }
}
