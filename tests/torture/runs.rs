//! The example as a user runs it.

use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::plan::Kind;
use crate::support::{PATIENCE, wait_until_blocking};

/// Cargo builds a package's examples before its tests, and tells tests the path of neither.
fn torture(arguments: &[&str]) -> Command {
    let test = std::env::current_exe().expect("a running program has a path");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/test");
    let program = profile
        .join("examples/torture")
        .with_extension(std::env::consts::EXE_EXTENSION);
    assert!(
        program.exists(),
        "the example is not built: run `cargo test` without naming a target, or `cargo build --examples` before"
    );
    let mut command = Command::new(program);
    command.args(arguments).current_dir(std::env::temp_dir());
    command
}

/// A number from the reports, added up. What did not happen in a run may have no row there.
fn row(reports: &str, name: &str) -> u64 {
    let lines = reports.lines().filter_map(|line| line.strip_prefix(name));
    let values = lines.filter(|value| value.starts_with(' '));
    values
        .map(|value| {
            let digits = value.trim().chars().take_while(char::is_ascii_digit);
            let digits: String = digits.collect();
            let number = digits.parse::<u64>();
            number.unwrap_or_else(|_| panic!("{name}: {value}"))
        })
        .sum()
}

/// Two runs at a time, and no more: a third makes all of them late on a small machine.
static PLACES: [Mutex<()>; 2] = [Mutex::new(()), Mutex::new(())];

/// How many runs there are at most, if the machine is slow.
const MOST_RUNS: usize = 16;

fn thirty_seconds_are_clean(deployment: &str, seed: u64, place: usize) {
    let mut reports = String::new();
    for run in 1..=MOST_RUNS {
        reports += &clean_run(deployment, seed, place);
        // On a busy machine less happens in thirty seconds, and another run of the same plan makes up for it.
        match what_is_missing(&reports, deployment) {
            None => return,
            Some(missing) => assert!(
                run < MOST_RUNS,
                "too little of {missing:?} in {run} runs:\n{reports}"
            ),
        }
    }
}

/// The exit code of a run in which the machine stood still or was slow, and something was late.
const SAYS_NOTHING: i32 = 3;

/// The report of a run in which nothing was wrong.
fn clean_run(deployment: &str, seed: u64, place: usize) -> String {
    let turn = PLACES[place].lock();
    let seed = seed.to_string();
    let run = || {
        let options = ["--seconds", "30", "--seed", &seed];
        let run = torture(&[&options[..], &["--deployment", deployment]].concat()).output();
        run.expect("the example runs")
    };
    let mut runs = std::iter::repeat_with(run).take(MOST_RUNS);
    let says = |run: &Output| run.status.code() != Some(SAYS_NOTHING);
    let run = runs.find(says);
    drop(turn);
    let run = run.expect("the machine goes on in one of so many runs");
    let report = String::from_utf8_lossy(&run.stdout).into_owned();
    assert!(
        run.status.success(),
        "{report}\n{}",
        String::from_utf8_lossy(&run.stderr)
    );
    report
}

/// What the runs were to go through and did not, if anything.
fn what_is_missing(reports: &str, deployment: &str) -> Option<&'static str> {
    // A quorum of five has five times the work, and is kept from it now and then.
    let least = match deployment {
        // Each lease of a key is a tenure of its own, and has a transaction.
        "postgres" | "postgres-async" => 400,
        "quorum" => 300,
        _ => 1_000,
    };
    let fenced = "fenced updates of the table";
    let fences = deployment.starts_with("postgres");
    if !fences {
        assert_eq!(row(reports, fenced), 0, "{reports}");
    }
    let shared = if deployment == "quorum" {
        &[][..]
    } else {
        &["  reader", "  permit"]
    };
    let modes = ["  exclusive", "  group", "  kept"].iter().chain(shared);
    let floors = [
        ("leases", least),
        ("hand-overs between processes", 100),
        ("stale asks refused by it", least / 100),
        ("steps checked by stateright", 2 * least),
    ];
    let kinds = Kind::of(deployment).into_iter().map(|kind| kind.name());
    floors
        .into_iter()
        .chain(fences.then_some((fenced, 100)))
        .chain(modes.map(|mode| (*mode, 0)))
        .chain(kinds.map(|kind| (kind, 0)))
        .find(|(name, floor)| row(reports, name) <= *floor)
        .map(|(name, _)| name)
}

#[test]
fn standalone() {
    thirty_seconds_are_clean("standalone", 1, 0);
}

#[test]
fn valkey() {
    thirty_seconds_are_clean("valkey", 2, 1);
}

#[test]
fn sentinel() {
    thirty_seconds_are_clean("sentinel", 4, 1);
}

#[test]
fn cluster() {
    thirty_seconds_are_clean("cluster", 6, 0);
}

#[test]
fn postgres() {
    thirty_seconds_are_clean("postgres", 7, 1);
}

#[test]
fn postgres_with_asynchronous_commit() {
    thirty_seconds_are_clean("postgres-async", 8, 0);
}

#[test]
fn quorum() {
    thirty_seconds_are_clean("quorum", 5, 0);
}

#[test]
fn errors_of_the_program_are_one_sentence() {
    for (arguments, fault) in [
        (
            &["--deployment", "abacus"][..],
            "there is no deployment \"abacus\"; there are: standalone",
        ),
        (&["--seed"], "--seed wants a value"),
        (
            &["--minutes", "five"],
            "--minutes wants a whole number, not \"five\"",
        ),
        (&["--seconds", "0"], "a run lasts from a second to a day"),
        (&["--frobnicate"], "\"--frobnicate\" is no option"),
    ] {
        let run = torture(arguments).output().unwrap();
        assert_eq!(run.status.code(), Some(2), "{arguments:?}: {run:?}");
        let said = String::from_utf8_lossy(&run.stderr);
        assert!(
            said.contains(fault) && said.contains("usage: "),
            "{arguments:?}: {said}"
        );
        assert!(run.stdout.is_empty(), "{arguments:?}: {run:?}");
    }
}

/// What no lock can stand is done behind its back all the while: keys are deleted that are held. It is found, and told
/// with the seed.
#[cfg(target_os = "linux")]
#[test]
fn a_breach_is_told_with_its_seed_and_is_no_success() {
    const DELETE: &str = "for _, key in ipairs(redis.call('KEYS', 'torture:*')) do \
                          if redis.call('TYPE', key).ok == 'string' and key ~= 'torture:~fence' then \
                          redis.call('DEL', key) end end";
    let _turn = PLACES[1].lock();
    let folder = tempfile::TempDir::new().unwrap();
    let mut run = torture(&["--seconds", "4", "--seed", "5"])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = run.id();
    let delete = || -> redis::RedisResult<()> {
        let port = port_of_server(pid).ok_or(std::io::Error::other("there is none yet"))?;
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}/"))?;
        let patience = Duration::from_millis(200);
        let mut connection = client.get_connection_with_timeout(patience)?;
        connection.set_read_timeout(Some(patience))?;
        loop {
            let deleting = redis::cmd("EVAL").arg(DELETE).arg(0).exec(&mut connection);
            if deleting.is_err_and(|error| error.is_io_error()) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    };
    let begin = std::time::Instant::now();
    let status = loop {
        // Its server may be stopped, killed, or cut all connections.
        let _ = delete();
        std::thread::sleep(Duration::from_millis(5));
        if let Some(status) = run.try_wait().unwrap() {
            break status;
        }
        // Of what it leaves it may wait for the end: a minute.
        assert!(begin.elapsed() < 4 * PATIENCE, "it does not end");
    };
    let mut report = String::new();
    let mut output = run.stdout.take().unwrap();
    std::io::Read::read_to_string(&mut output, &mut report).unwrap();
    assert_eq!(status.code(), Some(1), "{report}");
    assert!(row(&report, "overlaps within validity") > 0, "{report}");
    let end = "standalone, seed 5: BREACHED\nthe logs are kept in ";
    assert!(report.contains(end), "{report}");
}

/// Of the server in a run.
#[cfg(target_os = "linux")]
fn port_of_server(run: u32) -> Option<u16> {
    // Each server is a child of its keeper, and says in its title where it listens.
    let servers = children_of(run).into_iter().flat_map(children_of);
    let titles =
        servers.filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok());
    titles
        .filter_map(|title| {
            let (_, rest) = title.split_once("127.0.0.1:")?;
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().ok()
        })
        .next()
}

/// Ends, and says how, or panics.
fn exit(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_until_blocking("it ends", PATIENCE, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

/// A child that is stopped when its parent is killed would stay for ever, if the kernel did not see to it.
#[cfg(target_os = "linux")]
#[test]
fn a_killed_run_leaves_no_process_behind() {
    let _turn = PLACES[0].lock();
    // Its own folder nobody removes when it is killed.
    let folder = tempfile::TempDir::new().unwrap();
    let mut run = torture(&["--seconds", "60", "--seed", "3"])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = run.id();
    let mut children = Vec::new();
    // One that the plan kills is soon replaced, and then this is so again.
    wait_until_blocking("there are children", PATIENCE, || {
        // The keeper of the server is one, too.
        children = children_of(pid);
        let at_work = children.iter().filter(|child| has_its_log(**child));
        children.len() == 5 && at_work.count() == 4
    });
    for child in &children {
        // The keeper sees to itself.
        if has_its_log(*child) {
            let stopped = kill_process(Pid::from_raw(*child as i32).unwrap(), Signal::STOP);
            // The plan may have killed it just now.
            assert!(matches!(stopped, Ok(()) | Err(Errno::SRCH)), "{stopped:?}");
        }
    }
    run.kill().unwrap();
    assert!(!exit(&mut run).success());
    wait_until_blocking("all are gone", PATIENCE, || {
        children.iter().all(|child| !is_there(*child))
    });
}

#[cfg(target_os = "linux")]
fn children_of(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks = tasks.into_iter().flatten().flatten();
    tasks
        .filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|children| {
            let children = children.split_whitespace();
            children
                .map(|child| child.parse().unwrap())
                .collect::<Vec<_>>()
        })
        .collect()
}

/// Whether it is a child that has its log open. Such a one has told the kernel what is to become of it.
#[cfg(target_os = "linux")]
fn has_its_log(pid: u32) -> bool {
    // Until it is a program of its own it is a copy of its parent, which has all logs open to read them. And errors may go
    // to a log as well.
    let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let arguments: Vec<_> = arguments.split(|byte| *byte == 0).collect();
    let files = std::fs::read_dir(format!("/proc/{pid}/fd"));
    let files = files.into_iter().flatten().flatten();
    let mut files = files.filter_map(|file| std::fs::read_link(file.path()).ok());
    files.any(|file| arguments.contains(&file.as_os_str().as_encoded_bytes()))
}

#[cfg(target_os = "linux")]
fn is_there(pid: u32) -> bool {
    // One that nobody reaps any more is gone all the same.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('Z'))
    })
}
