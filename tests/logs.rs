//! What the log is told of an outage, and how often.
#![cfg(feature = "test-util")]

#[path = "support/hearing.rs"]
mod hearing;

use std::time::Duration;

use hearing::Log;
use lockstream::store::MemoryStore;
use lockstream::{Leadership, LockRegistry};
use tracing::Level;

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

fn registry(store: &MemoryStore) -> LockRegistry {
    let builder = LockRegistry::builder(store.clone()).prefix("shop");
    builder.name("web-1").ttl(secs(9)).build().unwrap()
}

fn lines<'a>(told: &'a [String], word: &str) -> Vec<&'a str> {
    let lines = told.iter().map(String::as_str);
    lines.filter(|line| line.contains(word)).collect()
}

/// A thousand leases were two thousand lines, in each process of a fleet.
#[tokio::test(start_paused = true)]
async fn of_many_losses_the_first_have_lines_and_the_others_are_counted() {
    let (log, store) = (Log::default(), MemoryStore::new());
    let _hearing = log.hear(Level::WARN);
    let locks = registry(&store);
    let mut leases = Vec::new();
    for key in 0..1000 {
        leases.push(locks.obtain(key.to_string()).lease().await.unwrap());
    }
    store.set_offline(true);
    tokio::time::sleep(secs(60)).await;
    let told = log.take();
    for (word, end) in [
        ("lease lost", "lease lost: and"),
        (
            "renewal not confirmed yet",
            "renewal not confirmed yet: and",
        ),
    ] {
        let of_word = lines(&told, word);
        let sums = lines(&told, end);
        // Those of one second, or of two where their deadlines lie on both sides of its end.
        assert!((1..=6).contains(&sums.len()), "{of_word:?}");
        let more: usize = sums
            .iter()
            .map(|line| {
                assert!(line.contains("prefix=\"shop\""), "{line}");
                let (_, more) = line.split_once(": and ").unwrap();
                let (more, _) = more.split_once(" more").unwrap();
                more.parse::<usize>().unwrap()
            })
            .sum();
        assert_eq!(of_word.len() - sums.len() + more, 1000, "{of_word:?}");
        assert!(of_word.len() <= 150, "{}", of_word.len());
    }
    drop(leases);
}

/// The first error stayed the only one in the log, though the cause had changed since.
#[tokio::test(start_paused = true)]
async fn an_outage_is_told_once_a_minute_with_its_registry() {
    let (log, store) = (Log::default(), MemoryStore::new());
    let _hearing = log.hear(Level::INFO);
    let locks = registry(&store);
    let lease = locks.obtain("k").lease().await.unwrap();
    store.set_offline(true);
    tokio::time::sleep(secs(7)).await;
    store.set_offline(false);
    tokio::time::sleep(secs(7)).await;
    lease.release().await.unwrap();
    let told = log.take();
    let outages = lines(&told, "store unreachable");
    assert_eq!(outages.len(), 1, "{told:?}");
    let back = lines(&told, "store reachable again");
    assert_eq!(back.len(), 1, "{told:?}");
    for line in [outages[0], back[0]] {
        assert!(line.contains("prefix=\"shop\" name=\"web-1\""), "{line}");
        assert!(line.contains("away_for="), "{line}");
    }
    assert!(back[0].contains("away_for=7"), "{back:?}");
}

/// A candidate that may not lead wrote twelve lines a minute.
#[tokio::test(start_paused = true)]
async fn a_campaign_that_fails_for_ever_is_told_once_a_minute() {
    use futures::StreamExt;
    let (log, store) = (Log::default(), MemoryStore::new());
    let _hearing = log.hear(Level::WARN);
    let locks = LockRegistry::builder(store).max_waiters(1).build().unwrap();
    let held = locks.obtain("k").lease().await.unwrap();
    let waiting = tokio::spawn(locks.obtain("k").wait(secs(3600)).lease());
    tokio::task::yield_now().await;
    let mut campaign = Box::pin(locks.obtain("k").leadership());
    let following = async {
        while let Some(item) = campaign.next().await {
            assert!(matches!(item, Leadership::Follower), "{item:?}");
        }
    };
    let _ = tokio::time::timeout(secs(150), following).await;
    let told = log.take();
    assert_eq!(lines(&told, "campaign failed").len(), 3, "{told:?}");
    waiting.abort();
    drop(held);
}
