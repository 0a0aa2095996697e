//! A transaction of sqlx that commits only while a lease holds.
//!
//! ```sh
//! DATABASE_URL=postgres://postgres@localhost/postgres cargo run --manifest-path examples/sqlx_fence/Cargo.toml
//! ```
//!
//! The fence is one SQL function, so any client can call it: the key, and the lease's token.

use std::error::Error;
use std::time::Duration;

use lockstream::{LeaseView, LockRegistry};
use sqlx::{Connection, PgConnection};

const KEY: &str = "order:42";

/// Marks the order as paid, if the lease still has its lock when the transaction commits.
async fn pay(connection: &mut PgConnection, lease: &LeaseView) -> Result<(), sqlx::Error> {
    let token = i64::try_from(lease.token().get()).expect("every token fits");
    let mut transaction = connection.begin().await?;
    sqlx::query("SELECT lockstream.fence($1, $2)")
        .bind(KEY)
        .bind(token)
        .execute(&mut *transaction)
        .await?;
    sqlx::query("UPDATE pg_temp.orders SET paid = true")
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await
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
