//! An outbox in PostgreSQL that two consumers empty at once: each message is sent in the order of its customer, and never by
//! both at the same time.
//!
//! ```sh
//! DATABASE_URL=postgres://… cargo run --features postgres --example outbox
//! ```
//!
//! A row is marked as sent in a transaction with a fence, which commits only while the lease holds. So a consumer that stood
//! still for longer than its lease marks nothing. One that dies between the sending and the commit sends once more when it
//! comes back: the receiver must know a message by its number.

use std::error::Error;
use std::sync::Mutex;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt, stream};
use lockstream::{LeaseView, LockError, LockRegistry, StreamLockExt};
use tokio_postgres::{Client, NoTls};

const CUSTOMERS: i64 = 6;
const MESSAGES: i64 = 60;

/// How many messages of a consumer are under way.
const AT_ONCE: usize = 4;

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error("the database failed")]
    Sql(#[from] tokio_postgres::Error),
}

/// A row of the outbox.
struct Message {
    id: i64,
    customer: i64,
}

/// What was sent: by whom, to whom, which.
type Sent = Mutex<Vec<(usize, i64, i64)>>;

struct Consumer<'a> {
    name: usize,
    url: &'a str,
    table: &'a str,
    locks: LockRegistry,
    sent: &'a Sent,
}

impl Consumer<'_> {
    /// Sends all that is in the outbox now.
    async fn run(&self) -> Result<(), Failed> {
        let client = connect(self.url).await?;
        let unsent = format!(
            "SELECT id, customer FROM {} WHERE sent_at IS NULL ORDER BY id",
            self.table
        );
        let rows = client.query(&unsent, &[]).await?;
        let messages = rows.iter().map(|row| Message {
            id: row.get(0),
            customer: row.get(1),
        });
        let sendings = stream::iter(messages).map(|message| {
            let lock = self.locks.obtain(format!("customer:{}", message.customer));
            lock.try_with_lease(async move |lease| self.send(&message, lease).await)
        });
        sendings.buffer_keyed(AT_ONCE).try_collect().await
    }

    /// Runs under the customer's lock.
    async fn send(&self, message: &Message, lease: LeaseView) -> Result<(), Failed> {
        let mut client = connect(self.url).await?;
        let transaction = client.transaction().await?;
        lease.fence(&transaction).await?;
        let mark = format!(
            "UPDATE {} SET sent_at = now() WHERE id = $1 AND sent_at IS NULL",
            self.table
        );
        // The other consumer may have sent it meanwhile.
        if transaction.execute(&mark, &[&message.id]).await? == 1 {
            tokio::time::sleep(Duration::from_millis(3)).await;
            let mut sent = self.sent.lock().expect("nobody panics");
            sent.push((self.name, message.customer, message.id));
        }
        Ok(transaction.commit().await?)
    }
}

/// A real service has a pool.
async fn connect(url: &str) -> Result<Client, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL");
    let url =
        url.map_err(|_| "it needs a database: set DATABASE_URL=postgres://user@127.0.0.1/name")?;
    let table = format!("outbox_{}", std::process::id());
    let client = connect(&url).await?;
    let make = format!(
        "CREATE TABLE {table} (id bigint PRIMARY KEY, customer bigint NOT NULL, sent_at timestamptz);
         INSERT INTO {table} SELECT id, id * id % {CUSTOMERS} FROM generate_series(1, {MESSAGES}) id"
    );
    client.batch_execute(&make).await?;

    let sent = Sent::default();
    let consumer = async |name| {
        let locks = LockRegistry::connect(&*url).await?;
        let consumer = Consumer {
            name,
            url: &url,
            table: &table,
            locks,
            sent: &sent,
        };
        consumer.run().await?;
        consumer.locks.shutdown().await;
        Ok::<_, Box<dyn Error>>(())
    };
    let ended = tokio::try_join!(consumer(1), consumer(2));
    client.batch_execute(&format!("DROP TABLE {table}")).await?;
    ended?;

    let sent = sent.into_inner()?;
    for customer in 0..CUSTOMERS {
        let of_customer = sent.iter().filter(|(_, to, _)| *to == customer);
        let of_customer: Vec<_> = of_customer
            .map(|(by, _, id)| format!("{id} by {by}"))
            .collect();
        if !of_customer.is_empty() {
            println!("to {customer}: {}", of_customer.join(", "));
        }
    }
    let by = |name| sent.iter().filter(|(by, ..)| *by == name).count();
    println!(
        "{} sent, {} by consumer 1 and {} by consumer 2",
        sent.len(),
        by(1),
        by(2)
    );
    Ok(())
}
