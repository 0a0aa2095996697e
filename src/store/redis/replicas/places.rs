//! Which primary's replicas are to be asked for a lock.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use rand::seq::SliceRandom;
use tokio::time::{Instant, timeout_at};

use super::wire::Wire;
use crate::store::redis::cluster::{STRANGERS, Seeds, SlotMap, find_map};
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::Fault;
use crate::store::redis::pauses::Pauses;

/// The map is asked for no more often.
const MAP_PAUSE: Duration = Duration::from_millis(50);

/// The slots of a cluster. It is another map than the session's: what it says wrongly a node puts right, and what counts
/// is what the node says that runs the script.
pub(super) struct Slots {
    seeds: Seeds,
    /// Each step of a search takes so long at most.
    within: Duration,
    map: Option<SlotMap>,
    searching: Option<BoxFuture<'static, Result<SlotMap, Fault>>>,
    due: Option<Instant>,
    began: Option<Instant>,
    pauses: Pauses,
}

impl Slots {
    pub(super) fn new(seeds: Seeds, within: Duration) -> Self {
        Self {
            seeds,
            within,
            map: None,
            searching: None,
            due: None,
            began: None,
            pauses: Pauses::default(),
        }
    }

    /// Who has the slot. Of one that nobody has, somebody who will say so; `None` while there is no map.
    pub(super) fn owner(&self, slot: u16) -> Option<Arc<str>> {
        let map = self.map.as_ref()?;
        let anybody = || map.wanted(None).into_iter().next().map(|(node, _)| node);
        map.owner(slot).cloned().or_else(anybody)
    }

    pub(super) fn endpoint(&self, address: &str) -> Endpoint {
        self.seeds.node(address)
    }

    /// Those that the map names.
    pub(super) fn primaries(&self) -> Vec<Arc<str>> {
        let primaries = self.map.iter().flat_map(|map| map.wanted(None));
        primaries.map(|(node, _)| node).collect()
    }

    pub(super) fn has_map(&self) -> bool {
        self.map.is_some()
    }

    /// Wants a newer map.
    pub(super) fn search(&mut self, now: Instant) {
        let due = self.began.map_or(now, |began| began + MAP_PAUSE).max(now);
        self.due = Some(self.due.map_or(due, |other| other.min(due)));
    }

    /// When the search is to begin.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.filter(|_| self.searching.is_none())
    }

    /// Searches if a search is due; ready when one ends.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, now: Instant) -> Poll<Result<(), Fault>> {
        if self.searching.is_none() && self.due.is_some_and(|due| due <= now) {
            self.due = None;
            self.began = Some(now);
            self.searching = Some(find_map(self.nodes(), self.within).boxed());
        }
        let Some(searching) = &mut self.searching else {
            return Poll::Pending;
        };
        let found = std::task::ready!(searching.poll_unpin(cx));
        self.searching = None;
        Poll::Ready(match found {
            Ok(map) => {
                self.map = Some(map);
                self.pauses = Pauses::default();
                Ok(())
            }
            Err(fault) => {
                self.due = Some(now + self.pauses.next().max(MAP_PAUSE));
                Err(fault)
            }
        })
    }

    /// Whom to ask for the map, the seeds last.
    fn nodes(&self) -> Vec<Endpoint> {
        let mut known = self.primaries();
        known.shuffle(&mut rand::rng());
        let seeds = self.seeds.endpoints().iter();
        let others = seeds.filter(|seed| !known.contains(seed.address()));
        let others: Vec<_> = others.cloned().collect();
        let known = known.iter().map(|node| self.seeds.node(node));
        known.chain(others).collect()
    }
}

/// The nodes that the map does not name, and redirects have.
pub(super) struct Strangers {
    known: Vec<Arc<str>>,
    all: Vec<Arc<str>>,
}

impl Strangers {
    /// `asked`: all that are connected to.
    pub(super) fn new<'a>(slots: &Slots, asked: impl Iterator<Item = &'a Arc<str>>) -> Self {
        let known = slots.primaries();
        let all = asked.filter(|it| !known.contains(it)).cloned().collect();
        Self { known, all }
    }

    /// Whether it may be asked; one too many is not, and who has the slot by the map says it again.
    pub(super) fn admits(&mut self, address: &Arc<str>) -> bool {
        if self.known.contains(address) || self.all.contains(address) {
            return true;
        }
        let has_room = self.all.len() < STRANGERS;
        if has_room {
            self.all.push(address.clone());
        }
        has_room
    }
}

/// Whether a primary of the cluster lets us wait for its replicas. `within` is for all of it.
pub(super) async fn try_out(seeds: &Seeds, within: Duration) -> Result<(), Fault> {
    let until = Instant::now() + within;
    let map = seeds.find_map(within).await?;
    let mut waiting: Vec<_> = map.wanted(None).into_iter().map(|(node, _)| node).collect();
    let asking = waiting.iter().map(|node| {
        let (address, endpoint) = (node.clone(), seeds.node(node));
        async move { (address, Wire::connect(&endpoint, false, within).await) }
    });
    let mut asking: FuturesUnordered<_> = asking.collect();
    let mut told: Option<Fault> = None;
    while let Ok(Some((address, answer))) = timeout_at(until, asking.next()).await {
        let Err(fault) = answer else { return Ok(()) };
        waiting.retain(|other| *other != address);
        // What asking again will not mend is said before what may be over in a moment.
        if told
            .as_ref()
            .is_none_or(|told| !told.is_lasting() && fault.is_lasting())
        {
            told = Some(fault);
        }
    }
    Err(told.unwrap_or_else(|| {
        let address = waiting.swap_remove(0);
        Fault::Silent { address, within }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A node that lies names another with each answer: no more of them are connected to than a few, and who is known, or
    /// was named before, is asked as ever.
    #[test]
    fn no_more_strangers_are_asked_than_there_is_room_for() {
        let node = |number: usize| Arc::<str>::from(format!("10.0.0.1:{number}"));
        let mut strangers = Strangers {
            known: vec![node(1)],
            all: vec![node(2)],
        };
        for number in 3..=STRANGERS + 1 {
            assert!(strangers.admits(&node(number)), "{number}");
        }
        assert!(!strangers.admits(&node(STRANGERS + 2)));
        for number in 1..=STRANGERS + 1 {
            assert!(strangers.admits(&node(number)), "{number} again");
        }
        assert_eq!(strangers.all.len(), STRANGERS);
    }
}
