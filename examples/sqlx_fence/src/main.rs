//! A transaction of sqlx that commits only while a lease holds.
//!
//! ```sh
//! DATABASE_URL=postgres://postgres@localhost/postgres cargo run --manifest-path examples/sqlx_fence/Cargo.toml
//! ```
//!
//! The lease has the statement and its arguments for any client: one for each of its keys.

use std::error::Error;
use std::time::Duration;

use lockstream::{LeaseView, LockRegistry};
use sqlx::{Connection, PgConnection};

const KEY: &str = "order:42";

/// Marks the order as paid, if the lease still has its lock when the transaction commits.
async fn pay(connection: &mut PgConnection, lease: &LeaseView) -> Result<(), Box<dyn Error>> {
    let mut transaction = connection.begin().await?;
    for fence in lease.fence_sql()? {
        let query = sqlx::query(fence.text());
        let query = query.bind(fence.key()).bind(fence.token()).bind(fence.prefix());
        query.execute(&mut *transaction).await?;
    }
    sqlx::query("UPDATE pg_temp.orders SET paid = true")
        .execute(&mut *transaction)
        .await?;
    Ok(transaction.commit().await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a PostgreSQL server")?;
    let locks = LockRegistry::connect(&url).await?;
    let mut connection = PgConnection::connect(&url).await?;
    sqlx::query("CREATE TEMP TABLE orders AS SELECT false AS paid")
        .execute(&mut connection)
        .await?;

    let lease = locks.obtain(KEY).lease().await?;
    pay(&mut connection, &lease.view()).await?;
    println!("paid under token {}", lease.token());
    lease.release().await?;

    // Too late: another process has the lock by now. The holder's own deadline does not show that: it comes a little
    // before the lease ends at the server, and until then a transaction still commits.
    let lease = locks.obtain(KEY).ttl(Duration::from_millis(100)).lease().await?;
    let view = lease.view();
    let other = LockRegistry::connect(&url).await?;
    let next = other.obtain(KEY).lease().await?;
    match pay(&mut connection, &view).await {
        Err(error) => println!("refused: {error}"),
        Ok(()) => return Err("a stale transaction has committed".into()),
    }
    next.release().await?;
    Ok(())
}
