//! What may name a lock, on every store alike.

/// The longest key, in bytes.
pub(crate) const MAX_KEY: usize = 512;

/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 128;

/// What our own names have and no lock's name has (K5): fences, queues, channels.
const RESERVED: &str = ":~";

/// Why `key` cannot name a lock under `prefix`; `None` if it can.
///
/// On a cluster a lock's queue must live in the lock's slot without being another lock's name, and
/// what is invalid there is so everywhere, so that a program may move from one store to another.
pub(crate) fn fault(prefix: &str, key: &str) -> Option<&'static str> {
    if let Some(fault) = fault_of_text(key) {
        return Some(fault);
    }
    if prefix.contains('}') || key.contains('}') {
        let full = format!("{prefix}:{key}");
        if !has_hash_tag(&full) {
            return Some("must not contain '}' without a hash tag '{…}' before it");
        }
    }
    None
}

/// Why `key` cannot name a lock under any prefix.
pub(crate) fn fault_of_text(key: &str) -> Option<&'static str> {
    if key.is_empty() {
        return Some("must not be empty");
    }
    if key.len() > MAX_KEY {
        return Some("must be at most 512 bytes: lock a hash of it instead");
    }
    if key.chars().any(char::is_control) {
        return Some("must not contain control characters");
    }
    if key.starts_with('~') {
        return Some("must not begin with '~', which is reserved");
    }
    if key.contains(RESERVED) {
        return Some("must not contain ':~', which is reserved");
    }
    None
}

/// Why `prefix` cannot stand before keys; `None` if it can.
///
/// The first `:` of a name ends its prefix, so no two prefixes have a name in common (K4). With an open brace, a queue
/// `{P:N}:~queue2` could be that of the lock `{P:N}`, too.
pub(crate) fn prefix_fault(prefix: &str) -> Option<&'static str> {
    if prefix.is_empty() {
        Some("must not be empty")
    } else if prefix.len() > MAX_PREFIX {
        Some("must be at most 128 bytes")
    } else if prefix.chars().any(char::is_control) {
        Some("must not contain control characters")
    } else if prefix.contains('~') {
        Some("must not contain '~', which is reserved")
    } else if prefix.contains(':') {
        Some(
            "must not contain ':', which ends it; write '-' or '.', or begin the keys with the rest",
        )
    } else if prefix.contains(['{', '}']) && !has_hash_tag(prefix) {
        Some("must not contain '{' or '}' without a hash tag '{…}'")
    } else {
        None
    }
}

/// Whether Redis hashes only a part of the name: from the first `{` to the first `}` after it, if
/// something stands between.
pub(crate) fn has_hash_tag(name: &str) -> bool {
    hash_tag(name).is_some()
}

/// That part.
pub(crate) fn hash_tag(name: &str) -> Option<&str> {
    let (tag, _) = name.split_once('{')?.1.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_can_name_a_lock() {
        for key in [
            "a",
            "order:42",
            "ключ",
            "{a}b",
            "a{b}c}",
            "a{b",
            ":a",
            "a:",
            "a::b~",
            &"x".repeat(512),
        ] {
            assert_eq!(fault("lock", key), None, "{key}");
        }
    }

    #[test]
    fn keys_that_cannot() {
        let long = "x".repeat(513);
        for key in [
            "",
            &long,
            "a\nb",
            "~fence",
            "a:~queue2",
            "a:~listen1",
            "a:~",
            "billing:~fence",
            "a:~b",
            "a}",
            "{}a",
            "{}{a}",
        ] {
            assert!(fault("lock", key).is_some(), "{key}");
        }
    }

    #[test]
    fn prefixes() {
        assert_eq!(prefix_fault("lock"), None);
        assert_eq!(prefix_fault("shop-billing"), None);
        assert_eq!(prefix_fault("{app}"), None);
        assert_eq!(prefix_fault("shop.{app}"), None);
        for prefix in [
            "", "a\tb", "a~b", "a}", "{a", "a{}", "a:b", ":", "{a:b}", "{a}:b",
        ] {
            assert!(prefix_fault(prefix).is_some(), "{prefix}");
        }
    }
}
