//! What may name a lock, on every store alike.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher};
use std::sync::{Arc, LazyLock};

/// The longest key, in bytes.
pub(crate) const MAX_KEY: usize = 512;

/// The longest prefix, in bytes.
const MAX_PREFIX: usize = 128;

/// A key and its hash, made once for a handle, however often that acquires: hashing at each event was nearly a
/// tenth of the instructions of a pass.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    name: Arc<str>,
    hash: u64,
}

/// What is kept for keys.
pub(crate) type KeyMap<V> = HashMap<Key, V, BuildHasherDefault<Kept>>;

/// Takes the hash that a [`Key`] has brought.
#[derive(Debug, Default)]
pub(crate) struct Kept(u64);

impl Key {
    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }
}

impl From<Arc<str>> for Key {
    fn from(name: Arc<str>) -> Self {
        /// The standard hasher, with secrets of this process: keys may come from strangers, who must not be able to
        /// choose such as meet in one place of a table.
        static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let hash = HASHER.hash_one(&*name);
        Self { name, hash }
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        // One handle's are the same text in the same place.
        self.hash == other.hash && (Arc::ptr_eq(&self.name, &other.name) || self.name == other.name)
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Hasher for Kept {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key writes its hash alone")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

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
        return Some("must be at most 512 bytes");
    }
    if key.chars().any(char::is_control) {
        return Some("must not contain control characters");
    }
    if key.starts_with('~') {
        return Some("must not begin with '~', which is reserved");
    }
    if ends_like_a_set(key) {
        return Some("must not end in ':~queue' or ':~listen' and a number, which are reserved");
    }
    None
}

/// Why `prefix` cannot stand before keys; `None` if it can.
pub(crate) fn prefix_fault(prefix: &str) -> Option<&'static str> {
    if prefix.is_empty() {
        Some("must not be empty")
    } else if prefix.len() > MAX_PREFIX {
        Some("must be at most 128 bytes")
    } else if prefix.chars().any(char::is_control) {
        Some("must not contain control characters")
    } else if prefix.contains('~') {
        Some("must not contain '~', which is reserved")
    } else if prefix.contains('}') && !has_hash_tag(prefix) {
        Some("must not contain '}' without a hash tag '{…}' before it")
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

fn ends_like_a_set(key: &str) -> bool {
    let stem = key.trim_end_matches(|c: char| c.is_ascii_digit());
    stem.len() < key.len() && (stem.ends_with(":~queue") || stem.ends_with(":~listen"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_by_its_name_whoever_made_it() {
        let key = |name: &str| Key::from(Arc::from(name));
        let mut map = KeyMap::default();
        for n in 0..100 {
            map.insert(key(&n.to_string()), n);
        }
        for n in 0..100 {
            assert_eq!(map.get(&key(&n.to_string())), Some(&n));
        }
        assert_eq!(map.get(&key("100")), None);
        let (one, other) = (key("one"), key("other"));
        let collides = Key {
            hash: one.hash,
            ..other.clone()
        };
        assert_ne!(one, collides, "a hash is no name");
        assert!(one < other);
    }

    #[test]
    fn keys_that_can_name_a_lock() {
        for key in [
            "a",
            "order:42",
            "ключ",
            "{a}b",
            "a{b}c}",
            "a{b",
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
            "a:~queue1",
            "a:~queue42",
            "a:~listen1",
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
        assert_eq!(prefix_fault("{app}"), None);
        for prefix in ["", "a\tb", "a~b", "a}"] {
            assert!(prefix_fault(prefix).is_some(), "{prefix}");
        }
    }
}
