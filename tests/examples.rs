//! The examples do what the README says: they are run here as a user runs them.
#![cfg(feature = "redis")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use support::{PATIENCE, RedisServer, on_a_steady_machine_blocking, wait_until_blocking};
use tempfile::TempDir;

/// Cargo builds a package's examples before its tests, and tells tests the path of neither.
fn example(name: &str) -> Command {
    let test = std::env::current_exe().expect("a running program has a path");
    let profile = test.ancestors().nth(2).expect("target/<profile>/deps/test");
    let program = profile
        .join("examples")
        .join(name)
        .with_extension(std::env::consts::EXE_EXTENSION);
    assert!(
        program.exists(),
        "example {name} is not built: run `cargo test` without naming a target, or `cargo build --examples` before"
    );
    let mut command = Command::new(program);
    // Elsewhere than in the repository, and on no server that happens to be the developer's.
    command
        .current_dir(std::env::temp_dir())
        .env_remove("REDIS_URL");
    command
}

/// A server may stand still for a while.
fn patient_url(server: &RedisServer) -> String {
    format!("{}?response_timeout=10", server.url())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("examples speak UTF-8")
}

/// A row of the quickstart's table: what the run without locks has, and the one with them.
fn row(output: &Output, name: &str) -> [String; 2] {
    let printed = text(&output.stdout);
    let cells = printed
        .lines()
        .find_map(|line| line.trim_start().strip_prefix(name))
        .unwrap_or_else(|| panic!("no row {name:?} in\n{printed}"));
    let cells: Vec<&str> = cells.split("  ").map(str::trim).collect();
    let cells: Vec<&str> = cells.into_iter().filter(|cell| !cell.is_empty()).collect();
    let [without, with] = cells[..] else {
        panic!("row {name:?} has cells {cells:?}");
    };
    [without.to_owned(), with.to_owned()]
}

fn assert_money_is_lost_without_locks_alone(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let [before, _] = row(output, "money before");
    assert_eq!(before, "12,000.00");
    assert_eq!(row(output, "money after")[1], before);
    let [without, with] = row(output, "wrong balances");
    assert_ne!(without, "0 of 12");
    assert_eq!(with, "0 of 12");
    let [without, with] = row(output, "updates overwritten");
    assert_ne!(without, "0");
    assert_eq!(with, "0");
    // The locks went from instance to instance, so it was not one instance that did all.
    let [_, hand_overs] = row(output, "hand-overs between instances");
    assert!(hand_overs.parse::<u32>().unwrap() > 10, "{hand_overs}");
}

#[test]
fn quickstart_in_one_process() {
    let output = example("quickstart").output().unwrap();
    assert_money_is_lost_without_locks_alone(&output);
    assert!(text(&output.stdout).contains("4 registries in this process"));
}

#[test]
fn quickstart_in_four_processes() {
    let server = RedisServer::start();
    let mut command = example("quickstart");
    command.env("REDIS_URL", patient_url(&server));
    let output = command.output().unwrap();
    assert_money_is_lost_without_locks_alone(&output);
    assert!(text(&output.stdout).contains("4 processes"));
    assert_eq!(server.keys("*"), [""; 0]);
    assert!(server.calls("publish") > 10, "the locks were not on it");
}

/// Runs the quickstart on a file with these lines.
fn on_file(lines: &str) -> Output {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("given.csv");
    std::fs::write(&file, lines).unwrap();
    example("quickstart").arg(file).output().unwrap()
}

#[test]
fn quickstart_takes_another_file() {
    // A byte order mark, line ends and a last line as a spreadsheet writes them.
    let output =
        on_file("\u{feff}id,from,to,amount\r\n1, a ,b,150\r\n# paid back\r\n\r\n2,b,a,100");
    assert!(output.status.success(), "{output:?}");
    assert!(text(&output.stdout).starts_with("2 transfers between 2 accounts"));
    assert_eq!(row(&output, "money after")[1], "2,000.00");
    assert_eq!(row(&output, "wrong balances")[1], "0 of 2");
}

#[test]
fn quickstart_names_every_bad_row_by_its_line_and_applies_nothing() {
    let cases = [
        ("2,a,b", "it has 3 columns"),
        ("2,a,b,1,", "it has 5 columns"),
        ("nonsense", "it has 1 columns"),
        ("2,a,b,x", "amount \"x\" is not a whole number of cents"),
        ("2,a,b,1.5", "amount \"1.5\" is not a whole number of cents"),
        ("2,a,b,", "amount \"\" is not a whole number of cents"),
        ("2,a,b,0", "amount is 0"),
        ("2,a,b,-5", "amount -5 is negative"),
        ("2,a,a,5", "\"a\" pays itself"),
        ("2,,b,5", "from \"\" is empty"),
        ("2,a,b}{,5", "to \"b}{\" holds something besides"),
        (",a,b,5", "id \"\" is empty"),
        ("1,a,b,5", "id \"1\" was seen in line 3"),
        ("2,a,b,9223372036854775808", "more than a balance can hold"),
        ("2,a,b,9223372036854775000", "more than a balance can hold"),
    ];
    for (bad, fault) in cases {
        // Neither comments nor empty lines put the count out.
        let output = on_file(&format!(
            "# made up\nid,from,to,amount\n1,a,b,5\n\n{bad}\n3,a,b,5\n"
        ));
        assert_eq!(output.status.code(), Some(1), "{bad}: {output:?}");
        let said = text(&output.stderr);
        assert!(
            said.contains("line 5: ") && said.contains(fault),
            "{bad}: {said}"
        );
        assert!(said.contains("nothing was applied"), "{bad}: {said}");
        assert_eq!(text(&output.stdout), "", "{bad}");
    }
    let all = on_file("id,from,to,amount\n1,a,b\n2,a,a,1\n3,a,b,3\n");
    let said = text(&all.stderr);
    assert!(
        said.contains("line 2: ") && said.contains("line 3: "),
        "{said}"
    );
}

#[test]
fn quickstart_refuses_an_invalid_file_of_transfers() {
    for (lines, fault) in [
        ("", "it holds no transfers"),
        ("id,from,to,amount\n", "it holds no transfers"),
        ("1,a,b,5\n", "line 1: the header must be"),
    ] {
        let output = on_file(lines);
        assert_eq!(output.status.code(), Some(1), "{lines:?}: {output:?}");
        let said = text(&output.stderr);
        assert!(said.contains(fault), "{lines:?}: {said}");
    }
    let absent = example("quickstart").arg("/no/such.csv").output().unwrap();
    assert_eq!(absent.status.code(), Some(1));
    assert!(text(&absent.stderr).contains("/no/such.csv: "));
    let asked = example("quickstart").arg("--frobnicate").output().unwrap();
    assert_eq!(asked.status.code(), Some(2));
    assert!(text(&asked.stderr).contains("usage: "));
}

#[test]
fn without_a_server_there_is_one_sentence_and_no_run() {
    let mut server = RedisServer::start();
    let url = server.url();
    server.kill();
    for name in [
        "quickstart",
        "service",
        "leader",
        "pipeline",
        "cron",
        "scheduler",
        "timeline",
    ] {
        for url in [&*url, "http://127.0.0.1/", "redis://127.0.0.1:port/"] {
            let output = example(name).env("REDIS_URL", url).output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{name} {url}: {output:?}");
            let said = text(&output.stderr);
            assert_eq!(said.lines().count(), 1, "{name} {url}: {said}");
            assert!(
                said.contains("the server in REDIS_URL cannot be used"),
                "{name} {url}: {said}"
            );
            assert_eq!(text(&output.stdout), "", "{name} {url}");
        }
    }
}

#[test]
fn the_file_of_transfers_is_made_from_its_seed() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/transfers.csv");
    let file = std::fs::read_to_string(file).unwrap();
    let (_, seed) = file.split_once("--generate ").expect("it names its seed");
    let seed = seed.split_whitespace().next().unwrap();
    let mut command = example("quickstart");
    let output = command.args(["--generate", seed]).output().unwrap();
    assert_eq!(text(&output.stdout), file);
}

/// Runs it until it has printed `line`, sends it the signal, and gives its exit code and what else
/// it printed.
fn signalled(mut command: Command, line: &str, signal: Signal) -> (Option<i32>, String) {
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    signalled_child(child, line, signal)
}

/// [`signalled`] for one that runs already, with its output piped.
fn signalled_child(mut child: Child, line: &str, signal: Signal) -> (Option<i32>, String) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let seen = lines.any(|printed| printed.unwrap().contains(line));
    assert!(seen, "it never printed {line:?}");
    kill_process(Pid::from_child(&child), signal).unwrap();
    let mut status = None;
    wait_until_blocking("it ends", PATIENCE, || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    (status.unwrap().code(), rest.join("\n"))
}

/// Transfers between the same two accounts. With locks one is applied at a time, in 4 ms or more, so that all of them
/// take 20 s at least, and no signal comes too late. Without locks it is 32 at a time.
fn many_transfers(folder: &TempDir) -> PathBuf {
    let header = std::iter::once("id,from,to,amount".to_owned());
    let rows = (1..=5_000).map(|id| format!("{id},a,b,1"));
    let lines: Vec<String> = header.chain(rows).collect();
    let file = folder.path().join("many.csv");
    std::fs::write(&file, lines.join("\n")).unwrap();
    file
}

#[test]
fn quickstart_interrupted_leaves_nothing() {
    let server = RedisServer::start();
    let folder = TempDir::new().unwrap();
    let file = many_transfers(&folder);
    let mut command = example("quickstart");
    command.arg(&file).env("REDIS_URL", patient_url(&server));
    // What is printed right before the run with locks, which takes its time.
    let (code, rest) = signalled(command, "without locks", Signal::INT);
    assert_eq!(code, Some(130), "{rest}");
    assert!(!rest.contains("with locks"), "{rest}");
    assert_eq!(server.keys("*"), [""; 0]);

    let mut command = example("quickstart");
    command.arg(&file);
    let (code, rest) = signalled(command, "without locks", Signal::INT);
    assert_eq!(code, Some(130), "{rest}");
}

#[test]
fn the_service_releases_at_sigterm() {
    let server = RedisServer::start();
    let mut command = example("service");
    command.env("REDIS_URL", patient_url(&server));
    let (code, rest) = signalled(command, "sweeping", Signal::TERM);
    assert_eq!(code, Some(0), "{rest}");
    assert!(rest.contains("ended: "), "{rest}");
    assert!(rest.contains("swept"), "it was cut off: {rest}");
    assert!(!server.exists("lock:service:sweep"));
}

/// What `leader` prints under its picture: of each term the leader, the token, how it ended, and for how many
/// milliseconds nobody led before it.
fn terms(output: &Output) -> Vec<(String, u64, String, Option<u64>)> {
    let printed = text(&output.stdout);
    let rows = printed
        .lines()
        .skip_while(|line| !line.contains("term  leader"));
    let rows = rows.skip(1).take_while(|line| !line.is_empty());
    let cells = rows.map(|row| {
        let cells: Vec<&str> = row.split("  ").map(str::trim).collect();
        let cells = cells.into_iter().filter(|cell| !cell.is_empty());
        cells.map(str::to_owned).collect::<Vec<String>>()
    });
    let terms = cells.map(|cells| {
        let vacant = cells.get(5).map(|ms| ms.strip_suffix(" ms").unwrap());
        (
            cells[1].clone(),
            cells[2].parse().unwrap(),
            cells[4].clone(),
            vacant.map(|ms| ms.parse().unwrap()),
        )
    });
    terms.collect()
}

fn assert_the_next_leads_within_the_ttl(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let terms = terms(output);
    let ends: Vec<&str> = terms.iter().map(|(_, _, end, _)| &**end).collect();
    assert_eq!(
        ends,
        [
            "killed",
            "killed",
            "killed",
            "killed",
            "resigned",
            "at the end"
        ]
    );
    assert!(terms.is_sorted_by(|a, b| a.1 < b.1), "{terms:?}");
    for pair in terms.windows(2) {
        let [(before, _, end, _), (leader, _, _, vacant)] = pair else {
            unreachable!("windows of two");
        };
        assert_ne!(before, leader, "whoever was killed is last in line");
        let vacant = vacant.expect("there was a term before");
        // Of a ttl that is renewed at every third two thirds are left, which is more than the next may be late.
        let (ttl, late) = (1_300, 750);
        if end == "killed" {
            assert!((ttl / 2..ttl + late).contains(&vacant), "{terms:?}");
        } else {
            assert!(vacant < late, "{terms:?}");
        }
    }
    let picture = text(&output.stdout);
    assert_eq!(picture.matches('✗').count(), 5, "four, and what it means");
    for lane in ["  A  ", "  B  ", "  C  "] {
        let lane = picture.lines().find_map(|line| line.strip_prefix(lane));
        let lane = lane.expect("there are three lanes");
        assert!(lane.contains('█') && lane.contains('·'), "{lane}");
    }
}

#[test]
fn leaders_of_three_threads() {
    on_a_steady_machine_blocking(|| {
        let output = example("leader").output().unwrap();
        assert_the_next_leads_within_the_ttl(&output);
        assert!(text(&output.stdout).contains("3 threads"));
    });
}

#[test]
fn leaders_of_three_processes() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut command = example("leader");
        command.env("REDIS_URL", patient_url(&server));
        let output = command.output().unwrap();
        assert_the_next_leads_within_the_ttl(&output);
        assert!(text(&output.stdout).contains("3 processes"));
        assert_eq!(server.keys("*"), [""; 0]);
        assert_eq!(server.clients().len(), 0, "a candidate lives on");
    });
}

#[test]
fn the_leader_interrupted_leaves_nothing() {
    let server = RedisServer::start();
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = example("leader");
        command.env("REDIS_URL", patient_url(&server));
        let (code, rest) = signalled(command, "a lead that is not renewed", signal);
        assert_eq!(code, Some(130), "{rest}");
        assert_eq!(server.keys("*"), [""; 0]);
        assert_eq!(server.clients().len(), 0, "a candidate lives on");
    }
}

#[test]
fn the_pipeline_is_in_order_with_locks_alone() {
    let server = RedisServer::start();
    let mut command = example("pipeline");
    command.env("REDIS_URL", patient_url(&server));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(row(&output, "movements applied"), ["120", "120"]);
    let [without, with] = row(&output, "out of order");
    assert_ne!(without, "0");
    assert_eq!(with, "0");
    let [without, with] = row(&output, "wrong balances");
    assert_ne!(without, "0 of 6");
    assert_eq!(with, "0 of 6");
    let printed = text(&output.stdout);
    let numbers: Vec<String> = (1..=20).map(|number| number.to_string()).collect();
    assert!(printed.contains(&format!("with     {}\n", numbers.join(" "))));
    assert_eq!(server.keys("*"), [""; 0]);
    assert!(server.calls("publish") > 10, "the locks were not on it");
}

#[test]
fn the_pipeline_interrupted_leaves_nothing() {
    let server = RedisServer::start();
    // Its prefix is made from its pid, which is that of the shell that it takes the place of.
    let mut child = Command::new("/bin/sh")
        .args(["-c", "read -r go && exec \"$0\""])
        .arg(example("pipeline").get_program())
        .current_dir(std::env::temp_dir())
        .env("REDIS_URL", patient_url(&server))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // Somebody else has one of its locks before it begins, so that it cannot end before the signal.
    let held = format!("pipeline-{}:account:0", child.id());
    server.cmd(&["SET", &held, "somebody", "PX", "600000"]);
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let (code, rest) = signalled_child(child, "120 movements", Signal::INT);
    assert_eq!(code, Some(130), "{rest}");
    assert_eq!(server.keys("*"), [held]);
}

#[test]
fn the_pipeline_says_that_it_needs_a_server() {
    let output = example("pipeline").output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("it needs a server: start one (redis-server"),
        "{said}"
    );
}

/// The number before this word in what was printed.
fn numbers_before(printed: &str, word: &str) -> Vec<usize> {
    let words: Vec<&str> = printed.split_whitespace().collect();
    let pairs = words
        .windows(2)
        .filter(|pair| pair[1].trim_end_matches(',') == word);
    pairs.map(|pair| pair[0].parse().unwrap()).collect()
}

/// It fails by itself when a run begins too early; here it must have run at all, and skipped.
fn assert_at_most_once_a_period(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let printed = text(&output.stdout);
    let count = |before: &str| -> usize {
        let (_, rest) = printed.split_once(before).expect("it counts");
        let (count, _) = rest.split_once(" times").expect("it counts");
        count.parse().unwrap()
    };
    let (done, skipped) = (count("done "), count(", skipped "));
    assert!((2..=4).contains(&done), "{printed}");
    assert_eq!(done + skipped, 4 * 4, "{printed}");
    let lines = printed
        .lines()
        .filter(|line| line.starts_with("  machine "));
    let drawn: usize = lines.map(|line| line.matches('█').count()).sum();
    assert_eq!(drawn, done, "{printed}");
    let runs = printed.lines().filter(|line| line.ends_with(" did it"));
    assert_eq!(runs.count(), done, "{printed}");
}

#[test]
fn cron_on_a_memory_store() {
    on_a_steady_machine_blocking(|| {
        let output = example("cron").output().unwrap();
        assert_at_most_once_a_period(&output);
        assert!(text(&output.stdout).contains("on a memory store"));
    });
}

#[test]
fn cron_on_a_server() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut command = example("cron");
        let output = command.env("REDIS_URL", patient_url(&server)).output();
        assert_at_most_once_a_period(&output.unwrap());
        assert_a_kept_key_goes(&server, "cron");
    });
}

/// The last run's key outlives the programs, and nothing else does.
fn assert_a_kept_key_goes(server: &RedisServer, prefix: &str) {
    // Less than a ttl.
    wait_until_blocking("the key's time is over", Duration::from_secs(20), || {
        !server.exists(&format!("{prefix}:report"))
    });
    assert_eq!(server.keys("*"), [format!("{prefix}:~fence")]);
}

/// The tasks that have a token stop at the loss, and the one that has none goes on under another's lock.
#[cfg(feature = "tokio-util")]
#[test]
fn tasks_with_a_token_stop_when_the_lease_is_lost() {
    on_a_steady_machine_blocking(|| {
        let output = example("cancel").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let printed = text(&output.stdout);
        assert!(printed.contains("lease on \"backup\" lost"), "{printed}");
        let order = |line: &str| printed.find(line).unwrap_or_else(|| panic!("{printed}"));
        assert!(order("a task has stopped") < order("somebody else has the lock"));
        assert_eq!(
            printed.matches("a task has stopped").count(),
            3,
            "{printed}"
        );
        for (task, late) in [
            ("first", true),
            ("second", true),
            ("third", true),
            ("careless", false),
        ] {
            let line = printed.lines().find(|line| line.starts_with(task));
            let line = line.unwrap_or_else(|| panic!("no {task}: {printed}"));
            assert_eq!(line.contains(" 0 of them"), late, "{line}");
        }
    });
}

#[test]
fn cron_refuses_an_invalid_period() {
    for arguments in [&["0.4"][..], &["3601"], &["x"], &["1", "2"]] {
        let output = example("cron").args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(text(&output.stderr).contains("usage: cron [SECONDS]"));
    }
}

/// Three starts a second, of which one does it.
fn assert_one_instance_does_it(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let printed = text(&output.stdout);
    let done = numbers_before(&printed, "done");
    let skipped = numbers_before(&printed, "skipped");
    assert_eq!((done.len(), skipped.len()), (3, 3), "{printed}");
    let done: usize = done.iter().sum();
    // Its five seconds have room for six runs that begin 900 ms apart, and no more.
    assert!((2..=6).contains(&done), "{printed}");
    assert!(skipped.iter().sum::<usize>() > done, "{printed}");
    let runs = printed.lines().filter(|line| line.ends_with(" did it"));
    assert_eq!(runs.count(), done, "{printed}");
}

#[test]
fn the_scheduler_on_a_memory_store() {
    on_a_steady_machine_blocking(|| {
        assert_one_instance_does_it(&example("scheduler").output().unwrap());
    });
}

#[test]
fn the_scheduler_on_a_server() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let mut command = example("scheduler");
        let output = command.env("REDIS_URL", patient_url(&server)).output();
        assert_one_instance_does_it(&output.unwrap());
        assert_a_kept_key_goes(&server, "lock");
    });
}

/// Each message is sent once, in the order of its customer.
#[cfg(feature = "postgres")]
#[test]
fn the_outbox_is_emptied_in_order() {
    let server = support::PgServer::start();
    let mut command = example("outbox");
    let output = command.env("DATABASE_URL", server.url()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let printed = text(&output.stdout);
    assert!(printed.contains("60 sent, "), "{printed}");
    let mut all = Vec::new();
    for line in printed.lines().filter_map(|line| line.strip_prefix("to ")) {
        let (_, sent) = line.split_once(": ").unwrap();
        let ids = sent.split(", ").map(|it| it.split(' ').next().unwrap());
        let ids: Vec<u32> = ids.map(|id| id.parse().unwrap()).collect();
        assert!(ids.is_sorted_by(|a, b| a < b), "{printed}");
        all.extend(ids);
    }
    all.sort_unstable();
    assert_eq!(all, (1..=60).collect::<Vec<_>>());

    let output = example("outbox")
        .env_remove("DATABASE_URL")
        .output()
        .unwrap();
    assert!(
        text(&output.stderr).contains("set DATABASE_URL"),
        "{output:?}"
    );
}

#[test]
fn the_poller_hands_the_inbox_over() {
    let server = RedisServer::start();
    let mut on_server = example("poller");
    on_server.env("REDIS_URL", patient_url(&server));
    for mut command in [example("poller"), on_server] {
        let output = command.output().unwrap();
        let printed = text(&output.stdout);
        let words = printed
            .lines()
            .map(|line| line.split_whitespace().collect());
        let lines: Vec<Vec<&str>> = words.collect();
        let mails: Vec<_> = lines.iter().filter(|words| words.len() == 3).collect();
        let who: Vec<_> = mails.iter().map(|words| (words[0], words[2])).collect();
        let expected = ["one", "two", "three", "four", "five", "six"];
        let expected = expected.into_iter().enumerate();
        let expected = expected.map(|(at, mail)| (["first", "second"][at / 3], mail));
        assert_eq!(who, expected.collect::<Vec<_>>(), "{output:?}");
        let token = |at: usize| mails[at][1].parse::<u64>().unwrap();
        assert!(token(2) < token(3), "{printed}");
        assert!(printed.ends_with("the inbox is empty\n"), "{output:?}");
    }
    assert_eq!(server.keys("lock:poller"), [""; 0]);
}

#[test]
fn lock_it_works_with_and_without_a_server() {
    let output = example("lock_it").output().unwrap();
    assert_eq!(text(&output.stdout), "charged, then 100 orders\n");
    let server = RedisServer::start();
    let mut command = example("lock_it");
    command.env("REDIS_URL", patient_url(&server));
    let output = command.output().unwrap();
    assert_eq!(text(&output.stdout), "charged, then 100 orders\n");
    assert!(!server.exists("lock:order:42"));
    assert!(server.exists("lock:~fence"), "it was never locked there");
}

/// A lease in the picture of `timeline`.
#[derive(Debug)]
struct Hold {
    process: u32,
    token: u64,
    from: f64,
    to: f64,
    end: String,
}

/// Each process notes its own times, a little after the fact. In milliseconds.
const NOTED_AFTER: f64 = 100.0;

/// The value of an attribute in the text of an element.
fn attribute<'a>(element: &'a str, name: &str) -> &'a str {
    let (_, rest) = element
        .split_once(&format!(" {name}=\""))
        .unwrap_or_else(|| panic!("no {name} in {element}"));
    rest.split_once('"').expect("it is closed").0
}

/// What `timeline` drew and printed: the picture is whole, and shows what it is there for.
fn assert_shows_a_killed_holder(output: &Output, picture: &str, place: &str) {
    assert!(output.status.success(), "{output:?}");
    assert_eq!(text(&output.stderr), "");
    assert!(picture.contains(place), "{place}");

    // Every element is closed, in order; no text holds what would be markup.
    let mut open = Vec::new();
    for tag in picture.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("every < has its >");
        let name = tag.split([' ', '/']).find(|name| !name.is_empty());
        if tag.starts_with('/') {
            assert_eq!(open.pop(), name, "{tag}");
        } else if !tag.ends_with('/') {
            open.push(name.unwrap());
        }
        assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
    }
    assert_eq!(open, [""; 0]);
    assert_eq!(picture.matches("class=\"process\"").count(), 4);

    let mut holds: Vec<Hold> = picture
        .lines()
        .filter(|line| line.starts_with("<g data-process"))
        .map(|line| Hold {
            process: attribute(line, "data-process").parse().unwrap(),
            token: attribute(line, "data-token").parse().unwrap(),
            from: attribute(line, "data-from").parse().unwrap(),
            to: attribute(line, "data-to").parse().unwrap(),
            end: attribute(line, "data-end").to_owned(),
        })
        .collect();
    holds.sort_by(|a, b| a.from.total_cmp(&b.from));
    for process in 1..=4 {
        let mut of = holds.iter().filter(|hold| hold.process == process);
        assert!(of.next().is_some(), "process {process} never had the lock");
    }
    for pair in holds.windows(2) {
        assert!(pair[0].token < pair[1].token, "{pair:?}");
        assert!(
            pair[0].to - NOTED_AFTER < pair[1].from,
            "two at a time: {pair:?}"
        );
    }
    assert!(picture.contains(", passed on, "));
    assert!(holds.iter().any(|hold| hold.end == "lost"), "{holds:?}");

    let killed = picture
        .lines()
        .find(|line| line.starts_with("<g class=\"killed\""))
        .expect("the kill is marked");
    let at: f64 = attribute(killed, "data-at").parse().unwrap();
    let dead = holds.iter().position(|hold| hold.end == "killed").unwrap();
    assert_eq!(
        attribute(killed, "data-token"),
        holds[dead].token.to_string()
    );
    let (dead, next) = (&holds[dead], &holds[dead + 1]);
    assert!(dead.from <= at && next.process != dead.process, "{next:?}");
    // Not before the dead lease has run out, and not much later; its ttl is 600 ms.
    let took = next.from - dead.from;
    assert!(took > 600.0 - NOTED_AFTER && took < 600.0 + 500.0, "{took}");
    let last = holds.last().unwrap();
    assert!(last.from > next.from, "nobody has it again after {next:?}");
    assert!(
        !holds
            .iter()
            .any(|hold| hold.process == dead.process && hold.from > at)
    );

    let printed = text(&output.stdout);
    let begins = format!("{} leases in ", holds.len());
    assert!(printed.starts_with(&begins), "{printed}");
    let killed = format!("process {} was killed at ", dead.process);
    assert!(printed.contains(&killed), "{printed}");
    assert!(printed.contains("wrote "), "{printed}");
}

#[test]
fn timeline_draws_a_holder_killed_in_one_process() {
    on_a_steady_machine_blocking(|| {
        let folder = TempDir::new().unwrap();
        let file = folder.path().join("timeline.svg");
        let output = example("timeline").arg(&file).output().unwrap();
        let picture = std::fs::read_to_string(&file).unwrap();
        assert_shows_a_killed_holder(&output, &picture, "4 registries in one process");
    });
}

#[test]
fn timeline_draws_a_holder_killed_among_processes() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let folder = TempDir::new().unwrap();
        let mut command = example("timeline");
        command
            .env("REDIS_URL", patient_url(&server))
            .current_dir(folder.path());
        let output = command.output().unwrap();
        let picture = std::fs::read_to_string(folder.path().join("timeline.svg")).unwrap();
        assert_shows_a_killed_holder(&output, &picture, "4 processes on one server");
        assert!(server.calls("publish") > 5, "the locks were not on it");
        assert!(!server.keys("*").iter().any(|key| key.ends_with(":~fence")));
    });
}

#[test]
fn timeline_reports_errors() {
    on_a_steady_machine_blocking(|| {
        let output = example("timeline").arg("--frobnicate").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("usage: "));
        let output = example("timeline").arg("/no/such/folder.svg").output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(1));
        let said = text(&output.stderr);
        assert!(said.contains("/no/such/folder.svg: "), "{said}");
    });
}

/// The picture in the README is one that the example drew, on a server.
#[test]
fn the_readme_shows_a_picture_of_the_timeline() {
    assert!(in_repository("README.md").contains("](docs/timeline.svg)"));
    let picture = in_repository("docs/timeline.svg");
    assert!(picture.contains("4 processes on one server"));
    assert!(picture.contains("<g class=\"killed\""));
}

fn in_repository(path: &str) -> String {
    let path: PathBuf = [env!("CARGO_MANIFEST_DIR"), path].iter().collect();
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn the_pages_show_the_code_as_it_is() {
    let pages = [
        ("README.md", "examples/lock_it.rs"),
        ("docs/guide.md", "tests/readme.rs"),
    ];
    for (name, path) in pages {
        let page = in_repository(name);
        let source = in_repository(path);
        let code: String = source
            .lines()
            .skip_while(|line| line.starts_with("//!") || line.is_empty())
            .flat_map(|line| [line, "\n"])
            .collect();
        assert!(
            page.contains(&format!("```rust\n{code}```\n")),
            "{name} has another text of {path} than\n{code}"
        );
    }
}
