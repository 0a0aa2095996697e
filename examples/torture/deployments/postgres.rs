//! A PostgreSQL server, and a proxy before it for each child.

use std::time::Duration;

use lockstream::StoreError;
use lockstream::store::PostgresStore;

use super::wires::Wires;
use super::{Deployment, Leftovers, Servers, StoredLock, TableVerdict, servers};
use crate::callers::TTL;
use crate::judge::Span;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::plan::{Kind, Stroke};
use crate::support::{PgClient, PgServer};

/// What a url ends in if the server answers before it has a lease on disk.
const ASYNC: &str = "#async";

/// A call waits for the transactions of three other children that have the same keys, each of which is a commit.
pub(super) const RESPONSE_TIMEOUT: Duration = Duration::from_millis(1_000);

/// A connection takes a process of the server, which answers several questions.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// As long as the longest lease that may be forgotten, and its drift.
const QUIET: Duration = Duration::from_millis(TTL.as_millis() as u64 * 11 / 10);

struct Postgres {
    server: PgServer,
    reigns: Reigns,
    /// The transaction that has locked our tables.
    locker: Option<PgClient>,
}

pub(super) fn is_here(url: &str) -> bool {
    url.starts_with("postgres://")
}

/// The url for clients that know nothing of us.
pub(crate) fn plain_url(url: &str) -> Option<&str> {
    let is_here = is_here(url);
    is_here.then(|| url.strip_suffix(ASYNC).unwrap_or(url))
}

/// A child's store.
pub(super) fn open(url: &str) -> Result<PostgresStore, StoreError> {
    let builder = PostgresStore::builder(url.strip_suffix(ASYNC).unwrap_or(url));
    let is_async = url.ends_with(ASYNC);
    builder
        .connect_timeout(CONNECT_TIMEOUT)
        .synchronous_commit(!is_async)
        .connect_lazy()
}

fn url(hosts: &[String]) -> String {
    format!("postgres://postgres@{}/postgres?sslmode=disable", hosts[0])
}

fn async_url(hosts: &[String]) -> String {
    format!("{}{ASYNC}", url(hosts))
}

pub(super) fn start(is_async: bool, slots: usize) -> Deployment {
    let server = PgServer::builder()
        .config("max_connections = 300")
        // A transaction whose client is cut off keeps its locks for no longer.
        .config("idle_in_transaction_session_timeout = '1s'")
        .config("wal_writer_delay = '200ms'")
        .start();
    let mut admin = server.client();
    admin.run(PostgresStore::SQL);
    if is_async {
        admin.run(&format!(
            "UPDATE lockstream.state SET quiet = {}",
            QUIET.as_micros()
        ));
    }
    admin.run(
        "CREATE TABLE register (key text PRIMARY KEY, value bigint NOT NULL); \
         CREATE TABLE ledger (key text, token bigint, before bigint); \
         CREATE TABLE looks (many bigint); INSERT INTO looks VALUES (0)",
    );
    let url = if is_async { async_url } else { url };
    Deployment {
        wires: Wires::of(slots, &[server.port()], |_| vec![0]).with_url(url),
        servers: Box::new(Postgres {
            server,
            reigns: Reigns::of_the_only_ones(1),
            locker: None,
        }),
    }
}

impl Servers for Postgres {
    /// As usual, but on a busy machine four attempts to connect may take all of their time.
    fn longest_recovery(&self) -> Duration {
        super::LONGEST_RECOVERY + 4 * CONNECT_TIMEOUT
    }

    fn begin(&mut self, stroke: &Stroke) {
        if servers::silences(stroke.kind) {
            self.reigns.falls_silent(now());
        }
        let server = &mut self.server;
        match stroke.kind {
            Kind::BackendsEnd => drop(server.terminate_all()),
            Kind::BackendCrash => server.crash(),
            Kind::TablesLocked => {
                let mut locker = server.client();
                // It waits for transactions that use them, which are short; if one does not end, nothing is locked.
                let locked = locker.try_run(
                    "SET lock_timeout = '500ms'; SET idle_in_transaction_session_timeout = 0; BEGIN; \
                     LOCK TABLE lockstream.lock, lockstream.ticket",
                );
                self.locker = locked.is_ok().then_some(locker);
            }
            Kind::Truncate => {
                let from = now();
                let mut admin = server.client();
                let tables =
                    "lockstream.lock, lockstream.holder, lockstream.guard, lockstream.ticket";
                let truncated = admin.try_run(&format!(
                    "SET lock_timeout = '2s'; BEGIN; \
                     UPDATE lockstream.state SET epoch = (SELECT greatest(max(epoch), 0) FROM lockstream.lock); \
                     TRUNCATE {tables}; COMMIT"
                ));
                if truncated.is_ok() {
                    self.reigns.flushed(0, Span { from, to: now() });
                }
            }
            Kind::Sweep => drop(server.client().try_rows("SELECT lockstream.sweep_1(0, 0)")),
            Kind::RestartKept => {
                server.kill();
                self.reigns.killed(0, now());
            }
            Kind::ServerStop => server.stop(),
            _ => {}
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        match stroke.kind {
            Kind::TablesLocked => self.locker = None,
            Kind::RestartKept => {
                self.server.restart();
                let now = now();
                self.reigns.answered(0, Span { from: now, to: now }, true);
            }
            Kind::ServerStop => self.server.cont(),
            // It recovers by itself.
            Kind::BackendCrash => while self.server.try_client().is_err() {},
            _ => {}
        }
        if servers::silences(stroke.kind) {
            self.reigns.speaks_again(now());
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        // A server that recovers cannot be asked. The look commits, as calls do, because it is timed.
        let sql = "WITH look AS (UPDATE looks SET many = many + 1) \
                   SELECT key, owner, expires_at - lockstream.now_1() FROM lockstream.lock \
                   WHERE owner LIKE '%:%' AND expires_at > lockstream.now_1() \
                   UNION ALL SELECT key, owner, expires_at - lockstream.now_1() FROM lockstream.holder \
                   WHERE expires_at > lockstream.now_1()";
        let client = self.server.try_client();
        let rows = client
            .and_then(|mut client| client.try_rows(sql))
            .unwrap_or_default();
        let lock = |row: &postgres::Row| StoredLock {
            key: row.get(0),
            owner: row.get(1),
            // The clock may have gone past the end since the row was chosen.
            left: Some(Duration::from_micros(
                u64::try_from(row.get::<_, i64>(2)).unwrap_or(0),
            )),
        };
        rows.iter().map(lock).collect()
    }

    fn leftovers(&mut self) -> Leftovers {
        let mut client = self.server.client();
        // A withdrawal that got no answer leaves its ticket to whoever asks for the key next, or to a sweep.
        client.rows("SELECT lockstream.sweep_1(3600000000, 0)");
        let mut texts =
            |sql: &str| -> Vec<String> { client.rows(sql).iter().map(|row| row.get(0)).collect() };
        Leftovers {
            keys: texts(
                "SELECT key || ' of ' || owner FROM lockstream.lock \
                 WHERE owner LIKE '%:%' AND expires_at > lockstream.now_1() \
                 UNION ALL SELECT key || ' of ' || owner FROM lockstream.holder WHERE expires_at > lockstream.now_1()",
            ),
            queue_entries: texts("SELECT key || ': ' || owner FROM lockstream.ticket"),
            subscriptions: texts("SELECT 'line ' || pid FROM pg_locks WHERE locktype = 'advisory'"),
            connections: texts(
                "SELECT pid || ' ' || query FROM pg_stat_activity \
                 WHERE backend_type = 'client backend' AND application_name <> 'harness'",
            ),
            ..Leftovers::default()
        }
    }

    fn reigns(&self) -> Reigns {
        self.reigns.clone()
    }

    fn log(&self) -> Option<String> {
        Some(self.server.log())
    }

    /// Each update has read what the one before it wrote, and no smaller token came after a greater one.
    fn table(&mut self) -> TableVerdict {
        let mut client = self.server.client();
        let rows = client.rows(
            "SELECT 'of ' || key || ', value ' || value || ' after ' || (SELECT count(*) FROM ledger l WHERE l.key = r.key) \
             || ' updates' FROM register r WHERE value <> (SELECT count(*) FROM ledger l WHERE l.key = r.key) \
             UNION ALL SELECT 'of ' || key || ', ' || count(*) || ' updates have read ' || before \
             FROM ledger GROUP BY key, before HAVING count(*) > 1 \
             UNION ALL SELECT 'of ' || key || ', token ' || token || ' after ' || last FROM (SELECT *, max(token) OVER \
             (PARTITION BY key ORDER BY before ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS last FROM ledger) l \
             WHERE token < last",
        );
        TableVerdict {
            updates: client.one::<i64>("SELECT count(*) FROM ledger") as u64,
            breaches: rows.iter().map(|row| row.get(0)).collect(),
        }
    }
}
