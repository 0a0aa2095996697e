use tokio::time::timeout;

use crate::flock::registry;
use crate::support::{FAIL_OVER, Watched, on_a_steady_machine, wait_until};
use crate::{BOUND, ms};

/// Nobody waits until the replicas have it, but the acquisition itself; and the connection that asks follows to the
/// new primary.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirmed_lock_survives_the_primary() {
    on_a_steady_machine(async || {
        let mut watched = Watched::start();
        let url = watched.url();
        let (holding, other) = (
            registry(&url, 2, ms(5_000)).await,
            registry(&url, 1, ms(5_000)).await,
        );
        // Both its connections stand, and are needed.
        let lease = other.obtain("other").lease().await.unwrap();
        lease.release().await.unwrap();
        let kept = other.obtain("kept").lease().await.unwrap();
        let lease = holding.obtain("k").lease().await.unwrap();
        let old = watched.kill_primary();
        watched.wait_until_promoted(old);
        let primary = watched.primary();
        assert!(primary.exists("lock:k"));
        wait_until("it is found there", FAIL_OVER, || {
            // Sentinels listen there, too.
            let channels = primary.channels();
            channels.iter().filter(|it| it.contains("~grant:")).count() == 2
        })
        .await;
        assert!(lease.is_valid());
        // One replica is left.
        let next = timeout(FAIL_OVER, other.obtain("other").lease()).await;
        let next = next.expect("it is confirmed by the new primary").unwrap();
        assert!(primary.exists("lock:other") && primary.calls("wait") > 0);
        next.release().await.unwrap();
        kept.release().await.unwrap();
        assert!(lease.is_valid());
        let released = timeout(BOUND, lease.release()).await;
        released
            .expect("a release ends")
            .expect("it was held to the end");
        wait_until("nothing is left", BOUND, || {
            primary.keys("*") == ["lock:~fence"]
        })
        .await;
    })
    .await;
}
