//! The server: the modelled store, and one channel a connection.

use std::sync::Arc;

use super::clock::{Clock, MILLI, SECOND, True};
use super::link::{Reply, Said, Told};
use super::process::{ProcessId, line_of};
use super::profile::Theme;
use super::world::{Event, KeyId, World};
use crate::base::clock::Moment;
use crate::store::contract::{Op, Owner, ServerTime};
use crate::store::memory::{Applied, Asking, Keyspace};

pub(super) type ConnId = usize;

pub(super) struct Server {
    pub(super) keyspace: Keyspace,
    pub(super) clock: Clock,
    pub(super) prefix: Arc<str>,
    pub(super) conns: Vec<Conn>,
    /// Whether the scripts are loaded; without them every call comes back.
    pub(super) scripts: bool,
    /// Not to be reached before.
    pub(super) down_until: True,
    pub(super) last_epoch: u64,
}

/// One connection, as the net and the server see it.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) process: ProcessId,
    /// The server has it open: its requests are done, and it counts as a subscriber.
    pub(super) open: bool,
    pub(super) subscribed: bool,
    /// Broken: nothing reaches the client any more, nor the server what was sent later.
    pub(super) cut: bool,
    /// Of a broken one: what would arrive later does not.
    pub(super) last_request: True,
    request_at: True,
    reply_at: True,
    push_at: True,
}

/// One script call: several ops, done together.
#[derive(Clone, Debug)]
pub(super) struct Call {
    pub(super) id: u64,
    pub(super) ops: Vec<Item>,
    /// Brings the scripts along.
    pub(super) loads: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) key: KeyId,
    pub(super) op: Op,
    /// G4: the end of the lease that a renewal is for.
    pub(super) until: Moment,
    /// O5: the last server time at which it is of use.
    pub(super) use_by: ServerTime,
    pub(super) late_before: bool,
}

impl Server {
    pub(super) fn new(clock: Clock) -> Self {
        Self {
            keyspace: Keyspace::default(),
            clock,
            prefix: "P".into(),
            conns: Vec::new(),
            scripts: false,
            down_until: 0,
            last_epoch: 0,
        }
    }
}

impl World {
    pub(super) fn new_conn(&mut self, process: ProcessId) -> ConnId {
        self.server.conns.push(Conn {
            process,
            open: false,
            subscribed: false,
            cut: false,
            last_request: True::MAX,
            request_at: 0,
            reply_at: 0,
            push_at: 0,
        });
        self.server.conns.len() - 1
    }

    /// Puts a call on its way: in order within the connection.
    pub(super) fn transmit(&mut self, conn: ConnId, call: Call) {
        let at = self.now + self.latency();
        let channel = &mut self.server.conns[conn];
        if channel.cut {
            return;
        }
        channel.request_at = channel.request_at.max(at);
        let delay = channel.request_at - self.now;
        self.plan(delay, Event::Request(conn, call));
    }

    pub(super) fn on_request(&mut self, conn: ConnId, call: Call) {
        let channel = &self.server.conns[conn];
        if !channel.open || self.now > channel.last_request {
            return;
        }
        let process = channel.process;
        if !self.server.scripts && !call.loads {
            self.note(|_| format!("server: no script for call {} of r{process}", call.id));
            let said = Told::NoScript;
            return self.send_reply(conn, Reply { call, said });
        }
        self.server.scripts = true;
        if !self.calm && self.rng.chance(self.profile.refusals / 4) {
            self.note(|_| format!("server: r{process} call {} refused", call.id));
            let said = Told::Refused;
            return self.send_reply(conn, Reply { call, said });
        }
        self.check_order_of(&call);
        let mut said = Vec::new();
        for item in &call.ops {
            said.push(self.execute(process, item));
        }
        let said = Told::Ops(said);
        self.send_reply(conn, Reply { call, said });
    }

    /// O2: a call has one op a line, renewals aside.
    fn check_order_of(&mut self, call: &Call) {
        let mut lines: Vec<_> = call.ops.iter().map(|it| line_of(it.key, &it.op)).collect();
        lines.sort_unstable();
        // Nobody waits for the answer to a serve.
        lines.retain(|(_, sequence)| *sequence != u64::MAX);
        let renews = |item: &Item| matches!(item.op, Op::Renew { .. });
        if !call.ops.iter().any(renews) && lines.windows(2).any(|two| two[0] == two[1]) {
            self.breach(format!("O2: two ops of one line in {call:?}"));
        }
    }

    fn execute(&mut self, process: ProcessId, item: &Item) -> Said {
        let now = self.server.clock.micros(self.now);
        let timely = matches!(
            item.op,
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Adopt { .. }
        );
        if timely && now > item.use_by {
            self.note(|_| format!("server: r{process} {:?} is too late", item.op));
            return Said::Late(now);
        }
        if !self.calm && self.rng.chance(self.profile.refusals) {
            self.note(|_| format!("server: r{process} {:?} refused", item.op));
            let lasting = self.rng.chance(30);
            self.referee.refused_for_good |= lasting;
            return Said::Refused { lasting };
        }
        let before = (
            self.tickets_ahead(item.key, &item.op),
            self.holders(item.key),
        );
        let server = &mut self.server;
        let conns = &server.conns;
        let processes = &self.processes;
        let live = |instance: &Arc<str>| {
            let subscribes = |conn: &Conn| {
                conn.open && conn.subscribed && processes[conn.process].instance == *instance
            };
            conns.iter().any(subscribes)
        };
        // Whoever hears no grants has a ticket that stands in front until the next op drops it (M3).
        let is_deaf_entry = matches!(item.op, Op::Enter { score: Some(_), .. })
            && !live(&self.processes[process].instance);
        let asking = Asking {
            prefix: &server.prefix,
            instance: &self.processes[process].instance,
            key: &self.keys[item.key],
            now,
        };
        let Applied {
            answer,
            deliveries,
            unserved,
        } = server.keyspace.apply(asking, &item.op, &live);
        self.note(|_| {
            format!(
                "server: r{process} k{} {:?} -> {answer:?}",
                item.key, item.op
            )
        });
        self.check_kept(item.key, &item.op, process);
        self.key_is_kept(process, item.key, &item.op, &answer.outcome);
        self.check_epoch(&answer, &deliveries);
        self.check_renewal(process, &item.op, &answer.outcome);
        self.check_queue(
            item.key,
            &item.op,
            &answer.outcome,
            before,
            unserved || is_deaf_entry,
        );
        if let Op::Listen { .. } = item.op
            && !self.calm
        {
            self.tell_of_nothing(process, item.key);
        }
        for delivery in deliveries {
            let to = self
                .processes
                .iter()
                .position(|p| p.instance == delivery.instance);
            let to = to.expect("only registries stand in the queue");
            let Some(grant) = delivery.grant else {
                // Those that listen have no pushes, and are told nothing but what is made up.
                if let Op::Keep { .. } = item.op {
                    let delay = self.latency();
                    self.plan(delay, Event::Freed(to, item.key));
                }
                continue;
            };
            self.note(|_| format!("server: k{} granted to r{to} {:?}", item.key, grant));
            for conn in 0..self.server.conns.len() {
                let channel = &self.server.conns[conn];
                if channel.process == to && channel.open && channel.subscribed {
                    let at = self.now + self.latency();
                    let channel = &mut self.server.conns[conn];
                    channel.push_at = channel.push_at.max(at);
                    let delay = channel.push_at - self.now;
                    let push = Event::Push(conn, item.key, grant.clone(), delivery.unserved);
                    self.plan(delay, push);
                }
            }
        }
        Said::Done(answer, unserved)
    }

    /// W7: notices that are late, or of nothing, change nothing.
    fn tell_of_nothing(&mut self, process: ProcessId, key: KeyId) {
        for _ in 0..self.rng.below(4) {
            let delay = self.rng.between(0, 2 * SECOND);
            self.plan(delay, Event::Freed(process, key));
        }
    }

    /// The first ticket whose registry the server has a subscriber of.
    pub(super) fn first_live(&mut self, key: KeyId) -> Option<(Arc<str>, Owner)> {
        self.live_tickets(key).into_iter().next()
    }

    pub(super) fn live_tickets(&mut self, key: KeyId) -> Vec<(Arc<str>, Owner)> {
        let mut tickets = self.tickets(key);
        let processes = &self.processes;
        let conns = &self.server.conns;
        tickets.retain(|(instance, _)| {
            conns.iter().any(|conn| {
                conn.open && conn.subscribed && processes[conn.process].instance == *instance
            })
        });
        tickets
    }

    fn send_reply(&mut self, conn: ConnId, reply: Reply) {
        let lag = if self.calm { 0 } else { self.profile.reply_lag };
        let at = self.now + self.latency() + self.rng.between(0, lag);
        let channel = &mut self.server.conns[conn];
        channel.reply_at = channel.reply_at.max(at);
        let delay = channel.reply_at - self.now;
        self.plan(delay, Event::Reply(conn, reply));
    }

    /// O4: the old connections are killed, if that may be done; the new one subscribes.
    pub(super) fn on_handshake(&mut self, conn: ConnId) {
        let Conn { process, cut, .. } = self.server.conns[conn];
        if cut {
            return;
        }
        if self.profile.kills {
            for old in &mut self.server.conns {
                if old.process == process {
                    old.open = false;
                }
            }
        }
        let pushless = self.rng.chance(self.profile.pushless);
        let channel = &mut self.server.conns[conn];
        channel.open = true;
        channel.subscribed = !pushless;
        self.note(|_| format!("server: r{process} is back, pushes: {}", !pushless));
        // The proof that pushes arrive takes a while, in which they do.
        let quick = self.calm || self.profile.theme == Theme::Calm;
        let proof = if quick {
            0
        } else {
            self.rng.pick(&[0, 0, 20 * MILLI, SECOND / 2])
        };
        let delay = self.latency() + self.rng.between(0, proof);
        self.plan(delay, Event::Connected(conn));
    }

    /// The connection breaks: some of what is on its way still arrives.
    pub(super) fn cut(&mut self, conn: ConnId) {
        let now = self.now;
        let half_open = self.rng.chance(300);
        let still = self.rng.chance(500);
        let grace = self.rng.between(0, 3 * SECOND);
        let channel = &mut self.server.conns[conn];
        if channel.cut {
            return;
        }
        channel.cut = true;
        channel.last_request = if still { now + grace } else { now };
        let process = channel.process;
        self.note(|_| format!("connection {conn} of r{process} is cut"));
        let unnoticed = if half_open || still {
            grace + self.rng.between(0, 10 * SECOND)
        } else {
            0
        };
        self.plan(unnoticed, Event::ServerNotices(conn));
        // A broken connection shows at once, or only by its silence.
        if self.rng.chance(700) {
            let delay = self.rng.between(0, 5_000);
            self.plan(delay, Event::Notice(conn));
        }
    }
}
