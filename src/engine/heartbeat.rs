//! The thread that lends the tasks of a registry a runtime while their own is busy, so that leases are renewed, and those on
//! other runtimes are served and told of their losses (D8).
//!
//! There is one for all registries of a process, while any of them has a use for it. Every sixth of a ttl, and twice a second
//! at least, it wakes the tasks of a registry. If their runtime does not poll them within a moment, the thread does, until
//! the runtime does.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::runtime::{self, Runtime};
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::base::clock::is_virtual;
use crate::base::mutex::Mutex;
use crate::base::user_code::log;
use crate::engine::Engine;
use crate::roaming;
use crate::roaming::Tasks;

/// A runtime that is not busy polls a task that was woken within this time.
const LONGEST_MOMENT: Duration = Duration::from_millis(50);

/// The thread ends when it was not needed for so long.
const LINGER: Duration = Duration::from_secs(1);

/// The least time between two looks.
const LEAST_PAUSE: Duration = Duration::from_millis(5);

/// The longest: a caller on another runtime is served within one response time-out.
const MOST_PAUSE: Duration = Duration::from_millis(500);

/// The ttl of a lease that is not renewed counts as so long at least: its end may be told a little late.
const LEAST_UNRENEWED: Duration = Duration::from_secs(1);

/// So often at most the moment is prolonged, where this thread itself comes late: the whole machine is busy, or stood still.
const MOMENTS: usize = 5;

/// What the heartbeat of one registry does.
#[derive(Debug)]
pub(crate) struct Heartbeat {
    tasks: Arc<Tasks>,
    engine: Weak<Engine>,
    /// For how long it lends a runtime.
    longest: Duration,
    /// The shortest ttl of the leases that were wanted since it rested, in microseconds, or [`RESTS`], or [`OFF`].
    ttl: AtomicU64,
    /// The ttl has become shorter.
    sooner: Notify,
}

/// Nobody needs it now.
const RESTS: u64 = 0;
/// It never does anything: it is switched off, the clock of the registry's runtime is a test's own, or it has failed.
const OFF: u64 = 1;

/// Who needs it says so to the engine first, and then here; who rests does so here first.
const IN_ORDER: Ordering = Ordering::SeqCst;

impl Heartbeat {
    /// `longest`: for how long a runtime may be busy, at most. Zero: there is no heartbeat.
    pub(crate) fn new(tasks: Arc<Tasks>, engine: Weak<Engine>, longest: Duration) -> Self {
        Self {
            tasks,
            engine,
            longest,
            ttl: AtomicU64::new(if longest.is_zero() { OFF } else { RESTS }),
            sooner: Notify::new(),
        }
    }

    /// A lease with this ttl is wanted; the engine says so from now on.
    pub(crate) fn need(self: &Arc<Self>, ttl: Duration, is_renewed: bool) {
        let ttl = if is_renewed {
            ttl
        } else {
            ttl.max(LEAST_UNRENEWED)
        };
        // No ttl is longer than a day.
        let micros = ttl.as_secs() * 1_000_000 + u64::from(ttl.subsec_micros());
        let known = self.ttl.load(IN_ORDER);
        if known == RESTS || known > micros {
            self.need_sooner(micros);
        }
    }

    fn need_sooner(self: &Arc<Self>, micros: u64) {
        let next = if is_virtual() { OFF } else { micros };
        let changed = self.ttl.fetch_update(IN_ORDER, IN_ORDER, |known| {
            (known == RESTS || known > next).then_some(next)
        });
        match changed {
            Ok(RESTS) if next != OFF => start(self.clone()),
            Ok(_) => self.sooner.notify_one(),
            Err(_) => {}
        }
    }

    /// Leases are in danger if nobody looks after them for longer.
    fn longest_neglect(&self) -> Duration {
        Duration::from_micros(self.ttl.load(Ordering::Relaxed) / 6).max(LEAST_PAUSE)
    }

    /// Between two looks.
    fn pause(&self) -> Duration {
        self.longest_neglect().min(MOST_PAUSE)
    }

    /// Looks after the registry's tasks until no key is in use.
    async fn run(self: Arc<Self>) {
        let _end = OffAtPanic(&self);
        let is_needed = || self.engine.upgrade().is_some_and(|it| it.is_in_use());
        let mut busy: Option<Busy> = None;
        loop {
            let began = Instant::now();
            let pause = || match &busy {
                Some(busy) => self
                    .pause()
                    .min(self.longest.saturating_sub(busy.since.elapsed())),
                None => self.pause(),
            };
            while let left = pause().saturating_sub(began.elapsed())
                && !left.is_zero()
            {
                let _ = timeout(left, self.sooner.notified()).await;
            }
            if self.ttl.load(Ordering::Relaxed) == OFF {
                return self.tasks.leave();
            }
            if is_needed() || self.tasks.away_since().is_some() {
                self.look(&mut busy).await;
                continue;
            }
            let ttl = self.ttl.swap(RESTS, IN_ORDER);
            // A caller that came before the swap has started no run and relies on this one. One that came after it has
            // started another.
            let goes_on = || self.ttl.compare_exchange(RESTS, ttl, IN_ORDER, IN_ORDER);
            if !is_needed() || goes_on().is_err() {
                return;
            }
        }
    }

    async fn look(&self, busy: &mut Option<Busy>) {
        let woken = self.tasks.wake();
        let moment = LONGEST_MOMENT.min(self.pause() / 2);
        for _ in 0..MOMENTS {
            let began = Instant::now();
            sleep(moment).await;
            if began.elapsed() < 2 * moment + Duration::from_millis(5) {
                break;
            }
        }
        for (task, polls) in woken {
            task.lend(polls);
        }
        let since = self.tasks.away_since();
        if let Some(ended) = busy.take_if(|busy| since != Some(busy.since))
            && ended.is_told
        {
            tell(move || {
                let lasted = ended.since.elapsed();
                log!(info, ?lasted, "the runtime is not busy any more");
            });
        }
        let Some(since) = since else {
            return;
        };
        let is_told = false;
        let spell = busy.get_or_insert(Busy { since, is_told });
        let lasts = since.elapsed();
        if !spell.is_told && lasts >= self.longest_neglect().min(self.longest) {
            spell.is_told = true;
            let engine = self.engine.upgrade();
            tell(move || engine.iter().for_each(|engine| engine.tell_busy(lasts)));
        }
        if lasts >= self.longest {
            *busy = None;
            self.tasks.leave();
            let told = "the runtime is still busy: leases are not renewed any more";
            tell(move || log!(error, ?lasts, "{told}"));
        }
    }
}

/// A runtime does not poll its tasks.
struct Busy {
    since: Instant,
    is_told: bool,
}

/// If a run fails, nobody relies on it any more.
struct OffAtPanic<'a>(&'a Heartbeat);

impl Drop for OffAtPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.ttl.store(OFF, IN_ORDER);
            self.0.tasks.leave();
        }
    }
}

/// Runs what is the user's code, which may block, on a thread of its own.
fn tell(told: impl FnOnce() + Send + 'static) {
    // If there is none to be had, there is nobody to tell.
    let _ = std::thread::Builder::new().spawn(told);
}

/// Where the thread, if it runs, takes registries from.
static THREAD: Mutex<Option<UnboundedSender<Arc<Heartbeat>>>> = Mutex::new(None);

/// The process that was the first to start the thread.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Hands a registry to the thread, which is started if need be.
fn start(heartbeat: Arc<Heartbeat>) {
    let here = std::process::id();
    let first = PROCESS.compare_exchange(0, here, IN_ORDER, IN_ORDER);
    if first.is_err_and(|first| first != here) {
        // `THREAD` and the kept runtime are copies here: the channel of a thread that only the parent has, and a runtime
        // whose epoll both processes would share.
        heartbeat.ttl.store(OFF, IN_ORDER);
        log!(
            warn,
            "this process was forked from one with locks: no thread renews leases while the runtime is busy"
        );
        return;
    }
    let mut thread = THREAD.lock();
    let mut unsent = Some(heartbeat);
    if let Some(sender) = &*thread {
        unsent = unsent
            .and_then(|it| sender.send(it).err())
            .map(|error| error.0);
    }
    let Some(heartbeat) = unsent else {
        return;
    };
    let (sender, registries) = mpsc::unbounded_channel();
    let named = std::thread::Builder::new().name("lockstream".to_owned());
    match named.spawn(|| serve(registries)) {
        Ok(_) => {
            let _ = sender.send(heartbeat);
            *thread = Some(sender);
        }
        Err(error) => {
            heartbeat.ttl.store(OFF, IN_ORDER);
            drop(thread);
            log!(warn, %error, "no thread could be started that renews leases while the runtime is busy");
        }
    }
}

/// The thread.
fn serve(mut registries: UnboundedReceiver<Arc<Heartbeat>>) {
    /// Kept for the next thread: what was begun on it may still need it.
    static RUNTIME: Mutex<Option<Runtime>> = Mutex::new(None);
    let mut runtime = RUNTIME.lock();
    let made = match runtime.take() {
        Some(runtime) => Ok(runtime),
        None => runtime::Builder::new_current_thread().enable_all().build(),
    };
    let made = match made {
        Ok(made) => runtime.insert(made),
        Err(error) => {
            // Nobody who was handed over, or is meanwhile, may believe to be looked after.
            registries.close();
            while let Ok(registry) = registries.try_recv() {
                registry.ttl.store(OFF, IN_ORDER);
            }
            log!(warn, %error, "no runtime could be made that renews leases while the other is busy");
            return;
        }
    };
    roaming::as_lender(|| {
        made.block_on(async {
            let mut served = JoinSet::new();
            loop {
                tokio::select! {
                    registry = registries.recv() => match registry {
                        Some(registry) => drop(served.spawn(registry.run())),
                        None => return,
                    },
                    Some(_) = served.join_next() => {}
                    () = sleep(LINGER), if served.is_empty() => {
                        let mut thread = THREAD.lock();
                        if registries.is_empty() {
                            *thread = None;
                            return;
                        }
                    }
                }
            }
        })
    });
}
