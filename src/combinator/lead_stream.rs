use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures::Stream;
use futures::stream::FusedStream;
use pin_project::pin_project;

use super::LockedWork;
use super::leadership::Candidate;
use crate::base::{LockError, Pauses, Repeat};
use crate::handle::LeaseView;
use crate::handle::options::LockOptions;

/// Stream of [`Lock::lead_stream`](crate::Lock::lead_stream).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct LeadStream<F, S> {
    /// Before the lock: the destructors of what it captured run under it.
    begin: F,
    #[pin]
    locked_work: LockedWork<S, ()>,
    candidate: Candidate,
    /// What follows if the source ends.
    restarts: Option<Repeat>,
    /// The pauses since its last item.
    pauses: Option<Pauses>,
    /// Whether the source has ended by itself. Then a loss that the release finds changes nothing.
    has_ended: bool,
}

impl<F, S> LeadStream<F, S> {
    pub(super) fn new(options: LockOptions, begin: F) -> Self {
        let (candidate, work_lock) = Candidate::new(options);
        Self {
            begin,
            locked_work: LockedWork::new(work_lock, None),
            candidate,
            restarts: None,
            pauses: None,
            has_ended: false,
        }
    }

    /// If the source ends by itself, the lead is given up, and this candidate campaigns again after a pause of `policy`. The
    /// policy begins anew with each item. If it ends, so does the stream. Without this the stream ends with its first source
    /// that ends.
    pub fn restart(mut self, policy: Repeat) -> Self {
        self.restarts = Some(policy);
        self
    }
}

impl<F, S> Stream for LeadStream<F, S>
where
    F: FnMut(LeaseView) -> S,
    S: Stream,
{
    type Item = Result<S::Item, LockError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        loop {
            ready!(this.candidate.poll_pause(cx));
            if this.locked_work.is_done() {
                return Poll::Ready(None);
            }
            let mut begin = Some(&mut *this.begin);
            let has_ended = &mut *this.has_ended;
            let poll_item = |source: Pin<&mut S>, cx: &mut Context<'_>| {
                let item = ready!(source.poll_next(cx));
                *has_ended = item.is_none();
                Poll::Ready(item)
            };
            let item = this.locked_work.as_mut();
            let item = ready!(item.poll_items(cx, &mut begin, poll_item));
            let item = match item {
                Some(Err(error)) if error.is_lost() && *this.has_ended => None,
                item => item,
            };
            let work_lock = match item {
                Some(Ok(item)) => {
                    *this.pauses = None;
                    return Poll::Ready(Some(Ok(item)));
                }
                Some(Err(error)) => match this.candidate.retry(error) {
                    Ok(work_lock) => work_lock,
                    Err(error) => return Poll::Ready(Some(Err(error))),
                },
                None => {
                    let Some(policy) = this.restarts else {
                        return Poll::Ready(None);
                    };
                    let pauses = this.pauses.get_or_insert_with(|| policy.start());
                    match pauses.next() {
                        Some(pause) => this.candidate.again_after(pause),
                        None => return Poll::Ready(None),
                    }
                }
            };
            *this.has_ended = false;
            this.locked_work.as_mut().restart(work_lock);
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, self.is_over().then_some(0))
    }
}

impl<F, S> LeadStream<F, S> {
    fn is_over(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<F, S> FusedStream for LeadStream<F, S>
where
    Self: Stream,
{
    fn is_terminated(&self) -> bool {
        self.is_over()
    }
}

impl<F, S> fmt::Debug for LeadStream<F, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LeadStream")
            .field(&self.locked_work.work_lock)
            .finish()
    }
}
