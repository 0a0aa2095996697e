//! Guides and reference pages. The repository has the same pages in its folder `docs`.
//!
//! Within this crate the links of a page lead to modules, so each one that has links begins with their targets: the
//! first definition of a link counts.

/// [protocol.md]: crate::docs::protocol
///
#[doc = include_str!("../docs/architecture.md")]
pub mod architecture {}

/// [protocol.md]: crate::docs::protocol
///
#[doc = include_str!("../docs/bugs-of-others.md")]
pub mod bugs_of_others {}

/// [operations.md]: crate::docs::operations
/// [postgres.md]: crate::docs::postgres
///
#[doc = include_str!("../docs/command-line.md")]
pub mod command_line {}

#[doc = include_str!("../docs/fairness.md")]
pub mod fairness {}

// Its snippets need these features.
#[cfg(any(
    not(doctest),
    all(feature = "macros", feature = "redis", feature = "test-util")
))]
/// [postgres.md#a-fenced-transaction]: crate::docs::postgres#a-fenced-transaction
///
#[doc = include_str!("../docs/from-other-libraries.md")]
pub mod from_other_libraries {}

/// [operations.md]: crate::docs::operations
/// [postgres.md]: crate::docs::postgres
///
#[doc = include_str!("../docs/guarantees.md")]
pub mod guarantees {}

// Its snippets need these features.
#[cfg(any(
    not(doctest),
    all(
        feature = "macros",
        feature = "redis",
        feature = "test-util",
        feature = "tokio-util",
        feature = "tower"
    )
))]
/// [fairness.md]: crate::docs::fairness
/// [from-other-libraries.md]: crate::docs::from_other_libraries
/// [guarantees.md]: crate::docs::guarantees
/// [lib.rs#features]: crate#features
/// [operations.md]: crate::docs::operations
/// [operations.md#access-rights]: crate::docs::operations#access-rights
/// [operations.md#rotating-credentials]: crate::docs::operations#rotating-credentials
/// [operations.md#stopping-a-process]: crate::docs::operations#stopping-a-process
/// [operations.md#when-it-does-not-connect]: crate::docs::operations#when-it-does-not-connect
/// [pipelines.md]: crate::docs::pipelines
/// [postgres.md]: crate::docs::postgres
///
#[doc = include_str!("../docs/guide.md")]
pub mod guide {}

// Its snippet needs this feature.
#[cfg(any(not(doctest), feature = "redis"))]
/// [urls.md]: crate::docs::urls
///
#[doc = include_str!("../docs/operations.md")]
pub mod operations {}

// Its snippets need these features.
#[cfg(any(not(doctest), all(feature = "postgres", feature = "redis")))]
#[doc = include_str!("../docs/pipelines.md")]
pub mod pipelines {}

// Its snippet needs this feature.
#[cfg(any(not(doctest), feature = "postgres"))]
#[doc = include_str!("../docs/postgres.md")]
pub mod postgres {}

/// [guarantees.md]: crate::docs::guarantees
///
#[doc = include_str!("../docs/protocol.md")]
pub mod protocol {}

/// [postgres.md#tls]: crate::docs::postgres#tls
///
#[doc = include_str!("../docs/urls.md")]
pub mod urls {}
