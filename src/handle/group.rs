//! Several keys as one lock.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::base::clock::Moment;
use crate::base::{Clock, LockError};
use crate::handle::acquire::Acquiring;
use crate::handle::lease::Lease;
use crate::handle::lease_view::Lost;
use crate::handle::options::LockOptions;

/// The acquisition of several keys, one after the other in the order of their bytes (M9). So any two callers take the
/// keys that both want in the same order, and do not wait for each other in a circle.
///
/// The keys that it holds already are renewed until it has the last one. Dropped, it releases them.
#[derive(Debug)]
pub(crate) struct GroupAcquiring {
    options: LockOptions,
    /// In the order of the keys, with what tells that one of them is lost.
    held: Vec<(Lease, Lost)>,
    /// That of the next key.
    current: Option<Box<Acquiring>>,
    began: Moment,
}

impl GroupAcquiring {
    pub(crate) fn new(options: LockOptions) -> Self {
        let began = options.known_engine().view_context.clock.now();
        Self {
            options,
            held: Vec::new(),
            current: None,
            began,
        }
    }

    /// Whether it is known to wait for others, which have the next key.
    pub(crate) fn waits_for_others(&self) -> bool {
        let current = self.current.as_ref();
        current.is_some_and(|current| current.waits_for_others())
    }

    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Lease, LockError>> {
        loop {
            // Before the look at the others: a wait that has ended in vain has released them.
            if let Some(current) = &mut self.current
                && let Poll::Ready(acquired) = current.poll(cx)
            {
                self.current = None;
                let lease = acquired.map_err(|error| self.waited(error))?;
                let lost = lease.lost();
                self.held.push((lease, lost));
            }
            self.drop_lost(cx);
            if self.current.is_some() {
                return Poll::Pending;
            }
            let Some(mut next) = self.options.member(self.held.len()) else {
                return Poll::Ready(Ok(self.finish()));
            };
            let held = self.held.iter().map(|(lease, _)| lease.caller().clone());
            next.wait = Some(self.wait_left());
            let next = Acquiring::behind(next, held.collect());
            self.current = Some(Box::new(next));
        }
    }

    /// If a key was lost meanwhile, those after it are released, and it goes on from there.
    fn drop_lost(&mut self, cx: &mut Context<'_>) {
        let lost = self.held.iter_mut().position(|(lease, lost)| {
            // It was also released if nobody polled this for too long (W4).
            Pin::new(lost).poll(cx).is_ready() || !lease.is_valid()
        });
        if let Some(first) = lost {
            // The wait for the next key ends first.
            self.current = None;
            self.release_from(first);
        }
    }

    fn release_from(&mut self, first: usize) {
        for (lease, _) in self.held.drain(first..) {
            // It frees the key whatever the lock's `on_finish` says. It goes on in the background.
            drop(lease.release());
        }
    }

    /// What is left of the wait, which is one for all keys.
    fn wait_left(&self) -> Duration {
        let now = self.options.known_engine().view_context.clock.now();
        match self.options.wait() {
            Duration::MAX => Duration::MAX,
            wait => Clock::after(self.began, wait).saturating_sub(now),
        }
    }

    fn waited(&self, error: LockError) -> LockError {
        match error {
            LockError::NotAcquired { key, holder, .. } => {
                let now = self.options.known_engine().view_context.clock.now();
                let waited = match self.options.wait() {
                    Duration::ZERO => Duration::ZERO,
                    _ => now.saturating_sub(self.began),
                };
                LockError::NotAcquired {
                    key,
                    waited,
                    holder,
                }
            }
            other => other,
        }
    }

    /// All are held. From now on they are renewed as the lock says.
    fn finish(&mut self) -> Lease {
        let held = std::mem::take(&mut self.held).into_iter();
        let views = held.map(|(lease, _)| lease.into_view()).collect();
        Lease::of_group(&self.options, views)
    }
}

impl Drop for GroupAcquiring {
    fn drop(&mut self) {
        self.current = None;
        self.release_from(0);
    }
}
