//! How locks are named on the server.

use std::sync::Arc;

/// The names under one prefix, as one registry uses them.
#[derive(Clone, Debug)]
pub(super) struct Names {
    prefix: Arc<str>,
    instance: Arc<str>,
    fence: Box<str>,
    channel: Box<str>,
}

impl Names {
    pub(super) fn new(prefix: Arc<str>, instance: Arc<str>) -> Self {
        Self {
            fence: format!("{prefix}:~fence").into(),
            channel: format!("{prefix}:~grant:{instance}").into(),
            prefix,
            instance,
        }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The registry's id, with which all its owners begin.
    pub(super) fn instance(&self) -> &str {
        &self.instance
    }

    /// Where every draw comes from.
    pub(super) fn fence(&self) -> &str {
        &self.fence
    }

    /// Where the grants for this registry are published.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// The plain string that holds the owner of `key`.
    pub(super) fn lock(&self, key: &str) -> String {
        format!("{}:{key}", self.prefix)
    }

    /// The sorted set of the tickets for the lock, in the lock's hash slot. The number is the
    /// format's: another version of this crate must not misread these tickets.
    pub(super) fn queue(lock: &str) -> String {
        if has_hash_tag(lock) {
            format!("{lock}:~queue1")
        } else {
            format!("{{{lock}}}:~queue1")
        }
    }
}

/// Whether Redis takes a part of the name for its slot: what stands between the first `{` and the
/// first `}` after it, if that is something.
fn has_hash_tag(name: &str) -> bool {
    name.split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .is_some_and(|(tag, _)| !tag.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_lies_in_the_slot_of_its_lock() {
        assert_eq!(Names::queue("lock:order:42"), "{lock:order:42}:~queue1");
        assert_eq!(Names::queue("lock:{order}:42"), "lock:{order}:42:~queue1");
        assert_eq!(Names::queue("{app}:order"), "{app}:order:~queue1");
        assert_eq!(
            Names::queue("a{b"),
            "{a{b}:~queue1",
            "an open brace is no tag"
        );
        assert_eq!(
            Names::queue("a{}{b}"),
            "{a{}{b}}:~queue1",
            "an empty first tag means none, for Redis"
        );
        assert_eq!(
            Names::queue("a}b{c}"),
            "a}b{c}:~queue1",
            "a brace that closes nothing"
        );
    }

    #[test]
    fn names_stand_under_the_prefix() {
        let names = Names::new("p".into(), "1f".into());
        assert_eq!(names.lock("n"), "p:n");
        assert_eq!(names.fence(), "p:~fence");
        assert_eq!(names.channel(), "p:~grant:1f");
    }
}
