//! Was the resource ever anything else than one register that adds up? Decided by `stateright`'s tester.

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

/// The register as it would be if everything happened one after another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Register {
    /// The greatest token seen.
    pub(crate) mark: u64,
    pub(crate) value: u64,
}

/// What is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Read, then write one more than was read, both with this token.
    Add { token: u64 },
    /// A write for itself.
    Write { token: u64, value: u64 },
    /// The parent's own look.
    Look,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ret {
    /// The value was this, and is one more now.
    Added(u64),
    /// An addition that read, and then was refused or did not come to its write.
    ReadOnly,
    Written,
    /// A greater token was seen before.
    Stale,
    Seen(Register),
}

impl SequentialSpec for Register {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        let (Op::Add { token } | Op::Write { token, .. }) = *op else {
            return Ret::Seen(*self);
        };
        if token < self.mark {
            return Ret::Stale;
        }
        self.mark = token;
        match *op {
            Op::Write { value, .. } => {
                self.value = value;
                Ret::Written
            }
            _ => {
                self.value += 1;
                Ret::Added(self.value - 1)
            }
        }
    }

    fn is_valid_step(&mut self, op: &Op, ret: &Ret) -> bool {
        match (op, ret) {
            // All that it did is what its read did.
            (Op::Add { token }, Ret::ReadOnly) => {
                let allowed = *token >= self.mark;
                self.mark = self.mark.max(*token);
                allowed
            }
            _ => self.invoke(op) == *ret,
        }
    }
}

/// One line of a history. Callers are told apart by small numbers, which may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Invoked(usize, Op),
    Returned(usize, Ret),
}

/// A piece of one key's history, cut where nothing was under way. It begins in the state in which the one before was
/// seen to end, so the whole is linearizable if, and only if, every piece is.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    pub(crate) key: String,
    pub(crate) origin: Register,
    pub(crate) steps: Vec<Step>,
}

impl Window {
    pub(crate) fn is_linearizable(&self) -> Result<bool, String> {
        let mut tester = LinearizabilityTester::new(self.origin);
        for step in &self.steps {
            match *step {
                Step::Invoked(caller, op) => tester.on_invoke(caller, op)?,
                Step::Returned(caller, ret) => tester.on_return(caller, ret)?,
            };
        }
        Ok(tester.is_consistent())
    }
}

/// What the checker has found so far.
#[derive(Debug, Default)]
pub(crate) struct Verdict {
    pub(crate) windows: u64,
    pub(crate) steps: u64,
    /// Windows in which callers were under way at the same time.
    pub(crate) concurrent: u64,
    pub(crate) breaches: Vec<String>,
}

impl Verdict {
    pub(crate) fn judge(&mut self, window: &Window) {
        self.windows += 1;
        self.steps += window.steps.len() as u64;
        let mut under_way = 0;
        let mut most = 0;
        for step in &window.steps {
            match step {
                Step::Invoked(..) => under_way += 1,
                Step::Returned(..) => under_way -= 1,
            }
            most = most.max(under_way);
        }
        self.concurrent += u64::from(most > 1);
        let fault = match window.is_linearizable() {
            Ok(true) => return,
            Ok(false) => "it is no history of one register".to_owned(),
            Err(error) => format!("the checker cannot read it: {error}"),
        };
        self.breaches.push(format!(
            "history of {}: {fault}: from {:?}: {:?}",
            window.key, window.origin, window.steps
        ));
    }
}
