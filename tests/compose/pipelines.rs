use std::cell::{Cell, RefCell};
use std::future::{pending, poll_fn};
use std::panic::AssertUnwindSafe;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake};

use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use lockstream::verify::StepVerifier;
use lockstream::{
    FutureLockExt, Lock, LockError, LockEvent, LockRegistry, OnLost, Renewal, StreamLockExt,
};
use tokio::time::{Instant, sleep};

use crate::{Floor, is_free, ms, two};

/// What works, and what has worked.
#[derive(Clone, Default)]
struct Shop(Rc<Counts>);

#[derive(Default)]
struct Counts {
    working: Cell<usize>,
    most: Cell<usize>,
    begun: RefCell<Vec<usize>>,
}

impl Shop {
    /// Works for so many milliseconds, and says so.
    async fn work(self, item: usize, millis: u64) -> usize {
        self.0.begun.borrow_mut().push(item);
        self.0.working.set(self.0.working.get() + 1);
        self.0.most.set(self.0.most.get().max(self.0.working.get()));
        sleep(ms(millis)).await;
        self.0.working.set(self.0.working.get() - 1);
        item
    }
}

/// Each fourth item belongs to a key that another process has. All others are done, with two that work at a time.
#[tokio::test(start_paused = true)]
async fn a_busy_key_does_not_stand_in_the_way() {
    let modes: [fn(Lock) -> Lock; 3] = [|lock| lock, Lock::shared, |lock| lock.permits(1)];
    for mode in modes {
        let (_, here, there) = two();
        let held = there.obtain("k0").lease().await.unwrap();
        let shop = Shop::default();
        let items = stream::iter(0..20).map(|item| {
            let lock = mode(here.obtain(format!("k{}", item % 4)));
            shop.clone().work(item, 10).with_lock(lock)
        });
        let mut items = items.buffer_keyed(2).waiting(8);
        let begin = Instant::now();
        let mut done = Vec::new();
        while done.len() < 15 {
            done.push(items.next().await.unwrap().unwrap());
        }
        assert!(done.iter().all(|item| item % 4 != 0), "{done:?}");
        assert!(begin.elapsed() <= ms(100), "{:?}", begin.elapsed());
        assert!(items.next().now_or_never().is_none());
        held.release().await.unwrap();
        let rest: Vec<_> = items.try_collect().await.unwrap();
        assert_eq!(rest, [0, 4, 8, 12, 16]);
        assert_eq!(shop.0.most.get(), 2);
    }
}

/// The store takes its time. Until it has said that others have the key, the item has its place; from then on another has.
#[tokio::test(start_paused = true)]
async fn a_busy_key_does_not_stand_in_the_way_once_that_is_known() {
    let (store, here, there) = two();
    let held = there.obtain("k0").lease().await.unwrap();
    store.set_latency(ms(20));
    let items = stream::iter(0..3).map(|item| {
        let lock = here.obtain(format!("k{item}"));
        let work = async move {
            sleep(ms(100)).await;
            item
        };
        work.with_lock(lock)
    });
    let mut items = Box::pin(items.buffer_keyed(1).waiting(8));
    let begin = Instant::now();
    let both = async {
        let first = items.next().await.unwrap().unwrap();
        [first, items.next().await.unwrap().unwrap()]
    };
    let others = async {
        sleep(ms(60)).await;
        let is_held = async |key: &str| there.obtain(key).inspect().await.unwrap().is_held();
        assert!(!is_held("k2").await, "it has no place");
        assert!(is_held("k1").await);
    };
    let (done, ()) = tokio::join!(both, others);
    assert_eq!(done, [1, 2]);
    assert!(begin.elapsed() <= ms(500), "{:?}", begin.elapsed());
    drop(held);
}

/// A key that others do not have is asked for only where there is a place to work.
#[tokio::test(start_paused = true)]
async fn who_has_no_place_takes_no_key() {
    let (_, here, there) = two();
    let items = stream::iter(0..3).map(|item| {
        let lock = here.obtain(format!("k{item}"));
        async { sleep(ms(100)).await }.with_lock(lock)
    });
    let mut items = Box::pin(items.buffer_keyed(1).waiting(8));
    assert!(items.next().now_or_never().is_none());
    let others = async {
        for now in 0..3 {
            sleep(ms(if now == 0 { 50 } else { 100 })).await;
            for item in 0..3 {
                let key = format!("k{item}");
                assert_eq!(is_free(&there, &key).await, item != now, "{key}");
            }
        }
    };
    let (done, ()) = tokio::join!(items.try_collect::<Vec<_>>(), others);
    assert_eq!(done.unwrap().len(), 3);
}

/// The errors of the work and of the lock are of one type.
#[tokio::test(start_paused = true)]
async fn work_with_errors_of_its_own_tells_them() {
    let (_, here, _) = two();
    let items = stream::iter(0..4).map(|item| {
        let work = async move {
            if item == 2 {
                return Err(Box::<dyn std::error::Error>::from("out of stock"));
            }
            Ok(item)
        };
        work.try_with_lock(here.obtain("k"))
    });
    let done: Vec<_> = items.buffer_keyed(2).collect().await;
    let done: Vec<_> = { done.into_iter() }
        .map(|item| item.map_err(|error| error.to_string()))
        .collect();
    let failed = Err("out of stock".to_owned());
    assert_eq!(done, [Ok(0), Ok(1), failed, Ok(3)]);
}

/// It asks only when it is the next at each of its keys: the first of them is free for others until then.
#[tokio::test(start_paused = true)]
async fn several_keys_are_asked_for_when_each_is_had_by_nobody_before() {
    let (_, here, there) = two();
    let items = stream::iter(0..2).map(|item| {
        let lock = match item {
            0 => here.obtain("b"),
            _ => here.obtain_all(["a", "b"]),
        };
        async { sleep(ms(100)).await }.with_lock(lock)
    });
    let mut items = Box::pin(items.buffer_keyed(2));
    assert!(items.next().now_or_never().is_none());
    let others = async {
        sleep(ms(50)).await;
        assert!(is_free(&there, "a").await && !is_free(&there, "b").await);
        sleep(ms(100)).await;
        assert!(!is_free(&there, "a").await);
    };
    let (done, ()) = tokio::join!(items.try_collect::<Vec<_>>(), others);
    assert_eq!(done.unwrap().len(), 2);
}

/// However many the source has at once: the task is woken to take more of them.
#[tokio::test(start_paused = true)]
async fn a_source_that_has_much_is_taken_in_in_pieces() {
    #[derive(Default)]
    struct Wakes(AtomicBool);
    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    const MANY: usize = 1_000;
    let (_, here, there) = two();
    let _held = there.obtain("k").lease().await.unwrap();
    let asked = Rc::new(Cell::new(0));
    let items = stream::iter(0..MANY).map(|_| {
        asked.set(asked.get() + 1);
        async {}.with_lock(here.obtain("k"))
    });
    let mut items = items.buffer_keyed(1).waiting(MANY);
    let wakes = Arc::new(Wakes::default());
    let waker = wakes.clone().into();
    let mut polls = 0;
    // Nothing else runs here, and so nothing else wakes.
    while polls == 0 || wakes.0.swap(false, Ordering::SeqCst) {
        let next = items.poll_next_unpin(&mut Context::from_waker(&waker));
        assert!(next.is_pending());
        polls += 1;
    }
    assert_eq!(asked.get(), MANY);
    assert!(polls > 3, "other tasks had their turn {polls} times");
}

/// The same with `buffer_unordered` stands still: what this is for.
#[tokio::test(start_paused = true)]
async fn a_busy_key_fills_all_places_of_another_buffer() {
    let (_, here, there) = two();
    let _held = there.obtain("k0").lease().await.unwrap();
    let items = stream::iter(0..20).map(|item| {
        let lock = here.obtain(format!("k{}", item % 4));
        sleep(ms(10)).with_lock(lock)
    });
    let items = items.buffer_unordered(2);
    let done = items.take_until(sleep(ms(5000))).count().await;
    assert!(done < 10, "{done}");
}

#[tokio::test(start_paused = true)]
async fn items_of_a_key_begin_in_the_order_of_the_stream() {
    let locks = LockRegistry::in_memory();
    let (shop, floors) = (Shop::default(), [Floor::default(), Floor::default()]);
    // The later an item, the shorter it takes.
    let items = stream::iter(0..40).map(|item| {
        let (shop, floor) = (shop.clone(), floors[item % 2].clone());
        let work = async move {
            floor.cross().await;
            shop.work(item, 40 - item as u64).await
        };
        work.with_lock(locks.obtain(format!("k{}", item % 2)))
    });
    let done: Vec<_> = items.buffer_keyed(16).try_collect().await.unwrap();
    for key in 0..2 {
        let of_key = |items: &[usize]| {
            let items = items.iter().copied().filter(|item| item % 2 == key);
            items.collect::<Vec<_>>()
        };
        let expected: Vec<_> = (0..40).filter(|item| item % 2 == key).collect();
        assert_eq!(of_key(&shop.0.begun.borrow()), expected);
        assert_eq!(of_key(&done), expected);
    }
    assert_eq!(shop.0.most.get(), 2, "different keys at once");
}

/// An item that is the next of its key is passed it, and no other registry is asked for.
#[tokio::test(start_paused = true)]
async fn the_next_of_a_key_is_passed_it() {
    let locks = LockRegistry::builder(lockstream::store::MemoryStore::new())
        .local_passes(63)
        .local_span(ms(60_000))
        .build()
        .unwrap();
    let mut events = locks.events();
    let work = async || sleep(ms(1)).await;
    let items = stream::iter(0..10).map(|_| work().with_lock(locks.obtain("k")));
    let done: Vec<_> = items.buffer_keyed(4).try_collect().await.unwrap();
    assert_eq!(done.len(), 10);
    let mut passes = 0;
    while let Some(Some(event)) = events.next().now_or_never() {
        passes += usize::from(matches!(event, LockEvent::Passed { .. }));
    }
    assert_eq!(passes, 9);
}

/// With as many waiting as may wait, the source is not asked for more. Nor is it while all places are taken.
#[tokio::test(start_paused = true)]
async fn the_source_is_asked_for_no_more_than_there_is_room_for() {
    let (_, here, there) = two();
    let _held = there.obtain("busy").lease().await.unwrap();
    let asked = Cell::new(0);
    let source = || stream::iter(0..100).inspect(|_| asked.set(asked.get() + 1));
    let items = source().map(|_| pending::<()>().with_lock(here.obtain("busy")));
    let mut items = items.buffer_keyed(2).waiting(5);
    for _ in 0..3 {
        assert!(
            sleep(ms(100))
                .map(|()| items.next().now_or_never())
                .await
                .is_none()
        );
    }
    assert_eq!(asked.take(), 5);
    drop(items);

    let items = source().map(|item| pending::<()>().with_lock(here.obtain(format!("k{item}"))));
    let mut items = items.buffer_keyed(3);
    for _ in 0..3 {
        assert!(
            sleep(ms(100))
                .map(|()| items.next().now_or_never())
                .await
                .is_none()
        );
    }
    assert_eq!(asked.take(), 3);
}

#[tokio::test(start_paused = true)]
async fn results_come_as_they_are_ready_or_in_order() {
    let locks = LockRegistry::in_memory();
    let items = |in_order: bool| {
        let items = stream::iter([30, 10, 20, 5]).map(|millis| {
            let work = sleep(ms(millis)).map(move |()| millis);
            work.with_lock(locks.obtain(format!("k{millis}")))
        });
        let items = items.buffer_keyed(3);
        match in_order {
            true => items.in_order(),
            false => items,
        }
    };
    StepVerifier::try_create(items(false))
        .expect_no_event(ms(9))
        .expect_next(10)
        // The fourth took its place.
        .expect_next(5)
        .expect_next(20)
        .expect_next(30)
        .expect_complete()
        .verify()
        .await;
    StepVerifier::try_create(items(true))
        .expect_no_event(ms(29))
        .expect_next(30)
        .expect_next(10)
        .expect_next(20)
        .expect_next(5)
        .expect_complete()
        .verify()
        .await;
}

/// What is done and not yielded counts as waiting.
#[tokio::test(start_paused = true)]
async fn a_slow_item_holds_up_as_many_results_as_may_wait() {
    let locks = LockRegistry::in_memory();
    let asked = Cell::new(0);
    let source = stream::iter(0..100).inspect(|_| asked.set(asked.get() + 1));
    let items = source.map(|item| {
        let work = sleep(ms(if item == 0 { 1000 } else { 1 })).map(move |()| item);
        work.with_lock(locks.obtain(format!("k{item}")))
    });
    let items = items.buffer_keyed(2).waiting(10).in_order();
    StepVerifier::try_create(items)
        .expect_no_event(ms(900))
        .then(async || assert_eq!(asked.get(), 11))
        .expect_next(0)
        .expect_next_count(99)
        .expect_complete()
        .verify()
        .await;
}

/// An item that others have for its whole wait, one that is lost, and one that is invalid: the stream goes on.
#[tokio::test(start_paused = true)]
async fn the_errors_of_an_item_are_its_own() {
    let (store, here, there) = two();
    let _held = there.obtain("busy").lease().await.unwrap();
    let names = ["busy", "lost", "", "well"];
    let items = stream::iter(names).map(|name| {
        let lock = here.obtain(name).ttl(ms(300)).wait(ms(200));
        sleep(ms(100)).with_lock(lock)
    });
    let mut items = items.buffer_keyed(4).in_order();
    assert!(items.next().now_or_never().is_none());
    store.expire("lost");
    let ended = items.collect::<Vec<_>>().await;
    assert!(
        matches!(ended[0], Err(LockError::NotAcquired { .. })),
        "{ended:?}"
    );
    // It ends before anybody looks at the store.
    assert!(
        matches!(ended[1], Ok(()) | Err(LockError::Lost { .. })),
        "{ended:?}"
    );
    assert!(
        matches!(ended[2], Err(LockError::InvalidKey { .. })),
        "{ended:?}"
    );
    assert!(matches!(ended[3], Ok(())), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn what_is_skipped_is_left_out() {
    let (_, here, there) = two();
    let _held = there.obtain("k0").lease().await.unwrap();
    let once = |item: usize| here.obtain(format!("k{}", item % 3)).wait(ms(0));
    let items = stream::iter(0..9).map(|item| {
        let work = sleep(ms(1)).map(move |()| item);
        work.with_lock(once(item)).or_skip()
    });
    let done: Vec<usize> = items
        .buffer_keyed(4)
        .in_order()
        .try_collect()
        .await
        .unwrap();
    // One that asks once waits for the items of its key that are ahead.
    assert_eq!(done, [1, 2, 4, 5, 7, 8]);

    let items = stream::iter(0..9).map(|item| {
        let work = sleep(ms(1)).map(move |()| Ok::<_, LockError>(item));
        work.try_with_lock(once(item)).or_skip()
    });
    let mut done: Vec<usize> = items.buffer_keyed(4).try_collect().await.unwrap();
    done.sort_unstable();
    assert_eq!(done, [1, 2, 4, 5, 7, 8]);
}

/// Readers of a key work side by side, and so do permits; a writer works alone, and in its turn.
#[tokio::test(start_paused = true)]
async fn each_mode_overlaps_as_it_may() {
    let locks = LockRegistry::in_memory();
    let shop = Shop::default();
    let items = stream::iter(0..9).map(|item| {
        let lock = locks.obtain("k");
        let lock = if item == 4 { lock } else { lock.shared() };
        let begun = shop.0.clone();
        let shop = shop.clone();
        async move {
            let alone = begun.working.get();
            (item, alone, shop.work(item, 10).await)
        }
        .with_lock(lock)
    });
    let begin = Instant::now();
    let done: Vec<_> = items
        .buffer_keyed(8)
        .in_order()
        .try_collect()
        .await
        .unwrap();
    assert_eq!(*shop.0.begun.borrow(), (0..9).collect::<Vec<_>>());
    assert!(begin.elapsed() < ms(40), "{:?}", begin.elapsed());
    assert_eq!(done[4].1, 0, "alone");
    assert_eq!(shop.0.most.get(), 4);

    let shop = Shop::default();
    let items = stream::iter(0..8).map(|item| {
        let lock = locks.obtain("permits").permits(3);
        shop.clone().work(item, 10).with_lock(lock)
    });
    let done: Vec<_> = items.buffer_keyed(8).try_collect().await.unwrap();
    assert_eq!((done.len(), shop.0.most.get()), (8, 3));
}

/// Each has two neighbours' keys: none waits for one behind it.
#[tokio::test(start_paused = true)]
async fn items_of_several_keys_take_their_turn_at_each() {
    let locks = LockRegistry::in_memory();
    let floors: Vec<_> = (0..4).map(|_| Floor::default()).collect();
    let items = stream::iter(0..40_usize).map(|item| {
        let keys = [item % 4, (item + 1) % 4];
        let lock = locks.obtain_all(keys.map(|key| format!("k{key}")));
        let floors = keys.map(|key| floors[key].clone());
        let work = async move {
            for floor in floors {
                floor.cross().await;
            }
            item
        };
        work.with_lock(lock)
    });
    let done: Vec<_> = items.buffer_keyed(8).try_collect().await.unwrap();
    assert_eq!(done.len(), 40);
}

/// A lease of the work around it is shared by one item at a time.
#[tokio::test(start_paused = true)]
async fn reentrant_items_do_not_overlap() {
    let locks = LockRegistry::in_memory();
    let floor = Floor::default();
    let inner = || {
        let items = stream::iter(0..6).map(|_| {
            let floor = floor.clone();
            async move { floor.cross().await }.with_lock(locks.obtain("k").reentrant())
        });
        items.buffer_keyed(4).try_collect::<Vec<_>>()
    };
    let lock = locks.obtain("k");
    let done = lock.with_lease(|_| inner()).await.unwrap();
    assert_eq!(done.unwrap().len(), 6);
}

/// Wherever it is dropped, all is given back.
#[tokio::test(start_paused = true)]
async fn a_stream_that_is_dropped_releases_everything() {
    for until in 0..30 {
        let (store, here, there) = two();
        store.set_latency(ms(2));
        let held = there.obtain("k0").lease().await.unwrap();
        let items = stream::iter(0..40).map(|item| {
            let lock = here.obtain(format!("k{}", item % 5));
            sleep(ms(3)).with_lock(lock)
        });
        let items = items.buffer_keyed(3);
        items
            .take_until(sleep(ms(until)))
            .for_each(async |_| ())
            .await;
        sleep(ms(100)).await;
        assert_eq!(here.in_use(), 0, "dropped after {until} ms");
        held.release().await.unwrap();
        for key in 0..5 {
            assert!(is_free(&there, &format!("k{key}")).await);
        }
    }
}

#[tokio::test(start_paused = true)]
#[should_panic = "buffer_keyed(0)"]
async fn no_place_is_refused() {
    let locks = LockRegistry::in_memory();
    let items = stream::iter(0..1).map(|_| pending::<()>().with_lock(locks.obtain("k")));
    drop(items.buffer_keyed(0));
}

/// The item is gone, its lock is free, and the others of its key go on.
#[tokio::test(start_paused = true)]
async fn an_item_that_panics_is_gone() {
    let locks = LockRegistry::in_memory();
    let items = stream::iter(0..6).map(|item| {
        let work = async move {
            sleep(ms(1)).await;
            assert_ne!(item, 2, "on purpose");
            item
        };
        work.with_lock(locks.obtain(format!("k{}", item % 2)))
    });
    let mut items = items.buffer_keyed(1).in_order();
    let mut done = Vec::new();
    loop {
        match AssertUnwindSafe(items.next()).catch_unwind().await {
            Ok(Some(item)) => done.push(item.unwrap()),
            Ok(None) => break,
            Err(_) => done.push(99),
        }
    }
    assert_eq!(done, [0, 1, 99, 3, 4, 5]);
    assert!(locks.obtain("k0").lease_once().await.unwrap().is_some());
}

/// The lock comes while all places are taken. The item does not work then, and is the next that does.
#[tokio::test(start_paused = true)]
async fn a_lock_that_comes_late_waits_for_a_place() {
    let (_, here, there) = two();
    let held = there.obtain("late").lease().await.unwrap();
    let shop = Shop::default();
    let names = ["late", "a", "b", "c"];
    let items = stream::iter(names.into_iter().enumerate())
        .map(|(item, name)| shop.clone().work(item, 100).with_lock(here.obtain(name)));
    let items = items.buffer_keyed(1);
    StepVerifier::try_create(items)
        .then_await(ms(50))
        .then(async || held.release().await.unwrap())
        .then(async || assert!(!is_free(&there, "late").await))
        .expect_next(1)
        .expect_next(0)
        .expect_next(2)
        .expect_next(3)
        .expect_complete()
        .verify()
        .await;
    assert_eq!(shop.0.most.get(), 1);
}

/// A source that is slow, and ends late.
#[tokio::test(start_paused = true)]
async fn a_source_that_pauses_is_asked_again() {
    let locks = LockRegistry::in_memory();
    let source = async_stream::stream! {
        for item in 0..3 {
            sleep(ms(50)).await;
            yield sleep(ms(1)).map(move |()| item).with_lock(locks.obtain("k"));
        }
        sleep(ms(50)).await;
    };
    StepVerifier::try_create(source.buffer_keyed(2))
        .expect_no_event(ms(50))
        .expect_next(0)
        .expect_next(1)
        .expect_next(2)
        .expect_no_event(ms(40))
        .expect_complete()
        .verify()
        .await;
}

/// Its lease is lost while it waits for a place. The work does not begin, not even if it were to run on without its lease.
#[tokio::test(start_paused = true)]
async fn work_does_not_begin_under_a_lease_that_was_lost_meanwhile() {
    let (store, here, there) = two();
    let held = there.obtain("late").lease().await.unwrap();
    let begun = Cell::new(0);
    let items = stream::iter(["late", "long"]).map(|name| {
        let lock = here.obtain(name).ttl(ms(600)).renewal(Renewal::watchdog());
        lock.on_lost(OnLost::RunOn).with_lease(|_| {
            begun.set(begun.get() + 1);
            sleep(ms(3000))
        })
    });
    StepVerifier::try_create(items.buffer_keyed(1))
        .then_await(ms(50))
        .then(async || held.release().await.unwrap())
        .then_await(ms(50))
        .then(async || assert!(!is_free(&there, "late").await))
        .then(async || store.expire("late"))
        .expect_next(())
        .expect_error_matches(|error| error.is_lost())
        .expect_complete()
        .verify()
        .await;
    assert_eq!(begun.get(), 1);
}

/// Items of two stores, of which one is away: those of the other go on.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_does_not_stand_in_the_way() {
    let (_, here, _) = two();
    let (away, elsewhere, _) = two();
    // Known to be away, or not yet.
    for is_known in [true, false] {
        away.set_offline(true);
        if is_known {
            let asked = elsewhere.obtain("k").wait(ms(0)).lease().await;
            assert!(matches!(asked, Err(LockError::Store { .. })), "{asked:?}");
        }
        let items = stream::iter(0..20).map(|item| {
            let locks = if item % 4 == 0 { &elsewhere } else { &here };
            let lock = locks.obtain(format!("k{item}"));
            sleep(ms(10)).map(move |()| item).with_lock(lock)
        });
        let mut items = items.buffer_keyed(2).waiting(8);
        let mut done = Vec::new();
        while done.len() < 15 {
            done.push(items.next().await.unwrap().unwrap());
        }
        assert!(done.iter().all(|item| item % 4 != 0), "{done:?}");
        away.set_offline(false);
        let mut rest: Vec<_> = items.try_collect().await.unwrap();
        rest.sort_unstable();
        assert_eq!(rest, [0, 4, 8, 12, 16]);
    }
}

/// It wakes itself in each poll. The source is asked all the same, and so are others that have woken.
#[tokio::test(start_paused = true)]
async fn an_item_that_never_rests_holds_up_no_other() {
    let locks = LockRegistry::in_memory();
    let done = Cell::new(0);
    let items = stream::iter(0..6).map(|item| {
        let (done, locks) = (&done, &locks);
        let work = async move {
            if item > 0 {
                tokio::task::yield_now().await;
                return done.set(done.get() + 1);
            }
            poll_fn(|cx| {
                cx.waker().wake_by_ref();
                match done.get() {
                    5 => Poll::Ready(()),
                    _ => Poll::Pending,
                }
            })
            .await;
        };
        work.with_lock(locks.obtain(format!("k{item}")))
    });
    let all = items.buffer_keyed(2).try_collect::<Vec<_>>();
    let all = tokio::time::timeout(ms(1000), all).await;
    assert_eq!(all.expect("in time").unwrap().len(), 6);
}
