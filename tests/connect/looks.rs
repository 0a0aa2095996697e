//! What `LockRegistry::check` and `ping` say, and what they cost.

use lockstream::store::{MemoryStore, QuorumStore, RedisStore};
use lockstream::{Check, LockRegistry};

use crate::support::{Cluster, Program, Proxy, RedisServer, Way, least_rights, wait_until};
use crate::{BOUND, lazy};

/// A registry that has not connected, whose server may stand still for a while.
fn patient(url: &str) -> LockRegistry {
    let builder = LockRegistry::builder_for(url).unwrap();
    builder.response_timeout(BOUND).build().unwrap()
}

/// Every server is one that takes writes, and its way was measured.
fn assert_sound(check: &Check, servers: usize) {
    assert_eq!(check.servers.len(), servers, "{check}");
    assert!(check.failed.is_empty(), "{check}");
    assert!(!check.round_trip().is_zero(), "{check}");
    for server in &check.servers {
        assert!(server.version.is_some(), "{check}");
        assert!(check.to_string().contains(&server.address), "{check}");
    }
}

#[tokio::test]
async fn each_server_is_named_with_its_version() {
    for (program, name) in [
        (Program::Usual, ""),
        (Program::Valkey, "Valkey 9."),
        (Program::Redis8, "Redis 8."),
        (Program::Redis6, "Redis 6.2"),
    ] {
        let server = RedisServer::builder().program(program).start();
        let check = patient(&server.url()).check().await.unwrap();
        assert_sound(&check, 1);
        let checked = &check.servers[0];
        let version = checked.version.as_deref().unwrap();
        assert!(version.starts_with(name), "{check}");
        assert_eq!(checked.no_push, None);
        assert_eq!(checked.missing_rights, Vec::<String>::new());
        assert!(check.shares && checked.warnings.is_empty(), "{check}");
        assert_eq!(server.keys("*"), Vec::<String>::new(), "it writes nothing");
        // Its connection closes with it.
        crate::support::wait_until("it is gone", crate::BOUND, || server.clients().is_empty())
            .await;
    }
}

/// Rights that not everybody needs, an eviction policy, a server that cannot push: told, and no error.
#[tokio::test]
async fn what_is_missing_is_told() {
    let rights = least_rights().join(" ");
    let user = format!("user {rights}");
    let server = RedisServer::builder()
        .config(user)
        .config("maxmemory 100mb")
        .config("maxmemory-policy allkeys-lru")
        .start();
    let url = server.url_with("lockstream", "password", 0);
    let check = patient(&url).check().await.unwrap();
    assert_sound(&check, 1);
    assert_eq!(check.servers[0].missing_rights, ["scan"], "{check}");

    server.cmd(&[
        "ACL",
        "SETUSER",
        "lockstream",
        "-info",
        "-client|kill",
        "-publish",
    ]);
    let check = patient(&url).check().await.unwrap();
    let checked = &check.servers[0];
    assert_eq!(
        checked.missing_rights,
        ["info", "client|kill", "scan"],
        "{check}"
    );
    assert!(
        checked
            .version
            .as_deref()
            .is_some_and(|it| !it.ends_with(' ')),
        "from HELLO"
    );
    assert!(
        checked
            .no_push
            .as_deref()
            .is_some_and(|it| it.contains("publish")),
        "{check}"
    );

    server.cmd(&["ACL", "SETUSER", "lockstream", "+info"]);
    let check = patient(&url).check().await.unwrap();
    assert!(
        check.servers[0].warnings[0].contains("allkeys-lru"),
        "{check}"
    );
}

/// Each look sent the whole script, 33 KB, which the server had.
#[tokio::test]
async fn a_look_costs_one_connection_and_no_script() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let locks = patient(&proxy.url());
    locks.check().await.unwrap();
    server.reset_stats();
    let (accepted, bytes) = (proxy.accepted(), proxy.bytes().0);
    locks.check().await.unwrap();
    assert_eq!(proxy.accepted() - accepted, 1);
    let sent = proxy.bytes().0 - bytes;
    assert!(sent < 2000, "{sent} bytes");
    let calls = server.all_calls();
    for (command, times) in [("evalsha", 1), ("eval", 0), ("scan", 1), ("hello", 4)] {
        assert_eq!(server.calls(command), times, "{command}: {calls:?}");
    }
}

/// It made and deleted seventeen keys to see whether a proxy spreads them.
#[tokio::test]
async fn a_look_through_an_old_protocol_writes_nothing() {
    let server = RedisServer::builder()
        .config("rename-command HELLO \"\"")
        .start();
    let changes = || {
        let info: String = server.ask(&["INFO", "persistence"]);
        let line = info.lines().find(|it| it.starts_with("rdb_changes_since"));
        line.unwrap().to_owned()
    };
    let before = changes();
    let check = patient(&server.url()).check().await.unwrap();
    assert!(check.servers[0].no_push.is_some(), "{check}");
    assert_eq!(changes(), before);
}

/// The map of a cluster was asked for again for each of its primaries, and they were looked at one after the other: each
/// might take the whole time for connecting.
#[tokio::test]
async fn the_primaries_of_a_cluster_are_looked_at_side_by_side() {
    let cluster = Cluster::behind_proxies();
    let proxies = &cluster.proxies()[..3];
    // One node is asked for the map.
    let url = format!("redis+cluster://127.0.0.1:{}/", proxies[0].port());
    let locks = patient(&url);
    locks.check().await.unwrap();
    let accepted = || proxies.iter().map(Proxy::accepted).collect::<Vec<_>>();
    let before = accepted();
    assert_sound(&locks.check().await.unwrap(), 3);
    let made: u64 = accepted().iter().sum::<u64>() - before.iter().sum::<u64>();
    assert_eq!(made, 1 + 3);

    for proxy in &proxies[1..] {
        proxy.hold(Way::ToClient, true);
    }
    let before = accepted();
    let checking = tokio::spawn(locks.check());
    wait_until("both are asked", BOUND, || {
        (1..3).all(|index| accepted()[index] > before[index])
    })
    .await;
    for proxy in &proxies[1..] {
        proxy.hold(Way::ToClient, false);
    }
    // It may have been given up meanwhile.
    let _ = checking.await.unwrap();
}

/// All processes of a fleet asked the node for the map that the url names first.
#[tokio::test]
async fn any_node_of_a_cluster_is_asked_for_the_map() {
    let cluster = Cluster::without_replicas();
    for _ in 0..100 {
        RedisStore::connect(cluster.url()).await.unwrap();
    }
    for server in cluster.primaries() {
        // That one of three is never chosen happens once in 10^17 runs.
        assert!(server.calls("cluster|slots") > 0);
    }
}

/// A readiness probe by `check` said "not ready" of a process whose locks worked, since the server accepted no further
/// connection.
#[tokio::test]
async fn a_ping_makes_no_connection_if_there_is_one() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let locks = patient(&proxy.url());
    // The first makes it, as the first lock would.
    locks.ping().await.unwrap();
    // One that does not wait as long as some pauses between attempts to connect.
    let hasty = lazy(&proxy.url());
    let lease = hasty.obtain("hasty").lease().await.unwrap();
    lease.release().await.unwrap();
    proxy.refuse();
    let accepted = proxy.accepted();
    server.reset_stats();
    for _ in 0..10 {
        locks.ping().await.unwrap();
    }
    assert_eq!(proxy.accepted(), accepted);
    let calls = server.all_calls();
    // A call, and in it the time and a look at the key.
    assert_eq!(server.calls("evalsha"), 10, "{calls:?}");
    assert_eq!(calls.values().sum::<u64>(), 30, "{calls:?}");
    locks.check().await.unwrap_err();
    let lease = locks.obtain("k").lease().await.unwrap();
    lease.release().await.unwrap();

    // What it says is why there is no connection, and not only that there was no answer.
    proxy.cut();
    let refused = async || {
        let error = hasty.ping().await.unwrap_err();
        assert!(error.is_retryable(), "{error}");
        error.to_string().contains("refused")
    };
    // The first may still go to the connection that is cut.
    while !refused().await {}
    for _ in 0..3 {
        assert!(refused().await);
    }
}

/// Of a cluster each primary is asked that the registry uses, and no other.
#[tokio::test]
async fn a_ping_asks_each_primary_in_use() {
    let cluster = Cluster::behind_proxies();
    let locks = patient(&cluster.url());
    let asked = || {
        let primaries = cluster.primaries().iter();
        primaries.map(|it| it.calls("evalsha")).collect::<Vec<_>>()
    };
    locks.ping().await.unwrap();
    let used: Vec<_> = asked().iter().map(|calls| *calls > 0).collect();
    assert_eq!(used.iter().filter(|it| **it).count(), 1, "{used:?}");
    let homes = [0, 1].map(|home| {
        let mut keys = (0..).map(|n| format!("k{n}"));
        keys.find(|key| cluster.home(&format!("lock:{key}")) == home)
            .unwrap()
    });
    for key in &homes {
        let lease = locks.obtain(key).lease().await.unwrap();
        lease.release().await.unwrap();
    }
    let in_use: Vec<_> = (0..3).map(|index| index < 2 || used[index]).collect();
    let before = asked();
    locks.ping().await.unwrap();
    let each: Vec<_> = asked()
        .iter()
        .zip(&before)
        .map(|(after, it)| after - it)
        .collect();
    let expected: Vec<_> = in_use.iter().map(|it| u64::from(*it)).collect();
    assert_eq!(each, expected);

    // Locks of that primary do not work any more, whatever the others do.
    let lock = locks.obtain(&homes[0]);
    let _lease = lock.lease().await.unwrap();
    let proxy = &cluster.proxies()[0];
    proxy.refuse();
    proxy.cut();
    locks.ping().await.unwrap_err();
}

#[tokio::test]
async fn what_cannot_be_used_is_an_error() {
    let server = RedisServer::builder().config("requirepass secret").start();
    let port = server.port();
    let replica = RedisServer::builder()
        .config(format!("replicaof 127.0.0.1 {port}"))
        .config("masterauth secret")
        .start();
    let right = format!("redis://:secret@127.0.0.1:{port}/");
    assert_sound(&patient(&right).check().await.unwrap(), 1);
    for (url, word, is_retryable) in [
        (server.url(), "requires a password", false),
        (right.replace("secret", "wrong"), "WRONGPASS", false),
        (replica.url(), "READONLY", true),
        (
            format!("redis://:secret@127.0.0.1:{port}/99"),
            "DB index",
            false,
        ),
        ("redis://127.0.0.1:1/".to_owned(), "refused", true),
    ] {
        let error = patient(&url).check().await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(error.is_retryable(), is_retryable, "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let closed = patient(&right);
    closed.shutdown().await;
    assert!(closed.check().await.is_err());
}

#[tokio::test]
async fn a_quorum_can_be_used_if_a_majority_can() {
    let mut servers = [
        RedisServer::start(),
        RedisServer::start(),
        RedisServer::start(),
    ];
    let urls = servers.each_ref().map(RedisServer::url);
    let nodes: Result<Vec<_>, _> = urls.iter().map(RedisStore::connect_lazy).collect();
    let locks = LockRegistry::builder(QuorumStore::new(nodes.unwrap()).unwrap());
    let locks = locks.response_timeout(BOUND).build().unwrap();
    let check = locks.check().await.unwrap();
    assert_sound(&check, 3);
    assert!(
        !check.shares && check.to_string().contains("exclusive"),
        "{check}"
    );
    locks.ping().await.unwrap();
    servers[2].kill();
    let check = locks.check().await.unwrap();
    assert_eq!((check.servers.len(), check.failed.len()), (2, 1), "{check}");
    locks.ping().await.unwrap();
    servers[1].kill();
    let error = locks.check().await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let error = locks.ping().await.unwrap_err();
    assert!(error.to_string().contains("no majority of 2"), "{error}");
    assert!(error.is_retryable(), "{error}");
}

#[tokio::test]
async fn memory_is_a_store_as_well() {
    let store = MemoryStore::new();
    let locks = LockRegistry::builder(store.clone()).build().unwrap();
    let check = locks.check().await.unwrap();
    assert_eq!(check.servers[0].version.as_deref(), Some("memory"));
    store.set_offline(true);
    assert!(locks.check().await.is_err());
}
