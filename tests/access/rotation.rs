//! Passwords and tokens that change while leases are held, on real servers.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::StreamExt;
use futures::future::join_all;
use lockstream::store::{Credentials, RedisStore, RedisStoreBuilder};
use lockstream::{LockEvent, LockRegistry, stream};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::hearing::Log;
use crate::support::{ClientRow, Program, RedisServer, least_rights, wait_until};
use crate::{BOUND, patient};

/// For a reconnect after refused attempts: the pauses between them are 2 s at most. A renewal is due later than that.
const LATER: Duration = Duration::from_secs(15);

/// Of leases that outlive the pauses between attempts to connect, and are renewed after each of them.
const TTL: Duration = Duration::from_secs(60);

/// A server that knows `lockstream` by the first of the passwords.
fn server() -> RedisServer {
    let server = RedisServer::start();
    know(&server, "lockstream", &password(0));
    server
}

/// The user has these rights, and this password besides those that it has.
fn know(server: &RedisServer, user: &str, password: &str) {
    let rights = &least_rights()[3..];
    let password = format!(">{password}");
    server.cmd(&[&["ACL", "SETUSER", user, "on", &password], rights].concat());
}

fn forget(server: &RedisServer, user: &str, password: &str) {
    server.cmd(&["ACL", "SETUSER", user, &format!("<{password}")]);
}

fn password(number: u32) -> String {
    format!("s3kret{number}")
}

fn credentials(number: u32) -> Credentials {
    Credentials::new("lockstream", password(number))
}

fn builder(server: &RedisServer) -> (RedisStoreBuilder, watch::Sender<Credentials>) {
    let (rotate, newest) = watch::channel(credentials(0));
    // What the url says of a user does not count.
    let url = server.url_with("nobody", "nothing", 0);
    (patient(url).credentials(newest), rotate)
}

fn registry(builder: RedisStoreBuilder) -> LockRegistry {
    let store = builder.connect_lazy().unwrap();
    let locks = LockRegistry::builder(store).ttl(TTL).wait(2 * TTL);
    locks.response_timeout(BOUND).build().unwrap()
}

/// The connections of a user.
fn connections(server: &RedisServer, user: &str) -> BTreeSet<u64> {
    let clients = server.clients();
    let of_user = clients.iter().filter(|client| client.field("user") == user);
    of_user.map(ClientRow::id).collect()
}

/// Whether connections that there were before are another user's now, and none is the old one's. One that was begun beside
/// others, and is not needed, may have ended meanwhile.
fn are_anothers(server: &RedisServer, before: &BTreeSet<u64>) -> bool {
    let now = connections(server, "another");
    !now.is_empty() && now.is_subset(before) && connections(server, "lockstream").is_empty()
}

/// Waits until each of these leases has been renewed once more. Fails if any is lost.
async fn all_renewed(events: &mut stream::Events, keys: usize) {
    let mut renewed = BTreeSet::new();
    let hearing = async {
        while renewed.len() < keys {
            match events.next().await.expect("the registry is in use") {
                LockEvent::Renewed { key, .. } => drop(renewed.insert(key)),
                lost @ (LockEvent::Lost { .. } | LockEvent::Missed { .. }) => panic!("{lost:?}"),
                _ => {}
            }
        }
    };
    timeout(LATER, hearing).await.expect("all are renewed");
}

/// The story of the page: the new password is added, handed out, the old one is removed, and every connection ends. Three
/// times, under fifty leases and a waiter, of whom nobody notices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_rotates_under_held_leases() {
    const LEASES: usize = 50;
    let server = server();
    let (builder, rotate) = builder(&server);
    let locks = registry(builder.clone());
    let others = registry(builder);
    let mut events = locks.events();
    let leases = join_all((0..LEASES).map(|key| locks.obtain(format!("k{key}")).lease())).await;
    let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();
    let waiter = tokio::spawn(others.obtain("k0").lease());
    wait_until("one waits", BOUND, || server.exists("{lock:k0}:~queue2")).await;
    for number in 1..=3 {
        know(&server, "lockstream", &password(number));
        let before = server.calls("auth");
        rotate.send(credentials(number)).unwrap();
        wait_until("both connections authenticate anew", BOUND, || {
            server.calls("auth") >= before + 2
        })
        .await;
        forget(&server, "lockstream", &password(number - 1));
        let old = connections(&server, "lockstream");
        assert!(server.client_kill_all() >= 2);
        wait_until("both connect with the new password", LATER, || {
            let new = connections(&server, "lockstream");
            new.len() >= 2 && new.is_disjoint(&old)
        })
        .await;
        all_renewed(&mut events, LEASES).await;
        assert!(leases.iter().all(|lease| lease.is_valid()));
    }
    // The old ones are refused by now.
    let old = server.url_with("lockstream", &password(2), 0);
    assert!(RedisStore::connect(old).await.is_err());
    for lease in leases {
        lease.release().await.unwrap();
    }
    let next = timeout(2 * BOUND, waiter).await.expect("it kept its place");
    next.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.keys("*"), ["lock:~fence"]);
}

/// A connection that stands becomes another user's, and stays the same connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_stand_are_authenticated_anew() {
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        a_connection_is_authenticated_anew(&RedisServer::builder().program(program).start()).await;
    }
}

async fn a_connection_is_authenticated_anew(server: &RedisServer) {
    know(server, "lockstream", &password(0));
    know(server, "another", "theirs");
    let (builder, rotate) = builder(server);
    let locks = registry(builder.clone());
    let lease = locks.obtain("k").lease().await.unwrap();
    let before = connections(server, "lockstream");
    assert_eq!(before.len(), 1);
    rotate.send(Credentials::new("another", "theirs")).unwrap();
    wait_until("it is the other user's", BOUND, || {
        are_anothers(server, &before)
    })
    .await;
    assert!(lease.extend(2 * TTL).await.is_ok());
    // So is one that is made later, also when nobody sends credentials any more.
    drop(rotate);
    let later = registry(builder);
    let other = later.obtain("other").lease().await.unwrap();
    assert_eq!(connections(server, "another").len(), 2);
    assert_eq!(connections(server, "lockstream").len(), 0);
    lease.release().await.unwrap();
    other.release().await.unwrap();
}

/// How often the server has refused something.
fn refused(server: &RedisServer) -> u64 {
    // Each entry begins with its count, and is one of many of the same kind.
    let log: Vec<Vec<redis::Value>> = server.ask(&["ACL", "LOG"]);
    let count =
        |entry: Vec<redis::Value>| redis::from_redis_value::<u64>(entry[1].clone()).unwrap();
    log.into_iter().map(count).sum()
}

/// The server is faster than the provider: until the new password comes, attempts to connect are refused. Nobody is told a
/// lasting error, and no lease is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_that_is_late_costs_no_lease() {
    let server = server();
    let (builder, rotate) = builder(&server);
    let (locks, others) = (registry(builder.clone()), registry(builder));
    let mut events = locks.events();
    let lease = locks.obtain("k").lease().await.unwrap();
    let held = others.obtain("held").lease().await.unwrap();
    know(&server, "lockstream", &password(1));
    forget(&server, "lockstream", &password(0));
    server.client_kill_all();
    let waiter = tokio::spawn(others.obtain("k").lease());
    wait_until("both are refused again and again", LATER, || {
        refused(&server) >= 4
    })
    .await;
    let told = crate::told(others.obtain("k").acquire_once().await);
    assert!(told.is_retryable(), "{told}");
    assert!(!waiter.is_finished());
    rotate.send(credentials(1)).unwrap();
    all_renewed(&mut events, 1).await;
    assert!(lease.is_valid() && held.is_valid());
    lease.release().await.unwrap();
    let next = timeout(2 * BOUND, waiter).await.expect("it is served");
    next.unwrap().unwrap().release().await.unwrap();
    held.release().await.unwrap();
}

/// New credentials that the server refuses leave the connection as it is.
#[tokio::test]
async fn refused_credentials_leave_the_connection_as_it_is() {
    let server = server();
    let (builder, rotate) = builder(&server);
    let log = Log::default();
    let _hearing = log.hear(tracing::Level::TRACE);
    let locks = registry(builder);
    let lease = locks.obtain("k").lease().await.unwrap();
    let before = connections(&server, "lockstream");
    let wrong = Credentials::new("lockstream", "s3kret-wrong");
    rotate.send(wrong).unwrap();
    wait_until("it is refused", BOUND, || {
        let logged = log.text();
        logged.contains("the server refused the new credentials") && logged.contains("WRONGPASS")
    })
    .await;
    assert_eq!(connections(&server, "lockstream"), before);
    lease.extend(2 * TTL).await.unwrap();
    lease.release().await.unwrap();
    let logged = log.text();
    assert!(!logged.contains("s3kret"), "{logged}");
}

/// Neither the credentials nor who has them shows a password.
#[tokio::test]
async fn rotating_credentials_are_not_shown() {
    let server = server();
    let (builder, rotate) = builder(&server);
    let store = builder.clone().connect().await.unwrap();
    let shown = format!("{:?} {builder:?} {store:?}", credentials(0));
    assert!(
        shown.contains("lockstream") && !shown.contains("s3kret"),
        "{shown}"
    );
    rotate
        .send(Credentials::new("lockstream", "s3kret-wrong"))
        .unwrap();
    let error = builder.connect().await.unwrap_err();
    let told = format!("{error} {error:?}");
    assert!(
        told.contains("WRONGPASS") && !told.contains("s3kret"),
        "{told}"
    );
    assert!(error.is_retryable());
}

/// What `redis` has for short-lived tokens: a provider of its own trait, which gives nothing at first.
#[cfg(feature = "redis-1")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_provider_of_the_client_library_rotates_as_well() {
    use std::pin::Pin;

    use futures::Stream;
    use redis::{BasicAuth, RedisResult, StreamingCredentialsProvider};

    struct Provider(watch::Receiver<Option<(&'static str, &'static str)>>);

    impl StreamingCredentialsProvider for Provider {
        fn subscribe(&self) -> Pin<Box<dyn Stream<Item = RedisResult<BasicAuth>> + Send>> {
            let tokens = tokio_stream::wrappers::WatchStream::new(self.0.clone());
            let tokens = tokens.filter_map(async |it| it);
            let login = |(user, token): (&str, &str)| Ok(BasicAuth::new(user.into(), token.into()));
            tokens.map(login).boxed()
        }
    }

    let server = server();
    know(&server, "another", "theirs");
    let (rotate, newest) = watch::channel(None);
    let builder = RedisStore::builder(server.url()).credentials_provider(Provider(newest));
    let locks = registry(builder.clone());
    let early = locks.obtain("early").acquire_within(2 * BOUND).await;
    let early = crate::told(early);
    assert!(
        early.to_string().contains("no credentials for Redis"),
        "{early}"
    );
    assert!(early.is_retryable());

    let acquiring = tokio::spawn(locks.obtain("k").lease());
    rotate.send(Some(("lockstream", "s3kret0"))).unwrap();
    let lease = timeout(LATER, acquiring).await.expect("it connects");
    let lease = lease.unwrap().unwrap();
    let before = connections(&server, "lockstream");
    rotate.send(Some(("another", "theirs"))).unwrap();
    wait_until("it is the other user's", BOUND, || {
        are_anothers(&server, &before)
    })
    .await;
    lease.release().await.unwrap();
    builder.connect().await.unwrap();
}

/// All connections to all nodes.
#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_connection_to_a_cluster_rotates() {
    use crate::support::Cluster;

    let cluster = Cluster::without_replicas();
    let all = "on >s3kret0 ~* &* +@all";
    for server in cluster.primaries() {
        for user in ["lockstream", "another"] {
            let words = all.split(' ');
            let words: Vec<&str> = ["ACL", "SETUSER", user].into_iter().chain(words).collect();
            server.cmd(&words);
        }
    }
    let (rotate, newest) = watch::channel(credentials(0));
    let builder = patient(cluster.url()).credentials(newest);
    let (locks, others) = (registry(builder.clone()), registry(builder));
    let mut events = locks.events();
    let keys: Vec<String> = (0..12).map(|key| format!("k{key}")).collect();
    let leases = join_all(keys.iter().map(|key| locks.obtain(key).lease())).await;
    let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();
    // Each node has one connection of the holders, and one of those who wait there.
    let waiters = keys
        .iter()
        .map(|key| tokio::spawn(others.obtain(key).lease()));
    let waiters: Vec<_> = waiters.collect();
    let of = |user: &str| -> Vec<BTreeSet<u64>> {
        let servers = cluster.primaries().iter();
        servers.map(|server| connections(server, user)).collect()
    };
    wait_until("all are connected", LATER, || {
        of("lockstream").iter().all(|it| it.len() == 2)
    })
    .await;
    let before = of("lockstream");
    rotate.send(Credentials::new("another", "s3kret0")).unwrap();
    wait_until("all are the other user's", BOUND, || {
        let mut servers = cluster.primaries().iter().zip(&before);
        servers.all(|(server, before)| are_anothers(server, before))
    })
    .await;

    for server in cluster.primaries() {
        server.cmd(&["ACL", "DELUSER", "lockstream"]);
        server.client_kill_all();
    }
    all_renewed(&mut events, keys.len()).await;
    for (lease, waiter) in leases.into_iter().zip(waiters) {
        lease.release().await.unwrap();
        let next = timeout(2 * BOUND, waiter).await.expect("it kept its place");
        next.unwrap().unwrap().release().await.unwrap();
    }
    assert!(of("lockstream").iter().all(BTreeSet::is_empty));
}

/// Behind sentinels the servers' credentials rotate, and those of the sentinels stay.
#[cfg(feature = "sentinel")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn behind_sentinels_the_primary_s_credentials_rotate() {
    use crate::support::{Passwords, Watched, on_a_steady_machine};

    on_a_steady_machine(async || {
        let watched = Watched::start_with(Some(Passwords {
            server: "first",
            sentinel: "theirs",
        }));
        know(watched.primary(), "lockstream", &password(0));
        know(watched.primary(), "another", "s3kret0");
        let (rotate, newest) = watch::channel(credentials(0));
        let builder = patient(watched.url()).credentials(newest);
        let locks = registry(builder);
        let lease = locks.obtain("k").lease().await.unwrap();
        let before = connections(watched.primary(), "lockstream");
        rotate.send(Credentials::new("another", "s3kret0")).unwrap();
        wait_until("it is the other user's", BOUND, || {
            are_anothers(watched.primary(), &before)
        })
        .await;
        watched.primary().cmd(&["ACL", "DELUSER", "lockstream"]);
        for id in before {
            watched
                .primary()
                .cmd(&["CLIENT", "KILL", "ID", &id.to_string()]);
        }
        wait_until("it is back", LATER, || {
            !connections(watched.primary(), "another").is_empty()
        })
        .await;
        lease.release().await.unwrap();
    })
    .await;
}
