//! One state of a small world, and every step that may follow it.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::plan::{Ending, Plan, Wants};
use super::referee::{Breach, Referee, Rule};
use crate::base::clock::{FOREVER, Moment};
use crate::base::holder::KEPT;
use crate::base::{Mode, OnFinish};
use crate::store::contract::{Grant, Op, OpError, OpResult, Owner, ServerTime};
use crate::store::memory::{Asking, Keyspace};
use crate::turnstile::tests::harness::{broken, ms};
use crate::turnstile::{
    Effect, EndMode, EventCx, Ids, LeaseEnd, LeaseVerdict, Lines, NotGranted, Rules, Turnstile,
    Verdict, Waiter, WaiterId, WaiterVerdict,
};

/// What the server's clock shows when ours shows 0, in microseconds.
const EPOCH: ServerTime = 1_700_000_000_000_000;

/// O5: how long an attempt is of use.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) const PREFIX: &str = "P";
pub(super) const KEY: &str = "k";

/// A registry and a caller of it.
pub(super) type Who = (usize, usize);

/// One thing that may happen. `usize`: the registry that it happens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Arrive(Who),
    /// A caller that was granted the key is polled.
    Poll(Who),
    /// A holder ends its lease: it releases it, keeps the key or detaches the lease.
    Finish(Who),
    /// A caller that waits, or was granted the key and not polled, is dropped.
    Drop(Who),
    /// The server runs the first request of the connection.
    Run(usize),
    /// The server runs the first request of a connection that has ended for its client.
    RunLate(usize),
    /// The first answer arrives.
    Hear(usize),
    /// The first push arrives: before or after answers that the server sent earlier.
    HearPush(usize),
    /// Its timer fires.
    Tick(usize),
    /// Time goes by, to the next moment at which something is due.
    Wait,
    /// Its connection breaks. What the server has not run is lost, or may still be run, if `lingers`.
    Break {
        registry: usize,
        lingers: bool,
    },
    /// The server notices that a connection has ended.
    Notice(usize),
    /// It has a new connection.
    Connect(usize),
    /// The process dies.
    Crash {
        registry: usize,
        lingers: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Out,
    Waiting(WaiterId),
    Granted(WaiterId),
    Holding(WaiterId),
    /// It has ended its lease, and waits for the answer.
    Ending,
    /// Served, refused, lost or dropped.
    Done,
}

#[derive(Clone, Debug)]
pub(super) struct Caller {
    pub(super) mode: Mode,
    /// For how long its key is kept.
    pub(super) keeps: Option<Duration>,
    pub(super) stage: Stage,
    /// Until when it believes to hold the key.
    pub(super) deadline: Option<Moment>,
    pub(super) arrived: Moment,
    pub(super) was_served: bool,
    /// It was dropped, or did not do its part: it need not be served.
    pub(super) is_excused: bool,
}

#[derive(Clone, Debug)]
struct Sent {
    op: Op,
    /// O5: the last server time at which it is of use. `None`: it waits for a connection.
    use_by: Option<ServerTime>,
}

#[derive(Clone, Debug)]
enum Heard {
    Answer(Op, OpResult),
    /// O5: it was not run, because it came too late.
    Late(Op),
    Unserved(Owner),
}

#[derive(Clone, Debug)]
enum Push {
    Grant(Grant, bool),
    Freed,
}

#[derive(Clone, Debug)]
pub(super) struct Registry {
    pub(super) instance: Arc<str>,
    pub(super) lines: Lines<usize>,
    ids: Ids,
    pub(super) callers: Vec<Caller>,
    pub(super) is_alive: bool,
    is_connected: bool,
    /// Whether the server still has a connection that has ended for its client.
    is_half_open: bool,
    requests: VecDeque<Sent>,
    /// Of a connection that has ended.
    lingering: VecDeque<Sent>,
    answers: VecDeque<Heard>,
    pushes: VecDeque<Push>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// How often time goes by.
    pub(super) waits: u8,
    /// How often it does while something could be done: a message is on its way, or a process stands still.
    pub(super) delays: u8,
    pub(super) drops: u8,
    pub(super) breaks: u8,
    pub(super) crashes: u8,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) now: Moment,
    pub(super) registries: Vec<Registry>,
    pub(super) keyspace: Keyspace,
    left: Budget,
    /// The owner of a lease that was detached, and its mode.
    pub(super) detached: Option<(Arc<str>, Mode)>,
    pub(super) referee: Referee,
}

impl PartialEq for World {
    fn eq(&self, other: &Self) -> bool {
        format!("{self:?}") == format!("{other:?}")
    }
}

/// All of it counts, and all of it is in its `Debug` text. No `Hash` is needed in the code that is checked.
impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        struct Text<'a, H>(&'a mut H);
        impl<H: Hasher> Write for Text<'_, H> {
            fn write_str(&mut self, text: &str) -> std::fmt::Result {
                self.0.write(text.as_bytes());
                Ok(())
            }
        }
        write!(Text(state), "{self:?}").expect("a hasher takes everything");
    }
}

impl World {
    pub(super) fn new(plan: &Plan) -> Self {
        let rules = Rules {
            local_passes: plan.local_passes,
            local_span: ms(20),
            max_waiters: 100,
            response_timeout: RESPONSE_TIMEOUT,
        };
        let caller = |wants: &Wants| Caller {
            mode: wants.mode,
            keeps: match wants.ending {
                Ending::Keeps(time) => Some(time),
                _ => None,
            },
            stage: Stage::Out,
            deadline: None,
            arrived: Moment::ZERO,
            was_served: false,
            is_excused: false,
        };
        let registry = |(id, wants): (usize, &Vec<Wants>)| Registry {
            instance: format!("r{id}").into(),
            lines: Lines::new(true),
            ids: Ids::new(rules, 0),
            callers: wants.iter().map(caller).collect(),
            is_alive: true,
            is_connected: true,
            is_half_open: false,
            requests: VecDeque::new(),
            lingering: VecDeque::new(),
            answers: VecDeque::new(),
            pushes: VecDeque::new(),
        };
        Self {
            now: ms(5000),
            registries: plan.registries.iter().enumerate().map(registry).collect(),
            keyspace: Keyspace::default(),
            left: plan.budget,
            detached: None,
            referee: Referee::default(),
        }
    }

    fn server_time(&self) -> ServerTime {
        EPOCH + self.now.as_micros() as u64
    }

    /// The steps that may follow. A world that broke a rule goes no further.
    pub(super) fn steps(&self, plan: &Plan) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.referee.breach.is_some() {
            return steps;
        }
        for id in 0..self.registries.len() {
            self.steps_of(plan, id, &mut steps);
        }
        let may_wait = self.left.waits > 0 && (self.left.delays > 0 || !self.is_busy());
        if may_wait && self.next_moment().is_some() {
            steps.push(Step::Wait);
        }
        steps
    }

    fn steps_of(&self, plan: &Plan, id: usize, steps: &mut Vec<Step>) {
        let registry = &self.registries[id];
        if !registry.lingering.is_empty() {
            steps.push(Step::RunLate(id));
        }
        if registry.is_half_open && !registry.is_connected {
            steps.push(Step::Notice(id));
        }
        if !registry.is_alive {
            return;
        }
        for (at, caller) in registry.callers.iter().enumerate() {
            let who = (id, at);
            match caller.stage {
                Stage::Out if self.may_arrive(plan, who) => steps.push(Step::Arrive(who)),
                Stage::Granted(_) => steps.push(Step::Poll(who)),
                Stage::Holding(_) => steps.push(Step::Finish(who)),
                _ => {}
            }
            if self.left.drops > 0 && matches!(caller.stage, Stage::Waiting(_) | Stage::Granted(_))
            {
                steps.push(Step::Drop(who));
            }
        }
        if self.is_due(id) {
            steps.push(Step::Tick(id));
        }
        if !registry.answers.is_empty() {
            steps.push(Step::Hear(id));
        }
        if !registry.pushes.is_empty() {
            steps.push(Step::HearPush(id));
        }
        let lingers = [false, plan.lingers && !registry.requests.is_empty()];
        let lingers = || lingers.into_iter().take(1 + usize::from(lingers[1]));
        if registry.is_connected {
            if !registry.requests.is_empty() {
                steps.push(Step::Run(id));
            }
            if self.left.breaks > 0 {
                steps.extend(lingers().map(|lingers| Step::Break {
                    registry: id,
                    lingers,
                }));
            }
        } else {
            steps.push(Step::Connect(id));
        }
        // One that has done nothing yet is nobody.
        let has_begun = registry.callers.iter().any(|it| it.stage != Stage::Out);
        if self.left.crashes > 0 && has_begun {
            steps.extend(lingers().map(|lingers| Step::Crash {
                registry: id,
                lingers,
            }));
        }
    }

    /// Symmetry: callers that want the same come in order, and so do registries whose callers want the same.
    fn may_arrive(&self, plan: &Plan, (id, at): Who) -> bool {
        let wants = &plan.registries[id];
        if matches!(wants[at].ending, Ending::Adopts) && self.detached.is_none() {
            return false;
        }
        let callers = &self.registries[id].callers;
        let earlier = callers[..at].iter().zip(wants);
        let is_next =
            |(caller, other): (&Caller, &Wants)| *other != wants[at] || caller.stage != Stage::Out;
        let mut twins = (0..id).filter(|other| plan.registries[*other] == *wants);
        let has_begun = |other: usize| {
            let callers = &self.registries[other].callers;
            callers.iter().any(|caller| caller.stage != Stage::Out)
        };
        earlier.into_iter().all(is_next) && twins.all(has_begun)
    }

    /// Whether something could be done at once, by the network, the server or a process.
    fn is_busy(&self) -> bool {
        let mut registries = self.registries.iter().enumerate();
        registries.any(|(id, it)| {
            let is_asked = it.is_connected && !it.requests.is_empty();
            let is_awaited = !it.answers.is_empty() || !it.pushes.is_empty();
            let mut callers = it.callers.iter();
            let is_polled = callers.any(|caller| matches!(caller.stage, Stage::Granted(_)));
            is_asked || is_awaited || is_polled || !it.lingering.is_empty() || self.is_due(id)
        })
    }

    fn is_due(&self, id: usize) -> bool {
        let registry = &self.registries[id];
        let timeout = registry.lines.next_timeout();
        registry.is_alive && timeout.is_some_and(|at| at <= self.now)
    }

    /// The next moment at which a timer fires, a lease ends at the server, or a request is of no use any more.
    fn next_moment(&self) -> Option<Moment> {
        let alive = || self.registries.iter().filter(|it| it.is_alive);
        let timers = alive().filter_map(|registry| registry.lines.next_timeout());
        let requests = self.registries.iter();
        let requests = requests.flat_map(|it| it.requests.iter().chain(&it.lingering));
        let of_no_use = requests.filter_map(|request| request.use_by);
        let of_no_use = of_no_use.map(|at| Duration::from_micros(at + 1 - EPOCH));
        let mut keyspace = self.keyspace.clone();
        let (prefix, key) = (PREFIX.into(), KEY.into());
        let status = keyspace.inspect(&prefix, &key, self.server_time(), &|_| true);
        let leases = status.holders.into_iter();
        let leases = leases.filter_map(|holder| Some(self.now + holder.left?));
        let all = timers.chain(of_no_use).chain(leases);
        all.filter(|at| *at > self.now).min().map(|at| {
            // The server counts in microseconds.
            Duration::from_micros(at.as_nanos().div_ceil(1000) as u64)
        })
    }

    /// Does a step. A panic in it is a breach.
    pub(super) fn after(&self, plan: &Plan, step: Step) -> Self {
        let mut next = self.clone();
        let done = catch_unwind(AssertUnwindSafe(|| next.step(plan, step)));
        if let Err(panic) = done {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            next = self.clone();
            next.breach(Rule::Told, format!("{step:?} panicked: {text:?}"));
        }
        next.check();
        next
    }

    fn step(&mut self, plan: &Plan, step: Step) {
        match step {
            Step::Arrive(who) => self.arrive(plan, who),
            Step::Poll(who) => self.poll(who),
            Step::Finish(who) => self.finish(plan, who),
            Step::Drop(who) => {
                self.left.drops -= 1;
                self.drop_caller(who);
            }
            Step::Run(id) => {
                let request = self.registries[id].requests.pop_front();
                self.run(id, request.expect("there is one"), true);
            }
            Step::RunLate(id) => {
                let request = self.registries[id].lingering.pop_front();
                self.run(id, request.expect("there is one"), false);
            }
            Step::Hear(id) => self.hear(id),
            Step::HearPush(id) => self.hear_push(id),
            Step::Tick(id) => {
                self.feed(id, Lines::tick);
                if self.is_due(id) {
                    self.breach(Rule::Told, format!("r{id} is ticked, and still due"));
                }
            }
            Step::Wait => {
                self.left.waits -= 1;
                if self.is_busy() {
                    self.left.delays -= 1;
                }
                self.now = self.next_moment().expect("there is one");
            }
            Step::Break { registry, lingers } => {
                self.left.breaks -= 1;
                self.cut(registry, lingers);
                self.tell_of_the_break(registry);
            }
            Step::Notice(id) => self.registries[id].is_half_open = false,
            Step::Connect(id) => self.connect(plan, id),
            Step::Crash { registry, lingers } => {
                self.left.crashes -= 1;
                self.cut(registry, lingers);
                self.referee.has_crashed = true;
                let registry = &mut self.registries[registry];
                registry.is_alive = false;
                registry.lines = Lines::new(true);
                registry.requests.clear();
                registry.answers.clear();
                for caller in &mut registry.callers {
                    (caller.stage, caller.deadline) = (Stage::Done, None);
                    caller.is_excused = true;
                }
            }
        }
    }

    fn feed<R>(
        &mut self,
        id: usize,
        event: impl FnOnce(&mut Lines<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> R {
        let (result, effects) = self.put_in(id, event);
        self.drain(id, effects);
        result
    }

    fn put_in<R>(
        &mut self,
        id: usize,
        event: impl FnOnce(&mut Lines<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> (R, VecDeque<Effect<usize>>) {
        let registry = &mut self.registries[id];
        registry.ids.reseed();
        let mut effects = VecDeque::new();
        let mut cx = EventCx::new(self.now, &mut registry.ids, &mut effects);
        (event(&mut registry.lines, &mut cx), effects)
    }

    /// Feeds the turnstile of one caller.
    fn feed_caller<R>(
        &mut self,
        id: usize,
        waiter: WaiterId,
        event: impl FnOnce(&mut Turnstile<usize>, &mut EventCx<'_, usize>) -> R,
    ) -> R {
        self.feed(id, |lines, cx| lines.feed(cx, waiter, event))
    }

    fn drain(&mut self, id: usize, effects: VecDeque<Effect<usize>>) {
        for effect in effects {
            match effect {
                Effect::Send(op) => self.submit(id, op),
                Effect::Wake(at, verdict) => self.told((id, at), &verdict),
                Effect::AskPolicy(..) => self.breach(
                    Rule::Told,
                    "a policy is asked though grants come".to_owned(),
                ),
            }
        }
        if self.registries[id].lines.is_idle() {
            // As the engine forgets it.
            self.registries[id].lines = Lines::new(true);
            let callers = &self.registries[id].callers;
            let forgotten = callers
                .iter()
                .position(|caller| !matches!(caller.stage, Stage::Out | Stage::Done));
            if let Some(at) = forgotten {
                self.breach(Rule::Told, format!("caller {at} of r{id} is forgotten"));
            }
        }
    }

    fn submit(&mut self, id: usize, op: Op) {
        let use_by = self.server_time() + RESPONSE_TIMEOUT.as_micros() as u64;
        let registry = &mut self.registries[id];
        let use_by = registry.is_connected.then_some(use_by);
        registry.requests.push_back(Sent { op, use_by });
    }

    fn arrive(&mut self, plan: &Plan, (id, at): Who) {
        let wants = plan.registries[id][at];
        let detached = self.detached.clone();
        let detached = detached.filter(|_| wants.ending == Ending::Adopts);
        let mode = detached.as_ref().map_or(wants.mode, |(_, mode)| *mode);
        let waiter = Waiter {
            caller: at,
            ttl: wants.ttl,
            renewals: wants.renewals,
            adopts: detached.map(|(from, _)| from),
            on_finish: match wants.ending {
                Ending::Keeps(time) => OnFinish::KeepFor(time),
                _ => OnFinish::Release,
            },
            is_conditional: false,
            asks_once: wants.wait == Some(Duration::ZERO),
            hears_of_others: false,
            until: wants.wait.map_or(FOREVER, |wait| self.now + wait),
            answer_by: self.now + RESPONSE_TIMEOUT,
        };
        let (waiter, effects) = self.put_in(id, |lines, cx| lines.arrive(cx, mode, waiter));
        let caller = &mut self.registries[id].callers[at];
        caller.arrived = self.now;
        // Its verdict may be among the effects.
        caller.stage = Stage::Waiting(waiter);
        self.drain(id, effects);
    }

    fn poll(&mut self, (id, at): Who) {
        let Stage::Granted(waiter) = self.registries[id].callers[at].stage else {
            return;
        };
        let is_taken = self.feed_caller(id, waiter, |line, cx| line.take(cx, waiter));
        let caller = &mut self.registries[id].callers[at];
        match (is_taken, caller.stage) {
            (true, Stage::Granted(_)) => {
                caller.stage = Stage::Holding(waiter);
                caller.was_served = true;
            }
            // It was told that it has lost its turn.
            (false, Stage::Done) => {}
            (is_taken, stage) => {
                let what = format!("caller {at} of r{id} takes it: {is_taken}, and is {stage:?}");
                self.breach(Rule::Told, what);
            }
        }
    }

    fn finish(&mut self, plan: &Plan, (id, at): Who) {
        let Stage::Holding(waiter) = self.registries[id].callers[at].stage else {
            return;
        };
        let ending = plan.registries[id][at].ending;
        // Whoever ends it works no more.
        self.registries[id].callers[at].stage = Stage::Ending;
        let is_valid = self.is_valid((id, at));
        self.registries[id].callers[at].deadline = None;
        let end_mode = match ending {
            Ending::Detaches => EndMode::Detach,
            Ending::Keeps(_) => EndMode::Keep,
            Ending::Releases | Ending::Adopts => EndMode::Release,
        };
        let owner = self.feed_caller(id, waiter, |line, cx| line.finish(cx, waiter, end_mode));
        if ending == Ending::Detaches {
            let registry = &mut self.registries[id];
            registry.callers[at].stage = Stage::Done;
            if let Some(owner) = owner {
                let text = format!("{}:{}", registry.instance, owner.sequence);
                self.detached = Some((text.into(), owner.mode));
            } else if is_valid {
                self.breach(Rule::Told, format!("r{id} cannot detach a valid lease"));
            }
        }
    }

    fn drop_caller(&mut self, (id, at): Who) {
        let (Stage::Waiting(waiter) | Stage::Granted(waiter)) =
            self.registries[id].callers[at].stage
        else {
            return;
        };
        let caller = &mut self.registries[id].callers[at];
        (caller.stage, caller.deadline) = (Stage::Done, None);
        caller.is_excused = true;
        self.referee.leaving = Some((id, at));
        self.feed_caller(id, waiter, |line, cx| line.leave(cx, waiter));
        self.referee.leaving = None;
    }

    fn run(&mut self, id: usize, request: Sent, is_heard: bool) {
        let now = self.server_time();
        let Sent { op, use_by } = request;
        let timely = matches!(
            op,
            Op::Attempt { .. } | Op::Listen { .. } | Op::Enter { .. } | Op::Adopt { .. }
        );
        if timely && use_by.is_some_and(|use_by| use_by < now) {
            if is_heard {
                self.registries[id].answers.push_back(Heard::Late(op));
            }
            return;
        }
        let Self {
            keyspace,
            registries,
            ..
        } = self;
        let is_live = |instance: &Arc<str>| {
            let mut registries = registries.iter();
            registries.any(|it| (it.is_connected || it.is_half_open) && it.instance == *instance)
        };
        let asking = Asking {
            prefix: &PREFIX.into(),
            instance: &registries[id].instance,
            key: &KEY.into(),
            now,
        };
        let applied = keyspace.apply(asking, &op, &is_live);
        if is_heard {
            let answers = &mut self.registries[id].answers;
            if applied.unserved {
                answers.push_back(Heard::Unserved(op.owner()));
            }
            answers.push_back(Heard::Answer(op, Ok(applied.answer)));
        }
        for delivery in applied.deliveries {
            let mut registries = self.registries.iter_mut();
            let to = registries.find(|it| it.instance == delivery.instance);
            let to = to.expect("only registries stand in the queue");
            // What goes to a connection that has ended is lost.
            if to.is_connected {
                to.pushes.push_back(match delivery.grant {
                    Some(grant) => Push::Grant(grant, delivery.unserved),
                    None => Push::Freed,
                });
            }
        }
        // It sweeps, and so counts ops anew: states that differ in nothing else are one.
        self.keyspace.len(now);
        self.check_store();
    }

    fn hear(&mut self, id: usize) {
        match self.registries[id].answers.pop_front() {
            Some(Heard::Answer(op, result)) => {
                self.note_answer(id, &op, &result);
                self.feed(id, |lines, cx| lines.replied(cx, &op, result));
            }
            // The driver sends it again, with the time that it was told.
            Some(Heard::Late(op)) => self.submit(id, op),
            Some(Heard::Unserved(owner)) => self.submit(id, Op::Serve { owner }),
            None => {}
        }
    }

    fn hear_push(&mut self, id: usize) {
        match self.registries[id].pushes.pop_front() {
            Some(Push::Grant(grant, unserved)) => {
                if unserved {
                    let owner = grant.owner;
                    self.submit(id, Op::Serve { owner });
                }
                self.feed(id, |lines, cx| lines.grant_received(cx, grant, None));
            }
            Some(Push::Freed) => self.feed(id, |lines, cx| lines.feed_all(cx, Turnstile::freed)),
            None => {}
        }
    }

    fn cut(&mut self, id: usize, lingers: bool) {
        let registry = &mut self.registries[id];
        registry.is_connected = false;
        registry.is_half_open = true;
        registry.pushes.clear();
        if lingers {
            let requests = registry.requests.iter();
            registry
                .lingering
                .extend(requests.filter(|it| it.use_by.is_some()).cloned());
        }
    }

    fn tell_of_the_break(&mut self, id: usize) {
        let registry = &mut self.registries[id];
        let answers = std::mem::take(&mut registry.answers);
        let requests = std::mem::take(&mut registry.requests);
        let answers = answers.into_iter().filter_map(|heard| match heard {
            Heard::Answer(op, _) | Heard::Late(op) => Some(op),
            Heard::Unserved(_) => None,
        });
        let lost: Vec<_> = answers
            .chain(requests.into_iter().map(|it| it.op))
            .collect();
        for op in lost {
            let result = Err(OpError::Unknown(broken()));
            self.feed(id, |lines, cx| lines.replied(cx, &op, result));
        }
        self.feed(id, |lines, cx| {
            lines.feed_all(cx, |line, cx| line.down(cx, &broken()))
        });
    }

    fn connect(&mut self, plan: &Plan, id: usize) {
        let use_by = self.server_time() + RESPONSE_TIMEOUT.as_micros() as u64;
        let registry = &mut self.registries[id];
        registry.is_connected = true;
        registry.is_half_open = false;
        if plan.kills {
            // O4: the new connection ends the old one at the server first.
            registry.lingering.clear();
        } else if !registry.lingering.is_empty() {
            self.referee.may_come_late = true;
        }
        for request in &mut registry.requests {
            request.use_by = Some(use_by);
        }
        self.feed(id, |lines, cx| {
            lines.feed_all(cx, |line, cx| line.up_renew(cx, false))
        });
        self.feed(id, |lines, cx| {
            lines.feed_all(cx, |line, cx| line.up(cx, true))
        });
    }

    fn told(&mut self, (id, at): Who, verdict: &Verdict) {
        let now = self.now;
        if self.referee.leaving == Some((id, at)) {
            return;
        }
        let caller = &mut self.registries[id].callers[at];
        let stage = caller.stage;
        match (verdict, stage) {
            (
                Verdict::Waiter(WaiterVerdict::Granted {
                    token, deadline, ..
                }),
                Stage::Waiting(waiter),
            ) => {
                caller.stage = Stage::Granted(waiter);
                caller.deadline = Some(*deadline);
                let token = token.get();
                self.granted((id, at), token);
            }
            (
                Verdict::Lease(LeaseVerdict::Prolonged { deadline, .. }),
                Stage::Granted(_) | Stage::Holding(_),
            ) => caller.deadline = Some(*deadline),
            (
                Verdict::Lease(LeaseVerdict::Unrenewed(_) | LeaseVerdict::RenewalLate),
                Stage::Holding(_),
            ) => {}
            // It did not look in time, or answers take longer than its lease lasts (D4).
            (Verdict::Waiter(WaiterVerdict::TurnLost), Stage::Granted(_))
            | (
                Verdict::Waiter(WaiterVerdict::Refused(NotGranted::TooSlow { .. })),
                Stage::Waiting(_),
            ) => {
                (caller.stage, caller.deadline) = (Stage::Done, None);
                caller.is_excused = true;
            }
            (
                Verdict::Waiter(WaiterVerdict::Refused(
                    NotGranted::Busy(_) | NotGranted::Failed(_) | NotGranted::NothingToAdopt,
                )),
                Stage::Waiting(_),
            )
            | (Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Failed(_))), Stage::Ending) => {
                caller.stage = Stage::Done;
            }
            (
                Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Lost(_))),
                Stage::Holding(_) | Stage::Ending,
            ) => {
                let is_early = caller.deadline.is_some_and(|deadline| now < deadline);
                (caller.stage, caller.deadline) = (Stage::Done, None);
                if is_early {
                    let what = format!("caller {at} of r{id} loses a lease that is proved");
                    self.breach(Rule::Exclusion, what);
                }
            }
            (Verdict::Lease(LeaseVerdict::Ended(LeaseEnd::Released)), Stage::Ending) => {
                caller.stage = Stage::Done;
                self.released((id, at));
            }
            _ => {
                let what = format!("caller {at} of r{id} is {stage:?}, and is told {verdict:?}");
                self.breach(Rule::Told, what);
            }
        }
    }

    pub(super) fn is_valid(&self, (id, at): Who) -> bool {
        let deadline = self.registries[id].callers[at].deadline;
        deadline.is_some_and(|deadline| self.now < deadline)
    }

    pub(super) fn everybody(&self) -> impl Iterator<Item = Who> {
        let registries = self.registries.iter().enumerate();
        registries.flat_map(|(id, registry)| (0..registry.callers.len()).map(move |at| (id, at)))
    }

    /// Nothing is on its way, and nobody knows of anything that the store might have.
    pub(super) fn is_quiet(&self) -> bool {
        self.registries.iter().all(|it| {
            let is_done = |caller: &Caller| matches!(caller.stage, Stage::Out | Stage::Done);
            let is_silent = it.requests.is_empty()
                && it.lingering.is_empty()
                && it.answers.is_empty()
                && it.pushes.is_empty();
            is_silent && it.lines.is_idle() && it.callers.iter().all(is_done)
        })
    }

    /// Nothing goes wrong any more, and everybody does its part, for as long as it takes.
    pub(super) fn calmed(mut self, plan: &Plan) -> Self {
        self.left = Budget {
            waits: u8::MAX,
            delays: 0,
            drops: 0,
            breaks: 0,
            crashes: 0,
        };
        // Whoever waits for a dead process that the server has not noticed gets the key when a ttl is over.
        while let Some(step) = self.steps(plan).into_iter().next() {
            self = self.after(plan, step);
        }
        self
    }

    pub(super) fn breach(&mut self, rule: Rule, what: String) {
        self.referee.breach.get_or_insert(Breach { rule, what });
    }

    pub(super) fn check_store(&mut self) {
        let now = self.server_time();
        let status = self
            .keyspace
            .inspect(&PREFIX.into(), &KEY.into(), now, &|_| true);
        let holders = status.holders.iter().map(|holder| &holder.name);
        let tickets = status.queue.iter().map(|(name, _)| name);
        let names: BTreeSet<_> = holders.chain(tickets).collect();
        let back = names
            .into_iter()
            .find(|name| self.referee.ended.contains(*name));
        if let Some(name) = back.cloned()
            && !self.referee.may_come_late
        {
            self.breach(
                Rule::Freed,
                format!("{name} was ended, and is in the store"),
            );
        }
    }

    /// Whether the key is kept, for nobody.
    pub(super) fn is_kept(&self) -> bool {
        let now = self.server_time();
        let mut keyspace = self.keyspace.clone();
        let status = keyspace.inspect(&PREFIX.into(), &KEY.into(), now, &|_| true);
        let mut holders = status.holders.iter();
        holders.any(|holder| holder.name.contains(KEPT))
    }

    pub(super) fn is_store_empty(&self) -> bool {
        let now = self.server_time();
        self.keyspace.clone().len(now) == 0
    }
}
