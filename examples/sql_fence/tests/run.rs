//! The example does what it says, on both stores.

#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use support::{PATIENCE, PgServer, RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockstream-sql-fence"));
    // No server that happens to be the developer's.
    command.env_remove("REDIS_URL").env_remove("DATABASE_URL");
    command
}

/// A line of its table: who, under which token, does what, and the verdict.
fn rows(printed: &str) -> Vec<[String; 4]> {
    let rows = printed.lines().filter_map(|line| {
        let cells: Vec<&str> = line.split("  ").map(str::trim).collect();
        let mut cells = cells.into_iter().filter(|cell| !cell.is_empty());
        let (who, token, does) = (cells.next()?, cells.next()?, cells.next()?);
        token.parse::<u64>().ok()?;
        let verdict = cells.next().unwrap_or_default();
        Some([who, token, does, verdict].map(str::to_owned))
    });
    rows.collect()
}

fn assert_late_writes_are_refused(output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let printed = String::from_utf8(output.stdout.clone()).unwrap();
    let (without, with) = printed
        .split_once("with the token")
        .expect("both runs are printed");
    assert!(without.contains("the balance is 130: and should be 79"));
    assert!(with.contains("the balance is 79: right"));
    let does = |rows: &[[String; 4]]| -> Vec<String> {
        let rows = rows.iter().map(|[who, _, does, verdict]| {
            let verdict = verdict.split([' ', ',', ':']).next().unwrap_or_default();
            format!("{who} {does} {verdict}")
        });
        rows.collect()
    };
    let (without, with) = (rows(without), rows(with));
    let begin = [
        "slow reads 100 ",
        "slow is stopped its",
        "quick pays 50, writes 50 written",
        "quick a fee, writes 49 written",
    ];
    assert_eq!(does(&without)[..4], begin);
    assert_eq!(does(&without)[4..], ["slow adds 30, writes 130 written"]);
    assert_eq!(does(&with)[..4], begin);
    assert_eq!(
        does(&with)[4..],
        [
            "slow adds 30, writes 130 refused",
            "slow reads 49 ",
            "slow adds 30, writes 79 written",
        ]
    );
    // The late write came under the first token, the fee under that of the payment, and the last under a new one.
    let token = |row: &[String; 4]| row[1].parse::<u64>().unwrap();
    let tokens: Vec<u64> = with.iter().map(token).collect();
    let [first, stopped, paid, fee, late, anew, last] = tokens[..] else {
        panic!("{tokens:?}");
    };
    assert!(first == stopped && stopped == late, "{tokens:?}");
    assert!(paid == fee && anew == last, "{tokens:?}");
    assert!(first < paid && paid < anew, "{tokens:?}");
}

/// What a look at the token lets through, a fence does not: whoever comes next waits for the end of the transaction.
#[test]
fn in_postgres_a_look_is_not_enough_and_a_fence_is() {
    on_a_steady_machine_blocking(|| {
        let server = PgServer::start();
        let output = program()
            .env("DATABASE_URL", server.url())
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(output.status.success(), "{output:?}");
        let (look, fence) = printed
            .split_once("with a fence")
            .expect("both runs are printed");
        assert!(
            look.contains("the balance is 130: and should be 79"),
            "{printed}"
        );
        assert!(fence.contains("the balance is 79: right"), "{printed}");
        let line = |text: &str, what: &str| {
            text.find(what)
                .unwrap_or_else(|| panic!("no {what:?}: {printed}"))
        };
        assert!(line(look, "quick  wrote 49") < line(look, "slow   goes on"));
        assert!(line(fence, "slow   goes on") < line(fence, "quick  has the lock"));
        assert_eq!(
            server
                .rows("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'sql_fence%'")
                .len(),
            0
        );
    });
}

#[test]
fn in_one_process() {
    let output = program().output().unwrap();
    assert_late_writes_are_refused(&output);
}

#[test]
fn with_a_process_that_is_stopped() {
    let server = RedisServer::start();
    let output = program().env("REDIS_URL", server.url()).output().unwrap();
    assert_late_writes_are_refused(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("SIGSTOP"));
    assert_eq!(server.keys("*"), [""; 0]);
}

#[test]
fn without_a_server_there_is_one_sentence_and_no_run() {
    let mut server = RedisServer::start();
    let url = server.url();
    server.kill();
    let output = program().env("REDIS_URL", url).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("the server in REDIS_URL cannot be used"),
        "{said}"
    );
    assert!(output.stdout.is_empty());
}

/// Interrupts it while the holder is stopped, or is about to be, and gives its exit code.
fn interrupted(server: &RedisServer) -> Option<i32> {
    let mut child = program()
        .env("REDIS_URL", server.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let seen = lines.any(|line| line.unwrap().contains("reads 100"));
    assert!(seen);
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    child.wait().unwrap().code()
}

#[test]
fn interrupted_it_leaves_nobody_behind() {
    let server = RedisServer::start();
    // If this test stood still, the signal came after the end. Then the example says 0, and is run again.
    let mut codes = std::iter::repeat_with(|| interrupted(&server)).take(4);
    let code = codes.find(|code| *code != Some(0));
    let code = code.expect("one run of four is interrupted before its end");
    assert_eq!(code, Some(130));
    // One that is left behind stopped stays connected.
    wait_until_blocking("nobody is connected any more", PATIENCE, || {
        server.clients().is_empty()
    });
}
