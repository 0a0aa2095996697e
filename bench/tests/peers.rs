//! The program that measures lockstream beside libraries of other languages, with those that any machine has that runs the
//! tests.

#[path = "../../tests/support/steady.rs"]
#[allow(unreachable_pub, dead_code, reason = "other tests use the rest of it")]
mod steady;

use std::process::Command;

use serde_json::Value;
use steady::on_a_steady_machine_blocking;

fn peers(args: &[&str]) -> (bool, String, String) {
    peers_with(&[], args)
}

/// The same with these variables.
fn peers_with(variables: &[(&str, &str)], args: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_peers"))
        .args(args)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.success(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn ours_bare_commands_and_python_are_measured_side_by_side() {
    on_a_steady_machine_blocking(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let (json, plot) = (path("peers.json"), path("peers.svg"));
        let (done, out, said) = peers(&[
            "--only",
            "lockstream,bare,redis-py",
            "--scenario",
            "free-8,hot,hot-processes,first",
            "--rounds",
            "1",
            "--secs",
            "1",
            "--json",
            &json,
            "--plot",
            &plot,
        ]);
        assert!(done, "{out}{said}");
        let all: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(all["left_out"], Value::Array(Vec::new()), "{said}");
        let results = all["results"].as_array().unwrap();
        assert_eq!(results.len(), 3 * 4);
        for result in results {
            assert_eq!(result["failure"], Value::Null, "{result}");
            let figures = result["figures"].as_array().unwrap();
            let figure = |name: &str| {
                let mut found = figures.iter().filter(|one| one["figure"] == name);
                found.next().map(|one| one["value"].as_f64().unwrap())
            };
            if result["scenario"] != "first" {
                let rate = figure("pairs").or(figure("acquisitions"));
                assert!(rate.unwrap() > 0.0, "{result}");
                assert_eq!(figure("overlaps"), Some(0.0), "{result}");
                assert_eq!(figure("hung"), Some(0.0), "{result}");
            }
        }
        assert!(
            out.contains("### hot-processes") && out.contains("| redis-py |"),
            "{out}"
        );
        assert!(std::fs::read_to_string(&plot).unwrap().contains("redis-py"));
        // The same again, of the file alone.
        let (done, again, said) = peers(&[
            "--from",
            &json,
            "--scenario",
            "free-8,hot,hot-processes,first",
        ]);
        assert!(done && again == out, "{again}{said}");
        // What is not whole does not come into the repository's pages.
        let (done, _, said) = peers(&["--from", &json, "--pages"]);
        assert!(
            !done && said.starts_with("--pages wants a whole run"),
            "{said}"
        );
    });
}

#[test]
fn what_is_not_there_is_said() {
    let (done, _, said) = peers(&["--only", "lockstream,nobody"]);
    assert!(
        !done && said.contains("there is no peer \"nobody\"; there are: lockstream, "),
        "{said}"
    );
    let (done, _, said) = peers(&["--scenario", "free-2"]);
    assert!(
        !done && said.contains("there is no scenario \"free-2\""),
        "{said}"
    );
    let (done, _, said) = peers(&["--rounds", "0"]);
    assert!(
        !done && said.contains("'0' for '--rounds <N>': 0 is not in 1..=20"),
        "{said}"
    );
    let (done, _, said) = peers(&["--from", "/", "--secs", "1"]);
    assert!(
        !done && said.contains("'--from <FILE>' cannot be used with '--secs <N>'"),
        "{said}"
    );
    let (done, _, said) = peers(&["--from", "/nowhere/peers.json"]);
    assert!(!done && said.starts_with("/nowhere/peers.json: "), "{said}");
    let (done, _, said) = peers(&["--pages", "--only", "lockstream"]);
    assert!(
        !done && said.contains("'--pages' cannot be used with '--only <A,B>'"),
        "{said}"
    );
    let (done, out, _) = peers(&["--list"]);
    assert!(done && out.contains("redisson-fair") && out.contains("hand-over"));
}

/// It was a panic, in which the figures of all others were lost.
#[test]
fn peers_whose_server_is_missing_are_left_out() {
    on_a_steady_machine_blocking(|| {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("peers.json").display().to_string();
        let both = "lockstream,lockstream-postgres,sqlx-advisory";
        let run = ["--scenario", "free-1", "--rounds", "1", "--secs", "0.2"];
        let no_postgres = ("LOCKSTREAM_POSTGRES_BIN", "/nowhere");
        let args = [&["--only", both, "--json", &json][..], &run].concat();
        let (done, out, said) = peers_with(&[no_postgres], &args);
        assert!(done, "{out}{said}");
        let all: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
        assert_eq!(all["left_out"].as_array().unwrap().len(), 2, "{said}");
        assert_eq!(all["results"].as_array().unwrap().len(), 1, "{said}");
        for peer in ["lockstream-postgres", "sqlx-advisory"] {
            let told =
                format!("leaves out {peer}: LOCKSTREAM_POSTGRES_BIN is /nowhere, which lacks");
            assert!(said.contains(&told), "{said}");
        }
        assert!(out.contains("sqlx-advisory"), "{out}");

        let no_redis = ("LOCKSTREAM_REDIS_SERVER", "/nowhere");
        let args = [&["--only", "lockstream"][..], &run].concat();
        let (done, _, said) = peers_with(&[no_redis], &args);
        assert!(
            !done && said.ends_with("nobody is left to be measured\n"),
            "{said}"
        );
        assert!(
            said.contains("leaves out lockstream: LOCKSTREAM_REDIS_SERVER is /nowhere: "),
            "{said}"
        );
    });
}
