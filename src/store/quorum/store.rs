use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::fault::Fault;
use super::quarantine::Quarantine;
use super::session::QuorumSession;
use crate::StoreError;
use crate::store::contract::{Session, SessionConfig};
use crate::store::{LockStore, sealed};

/// Leases on a majority of several independent stores, by the Redlock algorithm.
///
/// A lock is held by whoever has it on more than half of the nodes, so it survives that the others
/// are away: one of three, two of five. Nodes are servers that know nothing of each other: no
/// replicas of one another, no databases of one server. An even number is allowed and needs one
/// more for a majority: four stand the loss of one, as three do. One node alone works as it does
/// without a quorum, but for the queue.
///
/// The algorithm is Salvatore Sanfilippo's ([Distributed Locks with
/// Redis](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)), with what its
/// critics asked for (Martin Kleppmann, [How to do distributed
/// locking](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)):
///
/// - All nodes are asked at once, and a majority decides; a slow one is not waited for.
/// - A lease counts from before the first node was asked, less what clocks may drift.
/// - Every vote that is not known to have refused is given back, one that comes late behind its
///   answer, and one on a node that was away when that is back.
/// - [Tokens](crate::Lease::token) grow: a lease has the highest of its majority, and a majority is
///   raised to it before the lease is told.
/// - A renewal needs a majority, too. A node that has lost the lock, or was away, is then given it
///   again if it is free there.
///
/// # What it promises
///
/// Until its deadline no other lease of the key is held through the same nodes, as long as these
/// keep what they acknowledged and clocks run within 0.1 % of each other. A node that forgets a vote
/// (by a restart without its data, a clock that jumps, a deletion by hand) is survived by every lease
/// that has more votes than it needs: one that all nodes voted for, as they do when none is away,
/// stands until a majority has forgotten it; one that has a bare majority of an even number of
/// nodes survives one of them, and of an odd number none.
///
/// What it does not:
///
/// - **Restarts.** With two of three nodes for a lease, one of them started again without its data
///   and the third could elect another holder. So one that was started lately has no vote for anybody new
///   for as long as the registry's [ttl](crate::LockRegistryBuilder::ttl): see [`quarantine`](Self::quarantine)
///   for longer leases, and for how to turn it off.
/// - **Tokens after a restart without data** grow as long as the nodes' clocks agree within the time
///   for which the node was not asked: draws begin with a server's clock.
/// - **Fairness.** There is no queue that all nodes share. Where nodes can push, each tells the registry that
///   has waited there longest when the key is free, and keeps it for 100 ms for that one: mostly that is the
///   same registry on all of them, so turns go round, and those who wait do not all ask at once and split the
///   votes. Nothing promises it: nodes may see waiters in different orders, and a notice may be lost. So who
///   waits also asks when a connection to a node is made again, which may have told meanwhile, and else as
///   [`Repeat`](crate::Repeat) says, and where nodes cannot push that is all: somebody
///   may wait while others take turns. [`acquire_once`](crate::Lock::acquire_once) may find a lock busy that
///   nobody gets.
/// - **Speed.** An acquisition takes two round trips, as the majority's second fastest node
///   answers: the vote, and the raising of its fences.
///
/// A notice costs nothing where nobody waits, and one that lies does no harm: however many come, a waiter
/// asks a few times more in each of its pauses, later each time.
///
/// Nodes are for quorums alone: a registry that uses one of them by itself under the same prefix
/// counts there as one that stands in the way. All processes name the same nodes, in any order.
///
/// # Examples
///
/// ```
/// use lockstream::LockRegistry;
/// use lockstream::store::{MemoryStore, QuorumStore};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let nodes = [MemoryStore::new(), MemoryStore::new(), MemoryStore::new()];
/// let here = LockRegistry::builder(QuorumStore::new(nodes.clone())?).build();
/// let there = LockRegistry::builder(QuorumStore::new(nodes)?).build();
///
/// let lock = here.obtain("till");
/// assert!(lock.acquire_once().await?);
/// assert!(!there.obtain("till").acquire_once().await?);
/// lock.release().await?;
/// # Ok(()) }
/// ```
///
/// On servers, some of which may be away while the service boots:
///
/// ```
/// # #[cfg(feature = "redis")] fn f() -> Result<(), lockstream::StoreError> {
/// use std::time::Duration;
/// use lockstream::store::{QuorumStore, RedisStore};
///
/// let urls = ["redis://10.0.0.1/", "redis://10.0.0.2/", "redis://10.0.0.3/"];
/// let nodes: Result<Vec<_>, _> = urls.into_iter().map(RedisStore::connect_lazy).collect();
/// // Some leases last longer than their registry's ttl.
/// let store = QuorumStore::new(nodes?)?.quarantine(Duration::from_secs(300));
/// # let _ = store; Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct QuorumStore {
    nodes: Arc<[Arc<dyn LockStore>]>,
    /// `None`: the registry's ttl.
    quarantine: Option<Quarantine>,
}

impl QuorumStore {
    /// Of these nodes, which are all of one type; mix them as `Arc<dyn LockStore>`.
    ///
    /// # Errors
    ///
    /// If there is none, or two are one: clones of a [`MemoryStore`](crate::store::MemoryStore), or
    /// [`RedisStore`](crate::store::RedisStore)s with the same host and port, as they are written, whatever the
    /// database. Two names of one server are noticed when it is connected to, if it lets us ask (`INFO server`): the
    /// second has no vote, which is logged as an error, and told when no majority is left.
    pub fn new<I>(nodes: I) -> Result<Self, StoreError>
    where
        I: IntoIterator,
        I::Item: LockStore,
    {
        let nodes: Arc<[_]> = nodes
            .into_iter()
            .map(|node| -> Arc<dyn LockStore> { Arc::new(node) })
            .collect();
        if nodes.is_empty() {
            return Err(Fault::NoNodes.into());
        }
        let mut places = HashSet::new();
        for place in nodes.iter().filter_map(|node| node.place()) {
            if !places.insert(place.clone()) {
                return Err(Fault::Twice { place }.into());
            }
        }
        let quarantine = None;
        Ok(Self { nodes, quarantine })
    }

    /// Does not count the votes of a node for anybody new for this long after it was started. `None`
    /// turns it off. By default it is the registry's [ttl](crate::LockRegistryBuilder::ttl), or the
    /// lock's where that is longer.
    ///
    /// By then every lease that a node may have voted for and forgotten is over, if none lasts longer.
    /// Set it where leases do ([`extend`](crate::Lease::extend), other processes with other ttls): to the
    /// longest, and to the same in all processes. Leases that a node has not forgotten are renewed
    /// meanwhile.
    ///
    /// Servers tell how long they have been up (`INFO server`, whole seconds); after one
    /// that does not let us know has broken its connection to us, this registry, but no other, takes
    /// it for started again. A [`MemoryStore`](crate::store::MemoryStore) is old from the start. So **new
    /// servers give no lock before that time is over**: who asks once gets an error, and who waits goes on
    /// waiting. Turn it off for tests, and where servers keep each vote (`appendfsync always`). Data lost
    /// in another way than by a restart (`FLUSHALL`, a fail-over behind the address) is not noticed.
    #[must_use]
    pub fn quarantine(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.quarantine = Some(Quarantine::Fixed(time.into()));
        self
    }
}

impl sealed::Sealed for QuorumStore {}

impl LockStore for QuorumStore {
    fn open(&self, config: SessionConfig) -> Arc<dyn Session> {
        let by_ttl = Quarantine::AtLeast(config.ttl);
        let quarantine = self.quarantine.unwrap_or(by_ttl);
        Arc::new(QuorumSession::new(&self.nodes, quarantine, config))
    }

    fn overhead(&self) -> Duration {
        let nodes = self.nodes.iter().map(|node| node.overhead());
        nodes.max().unwrap_or_default()
    }
}
