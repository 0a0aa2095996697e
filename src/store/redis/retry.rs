//! What is tried again after a pause.

use std::sync::{Arc, Weak};

use tokio::time::{Instant, sleep_until};

use super::request::Request;
use super::session::Shared;

pub(super) enum Retry {
    Request(Box<Request>),
    /// Telling the registry that it may ask again.
    Settle,
}

/// Dropped before it has run, its runtime has gone.
pub(super) struct RetryTask {
    shared: Weak<Shared>,
    what: Option<Retry>,
}

impl RetryTask {
    pub(super) fn new(shared: &Arc<Shared>, what: Retry) -> Self {
        Self {
            shared: Arc::downgrade(shared),
            what: Some(what),
        }
    }

    pub(super) async fn run(mut self, due: Instant) {
        sleep_until(due).await;
        self.end(true);
    }

    fn end(&mut self, is_due: bool) {
        let (Some(what), Some(shared)) = (self.what.take(), self.shared.upgrade()) else {
            return;
        };
        shared.change(|change| match what {
            Retry::Request(request) if is_due => change.route(*request),
            Retry::Request(request) => change.answer_unsent(*request, shared.abandoned_error()),
            Retry::Settle => {
                change.state.settles_soon = false;
                match is_due {
                    true => change.settle(),
                    false => shared.lack_task(),
                }
            }
        });
    }
}

impl Drop for RetryTask {
    fn drop(&mut self) {
        self.end(false);
    }
}
