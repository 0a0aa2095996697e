//! A lock that is waited for inside the work that holds it: a deadlock, bounded by the wait, and said.

use std::panic::Location;
use std::time::Duration;

use futures::{StreamExt, stream};
use lockstream::{FutureLockExt, Lock, LockError, OnLost, StreamLockExt};
use tokio::time::Instant;
use tracing::Level;
use tracing::subscriber::DefaultGuard;

use crate::assert_waited_in_vain;
use crate::hearing::Log;
use crate::scene::{BRIEF, KEY, Memory, Scene, ms};

/// What this thread logs as long as the guard lives.
fn hear() -> (Log, DefaultGuard) {
    let log = Log::default();
    let logging = log.hear(Level::WARN);
    (log, logging)
}

/// The warnings so far about nested waits, each on a line. They are then forgotten.
fn in_vain(log: &Log) -> Vec<String> {
    let mut lines = log.take();
    lines.retain(|line| line.contains("inside the work that holds it"));
    lines
}

/// The warnings so far about guards of the task that waited.
fn beside_a_guard(log: &Log) -> Vec<String> {
    let mut lines = log.take();
    lines.retain(|line| line.contains("a guard of the same task"));
    lines
}

/// Where it was called, and what it was given.
#[track_caller]
fn here<T>(value: T) -> (T, &'static Location<'static>) {
    (value, Location::caller())
}

/// One warning, with the key and both lines; none in a build without debug assertions.
#[track_caller]
fn assert_told(log: &Log, outer: &Location<'_>, inner: &Location<'_>) {
    assert_one(&in_vain(log), outer, inner);
}

#[track_caller]
fn assert_one(told: &[String], outer: &Location<'_>, inner: &Location<'_>) {
    if !cfg!(debug_assertions) {
        assert_eq!(told, [""; 0]);
        return;
    }
    let [told] = told else {
        panic!("not one warning: {told:#?}");
    };
    let at = |name, place: &Location<'_>| format!("{name}={}:{}:", place.file(), place.line());
    for part in [
        "WARN",
        "key=\"k\"",
        &at("outer", outer),
        &at("inner", inner),
    ] {
        assert!(told.contains(part), "no {part} in {told}");
    }
    let columns = told.matches(concat!(file!(), ":")).count();
    assert_eq!(columns, 2, "{told}");
}

/// Each thing that waits, inside each thing that holds.
#[tokio::test(start_paused = true)]
async fn both_places_are_named() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let plain: &Lock = &s.here.obtain(KEY).wait(BRIEF);
    let ok = async || Ok::<_, LockError>(());
    let one = || stream::iter([Ok::<_, LockError>(())]);
    macro_rules! waiters {
        ($($waiter:expr;)+) => {[$({
            let (waiter, place) = $waiter;
            let waited = async {
                let begin = Instant::now();
                waiter.await;
                assert!(begin.elapsed() >= BRIEF, "{}", stringify!($waiter));
            };
            (waited.boxed_local(), place)
        }),+]};
    }
    use futures::FutureExt;
    let waiters = || {
        waiters! {
            here(async {}.with_lock(plain).map(|told| assert_waited_in_vain!(told)));
            here(ok().try_with_lock(plain).map(|told| assert_waited_in_vain!(told)));
            here(async {}.with_lock(plain).or_skip().map(|told| assert!(told.unwrap().is_none())));
            here(plain.with_lease(async |_| ()).map(|told| assert_waited_in_vain!(told)));
            here(plain.try_with_lease(async |_| ok().await).map(|told| assert_waited_in_vain!(told)));
            here(StreamLockExt::with_lock(one(), plain).count().map(|n| assert_eq!(n, 1)));
            here(StreamLockExt::try_with_lock(one(), plain).count().map(|n| assert_eq!(n, 1)));
            here(plain.with_lease_stream(|_| one()).count().map(|n| assert_eq!(n, 1)));
            here(plain.try_with_lease_stream(|_| one()).count().map(|n| assert_eq!(n, 1)));
            here(plain.acquire().map(|told| assert!(!told.unwrap())));
            here(plain.acquire_within(BRIEF).map(|told| assert!(!told.unwrap())));
            here(plain.lease().map(|told| assert_waited_in_vain!(told)));
            here(plain.lease_within(BRIEF).map(|told| assert_waited_in_vain!(told)));
        }
    };
    for (waiter, inner) in waiters() {
        let (work, outer) = here(waiter.with_lock(&s.lock));
        work.await.unwrap();
        assert_told(&log, outer, inner);
    }
    macro_rules! holders {
        ($waiter:ident: $($holder:expr;)+) => {$(
            let (waiter, inner) = here(plain.lease().map(|told| assert_waited_in_vain!(told)));
            let $waiter = waiter;
            let (holder, outer) = $holder;
            holder.await;
            assert_told(&log, outer, inner);
        )+};
    }
    holders! { w:
        here(w.with_lock(&s.lock).map(Result::unwrap));
        here(w.map(Ok::<_, LockError>).try_with_lock(&s.lock).map(Result::unwrap));
        here(s.lock.with_lease(|_| w).map(Result::unwrap));
        here(s.lock.try_with_lease(|_| w.map(Ok::<_, LockError>)).map(Result::unwrap));
        here(StreamLockExt::with_lock(stream::once(w), &s.lock).count());
        here(StreamLockExt::try_with_lock(stream::once(w).map(Ok::<_, LockError>), &s.lock).count());
        here(s.lock.with_lease_stream(|_| stream::once(w)).count());
        here(s.lock.try_with_lease_stream(|_| stream::once(w).map(Ok::<_, LockError>)).count());
    }
    s.settles().await;
}

/// The innermost on the key is told: it is the nearest to what can be mended.
#[tokio::test(start_paused = true)]
async fn of_several_the_innermost_is_named() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let plain = s.here.obtain(KEY).wait(BRIEF);
    let (waiter, inner) = here(plain.lease());
    let (work, outer) = here(waiter.with_lock(&s.nested));
    let told = work.with_lock((&s.here, "other")).with_lock(&s.lock).await;
    assert_waited_in_vain!(told.unwrap().unwrap().unwrap());
    assert_told(&log, outer, inner);
    s.settles().await;
}

/// Once an acquisition, however often it is polled, and again for the next.
#[tokio::test(start_paused = true)]
async fn once_an_acquisition() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let plain = s.here.obtain(KEY).wait(BRIEF);
    let work = async {
        for times in 1..4 {
            let mut waiter = plain.lease();
            let told = loop {
                tokio::select! {
                    biased;
                    told = &mut waiter => break told,
                    () = tokio::time::sleep(ms(7)) => (),
                }
            };
            assert_waited_in_vain!(told);
            let told = in_vain(&log);
            assert_eq!(
                told.len(),
                usize::from(cfg!(debug_assertions)),
                "{times}: {told:#?}"
            );
        }
    };
    work.with_lock(&s.lock).await.unwrap();
    s.settles().await;
}

/// Whatever is no deadlock is none.
#[tokio::test(start_paused = true)]
async fn the_innocent_are_not_warned_of() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let plain = s.here.obtain(KEY).wait(BRIEF);
    let zero = plain.clone().wait(Duration::ZERO);
    let theirs = s.there.obtain(KEY).wait(BRIEF);
    let work = async {
        assert!(!plain.acquire_once().await.unwrap());
        assert!(plain.lease_once().await.unwrap().is_none());
        assert!(!plain.acquire_within(Duration::ZERO).await.unwrap());
        assert_waited_in_vain!(async {}.with_lock(&zero).await);
        assert!(async {}.with_lock(&zero).or_skip().await.unwrap().is_none());
        async {}.with_lock(&s.nested).await.unwrap();
        async {}.with_lock((&s.here, "other")).await.unwrap();
        assert_waited_in_vain!(theirs.lease().await);
        assert_waited_in_vain!(tokio::spawn(plain.lease()).await.unwrap());
        // Made, and not polled.
        drop((plain.lease(), plain.acquire()));
    };
    work.with_lock(&s.lock).await.unwrap();
    let guard = plain.lease().await.unwrap();
    assert_waited_in_vain!(plain.lease().await);
    guard.release().await.unwrap();
    // What was lost is nobody's any more.
    let run_on = plain.clone().ttl(ms(50)).on_lost(OnLost::RunOn);
    let work = run_on.with_lease(async |lease| {
        lease.lost().await;
        plain.lease().await.unwrap().release().await.unwrap();
    });
    work.await.unwrap();
    assert_eq!(in_vain(&log), [""; 0]);
    s.settles().await;
}

/// What waits beside a guard or a handle of its own task waited in vain without a word, `reentrant` or not.
async fn beside_guards(s: &Scene<Memory>, log: &Log) {
    let handle = s.here.obtain(KEY);
    let plain = s.here.obtain(KEY).wait(BRIEF);
    for is_reentrant in [false, true] {
        let plain = match is_reentrant {
            true => plain.clone().reentrant(),
            false => plain.clone(),
        };
        let (guard, outer) = here(s.lock.lease());
        let guard = guard.await.unwrap();
        let (waiter, inner) = here(plain.lease());
        assert_waited_in_vain!(waiter.await);
        assert_one(&beside_a_guard(log), outer, inner);
        let (waiter, inner) = here(async {}.with_lock(&plain));
        assert_waited_in_vain!(waiter.await);
        assert_one(&beside_a_guard(log), outer, inner);
        guard.release().await.unwrap();
        let (acquired, outer) = here(handle.acquire());
        assert!(acquired.await.unwrap());
        let (waiter, inner) = here(plain.acquire());
        assert!(!waiter.await.unwrap());
        assert_one(&beside_a_guard(log), outer, inner);
        handle.release().await.unwrap();
    }
    let (guard, outer) = here(s.here.obtain_all([KEY, "other"]).lease());
    let guard = guard.await.unwrap();
    let (waiter, inner) = here(plain.lease());
    assert_waited_in_vain!(waiter.await);
    assert_one(&beside_a_guard(log), outer, inner);
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_guard_of_the_same_task_is_named() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    beside_guards(&s, &log).await;
    let spawned = tokio::spawn(async move {
        beside_guards(&s, &log).await;
        s
    });
    spawned.await.unwrap().settles().await;
}

/// Another task's guard, another process's, one that came after the wait began, and work that is beside the wait.
#[tokio::test(start_paused = true)]
async fn guards_of_others_are_not_named() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let plain = s.here.obtain(KEY).wait(BRIEF);
    let theirs = tokio::spawn(s.lock.lease()).await.unwrap().unwrap();
    assert_waited_in_vain!(plain.lease().await);
    theirs.release().await.unwrap();
    let other = s.there.obtain(KEY).lease().await.unwrap();
    assert_waited_in_vain!(plain.lease().await);
    // The first has it for what is left of the second's wait.
    let sooner = async {
        let sooner = plain.lease().await.unwrap();
        tokio::time::sleep(BRIEF * 2).await;
        sooner.release().await.unwrap();
    };
    let end = async {
        tokio::time::sleep(BRIEF / 2).await;
        other.release().await.unwrap();
    };
    let ((), later, ()) = tokio::join!(sooner, plain.lease(), end);
    assert_waited_in_vain!(later);
    let guard = plain.lease().await.unwrap();
    assert!(plain.lease_once().await.unwrap().is_none());
    guard.release().await.unwrap();
    let work = tokio::time::sleep(BRIEF * 2).with_lock(&s.lock);
    let (worked, waited) = tokio::join!(work, plain.lease());
    worked.unwrap();
    assert_waited_in_vain!(waited);
    assert_eq!(beside_a_guard(&log), [""; 0]);
    s.settles().await;
}

/// A handle that is dropped while it holds is warned of if that frees the lock, and only then.
#[tokio::test(start_paused = true)]
async fn a_handle_dropped_inside_frees_nothing() {
    let s = Scene::new(Memory::default()).await;
    let (log, _logging) = hear();
    let carried = async {
        assert!(s.nested.clone().acquire().await.unwrap());
        assert!(s.is_busy().await);
        assert_eq!(log.take(), [""; 0]);
        let handle = s.nested.clone();
        assert!(handle.acquire().await.unwrap());
        handle
    };
    let handle = carried.with_lock(&s.lock).await.unwrap();
    assert_eq!(log.take(), [""; 0]);
    drop(handle);
    let told = log.take();
    assert!(
        told.len() == 1 && told[0].contains("last handle"),
        "{told:#?}"
    );
    s.settles().await;
}
