use std::time::Duration;

use lockstream::store::MemoryStore;
use lockstream::{Lease, LockRegistry, Token};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use crate::cut::{Cut, Then};
use crate::victims::{ENTERING, Floor, Kind, Make};

pub(crate) const KEY: &str = "contended";
pub(crate) const LATENCY: Duration = Duration::from_millis(4);

/// Long enough for whatever is under way, and far shorter than a ttl.
pub(crate) const SOON: Duration = Duration::from_millis(4 * 4);

/// Who has the key when the victim comes.
#[derive(Clone, Copy, Debug)]
enum Holder {
    Nobody,
    /// Another process.
    There,
    /// Another task of the victim's own registry.
    Here,
}

/// Three processes on one store.
pub(crate) struct World {
    pub(crate) store: MemoryStore,
    pub(crate) here: LockRegistry,
    pub(crate) there: LockRegistry,
    pub(crate) behind: LockRegistry,
    tasks: usize,
}

impl World {
    pub(crate) fn new() -> Self {
        let tasks = Handle::current().metrics().num_alive_tasks();
        let store = MemoryStore::new();
        store.set_latency(LATENCY);
        let registry = || {
            LockRegistry::builder(store.clone())
                .ttl(Duration::from_secs(9))
                .wait(Duration::from_secs(60))
                .build()
                .unwrap()
        };
        let (here, there, behind) = (registry(), registry(), registry());
        Self {
            store,
            here,
            there,
            behind,
            tasks,
        }
    }

    /// Nothing is held, waited for, kept or running any more; `last` was the last token.
    pub(crate) async fn assert_clean(self, last: Token, what: &str) {
        let probe = self.behind.obtain(KEY).lease_once().await.unwrap();
        let probe = probe.unwrap_or_else(|| panic!("{what}: the key is not free"));
        assert!(probe.token() > last, "{what}: tokens do not grow");
        probe.release().await.unwrap();
        eventually(&format!("{what}: a key stays in use"), || {
            [&self.here, &self.there, &self.behind]
                .iter()
                .all(|it| it.in_use() == 0)
        })
        .await;
        assert_eq!(self.store.keys(), 0, "{what}: something stays in the store");
        let tasks = self.tasks;
        drop(self);
        eventually(&format!("{what}: a task stays"), || {
            Handle::current().metrics().num_alive_tasks() == tasks
        })
        .await;
    }
}

pub(crate) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < SOON, "{what}");
        sleep(Duration::from_millis(1)).await;
    }
}

/// Holds for a while, and tells when the key was free again.
async fn hold(lease: Option<Lease>, floor: Floor) -> (Option<Token>, Instant) {
    let Some(lease) = lease else {
        return (None, Instant::now());
    };
    let standing = floor.enter();
    sleep(3 * LATENCY).await;
    drop(standing);
    let token = lease.token();
    lease.release().await.unwrap();
    (Some(token), Instant::now())
}

/// Comes after the victim, and tells when it got the key.
async fn come_behind(registry: LockRegistry, floor: Floor) -> (Token, Instant) {
    sleep(Duration::from_millis(1)).await;
    let lease = registry.obtain(KEY).lease().await.unwrap();
    let at = Instant::now();
    let standing = floor.enter();
    tokio::task::yield_now().await;
    drop(standing);
    let token = lease.token();
    lease.release().await.unwrap();
    (token, at)
}

/// One victim, one cut; whether it was done before.
async fn drop_one(make: Make, kind: Kind, holder: Holder, cut: Cut, what: &str) -> bool {
    let world = World::new();
    let floor = Floor::default();
    let held = match holder {
        Holder::Nobody => None,
        Holder::There => Some(world.there.obtain(KEY).lease().await.unwrap()),
        Holder::Here => Some(world.here.obtain(KEY).lease().await.unwrap()),
    };
    let holding = tokio::spawn(hold(held, floor.clone()));
    let behind = tokio::spawn(come_behind(world.behind.clone(), floor.clone()));

    let lock = kind.lock(&world.here, KEY);
    let output = cut.drive(make(&lock, floor)).await;
    let done = output.is_some();
    drop((output, lock));
    let cut_at = Instant::now();

    let (held_token, free_at) = holding.await.unwrap();
    let (token, served_at) = timeout(Duration::from_secs(30), behind)
        .await
        .unwrap_or_else(|_| panic!("{what}: the next waiter is never served"))
        .unwrap();
    let late = served_at.saturating_duration_since(cut_at.max(free_at));
    assert!(
        late <= SOON,
        "{what}: the next waiter is served {late:?} late"
    );
    assert!(Some(token) > held_token, "{what}: tokens do not grow");
    world.assert_clean(token, what).await;
    done
}

const THENS: [Then; 5] = [
    Then::AtOnce,
    Then::After(Duration::from_millis(1)),
    Then::After(Duration::from_millis(3)),
    Then::After(Duration::from_millis(30)),
    Then::WhenWoken,
];

/// Every victim at every cut, until it is done before the cut.
async fn drop_everywhere(holder: Holder) {
    for kind in Kind::ALL {
        let mut cuts = 0;
        for (name, make) in ENTERING {
            for then in THENS {
                for polls in 0.. {
                    assert!(polls < 100, "{name} never ends");
                    let cut = Cut { polls, then };
                    let what = format!("{name}, {kind:?}, {holder:?}, {cut:?}");
                    cuts += 1;
                    if drop_one(*make, kind, holder, cut, &what).await {
                        break;
                    }
                }
            }
        }
        assert!(cuts > ENTERING.len() * 12, "{cuts} cuts of {kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_while_the_key_is_free() {
    drop_everywhere(Holder::Nobody).await;
}

#[tokio::test(start_paused = true)]
async fn dropped_while_another_process_holds() {
    drop_everywhere(Holder::There).await;
}

#[tokio::test(start_paused = true)]
async fn dropped_while_another_task_of_the_process_holds() {
    drop_everywhere(Holder::Here).await;
}
