use std::sync::Arc;

use crate::base::LockError;
use crate::base::operation::operation;
use crate::base::user_code::log;
use crate::handle::options::LockOptions;
use crate::store::contract::{Op, Outcome};

operation! {
    /// Future of [`LockRegistry::force_release`](crate::LockRegistry::force_release).
    #[must_use = "futures do nothing unless polled"]
    pub struct ForceRelease(Operation<Result<bool, LockError>>);
}

/// Takes the key from the holder with this owner. Returns whether it was one.
pub(crate) async fn force_release(
    options: LockOptions,
    whose: Arc<str>,
) -> Result<bool, LockError> {
    let (session, key) = (options.session()?, options.key().clone());
    if whose.is_empty() {
        // Nobody has that name.
        return Ok(false);
    }
    let owner = whose.clone();
    let answer = session.ask(key.clone(), Op::Evict { whose }).await;
    let answer = answer.map_err(|error| {
        let (key, source) = (key.clone(), error.store_error().clone());
        LockError::Store { key, source }
    })?;
    let was_held = answer.outcome == Outcome::Gone { held: true };
    if was_held {
        log!(info, key = &*key, owner = &*owner, "lock released by force");
    }
    Ok(was_held)
}
