//! A service of tower handles one request a key at a time. On the memory store, where time is paused.

use std::convert::Infallible;
use std::future::{Ready, pending, poll_fn, ready};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::stream::{BoxStream, StreamExt};
use futures::{FutureExt, poll};
use lockstream::store::MemoryStore;
use lockstream::tower::{LockLayer, RequestLock};
use lockstream::{FutureLockExt, Lock, LockError, LockRegistry, Renewal, Token};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Two processes on one store.
fn two() -> (MemoryStore, LockRegistry, LockRegistry) {
    let store = MemoryStore::new();
    let registry = || LockRegistry::builder(store.clone()).build().unwrap();
    let (here, there) = (registry(), registry());
    (store, here, there)
}

/// A request that names its key; `None`: it needs no lock.
#[derive(Clone, Debug)]
struct Order(Option<&'static str>);

const A: Order = Order(Some("a"));

/// The lock of each order, with the settings of `set`.
fn set(
    locks: LockRegistry,
    set: impl Fn(Lock) -> Lock + Clone,
) -> LockLayer<impl Fn(&Order) -> RequestLock + Clone> {
    LockLayer::new(move |order: &Order| match order.0 {
        Some(key) => set(locks.obtain(key)).into(),
        None => RequestLock::Unlocked,
    })
}

fn each(locks: LockRegistry) -> LockLayer<impl Fn(&Order) -> RequestLock + Clone> {
    set(locks, |lock| lock)
}

async fn is_free(locks: &LockRegistry, key: &str) -> bool {
    locks.obtain(key).lease_once().await.unwrap().is_some()
}

/// An error that can hold one of a lock.
#[derive(Debug)]
enum ShopError {
    Lock(LockError),
    SoldOut,
}

impl From<LockError> for ShopError {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// Counts how many requests of a key are inside, and panics at the second.
#[tokio::test(start_paused = true)]
async fn one_request_a_key_at_a_time() {
    let (store, here, there) = two();
    let inside: Arc<Mutex<Vec<&str>>> = Arc::default();
    let most = Arc::new(AtomicU32::new(0));
    let inner = service_fn(|order: Order| {
        let (inside, most) = (inside.clone(), most.clone());
        async move {
            let key = order.0.unwrap();
            {
                let mut inside = inside.lock().unwrap();
                assert!(!inside.contains(&key), "two at once");
                inside.push(key);
                most.fetch_max(inside.len() as u32, Ordering::Relaxed);
            }
            sleep(ms(3)).await;
            inside.lock().unwrap().retain(|it| *it != key);
            Ok::<_, LockError>(key)
        }
    });
    let services = [here, there].map(|locks| each(locks).layer(inner));
    let calls = (0..60).map(|i| {
        let key = ["a", "b", "c"][i % 3];
        let service = services[i % 2].clone();
        async move { assert_eq!(service.oneshot(Order(Some(key))).await.unwrap(), key) }
    });
    futures::future::join_all(calls).await;
    assert_eq!(
        most.load(Ordering::Relaxed),
        3,
        "different keys run at once"
    );
    drop(services);
    assert_eq!(store.keys(), 0);
}

/// The error of the lock is one of the service, and the inner service was never touched.
#[tokio::test(start_paused = true)]
async fn a_busy_lock_is_an_error_of_the_service() {
    let (_, here, there) = two();
    let held = there.obtain("a").lease().await.unwrap();
    let inner = Inner::default();
    let service = set(here, |lock| lock.wait(ms(300))).layer(inner.clone());
    let begin = Instant::now();
    let told = service.clone().oneshot(A).await.unwrap_err();
    let ShopError::Lock(LockError::NotAcquired { key, .. }) = &told else {
        panic!("{told:?}");
    };
    assert_eq!((&**key, begin.elapsed()), ("a", ms(300)));
    assert_eq!(inner.counts(), (0, 0));
    held.release().await.unwrap();
    service.oneshot(A).await.unwrap();
    assert_eq!(inner.counts(), (1, 1));
}

/// The closure answers, and the error type of the service needs to hold nothing.
#[tokio::test(start_paused = true)]
async fn a_busy_lock_is_what_a_closure_answers() {
    let (store, here, there) = two();
    let (sender, go_on) = oneshot::channel::<()>();
    let go_on = go_on.shared();
    let inner = service_fn(|_: Order| {
        let go_on = go_on.clone();
        async move {
            go_on.await.unwrap();
            Ok::<_, Infallible>(200)
        }
    });
    let answer = |error: LockError| Ok(if error.is_not_acquired() { 409 } else { 503 });
    let service = |locks: LockRegistry| {
        let at_once = move |order: &Order| locks.obtain(order.0.unwrap()).wait(Duration::ZERO);
        LockLayer::new(at_once).or_else(answer).layer(inner)
    };
    let (here_too, ours, theirs) = (here.clone(), service(here), service(there));
    let begin = Instant::now();
    let mut first = Box::pin(ours.clone().oneshot(A));
    assert!(poll!(&mut first).is_pending());
    for rival in [&ours, &theirs] {
        assert_eq!(rival.clone().oneshot(A).await, Ok(409));
        let another = rival.clone().oneshot(Order(Some("b")));
        let mut another = Box::pin(another);
        assert!(poll!(&mut another).is_pending(), "another key is free");
    }
    assert_eq!(begin.elapsed(), Duration::ZERO);
    sender.send(()).unwrap();
    assert_eq!(first.await, Ok(200));
    assert_eq!(theirs.clone().oneshot(A).await, Ok(200));
    // What is no busy lock is given to the closure, too.
    here_too.shutdown().await;
    assert_eq!(ours.clone().oneshot(A).await, Ok(503));
    drop((ours, theirs, here_too));
    assert_eq!(store.keys(), 0);
}

/// Counts how often it was made ready and called. It is ready when it is told to be.
#[derive(Clone, Default)]
struct Inner {
    readied: Arc<AtomicU32>,
    called: Arc<AtomicU32>,
    /// Of this clone: it was made ready, and not called yet.
    is_ready: bool,
    unready: Arc<AtomicBool>,
    /// Looked at whenever readiness is asked for.
    watched: Option<LockRegistry>,
}

impl Inner {
    fn counts(&self) -> (u32, u32) {
        let count = |it: &AtomicU32| it.load(Ordering::Relaxed);
        (count(&self.readied), count(&self.called))
    }
}

impl Service<Order> for Inner {
    type Response = ();
    type Error = ShopError;
    type Future = Ready<Result<(), ShopError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ShopError>> {
        if let Some(locks) = &self.watched {
            let keys = locks.snapshot().keys;
            let held = keys.iter().any(|key| !key.held.is_empty());
            assert!(held, "made ready without the lease");
        }
        if self.unready.load(Ordering::Relaxed) {
            // The test polls again.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.readied.fetch_add(1, Ordering::Relaxed);
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Order) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called unready");
        self.called.fetch_add(1, Ordering::Relaxed);
        ready(Ok(()))
    }
}

/// The layer is ready at once; the inner service when the lock is held, and the lock is held while it is waited for.
#[tokio::test(start_paused = true)]
async fn the_inner_service_is_made_ready_under_the_lease() {
    let (_, here, there) = two();
    let inner = Inner {
        watched: Some(here.clone()),
        ..Inner::default()
    };
    inner.unready.store(true, Ordering::Relaxed);
    let mut service = each(here).layer(inner.clone());
    poll_fn(|cx| service.poll_ready(cx)).await.unwrap();
    assert_eq!(inner.counts(), (0, 0));

    let held = there.obtain("a").lease().await.unwrap();
    let mut call = Box::pin(service.call(A));
    assert!(poll!(&mut call).is_pending());
    held.release().await.unwrap();
    for _ in 0..10 {
        assert!(poll!(&mut call).is_pending());
    }
    assert!(!is_free(&there, "a").await, "it waits under the lease");
    assert_eq!(inner.counts(), (0, 0));
    inner.unready.store(false, Ordering::Relaxed);
    call.await.unwrap();
    assert_eq!(inner.counts(), (1, 1));
    assert!(is_free(&there, "a").await);
}

/// Requests that wait for a lock leave the limit of the inner service to the others.
#[tokio::test(start_paused = true)]
async fn waiting_requests_use_up_no_limit() {
    let (_, here, there) = two();
    let service = ServiceBuilder::new()
        .layer(each(here))
        .concurrency_limit(1)
        .service(service_fn(|_: Order| ready(Ok::<_, LockError>(()))));
    let held = there.obtain("a").lease().await.unwrap();
    let mut waiting: Vec<_> = (0..5)
        .map(|_| Box::pin(service.clone().oneshot(A)))
        .collect();
    for call in &mut waiting {
        assert!(poll!(call).is_pending());
    }
    let begin = Instant::now();
    service.clone().oneshot(Order(Some("b"))).await.unwrap();
    service.clone().oneshot(Order(None)).await.unwrap();
    assert!(begin.elapsed() < ms(5));
    held.release().await.unwrap();
    for call in waiting {
        call.await.unwrap();
    }
}

/// An inner service that fails to be ready, or fails: its error is told, and the lock is free.
#[tokio::test(start_paused = true)]
async fn errors_of_the_inner_service_are_its_own() {
    #[derive(Clone)]
    struct Never;
    impl Service<Order> for Never {
        type Response = ();
        type Error = ShopError;
        type Future = Ready<Result<(), ShopError>>;
        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ShopError>> {
            Poll::Ready(Err(ShopError::SoldOut))
        }
        fn call(&mut self, _: Order) -> Self::Future {
            unreachable!("it was never ready")
        }
    }
    let (_, here, there) = two();
    let layer = each(here);
    let failing = service_fn(|_: Order| ready(Err::<(), _>(ShopError::SoldOut)));
    for told in [
        layer.layer(Never).oneshot(A).await,
        layer.layer(failing).oneshot(A).await,
        layer.layer(Never).oneshot(Order(None)).await,
    ] {
        assert!(matches!(told, Err(ShopError::SoldOut)), "{told:?}");
        assert!(is_free(&there, "a").await);
    }
}

/// Says when it is dropped.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A service that never answers, and whether its call was dropped.
fn endless() -> (
    impl Service<Order, Response = (), Error = LockError, Future: Send> + Clone + Send,
    Arc<AtomicBool>,
) {
    let dropped = Arc::new(AtomicBool::new(false));
    let told = dropped.clone();
    let service = service_fn(move |_: Order| {
        let inside = Dropped(told.clone());
        async move {
            let _inside = inside;
            pending::<Result<(), LockError>>().await
        }
    });
    (service, dropped)
}

/// Dropped while it waits it leaves the queue; dropped while the call runs it drops that, and releases.
#[tokio::test(start_paused = true)]
async fn a_dropped_response_leaves_nothing() {
    let (store, here, there) = two();
    let (inner, dropped) = endless();
    let service = each(here.clone()).layer(inner);
    // Never polled, it does nothing at all.
    drop(service.clone().call(A));
    assert_eq!((here.in_use(), store.keys()), (0, 0));

    let held = there.obtain("a").lease().await.unwrap();
    let mut call = Box::pin(service.clone().call(A));
    assert!(poll!(&mut call).is_pending());
    assert_eq!(here.snapshot().keys.len(), 1);
    drop(call);
    assert_eq!(
        here.snapshot()
            .keys
            .iter()
            .map(|key| key.waiting.len())
            .sum::<usize>(),
        0
    );
    held.release().await.unwrap();
    assert!(is_free(&there, "a").await, "nobody waits any more");

    let mut call = Box::pin(service.clone().call(A));
    assert!(poll!(&mut call).is_pending());
    assert!(!is_free(&there, "a").await && !dropped.load(Ordering::Relaxed));
    drop(call);
    assert!(dropped.load(Ordering::Relaxed));
    assert!(is_free(&there, "a").await);
    drop((service, here, there));
    assert_eq!(store.keys(), 0);
}

/// The inner call is dropped in the moment in which the lease is lost.
#[tokio::test(start_paused = true)]
async fn a_loss_stops_the_inner_call() {
    let (store, here, there) = two();
    let (inner, dropped) = endless();
    let service = each(here).layer(inner);
    let call = tokio::spawn(service.oneshot(A));
    sleep(Duration::from_secs(300)).await;
    assert!(!call.is_finished(), "it is renewed");
    store.expire("a");
    let told = call.await.unwrap().unwrap_err();
    assert!(told.is_lost() && dropped.load(Ordering::Relaxed), "{told}");
    assert!(is_free(&there, "a").await);
}

/// Mode and renewal are the lock's own, too: readers are handled at once, and one whose ttl was set is renewed.
#[tokio::test(start_paused = true)]
async fn all_settings_are_those_of_the_lock() {
    let (_, here, there) = two();
    let readers = set(here, |lock| {
        let lock = lock.shared().ttl(Duration::from_secs(2));
        lock.renewal(Renewal::watchdog())
    });
    let service = readers.layer(service_fn(|_: Order| async {
        sleep(Duration::from_secs(9)).await;
        Ok::<_, LockError>(())
    }));
    let begin = Instant::now();
    let calls = (0..5).map(|_| service.clone().oneshot(A));
    let (told, writer) = tokio::join!(futures::future::join_all(calls), async {
        sleep(ms(1)).await;
        there.obtain("a").lease().await
    });
    assert!(told.iter().all(Result::is_ok), "{told:?}");
    drop(writer.unwrap());
    assert_eq!(begin.elapsed(), Duration::from_secs(9));
}

/// A ttl that was set bounds the call.
#[tokio::test(start_paused = true)]
async fn a_ttl_bounds_the_call() {
    let (_, here, there) = two();
    let (inner, dropped) = endless();
    let layer = set(here, |lock| lock.ttl(Duration::from_secs(2)));
    let begin = Instant::now();
    let told = layer.layer(inner).oneshot(A).await.unwrap_err();
    assert!(told.is_lost() && dropped.load(Ordering::Relaxed), "{told}");
    let took = begin.elapsed();
    assert!((ms(1_970)..=ms(2_000)).contains(&took), "{took:?}");
    let next = async {}.with_lock(there.obtain("a").wait(ms(100)));
    next.await.unwrap();
}

/// Whoever asks for no lock has none: any number at once, also when the store is away.
#[tokio::test(start_paused = true)]
async fn no_lock_is_asked_for_by_name() {
    let (store, here, _) = two();
    store.set_offline(true);
    let inside = Arc::new(AtomicU32::new(0));
    let service = each(here.clone()).layer(service_fn(|_: Order| {
        let inside = inside.clone();
        async move {
            inside.fetch_add(1, Ordering::Relaxed);
            sleep(ms(5)).await;
            Ok::<_, LockError>(inside.load(Ordering::Relaxed))
        }
    }));
    let calls = (0..10).map(|_| service.clone().oneshot(Order(None)));
    for all in futures::future::join_all(calls).await {
        assert_eq!(all.unwrap(), 10);
    }
    assert_eq!(here.in_use(), 0);
}

/// The lock ends with the head of the response. Whoever reads the body reads it unlocked.
#[tokio::test(start_paused = true)]
async fn the_lock_does_not_cover_the_body() {
    let (_, here, there) = two();
    let service = each(here).layer(service_fn(|_: Order| {
        let body: BoxStream<'static, u32> = futures::stream::iter([1, 2, 3]).boxed();
        ready(Ok::<_, LockError>(body))
    }));
    let body = service.oneshot(A).await.unwrap();
    assert!(is_free(&there, "a").await, "before the body was read");
    assert_eq!(body.collect::<Vec<_>>().await, [1, 2, 3]);
}

/// Inside, the handler has the fencing token of the lease that it runs under.
#[tokio::test(start_paused = true)]
async fn a_handler_shares_the_lease_around_it() {
    let (_, here, there) = two();
    let before = there.obtain("a").lease().await.unwrap();
    let older = before.token();
    before.release().await.unwrap();
    let locks = here.clone();
    let service = each(here).layer(service_fn(move |order: Order| {
        let lock = locks.obtain(order.0.unwrap()).reentrant();
        async move {
            let begin = Instant::now();
            let token = lock.with_lease(async |lease| lease.token()).await?;
            assert_eq!(begin.elapsed(), Duration::ZERO);
            Ok::<Token, LockError>(token)
        }
    }));
    assert!(service.oneshot(A).await.unwrap() > older);
}

/// A key that cannot name a lock is told like any other error of the lock.
#[tokio::test(start_paused = true)]
async fn an_invalid_key_is_an_error() {
    let (_, here, _) = two();
    let service = each(here).layer(service_fn(|_: Order| ready(Ok::<(), LockError>(()))));
    let told = service.oneshot(Order(Some(""))).await.unwrap_err();
    assert!(matches!(told, LockError::InvalidKey { .. }), "{told}");
}

/// What is printed says whether a request has a lock, and shows none of it.
#[tokio::test(start_paused = true)]
async fn debug_says_how_it_locks() {
    let (_, here, _) = two();
    let mut locked = each(here).layer(Inner::default());
    let call = locked.call(A);
    assert!(format!("{call:?}").contains("Acquiring"), "{call:?}");
    let call = locked.call(Order(None));
    assert!(format!("{call:?}").contains("no lock"), "{call:?}");
}
