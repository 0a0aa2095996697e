//! Leadership through crashes: of three candidates one leads. Four times the leader is killed with
//! SIGKILL, and the next takes over within the ttl; then one resigns, and the next takes over at
//! once. What came of it is printed as a picture, a lane for each candidate.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example leader   # three processes on that server
//! cargo run --example leader                                # three threads of this process
//! ```
//!
//! [`stand`] is what a service would do. The rest starts, kills, listens and draws.

use std::fmt;
use std::io::{Read, Write};
use std::pin::pin;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use futures::StreamExt;
use lockstream::store::MemoryStore;
use lockstream::{BuildError, Leadership, LockRegistry, StoreError};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

/// How long a lead lasts when its holder is not heard of any more.
const TTL: Duration = Duration::from_millis(1300);

/// How long each leader is left in peace: part of its lease, so that it is renewed meanwhile.
const REIGN: Duration = Duration::from_millis(600);

/// How many leaders are killed.
const KILLS: usize = 4;

/// For what must come about sooner or later.
const PATIENCE: Duration = Duration::from_secs(10);

/// How late the next leader may be, on a machine that has other things to do.
const LATE: Duration = Duration::from_millis(750);

/// One character of the picture.
const COLUMN: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("usage: leader")]
    Usage,
    #[error("the server in REDIS_URL cannot be used: {0}")]
    Server(#[from] StoreError),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error("a candidate cannot be run: {0}")]
    Process(#[from] std::io::Error),
    #[error("candidate {0}: {1}")]
    Candidate(char, String),
    #[error("nobody leads after {PATIENCE:?}")]
    Vacant,
    #[error("candidates {0} and {1} lead at the same time")]
    Two(char, char),
    #[error("interrupted; what was held is released")]
    Interrupted,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ended = match arguments[..] {
        [] => play().await,
        ["--candidate", prefix] => be_candidate(prefix).await,
        _ => Err(Error::Usage),
    };
    match ended {
        Ok(code) => code,
        Err(error) => {
            eprintln!("leader: {error}");
            match error {
                Error::Usage => ExitCode::from(2),
                Error::Interrupted => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Stands for the lead until it is asked to leave, and says how it goes.
async fn stand(locks: LockRegistry, leave: impl Future<Output = ()>, say: impl Fn(Said)) {
    let mut campaign = locks.obtain("lead").ttl(TTL).leadership();
    let mut leave = pin!(leave);
    loop {
        tokio::select! {
            Some(leadership) = campaign.next() => say(match leadership {
                // A real one would begin its work here, and end it at `lease.lost()`, or at the next item. Work that
                // is one future is run by `lock.lead(…)`, which does just that.
                Leadership::Leader(lease) => Said::Leads(lease.token().get()),
                Leadership::Follower => Said::Follows,
                Leadership::Ended(why) => Said::Fails(why.to_string()),
                _ => continue,
            }),
            () = &mut leave => break,
        }
    }
    campaign.resign().await;
    locks.shutdown().await;
}

/// What a candidate tells of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Follows,
    Leads(u64),
    Fails(String),
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Follows => f.write_str("follows"),
            Self::Leads(token) => write!(f, "leads {token}"),
            Self::Fails(why) => write!(f, "fails {why}"),
        }
    }
}

impl Said {
    fn read(line: &str) -> Self {
        let token = line.strip_prefix("leads ");
        match token.and_then(|token| token.parse().ok()) {
            Some(token) => Self::Leads(token),
            None if line == "follows" => Self::Follows,
            None => Self::Fails(line.strip_prefix("fails ").unwrap_or(line).to_owned()),
        }
    }
}

/// What a child process does: it stands until its input ends, so it does not outlive its parent.
async fn be_candidate(prefix: &str) -> Result<ExitCode, Error> {
    // What cannot be told is told to nobody: the parent is gone, which shows at the input.
    let say = |said: Said| drop(writeln!(std::io::stdout(), "{said}"));
    let url = std::env::var("REDIS_URL").unwrap_or_default();
    let locks = async {
        let locks = LockRegistry::builder_for(url)?.prefix(prefix).build()?;
        locks.check().await?;
        Ok::<_, Box<dyn std::error::Error>>(locks)
    };
    let locks = match locks.await {
        Ok(locks) => locks,
        Err(error) => {
            say(Said::Fails(error.to_string()));
            return Ok(ExitCode::FAILURE);
        }
    };
    let (sender, ended) = oneshot::channel();
    // A thread of its own: one that waits for input must not keep the process from ending.
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        drop::<oneshot::Sender<()>>(sender);
    });
    stand(locks, async { drop(ended.await) }, say).await;
    Ok(ExitCode::SUCCESS)
}

/// Where candidates live.
enum Place {
    Processes { url: String, prefix: String },
    Threads(MemoryStore),
}

impl Place {
    /// A server that is not there is told before anything begins.
    async fn find() -> Result<Self, Error> {
        let url = std::env::var("REDIS_URL").ok();
        let Some(url) = url.filter(|url| !url.is_empty()) else {
            return Ok(Self::Threads(MemoryStore::new()));
        };
        LockRegistry::connect(&*url).await?.check().await?;
        let prefix = format!("leader-{}", std::process::id());
        Ok(Self::Processes { url, prefix })
    }

    fn start(&self, say: impl Fn(Said) + Send + 'static) -> Result<Candidate, Error> {
        match self {
            Self::Processes { prefix, .. } => Candidate::process(prefix, say),
            Self::Threads(store) => Ok(Candidate::thread(store.clone(), say)),
        }
    }

    /// Takes away the one key that locks leave behind: the counter of fencing tokens.
    async fn tidy(&self) {
        let Self::Processes { url, prefix } = self else {
            return;
        };
        let fence = format!("{prefix}:~fence");
        let delete = async {
            let client = redis::Client::open(&**url)?;
            let patient = redis::AsyncConnectionConfig::new()
                .set_connection_timeout(Some(PATIENCE))
                .set_response_timeout(Some(PATIENCE));
            let connecting = client.get_multiplexed_async_connection_with_config(&patient);
            redis::cmd("DEL")
                .arg(&fence)
                .exec_async(&mut connecting.await?)
                .await
        };
        if let Err(error) = delete.await {
            eprintln!("leader: the key {fence} stays behind: {error}");
        }
    }
}

/// A candidate, as the one who plays with it sees it.
enum Candidate {
    Process {
        child: Box<Child>,
        /// Dropped, the process leaves.
        input: ChildStdin,
    },
    Thread {
        kill: oneshot::Sender<()>,
        /// Dropped, the thread leaves.
        leave: oneshot::Sender<()>,
        gone: oneshot::Receiver<()>,
    },
}

impl Candidate {
    /// This very program, run again.
    fn process(prefix: &str, say: impl Fn(Said) + Send + 'static) -> Result<Self, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["--candidate", prefix])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        // A Ctrl-C is the parent's, whose end is the end of the child's input.
        #[cfg(unix)]
        command.process_group(0);
        let mut child = command.spawn()?;
        let input = child.stdin.take().expect("piped");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                say(Said::read(&line));
            }
            say(Said::Fails("it ended early".to_owned()));
        });
        let child = Box::new(child);
        Ok(Self::Process { child, input })
    }

    /// A thread with a registry and a runtime of its own, which to the others is like a process.
    fn thread(store: MemoryStore, say: impl Fn(Said) + Send + 'static) -> Self {
        let (kill, killed) = oneshot::channel();
        let (leave, left) = oneshot::channel::<()>();
        let (going, gone) = oneshot::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime can be had");
            runtime.block_on(async {
                let locks = LockRegistry::builder(store)
                    .build()
                    .expect("the defaults are valid");
                let mut standing = Box::pin(stand(locks, async { drop(left.await) }, say));
                tokio::select! {
                    () = &mut standing => {}
                    // What a SIGKILL leaves: nobody renews the lease, since its runtime ends, and nobody releases it.
                    Ok(()) = killed => std::mem::forget(standing),
                }
            });
            drop(runtime);
            drop::<oneshot::Sender<()>>(going);
        });
        Self::Thread { kill, leave, gone }
    }

    async fn kill(self) {
        match self {
            Self::Process { mut child, .. } => {
                // SIGKILL, which nobody can catch. It fails only if there is none to kill.
                let _ = child.kill().await;
            }
            Self::Thread { kill, gone, .. } => {
                let _ = kill.send(());
                let _ = gone.await;
            }
        }
    }

    async fn leave(self) {
        match self {
            Self::Process { mut child, input } => {
                drop(input);
                // One that does not go is killed when it is dropped.
                let _ = timeout(PATIENCE, child.wait()).await;
            }
            Self::Thread { leave, gone, .. } => {
                drop(leave);
                let _ = gone.await;
            }
        }
    }
}

/// A candidate's line in the picture, through several lives.
struct Lane {
    name: char,
    candidate: Option<Candidate>,
    /// Which life of the candidate is the present one: what was said in others is old.
    life: usize,
    marks: Vec<(Instant, Mark)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    Away,
    Follows,
    Leads,
    Killed,
    Resigned,
}

impl Lane {
    fn mark(&mut self, mark: Mark) {
        self.marks.push((Instant::now(), mark));
    }

    fn last(&self) -> Mark {
        self.marks.last().map_or(Mark::Away, |(_, mark)| *mark)
    }
}

/// One term of one leader.
struct Term {
    lane: usize,
    token: u64,
    began: Instant,
    /// Since the term before ended.
    vacant: Option<Duration>,
    ended: Option<(Instant, Mark)>,
}

struct Play {
    place: Place,
    began: Instant,
    lanes: [Lane; 3],
    terms: Vec<Term>,
    sender: mpsc::UnboundedSender<(usize, usize, Said)>,
    said: mpsc::UnboundedReceiver<(usize, usize, Said)>,
}

async fn play() -> Result<ExitCode, Error> {
    let place = Place::find().await?;
    let stop = interrupted();
    let what = match &place {
        Place::Processes { .. } => "processes",
        Place::Threads(_) => "threads on a memory store (set REDIS_URL for processes)",
    };
    println!("3 {what}; a lead that is not renewed ends after {TTL:?}\n");
    let (sender, said) = mpsc::unbounded_channel();
    let mut play = Play {
        place,
        began: Instant::now(),
        lanes: ['A', 'B', 'C'].map(|name| Lane {
            name,
            candidate: None,
            life: 0,
            marks: Vec::new(),
        }),
        terms: Vec::new(),
        sender,
        said,
    };
    let ended = tokio::select! {
        ended = play.run() => ended,
        () = stop => Err(Error::Interrupted),
    };
    for lane in &mut play.lanes {
        if let Some(candidate) = lane.candidate.take() {
            candidate.leave().await;
        }
    }
    play.place.tidy().await;
    ended?;
    Ok(play.report())
}

impl Play {
    async fn run(&mut self) -> Result<(), Error> {
        for lane in 0..self.lanes.len() {
            self.start(lane)?;
        }
        for term in 0..KILLS + 2 {
            let leader = self.next_leader().await?;
            self.listen(REIGN).await?;
            if term < KILLS {
                self.end(leader, Mark::Killed).await;
                // As whoever supervises it would do.
                self.start(leader)?;
            } else if term == KILLS {
                self.end(leader, Mark::Resigned).await;
            }
        }
        Ok(())
    }

    fn start(&mut self, number: usize) -> Result<(), Error> {
        let lane = &mut self.lanes[number];
        lane.life += 1;
        let (life, sender) = (lane.life, self.sender.clone());
        let say = move |said| {
            // Nobody listens when the play is over.
            let _ = sender.send((number, life, said));
        };
        lane.candidate = Some(self.place.start(say)?);
        Ok(())
    }

    async fn end(&mut self, number: usize, how: Mark) {
        let lane = &mut self.lanes[number];
        lane.life += 1;
        lane.mark(how);
        let term = self.terms.last_mut().expect("somebody leads");
        term.ended = Some((Instant::now(), how));
        if let Some(candidate) = lane.candidate.take() {
            match how {
                Mark::Killed => candidate.kill().await,
                _ => candidate.leave().await,
            }
        }
    }

    /// Resolves when somebody says that it leads.
    async fn next_leader(&mut self) -> Result<usize, Error> {
        let until = Instant::now() + PATIENCE;
        loop {
            let Ok(Some((lane, life, said))) = timeout_at(until, self.said.recv()).await else {
                return Err(Error::Vacant);
            };
            if self.note(lane, life, said)? {
                return Ok(lane);
            }
        }
    }

    async fn listen(&mut self, time: Duration) -> Result<(), Error> {
        let until = Instant::now() + time;
        while let Ok(Some((lane, life, said))) = timeout_at(until, self.said.recv()).await {
            self.note(lane, life, said)?;
        }
        Ok(())
    }

    /// Writes down what a candidate said; true if it leads.
    fn note(&mut self, number: usize, life: usize, said: Said) -> Result<bool, Error> {
        let lane = &mut self.lanes[number];
        if life != lane.life {
            return Ok(false);
        }
        let token = match said {
            Said::Fails(why) => return Err(Error::Candidate(lane.name, why)),
            Said::Follows => {
                lane.mark(Mark::Follows);
                return Ok(false);
            }
            Said::Leads(token) => token,
        };
        lane.mark(Mark::Leads);
        let name = lane.name;
        let before = self.terms.last().and_then(|term| term.ended);
        self.terms.push(Term {
            lane: number,
            token,
            began: Instant::now(),
            vacant: before.map(|(ended, _)| ended.elapsed()),
            ended: None,
        });
        let others = self.lanes.iter().filter(|other| other.name != name);
        let mut others = others.filter(|other| other.last() == Mark::Leads);
        others
            .next()
            .map_or(Ok(true), |other| Err(Error::Two(other.name, name)))
    }

    fn report(&self) -> ExitCode {
        let ended = Instant::now();
        let columns = ended.duration_since(self.began).as_millis() / COLUMN.as_millis() + 1;
        let columns = u32::try_from(columns).unwrap_or(u32::MAX);
        let seconds: String = (0..=columns / 10).map(|s| format!("{s:<10}")).collect();
        println!("     {}", seconds.trim_end());
        for lane in &self.lanes {
            let picture: String = (0..columns)
                .map(|column| lane.at(self.began + COLUMN * column))
                .collect();
            println!("  {}  {}", lane.name, picture.trim_end());
        }
        println!(
            "     █ leads   · follows   ✗ killed, and started anew   ○ resigned   (1 s is 10 columns)\n"
        );

        println!("  term  leader  token                 led for  ended     vacant before");
        let mut right = self.terms.is_sorted_by(|a, b| a.token < b.token);
        let mut how_before = None;
        for (number, term) in self.terms.iter().enumerate() {
            let (until, how) = match term.ended {
                Some((at, Mark::Killed)) => (at, "killed"),
                Some((at, _)) => (at, "resigned"),
                None => (ended, "at the end"),
            };
            let led = until.duration_since(term.began);
            let vacant = match term.vacant {
                Some(vacant) => {
                    let most = if how_before == Some("killed") {
                        TTL
                    } else {
                        Duration::ZERO
                    };
                    right &= vacant <= most + LATE;
                    format!("{} ms", vacant.as_millis())
                }
                None => String::new(),
            };
            println!(
                "  {:>4}  {:<6}  {:<20}  {:>4} ms  {how:<10}{vacant:>13}",
                number + 1,
                self.lanes[term.lane].name,
                term.token,
                led.as_millis(),
            );
            how_before = Some(how);
        }
        if right {
            println!(
                "\neach token is greater than the last; nobody waited longer than the ttl for a leader"
            );
            ExitCode::SUCCESS
        } else {
            println!("\na token did not grow, or the next leader came too late");
            ExitCode::FAILURE
        }
    }
}

impl Lane {
    /// What it was in the column that begins at `from`: how it ended, if it did, else how it stood.
    fn at(&self, from: Instant) -> char {
        let until = from + COLUMN;
        let marks = self.marks.iter().filter(|(at, _)| *at < until);
        let mut mark = Mark::Away;
        for (at, next) in marks {
            let ends = matches!(mark, Mark::Killed | Mark::Resigned);
            let here = *at >= from;
            // A start right after an end would hide it.
            if !(ends && here) {
                mark = *next;
            }
            if !here && matches!(mark, Mark::Killed | Mark::Resigned) {
                mark = Mark::Away;
            }
        }
        match mark {
            Mark::Away => ' ',
            Mark::Follows => '·',
            Mark::Leads => '█',
            Mark::Killed => '✗',
            Mark::Resigned => '○',
        }
    }
}

/// Resolves at a Ctrl-C or SIGTERM, and at one that came before it is polled.
fn interrupted() -> impl Future<Output = ()> {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::interrupt(), SignalKind::terminate()];
        let [mut int, mut term] = kinds.map(|kind| signal(kind).expect("it can be caught"));
        async move {
            tokio::select! {
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
        }
    }
    #[cfg(not(unix))]
    {
        let heard = tokio::spawn(tokio::signal::ctrl_c());
        async move {
            let _ = heard.await;
        }
    }
}
