//! What breaks, and when: the same for the same seed.

use std::fmt;

use crate::dice::Dice;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Kind {
    /// SIGKILL to a child; a new one takes its place.
    Kill,
    /// A child shuts its registry down and ends in good order; a new one takes its place.
    Leave,
    /// SIGSTOP and SIGCONT within every ttl.
    Stop,
    /// SIGSTOP, and SIGCONT when every lease is over.
    LongStop,
    /// A task of a child computes without an await, within every ttl or for longer.
    Compute,
    /// Every connection of a child is closed.
    Cut,
    /// The same, and new ones are refused for a while.
    Refuse,
    /// Bytes of a child's connections come later.
    Delay,
    /// One way of every connection of a child ends; the other goes on.
    HalfClose,
    /// Bytes of a child vanish; the connections are closed at the end.
    Blackhole,
    /// Bytes of a child are kept back, and all come at the end.
    Stall,
    /// A child gets many more waiters.
    Flood,
    /// A child gets many more waiters, and drops them all at once.
    Drop,
    /// `CLIENT KILL` of every connection.
    ClientKill,
    /// `CLIENT PAUSE`.
    ClientPause,
    /// `SCRIPT FLUSH`.
    ScriptFlush,
    /// `FLUSHALL`: what was held is forgotten.
    FlushAll,
    /// The server is killed, and starts again with its data.
    RestartKept,
    /// The server is killed, and starts again empty.
    RestartEmpty,
    /// SIGSTOP and SIGCONT of the server.
    ServerStop,
    /// `SENTINEL FAILOVER`: the last that was held may be forgotten. `CLUSTER FAILOVER`: nothing is.
    FailOver,
    /// SIGKILL to the primary until another has taken its place, where the last may be forgotten; then it comes back as a
    /// replica.
    PrimaryKill,
    /// SIGSTOP and SIGCONT of a majority of a quorum's servers.
    MajorityStop,
    /// A majority of a quorum's servers is killed, and starts again with its data.
    MajorityKill,
    /// SIGSTOP to a primary until another has taken its place: the same; then SIGCONT, and it believes to be one still.
    PrimaryStop,
    /// The slot of a key goes to another primary, and is half-way for a while.
    SlotMove,
    /// SIGSTOP and SIGCONT of a sentinel, or of two.
    SentinelStop,
    /// A sentinel is killed, or two are, and starts again.
    SentinelKill,
    /// Every server process of a client is ended.
    BackendsEnd,
    /// One process of the server dies, and the server ends all others and recovers.
    BackendCrash,
    /// A transaction has locked the tables.
    TablesLocked,
    /// The tables are emptied: what was held is forgotten.
    Truncate,
    /// Rows that are not used are deleted at once.
    Sweep,
}

impl Kind {
    /// What can befall every deployment: children, the connection to their servers, and a server.
    pub(crate) const EVERYWHERE: [Self; 20] = [
        Self::Kill,
        Self::Leave,
        Self::Stop,
        Self::LongStop,
        Self::Compute,
        Self::Cut,
        Self::Refuse,
        Self::Delay,
        Self::HalfClose,
        Self::Blackhole,
        Self::Stall,
        Self::Flood,
        Self::Drop,
        Self::ClientKill,
        Self::ClientPause,
        Self::ScriptFlush,
        Self::FlushAll,
        Self::RestartKept,
        Self::RestartEmpty,
        Self::ServerStop,
    ];

    /// And what one whose primary changes.
    const UNDER_SENTINELS: [Self; 5] = [
        Self::FailOver,
        Self::PrimaryKill,
        Self::PrimaryStop,
        Self::SentinelStop,
        Self::SentinelKill,
    ];

    /// And what several servers that know nothing of each other.
    const IN_A_QUORUM: [Self; 2] = [Self::MajorityStop, Self::MajorityKill];

    /// And what several that do.
    const IN_A_CLUSTER: [Self; 4] = [
        Self::FailOver,
        Self::PrimaryKill,
        Self::PrimaryStop,
        Self::SlotMove,
    ];

    /// And what a PostgreSQL server, besides what befalls children and their connections.
    pub(crate) const IN_POSTGRES: [Self; 7] = [
        Self::BackendsEnd,
        Self::BackendCrash,
        Self::TablesLocked,
        Self::Truncate,
        Self::Sweep,
        Self::RestartKept,
        Self::ServerStop,
    ];

    /// What can befall a deployment. What is in this list, and in which order, makes the plan of a seed.
    pub(crate) fn of(deployment: &str) -> Vec<Self> {
        if deployment.starts_with("postgres") {
            let of_children = Self::EVERYWHERE
                .into_iter()
                .filter(|kind| kind.is_of_a_child());
            return of_children.chain(Self::IN_POSTGRES).collect();
        }
        let more: &[Self] = match deployment {
            "sentinel" => &Self::UNDER_SENTINELS,
            "quorum" => &Self::IN_A_QUORUM,
            "cluster" => &Self::IN_A_CLUSTER,
            _ => &[],
        };
        [&Self::EVERYWHERE, more].concat()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "SIGKILL",
            Self::Leave => "orderly shutdown",
            Self::Stop => "SIGSTOP, short",
            Self::LongStop => "SIGSTOP, past the ttl",
            Self::Compute => "a worker computes",
            Self::Cut => "connections cut",
            Self::Refuse => "connections refused",
            Self::Delay => "bytes delayed",
            Self::HalfClose => "half-closed",
            Self::Blackhole => "blackholed",
            Self::Stall => "stalled, then delivered",
            Self::Flood => "flood of waiters",
            Self::Drop => "callers dropped",
            Self::ClientKill => "CLIENT KILL",
            Self::ClientPause => "CLIENT PAUSE",
            Self::ScriptFlush => "SCRIPT FLUSH",
            Self::FlushAll => "FLUSHALL",
            Self::RestartKept => "restart with data",
            Self::RestartEmpty => "restart without data",
            Self::ServerStop => "server stopped",
            Self::FailOver => "fail-over at will",
            Self::PrimaryKill => "primary killed",
            Self::MajorityStop => "majority stopped",
            Self::MajorityKill => "majority killed",
            Self::PrimaryStop => "primary stopped, replaced",
            Self::SlotMove => "slot moved",
            Self::SentinelStop => "sentinels silent",
            Self::SentinelKill => "sentinels killed",
            Self::BackendsEnd => "backends terminated",
            Self::BackendCrash => "backend crashed",
            Self::TablesLocked => "tables locked",
            Self::Truncate => "TRUNCATE",
            Self::Sweep => "swept",
        }
    }

    /// Whether it strikes one child, and not all at once.
    pub(crate) fn is_of_a_child(self) -> bool {
        self < Self::ClientKill
    }

    /// How long it lasts, in ms.
    fn lasts(self, dice: &mut Dice) -> u64 {
        let (low, high) = match self {
            Self::Cut | Self::HalfClose | Self::ClientKill | Self::ScriptFlush | Self::FlushAll => {
                (0, 0)
            }
            Self::Kill => (0, 400),
            Self::Leave => (1_500, 2_000),
            Self::Stop => (5, 80),
            Self::LongStop => (900, 2_500),
            Self::Compute => (100, 2_500),
            Self::Refuse => (50, 1_000),
            Self::Delay => (300, 2_000),
            Self::Blackhole | Self::Stall => (100, 2_500),
            Self::Flood | Self::Drop => (50, 500),
            Self::ClientPause => (20, 800),
            Self::RestartKept | Self::RestartEmpty => (0, 500),
            Self::ServerStop => (50, 1_500),
            // Less than it takes: whoever undoes it waits for the other to be there.
            Self::FailOver | Self::PrimaryKill | Self::PrimaryStop => (1_500, 2_500),
            Self::MajorityStop => (50, 1_500),
            Self::MajorityKill => (0, 500),
            Self::SlotMove | Self::TablesLocked => (50, 1_000),
            Self::BackendsEnd | Self::Truncate | Self::Sweep => (0, 0),
            // It is over when the server is back.
            Self::BackendCrash => (0, 500),
            Self::SentinelStop | Self::SentinelKill => (50, 2_500),
        };
        dice.between(low, high)
    }
}

/// Which of the two directions of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    ToServer,
    ToClient,
    Both,
}

/// One fault of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stroke {
    /// In ms from the beginning.
    pub(crate) at: u64,
    /// In ms.
    pub(crate) lasts: u64,
    pub(crate) kind: Kind,
    /// The child that it strikes; nothing to one that strikes all.
    pub(crate) slot: usize,
    pub(crate) side: Side,
    /// In ms, for what comes later.
    pub(crate) delay: u64,
}

impl Stroke {
    /// By which a deployment chooses whatever the kind leaves open.
    pub(crate) fn number(&self) -> usize {
        usize::try_from(self.delay).expect("a few ms")
    }

    pub(crate) fn end(&self) -> u64 {
        self.at + self.lasts
    }
}

impl fmt::Display for Stroke {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8} ms  {:>5} ms  ", self.at, self.lasts)?;
        match self.kind.is_of_a_child() {
            true => write!(f, "child {}  {}", self.slot, self.kind.name())?,
            false => write!(f, "server   {}", self.kind.name())?,
        }
        match self.kind {
            Kind::HalfClose | Kind::Blackhole | Kind::Stall => write!(f, " ({:?})", self.side),
            Kind::Delay => write!(f, " ({:?}, {} ms)", self.side, self.delay),
            _ => Ok(()),
        }
    }
}

/// Faults of these kinds until `length` (ms), by the time at which they begin. Each child has a row of its own and the
/// servers have one; faults of one row never overlap, those of different rows do. A row goes through all of its kinds,
/// in an order of its own, before any comes again.
pub(crate) fn plan(seed: u64, length: u64, kinds: &[Kind], slots: usize) -> Vec<Stroke> {
    let mut plan = Vec::new();
    for row in 0..=slots {
        let mut dice = Dice::of(seed, row as u64);
        let of_a_child = row < slots;
        let kinds: Vec<Kind> = kinds
            .iter()
            .copied()
            .filter(|kind| kind.is_of_a_child() == of_a_child)
            .collect();
        if kinds.is_empty() {
            continue;
        }
        let mut bag = Vec::new();
        let mut at = dice.between(300, 1_500);
        loop {
            if bag.is_empty() {
                bag.clone_from(&kinds);
                dice.shuffle(&mut bag);
            }
            let kind = bag.pop().expect("filled just now");
            let stroke = Stroke {
                at,
                lasts: kind.lasts(&mut dice),
                kind,
                slot: row,
                side: *dice.pick(&[Side::ToServer, Side::ToClient, Side::Both]),
                delay: dice.between(2, 120),
            };
            if stroke.end() > length {
                break;
            }
            at = stroke.end() + dice.between(150, 1_200);
            plan.push(stroke);
        }
    }
    plan.sort_by_key(|stroke| (stroke.at, stroke.slot));
    plan
}
