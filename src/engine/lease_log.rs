//! The warnings about leases.
//!
//! An outage costs every lease of a registry, in every process of a fleet. So the first of a second have lines of their
//! own, and one line counts the others. Events and metrics tell of each.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::base::mutex::Mutex;
use crate::base::sync::Notify;
use crate::base::user_code::log;
use crate::base::{LossCause, Token};

/// How many lines of a kind there are in a second.
const LINES: usize = 20;
const SPAN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct LeaseLog {
    prefix: Arc<str>,
    /// Wakes the timer's task, which sums up.
    wake_up: Arc<Notify>,
    late: Mutex<Burst>,
    lost: Mutex<Burst>,
}

/// What was to be told within a second.
#[derive(Default)]
struct Burst {
    ends: Option<Instant>,
    count: usize,
}

/// Both are written where nothing is locked: the log sink is the user's code.
impl LeaseLog {
    pub(super) fn new(prefix: Arc<str>, wake_up: Arc<Notify>) -> Self {
        Self {
            prefix,
            wake_up,
            ..Self::default()
        }
    }

    pub(super) fn late(&self, key: &str, token: Token, left: Duration) {
        if self.has_line(&self.late) {
            let (token, told) = (
                token.get(),
                "renewal not confirmed yet, retrying until the deadline",
            );
            log!(warn, key, token, ?left, "{told}");
        }
    }

    pub(super) fn lost(&self, key: &str, token: Token, cause: &LossCause) {
        if self.has_line(&self.lost) {
            let token = token.get();
            log!(warn, key, token, "lease lost: {cause}");
        }
    }

    fn has_line(&self, burst: &Mutex<Burst>) -> bool {
        self.sum_up(Instant::now());
        let mut burst = burst.lock();
        burst.ends.get_or_insert_with(|| Instant::now() + SPAN);
        burst.count += 1;
        if burst.count == LINES + 1 {
            self.wake_up.notify_one();
        }
        burst.count <= LINES
    }

    /// Tells how many had no line of their own in a second that is over. Returns when that is to be called again.
    pub(super) fn sum_up(&self, now: Instant) -> Option<Instant> {
        let late = self.sum_up_one(&self.late, "renewal not confirmed yet", now);
        let lost = self.sum_up_one(&self.lost, "lease lost", now);
        late.into_iter().chain(lost).min()
    }

    fn sum_up_one(&self, burst: &Mutex<Burst>, what: &str, now: Instant) -> Option<Instant> {
        let mut burst = burst.lock();
        let more = burst.count.saturating_sub(LINES);
        let owed_at = burst.ends.filter(|_| more > 0);
        if burst.ends.is_none_or(|ends| ends > now) {
            return owed_at;
        }
        *burst = Burst::default();
        drop(burst);
        if more > 0 {
            let prefix = &*self.prefix;
            log!(warn, prefix, more, "{what}: and {more} more");
        }
        None
    }

    /// The registry goes.
    pub(super) fn end(&self) {
        self.sum_up(Instant::now() + SPAN);
    }
}
