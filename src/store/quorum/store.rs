use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use super::fault::Fault;
use super::quarantine::Quarantine;
use super::session::QuorumSession;
use crate::base::StoreError;
use crate::store::contract::{RegistryOptions, Session, SessionConfig};
use crate::store::{LockStore, sealed};

/// Leases on a majority of several independent stores, by the Redlock algorithm.
///
/// A lock is held by the owner that has it on more than half of the nodes. So the others may be down: one of three,
/// two of five. Nodes must be servers that know nothing of each other: not replicas of one another, nor databases of
/// one server. An even number is allowed, but needs one more node for a majority: four nodes tolerate the loss of one,
/// as three do. A single node works as without a quorum, but has no queue.
///
/// The algorithm is Salvatore Sanfilippo's ([Distributed Locks with
/// Redis](https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/)), with what its
/// critics asked for (Martin Kleppmann, [How to do distributed
/// locking](https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html)):
///
/// - All nodes are asked at once, and a majority decides; a slow node is not waited for.
/// - A lease counts from before the first node was asked, less the drift of clocks.
/// - Every vote that was not refused is released: a late one after its answer, and one on a node that is down when the
///   node is back.
/// - [Tokens](crate::Lease::token) grow: a lease has the highest of its majority, and a majority is raised to it
///   before the holder gets its lease.
/// - A renewal needs a majority, too. A node that has lost the lock, or was down, gets it again if it is free there.
///
/// # What it promises
///
/// Until its deadline no other lease of the key is held through the same nodes, as long as these keep what they
/// acknowledged and clocks run within 0.1 % of each other. A node may forget a vote: by a restart without its data, a
/// clock that jumps, or a deletion by hand. A lease with more votes than it needs survives that. One with the votes of
/// all nodes, the usual case, is safe until a majority has forgotten it. One with a bare majority survives the loss of
/// one vote if the number of nodes is even, and of none if it is odd.
///
/// What it does not promise:
///
/// - **Restarts.** If a lease has two votes of three, and one of the two nodes restarts without its data, that node
///   and the third could elect another holder. So a node that has restarted gives no vote to a new owner for the
///   registry's [ttl](crate::LockRegistryBuilder::ttl). See [`quarantine`](Self::quarantine) for longer leases, and
///   for how to turn it off.
/// - **Tokens after a restart without data** grow if the nodes' clocks agree within the time for which the node was
///   not asked: epochs start with a server's clock.
/// - **Fairness.** The nodes have no common queue. If a node can push, it notifies the registry that has waited longest
///   there when the key is released, and keeps the key for 100 ms for it. Mostly that is the same registry on all
///   nodes, so registries take turns and do not split the votes. That is not guaranteed: nodes may see waiters in
///   different orders, and a notice may be lost. So waiters also ask when a connection to a node is made again, and by
///   their [`Repeat`](crate::Repeat) policy. Where nodes cannot push, only the policy is left, and a waiter may wait
///   while others take turns. [`acquire_once`](crate::Lock::acquire_once), and any lock whose
///   wait is zero, may report a busy key although no caller gets the lock.
/// - **Speed.** An acquisition takes two round trips to a majority: the votes, and raising the fences.
///
/// Notices cost nothing if nobody waits. False notices do no harm: a waiter asks only a few more times in each of its
/// pauses, however many come.
///
/// Use the nodes only for quorums: a registry that uses one of them alone, with the same prefix, counts there as
/// another owner. All processes must name the same nodes, in any order.
///
/// # Examples
///
/// ```
/// use lockstream::LockRegistry;
/// use lockstream::store::{MemoryStore, QuorumStore};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let nodes = [MemoryStore::new(), MemoryStore::new(), MemoryStore::new()];
/// let here = LockRegistry::builder(QuorumStore::new(nodes.clone())?).build()?;
/// let there = LockRegistry::builder(QuorumStore::new(nodes)?).build()?;
///
/// let lock = here.obtain("till");
/// assert!(lock.acquire_once().await?);
/// assert!(!there.obtain("till").acquire_once().await?);
/// lock.release().await?;
/// # Ok(()) }
/// ```
///
/// On servers, some of which may be down when the service starts:
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
    /// Makes a quorum of these nodes, which are all of one type; mix types as `Arc<dyn LockStore>`.
    ///
    /// # Errors
    ///
    /// If the urls of nodes say different things of the registry (`prefix`, `name`, `response_timeout`). If there is no
    /// node, or two are the same: clones of a [`MemoryStore`](crate::store::MemoryStore), or
    /// [`RedisStore`](crate::store::RedisStore)s with the same host and port as written, whatever the database. Two
    /// names of one server are noticed at the connection, with the right to `INFO server`: the second node has no
    /// vote. An error is logged, and later errors say so if no majority is left.
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
        let said = nodes[0].registry_options();
        if nodes.iter().any(|node| node.registry_options() != said) {
            return Err(Fault::Differ.into());
        }
        let quarantine = None;
        Ok(Self { nodes, quarantine })
    }

    /// A node that has restarted gives no vote to a new owner for this long after its start. `None` turns that off.
    /// Default: the registry's [ttl](crate::LockRegistryBuilder::ttl), or the lock's if that is longer.
    ///
    /// After that time every lease that the node has forgotten is over, if none lasts longer. If leases last longer
    /// ([`extend`](crate::Lease::extend), other processes with other ttls), set it to the longest of them, and to the
    /// same in all processes. Leases that the node has not forgotten are renewed meanwhile.
    ///
    /// Servers report how long they have been up (`INFO server`, in whole seconds). If the right to that is missing,
    /// the time is counted from each connection that a registry makes: a process that has just started gets no lock
    /// until the connections have stood for that long. A [`MemoryStore`](crate::store::MemoryStore) counts as old from
    /// the start. So **new servers give no lock before that time is over**: `acquire_once` gets an error, and waiters
    /// wait. Turn it off for tests, and for servers that keep each vote (`appendfsync always`). Data that is lost
    /// without a restart (`FLUSHALL`, a fail-over behind the address) is not noticed.
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

    /// All nodes say the same.
    fn registry_options(&self) -> RegistryOptions {
        self.nodes[0].registry_options()
    }

    /// Shared leases need one queue for all, or writers starve (M10).
    fn shares(&self) -> bool {
        false
    }

    fn overhead(&self) -> Duration {
        let nodes = self.nodes.iter().map(|node| node.overhead());
        nodes.max().unwrap_or_default()
    }
}
