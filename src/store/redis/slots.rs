//! The slot of a name, and the shortest hash tag for each slot.

use std::sync::{Arc, LazyLock};

use crc::{CRC_16_XMODEM, Crc};

use crate::base::key::hash_tag;
use crate::store::driver::Slot;

/// How many slots a cluster has.
pub(super) const SLOTS: usize = 16_384;

/// The slot of a name, or of its hash tag.
pub(super) fn slot(name: &str) -> Slot {
    slot_of(hash_tag(name).unwrap_or(name))
}

fn slot_of(hashed: &str) -> Slot {
    CRC.checksum(hashed.as_bytes()) % SLOTS as u16
}

/// The checksum that the specification of Redis Cluster names.
static CRC: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);

/// Tags are tried in this order. It never changes, since all processes must get the same tags.
const LETTERS: &str = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// The shortest hash tag of each slot. A fence's name ends with one, in braces.
#[derive(Debug)]
pub(super) struct Tags(Box<[Box<str>]>);

/// The tags for all prefixes without a brace.
static USUAL: LazyLock<Arc<Tags>> = LazyLock::new(|| Arc::new(Tags::make("")));

impl Tags {
    /// The tags for the fences of a prefix. A prefix with an open brace makes all that follows part of the hash tag,
    /// so it needs other tags.
    pub(super) fn after(prefix: &str) -> Arc<Self> {
        match prefix.split_once('{') {
            None => USUAL.clone(),
            Some((_, begun)) => Arc::new(Self::make(&format!("{begun}:~fence:{{"))),
        }
    }

    pub(super) fn of(&self, slot: Slot) -> &str {
        &self.0[usize::from(slot)]
    }

    /// Tries all texts, the shortest first, with `before` in front of them.
    fn make(before: &str) -> Self {
        let mut tags = vec![Box::<str>::default(); SLOTS];
        let (mut missing, mut texts) = (SLOTS, (1..).map(text));
        while missing > 0
            && let Some(text) = texts.next()
        {
            let tag = &mut tags[usize::from(slot_of(&format!("{before}{text}")))];
            if tag.is_empty() {
                *tag = text.into();
                missing -= 1;
            }
        }
        Self(tags.into())
    }
}

/// The texts in order: the shortest first; the last letter changes fastest.
fn text(number: usize) -> String {
    match number.checked_sub(1) {
        None => String::new(),
        Some(before) => {
            let last = before % LETTERS.len();
            text(before / LETTERS.len()) + &LETTERS[last..=last]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("{user1000}.following"), slot("user1000"));
        assert_eq!(slot("foo{}{bar}"), slot_of("foo{}{bar}"));
        assert_eq!(slot("foo{{bar}}zap"), slot_of("{bar"));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
    }

    /// Another table in another version of this crate would be another fence for the same locks.
    #[test]
    fn f1_every_slot_has_one_tag_and_it_stays_the_same() {
        for prefix in ["lock", "a.b"] {
            let tags = Tags::after(prefix);
            for index in 0..SLOTS {
                let index = u16::try_from(index).unwrap();
                let fence = format!("{prefix}:~fence:{{{}}}", tags.of(index));
                assert_eq!(slot(&fence), index, "{fence}");
            }
        }
        let usual = Tags::after("lock");
        let some = [0, 1, 8191, 12_182, 16_383].map(|slot| usual.of(slot));
        assert_eq!(some, ["06S", "Qi", "6xN", "9Le", "6ZJ"]);
        let longest = usual.0.iter().map(|tag| tag.len()).max();
        assert!(longest <= Some(4), "{longest:?}");
    }
}
