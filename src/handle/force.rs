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
    let engine = options.engine()?;
    let key = options.key().clone();
    let Some(session) = engine.session() else {
        return Err(LockError::Closed { key });
    };
    if whose.is_empty() {
        // Nobody has that name.
        return Ok(false);
    }
    let op = Op::Evict {
        whose: whose.clone(),
    };
    match session.ask(key.clone(), op).await {
        Ok(answer) => {
            let was_held = answer.outcome == Outcome::Gone { held: true };
            if was_held {
                log!(info, key = &*key, owner = &*whose, "lock released by force");
            }
            Ok(was_held)
        }
        Err(error) => {
            let source = error.store_error().clone();
            Err(LockError::Store { key, source })
        }
    }
}
