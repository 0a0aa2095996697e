use std::fmt;

/// F2: six bits of a token count the passes.
pub(crate) const MOST_PASSES: u32 = 63;

/// A fencing token: strictly greater for every later lease of a key.
///
/// Send it along with what you write, and refuse a write whose token is less than one seen before.
/// It always fits an `i64` (SQL's `bigint`), but not a double: JavaScript loses its last digits.
///
/// With the feature `serde` it is a number.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), lockstream::LockError> {
/// # let locks = lockstream::LockRegistry::in_memory();
/// let lock = locks.obtain("row:7");
/// let first = lock.with_lease(async |lease| lease.token()).await?;
/// let second = lock.with_lease(async |lease| lease.token()).await?;
/// assert!(second > first);
/// assert_eq!(u64::try_from(second.as_i64()), Ok(second.get()));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "number::Number", into = "u64"))]
pub struct Token(u64);

/// F2: whether all tokens of a tenure with this epoch fit an `i64`, as they do for some thousand years.
pub(crate) fn is_epoch(number: u64) -> bool {
    i64::try_from(number).is_ok_and(|number| number <= i64::MAX / 64)
}

impl Token {
    /// F2: that of the lease which follows so many passes in its tenure.
    pub(crate) fn of(epoch: u64, passes: u32) -> Self {
        debug_assert!(is_epoch(epoch) && passes <= MOST_PASSES);
        Self((epoch << 6) + u64::from(passes))
    }

    pub(crate) fn new(number: u64) -> Option<Self> {
        i64::try_from(number).is_ok().then_some(Self(number))
    }

    /// Whether the lease was passed on inside of a tenure.
    pub(crate) fn is_passed(self) -> bool {
        self.0 & u64::from(MOST_PASSES) != 0
    }

    /// The token as a number.
    #[must_use]
    pub fn get(self) -> u64 {
        self.0
    }

    /// The same number, for databases, whose drivers have no `u64`. Never negative.
    #[must_use]
    pub fn as_i64(self) -> i64 {
        i64::try_from(self.0).expect("a token fits an i64")
    }
}

impl From<Token> for u64 {
    fn from(token: Token) -> Self {
        token.get()
    }
}

impl From<Token> for i64 {
    fn from(token: Token) -> Self {
        token.as_i64()
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(feature = "serde")]
mod number {
    use super::Token;

    /// What is read may be any number.
    #[derive(serde::Deserialize)]
    pub(super) struct Number(u64);

    impl TryFrom<Number> for Token {
        type Error = &'static str;

        fn try_from(Number(number): Number) -> Result<Self, Self::Error> {
            Self::new(number).ok_or("a fencing token fits an i64")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f2_the_greatest_token_fits_an_i64() {
        let epoch = i64::MAX as u64 / 64;
        assert!(is_epoch(epoch) && !is_epoch(epoch + 1) && !is_epoch(u64::MAX));
        let greatest = Token::of(epoch, 63);
        assert_eq!(greatest.as_i64(), i64::MAX);
        assert_eq!(
            (u64::from(greatest), i64::from(greatest)),
            (greatest.get(), i64::MAX)
        );
        assert!(Token::of(epoch, 62) < greatest && Token::of(epoch - 1, 63) < Token::of(epoch, 0));
        assert_eq!(Token::new(greatest.get()), Some(greatest));
        assert_eq!(Token::new(greatest.get() + 1), None);
        assert_eq!(greatest.to_string(), i64::MAX.to_string());
        assert_eq!(format!("{:?}", Token::of(1, 2)), "Token(66)");
    }

    #[cfg(feature = "serde")]
    #[test]
    fn in_serde_it_is_a_number() {
        let token = Token::of(1_700_000_000_000_000, 1);
        let json = serde_json::to_string(&token).unwrap();
        assert_eq!(json, token.to_string());
        assert_eq!(serde_json::from_str::<Token>(&json).unwrap(), token);
        for wrong in ["-1", "9223372036854775808", "1.5", "\"64\""] {
            assert!(serde_json::from_str::<Token>(wrong).is_err(), "{wrong}");
        }
    }
}
