use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::runtime::{Handle, Id};
use tokio::time::Instant;

use crate::base::sync::AtomicWaker;
use crate::base::{LockError, LossCause, Token};
use crate::engine::{Caller, Engine, Phase, ViewContext};
use crate::handle::verify_lease::{Verify, verify};
use crate::turnstile::LeaseEnd;

/// A view of a lease, which cannot release it: for work that needs the fencing token, the deadline, or the loss.
#[derive(Clone)]
pub struct LeaseView {
    /// A view does not keep the registry alive.
    pub(super) view_context: Arc<ViewContext>,
    pub(super) caller: Arc<Caller>,
    pub(super) token: Token,
    /// If it is a lease of several keys: `caller` and `token` are those of the first.
    pub(super) group: Option<Arc<Group>>,
}

/// The leases of several keys that are one lease.
pub(super) struct Group {
    /// The name of all keys.
    pub(super) key: Arc<str>,
    pub(super) members: Vec<LeaseView>,
    /// What is cancelled at the first loss.
    #[cfg(feature = "tokio-util")]
    pub(super) cancellation: std::sync::OnceLock<crate::engine::Cancellation>,
}

impl LeaseView {
    /// The name of what is locked: of several keys, that of [`obtain_all`](crate::LockRegistry::obtain_all).
    pub fn key(&self) -> &str {
        self.whole_key()
    }

    pub(super) fn whole_key(&self) -> &Arc<str> {
        match &self.group {
            Some(group) => &group.key,
            None => self.caller.key(),
        }
    }

    /// The leases of its keys.
    pub(crate) fn members(&self) -> &[Self] {
        match &self.group {
            Some(group) => &group.members,
            None => std::slice::from_ref(self),
        }
    }

    /// What the tokens of this lease have in common.
    #[cfg(feature = "tokio-util")]
    pub(crate) fn cancellation(&self) -> &std::sync::OnceLock<crate::engine::Cancellation> {
        match &self.group {
            Some(group) => &group.cancellation,
            None => &self.caller.cancellation,
        }
    }

    /// A caller waits for the loss of this lease: the timer must run, also if the runtime of the lease ends (D7).
    pub(crate) fn note_runtime(&self) {
        if let Some(engine) = self.view_context.engine.upgrade() {
            engine.note_runtime();
        }
    }

    /// The fencing token: strictly greater for every later lease of this key. Of several keys, that of the first.
    ///
    /// For a statement of your own that calls `lockstream.fence` in PostgreSQL, ask for it while the lease is held. If
    /// nobody has asked by its end, the next caller of the registry may work under the same row.
    pub fn token(&self) -> Token {
        let first = self.members().first();
        first.map_or(self.token, Self::see_token)
    }

    /// The token for logs and errors.
    pub(crate) fn told_token(&self) -> Token {
        self.token
    }

    /// The token of a lease of one key, which may fence a transaction from now on.
    fn see_token(&self) -> Token {
        if self.view_context.fence.is_some()
            && let Some(engine) = self.view_context.engine.upgrade()
        {
            engine.see_token(&self.caller);
        }
        self.token
    }

    /// The fencing token of one of the keys of [`obtain_all`](crate::LockRegistry::obtain_all). `None` for another key.
    pub fn token_of(&self, key: &str) -> Option<Token> {
        self.member(key).map(Self::see_token)
    }

    /// The lease of one of its keys.
    fn member(&self, key: &str) -> Option<&Self> {
        let mut members = self.members().iter();
        members.find(|member| **member.caller.key() == *key)
    }

    /// The owner under which the store has this lease, `<instance>:<sequence>`: what
    /// [`Lock::inspect`](crate::Lock::inspect) shows as [`InspectedHolder::owner`](crate::InspectedHolder::owner) while it
    /// is held. Of several keys, that of the first. `None` once the lease is over, or its registry dropped.
    pub fn owner(&self) -> Option<String> {
        self.members().first().and_then(Self::own_owner)
    }

    /// The owner of one of the keys of [`obtain_all`](crate::LockRegistry::obtain_all). `None` for another key, too.
    pub fn owner_of(&self, key: &str) -> Option<String> {
        self.member(key).and_then(Self::own_owner)
    }

    fn own_owner(&self) -> Option<String> {
        let engine = self.view_context.engine.upgrade()?;
        let owned = engine.owner_of(&self.caller);
        let (_, owner) = owned.filter(|_| self.own_loss().is_none())?;
        Some(owner)
    }

    /// The registry, if it is still there.
    pub(crate) fn engine(&self) -> Result<Arc<Engine>, LockError> {
        let key = self.whole_key().clone();
        let engine = self.view_context.engine.upgrade();
        engine.ok_or(LockError::Closed { key })
    }

    /// The time until which nobody else can hold the key, on our own clock. It may move earlier after the machine was
    /// suspended, since suspended time counts. Of several keys, the earliest.
    pub fn deadline(&self) -> Instant {
        let deadlines = self.members().iter().map(|member| member.caller.deadline());
        let earliest = deadlines.min().unwrap_or_default();
        self.view_context.clock.instant(earliest)
    }

    /// Whether the lease is held and its deadline has not passed. False once it is being released, and after a
    /// shutdown of its registry.
    pub fn is_valid(&self) -> bool {
        self.view_context.ensure_timer();
        let now = self.view_context.clock.now();
        self.members()
            .iter()
            .all(|member| member.caller.is_held(now))
    }

    /// Asks the store whether it still has this lease, and prolongs nothing. [`is_valid`](Self::is_valid) looks at our own
    /// clock alone: it cannot know that somebody has deleted the key, or [released it by
    /// force](crate::LockRegistry::force_release), until the next renewal.
    ///
    /// `Ok` says that the store had the lease when it answered. It proves nothing for later: fence what must not be
    /// written by a stale holder.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if it is gone, or over: the lease is lost from then on, as if a renewal had found out.
    /// [`LockError::Store`] if no answer came within the registry's response time-out: then it is not known.
    /// [`LockError::Closed`] if the registry was shut down.
    ///
    /// # Cancel safety
    ///
    /// Dropped at any time, it has changed nothing.
    pub fn verify(&self) -> Verify {
        Verify::new(verify(self.clone()))
    }

    /// Resolves to the error when the lease is lost ([`LockError::Lost`]) or its registry is shut down
    /// ([`LockError::Closed`]), also if that happened before this call, or if only the release found the loss. It
    /// never resolves after any other release, nor after the lease was [detached](crate::Lease::detach) or left to expire.
    ///
    /// # Cancel safety
    ///
    /// Dropping it has no effect.
    pub fn lost(&self) -> Lost {
        Lost {
            view: self.clone(),
            watch: None,
            runtime: None,
        }
    }

    pub(crate) fn caller(&self) -> &Arc<Caller> {
        &self.caller
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn context(&self) -> &ViewContext {
        &self.view_context
    }

    /// How the lease ended under its holder, if it did. Of several keys, the first that is lost.
    pub(crate) fn loss(&self) -> Option<LockError> {
        self.view_context.ensure_timer();
        self.members().iter().find_map(Self::own_loss)
    }

    /// The error of what comes after the end of the lease, also if its own guard has ended it.
    pub(crate) fn over(&self) -> LockError {
        let (key, token) = (self.caller.key().clone(), self.token);
        let cause = LossCause::Ended;
        self.loss().unwrap_or(LockError::Lost { key, token, cause })
    }

    fn own_loss(&self) -> Option<LockError> {
        let key = self.caller.key().clone();
        let (token, cause) = match self.caller.phase() {
            Phase::Closing { .. }
            | Phase::Ended {
                end: LeaseEnd::Closed,
                ..
            } => return Some(LockError::Closed { key }),
            Phase::Ended {
                token,
                end: LeaseEnd::Lost(cause),
            }
            | Phase::Finished {
                token,
                end: LeaseEnd::Lost(cause),
            } => (token, cause),
            Phase::Ended { token, .. } => (token, LossCause::Ended),
            // The deadline is proved on our own clock, whether or not the timer has run.
            Phase::Held { token } if self.view_context.clock.now() >= self.caller.deadline() => {
                let engine = self.view_context.engine.upgrade();
                let cause = engine.map_or(LossCause::RegistryFailed, |engine| {
                    engine.cause_of_expiry(&self.caller)
                });
                (token, cause)
            }
            _ => return None,
        };
        Some(LockError::Lost { key, token, cause })
    }
}

impl fmt::Debug for LeaseView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseView")
            .field("key", &self.key())
            .field("token", &self.token)
            .field("valid", &self.is_valid())
            .finish_non_exhaustive()
    }
}

/// Future of [`LeaseView::lost`] and [`Lease::lost`](crate::Lease::lost); resolves to the error.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Lost {
    view: LeaseView,
    watch: Option<Arc<AtomicWaker>>,
    /// Where it was polled last.
    runtime: Option<Id>,
}

impl Future for Lost {
    type Output = LockError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LockError> {
        let this = &mut *self;
        if let Some(loss) = this.view.loss() {
            return Poll::Ready(loss);
        }
        let view = &this.view;
        let runtime = Handle::try_current().ok().map(|runtime| runtime.id());
        if this.runtime != runtime {
            this.runtime = runtime;
            view.note_runtime();
        }
        let watch = this.watch.get_or_insert_with(|| {
            let waker = Arc::default();
            for member in view.members() {
                member.caller.watch_with(&waker, false);
            }
            waker
        });
        // Watch first, look again, and only then wait: else a loss between the look and the
        // watching would wake nobody.
        watch.register(cx.waker());
        match this.view.loss() {
            Some(loss) => Poll::Ready(loss),
            None => Poll::Pending,
        }
    }
}
