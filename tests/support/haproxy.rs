//! How does a test get a proxy as people have it before their servers?

use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::PATIENCE;
use super::keeper::Process;
use super::ports::Port;

/// HAProxy in TCP mode before a server.
#[derive(Debug)]
pub struct HaProxy {
    port: Port,
    _process: Process,
    _folder: TempDir,
}

impl HaProxy {
    /// Before the server at this port. It ends connections on which nothing was sent for `idle`.
    pub fn to(server: u16, idle: Duration) -> Self {
        let program = env::var_os("LOCKSTREAM_HAPROXY").map(PathBuf::from);
        let path = env::var_os("PATH").unwrap_or_default();
        let mut places = env::split_paths(&path)
            .chain(["/usr/sbin".into(), "/opt/homebrew/bin".into()])
            .map(|folder| folder.join("haproxy"));
        let program = program.or_else(|| places.find(|place| place.exists()));
        let program = program.expect(
            "this test needs HAProxy: `apt-get install haproxy`, `brew install haproxy`, run the tests with \
             `./tests/run`, which sees to it, or name the program in LOCKSTREAM_HAPROXY",
        );
        let (folder, port) = (
            tempfile::tempdir().expect("a temporary folder"),
            Port::pick(),
        );
        let config = folder.path().join("haproxy.cfg");
        let idle = idle.as_millis();
        let lines = format!(
            "defaults\n  mode tcp\n  timeout connect 1s\n  timeout client {idle}ms\n  timeout server {idle}ms\n\
             listen redis\n  bind 127.0.0.1:{}\n  server one 127.0.0.1:{server}\n",
            port.number()
        );
        fs::write(&config, lines).expect("the folder is ours");
        let words = [
            program.as_os_str(),
            "-db".as_ref(),
            "-f".as_ref(),
            config.as_os_str(),
        ];
        let process = Process::spawn(&words, folder.path(), "KILL", None);
        let begin = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port.number())).is_err() {
            let log = process.log.text();
            assert!(begin.elapsed() < PATIENCE, "no proxy: {log}");
            std::thread::sleep(super::LOOK_AGAIN);
        }
        Self {
            port,
            _process: process,
            _folder: folder,
        }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port.number())
    }
}
