//! The server's clock, estimated from its last known time.

use std::time::Duration;

use tokio::time::Instant;

use crate::store::contract::ServerTime;

/// A time of the server, and when we received it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerClock {
    told: ServerTime,
    heard: Instant,
}

impl ServerClock {
    /// `heard`: not earlier than it was received.
    pub(crate) fn told(at: ServerTime, heard: Instant) -> Self {
        Self { told: at, heard }
    }

    /// The server's time when a command that is sent now is given up (O5), or earlier. It counts from when the last
    /// time was received, with the slowest clock that is allowed. So after hours without a reply it may be too early;
    /// then the server says so.
    pub(crate) fn of_use(&self, now: Instant, response_timeout: Duration) -> ServerTime {
        let since = now.saturating_duration_since(self.heard);
        let ahead = since - since / 1000 + response_timeout;
        self.told
            .saturating_add(u64::try_from(ahead.as_micros()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn o5_a_command_is_of_use_until_we_give_it_up() {
        let timeout = Duration::from_secs(1);
        let clock = ServerClock::told(1_000_000, Instant::now());
        assert_eq!(clock.of_use(Instant::now(), timeout), 2_000_000);
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(
            clock.of_use(Instant::now(), timeout),
            11_990_000,
            "less a thousandth for drift"
        );
    }
}
