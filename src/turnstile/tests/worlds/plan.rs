//! The worlds: who is there, what they want, and what may go wrong.

use std::time::Duration;

use super::world::Budget;
use crate::base::Mode;

/// What becomes of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    Releases,
    Keeps(Duration),
    Detaches,
    /// It takes over what another has detached, and releases it.
    Adopts,
}

/// What a caller wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wants {
    pub(super) mode: Mode,
    pub(super) ttl: Duration,
    pub(super) renewals: u32,
    /// `None`: for ever.
    pub(super) wait: Option<Duration>,
    pub(super) ending: Ending,
}

#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) name: &'static str,
    /// By registry.
    pub(super) registries: Vec<Vec<Wants>>,
    pub(super) local_passes: u32,
    pub(super) budget: Budget,
    /// Whether the server may run requests of a connection that has ended.
    pub(super) lingers: bool,
    /// O4: whether a new connection ends the old one at the server.
    pub(super) kills: bool,
}

const TTL: Duration = Duration::from_millis(300);

/// One that waits for an exclusive lease of a fixed length, for ever.
const WAITS: Wants = Wants {
    mode: Mode::Exclusive,
    ttl: TTL,
    renewals: 0,
    wait: None,
    ending: Ending::Releases,
};

/// `budget`: how many waits, delays, drops, breaks and crashes there are at the most.
fn plan(name: &'static str, registries: Vec<Vec<Wants>>, budget: [u8; 5]) -> Plan {
    let [waits, delays, drops, breaks, crashes] = budget;
    Plan {
        name,
        registries,
        local_passes: 1,
        budget: Budget {
            waits,
            delays,
            drops,
            breaks,
            crashes,
        },
        lingers: false,
        kills: true,
    }
}

/// The server may run what a connection sent before it ended.
fn linger(name: &'static str, registries: Vec<Vec<Wants>>, budget: [u8; 5]) -> Plan {
    Plan {
        lingers: true,
        ..plan(name, registries, budget)
    }
}

/// Kept from its acquisition on for longer than a ttl.
const KEEPS: Wants = Wants {
    ending: Ending::Keeps(Duration::from_millis(500)),
    ..WAITS
};

const DETACHES: Wants = Wants {
    ending: Ending::Detaches,
    ..WAITS
};

const ADOPTS: Wants = Wants {
    ending: Ending::Adopts,
    wait: Some(Duration::from_millis(100)),
    ..WAITS
};

const ASKS: Wants = Wants {
    wait: Some(Duration::ZERO),
    ..WAITS
};

const WAITS_A_WHILE: Wants = Wants {
    wait: Some(Duration::from_millis(150)),
    ..WAITS
};

const RENEWS: Wants = Wants {
    renewals: u32::MAX,
    ..WAITS
};

const READS: Wants = Wants {
    mode: Mode::Shared,
    ..WAITS
};

const fn takes(weight: u8, limit: u32) -> Wants {
    Wants {
        mode: Mode::Permits { limit, weight },
        ..WAITS
    }
}

/// They take about twenty seconds on two cores, without optimization.
pub(super) fn small() -> Vec<Plan> {
    let (one, two) = (|| vec![WAITS], || vec![WAITS; 2]);
    let (light, heavy) = (takes(1, 2), takes(2, 2));
    vec![
        plan("two and two, a drop", vec![two(), two()], [0, 0, 1, 0, 0]),
        plan("two and two, a break", vec![two(), two()], [0, 0, 0, 1, 0]),
        plan("two and two, a crash", vec![two(), two()], [0, 0, 0, 0, 1]),
        plan("three, a drop", vec![one(), one(), one()], [0, 0, 1, 0, 0]),
        plan(
            "one and one, a drop and a break",
            vec![one(), one()],
            [0, 0, 1, 1, 0],
        ),
        plan("one and one, time", vec![one(), one()], [3, 1, 0, 0, 0]),
        plan(
            "one and one, time, a drop",
            vec![one(), one()],
            [3, 1, 1, 0, 0],
        ),
        plan(
            "one and one, time, a break",
            vec![one(), one()],
            [1, 1, 0, 1, 0],
        ),
        plan(
            "one and one, time, a crash",
            vec![one(), one()],
            [3, 0, 0, 0, 1],
        ),
        plan("renewed, time", vec![vec![RENEWS], one()], [4, 1, 0, 0, 0]),
        plan(
            "a pass and a yield",
            vec![vec![WAITS; 3], one()],
            [0, 0, 1, 0, 0],
        ),
        plan(
            "readers and a writer",
            vec![vec![READS, WAITS], vec![READS]],
            [0, 0, 1, 0, 0],
        ),
        plan(
            "readers, a writer, time",
            vec![vec![READS], one(), vec![READS]],
            [3, 0, 0, 0, 0],
        ),
        plan(
            "permits",
            vec![vec![light, heavy], vec![light]],
            [0, 0, 1, 0, 0],
        ),
        plan(
            "permits, time",
            vec![vec![light], vec![heavy], vec![light]],
            [3, 0, 0, 0, 0],
        ),
        plan(
            "an adoption",
            vec![vec![DETACHES], vec![ADOPTS, WAITS]],
            [1, 1, 0, 0, 0],
        ),
        plan(
            "an adoption, a break",
            vec![vec![DETACHES], vec![ADOPTS]],
            [1, 0, 0, 1, 0],
        ),
        plan(
            "two adopt one",
            vec![vec![DETACHES], vec![ADOPTS], vec![ADOPTS]],
            [0, 0, 0, 0, 0],
        ),
        plan("a kept key", vec![vec![KEEPS], one()], [3, 1, 0, 0, 0]),
        plan(
            "a kept key, a break",
            vec![vec![KEEPS], one()],
            [2, 0, 0, 1, 0],
        ),
        plan(
            "asks once",
            vec![vec![WAITS, ASKS], vec![ASKS]],
            [0, 0, 1, 0, 0],
        ),
        plan(
            "waits for a while",
            vec![vec![WAITS_A_WHILE], one()],
            [3, 1, 0, 0, 0],
        ),
        linger("requests linger", vec![one(), one()], [2, 0, 0, 1, 0]),
        linger(
            "requests of a dead process linger",
            vec![one(), one()],
            [2, 0, 0, 0, 1],
        ),
    ]
}

/// They take about half an hour on two cores, with optimization.
pub(super) fn large() -> Vec<Plan> {
    let (one, two) = (|| vec![WAITS], || vec![WAITS; 2]);
    let (light, heavy) = (takes(1, 2), takes(2, 2));
    vec![
        plan(
            "two and two, a drop and a break",
            vec![two(), two()],
            [0, 0, 1, 1, 0],
        ),
        plan(
            "two and two, two drops and a crash",
            vec![two(), two()],
            [0, 0, 2, 0, 1],
        ),
        plan("two and two, time", vec![two(), two()], [3, 1, 0, 0, 0]),
        plan(
            "two and two, time, a break",
            vec![two(), two()],
            [1, 1, 0, 1, 0],
        ),
        plan(
            "three, a drop and a break",
            vec![one(), one(), one()],
            [0, 0, 1, 1, 0],
        ),
        plan(
            "three, two breaks",
            vec![one(), one(), one()],
            [0, 0, 0, 2, 0],
        ),
        plan(
            "three, time, a crash",
            vec![one(), one(), one()],
            [2, 1, 0, 0, 1],
        ),
        plan(
            "one and one, time, a drop and two breaks",
            vec![one(), one()],
            [3, 1, 1, 2, 0],
        ),
        plan(
            "one and one, time, delays",
            vec![one(), one()],
            [5, 3, 1, 0, 0],
        ),
        plan(
            "one and one, time, a drop, a crash",
            vec![one(), one()],
            [4, 1, 1, 0, 1],
        ),
        plan(
            "renewed, time, a break",
            vec![vec![RENEWS], vec![RENEWS]],
            [4, 1, 0, 1, 0],
        ),
        plan(
            "a pass and a yield, a break",
            vec![vec![WAITS; 3], one()],
            [0, 0, 1, 1, 0],
        ),
        plan(
            "a pass and a yield, time",
            vec![vec![WAITS; 3], one()],
            [2, 1, 0, 0, 0],
        ),
        plan(
            "readers and a writer",
            vec![vec![READS, WAITS], vec![READS]],
            [0, 0, 1, 1, 0],
        ),
        plan(
            "readers, a writer, time",
            vec![vec![READS], one(), vec![READS]],
            [3, 1, 0, 0, 0],
        ),
        plan(
            "readers, a writer, time, a break",
            vec![vec![READS, WAITS], vec![READS]],
            [2, 0, 0, 1, 0],
        ),
        plan(
            "permits",
            vec![vec![light, heavy], vec![light]],
            [0, 0, 1, 1, 0],
        ),
        plan(
            "permits of two limits",
            vec![vec![takes(1, 3), heavy], vec![light]],
            [1, 0, 1, 1, 0],
        ),
        plan(
            "permits, time",
            vec![vec![light], vec![heavy], vec![light]],
            [3, 1, 0, 0, 0],
        ),
        plan(
            "an adoption, a break",
            vec![vec![DETACHES], vec![ADOPTS, WAITS]],
            [2, 1, 0, 1, 0],
        ),
        plan(
            "an adoption, a drop, a crash",
            vec![vec![DETACHES], vec![ADOPTS, WAITS]],
            [2, 1, 1, 0, 1],
        ),
        plan(
            "two adopt one",
            vec![vec![DETACHES], vec![ADOPTS], vec![ADOPTS]],
            [2, 1, 0, 1, 0],
        ),
        plan(
            "a kept key, a drop, a break",
            vec![vec![KEEPS], one()],
            [4, 1, 1, 1, 0],
        ),
        plan(
            "a kept key and who waits beside it",
            vec![vec![KEEPS, WAITS], one()],
            [3, 1, 0, 1, 0],
        ),
        plan(
            "asks once, a break",
            vec![vec![WAITS, ASKS], vec![ASKS]],
            [1, 1, 0, 1, 0],
        ),
        plan(
            "waits for a while, a break",
            vec![vec![WAITS_A_WHILE; 2], one()],
            [3, 1, 0, 1, 0],
        ),
        linger("requests linger", vec![one(), one()], [3, 1, 1, 1, 0]),
        linger(
            "requests of a dead process linger",
            vec![one(), one()],
            [3, 1, 1, 0, 1],
        ),
        Plan {
            kills: false,
            ..linger("requests linger on", vec![one(), one()], [3, 1, 1, 1, 0])
        },
    ]
}
