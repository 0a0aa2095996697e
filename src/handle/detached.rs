use std::fmt;
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use futures::future::FusedFuture;

use crate::base::holder::parts_of;
use crate::base::{LockError, Mode, Renewal, Token, key};
use crate::handle::acquire::Acquiring;
use crate::handle::lease::Lease;

/// What a [`DetachedLease`]'s text begins with: the format and its version.
const HEAD: &str = "lockstream-lease-1";

/// The same of a reader or a permit: the mode follows.
const SHARED_HEAD: &str = "lockstream-lease-2";

/// The longest owner, in bytes.
const MAX_OWNER: usize = 200;

/// A lease without a holder. [`Lease::detach`](crate::Lease::detach) leaves it in the store, and
/// [`LockRegistry::adopt`](crate::LockRegistry::adopt) takes it over, in this process or another.
///
/// [`Display`](fmt::Display) and [`FromStr`] convert it to and from one line of text, which later versions of the
/// crate can read, too. With the feature `serde` it is serialized as that line. Dropping it does nothing: the key
/// expires.
///
/// Anyone who has the text can take the lease.
///
/// # Examples
///
/// ```
/// use lockstream::{DetachedLease, LockRegistry};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = LockRegistry::in_memory();
/// let detached = locks.obtain("upload:7").lease().await?.detach()?;
/// let line = detached.to_string();
/// assert_eq!(line.parse::<DetachedLease>()?, detached);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a lease that is detached and not adopted keeps everybody out until its ttl is over"]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "String", into = "String"))]
pub struct DetachedLease {
    key: Arc<str>,
    owner: Arc<str>,
    mode: Mode,
    token: Token,
    /// Milliseconds since the Unix epoch: what a text can say.
    deadline: u64,
}

impl DetachedLease {
    /// `left`: how long it lasts on our own clock.
    pub(crate) fn new(
        key: Arc<str>,
        owner: String,
        mode: Mode,
        token: Token,
        left: Duration,
    ) -> Self {
        let deadline = SystemTime::now() + left;
        let since = deadline
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Self {
            key,
            owner: owner.into(),
            mode,
            token,
            deadline: u64::try_from(since.as_millis()).unwrap_or(0),
        }
    }

    /// From outside: anything may stand in it.
    fn checked(
        key: &str,
        owner: &str,
        mode: Mode,
        token: u64,
        deadline: u64,
    ) -> Result<Self, ParseDetachedLeaseError> {
        let fault = key::fault_of_text(key).map(|_| "invalid key");
        let fault = fault.or_else(|| owner_fault(owner));
        let ends = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(deadline));
        let fault = fault.or(ends.is_none().then_some("deadline out of range"));
        if let Some(fault) = fault {
            return Err(ParseDetachedLeaseError(fault));
        }
        let token = Token::new(token).ok_or(ParseDetachedLeaseError("token out of range"))?;
        Ok(Self {
            key: key.into(),
            owner: owner.into(),
            mode,
            token,
            deadline,
        })
    }

    /// The name of what is locked.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The owner that left it, as stored: `<instance>:<sequence>`, at most 200 bytes.
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// What it excludes, as before.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Its fencing token. Adopting it yields a greater one.
    pub fn token(&self) -> Token {
        self.token
    }

    /// When it ends, by the clock of the machine that left it, in whole milliseconds. For people: nothing depends on
    /// it.
    pub fn deadline(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_millis(self.deadline)
    }
}

/// Why `owner` cannot be the value of a lock that somebody of us left.
fn owner_fault(owner: &str) -> Option<&'static str> {
    let fault =
        "owner must be `<instance>:<sequence>`, printable, without spaces, at most 200 bytes";
    let is_plain = |c: char| !c.is_control() && !c.is_whitespace();
    let is_ours = owner.chars().all(is_plain) && parts_of(owner).is_some();
    let fits = is_ours && owner.len() <= MAX_OWNER;
    (!fits).then_some(fault)
}

/// The format's name and version; the mode, if it is not exclusive; owner, token, deadline in milliseconds since the Unix
/// epoch, and last the key, which may hold spaces.
impl fmt::Display for DetachedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            Mode::Exclusive => write!(f, "{HEAD}")?,
            Mode::Shared => write!(f, "{SHARED_HEAD} r")?,
            Mode::Permits { limit, weight } => write!(f, "{SHARED_HEAD} {weight}/{limit}")?,
        }
        let (owner, deadline) = (&self.owner, self.deadline);
        write!(f, " {owner} {} {deadline} {}", self.token, self.key)
    }
}

impl FromStr for DetachedLease {
    type Err = ParseDetachedLeaseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_suffix('\n').unwrap_or(text);
        let text = text.strip_suffix('\r').unwrap_or(text);
        const TRUNCATED: ParseDetachedLeaseError = ParseDetachedLeaseError("truncated");
        let (head, mut rest) = text.split_once(' ').unwrap_or((text, ""));
        let mode = match head {
            HEAD => Mode::Exclusive,
            SHARED_HEAD => {
                let (mode, others) = rest.split_once(' ').ok_or(TRUNCATED)?;
                rest = others;
                shared_mode(mode)?
            }
            _ => {
                return Err(ParseDetachedLeaseError(
                    "must begin with `lockstream-lease-1` or `lockstream-lease-2`",
                ));
            }
        };
        let mut words = rest.splitn(4, ' ');
        let mut word = || words.next().ok_or(TRUNCATED);
        let owner = word()?;
        let token = number(word()?, "token is not a number")?;
        let deadline = number(word()?, "deadline is not a number")?;
        Self::checked(word()?, owner, mode, token, deadline)
    }
}

/// The mode of a reader or a permit. Whether the weight is allowed is told when it is adopted.
fn shared_mode(text: &str) -> Result<Mode, ParseDetachedLeaseError> {
    const FAULT: &str = "mode must be `r` or `<weight>/<limit>`";
    if text == "r" {
        return Ok(Mode::Shared);
    }
    let (weight, limit) = text.split_once('/').ok_or(ParseDetachedLeaseError(FAULT))?;
    let (weight, limit) = (number(weight, FAULT)?, number(limit, FAULT)?);
    let fits = u8::try_from(weight).ok().zip(u32::try_from(limit).ok());
    let (weight, limit) = fits.ok_or(ParseDetachedLeaseError(FAULT))?;
    Ok(Mode::Permits { limit, weight })
}

/// Digits alone: one number has one text.
fn number(word: &str, fault: &'static str) -> Result<u64, ParseDetachedLeaseError> {
    let digits = word.bytes().all(|byte| byte.is_ascii_digit());
    let number = word.parse().ok().filter(|_| digits);
    number.ok_or(ParseDetachedLeaseError(fault))
}

/// The text is not a [`DetachedLease`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid detached lease: {0}")]
pub struct ParseDetachedLeaseError(&'static str);

/// The error of [`Lease::detach`]: why the lease was not detached, and the lease itself.
///
/// `Display` is that of the [`LockError`]. Dropping it drops the lease; so does `?` where the function returns a
/// `LockError`.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
#[must_use = "it has the lease, and dropping it releases the lock"]
pub struct DetachError {
    error: LockError,
    lease: Box<Lease>,
}

impl DetachError {
    pub(crate) fn new(error: LockError, lease: Lease) -> Self {
        let lease = Box::new(lease);
        Self { error, lease }
    }

    /// Why it was not detached.
    pub fn error(&self) -> &LockError {
        &self.error
    }

    /// The lease, as it was before: held, or lost.
    pub fn into_lease(self) -> Lease {
        *self.lease
    }
}

impl From<DetachError> for LockError {
    /// Drops the lease.
    fn from(refused: DetachError) -> Self {
        refused.error
    }
}

#[cfg(feature = "serde")]
impl From<DetachedLease> for String {
    fn from(lease: DetachedLease) -> Self {
        lease.to_string()
    }
}

#[cfg(feature = "serde")]
impl TryFrom<String> for DetachedLease {
    type Error = ParseDetachedLeaseError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

/// Future of [`LockRegistry::adopt`](crate::LockRegistry::adopt).
///
/// Its setters count before its first poll. Dropped before it has resolved, a lease that it has adopted is released.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Adopt(Acquiring);

impl Adopt {
    pub(crate) fn new(acquiring: Acquiring) -> Self {
        Self(acquiring)
    }

    /// How long the new lease lasts, counted from when it is adopted, and that it is not renewed unless
    /// [`renewal`](Self::renewal) says so: as [`Lock::ttl`](crate::Lock::ttl). From 10 ms to 24 h. Default: the
    /// registry's.
    ///
    /// The future yields [`LockError::InvalidTtl`] if it is out of range, before anything is sent.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.0.options_mut().ttl = Some(ttl);
        self
    }

    /// Whether the new lease is renewed while it is held: as [`Lock::renewal`](crate::Lock::renewal). Default:
    /// [`Renewal::off`] if [`ttl`](Self::ttl) was set, otherwise the registry's.
    pub fn renewal(mut self, renewal: Renewal) -> Self {
        self.0.options_mut().renewal = Some(renewal);
        self
    }
}

impl Future for Adopt {
    type Output = Result<Lease, LockError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(cx)
    }
}

impl FusedFuture for Adopt {
    fn is_terminated(&self) -> bool {
        self.0.is_done()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> DetachedLease {
        DetachedLease::new(
            "a key".into(),
            "00ab:17".into(),
            Mode::Exclusive,
            Token::new(108_800_000_000_064).unwrap(),
            Duration::from_secs(3),
        )
    }

    #[test]
    fn a_text_is_read_back() {
        let lease = lease();
        let line = lease.to_string();
        assert!(!line.contains('\n'));
        for line in [line.clone(), format!("{line}\n"), format!("{line}\r\n")] {
            assert_eq!(line.parse::<DetachedLease>().unwrap(), lease);
        }
    }

    /// What one version writes, all later ones read.
    #[test]
    fn the_format_never_changes() {
        let lease: DetachedLease = "lockstream-lease-1 00ab:17 64 1700000000123 a key: {x}"
            .parse()
            .unwrap();
        assert_eq!(
            (lease.key(), lease.owner(), lease.token().get()),
            ("a key: {x}", "00ab:17", 64)
        );
        let since = lease.deadline().duration_since(SystemTime::UNIX_EPOCH);
        assert_eq!(since.unwrap(), Duration::from_millis(1_700_000_000_123));
    }

    #[test]
    fn the_format_of_shared_leases_never_changes() {
        let permit = Mode::Permits {
            limit: 9,
            weight: 3,
        };
        for (text, mode) in [("r", Mode::Shared), ("3/9", permit)] {
            let line = format!("lockstream-lease-2 {text} 00ab:17 64 1700000000123 a key: {{x}}");
            let lease: DetachedLease = line.parse().unwrap();
            assert_eq!((lease.key(), lease.owner()), ("a key: {x}", "00ab:17"));
            assert_eq!((lease.mode(), lease.token().get()), (mode, 64));
            assert_eq!(lease.to_string(), line);
        }
    }

    /// A key that only some prefixes allow is told when it is adopted, by a registry that has one.
    #[test]
    fn a_key_that_needs_its_prefix_is_read() {
        let line = "lockstream-lease-1 00ab:17 64 1 a}b";
        assert_eq!(line.parse::<DetachedLease>().unwrap().key(), "a}b");
    }

    #[test]
    fn hostile_texts_are_refused() {
        let long = "x".repeat(600);
        for line in [
            "",
            " ",
            "\n",
            "rubbish",
            "lockstream-lease-1",
            "lockstream-lease-1 00ab:17 64 1",
            "lockstream-lease-1 00ab:17 64 1 ",
            "lockstream-lease-2 00ab:17 64 1 k",
            "lockstream-lease-2",
            "lockstream-lease-2 r",
            "lockstream-lease-2 r 00ab:17 64 1",
            "lockstream-lease-2 x 00ab:17 64 1 k",
            "lockstream-lease-2 1/ 00ab:17 64 1 k",
            "lockstream-lease-2 /4 00ab:17 64 1 k",
            "lockstream-lease-2 +1/4 00ab:17 64 1 k",
            "lockstream-lease-2 256/400 00ab:17 64 1 k",
            "lockstream-lease-2 1/4294967296 00ab:17 64 1 k",
            "lockstream-lease-2 1/4 64 1 k",
            "lockstream-lease-3 00ab:17 64 1 k",
            "lockstream-lease-1  64 1 k",
            "lockstream-lease-1 00ab 64 1 k",
            "lockstream-lease-1 :17 64 1 k",
            "lockstream-lease-1 00ab: 64 1 k",
            "lockstream-lease-1 00ab:-1 64 1 k",
            "lockstream-lease-1 00\tab:17 64 1 k",
            "lockstream-lease-1 00\u{a0}ab:17 64 1 k",
            "lockstream-lease-1 00\rab:17 64 1 k",
            "lockstream-lease-1 00ab:17 -64 1 k",
            "lockstream-lease-1 00ab:17 +64 1 k",
            "lockstream-lease-1 00ab:17 99999999999999999999 1 k",
            "lockstream-lease-1 00ab:17 9223372036854775808 1 k",
            "lockstream-lease-1 00ab:17 64 soon k",
            "lockstream-lease-1 00ab:17 64 1 k\nk",
            "lockstream-lease-1 00ab:17 64 1 k\n\n",
            "lockstream-lease-1 00ab:17 64 1 k\u{7}",
            "lockstream-lease-1 00ab:17 64 1 ~fence",
            &format!("lockstream-lease-1 00ab:17 64 1 {long}"),
            &format!("lockstream-lease-1 {long}:17 64 1 k"),
        ] {
            let read = line.parse::<DetachedLease>();
            assert!(read.is_err(), "{line:?}: {read:?}");
        }
        let whatever = format!("lockstream-lease-1 00ab:17 64 {} k", u64::MAX);
        if let Ok(lease) = whatever.parse::<DetachedLease>() {
            // It must not panic.
            let _ = lease.deadline();
        }
    }

    #[cfg(feature = "serde")]
    #[test]
    fn it_goes_through_serde_and_is_checked() {
        let lease = lease();
        let json = serde_json::to_string(&lease).unwrap();
        assert_eq!(serde_json::from_str::<DetachedLease>(&json).unwrap(), lease);
        let good = r#""lockstream-lease-1 ab:1 64 1 k""#;
        assert!(serde_json::from_str::<DetachedLease>(good).is_ok());
        for bad in [
            r#""lockstream-lease-1 ab 1 64 1 k""#,
            r#""lockstream-lease-1 ab:1 64 1 k\n\n""#,
            r#""lockstream-lease-1 ab:1 -1 1 k""#,
            r#""lockstream-lease-1 ab:1 64 k""#,
            "64",
        ] {
            assert!(serde_json::from_str::<DetachedLease>(bad).is_err(), "{bad}");
        }
    }
}
