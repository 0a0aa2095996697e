//! One server, and a proxy before it for each child.

use super::wires::Wires;
use super::{Deployment, Leftovers, Servers, StoredLock, leftovers, servers, stored_locks};
use crate::judge::Span;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::plan::Stroke;
use crate::support::{Program, RedisServer};

struct Single {
    server: RedisServer,
    reigns: Reigns,
}

pub(super) fn start(program: Program, slots: usize) -> Deployment {
    let server = RedisServer::builder().program(program).keep_data().start();
    Deployment {
        wires: Wires::of(slots, &[server.port()], |_| vec![0]),
        servers: Box::new(Single {
            server,
            reigns: Reigns::of_the_only_ones(1),
        }),
    }
}

impl Servers for Single {
    fn begin(&mut self, stroke: &Stroke) {
        if servers::silences(stroke.kind) {
            self.reigns.falls_silent(now());
        }
        servers::begin(&mut self.server, stroke, Some((&mut self.reigns, 0)));
    }

    fn end(&mut self, stroke: &Stroke) {
        servers::end(&mut self.server, stroke);
        // It is the only one, and there again.
        let now = now();
        let here = Span { from: now, to: now };
        self.reigns.answered(0, here, true);
        if servers::silences(stroke.kind) {
            self.reigns.speaks_again(now);
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
