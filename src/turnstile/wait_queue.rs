use std::sync::Arc;
use std::time::Duration;

use super::crowd::Crowd;
use super::time::{FOREVER, Moment, Point};

/// One arrival of one waiter; later arrivals have greater ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WaiterId(pub(crate) u64);

/// How a waiter takes "busy".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Wants to be told.
    Once,
    /// Stands in line until its time is over.
    Queue,
}

/// One local caller that waits for the key. `C` is whatever the shell wants back with a verdict.
#[derive(Debug)]
pub(crate) struct Waiter<C> {
    pub(crate) who: C,
    pub(crate) ttl: Duration,
    /// How often its lease is prolonged at most while it is held; 0: it ends `ttl` after it began.
    pub(crate) renewals: u32,
    /// Whether the key stays in the store when its lease ends, until its ttl is over.
    pub(crate) lets_expire: bool,
    pub(crate) patience: Patience,
    pub(crate) until: Moment,
}

impl<C> Waiter<C> {
    pub(super) fn is_patient(&self) -> bool {
        self.patience == Patience::Queue
    }

    /// When its wait is over, if ever.
    pub(super) fn end(&self) -> Option<Point> {
        (self.until != FOREVER).then(|| self.until.into())
    }

    /// Whether the watchdog prolongs its lease.
    pub(super) fn is_renewed(&self) -> bool {
        self.renewals > 0
    }
}

/// One local caller that wants the lease which another owner left in the store. It does not stand in
/// line: nobody else can be given what it wants.
#[derive(Debug)]
pub(super) struct Adopter<C> {
    pub(super) id: WaiterId,
    /// The owner that left it, as the store has it.
    pub(super) from: Arc<str>,
    pub(super) waiter: Waiter<C>,
}

/// The waiters of one key in order of arrival.
///
/// Most keys have none, or one: that is a pointer, and one allocation.
#[derive(Debug)]
pub(super) enum WaitQueue<C> {
    Empty,
    One(Box<(WaiterId, Waiter<C>)>),
    Many(Box<Crowd<C>>),
}

impl<C> WaitQueue<C> {
    pub(super) const fn new() -> Self {
        Self::Empty
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Empty => 0,
            Self::One(_) => 1,
            Self::Many(crowd) => crowd.len(),
        }
    }

    /// Whether anybody wants a place in the store's queue.
    pub(super) fn has_patient(&self) -> bool {
        match self {
            Self::Empty => false,
            Self::One(one) => one.1.is_patient(),
            Self::Many(crowd) => crowd.has_patient(),
        }
    }

    /// The newest arrival.
    pub(super) fn push(&mut self, id: WaiterId, waiter: Waiter<C>) {
        debug_assert!(id > self.last_id(), "{id:?} is not the newest");
        if let Self::Many(crowd) = self {
            crowd.push(id, waiter);
            return;
        }
        *self = match std::mem::replace(self, Self::Empty) {
            Self::One(one) => {
                let mut crowd = Crowd::new();
                crowd.push(one.0, one.1);
                crowd.push(id, waiter);
                Self::Many(Box::new(crowd))
            }
            _ => Self::One(Box::new((id, waiter))),
        };
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<Waiter<C>> {
        match self {
            Self::One(one) if one.0 == id => self.take_one(),
            Self::Many(crowd) => {
                let removed = crowd.remove(id);
                self.forget_crowd();
                removed
            }
            _ => None,
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter<C>> {
        let (one, crowd) = match self {
            Self::Empty => (None, None),
            Self::One(one) => (Some(&one.1), None),
            Self::Many(crowd) => (None, Some(crowd.iter())),
        };
        one.into_iter().chain(crowd.into_iter().flatten())
    }

    pub(super) fn first(&self) -> Option<&Waiter<C>> {
        match self {
            Self::Empty => None,
            Self::One(one) => Some(&one.1),
            Self::Many(crowd) => crowd.first(),
        }
    }

    pub(super) fn first_id(&self) -> Option<WaiterId> {
        match self {
            Self::Empty => None,
            Self::One(one) => Some(one.0),
            Self::Many(crowd) => crowd.first_id(),
        }
    }

    pub(super) fn pop_first(&mut self) -> Option<(WaiterId, Waiter<C>)> {
        match self {
            Self::Empty => None,
            Self::One(one) => {
                let id = one.0;
                self.take_one().map(|waiter| (id, waiter))
            }
            Self::Many(crowd) => {
                let first = crowd.pop_first();
                self.forget_crowd();
                first
            }
        }
    }

    /// Takes out those who will not stand in line and arrived no later than `upto`.
    pub(super) fn take_once(&mut self, upto: WaiterId) -> Vec<Waiter<C>> {
        match self {
            Self::One(one) if one.0 <= upto && !one.1.is_patient() => {
                self.take_one().into_iter().collect()
            }
            Self::Many(crowd) => {
                let taken = crowd.take_once(upto);
                self.forget_crowd();
                taken
            }
            _ => Vec::new(),
        }
    }

    /// The newest arrival.
    pub(super) fn last_id(&self) -> WaiterId {
        match self {
            Self::Empty => WaiterId(0),
            Self::One(one) => one.0,
            Self::Many(crowd) => crowd.last_id(),
        }
    }

    pub(super) fn next_end(&self) -> Option<Point> {
        match self {
            Self::Empty => None,
            Self::One(one) => one.1.end(),
            Self::Many(crowd) => crowd.next_end(),
        }
    }

    /// Takes out one whose time is over.
    pub(super) fn pop_ended(&mut self, now: Point) -> Option<Waiter<C>> {
        if self.next_end()? > now {
            return None;
        }
        match self {
            Self::Many(crowd) => {
                let ended = crowd.pop_next_end();
                self.forget_crowd();
                ended
            }
            _ => self.take_one(),
        }
    }

    fn take_one(&mut self) -> Option<Waiter<C>> {
        match std::mem::replace(self, Self::Empty) {
            Self::One(one) => Some(one.1),
            _ => None,
        }
    }

    /// Gives back the memory of a crowd that is gone.
    fn forget_crowd(&mut self) {
        if matches!(self, Self::Many(crowd) if crowd.len() == 0) {
            *self = Self::Empty;
        }
    }
}
