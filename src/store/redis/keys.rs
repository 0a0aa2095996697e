//! How locks are named on the server.

use std::sync::Arc;

use super::slots::{self, Tags};
use crate::base::key;
use crate::base::key::has_hash_tag;
use crate::store::driver::Slot;

/// What follows a lock's name in those of its queue, and of the channel for its grants on a cluster. The queue's number is
/// the format's: another version of this crate must not misread the tickets.
const QUEUE: &str = ":~queue2";
const GRANT: &str = ":~grant:";

/// The names under one prefix, as one registry uses them.
#[derive(Clone, Debug)]
pub(super) struct Names {
    prefix: Arc<str>,
    /// What begins the name of a queue; without its brace, that of a lock.
    root: Box<str>,
    instance: Arc<str>,
    fence: Box<str>,
    slots: Slots,
    channel: Box<str>,
}

/// The slots of the locks, and the fences for them.
#[derive(Clone, Debug)]
enum Slots {
    /// All locks in this slot, with one fence.
    One(Slot),
    /// Each lock in its own slot. Each slot has a fence, whose name ends with the slot's tag.
    All(Arc<Tags>),
}

impl Names {
    pub(super) fn new(prefix: Arc<str>, instance: Arc<str>) -> Self {
        Self {
            root: format!("{{{prefix}:").into(),
            fence: format!("{prefix}:~fence").into(),
            channel: format!("{prefix}:~grant:{instance}").into(),
            slots: Slots::One(0),
            prefix,
            instance,
        }
    }

    /// For a cluster, whose scripts may use only names in the lock's slot. Under a prefix with a hash tag all locks
    /// have one slot, and one fence.
    pub(super) fn clustered(prefix: Arc<str>, instance: Arc<str>) -> Self {
        let slots = match has_hash_tag(&prefix) {
            true => Slots::One(slots::slot(&prefix)),
            false => Slots::All(Tags::after(&prefix)),
        };
        Self {
            slots,
            ..Self::new(prefix, instance)
        }
    }

    /// The first part of every name.
    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// The registry's id, the first part of its owners.
    pub(super) fn instance(&self) -> &str {
        &self.instance
    }

    /// The key from which every epoch of the lock comes.
    pub(super) fn fence<'a>(&'a self, key: &'a str) -> [&'a str; 4] {
        self.fence_in(self.slot(key))
    }

    /// The fence of a slot.
    fn fence_in(&self, slot: Slot) -> [&str; 4] {
        match &self.slots {
            Slots::All(tags) => [&self.fence, ":{", tags.of(slot), "}"],
            Slots::One(_) => [&self.fence, "", "", ""],
        }
    }

    /// The lock's slot on a cluster; 0 elsewhere.
    pub(super) fn slot(&self, key: &str) -> Slot {
        match &self.slots {
            Slots::All(_) => slots::slot(&self.lock(key).concat()),
            Slots::One(slot) => *slot,
        }
    }

    /// Whether there may be locks in the slot.
    pub(super) fn has_locks_in(&self, slot: Slot) -> bool {
        match &self.slots {
            Slots::All(_) => true,
            Slots::One(one) => *one == slot,
        }
    }

    /// The channel for grants of the lock to this registry, on a cluster: in the lock's slot.
    pub(super) fn channel_of(&self, key: &str) -> String {
        self.beside(key, GRANT).concat() + &self.instance
    }

    /// Names for a probe in a slot, which nothing else uses: a lock, its queue and its channel.
    pub(super) fn probe_in(&self, slot: Slot) -> [String; 3] {
        let (stem, instance) = (self.fence_in(slot).concat(), &self.instance);
        let lock = format!("{stem}:~probe:{instance}");
        let queue = format!("{lock}:~queue2");
        [lock, queue, format!("{stem}:~grant:{instance}")]
    }

    /// The same for a probe on one server.
    pub(super) fn probe(&self) -> [String; 3] {
        let never = format!("~grant:{}", self.instance);
        let [lock, queue] = [self.lock(&never).concat(), self.queue(&never).concat()];
        [lock, queue, self.channel().to_owned()]
    }

    /// Names that a proxy would spread over its servers, with this word in them. One in 65,000 times they are all on one
    /// of two.
    pub(super) fn far_apart(&self, word: &str) -> Vec<String> {
        let name = |index| self.lock(&format!("~spread:{word}:{index}")).concat();
        (0..17).map(name).collect()
    }

    /// The channel for grants to this registry.
    pub(super) fn channel(&self) -> &str {
        &self.channel
    }

    /// The string that holds the owner of `key`; in pieces, so that it is put together only in the command.
    pub(super) fn lock<'a>(&'a self, key: &'a str) -> [&'a str; 2] {
        [&self.root[1..], key]
    }

    /// The sorted set of tickets for the lock, in its slot.
    pub(super) fn queue<'a>(&'a self, key: &'a str) -> [&'a str; 4] {
        self.beside(key, QUEUE)
    }

    /// The key whose lock or queue has this name.
    pub(super) fn key_of<'a>(&self, name: &'a str) -> Option<&'a str> {
        let key = match name.strip_suffix(QUEUE) {
            Some(stem) => self.key_beside(name, stem, QUEUE),
            None => self.key_in(name),
        };
        key.filter(|key| key::fault(&self.prefix, key).is_none())
    }

    /// The key whose grants go by this channel, on a cluster.
    pub(super) fn key_of_channel<'a>(&self, channel: &'a str) -> Option<&'a str> {
        let name = channel.strip_suffix(&*self.instance)?;
        self.key_beside(name, name.strip_suffix(GRANT)?, GRANT)
    }

    fn key_in<'a>(&self, lock: &'a str) -> Option<&'a str> {
        lock.strip_prefix(&*self.prefix)?.strip_prefix(':')
    }

    /// The key with this name in its slot, which is a stem and what is beside the lock.
    fn key_beside<'a>(&self, name: &str, stem: &'a str, what: &str) -> Option<&'a str> {
        let in_braces = stem.strip_prefix('{').and_then(|it| it.strip_suffix('}'));
        let keys = [Some(stem), in_braces].into_iter().flatten();
        let mut keys = keys.filter_map(|it| self.key_in(it));
        keys.find(|key| self.beside(key, what).concat() == name)
    }

    /// A pattern for the names of all locks and queues whose keys begin with `start`, and a few others.
    pub(super) fn pattern(&self, start: &str) -> String {
        let mut pattern = String::from("*");
        for c in self.prefix.chars().chain([':']).chain(start.chars()) {
            if matches!(c, '*' | '?' | '[' | ']' | '^' | '\\') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern + "*"
    }

    /// The sorted set of subscriptions to the release of the lock (W7).
    pub(super) fn listeners<'a>(&'a self, key: &'a str) -> [&'a str; 4] {
        self.beside(key, ":~listen1")
    }

    /// A name in the lock's hash slot.
    fn beside<'a>(&'a self, key: &'a str, what: &'a str) -> [&'a str; 4] {
        let has_brace = key.contains('{') || self.prefix.contains('{');
        match has_brace && has_hash_tag(&self.lock(key).concat()) {
            true => [&self.root[1..], key, "", what],
            false => [&self.root, key, "}", what],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn queue(prefix: &str, key: &str) -> String {
        Names::new(prefix.into(), "1f".into()).queue(key).concat()
    }

    #[test]
    fn a_queue_lies_in_the_slot_of_its_lock() {
        assert_eq!(queue("lock", "order:42"), "{lock:order:42}:~queue2");
        assert_eq!(queue("lock", "{order}:42"), "lock:{order}:42:~queue2");
        assert_eq!(queue("{app}", "order"), "{app}:order:~queue2");
        assert_eq!(
            queue("p", "a{b"),
            "{p:a{b}:~queue2",
            "an open brace is no tag"
        );
        assert_eq!(
            queue("p", "a{}{b}"),
            "{p:a{}{b}}:~queue2",
            "an empty first tag means none, for Redis"
        );
        assert_eq!(
            queue("p", "a}b{c}"),
            "p:a}b{c}:~queue2",
            "a brace that closes nothing"
        );
    }

    /// All texts of up to `most` of these pieces.
    fn texts(pieces: &[&str], most: usize) -> Vec<String> {
        let mut all = vec![String::new()];
        let mut last = all.clone();
        for _ in 0..most {
            let longer = last
                .iter()
                .flat_map(|text| pieces.iter().map(move |piece| text.clone() + piece));
            last = longer.collect();
            all.extend_from_slice(&last);
        }
        all
    }

    /// `shop` with `billing:x` and `shop:billing` with `x` were one lock. The locks `ap:p` and `{ap:p}` had one queue.
    /// A key `billing:~fence` was the fence of another prefix.
    #[test]
    fn k4_no_name_belongs_to_two_locks() {
        let mut prefixes = texts(&["a", ":", "{", "}", "~fence"], 4);
        prefixes.retain(|prefix| key::prefix_fault(prefix).is_none());
        let keys = texts(&["a", ":", "{", "}", ":~queue2", "~fence"], 4);
        let mut owners = HashMap::new();
        let mut own = |name: String, prefix: &str, key: &str| {
            let owner = (prefix.to_owned(), key.to_owned());
            let before = owners.entry(name.clone()).or_insert_with(|| owner.clone());
            assert_eq!(*before, owner, "both have {name}");
        };
        for prefix in &prefixes {
            let names = Names::new(prefix.as_str().into(), "1f".into());
            let clustered = Names::clustered(prefix.as_str().into(), "1f".into());
            own(names.fence("a").concat(), prefix, "~fence");
            own(names.channel().to_owned(), prefix, "~grant");
            for key in &keys {
                if key::fault(prefix, key).is_some() {
                    continue;
                }
                own(names.lock(key).concat(), prefix, key);
                own(names.queue(key).concat(), prefix, key);
                own(names.listeners(key).concat(), prefix, key);
                own(clustered.channel_of(key), prefix, key);
                let fence = clustered.fence(key).concat();
                own(fence, prefix, "~fence");
                let lock = names.lock(key).concat();
                let lists = prefixes.iter().filter(|prefix| {
                    let names = Names::new(prefix.as_str().into(), "1f".into());
                    names.key_of(&lock).is_some()
                });
                assert_eq!(lists.collect::<Vec<_>>(), [prefix], "who lists {lock}");
            }
        }
        assert!(owners.len() > 10_000, "{}", owners.len());
    }

    #[test]
    fn names_stand_under_the_prefix() {
        let names = Names::new("p".into(), "1f".into());
        assert_eq!(names.lock("n").concat(), "p:n");
        assert_eq!(names.fence("n").concat(), "p:~fence");
        assert_eq!(names.channel(), "p:~grant:1f");
    }

    #[test]
    fn names_lead_back_to_their_keys() {
        for (prefix, key) in [
            ("lock", "order:42"),
            ("lock", "{order}:42"),
            ("{app}", "order"),
            ("{app}", "a{b}"),
            ("p", "a}b{c}"),
            ("lock", "lock:a"),
        ] {
            let names = Names::new(prefix.into(), "1f".into());
            for name in [names.lock(key).concat(), names.queue(key).concat()] {
                assert_eq!(names.key_of(&name), Some(key), "{name}");
            }
            let others = [
                names.listeners(key).concat(),
                names.fence(key).concat(),
                names.channel().to_owned(),
                format!("other:{key}"),
                format!("{{other:{key}}}:~queue2"),
            ];
            for name in others {
                assert_eq!(names.key_of(&name), None, "{name}");
            }
        }
    }

    #[test]
    fn a_pattern_means_its_text() {
        let names = Names::new("l*ck".into(), "1f".into());
        assert_eq!(names.pattern("a[b]?\\^-"), "*l\\*ck:a\\[b\\]\\?\\\\\\^-*");
    }

    /// Other versions of this crate on the same server rely on these names. A change of one is a change of the format,
    /// and needs another number in the queue's name.
    #[test]
    fn names_are_as_other_versions_know_them() {
        let all = |names: &Names, key| {
            [
                names.lock(key).concat(),
                names.queue(key).concat(),
                names.listeners(key).concat(),
                names.fence(key).concat(),
                names.channel().to_owned(),
            ]
        };
        let names = Names::new("lock".into(), "1f".into());
        let known = [
            "lock:order:42",
            "{lock:order:42}:~queue2",
            "{lock:order:42}:~listen1",
            "lock:~fence",
            "lock:~grant:1f",
        ];
        assert_eq!(all(&names, "order:42"), known);
        {
            let names = Names::clustered("lock".into(), "1f".into());
            assert_eq!(names.slot("order:42"), 1507, "as CRC16 says");
            assert_eq!(names.fence("order:42").concat(), "lock:~fence:{6SN}");
            assert_eq!(names.queue("order:42").concat(), known[1]);
            assert_eq!(names.channel_of("order:42"), "{lock:order:42}:~grant:1f");
            assert_eq!(names.channel_of("{order}:42"), "lock:{order}:42:~grant:1f");
            // Under a prefix with a tag of its own all locks have one slot, and one fence.
            let names = Names::clustered("{app}".into(), "1f".into());
            assert_eq!(names.fence("order:42").concat(), "{app}:~fence");
            assert_eq!(names.channel_of("order:42"), "{app}:order:42:~grant:1f");
        }
    }
}
