use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::future::try_join_all;
use tokio::time::Instant;

use crate::base::LockError;
use crate::base::limits::TTL;
use crate::base::operation::operation;
use crate::engine::{Engine, Phase};
use crate::handle::LeaseView;

operation! {
    /// Future of [`Lease::extend`](crate::Lease::extend).
    #[must_use = "futures do nothing unless polled"]
    pub struct Extend(Operation<Result<Instant, LockError>>);
}

/// Returns the deadline once the store has confirmed that the lease lasts `ttl` from now: of several keys, each.
pub(crate) async fn extend(
    engine: Arc<Engine>,
    view: LeaseView,
    ttl: Duration,
) -> Result<Instant, LockError> {
    let members = view.members().iter();
    let extended = try_join_all(members.map(|member| extend_one(&engine, member, ttl))).await;
    match extended {
        Ok(_) => Ok(view.deadline()),
        // Of several keys, the loss of one has ended the others (H4).
        Err(error) if error.is_lost() => Err(view.loss().unwrap_or(error)),
        Err(error) => Err(error),
    }
}

async fn extend_one(engine: &Engine, view: &LeaseView, ttl: Duration) -> Result<(), LockError> {
    let caller = view.caller();
    let key = || caller.key().clone();
    if !TTL.contains(&ttl) {
        return Err(LockError::InvalidTtl { key: key(), ttl });
    }
    engine.note_runtime();
    let until = engine.extend(caller, ttl).ok_or_else(|| view.over())?;
    let watch = caller.watch(true);
    let confirmed = poll_fn(|cx| {
        // Before the look, or an answer between the two would wake nobody.
        watch.register(cx.waker());
        if !matches!(caller.phase(), Phase::Held { .. }) || view.loss().is_some() {
            Poll::Ready(Err(view.over()))
        } else if caller.deadline() >= until {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    });
    let confirmed = engine.in_time(confirmed).await;
    confirmed.unwrap_or_else(|source| Err(LockError::Store { key: key(), source }))
}
