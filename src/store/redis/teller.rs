//! What the registry is told, in the order in which it came.

use std::sync::Weak;

use crate::store::contract::{Listener, News};

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

    /// Whether something has come that was not told yet.
    pub(super) fn has_news(&self) -> bool {
        !self.news.is_empty()
    }

    /// Tells the first of what has come, so many at most; returns how many there were.
    pub(super) fn tell_some(&mut self, most: usize) -> usize {
        let count = self.news.len().min(most);
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
