//! The one task of a session, from its first connection to its last.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;

use futures::future::{Either, select};
use tokio::time::Instant;

use super::call::{Job, Wish};
use super::endpoint::Endpoint;
use super::fault::Fault;
use super::inbox::{Inbox, Pace};
use super::keys::Names;
use super::pauses::Pauses;
use super::setup::{ClientId, Connected, Setup};
use super::teller::Teller;
use crate::StoreError;
use crate::store::contract::{News, OpError, Opening};
use crate::store::traffic::{Limits, Traffic};

/// The task's state. Dropped, wherever the task stands, it answers every job that it has.
///
/// What it does while a connection stands is in `serve`.
pub(super) struct Link {
    pub(super) inbox: Arc<Inbox>,
    pub(super) endpoint: Endpoint,
    pub(super) opening: Opening,
    pub(super) names: Names,
    pub(super) traffic: Traffic<Job, Instant>,
    /// The last call's number, over all connections of this task.
    pub(super) number: u64,
    /// The last connection that stood.
    pub(super) old: Option<ClientId>,
    /// Whether it was said that there is no push.
    pub(super) was_warned: bool,
    /// Whether nothing can be pushed to us on this connection.
    pub(super) is_deaf: bool,
    pub(super) teller: Teller,
    /// Empty; what came in passes through it.
    room: VecDeque<Job>,
    /// Whether the task was ever polled.
    has_begun: bool,
}

/// Why a connection serves no more, or was not made.
pub(super) enum End {
    /// The session was dropped.
    Closed,
    Broken(Fault),
}

impl From<Fault> for End {
    fn from(fault: Fault) -> Self {
        Self::Broken(fault)
    }
}

impl Link {
    pub(super) fn new(inbox: Arc<Inbox>, endpoint: Endpoint, opening: Opening) -> Self {
        Self {
            inbox,
            endpoint,
            names: Names::new(opening.prefix.clone(), opening.instance.clone()),
            teller: Teller::new(opening.listener.clone()),
            opening,
            traffic: Traffic::new(Limits::default()),
            number: 0,
            old: None,
            was_warned: false,
            is_deaf: false,
            room: VecDeque::new(),
            has_begun: false,
        }
    }

    /// Runs until the session is dropped, or the registry has gone.
    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let mut pauses = Pauses::default();
        while self.teller.has_listener() {
            if self.pause(&mut pauses).await.is_break() {
                return;
            }
            match self.connect().await {
                Ok(standing) => {
                    let began = Instant::now();
                    match self.serve_here(standing).await {
                        End::Closed => return,
                        End::Broken(fault) => self.lose(&fault.into()),
                    }
                    // One that breaks at once is as good as none.
                    if began.elapsed() > Pauses::LONGEST {
                        pauses = Pauses::default();
                    }
                }
                Err(End::Closed) => return,
                Err(End::Broken(fault)) => self.fail(&fault.into()),
            }
        }
    }

    /// Waits before the next attempt, unless somebody wants something.
    async fn pause(&mut self, pauses: &mut Pauses) -> ControlFlow<()> {
        let pause = pauses.next();
        if !pause.is_zero() && !self.traffic.is_waiting() {
            self.inbox.set_pace(Pace::Pausing);
            let hurried = poll_fn(|cx| self.inbox.poll_hurried(cx));
            select(hurried, pin!(tokio::time::sleep(pause))).await;
            self.inbox.set_pace(Pace::Running);
        }
        if self.inbox.is_closed() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    }

    async fn connect(&mut self) -> Result<Connected, End> {
        self.number += 1;
        let within = self.opening.response_timeout;
        let connecting = async {
            let found = self.endpoint.resolve(within).await?;
            let setup = Setup {
                endpoint: found.as_ref().unwrap_or(&self.endpoint),
                names: &self.names,
                within,
            };
            let standing = setup.run(self.old.as_ref(), self.number).await;
            let standing = standing.inspect_err(|_| setup.endpoint.doubt())?;
            Ok::<_, Fault>((found, standing))
        };
        let closed = poll_fn(|cx| self.inbox.poll_closed(cx));
        // May be dropped half-way: no op runs in it (O2).
        let (found, standing) = match select(closed, pin!(connecting)).await {
            Either::Left(_) => return Err(End::Closed),
            Either::Right((connected, _)) => connected?,
        };
        if let Some(found) = found {
            self.endpoint = found;
        }
        Ok(standing)
    }

    /// Serves until the connection ends, or the server is no more the one to be connected to.
    async fn serve_here(&mut self, standing: Connected) -> End {
        let Some(moved) = self.endpoint.moved(self.opening.response_timeout) else {
            return self.serve(standing).await;
        };
        // Between two turns nothing is half done: dropped there, a connection just breaks.
        match select(moved, pin!(self.serve(standing))).await {
            Either::Left((fault, _)) => End::Broken(fault),
            Either::Right((end, _)) => end,
        }
    }

    /// What callers put in meanwhile waits for its call.
    pub(super) fn take_in(&mut self) {
        self.inbox.take(&mut self.room);
        self.traffic.add(self.room.drain(..));
    }

    /// A connection ended that had stood. It is gone by now with all that it would have written;
    /// what went out is Unknown, op by op (O2). What was not sent waits on.
    fn lose(&mut self, error: &StoreError) {
        tracing::debug!(%error, "lost the connection");
        let jobs = self.traffic.crash();
        self.answer_all(jobs, &OpError::Unknown(error.clone()));
        self.teller.announce(News::Down(error.clone()));
    }

    /// A connection could not be made: whoever waited for it is told.
    fn fail(&mut self, error: &StoreError) {
        tracing::debug!(%error, "could not connect");
        self.take_in();
        let jobs = self.traffic.cancel();
        self.answer_all(jobs, &OpError::Unsent(error.clone()));
        self.teller.announce(News::Down(error.clone()));
    }

    pub(super) fn answer_all(&mut self, jobs: impl IntoIterator<Item = Job>, error: &OpError) {
        for job in jobs {
            self.answer(job, error.clone());
        }
    }

    pub(super) fn answer(&mut self, job: Job, error: OpError) {
        match job.wish {
            Wish::Op { op, .. } => self.teller.tell(News::Replied {
                key: job.key,
                op,
                result: Err(error),
            }),
            Wish::Look(answer) => {
                // Whoever asked may have gone.
                let _ = answer.send(Err(error.store_error().clone()));
            }
        }
    }
}

impl Drop for Link {
    /// The session was dropped, or the runtime has gone: nobody else will answer these.
    fn drop(&mut self) {
        if !self.has_begun {
            // A runtime on its way down took the task and dropped it. Whatever waits was never
            // ours: an answer here could make its taker ask again, and so start the next task on
            // the same runtime, without end.
            self.inbox.set_pace(Pace::Absent);
            return;
        }
        self.traffic.add(self.inbox.resign());
        let address = self.endpoint.address().clone();
        let error = StoreError::from(Fault::Abandoned { address });
        let (sent, unsent) = (self.traffic.crash(), self.traffic.cancel());
        self.answer_all(sent, &OpError::Unknown(error.clone()));
        self.answer_all(unsent, &OpError::Unsent(error.clone()));
        self.teller.announce(News::Down(error));
    }
}
