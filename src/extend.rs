use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::FusedFuture;
use tokio::time::{Instant, Sleep};

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
        patience: Option<Pin<Box<Sleep>>>,
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

    /// The lease is over, under its holder or by it: it lasts no longer.
    fn over(&self) -> LockError {
        self.view.loss().unwrap_or_else(|| LockError::Lost {
            key: self.key(),
            token: self.view.token(),
        })
    }

    fn ask(&mut self) -> Result<(), LockError> {
        if !TTL.contains(&self.ttl) {
            return Err(LockError::InvalidTtl {
                key: self.key(),
                ttl: self.ttl,
            });
        }
        self.engine.note_runtime();
        let asked = self.engine.extend(self.view.caller(), self.ttl);
        let until = asked.ok_or_else(|| self.over())?;
        let patience = None;
        self.stage = Stage::Asked { until, patience };
        Ok(())
    }

    /// Whether the lease lasts as long as was asked for; `None` if that is not known yet.
    fn look(&self, until: Moment) -> Option<Result<Instant, LockError>> {
        let caller = self.view.caller();
        let held = matches!(caller.phase(), Phase::Held { .. });
        if !held || self.view.loss().is_some() {
            return Some(Err(self.over()));
        }
        let reached = caller.deadline() >= until;
        reached.then(|| Ok(self.view.deadline()))
    }

    fn poll_asked(&mut self, cx: &mut Context<'_>) -> Poll<Result<Instant, LockError>> {
        if let Stage::Unpolled = self.stage
            && let Err(error) = self.ask()
        {
            return Poll::Ready(Err(error));
        }
        let Stage::Asked { until, .. } = self.stage else {
            panic!("`Extend` polled after it was done");
        };
        // Watch first, look then: else an answer between the two would wake nobody.
        let caller = self.view.caller();
        caller.watch(&mut self.watch, true, cx.waker());
        if let Some(seen) = self.look(until) {
            return Poll::Ready(seen);
        }
        if let Stage::Asked { patience, .. } = &mut self.stage {
            let timeout = self.engine.settings().response_timeout;
            let patience = patience.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
            std::task::ready!(patience.as_mut().poll(cx));
        }
        let key = self.key();
        let source = StoreError::new("no answer in time");
        Poll::Ready(Err(LockError::Store { key, source }))
    }
}

impl Future for Extend {
    type Output = Result<Instant, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let extended = std::task::ready!(this.poll_asked(cx));
        this.stage = Stage::Done;
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
