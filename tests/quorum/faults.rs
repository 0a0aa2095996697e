//! What breaks between a registry and some of its servers, or ends beside it.

use std::cell::Cell;
use std::time::Duration;

use lockstream::store::{QuorumStore, RedisStore};
use lockstream::{Lease, LockError, LockRegistry, Renewal};
use tokio::time::{Instant, timeout};

use super::support::{Proxy, RedisServer, Way, chain, on_a_steady_machine, wait_until};
use super::{BOUND, builder, ms, nothing_left, servers, settle, values};

/// A connection of its own to each of them.
fn wired(servers: &[RedisServer]) -> (Vec<Proxy>, LockRegistry) {
    let wires: Vec<_> = servers.iter().map(Proxy::to).collect();
    let nodes = wires
        .iter()
        .map(|wire| RedisStore::connect_lazy(wire.url()).unwrap());
    let store = QuorumStore::new(nodes).unwrap().quarantine(None);
    let registry = settle(store).response_timeout(ms(300));
    (wires, registry.build().unwrap())
}

async fn renewed(registry: &LockRegistry, ttl: Duration) -> Lease {
    let lock = registry.obtain("k").ttl(ttl).renewal(Renewal::watchdog());
    timeout(BOUND, lock.lease()).await.unwrap().unwrap()
}

/// One wire after the other is cut, swallows everything, or half of it: a majority is always there.
#[tokio::test]
async fn one_wire_after_the_other_breaks() {
    let servers = servers(3);
    let (wires, here) = wired(&servers);
    let there = builder(&servers).build().unwrap();
    let lease = renewed(&here, ms(9000)).await;
    for (at, wire) in wires.iter().enumerate() {
        let before = lease.deadline();
        match at {
            0 => wire.cut(),
            1 => wire.blackhole(Way::Both, true),
            _ => wire.half_close(Way::ToServer),
        }
        wait_until("renewed by the others", BOUND, || {
            lease.deadline() > before + ms(600)
        })
        .await;
        assert!(!there.obtain("k").acquire_once().await.unwrap());
        wire.blackhole(Way::Both, false);
        wire.cut();
        wait_until("it has its vote again", BOUND, || {
            values(&servers).iter().all(Option::is_some)
        })
        .await;
    }
    assert!(lease.is_valid());
    lease.release().await.unwrap();
    nothing_left(&servers, &[&here, &there]).await;
}

/// It is told by its own clock, before anybody else has the lock.
#[tokio::test]
async fn cut_off_from_a_majority_for_longer_than_the_ttl() {
    let servers = servers(3);
    let (wires, here) = wired(&servers);
    let there = builder(&servers).build().unwrap();
    let lease = renewed(&here, ms(1000)).await;
    let token = lease.token();
    for wire in &wires[..2] {
        wire.blackhole(Way::Both, true);
    }
    let waiter = tokio::spawn(there.obtain("k").lease());
    let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
    let taken = Instant::now();
    assert!(timeout(BOUND, lease.lost()).await.unwrap().is_lost());
    // Which of the two is seen first is up to the runtime. The holder believes in its lease until the deadline.
    let deadline = lease.deadline();
    assert!(deadline <= taken, "two held for {:?}", deadline - taken);
    assert!(next.token() > token);
    next.release().await.unwrap();
    for wire in &wires {
        wire.refuse();
        wire.cut();
        wire.blackhole(Way::Both, false);
        wire.accept();
    }
    nothing_left(&servers, &[&here, &there]).await;
}

/// Of four two are no majority, and three are.
#[tokio::test]
async fn half_of_an_even_number_is_away() {
    // Also if the machine stands still.
    let too_early = Cell::new(false);
    on_a_steady_machine(async || {
        let mut servers = servers(4);
        let (here, there) = (
            builder(&servers).build().unwrap(),
            builder(&servers).build().unwrap(),
        );
        let lease = renewed(&here, ms(4000)).await;
        wait_until("all have voted", BOUND, || {
            values(&servers).iter().all(Option::is_some)
        })
        .await;
        servers[0].kill();
        let before = lease.deadline();
        wait_until("renewed by three", BOUND, || {
            lease.deadline() > before + ms(1200)
        })
        .await;
        servers[1].kill();
        let error = there.obtain("k").acquire_once().await.unwrap_err();
        assert!(matches!(error, LockError::Store { .. }), "{error}");
        assert!(chain(&error).contains("no majority of 3"), "{error:?}");
        let until = lease.deadline();
        assert!(timeout(BOUND, lease.lost()).await.unwrap().is_lost());
        too_early.set(too_early.get() || Instant::now() < until);
        assert!(!too_early.get(), "told before its deadline");
        servers[0].restart();
        servers[1].restart();
        let next = timeout(BOUND, there.obtain("k").lease()).await;
        next.unwrap().unwrap().release().await.unwrap();
        nothing_left(&servers, &[&here, &there]).await;
    })
    .await;
    assert!(!too_early.get(), "told before its deadline");
}

/// Its tasks and connections end, as those of a process that is killed, and it says nothing.
#[tokio::test]
async fn the_lock_of_a_crashed_holder_comes_when_its_ttl_is_over() {
    let servers = servers(3);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let gone = builder(&servers).build().unwrap();
    let lock = gone.obtain("k").ttl(ms(1500)).renewal(Renewal::watchdog());
    let held = runtime.spawn(async move { lock.lease().await.unwrap() });
    let held = held.await.unwrap();
    let token = held.token();
    runtime.shutdown_background();
    // Nobody renews it any more.
    let deadline = held.deadline();
    let there = builder(&servers).build().unwrap();
    let next = timeout(BOUND, there.obtain("k").lease());
    let next = next.await.unwrap().unwrap();
    assert!(
        Instant::now() >= deadline,
        "{:?} too early",
        deadline.elapsed()
    );
    assert!(next.token() > token);
    std::mem::forget((held, gone));
    next.release().await.unwrap();
    nothing_left(&servers, &[&there]).await;
}

/// A plain lock on two of three, or a registry that uses one of them by itself.
#[tokio::test]
async fn others_on_the_servers() {
    let servers = servers(3);
    let here = builder(&servers).build().unwrap();
    for server in &servers[..2] {
        server.set("lock:k", "foreign");
    }
    assert!(!here.obtain("k").acquire_once().await.unwrap());
    let asked = || servers[0].calls("evalsha");
    let before = asked();
    let waiter = tokio::spawn(here.obtain("k").lease());
    wait_until("it has asked again", BOUND, || asked() > before + 1).await;
    assert!(!waiter.is_finished());
    // Nobody tells of that.
    servers[0].del("lock:k");
    let lease = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
    servers[1].del("lock:k");
    lease.release().await.unwrap();

    let alone = RedisStore::connect(servers[0].url()).await.unwrap();
    let alone = settle(alone).build().unwrap();
    let minority = alone.obtain("k").lease().await.unwrap();
    let lease = timeout(BOUND, here.obtain("k").lease()).await;
    let lease = lease.unwrap().unwrap();
    minority.release().await.unwrap();
    lease.release().await.unwrap();
    nothing_left(&servers, &[&here, &alone]).await;
}

#[tokio::test]
async fn scripts_flushed_and_connections_killed() {
    let servers = servers(3);
    let here = builder(&servers).build().unwrap();
    let lease = renewed(&here, ms(6000)).await;
    for server in &servers {
        server.script_flush();
        server.client_kill_all();
    }
    let before = lease.deadline();
    wait_until("renewed", BOUND, || lease.deadline() > before + ms(600)).await;
    lease.release().await.unwrap();
    nothing_left(&servers, &[&here]).await;
}

/// A majority is started again, with what it had.
#[tokio::test]
async fn started_again_with_its_data() {
    let server = || RedisServer::builder().keep_data().start();
    let mut servers: Vec<_> = std::iter::repeat_with(server).take(3).collect();
    let (here, there) = (
        builder(&servers).build().unwrap(),
        builder(&servers).build().unwrap(),
    );
    // Servers take a while to start on a busy machine.
    let lease = renewed(&here, ms(9000)).await;
    wait_until("all have voted", BOUND, || {
        values(&servers).iter().all(Option::is_some)
    })
    .await;
    servers[0].restart();
    servers[1].restart();
    assert!(!there.obtain("k").acquire_once().await.unwrap_or(false));
    let before = lease.deadline();
    wait_until("renewed", BOUND, || lease.deadline() > before + ms(2000)).await;
    lease.release().await.unwrap();
    let next = timeout(BOUND, there.obtain("k").lease()).await;
    next.unwrap().unwrap().release().await.unwrap();
    nothing_left(&servers, &[&here, &there]).await;
}

/// Servers close connections on which nothing is said. The registry was idle, and made none before the next caller came;
/// and that one's question was sent nowhere, since all nodes were down. So it was for ever.
#[tokio::test]
async fn connections_lost_while_idle_are_made_again() {
    let servers = servers(3);
    let locks = builder(&servers).build().unwrap();
    for _ in 0..2 {
        let lease = timeout(BOUND, locks.obtain("k").lease()).await;
        lease.unwrap().unwrap().release().await.unwrap();
        nothing_left(&servers, &[&locks]).await;
        for server in &servers {
            server.client_kill_all();
        }
        tokio::time::sleep(ms(300)).await;
    }
    locks.shutdown().await;
}

/// A node that is down at the release is told when it is back, though nothing is in use by then.
#[tokio::test]
async fn a_node_that_is_back_releases_its_lock_though_nothing_is_in_use() {
    let servers = servers(3);
    let (wires, locks) = wired(&servers);
    let lock = locks.obtain("k").ttl(Duration::from_secs(3600));
    let lease = timeout(BOUND, lock.lease()).await.unwrap().unwrap();
    wait_until("all have voted", BOUND, || {
        values(&servers).iter().all(Option::is_some)
    })
    .await;
    wires[2].refuse();
    wires[2].cut();
    lease.release().await.unwrap();
    wait_until("idle", BOUND, || locks.in_use() == 0).await;
    // Two attempts to connect fail meanwhile, or more.
    tokio::time::sleep(ms(1500)).await;
    wires[2].accept();
    nothing_left(&servers, &[&locks]).await;
}
