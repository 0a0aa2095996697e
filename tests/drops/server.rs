use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lockstream::{Lease, LockRegistry};
use tokio::runtime::Handle;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::cut::{Cut, Then};
use crate::lock_server::{LockServer, nothing_left, registry_builder};
use crate::support::wait_until;
use crate::victims::{ENTERING, Floor, Kind, Make};

/// For what takes a round trip or two on an idle machine; far below a ttl, and before a waiter asks by itself, after 8 s
/// (W2).
const BOUND: Duration = Duration::from_secs(7);

/// Most cuts come long before; those that do not differ in nothing but the work.
const MOST_POLLS: usize = 20;

crate::on_each_server! {
    #[tokio::test] {
        dropped_at_every_poll_on_a_server,
        a_reader_dropped_at_every_poll_on_a_server,
        a_permit_dropped_at_every_poll_on_a_server,
        a_group_dropped_at_every_poll_on_a_server,
        a_connect_that_is_dropped_leaves_no_connection,
        a_registry_dropped_amid_everything_gives_all_of_it_back,
    }
}

async fn registry(server: &impl LockServer) -> LockRegistry {
    let minute = Duration::from_secs(60);
    let builder = registry_builder(&server.url()).await;
    builder.ttl(minute).wait(minute).build().unwrap()
}

struct World {
    here: LockRegistry,
    there: LockRegistry,
    behind: LockRegistry,
}

async fn served(what: &str, registry: &LockRegistry, key: &str) -> Lease {
    let lease = timeout(BOUND, registry.obtain(key).lease()).await;
    lease
        .unwrap_or_else(|_| panic!("{what}: the next waiter is not served"))
        .unwrap()
}

/// One victim, one cut; whether it was done before.
async fn drop_one(world: &World, make: Make, kind: Kind, held: bool, cut: Cut, what: &str) -> bool {
    let key = what;
    let floor = Floor::default();
    let holder = if held {
        Some(served(what, &world.there, key).await)
    } else {
        None
    };
    let first = holder.as_ref().map(Lease::token);
    // A task of its own: it must not wake the victim.
    let release = tokio::task::spawn_local(async move {
        if let Some(lease) = holder {
            sleep(Duration::from_millis(8)).await;
            lease.release().await.unwrap();
        }
    });
    let lock = kind.lock(&world.here, key);
    let output = cut.drive(make(&lock, floor.clone())).await;
    let done = output.is_some();
    drop((output, lock));
    release.await.unwrap();
    let lease = served(what, &world.behind, key).await;
    let _standing = floor.enter();
    assert!(Some(lease.token()) > first, "{what}: tokens do not grow");
    lease.release().await.unwrap();
    done
}

async fn dropped_at_every_poll_on_a_server<S: LockServer>() {
    drop_at_every_poll::<S>(Kind::Exclusive).await;
}

async fn a_reader_dropped_at_every_poll_on_a_server<S: LockServer>() {
    drop_at_every_poll::<S>(Kind::Reader).await;
}

async fn a_permit_dropped_at_every_poll_on_a_server<S: LockServer>() {
    drop_at_every_poll::<S>(Kind::Permit).await;
}

async fn a_group_dropped_at_every_poll_on_a_server<S: LockServer>() {
    drop_at_every_poll::<S>(Kind::Group).await;
}

async fn drop_at_every_poll<S: LockServer>(kind: Kind) {
    let server = S::start();
    let tasks = Handle::current().metrics().num_alive_tasks();
    let world = World {
        here: registry(&server).await,
        there: registry(&server).await,
        behind: registry(&server).await,
    };
    let local = LocalSet::new();
    let mut all = FuturesUnordered::new();
    let shared = std::rc::Rc::new(world);
    for (name, make) in ENTERING {
        for held in [false, true] {
            for then in [Then::AtOnce, Then::WhenWoken] {
                let world = shared.clone();
                all.push(local.spawn_local(async move {
                    for polls in 0..MOST_POLLS {
                        let cut = Cut { polls, then };
                        let held_or_free = if held { "held" } else { "free" };
                        let what =
                            format!("{name}, {held_or_free}, {cut:?}").replace(['{', '}'], "|");
                        if drop_one(&world, *make, kind, held, cut, &what).await {
                            return polls;
                        }
                    }
                    MOST_POLLS
                }));
            }
        }
    }
    let cuts = local.run_until(async {
        let mut cuts = 0;
        while let Some(polls) = all.next().await {
            cuts += polls.unwrap();
        }
        cuts
    });
    let cuts = cuts.await;
    assert!(cuts > ENTERING.len() * 6, "{cuts} cuts");
    drop((all, local));
    let world = std::rc::Rc::into_inner(shared).unwrap();
    nothing_left(&server, &[&world.here, &world.there, &world.behind]).await;
    drop(world);
    wait_until("connections end", BOUND, || server.connections() == 0).await;
    wait_until("tasks end", BOUND, || {
        Handle::current().metrics().num_alive_tasks() == tasks
    })
    .await;
}

async fn a_connect_that_is_dropped_leaves_no_connection<S: LockServer>() {
    let server = S::start();
    let tasks = Handle::current().metrics().num_alive_tasks();
    for then in [Then::AtOnce, Then::WhenWoken] {
        for polls in 0.. {
            assert!(polls < 200, "it never ends");
            let connected = Cut { polls, then }
                .drive(LockRegistry::connect(server.url()))
                .await;
            let done = connected.is_some();
            if let Some(connected) = connected {
                assert!(connected.unwrap().obtain("k").acquire_once().await.unwrap());
            }
            wait_until("connections end", BOUND, || server.connections() == 0).await;
            if done {
                break;
            }
        }
    }
    wait_until("tasks end", BOUND, || {
        Handle::current().metrics().num_alive_tasks() == tasks
    })
    .await;
}

/// Dropped as a whole while much is under way: the connection stays until what is owed has been released.
async fn a_registry_dropped_amid_everything_gives_all_of_it_back<S: LockServer>() {
    let server = S::start();
    let there = registry(&server).await;
    for round in 0..10 {
        let here = registry(&server).await;
        let begin = Instant::now();
        let mut held = Vec::new();
        let mut waiting = FuturesUnordered::new();
        for key in 0..10 {
            held.push(there.obtain(format!("busy {key}")).lease().await.unwrap());
            waiting.push(here.obtain(format!("busy {key}")).lease());
            waiting.push(here.obtain(format!("free {key}")).lease());
        }
        // From "nothing sent yet" to "everything answered".
        let _ = timeout(Duration::from_micros(300 * round), waiting.next()).await;
        drop((here, waiting));
        drop(held);
        for kind in ["busy", "free"] {
            for key in 0..10 {
                let lease = served("all given back", &there, &format!("{kind} {key}")).await;
                lease.release().await.unwrap();
            }
        }
        wait_until("one connection is left", BOUND, || {
            server.connections() == 1
        })
        .await;
        assert_eq!(server.leftovers(), [""; 0], "after {:?}", begin.elapsed());
    }
}
