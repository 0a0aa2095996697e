//! What becomes of the servers behind sentinels between two faults.

use std::time::{Duration, Instant};

use crate::deployments;
use crate::plan::{Kind, Side, Stroke};
use crate::support::{Watched, on_a_steady_machine_blocking};

/// Sentinels in TILT mode replace nobody for thirty seconds; else a fail-over takes five.
const BOUND: Duration = Duration::from_secs(28);

/// A sentinel that is silent for more than two seconds enters TILT mode.
const SILENCE: Duration = Duration::from_millis(2_500);

/// A stroke that strikes two sentinels of three, if it strikes any.
fn stroke(kind: Kind) -> Stroke {
    Stroke {
        at: 0,
        lasts: 0,
        kind,
        slot: 0,
        side: Side::Both,
        delay: 3,
    }
}

/// The primary was killed when two sentinels had been silent: nobody replaced it for 47 s, and for more than a minute
/// in another run.
#[test]
fn a_primary_is_replaced_when_sentinels_were_silent_for_long() {
    on_a_steady_machine_blocking(|| {
        let mut servers = deployments::start("sentinel", 1).unwrap().servers;
        let (silent, killed) = (stroke(Kind::SentinelStop), stroke(Kind::PrimaryKill));
        servers.begin(&silent);
        std::thread::sleep(SILENCE);
        servers.end(&silent);
        let begin = Instant::now();
        servers.begin(&killed);
        servers.end(&killed);
        let took = begin.elapsed();
        assert!(took < BOUND, "{took:?}");
    });
}

/// Whoever settled things in the middle of a fail-over made the new primary a replica again.
#[test]
fn a_fail_over_is_not_undone() {
    on_a_steady_machine_blocking(|| {
        let watched = Watched::start();
        let old = watched.primary_index();
        watched.order_fail_over();
        watched.wait_until_fail_over_ends();
        assert_ne!(watched.settle(), old);
    });
}
