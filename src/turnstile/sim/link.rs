//! A registry's session: what the Redis store does between a registry and the connection. Which ops share
//! a call, and in what order they go, is decided by the store's own code.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::clock::{MILLI, True};
use super::process::{ProcessId, StoreEvent, line_of};
use super::server::{Call, ConnId, Item};
use super::world::{Event, KeyId, World};
use crate::base::StoreError;
use crate::base::clock::{FOREVER, Moment};
use crate::store::contract::{Answer, Grant, Op, OpError, Outcome, ServerTime};
use crate::store::send_window::{Limits, Priority, SendWindow, Sendable};

pub(super) struct Link {
    pub(super) conn: Option<ConnId>,
    pub(super) up: bool,
    window: SendWindow<Item>,
    /// The calls in flight, and when they were sent; the oldest first.
    in_flight: VecDeque<(u64, True)>,
    /// The server did not know the script: the next call brings it.
    loads: bool,
    flushing: bool,
    last_call: u64,
    probe: (ServerTime, Moment),
}

impl Link {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            conn: None,
            up: false,
            window: SendWindow::new(limits),
            in_flight: VecDeque::new(),
            loads: false,
            flushing: false,
            last_call: 0,
            probe: (0, Moment::ZERO),
        }
    }
}

impl Sendable for Item {
    fn line(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        line_of(self.key, &self.op).hash(&mut hasher);
        hasher.finish()
    }

    fn priority(&self) -> Priority {
        match self.op {
            Op::Renew { .. } => Priority::Renew,
            _ => Priority::Change,
        }
    }

    fn group(&self) -> u16 {
        0
    }

    fn most(&self) -> usize {
        usize::MAX
    }

    fn size(&self) -> usize {
        0
    }
}

/// The answer to one call.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) call: Call,
    pub(super) said: Told,
}

#[derive(Clone, Debug)]
pub(super) enum Told {
    /// The script was not there.
    NoScript,
    /// Nothing of it was done.
    Refused,
    Ops(Vec<Said>),
}

/// The answer to one op.
#[derive(Clone, Debug)]
pub(super) enum Said {
    /// And whether it is to serve the rest of the queue.
    Done(Answer, bool),
    Refused {
        lasting: bool,
    },
    /// O5: nothing was done, and this is the time.
    Late(ServerTime),
}

fn too_few() -> StoreError {
    StoreError::new("too few replicas")
}

/// How long ops wait for others that go with them.
pub(super) const BATCH: u64 = MILLI / 2;

/// How late a renewal may set out.
pub(super) const STRAGGLE: u64 = 5 * MILLI;

fn broken() -> StoreError {
    StoreError::new("the connection broke")
}

impl World {
    pub(super) fn submit(&mut self, id: ProcessId, key: KeyId, op: Op) {
        self.note(|_| format!("r{id} k{key} sends {op:?}"));
        let conn = self.processes[id].link.conn;
        let straggles = matches!(op, Op::Renew { .. }) && self.rng.chance(self.profile.stragglers);
        if straggles && !self.calm {
            let delay = self.rng.between(0, STRAGGLE);
            self.plan(delay, Event::Straggler(id, conn, key, op));
        } else {
            self.catch_up(id, conn, key, op);
        }
    }

    /// Its turn has come, if the connection is still the one that it was meant for.
    pub(super) fn catch_up(&mut self, id: ProcessId, conn: Option<ConnId>, key: KeyId, op: Op) {
        let now = self.processes[id].clock.moment(self.now);
        let until = match &op {
            Op::Renew { within, .. } => now + *within,
            _ => FOREVER,
        };
        let item = Item {
            key,
            op,
            until,
            use_by: 0,
            late_before: false,
        };
        let link = &mut self.processes[id].link;
        if link.conn == conn && (link.up || self.profile.ops_wait) {
            link.window.add([item]);
            self.flush_soon(id);
        } else {
            let (op, error) = (item.op, OpError::Unsent(broken()));
            self.tell(id, StoreEvent::Replied(key, op, Err(error)));
        }
    }

    fn flush_soon(&mut self, id: ProcessId) {
        let link = &mut self.processes[id].link;
        if link.up && link.window.is_waiting() && !link.flushing {
            link.flushing = true;
            let delay = if self.profile.batches {
                self.rng.between(0, BATCH)
            } else {
                0
            };
            self.plan(delay, Event::Flush(id));
        }
    }

    pub(super) fn flush(&mut self, id: ProcessId) {
        let process = &mut self.processes[id];
        let link = &mut process.link;
        link.flushing = false;
        let (Some(conn), true) = (link.conn, link.up) else {
            return;
        };
        let now = process.clock.moment(self.now);
        let since = now.saturating_sub(link.probe.1).as_micros() as u64;
        let use_by = link.probe.0 + since + self.profile.response_timeout;
        while let Some((priority, mut ops)) = self.processes[id].link.window.next_call() {
            if priority == Priority::Renew {
                ops = self.shed(id, now, ops);
                if ops.is_empty() {
                    continue;
                }
            }
            for item in &mut ops {
                item.use_by = use_by;
            }
            let link = &mut self.processes[id].link;
            link.last_call += 1;
            let call = Call {
                id: link.last_call,
                ops: ops.clone(),
                loads: std::mem::take(&mut link.loads),
            };
            link.in_flight.push_back((call.id, self.now));
            link.window.sent(ops);
            if priority == Priority::Change && call.ops.len() > 1 {
                self.referee.counts.shared += 1;
            }
            self.plan(self.profile.response_timeout, Event::Overdue(conn, call.id));
            self.transmit(conn, call);
        }
    }

    /// G4: a renewal that cannot be answered in time is not sent.
    fn shed(&mut self, id: ProcessId, now: Moment, ops: Vec<Item>) -> Vec<Item> {
        let mut timely = Vec::new();
        for item in ops {
            let guessed = !self.calm && self.rng.chance(self.profile.refusals);
            if now < item.until && !guessed {
                timely.push(item);
                continue;
            }
            self.referee.counts.shed += 1;
            let error = OpError::TooLate(StoreError::new("too late"));
            self.tell(id, StoreEvent::Replied(item.key, item.op, Err(error)));
        }
        timely
    }

    pub(super) fn deliver_reply(&mut self, conn: ConnId, reply: Reply) {
        let id = self.server.conns[conn].process;
        let link = &mut self.processes[id].link;
        if link.conn != Some(conn) || self.server.conns[conn].cut {
            return;
        }
        let oldest = link.in_flight.pop_front().map(|(id, _)| id);
        assert_eq!(oldest, Some(reply.call.id), "answers come in order");
        let answered = link.window.answered();
        let ops = answered.expect("a call is in flight until its reply");
        let said = match reply.said {
            // Again, with the script, before whatever else waits for their keys.
            Told::NoScript => {
                link.loads = true;
                for item in ops.into_iter().rev() {
                    link.window.add_again(item);
                }
                return self.flush_soon(id);
            }
            Told::Refused => vec![Said::Refused { lasting: false }; reply.call.ops.len()],
            Told::Ops(said) => said,
        };
        assert_eq!(ops.len(), said.len(), "an answer for each op");
        let mut doubtful = false;
        for (item, said) in ops.into_iter().zip(said) {
            doubtful |= self.on_said(id, item, said);
        }
        if doubtful {
            return self.break_off(id);
        }
        self.flush_soon(id);
    }

    /// Tells an answer; true if the connection is not to be trusted any more.
    fn on_said(&mut self, id: ProcessId, mut item: Item, said: Said) -> bool {
        let is_again = matches!(said, Said::Late(_)) && !item.late_before;
        if !is_again {
            self.processes[id].link.window.finish(&item);
        }
        let result = match said {
            Said::Done(answer, unserved) => {
                if unserved {
                    let owner = item.op.owner();
                    self.tell(id, StoreEvent::Unserved(item.key, owner));
                }
                match answer.outcome {
                    Outcome::Won { .. } if self.is_unconfirmed() => {
                        Err(OpError::Unconfirmed(too_few()))
                    }
                    _ => Ok(answer),
                }
            }
            Said::Refused { lasting: true } => {
                Err(OpError::Refused(StoreError::lasting("not allowed")))
            }
            Said::Refused { lasting: false } => {
                Err(OpError::Refused(StoreError::new("busy loading")))
            }
            Said::Late(at) => {
                let now = self.processes[id].clock.moment(self.now);
                let link = &mut self.processes[id].link;
                link.probe = (at, now);
                if !item.late_before {
                    item.late_before = true;
                    link.window.add_again(item);
                    self.referee.counts.again += 1;
                    return false;
                }
                let error = OpError::Unknown(broken());
                self.tell(id, StoreEvent::Replied(item.key, item.op, Err(error)));
                return true;
            }
        };
        self.tell(id, StoreEvent::Replied(item.key, item.op, result));
        false
    }

    pub(super) fn on_push(&mut self, conn: ConnId, key: KeyId, grant: Grant, unserved: bool) {
        let id = self.server.conns[conn].process;
        if self.processes[id].link.conn == Some(conn) && !self.server.conns[conn].cut {
            if unserved {
                self.tell(id, StoreEvent::Unserved(key, grant.owner));
            }
            let event = if self.is_unconfirmed() {
                StoreEvent::Unconfirmed(key, grant, too_few())
            } else {
                StoreEvent::Granted(key, grant)
            };
            self.tell(id, event);
        }
    }

    /// Whether too few of those who have to know of it do.
    fn is_unconfirmed(&mut self) -> bool {
        let is = !self.calm && self.rng.chance(self.profile.unconfirmed);
        self.referee.counts.unconfirmed += u64::from(is);
        is
    }

    /// The oldest call is not answered in time: the connection ends.
    pub(super) fn on_overdue(&mut self, conn: ConnId, call: u64) {
        let id = self.server.conns[conn].process;
        let link = &self.processes[id].link;
        let handshake = call == 0 && !link.up;
        let oldest = link.in_flight.front();
        let late = oldest.is_some_and(|(_, sent)| sent + self.profile.response_timeout <= self.now);
        let waits = handshake || late;
        if link.conn == Some(conn) && waits {
            self.break_off(id);
        }
    }

    pub(super) fn on_notice(&mut self, conn: ConnId) {
        let id = self.server.conns[conn].process;
        if self.processes[id].link.conn == Some(conn) {
            self.break_off(id);
        }
    }

    /// The connection ends for the client; the server may not know yet.
    pub(super) fn break_off(&mut self, id: ProcessId) {
        self.note(|_| format!("r{id} gives up its connection"));
        let link = &mut self.processes[id].link;
        let conn = link.conn.take();
        let stood = std::mem::replace(&mut link.up, false);
        link.in_flight.clear();
        link.loads = false;
        let (lost, mut unsent) = link.window.abort();
        // What was not sent waits for the next connection, unless that can not be made.
        if stood && self.profile.ops_wait {
            link.window.add(unsent.drain(..));
        }
        if let Some(conn) = conn {
            self.cut(conn);
        }
        let batched = |item: &&Item| item.priority() == Priority::Change;
        if lost.iter().filter(batched).count() > 1 {
            self.referee.counts.lost += 1;
        }
        for item in lost {
            let error = OpError::Unknown(broken());
            self.tell(id, StoreEvent::Replied(item.key, item.op, Err(error)));
        }
        for item in unsent {
            // One that came back too late once has not been done either.
            let error = OpError::Unsent(broken());
            self.tell(id, StoreEvent::Replied(item.key, item.op, Err(error)));
        }
        self.tell(id, StoreEvent::Down(broken()));
        let pause = if self.calm {
            20 * MILLI
        } else {
            self.rng.between(0, 1000) * MILLI
        };
        self.plan(pause, Event::Reconnect(id));
    }

    pub(super) fn reconnect(&mut self, id: ProcessId) {
        if self.processes[id].link.conn.is_some() {
            return;
        }
        let fails = self.now < self.server.down_until
            || (!self.calm && self.rng.chance(self.profile.failed_connects));
        if fails {
            return self.break_off(id);
        }
        let conn = self.new_conn(id);
        self.processes[id].link.conn = Some(conn);
        let delay = self.latency();
        self.plan(delay, Event::Handshake(conn));
        let timeout: True = self
            .profile
            .response_timeout
            .max(4 * self.profile.latency.1);
        self.plan(timeout, Event::Overdue(conn, 0));
    }

    pub(super) fn on_connected(&mut self, conn: ConnId) {
        let id = self.server.conns[conn].process;
        let at = self.server.clock.micros(self.now);
        let process = &mut self.processes[id];
        if process.link.conn != Some(conn) || self.server.conns[conn].cut {
            return;
        }
        process.link.up = true;
        // A little old, as it came with an answer.
        process.link.probe = (at.saturating_sub(100), process.clock.moment(self.now));
        let queue = self.server.conns[conn].subscribed;
        self.tell(id, StoreEvent::Up { queue });
        self.flush_soon(id);
    }
}
