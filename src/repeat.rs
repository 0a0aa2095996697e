use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rand::RngExt;

use crate::turnstile::Repeats;

/// How to try again when an attempt came back empty: the pauses between attempts.
///
/// It serves where the store cannot tell who is next: a server that cannot push (a proxy, an old
/// protocol, a missing right to subscribe). Elsewhere a waiter stands in the store's queue and is
/// told, and `Repeat` is not asked. The lock's `wait` bounds it, on tokio's clock; a policy that
/// ends before that makes the caller see "busy" there and then.
///
/// The default is [`Repeat::exponential`] from 20 ms to 500 ms.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockstream::{LockRegistry, Repeat};
///
/// let locks = LockRegistry::in_memory();
/// let lock = locks.obtain("report").repeat(Repeat::fixed(Duration::from_millis(100)));
/// # let _ = lock;
/// ```
#[derive(Clone)]
pub struct Repeat {
    policy: Arc<dyn Fn() -> Repeats + Send + Sync>,
    name: &'static str,
}

impl Repeat {
    /// The same pause each time, and up to a tenth more, so that callers do not march in step.
    pub fn fixed(pause: Duration) -> Self {
        Self::named("fixed", move || {
            move || Some(pause.saturating_add(spread(pause / 10)))
        })
    }

    /// A pause that doubles from `first` up to `longest`; each time, between half of it and all
    /// of it is taken, at random.
    pub fn exponential(first: Duration, longest: Duration) -> Self {
        Self::named("exponential", move || {
            let mut pause = first.min(longest);
            move || {
                let half = pause / 2;
                pause = pause.saturating_mul(2).min(longest);
                Some(half + spread(half))
            }
        })
    }

    /// No pause for the first `spins` repeats, then `pause` each time.
    pub fn spin_then(spins: u32, pause: Duration) -> Self {
        Self::named("spin_then", move || {
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

    /// Any policy: `start` is called for each wait and makes the pauses of that wait; `None` ends
    /// it, and the caller sees "busy". The pauses are asked for while the registry is locked, and may
    /// be dropped then: neither they nor what they own must use it, or block.
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
        Self::named("from_fn", start)
    }

    /// Any policy of the `backoff` crate: `start` makes one for each wait.
    ///
    /// An [`ExponentialBackoff`](backoff::ExponentialBackoff)'s own limit (15 minutes of the
    /// standard clock, as it comes) is switched off: the lock's `wait` alone bounds the wait.
    #[cfg(feature = "backoff")]
    pub fn backoff<S, B>(start: S) -> Self
    where
        S: Fn() -> B + Send + Sync + 'static,
        B: backoff::backoff::Backoff + Send + 'static,
    {
        Self::named("backoff", move || {
            let mut policy = start();
            let any: &mut dyn std::any::Any = &mut policy;
            if let Some(exponential) = any.downcast_mut::<backoff::ExponentialBackoff>() {
                exponential.max_elapsed_time = None;
            }
            move || policy.next_backoff()
        })
    }

    /// The pauses of one wait.
    pub(crate) fn start(&self) -> Repeats {
        (self.policy)()
    }

    fn named<S, P>(name: &'static str, start: S) -> Self
    where
        S: Fn() -> P + Send + Sync + 'static,
        P: FnMut() -> Option<Duration> + Send + 'static,
    {
        Self {
            policy: Arc::new(move || Repeats(Box::new(start()))),
            name,
        }
    }
}

/// Anything from nothing to `most`.
fn spread(most: Duration) -> Duration {
    most.mul_f64(rand::rng().random::<f64>())
}

impl Default for Repeat {
    fn default() -> Self {
        Self::exponential(Duration::from_millis(20), Duration::from_millis(500))
    }
}

impl fmt::Debug for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Repeat").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(repeat: &Repeat, n: usize) -> Vec<Option<Duration>> {
        let mut pauses = repeat.start();
        (0..n).map(|_| (pauses.0)()).collect()
    }

    #[test]
    fn fixed_stays_within_a_tenth() {
        let pause = Duration::from_millis(100);
        for taken in pauses(&Repeat::fixed(pause), 100) {
            let taken = taken.expect("a fixed policy never ends");
            assert!(taken >= pause && taken <= pause + pause / 10, "{taken:?}");
        }
    }

    #[test]
    fn exponential_doubles_up_to_the_longest() {
        let repeat = Repeat::exponential(Duration::from_millis(10), Duration::from_millis(50));
        for (taken, most) in pauses(&repeat, 6).into_iter().zip([10, 20, 40, 50, 50, 50]) {
            let (taken, most) = (taken.unwrap(), Duration::from_millis(most));
            assert!(taken >= most / 2 && taken <= most, "{taken:?} of {most:?}");
        }
    }

    #[test]
    fn spins_come_first_and_anew_for_each_wait() {
        let pause = Some(Duration::from_millis(5));
        let repeat = Repeat::spin_then(2, Duration::from_millis(5));
        let spin = Some(Duration::ZERO);
        for _ in 0..2 {
            assert_eq!(pauses(&repeat, 4), [spin, spin, pause, pause]);
        }
    }

    #[cfg(feature = "backoff")]
    #[test]
    fn an_exponential_backoffs_own_limit_is_switched_off() {
        let repeat = Repeat::backoff(|| backoff::ExponentialBackoff {
            max_elapsed_time: Some(Duration::ZERO),
            ..Default::default()
        });
        assert!(pauses(&repeat, 20).iter().all(Option::is_some));
    }
}
