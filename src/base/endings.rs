//! What happens when a lease is lost, or ends.

use std::time::Duration;

/// What happens to work whose lease is lost while it runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// The work is dropped at once and the combinator yields
    /// [`LockError::Lost`](crate::LockError::Lost).
    #[default]
    Stop,
    /// The work runs on and its value is delivered. The loss is reported by an
    /// [event](crate::LockEvent::Lost), in the log and by
    /// [`LeaseView::is_valid`](crate::LeaseView::is_valid).
    RunOn,
}

/// What happens to the key when a lease ends: when its work completes or fails, when its combinator,
/// guard or last handle is dropped, or when the registry is shut down.
///
/// An explicit [`Lease::release`](crate::Lease::release) or [`Lock::release`](crate::Lock::release)
/// frees the key in any case: a job that failed can let another one try. So does a combinator with
/// [`keep_if`](crate::future::Guarded::keep_if) whose work does not succeed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFinish {
    /// It is free, or goes to the next waiter.
    #[default]
    Release,
    /// It stays in the store until its ttl is over, and is not renewed any more: for a [rate limit](crate::Lock::permits), or a pause after the
    /// work. For a job that is done once a period there is [`KeepFor`](Self::KeepFor). Nothing is sent at the end, and
    /// a combinator does not wait for anything.
    ///
    /// The ttl counts from the acquisition or from the last renewal. A renewal that is in flight at
    /// the end may prolong the key once more. A fixed lease (a [`ttl`](crate::Lock::ttl) and no
    /// [`renewal`](crate::Lock::renewal)) is exact to the millisecond. Waiters, here or elsewhere, get
    /// the key when it has expired, or up to 12 s later: the store does not announce an expiry, and
    /// a waiter that queued behind a longer lease expects that one's end.
    LetExpire,
    /// It stays in the store until this much time has passed since the acquisition, from 10 ms to a year (366 days): for a
    /// job that any of many machines may do once a period. A lease that ends before that, also one that is lost at its deadline,
    /// sets the key's end by one call. A combinator delivers its value when that is confirmed, as after a release.
    /// A lease that lasts longer is released at its end.
    ///
    /// The lease itself has the ttl and the renewal of its lock, whatever this time is. Other libraries call the two
    /// the least and the most time of a lock: this time is the least, and the ttl the most.
    ///
    /// After **a crash** the key stays until the ttl is over, and no longer. The same goes if the store cannot be told
    /// of the end in that time. Then the job is done again. Where that is worse than a job that is left out, set the
    /// [`ttl`](crate::Lock::ttl) to the period as well, with [`Renewal::watchdog`](crate::Renewal::watchdog).
    ///
    /// While the store keeps the key, its owner there is `<instance>+kept:<sequence>`. Waiters, here or elsewhere, get
    /// it when it has expired, or up to 12 s later, as with [`LetExpire`](Self::LetExpire).
    ///
    /// Choose the period, less the time by which a start may be early, less the difference of the machines' clocks: 59
    /// minutes, say, for a job that starts once an hour. With a shorter time a late machine does the job again.
    KeepFor(Duration),
}
