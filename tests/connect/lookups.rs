//! Names of servers, as some resolvers and services give them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use lockstream::LockRegistry;
use lockstream::store::RedisStore;

use crate::support::{
    Cluster, Lookups, PATIENCE, Proxy, RedisServer, Role, Watched, Way, on_a_steady_machine,
};
use crate::{BOUND, lazy, ms, spawn, told};

/// What a process does that finds the server by its name.
pub(crate) async fn run(role: &mut Role) {
    let url = role.env("URL");
    match role.name() {
        // Each way in by itself: the first connection of each is a slow one.
        "takes" => {
            let once = lazy(&url).obtain("once").acquire_once().await;
            role.say(format_args!("once {once:?}"));
            let lease = lazy(&url).obtain("lease").lease().await;
            role.say(format_args!("lease {}", lease.is_ok()));
            let connected = LockRegistry::connect(&url).await;
            let locks = connected.unwrap_or_else(|error| panic!("{error}"));
            let check = locks.check().await;
            role.say(format_args!("check {}", check.is_ok()));
        }
        "gives up" => {
            let store = RedisStore::builder(&url).connect_timeout(ms(2_500));
            let locks = LockRegistry::builder(store.connect_lazy().unwrap());
            let locks = locks.response_timeout(BOUND).build().unwrap();
            let error = locks.obtain("k").lease_once().await;
            role.say(format_args!("error {}", told(error)));
        }
        "is timed" => {
            let begin = Instant::now();
            let lease = lazy(&url).obtain("lease").lease_within(2 * BOUND).await;
            assert!(lease.is_ok(), "{lease:?}");
            role.say(format_args!("millis {}", begin.elapsed().as_millis()));
        }
        other => panic!("no such role: {other}"),
    }
}

/// In a cluster of containers a name that is looked up along a search path takes a second and more. The look-up, the
/// connection and the greeting had the response time-out of one call: no attempt ever succeeded.
#[tokio::test]
async fn a_slow_look_up_only_delays() {
    on_a_steady_machine(async || {
        let (server, lookups) = (RedisServer::start(), Lookups::compile());
        let url = format!("redis://localhost:{}/", server.port());
        let env = [
            ("URL", &*url),
            ("LD_PRELOAD", lookups.library()),
            ("LOOKUP_MILLIS", "1500"),
        ];
        let worker = spawn("takes", &env);
        assert_eq!(worker.expect_line("once", PATIENCE).await, " Ok(true)");
        assert_eq!(worker.expect_line("lease", PATIENCE).await, " true");
        assert_eq!(worker.expect_line("check", PATIENCE).await, " true");
    })
    .await;
}

/// So do those of sentinels and of the nodes of a cluster, each of which is looked up before its servers are.
#[tokio::test]
async fn a_slow_look_up_only_delays_sentinels_and_clusters() {
    on_a_steady_machine(async || {
        let (watched, cluster) = (Watched::start(), Cluster::without_replicas());
        let lookups = Lookups::compile();
        let urls = [watched.url(), cluster.url()];
        let urls = urls.map(|url| url.replace("127.0.0.1", "localhost"));
        for url in &urls {
            let env = [
                ("URL", &**url),
                ("LD_PRELOAD", lookups.library()),
                ("LOOKUP_MILLIS", "1200"),
            ];
            let worker = spawn("takes", &env);
            assert_eq!(
                worker.expect_line("once", PATIENCE).await,
                " Ok(true)",
                "{url}"
            );
            assert_eq!(
                worker.expect_line("lease", PATIENCE).await,
                " true",
                "{url}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn a_look_up_that_takes_longer_than_the_time_to_connect_is_named() {
    let (server, lookups) = (RedisServer::start(), Lookups::compile());
    let url = format!("redis://localhost:{}/", server.port());
    let env = [
        ("URL", &*url),
        ("LD_PRELOAD", lookups.library()),
        ("LOOKUP_MILLIS", "90000"),
    ];
    let worker = spawn("gives up", &env);
    let error = worker.expect_line("error", PATIENCE).await;
    assert!(
        error.contains("the look-up of its name timed out"),
        "{error}"
    );
}

/// Sends what comes to this port of another address on to a server.
fn forward(from: &str, to: u16) {
    let listener = TcpListener::bind(from).unwrap();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            relay(client, to);
        }
    });
}

/// Sends what comes on one connection on to a server, and back.
pub(crate) fn relay(mut client: TcpStream, to: u16) {
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", to)) else {
        return;
    };
    let (mut back, mut forth) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    thread::spawn(move || std::io::copy(&mut client, &mut forth));
    thread::spawn(move || std::io::copy(&mut server, &mut back));
}

/// A service of containers has one name for a primary and its replicas. Whichever answered first was taken, at each
/// attempt anew, and took no writes.
#[tokio::test]
async fn of_several_addresses_the_one_that_takes_writes_is_used() {
    let (primary, lookups) = (RedisServer::start(), Lookups::compile());
    let port = primary.port();
    let replica = RedisServer::builder()
        .config(format!("replicaof 127.0.0.1 {port}"))
        .start();
    forward(&format!("127.0.0.2:{port}"), replica.port());
    let url = format!("redis://redis-headless:{port}/?response_timeout=10");
    let env = [
        ("URL", &*url),
        ("LD_PRELOAD", lookups.library()),
        ("LOOKUP_NAME", "redis-headless"),
        ("LOOKUP_FIRST", "127.0.0.2"),
        ("LOOKUP_SECOND", "127.0.0.1"),
    ];
    let worker = spawn("takes", &env);
    assert_eq!(worker.expect_line("once", PATIENCE).await, " Ok(true)");
    assert_eq!(worker.expect_line("lease", PATIENCE).await, " true");
    assert_eq!(worker.expect_line("check", PATIENCE).await, " true");
}

/// If none can be used, the error has the reason of each.
#[tokio::test]
async fn if_no_address_can_be_used_each_is_told() {
    let (gone, lookups) = (RedisServer::start(), Lookups::compile());
    let port = gone.port();
    let replica = RedisServer::builder()
        .config("replicaof 127.0.0.1 1")
        .config("replica-serve-stale-data yes")
        .start();
    drop(gone);
    forward(&format!("127.0.0.2:{port}"), replica.port());
    let url = format!("redis://redis-headless:{port}/");
    let env = [
        ("URL", &*url),
        ("LD_PRELOAD", lookups.library()),
        ("LOOKUP_NAME", "redis-headless"),
        ("LOOKUP_FIRST", "127.0.0.2"),
        ("LOOKUP_SECOND", "127.0.0.1"),
    ];
    let worker = spawn("gives up", &env);
    let told = worker.expect_line("error", PATIENCE).await;
    assert!(told.contains("READONLY"), "{told}");
    assert!(told.contains("Connection refused"), "{told}");
}

/// Each address that did not finish within 250 ms had another set-up beside it, at the next address of the same server.
#[tokio::test]
async fn a_slow_server_with_two_addresses_sees_one_set_up() {
    let (server, lookups) = (RedisServer::start(), Lookups::compile());
    let proxy = Proxy::to(&server);
    let port = proxy.port();
    forward(&format!("127.0.0.2:{port}"), port);
    on_a_steady_machine(async || {
        // A set-up takes two of these, and the second address has its turn after 11.25 s.
        proxy.delay(Way::ToServer, ms(700));
        let url = format!("redis://redis-headless:{port}/?connect_timeout=30&response_timeout=10");
        let env = [
            ("URL", &*url),
            ("LD_PRELOAD", lookups.library()),
            ("LOOKUP_NAME", "redis-headless"),
            ("LOOKUP_FIRST", "127.0.0.1"),
            ("LOOKUP_SECOND", "127.0.0.2"),
        ];
        let before = proxy.accepted();
        spawn("is timed", &env)
            .expect_line("millis", PATIENCE)
            .await;
        assert_eq!(proxy.accepted() - before, 1);
    })
    .await;
}

/// Nobody answers there, not even with a refusal: its queue of connections is full.
fn black_hole(at: SocketAddr) -> (tokio::net::TcpListener, Vec<TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(at).unwrap();
    let listener = socket.listen(1).unwrap();
    let connect = |_| TcpStream::connect_timeout(&at, ms(200)).ok();
    let waiting = (0..10).map_while(connect).collect::<Vec<_>>();
    assert!(waiting.len() < 10, "it accepts more than it should");
    (listener, waiting)
}

#[tokio::test]
async fn an_address_that_swallows_packets_costs_a_quarter_of_a_second() {
    let (server, lookups) = (RedisServer::start(), Lookups::compile());
    let port = server.port();
    let _gone = black_hole(SocketAddr::from(([127, 0, 0, 2], port)));
    on_a_steady_machine(async || {
        let url = format!("redis://redis-headless:{port}/?connect_timeout=60");
        let env = [
            ("URL", &*url),
            ("LD_PRELOAD", lookups.library()),
            ("LOOKUP_NAME", "redis-headless"),
            ("LOOKUP_FIRST", "127.0.0.2"),
            ("LOOKUP_SECOND", "127.0.0.1"),
        ];
        let worker = spawn("is timed", &env);
        let millis: u64 = worker
            .expect_line("millis", PATIENCE)
            .await
            .trim()
            .parse()
            .unwrap();
        // The next address would have its turn after an eighth of the time to connect, if it had no time of its own: that is
        // 7.5 s. Another attempt would begin after a third of it, 20 s: this one went on.
        assert!((250..7_000).contains(&millis), "{millis}");
    })
    .await;
}
