//! What the store says, told to those whom it is about.

use super::core::Driver;
use super::state::{Now, State};
use crate::events::LockEvent;
use crate::store::contract::{Listener, News, Scope};
use crate::turnstile::Turnstile;
use crate::user_code::log;

impl Listener for Driver {
    fn all_news(&self, news: Vec<News>) {
        let mut news = news.into_iter().peekable();
        while news.peek().is_some() {
            // One lock for all of them: a call has up to some dozens of answers.
            self.at_once(|state, at| {
                while let Some(news) = news.next_if(News::is_of_a_key) {
                    self.feed_news(state, at, news);
                }
            });
            if let Some(other) = news.next() {
                self.news(other);
            }
        }
    }

    fn news(&self, news: News) {
        match news {
            News::Replied { .. }
            | News::Granted { .. }
            | News::Unconfirmed { .. }
            | News::Freed { .. } => {
                self.at_once(|state, at| self.feed_news(state, at, news));
            }
            News::Up {
                scope,
                queue,
                complete,
            } => {
                let mut was_down = false;
                let told = |state: &mut State| {
                    if matches!(scope, Scope::All) {
                        state.queue = queue;
                    }
                    if complete {
                        state.away = None;
                        let before = state.up.replace(true);
                        was_down = before == Some(false);
                        if before != Some(true) {
                            self.journal.tell(|| LockEvent::StoreUp {});
                        }
                    }
                };
                self.feed_scope(
                    &scope,
                    told,
                    &[&Turnstile::up_renew, &|turnstile, cx| {
                        turnstile.up(cx, queue)
                    }],
                );
                if was_down {
                    log!(info, "the store is back");
                }
            }
            News::Down { scope, error } => {
                let mut is_new = false;
                let told = |state: &mut State| {
                    state.away = Some((scope.clone(), error.clone()));
                    // Once an outage, however often it is tried again.
                    is_new = state.up.replace(false) != Some(false);
                    if is_new {
                        self.journal.tell(|| LockEvent::StoreDown {
                            error: error.clone(),
                        });
                    }
                };
                self.feed_scope(&scope, told, &[&|turnstile, cx| turnstile.down(cx, &error)]);
                // The losses that come of it are told by the log, so it tells of their cause as well.
                if is_new {
                    log!(warn, %error, "the store is away: no lease is renewed until it is back");
                } else {
                    log!(debug, %error, "the store is still away");
                }
                // It may have gone with its runtime: the timer's may be alive, and looks.
                self.timer.ring();
            }
        }
    }

    fn uses(&self, scope: &Scope) -> bool {
        self.is_used(scope)
    }

    fn waits(&self, key: &str) -> bool {
        self.is_waited_for(key)
    }
}

impl Driver {
    /// Tells the turnstile of a key what the store said of it.
    fn feed_news(&self, state: &mut State, at: &mut Now<'_>, news: News) {
        match news {
            News::Replied { key, op, result } => {
                state.feed(at, &key.into(), None, |turnstile, cx| {
                    turnstile.replied(cx, &op, result);
                });
            }
            News::Granted { key, grant } => {
                state.feed_grant(at, &key.into(), self.settings.rules(), grant, None);
            }
            News::Unconfirmed { key, grant, error } => {
                let rules = self.settings.rules();
                state.feed_grant(at, &key.into(), rules, grant, Some(error));
            }
            News::Freed { key } => {
                state.feed(at, &key.into(), None, Turnstile::freed);
            }
            News::Up { .. } | News::Down { .. } => unreachable!("those are for all keys"),
        }
    }
}
