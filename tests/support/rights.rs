//! The rights that the documentation says are enough.

/// The words after `ACL SETUSER` in `docs/operations.md`: the user, its password, and each of its rights.
pub fn least_rights() -> Vec<&'static str> {
    rights_of("lockstream")
}

/// The same of the user that sentinels are to know.
pub fn least_rights_at_sentinels() -> Vec<&'static str> {
    rights_of("watcher")
}

fn rights_of(user: &str) -> Vec<&'static str> {
    const PAGE: &str = include_str!("../../docs/operations.md");
    let all = PAGE
        .lines()
        .filter_map(|line| line.strip_prefix("ACL SETUSER "));
    let mut lines = all.filter(|line| line.split(' ').next() == Some(user));
    let line = lines.next().expect("the page has such a line");
    assert!(lines.next().is_none(), "the page has one such line");
    line.split(' ').collect()
}
