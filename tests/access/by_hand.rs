//! What `docs/operations.md` tells a person to type is typed here.

use std::time::Duration;

use lockstream::{LockRegistry, Renewal};
use tokio::time::timeout;

use crate::support::{
    PATIENCE, Program, RedisServer, least_rights, on_a_steady_machine, wait_until,
};
use crate::{BOUND, WAIT, patient, told};

const PAGE: &str = include_str!("../../docs/operations.md");

/// The words of a line for a shell: what is in quotes is one.
fn words(line: &str) -> Vec<&str> {
    let parts = line.split('\'').enumerate();
    parts
        .flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().collect(),
            _ => vec![part],
        })
        .collect()
}

/// The commands for `redis-cli` on the page, in order.
fn commands() -> Vec<Vec<&'static str>> {
    let lines = PAGE.lines();
    lines
        .filter_map(|line| line.strip_prefix("redis-cli "))
        .map(words)
        .collect()
}

fn registry(url: &str) -> LockRegistry {
    let store = patient(url).connect_lazy().unwrap();
    LockRegistry::builder(store).wait(WAIT).build().unwrap()
}

/// Who holds and who waits is seen, the key is freed, and the first in the queue has it next.
#[tokio::test]
async fn a_key_is_looked_at_and_freed() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let (holding, waiting) = (registry(&server.url()), registry(&server.url()));
        // So long a waiter believes in it. It is renewed until it is deleted.
        let ttl = Duration::from_secs(3);
        let lock = holding.obtain("order:42").ttl(ttl);
        let lock = lock.renewal(Renewal::watchdog());
        let lease = lock.lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("order:42").lease());
        wait_until("one waits", BOUND, || server.keys("*").len() == 3).await;

        // The table of keys has these names, and there are no others.
        for key in server.keys("*") {
            assert!(PAGE.contains(&format!("| `{key}` |")), "{key}");
        }
        let [kind, get, members, pttl, queue, del] = &commands()[..] else {
            panic!("{:?}", commands())
        };
        assert_eq!(server.ask::<String>(kind), "string");
        let owner: String = server.ask(get);
        let (instance, number) = owner.split_once(':').expect("<registry>:<number>");
        assert!(number.parse::<u64>().is_ok(), "{owner}");
        let channels = server.channels();
        assert!(
            channels.contains(&format!("lock:~grant:{instance}")),
            "{channels:?}"
        );
        let left: i64 = server.ask(pttl);
        assert!((1..=3_000).contains(&left), "{left}");
        let tickets: Vec<String> = server.ask(queue);
        assert_eq!(tickets.len(), 1, "{tickets:?}");
        assert!(!tickets[0].contains(instance), "{tickets:?}");

        assert!(server.ask::<bool>(del), "there was something to delete");
        let next = timeout(BOUND + ttl, waiter).await.expect("it is served");
        let next = next.unwrap().unwrap();
        let now: String = server.ask(get);
        assert!(tickets[0].starts_with(&now), "{now}: {tickets:?}");
        // The other learns of it, and takes nothing from this one.
        assert!(lease.release().await.unwrap_err().is_lost());
        assert!(next.is_valid() && server.exists("lock:order:42"));
        next.release().await.unwrap();
        assert_eq!(server.keys("*"), ["lock:~fence"]);

        // Readers and permits are in a set.
        let cases = [
            (holding.obtain("order:42").shared(), ""),
            (holding.obtain("order:42").permits(4), " 1/4"),
        ];
        for (lock, suffix) in cases {
            let lease = lock.ttl(Duration::from_secs(60)).lease().await.unwrap();
            assert_eq!(server.ask::<String>(kind), "zset");
            let in_it: Vec<String> = server.ask(members);
            let owner = lease.owner().unwrap();
            assert_eq!(in_it.len(), 2, "{in_it:?}");
            assert_eq!(in_it[0], owner + suffix);
            assert!(in_it[1].parse::<u64>().is_ok(), "{in_it:?}");
            // The set's end is that of its lease, rounded up to a millisecond.
            assert!((1..=60_001).contains(&server.ask::<i64>(pttl)));
            lease.release().await.unwrap();
        }
    })
    .await;
}

/// A key with a hash tag of its own has its queue where the page says.
#[tokio::test]
async fn the_queue_of_a_key_with_a_hash_tag() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let (holding, waiting) = (registry(&server.url()), registry(&server.url()));
        let lease = holding.obtain("{order}:42").lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("{order}:42").lease());
        wait_until("one waits", BOUND, || server.keys("*").len() == 3).await;
        for key in server.keys("*") {
            let is_told = PAGE.contains(&format!("`{key}`")) || key == "lock:{order}:42";
            assert!(is_told, "{key}");
        }
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.expect("it is served");
        next.unwrap().unwrap().release().await.unwrap();
    })
    .await;
}

/// A database takes one right more, and its lack is named.
#[tokio::test]
async fn a_database_takes_the_right_to_select() {
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        a_database_takes_it(&RedisServer::builder().program(program).start()).await;
    }
}

async fn a_database_takes_it(server: &RedisServer) {
    server.cmd(&[&["ACL", "SETUSER"], &least_rights()[..]].concat());
    let url = server.url_with("lockstream", "password", 1);
    let waiter = registry(&url).obtain("k").lease();
    for error in [
        patient(&*url).connect().await.unwrap_err(),
        // Nobody waits for what will not pass.
        told(timeout(PATIENCE, waiter).await.expect("it is told")),
    ] {
        let told = error.to_string();
        let names = told.contains("no permissions") && told.to_lowercase().contains("select");
        assert!(names && !error.is_retryable(), "{told}");
    }
    server.cmd(&["ACL", "SETUSER", "lockstream", "+select"]);
    let store = patient(&*url).connect().await.unwrap();
    let locks = LockRegistry::builder(store).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    let there: String = server.ask(&["INFO", "keyspace"]);
    assert!(there.contains("db1:") && !there.contains("db0:"), "{there}");
    lease.release().await.unwrap();
}
