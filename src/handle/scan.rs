use std::collections::HashSet;
use std::fmt;
use std::future::ready;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::Either;
use futures::stream::{self, BoxStream, FusedStream};
use futures::{Stream, StreamExt};

use crate::base::{LockError, StoreError};
use crate::engine::Engine;
use crate::handle::Inspection;
use crate::store::contract::Session;

/// How many keys are inspected at a time.
const AT_A_TIME: usize = 32;

/// A lock that [`LockRegistry::scan`](crate::LockRegistry::scan) has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ScannedLock {
    /// The name of what is locked.
    pub key: Arc<str>,
    /// Who holds it and who waits for it.
    pub inspection: Inspection,
}

/// Stream of [`LockRegistry::scan`](crate::LockRegistry::scan).
#[must_use = "streams do nothing unless polled"]
pub struct Scan {
    /// `None` once it has ended.
    locks: Option<BoxStream<'static, Result<ScannedLock, LockError>>>,
}

impl Scan {
    pub(crate) fn new(engine: Arc<Engine>, start: Arc<str>) -> Self {
        // The session is opened at the first poll, where there is a runtime.
        let locks = stream::once(async move {
            match engine.session() {
                Some(session) => Either::Left(scan(session, start)),
                None => Either::Right(stream::once(ready(Err(LockError::Closed { key: start })))),
            }
        });
        let locks = Some(locks.flatten().boxed());
        Self { locks }
    }
}

fn scan(
    session: Arc<dyn Session>,
    start: Arc<str>,
) -> impl Stream<Item = Result<ScannedLock, LockError>> {
    let mut seen = HashSet::new();
    let keys = session.scan(start.clone()).flat_map(move |page| {
        let keys = match page {
            Ok(keys) => keys
                .into_iter()
                .filter(|key| seen.insert(key.clone()))
                .map(Ok)
                .collect(),
            Err(error) => vec![Err(failed(&start, error))],
        };
        stream::iter(keys)
    });
    let looks = keys.map(move |key| {
        let look = key.map(|key: Arc<str>| (session.inspect(key.clone()), key));
        async move {
            let (look, key) = look?;
            let status = look.await.map_err(|error| failed(&key, error))?;
            let inspection = Inspection::of([(key.clone(), status)].into_iter());
            Ok(ScannedLock { key, inspection })
        }
    });
    looks.buffered(AT_A_TIME).filter(|lock| {
        let is_free =
            |lock: &ScannedLock| !lock.inspection.is_held() && lock.inspection.waiting == 0;
        ready(!lock.as_ref().is_ok_and(is_free))
    })
}

fn failed(key: &Arc<str>, source: StoreError) -> LockError {
    let key = key.clone();
    LockError::Store { key, source }
}

impl Stream for Scan {
    type Item = Result<ScannedLock, LockError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(locks) = &mut self.locks else {
            return Poll::Ready(None);
        };
        let next = locks.poll_next_unpin(cx);
        if matches!(next, Poll::Ready(None)) {
            self.locks = None;
        }
        next
    }
}

impl FusedStream for Scan {
    fn is_terminated(&self) -> bool {
        self.locks.is_none()
    }
}

impl fmt::Debug for Scan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_done = self.locks.is_none();
        f.debug_struct("Scan")
            .field("is_done", &is_done)
            .finish_non_exhaustive()
    }
}
