//! PostgreSQL servers as members of a quorum.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lockstream::store::{LockStore, PostgresStore, QuorumStore};
use lockstream::{LockRegistry, LockRegistryBuilder, Repeat};
use tokio::time::timeout;

use crate::support::{PgServer, chain, on_a_steady_machine};
use crate::{BOUND, PATIENCE, eventually, patient};

/// Nobody asks by itself while a test looks.
const PAUSE: Duration = Duration::from_secs(5);

/// What a busy machine may take for what takes a few milliseconds on an idle one.
const AT_ONCE: Duration = Duration::from_secs(4);

/// Servers whose schema was made long ago.
fn servers() -> [PgServer; 3] {
    [(); 3].map(|()| {
        let server = PgServer::builder().own_identity().start();
        server.run(PostgresStore::SQL);
        server.run("UPDATE lockstream.alive SET since = 0");
        server
    })
}

fn node(server: &PgServer) -> Arc<dyn LockStore> {
    Arc::new(patient(server.url()).connect_lazy().unwrap())
}

fn builder(nodes: Vec<Arc<dyn LockStore>>) -> LockRegistryBuilder {
    let store = QuorumStore::new(nodes).unwrap().quarantine(None);
    LockRegistry::builder(store)
        .ttl(2 * PATIENCE)
        .wait(PATIENCE)
        .repeat(Repeat::fixed(PAUSE))
        .response_timeout(BOUND)
}

/// How many subscriptions there are on a server.
fn listening(server: &PgServer) -> i64 {
    server.one("SELECT count(*) FROM lockstream.ticket WHERE ttl IS NULL")
}

fn held(server: &PgServer) -> bool {
    server
        .one("SELECT count(*) > 0 FROM lockstream.lock WHERE key = 'lock:k' AND owner IS NOT NULL")
}

/// One holds, another is told of the release, and a third of the servers may be gone.
#[tokio::test]
async fn a_quorum_of_postgres_servers() {
    on_a_steady_machine(async || {
        let mut servers = servers();
        let registry = || builder(servers.iter().map(node).collect()).build().unwrap();
        let (here, there) = (registry(), registry());
        for registry in [&here, &there] {
            let lease = registry.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
            eventually("it is released everywhere", async || {
                servers.iter().all(|server| !held(server))
            })
            .await;
        }
        let lease = here.obtain("k").lease().await.unwrap();
        eventually("all have voted", async || servers.iter().all(held)).await;
        assert!(!there.obtain("k").acquire_once().await.unwrap());
        let lock = there.obtain("k");
        let waiting = tokio::spawn(async move { lock.lease().await.unwrap() });
        eventually("it listens everywhere", async || {
            servers.iter().all(|server| listening(server) == 1)
        })
        .await;
        let (token, begin) = (lease.token(), Instant::now());
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiting).await.unwrap().unwrap();
        assert!(begin.elapsed() < AT_ONCE, "{:?}", begin.elapsed());
        assert!(next.token() > token);
        servers[0].kill();
        assert!(!here.obtain("k").acquire_once().await.unwrap());
        let token = next.token();
        next.release().await.unwrap();
        // Who asks before all have heard of the release may have to ask again, after a pause.
        let last = timeout(3 * BOUND, here.obtain("k").lease()).await.unwrap();
        let last = last.unwrap();
        assert!(last.token() > token);
        last.release().await.unwrap();
    })
    .await;
}

/// Servers of different kinds vote together.
#[cfg(feature = "redis")]
#[tokio::test]
async fn a_quorum_of_postgres_and_redis() {
    use crate::ms;
    use crate::support::RedisServer;
    use lockstream::store::RedisStore;

    let postgres = PgServer::start();
    postgres.run(PostgresStore::SQL);
    let redis = [RedisServer::start(), RedisServer::start()];
    let registry = || {
        let mut nodes = vec![node(&postgres)];
        for server in &redis {
            nodes.push(Arc::new(RedisStore::connect_lazy(server.url()).unwrap()));
        }
        builder(nodes).build().unwrap()
    };
    let (here, there) = (registry(), registry());
    let lease = here.obtain("k").lease().await.unwrap();
    let token = lease.token();
    eventually("all have voted", async || {
        held(&postgres) && redis.iter().all(|server| server.exists("lock:k"))
    })
    .await;
    assert!(!there.obtain("k").acquire_once().await.unwrap());
    redis[0].stop();
    // A majority of both kinds.
    lease.release().await.unwrap();
    let lock = there.obtain("k").repeat(Repeat::fixed(ms(100)));
    let next = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
    assert!(next.token() > token);
    next.release().await.unwrap();
    redis[0].cont();
}

/// A database that was lost, and made again, does not know who has its vote.
#[tokio::test]
async fn a_schema_that_was_made_again_has_no_vote_yet() {
    on_a_steady_machine(async || {
        let servers = servers();
        let registry = || {
            let store = QuorumStore::new(servers.iter().map(node)).unwrap();
            let store = store.quarantine(Duration::from_secs(60));
            let builder = LockRegistry::builder(store).response_timeout(BOUND);
            builder.build().unwrap()
        };
        assert!(registry().obtain("k").acquire_once().await.unwrap());
        for server in &servers[1..] {
            server.run("DROP SCHEMA lockstream CASCADE");
        }
        let error = registry().obtain("other").acquire_once().await.unwrap_err();
        assert!(chain(&error).contains("node restarted"), "{error:?}");
    })
    .await;
}
