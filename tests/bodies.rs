//! HTTP through a `LockLayer`: bodies that are sent under the lock, and the lease in a request's extensions. On the memory
//! store, where time is paused.

use std::error::Error;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::poll;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use lockstream::store::MemoryStore;
use lockstream::tower::{LockLayer, LockedBody, RequestLock};
use lockstream::{FutureLockExt, LeaseView, Lock, LockError, LockRegistry, Token};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceExt, service_fn};

type BoxError = Box<dyn Error + Send + Sync>;

/// Two processes on one store.
fn two() -> (MemoryStore, LockRegistry, LockRegistry) {
    let store = MemoryStore::new();
    let registry = || LockRegistry::builder(store.clone()).build().unwrap();
    let (here, there) = (registry(), registry());
    (store, here, there)
}

/// A body whose frames come from the test.
struct Rows {
    frames: mpsc::UnboundedReceiver<Result<&'static [u8], BoxError>>,
    dropped: Arc<AtomicBool>,
    /// Acquired whenever a frame is asked for, without waiting.
    inside: Option<Lock>,
}

impl Body for Rows {
    type Data = &'static [u8];
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, BoxError>>> {
        if let Some(lock) = &self.inside {
            let Poll::Ready(lease) = pin!(lock.lease()).poll(cx) else {
                panic!("not inside");
            };
            drop(lease.unwrap());
        }
        let frame = self.frames.poll_recv(cx);
        frame.map(|frame| frame.map(|frame| frame.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_closed() && self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(7)
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

/// What the test sends as the body of one response, and sees of it.
struct Sent {
    frames: mpsc::UnboundedSender<Result<&'static [u8], BoxError>>,
    dropped: Arc<AtomicBool>,
}

impl Sent {
    fn row(&self, row: &'static [u8]) {
        self.frames.send(Ok(row)).unwrap();
    }

    fn is_dropped(&self) -> bool {
        self.dropped.load(Ordering::Relaxed)
    }
}

fn rows() -> (Rows, Sent) {
    let (sender, frames) = mpsc::unbounded_channel();
    let dropped = Arc::new(AtomicBool::new(false));
    let sent = Sent {
        frames: sender,
        dropped: dropped.clone(),
    };
    let rows = Rows {
        frames,
        dropped,
        inside: None,
    };
    (rows, sent)
}

/// The path is the key; `/` needs no lock.
fn lock_of(locks: &LockRegistry, request: &Request<()>) -> RequestLock {
    match request.uri().path() {
        "/" => RequestLock::Unlocked,
        path => locks.obtain(path).into(),
    }
}

fn get(path: &str) -> Request<()> {
    Request::get(path).body(()).unwrap()
}

/// The response that is there already, under the lock of its path to the end of its body.
async fn answer(
    locks: &LockRegistry,
    path: &str,
    response: Result<Response<Rows>, LockError>,
) -> Result<Response<LockedBody<Rows>>, LockError> {
    let locks = locks.clone();
    let layer = LockLayer::new(move |request: &Request<()>| lock_of(&locks, request));
    let mut response = Some(response);
    let inner = tower::util::BoxService::new(service_fn(move |_: Request<()>| {
        std::future::ready(response.take().unwrap())
    }));
    let inner = Once(Arc::new(std::sync::Mutex::new(Some(inner))));
    layer
        .hold_through_body()
        .layer(inner)
        .oneshot(get(path))
        .await
}

/// A service that is called once, through whatever clone.
struct Once<S>(Arc<std::sync::Mutex<Option<S>>>);

impl<S> Clone for Once<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<R, S: Service<R>> Service<R> for Once<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.lock().unwrap().as_mut().unwrap().poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.0.lock().unwrap().take().unwrap().call(request)
    }
}

async fn is_free(locks: &LockRegistry) -> bool {
    locks.obtain("/a").lease_once().await.unwrap().is_some()
}

async fn next<B: Body>(body: &mut Pin<Box<B>>) -> Option<Result<B::Data, B::Error>> {
    let frame = poll_fn(|cx| body.as_mut().poll_frame(cx)).await;
    frame.map(|frame| frame.map(|frame| frame.into_data().ok().unwrap()))
}

/// The next frame is the loss of the lock, and the last.
async fn assert_ends_with<B>(body: &mut Pin<Box<B>>, is_it: impl Fn(&LockError) -> bool)
where
    B: Body<Data: std::fmt::Debug, Error = BoxError>,
{
    let told = next(body).await.unwrap().unwrap_err();
    let told = told.downcast_ref::<LockError>().unwrap();
    assert!(is_it(told), "{told:?}");
    assert!(next(body).await.is_none());
}

/// The lock ended with the head, and two wrote their bodies at a time.
#[tokio::test(start_paused = true)]
async fn the_lock_covers_the_body() {
    let (store, here, there) = two();
    let (rows, sent) = rows();
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(7));
    assert!(format!("{body:?}").contains("Holding"), "{body:?}");
    // However long it takes: the lease is renewed.
    for row in [b"1", b"2"] {
        sleep(Duration::from_secs(300)).await;
        assert!(!is_free(&there).await);
        sent.row(row);
        assert_eq!(next(&mut body).await.unwrap().unwrap(), row);
    }
    drop(sent);
    assert!(!body.is_end_stream(), "the lock is held");
    assert!(next(&mut body).await.is_none());
    assert!(body.is_end_stream());
    assert!(is_free(&there).await, "released before the end was told");
    assert!(next(&mut body).await.is_none());
    drop((body, here, there));
    assert_eq!(store.keys(), 0);
}

/// The client has gone, or the server has sent all that there is, and does not ask for the end.
#[tokio::test(start_paused = true)]
async fn a_dropped_body_releases() {
    let (_, here, there) = two();
    let (rows, sent) = rows();
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    sent.row(b"1");
    next(&mut body).await.unwrap().unwrap();
    assert!(!is_free(&there).await);
    drop(body);
    assert!(sent.is_dropped() && is_free(&there).await);
}

/// Whoever waits for a frame learns of the loss at once. The work behind the body ends before the lock is another's.
#[tokio::test(start_paused = true)]
async fn a_loss_ends_the_body_with_an_error() {
    let (store, here, there) = two();
    let (rows, sent) = rows();
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    sent.row(b"1");
    next(&mut body).await.unwrap().unwrap();
    let reading = tokio::spawn(async move {
        assert_ends_with(&mut body, LockError::is_lost).await;
        assert!(body.is_end_stream());
    });
    sleep(Duration::from_secs(1)).await;
    assert!(!reading.is_finished());
    store.expire("/a");
    reading.await.unwrap();
    assert!(sent.is_dropped() && is_free(&there).await);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_the_body_with_an_error() {
    let (_, here, there) = two();
    let (rows, sent) = rows();
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    let closed = |error: &LockError| matches!(error, LockError::Closed { .. });
    let (_, ()) = tokio::join!(here.shutdown(), assert_ends_with(&mut body, closed));
    assert!(sent.is_dropped() && is_free(&there).await);
}

/// A client that reads slowly keeps the lock for as long as its ttl says.
#[tokio::test(start_paused = true)]
async fn a_ttl_bounds_the_body() {
    let (_, here, there) = two();
    let locks = here.clone();
    let lock = move |_: &Request<()>| locks.obtain("/a").ttl(Duration::from_secs(2));
    let layer = LockLayer::new(lock).hold_through_body();
    let (rows, sent) = rows();
    let rows = Arc::new(std::sync::Mutex::new(Some(rows)));
    let service = layer.layer(service_fn(move |_: Request<()>| {
        let rows = rows.lock().unwrap().take().unwrap();
        async move { Ok::<_, LockError>(Response::new(rows)) }
    }));
    let begin = Instant::now();
    let response = service.oneshot(get("/a")).await.unwrap();
    let mut body = Box::pin(response.into_body());
    assert_ends_with(&mut body, LockError::is_lost).await;
    assert!(begin.elapsed() <= Duration::from_secs(2));
    assert!(sent.is_dropped());
    let next = async {}.with_lock((&there, "/a"));
    next.await.unwrap();
}

/// One without a body, and one that failed, are told when the lock is free: nothing is left to be dropped.
#[tokio::test(start_paused = true)]
async fn what_has_no_body_is_told_unlocked() {
    let (_, here, there) = two();
    let (empty, sent) = rows();
    drop(sent.frames);
    let response = answer(&here, "/a", Ok(Response::new(empty))).await.unwrap();
    assert!(is_free(&there).await);
    assert!(response.body().is_end_stream());
    assert!(next(&mut Box::pin(response.into_body())).await.is_none());
    let error = async {}.with_lock("not installed").await.unwrap_err();
    let failed = answer(&here, "/a", Err(error)).await;
    assert!(matches!(failed, Err(LockError::NoRegistry { .. })));
    assert!(is_free(&there).await);
}

/// A request without a lock, and the answer to one whose lock failed: their bodies are read as they are.
#[tokio::test(start_paused = true)]
async fn a_body_without_a_lock_is_read_as_it_is() {
    let (_, here, there) = two();
    let (unlocked, sent) = rows();
    let response = answer(&here, "/", Ok(Response::new(unlocked)))
        .await
        .unwrap();
    assert_eq!(here.in_use(), 0);
    let mut body = Box::pin(response.into_body());
    assert!(!body.is_end_stream() && body.size_hint().exact() == Some(7));
    assert!(format!("{body:?}").contains("no lock"), "{body:?}");
    sent.row(b"1");
    assert_eq!(next(&mut body).await.unwrap().unwrap(), b"1");
    sent.frames.send(Err("torn".into())).unwrap();
    let torn = next(&mut body).await.unwrap().unwrap_err();
    assert_eq!(torn.to_string(), "torn");
    drop(sent);
    assert!(next(&mut body).await.is_none());

    let held = there.obtain("/a").lease().await.unwrap();
    let locks = here.clone();
    let lock = move |_: &Request<()>| locks.obtain("/a").wait(Duration::ZERO);
    let busy = |_: LockError| {
        let (rows, sent) = rows();
        sent.row(b"busy");
        let response = Response::builder().status(StatusCode::CONFLICT);
        Ok::<_, LockError>(response.body(rows).unwrap())
    };
    let inner = service_fn(
        async |_: Request<()>| -> Result<Response<Rows>, LockError> { unreachable!("it is busy") },
    );
    let service = LockLayer::new(lock)
        .hold_through_body()
        .or_else(busy)
        .layer(inner);
    let response = service.oneshot(get("/a")).await.unwrap();
    assert_eq!(response.status(), StatusCode::CONFLICT);
    let mut body = Box::pin(response.into_body());
    assert_eq!(next(&mut body).await.unwrap().unwrap(), b"busy");
    held.release().await.unwrap();
}

/// An error of the body is its own, and the lock is held until the body is dropped.
#[tokio::test(start_paused = true)]
async fn an_error_of_the_body_is_its_own() {
    let (_, here, there) = two();
    let (rows, sent) = rows();
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    sent.frames.send(Err("torn".into())).unwrap();
    let torn = next(&mut body).await.unwrap().unwrap_err();
    assert_eq!(torn.to_string(), "torn");
    assert!(!is_free(&there).await);
    drop(body);
    assert!(is_free(&there).await);
}

/// What the body locks while it is polled is inside of the request's lock.
#[tokio::test(start_paused = true)]
async fn a_body_is_inside_of_its_lock() {
    let (_, here, _) = two();
    let (mut rows, sent) = rows();
    rows.inside = Some(here.obtain("/a").nested());
    let response = answer(&here, "/a", Ok(Response::new(rows))).await.unwrap();
    let mut body = Box::pin(response.into_body());
    sent.row(b"1");
    assert_eq!(next(&mut body).await.unwrap().unwrap(), b"1");
}

/// Between the head and the first frame the lease may be lost, too: with the head in the last poll, there is no response.
#[tokio::test(start_paused = true)]
async fn a_loss_in_the_last_poll_is_no_response() {
    let (store, here, there) = two();
    let locks = here.clone();
    let layer =
        LockLayer::new(move |_: &Request<()>| locks.obtain("/a").ttl(Duration::from_secs(2)));
    let dropped = Arc::new(AtomicBool::new(false));
    let told = dropped.clone();
    let service = layer
        .hold_through_body()
        .layer(service_fn(move |_: Request<()>| {
            let (mut rows, sent) = rows();
            rows.dropped = told.clone();
            // One poll, in which the whole lease passes.
            let mut advance = Box::pin(tokio::time::advance(Duration::from_secs(3)));
            async move {
                let _sent = sent;
                poll_fn(|cx| {
                    let _ = advance.as_mut().poll(cx);
                    Poll::Ready(())
                })
                .await;
                Ok::<_, LockError>(Response::new(rows))
            }
        }));
    let told = service.oneshot(get("/a")).await.unwrap_err();
    assert!(told.is_lost(), "{told}");
    assert!(dropped.load(Ordering::Relaxed));
    assert!(is_free(&there).await);
    drop((here, there));
    assert_eq!(store.keys(), 0);
}

/// A handler had to know the key to learn its token, and a spawned task could not.
#[tokio::test(start_paused = true)]
async fn a_request_has_its_lease_in_its_extensions() {
    let (_, here, there) = two();
    let before = there.obtain("/a").lease().await.unwrap();
    let older = before.token();
    before.release().await.unwrap();
    let locks = here.clone();
    let layer = LockLayer::new(move |request: &Request<()>| lock_of(&locks, request));
    let inner = service_fn(async |request: Request<()>| {
        let lease = request.extensions().get::<LeaseView>().cloned();
        let spawned = tokio::spawn(async move { lease.map(|lease| lease.token()) });
        Ok::<Option<Token>, LockError>(spawned.await.unwrap())
    });
    let service = layer.lease_in_extensions().layer(inner);
    let token = service.clone().oneshot(get("/a")).await.unwrap();
    assert!(token.unwrap() > older);
    assert_eq!(service.clone().oneshot(get("/")).await.unwrap(), None);
    let mut call = Box::pin(service.clone().call(get("/a")));
    assert!(poll!(&mut call).is_pending());
    drop(call);
    assert!(is_free(&there).await);
}

/// For requests of another protocol a closure puts the lease wherever it belongs.
#[tokio::test(start_paused = true)]
async fn a_closure_shows_a_request_its_lease() {
    let (_, here, there) = two();
    let older = there.obtain("/a").lease().await.unwrap();
    let older = {
        let token = older.token();
        older.release().await.unwrap();
        token
    };
    #[derive(Default)]
    struct Write {
        lease: Option<LeaseView>,
    }
    let layer = LockLayer::new(move |_: &Write| here.obtain("/a"));
    let layer = layer.on_lease(|write: &mut Write, lease| write.lease = Some(lease));
    let service = layer.layer(service_fn(async |write: Write| {
        let lease = write.lease.unwrap();
        assert!(lease.is_valid());
        Ok::<_, LockError>(lease)
    }));
    let lease = service.oneshot(Write::default()).await.unwrap();
    assert!(lease.token() > older && !lease.is_valid());
}
