//! Which server gave out leases when, and out of which memory?
//!
//! A **reign** is a time in which one server, with one memory, may have given leases out: as a primary, until it was
//! killed, replaced or emptied. One that starts again with its data goes on with the same memory, and so does one to
//! which another has handed all over in good order.
//!
//! Two reigns with different memories in the same shard are a **loss**: what the one has acknowledged, the other may not
//! know. Nothing else explains two leases at a time.
//!
//! A reign begins with the last moment at which the server was seen to be none that gives leases, and ends with the first
//! at which it was seen to be none again: it is never shorter than the truth.
//!
//! A **vacancy** is a time in which no server said that it was a primary, so that nobody could give leases out: it is
//! never longer than the truth.

use super::Span;

/// A vacancy lasts for longer than this (ns), which a busy primary may take to answer.
const LEAST_VACANCY: u64 = 500_000_000;

/// How a memory came to be another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Cause {
    /// All of it was deleted.
    Flushed,
    /// The server came back without it.
    Emptied,
    /// Another took the place of one that was gone.
    Replaced,
    /// Another took the place of one that served on.
    TwoPrimaries,
}

impl Cause {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Flushed => "flushed",
            Self::Emptied => "came back empty",
            Self::Replaced => "replaced when it was gone",
            Self::TwoPrimaries => "replaced while it served on",
        }
    }
}

/// Two reigns of which one does not know all that the other has given out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Loss {
    pub(crate) one: Span,
    pub(crate) other: Span,
    pub(crate) cause: Cause,
    /// Which keys it concerns; `None`: all.
    pub(crate) keys: Option<Vec<String>>,
}

impl Loss {
    /// Whether one lease may be of the one reign, and another of the other, by when they were proved.
    pub(crate) fn explains(&self, key: &str, lease: Span, another: Span) -> bool {
        let parts = |one: Span, other: Span| lease.touches(one) && another.touches(other);
        self.concerns(key) && (parts(self.one, self.other) || parts(self.other, self.one))
    }

    /// From when till when it is open which of the two counts.
    pub(crate) fn border(&self) -> Span {
        let from = self.one.from.max(self.other.from);
        let to = self.one.to.min(self.other.to);
        Span {
            from: from.min(to),
            to: from.max(to),
        }
    }

    pub(crate) fn concerns(&self, key: &str) -> bool {
        let keys = self.keys.as_ref();
        keys.is_none_or(|keys| keys.iter().any(|it| it == key))
    }
}

#[derive(Clone, Debug)]
struct Reign {
    server: usize,
    span: Span,
    /// Reigns with the same number know the same.
    memory: usize,
    /// By which it began.
    cause: Cause,
}

/// All reigns of a run.
#[derive(Clone, Debug)]
pub(crate) struct Reigns {
    /// In which shard each server is.
    shards: Vec<usize>,
    reigns: Vec<Reign>,
    /// Which of them goes on, by server.
    open: Vec<Option<usize>>,
    /// When each server was last known to give no leases.
    idle: Vec<u64>,
    /// What was asked before this moment says nothing any more.
    deaf: Vec<u64>,
    /// The memory with which a server that was killed comes back.
    kept: Vec<Option<usize>>,
    memories: usize,
    /// Shards in which all was handed over in good order, and when.
    orderly: Vec<(usize, Span)>,
    /// Which keys were in which shard from then on.
    homes: Vec<(u64, Vec<Vec<String>>)>,
    /// When a server last said that it was a primary.
    primary_at: Option<u64>,
    vacancies: Vec<Span>,
    /// Whether they are asked all the time who is a primary, so that a long silence is a vacancy.
    is_watched: bool,
    /// What is not watched was made silent then, and still is.
    silent_since: Option<u64>,
}

impl Reigns {
    /// Of these servers, given by the shard that each is in.
    pub(crate) fn of(shards: Vec<usize>) -> Self {
        let count = shards.len();
        Self {
            shards,
            reigns: Vec::new(),
            open: vec![None; count],
            idle: vec![0; count],
            deaf: vec![0; count],
            kept: vec![None; count],
            memories: 0,
            orderly: Vec::new(),
            homes: Vec::new(),
            primary_at: None,
            vacancies: Vec::new(),
            is_watched: true,
            silent_since: None,
        }
    }

    /// Of so many servers that know nothing of each other, and are there from the beginning.
    pub(crate) fn of_the_only_ones(count: usize) -> Self {
        let mut reigns = Self::of((0..count).collect());
        reigns.is_watched = false;
        let always = Span { from: 0, to: 0 };
        (0..count).for_each(|server| reigns.answered(server, always, true));
        reigns
    }

    /// A server was asked for its role at the one moment, and has answered by the other.
    pub(crate) fn answered(&mut self, server: usize, asked: Span, is_primary: bool) {
        if asked.from < self.deaf[server] {
            return;
        }
        if is_primary && self.is_watched {
            self.is_not_vacant(asked);
        }
        match (is_primary, self.open[server]) {
            (true, None) => {
                let memory = self.kept[server].take();
                let memory = memory.unwrap_or_else(|| self.new_memory());
                self.begin(server, self.idle[server], memory, Cause::TwoPrimaries);
            }
            (true, Some(_)) => {}
            (false, _) => {
                self.end(server, asked.to);
                self.idle[server] = asked.from;
                self.kept[server] = None;
            }
        }
    }

    /// At some moment of this span a server was a primary.
    fn is_not_vacant(&mut self, during: Span) {
        let last = self.primary_at.unwrap_or(during.from);
        if last + LEAST_VACANCY < during.from {
            let to = during.from;
            self.vacancies.push(Span { from: last, to });
        }
        // Servers are asked side by side.
        self.primary_at = Some(last.max(during.to));
    }

    /// From now on nobody can give leases out. For servers that are not watched.
    pub(crate) fn falls_silent(&mut self, at: u64) {
        self.silent_since = Some(at);
    }

    pub(crate) fn speaks_again(&mut self, at: u64) {
        let since = self.silent_since.take();
        self.vacancies
            .extend(since.map(|from| Span { from, to: at }));
    }

    /// When nobody could give leases out.
    pub(crate) fn vacancies(&self) -> &[Span] {
        &self.vacancies
    }

    /// A server is gone since this moment at the latest, and has not come back.
    pub(crate) fn killed(&mut self, server: usize, at: u64) {
        self.kept[server] = self.open[server].map(|open| self.reigns[open].memory);
        self.end(server, at);
        self.idle[server] = at;
        self.deaf[server] = at;
    }

    /// What a server had on disk is gone, before it comes back.
    pub(crate) fn emptied(&mut self, server: usize) {
        if self.kept[server].take().is_some() {
            let memory = self.new_memory();
            let idle = self.idle[server];
            self.begin(server, idle, memory, Cause::Emptied);
        }
    }

    /// All that a server knew was deleted in this span.
    pub(crate) fn flushed(&mut self, server: usize, during: Span) {
        if self.open[server].is_some() {
            self.end(server, during.to);
            let memory = self.new_memory();
            self.begin(server, during.from, memory, Cause::Flushed);
        }
    }

    /// Who became a primary of this shard in this span did so in good order, knowing all.
    pub(crate) fn handed_over(&mut self, shard: usize, during: Span) {
        self.orderly.push((shard, during));
    }

    /// Which keys are in which shard from this moment on. Never told: all are in each.
    pub(crate) fn housed(&mut self, at: u64, keys: Vec<Vec<String>>) {
        self.homes.push((at, keys));
    }

    /// How often another than before became the primary of a shard.
    pub(crate) fn changes(&self) -> usize {
        let mut last = std::collections::HashMap::new();
        let mut reigns: Vec<&Reign> = self.reigns.iter().collect();
        reigns.sort_by_key(|reign| reign.span.from);
        let all = reigns.into_iter();
        all.filter(|reign| {
            let before = last.insert(self.shards[reign.server], reign.server);
            before.is_some_and(|before| before != reign.server)
        })
        .count()
    }

    /// Every loss that leases of at most this ttl can tell of.
    pub(crate) fn losses(&self, longest_ttl: u64) -> Vec<Loss> {
        let mut reigns = self.reigns.clone();
        reigns.sort_by_key(|reign| reign.span.from);
        for index in 1..reigns.len() {
            let shard = self.shards[reigns[index].server];
            let began = Span {
                from: reigns[index].span.from,
                to: reigns[index].span.from,
            };
            let in_order =
                |(which, during): &(usize, Span)| *which == shard && during.touches(began);
            if reigns[index].cause == Cause::TwoPrimaries && self.orderly.iter().any(in_order) {
                let mut before = reigns[..index].iter().rev();
                let before = before.find(|reign| self.shards[reign.server] == shard);
                if let Some(memory) = before.map(|before| before.memory) {
                    reigns[index].memory = memory;
                }
            }
        }
        let mut losses = Vec::new();
        for (index, other) in reigns.iter().enumerate() {
            for one in &reigns[..index] {
                let is_far = one.span.to.saturating_add(longest_ttl) < other.span.from;
                let is_elsewhere = self.shards[one.server] != self.shards[other.server];
                if is_far || is_elsewhere || one.memory == other.memory {
                    continue;
                }
                let cause = match other.cause {
                    Cause::TwoPrimaries if !one.span.touches(other.span) => Cause::Replaced,
                    cause => cause,
                };
                losses.push(Loss {
                    one: one.span,
                    other: other.span,
                    cause,
                    keys: self.keys(self.shards[one.server], other.span.from),
                });
            }
        }
        losses
    }

    /// Of a shard, at that moment.
    fn keys(&self, shard: usize, at: u64) -> Option<Vec<String>> {
        let mut told = self.homes.iter().rev();
        let told = told.find(|(since, _)| *since <= at);
        let (_, keys) = told.or(self.homes.first())?;
        Some(keys[shard].clone())
    }

    fn new_memory(&mut self) -> usize {
        self.memories += 1;
        self.memories
    }

    fn begin(&mut self, server: usize, from: u64, memory: usize, cause: Cause) {
        self.open[server] = Some(self.reigns.len());
        self.reigns.push(Reign {
            server,
            span: Span { from, to: u64::MAX },
            memory,
            cause,
        });
    }

    fn end(&mut self, server: usize, at: u64) {
        if let Some(open) = self.open[server].take() {
            self.reigns[open].span.to = at;
        }
    }
}
