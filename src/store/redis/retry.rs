//! What is tried again after a pause.

use std::sync::{Arc, Weak};

use tokio::time::{Instant, sleep_until};

use super::change::Change;
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
        self.end(|change, what| match what {
            Retry::Request(request) => change.route(*request),
            Retry::Settle => change.settle(),
        });
    }

    fn end(&mut self, end: impl FnOnce(&mut Change<'_>, Retry)) {
        if let (Some(what), Some(shared)) = (self.what.take(), self.shared.upgrade()) {
            shared.change(|change| {
                if let Retry::Settle = what {
                    change.state.settles_soon = false;
                }
                end(change, what);
            });
        }
    }
}

impl Drop for RetryTask {
    fn drop(&mut self) {
        self.end(|change, what| {
            change.shared.lack_task();
            if let Retry::Request(request) = what {
                change.answer_unsent(*request, change.shared.abandoned_error());
            }
        });
    }
}
