//! `inspect`, `ls`, `watch` and `free`; completions and manual pages.

use std::time::{Duration, Instant};

use futures::future::try_join_all;
use lockstream::LockRegistry;
use rustix::process::Signal;
use serde_json::Value;

use crate::program::{Program, SOON, run};
use crate::support::{PgServer, Proxy, RedisServer, Way, wait_until_blocking};

fn hold(server: &RedisServer, options: &[&str]) -> Program {
    let command = ["--", "sh", "-c", "echo up; sleep 600"];
    let program = Program::start(&server.url(), [&["run"], options, &command].concat());
    program.expect("up");
    program
}

fn wait_for_waiter(server: &RedisServer, key: &str) {
    let queue = format!("{{lock:{key}}}:~queue2");
    wait_until_blocking("it waits", SOON, || {
        server.ask::<u64>(&["ZCARD", &queue]) == 1
    });
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn locks_are_listed_with_names_modes_and_waiters() {
    let server = RedisServer::start();
    let _holders = [
        hold(&server, &["--name", "alpha", "order:1"]),
        hold(&server, &["--name", "beta", "--shared", "doc:7"]),
        hold(&server, &["--name", "gamma", "--permits", "3", "gpu"]),
    ];
    let _waiter = Program::start(
        &server.url(),
        ["run", "--name", "delta", "order:1", "--", "true"],
    );
    wait_for_waiter(&server, "order:1");

    let mut all: Vec<_> = run(&server.url(), ["ls"])
        .out
        .lines()
        .map(str::to_owned)
        .collect();
    all.sort_unstable();
    let begin = ["doc:7\tbeta~", "gpu\tgamma~", "order:1\talpha~"];
    assert_eq!(all.len(), 3, "{all:?}");
    for (line, begin) in all.iter().zip(begin) {
        assert!(line.starts_with(begin), "{line}");
    }
    assert!(
        all[0].contains("(shared)") && all[0].ends_with("0 waiting"),
        "{}",
        all[0]
    );
    assert!(all[1].contains("(permit 1/3)"), "{}", all[1]);
    assert!(all[2].ends_with("1 waiting"), "{}", all[2]);

    let some = run(&server.url(), ["ls", "--json", "order:"]).out;
    let lock = json(&some);
    assert_eq!(
        (&lock["key"], &lock["waiting"]),
        (&"order:1".into(), &1.into())
    );
    assert_eq!(lock["holders"][0]["name"], "alpha");
    assert!(lock["holders"][0]["remaining_ms"].as_u64().unwrap() <= 30_000);
    assert_eq!(lock["queue"][0]["name"], "delta");
    assert_eq!(
        json(&run(&server.url(), ["inspect", "--json", "order:1"]).out)["key"],
        "order:1"
    );

    let shown = run(&server.url(), ["inspect", "order:1"]).out;
    assert!(shown.starts_with("order:1: held by alpha~"), "{shown}");
    assert!(shown.contains("order:1: waited for by delta~"), "{shown}");
    assert_eq!(run(&server.url(), ["inspect", "a}"]).code, Some(64));
    assert_eq!(run(&server.url(), ["ls", "--prefix", "other"]).out, "");
}

/// What somebody else has put there is shown, and cannot write to the terminal; what is no lock hides nothing.
#[test]
fn values_of_others_are_shown() {
    let server = RedisServer::start();
    server.set("lock:theirs", "\u{1b}[2Jvalue");
    server.cmd(&["HSET", "lock:hash", "a", "b"]);
    let _holder = hold(&server, &["ours"]);
    let done = run(&server.url(), ["ls"]);
    assert!(
        done.out.contains("theirs\t\u{fffd}[2Jvalue without an end"),
        "{done:?}"
    );
    assert!(done.out.contains("ours\t"), "{done:?}");
    assert!(done.err.contains("\"hash\""), "{done:?}");
    assert_eq!(done.code, Some(69));
    let free = run(&server.url(), ["free", "--yes", "theirs"]);
    assert_eq!(free.code, Some(64), "{free:?}");
    assert!(server.exists("lock:theirs"));
}

/// The holder was killed, and the server's clock set back by an hour: its lock stays for as long. Nobody can be wrong about a
/// lock that says so.
#[test]
fn a_lock_that_lasts_longer_than_its_ttl_is_told() {
    let server = RedisServer::start();
    let take_for = |millis| server.cmd(&["SET", "lock:k", "alpha~0:1", "PX", millis]);
    take_for("3659000");
    let shown = run(&server.url(), ["inspect", "k"]).out;
    assert!(shown.contains("held by alpha~0:1 for 60m"), "{shown}");
    for options in [&["run", "k"][..], &["lead", "k"]] {
        take_for("3659000");
        let waiter = Program::start(&server.url(), [options, &["--", "true"]].concat());
        let told =
            "waiting for lock \"k\", held by alpha for 60m, longer than the 30s asked for here";
        waiter.expect_said(told);
    }
    // What others have for no longer than is usual is no news.
    take_for("29000");
    let waiter = Program::start(&server.url(), ["run", "k", "--", "true"]);
    waiter.expect_said("waiting for lock \"k\", held by alpha for 2");
    assert!(!waiter.err().contains("longer than"), "{}", waiter.err());
}

/// Who is in the way, by name.
#[test]
fn a_waiter_says_who_has_the_lock() {
    let server = RedisServer::start();
    let _readers = ["a", "b", "c", "d"].map(|name| hold(&server, &["--name", name, "-s", "k"]));
    let waiter = Program::start(&server.url(), ["run", "--json", "k", "--", "true"]);
    waiter.expect_said("waiting");
    let waiting = json(&waiter.err());
    assert_eq!(waiting["holders"].as_array().map(Vec::len), Some(4));
    assert_eq!(waiting["holders"][0]["mode"], "shared");
    let text = waiting["message"].as_str().unwrap();
    assert_eq!(text.matches(" (shared) for ").count(), 3, "{text}");
    let names = ["a", "b", "c", "d"].map(|name| text.contains(&format!(" {name} (shared)")));
    assert_eq!(
        names.iter().filter(|is_told| **is_told).count(),
        3,
        "{text}"
    );
    assert!(text.ends_with(" and 1 more"), "{text}");
}

#[test]
fn looking_needs_the_right_to_scan() {
    let rights = "user looker on >pw ~* &* +@all -scan";
    let server = RedisServer::builder().config(rights).start();
    let url = server.url_with("looker", "pw", 0);
    let done = run(&url, ["ls"]);
    assert_eq!(done.code, Some(69));
    assert!(done.err.contains("scan"), "{}", done.err);
    assert_eq!(run(&url, ["inspect", "k"]).code, Some(0));
}

#[test]
fn a_lock_is_freed_only_when_told_twice() {
    let server = RedisServer::start();
    let holder = hold(
        &server,
        &["--ttl", "9s", "--kill-after", "3s", "--name", "alpha", "k"],
    );
    let next = Program::start(
        &server.url(),
        [
            "run",
            "--name",
            "beta",
            "k",
            "--",
            "sh",
            "-c",
            "echo next; sleep 600",
        ],
    );
    wait_for_waiter(&server, "k");

    let asked = run(&server.url(), ["free", "k"]);
    assert_eq!(asked.code, Some(0));
    assert!(
        asked.err.contains("held by alpha~") && asked.err.contains("--yes"),
        "{}",
        asked.err
    );
    assert!(server.get("lock:k").unwrap().starts_with("alpha~"));

    let freed = run(&server.url(), ["free", "--yes", "k"]);
    assert_eq!(freed.code, Some(0), "{freed:?}");
    assert!(
        freed.err.contains("lock \"k\" taken from alpha~"),
        "{}",
        freed.err
    );
    // Whoever waits is served, and the holder's command is stopped.
    next.expect("next");
    assert_eq!(holder.end().code, Some(76));
    assert!(server.get("lock:k").unwrap().starts_with("beta~"));

    let free = run(&server.url(), ["free", "--yes", "nobody"]);
    assert_eq!(
        (free.code, free.err.contains("is free")),
        (Some(0), true),
        "{free:?}"
    );
    let _reader = hold(&server, &["--shared", "doc"]);
    let shared = run(&server.url(), ["free", "--yes", "doc"]);
    assert_eq!(shared.code, Some(64), "{shared:?}");
    assert!(shared.err.contains("shared"), "{}", shared.err);
}

/// One stuck reader, or one permit, and no other.
#[test]
fn one_of_those_who_share_a_lock_is_freed_by_name() {
    let server = RedisServer::start();
    let url = server.url();
    let free = |options: &[&str]| run(&url, [&["free"], options, &["k"]].concat());
    for mode in [&["-s"][..], &["--permits", "2"]] {
        let options = ["--ttl", "9s", "--kill-after", "3s", "k", "--name"];
        let hold_as = |name| hold(&server, &[mode, &options, &[name]].concat());
        let (alpha, beta) = (hold_as("alpha"), hold_as("beta"));
        let unnamed = free(&["--yes"]);
        assert_eq!(unnamed.code, Some(64), "{}", unnamed.err);
        assert!(unnamed.err.contains("--holder"), "{}", unnamed.err);
        let stranger = free(&["--yes", "--holder", "gamma"]);
        assert_eq!(stranger.code, Some(75), "{}", stranger.err);
        let asked = free(&["--holder", "alpha"]);
        assert_eq!(asked.code, Some(0));
        assert!(asked.err.contains("held by alpha~"), "{}", asked.err);
        let freed = free(&["--yes", "--holder", "alpha"]);
        assert_eq!(freed.code, Some(0), "{}", freed.err);
        assert_eq!(alpha.end().code, Some(76));
        let shown = run(&url, ["inspect", "k"]).out;
        assert!(
            shown.contains("beta~") && !shown.contains("alpha~"),
            "{shown}"
        );
        beta.signal(Signal::TERM);
        assert_eq!(beta.end().code, Some(128 + 15));
    }
    // Two of one name are told apart by their owners.
    let same = ["--name", "same", "-s", "k"];
    let _both = [hold(&server, &same), hold(&server, &same)];
    let several = free(&["--yes", "--holder", "same"]);
    assert_eq!(several.code, Some(64), "{}", several.err);
    let holders = json(&run(&url, ["inspect", "--json", "k"]).out)["holders"].take();
    let owner = holders[0]["owner"].as_str().unwrap();
    assert_eq!(free(&["--yes", "--holder", owner]).code, Some(0));
    // What is no holder of ours, too, if it is named.
    server.set("lock:theirs", "value");
    let named = run(&url, ["free", "--yes", "--holder", "value", "theirs"]);
    assert_eq!(named.code, Some(0), "{}", named.err);
    assert!(!server.exists("lock:theirs"));
}

/// A hundred holders are shown, those whose leases end first. Of the last of 300 readers it said that it held nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_is_not_shown_is_freed_by_its_owner() {
    let (redis, postgres) = (RedisServer::start(), PgServer::start());
    for url in [redis.url(), postgres.url()] {
        let named = |name: &str| {
            let locks = LockRegistry::builder_for(&url).unwrap();
            let locks = locks.response_timeout(Duration::from_secs(5));
            locks.name(name).build().unwrap()
        };
        let (early, late) = (named("early"), named("late"));
        let early = early.obtain("k").shared().ttl(Duration::from_secs(600));
        let early = try_join_all((0..110).map(|_| early.lease())).await.unwrap();
        let late = late.obtain("k").shared().ttl(Duration::from_secs(3600));
        let late = late.lease().await.unwrap();
        let owner = late.owner().unwrap();
        let free = |options: &[&str]| run(&url, [&["free", "k", "--holder"], options].concat());
        let by_name = free(&["late", "--yes"]);
        assert_eq!(by_name.code, Some(75), "{}", by_name.err);
        let told = "\"late\" is not among the first 100 holders of lock \"k\"";
        assert!(by_name.err.contains(told), "{}", by_name.err);
        let asked = free(&[&owner]);
        assert_eq!(asked.code, Some(0), "{}", asked.err);
        assert!(asked.err.contains("give --yes"), "{}", asked.err);
        late.verify().await.unwrap();
        let freed = free(&[&owner, "--yes"]);
        assert_eq!(freed.code, Some(0), "{}", freed.err);
        assert!(freed.err.contains("taken from late~"), "{}", freed.err);
        late.verify().await.unwrap_err();
        let again = free(&[&owner, "--yes"]);
        assert_eq!(again.code, Some(75), "{}", again.err);
        drop(early);
    }
}

/// Each change is a line, from the wait to the release.
#[test]
fn changes_are_watched() {
    let server = RedisServer::start();
    let holder = hold(&server, &["--ttl", "10m", "--name", "alpha", "k"]);
    let watch = |options: &[&str]| {
        Program::start(
            &server.url(),
            [&["watch", "--every", "100ms"], options].concat(),
        )
    };
    let (plain, json_lines) = (watch(&[]), watch(&["--json", "k"]));
    plain.expect("k\theld\talpha\talpha~");
    json_lines.expect("\"name\":\"alpha\"");
    let waiter = Program::start(&server.url(), ["run", "--name", "beta", "k", "--", "true"]);
    plain.expect("k\twaits\tbeta\tbeta~");
    holder.signal(Signal::TERM);
    assert_eq!(holder.end().code, Some(128 + 15));
    assert_eq!(waiter.end().code, Some(0));
    plain.expect("k\tfree\n");
    json_lines.expect("\"holders\":[]");
    for line in json_lines.out().lines() {
        assert_eq!(json(line)["key"], "k");
    }
    for watching in [plain, json_lines] {
        watching.signal(Signal::INT);
        assert_eq!(watching.end().code, Some(128 + 2));
    }
}

/// A look at a large database takes long, and the next one began at its end: the server did nothing else. An answer that
/// is a second on its way stands in for it.
#[test]
fn a_watch_pauses_after_a_slow_look() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let options = ["watch", "--every", "100ms", "--response-timeout", "1m"];
    let _watching = Program::start(&proxy.url(), options);
    wait_until_blocking("it looks", SOON, || server.calls("scan") >= 2);
    proxy.delay(Way::ToClient, Duration::from_secs(1));
    let calls = server.calls("scan");
    let mut before = Instant::now();
    wait_until_blocking("a look is slow", SOON, || {
        let at = Instant::now();
        let asks = server.calls("scan") > calls;
        if !asks {
            before = at;
        }
        asks
    });
    wait_until_blocking("it looks again", SOON, || server.calls("scan") > calls + 1);
    let later = before.elapsed();
    // A second, and four times as long.
    assert!(later >= Duration::from_secs(5), "{later:?}");
}

/// The server is away for a while, and the watch goes on.
#[test]
fn a_watch_outlives_an_outage() {
    let mut server = RedisServer::start();
    let watching = Program::start(&server.url(), ["watch", "--every", "100ms"]);
    let first = hold(&server, &["first"]);
    watching.expect("first\theld");
    server.kill();
    watching.expect_said("failed");
    server.restart();
    drop(first);
    let _second = hold(&server, &["second"]);
    watching.expect("second\theld");
}

#[test]
fn completions_and_manual_pages_know_every_command() {
    let commands = [
        "run", "lead", "hold", "renew", "release", "inspect", "ls", "watch", "free", "check",
        "migrate",
    ];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let done = run("", ["completions", shell]);
        assert_eq!((done.code, &*done.err), (Some(0), ""), "{shell}");
        for command in commands {
            assert!(done.out.contains(command), "{shell}: {command}");
        }
    }
    let page = run("", ["man"]).out;
    for command in commands {
        assert!(
            page.contains(&format!("lockstream\\-{command}(1)")),
            "{command}"
        );
        let own = run("", ["man", command]);
        assert_eq!(own.code, Some(0));
        assert!(
            own.out.contains(&format!(".TH lockstream-{command} 1")),
            "{}",
            own.out
        );
    }
    assert_eq!(run("", ["man", "guardian"]).code, Some(64));
    assert_eq!(run("", ["completions", "no-shell"]).code, Some(64));
}

/// Whatever can be said on the command line is on the page, and so is every exit code.
#[test]
fn the_page_tells_of_every_option() {
    const PAGE: &str = include_str!("../../../docs/command-line.md");
    let mut options = 0;
    for command in [
        "run", "lead", "hold", "renew", "release", "inspect", "ls", "watch", "free", "check",
        "migrate",
    ] {
        let has_row = |end: char| PAGE.contains(&format!("| `{command}{end}"));
        assert!(has_row(' ') || has_row('`'), "{command}");
        let help = run("", [command, "-h"]).out;
        let words = help.split(|c: char| c.is_whitespace() || ",[]<>".contains(c));
        for option in words.filter(|word| word.starts_with("--") && word.len() > 2) {
            options += 1;
            let is_told = PAGE.contains(option);
            let has_short = ["--help", "--no-wait", "--busy-code", "--quiet"].contains(&option);
            assert!(is_told || has_short, "{option}");
        }
    }
    assert!(options > 40, "{options}");
    for code in ["64", "69", "75", "76", "124", "126"] {
        assert!(PAGE.contains(&format!("| {code}")), "{code}");
    }
}
