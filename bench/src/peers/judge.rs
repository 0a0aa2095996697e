//! Who held what when: what all processes of a scenario have written, judged in the same way for every library.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::clock::Nanos;
use crate::libs::{Outcome, told};

/// One wait of one task, and what followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Which process, and which task of it.
    task: (usize, usize),
    asked: Nanos,
    /// Or 0: it waits still.
    held: Nanos,
    /// About to be released.
    left: Nanos,
}

/// The turns of each key.
#[derive(Debug, Default)]
pub(super) struct Journal {
    keys: HashMap<String, Vec<Turn>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) acquisitions: usize,
    /// By another task than the last.
    pub(super) changes: usize,
    /// Two at work at once.
    pub(super) overlaps: usize,
    /// For so long in all.
    pub(super) overlap: Nanos,
    /// Of anybody, who got it or waits still.
    pub(super) longest_wait: Nanos,
    pub(super) most_served: usize,
    pub(super) least_served: usize,
    pub(super) never_served: usize,
}

impl Journal {
    /// Of the processes, each with a file of its own.
    pub(super) fn read(files: &[PathBuf]) -> Outcome<Self> {
        let mut journal = Self::default();
        for (process, file) in files.iter().enumerate() {
            journal.add(process, file)?;
        }
        Ok(journal)
    }

    fn add(&mut self, process: usize, file: &Path) -> Outcome<()> {
        let text = fs::read_to_string(file).map_err(told("a journal"))?;
        for line in text.lines() {
            let (key, turn) = parse(process, line).ok_or_else(|| format!("no turn: {line:?}"))?;
            match self.keys.get_mut(key) {
                Some(turns) => turns.push(turn),
                None => drop(self.keys.insert(key.to_owned(), vec![turn])),
            }
        }
        Ok(())
    }

    /// `tasks`: how many there were. `until`: when no more was asked. Whoever waited then is served in peace, and what it
    /// gets is no measure of anything. `end`: until when those that wait still have waited.
    pub(super) fn judge(mut self, tasks: usize, until: Nanos, end: Nanos) -> Verdict {
        let mut verdict = Verdict::default();
        let mut served: HashMap<(usize, usize), usize> = HashMap::new();
        for turns in self.keys.values_mut() {
            for turn in turns.iter() {
                let waited_to = if turn.held == 0 { end } else { turn.held };
                let wait = waited_to.saturating_sub(turn.asked);
                verdict.longest_wait = verdict.longest_wait.max(wait);
            }
            turns.retain(|turn| turn.held > 0);
            turns.sort_unstable_by_key(|turn| turn.held);
            let mut last: Option<Turn> = None;
            for turn in turns.iter() {
                let counts = turn.held < until;
                if counts {
                    *served.entry(turn.task).or_default() += 1;
                    verdict.acquisitions += 1;
                }
                if let Some(last) = last {
                    verdict.changes += usize::from(counts && last.task != turn.task);
                    if turn.held < last.left {
                        verdict.overlaps += 1;
                        verdict.overlap += last.left.min(turn.left) - turn.held;
                    }
                }
                // Of two that overlap the one that ends later may meet the next as well.
                last = Some(match last {
                    Some(last) if last.left > turn.left => Turn {
                        left: last.left,
                        ..*turn
                    },
                    _ => *turn,
                });
            }
        }
        verdict.never_served = tasks.saturating_sub(served.len());
        verdict.most_served = served.values().copied().max().unwrap_or(0);
        let least = served.values().copied().min().unwrap_or(0);
        verdict.least_served = if verdict.never_served > 0 { 0 } else { least };
        verdict
    }
}

fn parse(process: usize, line: &str) -> Option<(&str, Turn)> {
    let mut words = line.split(' ');
    let key = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (task, asked, held, left) = (number()?, number()?, number()?, number()?);
    let task = (process, usize::try_from(task).ok()?);
    let turn = Turn {
        task,
        asked,
        held,
        left,
    };
    Some((key, turn))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(processes: &[&str], tasks: usize, end: Nanos) -> Verdict {
        let folder = tempfile::tempdir().unwrap();
        let files = processes.iter().enumerate().map(|(number, text)| {
            let file = folder.path().join(number.to_string());
            fs::write(&file, text).unwrap();
            file
        });
        let files: Vec<_> = files.collect();
        Journal::read(&files).unwrap().judge(tasks, end, end)
    }

    #[test]
    fn turns_one_after_the_other_are_no_overlap() {
        let verdict = judge(
            &["k 0 1 2 5\nk 0 5 9 12\n", "k 0 2 5 9\nother 1 1 3 90\n"],
            3,
            100,
        );
        let expected = Verdict {
            acquisitions: 4,
            changes: 2,
            longest_wait: 4,
            most_served: 2,
            least_served: 1,
            ..Verdict::default()
        };
        assert_eq!(verdict, expected);
    }

    #[test]
    fn two_at_work_are_seen_also_around_a_short_one() {
        let verdict = judge(&["k 0 0 10 100\n", "k 0 0 20 30\nk 0 30 50 120\n"], 2, 200);
        assert_eq!((verdict.overlaps, verdict.overlap), (2, 10 + 50));
    }

    #[test]
    fn who_waits_still_has_waited_to_the_end() {
        let verdict = judge(&["k 0 0 10 20\nk 1 5 0 0\n"], 2, 1_000);
        assert_eq!((verdict.never_served, verdict.least_served), (1, 0));
        assert_eq!((verdict.longest_wait, verdict.most_served), (995, 1));
    }

    #[test]
    fn who_is_served_in_peace_was_not_served() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("0");
        fs::write(&file, "k 0 0 1 50\nk 1 0 50 60\n").unwrap();
        let verdict = Journal::read(&[file]).unwrap().judge(2, 40, 100);
        let counts = (verdict.acquisitions, verdict.changes, verdict.never_served);
        assert_eq!(counts, (1, 0, 1));
        assert_eq!(verdict.longest_wait, 50);
    }

    #[test]
    fn what_is_cut_short_is_no_journal() {
        assert!(parse(0, "k 0 1 2").is_none());
    }
}
