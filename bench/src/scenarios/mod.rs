//! The scenarios. Each file has both halves of its own: what the bench does in a round, and what
//! the processes do that it starts for it.

mod handover;
mod held;
mod many_keys;
mod turns;
mod waiters;
mod waiting;

use serde::{Deserialize, Serialize};

use crate::figures::Figure;
use crate::libs::{
    Asleep, AsyncRedisLock, Bare, Lib, Library, Lockstream, Outcome, Passes, Rslock,
};
use crate::server::Server;
use crate::worker::{Boss, Job, Worker};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Scenario {
    Free1,
    Free8,
    Free64,
    Free256,
    HotLocal,
    HotProcesses,
    HotProcessesNopass,
    Waiting1000,
    Handover,
    Held100k,
    ManyKeys,
    Fair1To100,
    Fair1To100Nopass,
    Waiters10k,
}

impl Scenario {
    pub(crate) const ALL: [Self; 14] = [
        Self::Free1,
        Self::Free8,
        Self::Free64,
        Self::Free256,
        Self::HotLocal,
        Self::HotProcesses,
        Self::HotProcessesNopass,
        Self::Waiting1000,
        Self::Handover,
        Self::Held100k,
        Self::ManyKeys,
        Self::Fair1To100,
        Self::Fair1To100Nopass,
        Self::Waiters10k,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Free1 => "free-1",
            Self::Free8 => "free-8",
            Self::Free64 => "free-64",
            Self::Free256 => "free-256",
            Self::HotLocal => "hot-local",
            Self::HotProcesses => "hot-processes",
            Self::HotProcessesNopass => "hot-processes-nopass",
            Self::Waiting1000 => "waiting-1000",
            Self::Handover => "handover",
            Self::Held100k => "held-100k",
            Self::ManyKeys => "many-keys",
            Self::Fair1To100 => "fair-1-100",
            Self::Fair1To100Nopass => "fair-1-100-nopass",
            Self::Waiters10k => "waiters-10k",
        }
    }

    /// Whether it is run once, for lockstream alone.
    pub(crate) fn is_ours_alone(self) -> bool {
        matches!(
            self,
            Self::Held100k
                | Self::ManyKeys
                | Self::Fair1To100
                | Self::Fair1To100Nopass
                | Self::Waiters10k
        )
    }
}

/// One round of one scenario and library, as the bench sees it.
pub(crate) struct Round<'a> {
    pub(crate) scenario: Scenario,
    pub(crate) lib: Lib,
    pub(crate) secs: f64,
    pub(crate) server: &'a mut Server,
}

impl Round<'_> {
    /// Runs it on an empty server.
    pub(crate) fn run(mut self) -> Outcome<Vec<Figure>> {
        let _: String = self.server.ask(&["FLUSHALL"])?;
        match self.scenario {
            Scenario::Waiting1000 => waiting::round(&mut self),
            Scenario::Handover => handover::round(&mut self),
            Scenario::Held100k => held::round(&mut self),
            Scenario::ManyKeys => many_keys::round(&mut self),
            Scenario::Waiters10k => waiters::round(&mut self),
            _ => turns::round(&mut self),
        }
    }

    /// A process for it, ready to go.
    fn hire(&self, role: usize, secs: f64) -> Outcome<Worker> {
        Worker::hire(&Job {
            scenario: self.scenario,
            lib: self.lib,
            url: self.server.url(),
            secs,
            role,
            folder: self.server.folder(),
        })
    }

    /// How many keys are on the server, lockstream's fence aside, of which there is one a prefix.
    fn keys_left(&mut self) -> Outcome<u64> {
        let all: u64 = self.server.ask(&["DBSIZE"])?;
        let fence: u64 = self.server.ask(&["EXISTS", "lock:~fence"])?;
        Ok(all - fence)
    }
}

/// What a process of it does.
pub(crate) async fn work(job: Job, boss: Boss) -> Outcome<()> {
    match (job.scenario, job.lib) {
        (Scenario::Held100k, _) => held::work(&job, boss).await,
        (Scenario::ManyKeys, _) => many_keys::work(&job, boss).await,
        (Scenario::Waiters10k, _) => waiters::work(&job, boss).await,
        (_, Lib::Lockstream) => work_with::<Lockstream>(job, boss).await,
        (_, Lib::LockstreamAsleep) => work_with::<Asleep>(job, boss).await,
        (_, Lib::Bare) => work_with::<Bare>(job, boss).await,
        (_, Lib::Rslock) => work_with::<Rslock>(job, boss).await,
        (_, Lib::AsyncRedisLock) => work_with::<AsyncRedisLock>(job, boss).await,
    }
}

async fn work_with<L: Library>(job: Job, boss: Boss) -> Outcome<()> {
    match job.scenario {
        Scenario::Waiting1000 => waiting::work::<L>(&job, boss).await,
        Scenario::Handover => handover::work::<L>(&job, boss).await,
        _ => turns::work::<L>(&job, boss).await,
    }
}

/// Connects, and takes a lock once: what happens only then is not measured.
async fn connect<L: Library>(job: &Job, passes: Passes) -> Outcome<L> {
    let lib = L::connect(&job.url, passes).await?;
    let lock = lib.lock(&format!("warm-{}", job.role));
    let held = lib.acquire(&lock).await?;
    lib.release(held).await?;
    Ok(lib)
}
