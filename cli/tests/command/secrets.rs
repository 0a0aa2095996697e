//! The password: not in the list of processes, not in the command's environment, not in messages.

use std::fs;
use std::path::Path;

use crate::program::{LOCKSTREAM, Program, run};
use crate::support::RedisServer;

const PASSWORD: &str = "sesame-7f";

fn server() -> RedisServer {
    RedisServer::builder()
        .config(format!("requirepass {PASSWORD}"))
        .start()
}

/// What the system shows of a process, and of those that it and they have started.
fn shown(pid: i32) -> Vec<String> {
    let read = |name: &str| fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let text = |name: &str| String::from_utf8_lossy(&read(name)).into_owned();
    let mut shown = vec![text("cmdline")];
    for child in text(&format!("task/{pid}/children")).split_whitespace() {
        let child = child.parse().unwrap();
        let environment = fs::read(format!("/proc/{child}/environ")).unwrap_or_default();
        shown.push(String::from_utf8_lossy(&environment).into_owned());
        shown.extend(self::shown(child));
    }
    shown
}

#[test]
fn nobody_else_sees_the_password() {
    let server = server();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("url");
    let url = server.url_with("", PASSWORD, 0);
    fs::write(&file, format!("{url}\n")).unwrap();
    let by_file = ["run", "--url-file", file.to_str().unwrap(), "k"];
    for (variable, arguments) in [("", &by_file[..]), (&url, &["run", "k"])] {
        let command = ["--", "sh", "-c", "echo up; exec sleep 600"];
        let program = Program::start(variable, [arguments, &command].concat());
        program.expect("up");
        if Path::new("/proc/self/stat").exists() {
            let shown = shown(program.pid().as_raw_pid());
            assert_eq!(
                shown.len(),
                5,
                "us, and two of the guardian and of the command: {shown:?}"
            );
            for text in &shown {
                assert!(!text.contains(PASSWORD), "{text:?}");
            }
        }
        program.signal(rustix::process::Signal::TERM);
        let done = program.end();
        assert_eq!(done.code, Some(128 + 15), "{done:?}");
    }
}

#[test]
fn no_error_shows_the_password() {
    let server = server();
    let port = server.port();
    for url in [
        format!("redis://:wrong-{PASSWORD}@127.0.0.1:{port}/"),
        format!("redis://:{PASSWORD}@127.0.0.1:1/"),
        format!("redis://:{PASSWORD}/x@127.0.0.1:{port}/"),
        format!("redis+cluster://:{PASSWORD}@127.0.0.1:{port}/"),
        format!("redis+sentinel://:{PASSWORD}@127.0.0.1:{port}/main?sentinel_password={PASSWORD}"),
        format!("rediss://:{PASSWORD}@127.0.0.1:{port}/"),
        format!("postgres://me:{PASSWORD}@127.0.0.1:1/db?sslmode=disable"),
        format!("http://me:{PASSWORD}@127.0.0.1:1/"),
    ] {
        for options in [&["run"][..], &["run", "--json"]] {
            // A Redis server says nothing to a client that begins with TLS.
            let within = ["--connect-timeout", "5s"];
            let done = run(&url, [options, &within, &["k", "--", "true"]].concat());
            assert!(matches!(done.code, Some(64 | 69)), "{url}: {done:?}");
            assert!(
                !done.err.is_empty() && !done.err.contains(PASSWORD),
                "{}",
                done.err
            );
        }
    }
}

#[test]
fn a_password_on_the_command_line_is_refused() {
    let server = server();
    let url = server.url_with("", PASSWORD, 0);
    // The list of processes shows that of a pooler, too.
    let pooled = format!("postgres%3A%2F%2Fapp%3A{PASSWORD}%40pooler%2Fshop");
    let by_pooler = format!("postgres://app@db/shop?pooled={pooled}");
    for url in [&url, &by_pooler] {
        let done = run("", ["run", "--url", url, "k", "--", "true"]);
        assert_eq!(done.code, Some(64), "{}", done.err);
        let told = "a password in --url is visible in the list of processes: use LOCKSTREAM_URL or --url-file";
        assert!(done.err.contains(told), "{}", done.err);
        assert!(!done.err.contains(PASSWORD), "{}", done.err);
    }
}

/// Who wants nested locks says so. The list of processes does not show it even then.
#[test]
fn a_command_gets_the_url_if_it_is_told_so() {
    let server = server();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("url");
    let url = server.url_with("", PASSWORD, 0);
    fs::write(&file, format!("{url}\n")).unwrap();
    let script = "\"$0\" run b -- env; exec sleep 600";
    for begin in [
        &["run", "--url-file", file.to_str().unwrap(), "a"][..],
        &["run", "a"],
        &["lead", "a"],
    ] {
        let options = ["--pass-url", "--", "sh", "-c", script, LOCKSTREAM];
        let program = Program::start(&url, [begin, &options].concat());
        program.expect("LOCKSTREAM_KEY=b\n");
        assert!(!program.out().contains(PASSWORD));
        if Path::new("/proc/self/stat").exists() {
            let mut lines = vec![program.pid().as_raw_pid()];
            while let Some(pid) = lines.pop() {
                let read = |name: &str| fs::read(format!("/proc/{pid}/{name}"));
                let line = read("cmdline").unwrap_or_default();
                assert!(!String::from_utf8_lossy(&line).contains(PASSWORD));
                let below = read(&format!("task/{pid}/children")).unwrap_or_default();
                let below = String::from_utf8(below).unwrap();
                lines.extend(
                    below
                        .split_whitespace()
                        .map(|pid| pid.parse::<i32>().unwrap()),
                );
            }
        }
        program.signal(rustix::process::Signal::TERM);
        assert_eq!(program.end().code, Some(128 + 15));
    }
}
