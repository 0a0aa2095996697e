//! What the peers do, and what befalls them.

use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde::Deserialize;
use serde_json::Value;

use super::judge::{Journal, Verdict};
use super::languages::Peer;
use super::process::Process;
use crate::clock::{self, MILLISECOND, Nanos, SECOND};
use crate::figures::percentile;
use crate::libs::{Outcome, told};
use crate::target::{Store, Target};

/// For a program to start and to connect, on a machine that has other things to do.
const START: Duration = Duration::from_secs(30);

/// Whoever has no lock so long after the end of a run hangs.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a lock lasts where nothing goes wrong.
const TTL: u64 = 30_000;

/// And where something does. It is longer than what is worked under it, for not every library renews.
const SHORT: u64 = 10_000;

/// What is worked under [`SHORT`], and by whoever comes after.
const WORK: u64 = 8_000;

/// A figure's name, its value and its unit.
pub(super) type Figures = Vec<(&'static str, f64, &'static str)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Scenario {
    Free(usize),
    Hot,
    HotProcesses,
    HotWork,
    Waiting,
    HandOver,
    Held,
    First,
    Crash,
    Pause,
    Compute,
    Cut,
    Restart,
}

pub(super) const SCENARIOS: [(Scenario, &str, &str); 16] = [
    (
        Scenario::Free(1),
        "free-1",
        "one task takes and releases a key of its own",
    ),
    (
        Scenario::Free(8),
        "free-8",
        "eight tasks, each with a key of its own",
    ),
    (
        Scenario::Free(64),
        "free-64",
        "64 tasks, each with a key of its own",
    ),
    (
        Scenario::Free(256),
        "free-256",
        "256 tasks, each with a key of its own",
    ),
    (Scenario::Hot, "hot", "16 tasks of one process take one key"),
    (
        Scenario::HotProcesses,
        "hot-processes",
        "four processes of four tasks take one key",
    ),
    (
        Scenario::HotWork,
        "hot-work",
        "the same, with 1 ms of work under the lock",
    ),
    (
        Scenario::Waiting,
        "waiting",
        "1,000 tasks of one process wait for one key",
    ),
    (
        Scenario::HandOver,
        "hand-over",
        "from release in one process to held in another",
    ),
    (Scenario::Held, "held", "one process holds 10,000 keys"),
    (
        Scenario::First,
        "first",
        "from the start of a process to its first lock",
    ),
    (
        Scenario::Crash,
        "crash",
        "a holder is killed: when has the next it?",
    ),
    (
        Scenario::Pause,
        "pause",
        "a holder is stopped for longer than its ttl, and goes on",
    ),
    (
        Scenario::Compute,
        "compute",
        "the holder's process computes for three ttls",
    ),
    (
        Scenario::Cut,
        "cut",
        "all connections are killed every 200 ms",
    ),
    (
        Scenario::Restart,
        "restart",
        "the server loses all its data",
    ),
];

impl Scenario {
    pub(super) fn name(self) -> &'static str {
        let found = SCENARIOS.iter().find(|(scenario, ..)| *scenario == self);
        found.expect("all are listed").1
    }

    /// Whether it leaves the machine idle nearly all the time.
    pub(super) fn only_waits(self) -> bool {
        matches!(self, Self::Held | Self::Crash | Self::Pause | Self::Restart)
    }

    /// Whether it can be had of a peer on PostgreSQL: where nothing is done to the server.
    pub(super) fn is_for(self, peer: Peer) -> bool {
        let of_redis = [Self::Waiting, Self::Held, Self::Cut, Self::Restart];
        peer.store == Store::Redis || !of_redis.contains(&self)
    }
}

/// One round of one peer.
pub(super) struct Round<'a> {
    pub(super) target: &'a mut Target,
    pub(super) peer: Peer,
    /// What starts it.
    pub(super) words: &'a [String],
    /// Which of the peer's rounds it is, from 0.
    pub(super) number: usize,
    pub(super) millis: u64,
    /// For how long [`Scenario::Held`] holds.
    pub(super) hold: Duration,
}

impl Round<'_> {
    pub(super) fn run(&mut self, scenario: Scenario) -> Outcome<Figures> {
        match scenario {
            Scenario::Free(tasks) => self.free(tasks),
            Scenario::Hot => self.hot(1, 16, 0),
            Scenario::HotProcesses => self.hot(4, 4, 0),
            Scenario::HotWork => self.hot(4, 4, 1),
            Scenario::Waiting => self.waiting(),
            Scenario::HandOver => self.hand_over(),
            Scenario::Held => self.held(),
            Scenario::First => self.first(),
            Scenario::Crash => self.crash(),
            Scenario::Pause => self.pause(),
            Scenario::Compute => self.compute(),
            Scenario::Cut => self.cut(),
            Scenario::Restart => self.restart(),
        }
    }

    fn start(&self, role: &str, args: &[(&str, &dyn std::fmt::Display)]) -> Outcome<Process> {
        let mut command = Command::new(&self.words[0]);
        command.args(&self.words[1..]).arg(self.peer.name).arg(role);
        let url = self.target.url();
        match &*self.target {
            Target::Redis(server) => command.arg(server.port().to_string()),
            Target::Postgres(_) => command.args(["0", &format!("url={url}")]),
        };
        for (name, value) in args {
            command.arg(format!("{name}={value}"));
        }
        Process::start(command)
    }

    /// Whoever works under a key for some time.
    fn works(&self, ttl: u64, millis: u64, compute: u64) -> Outcome<Process> {
        self.start(
            "work",
            &[
                ("key", &"k"),
                ("ttl", &ttl),
                ("millis", &millis),
                ("compute", &compute),
            ],
        )
    }

    // ---- many turns

    /// Processes that take locks for the time of a round; `meanwhile` runs beside them.
    fn turns(
        &mut self,
        (processes, tasks): (usize, usize),
        args: &[(&str, &dyn std::fmt::Display)],
        millis: u64,
        meanwhile: impl FnOnce(&mut Target) -> Outcome<()>,
    ) -> Outcome<Turns> {
        let folder = self.target.folder();
        let files: Vec<PathBuf> = (0..processes)
            .map(|number| folder.join(format!("turns-{number}")))
            .collect();
        let warm = self.peer.language.warm();
        let mut all = Vec::new();
        for (number, file) in files.iter().enumerate() {
            let (journal, patience) = (file.display(), PATIENCE.as_millis());
            let common: [(&str, &dyn std::fmt::Display); 6] = [
                ("tasks", &tasks),
                ("millis", &millis),
                ("warm", &warm),
                ("patience", &patience),
                ("name", &number),
                ("journal", &journal),
            ];
            all.push(self.start("run", &[&common, args].concat())?);
        }
        let mut turns = Turns::default();
        for process in &all {
            let limit = START + PATIENCE + Duration::from_millis(warm);
            let warmed_up = process.expect("warm", limit)?;
            turns.hung += warmed_up["hung"].as_u64().unwrap_or(0);
        }
        let before = self.target.processor_secs()?;
        for process in &mut all {
            process.tell("go")?;
        }
        meanwhile(self.target)?;
        let (mut until, mut end) = (0, 0);
        for process in &all {
            let limit = Duration::from_millis(millis) + 2 * PATIENCE;
            let done = process.expect("done", limit)?;
            let number = |name: &str| done[name].as_u64().unwrap_or(0);
            until = until.max(number("begin") + millis * MILLISECOND);
            end = end.max(number("end"));
            turns.client += number("cpu");
            turns.hung += number("hung");
            turns.failures += number("failures");
        }
        turns.server = self.target.processor_secs()? - before;
        turns.verdict = Journal::read(&files)?.judge(processes * tasks, until, end);
        match turns.verdict.acquisitions {
            0 => Err("nobody got a lock".to_owned()),
            _ => Ok(turns),
        }
    }

    fn free(&mut self, tasks: usize) -> Outcome<Figures> {
        let millis = self.millis;
        let turns = self.turns((1, tasks), &[("ttl", &TTL)], millis, |_| Ok(()))?;
        let pairs = turns.verdict.acquisitions as f64;
        let mut figures = vec![
            ("pairs", pairs * 1e3 / millis as f64, "1/s"),
            ("client", turns.client as f64 / pairs / 1e3, "µs"),
            ("server", turns.server * 1e6 / pairs, "µs"),
        ];
        figures.extend(turns.faults());
        Ok(figures)
    }

    fn hot(&mut self, processes: usize, tasks: usize, inside: u64) -> Outcome<Figures> {
        let millis = self.millis;
        let args: [(&str, &dyn std::fmt::Display); 3] =
            [("ttl", &TTL), ("hot", &1), ("inside", &inside)];
        let turns = self.turns((processes, tasks), &args, millis, |_| Ok(()))?;
        let verdict = turns.verdict;
        let share = |served: usize| 100.0 * served as f64 / verdict.acquisitions as f64;
        let mut figures = vec![
            (
                "acquisitions",
                verdict.acquisitions as f64 * 1e3 / millis as f64,
                "1/s",
            ),
            (
                "changes",
                verdict.changes as f64 * 1e3 / millis as f64,
                "1/s",
            ),
            ("longest-wait", verdict.longest_wait as f64 / 1e6, "ms"),
            ("most-served", share(verdict.most_served), "%"),
            ("least-served", share(verdict.least_served), "%"),
        ];
        figures.extend(turns.faults());
        Ok(figures)
    }

    fn cut(&mut self) -> Outcome<Figures> {
        const LASTS: u64 = 10_000;
        let args: [(&str, &dyn std::fmt::Display); 3] =
            [("ttl", &3_000), ("hot", &1), ("inside", &1)];
        let turns = self.turns((2, 4), &args, LASTS, |target| {
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_millis(LASTS) {
                sleep(Duration::from_millis(200));
                for kind in ["normal", "pubsub"] {
                    target
                        .redis()
                        .order(&["CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes"])?;
                }
            }
            Ok(())
        })?;
        let verdict = turns.verdict;
        let mut figures = vec![
            (
                "acquisitions",
                verdict.acquisitions as f64 * 1e3 / LASTS as f64,
                "1/s",
            ),
            ("refused", turns.failures as f64, ""),
            ("longest-wait", verdict.longest_wait as f64 / 1e6, "ms"),
        ];
        // Whoever is cut off may be refused.
        figures.extend(turns.faults());
        figures.retain(|(name, ..)| *name != "errors");
        Ok(figures)
    }

    // ---- some that hold, and some that wait

    fn waiting(&mut self) -> Outcome<Figures> {
        let holder = self.start("hold", &[("keys", &1), ("key", &"w"), ("ttl", &TTL)])?;
        holder.expect("held", START)?;
        let before = self.connections()?;
        let waiters = self.start("wait", &[("tasks", &1_000), ("key", &"w"), ("ttl", &TTL)])?;
        waiters.expect("waiting", START)?;
        sleep(Duration::from_secs(3));
        let (begin, count) = (Instant::now(), self.target.count()?);
        sleep(Duration::from_secs(5));
        let (time, commands) = (begin.elapsed(), self.target.counted(count)?);
        if waiters.has_said("gave-up") {
            return Err("some gave up".to_owned());
        }
        Ok(vec![
            ("commands", commands as f64 / time.as_secs_f64(), "1/s"),
            ("connections", self.connections()? - before, ""),
            ("threads", waiters.status("Threads")?, ""),
            ("memory", waiters.status("VmRSS")? / 1024.0, "MiB"),
        ])
    }

    fn connections(&mut self) -> Outcome<f64> {
        let clients = self.target.redis().info("clients", "connected_clients")?;
        clients.parse().map_err(|_| format!("no number: {clients}"))
    }

    fn held(&mut self) -> Outcome<Figures> {
        let holder = self.start("hold", &[("keys", &10_000), ("key", &"h"), ("ttl", &TTL)])?;
        holder.expect("held", START + Duration::from_secs(60))?;
        let begun: f64 = self.target.redis().ask(&["DBSIZE"])?;
        let (begin, count) = (Instant::now(), self.target.count()?);
        sleep(self.hold);
        let (time, commands) = (begin.elapsed(), self.target.counted(count)?);
        let keys: f64 = self.target.redis().ask(&["DBSIZE"])?;
        Ok(vec![
            ("commands", commands as f64 / time.as_secs_f64(), "1/s"),
            ("memory", holder.status("VmRSS")? / 1024.0, "MiB"),
            ("keys-left", 100.0 * keys / begun, "%"),
        ])
    }

    fn hand_over(&mut self) -> Outcome<Figures> {
        const TIMES: usize = 40;
        // Until the other surely waits, and then at one of many moments between two questions of whoever asks every 100 ms.
        let pause = |time: u64| Duration::from_millis(200 + time * 618 / 10 % 200);
        let args: [(&str, &dyn std::fmt::Display); 3] =
            [("keys", &1), ("key", &"o"), ("ttl", &TTL)];
        let mut holds = self.start("hold", &args)?;
        holds.expect("held", START)?;
        let mut waits = self.start("hold", &args)?;
        sleep(Duration::from_millis(2_500));
        let mut took = Vec::new();
        let warm_up = Duration::from_millis(self.peer.language.warm());
        let begin = Instant::now();
        let mut is_warm = false;
        while took.len() < TIMES {
            holds.tell("release")?;
            let released = holds.when("releasing", PATIENCE)?;
            let held = waits.when("held", 2 * PATIENCE)?;
            let Some(time_between) = held.checked_sub(released) else {
                return Err("two held it".to_owned());
            };
            if is_warm {
                took.push(time_between as f64 / 1e3);
            }
            holds.tell("lock")?;
            is_warm = begin.elapsed() > warm_up;
            let warming = Duration::from_millis(20);
            sleep(if is_warm {
                pause(took.len() as u64)
            } else {
                warming
            });
            std::mem::swap(&mut holds, &mut waits);
        }
        let within = |percent| percentile(&took, percent).expect("there were some");
        Ok(vec![
            ("p50", within(50.0), "µs"),
            ("longest", within(100.0), "µs"),
        ])
    }

    fn first(&mut self) -> Outcome<Figures> {
        let began = clock::now();
        let holder = self.start("hold", &[("keys", &1), ("key", &"f"), ("ttl", &TTL)])?;
        let held = holder.when("held", START)?;
        Ok(vec![("held-after", (held - began) as f64 / 1e6, "ms")])
    }

    // ---- what befalls a holder

    fn crash(&mut self) -> Outcome<Figures> {
        let args: [(&str, &dyn std::fmt::Display); 3] =
            [("keys", &1), ("key", &"c"), ("ttl", &SHORT)];
        let dies = self.start("hold", &args)?;
        dies.expect("held", START)?;
        let next = self.start("hold", &args)?;
        // At another moment of its lease in each round. Not later, for not every library renews.
        let moments = [4_000, 2_000, 6_000];
        sleep(Duration::from_millis(moments[self.number % moments.len()]));
        if next.has_said("held") {
            return Err("two held it".to_owned());
        }
        let killed = clock::now();
        dies.signal(Signal::KILL)?;
        let held = next.when("held", START)?;
        Ok(vec![("next-after", (held - killed) as f64 / 1e6, "ms")])
    }

    fn pause(&mut self) -> Outcome<Figures> {
        let stands = self.works(SHORT, WORK, 0)?;
        stands.expect("held", START)?;
        let next = self.works(SHORT, WORK + 2_000, 0)?;
        sleep(Duration::from_millis(1_000));
        if next.has_said("held") {
            return Err("two held it".to_owned());
        }
        let stopped = clock::now();
        stands.signal(Signal::STOP)?;
        let held = next.when("held", START)?;
        sleep(Duration::from_millis(1_000));
        let goes_on = clock::now();
        stands.signal(Signal::CONT)?;
        let mut figures = both_at_work(&stands, &next, held, goes_on)?;
        figures.push(("next-after", (held - stopped) as f64 / 1e6, "ms"));
        Ok(figures)
    }

    fn compute(&mut self) -> Outcome<Figures> {
        const BRIEF: u64 = 3_000;
        let computes = self.works(BRIEF, 3 * BRIEF + 1_000, 3 * BRIEF)?;
        computes.expect("held", START)?;
        let next = self.works(BRIEF, 4 * BRIEF + 2_000, 0)?;
        let held = next.when("held", START)?;
        both_at_work(&computes, &next, held, held)
    }

    fn restart(&mut self) -> Outcome<Figures> {
        let believes = self.works(SHORT, WORK, 0)?;
        believes.expect("held", START)?;
        let next = self.works(SHORT, WORK + 2_000, 0)?;
        sleep(Duration::from_millis(2_500));
        if next.has_said("held") {
            return Err("two held it".to_owned());
        }
        let server = self.target.redis();
        server.stop();
        server.start_again()?;
        let restarted = clock::now();
        let held = next.when("held", START)?;
        let mut figures = both_at_work(&believes, &next, held, held)?;
        figures.push((
            "next-after",
            held.saturating_sub(restarted) as f64 / 1e6,
            "ms",
        ));
        Ok(figures)
    }
}

/// For how long the first worked beside the second, which has the lock since `held`; what the first did before `from` does
/// not count.
fn both_at_work(first: &Process, second: &Process, held: Nanos, from: Nanos) -> Outcome<Figures> {
    let limit = Duration::from_millis(4 * WORK) + PATIENCE;
    let first = Ended::parse(first.expect("ended", limit)?)?;
    let second = Ended::parse(second.expect("ended", limit)?)?;
    let both = first.worked_within(held.max(from), second.last);
    Ok(vec![
        ("both-at-work", both as f64 / MILLISECOND as f64, "ms"),
        ("told", f64::from(u8::from(first.told)), ""),
    ])
}

/// How somebody's work ended.
#[derive(Deserialize)]
struct Ended {
    last: Nanos,
    /// When it did not work, though it thought that it held.
    gaps: Vec<(Nanos, Nanos)>,
    told: bool,
}

impl Ended {
    fn parse(line: Value) -> Outcome<Self> {
        serde_json::from_value(line).map_err(told("no end of work"))
    }

    fn worked_within(&self, from: Nanos, until: Nanos) -> Nanos {
        let within = |(begin, end): (Nanos, Nanos)| end.min(until).saturating_sub(begin.max(from));
        let idle: Nanos = self.gaps.iter().copied().map(within).sum();
        within((0, self.last)) - idle
    }
}

#[derive(Debug, Default)]
struct Turns {
    verdict: Verdict,
    /// Nanoseconds of the clients' processors.
    client: Nanos,
    /// Seconds of the server's.
    server: f64,
    hung: u64,
    failures: u64,
}

impl Turns {
    /// What must be 0.
    fn faults(&self) -> Figures {
        let verdict = self.verdict;
        let overlap = verdict.overlap as f64 / SECOND as f64 * 1e3;
        vec![
            ("overlaps", verdict.overlaps as f64, ""),
            ("overlap", overlap, "ms"),
            ("hung", self.hung as f64, ""),
            ("errors", self.failures as f64, ""),
            ("never-served", verdict.never_served as f64, ""),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stood_still_did_not_work() {
        let ended = Ended {
            last: 100,
            gaps: vec![(10, 30), (50, 70)],
            told: false,
        };
        assert_eq!(ended.worked_within(20, 60), 40 - 10 - 10);
        assert_eq!(ended.worked_within(80, 200), 20);
        assert_eq!(ended.worked_within(120, 200), 0);
    }
}
