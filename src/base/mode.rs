use std::fmt;

/// What a lock excludes: see [`Lock::shared`](crate::Lock::shared) and [`Lock::permits`](crate::Lock::permits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Mode {
    /// All others.
    #[default]
    Exclusive,
    /// All but other shared ones.
    Shared,
    /// All but other permits, as long as all weights fit into its limit when it enters.
    #[non_exhaustive]
    Permits {
        /// How much may be taken at a time, with its own weight: what its caller asked for. Others may have asked for
        /// another limit.
        limit: u32,
        /// How much of the limit this one takes.
        weight: u8,
    },
}

impl Mode {
    /// `exclusive`, `shared` or `permit`.
    #[cfg(feature = "metrics")]
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Shared => "shared",
            Self::Permits { .. } => "permit",
        }
    }
}

/// `exclusive`, `shared`, or `permit 2/8`.
impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exclusive => f.write_str("exclusive"),
            Self::Shared => f.write_str("shared"),
            Self::Permits { limit, weight } => write!(f, "permit {weight}/{limit}"),
        }
    }
}
