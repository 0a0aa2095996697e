use std::future::ready;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};

use crate::{Floor, ms, two};

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
