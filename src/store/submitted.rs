//! Submitted operations, and those that were lost.

use std::mem;
use std::sync::{Arc, Weak};

use super::contract::Op;
use crate::base::StoreError;
use crate::base::mutex::Mutex;
use crate::base::sync::Notify;

/// An op that awaits its one answer. If it is dropped before that, it is noted as lost: a caller waits for it, and no
/// other op of the key is sent before the answer (O2).
#[derive(Debug)]
pub struct SubmittedOp {
    pub key: Arc<str>,
    pub op: Op,
    lost: Weak<DroppedOps>,
}

impl SubmittedOp {
    pub fn new(key: Arc<str>, op: Op, lost: &Arc<DroppedOps>) -> Self {
        let lost = Arc::downgrade(lost);
        Self { key, op, lost }
    }

    /// An op whose answer nobody awaits.
    pub fn unattended(key: impl Into<Arc<str>>, op: Op) -> Self {
        let (key, lost) = (key.into(), Weak::new());
        Self { key, op, lost }
    }

    /// The answer was delivered.
    pub fn answered(&mut self) {
        self.lost = Weak::new();
    }
}

impl Drop for SubmittedOp {
    fn drop(&mut self) {
        if let Some(lost) = self.lost.upgrade() {
            lost.ops.lock().push((self.key.clone(), self.op.clone()));
            lost.wake.notify_one();
        }
    }
}

/// The ops that a session has lost. Their outcome is unknown.
///
/// They may be dropped under any lock of the session, or by a panic. So they are only noted here, and nothing is
/// called that might lock.
#[derive(Debug, Default)]
pub struct DroppedOps {
    ops: Mutex<Vec<(Arc<str>, Op)>>,
    wake: Arc<Notify>,
}

impl DroppedOps {
    /// `wake` is notified of each lost op.
    pub(crate) fn new(wake: Arc<Notify>) -> Self {
        let ops = Mutex::default();
        Self { ops, wake }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ops.lock().is_empty()
    }

    /// Takes them, in the order in which they were lost.
    pub(crate) fn take(&self) -> Vec<(Arc<str>, Op)> {
        mem::take(&mut *self.ops.lock())
    }
}

/// The error of a lost op.
pub(crate) fn dropped_error() -> StoreError {
    StoreError::new("the store session dropped the operation")
}
