use std::fmt::Write;

use super::{Speed, short};
use crate::libs::Lib;
use crate::scenarios::Scenario;

/// What is done, where it was measured, and the figure.
const ROWS: [(&str, Scenario, &str); 17] = [
    ("1 task, free keys: pairs/s", Scenario::Free1, "pairs"),
    ("8 tasks", Scenario::Free8, "pairs"),
    ("64 tasks", Scenario::Free64, "pairs"),
    ("256 tasks", Scenario::Free256, "pairs"),
    (
        "16 tasks, one key: acquisitions/s",
        Scenario::HotLocal,
        "acquisitions",
    ),
    (
        "by another task than the last",
        Scenario::HotLocal,
        "changes",
    ),
    (
        "turns of the luckiest task to those of the unluckiest",
        Scenario::HotLocal,
        "turns",
    ),
    ("longest wait, ms", Scenario::HotLocal, "maxwait"),
    (
        "4 processes of 4 tasks, one key: acquisitions/s",
        Scenario::HotProcesses,
        "acquisitions",
    ),
    (
        "by another task than the last",
        Scenario::HotProcesses,
        "changes",
    ),
    (
        "turns of the luckiest to those of the unluckiest",
        Scenario::HotProcesses,
        "turns",
    ),
    ("longest wait, ms", Scenario::HotProcesses, "maxwait"),
    (
        "release in one process to held in another, median, µs",
        Scenario::Handover,
        "p50",
    ),
    ("99 of 100 within, µs", Scenario::Handover, "p99"),
    (
        "1,000 tasks wait for a held key: commands/s",
        Scenario::Waiting1000,
        "commands",
    ),
    (
        "client's processor time for a pair at 64 tasks, µs",
        Scenario::Free64,
        "clients-cpu",
    ),
    ("server's, µs", Scenario::Free64, "server-cpu"),
];

/// In Markdown: a row a figure, a column a library; what is indented belongs to the row above it.
pub(super) fn of(speed: &Speed) -> String {
    let mut text = String::from("| |");
    for lib in Lib::ON_REDIS {
        write!(text, " {} |", lib.name()).expect("a String takes everything");
    }
    text.push_str("\n|---|");
    text.push_str(&"--:|".repeat(Lib::ON_REDIS.len()));
    text.push('\n');
    for (name, scenario, figure) in ROWS {
        write!(text, "| {name} |").expect("a String takes everything");
        for lib in Lib::ON_REDIS {
            // What failed in every round has no figure.
            let value = speed.median(scenario, lib, figure);
            let value = value.map_or("–".to_owned(), short);
            write!(text, " {value} |").expect("a String takes everything");
        }
        text.push('\n');
    }
    text
}

/// What was measured for lockstream alone, a sentence each; nothing of what was not.
pub(super) fn of_ours_alone(speed: &Speed) -> String {
    let of = |scenario, figure| speed.median(scenario, Lib::Lockstream, figure);
    let memory = || {
        let pairs = short(of(Scenario::Memory64, "pairs")?);
        Some(format!(
            "- 64 tasks on a store in memory, free keys: {pairs} pairs/s.\n"
        ))
    };
    let leases = || {
        let (bytes, cpu) = (
            of(Scenario::Held100k, "bytes")?,
            of(Scenario::Held100k, "cpu")?,
        );
        let (bytes, cpu) = (bytes.round(), short(100.0 * cpu));
        Some(format!(
            "- 100,000 leases held and renewed in one process: {bytes} bytes each and {cpu} % of a core.\n"
        ))
    };
    let waiters = || {
        let own = of(Scenario::Waiters10k, "own-bytes")?.round();
        let task = of(Scenario::Waiters10k, "task-bytes")?.round();
        let served = short(of(Scenario::Waiters10k, "served")?);
        Some(format!(
            "- 10,000 tasks of one process that wait for a key: {own} bytes each beside the task's own \
             {task}; each has had its turn {served} ms after the release.\n"
        ))
    };
    let keys = || {
        let left = of(Scenario::ManyKeys, "left")?;
        Some(format!(
            "- 1,000,000 different keys locked once each: {left} entries and keys left.\n"
        ))
    };
    let alone = [memory(), leases(), waiters(), keys()];
    let elsewhere = [modes(speed), far(speed), cluster(speed), fleet(speed)];
    alone.into_iter().chain(elsewhere).flatten().collect()
}

/// Permits, readers and several keys.
fn modes(speed: &Speed) -> Option<String> {
    let of = |scenario, lib, figure| speed.median(scenario, lib, figure).map(short);
    let permits = |lib| {
        let taken = of(Scenario::Permits8, lib, "acquisitions")?;
        let wait = of(Scenario::Permits8, lib, "maxwait")?;
        Some((taken, wait))
    };
    let ((ours, wait), (bare, bare_wait)) = (permits(Lib::Lockstream)?, permits(Lib::Bare)?);
    let ours_alone = |scenario, figure| of(scenario, Lib::Lockstream, figure);
    let reads = ours_alone(Scenario::Readers, "reads")?;
    let write_wait = ours_alone(Scenario::Readers, "write-maxwait")?;
    let groups = ours_alone(Scenario::All3, "acquisitions")?;
    let group_wait = ours_alone(Scenario::All3, "maxwait")?;
    Some(format!(
        "- 64 tasks on 8 permits: {ours} acquisitions/s, the longest wait {wait} ms; bare's sorted set, asked again \
         and again: {bare}, {bare_wait} ms. 64 readers and a writer: {reads} reads/s, and the writer waits \
         {write_wait} ms at most. Three of ten keys at once, 16 tasks: {groups} acquisitions/s, {group_wait} ms.\n"
    ))
}

/// Over a slow network.
fn far(speed: &Speed) -> Option<String> {
    let [one, many, most] = ["far-1", "far-64", "far-256"].map(|name| speed.ratio(name));
    let [one, many, most] = [one?, many?, most?].map(short);
    Some(format!(
        "- Over a network with a round trip of 1 ms, an acquisition takes {one} times as long as bare's with \
         1 task, {many} with 64, {most} with 256.\n"
    ))
}

/// On a cluster.
fn cluster(speed: &Speed) -> Option<String> {
    let of = |name| speed.ratio(name).map(short);
    let (lost, brief, moved) = (
        of("cluster-100k-lost")?,
        of("cluster-brief-lost")?,
        of("cluster-moving-lost")?,
    );
    let cpu = short(100.0 * speed.ratio("cluster-100k-cpu")?);
    let kept = short(100.0 * speed.ratio("cluster-brief-kept")?);
    Some(format!(
        "- On a cluster of three primaries with a round trip of 1 ms, one registry lost {lost} of 100,000 leases \
         (ttl 30 s, {cpu} % of a core), {brief} of 8,000 (3 s), and {moved} of 2,000 (3 s) in a slot that was \
         being moved. Of twice as many as it could renew it kept {kept} %.\n"
    ))
}

/// With thousands of registries.
fn fleet(speed: &Speed) -> Option<String> {
    let of = |name| speed.ratio(name).map(short);
    let (first, served) = (of("fleet-crash-first-ms")?, of("fleet-crash-served-ms")?);
    let (still, lost) = (
        of("fleet-timeout-standstill-ms")?,
        of("fleet-timeout-lost")?,
    );
    let (busiest, back) = (of("fleet-restart-busiest")?, of("fleet-restart-back-s")?);
    Some(format!(
        "- 2,000 registries wait, and the holder is killed: the next has the lock {first} ms after the ttl, all \
         have had it after {served} ms. 4,000 waits end at once: nobody else waits longer than {still} ms for the \
         server, and {lost} of 100 leases with a ttl of 3 s are lost. The server restarts under 2,000 \
         registries: at most {busiest} try to connect within 0.1 s, and all are back after {back} s.\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_told_and_nothing_else() {
        let speed =
            r#"{"results": [], "ratios": {"far-1": 1.02, "far-64": 1.0, "far-256": 1.056}}"#;
        assert_eq!(
            of_ours_alone(&Speed::parse(speed).unwrap()),
            "- Over a network with a round trip of 1 ms, an acquisition takes 1.02 times as long as bare's with \
             1 task, 1 with 64, 1.06 with 256.\n"
        );
    }

    #[test]
    fn a_row_has_a_cell_for_each_library_also_for_one_that_failed() {
        let speed = r#"{"results": [
            {"scenario": "free-8", "lib": "bare", "figures": [{"figure": "pairs", "median": 31400.0}]},
            {"scenario": "free-8", "lib": "rslock", "figures": []}
        ]}"#;
        let table = of(&Speed::parse(speed).unwrap());
        assert!(
            table.contains("\n| 8 tasks | – | 31.4 k | – | – |\n"),
            "{table}"
        );
        let rows: Vec<&str> = table.lines().collect();
        assert_eq!(rows.len(), 2 + ROWS.len());
        let cells = |row: &&str| row.matches('|').count();
        assert!(
            rows.iter()
                .map(cells)
                .all(|cells| cells == 2 + Lib::ON_REDIS.len())
        );
    }
}
