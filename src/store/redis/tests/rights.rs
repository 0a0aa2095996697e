//! Which rights the scripts need, told in one place and proved beforehand.

use std::collections::BTreeSet;

use super::support::least_rights;

const SCRIPTS: [&str; 3] = [
    include_str!("../batch.lua"),
    include_str!("../renew.lua"),
    include_str!("../inspect.lua"),
];

/// The commands that follow one of these in a script, as rights name them.
fn commands(script: &str, before: &[&str]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for before in before {
        for rest in script.split(before).skip(1) {
            let mut words = rest.split('\'');
            let name = words.next().unwrap().to_ascii_lowercase();
            found.insert(match &*name {
                "pubsub" => format!("{name}|{}", words.nth(1).unwrap().to_ascii_lowercase()),
                _ => name,
            });
        }
    }
    found
}

fn used() -> BTreeSet<String> {
    let calls = ["call('", "try('", "call, '"];
    let scripts = SCRIPTS.iter().map(|script| commands(script, &calls));
    let mut used: BTreeSet<_> = scripts.flatten().collect();
    // Of use to a quorum that keeps servers out after a restart, and to nobody else.
    assert!(used.remove("info"));
    used
}

/// Whoever lets a script do something new adds it there.
#[test]
fn o4_the_probe_tries_what_the_scripts_do() {
    let tried = commands(include_str!("../probe.lua"), &["  { '"]);
    let mut used = used();
    assert!(used.contains("zadd") && used.contains("pubsub|numsub"));
    // The probe does it in earnest, and goes without if it must.
    assert!(used.remove("publish"));
    assert_eq!(tried, used, "probe.lua, and what the scripts do");
}

/// Neither a right too few nor one too many; what `ping` is for, and all that a connection takes, is in Rust.
#[test]
fn the_page_names_what_the_scripts_do() {
    let mut needed = used();
    for command in [
        "client|info",
        "client|kill",
        "eval",
        "evalsha",
        "ping",
        "subscribe",
    ] {
        needed.insert(command.to_owned());
    }
    let rights = least_rights();
    let named = rights.iter().filter_map(|right| right.strip_prefix('+'));
    let named: BTreeSet<_> = named.map(str::to_owned).collect();
    assert_eq!(named, needed, "docs/operations.md, and what is needed");
}
