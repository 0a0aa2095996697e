use std::pin::pin;
use std::sync::Arc;

use futures::future::{Either, select, try_join_all};

use crate::base::LockError;
use crate::base::operation::operation;
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
    let over = || view.over();
    let held = engine.owner_of(caller).filter(|_| view.loss().is_none());
    let (owner, _) = held.ok_or_else(over)?;
    let session = engine.session();
    let session = session.ok_or_else(|| LockError::Closed { key: key() })?;
    let answered = engine.in_time(session.ask(key(), Op::Verify { owner }));
    let answer = match select(pin!(answered), view.lost()).await {
        Either::Left((answer, _)) => answer,
        Either::Right((loss, _)) => return Err(loss),
    };
    let source = match answer {
        Ok(Ok(answer)) if answer.outcome == Outcome::Renewed => {
            // It may have ended here meanwhile.
            let is_held = engine.owner_of(caller).is_some() && view.loss().is_none();
            return is_held.then_some(()).ok_or_else(over);
        }
        Ok(Ok(_)) => {
            engine.found_lost(caller.key(), owner);
            return Err(view.over());
        }
        Ok(Err(error)) => error.store_error().clone(),
        Err(error) => error,
    };
    Err(LockError::Store { key: key(), source })
}
