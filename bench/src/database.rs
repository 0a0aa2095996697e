//! A PostgreSQL server of the run's own, with a database for what is measured.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use rustix::param::clock_ticks_per_second;

use crate::libs::{Outcome, told};
use crate::support::{PgServer, find_programs, postgres_program};

/// One library has a connection for each of a thousand tasks.
const CONNECTIONS: u32 = 1_200;

/// What marks the lines that the server logs of the database that is measured.
const MARK: &str = "bench LOG:  ";

/// A running server; it ends when this is dropped.
pub(crate) struct Database {
    server: PgServer,
    version: String,
}

impl Database {
    pub(crate) fn start() -> Outcome<Self> {
        find_programs()?;
        let server = PgServer::builder()
            // As it comes from its makers, unlike in tests.
            .config("fsync = on")
            .config("full_page_writes = on")
            .config("shared_buffers = 128MB")
            .config("max_wal_size = 1GB")
            .config(format!("max_connections = {CONNECTIONS}"))
            .config("log_line_prefix = '%d '")
            .start();
        server.run("CREATE DATABASE bench");
        let version: String = server.one("SHOW server_version");
        let number = version.split(' ').next().unwrap_or_default();
        let version = format!("postgresql {number}");
        Ok(Self { server, version })
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn url(&self) -> String {
        self.server.url().replace("/postgres?", "/bench?")
    }

    pub(crate) fn pid(&self) -> String {
        self.server.pid().to_string()
    }

    pub(crate) fn folder(&self) -> PathBuf {
        self.server.folder().to_path_buf()
    }

    /// Makes the database anew: no row and no table is left of the last round.
    pub(crate) fn empty(&self) {
        self.server.run("DROP DATABASE bench WITH (FORCE)");
        self.server.run("CREATE DATABASE bench");
    }

    /// The processor time of all of its processes so far, in seconds.
    pub(crate) fn processor_secs(&self) -> Outcome<f64> {
        let mut ticks = 0;
        for (place, pid) in self.server.pids().iter().enumerate() {
            let path = format!("/proc/{}/stat", pid.as_raw_pid());
            let Ok(stat) = fs::read_to_string(&path) else {
                // It has ended since, and its time is the first one's.
                continue;
            };
            let fields: Vec<u64> = stat
                .rsplit_once(')')
                .map(|(_, rest)| rest.split_whitespace().skip(11).take(4))
                .into_iter()
                .flatten()
                .filter_map(|field| field.parse().ok())
                .collect();
            // The first one's children that have ended are its third and fourth.
            let many = if place == 0 { 4 } else { 2 };
            ticks += fields.iter().take(many).sum::<u64>();
        }
        Ok(ticks as f64 / clock_ticks_per_second() as f64)
    }

    /// How many connections to the database there are.
    pub(crate) fn connections(&self) -> i64 {
        self.server
            .one("SELECT count(*) FROM pg_stat_activity WHERE datname = 'bench'")
    }

    /// Logs each statement from here on.
    pub(crate) fn log_statements(&self, logs: bool) {
        let what = if logs { "all" } else { "none" };
        self.server
            .run(&format!("ALTER SYSTEM SET log_statement = '{what}'"));
        self.server.run("SELECT pg_reload_conf()");
    }

    /// How many statements of the database it has logged. Each is a transaction of its own, if no transaction is begun.
    pub(crate) fn statements(&self) -> u64 {
        let log = self.server.log();
        let lines = log.lines().filter_map(|line| line.strip_prefix(MARK));
        lines
            .filter(|line| line.starts_with("execute ") || line.starts_with("statement: "))
            .count() as u64
    }

    /// How long a flush of the disk takes, in µs, by `pg_test_fsync`.
    pub(crate) fn flush(&self) -> Outcome<f64> {
        let file = self.server.folder().join("flush");
        let mut command = Command::new(postgres_program("pg_test_fsync"));
        let output = command
            .args(["-s", "1", "-f"])
            .arg(&file)
            .output()
            .map_err(told("pg_test_fsync"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // `fdatasync    9021.300 ops/sec     111 usecs/op`; the first is of one write of 8 kB.
        let line = text
            .lines()
            .find(|line| line.trim_start().starts_with("fdatasync"));
        let micros = line.and_then(|line| line.split_whitespace().rev().nth(1)?.parse().ok());
        micros.ok_or_else(|| format!("pg_test_fsync said nothing of fdatasync: {text}"))
    }
}
