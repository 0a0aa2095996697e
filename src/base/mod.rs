//! What every layer may use: the words of the crate, its errors and its clock. It knows no other layer.

pub(crate) mod check;
pub(crate) mod clock;
pub(crate) mod endings;
pub(crate) mod error;
pub(crate) mod holder;
pub(crate) mod key;
pub(crate) mod limits;
pub(crate) mod loss;
pub(crate) mod mode;
#[cfg(test)]
pub(crate) mod model;
pub(crate) mod mutex;
pub(crate) mod once_a_minute;
pub(crate) mod operation;
pub(crate) mod renewal;
pub(crate) mod repeat;
pub(crate) mod sync;
pub(crate) mod thread_end;
pub(crate) mod token;
pub(crate) mod user_code;

pub use self::check::{Check, CheckedServer};
pub(crate) use self::clock::Clock;
pub use self::endings::{OnFinish, OnLost};
pub use self::error::{BuildError, LockError, StoreError};
pub use self::holder::Holder;
pub use self::loss::LossCause;
pub use self::mode::Mode;
pub use self::renewal::Renewal;
pub(crate) use self::repeat::Pauses;
pub use self::repeat::Repeat;
pub use self::token::Token;
