//! A run: children at work, faults by the plan, and everything that is seen handed to the judges.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::callers::{KEYS, TTL};
use crate::child::Order;
use crate::children::Process;
use crate::deployments::wires::Wires;
use crate::deployments::{Deployment, Leftovers, Servers, StoredLock, longest_silence};
use crate::judge::holds::{Hold, Holds};
use crate::judge::recovery::{Struck, recoveries};
use crate::judge::standstill::Standstills;
use crate::judge::votes::Votes;
use crate::judge::waits::Waits;
use crate::judge::{Child, Span, linear};
use crate::log::{Line, now};
use crate::plan::{Kind, Stroke, plan};
use crate::report::Report;
use crate::resource::{self, Resource};
use crate::row::{News, Row};
use crate::support;

/// How many children work at a time.
pub(crate) const SLOTS: usize = 4;

/// So long it is calm after the last fault, at least. A slow machine may need longer until all work again, and gets
/// [`Servers::longest_recovery`].
const CALM: Duration = Duration::from_secs(4);

/// What a busy machine adds to whatever takes time.
pub(crate) const BUSY: Duration = Duration::from_secs(2);

/// How long a child may take to end when told to.
const PARTING: Duration = Duration::from_secs(15);

/// So long a queue outlasts a lock, of which nobody hears any more.
const LONGEST_QUEUE: Duration = Duration::from_secs(61).saturating_add(TTL);

/// So long no tenure lasts here. It is several times the longest hold with a stopped process and passes, and twice as long
/// as a group may wait, which holds its first key meanwhile.
const LONGEST_TENURE: Duration = Duration::from_secs(20);

/// How long a server may take to answer. A call may wait for one of each child, and then a lease is over when it comes.
const LONGEST_ANSWER: Duration = TTL.checked_div(SLOTS as u32).unwrap();

const LOOK_EVERY: Duration = Duration::from_millis(250);
const SAY_EVERY: Duration = Duration::from_secs(5);
const STEP: Duration = Duration::from_millis(2);

/// What is to be done.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) deployment: String,
    pub(crate) length: Duration,
    pub(crate) seed: u64,
}

impl Wish {
    pub(crate) fn plan(&self) -> Vec<Stroke> {
        let kinds = Kind::of(&self.deployment);
        plan(self.seed, self.length.as_millis() as u64, &kinds, SLOTS)
    }
}

/// Everything that a run is made of.
struct Run {
    wish: Wish,
    longest_silence: Duration,
    wires: Wires,
    row: Option<Row>,
    folder: TempDir,
    children: Vec<Process>,
    /// When a child was stopped that is so still.
    stopped: [Option<u64>; SLOTS],
    /// When the last fault of each child began.
    begun: [u64; SLOTS],
    resource: Arc<Mutex<Resource>>,
    holds: Holds,
    waits: Waits,
    struck: Vec<Struck>,
    /// Since when the same owner is seen at a key.
    seen: Vec<(StoredLock, Instant)>,
    votes: Votes,
    /// Whose shutdown took from when till when, and for how long (ns) it may have waited for answers.
    shutdowns: Vec<(Child, Span, u64)>,
    watch: support::Watch,
    standstills: Standstills,
    report: Report,
}

/// Runs it, and gives what came out.
pub(crate) fn run(wish: &Wish, deployment: Deployment) -> Report {
    let folder = TempDir::with_prefix("torture-").expect("a temporary folder");
    let (windows, inbox) = mpsc::channel::<linear::Window>();
    // The tester goes one call deeper for every step of a window.
    let checker = std::thread::Builder::new()
        .name("checker".to_owned())
        .stack_size(256 << 20)
        .spawn(move || {
            let mut verdict = linear::Verdict::default();
            inbox.iter().for_each(|window| verdict.judge(&window));
            verdict
        })
        .expect("a thread");
    let resource = Arc::new(Mutex::new(Resource::new(windows)));
    resource::serve(&folder.path().join("resource"), resource.clone()).expect("a socket of ours");

    let longest_silence = longest_silence(&deployment.wires.urls(0));
    // That is what the library takes to tell.
    let lateness = longest_silence + BUSY;
    let report = Report {
        longest_recovery: deployment.servers.longest_recovery(),
        ..Report::default()
    };
    let mut run = Run {
        wish: wish.clone(),
        longest_silence,
        votes: Votes::of(deployment.servers.majority()),
        wires: deployment.wires,
        row: Some(Row::of(deployment.servers)),
        folder,
        children: Vec::new(),
        stopped: [None; SLOTS],
        begun: [0; SLOTS],
        resource,
        holds: Holds::default(),
        waits: Waits::new(lateness.as_nanos() as u64),
        struck: Vec::new(),
        seen: Vec::new(),
        shutdowns: Vec::new(),
        watch: support::Watch::start(),
        standstills: Standstills::default(),
        report,
    };
    for slot in 0..SLOTS {
        let child = run.spawn(slot, 0);
        run.children.push(child);
    }
    run.torture();
    run.calm();
    let servers = run.part();
    run.look_at_the_machine();
    // What is judged by time takes no longer, but for what killed children leave behind.
    let longest = run.report.longest_recovery.max(LONGEST_TENURE);
    run.report.stood_still = run.standstills.most_within(longest);
    run.judge(checker, &*servers)
}

impl Run {
    fn spawn(&self, slot: usize, generation: u64) -> Process {
        let urls = self.wires.urls(slot);
        let child = Child { slot, generation };
        Process::spawn(child, self.wish.seed, self.folder.path(), urls)
    }

    fn torture(&mut self) {
        let plan = self.wish.plan();
        // What takes no time begins before it ends.
        let mut events: Vec<(u64, bool, Stroke)> = Vec::new();
        for stroke in plan {
            events.push((stroke.at, true, stroke));
            events.push((stroke.end(), false, stroke));
        }
        events.sort_by_key(|(at, begins, stroke)| (*at, stroke.slot, stroke.at, !*begins));
        let began = Instant::now();
        let mut events = events.into_iter().peekable();
        self.work_until(began + self.wish.length, &mut |run| {
            let elapsed = began.elapsed().as_millis() as u64;
            while let Some((_, begins, stroke)) = events.next_if(|(at, ..)| *at <= elapsed) {
                match begins {
                    true => run.begin(&stroke),
                    false => run.end(&stroke),
                }
            }
        });
        // What is late still has to be undone.
        for (_, begins, stroke) in events {
            match begins {
                true => self.begin(&stroke),
                false => self.end(&stroke),
            }
        }
        while !self.row().is_calm() {
            self.work_until(Instant::now() + LOOK_EVERY, &mut |_| {});
        }
    }

    fn row(&mut self) -> &mut Row {
        self.row.as_mut().expect("it goes on until all is over")
    }

    fn calm(&mut self) {
        let since = now();
        let begun = Instant::now();
        self.votes.begin();
        self.work_until(begun + CALM, &mut |_| {});
        let longest = self.report.longest_recovery;
        while !self.all_work_again(since) && begun.elapsed() < longest {
            self.work_until(Instant::now() + LOOK_EVERY, &mut |_| {});
        }
        for key in self.out_of_use(since) {
            let text = format!("{key}: nobody got it in {longest:?} without faults");
            self.report.unused.push(text);
        }
    }

    fn all_work_again(&self, since: u64) -> bool {
        self.out_of_use(since).is_empty()
            && (0..SLOTS).all(|slot| self.holds.took_since(slot, since))
    }

    /// The keys that nobody got since then.
    fn out_of_use(&self, since: u64) -> Vec<&'static str> {
        let of_use = |key: &str| self.holds.taken_since(key, since) || self.votes.changed(key);
        KEYS.into_iter().filter(|key| !of_use(key)).collect()
    }

    /// Follows the logs and looks at the store until then.
    fn work_until(&mut self, until: Instant, each: &mut dyn FnMut(&mut Self)) {
        let (mut look, mut say) = (Instant::now(), Instant::now() + SAY_EVERY);
        while Instant::now() < until {
            each(self);
            while let Some(news) = self.row().news() {
                match news {
                    News::Ended(stroke, at) => self.ended(&stroke, at),
                    News::Looked(locks, took) => {
                        self.report.late_answers += took.saturating_sub(LONGEST_ANSWER);
                        self.look_at(locks);
                    }
                }
            }
            if Instant::now() >= look {
                look = Instant::now() + LOOK_EVERY;
                (0..SLOTS).for_each(|slot| self.follow(slot));
                self.look_at_the_machine();
                self.row().look();
            }
            if Instant::now() >= say {
                say += SAY_EVERY;
                self.say();
            }
            std::thread::sleep(STEP);
        }
    }

    // ---- faults

    fn begin(&mut self, stroke: &Stroke) {
        let at = now();
        let slot = stroke.slot;
        if let Some(begun) = self.begun.get_mut(slot) {
            *begun = at;
        }
        match stroke.kind {
            Kind::Kill => {
                self.children[slot].kill();
                self.died(slot, at);
            }
            Kind::Stop | Kind::LongStop => {
                self.stopped[slot] = Some(at);
                self.children[slot].signal(Signal::STOP);
            }
            Kind::Compute => {
                self.stopped[slot] = Some(at);
                self.children[slot].tell(Order::Compute);
            }
            Kind::Leave => self.children[slot].tell(Order::Stop),
            Kind::Flood | Kind::Drop => self.children[slot].tell(Order::Flood),
            kind if kind.is_of_a_child() => self.wires.begin(stroke),
            _ => self.row().begin(*stroke),
        }
    }

    fn end(&mut self, stroke: &Stroke) {
        let slot = stroke.slot;
        match stroke.kind {
            Kind::Kill | Kind::Leave => {
                if stroke.kind == Kind::Leave {
                    self.see_off(slot, now());
                }
                let generation = self.children[slot].child.generation + 1;
                self.children[slot] = self.spawn(slot, generation);
            }
            Kind::Stop | Kind::LongStop | Kind::Compute => {
                match stroke.kind {
                    Kind::Compute => self.children[slot].tell(Order::Rest),
                    _ => self.children[slot].signal(Signal::CONT),
                }
                let stopped = self.stopped[slot].take().expect("it was stopped");
                let span = Span {
                    from: stopped,
                    to: now(),
                };
                self.waits.stopped(self.children[slot].child, span);
            }
            Kind::Drop => self.children[slot].tell(Order::Drop),
            kind if kind.is_of_a_child() => self.wires.end(stroke),
            _ => return self.row().end(*stroke),
        }
        self.ended(stroke, now());
    }

    fn ended(&mut self, stroke: &Stroke, at: u64) {
        self.struck.push(Struck {
            kind: stroke.kind,
            slot: stroke.slot,
            lasted: Span {
                from: self.begun.get(stroke.slot).copied().unwrap_or(at),
                to: at,
            },
        });
        // Who holds what may be another's now, by the same name or not.
        self.seen.clear();
    }

    // ---- what is seen

    fn look_at_the_machine(&mut self) {
        self.standstills.seen(now(), self.watch.stood_still());
    }

    /// All that a child has written since the last time.
    fn follow(&mut self, slot: usize) {
        let child = self.children[slot].child;
        for line in self.children[slot].lines() {
            match line {
                Line::Taken {
                    lease,
                    key,
                    token,
                    since,
                    at,
                    deadline,
                    mode,
                } => {
                    let hold = Hold::new(child, token, at, deadline).of(mode).since(since);
                    self.holds.taken(lease, key, hold);
                }
                Line::Until {
                    lease,
                    at,
                    deadline,
                } => self.holds.until(child, lease, at, deadline),
                Line::Ended { lease, at } => self.holds.ended(child, lease, at),
                Line::Waits { wait, at, limit } => self.waits.begins(child, wait, at, limit),
                Line::Waited { wait, at, how } => self.waits.ends(child, wait, at, &how),
                Line::Late { refused } => {
                    self.report.late_writes += 1;
                    self.report.late_refused += u64::from(refused);
                }
                Line::Closing { at } => self.holds.closing(child, at),
                Line::ShutDown { from, to, longest } => {
                    self.shutdowns.push((child, Span { from, to }, longest));
                }
                Line::Left { tasks, callers } => {
                    self.report.tasks_left += tasks;
                    if callers > 0 {
                        let text = format!("child {child}: {callers} callers came to no end");
                        self.report.wrong.push(text);
                    }
                }
                Line::Slow { from, to } => self.waits.slow(child, Span { from, to }),
                Line::Wrong { what } => self.report.wrong.push(format!("child {child}: {what}")),
            }
        }
    }

    /// What it wrote is all there is from it. It was told to at that time, and a machine may take long to end a process.
    fn died(&mut self, slot: usize, told: u64) {
        let at = now();
        self.follow(slot);
        let child = self.children[slot].child;
        self.holds.died(child, at);
        self.waits.died(child, told);
    }

    fn look_at(&mut self, locks: Option<Vec<StoredLock>>) {
        let Some(locks) = locks else {
            return;
        };
        let at_work: Vec<_> = self.children.iter().map(|it| it.child).collect();
        self.votes.count(&locks, &at_work);
        let mut seen = Vec::new();
        for lock in locks {
            // A shared lock ends at a whole millisecond.
            let longest = TTL + Duration::from_millis(1);
            if lock.left.is_none_or(|left| left > longest) {
                let text = format!("{}: {:?} is left of its ttl", lock.key, lock.left);
                self.report.stuck.push(text);
            }
            let before = self
                .seen
                .iter()
                .find(|(other, _)| (&other.key, &other.owner) == (&lock.key, &lock.owner));
            let since = before.map_or_else(Instant::now, |(_, since)| *since);
            if since.elapsed() > LONGEST_TENURE {
                let text = format!(
                    "{}: {} has it since {:?}",
                    lock.key,
                    lock.owner,
                    since.elapsed()
                );
                self.report.stuck.push(text);
            }
            seen.push((lock, since));
        }
        self.seen = seen;
    }

    fn say(&self) {
        let (writes, refused) = {
            let resource = resource::lock(&self.resource);
            (resource.writes, resource.refused)
        };
        crate::say(format_args!(
            "{}: {} leases, {} faults, {writes} writes, {refused} refused as stale, {} waiters forgotten, {} other breaches",
            self.wish.deployment,
            self.holds.count(),
            self.struck.len(),
            self.waits.forgotten.len(),
            self.report.wrong.len() + self.report.stuck.len(),
        ));
    }

    // ---- the end

    /// Everybody shuts down while all are at work; then nothing may be left.
    fn part(&mut self) -> Box<dyn Servers> {
        for child in &mut self.children {
            child.tell(Order::Stop);
        }
        let since = now();
        (0..SLOTS).for_each(|slot| self.see_off(slot, since));
        let row = self.row.take().expect("it went on until now");
        let mut servers = row.join();
        let gave_up = |(_, span, within): &(Child, Span, u64)| span.to - span.from >= *within;
        let in_order = self.shutdowns.iter().filter(|it| !gave_up(it));
        let in_order: Vec<Child> = in_order.map(|(child, ..)| *child).collect();
        let has_gone_in_order = |it: &Process| in_order.contains(&it.child);
        let longest = match self.children.iter().all(has_gone_in_order) {
            // A call that was on its way is done until the server gives it up, and what it locked is left to its ttl.
            true => self.longest_silence + TTL,
            false => LONGEST_QUEUE,
        };
        let begin = Instant::now();
        self.report.leftovers = loop {
            let leftovers = servers.leftovers();
            let longest = match leftovers.are_places_of_others(&in_order) {
                // A killed child keeps its place until somebody looks for the first in the queue, or the queue runs out.
                true => LONGEST_QUEUE + BUSY,
                false => longest + BUSY,
            };
            if leftovers == Leftovers::default() || begin.elapsed() > longest {
                break leftovers;
            }
            std::thread::sleep(STEP);
        };
        self.report.table = servers.table();
        servers
    }

    /// Waits for a child to end that was told to.
    fn see_off(&mut self, slot: usize, since: u64) {
        let until = since + PARTING.as_nanos() as u64;
        let status = loop {
            let status = self.children[slot].has_ended();
            if status.is_some() || now() > until {
                break status;
            }
            std::thread::sleep(STEP);
        };
        let child = self.children[slot].child;
        match status {
            Some(status) if status.success() => {}
            Some(status) => self.report.wrong.push(format!("child {child}: {status}")),
            None => {
                let text = format!("child {child} has not ended within {PARTING:?}");
                self.report.wrong.push(text);
                self.children[slot].kill();
            }
        }
        self.died(slot, now());
    }

    fn judge(
        mut self,
        checker: std::thread::JoinHandle<linear::Verdict>,
        servers: &dyn Servers,
    ) -> Report {
        let accepted = {
            let mut resource = resource::lock(&self.resource);
            self.report.writes = resource.writes;
            self.report.refused = resource.refused;
            resource.finish()
        };
        self.report.linear = checker.join().expect("the checker has not panicked");
        let ttl = TTL.as_nanos() as u64;
        let reigns = servers.reigns();
        self.report.changes = reigns.changes() as u64;
        self.report.holds = self.holds.judge(&accepted, &reigns.losses(ttl), ttl);
        self.report.recoveries =
            recoveries(&self.struck, &self.holds.arrivals(), reigns.vacancies());
        for (child, span, longest) in self.shutdowns {
            let took = span.to - span.from;
            let counted =
                Duration::from_nanos(took.saturating_sub(self.waits.slow_within(child, span)));
            if counted > Duration::from_nanos(longest) + BUSY {
                let text = format!("child {child}: the shutdown took {counted:?} of its time");
                self.report.wrong.push(text);
            }
        }
        self.report.waits = self.waits;
        if !self.report.is_clean() {
            // With the logs one can see what came before.
            let folder = self.folder.keep();
            if let Some(log) = servers.log() {
                std::fs::write(folder.join("servers.log"), log).expect("the folder is ours");
            }
            self.report.folder = Some(folder);
        }
        self.report
    }
}
