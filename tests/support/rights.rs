//! The rights that the documentation says are enough.

/// The words after `ACL SETUSER` in `docs/operations.md`: the user, its password, and each of its rights.
pub fn least_rights() -> Vec<&'static str> {
    const PAGE: &str = include_str!("../../docs/operations.md");
    let mut lines = PAGE
        .lines()
        .filter_map(|line| line.strip_prefix("ACL SETUSER "));
    let line = lines.next().expect("the page has such a line");
    assert!(lines.next().is_none(), "the page has one such line");
    line.split(' ').collect()
}
