use std::collections::VecDeque;
use std::iter;

/// A queue that is empty most of the time, and is a single pointer then: a registry may hold a hundred thousand keys.
/// One element costs one allocation, and the last that goes takes the memory along.
#[derive(Debug)]
pub(super) struct Few<T>(Option<Box<Filled<T>>>);

#[derive(Debug)]
struct Filled<T> {
    first: T,
    rest: VecDeque<T>,
}

impl<T> Few<T> {
    pub(super) const fn new() -> Self {
        Self(None)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn push_back(&mut self, last: T) {
        match &mut self.0 {
            Some(filled) => filled.rest.push_back(last),
            None => self.0 = Some(Box::new(Filled::of(last))),
        }
    }

    pub(super) fn push_front(&mut self, first: T) {
        match &mut self.0 {
            Some(filled) => {
                let second = std::mem::replace(&mut filled.first, first);
                filled.rest.push_front(second);
            }
            None => self.0 = Some(Box::new(Filled::of(first))),
        }
    }

    pub(super) fn front(&self) -> Option<&T> {
        self.0.as_ref().map(|filled| &filled.first)
    }

    #[inline]
    pub(super) fn pop_front(&mut self) -> Option<T> {
        if self.is_empty() { None } else { self.pop() }
    }

    fn pop(&mut self) -> Option<T> {
        let filled = self.0.as_mut()?;
        match filled.rest.pop_front() {
            Some(second) => Some(std::mem::replace(&mut filled.first, second)),
            None => self.0.take().map(|filled| filled.first),
        }
    }

    /// Takes out the first that is meant.
    #[inline]
    pub(super) fn remove_first(&mut self, which: impl Fn(&T) -> bool) -> Option<T> {
        let filled = self.0.as_mut()?;
        if which(&filled.first) {
            return self.pop_front();
        }
        let at = filled.rest.iter().position(which)?;
        filled.rest.remove(at)
    }

    #[inline]
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let Some(filled) = &mut self.0 else {
            return;
        };
        filled.rest.retain(&mut keep);
        if !keep(&filled.first) {
            self.pop_front();
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        let filled = self.0.iter();
        filled.flat_map(|filled| iter::once(&filled.first).chain(&filled.rest))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        let filled = self.0.iter_mut();
        filled.flat_map(|filled| iter::once(&mut filled.first).chain(&mut filled.rest))
    }
}

impl<T> Filled<T> {
    fn of(first: T) -> Self {
        let rest = VecDeque::new();
        Self { first, rest }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// It is a queue like any other.
        #[test]
        fn few_are_a_queue(steps in proptest::collection::vec(0_u8..6, 0..60)) {
            let mut few = Few::new();
            let mut queue = VecDeque::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    0 | 1 => {
                        few.push_back(number);
                        queue.push_back(number);
                    }
                    2 => {
                        few.push_front(number);
                        queue.push_front(number);
                    }
                    3 => prop_assert_eq!(few.pop_front(), queue.pop_front()),
                    4 => {
                        let at = queue.iter().position(|one| one % 3 == 0);
                        let removed = at.and_then(|at| queue.remove(at));
                        prop_assert_eq!(few.remove_first(|one| one % 3 == 0), removed);
                    }
                    _ => {
                        few.retain(|one| one % 4 != 1);
                        queue.retain(|one| one % 4 != 1);
                    }
                }
                prop_assert_eq!(few.front(), queue.front());
                prop_assert_eq!(few.is_empty(), queue.is_empty());
                prop_assert!(few.iter().eq(queue.iter()));
                prop_assert!(few.iter_mut().eq(queue.iter_mut()));
            }
        }
    }
}
