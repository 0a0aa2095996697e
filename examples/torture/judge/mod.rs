//! The judges: each looks at one thing, and none of them asks the library.
//!
//! | file | question it answers |
//! |---|---|
//! | `holds.rs` | did two hold a key at once, did tokens grow, did fencing let a stale write through? |
//! | `reigns.rs` | which server gave out leases when, and out of which memory? |
//! | `waits.rs` | did every wait end in its time? |
//! | `linear.rs` | was the resource ever anything else than one register that adds up? |
//! | `recovery.rs` | how long after a fault was there the next lease? |

pub(crate) mod holds;
pub(crate) mod linear;
pub(crate) mod recovery;
pub(crate) mod reigns;
pub(crate) mod waits;

/// A child: which of them, and which in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Child {
    pub(crate) slot: usize,
    pub(crate) generation: u64,
}

impl std::fmt::Display for Child {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
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
