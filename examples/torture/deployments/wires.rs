//! For each child a proxy before every server, so that its wires are its own.

use std::time::Duration;

use crate::plan::{Kind, Side, Stroke};
use crate::support::{Proxy, Way};

/// What stands between children and servers.
pub(crate) struct Wires {
    /// By child, then by what they lead to.
    rows: Vec<Vec<Proxy>>,
    /// Which of a child's wires a fault strikes.
    struck: fn(&Stroke) -> Vec<usize>,
    /// The url of a child's store, if it has one for all of its wires.
    url: Option<fn(&[String]) -> String>,
}

impl Wires {
    /// Of so many children, to each of these ports.
    pub(super) fn of(slots: usize, ports: &[u16], struck: fn(&Stroke) -> Vec<usize>) -> Self {
        let row = |_| ports.iter().copied().map(Proxy::to_port).collect();
        Self {
            rows: (0..slots).map(row).collect(),
            struck,
            url: None,
        }
    }

    /// A child has one url, made of all its proxies, each as `host:port`.
    pub(super) fn with_url(self, url: fn(&[String]) -> String) -> Self {
        Self {
            url: Some(url),
            ..self
        }
    }

    /// Wherever a child is told one of these ports, it is told its own proxy's.
    pub(super) fn told_of(self, ports: &[u16]) -> Self {
        for row in &self.rows {
            let pairs = ports.iter().copied().zip(row.iter().map(Proxy::port));
            let pairs: Vec<_> = pairs.collect();
            row.iter().for_each(|wire| wire.redirect(pairs.clone()));
        }
        self
    }

    /// Where the child in this slot finds its store: what its [`open`](super::open) gets.
    pub(crate) fn urls(&self, slot: usize) -> Vec<String> {
        let wires = self.rows[slot].iter();
        let Some(url) = self.url else {
            return wires.map(Proxy::url).collect();
        };
        let hosts = wires.map(|wire| format!("127.0.0.1:{}", wire.port()));
        let hosts: Vec<_> = hosts.collect();
        vec![url(&hosts)]
    }

    fn struck(&self, stroke: &Stroke) -> impl Iterator<Item = &Proxy> {
        let struck = (self.struck)(stroke).into_iter();
        struck.map(|which| &self.rows[stroke.slot][which])
    }

    /// Breaks wires of a child.
    pub(crate) fn begin(&self, stroke: &Stroke) {
        let way = way(stroke.side);
        for wire in self.struck(stroke) {
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
    pub(crate) fn end(&self, stroke: &Stroke) {
        let way = way(stroke.side);
        for wire in self.struck(stroke) {
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
