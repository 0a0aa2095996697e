//! The event loop: what is due next, in true time.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::caller::{Caller, CallerId};
use super::clock::{Clock, SECOND, True};
use super::link::Reply;
use super::process::{Process, ProcessId};
use super::profile::{Fault, Profile};
use super::referee::Referee;
use super::rng::Rng;
use super::server::{Call, ConnId, Server};
use crate::store::contract::{Grant, Op};
use crate::turnstile::WaiterId;

pub(super) type KeyId = usize;

/// The last steps of a run, for whoever has to read it; shared, so that a panic does not lose it.
pub(super) type Trace = Rc<RefCell<VecDeque<String>>>;

const TRACE_LENGTH: usize = 100_000;

#[derive(Clone, Debug)]
pub(super) enum Event {
    // What a process sees or does; it waits while the process is stopped.
    Arrive(CallerId),
    Look(CallerId, u32),
    Leave(CallerId, u32),
    Finish(CallerId, u32),
    Extend(CallerId, u32),
    Timer(ProcessId, KeyId),
    Pause(ProcessId, KeyId, WaiterId, Option<Duration>),
    Flush(ProcessId),
    Straggler(ProcessId, Option<ConnId>, KeyId, Op),
    Reply(ConnId, Reply),
    Push(ConnId, KeyId, Grant, bool),
    Freed(ProcessId, KeyId),
    Overdue(ConnId, u64),
    Notice(ConnId),
    Reconnect(ProcessId),
    Connected(ConnId),
    // What the server and the rest of the world do.
    Request(ConnId, Call),
    Handshake(ConnId),
    ServerNotices(ConnId),
    Resume(ProcessId),
    Exit(ProcessId),
    Fault(Fault),
    StrangerLeaves(KeyId),
    Calm,
    Beat,
}

struct Due {
    at: True,
    turn: u64,
    event: Event,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.turn) == (other.at, other.turn)
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.turn).cmp(&(other.at, other.turn))
    }
}

pub(super) struct World {
    pub(super) profile: Profile,
    pub(super) rng: Rng,
    pub(super) now: True,
    pub(super) calm: bool,
    pub(super) server: Server,
    pub(super) processes: Vec<Process>,
    pub(super) callers: Vec<Caller>,
    pub(super) keys: Vec<Arc<str>>,
    pub(super) referee: Referee,
    pub(super) steps: u64,
    due: BinaryHeap<Reverse<Due>>,
    turn: u64,
    trace: Option<Trace>,
}

/// Clocks run within 0.1 % of each other; the worst pairs are as likely as the others.
fn drift(rng: &mut Rng) -> i64 {
    let any = rng.between(0, 1000) as i64 - 500;
    rng.pick(&[-500, 500, any])
}

impl World {
    pub(super) fn new(seed: u64, trace: Option<Trace>) -> Self {
        let mut rng = Rng::new(seed);
        let profile = Profile::of(seed, &mut rng);
        Self::with(profile, rng, trace)
    }

    pub(super) fn with(profile: Profile, mut rng: Rng, trace: Option<Trace>) -> Self {
        let ppm = drift(&mut rng);
        let mut server = Server::new(Clock::new(1_700_000_000 * SECOND, ppm));
        server.keyspace.most_served = profile.most_served;
        let mut world = Self {
            now: 0,
            calm: false,
            server,
            processes: Vec::new(),
            callers: Vec::new(),
            keys: (0..profile.keys)
                .map(|key| format!("k{key}").into())
                .collect(),
            referee: Referee::new(profile.keys),
            steps: 0,
            due: BinaryHeap::new(),
            turn: 0,
            trace,
            profile,
            rng,
        };
        world.note(|world| format!("{:?}", world.profile));
        for id in 0..world.profile.registries {
            let seed = world.rng.next();
            let ppm = drift(&mut world.rng);
            let process = Process::new(id, Clock::new(0, ppm), seed, &world.profile);
            world.processes.push(process);
            world.plan(world.rng.clone().below(1000), Event::Reconnect(id));
        }
        for _ in 0..world.profile.callers {
            world.plan_caller();
        }
        for (at, fault) in world.profile.faults.clone() {
            world.plan(at, Event::Fault(fault));
        }
        world.plan(world.profile.calm_at, Event::Calm);
        world.plan(0, Event::Beat);
        world
    }

    /// Lets `event` happen after `delay`.
    pub(super) fn plan(&mut self, delay: u64, event: Event) {
        self.turn += 1;
        let at = self.now + delay;
        let turn = self.turn;
        self.due.push(Reverse(Due { at, turn, event }));
    }

    pub(super) fn note(&self, line: impl FnOnce(&Self) -> String) {
        if let Some(trace) = &self.trace {
            let line = format!("{:>12.3} ms  {}", self.now as f64 / 1000.0, line(self));
            let mut trace = trace.borrow_mut();
            if trace.len() == TRACE_LENGTH {
                trace.pop_front();
            }
            trace.push_back(line);
        }
    }

    /// Runs to the end; an error is what was broken.
    pub(super) fn run(mut self) -> Result<Self, String> {
        let end = self.end();
        while let Some(Reverse(due)) = self.due.pop() {
            if due.at > end {
                break;
            }
            self.now = due.at;
            self.steps += 1;
            self.handle(due.event);
            if let Some(breach) = self.referee.breach.take() {
                return Err(breach);
            }
        }
        self.now = end;
        self.check_end();
        match self.referee.breach.take() {
            Some(breach) => Err(breach),
            None => Ok(self),
        }
    }

    /// When everybody must be served or gone, and everything in the store have run out.
    fn end(&self) -> True {
        let wait = super::caller::LONGEST_WAIT;
        let hold = self.profile.holds.iter().copied().max().unwrap_or(0);
        let ttl = self.profile.longest_ttl();
        self.profile.calm_at + wait + hold + 2 * ttl + 100 * SECOND
    }

    /// Lets a process see what it is to see, now or when it runs again.
    fn handle(&mut self, event: Event) {
        let Some(id) = self.whose(&event) else {
            return self.handle_world(event);
        };
        let process = &mut self.processes[id];
        if process.gone {
            return;
        }
        if process.stopped {
            process.backlog.push(event);
            return;
        }
        self.handle_process(id, event);
    }

    fn whose(&self, event: &Event) -> Option<ProcessId> {
        Some(match event {
            Event::Arrive(caller)
            | Event::Look(caller, _)
            | Event::Leave(caller, _)
            | Event::Finish(caller, _)
            | Event::Extend(caller, _) => self.callers[*caller].process,
            Event::Timer(process, _)
            | Event::Pause(process, ..)
            | Event::Flush(process)
            | Event::Straggler(process, ..)
            | Event::Freed(process, _)
            | Event::Reconnect(process) => *process,
            Event::Reply(conn, _)
            | Event::Push(conn, ..)
            | Event::Overdue(conn, _)
            | Event::Notice(conn)
            | Event::Connected(conn) => self.server.conns[*conn].process,
            _ => return None,
        })
    }

    fn handle_process(&mut self, id: ProcessId, event: Event) {
        match event {
            Event::Arrive(caller) => self.caller_arrives(caller),
            Event::Look(caller, visit) => self.caller_looks(caller, visit),
            Event::Leave(caller, visit) => self.caller_leaves(caller, visit),
            Event::Finish(caller, visit) => self.caller_finishes(caller, visit),
            Event::Extend(caller, visit) => self.caller_extends(caller, visit),
            Event::Timer(_, key) => self.timer(id, key),
            Event::Pause(_, key, waiter, pause) => self.on_pause(id, key, waiter, pause),
            Event::Flush(_) => self.flush(id),
            Event::Straggler(_, conn, key, op) => self.catch_up(id, conn, key, op),
            Event::Reply(conn, reply) => self.deliver_reply(conn, reply),
            Event::Push(conn, key, grant, unserved) => self.on_push(conn, key, grant, unserved),
            Event::Freed(_, key) => self.tell(id, super::process::StoreEvent::Freed(key)),
            Event::Overdue(conn, call) => self.on_overdue(conn, call),
            Event::Notice(conn) => self.on_notice(conn),
            Event::Reconnect(_) => self.reconnect(id),
            Event::Connected(conn) => self.on_connected(conn),
            _ => unreachable!("not a process's event"),
        }
        self.read_inbox(id);
    }

    fn handle_world(&mut self, event: Event) {
        match event {
            Event::Request(conn, call) => self.on_request(conn, call),
            Event::Handshake(conn) => self.on_handshake(conn),
            Event::ServerNotices(conn) => self.server.conns[conn].open = false,
            Event::Resume(id) => self.resume(id),
            Event::Exit(id) => self.exit(id),
            Event::Fault(fault) => self.on_fault(fault),
            Event::StrangerLeaves(key) => self.stranger_leaves(key),
            Event::Calm => self.on_calm(),
            Event::Beat => self.on_beat(),
            _ => unreachable!("a process's event"),
        }
    }

    /// A process runs again: what piled up is seen in order, or what came by the same way first.
    pub(super) fn resume(&mut self, id: ProcessId) {
        if !std::mem::take(&mut self.processes[id].stopped) {
            return;
        }
        self.note(|_| format!("r{id} runs again"));
        let mut backlog = std::mem::take(&mut self.processes[id].backlog);
        let class = |event: &Event| match event {
            Event::Push(..) => 0,
            Event::Timer(..) => 1,
            Event::Reply(..) => 2,
            Event::Overdue(..) | Event::Notice(_) => 3,
            _ => 4,
        };
        match self.rng.below(4) {
            0 => backlog.sort_by_key(class),
            1 => backlog.sort_by_key(|event| Reverse(class(event))),
            2 => backlog.sort_by_key(|event| class(event) == 1),
            _ => {}
        }
        for event in backlog {
            if !self.processes[id].gone {
                self.handle_process(id, event);
            }
        }
    }

    pub(super) fn latency(&mut self) -> u64 {
        if self.calm {
            return self.rng.between(50, 300);
        }
        if self.rng.chance(self.profile.spikes) {
            return self.rng.between(0, self.profile.spike);
        }
        let (low, high) = self.profile.latency;
        self.rng.between(low, high)
    }
}
