//! One server, and a proxy before it for each child.

use std::time::Duration;

use super::{Deployment, Leftovers, StoredLock, leftovers, stored_locks};
use crate::plan::{Kind, Side, Stroke};
use crate::support::{Program, Proxy, RedisServer, Way};

pub(super) struct Single {
    server: RedisServer,
    wires: Vec<Proxy>,
}

impl Single {
    pub(super) fn start(program: Program, slots: usize) -> Self {
        let server = RedisServer::builder().program(program).keep_data().start();
        let wires = (0..slots).map(|_| Proxy::to(&server)).collect();
        Self { server, wires }
    }
}

fn way(side: Side) -> Way {
    match side {
        Side::ToServer => Way::ToServer,
        Side::ToClient => Way::ToClient,
        Side::Both => Way::Both,
    }
}

impl Deployment for Single {
    fn faults(&self) -> Vec<Kind> {
        Kind::ON_ONE_SERVER.to_vec()
    }

    fn excludes(&self, kind: Kind) -> bool {
        !matches!(kind, Kind::FlushAll | Kind::RestartEmpty)
    }

    fn urls(&self, slot: usize) -> Vec<String> {
        vec![self.wires[slot].url()]
    }

    fn begin(&mut self, stroke: &Stroke) {
        let wire = &self.wires[stroke.slot.min(self.wires.len() - 1)];
        match stroke.kind {
            Kind::Cut => wire.cut(),
            Kind::Refuse => {
                wire.refuse();
                wire.cut();
            }
            Kind::Delay => wire.delay(way(stroke.side), Duration::from_millis(stroke.delay)),
            Kind::HalfClose => wire.half_close(way(stroke.side)),
            Kind::Blackhole => wire.blackhole(way(stroke.side), true),
            Kind::Stall => wire.hold(way(stroke.side), true),
            Kind::ClientKill => drop(self.server.client_kill_all()),
            Kind::ClientPause => {
                let lasts = stroke.lasts.to_string();
                drop(self.server.cmd(&["CLIENT", "PAUSE", &lasts, "ALL"]));
            }
            Kind::ScriptFlush => self.server.script_flush(),
            Kind::FlushAll => self.server.flushall(),
            Kind::RestartKept => self.server.kill(),
            Kind::RestartEmpty => {
                self.server.kill();
                std::fs::remove_dir_all(self.server.folder().join("appendonlydir"))
                    .expect("a server that keeps its data has them there");
            }
            Kind::ServerStop => self.server.stop(),
            // Done to children by their parent.
            _ => {}
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        let wire = &self.wires[stroke.slot.min(self.wires.len() - 1)];
        match stroke.kind {
            Kind::Refuse => wire.accept(),
            Kind::Delay => wire.delay(way(stroke.side), Duration::ZERO),
            Kind::Blackhole => {
                // No wire goes on in the middle of what has vanished.
                wire.refuse();
                wire.cut();
                wire.blackhole(way(stroke.side), false);
                wire.accept();
            }
            Kind::Stall => wire.hold(way(stroke.side), false),
            Kind::RestartKept | Kind::RestartEmpty => self.server.restart(),
            Kind::ServerStop => self.server.cont(),
            _ => {}
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        stored_locks(&self.server)
    }

    fn leftovers(&mut self) -> Leftovers {
        leftovers(&self.server, |_| true)
    }
}
