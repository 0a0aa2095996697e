//! Registries that contend for one key while nodes break, and a referee: no two hold validly at
//! once, tokens grow, and nothing is left when all is over.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::nodes::{Node, ms, owners};
use crate::base::Renewal;
use crate::handle::{LeaseView, LockRegistry};
use crate::store::QuorumStore;

/// What breaks in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Profile {
    /// Messages take their time.
    Slow,
    /// Nodes go away, stop answering, break their connections: now and then more than may be spared.
    Outages,
    /// Replies are lost and ops refused.
    Lossy,
    /// Nodes are started again without their data, and are kept out for a while.
    Forgetful,
    /// One clock jumps, of an even number.
    Jumpy,
}

/// splitmix64.
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % below
    }

    fn ms(&mut self, low: u64, high: u64) -> Duration {
        ms(low + self.below(high - low))
    }
}

#[derive(Default)]
struct Referee {
    holder: Option<LeaseView>,
    token: u64,
    leases: u32,
    losses: u32,
}

impl Referee {
    fn enters(&mut self, lease: LeaseView) {
        if let Some(holder) = &self.holder {
            assert!(!holder.is_valid(), "two hold: {holder:?} and {lease:?}");
        }
        assert!(
            lease.token().get() > self.token,
            "{} after {}",
            lease.token(),
            self.token
        );
        self.token = lease.token().get();
        self.holder = Some(lease);
        self.leases += 1;
    }
}

/// The longest ttl in use, and for how long a node that forgot is kept out.
const LONGEST: Duration = ms(4000);

async fn work(registry: LockRegistry, mut dice: Dice, referee: Arc<Mutex<Referee>>) {
    for _ in 0..12 {
        let renewal = [Renewal::watchdog(), Renewal::off()][dice.below(2) as usize];
        let ttl = dice.ms(500, 4000);
        let lock = registry.obtain("k").ttl(ttl).renewal(renewal);
        let lock = lock.wait(dice.ms(1, 4000));
        // Dropped at any moment, as a caller's own time-out does.
        let patience = dice.ms(0, 8000);
        if let Ok(Ok(lease)) = timeout(patience, lock.lease()).await {
            referee.lock().unwrap().enters(lease.view());
            let span = dice.ms(0, 3000);
            if timeout(span, lease.lost()).await.is_ok() {
                referee.lock().unwrap().losses += 1;
            }
            if dice.below(2) == 0 {
                let _ = lease.release().await;
            }
        }
        sleep(dice.ms(0, 100)).await;
    }
}

/// Breaks nodes for ever.
async fn breakage(nodes: Vec<Node>, profile: Profile, mut dice: Dice) {
    loop {
        sleep(dice.ms(50, 800)).await;
        let node = &nodes[dice.below(nodes.len() as u64) as usize];
        match (profile, dice.below(4)) {
            (Profile::Slow | Profile::Lossy, _) => node.break_all(),
            (Profile::Jumpy, 0) => nodes[0].jump(dice.ms(1, 5000)),
            (Profile::Forgetful, 0 | 1) => node.forget(),
            (_, 0) => node.go_away(),
            (_, 1) => node.get_stuck(),
            (_, 2) => node.break_all(),
            _ => node.come_back(),
        }
        if dice.below(4) == 0 {
            nodes.iter().for_each(Node::come_back);
        }
    }
}

async fn run(profile: Profile, size: usize, seed: u64) -> Referee {
    let mut dice = Dice(seed);
    let nodes = Node::many(size);
    for node in &nodes {
        node.set_delay(dice.ms(0, 60));
        if profile == Profile::Lossy {
            node.set_faults(dice.below(1 << 40), 30, 60);
        }
    }
    let mut store = QuorumStore::new(nodes.clone()).unwrap();
    if profile == Profile::Forgetful {
        store = store.quarantine(LONGEST);
    }
    let registry = || {
        let builder = LockRegistry::builder(store.clone());
        builder.response_timeout(ms(300)).build().unwrap()
    };
    let registries: Vec<_> = std::iter::repeat_with(registry).take(3).collect();
    let referee = Arc::<Mutex<Referee>>::default();
    let breaking = tokio::spawn(breakage(nodes.clone(), profile, Dice(seed ^ 1)));
    let mut workers = Vec::new();
    for registry in &registries {
        for _ in 0..2 {
            let dice = Dice(dice.below(u64::MAX));
            workers.push(tokio::spawn(work(registry.clone(), dice, referee.clone())));
        }
    }
    for worker in workers {
        worker.await.unwrap();
    }
    breaking.abort();
    let _ = breaking.await;
    for node in &nodes {
        node.set_faults(1, 0, 0);
        node.come_back();
    }
    // All is well again, and whoever comes now is served before anything could have run out.
    let begin = Instant::now();
    if profile != Profile::Forgetful {
        let lease = registries[0]
            .obtain("k")
            .ttl(LONGEST)
            .lease_within(ms(3000))
            .await;
        lease.unwrap().release().await.unwrap();
    }
    for registry in &registries {
        timeout(ms(3000), registry.shutdown())
            .await
            .expect("a shutdown ends");
    }
    while nodes.iter().any(|node| node.keys() > 0) {
        let left = owners(&nodes, "k");
        assert!(begin.elapsed() < ms(3500), "left behind: {left:?}");
        sleep(ms(10)).await;
    }
    let mut referee = referee.lock().unwrap();
    std::mem::take(&mut *referee)
}

async fn runs(profile: Profile, sizes: impl IntoIterator<Item = usize> + Clone) {
    let (mut leases, mut losses) = (0, 0);
    for seed in 0..12 {
        for size in sizes.clone() {
            println!("{profile:?}, {size} nodes, seed {seed}");
            let referee = run(profile, size, seed * 100 + size as u64).await;
            leases += referee.leases;
            losses += referee.losses;
        }
    }
    println!("{profile:?}: {leases} leases, {losses} lost");
    assert!(leases > 100, "{leases} leases are no test");
}

#[tokio::test(start_paused = true)]
async fn slow_nodes() {
    runs(Profile::Slow, 1..=5).await;
}

#[tokio::test(start_paused = true)]
async fn nodes_that_go_away_and_stop_answering() {
    runs(Profile::Outages, 1..=5).await;
}

#[tokio::test(start_paused = true)]
async fn lost_replies_and_refusals() {
    runs(Profile::Lossy, 1..=5).await;
}

#[tokio::test(start_paused = true)]
async fn nodes_that_forget_and_are_kept_out() {
    runs(Profile::Forgetful, 2..=5).await;
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_jumps() {
    runs(Profile::Jumpy, [4]).await;
}
