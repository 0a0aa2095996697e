//! The scenarios. Each file has both halves of its own: what the bench does in a round, and what
//! the processes do that it starts for it.

mod cluster;
mod far;
mod fleet;
mod handover;
mod held;
mod leases;
mod many_keys;
mod pipelines;
mod spread;
mod turns;
mod waiters;
mod waiting;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::figures::Figure;
use crate::libs::{
    Advisory, AsyncRedisLock, Bare, Lib, Library, Lockstream, Outcome, Passes, PolledTable, Rslock,
};
use crate::target::{Store, Target};
use crate::worker::{Boss, Job, Worker};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Scenario {
    Free1,
    Free8,
    Free64,
    Free256,
    Memory64,
    HotLocal,
    HotProcesses,
    HotProcessesNopass,
    Waiting1000,
    Handover,
    Held100k,
    RenewalsSpread,
    ManyKeys,
    Fair1To100,
    Fair1To100Nopass,
    Waiters10k,
    Far1,
    Far64,
    Far256,
    Cluster100k,
    ClusterBrief,
    ClusterMoving,
    ClusterWaits,
    ClusterIdle,
    FleetCrash,
    FleetTimeout,
    FleetRestart,
    Permits8,
    Readers,
    All3,
    PipelineUniform,
    PipelineSkewed,
    PipelineBlocked,
}

impl Scenario {
    pub(crate) const ALL: [Self; 33] = [
        Self::Free1,
        Self::Free8,
        Self::Free64,
        Self::Free256,
        Self::Memory64,
        Self::HotLocal,
        Self::HotProcesses,
        Self::HotProcessesNopass,
        Self::Waiting1000,
        Self::Handover,
        Self::Held100k,
        Self::RenewalsSpread,
        Self::ManyKeys,
        Self::Fair1To100,
        Self::Fair1To100Nopass,
        Self::Waiters10k,
        Self::Far1,
        Self::Far64,
        Self::Far256,
        Self::Cluster100k,
        Self::ClusterBrief,
        Self::ClusterMoving,
        Self::ClusterWaits,
        Self::ClusterIdle,
        Self::FleetCrash,
        Self::FleetTimeout,
        Self::FleetRestart,
        Self::Permits8,
        Self::Readers,
        Self::All3,
        Self::PipelineUniform,
        Self::PipelineSkewed,
        Self::PipelineBlocked,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Free1 => "free-1",
            Self::Free8 => "free-8",
            Self::Free64 => "free-64",
            Self::Free256 => "free-256",
            Self::Memory64 => "memory-64",
            Self::HotLocal => "hot-local",
            Self::HotProcesses => "hot-processes",
            Self::HotProcessesNopass => "hot-processes-nopass",
            Self::Waiting1000 => "waiting-1000",
            Self::Handover => "handover",
            Self::Held100k => "held-100k",
            Self::RenewalsSpread => "renewals-spread",
            Self::ManyKeys => "many-keys",
            Self::Fair1To100 => "fair-1-100",
            Self::Fair1To100Nopass => "fair-1-100-nopass",
            Self::Waiters10k => "waiters-10k",
            Self::Far1 => "far-1",
            Self::Far64 => "far-64",
            Self::Far256 => "far-256",
            Self::Cluster100k => "cluster-100k",
            Self::ClusterBrief => "cluster-brief",
            Self::ClusterMoving => "cluster-moving",
            Self::ClusterWaits => "cluster-waits",
            Self::ClusterIdle => "cluster-idle",
            Self::FleetCrash => "fleet-crash",
            Self::FleetTimeout => "fleet-timeout",
            Self::FleetRestart => "fleet-restart",
            Self::Permits8 => "permits-8",
            Self::Readers => "readers",
            Self::All3 => "all-3",
            Self::PipelineUniform => "pipeline-uniform",
            Self::PipelineSkewed => "pipeline-skewed",
            Self::PipelineBlocked => "pipeline-blocked",
        }
    }

    fn group(self) -> Group {
        match self {
            Self::Memory64
            | Self::Held100k
            | Self::RenewalsSpread
            | Self::ManyKeys
            | Self::Fair1To100
            | Self::Fair1To100Nopass
            | Self::Waiters10k
            | Self::Readers
            | Self::All3 => Group::Alone,
            Self::PipelineUniform | Self::PipelineSkewed | Self::PipelineBlocked => {
                Group::BesideItself
            }
            Self::Permits8 => Group::Bare,
            Self::Far1 | Self::Far64 | Self::Far256 => Group::Far,
            Self::Cluster100k
            | Self::ClusterBrief
            | Self::ClusterMoving
            | Self::ClusterWaits
            | Self::ClusterIdle => Group::Cluster,
            Self::FleetCrash | Self::FleetTimeout | Self::FleetRestart => Group::Fleet,
            _ => Group::Compared,
        }
    }

    /// Those that can be run on such a store.
    pub(crate) fn on(store: Store) -> Vec<Self> {
        let is_on = |scenario: &Self| store == Store::Redis || ON_POSTGRES.contains(scenario);
        Self::ALL.into_iter().filter(is_on).collect()
    }

    /// Whether it is run once, for lockstream alone.
    pub(crate) fn is_ours_alone(self) -> bool {
        matches!(self.group(), Group::Alone | Group::Cluster | Group::Fleet)
    }

    /// Whether that library takes part in it.
    pub(crate) fn is_of(self, lib: Lib) -> bool {
        match self.group() {
            Group::Compared => true,
            Group::Bare | Group::Far => matches!(lib, Lib::Lockstream | Lib::Bare),
            Group::Alone | Group::BesideItself | Group::Cluster | Group::Fleet => {
                lib == Lib::Lockstream
            }
        }
    }
}

const ON_POSTGRES: [Scenario; 11] = [
    Scenario::Free1,
    Scenario::Free8,
    Scenario::Free64,
    Scenario::Free256,
    Scenario::HotLocal,
    Scenario::HotProcesses,
    Scenario::Waiting1000,
    Scenario::Handover,
    Scenario::Permits8,
    Scenario::Readers,
    Scenario::All3,
];

/// What scenarios have in common.
#[derive(Clone, Copy, PartialEq)]
enum Group {
    /// All libraries, on one server.
    Compared,
    /// Lockstream alone, on one server.
    Alone,
    /// The same, in each round: it compares two ways of its own.
    BesideItself,
    /// Lockstream and bare, on one server.
    Bare,
    /// Lockstream and bare, over a slow network.
    Far,
    Cluster,
    Fleet,
}

/// One round of one scenario and library, as the bench sees it.
pub(crate) struct Round<'a> {
    pub(crate) scenario: Scenario,
    pub(crate) lib: Lib,
    pub(crate) secs: f64,
    /// To a cluster and back.
    pub(crate) round_trip: Duration,
    /// How long the leases of `cluster-100k` are held.
    pub(crate) hold: Duration,
    pub(crate) server: &'a mut Target,
}

impl Round<'_> {
    /// Runs it on an empty server.
    pub(crate) fn run(mut self) -> Outcome<Vec<Figure>> {
        self.server.empty()?;
        match self.scenario.group() {
            Group::Far => return far::round(&mut self),
            Group::Cluster => return cluster::round(&mut self),
            Group::Fleet => return fleet::round(&mut self),
            Group::Compared | Group::Bare | Group::Alone | Group::BesideItself => {}
        }
        match self.scenario {
            Scenario::Waiting1000 => waiting::round(&mut self),
            Scenario::Handover => handover::round(&mut self),
            Scenario::Held100k => held::round(&mut self),
            Scenario::RenewalsSpread => spread::round(&mut self),
            Scenario::ManyKeys => many_keys::round(&mut self),
            Scenario::Waiters10k => waiters::round(&mut self),
            Scenario::PipelineUniform | Scenario::PipelineSkewed | Scenario::PipelineBlocked => {
                pipelines::round(&mut self)
            }
            _ => turns::round(&mut self),
        }
    }

    /// A process for it, ready to go.
    fn hire(&self, role: usize, secs: f64) -> Outcome<Worker> {
        self.hire_at(&self.server.url(), role, secs)
    }

    /// The same for a process that connects elsewhere than to the run's server.
    fn hire_at(&self, url: &str, role: usize, secs: f64) -> Outcome<Worker> {
        Worker::hire(&Job {
            scenario: self.scenario,
            lib: self.lib,
            url: url.to_owned(),
            secs,
            role,
            folder: self.server.folder(),
        })
    }

    /// How many keys are on the server, lockstream's fence aside, of which there is one a prefix.
    fn keys_left(&mut self) -> Outcome<u64> {
        let server = self.server.redis();
        let all: u64 = server.ask(&["DBSIZE"])?;
        let fence: u64 = server.ask(&["EXISTS", "lock:~fence"])?;
        Ok(all - fence)
    }
}

/// What a process of it does.
pub(crate) async fn work(job: Job, boss: Boss) -> Outcome<()> {
    match job.scenario.group() {
        Group::Cluster => return cluster::work(&job, boss).await,
        Group::Fleet => return fleet::work(&job, boss).await,
        Group::Compared | Group::Bare | Group::Alone | Group::BesideItself | Group::Far => {}
    }
    match (job.scenario, job.lib) {
        (Scenario::Held100k, _) => held::work(&job, boss).await,
        (Scenario::RenewalsSpread, _) => spread::work(&job, boss).await,
        (Scenario::ManyKeys, _) => many_keys::work(&job, boss).await,
        (Scenario::Waiters10k, _) => waiters::work(&job, boss).await,
        (Scenario::PipelineUniform | Scenario::PipelineSkewed | Scenario::PipelineBlocked, _) => {
            pipelines::work(&job, boss).await
        }
        (_, Lib::Lockstream) => work_with::<Lockstream>(job, boss).await,
        (_, Lib::Bare) => work_with::<Bare>(job, boss).await,
        (_, Lib::Rslock) => work_with::<Rslock>(job, boss).await,
        (_, Lib::AsyncRedisLock) => work_with::<AsyncRedisLock>(job, boss).await,
        (_, Lib::SqlxAdvisory) => work_with::<Advisory>(job, boss).await,
        (_, Lib::PolledTable) => work_with::<PolledTable>(job, boss).await,
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
async fn connect<L: Library>(job: &Job, passes: Passes, callers: usize) -> Outcome<L> {
    let lib = L::connect(&job.url, passes, callers).await?;
    let lock = lib.lock(&format!("warm-{}", job.role));
    let held = lib.acquire(&lock).await?;
    lib.release(held).await?;
    Ok(lib)
}
