/// Whether a lease is prolonged while it is held, and how often.
///
/// The watchdog prolongs a lease at every third of its ttl, to its whole ttl, until it is released,
/// dropped or lost. A renewal that finds the key in other hands loses the lease at once; one that
/// gets no answer changes nothing and is tried again until the deadline, which alone decides.
///
/// This is the default: a lock is held for as long as the work under it runs. A lock that sets a
/// [`ttl`](crate::Lock::ttl) of its own asks for a lease of just that length, and is renewed only if
/// [`Lock::renewal`](crate::Lock::renewal) says so; the registry's
/// [`ttl`](crate::LockRegistryBuilder::ttl) is renewed.
/// [`LockRegistryBuilder::renewal`](crate::LockRegistryBuilder::renewal) settles it for all locks
/// that set neither.
///
/// A renewal belongs to its lease and ends with it: nothing is prolonged after a release, a drop or
/// a loss, also if a renewal is on its way right then.
///
/// A lease leaked by [`std::mem::forget`] is renewed for as long as its runtime lives, as a
/// forgotten `MutexGuard` is locked, unless [`max_renewals`](Self::max_renewals) bounds it. One
/// whose runtime has gone, the one on which it was acquired, is not renewed, also if the registry is
/// at work on another.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use lockstream::{LockRegistry, Renewal};
///
/// let locks = LockRegistry::in_memory();
/// // an hour at most: 360 times 10 s
/// let hour = Renewal::watchdog().max_renewals(360);
/// let lock = locks.obtain("import").ttl(Duration::from_secs(30)).renewal(hour);
/// # let _ = lock;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renewal {
    times: u32,
}

impl Renewal {
    /// At every third of the ttl, for as long as the lease is held.
    pub const fn watchdog() -> Self {
        Self { times: u32::MAX }
    }

    /// Not at all: the lease ends its ttl after it began.
    pub const fn off() -> Self {
        Self { times: 0 }
    }

    /// At most so many times; then the lease ends its ttl after the last. 0 is [`off`](Self::off).
    ///
    /// A renewal that the store did not confirm is not counted, and is tried again.
    #[must_use]
    pub const fn max_renewals(self, times: u32) -> Self {
        Self { times }
    }

    /// Without end, as [`watchdog`](Self::watchdog) comes.
    #[must_use]
    pub const fn unlimited(self) -> Self {
        Self::watchdog()
    }

    pub(crate) const fn times(self) -> u32 {
        self.times
    }
}
