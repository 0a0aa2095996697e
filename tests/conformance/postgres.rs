//! A schema of the case's own on a server that all cases share, in real time, behind a proxy that breaks the connection.

use std::sync::OnceLock;
use std::time::Duration;

use futures::future::BoxFuture;
use lockstream::LockRegistry;
use lockstream::store::PostgresStore;

use crate::support::{PgSchema, PgServer, Proxy, Way};
use crate::watch::{Builder, Watch};
use crate::world::{PATIENCE, TTL, World};

pub(crate) type Postgres = On<false>;

/// Where all tables are published for logical replication: an update or a delete needs the table's primary key.
pub(crate) type Published = On<true>;

#[derive(Debug)]
pub(crate) struct On<const PUBLISHED: bool> {
    proxy: Proxy,
    schema: PgSchema,
    watch: Watch,
}

fn published() -> &'static PgServer {
    static SHARED: OnceLock<PgServer> = OnceLock::new();
    SHARED.get_or_init(|| {
        let server = PgServer::builder().config("wal_level = logical").start();
        server.run("CREATE PUBLICATION everything FOR ALL TABLES");
        server
    })
}

impl<const PUBLISHED: bool> On<PUBLISHED> {
    fn store(&self) -> PostgresStore {
        let store =
            PostgresStore::builder(PgServer::url_at(self.proxy.port())).schema(self.schema.name());
        store.connect_lazy().unwrap()
    }

    fn settle(&self, store: PostgresStore) -> Builder {
        let builder = LockRegistry::builder(store)
            .ttl(TTL)
            .wait(PATIENCE)
            .response_timeout(PATIENCE);
        self.watch.over(builder)
    }
}

impl<const PUBLISHED: bool> World for On<PUBLISHED> {
    fn new() -> Self {
        let server = match PUBLISHED {
            true => published(),
            false => PgServer::shared(),
        };
        let schema = server.schema();
        schema.run(
            &PostgresStore::SQL
                .replace(
                    "SCHEMA IF NOT EXISTS lockstream",
                    &format!("SCHEMA {}", schema.name()),
                )
                .replace(
                    "IN SCHEMA lockstream ",
                    &format!("IN SCHEMA {} ", schema.name()),
                ),
        );
        let proxy = Proxy::to_port(server.port());
        // Each connection for calls has prepared this function. A sweep comes at any time, on a connection of its own, and
        // does not count.
        proxy.count_from(b"ops_1");
        Self {
            proxy,
            schema,
            watch: Watch::new(),
        }
    }

    /// Each is two transactions, and nobody shares them.
    fn many(&self) -> usize {
        2_000
    }

    fn watch(&self) -> &Watch {
        &self.watch
    }

    fn builder(&self) -> BoxFuture<'_, Builder> {
        Box::pin(async {
            let store = PostgresStore::builder(PgServer::url_at(self.proxy.port()))
                .schema(self.schema.name());
            self.settle(store.connect().await.unwrap())
        })
    }

    fn lazy_builder(&self) -> Builder {
        self.settle(self.store())
    }

    fn set_offline(&self, offline: bool) {
        if offline {
            self.proxy.refuse();
            self.proxy.cut();
        } else {
            self.proxy.accept();
        }
    }

    fn set_latency(&self, latency: Duration) {
        self.proxy.delay(Way::Both, latency / 2);
    }

    fn expire(&self, key: &str) {
        self.schema.run(&format!(
            "UPDATE lockstream.lock SET expires_at = 0 WHERE key = 'lock:{key}'; \
             DELETE FROM lockstream.holder WHERE key = 'lock:{key}'"
        ));
    }

    fn crashed_holder(&self, key: &str, ttl: Duration) {
        self.schema.run(&format!(
            "INSERT INTO lockstream.lock VALUES ('lock:{key}', 'dead:1', 1, lockstream.now_1() + {}) \
             ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, expires_at = excluded.expires_at",
            ttl.as_micros()
        ));
    }

    fn dead_waiter(&self, key: &str) {
        self.schema.run(&format!(
            "INSERT INTO lockstream.ticket VALUES ('lock:{key}', 1, 'dead:1', 1, '', 2000000); \
             UPDATE lockstream.lock SET waited = true WHERE key = 'lock:{key}'"
        ));
    }

    fn leftovers(&self) -> Vec<String> {
        let rows = self.schema.rows(
            "SELECT 'lock ' || key || ' of ' || owner FROM lockstream.lock \
             WHERE owner <> '' AND expires_at > lockstream.now_1() \
             UNION ALL SELECT 'holder ' || key || ' ' || owner FROM lockstream.holder WHERE expires_at > lockstream.now_1() \
             UNION ALL SELECT 'ticket ' || key || ' ' || owner FROM lockstream.ticket",
        );
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Bytes, since no server counts calls as they come.
    fn commands(&self) -> u64 {
        self.proxy.bytes().0
    }
}

#[tokio::test]
async fn calls_count() {
    let w = Postgres::new();
    let lock = w.registry().await.obtain("k");
    let before = w.commands();
    assert!(lock.acquire().await.unwrap());
    assert!(w.commands() > before);
}
