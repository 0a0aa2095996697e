//! Which slot a name lies in, and the shortest hash tag for each slot.

use std::sync::{Arc, LazyLock};

/// Where a cluster keeps a name: below [`SLOTS`].
pub(in crate::store::redis) type Slot = u16;

pub(in crate::store::redis) const SLOTS: usize = 16_384;

/// The slot of a name, or of the hash tag in it.
pub(in crate::store::redis) fn slot(name: &str) -> Slot {
    let tag = name
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'))
        .map(|(tag, _)| tag)
        .filter(|tag| !tag.is_empty());
    slot_of(&[tag.unwrap_or(name)])
}

/// The slot of a name in pieces that has no hash tag.
pub(in crate::store::redis) fn slot_of(pieces: &[&str]) -> Slot {
    let crc = pieces
        .iter()
        .fold(0, |crc, piece| crc16(crc, piece.as_bytes()));
    crc % SLOTS as u16
}

/// CRC16/XMODEM, as the specification of Redis Cluster has it.
fn crc16(crc: u16, bytes: &[u8]) -> u16 {
    bytes.iter().fold(crc, |crc, &byte| {
        (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)]
    })
}

static TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < table.len() {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 {
                crc << 1
            } else {
                (crc << 1) ^ 0x1021
            };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

/// In this order they make tags; all processes must make the same.
const LETTERS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";

/// For each slot the shortest text that leads there, between braces at the end of a fence's name.
#[derive(Debug)]
pub(in crate::store::redis) struct Tags(Box<[Box<str>]>);

/// Of all prefixes that hold no brace.
static USUAL: LazyLock<Arc<Tags>> = LazyLock::new(|| Arc::new(Tags::make(0)));

impl Tags {
    /// The tags for the fences of a prefix. One with an open brace makes all that follows it part of
    /// the hash tag, so it needs others.
    pub(in crate::store::redis) fn after(prefix: &str) -> Arc<Self> {
        match prefix.split_once('{') {
            None => USUAL.clone(),
            Some((_, begun)) => {
                let crc = crc16(crc16(0, begun.as_bytes()), b":~fence:{");
                Arc::new(Self::make(crc))
            }
        }
    }

    pub(in crate::store::redis) fn of(&self, slot: Slot) -> &str {
        &self.0[usize::from(slot)]
    }

    /// Tries all texts, the shortest first, after what led to `crc`.
    fn make(crc: u16) -> Self {
        let mut tags = vec![Box::<str>::default(); SLOTS];
        let mut missing = SLOTS;
        let mut text = Vec::new();
        while missing > 0 {
            next(&mut text);
            let tag = &mut tags[usize::from(crc16(crc, &text)) % SLOTS];
            if tag.is_empty() {
                *tag = String::from_utf8_lossy(&text).into();
                missing -= 1;
            }
        }
        Self(tags.into())
    }
}

/// The text after this one: of the same length, or the first that is longer.
fn next(text: &mut Vec<u8>) {
    for place in (0..text.len()).rev() {
        let index = LETTERS.iter().position(|letter| *letter == text[place]);
        let next = index.expect("texts are made of letters") + 1;
        if let Some(letter) = LETTERS.get(next) {
            text[place] = *letter;
            return;
        }
        text[place] = LETTERS[0];
    }
    text.push(LETTERS[0]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(crc16(0, b"123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("{user1000}.following"), slot("user1000"));
        assert_eq!(slot("foo{}{bar}"), slot_of(&["foo{}", "{bar}"]));
        assert_eq!(slot("foo{{bar}}zap"), slot_of(&["{bar"]));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
    }

    /// Another table in another version of this crate would be another fence for the same locks.
    #[test]
    fn f1_every_slot_has_one_tag_and_it_stays_the_same() {
        for prefix in ["lock", "{ap"] {
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
