//! Which locks the running code is inside of: what a nested lock looks for.
//!
//! While a combinator polls its work, a frame is on a stack of the polling thread. It is removed
//! when that poll returns or unwinds. So the stack says what is polled inside what at this moment,
//! on whatever thread the next poll of the same work may run. A task that a nested runtime polls
//! inside the work is no part of it: frames count only within their own task.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use tokio::task;

use crate::base::OnFinish;
use crate::engine::{Caller, Engine};
use crate::handle::lease::Lease;
use crate::handle::lease_view::LeaseView;

thread_local! {
    /// Its capacity stays that of the deepest nesting so far: a poll allocates nothing.
    static STACK: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

struct Frame {
    /// Compared, never dereferenced: the combinator that pushed the frame keeps it alive.
    engine: *const Engine,
    task: Option<task::Id>,
    lease: LeaseView,
    on_finish: OnFinish,
    place: &'static Location<'static>,
}

/// A lease that the running code is inside of.
#[derive(Clone)]
pub(crate) struct Enclosing {
    pub(crate) caller: Arc<Caller>,
    pub(crate) on_finish: OnFinish,
    /// Where it was asked for.
    pub(crate) place: &'static Location<'static>,
}

/// The frame is on the stack as long as this exists, on the thread that made it.
#[must_use]
pub(crate) struct FrameGuard {
    entered: bool,
    here: PhantomData<*const ()>,
}

/// The running code is inside the lease until what this returns is dropped.
pub(crate) fn enter(lease: &Lease, place: &'static Location<'static>) -> FrameGuard {
    let frame = Frame {
        engine: Arc::as_ptr(lease.engine()),
        task: task::try_id(),
        lease: lease.view(),
        on_finish: lease.on_finish(),
        place,
    };
    // A thread that is ending has no stack any more: what it polls then is inside of nothing.
    let entered = STACK.try_with(|stack| stack.borrow_mut().push(frame));
    FrameGuard {
        entered: entered.is_ok(),
        here: PhantomData,
    }
}

/// The valid lease of this registry on the key that the running code is inside of: the innermost, if it is inside of
/// several readers or permits.
pub(crate) fn enclosing(engine: &Arc<Engine>, key: &str) -> Option<Enclosing> {
    let innermost = STACK.try_with(|stack| {
        let stack = stack.borrow();
        if stack.is_empty() {
            return None;
        }
        let task = task::try_id();
        let now = engine.view_context.clock.now();
        let mut frames = stack
            .iter()
            .rev()
            .filter(|frame| frame.task == task && std::ptr::eq(frame.engine, Arc::as_ptr(engine)));
        frames.find_map(|frame| {
            let callers = frame.lease.members().iter().map(LeaseView::caller);
            let mut of_key = callers.filter(|caller| **caller.key() == *key);
            let caller = of_key.find(|caller| caller.is_held(now))?;
            Some(Enclosing {
                caller: caller.clone(),
                on_finish: frame.on_finish,
                place: frame.place,
            })
        })
    });
    innermost.ok().flatten()
}

impl Drop for FrameGuard {
    fn drop(&mut self) {
        if self.entered {
            // Returned, so that it is dropped where the stack is not borrowed.
            let frame = STACK.try_with(|stack| stack.borrow_mut().pop());
            debug_assert!(!matches!(frame, Ok(None)), "a frame that was not its own");
        }
    }
}
