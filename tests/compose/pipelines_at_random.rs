//! Random streams whose items have locks, against what each promises: in virtual time, a seed at a time.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, LockError, LockRegistry, StreamLockExt};
use tokio::time::sleep;

use crate::at_random::Dice;
use crate::{ms, two};

const SEEDS: u64 = 400;
const KEYS: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
struct Wish {
    keys: Vec<&'static str>,
    is_shared: bool,
    millis: u64,
    /// `Some(0)`: it asks once.
    wait: Option<u64>,
}

impl Wish {
    fn random(dice: &mut Dice) -> Self {
        let mut keys = vec![*dice.pick(&KEYS)];
        let is_shared = dice.next(4) == 0;
        if dice.next(6) == 0 && !is_shared {
            keys.push(*dice.pick(&KEYS));
            keys.sort_unstable();
            keys.dedup();
        }
        Self {
            keys,
            is_shared,
            millis: dice.next(12),
            wait: *dice.pick(&[None, None, None, Some(0), Some(15)]),
        }
    }
}

/// What a stream may do: the model.
#[derive(Default)]
struct Model {
    working: Cell<usize>,
    /// By key: how many readers are inside, or -1 for a writer; and the last item that has begun.
    keys: RefCell<HashMap<&'static str, (isize, usize)>>,
}

/// An item at work. Dropped at its end, however it ends.
struct Working(Rc<Model>, Wish);

impl Working {
    fn begin(model: &Rc<Model>, item: usize, wish: &Wish, most: usize) -> Self {
        model.working.set(model.working.get() + 1);
        assert!(model.working.get() <= most, "more than {most} work");
        for key in &wish.keys {
            let mut keys = model.keys.borrow_mut();
            let (inside, last) = keys.entry(key).or_default();
            assert!(*last <= item, "{item} begins after {last} on {key}");
            match wish.is_shared {
                true => assert!(*inside >= 0, "{item} reads {key} beside a writer"),
                false => assert_eq!(*inside, 0, "{item} has {key} not alone"),
            }
            *inside += if wish.is_shared { 1 } else { -1 };
            *last = item;
        }
        Self(model.clone(), wish.clone())
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        self.0.working.set(self.0.working.get() - 1);
        for key in &self.1.keys {
            let mut keys = self.0.keys.borrow_mut();
            let (inside, _) = keys.get_mut(key).expect("it has begun");
            *inside -= if self.1.is_shared { 1 } else { -1 };
        }
    }
}

async fn is_idle(registry: &LockRegistry) -> bool {
    for _ in 0..100 {
        if registry.in_use() == 0 {
            return true;
        }
        sleep(ms(10)).await;
    }
    false
}

async fn run(seed: u64) {
    let mut dice = Dice(seed);
    let (store, here, there) = two();
    store.set_latency(ms(dice.next(3)));
    let most = 1 + dice.next(4) as usize;
    let wishes: Vec<_> = (0..5 + dice.next(40))
        .map(|_| Wish::random(&mut dice))
        .collect();
    let (in_order, waiting) = (dice.next(2) == 0, dice.next(10) as usize);
    let dropped_after = (dice.next(4) == 0).then(|| dice.next(60));

    let model = Rc::<Model>::default();
    let begun = Rc::<RefCell<Vec<usize>>>::default();
    let items = stream::iter(wishes.iter().enumerate()).map(|(item, wish)| {
        let (model, begun, wish) = (model.clone(), begun.clone(), wish.clone());
        let mut lock = here.obtain_all(&wish.keys).ttl(ms(500));
        if wish.is_shared {
            lock = lock.shared();
        }
        if let Some(wait) = wish.wait {
            lock = lock.wait(ms(wait));
        }
        let work = async move {
            let _working = Working::begin(&model, item, &wish, most);
            begun.borrow_mut().push(item);
            sleep(ms(wish.millis)).await;
            item
        };
        work.with_lock(lock).or_skip()
    });
    let mut items = items.buffer_keyed(most).waiting(waiting);
    if in_order {
        items = items.in_order();
    }

    // Others have the keys now and then, and leases are lost.
    let others = async {
        for _ in 0..6 {
            let lease = there.obtain(*dice.pick(&KEYS)).lease().await.unwrap();
            sleep(ms(dice.next(10))).await;
            lease.release().await.ok();
            sleep(ms(dice.next(10))).await;
            if dice.next(4) == 0 {
                store.expire(dice.pick(&KEYS));
            }
        }
        std::future::pending::<()>().await;
    };
    let stop = async {
        match dropped_after {
            Some(millis) => sleep(ms(millis)).await,
            None => std::future::pending().await,
        }
    };
    let (mut done, mut failed) = (Vec::new(), 0);
    let is_whole = {
        let all = async {
            while let Some(item) = items.next().await {
                match item {
                    Ok(item) => done.push(item),
                    Err(LockError::Lost { .. }) => failed += 1,
                    Err(error) => panic!("{error}"),
                }
            }
        };
        tokio::select! {
            () = all => true,
            () = stop => false,
            () = others => unreachable!("it never ends"),
        }
    };
    drop(items);
    assert_eq!(model.working.get(), 0);
    assert!(is_idle(&here).await, "something is left");
    let mut unique = done.clone();
    unique.sort_unstable();
    assert!(!in_order || unique == done, "out of order: {done:?}");
    unique.dedup();
    assert_eq!(unique.len(), done.len(), "twice: {done:?}");
    assert!(done.iter().all(|item| begun.borrow().contains(item)));
    if is_whole {
        let skipped = wishes.len() - done.len() - failed;
        let may_be_skipped = wishes.iter().filter(|wish| wish.wait.is_some()).count();
        assert!(skipped <= may_be_skipped, "{skipped} are missing");
        // Each that has begun has ended in one way. One may have lost its lease before it had a place.
        assert!(begun.borrow().len() <= done.len() + failed);
    }
}

#[tokio::test(start_paused = true)]
async fn any_stream_keeps_its_promises() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let ran = tokio::time::timeout(ms(600_000), run(seed)).await;
        assert!(ran.is_ok(), "seed {seed} hangs");
    }
}
