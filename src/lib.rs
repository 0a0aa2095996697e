//! Distributed locks as future and stream combinators.
