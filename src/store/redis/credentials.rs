//! Credentials that change while a store is in use.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt, future};
use redis::{Cmd, RedisConnectionInfo, cmd};
use tokio::sync::watch;
#[cfg(feature = "redis-1")]
use tokio::{sync::mpsc, task::JoinSet};

use super::fault::Fault;
use crate::base::once_a_minute::OnceAMinute;
use crate::base::user_code::log;
#[cfg(feature = "redis-1")]
use crate::roaming::runtime;
use crate::roaming::time::{sleep, timeout};
use crate::store::credentials::Credentials;
use crate::store::driver::Address;

/// How long a connection waits between two looks for new credentials: a provider may have some, or an error, at once each
/// time.
const PAUSE: Duration = Duration::from_secs(1);

/// How many credentials are skipped at once for newer ones.
const AT_ONCE: usize = 100;

impl Credentials {
    /// Settings that authenticate with these.
    pub(super) fn login(&self, settings: RedisConnectionInfo) -> RedisConnectionInfo {
        settings
            .set_username(self.user_or_default())
            .set_password(self.password())
    }
}

/// The current credentials first, and then each new pair.
type Newest = BoxStream<'static, Result<Credentials, String>>;

/// Where connections get their credentials from. Each has a stream of its own.
#[derive(Clone)]
pub(super) struct Source(Arc<dyn Fn() -> Newest + Send + Sync>);

/// The commands that authenticate a connection anew, whenever there are new credentials.
pub(super) type Logins = BoxStream<'static, Cmd>;

/// What follows the credentials that a connection was opened with.
pub(super) struct Newer(Newest);

impl Source {
    pub(super) fn watching(newest: watch::Receiver<Credentials>) -> Self {
        Self(Arc::new(move || {
            let mut newest = newest.clone();
            newest.mark_changed();
            let next = async |mut newest: watch::Receiver<Credentials>| {
                newest.changed().await.ok()?;
                let credentials = newest.borrow_and_update().clone();
                Some((Ok(credentials), newest))
            };
            stream::unfold(newest, next).boxed()
        }))
    }

    #[cfg(feature = "redis-1")]
    pub(super) fn provided(provider: impl redis::StreamingCredentialsProvider + 'static) -> Self {
        let provider = Arc::new(provider);
        Self(Arc::new(move || {
            // Its timers and sockets stay where they are made. So it runs on the runtime that the user knows, in a task.
            let (sender, newest) = mpsc::channel(1);
            let provider = provider.clone();
            let providing = async move {
                let mut credentials = provider.subscribe();
                while let Some(next) = credentials.next().await {
                    let next = next.map(|it| Credentials::new(it.username(), it.password()));
                    if sender
                        .send(next.map_err(|it| it.to_string()))
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
            };
            let mut task = JoinSet::new();
            match runtime() {
                Some(runtime) => task.spawn_on(providing, &runtime),
                None => task.spawn(providing),
            };
            stream::unfold((newest, task), async |(mut newest, mut task)| {
                let next = newest.recv().await;
                if next.is_none()
                    && let Some(Err(ended)) = task.join_next().await
                    && let Ok(panicked) = ended.try_into_panic()
                {
                    std::panic::resume_unwind(panicked);
                }
                Some((next?, (newest, task)))
            })
            .boxed()
        }))
    }

    /// The credentials for a new connection, and those that will follow.
    pub(super) async fn current(
        &self,
        address: &Address,
        within: Duration,
    ) -> Result<(Credentials, Newer), Fault> {
        // Made inside the stream: that is the user's code as well.
        let source = self.0.clone();
        let mut newer = Newer(stream::once(async move { source() }).flatten().boxed());
        let reason = match timeout(within, newer.next()).await {
            Ok(Some(Ok(credentials))) => return Ok((credentials, newer)),
            Ok(Some(Err(error))) => error,
            Ok(None) => "their provider has ended".to_owned(),
            Err(_) => format!("none came within {within:?}"),
        };
        Err(Fault::no_credentials(address, reason))
    }
}

impl Newer {
    /// The newest of those that are there, or an error if there is nothing else; waits until there are any. `None`: none will
    /// follow.
    async fn next(&mut self) -> Option<Result<Credentials, String>> {
        let newest = async {
            let mut newest = self.0.next().await?;
            for _ in 0..AT_ONCE {
                let Some(Some(newer)) = self.0.next().now_or_never() else {
                    break;
                };
                // Credentials do not end because newer ones could not be had.
                if newer.is_ok() || newest.is_err() {
                    newest = newer;
                }
            }
            Some(newest)
        };
        let newest = AssertUnwindSafe(newest).catch_unwind().await;
        newest.unwrap_or_else(|panicked| {
            // Its destructor is the user's code, too.
            std::mem::forget(panicked);
            log!(error, "a provider of credentials panicked");
            None
        })
    }

    /// The commands that authenticate with the credentials that follow.
    ///
    /// If they are refused, the connection goes on as the user that it is. If the server ends it, the next one is opened
    /// with the credentials that are the newest then.
    pub(super) fn logins(self, address: Address) -> Logins {
        let mut told = OnceAMinute::default();
        let look = async |mut newer: Self| {
            sleep(PAUSE).await;
            Some((newer.next().await?, newer))
        };
        let logins = stream::unfold(self, look).filter_map(move |next| {
            let (address, mut login) = (&*address, None);
            match next {
                Ok(newest) => {
                    told = OnceAMinute::default();
                    let (user, password) = (newest.user_or_default(), newest.password());
                    login = Some(cmd("AUTH").arg(user).arg(password).take());
                }
                Err(error) if told.is_news(&error) => {
                    log!(warn, address, error, "no new credentials");
                }
                Err(error) => log!(debug, address, error, "no new credentials"),
            }
            future::ready(login)
        });
        logins.boxed()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::store::hearing::Log;

    const WITHIN: Duration = Duration::from_secs(1);

    fn pair(number: u32) -> Credentials {
        Credentials::new("app", format!("secret{number}"))
    }

    #[tokio::test(start_paused = true)]
    async fn each_connection_begins_with_the_newest_and_is_told_of_newer_ones() {
        let address = Address::from("a:1");
        let (sender, newest) = watch::channel(pair(0));
        let source = Source::watching(newest);
        let (first, mut of_first) = source.current(&address, WITHIN).await.unwrap();
        assert_eq!(first, pair(0));
        assert!(of_first.next().now_or_never().is_none());
        sender.send_replace(pair(1));
        sender.send_replace(pair(2));
        let (second, mut of_second) = source.current(&address, WITHIN).await.unwrap();
        assert_eq!(second, pair(2));
        assert_eq!(of_first.next().await, Some(Ok(pair(2))));
        assert!(of_second.next().now_or_never().is_none());
        drop(sender);
        assert_eq!(of_first.next().await, None);
        // Whoever sent them has gone: the last ones stay good.
        let (third, _) = source
            .current(&address, WITHIN)
            .await
            .unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(third, pair(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_provider_that_gives_none_is_an_error_that_may_pass() {
        let address = Address::from("a:1");
        type Case = (fn() -> Newest, &'static str);
        let cases: [Case; 5] = [
            (|| stream::pending().boxed(), "none came within 1s"),
            (|| stream::empty().boxed(), "their provider has ended"),
            (
                || stream::iter([Err("no route".to_owned())]).boxed(),
                "no route",
            ),
            (|| panic!("no provider"), "their provider has ended"),
            (
                || stream::once(async { panic!("no token") }).boxed(),
                "their provider has ended",
            ),
        ];
        for (credentials, reason) in cases {
            let source = Source(Arc::new(credentials));
            let Err(fault) = source.current(&address, WITHIN).await else {
                panic!("{reason}");
            };
            let told = fault.to_string();
            assert!(told.ends_with(reason) && !fault.is_lasting(), "{told}");
        }
    }

    /// Credentials were dropped if an error was there when they were taken.
    #[tokio::test(start_paused = true)]
    async fn an_error_does_not_hide_the_credentials_before_it() {
        let address = Address::from("a:1");
        let error = || Err("no route".to_owned());
        let parts = [Ok(pair(0)), Ok(pair(1)), error(), error()];
        let source = Source(Arc::new(move || stream::iter(parts.clone()).boxed()));
        let (first, _) = source
            .current(&address, WITHIN)
            .await
            .unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(first, pair(1));
        let mut newer = Newer(stream::iter([error(), Ok(pair(2)), error()]).boxed());
        assert_eq!(newer.next().await, Some(Ok(pair(2))));
    }

    /// The thread was busy with it for ever, and renewed nothing.
    #[tokio::test(start_paused = true)]
    async fn a_provider_that_never_waits_does_not_keep_the_thread_busy() {
        const MANY: usize = 1_000_000;
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let endless = stream::repeat_with(move || {
            count.fetch_add(1, Ordering::Relaxed);
            Err("no file".to_owned())
        });
        let newer = Newer(endless.take(MANY).boxed());
        let mut logins = newer.logins(Address::from("a:1"));
        tokio::spawn(async move { logins.next().await });
        tokio::time::sleep(PAUSE * 3).await;
        let asked = asked.load(Ordering::Relaxed);
        assert!((2..=5 * (AT_ONCE + 1)).contains(&asked), "{asked}");
    }

    /// Each connection wrote a line a second.
    #[tokio::test(start_paused = true)]
    async fn a_provider_that_fails_for_ever_is_told_once_a_minute() {
        let log = Log::default();
        let _hearing = log.hear(tracing::Level::WARN);
        let endless = stream::repeat_with(|| Err("no file".to_owned()));
        let mut logins = Newer(endless.boxed()).logins(Address::from("a:1"));
        tokio::spawn(async move { logins.next().await });
        tokio::time::sleep(Duration::from_secs(150)).await;
        let told = log.take();
        assert_eq!(told.len(), 3, "{told:?}");
        assert!(told[0].contains("no new credentials"), "{told:?}");
    }

    #[test]
    fn a_password_is_not_shown() {
        let shown = format!("{:?}", Credentials::new("", "secret"));
        assert!(
            shown.contains("default") && !shown.contains("secret"),
            "{shown}"
        );
    }
}
