/// As a rule none or one, seldom more: the first needs no allocation, of which every event would
/// otherwise make two.
pub(super) struct Few<T> {
    first: Option<T>,
    others: Vec<T>,
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self {
            first: None,
            others: Vec::new(),
        }
    }
}

impl<T> Few<T> {
    pub(super) fn push(&mut self, item: T) {
        if self.first.is_none() {
            self.first = Some(item);
        } else {
            self.others.push(item);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Takes them out, in the order in which they came.
    pub(super) fn drain(&mut self, mut each: impl FnMut(T)) {
        if let Some(first) = self.first.take() {
            each(first);
            if !self.others.is_empty() {
                std::mem::take(&mut self.others).into_iter().for_each(each);
            }
        }
    }
}

impl<T> Extend<T> for Few<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, items: I) {
        items.into_iter().for_each(|item| self.push(item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_come_out_in_the_order_in_which_they_went_in() {
        for most in 0..4 {
            let mut few = Few::default();
            few.extend(0..most);
            assert_eq!(few.is_empty(), most == 0);
            let mut out = Vec::new();
            few.drain(|item| out.push(item));
            assert!(few.is_empty());
            assert_eq!(out, Vec::from_iter(0..most));
        }
    }
}
