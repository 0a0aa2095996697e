//! The peers, by language, and how their programs are built.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::libs::Outcome;
use crate::target::Store;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Language {
    Rust,
    Go,
    Java,
    Node,
    Python,
}

use Language::{Go, Java, Node, Python, Rust};

#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    pub(super) name: &'static str,
    pub(super) language: Language,
    /// Where its locks are.
    pub(super) store: Store,
}

const fn peer(name: &'static str, language: Language) -> Peer {
    let store = Store::Redis;
    Peer {
        name,
        language,
        store,
    }
}

const fn on_postgres(name: &'static str) -> Peer {
    let store = Store::Postgres;
    Peer {
        store,
        ..peer(name, Rust)
    }
}

/// In the order in which each round runs them.
pub(super) const PEERS: [Peer; 20] = [
    peer("lockstream", Rust),
    peer("bare", Rust),
    peer("rslock", Rust),
    peer("async-redis-lock", Rust),
    peer("rueidislock", Go),
    peer("rueidislock-1", Go),
    peer("redsync", Go),
    peer("redislock", Go),
    peer("redisson", Java),
    peer("redisson-fair", Java),
    peer("redisson-spin", Java),
    peer("redisson-fenced", Java),
    peer("spring", Java),
    peer("spring-pubsub", Java),
    peer("redlock", Node),
    peer("redis-semaphore", Node),
    peer("redis-py", Python),
    peer("python-redis-lock", Python),
    on_postgres("lockstream-postgres"),
    on_postgres("sqlx-advisory"),
];

impl Language {
    /// Before figures are taken, in milliseconds: a virtual machine compiles what is hot.
    pub(super) fn warm(self) -> u64 {
        match self {
            Java => 5_000,
            Node => 2_000,
            Rust | Go | Python => 1_000,
        }
    }

    /// What it needs, and what each program must say to be there.
    fn tools(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Rust => &[],
            Go => &[("go", "version")],
            Java => &[("java", "-version"), ("mvn", "-version")],
            Node => &[("node", "--version"), ("npm", "--version")],
            Python => &[("python3", "--version")],
        }
    }

    /// Builds its program below `built`, and gives the words that start it; or says why it is left out.
    pub(super) fn build(self, built: &Path) -> Outcome<Vec<String>> {
        for (tool, question) in self.tools() {
            let there = Command::new(tool)
                .arg(question)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            if !there.is_ok_and(|status| status.success()) {
                return Err(format!("there is no {tool}"));
            }
        }
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let text = |path: PathBuf| path.display().to_string();
        match self {
            Rust => {
                // Built beside this program, by cargo.
                let this = std::env::current_exe().map_err(|error| error.to_string())?;
                let program = this.with_file_name("peer");
                let hint = "cargo build --release -p lockstream-bench --bins";
                let is_there = program.is_file();
                is_there
                    .then(|| vec![text(program)])
                    .ok_or_else(|| format!("it is not built: {hint}"))
            }
            Go => {
                let program = text(built.join("go-peer"));
                run("go", &["build", "-o", &program, "."], &sources.join("go"))?;
                Ok(vec![program])
            }
            Java => {
                let target = built.join("java");
                let target = format!("-DbuildDirectory={}", target.display());
                run(
                    "mvn",
                    &["-q", "-B", &target, "package"],
                    &sources.join("java"),
                )?;
                let classes = format!("{0}/peers-1.jar:{0}/lib/*", built.join("java").display());
                Ok(["java", "-Xmx1g", "-cp", &classes, "Peer"]
                    .map(str::to_owned)
                    .to_vec())
            }
            Node => {
                let folder = built.join("node");
                std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
                for file in ["package.json", "package-lock.json", "peer.js"] {
                    let copied = std::fs::copy(sources.join("node").join(file), folder.join(file));
                    copied.map_err(|error| format!("{file}: {error}"))?;
                }
                run(
                    "npm",
                    &["ci", "--silent", "--no-audit", "--no-fund"],
                    &folder,
                )?;
                Ok(vec!["node".to_owned(), text(folder.join("peer.js"))])
            }
            Python => {
                let folder = text(built.join("python"));
                let install = [
                    "-m",
                    "pip",
                    "install",
                    "-q",
                    "--disable-pip-version-check",
                    "--no-input",
                    "--target",
                    &folder,
                    "-r",
                    "requirements.txt",
                ];
                run("python3", &install, &sources.join("python"))?;
                let program = text(sources.join("python").join("peer.py"));
                let path = format!("PYTHONPATH={folder}");
                Ok(["env", &path, "python3", &program]
                    .map(str::to_owned)
                    .to_vec())
            }
        }
    }
}

fn run(program: &str, words: &[&str], folder: &Path) -> Outcome<()> {
    let output = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let said: Vec<_> = said
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .take(5)
        .collect();
    Err(format!(
        "`{program} {}` failed: {}",
        words.join(" "),
        said.join("; ")
    ))
}
