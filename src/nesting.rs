//! Which locks the code that runs now is inside of: what a nested lock looks for.
//!
//! While a combinator polls its work, a frame stands on a stack of the polling thread; it is gone
//! when that poll returns or unwinds. So the stack is what is polled inside what, at this moment,
//! wherever the next poll of the same work may run. A task that a nested runtime polls inside is no
//! part of the work: frames count only within their own task.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use tokio::task;

use crate::engine::{Engine, WaiterState};
use crate::lease::Lease;
use crate::settings::OnFinish;

thread_local! {
    /// It grows to the deepest nesting so far, and stays so: a poll allocates nothing.
    static STACK: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

struct Frame {
    /// Who it is, never looked into: the combinator that made the frame keeps it alive.
    engine: *const Engine,
    caller: Arc<WaiterState>,
    on_finish: OnFinish,
    task: Option<task::Id>,
    place: &'static Location<'static>,
}

/// A frame stands as long as this does, on the thread that made it.
#[must_use]
pub(crate) struct Inside {
    entered: bool,
    here: PhantomData<*const ()>,
}

/// A lease that the code that runs now is inside of.
pub(crate) struct Around {
    pub(crate) caller: Arc<WaiterState>,
    /// What it has settled for its end.
    pub(crate) on_finish: OnFinish,
    /// Where it was asked for.
    pub(crate) place: &'static Location<'static>,
}

/// The code that runs now is inside the lease until what this returns is dropped.
pub(crate) fn enter(lease: &Lease, place: &'static Location<'static>) -> Inside {
    let frame = Frame {
        engine: Arc::as_ptr(lease.engine()),
        caller: lease.caller().clone(),
        on_finish: lease.on_finish(),
        task: task::try_id(),
        place,
    };
    // A thread that ends has no stack any more: what it polls then is inside of nothing.
    let entered = STACK.try_with(|stack| stack.borrow_mut().push(frame));
    Inside {
        entered: entered.is_ok(),
        here: PhantomData,
    }
}

/// The lease of this registry's on the key that the code that runs now is inside of, if it is valid.
pub(crate) fn around(engine: &Arc<Engine>, key: &str) -> Option<Around> {
    let inside = STACK.try_with(|stack| {
        let stack = stack.borrow();
        if stack.is_empty() {
            return None;
        }
        let task = task::try_id();
        let mut frames = stack.iter().rev();
        // The innermost on the key: it is there because what is around it was lost, or shares it.
        let frame = frames.find(|frame| {
            frame.task == task
                && std::ptr::eq(frame.engine, Arc::as_ptr(engine))
                && **frame.caller.key() == *key
        })?;
        Some(Around {
            caller: frame.caller.clone(),
            on_finish: frame.on_finish,
            place: frame.place,
        })
    });
    inside
        .ok()
        .flatten()
        .filter(|around| around.caller.is_held(engine.clock().now()))
}

impl Drop for Inside {
    fn drop(&mut self) {
        if self.entered {
            // Dropped where the stack is not borrowed.
            let frame = STACK.try_with(|stack| stack.borrow_mut().pop());
            debug_assert!(!matches!(frame, Ok(None)), "a frame that was not its own");
        }
    }
}
