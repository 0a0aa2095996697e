//! One server, and a proxy before it for each child.

use super::wires::Wires;
use super::{Deployment, Leftovers, StoredLock, leftovers, servers, stored_locks};
use crate::judge::reigns::Reigns;
use crate::plan::Stroke;
use crate::support::{Program, RedisServer};

pub(super) struct Single {
    server: RedisServer,
    wires: Wires,
    reigns: Reigns,
}

impl Single {
    pub(super) fn start(program: Program, slots: usize) -> Self {
        let server = RedisServer::builder().program(program).keep_data().start();
        Self {
            wires: Wires::of(slots, &[server.port()]),
            server,
            reigns: Reigns::of_the_only_ones(1),
        }
    }
}

impl Deployment for Single {
    fn urls(&self, slot: usize) -> Vec<String> {
        self.wires.urls(slot)
    }

    fn begin(&mut self, stroke: &Stroke) {
        match stroke.kind.is_of_a_child() {
            true => self.wires.begin(stroke, &[0]),
            false => servers::begin(&mut self.server, stroke, Some((&mut self.reigns, 0))),
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        match stroke.kind.is_of_a_child() {
            true => self.wires.end(stroke, &[0]),
            false => servers::end(&mut self.server, stroke),
        }
    }

    fn locks(&mut self) -> Vec<StoredLock> {
        stored_locks(&self.server).expect("nothing is done to it just now")
    }

    fn leftovers(&mut self) -> Leftovers {
        leftovers(&self.server, |_| true)
    }

    fn reigns(&self) -> Reigns {
        self.reigns.clone()
    }
}
