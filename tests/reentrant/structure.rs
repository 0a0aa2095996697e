//! What is polled inside is inside, however the work is built.

use std::convert::Infallible;
use std::future::pending;
use std::task::Poll;

use futures::future::{BoxFuture, join_all, ready};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use lockstream::{FutureLockExt, Lease, LockError, StreamLockExt, Token};
use tokio::task::yield_now;

use crate::scene::{KEY, Scene, World};

pub(crate) async fn three_deep_through_select<W: World>(s: &Scene<W>) {
    let inmost = async {
        tokio::select! {
            biased;
            () = pending() => unreachable!(),
            token = async {
                for _ in 0..3 {
                    yield_now().await;
                }
                s.inmost().await
            } => token,
        }
    };
    let middle = async {
        let mut ticks = 0;
        let mut inner = Box::pin(inmost.with_lock(&s.nested));
        loop {
            tokio::select! {
                biased;
                token = &mut inner => break (token.unwrap(), ticks),
                () = yield_now() => ticks += 1,
            }
        }
    };
    let outer = s.lock.with_lease(async |lease| {
        let (token, ticks) = tokio::select! {
            told = middle.with_lock(&s.nested) => told.unwrap(),
            () = pending() => unreachable!(),
        };
        assert!(ticks > 0, "it never went round");
        assert_eq!(token, lease.token());
    });
    outer.await.unwrap();
}

pub(crate) async fn three_deep_through_join<W: World>(s: &Scene<W>) {
    let inner = || async { tokio::join!(s.inmost(), s.inmost()) };
    let middle = || async {
        let (left, right) = tokio::join!(
            inner().with_lock(&s.nested),
            futures::future::join(inner().with_lock(&s.nested), yield_now()),
        );
        [left.unwrap(), right.0.unwrap()]
    };
    let outer = s.lock.with_lease(async |lease| {
        let all = join_all((0..3).map(|_| middle().with_lock(&s.nested))).await;
        for told in all {
            let token = lease.token();
            assert_eq!(told.unwrap(), [(token, token); 2]);
        }
    });
    outer.await.unwrap();
}

pub(crate) async fn three_deep_through_try_join<W: World>(s: &Scene<W>) {
    let work = async || Ok::<_, LockError>(s.inmost().await);
    let inner = || async { tokio::try_join!(work(), work().try_with_lock(&s.nested)) };
    let middle = || async {
        tokio::try_join!(
            inner().try_with_lock(&s.nested),
            inner().try_with_lock(&s.nested)
        )
    };
    let outer = s.lock.try_with_lease(async |lease| {
        let told = middle().try_with_lock(&s.nested).await?;
        assert_eq!(told.0, (lease.token(), lease.token()));
        assert_eq!(told.0, told.1);
        // One branch fails: the others are dropped, and the lock is held on.
        let failing = async {
            yield_now().await;
            Err::<Token, _>(s.lock.lease_within(crate::scene::ms(1)).await.unwrap_err())
        };
        let told = tokio::try_join!(work().try_with_lock(&s.nested), failing);
        assert!(told.is_err_and(|error| error.is_not_acquired()));
        assert!(s.is_busy().await);
        Ok::<_, LockError>(())
    });
    outer.await.unwrap();
}

pub(crate) async fn three_deep_through_boxed_futures<W: World>(s: &Scene<W>) {
    fn deeper<W: World>(s: &Scene<W>, levels: u32) -> BoxFuture<'_, Token> {
        if levels == 0 {
            // No future of the scene's own is `Send` for all worlds.
            return async {
                let lease = s.nested.lease().await.unwrap();
                yield_now().await;
                lease.token()
            }
            .boxed();
        }
        let work = async move {
            yield_now().await;
            deeper(s, levels - 1).await
        };
        let locked = work.boxed().with_lock(&s.nested).boxed();
        locked.map(Result::unwrap).boxed()
    }
    let outer = s.lock.with_lease(async |lease| {
        assert_eq!(deeper(s, 3).await, lease.token());
        assert!(s.is_busy().await);
    });
    outer.await.unwrap();
}

pub(crate) async fn three_deep_through_streams<W: World>(s: &Scene<W>) {
    let rows = |n: u64| stream::iter(0..n).then(async |_| s.inmost().await);
    let inner = || StreamLockExt::with_lock(rows(2), &s.nested);
    let middle = stream::iter(0..2).then(async |_| inner().try_collect::<Vec<_>>().await);
    let middle = s
        .nested
        .try_with_lease_stream(|lease| middle.map_ok(move |tokens| (lease.token(), tokens)));
    let flat = middle
        .map_ok(|(token, tokens)| {
            stream::iter(tokens)
                .map(move |inner| (token, inner))
                .map(Ok)
        })
        .try_flatten();
    let outer = StreamLockExt::try_with_lock(flat, &s.lock);
    let tokens: Vec<_> = outer
        .map_err(|error: LockError| error)
        .try_collect()
        .await
        .unwrap();
    assert_eq!(tokens.len(), 4);
    for (middle, inner) in tokens {
        assert_eq!((middle, inner), (middle, middle));
    }
}

pub(crate) async fn three_deep_through_buffer_unordered<W: World>(s: &Scene<W>) {
    let row = || s.inmost().with_lock(&s.nested);
    let rows = || {
        stream::iter(0..6)
            .map(|_| row())
            .buffer_unordered(3)
            .map(Result::unwrap)
    };
    let middle = || async { StreamLockExt::with_lock(rows(), &s.nested).count().await };
    let outer = stream::iter(0..4).map(|_| middle()).buffered(2);
    let counts: Vec<_> = StreamLockExt::with_lock(outer, &s.lock)
        .try_collect()
        .await
        .unwrap();
    assert_eq!(counts, [6; 4]);
}

pub(crate) async fn three_deep_through_futures_unordered<W: World>(s: &Scene<W>) {
    let inner = || async {
        let all: FuturesUnordered<_> = (0..4).map(|_| s.inmost().with_lock(&s.nested)).collect();
        all.try_collect::<Vec<_>>().await.unwrap()
    };
    let outer = s.lock.with_lease(async |lease| {
        let mut all: FuturesUnordered<_> = (0..3).map(|_| inner().with_lock(&s.nested)).collect();
        let mut seen = 0;
        while let Some(tokens) = all.next().await {
            assert_eq!(tokens.unwrap(), [lease.token(); 4]);
            assert!(s.is_busy().await, "one that is done freed it");
            seen += 1;
        }
        assert_eq!(seen, 3);
    });
    outer.await.unwrap();
}

/// Futures and streams, guards and handles, skipping or not: all share, and free nothing.
pub(crate) async fn every_form_shares<W: World>(s: &Scene<W>) {
    let (lock, nested) = (&s.lock, &s.nested);
    let work = async || Ok::<_, LockError>(s.inmost().await);
    let rows = || stream::iter([Ok::<_, LockError>(1)]);
    lock.with_lease(async |lease| {
        let token = lease.token();
        assert_eq!(s.inmost().with_lock(nested).await.unwrap(), token);
        assert_eq!(work().try_with_lock(nested).await.unwrap(), token);
        let told = s.inmost().with_lock(nested).or_skip().await;
        assert_eq!(told.unwrap(), Some(token));
        assert_eq!(nested.with_lease(async |l| l.token()).await.unwrap(), token);
        let told = nested.try_with_lease(async |l| Ok::<_, LockError>(l.token()));
        assert_eq!(told.await.unwrap(), token);
        assert_eq!(StreamLockExt::with_lock(rows(), nested).count().await, 1);
        let told = StreamLockExt::try_with_lock(rows(), nested);
        assert_eq!(told.try_collect::<Vec<_>>().await.unwrap(), [1]);
        let told = nested.with_lease_stream(|l| stream::iter([l.token()]));
        assert_eq!(told.try_collect::<Vec<_>>().await.unwrap(), [token]);
        let told = nested.try_with_lease_stream(|l| stream::iter([Ok::<_, LockError>(l.token())]));
        assert_eq!(told.try_collect::<Vec<_>>().await.unwrap(), [token]);
        let guards = [
            nested.lease().await.unwrap(),
            nested.lease_within(crate::scene::ms(1)).await.unwrap(),
            nested.lease_once().await.unwrap().unwrap(),
            nested.lease().or_skip().await.unwrap().unwrap(),
        ];
        for guard in guards {
            assert_eq!(guard.token(), token);
            assert_eq!(guard.deadline(), lease.deadline());
            assert!(guard.is_valid());
        }
        let within = nested.acquire_within(crate::scene::ms(1));
        let acquires = [nested.acquire(), within, nested.acquire_once()];
        for acquire in acquires {
            assert!(acquire.await.unwrap() && nested.is_acquired());
            assert!(nested.release().await.unwrap());
        }
        assert!(s.is_busy().await, "one of them freed it");
        assert!(lease.is_valid());
    })
    .await
    .unwrap();
    // The work around it may be any of them, too.
    let told = s.inmost().with_lock(nested).with_lock(lock).await;
    told.unwrap().unwrap();
    work()
        .try_with_lock(nested)
        .try_with_lock(lock)
        .await
        .unwrap();
    let rows = || stream::once(s.inmost());
    let nest = || StreamLockExt::with_lock(rows(), nested);
    let told = StreamLockExt::with_lock(nest(), lock);
    assert!(told.all(async |row| row.unwrap().is_ok()).await);
    let told = StreamLockExt::try_with_lock(nest(), lock);
    assert!(told.all(async |row| row.is_ok()).await);
    let told = lock.with_lease_stream(|_| nest());
    assert!(told.all(async |row| row.unwrap().is_ok()).await);
    let told = lock.try_with_lease_stream(|_| nest());
    assert!(told.all(async |row| row.is_ok()).await);
}

pub(crate) async fn a_clone_of_the_registry_is_the_registry<W: World>(s: &Scene<W>) {
    let clone = s.here.clone();
    let nested = clone.obtain(KEY).wait(crate::scene::BRIEF).reentrant();
    let told = s.inmost().with_lock(nested).with_lock((&clone, KEY)).await;
    told.unwrap().unwrap();
}

/// What a closure does with its view, before there is a future, is under the lock.
pub(crate) async fn what_is_begun_inside_is_inside<W: World>(s: &Scene<W>) {
    let work = s.lock.with_lease(|lease| {
        let guard: Lease = s.nested.lease().now_or_never().expect("at once").unwrap();
        assert_eq!(guard.token(), lease.token());
        ready(())
    });
    work.await.unwrap();
    let rows = s.lock.with_lease_stream(|_| {
        let guard = s.nested.lease().now_or_never().expect("at once").unwrap();
        stream::once(async move { guard.is_valid() })
    });
    assert_eq!(rows.try_collect::<Vec<_>>().await.unwrap(), [true]);
}

/// Two branches share the lease, and stand inside both at once: the docs say so, and so it is.
pub(crate) async fn who_shares_is_not_excluded<W: World>(s: &Scene<W>) {
    let meet = tokio::sync::Barrier::new(2);
    let branch = || async { meet.wait().await.is_leader() }.with_lock(&s.nested);
    let both = async { tokio::join!(branch(), branch()) };
    let (left, right) = both.with_lock(&s.lock).await.unwrap();
    assert!(left.unwrap() != right.unwrap());
}

/// Frames of several keys stand between each other.
pub(crate) async fn two_keys_crosswise<W: World>(s: &Scene<W>) {
    let other = s.here.obtain("other");
    let nested = other.clone().reentrant().wait(crate::scene::BRIEF);
    let polls = std::cell::Cell::new(0);
    let count = futures::future::poll_fn(|cx| {
        polls.set(polls.get() + 1);
        cx.waker().wake_by_ref();
        if polls.get() < 3 {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    });
    let work = async {
        let (a, b) = tokio::join!(s.nested.lease(), nested.lease());
        let (a, b) = (a.unwrap(), b.unwrap());
        count.await;
        (a.token(), b.token())
    };
    let outer = s.lock.with_lease(async |a| {
        let told = other.with_lease(async |b| {
            let told = work.with_lock(&nested).with_lock(&s.nested).await;
            assert_eq!(told.unwrap().unwrap(), (a.token(), b.token()));
            Ok::<_, Infallible>(())
        });
        told.await.unwrap().unwrap();
        let free = s.there.obtain("other").lease_once().await.unwrap();
        free.expect("its outermost is done")
            .release()
            .await
            .unwrap();
        assert!(s.is_busy().await);
    });
    outer.await.unwrap();
}
