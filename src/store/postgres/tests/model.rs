//! The functions in the database do what the model in memory does.

use postgres::{Client, NoTls};
use proptest::prelude::*;

use super::support::PgServer;
use crate::store::contract::KeyStatus;
use crate::store::driver::{Reply, Request};
use crate::store::model;
use crate::store::model::{Answers, INSTANCES, KEYS, PREFIX, Server, TTL};
use crate::store::postgres::call::{Call, Names};
use crate::store::postgres::{call, notice, schema};

/// By instance. Nobody holds the last.
const LINES: [i64; INSTANCES.len()] = [101, 102, 103];

/// Unused rows are deleted.
#[derive(Clone, Debug)]
struct Sweep;

struct Functions(Client);

fn names(who: usize) -> Names {
    Names::new(PREFIX.into(), INSTANCES[who].into(), schema::USUAL, TTL)
}

fn lock(key: usize) -> String {
    names(0).lock(KEYS[key])
}

impl Functions {
    fn run(&mut self, sql: &str) {
        self.0.batch_execute(sql).unwrap();
    }
}

impl Server for Functions {
    type Step = Sweep;
    const FENCES: [usize; KEYS.len()] = [0, 1, 2];
    /// Whoever calls is there: its line is its own.
    const CALLER_IS_LIVE: bool = true;

    fn own_steps() -> BoxedStrategy<Sweep> {
        Just(Sweep).boxed()
    }

    fn clear(&mut self) {
        self.run(
            "TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard, lockstream.ticket; \
             UPDATE lockstream.state SET epoch = 0",
        );
    }

    fn call(&mut self, who: usize, requests: &[Request]) -> Answers {
        let names = names(who);
        let call = Call::new(&names, true, LINES[who], u64::MAX, requests);
        let rows = self
            .0
            .query_typed(&names.sql(call::OPS), &call.arguments())
            .unwrap();
        assert_eq!(rows.len(), requests.len());
        let (mut outcomes, mut events) = (Vec::new(), Vec::new());
        for (row, request) in rows.iter().zip(requests) {
            let said = call::read(row, request).unwrap();
            let Reply::Done {
                outcome,
                unserved: false,
                ..
            } = said.reply
            else {
                panic!("{request:?}: {said:?}");
            };
            outcomes.push(outcome);
            for notice in said.notices.chunks(3) {
                let (line, text): (i64, _) = (notice[0].parse().unwrap(), &notice[2]);
                let who = LINES.iter().position(|it| *it == line).unwrap();
                let read = notice::read(PREFIX, INSTANCES[who], text);
                // Of the lock that the op was about.
                let own = format!(" {}", names.lock(request.key()));
                assert!(!read.is_empty() && text.ends_with(&own), "{notice:?}");
                events.extend(read.into_iter().map(|event| (who, event)));
            }
        }
        (outcomes, events)
    }

    fn run_out(&mut self, key: usize) {
        let name = lock(key);
        self.run(&format!(
            "UPDATE lockstream.lock SET expires_at = 0 WHERE key = '{name}'; \
             UPDATE lockstream.holder SET expires_at = 0 WHERE key = '{name}'"
        ));
    }

    fn take(&mut self, _: &Sweep, _: &mut [u64; KEYS.len()]) {
        // It deletes all tickets of the dead, and not one by one.
        self.run(
            "SELECT lockstream.sweep_1(3600000000, 0) \
             WHERE NOT EXISTS (SELECT 1 FROM lockstream.ticket WHERE line = 103)",
        );
    }

    fn written_owner(&mut self, key: usize) -> Option<String> {
        let sql = "SELECT owner FROM lockstream.lock WHERE key = $1 AND owner <> ''";
        let found = self.0.query_opt(sql, &[&lock(key)]).unwrap();
        found.map(|row| row.get(0))
    }

    fn look(&mut self, key: usize) -> (KeyStatus, Vec<String>) {
        let name = lock(key);
        let rows = self
            .0
            .query(&names(0).sql(call::INSPECT), &[&name, &0_i64])
            .unwrap();
        let status = call::read_status(&rows).unwrap();
        let sql =
            "SELECT owner FROM lockstream.ticket WHERE key = $1 AND ttl IS NULL ORDER BY score";
        let listeners = self.0.query(sql, &[&name]).unwrap();
        // A free lock has no ticket, and each shared lease its guard.
        let broken = self.0.query(
            "SELECT 1 FROM lockstream.lock l WHERE key = $1 AND owner IS NULL \
             AND (waited OR EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key)) \
             UNION ALL SELECT 2 FROM lockstream.lock l WHERE key = $1 AND NOT waited \
             AND EXISTS (SELECT 1 FROM lockstream.ticket t WHERE t.key = l.key) \
             UNION ALL SELECT 3 FROM lockstream.holder h FULL JOIN lockstream.guard g USING (key, owner) \
             WHERE key = $1 AND owner <> '' AND (h.weight IS NULL OR g.key IS NULL) \
             UNION ALL SELECT 4 FROM lockstream.lock l WHERE key = $1 AND owner = '' AND NOT waited \
             AND NOT EXISTS (SELECT 1 FROM lockstream.holder h WHERE h.key = l.key)",
            &[&name],
        );
        assert_eq!(broken.unwrap().len(), 0, "{name}");
        (status, listeners.iter().map(|row| row.get(0)).collect())
    }
}

#[test]
fn the_functions_agree_with_the_model() {
    // What is kept for a listener must not run out while it is looked at.
    let (ours, theirs) = ("at + 100000;", "at + 300000000;");
    assert!(schema::SQL.contains(ours));
    let sql = schema::SQL.replace(ours, theirs);
    let server = PgServer::start();
    let connect = || Client::connect(&server.url(), NoTls).unwrap();
    let mut others = Functions(connect());
    others.run("SELECT pg_advisory_lock(101), pg_advisory_lock(102)");
    let mut functions = Functions(connect());
    functions.run(&sql);
    model::agree("PostgreSQL", functions);
}
