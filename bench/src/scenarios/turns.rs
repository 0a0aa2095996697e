//! `free-*`, `memory-64`, `hot-*`, `fair-*`, `far-*`, `permits-8`, `readers` and `all-3`: tasks that take a lock and give it back, again and again.
//!
//! Nothing is done under the lock, and nothing between two turns but a pause where the network is slow:
//! what is measured is the lock.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use tokio::task::JoinSet;

use super::{Round, Scenario, connect};
use crate::clock::{self, MILLISECOND, Nanos};
use crate::figures::Figure;
use crate::journal::{self, Diary, Turn};
use crate::libs::{Library, MEMORY, Outcome, Passes};
use crate::tally::{Tally, Window};
use crate::worker::{Boss, Job, Worker, go, say};

/// How long it runs before the window that is measured: until connections have grown their buffers.
const LEAD: Nanos = 100 * MILLISECOND;

/// Beyond the time that a round is to take: then it hangs.
const GRACE: Duration = Duration::from_secs(10);

/// The stretch in which calls are counted, and rates are not taken.
const COUNTED_SECS: f64 = 0.4;

/// Where the network is slow, so that acquisitions wait for it and not for the processors.
const PAUSE: Duration = Duration::from_millis(50);

/// The writer's, between two writes.
const WRITER_PAUSE: Duration = Duration::from_millis(10);

/// Of how many keys the tasks of `all-3` take three.
const KEYS: usize = 10;

/// What a task takes.
#[derive(Clone, Copy)]
enum Wanted {
    /// A key of its own.
    Own,
    /// The key that all want.
    Hot,
    /// One of so many permits of that.
    Permit(u32),
    /// That key as the other readers; the last process is a writer.
    Reader,
    /// Three keys at once.
    Three,
}

/// How many tasks each process has.
struct Shape {
    tasks: &'static [usize],
    wanted: Wanted,
    passes: Passes,
    /// Between two turns of a task.
    pause: Duration,
}

impl Shape {
    fn of(scenario: Scenario) -> Self {
        let (tasks, wanted): (&[usize], Wanted) = match scenario {
            Scenario::Free1 | Scenario::Far1 => (&[1], Wanted::Own),
            Scenario::Free8 => (&[8], Wanted::Own),
            Scenario::Free64 | Scenario::Memory64 | Scenario::Far64 => (&[64], Wanted::Own),
            Scenario::Free256 | Scenario::Far256 => (&[256], Wanted::Own),
            Scenario::HotLocal => (&[16], Wanted::Hot),
            Scenario::HotProcesses | Scenario::HotProcessesNopass => (&[4; 4], Wanted::Hot),
            Scenario::Fair1To100 | Scenario::Fair1To100Nopass => (&[1, 100], Wanted::Hot),
            Scenario::Permits8 => (&[64], Wanted::Permit(8)),
            Scenario::Readers => (&[64, 1], Wanted::Reader),
            Scenario::All3 => (&[16], Wanted::Three),
            other => unreachable!("{} is in another file", other.name()),
        };
        let passes = match scenario {
            Scenario::HotProcessesNopass | Scenario::Fair1To100Nopass => Passes::None,
            _ => Passes::Default,
        };
        let pause = match scenario {
            Scenario::Far1 | Scenario::Far64 | Scenario::Far256 => PAUSE,
            _ => Duration::ZERO,
        };
        Self {
            tasks,
            wanted,
            passes,
            pause,
        }
    }

    /// Whether tasks wait for each other.
    fn is_contended(&self) -> bool {
        !matches!(self.wanted, Wanted::Own)
    }

    fn lock<L: Library>(&self, lib: &L, role: usize, task: usize) -> L::Lock {
        match self.wanted {
            Wanted::Own => lib.lock(&format!("free-{task}")),
            Wanted::Reader if role == 0 => lib.reader("hot"),
            Wanted::Hot | Wanted::Reader => lib.lock("hot"),
            Wanted::Permit(limit) => lib.permit("hot", limit),
            Wanted::Three => {
                let keys = [task, task * 3 + 1, task * 7 + 2];
                lib.all(&keys.map(|key| format!("key-{}", key % KEYS)))
            }
        }
    }
}

// ---- the bench's half

pub(super) fn round(round: &mut Round<'_>) -> Outcome<Vec<Figure>> {
    let url = match round.scenario {
        Scenario::Memory64 => MEMORY.to_owned(),
        _ => round.server.url(),
    };
    round_at(round, &url)
}

/// The same for processes that come to the server by that url.
pub(super) fn round_at(round: &mut Round<'_>, url: &str) -> Outcome<Vec<Figure>> {
    let shape = Shape::of(round.scenario);
    let mut workers = hire(round, url, &shape, round.secs)?;
    let server_before = round.server.processor_secs()?;
    let begin = go(&mut workers)?;
    let Work {
        diaries,
        processor_secs,
    } = collect(round, workers, round.secs)?;
    let server_secs = round.server.processor_secs()? - server_before;
    let window = Window {
        from: begin + LEAD,
        to: begin + LEAD + clock::nanos(round.secs),
    };
    let tally = Tally::of(&diaries, window);
    if let Some(stall) = tally.stall(shape.is_contended()) {
        return Err(stall);
    }
    let mut figures = if shape.is_contended() {
        tally.of_one_key()
    } else if shape.pause > Duration::ZERO {
        tally.of_acquisitions()
    } else {
        tally.of_free_keys()
    };
    // Of all turns, those outside of the window too, and steadier than rates where others work on
    // the same machine.
    let each = 1e6 / turns(&diaries)?;
    figures.push(Figure::new("clients-cpu", processor_secs * each, "us/acq"));
    figures.push(Figure::new("server-cpu", server_secs * each, "us/acq"));
    match round.scenario {
        Scenario::HotProcessesNopass => figures.push(calls(round, url, &shape)?),
        Scenario::Readers => {
            let (readers, writer) = diaries.split_at(shape.tasks[0]);
            figures = Tally::of_readers([readers, writer].map(|part| Tally::of(part, window)));
        }
        Scenario::Fair1To100 | Scenario::Fair1To100Nopass => {
            let (one, hundred) = diaries.split_at(shape.tasks[0]);
            figures.extend(tally.of_unequals([one, hundred].map(|part| Tally::of(part, window))));
        }
        _ => {}
    }
    Ok(figures)
}

/// The calls that clients send for one acquisition.
fn calls(round: &mut Round<'_>, url: &str, shape: &Shape) -> Outcome<Figure> {
    let mut workers = hire(round, url, shape, COUNTED_SECS)?;
    let count = round.server.count()?;
    go(&mut workers)?;
    let Work { diaries, .. } = collect(round, workers, COUNTED_SECS)?;
    let calls = round.server.counted(count)?;
    let each = calls as f64 / turns(&diaries)?;
    Ok(Figure::new("calls", each, "calls/acq"))
}

/// How many turns there were in all.
fn turns(diaries: &[Diary]) -> Outcome<f64> {
    match diaries.iter().map(|diary| diary.turns.len()).sum() {
        0 => Err("stalled: nobody ever got the lock".to_owned()),
        turns => Ok(turns as f64),
    }
}

fn hire(round: &Round<'_>, url: &str, shape: &Shape, secs: f64) -> Outcome<Vec<Worker>> {
    (0..shape.tasks.len())
        .map(|role| round.hire_at(url, role, secs))
        .collect()
}

/// What all processes did.
struct Work {
    /// One for each task, process by process.
    diaries: Vec<Diary>,
    processor_secs: f64,
}

/// Waits until they have written it down.
fn collect(round: &Round<'_>, mut workers: Vec<Worker>, secs: f64) -> Outcome<Work> {
    let within = Duration::from_secs_f64(secs) + Duration::from_nanos(LEAD) + GRACE;
    let (mut diaries, mut processor_secs) = (Vec::new(), 0.0);
    for (role, worker) in workers.iter_mut().enumerate() {
        processor_secs += worker.result::<f64>("done", within)?;
        let path = path(round.server.folder(), role);
        diaries.append(&mut journal::read(&path)?);
    }
    Ok(Work {
        diaries,
        processor_secs,
    })
}

fn path(folder: PathBuf, role: usize) -> PathBuf {
    folder.join(format!("journal-{role}"))
}

// ---- a process's half

pub(super) async fn work<L: Library>(job: &Job, mut boss: Boss) -> Outcome<()> {
    let shape = Shape::of(job.scenario);
    let lib: Arc<L> = Arc::new(connect(job, shape.passes, shape.tasks[job.role]).await?);
    // As much as the quickest of tasks could fill; a list that grows is a wait for its task, and
    // for all others on its key.
    let tasks_here = shape.tasks[job.role];
    let room = (job.secs * 3e6 / tasks_here as f64) as usize + 10_000;
    let (sender, written) = mpsc::channel();
    let begin = boss.ready().await?;
    let end = begin + LEAD + clock::nanos(job.secs);
    clock::sleep_until(begin).await;
    let processor_before = clock::processor_time();

    let mut tasks = JoinSet::new();
    for task in 0..tasks_here {
        let lock = shape.lock(&*lib, job.role, task);
        let diary = Diary {
            turns: Vec::with_capacity(room),
            waiting_since: None,
        };
        let keeper = Keeper {
            diary,
            sender: sender.clone(),
        };
        let lib = Arc::clone(&lib);
        let yields = job.scenario == Scenario::Memory64;
        let is_writer = matches!(shape.wanted, Wanted::Reader) && job.role == 1;
        let pause = if is_writer { WRITER_PAUSE } else { shape.pause };
        // Tasks that pause begin one after the other: no two should ask at the same moment.
        let first = pause * task as u32 / tasks_here as u32;
        tasks.spawn(async move {
            tokio::time::sleep(first).await;
            take_turns(&*lib, lock, end, pause, yields, keeper).await
        });
    }
    drop(sender);

    // Whoever holds the lock at the end sees for himself that it is over, and gives it back; those
    // who wait are stopped where they are.
    clock::sleep_until(end + 5 * MILLISECOND).await;
    let used = clock::processor_time() - processor_before;
    tasks.abort_all();
    while let Some(task) = tasks.join_next().await {
        match task {
            Ok(outcome) => outcome?,
            Err(stopped) if stopped.is_cancelled() => {}
            Err(panic) => return Err(panic.to_string()),
        }
    }
    let diaries: Vec<Diary> = written.iter().collect();
    journal::write(&path(job.folder.clone(), job.role), &diaries)?;
    say("done", &used.as_secs_f64());
    Ok(())
}

async fn take_turns<L: Library>(
    lib: &L,
    lock: L::Lock,
    end: Nanos,
    pause: Duration,
    yields: bool,
    mut keeper: Keeper,
) -> Outcome<()> {
    let diary = &mut keeper.diary;
    loop {
        let asked = clock::now();
        if asked >= end {
            return Ok(());
        }
        diary.waiting_since = Some(asked);
        let lease = lib.acquire(&lock).await?;
        let held = clock::now();
        diary.waiting_since = None;
        diary.turns.push(Turn { asked, held });
        lib.release(lease).await?;
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        } else if yields {
            // Nothing else lets the other tasks run: it waits for nobody.
            tokio::task::yield_now().await;
        }
    }
}

/// Hands a task's diary in when the task is over, also when it is stopped half-way.
struct Keeper {
    diary: Diary,
    sender: Sender<Diary>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // Nobody reads it when the process has failed already.
        let _ = self.sender.send(std::mem::take(&mut self.diary));
    }
}
