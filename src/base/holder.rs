//! Who holds a lock that was not acquired.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::base::Mode;

/// What follows the instance in the owner of a key that is kept after its lease (M8): no registry has such an instance.
pub(crate) const KEPT: &str = "+kept";

/// The most characters of a name, and of an owner: a foreign lock may have anything in it.
const LONGEST_NAME: usize = 100;
const LONGEST_OWNER: usize = 200;

/// Who holds a lock, as the store said it when the lock was last asked for: see
/// [`LockError::NotAcquired`](crate::LockError::NotAcquired).
///
/// Of several that share the lock, it is the one whose lease ends first. Its `Display` is for people: `ci-7 for another
/// 12s`, `ci-7 and 3 others for another 12s`, or `ci-7 (4 permits taken) for another 12s`.
///
/// # Examples
///
/// ```
/// use lockstream::store::MemoryStore;
/// use lockstream::{LockError, LockRegistry};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = MemoryStore::new();
/// let there = LockRegistry::builder(store.clone()).name("ci-7").build()?;
/// let here = LockRegistry::builder(store).build()?;
/// let lease = there.obtain("nightly").lease().await?;
/// let busy = here.obtain("nightly").lease_within(std::time::Duration::ZERO).await;
/// let Err(LockError::NotAcquired { holder: Some(holder), .. }) = busy else { panic!() };
/// assert_eq!(holder.name(), "ci-7");
/// println!("try again in {:?}", holder.remaining());
/// # lease.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Holder(Arc<Inner>);

/// Behind a pointer: errors and events are moved about.
#[derive(PartialEq, Eq)]
struct Inner {
    name: Box<str>,
    owner: Box<str>,
    mode: Mode,
    others: u64,
    remaining: Option<Duration>,
}

impl Holder {
    /// Of the whole text of an owner.
    pub(crate) fn new(owner: &str, mode: Mode, others: u64, remaining: Option<Duration>) -> Self {
        Self(Arc::new(Inner {
            name: printable(name_of(owner), LONGEST_NAME),
            owner: printable(owner, LONGEST_OWNER),
            mode,
            others,
            remaining,
        }))
    }

    /// The [name](crate::LockRegistryBuilder::name) of its registry, or the registry's random id if it has none. Of a
    /// lock that another program wrote, what it wrote: 100 characters at most, with others in place of control
    /// characters.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its owner, as in [`InspectedHolder::owner`](crate::InspectedHolder::owner), but printable and not longer than 200
    /// characters.
    pub fn owner(&self) -> &str {
        &self.0.owner
    }

    /// What it excludes.
    pub fn mode(&self) -> Mode {
        self.0.mode
    }

    /// How many other readers hold the lock, or how much other permits take.
    pub fn others(&self) -> u64 {
        self.0.others
    }

    /// After which time the lock may be free, unless it is renewed or released: of shared leases, when enough of them
    /// have run out. Counted from when the wait ended. `None`: it has no ttl.
    pub fn remaining(&self) -> Option<Duration> {
        self.0.remaining
    }

    /// Whether the key stays locked after its lease: see [`OnFinish::KeepFor`](crate::OnFinish::KeepFor).
    fn is_kept(&self) -> bool {
        let instance = self.owner().rsplit_once(':').map(|(instance, _)| instance);
        instance.is_some_and(|instance| instance.ends_with(KEPT))
    }
}

/// The instance and the sequence of an owner, `<instance>:<sequence>`. `None`: it is of another program.
pub(crate) fn parts_of(owner: &str) -> Option<(&str, &str)> {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let parts = owner.rsplit_once(':');
    parts.filter(|(instance, sequence)| !instance.is_empty() && is_number(sequence))
}

/// The part of an owner that people know: `<name>` of `<name>~<random>:<number>`.
fn name_of(owner: &str) -> &str {
    let Some((instance, _)) = parts_of(owner) else {
        return owner;
    };
    let instance = instance.strip_suffix(KEPT).unwrap_or(instance);
    match instance.split_once('~') {
        Some((name, _)) if !name.is_empty() => name,
        _ => instance,
    }
}

/// At most so many characters, none of which does anything to a terminal or a log.
fn printable(text: &str, most: usize) -> Box<str> {
    let plain = |c: char| match c.is_control() {
        true => char::REPLACEMENT_CHARACTER,
        false => c,
    };
    let text: String = text.chars().take(most).map(plain).collect();
    text.into()
}

impl fmt::Debug for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holder")
            .field("owner", &self.owner())
            .field("mode", &self.mode())
            .field("others", &self.others())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match (self.mode(), self.others()) {
            (Mode::Permits { weight, .. }, others) => {
                let taken = others.saturating_add(weight.into());
                let plural = if taken == 1 { "" } else { "s" };
                write!(f, " ({taken} permit{plural} taken)")?;
            }
            (_, 0) => {}
            (_, 1) => f.write_str(" and another")?,
            (_, others) => write!(f, " and {others} others")?,
        }
        if self.is_kept() {
            f.write_str(" (kept after its lease)")?;
        }
        match self.remaining() {
            None => f.write_str(" without a ttl"),
            Some(remaining) => write!(f, " for another {}", in_words(remaining)),
        }
    }
}

/// As precisely as anybody wants to know it.
fn in_words(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{time:.1?}"),
        _ => format!(
            "{:?}",
            Duration::from_secs((time.as_millis() + 500) as u64 / 1000)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const INSTANCE: &str = "ci-8~00112233445566778899aabbccddeeff";

    #[test]
    fn a_holder_is_told_in_words() {
        let seconds = |seconds: u64| Some(Duration::from_millis(seconds * 1000 - 127));
        let (named, plain) = (INSTANCE.replace("ci-8", "ci-7") + ":9", "0a1b2c:77");
        let permits = Mode::Permits {
            limit: 8,
            weight: 2,
        };
        let exclusive = Mode::Exclusive;
        for (holder, told) in [
            (
                Holder::new(&named, exclusive, 0, seconds(12)),
                "ci-7 for another 12s",
            ),
            (
                Holder::new(&named, exclusive, 0, seconds(3)),
                "ci-7 for another 2.9s",
            ),
            (
                Holder::new(plain, exclusive, 0, Some(Duration::from_micros(8_765))),
                "0a1b2c for another 8.8ms",
            ),
            (
                Holder::new(&named, Mode::Shared, 3, seconds(12)),
                "ci-7 and 3 others for another 12s",
            ),
            (
                Holder::new(&named, Mode::Shared, 1, seconds(12)),
                "ci-7 and another for another 12s",
            ),
            (
                Holder::new(&named, permits, 5, seconds(12)),
                "ci-7 (7 permits taken) for another 12s",
            ),
            (
                Holder::new("ci-7~0a1b+kept:9", exclusive, 0, seconds(3600)),
                "ci-7 (kept after its lease) for another 3600s",
            ),
            (
                Holder::new("by hand", exclusive, 0, None),
                "by hand without a ttl",
            ),
            (
                Holder::new("cron:nightly", exclusive, 0, None),
                "cron:nightly without a ttl",
            ),
            (Holder::new(":7", exclusive, 0, None), ":7 without a ttl"),
        ] {
            assert_eq!(holder.to_string(), told);
        }
        let owner = format!("{INSTANCE}:5");
        let here = Holder::new(&owner, exclusive, 0, seconds(20));
        assert_eq!(here.to_string(), "ci-8 for another 20s");
        assert_eq!(here.owner(), owner);
    }

    /// It may come from anybody who can write to the server, and goes to terminals and logs.
    #[test]
    fn what_a_foreign_lock_has_in_it_is_made_printable() {
        let wild = format!("\u{1b}[2J\n{}", "ö".repeat(1_000));
        let holder = Holder::new(&wild, Mode::Exclusive, 0, None);
        let expected = format!("\u{fffd}[2J\u{fffd}{}", "ö".repeat(95));
        assert_eq!(holder.name(), expected);
        assert_eq!(holder.owner().chars().count(), 200);
        assert!(!holder.owner().contains(char::is_control));
    }
}
