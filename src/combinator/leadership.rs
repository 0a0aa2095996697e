use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use futures::future::FusedFuture;
use futures::stream::FusedStream;
use pin_project::pin_project;
use tokio::time::{Sleep, sleep};

use crate::base::once_a_minute::OnceAMinute;
use crate::base::operation::operation;
use crate::base::user_code::log;
use crate::base::{LockError, OnFinish, OnLost, Pauses, Renewal, Repeat};
use crate::combinator::{LeadStream, LockedWork, WorkLock};
use crate::handle::Lock;
use crate::handle::lease_view::LeaseView;
use crate::handle::options::LockOptions;

/// Whether this candidate leads: the items of a [`Campaign`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Leadership {
    /// This candidate leads while the lease is valid; [`LeaseView::lost`] resolves when it is lost.
    Leader(LeaseView),
    /// Somebody else leads, or nobody does, or the store cannot be reached.
    Follower,
    /// Trying again cannot help: the registry was shut down, or the key, the ttl or a setting is
    /// invalid. The last item.
    Ended(LockError),
}

/// Leader election.
impl Lock {
    /// Campaigns for the lead: a stream of [`Leadership`] that says when this candidate leads and
    /// when it does not.
    ///
    /// The leader is the holder of this lock, so there is one at a time, with a fencing token greater
    /// than any before. The first item is `Leader` if the lock is free, otherwise `Follower`; from
    /// then on the two alternate. A loss yields `Follower`, and the campaign begins again.
    ///
    /// [`wait`](Self::wait), [`on_lost`](Self::on_lost) and [`on_finish`](Self::on_finish) have no
    /// effect here. The lease is renewed while the candidate leads, also if [`ttl`](Self::ttl) was
    /// set, unless [`renewal`](Self::renewal) says otherwise: the ttl is how long the others wait
    /// for the next leader after a crash.
    ///
    /// While the store cannot be reached, a leader leads until its lease ends; then it is a `Follower`, as a new
    /// candidate is. Temporary failures are retried for ever, after pauses that grow to 5 s, with a warning in the log
    /// once a minute: a store that refuses (a wrong password, a missing right) or is [too slow](LockError::TooSlow) for the ttl,
    /// a queue that is [full](LockError::QueueFull), a [`repeat`](Self::repeat) that ends. Permanent ones yield
    /// [`Ended`](Leadership::Ended), and then the stream ends: [`Closed`](LockError::Closed),
    /// [`NoRegistry`](LockError::NoRegistry), an invalid key, ttl or setting.
    ///
    /// A leader that does not poll the stream goes on leading. It learns of the loss by
    /// [`LeaseView::lost`], and by the stream when it polls again. A follower must poll: one that
    /// is granted the lead but does not poll for a third of the ttl loses its turn, and queues
    /// again when it is polled. For work that must run only while leading, use
    /// [`lead`](Self::lead).
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream resigns: it leaves the queue, or releases the lock in the background.
    /// [`resign`](Campaign::resign) waits for that. `next()` may be dropped and called again in a
    /// `select!` loop; no item is lost.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{Leadership, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// let locks = LockRegistry::in_memory();
    /// let mut campaign = locks.obtain("scheduler").leadership();
    /// # let mut terms = 0;
    /// while let Some(leadership) = campaign.next().await {
    ///     match leadership {
    ///         Leadership::Leader(lease) => println!("leading, token {}", lease.token()),
    ///         Leadership::Follower => println!("following"),
    ///         Leadership::Ended(why) => println!("ended: {why}"),
    ///         _ => {}
    ///     }
    /// #   terms += 1;
    /// #   if terms == 1 { locks.shutdown().await; }
    /// }
    /// # assert_eq!(terms, 2);
    /// # }
    /// ```
    #[track_caller]
    pub fn leadership(&self) -> Campaign {
        Campaign::new(self.options_here())
    }

    /// Runs work only while leading: `work` is called with the lease when this candidate becomes the
    /// leader. The future that it returns is dropped at once when the lead is lost, and `work` is
    /// called again when the candidate leads again.
    ///
    /// This is [`with_lease`](Self::with_lease), begun again after each loss. When the future
    /// completes, the lock is released and the value is yielded. A loss that is found at the last
    /// poll or at the release counts as well: the value is dropped, and the work begins again. So
    /// the work may run several times, in part or completely; protect what it writes with the
    /// fencing token. It campaigns as [`leadership`](Self::leadership) does.
    ///
    /// `async |lease| …` compiles only if it borrows nothing from outside. Otherwise write `|lease| { …; async move { … } }`,
    /// and clone what the future needs. To lead one term and end at its loss, use
    /// [`with_lease`](Self::with_lease) on `lock.renewal(Renewal::watchdog()).wait(Duration::MAX)`.
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`], [`LockError::NoRegistry`], an invalid key, ttl or setting. Failures of
    /// the store are retried.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits, it leaves the queue. Dropped while the work runs, it drops the work
    /// and then releases the lock in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// # let locks = lockstream::LockRegistry::in_memory();
    /// let lock = locks.obtain("scheduler");
    /// let jobs = vec!["nightly", "weekly"];
    /// let done = lock
    ///     .lead(|lease| {
    ///         // called once per term
    ///         let jobs = jobs.clone();
    ///         async move { format!("{} jobs under token {}", jobs.len(), lease.token()) }
    ///     })
    ///     .await?;
    /// assert!(done.starts_with("2 jobs"));
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn lead<F, Fut>(&self, work: F) -> Lead<F, Fut>
    where
        F: FnMut(LeaseView) -> Fut,
        Fut: Future,
    {
        let (candidate, work_lock) = Candidate::new(self.options_here());
        Lead {
            begin: work,
            locked_work: LockedWork::new(work_lock, None),
            candidate,
        }
    }

    /// A stream that runs only while leading: `source` is called with the lease when this candidate becomes the leader, and
    /// the items of the stream that it returns are passed on. That stream is dropped at once when the lead is lost, and
    /// `source` is called again when the candidate leads again. A reader sees items, then none for as long as others lead,
    /// then items again.
    ///
    /// For pollers, schedulers and consumers of which one instance runs. It campaigns as [`leadership`](Self::leadership)
    /// does. If the source ends, the lead is given up, and so the stream ends, unless it
    /// [`restarts`](crate::stream::LeadStream::restart). To let another lead, drop the stream.
    ///
    /// Back-pressure is that of [`with_lock`](crate::StreamLockExt::with_lock): one item asked for, one item polled, and a
    /// stream that is kept but not polled goes on leading. **Only what the source itself polls is stopped at a loss.** Work
    /// for an item belongs into the source, or is protected by the fencing token.
    ///
    /// # Errors
    ///
    /// [`LockError::Closed`], [`LockError::NoRegistry`], an invalid key, ttl or setting, as the last item. Failures of the
    /// store are retried.
    ///
    /// # Cancel safety
    ///
    /// Dropping the stream drops the source, and then releases the lock in the background. `next()` may be dropped and called
    /// again in a `select!` loop; no item is lost.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::{StreamExt, stream};
    /// use lockstream::LockRegistry;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let ticks = locks.obtain("scheduler").lead_stream(|lease| {
    ///     // called once per term
    ///     stream::iter(["02:00", "03:00"]).map(move |hour| (lease.token(), hour))
    /// });
    /// let mut ticks = std::pin::pin!(ticks);
    /// while let Some(tick) = ticks.next().await {
    ///     let (token, hour) = tick?;
    ///     println!("{hour}, under token {token}");
    /// }
    /// # Ok(()) }
    /// ```
    #[track_caller]
    pub fn lead_stream<F, S>(&self, source: F) -> LeadStream<F, S>
    where
        F: FnMut(LeaseView) -> S,
        S: Stream,
    {
        LeadStream::new(self.options_here(), source)
    }
}

/// Tries to get the lead again and again, after each failure and each loss.
pub(super) struct Candidate {
    /// Its wait has no end.
    options: LockOptions,
    /// Whether the first attempt is under way, which does not wait.
    first: bool,
    /// Delays the attempt that follows a failure.
    pause: Option<Pin<Box<Sleep>>>,
    pauses: Pauses,
    /// Failures that the log was told of.
    told: OnceAMinute,
}

impl Candidate {
    /// With the first attempt.
    pub(super) fn new(mut options: LockOptions) -> (Self, WorkLock) {
        // The ttl is how soon another leads after a crash of the leader, not how long one leads.
        options.renewal.get_or_insert(Renewal::watchdog());
        options.leads = true;
        options.on_lost = OnLost::Stop;
        options.on_finish = OnFinish::Release;
        options.wait = Some(Duration::ZERO);
        let work_lock = WorkLock::new(options.clone());
        options.wait = Some(Duration::MAX);
        let candidate = Self {
            options,
            first: true,
            pause: None,
            pauses: pauses(),
            told: OnceAMinute::default(),
        };
        (candidate, work_lock)
    }

    /// To be awaited before each poll of an attempt.
    pub(super) fn poll_pause(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Some(pause) = &mut self.pause {
            ready!(pause.as_mut().poll(cx));
            self.pause = None;
        }
        Poll::Ready(())
    }

    /// The attempt that follows one that ended with `error`, unless trying again cannot help.
    pub(super) fn retry(&mut self, error: LockError) -> Result<WorkLock, LockError> {
        let first = std::mem::take(&mut self.first);
        match &error {
            // It has led.
            LockError::Lost { .. } => {
                self.pauses = pauses();
                self.told = OnceAMinute::default();
            }
            // The first attempt does not wait; the next one does.
            LockError::NotAcquired { .. } if first => {}
            // Rights may be granted, and servers come back, be it much later. An attempt that
            // follows at once would fail at once.
            LockError::NotAcquired { .. }
            | LockError::QueueFull { .. }
            | LockError::TooSlow { .. }
            | LockError::Store { .. } => {
                let pause = self
                    .pauses
                    .next()
                    .expect("an exponential policy never ends");
                let (key, cause) = (error.key(), &error as &(dyn std::error::Error + 'static));
                if self.told.is_news(&error.to_string()) {
                    log!(
                        warn,
                        key,
                        error = cause,
                        ?pause,
                        "campaign failed, starting over after a pause"
                    );
                } else {
                    log!(debug, key, error = cause, ?pause, "campaign failed again");
                }
                self.pause = Some(Box::pin(sleep(pause)));
            }
            _ => return Err(error),
        }
        Ok(WorkLock::new(self.options.clone()))
    }

    /// The attempt that follows a term that has ended by itself.
    pub(super) fn again_after(&mut self, pause: Duration) -> WorkLock {
        self.pauses = pauses();
        self.told = OnceAMinute::default();
        self.pause = Some(Box::pin(sleep(pause)));
        WorkLock::new(self.options.clone())
    }
}

/// Between attempts that failed. The lock's own policy may be one that spins.
fn pauses() -> Pauses {
    Repeat::exponential(Duration::from_millis(100), Duration::from_secs(5)).start()
}

/// Stream of [`Lock::leadership`](crate::Lock::leadership).
#[must_use = "a campaign does nothing unless polled, and dropping it resigns"]
pub struct Campaign {
    candidate: Candidate,
    /// The current attempt, or the lead.
    work_lock: WorkLock,
    /// Whether the last item was [`Leadership::Follower`].
    follows: bool,
}

impl Campaign {
    fn new(options: LockOptions) -> Self {
        let (candidate, work_lock) = Candidate::new(options);
        Self {
            candidate,
            work_lock,
            follows: false,
        }
    }

    /// Releases the lead, or leaves the queue. Resolves when the store has confirmed it, after one
    /// response time-out at most; after that the release goes on in the background.
    ///
    /// Dropping the campaign resigns as well, without waiting.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, polled or not, the release goes on in the background.
    ///
    /// # Examples
    ///
    /// ```
    /// use futures::StreamExt;
    /// use lockstream::{Leadership, LockRegistry};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
    /// let locks = LockRegistry::in_memory();
    /// let mut campaign = locks.obtain("scheduler").leadership();
    /// assert!(matches!(campaign.next().await, Some(Leadership::Leader(_))));
    /// campaign.resign().await;
    /// assert!(locks.obtain("scheduler").lease_once().await?.is_some());
    /// # Ok(()) }
    /// ```
    #[must_use = "the lead is given up in the background; await this to know that it was"]
    pub fn resign(self) -> Resign {
        let mut work_lock = self.work_lock;
        work_lock.release();
        // A lead that was lost before need not be given up. Dropped early, the lock releases it as well.
        Resign::new(async move { drop(poll_fn(|cx| work_lock.poll_release(cx)).await) })
    }

    /// Waits for the lead; while it leads, for its loss.
    fn poll_scope(&mut self, cx: &mut Context<'_>) -> Poll<Result<LeaseView, LockError>> {
        if self.work_lock.is_acquiring() {
            ready!(self.candidate.poll_pause(cx));
            return self.work_lock.poll_acquire(cx);
        }
        match self.work_lock.check(cx) {
            Ok(()) => Poll::Pending,
            Err(loss) => Poll::Ready(Err(loss)),
        }
    }
}

impl Stream for Campaign {
    type Item = Leadership;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Leadership>> {
        let this = &mut *self;
        if this.work_lock.is_done() {
            return Poll::Ready(None);
        }
        loop {
            let error = match ready!(this.poll_scope(cx)) {
                Ok(lease) => {
                    this.follows = false;
                    return Poll::Ready(Some(Leadership::Leader(lease)));
                }
                Err(error) => error,
            };
            this.work_lock.end();
            match this.candidate.retry(error) {
                Ok(work_lock) => this.work_lock = work_lock,
                Err(error) => return Poll::Ready(Some(Leadership::Ended(error))),
            }
            if !std::mem::replace(&mut this.follows, true) {
                return Poll::Ready(Some(Leadership::Follower));
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, self.work_lock.is_done().then_some(0))
    }
}

impl FusedStream for Campaign {
    fn is_terminated(&self) -> bool {
        self.work_lock.is_done()
    }
}

impl fmt::Debug for Campaign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Campaign")
            .field("key", self.candidate.options.key())
            .field("work_lock", &self.work_lock)
            .finish_non_exhaustive()
    }
}

operation! {
    /// Future of [`Campaign::resign`](crate::stream::Campaign::resign).
    #[must_use = "the lead is given up in the background; await this to know that it was"]
    pub struct Resign(Operation<()>);
}

/// Future of [`Lock::lead`](crate::Lock::lead).
///
/// `Send` if the closure, the work and its output are: it keeps the value while the release runs.
#[pin_project]
#[must_use = "futures do nothing unless polled"]
pub struct Lead<F, Fut: Future> {
    /// Before the lock: the destructors of what it captured run under it.
    begin: F,
    #[pin]
    locked_work: LockedWork<Fut, Fut::Output>,
    candidate: Candidate,
}

impl<F, Fut> Future for Lead<F, Fut>
where
    F: FnMut(LeaseView) -> Fut,
    Fut: Future,
{
    type Output = Result<Fut::Output, LockError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            ready!(this.candidate.poll_pause(cx));
            let mut begin = Some(&mut *this.begin);
            match ready!(this.locked_work.as_mut().poll_future(cx, &mut begin)) {
                Ok(value) => return Poll::Ready(Ok(value)),
                Err(error) => {
                    let work_lock = this.candidate.retry(error)?;
                    this.locked_work.as_mut().restart(work_lock);
                }
            }
        }
    }
}

impl<F, Fut> FusedFuture for Lead<F, Fut>
where
    F: FnMut(LeaseView) -> Fut,
    Fut: Future,
{
    fn is_terminated(&self) -> bool {
        self.locked_work.is_done()
    }
}

impl<F, Fut: Future> fmt::Debug for Lead<F, Fut> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lead")
            .field(&self.locked_work.work_lock)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, StreamExt};
    use tokio::time::Instant;

    use super::*;
    use crate::{LossCause, Token};

    #[test]
    fn without_a_registry_there_is_nothing_to_campaign_for() {
        let mut campaign = Lock::new(None, "k").leadership();
        let told = campaign.next().now_or_never();
        assert!(
            matches!(
                told,
                Some(Some(Leadership::Ended(LockError::NoRegistry { .. })))
            ),
            "{told:?}"
        );
        assert!(
            campaign
                .next()
                .now_or_never()
                .expect("it is over")
                .is_none()
        );
    }

    /// Its failures of before are forgotten: the pauses are short again, and the log is told.
    #[tokio::test(start_paused = true)]
    async fn who_has_led_begins_anew() {
        let full = || LockError::QueueFull {
            key: "k".into(),
            limit: 1,
        };
        let pause = |candidate: &mut Candidate| {
            candidate.retry(full()).expect("it may have room later");
            let pause = candidate.pause.as_ref().expect("not at once");
            pause.deadline() - Instant::now()
        };
        let term_ends: [fn(&mut Candidate); 2] = [
            |candidate| drop(candidate.again_after(Duration::ZERO)),
            |candidate| {
                let lost = LockError::Lost {
                    key: "k".into(),
                    token: Token::of(1, 0),
                    cause: LossCause::Taken,
                };
                drop(candidate.retry(lost).expect("it may lead again"));
            },
        ];
        for term_ends in term_ends {
            let mut candidate = Lock::new(None, "k").leadership().candidate;
            let pauses: Vec<_> = (0..12).map(|_| pause(&mut candidate)).collect();
            assert!(pauses[11] > Duration::from_secs(1), "{pauses:?}");
            assert!(!candidate.told.is_news(&full().to_string()));
            term_ends(&mut candidate);
            assert!(candidate.told.is_news(&full().to_string()));
            assert!(pause(&mut candidate) <= Duration::from_millis(200));
        }
    }
}
