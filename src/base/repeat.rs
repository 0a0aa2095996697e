use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::{thread_end, user_code};

/// The pauses between the attempts of a waiter where the store cannot notify it.
///
/// That is so if the server cannot push (RESP2, a proxy, a missing right to subscribe), and in a quorum. Elsewhere
/// waiters are in the store's queue and no attempts are made. The lock's `wait` bounds the attempts, on tokio's clock.
/// A policy that ends earlier ends the wait: the caller gets "busy".
///
/// | policy | pauses |
/// |---|---|
/// | [`fixed`](Self::fixed) | always the same, plus up to a tenth |
/// | [`exponential`](Self::exponential) | doubled each time up to a limit; half of each is random. The default, from 20 ms to 500 ms |
/// | [`decorrelated`](Self::decorrelated) | random, up to three times the last one, up to a limit |
/// | [`spin_then`](Self::spin_then) | none at first, then always the same |
/// | [`from_fn`](Self::from_fn), `backoff` | your own, or those of the `backoff` crate |
/// | [`until`](Self::until), on any of them | ended by a condition |
///
/// Of all callers that wait for a key in one registry only the first asks the store, with its own policy. A zero pause
/// retries immediately: a busy loop at network speed. Timers have a resolution of a millisecond. A pause is cut short
/// at the end of the `wait`.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockstream::{LockRegistry, Repeat};
///
/// let locks = LockRegistry::in_memory();
/// let lock = locks.obtain("report").repeat(Repeat::fixed(Duration::from_millis(100)));
/// // ten attempts in all, with pauses that spread callers well
/// let few = Repeat::decorrelated(Duration::from_millis(20), Duration::from_secs(1)).until(|n| n >= 9);
/// let other = locks.obtain("report").repeat(few);
/// # let _ = (lock, other);
/// ```
#[derive(Clone)]
pub struct Repeat {
    policy: Arc<dyn Fn() -> PauseFn + Send + Sync>,
}

/// Yields the pauses of one wait; `None` ends the wait.
type PauseFn = Box<dyn FnMut() -> Option<Duration> + Send>;

/// The pauses between the attempts of one wait.
pub(crate) enum Pauses {
    /// Those of the registry's policy; not used yet, and mostly never.
    Usual,
    /// Those of the lock's own policy, not used yet.
    Fresh(Arc<dyn Fn() -> PauseFn + Send + Sync>),
    Begun(PauseFn),
}

impl Pauses {
    /// The same pauses; `usual` is the registry's policy, from which [`Usual`](Self::Usual) ones are begun.
    pub(crate) fn or(self, usual: &Repeat) -> Self {
        match self {
            Self::Usual => usual.start(),
            own => own,
        }
    }

    /// The next pause. A policy that panics ends here.
    pub(crate) fn next(&mut self) -> Option<Duration> {
        let next = || {
            if let Self::Fresh(begin) = self {
                *self = Self::Begun(begin());
            }
            match self {
                Self::Begun(pauses) => pauses(),
                Self::Usual | Self::Fresh(_) => unreachable!("it has begun"),
            }
        };
        user_code::run("a Repeat policy", next).flatten()
    }
}

/// A zero pause would never grow, so growing pauses start from this.
const LEAST: Duration = Duration::from_millis(1);

impl Repeat {
    /// The same pause each time, plus up to a tenth, so that callers do not stay in step.
    pub fn fixed(pause: Duration) -> Self {
        Self::from_fn(move || move || Some(pause.saturating_add(spread(pause / 10))))
    }

    /// A pause that doubles from `first` up to `longest`. Half of each pause is random.
    ///
    /// A `first` of nothing counts as 1 ms, and one over `longest` as `longest`.
    pub fn exponential(first: Duration, longest: Duration) -> Self {
        Self::from_fn(move || {
            let mut pause = first_of(first, longest);
            move || {
                let half = pause / 2;
                pause = pause.saturating_mul(2).min(longest);
                Some(half + spread(half))
            }
        })
    }

    /// A pause at random between `first` and three times the last pause, `longest` at most:
    /// "decorrelated jitter".
    ///
    /// It grows like [`exponential`](Self::exponential), but each caller in steps of its own, so
    /// that those who began together soon ask at different times. The policy is Marc Brooker's,
    /// from "Exponential Backoff And Jitter" on the AWS Architecture Blog (2015).
    ///
    /// A `first` of nothing counts as 1 ms, and one over `longest` as `longest`.
    pub fn decorrelated(first: Duration, longest: Duration) -> Self {
        Self::from_fn(move || {
            let first = first_of(first, longest);
            let mut last = first;
            move || {
                let more = last.saturating_mul(3).saturating_sub(first);
                last = first.saturating_add(spread(more)).min(longest);
                Some(last)
            }
        })
    }

    /// No pause for the first `spins` repeats, then `pause` each time.
    ///
    /// For locks that are held for about one round trip. Spinning costs the server one call for each round trip.
    pub fn spin_then(spins: u32, pause: Duration) -> Self {
        Self::from_fn(move || {
            let mut left = spins;
            move || {
                Some(if left == 0 {
                    pause
                } else {
                    left -= 1;
                    Duration::ZERO
                })
            }
        })
    }

    /// Any policy: `start` is called for each wait that needs a pause, and returns the pauses of that wait. `None`, or
    /// a panic, ends the wait, and the caller gets "busy". Neither may block: they run where the answers of the store
    /// are handled, and other answers wait for them.
    ///
    /// ```
    /// use std::time::Duration;
    /// use lockstream::Repeat;
    ///
    /// // three more attempts, 50 ms apart
    /// let thrice = Repeat::from_fn(|| {
    ///     let mut left = 3;
    ///     move || { left -= 1; (left >= 0).then_some(Duration::from_millis(50)) }
    /// });
    /// # let _ = thrice;
    /// ```
    pub fn from_fn<S, P>(start: S) -> Self
    where
        S: Fn() -> P + Send + Sync + 'static,
        P: FnMut() -> Option<Duration> + Send + 'static,
    {
        Self {
            policy: Arc::new(move || Box::new(start())),
        }
    }

    /// This policy, ended early. Before each pause `over` is called with the number of repeats so far, 0 before the
    /// first; true ends the wait, and the caller gets "busy".
    ///
    /// So `until(|n| n >= 9)` makes ten attempts in all. A caller that [lost its turn](crate::Lock::acquire) begins a
    /// new wait. `over` must not block, like a policy. It is called only where policies are, for the first waiter of
    /// the registry: a caller in the store's queue waits until its `wait` is over.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    /// use lockstream::Repeat;
    ///
    /// let draining = Arc::new(AtomicBool::new(false));
    /// let seen = draining.clone();
    /// // nobody begins new work while the service drains
    /// let repeat = Repeat::default().until(move |_| seen.load(Ordering::Relaxed));
    /// # let _ = (repeat, draining);
    /// ```
    #[must_use]
    pub fn until<F>(self, over: F) -> Self
    where
        F: Fn(u32) -> bool + Send + Sync + 'static,
    {
        let over = Arc::new(over);
        let policy = self.policy;
        Self::from_fn(move || {
            let over = over.clone();
            let mut pauses = policy();
            let mut repeats = 0_u32;
            move || {
                if over(repeats) {
                    return None;
                }
                repeats = repeats.saturating_add(1);
                pauses()
            }
        })
    }

    /// A policy of the `backoff` crate: `start` makes one for each wait.
    ///
    /// The limit of an [`ExponentialBackoff`](backoff::ExponentialBackoff) (15 minutes by default) is switched off:
    /// only the lock's `wait` bounds the wait.
    #[cfg(feature = "backoff")]
    pub fn backoff<S, B>(start: S) -> Self
    where
        S: Fn() -> B + Send + Sync + 'static,
        B: backoff::backoff::Backoff + Send + 'static,
    {
        Self::from_fn(move || {
            let mut policy = start();
            let any: &mut dyn std::any::Any = &mut policy;
            if let Some(exponential) = any.downcast_mut::<backoff::ExponentialBackoff>() {
                exponential.max_elapsed_time = None;
            }
            move || policy.next_backoff()
        })
    }

    /// The pauses of one wait.
    pub(crate) fn start(&self) -> Pauses {
        Pauses::Fresh(self.policy.clone())
    }
}

/// Anything from nothing to `most`.
fn spread(most: Duration) -> Duration {
    // Of a span too long for a double's digits the product may be rounded up past it.
    most.mul_f64(thread_end::random()).min(most)
}

/// Where a pause that grows begins.
fn first_of(first: Duration, longest: Duration) -> Duration {
    if first.is_zero() { LEAST } else { first }.min(longest)
}

impl Default for Repeat {
    fn default() -> Self {
        Self::exponential(Duration::from_millis(20), Duration::from_millis(500))
    }
}

impl fmt::Debug for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repeat").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
