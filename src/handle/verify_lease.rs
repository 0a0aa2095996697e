use std::pin::pin;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::{Either, select, try_join_all};
use tokio::time::timeout;

use crate::base::operation::operation;
use crate::base::{LockError, LossCause, StoreError};
use crate::engine::Engine;
use crate::handle::LeaseView;
use crate::store::contract::{Op, Outcome};

operation! {
    /// Future of [`Lease::verify`](crate::Lease::verify) and [`LeaseView::verify`].
    #[must_use = "futures do nothing unless polled"]
    pub struct Verify(Operation<Result<(), LockError>>);
}

/// Asks the store whether it has the lease: of several keys, each.
pub(crate) async fn verify(view: LeaseView) -> Result<(), LockError> {
    let engine = view.engine()?;
    let members = view.members().iter();
    try_join_all(members.map(|member| verify_one(&engine, member))).await?;
    Ok(())
}

async fn verify_one(engine: &Arc<Engine>, view: &LeaseView) -> Result<(), LockError> {
    let caller = view.caller();
    let key = || caller.key().clone();
    // Also for a lease that its holder has ended.
    let over = || {
        let (key, token) = (key(), view.told_token());
        let cause = LossCause::Ended;
        view.loss().unwrap_or(LockError::Lost { key, token, cause })
    };
    let held = engine.owner_of(caller).filter(|_| view.loss().is_none());
    let (owner, _) = held.ok_or_else(over)?;
    let session = engine.session();
    let session = session.ok_or_else(|| LockError::Closed { key: key() })?;
    let asked = session.ask(key(), Op::Verify { owner });
    let answered = async {
        let mut asked = pin!(asked);
        // A store that answers at once needs no timer.
        match asked.as_mut().now_or_never() {
            Some(answer) => Some(answer),
            None => timeout(engine.settings.response_timeout, asked).await.ok(),
        }
    };
    let answer = match select(pin!(answered), view.lost()).await {
        Either::Left((answer, _)) => answer,
        Either::Right((loss, _)) => return Err(loss),
    };
    let source = match answer {
        Some(Ok(answer)) if answer.outcome == Outcome::Renewed => {
            // It may have ended here meanwhile.
            let is_held = engine.owner_of(caller).is_some() && view.loss().is_none();
            return is_held.then_some(()).ok_or_else(over);
        }
        Some(Ok(_)) => {
            engine.found_lost(caller.key(), owner);
            return Err(over());
        }
        Some(Err(error)) => error.store_error().clone(),
        None => StoreError::new("no answer in time"),
    };
    Err(LockError::Store { key: key(), source })
}
