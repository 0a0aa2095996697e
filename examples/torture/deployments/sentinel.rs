//! A primary and two replicas, and three sentinels, which children ask where the primary is. Each child has a proxy of
//! its own before all six, and hears from sentinels the ports of those before the servers.
//!
//! A primary tells its replicas after it has answered: what it told last is forgotten when another takes its place. And
//! sentinels may find that one is dead which is only slow: nothing here counts on who is the primary.

use super::watch::Watch;
use super::wires::Wires;
use super::{Deployment, Leftovers, Servers, StoredLock, leftovers, servers, stored_locks};
use crate::judge::reigns::Reigns;
use crate::plan::{Kind, Stroke};
use crate::support::{
    ClientRow, RedisServer, Sentinel as OneSentinel, Watched, wait_until_blocking,
};

const SERVERS: usize = 3;

/// A fail-over, and another one if the first comes to nothing.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

struct Sentinel {
    // Dropped first: it looks at the servers all the time.
    watch: Watch,
    watched: Watched,
    /// Which server the fault that lasts has struck, and who was the primary then.
    struck: usize,
    primary: usize,
}

pub(super) fn start(slots: usize) -> Deployment {
    let watched = Watched::keeping_data();
    let servers: Vec<_> = watched.servers.iter().map(RedisServer::port).collect();
    let sentinels = watched.sentinels.iter().map(OneSentinel::port);
    let ports: Vec<_> = servers.iter().copied().chain(sentinels).collect();
    Deployment {
        wires: Wires::of(slots, &ports, wires)
            .told_of(&servers)
            .with_url(|hosts| {
                let sentinels = hosts[SERVERS..].join(",");
                format!("redis+sentinel://{sentinels}/{}", Watched::SERVICE)
            }),
        servers: Box::new(Sentinel {
            watch: Watch::over(watched.servers.iter().map(|server| (server, 0))),
            watched,
            struck: 0,
            primary: 0,
        }),
    }
}

impl Sentinel {
    /// Until another is the primary than the one that was struck.
    fn wait_until_replaced(&mut self) {
        wait_until_blocking("another is the primary", PATIENCE, || {
            // A busy machine may also keep sentinels from running for long enough.
            self.watched.end_tilt();
            self.watched
                .told()
                .is_some_and(|index| index != self.struck && self.watched.is_primary(index))
        });
    }
}

/// A child's wires to the servers, to the sentinels, or both.
fn wires(stroke: &Stroke) -> Vec<usize> {
    match stroke.number() % 4 {
        0 => SERVERS..2 * SERVERS,
        1 => 0..2 * SERVERS,
        _ => 0..SERVERS,
    }
    .collect()
}

/// One sentinel, or two: then none can replace a primary.
fn sentinels(stroke: &Stroke) -> impl Iterator<Item = usize> {
    let number = stroke.number();
    (0..1 + number / 3 % 2).map(move |nth| (number + nth) % 3)
}

/// Whether the primary stays away until the sentinels have replaced it.
fn replaces_the_primary(kind: Kind) -> bool {
    matches!(kind, Kind::FailOver | Kind::PrimaryKill | Kind::PrimaryStop)
}

/// Sentinels and replicas stay connected.
fn is_a_caller(client: &ClientRow) -> bool {
    let of_a_server = client.field("flags").contains(['M', 'S']);
    !of_a_server && !client.name().starts_with("sentinel-")
}

impl Servers for Sentinel {
    fn begin(&mut self, stroke: &Stroke) {
        match stroke.kind {
            Kind::SentinelStop => {
                sentinels(stroke).for_each(|index| self.watched.sentinels[index].stop());
                return;
            }
            Kind::SentinelKill => {
                sentinels(stroke).for_each(|index| self.watched.sentinels[index].kill());
                return;
            }
            _ => {}
        }
        if replaces_the_primary(stroke.kind) {
            // An earlier fault may have put sentinels into TILT mode. All other kinds of fault strike in that mode, too.
            self.watched.end_tilt();
        }
        self.primary = self.watched.settle();
        self.struck = match stroke.kind {
            // Now and then a replica.
            Kind::ClientKill | Kind::ClientPause | Kind::RestartKept | Kind::ServerStop
                if stroke.number().is_multiple_of(4) =>
            {
                (self.primary + 1) % SERVERS
            }
            _ => self.primary,
        };
        if stroke.kind == Kind::FailOver {
            return self.watched.order_fail_over();
        }
        let server = &mut self.watched.servers[self.struck];
        servers::begin(
            server,
            stroke,
            Some((&mut self.watch.reigns(), self.struck)),
        );
    }

    fn end(&mut self, stroke: &Stroke) {
        match stroke.kind {
            Kind::SentinelStop => {
                sentinels(stroke).for_each(|index| self.watched.sentinels[index].cont());
            }
            Kind::SentinelKill => {
                sentinels(stroke).for_each(|index| self.watched.sentinels[index].restart());
            }
            Kind::RestartKept | Kind::RestartEmpty => {
                let primary = (self.struck != self.primary).then_some(self.primary);
                self.watched.restart(self.struck, primary);
            }
            Kind::PrimaryKill => {
                self.wait_until_replaced();
                self.watched.restart(self.struck, self.watched.told());
            }
            // Ordered a moment ago, if the servers' faults are late.
            Kind::FailOver => self.watched.wait_until_fail_over_ends(),
            Kind::PrimaryStop => {
                self.wait_until_replaced();
                self.watched.servers[self.struck].cont();
            }
            _ => servers::end(&mut self.watched.servers[self.struck], stroke),
        }
        self.watched.settle();
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        let servers = self.watched.servers.iter();
        let mut primaries = servers.filter(|it| it.try_role().as_deref() == Some("master"));
        // They may change places just now, and end all connections for it.
        match (primaries.next(), primaries.next()) {
            (Some(primary), None) => stored_locks(primary).unwrap_or_default(),
            _ => Vec::new(),
        }
    }

    fn leftovers(&mut self) -> Leftovers {
        let primary = self.watched.settle();
        // Replicas delete a key when their primary does.
        let mut left = leftovers(&self.watched.servers[primary], is_a_caller);
        for server in &self.watched.servers {
            let others = leftovers(server, is_a_caller);
            left.subscriptions.extend(others.subscriptions);
            left.connections.extend(others.connections);
        }
        left.subscriptions.retain(|it| it != "__sentinel__:hello");
        left
    }

    fn reigns(&self) -> Reigns {
        self.watch.reigns().clone()
    }
}
