//! A release is committed, and whoever released is gone before it could send the notification. The next holder is told all the
//! same: not by asking, which would take eight seconds or more.

use std::time::Duration;

use lockstream::store::PostgresStore;
use lockstream::{Lease, LockError, LockRegistry};
use tokio::task::JoinHandle;

use crate::support::{PgServer, Proxy, Role, Worker, wait_until};
use crate::{BOUND, PATIENCE, builder, eventually, ms, patient, registry};

/// Only the notification to the waiter has its name in it.
const WAITER: &str = "waiter";
const WORD: &[u8] = b"waiter~";

const TTL: Duration = Duration::from_secs(60);

/// Whoever waits for the key that another holds, and is asked how long it takes.
struct Waiter {
    _registry: LockRegistry,
    waiting: JoinHandle<Result<Lease, LockError>>,
}

impl Waiter {
    async fn new(url: &str) -> Self {
        let store = patient(url).connect().await.unwrap();
        let registry = builder(store).name(WAITER).build().unwrap();
        let lock = registry.obtain("k").ttl(TTL).wait(TTL);
        let waiting = tokio::spawn(async move { lock.lease().await });
        let lock = registry.obtain("k");
        eventually("it waits", async || {
            lock.inspect().await.unwrap().waiting == 1
        })
        .await;
        Self {
            _registry: registry,
            waiting,
        }
    }

    /// Within a second, as a rule; asking by itself would take eight.
    async fn gets_told(self) {
        self.gets_told_within(ms(5000)).await;
    }

    async fn gets_told_within(self, time: Duration) {
        let told = tokio::time::timeout(time, self.waiting).await;
        let lease = told.expect("it is told").unwrap().unwrap();
        lease.release().await.unwrap();
    }
}

/// A proxy through which a holder comes whose notification does not get through.
async fn held_by_a_proxy(server: &PgServer) -> (Proxy, LockRegistry, Lease) {
    let proxy = Proxy::to_port(server.port());
    let holder = registry(&PgServer::url_at(proxy.port())).await;
    let lease = holder.obtain("k").ttl(TTL).lease().await.unwrap();
    proxy.lose_from(WORD);
    (proxy, holder, lease)
}

async fn lost(proxy: &Proxy) {
    wait_until("the notification is sent", BOUND, || proxy.words() == 1).await;
}

#[tokio::test]
async fn a_grant_is_told_though_the_connection_of_the_releaser_is_cut() {
    let server = PgServer::start();
    let (proxy, _holder, lease) = held_by_a_proxy(&server).await;
    let waiter = Waiter::new(&server.url()).await;
    lease.release().await.unwrap();
    lost(&proxy).await;
    proxy.cut();
    waiter.gets_told().await;
}

#[tokio::test]
async fn a_grant_is_told_though_the_releaser_is_shut_down_or_dropped() {
    for is_shut_down in [true, false] {
        let server = PgServer::start();
        let (proxy, holder, lease) = held_by_a_proxy(&server).await;
        let waiter = Waiter::new(&server.url()).await;
        lease.release().await.unwrap();
        lost(&proxy).await;
        if is_shut_down {
            holder.shutdown().await;
        }
        drop(holder);
        waiter.gets_told().await;
    }
}

#[tokio::test]
async fn a_grant_is_told_though_the_runtime_of_the_releaser_ends() {
    let server = PgServer::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap();
    let port = server.port();
    let holding = runtime.spawn(async move {
        let proxy = Proxy::to_port(port);
        let holder = registry(&PgServer::url_at(proxy.port())).await;
        let lease = holder.obtain("k").ttl(TTL).lease().await.unwrap();
        proxy.lose_from(WORD);
        (proxy, holder, lease)
    });
    let (proxy, _holder, lease) = holding.await.unwrap();
    let waiter = Waiter::new(&server.url()).await;
    lease.release().await.unwrap();
    lost(&proxy).await;
    runtime.shutdown_background();
    waiter.gets_told().await;
}

#[tokio::test]
async fn a_grant_is_told_though_the_releaser_is_killed() {
    let server = PgServer::start();
    let proxy = Proxy::to_port(server.port());
    let url = PgServer::url_at(proxy.port());
    let mut holder = Worker::spawn("notices::worker", "releaser", &[("URL", &url)]);
    holder.expect_line("holds", PATIENCE).await;
    let waiter = Waiter::new(&server.url()).await;
    proxy.lose_from(WORD);
    holder.tell("release");
    lost(&proxy).await;
    holder.sigkill();
    waiter.gets_told().await;
}

/// The server restarts, too. Nobody looks for the grant any more: whoever waits asks on its next connection.
#[tokio::test]
async fn a_grant_is_told_though_the_server_restarts() {
    let mut server = PgServer::start();
    let (proxy, _holder, lease) = held_by_a_proxy(&server).await;
    let waiter = Waiter::new(&server.url()).await;
    lease.release().await.unwrap();
    lost(&proxy).await;
    server.kill();
    server.restart();
    // It may pause for two seconds before it connects. By then it has waited for less than four, and W2 asks after eight.
    let connected =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockstream:waiter'";
    eventually("its next connection", async || {
        waiter.waiting.is_finished() || server.one::<i64>(connected) > 0
    })
    .await;
    waiter.gets_told_within(ms(4000)).await;
}

/// Whoever asks for it knows of its grant, and is not told later, when the lease may be somebody else's.
#[tokio::test]
async fn a_grant_that_was_asked_for_is_not_told_again() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let mut sql = server.client();
    let op = |letter: &str, line: i64, owner: &str| {
        format!(
            "SELECT verdict FROM lockstream.ops_1(true, {line}, 9000000000000000000, '{letter}', '{{lock:k}}', \
             '{{{owner}}}', '{{\"\"}}', '{{30000000}}', '{{\"\"}}', '{{null}}')"
        )
    };
    let mut waiter = server.client();
    waiter.run("SELECT lockstream.hello_1(4711)");
    assert_eq!(sql.one::<String>(&op("A", 0, "holder:1")), "won");
    assert_eq!(waiter.one::<String>(&op("E", 4711, "waiter:1")), "busy");
    assert_eq!(sql.one::<String>(&op("R", 0, "holder:1")), "held");
    let untold = "SELECT count(*) FROM lockstream.notice WHERE line = 4711";
    assert_eq!(server.one::<i64>(untold), 1);
    assert_eq!(waiter.one::<String>(&op("E", 4711, "waiter:1")), "won");
    assert_eq!(waiter.rows("SELECT lockstream.untold_1(4711)").len(), 0);
}

/// Whoever waits asks again and again while the lock is released. It is told that the lock is busy only if its grant is later
/// than that answer, or else it would take the grant for outdated (D2).
#[test]
fn no_grant_is_missed_by_asking_beside_it() {
    let server = PgServer::start();
    let mut holder = server.client();
    holder.run(PostgresStore::SQL);
    let mut waiter = server.client();
    waiter.run("SELECT lockstream.hello_1(4711)");
    let op = |letter: &str, line: i64, owner: &str, mode: &str, place: &str| {
        format!(
            "SELECT verdict, at, score, notices[2]::bigint FROM lockstream.ops_1(true, {line}, 9000000000000000000, \
             '{letter}', '{{lock:k}}', '{{{owner}}}', '{{\"{mode}\"}}', '{{30000000}}', '{{\"\"}}', '{{{place}}}')"
        )
    };
    let mut asked = 0;
    let mut rounds = 0..20_000;
    // On a busy machine few asks fall into the moment of a release.
    while let Some(round) = rounds.next()
        && (round < 200 || asked <= 100)
    {
        let (own, other) = (format!("waiter:{round}"), format!("holder:{round}"));
        // A release of an exclusive lease has a way of its own.
        let mode = ["", "r"][round % 2];
        holder.rows(&op("A", 0, &other, mode, "null"));
        let place: i64 = waiter.rows(&op("E", 4711, &own, "", "null"))[0].get(2);
        let ask = op("E", 4711, &own, "", &place.to_string());
        let (granted_at, last_busy_at) = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let mut last_busy_at: i64 = 0;
                loop {
                    let answer = waiter.rows(&ask);
                    match answer[0].get(0) {
                        "busy" => last_busy_at = answer[0].get(1),
                        "won" => return last_busy_at,
                        other => panic!("{other}"),
                    }
                    asked += 1;
                }
            });
            let granted_at: i64 = holder.rows(&op("R", 0, &other, mode, "null"))[0].get(3);
            (granted_at, asking.join().unwrap())
        });
        assert!(
            last_busy_at < granted_at,
            "{round}: {last_busy_at} {granted_at}"
        );
        waiter.rows(&op("R", 4711, &own, "", "null"));
    }
    assert!(asked > 100, "{asked}");
}

#[tokio::test]
async fn worker() {
    let Some(mut role) = Role::of_this_process() else {
        return;
    };
    let holder = registry(&role.env("URL")).await;
    let lease = holder.obtain("k").ttl(TTL).lease().await.unwrap();
    role.say("holds");
    role.hear().await;
    lease.release().await.unwrap();
    role.hear().await;
}
