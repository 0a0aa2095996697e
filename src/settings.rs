use std::sync::Arc;
use std::time::Duration;

use crate::BuildError;
use crate::key;
use crate::renewal::Renewal;
use crate::repeat::Repeat;
use crate::store::contract::RegistryOptions;
use crate::token::MOST_PASSES;
use crate::turnstile::{AtEnd, Rules};

/// The shortest and the longest ttl.
pub(crate) const TTL: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60);

/// The shortest and the longest time for which a key is kept. A year of some parsers has 365.25 days.
pub(crate) const KEEP: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(366 * 24 * 60 * 60);

/// The shortest and the longest response time-out. Without an upper bound, the connection to a server
/// that has gone would never be closed.
pub(crate) const RESPONSE_TIMEOUT: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(24 * 60 * 60);

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
    /// It stays in the store until its ttl is over, and is not renewed any more: for a rate limit, or a pause after the
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
    /// For a job that starts once an hour, say 59 minutes: less than the period by more than the starts may be early, and
    /// more than the machines' clocks may differ, or a late machine does it again.
    KeepFor(Duration),
}

impl OnFinish {
    pub(crate) fn at_end(self) -> AtEnd {
        match self {
            Self::Release => AtEnd::Release,
            Self::LetExpire => AtEnd::LetExpire,
            Self::KeepFor(time) => AtEnd::Keep(time),
        }
    }
}

/// The settings of a registry.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) prefix: Arc<str>,
    pub(crate) name: Option<String>,
    pub(crate) ttl: Duration,
    pub(crate) wait: Duration,
    pub(crate) repeat: Repeat,
    pub(crate) renewal: Renewal,
    pub(crate) max_waiters: usize,
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) renew_while_busy: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prefix: Arc::from("lock"),
            name: None,
            ttl: Duration::from_secs(30),
            wait: Duration::from_secs(30),
            repeat: Repeat::default(),
            renewal: Renewal::watchdog(),
            max_waiters: usize::MAX,
            local_passes: 16,
            local_span: Duration::from_millis(20),
            response_timeout: Duration::from_secs(1),
            renew_while_busy: Duration::from_secs(5 * 60),
        }
    }
}

impl Settings {
    pub(crate) fn rules(&self) -> Rules {
        Rules {
            local_passes: self.local_passes,
            local_span: self.local_span,
            max_waiters: self.max_waiters,
            response_timeout: self.response_timeout,
        }
    }

    /// Takes what the builder was told, and else what the url says.
    pub(crate) fn take(
        &mut self,
        set: RegistryOptions,
        url: RegistryOptions,
    ) -> Result<(), BuildError> {
        // Whoever writes the url and whoever writes the code would lock different things.
        if let (Some(set), Some(url)) = (&set.prefix, &url.prefix)
            && set != url
        {
            return Err(BuildError {
                setting: "prefix",
                reason: "the url of the store has another one",
            });
        }
        if let Some(prefix) = set.prefix.or(url.prefix) {
            self.prefix = prefix.into();
        }
        self.name = set.name.or(url.name);
        if let Some(within) = set.response_timeout.or(url.response_timeout) {
            self.response_timeout = within;
        }
        Ok(())
    }

    /// Refuses the first setting that is out of range.
    pub(crate) fn check(&self) -> Result<(), BuildError> {
        let refuse = |setting, reason| Err(BuildError { setting, reason });
        if let Some(reason) = key::prefix_fault(&self.prefix) {
            refuse("prefix", reason)
        } else if self.name.as_deref().is_some_and(|name| !is_name(name)) {
            refuse("name", "must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
        } else if !TTL.contains(&self.ttl) {
            refuse("ttl", "must be from 10 ms to 24 h")
        } else if self.max_waiters == 0 {
            refuse("max_waiters", "must be at least 1")
        } else if self.local_passes > MOST_PASSES {
            refuse("local_passes", "must be at most 63")
        } else if !RESPONSE_TIMEOUT.contains(&self.response_timeout) {
            refuse("response_timeout", "must be from 1 ms to 24 h")
        } else {
            Ok(())
        }
    }
}

/// Owners begin with it, so it holds nothing that means something in a ticket or a channel's name.
pub(crate) fn is_name(name: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || b"._-".contains(&c);
    (1..=64).contains(&name.len()) && name.bytes().all(is_plain)
}
