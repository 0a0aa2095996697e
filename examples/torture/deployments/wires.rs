//! For each child a proxy before every server, so that its wires are its own.

use std::time::Duration;

use crate::plan::{Kind, Side, Stroke};
use crate::support::{Proxy, Way};

/// By child, then by what they lead to.
pub(super) struct Wires(Vec<Vec<Proxy>>);

impl Wires {
    /// Of so many children, to each of these ports.
    pub(super) fn of(slots: usize, ports: &[u16]) -> Self {
        let row = |_| ports.iter().copied().map(Proxy::to_port).collect();
        Self((0..slots).map(row).collect())
    }

    /// Wherever a child is told one of these ports, it is told its own proxy's.
    pub(super) fn told_of(self, ports: &[u16]) -> Self {
        for row in &self.0 {
            let pairs = ports.iter().copied().zip(row.iter().map(Proxy::port));
            let pairs: Vec<_> = pairs.collect();
            row.iter().for_each(|wire| wire.redirect(pairs.clone()));
        }
        self
    }

    pub(super) fn urls(&self, slot: usize) -> Vec<String> {
        self.0[slot].iter().map(Proxy::url).collect()
    }

    /// Those of a child, each as `host:port`.
    pub(super) fn hosts(&self, slot: usize) -> Vec<String> {
        let ports = self.0[slot].iter().map(Proxy::port);
        ports.map(|port| format!("127.0.0.1:{port}")).collect()
    }

    /// Breaks these of a child's wires.
    pub(super) fn begin(&self, stroke: &Stroke, which: &[usize]) {
        let way = way(stroke.side);
        for wire in which.iter().map(|which| &self.0[stroke.slot][*which]) {
            match stroke.kind {
                Kind::Cut => wire.cut(),
                Kind::Refuse => {
                    wire.refuse();
                    wire.cut();
                }
                Kind::Delay => wire.delay(way, Duration::from_millis(stroke.delay)),
                Kind::HalfClose => wire.half_close(way),
                Kind::Blackhole => wire.blackhole(way, true),
                Kind::Stall => wire.hold(way, true),
                // Done to children by their parent.
                _ => {}
            }
        }
    }

    /// Mends them.
    pub(super) fn end(&self, stroke: &Stroke, which: &[usize]) {
        let way = way(stroke.side);
        for wire in which.iter().map(|which| &self.0[stroke.slot][*which]) {
            match stroke.kind {
                Kind::Refuse => wire.accept(),
                Kind::Delay => wire.delay(way, Duration::ZERO),
                Kind::Blackhole => {
                    // No wire goes on in the middle of what has vanished.
                    wire.refuse();
                    wire.cut();
                    wire.blackhole(way, false);
                    wire.accept();
                }
                Kind::Stall => wire.hold(way, false),
                _ => {}
            }
        }
    }
}

fn way(side: Side) -> Way {
    match side {
        Side::ToServer => Way::ToServer,
        Side::ToClient => Way::ToClient,
        Side::Both => Way::Both,
    }
}
