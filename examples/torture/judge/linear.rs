//! Was the resource ever anything else than one register that adds up, with so many inside? Decided by `stateright`'s
//! tester.

use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};

/// The resource as it would be if everything happened one after another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Register {
    /// The greatest token of an exclusive lease that was seen, and of a shared one.
    pub(crate) mark: u64,
    pub(crate) shared_mark: u64,
    pub(crate) value: u64,
    /// Who is inside with a permit: the token, the weight and the limit.
    pub(crate) inside: Vec<(u64, u64, u64)>,
}

impl Register {
    /// Whether an exclusive lease with this token may use it. All that are older may not from then on.
    pub(crate) fn admits(&mut self, token: u64) -> bool {
        let is_new = token >= self.mark && token >= self.shared_mark;
        if is_new {
            self.mark = token;
            self.inside.retain(|(inside, ..)| *inside >= token);
        }
        is_new
    }

    /// What a reader sees.
    pub(crate) fn read(&mut self, token: u64) -> Option<u64> {
        (token >= self.mark).then(|| {
            self.shared_mark = self.shared_mark.max(token);
            self.value
        })
    }

    /// One with a permit comes in. If there is no room, the oldest have to leave, and if that is this one, it is too late.
    /// Those with smaller tokens count against the limit of one with a greater.
    pub(crate) fn enter(&mut self, token: u64, weight: u64, limit: u64) -> bool {
        if token < self.mark {
            return false;
        }
        self.shared_mark = self.shared_mark.max(token);
        self.inside.push((token, weight, limit));
        self.inside.sort_unstable();
        while !self.has_room() {
            self.inside.remove(0);
        }
        self.inside.contains(&(token, weight, limit))
    }

    fn has_room(&self) -> bool {
        let mut taken = 0;
        self.inside.iter().all(|(_, weight, limit)| {
            taken += weight;
            taken <= *limit
        })
    }

    /// Whether it was still inside.
    pub(crate) fn leave(&mut self, token: u64) -> bool {
        let before = self.inside.len();
        self.inside.retain(|(inside, ..)| *inside != token);
        self.inside.len() < before
    }
}

/// What is asked of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    /// Read, then write one more than was read, both with this token.
    Add {
        token: u64,
    },
    /// A write for itself.
    Write {
        token: u64,
        value: u64,
    },
    /// What a reader does.
    Read {
        token: u64,
    },
    Enter {
        token: u64,
        weight: u64,
        limit: u64,
    },
    Leave {
        token: u64,
    },
    /// The parent's own look.
    Look,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ret {
    /// The value was this, and is one more now.
    Added(u64),
    /// An addition that read, and then was refused or did not come to its write.
    ReadOnly,
    Written,
    Value(u64),
    Entered,
    Left,
    /// A greater token was seen before.
    Stale,
    Seen(Register),
}

impl SequentialSpec for Register {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        let done = match *op {
            Op::Look => return Ret::Seen(self.clone()),
            Op::Read { token } => self.read(token).map(Ret::Value),
            Op::Enter {
                token,
                weight,
                limit,
            } => self.enter(token, weight, limit).then_some(Ret::Entered),
            Op::Leave { token } => self.leave(token).then_some(Ret::Left),
            Op::Write { token, value } => self.admits(token).then(|| {
                self.value = value;
                Ret::Written
            }),
            Op::Add { token } => self.admits(token).then(|| {
                self.value += 1;
                Ret::Added(self.value - 1)
            }),
        };
        done.unwrap_or(Ret::Stale)
    }

    fn is_valid_step(&mut self, op: &Op, ret: &Ret) -> bool {
        match (op, ret) {
            // All that it did is what its read did.
            (Op::Add { token }, Ret::ReadOnly) => self.admits(*token),
            _ => self.invoke(op) == *ret,
        }
    }
}

/// One line of a history. Callers are told apart by small numbers, which may be used again.
#[derive(Clone, Debug, PartialEq, Eq)]
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
        let mut tester = LinearizabilityTester::new(self.origin.clone());
        for step in &self.steps {
            match step.clone() {
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
