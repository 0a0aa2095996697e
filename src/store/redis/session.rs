//! A registry's line to a Redis server, as the registry sees it.

use std::fmt;
use std::sync::Arc;

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use tokio::runtime::Handle;

use super::call::{Job, Wish};
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::inbox::{Inbox, Pace};
use super::link::Link;
use crate::StoreError;
use crate::store::contract::{Op, Opening, Session, Sight};

/// Hands wishes to the link's task, and sees to it that there is one.
pub(super) struct RedisSession {
    line: Line,
}

/// What it takes to start the task. Cloned into futures that outlive a borrow of the session.
#[derive(Clone)]
struct Line {
    inbox: Arc<Inbox>,
    endpoint: Endpoint,
    opening: Opening,
}

impl RedisSession {
    pub(super) fn new(endpoint: Endpoint, opening: Opening) -> Self {
        let inbox = Arc::default();
        Self {
            line: Line {
                inbox,
                endpoint,
                opening,
            },
        }
    }
}

impl Line {
    fn start(&self) {
        match self.inbox.pace() {
            Pace::Running => {}
            Pace::Pausing => self.inbox.hurry(),
            Pace::Absent => self.spawn(),
        }
    }

    #[cold]
    fn spawn(&self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        if self.inbox.claim() {
            // Made here and not by the task: if the runtime never runs the task, its drop gives
            // the claim back.
            let link = Link::new(
                self.inbox.clone(),
                self.endpoint.clone(),
                self.opening.clone(),
            );
            runtime.spawn(link.run());
        }
    }

    fn revive(&self) {
        if self.inbox.pace() == Pace::Absent {
            self.spawn();
        }
    }

    fn put(&self, job: Job) {
        self.inbox.put(job);
        // The task may have gone since the caller called start().
        self.revive();
    }
}

impl Session for RedisSession {
    fn start(&self) {
        self.line.start();
    }

    fn revive(&self) {
        self.line.revive();
    }

    fn submit(&self, key: Arc<str>, op: Op) {
        let wish = Wish::Op {
            op,
            was_stale: false,
        };
        self.line.put(Job {
            key,
            wish,
            alone: false,
        });
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<Sight, StoreError>> {
        let line = self.line.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            line.start();
            line.put(Job {
                key,
                wish: Wish::Look(answer),
                alone: false,
            });
            answered.await.unwrap_or_else(|_| {
                let address = line.endpoint.address().clone();
                Err(Fault::Closed { address }.into())
            })
        }
        .boxed()
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        self.line.inbox.close();
    }
}

impl fmt::Debug for RedisSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisSession")
            .field("endpoint", &self.line.endpoint)
            .field("instance", &self.line.opening.instance)
            .field("inbox", &self.line.inbox)
            .finish()
    }
}
