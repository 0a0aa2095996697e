//! Exit codes, and whether the lock is held while the command runs and free after it.

use std::time::{Duration, Instant};

use crate::program::{Program, SOON, patient, run, write_program};
use crate::support::{RedisServer, on_a_steady_machine_blocking, wait_until_blocking};

const COMMAND: [&str; 2] = ["--", "true"];

/// A url at which nothing listens.
const NOWHERE: &str = "redis://127.0.0.1:1/";

#[test]
fn the_code_is_the_commands_own() {
    let server = RedisServer::start();
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("exit 255", 255),
        ("kill -TERM $$", 128 + 15),
        ("kill -KILL $$", 128 + 9),
    ] {
        let done = run(&server.url(), ["run", "k", "--", "sh", "-c", script]);
        assert_eq!(done.code, Some(code), "{script}: {}", done.err);
        assert_eq!((done.out.as_str(), done.err.as_str()), ("", ""));
        assert!(!server.exists("lock:k"), "{script}");
    }
}

#[test]
fn output_and_environment_are_the_commands() {
    let server = RedisServer::start();
    let script =
        "cat; echo $LOCKSTREAM_KEY $LOCKSTREAM_TOKEN ${LOCKSTREAM_URL-none}; echo oops >&2";
    let done = run(&server.url(), ["run", "a", "--", "sh", "-c", script]);
    let words: Vec<_> = done.out.split_whitespace().collect();
    assert_eq!((words[0], words[2]), ("a", "none"), "{done:?}");
    assert!(words[1].parse::<u64>().is_ok(), "{done:?}");
    assert_eq!(done.err, "oops\n");
}

/// What checks a token compares it with those of its own key. The token of the first key alone was smaller than that of
/// the last holder of another, and the keys `a` and `b` had the name of the key `a,b`.
#[test]
fn each_key_has_a_token_of_its_own() {
    let server = RedisServer::start();
    let environment = |keys: &[&str]| {
        let arguments = [&["run"][..], keys, &["--", "env"]].concat();
        let mut command = std::process::Command::new(crate::program::LOCKSTREAM);
        // As inside of another one.
        command
            .args(arguments)
            .env("LOCKSTREAM_URL", patient(&server.url()))
            .envs(["KEY", "TOKEN", "KEYS", "TOKENS"].map(|it| (format!("LOCKSTREAM_{it}"), "x")));
        let done = Program::spawn(command).end();
        assert_eq!(done.code, Some(0), "{}", done.err);
        done.out
    };
    // A line for each, and not more.
    let list = |environment: &str, name: &str, length: usize| -> Vec<String> {
        let lines = environment.lines();
        let mut lines = lines.skip_while(|line| !line.starts_with(&format!("{name}=")));
        let first = lines.next().map(|line| line[name.len() + 1..].to_owned());
        let list = first.into_iter().chain(lines.map(str::to_owned));
        list.take(length).collect()
    };
    let token = |key: &str| -> u64 {
        let environment = environment(&[key]);
        assert_eq!(list(&environment, "LOCKSTREAM_KEY", 1), [key]);
        assert!(!environment.contains("LOCKSTREAM_KEYS") && !environment.contains("_TOKENS"));
        list(&environment, "LOCKSTREAM_TOKEN", 1)[0]
            .parse()
            .unwrap()
    };
    token("a");
    let before = (0..5).map(|_| token("b,c")).max().unwrap();
    let several = environment(&["b,c", "a", "b,c"]);
    assert_eq!(list(&several, "LOCKSTREAM_KEYS", 2), ["b,c", "a"]);
    let tokens = list(&several, "LOCKSTREAM_TOKENS", 2);
    let tokens: Vec<u64> = tokens.iter().map(|token| token.parse().unwrap()).collect();
    assert!(!several.contains("LOCKSTREAM_KEY=") && !several.contains("LOCKSTREAM_TOKEN="));
    assert!(tokens[0] > before, "{tokens:?} {before}");
    assert!(token("a") > tokens[1] && token("b,c") > tokens[0]);
}

/// Signals for real time have no name: they were told as 255.
#[test]
fn a_signal_without_a_name_has_its_code() {
    let server = RedisServer::start();
    let arguments = ["run", "k", "--", "bash", "-c", "kill -34 $$"];
    assert_eq!(run(&server.url(), arguments).code, Some(128 + 34));
}

/// `flock`, `env` and a shell run it, too.
#[test]
fn a_script_that_names_no_interpreter_is_run_by_the_shell() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("script");
    write_program(&path, "echo $0 $1; exit 7\n");
    let path = path.to_str().unwrap();
    for ignored in ["--", "--ignore-signal=PIPE"] {
        let mut command = std::process::Command::new("env");
        // Only that of GNU can ignore a signal.
        if cfg!(target_os = "linux") {
            command.arg(ignored);
        }
        command
            .args([crate::program::LOCKSTREAM, "run", "k", "--", path, "word"])
            .env("LOCKSTREAM_URL", patient(&server.url()));
        let done = Program::spawn(command).end();
        assert_eq!(done.code, Some(7), "{}", done.err);
        assert_eq!(done.out, format!("{path} word\n"));
    }
}

/// `--` ends the options, as everywhere.
#[test]
fn a_key_may_begin_with_a_dash() {
    let server = RedisServer::start();
    let script = "echo $LOCKSTREAM_KEY $LOCKSTREAM_KEYS";
    let command = ["sh", "-c", script];
    for (before, out) in [
        (&["run", "--", "-x", "--"][..], "-x\n"),
        (&["run", "-q", "--", "-x", "y", "--"], "-x y\n"),
    ] {
        let done = run(&server.url(), [before, &command].concat());
        assert_eq!((done.code, &*done.out), (Some(0), out), "{}", done.err);
    }
    let leads = ["lead", "--", "-x", "--", "no-such-command"];
    assert_eq!(run(&server.url(), leads).code, Some(127));
    assert_eq!(run(&server.url(), ["inspect", "--", "-x"]).code, Some(0));
    for (arguments, said) in [
        (&["run", "-y", "--", "true"][..], "-- -y"),
        (&["run", "-x", "--", "true"], "no key"),
        (&["run", "--", "-x", "true"], "-- -x -- COMMAND"),
        (&["run", "--", "-x", "--"], "-- -x -- COMMAND"),
        (&["run", "--", "true", "--", "true"], "no key"),
        (&["lead", "--", "-x", "y", "--", "true"], "one key"),
    ] {
        let done = run(&server.url(), arguments);
        assert_eq!(done.code, Some(64), "{arguments:?}: {}", done.err);
        assert!(done.err.contains(said), "{arguments:?}: {}", done.err);
    }
}

#[test]
fn a_command_that_does_not_start_frees_the_lock() {
    let server = RedisServer::start();
    for (command, code) in [("no-such-command", 127), ("/etc/passwd", 126), ("/", 126)] {
        let done = run(&server.url(), ["run", "k", "--", command]);
        assert_eq!(done.code, Some(code), "{command}: {}", done.err);
        assert!(done.err.contains(command), "{}", done.err);
        assert!(!server.exists("lock:k"), "{command}");
    }
}

#[test]
fn usage_errors_are_told_before_anything_is_asked() {
    let long = "x".repeat(600);
    for arguments in [
        &["run"][..],
        &["run", "k"],
        &["run", "--", "true"],
        &["no-such-subcommand"],
        &["run", "--ttl", "soon", "k", "--", "true"],
        &["run", "--ttl", "10s", "k", "--", "true"],
        &["run", "--ttl", "14999ms", "k", "--", "true"],
        &[
            "run",
            "--ttl",
            "9ms",
            "--kill-after",
            "0",
            "k",
            "--",
            "true",
        ],
        &[
            "run",
            "--kill-after",
            "18446744073709551615",
            "k",
            "--",
            "true",
        ],
        &["run", "--keep-for", "9ms", "k", "--", "true"],
        &["run", "--keep-on-success", "k", "--", "true"],
        &["run", "-n", "--wait", "1s", "k", "--", "true"],
        &["run", "--shared", "--permits", "2", "k", "--", "true"],
        &["run", "--shared", "a", "b", "--", "true"],
        &["run", "--permits", "0", "k", "--", "true"],
        &["run", "--weight", "1", "k", "--", "true"],
        &["run", "--permits", "2", "--weight", "3", "k", "--", "true"],
        &["run", "-x", "-s", "k", "--", "true"],
        &["run", "-c", "true"],
        &["run", "-c", "true", "k", "--", "true"],
        &["run", "-E", "256", "k", "--", "true"],
        &["run", "--timeout", "0", "k", "--", "true"],
        &["run", "--name", "no spaces", "k", "--", "true"],
        &["run", "--prefix", "", "k", "--", "true"],
        &["run", "a}", "--", "true"],
        &["run", &long, "--", "true"],
        &["run", "--url", "http://127.0.0.1/", "k", "--", "true"],
        &[
            "run",
            "--url",
            "redis://:secret@127.0.0.1/",
            "k",
            "--",
            "true",
        ],
        &["run", "--url-file", "/no/such/file", "k", "--", "true"],
    ] {
        let done = run(NOWHERE, arguments);
        assert_eq!(done.code, Some(64), "{arguments:?}: {}", done.err);
        assert_eq!(done.out, "");
        assert!(
            !done.err.is_empty() && !done.err.contains("secret"),
            "{}",
            done.err
        );
    }
}

#[test]
fn without_a_url_one_line_says_what_is_missing() {
    let done = run("", ["run", "k", "--", "true"]);
    assert_eq!(done.code, Some(64));
    let said = "lockstream: no store: set LOCKSTREAM_URL, or give --url or --url-file\n";
    assert_eq!(done.err, said);
}

#[test]
fn a_store_that_is_not_there_is_told() {
    for url in [NOWHERE, "postgres://127.0.0.1:1/db?sslmode=disable"] {
        let done = run(url, ["run", "k", "--", "true"]);
        assert_eq!(done.code, Some(69), "{url}: {}", done.err);
        assert!(done.err.contains("127.0.0.1:1"), "{}", done.err);
    }
}

#[test]
fn help_and_version_are_no_errors() {
    for arguments in [&["--help"][..], &["run", "--help"], &["--version"]] {
        let done = run("", arguments);
        assert_eq!(done.code, Some(0));
        assert!(!done.out.is_empty() && done.err.is_empty());
    }
}

#[test]
fn a_busy_lock_is_75_or_what_was_asked_for() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let holder = Program::start(
            &server.url(),
            ["run", "k", "--", "sh", "-c", "echo up; sleep 600"],
        );
        holder.expect("up");
        for (options, code) in [
            (&["-n"][..], 75),
            (&["-n", "-E", "0"], 0),
            (&["--no-wait", "--busy-code", "3"], 3),
            (&["--wait", "200ms"], 75),
            (&["--wait", "200ms", "-E", "9"], 9),
            (&["-n", "--shared"], 75),
            (&["-n", "--permits", "3"], 75),
        ] {
            let arguments = [&["run"][..], options, &["k"], &COMMAND].concat();
            let done = run(&server.url(), &arguments);
            assert_eq!(done.code, Some(code), "{options:?}: {}", done.err);
            assert!(done.err.contains("\"k\" not acquired"), "{}", done.err);
            let quiet = [&arguments[..1], &["-q"], &arguments[1..]].concat();
            assert_eq!(run(&server.url(), quiet).err, "", "{options:?}");
        }
    });
}

/// The program ended before the server was told: `ls` showed a waiter that was gone for as long as its ttl.
#[test]
fn who_has_waited_in_vain_leaves_the_queue() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let holder = Program::start(
            &server.url(),
            ["run", "k", "--", "sh", "-c", "echo up; sleep 600"],
        );
        holder.expect("up");
        for keys in [&["k"][..], &["free", "k"]] {
            let arguments = [&["run", "--wait", "200ms"][..], keys, &COMMAND].concat();
            assert_eq!(run(&server.url(), &arguments).code, Some(75));
            assert_eq!(server.ask::<u64>(&["ZCARD", "{lock:k}:~queue2"]), 0);
            assert!(!server.exists("lock:free"));
        }
    });
}

/// It is not told for longer than a second that nobody waits any more.
#[test]
fn a_store_that_hangs_does_not_prolong_the_wait() {
    on_a_steady_machine_blocking(|| {
        let server = RedisServer::start();
        let holder = Program::start(
            &server.url(),
            ["run", "k", "--", "sh", "-c", "echo up; sleep 600"],
        );
        holder.expect("up");
        let waiter = Program::start(&server.url(), ["run", "--wait", "1s", "k", "--", "true"]);
        wait_until_blocking("it waits", SOON, || waiter.err().contains("waiting"));
        server.stop();
        let begin = Instant::now();
        let done = waiter.end();
        let took = begin.elapsed();
        server.cont();
        assert_eq!(done.code, Some(75), "{}", done.err);
        // The wait, and a second. It was three.
        assert!(took < Duration::from_millis(3_500), "{took:?}");
    });
}

#[test]
fn readers_and_permits_share_the_lock() {
    let server = RedisServer::start();
    let hold = |options: &[&'static str]| {
        let command = ["k", "--", "sh", "-c", "echo up; sleep 600"];
        let arguments = [&["run"][..], options, &command].concat();
        let program = Program::start(&server.url(), arguments);
        program.expect("up");
        program
    };
    let again = |options: &[&'static str]| {
        let arguments = [&["run", "-n"][..], options, &["k", "--", "true"]].concat();
        run(&server.url(), arguments).code
    };
    let reader = hold(&["--shared"]);
    assert_eq!(again(&["--shared"]), Some(0));
    assert_eq!(again(&[]), Some(75));
    reader.signal(rustix::process::Signal::TERM);
    assert_eq!(reader.end().code, Some(128 + 15));
    let _permits = [hold(&["--permits", "2"]), hold(&["--permits", "2"])];
    assert_eq!(again(&["--permits", "2"]), Some(75));
    // Of three one is left.
    assert_eq!(again(&["--permits", "3", "--weight", "2"]), Some(75));
    assert_eq!(again(&["--permits", "3", "--weight", "1"]), Some(0));
}

#[test]
fn a_key_is_kept_for_as_long_as_was_asked() {
    let server = RedisServer::start();
    let keep = [
        "run",
        "-n",
        "--ttl",
        "20s",
        "--keep-for",
        "1h",
        "k",
        "--",
        "true",
    ];
    assert_eq!(run(&server.url(), keep).code, Some(0));
    assert!(
        server.pttl("lock:k") > 3_500_000,
        "{}",
        server.pttl("lock:k")
    );
    assert_eq!(run(&server.url(), keep).code, Some(75));

    // Shorter than the ttl: it is the end of the command that says how long.
    let brief = ["run", "-n", "--keep-for", "20s", "brief", "--", "false"];
    assert_eq!(run(&server.url(), brief).code, Some(1));
    let left = server.pttl("lock:brief");
    assert!(left > 0 && left <= 20_000, "{left}");
    assert_eq!(run(&server.url(), brief).code, Some(75));
}

#[test]
fn a_key_is_kept_only_if_the_command_has_succeeded() {
    let server = RedisServer::start();
    let job = |command: &'static [&'static str]| {
        let options = [
            "run",
            "-n",
            "--keep-for",
            "1h",
            "--keep-on-success",
            "k",
            "--",
        ];
        run(&server.url(), [&options[..], command].concat()).code
    };
    assert_eq!(job(&["false"]), Some(1));
    assert!(!server.exists("lock:k"));
    assert_eq!(job(&["sh", "-c", "kill -TERM $$"]), Some(128 + 15));
    assert!(!server.exists("lock:k"));
    assert_eq!(job(&["no-such-command"]), Some(127));
    assert!(!server.exists("lock:k"));
    assert_eq!(job(&["true"]), Some(0));
    assert!(server.pttl("lock:k") > 3_500_000);
    assert_eq!(job(&["true"]), Some(75));
}

/// Each of the racers holds the lock alone, whether it waits or not.
#[test]
fn of_racers_one_works_at_a_time() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let script = format!("echo b >>{0}; sleep 0.05; echo e >>{0}", log.display());
    let race = |options: &[&'static str]| {
        let command = ["k", "--", "sh", "-c", script.as_str()];
        let arguments = [&["run"][..], options, &command].concat();
        let racers: Vec<_> = (0..5)
            .map(|_| Program::start(&server.url(), &arguments))
            .collect();
        racers
            .into_iter()
            .map(|racer| racer.end().code)
            .collect::<Vec<_>>()
    };
    assert_eq!(race(&[]), [Some(0); 5]);
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "b\ne\n".repeat(5));

    let holder = Program::start(
        &server.url(),
        ["run", "k", "--", "sh", "-c", "echo up; sleep 600"],
    );
    holder.expect("up");
    assert_eq!(race(&["-n"]), [Some(75); 5]);
    drop(holder);
}

#[test]
fn messages_are_lines_of_json_if_asked() {
    let server = RedisServer::start();
    let done = run(&server.url(), ["run", "--json", "k", "--", "true"]);
    let events: Vec<_> = done.err.lines().map(event).collect();
    assert_eq!(events, ["acquired", "released"], "{}", done.err);
    let done = run(NOWHERE, ["run", "--json", "k", "--", "true"]);
    assert_eq!(event(&done.err), "failed");
    assert!(done.err.contains("\"code\":69"), "{}", done.err);

    let _holder = Program::start(&server.url(), ["run", "k", "--", "sleep", "600"]);
    wait_until_blocking("k is held", SOON, || server.exists("lock:k"));
    let waiter = Program::start(&server.url(), ["run", "--json", "k", "--", "true"]);
    waiter.expect_said("\"event\":\"waiting\"");
    let late = run(
        &server.url(),
        ["run", "--json", "--wait", "3s", "k", "--", "true"],
    );
    assert!(late.err.contains("\"code\":75"), "{}", late.err);
}

fn event(line: &str) -> String {
    let value: serde_json::Value = serde_json::from_str(line).unwrap();
    value["event"].as_str().unwrap().to_owned()
}

/// The server is there when the wait begins and gone when it ends.
#[test]
fn a_server_that_goes_away_under_a_waiter_is_told() {
    let mut server = RedisServer::start();
    let _holder = Program::start(&server.url(), ["run", "k", "--", "sleep", "600"]);
    wait_until_blocking("k is held", SOON, || server.exists("lock:k"));
    let waiter = Program::start(&server.url(), ["run", "--wait", "8s", "k", "--", "true"]);
    let queue = ["ZCARD", "{lock:k}:~queue2"];
    wait_until_blocking("it waits", SOON, || server.ask::<u64>(&queue) == 1);
    server.kill();
    let done = waiter.end();
    assert_eq!(done.code, Some(69), "{}", done.err);
}

/// The command has done its work under the lock: only the release is in doubt, and the key expires.
#[test]
fn a_server_that_goes_away_before_the_release_does_not_change_the_code() {
    let mut server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    let flag = folder.path().join("flag");
    let script = format!(
        "echo up; while [ ! -e {} ]; do sleep 0.01; done; exit 5",
        flag.display()
    );
    let program = Program::start(
        &server.url(),
        ["run", "--ttl", "10m", "k", "--", "sh", "-c", &script],
    );
    program.expect("up");
    server.kill();
    std::fs::write(&flag, "").unwrap();
    let done = program.end();
    assert_eq!(done.code, Some(5), "{}", done.err);
    assert!(done.err.contains("not released within"), "{}", done.err);
    assert!(Duration::from_secs(600) > SOON, "the ttl outlasts the test");
}
