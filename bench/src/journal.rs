//! Who held the lock when: written by each task while it runs, read when all is over.

use std::fs;
use std::path::Path;

use crate::clock::Nanos;

/// One task's turns, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Diary {
    pub(crate) turns: Vec<Turn>,
    /// Since when it waited when it was stopped, if it did.
    pub(crate) waiting_since: Option<Nanos>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) asked: Nanos,
    pub(crate) held: Nanos,
}

/// Each diary is its length, the start of the last wait or 0, and its turns.
pub(crate) fn write(path: &Path, diaries: &[Diary]) -> Result<(), String> {
    let words = diaries.iter().map(|diary| 2 + 2 * diary.turns.len()).sum();
    let mut all: Vec<u64> = Vec::with_capacity(words);
    for diary in diaries {
        all.push(diary.turns.len() as u64);
        all.push(diary.waiting_since.unwrap_or(0));
        all.extend(diary.turns.iter().flat_map(|turn| [turn.asked, turn.held]));
    }
    let bytes: Vec<u8> = all.into_iter().flat_map(u64::to_le_bytes).collect();
    fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}

pub(crate) fn read(path: &Path) -> Result<Vec<Diary>, String> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&bytes).ok_or_else(|| format!("{} is cut short", path.display()))
}

fn parse(bytes: &[u8]) -> Option<Vec<Diary>> {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
    let mut diaries = Vec::new();
    while let Some(length) = words.next() {
        let since = words.next()?;
        let mut turns = Vec::with_capacity(usize::try_from(length).ok()?.min(bytes.len()));
        for _ in 0..length {
            let (asked, held) = (words.next()?, words.next()?);
            turns.push(Turn { asked, held });
        }
        diaries.push(Diary {
            turns,
            waiting_since: (since > 0).then_some(since),
        });
    }
    rest.is_empty().then_some(diaries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn diaries() -> Vec<Diary> {
        let turns = (1..4).map(|n| Turn {
            asked: n,
            held: n * 10,
        });
        vec![
            Diary::default(),
            Diary {
                turns: turns.collect(),
                waiting_since: Some(77),
            },
        ]
    }

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        write(&path, &diaries()).unwrap();
        assert_eq!(read(&path).unwrap(), diaries());
    }

    #[test]
    fn a_cut_journal_is_no_journal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        write(&path, &diaries()).unwrap();
        let whole = fs::read(&path).unwrap();
        for end in [whole.len() - 1, whole.len() - 8, 3 * 8] {
            assert_eq!(parse(&whole[..end]), None, "cut at {end}");
        }
    }
}
