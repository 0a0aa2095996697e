use lockstream::store::RedisStore;
use lockstream::{Lease, LockError, LockRegistry};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::{
    FAIL_OVER, RedisServer, Sentinel, Watched, chain, on_a_steady_machine, wait_until,
};
use crate::{ANSWER_WITHIN, BOUND, LONG, ms, registry};

const QUEUE: &str = "{lock:k}:~queue2";

/// One who holds `k`, and one who waits for it.
struct Scene {
    holding: LockRegistry,
    waiting: LockRegistry,
    lease: Lease,
    waiter: JoinHandle<Result<Lease, LockError>>,
    /// When the lock runs out, in the server's milliseconds.
    ends: u64,
}

impl Scene {
    async fn set(watched: &Watched) -> Self {
        let (holding, waiting) = (
            registry(&watched.url()).await,
            registry(&watched.url()).await,
        );
        let lease = holding.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("k").lease());
        wait_for_ticket(watched.primary()).await;
        Self {
            holding,
            waiting,
            lease,
            waiter,
            ends: watched.primary().ask(&["PEXPIRETIME", "lock:k"]),
        }
    }

    /// The holder holds on the new primary, releases there, and the waiter is served.
    async fn ends_well(self, primary: &RedisServer) {
        let owner = primary.get("lock:k");
        assert!(owner.is_some(), "the replica had it");
        wait_for_ticket(primary).await;
        let both = "both have found the new primary";
        wait_until(both, BOUND, || callers(primary) == 2).await;
        // At the reconnect it was renewed, and so proved.
        wait_until("it was renewed there", BOUND, || {
            primary.ask::<u64>(&["PEXPIRETIME", "lock:k"]) > self.ends
        })
        .await;
        assert!(self.lease.is_valid() && !self.waiter.is_finished());
        let token = self.lease.token();
        let released = timeout(BOUND, self.lease.release()).await;
        released.expect("a release ends").unwrap();
        let next = timeout(BOUND, self.waiter).await.expect("it is served");
        let next = next.unwrap().unwrap();
        assert!(next.token() > token, "tokens grow through a fail-over");
        next.release().await.unwrap();
        wait_until("nothing is left", BOUND, || {
            self.holding.in_use() + self.waiting.in_use() == 0
                && primary.keys("*") == ["lock:~fence"]
        })
        .await;
    }
}

/// How many registries are connected there.
fn callers(server: &RedisServer) -> usize {
    let channels = server.channels();
    channels.iter().filter(|it| it.contains("~grant:")).count()
}

async fn wait_for_ticket(primary: &RedisServer) {
    wait_until("one waits in the queue", BOUND, || {
        primary.ask::<u64>(&["ZCARD", QUEUE]) == 1
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_is_killed_and_comes_back_as_a_replica() {
    on_a_steady_machine(async || {
        let mut watched = Watched::start();
        let scene = Scene::set(&watched).await;
        watched.wait_until_replicated();
        let old = watched.kill_primary();
        watched.wait_until_promoted(old);
        let new = watched.primary_index();
        // It comes back as what it was, empty, until the sentinels see it. Nobody must believe it.
        watched.servers[old].restart();
        assert_eq!(watched.servers[old].keys("lock:*"), [""; 0]);
        scene.ends_well(&watched.servers[new]).await;
        wait_until("it is a replica", FAIL_OVER, || {
            watched.servers[old].role() == "slave"
        })
        .await;
        assert_eq!(watched.primary_index(), new);
        let lease = registry(&watched.url()).await;
        let lease = lease.obtain("k").lease().await.unwrap();
        assert!(watched.servers[new].exists("lock:k"));
        lease.release().await.unwrap();
    })
    .await;
}

/// Nothing dies: the old primary answers all the while, and takes itself for the primary for ten seconds. Whoever stayed
/// there would hold what others hold elsewhere, so all leave as soon as the sentinels say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sentinels_change_the_primary_at_will() {
    on_a_steady_machine(async || {
        let watched = Watched::start();
        let scene = Scene::set(&watched).await;
        watched.wait_until_replicated();
        let old = watched.fail_over();
        wait_until("both have left the old one", ms(4_000), || {
            callers(&watched.servers[old]) == 0
        })
        .await;
        assert_eq!(watched.servers[old].role(), "master", "it believes it is");
        scene.ends_well(watched.primary()).await;
    })
    .await;
}

/// A sentinel that leads a fail-over names the new primary as soon as that is one, and tells the other sentinels; that it
/// is over it tells when the other replicas follow, a second or more later. Those who waited for that stayed at the old
/// primary, while others, who ask another sentinel, were at the new: two at a time had the same key, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_leave_when_another_is_promoted_and_not_when_the_fail_over_is_over() {
    on_a_steady_machine(async || {
        let watched = Watched::start();
        let scene = Scene::set(&watched).await;
        watched.wait_until_replicated();
        // Whichever is promoted, the other does not come to follow it, which keeps the fail-over from its end.
        for server in &watched.servers {
            server.cmd(&["CONFIG", "SET", "masterauth", "nobody asks for one"]);
        }
        // Both ask this one, unless it fails; who is told to begin is who leads.
        let old = watched.primary_index();
        let leader = &watched.sentinels[0];
        let begun = leader.try_cmd(&["SENTINEL", "FAILOVER", Watched::SERVICE]);
        assert_eq!(begun.unwrap(), redis::Value::Okay);
        wait_until("the leader names another", FAIL_OVER, || {
            watched.primary_index() != old
        })
        .await;
        wait_until("both have left the old one", BOUND, || {
            callers(&watched.servers[old]) == 0
        })
        .await;
        let flags = leader.flags();
        assert!(flags.contains("failover_in_progress"), "{flags}");
        for server in &watched.servers {
            // Whoever changes roles ends the harness's connection, be it in the midst of this.
            let set = || server.try_cmd(&["CONFIG", "SET", "masterauth", ""]).is_ok();
            wait_until("the next may follow", BOUND, set).await;
        }
        watched.wait_until_promoted(old);
        scene.ends_well(watched.primary()).await;
    })
    .await;
}

/// What only the old primary had is forgotten: the holder is told at its reconnect, long before its deadline, and who
/// waits gets the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_no_replica_had_is_lost() {
    on_a_steady_machine(async || {
        let mut watched = Watched::start();
        let (holding, waiting) = (
            registry(&watched.url()).await,
            registry(&watched.url()).await,
        );
        for registry in [&holding, &waiting] {
            // Its connection stands from here on.
            registry.obtain("k").inspect().await.unwrap();
        }
        let primary = watched.primary();
        // Its replicas do not get in any more.
        primary.cmd(&["CONFIG", "SET", "requirepass", "new"]);
        primary.cmd(&["CLIENT", "KILL", "TYPE", "replica"]);
        let lease = holding.obtain("k").ttl(LONG).lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("k").lease());
        wait_for_ticket(primary).await;
        let token = lease.token();
        watched.kill_primary();
        let lost = timeout(FAIL_OVER, lease.lost());
        lost.await.expect("the holder is told");
        assert!(!lease.is_valid());
        let next = timeout(FAIL_OVER, waiter).await.expect("it is served");
        let next = next.unwrap().unwrap();
        assert!(next.token() > token, "the clock makes tokens grow");
        next.release().await.unwrap();
    })
    .await;
}

/// Sentinels that are stopped cost a response time-out each, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_while_one_sentinel_is_silent() {
    on_a_steady_machine(async || {
        let mut watched = Watched::start();
        let scene = Scene::set(&watched).await;
        watched.wait_until_replicated();
        // Not the first, which the harness asks.
        watched.sentinels[2].stop();
        let old = watched.kill_primary();
        let begun = std::time::Instant::now();
        wait_until("the others promote another", FAIL_OVER, || {
            watched.sentinels[..2]
                .iter()
                .all(|it| it.primary() != watched.servers[old].port())
        })
        .await;
        println!("promoted after {:?}", begun.elapsed());
        wait_until("it is a primary", FAIL_OVER, || {
            watched.primary().role() == "master"
        })
        .await;
        scene.ends_well(watched.primary()).await;
        watched.sentinels[2].cont();
    })
    .await;
}

/// Sentinels are asked where the primary is, and no more: while all are silent, whoever is connected to it goes on, and
/// whoever is not is told by whom it was not told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_sentinels_are_silent_and_the_primary_stays() {
    on_a_steady_machine(async || {
        let watched = Watched::start();
        let scene = Scene::set(&watched).await;
        let primary = watched.primary_index();
        let primary = &watched.servers[primary];
        let url = watched.url();
        watched.sentinels.iter().for_each(Sentinel::stop);
        let others = LockRegistry::builder(RedisStore::connect_lazy(&*url).unwrap())
            .response_timeout(ms(1_000))
            .build()
            .unwrap();
        let told = others.obtain("k").lease_within(ms(8_000)).await;
        let told = chain(&told.unwrap_err());
        assert!(
            told.contains("primary of service \"mine\" not found"),
            "{told}"
        );
        for sentinel in &watched.sentinels {
            assert!(told.contains(&sentinel.port().to_string()), "{told}");
        }
        // Longer than it takes to see that they are silent.
        let connected = primary.clients().len();
        let asking = tokio::time::Instant::now();
        while asking.elapsed() < ANSWER_WITHIN + ms(1_000) {
            scene.holding.obtain("k").inspect().await.unwrap();
            tokio::time::sleep(ms(100)).await;
        }
        assert!(primary.clients().len() <= connected, "nobody connects anew");
        let released = timeout(BOUND, scene.lease.release()).await;
        released.expect("a release ends").unwrap();
        let next = timeout(BOUND, scene.waiter).await.expect("it is served");
        next.unwrap().unwrap().release().await.unwrap();
        watched.sentinels.iter().for_each(Sentinel::cont);
        let lease = others.obtain("k").lease().await.unwrap();
        lease.release().await.unwrap();
    })
    .await;
}

/// What several hold is held at the new primary, and those who wait behind them are served there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_permits_and_groups_survive_the_primary() {
    on_a_steady_machine(async || {
        let mut watched = Watched::start();
        let (holding, waiting) = (
            registry(&watched.url()).await,
            registry(&watched.url()).await,
        );
        let permit = |locks: &LockRegistry, weight| locks.obtain("p").permits_of(3, weight);
        let readers = [
            holding.obtain("r").shared().lease().await.unwrap(),
            waiting.obtain("r").shared().lease().await.unwrap(),
        ];
        let one = permit(&holding, 1).lease().await.unwrap();
        let two = permit(&holding, 2).lease().await.unwrap();
        let group = holding.obtain_all(["g", "h"]).lease().await.unwrap();
        let writer = tokio::spawn(waiting.obtain("r").lease());
        let third = tokio::spawn(permit(&waiting, 1).lease());
        let other_group = tokio::spawn(waiting.obtain_all(["h", "i"]).lease());
        all_wait(watched.primary()).await;
        watched.wait_until_replicated();
        let old = watched.kill_primary();
        watched.wait_until_promoted(old);

        let primary = watched.primary();
        wait_until("both have found the new primary", BOUND, || {
            callers(primary) == 2
        })
        .await;
        all_wait(primary).await;
        assert!(
            readers
                .iter()
                .chain([&one, &two, &group])
                .all(Lease::is_valid)
        );
        assert_eq!(primary.ask::<u64>(&["ZCARD", "lock:r"]), 2);
        assert_eq!(primary.ask::<u64>(&["ZCARD", "lock:p"]), 3);
        assert!(permit(&waiting, 1).lease_once().await.unwrap().is_none());
        assert!(!writer.is_finished() && !third.is_finished() && !other_group.is_finished());

        let newest = readers.iter().map(Lease::token).max();
        for reader in readers {
            released(reader).await;
        }
        let writer = served(writer).await;
        assert!(
            Some(writer.token()) > newest,
            "tokens grow through a fail-over"
        );
        released(two).await;
        let third = served(third).await;
        assert_eq!(primary.ask::<u64>(&["ZCARD", "lock:p"]), 2);
        released(group).await;
        let other_group = served(other_group).await;
        for lease in [writer, one, third, other_group] {
            released(lease).await;
        }
        wait_until("nothing is left", BOUND, || {
            holding.in_use() + waiting.in_use() == 0 && primary.keys("*") == ["lock:~fence"]
        })
        .await;
    })
    .await;
}

async fn all_wait(primary: &RedisServer) {
    for key in ["r", "p", "h"] {
        let queue = format!("{{lock:{key}}}:~queue2");
        wait_until("one waits in each queue", BOUND, || {
            primary.ask::<u64>(&["ZCARD", &queue]) == 1
        })
        .await;
    }
}

async fn served(waiter: JoinHandle<Result<Lease, LockError>>) -> Lease {
    let lease = timeout(BOUND, waiter).await.expect("it is served");
    lease.unwrap().unwrap()
}

async fn released(lease: Lease) {
    let released = timeout(BOUND, lease.release()).await;
    released.expect("a release ends").unwrap();
}
