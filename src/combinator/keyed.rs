mod items;

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use futures::stream::{Fuse, FusedStream, StreamExt};
use pin_project::pin_project;

use self::items::Items;
use super::LockedFuture;

/// After so many polls of items the task lets others run.
const POLLS: usize = 256;

/// Stream of [`buffer_keyed`](crate::StreamLockExt::buffer_keyed).
#[pin_project]
#[must_use = "streams do nothing unless polled"]
pub struct BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    #[pin]
    source: Fuse<S>,
    items: Items<S::Item>,
}

impl<S> BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    pub(super) fn new(source: S, working: usize) -> Self {
        Self {
            source: source.fuse(),
            items: Items::new(working),
        }
    }

    /// At most `most` items do not work: those that wait for their locks, for an earlier item of their key or for a place, that
    /// release their locks, and [in order](Self::in_order) those that are done and not yielded. Then the source is asked for no
    /// more. 0 counts as 1, since an item waits at least until it was looked at. Default: 16 times as many as may work.
    pub fn waiting(mut self, most: usize) -> Self {
        self.items.waiting = most.max(1);
        self
    }

    /// Yields the results in the order of the source. The work is done in the same order as without. So when a result
    /// comes, all items before it have ended, and their results have come: a consumer of a log can commit its place after each
    /// `Ok`, up to the first error.
    ///
    /// An item that `or_skip` leaves out has no result, and one whose panic was caught outside has none: do without either
    /// where the place is committed.
    ///
    /// ```
    /// use futures::{StreamExt, TryStreamExt, stream};
    /// use lockstream::prelude::*;
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
    /// # fn commit(_: u64) {}
    /// let locks = LockRegistry::in_memory();
    /// let items = stream::iter(1..=100_u64).map(|offset| {
    ///     let key = format!("account:{}", offset % 7);
    ///     async move { offset }.with_lock(locks.obtain(key))
    /// });
    /// let mut done = items.buffer_keyed(16).in_order();
    /// while let Some(offset) = done.try_next().await? {
    ///     commit(offset); // all up to here are done
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// An item that takes long holds up the results behind it, but not their work, as long as there is
    /// [room](Self::waiting).
    pub fn in_order(mut self) -> Self {
        self.items.results.keep_order();
        self
    }
}

impl<S> Stream for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    type Item = <S::Item as LockedFuture>::Item;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut this = self.project();
        let items = this.items;
        items.ready.register(cx.waker());
        // An item that wakes itself must not keep the others, or the task, from their turn.
        let mut woken = items.ready.len();
        for _ in 0..POLLS {
            if let Some(result) = items.results.pop() {
                return Poll::Ready(Some(result));
            }
            if let Some(id) = items.next_to_poll(&mut woken) {
                items.poll(id);
            } else if items.has_room()
                && let Poll::Ready(Some(item)) = this.source.as_mut().poll_next(cx)
            {
                items.push(item);
            } else if items.ready.len() == 0 {
                return match this.source.is_done() && items.len() == 0 {
                    true => Poll::Ready(None),
                    false => Poll::Pending,
                };
            } else {
                break;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let within = self.items.len();
        let most = self.source.size_hint().1;
        // Any may be left out.
        (0, most.and_then(|most| most.checked_add(within)))
    }
}

impl<S> FusedStream for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    fn is_terminated(&self) -> bool {
        self.source.is_terminated() && self.items.len() == 0
    }
}

impl<S> fmt::Debug for BufferKeyed<S>
where
    S: Stream,
    S::Item: LockedFuture,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferKeyed")
            .field("working", &self.items.places)
            .field("items", &self.items.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::pin::pin;
    use std::time::Duration;

    use futures::stream::FusedStream;
    use futures::{FutureExt, Stream, stream};

    use crate::store::MemoryStore;
    use crate::{FutureLockExt, LockRegistry, StreamLockExt};

    /// A thousand items wait, each for a key of its own. When one key comes, no other item is polled.
    #[tokio::test(start_paused = true)]
    async fn one_that_wakes_is_polled_alone() {
        let soon = || tokio::time::sleep(Duration::from_millis(10));
        let store = MemoryStore::new();
        let registry = || LockRegistry::builder(store.clone()).build().unwrap();
        let (here, there) = (registry(), registry());
        let key = |item: usize| format!("k{item}");
        let mut held = Vec::new();
        for item in 0..1000 {
            held.push(there.obtain(key(item)).lease().await.unwrap());
        }
        let items = futures::StreamExt::map(stream::iter(0..1000), |item| {
            ready(item).with_lock(here.obtain(key(item)))
        });
        let mut items = pin!(items.buffer_keyed(1).waiting(1000));
        for _ in 0..20 {
            let next = futures::StreamExt::next(&mut items);
            assert!(next.now_or_never().is_none());
            soon().await;
        }
        assert_eq!((items.items.len(), items.items.places), (1000, 0));
        assert_eq!(items.items.ready.len(), 0);
        held.remove(500).release().await.unwrap();
        soon().await;
        assert_eq!(items.items.ready.len(), 1);
        let next = futures::StreamExt::next(&mut items).await;
        assert_eq!(next.unwrap().unwrap(), 500);
        assert_eq!(items.items.lines.len(), 999, "nothing is kept of its key");
    }

    /// It has ended when the source has, and all results have come.
    #[tokio::test]
    async fn what_is_left_and_the_end_are_known() {
        let locks = LockRegistry::in_memory();
        let items = futures::StreamExt::map(stream::iter(0..2), |item| {
            ready(item).with_lock(locks.obtain("k"))
        });
        let mut items = pin!(items.buffer_keyed(1));
        for left in [2, 1] {
            assert_eq!(items.size_hint(), (0, Some(left)));
            assert!(!items.is_terminated());
            let next = futures::StreamExt::next(&mut items).await;
            next.unwrap().unwrap();
        }
        assert!(futures::StreamExt::next(&mut items).await.is_none());
        assert_eq!(items.size_hint(), (0, Some(0)));
        assert!(items.is_terminated());
    }
}
