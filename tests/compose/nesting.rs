use std::future::ready;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use tokio::time::sleep;

use crate::{Floor, is_free, ms, two};

/// Two keys at once, by whoever, in sorted order: nobody waits for one who waits for him.
#[tokio::test(start_paused = true)]
async fn two_keys_in_sorted_order() {
    let (_, here, there) = two();
    let floors = [(); 3].map(|()| Floor::default());
    let accounts = ["a", "b", "c"];
    let transfer = async |registry: &LockRegistry, from: usize, to: usize| {
        let (first, second) = (from.min(to), from.max(to));
        let work = async {
            tokio::join!(floors[from].cross(), floors[to].cross());
        };
        work.with_lock((registry, accounts[second]))
            .try_with_lock((registry, accounts[first]))
            .await
    };
    let transfer = &transfer;
    let all = stream::iter(0..60).map(|i| {
        let registry = [&here, &there][i % 2];
        transfer(registry, i % 3, (i + 1 + i / 3 % 2) % 3)
    });
    let done: Vec<_> = all.buffer_unordered(12).collect().await;
    for outcome in done {
        outcome.unwrap();
    }
    assert_eq!((here.in_use(), there.in_use()), (0, 0));
}

/// A group that waits for its last key loses another. What it has before that one stays its own all the while.
#[tokio::test(start_paused = true)]
async fn a_key_that_is_lost_takes_none_of_those_before_it_along() {
    let (store, here, there) = two();
    let last = there.obtain("c").lease().await.unwrap();
    let group = here.obtain_all(["a", "b", "c"]);
    let owner = async |key: &str| {
        let seen = there.obtain(key).inspect().await.unwrap();
        seen.owner().map(str::to_owned)
    };
    let meanwhile = async {
        sleep(ms(10)).await;
        let (first, lost) = (owner("a").await, owner("b").await);
        assert!(first.is_some() && lost.is_some());
        store.expire("b");
        // The renewal at a third of the ttl finds the loss.
        sleep(ms(11_000)).await;
        let again = owner("b").await;
        assert!(again.is_some() && again != lost, "{again:?}");
        assert_eq!(owner("a").await, first);
        last.release().await.unwrap();
    };
    let (lease, ()) = tokio::join!(group.lease_within(ms(60_000)), meanwhile);
    let lease = lease.unwrap();
    assert!(lease.is_valid());
    lease.release().await.unwrap();
}

/// The last key is had, and the first was lost just before. That is found out when the lease of both begins, and ends it:
/// nobody has to look at it for that.
#[tokio::test(start_paused = true)]
async fn a_key_that_is_lost_as_its_group_is_complete_ends_the_group() {
    let (store, here, there) = two();
    let last = there.obtain("b").lease().await.unwrap();
    let group = here.obtain_all(["a", "b"]).ttl(ms(9_000));
    let mut waits = Box::pin(group.lease_within(ms(60_000)));
    assert!(futures::poll!(&mut waits).is_pending());
    sleep(ms(1_000)).await;
    store.expire("a");
    last.release().await.unwrap();
    let lease = waits.await.unwrap();
    assert!(is_free(&there, "b").await);
    assert!(!lease.is_valid());
    assert!(lease.release().await.unwrap_err().is_lost());
}

struct NeverBusy;

impl From<LockError> for NeverBusy {
    fn from(error: LockError) -> Self {
        panic!("{error}")
    }
}

/// The "busy" that is skipped is nobody's error, so it is not made one either.
#[tokio::test(start_paused = true)]
async fn or_skip_does_not_convert_the_skipped_error() {
    let (_, here, there) = two();
    let _held = there.obtain("k").lease().await.unwrap();
    let lock = here.obtain("k").wait(ms(5));
    let work = || ready(Ok::<_, NeverBusy>(1));
    let told = work().try_with_lock(&lock).or_skip().await;
    assert!(matches!(told, Ok(None)));
    let told = lock.try_with_lease(|_| work()).or_skip().await;
    assert!(matches!(told, Ok(None)));
    let rows = StreamLockExt::try_with_lock(stream::once(work()), &lock);
    assert_eq!(rows.or_skip().count().await, 0);
    let rows = lock.try_with_lease_stream(|_| stream::once(work()));
    assert_eq!(rows.or_skip().count().await, 0);
}
