//! What the registry is told, in the order in which it came.

use std::sync::Weak;

use crate::store::contract::{Listener, News};

/// More than are answered in one turn: what has piled up beyond that are grants, and they may come faster than they are
/// told in bursts.
const PILE: usize = 1024;

/// Gathers news, and tells it together: the registry is locked once for all of it.
pub(super) struct Teller {
    listener: Weak<dyn Listener>,
    news: Vec<News>,
}

impl Teller {
    pub(super) fn new(listener: Weak<dyn Listener>) -> Self {
        Self {
            listener,
            news: Vec::new(),
        }
    }

    /// Whether the registry is still there.
    pub(super) fn has_listener(&self) -> bool {
        self.listener.strong_count() > 0
    }

    /// Puts something with what is told together.
    pub(super) fn tell(&mut self, news: News) {
        self.news.push(news);
    }

    /// How much has come that was not told yet.
    pub(super) fn count(&self) -> usize {
        self.news.len()
    }

    /// Whether something has come that was not told yet.
    pub(super) fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// Tells the first of what has come, so many at most, or all of it if it piles up; returns how many there were.
    pub(super) fn tell_some(&mut self, most: usize) -> usize {
        let all = self.news.len();
        let count = if all > PILE { all } else { all.min(most) };
        let rest = self.news.split_off(count);
        self.tell_all();
        self.news = rest;
        count
    }

    /// Tells what has come.
    pub(super) fn tell_all(&mut self) {
        if self.news.is_empty() {
            return;
        }
        let news = std::mem::take(&mut self.news);
        if let Some(listener) = self.listener.upgrade() {
            listener.all_news(news);
        }
    }

    /// Tells what is about the connection, after all that came before it.
    pub(super) fn announce(&mut self, news: News) {
        self.tell_all();
        if let Some(listener) = self.listener.upgrade() {
            listener.news(news);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Default)]
    struct Heard(Mutex<Vec<usize>>);

    impl Listener for Heard {
        fn news(&self, _: News) {
            unreachable!("what is gathered is told together")
        }

        fn all_news(&self, news: Vec<News>) {
            self.0.lock().unwrap().push(news.len());
        }
    }

    /// A server may push as much between two turns as a socket takes. Told in bursts, all that has come would be moved for
    /// each of them, and there would be ever more of it.
    #[test]
    fn what_piles_up_is_told_at_once() {
        let heard = Arc::new(Heard::default());
        let listener: Arc<dyn Listener> = heard.clone();
        let mut teller = Teller::new(Arc::downgrade(&listener));
        let mut tell = |count, most| {
            for _ in 0..count {
                teller.tell(News::Freed { key: "k".into() });
            }
            let told = teller.tell_some(most);
            (told, teller.has_news())
        };
        assert_eq!(tell(20, 16), (16, true));
        assert_eq!(tell(0, 16), (4, false));
        assert_eq!(tell(PILE, 16), (16, true));
        assert_eq!(tell(17, 16), (PILE + 1, false));
        assert_eq!(*heard.0.lock().unwrap(), [16, 4, 16, PILE + 1]);
    }
}
