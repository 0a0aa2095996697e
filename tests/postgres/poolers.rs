//! A real PgBouncer in transaction mode, between a registry and its server.

use std::time::Duration;

use lockstream::LockRegistry;
use lockstream::store::PostgresStore;

use crate::support::{PgBouncer, PgServer};
use crate::{BOUND, builder, eventually, ms, told};

async fn registry(server: &PgServer, pooler: &PgBouncer) -> LockRegistry {
    let store = PostgresStore::builder(server.url())
        .pooled(pooler.url())
        .lanes(2)
        .connect()
        .await;
    let locks = builder(store.unwrap()).build().unwrap();
    locks.obtain("anything").inspect().await.unwrap();
    locks
}

/// Calls go by the pooler, and grants come by the server's own connection.
#[tokio::test]
async fn turns_are_taken_by_a_pooler() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 3);
    let (one, other) = (
        registry(&server, &pooler).await,
        registry(&server, &pooler).await,
    );
    for _ in 0..3 {
        let lease = one
            .obtain("k")
            .ttl(Duration::from_secs(20))
            .lease()
            .await
            .unwrap();
        let lock = other.obtain("k");
        let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
        let lock = one.obtain("k");
        eventually("it waits", async || {
            lock.inspect().await.unwrap().waiting == 1
        })
        .await;
        let token = lease.token();
        lease.release().await.unwrap();
        // Not by asking: that would take until the ttl is over, or eight seconds.
        let next = tokio::time::timeout(ms(3000), waiting)
            .await
            .expect("it is told")
            .unwrap()
            .unwrap();
        assert!(next.token() > token);
        next.release().await.unwrap();
    }
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_notify($1%' AND application_name LIKE 'lockstream%'";
    assert!(server.one::<i64>(listening) <= 2);
}

/// Many registries by few connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_registries_share_few_connections() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let mut registries = Vec::new();
    for _ in 0..8 {
        registries.push(registry(&server, &pooler).await);
    }
    let turns = async |locks: &LockRegistry| {
        for n in 0..20 {
            let lease = locks
                .obtain(format!("k{}", n % 3))
                .lease_within(Duration::from_secs(30))
                .await
                .unwrap();
            lease.release().await.unwrap();
        }
    };
    futures::future::join_all(registries.iter().map(turns)).await;
    let own = server.one::<i64>("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'");
    assert_eq!(own, 8, "each has its line on a connection of its own");
}

/// A fence by a pooler is one statement of the transaction.
#[tokio::test]
async fn a_transaction_by_a_pooler_is_fenced() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let one = registry(&server, &pooler).await;
    let lease = one.obtain("k").lease().await.unwrap();
    let mut client = crate::client(&pooler.url()).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    let releasing = tokio::spawn(async move { lease.release().await });
    tokio::time::sleep(ms(200)).await;
    assert!(!releasing.is_finished());
    transaction.commit().await.unwrap();
    releasing.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_url_of_a_pooler_alone_is_refused_with_a_hint() {
    let server = PgServer::start();
    let pooler = PgBouncer::to(&server, 2);
    let error = PostgresStore::connect(pooler.url()).await.unwrap_err();
    assert!(told(&error).contains("`pooled`"), "{error}");
}
