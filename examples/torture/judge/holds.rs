//! Did two hold a key at once, did tokens grow, did fencing let a stale write through?
//!
//! A **hold** lasts from the moment at which the lease was taken to the moment at which its work saw the end (it is
//! about to be released, or its loss was told, or its registry is being shut down, or its process is dead), and never
//! beyond the lease's own deadline. So it is a little shorter than the truth, and what is reported here is certain.
//!
//! - Two holds of one key that have a moment in common **overlap**, unless both are readers, or both are permits. Permits
//!   that are too many overlap, too. Each counts all others against its own limit, at the moment at which the store lets
//!   it in. That moment is not known here: it is not before its wait began, and not after it was taken. So there are too
//!   many if those that were held for all of that time leave no room for it, or if those that are held at once are more
//!   than the limit of each of them, since one came last. A kept key is held until its time is over, if the end of its
//!   lease was confirmed.
//!   A shutdown releases what is held when its work has ended, but does not wait for long, and not for work that hears
//!   of nothing; what came before such work was told is counted by itself.
//! - Of one key no two leases have the same **token**, and each has a greater one than all that ended before it was taken
//!   and that it could not be held beside: of two readers, the one that was granted first may look last.
//! - Of one key the tokens of **writes** that were let through never go down, each is that of a lease in the log, and
//!   none is of a lease that ended before one was taken whose write was let through earlier.
//!
//! A server that forgets what it has acknowledged gives a lease away that is still held. An overlap is **explained** by
//! nothing else: its two leases may have been proved by two [reigns](super::reigns) of which the one does not know what
//! the other gave out. A lease was proved when it was taken, and each time that its deadline moved: at the earliest its
//! deadline less the longest ttl, at the latest when it was seen. If the work looks late, it sees a new deadline only
//! after the old one has passed. From then to the look the lease stood by a renewal that nobody saw: it was made before
//! the look, and at most the longest ttl before the old deadline. Of every two proofs by which the two leases stood at
//! the same moment each must be explained: two from before a loss never are, and no two from after it. So no explained
//! overlap is longer than what was left of a ttl when a reign ended; and one of two primaries at a time lasts as long
//! as somebody is served by the wrong one.
//!
//! Nothing explains a token that was given twice, or a write with a smaller token than one before. The order in time of
//! leases and tokens, and of leases and writes, is not judged by a lease that was lost in that way, nor by one to which it
//! was passed on in the same tenure, nor by one whose taking was seen only when it was over: a process may be stopped
//! between the winning of a lease and its taking, and only while others are kept out is the one as good as the other.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::reigns::{Cause, Loss};
use super::{Child, Kind, Mode, Span};

/// One lease, as far as it is known.
#[derive(Clone, Debug)]
pub(crate) struct Hold {
    pub(crate) child: Child,
    pub(crate) token: u64,
    pub(crate) taken: u64,
    mode: Mode,
    /// From when on it may have been renewed before it was taken.
    since: u64,
    deadline: u64,
    /// When which deadline was seen: the first when it was taken.
    proofs: Vec<(u64, u64)>,
    ended: Option<u64>,
    /// When its work saw the end, be it that its registry was shut down before.
    worked: u64,
}

/// So many tokens has a tenure (F2).
const TOKENS: u64 = 64;

impl Hold {
    pub(crate) fn new(child: Child, token: u64, taken: u64, deadline: u64) -> Self {
        Self {
            child,
            token,
            taken,
            mode: Mode::Exclusive,
            since: taken,
            deadline,
            proofs: vec![(taken, deadline)],
            ended: None,
            worked: 0,
        }
    }

    pub(crate) fn of(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Its key may have been won as early as that, and renewed until it was taken: one of several that are taken
    /// together, or a permit whose first answer was lost.
    pub(crate) fn since(self, since: u64) -> Self {
        Self { since, ..self }
    }

    fn end(&self) -> u64 {
        self.ended.unwrap_or(u64::MAX).min(self.deadline)
    }

    /// Whether both may hold the key at once, if there is room.
    fn shares_with(&self, other: &Self) -> bool {
        self.mode.kind().is_some() && self.mode.kind() == other.mode.kind()
    }

    fn weight(&self) -> u64 {
        match self.mode {
            Mode::Permit { weight, .. } => weight,
            _ => 0,
        }
    }

    fn limit(&self) -> u64 {
        match self.mode {
            Mode::Permit { limit, .. } => limit,
            _ => u64::MAX,
        }
    }

    fn span(&self) -> Span {
        Span {
            from: self.taken,
            to: self.end(),
        }
    }

    /// A process that was stopped between the winning and the taking takes what is over.
    /// Of one tenure are leases that a registry passes on without asking the store.
    fn tenure(&self) -> (Child, u64) {
        (self.child, self.token / TOKENS)
    }

    fn is_dead_on_arrival(&self) -> bool {
        self.taken >= self.end()
    }

    /// All of the time in which the store may have had it as held.
    fn in_store(&self, longest_ttl: u64) -> Span {
        Span {
            from: self.since.min(self.proofs[0].1.saturating_sub(longest_ttl)),
            to: self.end(),
        }
    }

    /// When it can have been proved in each of the ways by which it stood at some moment of this span.
    fn proved(&self, during: Span, longest_ttl: u64) -> impl Iterator<Item = Span> {
        let proofs = self.proofs.iter();
        let standing =
            proofs.filter(move |(seen, deadline)| *seen <= during.to && *deadline > during.from);
        let seen = standing.map(move |(seen, deadline)| {
            let from = deadline.saturating_sub(longest_ttl);
            Span {
                from,
                to: from.max(*seen),
            }
        });
        // From a deadline to the look that found a later one the lease stood by a renewal that nobody saw.
        let gaps = self.proofs.windows(2).map(move |pair| Span {
            from: pair[0].1.max(during.from),
            to: pair[1].0.min(during.to),
        });
        let unseen = gaps.filter(|gap| gap.from < gap.to).map(move |gap| Span {
            from: gap.from.saturating_sub(longest_ttl),
            to: gap.to,
        });
        seen.chain(unseen)
    }
}

/// All holds of a run.
#[derive(Debug, Default)]
pub(crate) struct Holds {
    open: HashMap<(Child, u64), (String, Hold)>,
    /// When children shut their registries down.
    closings: HashMap<Child, u64>,
    keys: BTreeMap<String, Vec<Hold>>,
}

/// What they come to.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) leases: u64,
    /// How many of them in each mode.
    pub(crate) modes: BTreeMap<&'static str, u64>,
    pub(crate) hand_overs: u64,
    pub(crate) dead_on_arrival: u64,
    /// Work that had not yet seen that its registry was being shut down when the next lease was taken.
    pub(crate) after_shutdown: u64,
    /// Overlaps of leases that a server forgot, by how it came to.
    pub(crate) explained: BTreeMap<Cause, Explained>,
    /// More permits than their limit, of which a server forgot some.
    pub(crate) crowds: u64,
    pub(crate) overlaps: Vec<String>,
    pub(crate) tokens: Vec<String>,
    pub(crate) stale_writes: Vec<String>,
}

/// Overlaps with the same cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Explained {
    pub(crate) times: u64,
    /// How many leases others were taken beside.
    pub(crate) leases: u64,
    /// The longest (ns).
    pub(crate) longest: u64,
    /// From the first to the last of one loss (ns), where it was longest.
    pub(crate) lasted: u64,
}

impl Holds {
    pub(crate) fn taken(&mut self, lease: u64, key: String, hold: Hold) {
        self.open.insert((hold.child, lease), (key, hold));
    }

    pub(crate) fn until(&mut self, child: Child, lease: u64, at: u64, deadline: u64) {
        if let Some((_, hold)) = self.open.get_mut(&(child, lease)) {
            hold.deadline = deadline;
            hold.proofs.push((at, deadline));
        }
    }

    pub(crate) fn ended(&mut self, child: Child, lease: u64, at: u64) {
        if let Some((key, mut hold)) = self.open.remove(&(child, lease)) {
            hold.worked = at.min(hold.deadline);
            let closing = self.closings.get(&child);
            hold.ended = Some(closing.map_or(at, |closing| at.min(*closing)));
            self.keys.entry(key).or_default().push(hold);
        }
    }

    /// From this moment on the child releases whatever it holds, as it was told to.
    pub(crate) fn closing(&mut self, child: Child, at: u64) {
        self.closings.insert(child, at);
    }

    /// The child was seen dead at this moment: from then on it holds nothing.
    pub(crate) fn died(&mut self, child: Child, at: u64) {
        let open: Vec<_> = self.open.keys().copied().collect();
        for (_, lease) in open.into_iter().filter(|(whose, _)| *whose == child) {
            self.ended(child, lease, at);
        }
    }

    /// How many leases there were so far.
    pub(crate) fn count(&self) -> usize {
        self.open.len() + self.keys.values().map(Vec::len).sum::<usize>()
    }

    /// When leases were taken, and by which child, in order.
    pub(crate) fn arrivals(&self) -> Vec<(u64, usize)> {
        let holds = self.keys.values().flatten();
        let mut all: Vec<_> = holds.map(|hold| (hold.taken, hold.child.slot)).collect();
        all.sort_unstable();
        all
    }

    /// Whether anybody took this key since then.
    pub(crate) fn taken_since(&self, key: &str, since: u64) -> bool {
        let mut all = self.all();
        all.any(|(whose, hold)| whose == key && hold.taken >= since)
    }

    /// Whether a child of this slot took any key since then.
    pub(crate) fn took_since(&self, slot: usize, since: u64) -> bool {
        let mut all = self.all();
        all.any(|(_, hold)| hold.child.slot == slot && hold.taken >= since)
    }

    fn all(&self) -> impl Iterator<Item = (&str, &Hold)> {
        let done = self.keys.iter();
        let done = done.flat_map(|(key, holds)| holds.iter().map(move |hold| (key.as_str(), hold)));
        let open = self.open.values();
        done.chain(open.map(|(key, hold)| (key.as_str(), hold)))
    }

    /// To be asked when nothing is open any more.
    pub(crate) fn judge(
        &mut self,
        accepted: &HashMap<String, Vec<u64>>,
        losses: &[Loss],
        longest_ttl: u64,
    ) -> Verdict {
        let mut verdict = Verdict::default();
        for (key, holds) in &mut self.keys {
            holds.sort_by_key(|hold| (hold.taken, hold.token));
            verdict.leases += holds.len() as u64;
            for hold in &*holds {
                *verdict.modes.entry(hold.mode.name()).or_default() += 1;
            }
            verdict.dead_on_arrival += holds
                .iter()
                .filter(|hold| hold.is_dead_on_arrival())
                .count() as u64;
            verdict.hand_overs += holds
                .windows(2)
                .filter(|pair| pair[0].child != pair[1].child)
                .count() as u64;
            let was_forgotten = |hold: &&Hold| {
                let span = hold.in_store(longest_ttl);
                let mut losses = losses.iter().filter(|loss| loss.concerns(key));
                losses.any(|loss| loss.border().touches(span))
            };
            let forgotten = holds.iter().filter(was_forgotten);
            let forgotten: HashSet<_> = forgotten.map(Hold::tenure).collect();
            let was_lost = |hold: &Hold| forgotten.contains(&hold.tenure());
            let two_gave = |holds: [&Hold; 2]| {
                let gave = |loss: &Loss, hold: &Hold| {
                    let (from, to) = (hold.since, hold.taken);
                    loss.concerns(key) && loss.border().touches(Span { from, to })
                };
                let mut two = losses.iter().filter(|it| it.cause == Cause::TwoPrimaries);
                two.any(|loss| holds.iter().all(|hold| gave(loss, hold)))
            };
            let loss = |one: &Hold, other: &Hold| loss(key, one, other, losses, longest_ttl);
            overlaps(key, holds, losses, loss, &mut verdict);
            tokens(key, holds, was_lost, two_gave, &mut verdict);
            let accepted = accepted.get(key).map_or(&[][..], Vec::as_slice);
            writes(key, holds, accepted, was_lost, &mut verdict);
        }
        for key in accepted.keys().filter(|key| !self.keys.contains_key(*key)) {
            verdict
                .stale_writes
                .push(format!("{key}: writes without any lease"));
        }
        verdict
    }
}

/// Which loss explains that both were held at once, if any does.
fn loss(key: &str, one: &Hold, other: &Hold, losses: &[Loss], longest_ttl: u64) -> Option<usize> {
    let both = Span {
        from: one.taken.max(other.taken),
        to: one.end().min(other.end()),
    };
    let mut found = None;
    for lease in one.proved(both, longest_ttl) {
        for another in other.proved(both, longest_ttl) {
            let explains = |loss: &Loss| loss.explains(key, lease, another);
            found = Some(losses.iter().rposition(explains)?);
        }
    }
    found
}

/// How much permits take.
struct Taken {
    all: u64,
    /// What those take that no loss explains.
    known: u64,
}

impl Taken {
    fn by(hold: &Hold) -> Self {
        let weight = hold.weight();
        Self {
            all: weight,
            known: weight,
        }
    }

    fn add(&mut self, hold: &Hold, is_known: bool) {
        self.all += hold.weight();
        self.known += if is_known { hold.weight() } else { 0 };
    }
}

fn overlaps(
    key: &str,
    holds: &[Hold],
    losses: &[Loss],
    loss: impl Fn(&Hold, &Hold) -> Option<usize>,
    verdict: &mut Verdict,
) {
    let mut spans: HashMap<usize, Span> = HashMap::new();
    let mut standing: Vec<(&Hold, bool)> = Vec::new();
    for hold in holds.iter().filter(|hold| !hold.is_dead_on_arrival()) {
        standing.retain(|(earlier, _)| earlier.end().max(earlier.worked) > hold.taken);
        let mut at_once = Taken::by(hold);
        let mut all_along = Taken::by(hold);
        let mut greatest = hold.limit();
        for (earlier, is_counted) in &mut standing {
            if earlier.shares_with(hold) {
                if earlier.end() > hold.taken {
                    let is_known = loss(earlier, hold).is_none();
                    at_once.add(earlier, is_known);
                    greatest = greatest.max(earlier.limit());
                    if earlier.taken <= hold.since {
                        all_along.add(earlier, is_known);
                    }
                }
                continue;
            }
            if earlier.end() <= hold.taken {
                verdict.after_shutdown += 1;
                continue;
            }
            let lasts = earlier.span().within(hold.span());
            if let Some(loss) = loss(earlier, hold) {
                let explained = verdict.explained.entry(losses[loss].cause).or_default();
                let span = spans.entry(loss).or_insert(Span {
                    from: hold.taken,
                    to: hold.taken,
                });
                span.to = hold.taken + lasts;
                explained.lasted = explained.lasted.max(span.to - span.from);
                explained.times += 1;
                explained.leases += u64::from(!std::mem::replace(is_counted, true));
                explained.longest = explained.longest.max(lasts);
                continue;
            }
            verdict.overlaps.push(format!(
                "{key}: for {:.3} ms from {}: child {} with token {} (from {} to {}) and child {} with token {} (from {} to {})",
                lasts as f64 / 1e6,
                hold.taken,
                earlier.child,
                earlier.token,
                earlier.taken,
                earlier.end(),
                hold.child,
                hold.token,
                hold.taken,
                hold.end(),
            ));
        }
        for (taken, limit) in [(all_along, hold.limit()), (at_once, greatest)] {
            if taken.known > limit {
                verdict.overlaps.push(format!(
                    "{key}: {} of {limit} permits, when child {} took its own with token {} at {}",
                    taken.known, hold.child, hold.token, hold.taken
                ));
                break;
            } else if taken.all > limit {
                verdict.crowds += 1;
                break;
            }
        }
        standing.push((hold, false));
    }
}

fn tokens(
    key: &str,
    holds: &[Hold],
    was_lost: impl Fn(&Hold) -> bool,
    two_gave: impl Fn([&Hold; 2]) -> bool,
    verdict: &mut Verdict,
) {
    let mut seen: HashMap<u64, &Hold> = HashMap::new();
    for hold in holds {
        // Two primaries give the same token within the same microsecond.
        if let Some(other) = seen.insert(hold.token, hold)
            && !two_gave([other, hold])
        {
            verdict.tokens.push(format!(
                "{key}: children {} and {} both have token {}",
                other.child, hold.child, hold.token
            ));
        }
    }
    // By their ends: those that are over when the next is taken.
    let mut by_end: Vec<&Hold> = holds.iter().collect();
    by_end.sort_by_key(|hold| hold.end());
    let mut over = by_end.into_iter().peekable();
    let mut greatest: HashMap<Option<Kind>, &Hold> = HashMap::new();
    for hold in holds {
        while let Some(ended) = over.next_if(|ended| ended.end() < hold.taken) {
            let greatest = greatest.entry(ended.mode.kind()).or_insert(ended);
            if greatest.token < ended.token {
                *greatest = ended;
            }
        }
        let others = greatest.values().filter(|it| !it.shares_with(hold));
        let Some(greatest) = others
            .filter(|it| it.token >= hold.token)
            .max_by_key(|it| it.token)
        else {
            continue;
        };
        if hold.is_dead_on_arrival() || was_lost(hold) {
            continue;
        }
        verdict.tokens.push(format!(
            "{key}: child {} took token {} at {}, after child {} with token {} had ended at {}",
            hold.child,
            hold.token,
            hold.taken,
            greatest.child,
            greatest.token,
            greatest.end()
        ));
    }
}

fn writes(
    key: &str,
    holds: &[Hold],
    accepted: &[u64],
    was_lost: impl Fn(&Hold) -> bool,
    verdict: &mut Verdict,
) {
    let by_token: HashMap<u64, &Hold> = holds.iter().map(|hold| (hold.token, hold)).collect();
    let mut latest: Option<(u64, &Hold)> = None;
    let mut greatest = 0;
    for &token in accepted {
        if token < greatest {
            verdict.stale_writes.push(format!(
                "{key}: a write with token {token} after one with {greatest}"
            ));
        }
        greatest = greatest.max(token);
        let Some(hold) = by_token.get(&token) else {
            verdict.stale_writes.push(format!(
                "{key}: a write with token {token}, which no lease has"
            ));
            continue;
        };
        if let Some((before, later)) = latest
            && hold.end() < later.taken
        {
            verdict.stale_writes.push(format!(
                "{key}: a write of child {} (token {token}, ended at {}) after one of child {} (token {before}, taken at {})",
                hold.child,
                hold.end(),
                later.child,
                later.taken
            ));
        }
        // Of one that was taken when it was over, or forgotten before it was taken, nobody knows when it began.
        let began = !hold.is_dead_on_arrival() && !was_lost(hold);
        if began && latest.is_none_or(|(_, latest)| latest.taken < hold.taken) {
            latest = Some((token, hold));
        }
    }
}
