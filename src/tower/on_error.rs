use crate::base::LockError;

/// What an error of the lock becomes: a response, or an error of the service.
///
/// Closures have it, and [`IntoServiceError`], which is the default of a [`LockLayer`](super::LockLayer).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes nothing of a `LockError` for this service",
    note = "add `.or_else(|error| …)` to the layer, or implement `From<LockError>` for the service's error"
)]
pub trait OnLockError<Response, Error> {
    /// What the caller of the service gets.
    ///
    /// # Errors
    ///
    /// Those that the implementation chooses to tell.
    fn on_lock_error(&self, error: LockError) -> Result<Response, Error>;
}

/// Makes each error of the lock one of the service's.
#[derive(Clone, Copy, Debug, Default)]
pub struct IntoServiceError;

impl<Response, Error: From<LockError>> OnLockError<Response, Error> for IntoServiceError {
    fn on_lock_error(&self, error: LockError) -> Result<Response, Error> {
        Err(error.into())
    }
}

impl<F, Response, Error> OnLockError<Response, Error> for F
where
    F: Fn(LockError) -> Result<Response, Error>,
{
    fn on_lock_error(&self, error: LockError) -> Result<Response, Error> {
        self(error)
    }
}
