//! The clock that all processes of a run share, and what a process has used of the machine.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

/// A point in time in nanoseconds: the same number means the same moment in every process.
pub(crate) type Nanos = u64;

pub(crate) const SECOND: Nanos = 1_000_000_000;
pub(crate) const MILLISECOND: Nanos = 1_000_000;

pub(crate) fn now() -> Nanos {
    read(ClockId::Monotonic)
}

/// The processor time that this process has used so far, on all cores together.
pub(crate) fn processor_time() -> Duration {
    Duration::from_nanos(read(ClockId::ProcessCPUTime))
}

/// The memory of this process that is in the machine's, in bytes.
pub(crate) fn resident_bytes() -> Result<u64, String> {
    let status = std::fs::read_to_string("/proc/self/status")
        .map_err(|error| format!("this system does not tell a process's memory: {error}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib * 1024)
        .ok_or_else(|| "/proc/self/status has no VmRSS".to_owned())
}

pub(crate) async fn sleep_until(at: Nanos) {
    let left = Duration::from_nanos(at.saturating_sub(now()));
    tokio::time::sleep_until(Instant::now() + left).await;
}

pub(crate) fn nanos(secs: f64) -> Nanos {
    (secs * SECOND as f64) as Nanos
}

fn read(clock: ClockId) -> Nanos {
    let time = clock_gettime(clock);
    // Both clocks begin at nought, when the machine or the process does.
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}
