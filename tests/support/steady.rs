//! A test that measures time, on a machine that may stand still or be crowded.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::task::Poll;
use std::thread::{available_parallelism, sleep};
use std::time::{Duration, Instant};

/// Between two looks at the clock.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A thread that has slept and goes on so much too late was stopped: also on a busy machine its turn comes sooner.
const STOPPED: Duration = Duration::from_millis(100);

/// A test in which the machine stood still for so long says nothing about time.
const TOO_LONG: Duration = Duration::from_millis(200);

/// A test is run so often at most.
const RUNS: u32 = 4;

/// Runs a test that measures time. If it fails, and the machine stood still meanwhile, it is run again, and says so:
/// leases ran out in that time, and nothing came soon. On a machine that goes on, a failure is a failure.
pub async fn on_a_steady_machine(test: impl AsyncFn()) {
    let _turn = turn();
    again_if_it_stood_still(test).await;
}

/// The same for a part of a test. It does not wait until the machine has room: that would stop the test's own runtime.
pub async fn again_if_it_stood_still(test: impl AsyncFn()) {
    for run in 1.. {
        let watch = Watch::start();
        match panic_of(test()).await {
            Ok(()) => return,
            Err(panic) => tell_or_repeat(run, &watch, panic),
        }
    }
}

/// `catch_unwind` of the crate `futures`, which not every package with tests has.
async fn panic_of(test: impl Future<Output = ()>) -> Result<(), Box<dyn Any + Send>> {
    let mut test = pin!(test);
    poll_fn(
        |context| match catch_unwind(AssertUnwindSafe(|| test.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        },
    )
    .await
}

/// [`on_a_steady_machine`] for tests without a runtime.
pub fn on_a_steady_machine_blocking(test: impl Fn()) {
    let _turn = turn();
    for run in 1.. {
        let watch = Watch::start();
        match catch_unwind(AssertUnwindSafe(&test)) {
            Ok(()) => return,
            Err(panic) => tell_or_repeat(run, &watch, panic),
        }
    }
}

fn tell_or_repeat(run: u32, watch: &Watch, panic: Box<dyn Any + Send>) {
    // The threads that look may go on after this one.
    sleep(STOPPED);
    let stood_still = watch.stood_still();
    if stood_still < TOO_LONG || run == RUNS {
        resume_unwind(panic);
    }
    eprintln!("the machine stood still for {stood_still:?} in this test, which is run again");
}

/// For how long a test waits. Time in which the machine stood still does not count.
pub(super) struct Bound {
    within: Duration,
    begin: Instant,
    watch: Watch,
}

impl Bound {
    pub(super) fn new(within: Duration) -> Self {
        Self {
            within,
            watch: Watch::start(),
            begin: Instant::now(),
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let passed = self.begin.elapsed();
        if passed < self.within {
            return false;
        }
        // The threads that look may go on after this one.
        sleep(STOPPED);
        passed >= self.within + self.watch.stood_still()
    }
}

/// So many tests run beside each other in any case.
const ALWAYS: usize = 8;

/// No test waits longer for the others.
const LONGEST: Duration = Duration::from_secs(20);

/// More begin only while no more threads than this are ready to run for each processor. Threads that share a processor
/// are slower by their number.
const CROWDED: usize = 3;

/// Held while a test runs.
struct Turn;

static RUNNING: AtomicUsize = AtomicUsize::new(0);

/// Waits until the machine has room for one more test, on this thread. Most tests wait most of the time, so many run at a
/// time; where many compute instead, or on a slow machine, fewer do.
fn turn() -> Turn {
    static DOOR: Mutex<()> = Mutex::new(());
    let (_door, begin) = (DOOR.lock(), Instant::now());
    let is_full = || RUNNING.load(Ordering::Relaxed) >= ALWAYS;
    while is_full() && is_crowded() && begin.elapsed() < LONGEST {}
    RUNNING.fetch_add(1, Ordering::Relaxed);
    Turn
}

impl Drop for Turn {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Looks for some milliseconds. Where the system does not tell it is not known, and nobody waits.
fn is_crowded() -> bool {
    let most = CROWDED * available_parallelism().map_or(1, usize::from);
    (0..4).any(|_| {
        sleep(LOOK_AGAIN / 2);
        ready_threads().is_some_and(|ready| ready > most)
    })
}

/// How many threads of the whole machine run or wait for a processor: the fourth word, as in `7/812`.
fn ready_threads() -> Option<usize> {
    let load = std::fs::read_to_string("/proc/loadavg").ok()?;
    let (ready, _) = load.split(' ').nth(3)?.split_once('/')?;
    ready.parse().ok()
}

/// Sees for how long the machine stands still.
pub struct Watch {
    /// What was seen before, for each processor.
    before: Vec<Duration>,
}

impl Watch {
    pub fn start() -> Self {
        let before = SEEN.iter().map(Seen::stood_still).collect();
        Self { before }
    }

    /// Since its start. The processor counts that stood still for longest: whoever has its turn or its timer there stands
    /// still too, though the others go on.
    pub fn stood_still(&self) -> Duration {
        let seen = SEEN.iter().zip(&self.before);
        let longest = seen
            .map(|(seen, before)| seen.stood_still() - *before)
            .max();
        longest.unwrap_or_default()
    }
}

/// For each processor that this process may use.
static SEEN: LazyLock<Vec<Seen>> =
    LazyLock::new(|| processors().into_iter().map(Seen::on).collect());

/// For how long a processor has stood still, in microseconds.
struct Seen(Arc<AtomicU64>);

impl Seen {
    /// Starts a thread that looks. `None`: on whichever processor it is.
    fn on(processor: Option<usize>) -> Self {
        let micros = Arc::new(AtomicU64::new(0));
        let seen = micros.clone();
        // Also a stop before the thread's first look is seen.
        let mut begin = Instant::now();
        std::thread::spawn(move || {
            if let Some(processor) = processor {
                stay_on(processor);
            }
            loop {
                sleep(LOOK_AGAIN);
                let late = begin.elapsed().saturating_sub(LOOK_AGAIN);
                if late >= STOPPED {
                    seen.fetch_add(late.as_micros() as u64, Ordering::Relaxed);
                }
                begin = Instant::now();
            }
        });
        Self(micros)
    }

    fn stood_still(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

#[cfg(target_os = "linux")]
fn processors() -> Vec<Option<usize>> {
    let allowed = rustix::thread::sched_getaffinity(None).expect("a thread may ask for its own");
    let all = 0..rustix::thread::CpuSet::MAX_CPU;
    all.filter(|it| allowed.is_set(*it)).map(Some).collect()
}

#[cfg(target_os = "linux")]
fn stay_on(processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    // It fails if the processor was taken away meanwhile: the thread then looks wherever it is.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

#[cfg(not(target_os = "linux"))]
fn processors() -> Vec<Option<usize>> {
    vec![None]
}

#[cfg(not(target_os = "linux"))]
fn stay_on(_processor: usize) {}
