//! Whatever is nested in whatever, and dropped whenever: as long as one shares the lease nobody else has it, and when
//! the last is gone the lock is free.

use std::cell::RefCell;
use std::future::pending;

use futures::future::{LocalBoxFuture, join_all};
use futures::{FutureExt, StreamExt, stream};
use lockstream::{FutureLockExt, Lease, Lock, StreamLockExt, Token};
use proptest::prelude::*;
use tokio::task::yield_now;
use tokio::time::timeout;

use crate::scene::{BOUND, Memory, Scene};

/// One step of work that is under the lock.
#[derive(Clone, Debug)]
enum Step {
    Yield,
    Look,
    /// A guard, until the steps in it are done.
    Guard(Vec<Step>),
    /// A guard that is released before the next step.
    Release,
    /// A guard that stays when the work is done, and one that a later step drops.
    Carry,
    /// A handle's, that stays likewise.
    Acquire,
    DropCarried,
    WithLock(Vec<Step>),
    WithLease(Vec<Step>),
    Stream(Vec<Vec<Step>>),
    Join(Vec<Vec<Step>>),
    Unordered(Vec<Vec<Step>>),
    /// Dropped after so many polls, if it is not done before.
    Cut(usize, Box<Step>),
    Panic(Box<Step>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let leaf = prop_oneof![
        3 => Just(Step::Yield),
        2 => Just(Step::Look),
        1 => Just(Step::Release),
        1 => Just(Step::Carry),
        1 => Just(Step::Acquire),
        1 => Just(Step::DropCarried),
    ];
    let step = leaf.prop_recursive(5, 40, 4, |step| {
        let some = || prop::collection::vec(step.clone(), 0..4);
        let branches = || prop::collection::vec(some(), 1..4);
        prop_oneof![
            1 => some().prop_map(Step::Guard),
            3 => some().prop_map(Step::WithLock),
            1 => some().prop_map(Step::WithLease),
            1 => branches().prop_map(Step::Stream),
            2 => branches().prop_map(Step::Join),
            1 => branches().prop_map(Step::Unordered),
            2 => (0..6_usize, step.clone()).prop_map(|(polls, step)| Step::Cut(polls, Box::new(step))),
            1 => step.clone().prop_map(|step| Step::Panic(Box::new(step))),
        ]
    });
    prop::collection::vec(step, 0..6)
}

struct Stage {
    scene: Scene<Memory>,
    guards: RefCell<Vec<Lease>>,
    handles: RefCell<Vec<Lock>>,
    token: RefCell<Option<Token>>,
}

impl Stage {
    async fn guard(&self) -> Lease {
        let lease = self.scene.nested.lease().now_or_never();
        let lease = lease.expect("at once").unwrap();
        let token = *self.token.borrow_mut().get_or_insert(lease.token());
        assert_eq!(lease.token(), token, "not the lease around");
        lease
    }

    async fn look(&self) {
        assert!(self.scene.is_busy().await, "freed while it is shared");
    }

    fn is_carried(&self) -> bool {
        !self.guards.borrow().is_empty() || !self.handles.borrow().is_empty()
    }

    fn run<'a>(&'a self, steps: &'a [Step]) -> LocalBoxFuture<'a, ()> {
        async move {
            for step in steps {
                self.step(step).await;
            }
            self.look().await;
        }
        .boxed_local()
    }

    fn step<'a>(&'a self, step: &'a Step) -> LocalBoxFuture<'a, ()> {
        let nested = &self.scene.nested;
        async move {
            match step {
                Step::Yield => yield_now().await,
                Step::Look => self.look().await,
                Step::Guard(steps) => {
                    let guard = self.guard().await;
                    self.run(steps).await;
                    assert!(guard.is_valid());
                }
                Step::Release => self.guard().await.release().await.unwrap(),
                Step::Carry => {
                    let guard = self.guard().await;
                    self.guards.borrow_mut().push(guard);
                }
                Step::Acquire => {
                    let handle = nested.clone();
                    assert!(handle.acquire().await.unwrap());
                    self.handles.borrow_mut().push(handle);
                }
                Step::DropCarried => {
                    let carried = (
                        self.guards.borrow_mut().pop(),
                        self.handles.borrow_mut().pop(),
                    );
                    drop(carried);
                }
                Step::WithLock(steps) => self.run(steps).with_lock(nested).await.unwrap(),
                Step::WithLease(steps) => {
                    let work = nested.with_lease(|_| self.run(steps));
                    work.await.unwrap();
                }
                Step::Stream(rows) => {
                    let rows = stream::iter(rows).then(|row| self.run(row));
                    let rows = StreamLockExt::with_lock(rows, nested);
                    rows.for_each(async |row| row.unwrap()).await;
                }
                Step::Join(branches) => {
                    let branches = branches
                        .iter()
                        .map(|steps| self.run(steps).with_lock(nested));
                    for branch in join_all(branches).await {
                        branch.unwrap();
                    }
                }
                Step::Unordered(rows) => {
                    let rows = stream::iter(rows).map(|row| self.run(row).with_lock(nested));
                    let rows = rows.buffer_unordered(2);
                    rows.for_each(async |row| row.unwrap()).await;
                }
                Step::Cut(polls, step) => cut(*polls, self.step(step)).await,
                Step::Panic(step) => {
                    let broken = async {
                        self.step(step).await;
                        // A panic that the hook does not print.
                        std::panic::resume_unwind(Box::new(()));
                    };
                    let broken = std::panic::AssertUnwindSafe(broken.with_lock(nested));
                    assert!(broken.catch_unwind().await.is_err());
                }
            }
        }
        .boxed_local()
    }
}

/// Drops it after so many polls, wherever it is then.
async fn cut(polls: usize, mut work: LocalBoxFuture<'_, ()>) {
    for _ in 0..polls {
        if futures::poll!(&mut work).is_ready() {
            return;
        }
        yield_now().await;
    }
}

async fn play(steps: &[Step], polls: Option<usize>) {
    let scene = Scene::new(Memory::default()).await;
    let stage = Stage {
        scene,
        guards: RefCell::default(),
        handles: RefCell::default(),
        token: RefCell::default(),
    };
    // Somebody who waits must not get in between, nor be forgotten.
    let waiter = tokio::spawn(
        stage
            .scene
            .there
            .obtain(crate::scene::KEY)
            .lease_within(BOUND),
    );
    let outer = async {
        stage.run(steps).await;
        if polls.is_some() {
            pending::<()>().await;
        }
    };
    let outer = outer.with_lock(&stage.scene.lock);
    match polls {
        None => timeout(BOUND, outer).await.expect("it ends").unwrap(),
        Some(polls) => cut(polls, outer.map(|told| told.unwrap()).boxed_local()).await,
    }
    while stage.is_carried() {
        assert!(!waiter.is_finished(), "had while it is carried");
        stage.look().await;
        let guard = stage.guards.borrow_mut().pop();
        if let Some(guard) = guard {
            assert!(guard.is_valid());
            guard.release().await.unwrap();
            continue;
        }
        let handle = stage.handles.borrow_mut().pop().expect("one of both");
        assert!(handle.is_acquired() && handle.release().await.unwrap());
    }
    let lease = timeout(BOUND, waiter).await.expect("it is free");
    lease.unwrap().unwrap().release().await.unwrap();
    stage.scene.settles().await;
}

proptest! {
    #[test]
    fn never_freed_early_and_never_held_on(steps in steps(), polls in prop::option::of(0..30_usize)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(play(&steps, polls));
    }
}
