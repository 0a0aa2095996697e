//! What the diaries of a round's tasks come to.

use crate::clock::{Nanos, SECOND};
use crate::figures::{Figure, percentile};
use crate::journal::Diary;

/// The time that is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) from: Nanos,
    pub(crate) to: Nanos,
}

/// Sums over a window. A turn belongs to it if it began in it.
#[derive(Debug)]
pub(crate) struct Tally {
    secs: f64,
    acquisitions: usize,
    /// Acquisitions by another task than the one before.
    changes: usize,
    most_turns: usize,
    fewest_turns: usize,
    /// In µs; of those who got the lock.
    waits: Vec<f64>,
    /// In µs; also of those who were still waiting at the end.
    longest_wait: f64,
    /// In µs, from when the lock was acquired until it was released.
    releases: Vec<f64>,
    /// From the last turn of all to the end.
    idle_secs: f64,
}

impl Tally {
    /// `diaries` has one for each task, of whatever process.
    pub(crate) fn of(diaries: &[Diary], window: Window) -> Self {
        let inside = window.from..window.to;
        let turns = |diary: &Diary| {
            let turns = diary.turns.iter();
            turns.filter(|turn| inside.contains(&turn.held)).count()
        };
        let each: Vec<usize> = diaries.iter().map(turns).collect();
        let mut order: Vec<(Nanos, usize)> = Vec::with_capacity(each.iter().sum());
        let mut waits = Vec::with_capacity(order.capacity());
        let mut releases = Vec::with_capacity(order.capacity());
        for (task, diary) in diaries.iter().enumerate() {
            for turn in &diary.turns {
                if inside.contains(&turn.held) {
                    order.push((turn.held, task));
                    waits.push((turn.held - turn.asked) as f64 / 1e3);
                }
            }
            // Who has given the lock back asks for the next at once.
            let pairs = diary.turns.windows(2).map(|pair| (pair[0], pair[1]));
            let inside = pairs.filter(|(turn, _)| inside.contains(&turn.held));
            releases.extend(inside.map(|(turn, next)| (next.asked - turn.held) as f64 / 1e3));
        }
        // Under one lock no two tasks hold it at one moment, so this is the order of their turns.
        order.sort_unstable();
        let last = order.last().map_or(window.from, |(held, _)| *held);
        let changes = order.windows(2).filter(|pair| pair[0].1 != pair[1].1);
        let unserved = diaries.iter().filter_map(|diary| diary.waiting_since);
        let unserved = unserved.map(|since| window.to.saturating_sub(since) as f64 / 1e3);
        Self {
            secs: (window.to - window.from) as f64 / SECOND as f64,
            acquisitions: order.len(),
            changes: changes.count(),
            most_turns: each.iter().copied().max().unwrap_or(0),
            fewest_turns: each.iter().copied().min().unwrap_or(0),
            longest_wait: waits.iter().copied().chain(unserved).fold(0.0, f64::max),
            waits,
            releases,
            idle_secs: (window.to - last) as f64 / SECOND as f64,
        }
    }

    /// In words, if it came to a halt: no rate would tell that from being slow.
    ///
    /// On keys of their own nobody has to wait for long; on one key somebody must always go on.
    pub(crate) fn stall(&self, one_key: bool) -> Option<String> {
        let (halt, what) = if one_key {
            (self.idle_secs, "nobody got the lock")
        } else {
            (self.longest_wait / 1e6, "a task waited for a free lock")
        };
        let limit = (self.secs / 2.0).max(1.0).min(self.secs);
        (halt >= limit).then(|| format!("stalled: {what} for {halt:.1} s"))
    }

    pub(crate) fn of_free_keys(&self) -> Vec<Figure> {
        let mut figures = vec![Figure::new(
            "pairs",
            self.rate(self.acquisitions),
            "pairs/s",
        )];
        figures.extend(self.of_acquisitions());
        let release = percentile(&self.releases, 50.0);
        figures.extend(release.map(|us| Figure::new("release-p50", us, "us")));
        figures
    }

    /// What is known where tasks pause between two turns.
    pub(crate) fn of_acquisitions(&self) -> Vec<Figure> {
        let percents = [("acquire-p50", 50.0), ("acquire-p99", 99.0)];
        let waits = percents.map(|(name, percent)| self.wait(name, percent));
        waits.into_iter().flatten().collect()
    }

    pub(crate) fn of_one_key(&self) -> Vec<Figure> {
        let (most, fewest) = (self.most_turns as f64, self.fewest_turns as f64);
        let mut figures = vec![
            Figure::new("acquisitions", self.rate(self.acquisitions), "acq/s"),
            Figure::new("changes", self.rate(self.changes), "changes/s"),
            Figure::new("turns-most", most, "turns"),
            Figure::new("turns-fewest", fewest, "turns"),
            // Who never had a turn counts as one who had one: the ratio stays a number.
            Figure::new("turns", most / fewest.max(1.0), "most/fewest"),
        ];
        figures.extend(self.wait("wait-p50", 50.0));
        figures.extend(self.wait("wait-p99", 99.0));
        figures.push(Figure::new("maxwait", self.longest_wait / 1e3, "ms"));
        figures
    }

    /// Of two processes on one key, of which one has one task and the other many, what each gets.
    pub(crate) fn of_unequals(&self, [one, many]: [Self; 2]) -> Vec<Figure> {
        let share = |part: &Self| 100.0 * part.acquisitions as f64 / self.acquisitions as f64;
        let turns = many.most_turns as f64 / many.fewest_turns.max(1) as f64;
        let mut figures = vec![
            Figure::new("one-acquisitions", one.rate(one.acquisitions), "acq/s"),
            Figure::new("one-share", share(&one), "%"),
        ];
        figures.extend(one.wait("one-wait-p50", 50.0));
        figures.extend([
            Figure::new("one-maxwait", one.longest_wait / 1e3, "ms"),
            Figure::new("many-acquisitions", many.rate(many.acquisitions), "acq/s"),
            Figure::new("many-share", share(&many), "%"),
            Figure::new("many-turns", turns, "most/fewest"),
        ]);
        figures.extend(many.wait("many-wait-p50", 50.0));
        figures.push(Figure::new("many-maxwait", many.longest_wait / 1e3, "ms"));
        figures
    }

    /// Of readers, and of a writer among them.
    pub(crate) fn of_readers([readers, writer]: [Self; 2]) -> Vec<Figure> {
        let mut figures = vec![
            Figure::new("reads", readers.rate(readers.acquisitions), "reads/s"),
            Figure::new("reads-maxwait", readers.longest_wait / 1e3, "ms"),
            Figure::new("writes", writer.rate(writer.acquisitions), "writes/s"),
        ];
        figures.extend(writer.wait("write-wait-p50", 50.0));
        figures.push(Figure::new(
            "write-maxwait",
            writer.longest_wait / 1e3,
            "ms",
        ));
        figures
    }

    fn rate(&self, count: usize) -> f64 {
        count as f64 / self.secs
    }

    fn wait(&self, name: &'static str, percent: f64) -> Option<Figure> {
        percentile(&self.waits, percent).map(|wait| Figure::new(name, wait, "us"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::MILLISECOND;
    use crate::journal::Turn;

    const WINDOW: Window = Window {
        from: 1_000 * MILLISECOND,
        to: 1_500 * MILLISECOND,
    };

    /// A diary of turns, each asked for and had at so many ms.
    fn diary(turns: &[(u64, u64)], waiting_since: Option<u64>) -> Diary {
        let turns = turns.iter().map(|(asked, held)| Turn {
            asked: asked * MILLISECOND,
            held: held * MILLISECOND,
        });
        Diary {
            turns: turns.collect(),
            waiting_since: waiting_since.map(|since| since * MILLISECOND),
        }
    }

    fn value(figures: &[Figure], name: &str) -> f64 {
        let figure = figures.iter().find(|figure| figure.name == name);
        figure.unwrap_or_else(|| panic!("no {name}")).value
    }

    #[test]
    fn only_the_window_counts() {
        let diaries = [diary(&[(900, 990), (995, 1_000), (1_499, 1_500)], None)];
        let figures = Tally::of(&diaries, WINDOW).of_free_keys();
        assert_eq!(value(&figures, "pairs"), 2.0);
        assert_eq!(value(&figures, "acquire-p99"), 5_000.0);
    }

    #[test]
    fn a_change_is_a_turn_after_another_tasks() {
        // In order: 0 0 1 0 0 1
        let one = diary(
            &[(0, 1_000), (1_000, 1_001), (1_001, 1_003), (1_003, 1_004)],
            None,
        );
        let other = diary(&[(1_000, 1_002), (1_002, 1_005)], None);
        let figures = Tally::of(&[one, other], WINDOW).of_one_key();
        assert_eq!(value(&figures, "acquisitions"), 12.0);
        assert_eq!(value(&figures, "changes"), 6.0);
        assert_eq!(value(&figures, "turns"), 2.0);
        assert_eq!(value(&figures, "maxwait"), 1_000.0);
    }

    #[test]
    fn each_process_has_its_share() {
        let one = [diary(&[(1_000, 1_003)], Some(1_100))];
        let many = [
            diary(&[(1_000, 1_001), (1_001, 1_004)], None),
            diary(&[(1_000, 1_002)], None),
        ];
        let all = [one.as_slice(), &many].concat();
        let parts = [one.as_slice(), &many].map(|part| Tally::of(part, WINDOW));
        let figures = Tally::of(&all, WINDOW).of_unequals(parts);
        for (name, expected) in [
            ("one-share", 25.0),
            ("one-acquisitions", 2.0),
            ("one-maxwait", 400.0),
            ("many-share", 75.0),
            ("many-turns", 2.0),
            ("many-maxwait", 3.0),
        ] {
            assert_eq!(value(&figures, name), expected, "{name}");
        }
    }

    #[test]
    fn a_release_lasts_until_the_next_is_asked_for() {
        let turns = [(990, 999), (1_000, 1_001), (1_004, 1_010), (1_012, 1_499)];
        let figures = Tally::of(&[diary(&turns, None)], WINDOW).of_free_keys();
        // 3 ms, 2 ms, and the last one's end is not known.
        assert_eq!(value(&figures, "release-p50"), 2_000.0);
    }

    #[test]
    fn a_halt_is_told() {
        let goes_on = diary(&[(1_000, 1_001), (1_490, 1_499)], None);
        let stuck = diary(&[(900, 901)], Some(950));
        assert_eq!(
            Tally::of(std::slice::from_ref(&stuck), WINDOW)
                .stall(true)
                .as_deref(),
            Some("stalled: nobody got the lock for 0.5 s")
        );
        let both = Tally::of(&[goes_on, stuck], WINDOW);
        assert_eq!(both.stall(true), None, "starved, and not stalled");
        assert!(both.stall(false).is_some(), "its key is free");
    }

    #[test]
    fn who_never_had_a_turn_has_waited_all_the_same() {
        let diaries = [
            diary(&[(1_000, 1_010), (1_010, 1_011)], None),
            diary(&[], Some(1_100)),
        ];
        let figures = Tally::of(&diaries, WINDOW).of_one_key();
        assert_eq!(value(&figures, "turns-fewest"), 0.0);
        assert_eq!(value(&figures, "turns"), 2.0);
        assert_eq!(value(&figures, "maxwait"), 400.0);
    }
}
