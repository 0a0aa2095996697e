use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::future::FusedFuture;
use tokio::time::{Instant, Sleep, sleep};

use crate::engine::{Engine, Phase};
use crate::lease::LeaseView;
use crate::settings::TTL;
use crate::turnstile::Moment;
use crate::{LockError, StoreError};

/// Future of [`Lease::extend`](crate::Lease::extend).
#[must_use = "futures do nothing unless polled: the lease lasts no longer than before"]
pub struct Extend {
    engine: Arc<Engine>,
    view: LeaseView,
    ttl: Duration,
    watch: Option<u64>,
    stage: Stage,
}

enum Stage {
    Unpolled,
    Asked {
        until: Moment,
        /// One response time-out, begun when the answer is not there at once.
        timeout: Option<Pin<Box<Sleep>>>,
    },
    Done,
}

impl Extend {
    pub(crate) fn new(engine: Arc<Engine>, view: LeaseView, ttl: Duration) -> Self {
        Self {
            engine,
            view,
            ttl,
            watch: None,
            stage: Stage::Unpolled,
        }
    }

    fn key(&self) -> Arc<str> {
        self.view.caller().key().clone()
    }

    /// The lease was lost, or its holder has ended it.
    fn over(&self) -> LockError {
        self.view.loss().unwrap_or_else(|| LockError::Lost {
            key: self.key(),
            token: self.view.token(),
        })
    }

    fn ask(&self) -> Result<Moment, LockError> {
        let (key, ttl) = (self.key(), self.ttl);
        if !TTL.contains(&ttl) {
            return Err(LockError::InvalidTtl { key, ttl });
        }
        self.engine.note_runtime();
        let until = self.engine.extend(self.view.caller(), ttl);
        until.ok_or_else(|| self.over())
    }

    fn poll_stage(&mut self, cx: &mut Context<'_>) -> Poll<Result<Instant, LockError>> {
        if let Stage::Unpolled = self.stage {
            let until = self.ask()?;
            let timeout = None;
            self.stage = Stage::Asked { until, timeout };
        }
        let Stage::Asked { until, timeout } = &mut self.stage else {
            panic!("`Extend` polled after it was done");
        };
        // Registered before the look: an answer between the two would wake nobody otherwise.
        let caller = self.view.caller();
        caller.watch(&mut self.watch, true, cx.waker());
        let held = matches!(caller.phase(), Phase::Held { .. });
        if !held || self.view.loss().is_some() {
            return Poll::Ready(Err(self.over()));
        }
        if caller.deadline() >= *until {
            return Poll::Ready(Ok(self.view.deadline()));
        }
        let response_timeout = self.engine.settings().response_timeout;
        let timeout = timeout.get_or_insert_with(|| Box::pin(sleep(response_timeout)));
        ready!(timeout.as_mut().poll(cx));
        let source = StoreError::new("no answer in time");
        let key = self.key();
        Poll::Ready(Err(LockError::Store { key, source }))
    }
}

impl Future for Extend {
    type Output = Result<Instant, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let extended = ready!(self.poll_stage(cx));
        self.stage = Stage::Done;
        Poll::Ready(extended)
    }
}

impl FusedFuture for Extend {
    fn is_terminated(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }
}

impl Drop for Extend {
    fn drop(&mut self) {
        if let Some(watch) = self.watch {
            self.view.caller().unwatch(watch);
        }
    }
}

impl fmt::Debug for Extend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extend")
            .field("lease", &self.view)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}
