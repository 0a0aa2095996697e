//! The fenced resource: a register a key, in the parent, that takes greater or equal tokens only. Readers look at it, and
//! those with a permit come in and leave: they are refused if an exclusive lease with a greater token was there before.
//!
//! One line asks and one answers, on a unix socket; a connection does one thing after another:
//!
//! | asked | answered |
//! |---|---|
//! | `read KEY TOKEN` | `value VALUE`, or `stale` if a greater token was seen |
//! | `write KEY TOKEN VALUE` | `written`, or `stale` |
//! | `look KEY TOKEN` | `value VALUE`, or `stale` |
//! | `enter KEY TOKEN WEIGHT LIMIT` | `done`, or `stale` |
//! | `leave KEY TOKEN` | `done`, or `stale` if others have taken its place |
//!
//! A read raises the mark, too: else one that read before, and writes after, a later holder's read would undo its write.
//!
//! A read and the write that follows it on the same connection, with the same key and token, are one addition. What came
//! of it is known here when the write was answered or the connection is gone, so the history that is kept has no open
//! ends: it is at least as strict as what the children saw.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};

use stateright::semantics::SequentialSpec;

use crate::judge::linear::{Op, Register, Ret, Step, Window};

/// A window of the history ends at the first moment with nothing under way after so many steps.
const WINDOW: usize = 64;

/// After so many steps additions that still wait for their write count as ended with their read. A write that comes then
/// counts by itself.
const LONGEST: usize = 400;

/// What the resource has let through, for the judge.
pub(crate) type Accepted = HashMap<String, Vec<u64>>;

/// All keys of the resource.
#[derive(Debug)]
pub(crate) struct Resource {
    registers: HashMap<String, Fenced>,
    /// Tokens of writes in the order in which they were let through, each once while it repeats.
    accepted: Accepted,
    pub(crate) writes: u64,
    pub(crate) refused: u64,
    /// The end of it is the checker's.
    windows: Option<Sender<Window>>,
}

/// One key.
#[derive(Debug, Default)]
struct Fenced {
    state: Register,
    /// The state in which the window began.
    origin: Register,
    steps: Vec<Step>,
    /// Additions under way, by connection: the token, what was read, and the step in which it began.
    open: HashMap<u64, (u64, usize)>,
    /// Who is inside with a permit, by connection: the token.
    entered: HashMap<u64, u64>,
    /// Which numbers of callers are taken; small ones, since the checker tries all of them.
    callers: Vec<Option<u64>>,
}

impl Fenced {
    fn caller(&mut self, connection: u64) -> usize {
        let taken = self.callers.iter().position(|who| *who == Some(connection));
        taken.unwrap_or_else(|| {
            let free = self.callers.iter().position(Option::is_none);
            let free = free.unwrap_or_else(|| {
                self.callers.push(None);
                self.callers.len() - 1
            });
            self.callers[free] = Some(connection);
            free
        })
    }

    fn begins(&mut self, connection: u64, op: Op) -> usize {
        let caller = self.caller(connection);
        self.steps.push(Step::Invoked(caller, op));
        caller
    }

    fn ends(&mut self, connection: u64, caller: usize, ret: Ret) {
        self.steps.push(Step::Returned(caller, ret));
        self.callers[caller] = None;
        self.open.remove(&connection);
    }

    /// An addition under way that will not be completed.
    fn abandon(&mut self, connection: u64) {
        if let Some((_, caller)) = self.open.get(&connection).copied() {
            self.ends(connection, caller, Ret::ReadOnly);
        }
    }

    fn read(&mut self, connection: u64, token: u64) -> Option<u64> {
        self.abandon(connection);
        let caller = self.begins(connection, Op::Add { token });
        if !self.state.admits(token) {
            self.ends(connection, caller, Ret::Stale);
            return None;
        }
        self.open.insert(connection, (token, caller));
        Some(self.state.value)
    }

    fn write(&mut self, connection: u64, token: u64, value: u64) -> bool {
        let taken = self.state.admits(token);
        let open = self.open.get(&connection).copied();
        if taken {
            self.state.value = value;
        }
        match open {
            Some((read_with, caller)) if read_with == token => {
                // A write that adds something else than one is the child's mistake, and shows as such.
                let ret = match taken {
                    true => Ret::Added(value.wrapping_sub(1)),
                    false => Ret::ReadOnly,
                };
                self.ends(connection, caller, ret);
            }
            _ => {
                self.abandon(connection);
                let caller = self.begins(connection, Op::Write { token, value });
                let ret = if taken { Ret::Written } else { Ret::Stale };
                self.ends(connection, caller, ret);
            }
        }
        taken
    }

    /// What is done at once: the same as in the model.
    fn at_once(&mut self, connection: u64, op: Op) -> Ret {
        let caller = self.begins(connection, op);
        let ret = self.state.invoke(&op);
        match op {
            Op::Enter { token, .. } => drop(self.entered.insert(connection, token)),
            Op::Leave { .. } => drop(self.entered.remove(&connection)),
            _ => {}
        }
        self.ends(connection, caller, ret.clone());
        ret
    }

    fn gone(&mut self, connection: u64) {
        self.abandon(connection);
        if let Some(token) = self.entered.get(&connection).copied() {
            self.at_once(connection, Op::Leave { token });
        }
    }

    fn window(&mut self, key: &str, at_once: bool) -> Option<Window> {
        if self.steps.len() >= LONGEST || at_once {
            let open: Vec<u64> = self.open.keys().copied().collect();
            for connection in open {
                self.abandon(connection);
            }
        }
        let enough = self.steps.len() >= WINDOW || at_once;
        if !enough || self.steps.is_empty() || !self.open.is_empty() {
            return None;
        }
        // Nothing is under way: what a look sees now is where this window ends and the next begins.
        self.steps.push(Step::Invoked(0, Op::Look));
        self.steps
            .push(Step::Returned(0, Ret::Seen(self.state.clone())));
        let origin = std::mem::replace(&mut self.origin, self.state.clone());
        Some(Window {
            key: key.to_owned(),
            origin,
            steps: std::mem::take(&mut self.steps),
        })
    }
}

impl Resource {
    /// Each window of a key's history goes to `windows` when it is complete.
    pub(crate) fn new(windows: Sender<Window>) -> Self {
        Self {
            registers: HashMap::new(),
            accepted: Accepted::new(),
            writes: 0,
            refused: 0,
            windows: Some(windows),
        }
    }

    pub(crate) fn read(&mut self, connection: u64, key: &str, token: u64) -> Option<u64> {
        let value = self.register(key).read(connection, token);
        self.refused += u64::from(value.is_none());
        self.cut(key, false);
        value
    }

    pub(crate) fn write(&mut self, connection: u64, key: &str, token: u64, value: u64) -> bool {
        let taken = self.register(key).write(connection, token, value);
        if taken {
            self.writes += 1;
            let accepted = self.accepted.entry(key.to_owned()).or_default();
            if accepted.last() != Some(&token) {
                accepted.push(token);
            }
        } else {
            self.refused += 1;
        }
        self.cut(key, false);
        taken
    }

    pub(crate) fn gone(&mut self, connection: u64) {
        for fenced in self.registers.values_mut() {
            fenced.gone(connection);
        }
    }

    /// Of a shared lease. `None`: the token is stale.
    pub(crate) fn share(&mut self, connection: u64, key: &str, op: Op) -> Option<Ret> {
        let ret = self.register(key).at_once(connection, op);
        self.cut(key, false);
        self.refused += u64::from(ret == Ret::Stale);
        Some(ret).filter(|ret| *ret != Ret::Stale)
    }

    /// Hands over what is left of the history, and gives what was let through. Nothing is judged from then on.
    pub(crate) fn finish(&mut self) -> Accepted {
        let keys: Vec<String> = self.registers.keys().cloned().collect();
        for key in keys {
            self.cut(&key, true);
        }
        self.windows = None;
        std::mem::take(&mut self.accepted)
    }

    fn cut(&mut self, key: &str, at_once: bool) {
        let window = self.register(key).window(key, at_once);
        if let (Some(window), Some(windows)) = (window, &self.windows) {
            windows
                .send(window)
                .expect("the checker ends when nothing more comes");
        }
    }

    fn register(&mut self, key: &str) -> &mut Fenced {
        if !self.registers.contains_key(key) {
            self.registers.insert(key.to_owned(), Fenced::default());
        }
        self.registers.get_mut(key).expect("put there just now")
    }
}

/// Serves children on a thread of its own for as long as the process lives.
pub(crate) fn serve(path: &Path, resource: Arc<Mutex<Resource>>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let listener = {
        let _inside = runtime.enter();
        UnixListener::bind(path)?
    };
    std::thread::spawn(move || {
        runtime.block_on(async move {
            for connection in 0.. {
                // One that is gone before it was accepted wants nothing.
                let Ok((stream, _)) = listener.accept().await else {
                    continue;
                };
                let resource = resource.clone();
                tokio::spawn(async move {
                    // A child that was killed in the middle of a line has gone, no more.
                    let _ = attend(stream, connection, &resource).await;
                    lock(&resource).gone(connection);
                });
            }
        });
    });
    Ok(())
}

/// A panic of another thread has been told already.
pub(crate) fn lock(resource: &Mutex<Resource>) -> std::sync::MutexGuard<'_, Resource> {
    resource.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn attend(stream: UnixStream, connection: u64, resource: &Mutex<Resource>) -> io::Result<()> {
    let (from, mut to) = stream.into_split();
    let mut lines = BufReader::new(from).lines();
    while let Some(line) = lines.next_line().await? {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields[at].parse::<u64>().map_err(io::Error::other);
        let answer = match fields[..] {
            ["read", key, _] => {
                let token = number(2)?;
                let value = lock(resource).read(connection, key, token);
                value.map_or("stale\n".to_owned(), |value| format!("value {value}\n"))
            }
            ["write", key, _, _] => {
                let (token, value) = (number(2)?, number(3)?);
                let taken = lock(resource).write(connection, key, token, value);
                (if taken { "written\n" } else { "stale\n" }).to_owned()
            }
            [what @ ("look" | "leave" | "enter"), key, _, ..] => {
                let token = number(2)?;
                let op = match what {
                    "look" => Op::Read { token },
                    "leave" => Op::Leave { token },
                    _ => Op::Enter {
                        token,
                        weight: number(3)?,
                        limit: number(4)?,
                    },
                };
                let done = lock(resource).share(connection, key, op);
                match done {
                    None => "stale\n".to_owned(),
                    Some(Ret::Value(value)) => format!("value {value}\n"),
                    Some(_) => "done\n".to_owned(),
                }
            }
            _ => return Err(io::Error::other("no such request")),
        };
        to.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}

/// A child's way to the resource.
#[derive(Debug)]
pub(crate) struct Client {
    lines: tokio::io::Lines<BufReader<OwnedReadHalf>>,
    to: OwnedWriteHalf,
}

impl Client {
    pub(crate) async fn connect(path: &Path) -> io::Result<Self> {
        let (from, to) = UnixStream::connect(path).await?.into_split();
        Ok(Self {
            lines: BufReader::new(from).lines(),
            to,
        })
    }

    /// `None`: the token is stale.
    pub(crate) async fn read(&mut self, key: &str, token: u64) -> io::Result<Option<u64>> {
        let answer = self.ask(format!("read {key} {token}\n")).await?;
        match answer.strip_prefix("value ") {
            Some(value) => value.parse().map(Some).map_err(io::Error::other),
            None => Ok(None),
        }
    }

    /// Whether the write was taken.
    pub(crate) async fn write(&mut self, key: &str, token: u64, value: u64) -> io::Result<bool> {
        let answer = self.ask(format!("write {key} {token} {value}\n")).await?;
        Ok(answer == "written")
    }

    /// What a reader sees. `None`: the token is stale.
    pub(crate) async fn look(&mut self, key: &str, token: u64) -> io::Result<Option<u64>> {
        let answer = self.ask(format!("look {key} {token}\n")).await?;
        let value = answer.strip_prefix("value ").map(str::parse);
        value.transpose().map_err(io::Error::other)
    }

    /// Whether one with a permit was let in.
    pub(crate) async fn enter(
        &mut self,
        key: &str,
        token: u64,
        (weight, limit): (u64, u64),
    ) -> io::Result<bool> {
        let line = format!("enter {key} {token} {weight} {limit}\n");
        Ok(self.ask(line).await? == "done")
    }

    /// Whether it was inside until now.
    pub(crate) async fn leave(&mut self, key: &str, token: u64) -> io::Result<bool> {
        Ok(self.ask(format!("leave {key} {token}\n")).await? == "done")
    }

    async fn ask(&mut self, line: String) -> io::Result<String> {
        self.to.write_all(line.as_bytes()).await?;
        let answer = self.lines.next_line().await?;
        answer.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}
