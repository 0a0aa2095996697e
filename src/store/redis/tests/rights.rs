//! Which rights the scripts need, told in one place and proved beforehand.

use std::collections::BTreeSet;

use super::registry::{HELD, Settings, attempt, refused, release, renew, won};
use super::support::{Program, RedisServer, least_rights};
use crate::store::contract::Outcome;
use crate::store::redis::script;

/// What the script calls, as rights name it.
fn used() -> BTreeSet<String> {
    let mut used = BTreeSet::new();
    for before in ["call('", "try('"] {
        for rest in script::TEXT.split(before).skip(1) {
            let name = rest.split('\'').next().unwrap().to_ascii_lowercase();
            used.insert(match &*name {
                "pubsub" => "pubsub|numsub".to_owned(),
                _ => name,
            });
        }
    }
    assert!(script::TEXT.contains("pcall(publish, ") && script::TEXT.contains("'PUBSUB', numsub"));
    used.insert("publish".to_owned());
    // Without it the script answers that the age of the server is unknown.
    assert!(used.remove("info"));
    used
}

/// Whoever lets a script do something new adds it there.
#[test]
fn o4_the_probe_tries_every_command_of_the_scripts() {
    let (_, rest) = script::TEXT.split_once("local needed = [[").unwrap();
    let (needed, _) = rest.split_once("]] .. numsub").unwrap();
    let tried: BTreeSet<_> = needed
        .split(',')
        .map(|command| match command.split_whitespace().next().unwrap() {
            "pubsub|" => "pubsub|numsub".to_owned(),
            name => name.to_owned(),
        })
        .collect();
    let mut used = used();
    assert!(used.contains("zadd") && used.contains("pubsub|numsub"));
    // The probe does it in earnest, and goes without if it must.
    assert!(used.remove("publish"));
    assert_eq!(tried, used, "what the probe tries, and what the ops do");
}

/// A server that minds one key of a call refuses the whole of it, before it runs.
#[tokio::test]
async fn s1_a_key_without_rights_harms_no_neighbour() {
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let user = "user x on >p resetkeys ~lock:~* ~{lock:~* ~lock:ours* ~{lock:ours* &* +@all";
        let server = RedisServer::builder().program(program).config(user).start();
        let url = server.url_with("x", "p", 0);
        let mut one = Settings::url(url, "a1").up().await;
        // Nothing of it is sent before the first await, so all that may share a call does. The
        // release stays behind its attempt (O2).
        for (key, owner) in [("ours1", 1), ("theirs", 2), ("ours2", 3)] {
            one.submit(key, attempt(owner));
        }
        one.submit("ours1", release(1));
        let (why, retryable) = refused(one.reply("theirs", &attempt(2)).await);
        assert!(why.contains("NOPERM") && !retryable, "{program:?}: {why}");
        for (key, owner) in [("ours1", 1), ("ours2", 3)] {
            won(&one.reply(key, &attempt(owner)).await.unwrap().outcome);
        }
        let released = one.reply("ours1", &release(1)).await.unwrap();
        assert_eq!(released.outcome, HELD, "{program:?}");

        // The other lanes share calls as well.
        let longer = 2 * super::registry::TTL;
        one.submit("theirs", renew(2, longer));
        one.submit("ours2", renew(3, longer));
        let looks = ["theirs", "ours2"].map(|key| one.session().inspect(key.into()));
        refused(one.reply("theirs", &renew(2, longer)).await);
        let renewed = one.reply("ours2", &renew(3, longer)).await.unwrap();
        assert_eq!(renewed.outcome, Outcome::Renewed, "{program:?}");
        let [theirs, ours] = futures::future::join_all(looks).await.try_into().unwrap();
        theirs.unwrap_err();
        assert_eq!(ours.unwrap().owner(), Some(one.text(3)), "{program:?}");
    }
}

/// A call of one is not sent again: it is refused for its own sake.
#[tokio::test]
async fn s1_a_refused_call_goes_again_op_by_op_once() {
    let calls = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = calls.clone();
    let fake = super::fake::Fake::start(move |request| {
        request.is_call().then(|| {
            seen.lock().unwrap().push(request.letters().to_owned());
            b"-NOPERM No permissions to access a key\r\n".to_vec()
        })
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    for owner in 1..4 {
        one.submit(&format!("k{owner}"), attempt(owner));
    }
    for owner in 1..4 {
        refused(one.reply(&format!("k{owner}"), &attempt(owner)).await);
    }
    assert_eq!(*calls.lock().unwrap(), ["AAA", "A", "A", "A"]);
}

/// Neither a right too few nor one too many; what the connection itself takes, such as `ping`, is in Rust.
#[test]
fn the_page_names_every_command_of_the_scripts() {
    let mut needed = used();
    for command in [
        "client|info",
        "client|kill",
        "eval",
        "evalsha",
        "info",
        "ping",
        "script|load",
        "subscribe",
    ] {
        needed.insert(command.to_owned());
    }
    let rights = least_rights();
    let named = rights.iter().filter_map(|right| right.strip_prefix('+'));
    let named: BTreeSet<_> = named.map(str::to_owned).collect();
    assert_eq!(named, needed, "docs/operations.md, and what is needed");
}
