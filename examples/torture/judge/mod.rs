//! The judges: each looks at one thing, and none of them asks the library.
//!
//! | file | question it answers |
//! |---|---|
//! | `holds.rs` | did two hold a key at once that must not, did tokens grow, did fencing let a stale write through? |
//! | `reigns.rs` | which server gave out leases when, and out of which memory? |
//! | `waits.rs` | did every wait end in its time? |
//! | `linear.rs` | was the resource ever anything else than one register that adds up, with so many inside? |
//! | `votes.rs` | who had a key, by what a majority of servers says? |
//! | `recovery.rs` | how long after a fault was there the next lease? |
//! | `standstill.rs` | for how long did the machine stand still meanwhile? |

pub(crate) mod holds;
pub(crate) mod linear;
pub(crate) mod recovery;
pub(crate) mod reigns;
pub(crate) mod standstill;
pub(crate) mod votes;
pub(crate) mod waits;

/// A child: which of them, and which in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Child {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

/// The name of its registry as well, with which its owners begin in the stores.
impl std::fmt::Display for Child {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// How a lease shares its key with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Exclusive,
    /// One key of several that were taken as one lock.
    Group,
    /// Nobody else has the key before the first deadline, whenever the work ends.
    Kept,
    Reader,
    Permit {
        weight: u64,
        limit: u64,
    },
}

impl Mode {
    /// Equal for those that may hold a key at once; `None` for one that shares it with nobody.
    fn kind(self) -> Option<Kind> {
        match self {
            Self::Exclusive | Self::Group | Self::Kept => None,
            Self::Reader => Some(Kind::Readers),
            Self::Permit { .. } => Some(Kind::Permits),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Group => "group",
            Self::Kept => "kept",
            Self::Reader => "reader",
            Self::Permit { .. } => "permit",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "exclusive" => Self::Exclusive,
            "group" => Self::Group,
            "kept" => Self::Kept,
            "reader" => Self::Reader,
            _ => {
                let (weight, limit) = text.strip_prefix("permit:")?.split_once('/')?;
                let (weight, limit) = (weight.parse().ok()?, limit.parse().ok()?);
                Self::Permit { weight, limit }
            }
        })
    }
}

impl std::fmt::Display for Mode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Permit { weight, limit } => write!(f, "permit:{weight}/{limit}"),
            other => f.write_str(other.name()),
        }
    }
}

/// Who shares a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Readers,
    Permits,
}

/// From when till when (ns).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl Span {
    /// How much of it lies within another.
    pub(crate) fn within(self, other: Self) -> u64 {
        self.to
            .min(other.to)
            .saturating_sub(self.from.max(other.from))
    }

    pub(crate) fn touches(self, other: Self) -> bool {
        self.from <= other.to && other.from <= self.to
    }
}
