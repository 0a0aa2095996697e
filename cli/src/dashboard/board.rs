//! What was seen of the locks of a store, and what has changed from one look to the next.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use lockstream::{InspectedHolder, Inspection, LockError, LockRegistry, Mode};
use serde_json::{Value, json};

/// How long a key that has come free stays on the page, so that a hand-over with a pause in it is still seen as one.
const FREE_FOR: Duration = Duration::from_secs(30);

// How much is sent to the page at most.
const LOCKS: usize = 500;
const HOLDERS_OF_A_LOCK: usize = 8;
const TICKETS_OF_A_LOCK: usize = 6;
const HAND_OVERS: usize = 50;

/// What one look has found. A key is without an inspection if that one could not be read.
type Found = BTreeMap<Arc<str>, Option<Inspection>>;

/// Scans the store once.
pub(crate) async fn look(registry: &LockRegistry) -> Result<Found, LockError> {
    let mut found = BTreeMap::new();
    let mut locks = registry.scan("");
    while let Some(lock) = locks.next().await {
        match lock {
            Ok(lock) => found.insert(lock.key, Some(lock.inspection)),
            // A value of another program. Without a key it is the store that failed.
            Err(error) if !error.key().is_empty() => found.insert(error.key().into(), None),
            Err(error) => return Err(error),
        };
    }
    Ok(found)
}

/// All that was seen. Locks that are gone are forgotten after a while.
#[derive(Debug, Default)]
pub(crate) struct Board {
    locks: BTreeMap<Arc<str>, Seen>,
    /// The newest first.
    hand_overs: VecDeque<HandOver>,
    hand_overs_seen: u64,
}

/// A lock as it was at the last look.
#[derive(Debug)]
struct Seen {
    inspection: Inspection,
    /// Since when each owner holds it, and the longest that its lease was seen to last.
    held: BTreeMap<String, (Instant, Option<Duration>)>,
    /// The registries that held it, when it was last held.
    last: BTreeSet<String>,
    held_at: Instant,
    hand_overs: u64,
}

/// A lock had other holders than at the look before.
#[derive(Debug)]
struct HandOver {
    key: Arc<str>,
    from: Vec<String>,
    to: Vec<String>,
    at: Instant,
}

impl Board {
    /// Takes over what was found at this time.
    pub(crate) fn update(&mut self, found: Found, now: Instant) {
        let unread = found.iter().filter(|(_, inspection)| inspection.is_none());
        let unread: BTreeSet<_> = unread.map(|(key, _)| key.clone()).collect();
        for (key, seen) in &mut self.locks {
            if !found.contains_key(key) {
                seen.come_free();
            }
        }
        for (key, inspection) in found {
            let Some(inspection) = inspection else {
                continue;
            };
            let hand_over = match self.locks.get_mut(&key) {
                Some(seen) => seen.update(inspection, now),
                None => {
                    self.locks.insert(key.clone(), Seen::new(inspection, now));
                    None
                }
            };
            if let Some((from, to)) = hand_over {
                let at = now;
                self.hand_overs_seen += 1;
                self.hand_overs.truncate(HAND_OVERS - 1);
                self.hand_overs.push_front(HandOver { key, from, to, at });
            }
        }
        self.locks.retain(|key, seen| {
            let is_free = seen.held.is_empty() && seen.inspection.waiting == 0;
            !is_free || unread.contains(key) || now.duration_since(seen.held_at) < FREE_FOR
        });
    }

    /// All of it as the page takes it.
    pub(crate) fn to_json(&self, now: Instant) -> Value {
        let locks = self.locks.values();
        let held = locks.clone().filter(|seen| !seen.held.is_empty()).count();
        let waiting: u64 = locks.map(|seen| seen.inspection.waiting).sum();
        // If there are too many, those with the longest queues are shown.
        let mut rows: Vec<_> = self.locks.iter().collect();
        rows.sort_by_key(|(key, seen)| (Reverse(seen.inspection.waiting), *key));
        rows.truncate(LOCKS);
        rows.sort_by_key(|(key, _)| *key);
        let hand_overs = self.hand_overs.iter().map(|it| {
            let age = millis(now.duration_since(it.at));
            json!({ "key": *it.key, "from": it.from, "to": it.to, "age_ms": age })
        });
        json!({
            "held": held,
            "waiting": waiting,
            "hand_overs_seen": self.hand_overs_seen,
            "locks_not_shown": self.locks.len() - rows.len(),
            "locks": rows.iter().map(|(key, seen)| seen.to_json(key, now)).collect::<Vec<_>>(),
            "hand_overs": hand_overs.collect::<Vec<_>>(),
        })
    }
}

impl Seen {
    fn new(inspection: Inspection, now: Instant) -> Self {
        let mut seen = Self {
            inspection: inspection.clone(),
            held: BTreeMap::new(),
            last: BTreeSet::new(),
            held_at: now,
            hand_overs: 0,
        };
        seen.update(inspection, now);
        seen
    }

    fn come_free(&mut self) {
        self.held.clear();
        self.inspection.holders.clear();
        self.inspection.queue.clear();
        self.inspection.waiting = 0;
    }

    /// Yields from whom to whom the lock went, if it did. A registry that joins others who share it takes it from nobody.
    fn update(
        &mut self,
        inspection: Inspection,
        now: Instant,
    ) -> Option<(Vec<String>, Vec<String>)> {
        let held = inspection.holders.iter().map(|holder| {
            let before = self.held.get(&holder.owner);
            let (since, longest) = before.copied().unwrap_or((now, None));
            (holder.owner.clone(), (since, longest.max(holder.remaining)))
        });
        self.held = held.collect();
        self.inspection = inspection;
        if self.held.is_empty() {
            return None;
        }
        self.held_at = now;
        let holds: BTreeSet<String> = self.held.keys().map(|it| registry_of(it).into()).collect();
        let last = std::mem::replace(&mut self.last, holds.clone());
        let names = |registries: BTreeSet<&String>| -> Vec<String> {
            registries
                .into_iter()
                .map(|it| name_of(it).into())
                .collect()
        };
        let from = names(last.difference(&holds).collect());
        let to = names(holds.difference(&last).collect());
        let is_hand_over = !from.is_empty() && !to.is_empty();
        is_hand_over.then(|| {
            self.hand_overs += 1;
            (from, to)
        })
    }

    fn to_json(&self, key: &str, now: Instant) -> Value {
        let Inspection { holders, queue, .. } = &self.inspection;
        let mode = match holders.first().map(|first| first.mode) {
            None => "free".to_owned(),
            Some(Mode::Permits { .. }) => {
                let permits = holders.iter().filter_map(|holder| match holder.mode {
                    Mode::Permits { limit, weight, .. } => Some((limit, u32::from(weight))),
                    _ => None,
                });
                let taken: u32 = permits.clone().map(|(_, weight)| weight).sum();
                // During a rolling update there may be several.
                let limits: BTreeSet<u32> = permits.map(|(limit, _)| limit).collect();
                let limits: Vec<_> = limits.iter().map(u32::to_string).collect();
                format!("permits {taken}/{}", limits.join("|"))
            }
            Some(mode) => mode.to_string(),
        };
        let shown = holders.iter().take(HOLDERS_OF_A_LOCK);
        let tickets = queue.iter().take(TICKETS_OF_A_LOCK).map(
            |ticket| json!({ "name": name_of(&ticket.owner), "mode": ticket.mode.to_string() }),
        );
        json!({
            "key": key,
            "mode": mode,
            "holders": shown.map(|it| self.holder(it, now)).collect::<Vec<_>>(),
            "holders_not_shown": holders.len().saturating_sub(HOLDERS_OF_A_LOCK),
            "queue": tickets.collect::<Vec<_>>(),
            "waiting": self.inspection.waiting,
            "hand_overs": self.hand_overs,
        })
    }

    fn holder(&self, holder: &InspectedHolder, now: Instant) -> Value {
        let (since, longest) = self.held[&holder.owner];
        let lasts = holder.remaining.zip(longest);
        json!({
            "name": name_of(&holder.owner),
            "owner": holder.owner,
            "left_ms": holder.remaining.map(millis),
            "left_of_longest": lasts.map(|(left, longest)| left.as_secs_f64() / longest.as_secs_f64().max(0.001)),
            "held_ms": millis(now.duration_since(since)),
        })
    }
}

fn millis(time: Duration) -> u64 {
    time.as_millis().try_into().unwrap_or(u64::MAX)
}

/// The registry that an owner belongs to: within one, a lock may go from task to task without the store.
fn registry_of(owner: &str) -> &str {
    owner
        .rsplit_once(':')
        .map_or(owner, |(registry, _)| registry)
}

/// The name of that registry. One without a name goes by its random bits.
fn name_of(owner: &str) -> &str {
    let registry = registry_of(owner);
    registry.split_once('~').map_or(registry, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use lockstream::Lease;
    use lockstream::store::MemoryStore;

    use super::*;

    async fn hold(registry: &LockRegistry) -> Lease {
        registry.obtain("till").lease().await.unwrap()
    }

    async fn read(registry: &LockRegistry) -> Lease {
        registry.obtain("till").shared().lease().await.unwrap()
    }

    struct Test {
        board: Board,
        one: LockRegistry,
        two: LockRegistry,
        now: Instant,
    }

    impl Test {
        fn new() -> Self {
            let store = MemoryStore::new();
            let named = |name: &str| {
                LockRegistry::builder(store.clone())
                    .name(name)
                    .build()
                    .unwrap()
            };
            Self {
                board: Board::default(),
                one: named("one"),
                two: named("two"),
                now: Instant::now(),
            }
        }

        /// Looks a second later, and yields all hand-overs, the newest first.
        async fn look(&mut self) -> Vec<String> {
            self.now += Duration::from_secs(1);
            self.board.update(look(&self.one).await.unwrap(), self.now);
            let json = self.board.to_json(self.now);
            let hand_overs = json["hand_overs"].as_array().unwrap().iter();
            let words = |names: &Value| {
                let names = names.as_array().unwrap().iter();
                names
                    .map(|it| it.as_str().unwrap())
                    .collect::<Vec<_>>()
                    .join("+")
            };
            hand_overs
                .map(|it| {
                    format!(
                        "{} {}>{}",
                        it["key"].as_str().unwrap(),
                        words(&it["from"]),
                        words(&it["to"])
                    )
                })
                .collect()
        }

        fn row(&self) -> Value {
            self.board.to_json(self.now)["locks"][0].clone()
        }
    }

    #[tokio::test]
    async fn another_registry_is_a_hand_over_and_another_task_is_none() {
        let mut test = Test::new();
        for _ in 0..3 {
            let lease = hold(&test.one).await;
            assert!(test.look().await.is_empty());
            lease.release().await.unwrap();
        }
        // Free at a look between the two.
        assert!(test.look().await.is_empty());
        assert_eq!(test.row()["mode"], "free");
        let lease = hold(&test.two).await;
        assert_eq!(test.look().await, ["till one>two"]);
        assert_eq!(test.look().await.len(), 1, "it is seen once");
        lease.release().await.unwrap();
        let _lease = hold(&test.one).await;
        assert_eq!(test.look().await, ["till two>one", "till one>two"]);
        assert_eq!(test.row()["hand_overs"], 2);
    }

    #[tokio::test]
    async fn who_joins_takes_the_lock_from_nobody() {
        let mut test = Test::new();
        let first = read(&test.one).await;
        test.look().await;
        let second = read(&test.two).await;
        assert!(test.look().await.is_empty());
        first.release().await.unwrap();
        assert!(test.look().await.is_empty());
        second.release().await.unwrap();
        let lease = hold(&test.one).await;
        assert_eq!(test.look().await, ["till two>one"]);
        drop(lease);
    }

    #[tokio::test]
    async fn times_are_those_since_the_first_look() {
        let mut test = Test::new();
        let lease = hold(&test.one).await;
        for seconds in 0..3 {
            test.look().await;
            let row = test.row();
            assert_eq!(row["holders"][0]["held_ms"], seconds * 1_000);
            assert_eq!(row["holders"][0]["name"], "one");
            let left = row["holders"][0]["left_ms"].as_u64().unwrap();
            assert!((1..=30_000).contains(&left), "{left}");
        }
        lease.release().await.unwrap();
        test.look().await;
        assert_eq!(test.row()["holders"], json!([]));
        for _ in 0..FREE_FOR.as_secs() {
            test.look().await;
        }
        assert_eq!(test.row(), Value::Null, "it is forgotten");
    }

    #[test]
    fn owners_have_names() {
        for (owner, name) in [
            ("till-1~3f9a:42", "till-1"),
            ("3f9a:42", "3f9a"),
            ("somebody", "somebody"),
            ("", ""),
        ] {
            assert_eq!(name_of(owner), name, "{owner}");
        }
    }
}
