//! What goes wrong, and when it ends.

use std::sync::Arc;
use std::time::Duration;

use super::clock::{MILLI, SECOND};
use super::profile::Fault;
use super::world::{Event, World};
use crate::store::memory::{Asking, Keyspace};

impl World {
    pub(super) fn on_fault(&mut self, fault: Fault) {
        let process = self.rng.below(self.processes.len() as u64) as usize;
        let key = self.rng.below(self.keys.len() as u64) as usize;
        if self.processes[process].gone || self.calm {
            return;
        }
        self.note(|_| format!("{fault:?}, r{process}, k{key}"));
        match fault {
            Fault::Cut => {
                if let Some(conn) = self.processes[process].link.conn {
                    self.cut(conn);
                }
            }
            Fault::Crash => self.exit(process),
            Fault::Pause => {
                if !std::mem::replace(&mut self.processes[process].stopped, true) {
                    let ttl = self.profile.ttls[0];
                    let most = self.rng.pick(&[20 * MILLI, ttl, 3 * ttl, 5 * SECOND]);
                    let pause = self.rng.between(0, most);
                    self.plan(pause, Event::Resume(process));
                }
            }
            Fault::Close => {
                if !self.processes[process].stopped {
                    self.close(process);
                }
            }
            Fault::Restart { wipe } => {
                if wipe {
                    self.flush_all();
                }
                self.server.scripts = false;
                self.server.down_until = self.now + self.rng.between(0, 2 * SECOND);
                for conn in 0..self.server.conns.len() {
                    if !self.server.conns[conn].cut {
                        self.cut(conn);
                    }
                    self.server.conns[conn].open = false;
                }
            }
            Fault::Flush => {
                self.flush_all();
                self.referee.flushed = true;
            }
            Fault::ScriptFlush => self.server.scripts = false,
            Fault::FenceLost => {
                self.server.keyspace.forget_fences();
                self.referee.fence_lost = true;
            }
            Fault::Step => {
                let by = self.rng.between(0, 6 * SECOND) as i64 - 3 * SECOND as i64;
                self.server.clock.step(by);
                self.referee.stepped += by.unsigned_abs();
            }
            Fault::Delete => {
                let name = self.keys[key].clone();
                self.server.keyspace.expire(&name);
            }
            Fault::Stranger => {
                let ttl = self.rng.pick(&[None, Some(SECOND), Some(60 * SECOND)]);
                if self.strangers(key, |keyspace, asking| {
                    keyspace.seize(asking, ttl.map(Duration::from_micros))
                }) {
                    let hold = self.rng.between(0, 4 * SECOND);
                    self.plan(hold, Event::StrangerLeaves(key));
                }
            }
        }
        self.read_inbox(process);
    }

    fn flush_all(&mut self) {
        self.server.keyspace = Keyspace::default();
        self.server.keyspace.most_served = self.profile.most_served;
        self.referee.fence_lost = true;
    }

    pub(super) fn stranger_leaves(&mut self, key: usize) {
        self.note(|_| format!("the stranger leaves k{key}"));
        self.strangers(key, Keyspace::unseize);
    }

    fn strangers<R>(&mut self, key: usize, what: impl FnOnce(&mut Keyspace, Asking<'_>) -> R) -> R {
        let instance: Arc<str> = "stranger".into();
        let asking = Asking {
            prefix: &self.server.prefix,
            instance: &instance,
            key: &self.keys[key],
            now: self.server.clock.micros(self.now),
        };
        what(&mut self.server.keyspace, asking)
    }

    /// Nothing goes wrong any more.
    pub(super) fn on_calm(&mut self) {
        self.note(|_| "from here on nothing goes wrong".into());
        self.calm = true;
        for conn in &mut self.server.conns {
            conn.open &= !conn.cut;
        }
        self.referee.starving.fill(None);
        for id in 0..self.processes.len() {
            self.resume(id);
        }
    }
}
