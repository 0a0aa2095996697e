//! A registry's line to a Redis server, as the registry sees it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use tokio::runtime::Handle;

use super::call::{Job, Wish};
#[cfg(feature = "cluster")]
use super::cluster::{Seeds, Task};
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::inbox::{Inbox, Pace};
use super::link::Link;
use crate::StoreError;
use crate::store::contract::{Op, Opening, Session, Sight};

/// Where the leases are.
#[derive(Clone, Debug)]
pub(super) enum Place {
    Server(Box<Endpoint>),
    #[cfg(feature = "cluster")]
    Cluster(Seeds),
}

impl Place {
    /// Host and port, or the socket's path; of one node.
    pub(super) fn address(&self) -> &Arc<str> {
        match self {
            Self::Server(endpoint) => endpoint.address(),
            #[cfg(feature = "cluster")]
            Self::Cluster(seeds) => seeds.address(),
        }
    }

    /// Whether somebody answers, and takes us in.
    pub(super) async fn try_out(&self, within: Duration) -> Result<(), Fault> {
        match self {
            Self::Server(endpoint) => endpoint.try_out(within).await,
            #[cfg(feature = "cluster")]
            Self::Cluster(seeds) => seeds.try_out(within).await,
        }
    }
}

/// Hands wishes to the link's task, and sees to it that there is one.
pub(super) struct RedisSession {
    line: Line,
}

/// What it takes to start the task. Cloned into futures that outlive a borrow of the session.
#[derive(Clone)]
struct Line {
    inbox: Arc<Inbox>,
    place: Place,
    opening: Opening,
}

impl RedisSession {
    pub(super) fn new(place: Place, opening: Opening) -> Self {
        let inbox = Arc::default();
        Self {
            line: Line {
                inbox,
                place,
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
            let (inbox, opening) = (self.inbox.clone(), self.opening.clone());
            match self.place.clone() {
                Place::Server(endpoint) => {
                    runtime.spawn(Link::new(inbox, *endpoint, opening).run());
                }
                #[cfg(feature = "cluster")]
                Place::Cluster(seeds) => {
                    runtime.spawn(Task::new(inbox, seeds, opening).run());
                }
            }
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
        self.line.put(Job::new(key, op));
    }

    fn inspect(&self, key: Arc<str>) -> BoxFuture<'static, Result<Sight, StoreError>> {
        let line = self.line.clone();
        async move {
            let (answer, answered) = oneshot::channel();
            line.start();
            line.put(Job::of(key, Wish::Look(answer)));
            answered.await.unwrap_or_else(|_| {
                let address = line.place.address().clone();
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
            .field("place", &self.line.place)
            .field("instance", &self.line.opening.instance)
            .field("inbox", &self.line.inbox)
            .finish()
    }
}
