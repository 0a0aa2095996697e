//! The one task that asks the replicas, for as long as its session lives.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::{Either, select};
use tokio::time::{Instant, sleep};

use super::ledger::{Round, Seen};
use super::session::Core;
use super::wire::Wire;
use crate::store::redis::fault::Fault;
use crate::store::redis::keys::Names;
use crate::store::redis::pauses::Pauses;

pub(super) struct Task {
    core: Arc<Core>,
    names: Names,
    wire: Option<Wire>,
    /// How often the session's connection had gone when `wire` was made.
    downs: u64,
    /// Whether the task was ever polled.
    has_begun: bool,
}

impl Task {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let opening = &core.opening;
        Self {
            names: Names::new(opening.prefix.clone(), opening.instance.clone()),
            core,
            wire: None,
            downs: 0,
            has_begun: false,
        }
    }

    pub(super) async fn run(mut self) {
        self.has_begun = true;
        let mut pauses = Pauses::default();
        while let Some(round) = self.next_round().await {
            let core = self.core.clone();
            let asked = {
                // A round of which nothing is left, since the session's connection has gone, is not waited for.
                let forgotten = pin!(core.forgotten(round.number));
                match select(forgotten, pin!(self.ask(&round))).await {
                    Either::Left(_) => None,
                    Either::Right((asked, _)) => Some(asked),
                }
            };
            match asked {
                None => self.wire = None,
                Some(Ok(seen)) => {
                    pauses = Pauses::default();
                    self.on_seen(&round, &seen);
                }
                Some(Err(fault)) => {
                    self.on_failed(&round, fault);
                    if self.core.is_waiting() {
                        // Whoever comes meanwhile is a reason to try at once.
                        let bell = pin!(self.core.bell.notified());
                        select(bell, pin!(sleep(pauses.next().min(round.wait)))).await;
                    }
                }
            }
        }
    }

    /// Waits until somebody waits; `None` when the session was dropped.
    async fn next_round(&mut self) -> Option<Round> {
        loop {
            if self.core.closed.load(Ordering::Acquire) {
                return None;
            }
            if let Some(round) = self.core.begin() {
                return Some(round);
            }
            let bell = pin!(self.core.bell.notified());
            let has_ended = match &mut self.wire {
                None => {
                    bell.await;
                    false
                }
                Some(wire) => {
                    let ended = pin!(wire.ended());
                    matches!(select(bell, ended).await, Either::Right(_))
                }
            };
            if has_ended {
                self.wire = None;
            }
        }
    }

    /// May be dropped half-way: it changes nothing in the store.
    async fn ask(&mut self, round: &Round) -> Result<Seen, Fault> {
        let core = &self.core;
        let timeout = core.opening.response_timeout;
        if self.downs != round.downs {
            self.wire = None;
        }
        let wire = match &mut self.wire {
            Some(wire) => wire,
            None => {
                let wire = Wire::connect(&core.endpoint, timeout).await?;
                self.downs = round.downs;
                self.wire.insert(wire)
            }
        };
        wire.confirm(&self.names, round, core.rule, timeout).await
    }

    fn on_seen(&mut self, round: &Round, seen: &Seen) {
        let Some(wire) = &self.wire else {
            unreachable!("it has just answered")
        };
        let address = wire.address().clone();
        if !seen.ours.contains(&true) {
            // It may be another server than the session's, after a fail-over. So may the next be, but not for ever.
            self.wire = None;
        }
        self.core
            .act(|ledger| ledger.seen(round.number, seen, &address));
    }

    fn on_failed(&mut self, round: &Round, fault: Fault) {
        tracing::debug!(%fault, "could not ask the replicas");
        self.wire = None;
        let source = Box::new(fault);
        let error = Fault::Unasked { source }.into();
        self.core
            .act(|ledger| ledger.failed(Instant::now(), round.number, &error));
    }
}

impl Drop for Task {
    /// The session was dropped, or the runtime has gone.
    fn drop(&mut self) {
        self.core.runs.store(false, Ordering::Release);
        // A runtime on its way down took the task and dropped it: what waits was never ours, and an answer here could
        // start the next task on the same runtime, without end.
        if self.has_begun {
            let address = self.core.endpoint.address().clone();
            let error = Fault::Abandoned { address }.into();
            self.core.act(|ledger| ledger.give_up(&error));
        }
    }
}
