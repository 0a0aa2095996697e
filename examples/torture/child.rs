//! A child process: this very program, run again. It is told what to do on its standard input, and ends in good order
//! when that does.

use std::io::BufRead;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lockstream::LockRegistry;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::callers::{Caller, HABITS, KEYS, TTL, handles};
use crate::deployments::{PREFIX, callers_of_a_sort, open, response_timeout, shares};
use crate::dice::Dice;
use crate::judge::Child;
use crate::log::{Line, Log, now};

/// How many wait when there is a flood.
const FLOOD: u64 = 200;

/// How often a child looks whether its runtime is slow.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// A runtime is slow if one of its tasks goes on so late.
const SLOW: Duration = Duration::from_millis(100);

/// How long callers may take to see that the registry is closed, and its tasks to end.
const PARTING: Duration = Duration::from_secs(5);

/// What a child is told, a line each. The end of the input is [`Order::Stop`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Many callers more.
    Flood,
    /// Those callers are dropped, all at once.
    Drop,
    /// One task computes, right after an answer from the network, so that nobody looks after the timers.
    Compute,
    /// It does so no longer.
    Rest,
    /// Shut down, and end.
    Stop,
}

impl Order {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flood => "flood",
            Self::Drop => "drop",
            Self::Compute => "compute",
            Self::Rest => "rest",
            Self::Stop => "stop",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        let all = [
            Self::Flood,
            Self::Drop,
            Self::Compute,
            Self::Rest,
            Self::Stop,
        ];
        all.into_iter().find(|order| order.name() == name)
    }
}

/// What a child is.
#[derive(Clone, Debug)]
pub(crate) struct Role {
    pub(crate) child: Child,
    pub(crate) seed: u64,
    pub(crate) log: PathBuf,
    pub(crate) resource: PathBuf,
    pub(crate) urls: Vec<String>,
}

impl Role {
    /// What stands before the arguments of a child.
    pub(crate) const MARK: &str = "--child";

    pub(crate) fn arguments(&self) -> Vec<String> {
        let mut arguments = vec![
            Self::MARK.to_owned(),
            self.child.slot.to_string(),
            self.child.generation.to_string(),
            self.seed.to_string(),
            self.log.display().to_string(),
            self.resource.display().to_string(),
        ];
        arguments.extend(self.urls.iter().cloned());
        arguments
    }

    pub(crate) fn parse(arguments: &[String]) -> Option<Self> {
        let [slot, generation, seed, log, resource, urls @ ..] = arguments else {
            return None;
        };
        Some(Self {
            child: Child {
                slot: slot.parse().ok()?,
                generation: generation.parse().ok()?,
            },
            seed: seed.parse().ok()?,
            log: log.into(),
            resource: resource.into(),
            urls: urls.to_vec(),
        })
    }

    /// Lives until it is told to stop.
    pub(crate) fn play(self) -> ExitCode {
        // A child that is stopped when its parent dies sees no end of its input.
        #[cfg(target_os = "linux")]
        let _ =
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        let log = Log::create(&self.log).expect("the parent has made a folder for it");
        tell_of_panics(log.clone());
        // Children of either kind: all on one thread, and on several.
        let runtime = match self.child.slot % 2 {
            0 => Builder::new_current_thread().enable_all().build(),
            _ => Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build(),
        };
        let runtime = runtime.expect("a runtime");
        let callers = runtime.block_on(self.live(log.clone()));
        let tasks = runtime.block_on(tasks_left(&runtime));
        log.write(&Line::Left {
            tasks: tasks as u64,
            callers: callers as u64,
        });
        runtime.shutdown_background();
        ExitCode::SUCCESS
    }

    /// How many callers never came to an end.
    async fn live(self, log: Log) -> usize {
        let response_timeout = response_timeout(&self.urls);
        let registry = open(&self.urls)
            .expect("the parent gives urls that can be read")
            .prefix(PREFIX)
            .name(self.child.to_string())
            .ttl(TTL)
            .response_timeout(response_timeout)
            .build()
            .expect("the settings are valid");
        let resource = Arc::new(self.resource);
        let handles = handles(&registry, shares(&self.urls));
        let mut next = 0;
        let mut caller = || {
            next += 1;
            Caller {
                registry: registry.clone(),
                response_timeout,
                log: log.clone(),
                resource: resource.clone(),
                handles: handles.clone(),
                dice: Dice::of(self.seed, next),
                shares: shares(&self.urls),
                table: crate::deployments::postgres::plain_url(&self.urls[0]).map(Into::into),
            }
        };
        let mut callers = JoinSet::new();
        for (habit, many) in HABITS {
            for _ in 0..callers_of_a_sort(&self.urls, many) {
                callers.spawn(caller().live(habit));
            }
        }
        let looks = tokio::spawn(tell_how_late(log.clone()));
        let mut flood = JoinSet::new();
        let mut orders = orders();
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Flood) => (0..FLOOD).for_each(|_| {
                        flood.spawn(one_of_a_flood(caller()));
                    }),
                    Some(Order::Drop) => flood.abort_all(),
                    Some(Order::Compute) => {
                        flood.spawn(compute(registry.clone()));
                    }
                    Some(Order::Rest) => {}
                    Some(Order::Stop) | None => break,
                },
                Some(_) = flood.join_next() => {}
            }
        }
        shut_down(registry, response_timeout, &log).await;

        let everybody = async {
            while callers.join_next().await.is_some() {}
            while flood.join_next().await.is_some() {}
        };
        // Those that do not come to an end are counted, and then dropped.
        let _ = timeout(PARTING, everybody).await;
        looks.abort();
        callers.len() + flood.len()
    }
}

async fn shut_down(registry: LockRegistry, response_timeout: Duration, log: &Log) {
    let from = now();
    log.write(&Line::Closing { at: from });
    registry.shutdown().await;
    // So long it waits for answers.
    let longest = (3 * response_timeout).as_nanos() as u64;
    let to = now();
    log.write(&Line::ShutDown { from, to, longest });
}

/// Tells when the runtime is slow, so that whatever it does comes late.
async fn tell_how_late(log: Log) {
    loop {
        let due = now() + LOOK_AGAIN.as_nanos() as u64;
        sleep(LOOK_AGAIN).await;
        let at = now();
        if at.saturating_sub(due) > SLOW.as_nanos() as u64 {
            log.write(&Line::Slow { from: due, to: at });
        }
    }
}

/// Whether somebody computes.
static COMPUTES: AtomicBool = AtomicBool::new(false);

async fn compute(registry: LockRegistry) {
    // An error is an answer, too.
    let _ = registry.obtain("nobody's").inspect().await;
    while COMPUTES.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

async fn one_of_a_flood(mut caller: Caller) {
    let wanted = match caller.dice.once_in(3) {
        true => caller.shared(),
        false => caller.one_of(&KEYS[..4]),
    };
    let (limit, hold) = (caller.dice.millis(50, 3_000), caller.dice.micros(0, 200));
    // Whether the registry is closed is all the same to one that comes once.
    let _ = caller.guarded(wanted, limit, hold).await;
}

/// How many tasks are on the runtime when there ought to be none, after some time for them to end.
async fn tasks_left(runtime: &Runtime) -> usize {
    let begin = Instant::now();
    loop {
        let left = runtime.metrics().num_alive_tasks();
        if left == 0 || begin.elapsed() > PARTING {
            return left;
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// The lines of standard input, from a thread of their own: one that waits for a line must not keep the process from
/// ending.
fn orders() -> mpsc::UnboundedReceiver<Order> {
    let (sender, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        let lines = std::io::stdin().lock().lines().map_while(Result::ok);
        for order in lines.filter_map(|line| Order::parse(&line)) {
            // Whoever computes hears nothing else.
            COMPUTES.store(order == Order::Compute, Ordering::Relaxed);
            if sender.send(order).is_err() {
                return;
            }
        }
    });
    orders
}

fn tell_of_panics(log: Log) {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let what = format!("panic: {panic}");
        log.write(&Line::Wrong { what });
        before(panic);
    }));
}
