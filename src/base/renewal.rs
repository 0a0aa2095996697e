/// Whether a lease is renewed while it is held, and how often.
///
/// The watchdog renews a lease to its whole ttl at every third of it, until the lease is released, dropped or lost. If
/// a renewal finds the key deleted or held by another owner, the lease is lost at once. A renewal without an answer
/// changes nothing and is retried until the deadline.
///
/// A registry that uses 64 keys or more spreads its renewals over time: the first one of a lease may come earlier, and
/// after a reconnect each lease is renewed at a moment of its own, within a millisecond for each key and a third of the
/// ttl at most.
///
/// This is the default: a lock is held as long as its work runs. A lock with a [`ttl`](crate::Lock::ttl) of its own
/// gets a lease of that length, which is renewed only if [`Lock::renewal`](crate::Lock::renewal) is set, too.
/// [`LockRegistryBuilder::renewal`](crate::LockRegistryBuilder::renewal) is the default of all locks that set neither.
/// The registry's [`ttl`](crate::LockRegistryBuilder::ttl) does not turn renewal off.
///
/// Renewal ends with the lease: nothing is renewed after a release, a drop or a loss.
///
/// A lease leaked by [`std::mem::forget`] stays locked, like a forgotten `MutexGuard`: it is renewed until
/// [`max_renewals`](Self::max_renewals) are used up, or no runtime is left on which its registry was used.
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
    /// At every third of the ttl, as long as the lease is held.
    pub const fn watchdog() -> Self {
        Self { times: u32::MAX }
    }

    /// Never: the lease ends one ttl after it began.
    pub const fn off() -> Self {
        Self { times: 0 }
    }

    /// At most this many times. Then the lease ends one ttl after the last renewal. 0 is [`off`](Self::off).
    ///
    /// A renewal that the store did not confirm is not counted and is retried.
    #[must_use]
    pub const fn max_renewals(self, times: u32) -> Self {
        Self { times }
    }

    /// [`watchdog`](Self::watchdog), without a limit.
    #[must_use]
    pub const fn unlimited(self) -> Self {
        Self::watchdog()
    }

    pub(crate) const fn times(self) -> u32 {
        self.times
    }
}
