//! What `LockRegistry::check` says, and what it costs.

use lockstream::store::{MemoryStore, QuorumStore, RedisStore};
use lockstream::{Check, LockRegistry};

use crate::support::{Cluster, Program, Proxy, RedisServer, Way, least_rights, wait_until};
use crate::{BOUND, lazy};

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
        let check = lazy(&server.url()).check().await.unwrap();
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
    let check = lazy(&url).check().await.unwrap();
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
    let check = lazy(&url).check().await.unwrap();
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
    let check = lazy(&url).check().await.unwrap();
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
    let locks = lazy(&proxy.url());
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
    let check = lazy(&server.url()).check().await.unwrap();
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
    let locks = lazy(&url);
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

#[tokio::test]
async fn what_cannot_be_used_is_an_error() {
    let server = RedisServer::builder().config("requirepass secret").start();
    let port = server.port();
    let replica = RedisServer::builder()
        .config(format!("replicaof 127.0.0.1 {port}"))
        .config("masterauth secret")
        .start();
    let right = format!("redis://:secret@127.0.0.1:{port}/");
    assert_sound(&lazy(&right).check().await.unwrap(), 1);
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
        let error = lazy(&url).check().await.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
        assert_eq!(error.is_retryable(), is_retryable, "{error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let closed = lazy(&right);
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
    let locks = locks.build().unwrap();
    let check = locks.check().await.unwrap();
    assert_sound(&check, 3);
    assert!(
        !check.shares && check.to_string().contains("exclusive"),
        "{check}"
    );
    servers[2].kill();
    let check = locks.check().await.unwrap();
    assert_eq!((check.servers.len(), check.failed.len()), (2, 1), "{check}");
    servers[1].kill();
    let error = locks.check().await.unwrap_err();
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
