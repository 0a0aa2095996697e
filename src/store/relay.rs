//! What a session that is made of other sessions tells its registry.

use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use super::contract::{Listener, News};

/// Tells news in the order in which it was put in, whoever brings it. More may be put in while it tells.
pub(super) struct Relay {
    listener: Weak<dyn Listener>,
    news: Mutex<Vec<News>>,
    /// Held by whoever tells: others leave it to them, or the order would be lost. It is only ever
    /// tried. (Unlike one of std, it is not poisoned if the listener panics.)
    telling: tokio::sync::Mutex<()>,
}

impl Relay {
    pub(super) fn new(listener: Weak<dyn Listener>) -> Self {
        Self {
            listener,
            news: Mutex::default(),
            telling: tokio::sync::Mutex::default(),
        }
    }

    fn news(&self) -> MutexGuard<'_, Vec<News>> {
        // Every change leaves it whole.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in what follows from a change, while the lock is held under which that was made: so it is told in the order
    /// of the changes.
    pub(super) fn put(&self, news: impl IntoIterator<Item = News>) {
        self.news().extend(news);
    }

    /// Tells the registry what is to be told, unless somebody does.
    pub(super) fn tell(&self) {
        // Looks again after each turn: what came meanwhile was left to us.
        while !self.news().is_empty()
            && let Ok(_telling) = self.telling.try_lock()
        {
            let news = std::mem::take(&mut *self.news());
            if let Some(listener) = self.listener.upgrade() {
                listener.all_news(news);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::{Arc, OnceLock};

    use super::*;
    use crate::store::contract::Scope;

    /// Puts more in while it hears some, as a registry does that sends an op at once.
    #[derive(Default)]
    struct Ear {
        relay: OnceLock<Relay>,
        heard: Mutex<Vec<String>>,
    }

    impl Listener for Ear {
        fn news(&self, _: News) {
            unreachable!("all is told together")
        }

        fn uses(&self, _: &Scope) -> bool {
            true
        }

        fn waits(&self, _: &str) -> bool {
            true
        }

        fn all_news(&self, news: Vec<News>) {
            for news in news {
                let News::Freed { key } = news else {
                    unreachable!("nothing else was put in")
                };
                assert!(&*key != "panic", "as it was told to");
                if &*key == "more" {
                    self.tells(&["then"]);
                }
                self.heard.lock().unwrap().push(key.to_string());
            }
        }
    }

    impl Ear {
        fn new() -> Arc<Self> {
            let ear = Arc::new(Self::default());
            let listener: Arc<dyn Listener> = ear.clone();
            assert!(ear.relay.set(Relay::new(Arc::downgrade(&listener))).is_ok());
            ear
        }

        fn tells(&self, keys: &[&str]) {
            let relay = self.relay.get().unwrap();
            relay.put(keys.iter().map(|&key| News::Freed { key: key.into() }));
            relay.tell();
        }

        fn heard(&self) -> Vec<String> {
            std::mem::take(&mut *self.heard.lock().unwrap())
        }
    }

    #[test]
    fn what_comes_while_it_tells_is_told_after_it() {
        let ear = Ear::new();
        ear.tells(&["more", "a", "b"]);
        assert_eq!(ear.heard(), ["more", "a", "b", "then"]);
    }

    #[test]
    fn a_listener_that_panics_is_told_the_next_all_the_same() {
        let ear = Ear::new();
        let told = catch_unwind(AssertUnwindSafe(|| ear.tells(&["a", "panic"])));
        assert!(told.is_err());
        ear.tells(&["b"]);
        assert_eq!(ear.heard(), ["a", "b"]);
    }
}
