//! The fenced resource as a real table: an update of it commits only while its lease has the lock.

use std::time::Duration;

use lockstream::LeaseView;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_postgres::NoTls;

/// How long a transaction may take, whatever befalls its connection.
const LONGEST: Duration = Duration::from_millis(800);

/// Adds one to each key, in one transaction. Nobody but the ledger in the database knows for sure whether it has
/// committed.
pub(crate) async fn add(url: &str, lease: &LeaseView, keys: &[&str], pause: Duration) {
    // Whatever ends it, the server rolls back what has not committed.
    let _ = timeout(LONGEST, transact(url, lease, keys, pause)).await;
}

async fn transact(url: &str, lease: &LeaseView, keys: &[&str], pause: Duration) -> Option<()> {
    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await.ok()?;
    // Ends with this future.
    let _driver = JoinSet::from_iter([async {
        let _ = connection.await;
    }]);
    let transaction = client.transaction().await.ok()?;
    lease.fence(&transaction).await.ok()?;
    let mut values = Vec::new();
    for key in keys {
        let sql = "SELECT value FROM register WHERE key = $1";
        let value = transaction.query_opt(sql, &[key]).await.ok()?;
        values.push(value.map_or(0, |row| row.get::<_, i64>(0)));
    }
    sleep(pause).await;
    for (key, value) in keys.iter().zip(values) {
        let token = i64::try_from(lease.token_of(key)?.get()).ok()?;
        let update = "INSERT INTO register VALUES ($1, $2::bigint + 1) ON CONFLICT (key) DO UPDATE SET value = $2::bigint + 1";
        transaction.execute(update, &[key, &value]).await.ok()?;
        let entry = "INSERT INTO ledger VALUES ($1, $2, $3)";
        transaction
            .execute(entry, &[key, &token, &value])
            .await
            .ok()?;
    }
    transaction.commit().await.ok()
}
