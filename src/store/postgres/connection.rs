//! One connection. Whoever owns it polls it: it has no task of its own.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{self, BoxStream};
use tokio::time::Instant;
use tokio_postgres::error::SqlState;
use tokio_postgres::{AsyncMessage, Client, Error, Notification, Row};

use super::call::{Argument, Caller, Names};
use super::fault::{Address, Fault};
use super::secure::Secured;
use super::socket::Site;
use crate::roaming::time::timeout_at;
use crate::store::attempts::SetUp;

/// Dropping it closes the connection; what is not written by then is never sent.
pub(super) struct Connection {
    pub(super) caller: Caller,
    pub(super) address: Address,
    /// The server process, if the session is known to be ours: no pooler is between.
    pub(super) process: Option<i32>,
    /// The host that it leads to.
    pub(super) site: Option<Site>,
    /// How long an answer may take.
    within: Duration,
    /// Until it is ready for calls: when connecting must be done, which began `within` before.
    until: Option<Instant>,
    set_up: Option<SetUp>,
    messages: BoxStream<'static, Result<AsyncMessage, Error>>,
    /// Notices that came while an answer was waited for.
    heard: VecDeque<Notification>,
    /// Why it has ended.
    end: Option<Fault>,
}

impl Connection {
    pub(super) fn new(
        address: Address,
        within: Duration,
        until: Instant,
        set_up: SetUp,
        client: Client,
        mut connection: tokio_postgres::Connection<Secured, Secured>,
    ) -> Self {
        Self {
            caller: Caller::new(client),
            address,
            process: None,
            site: None,
            within,
            until: Some(until),
            set_up: Some(set_up),
            messages: stream::poll_fn(move |cx| connection.poll_message(cx)).boxed(),
            heard: VecDeque::new(),
            end: None,
        }
    }

    /// Connecting is done: each answer may take that long.
    pub(super) fn begin_calls(&mut self, within: Duration) {
        self.within = within;
        (self.until, self.set_up) = (None, None);
    }

    /// Awaits an answer on this connection. `asking` uses its caller.
    pub(super) async fn ask<T>(&mut self, asking: impl Future<Output = T>) -> Result<T, Fault> {
        let mut asking = pin!(asking);
        let address = self.address.clone();
        let within = self.within;
        let until = self.until.unwrap_or_else(|| Instant::now() + within);
        let answered = poll_fn(|cx| {
            loop {
                if let Poll::Ready(answer) = asking.as_mut().poll(cx) {
                    return Poll::Ready(Ok(answer));
                }
                match self.poll_message(cx) {
                    Poll::Ready(Ok(notice)) => self.heard.push_back(notice),
                    // The answer may have come before the end. If not, `asking` has the server's own reason.
                    Poll::Ready(Err(fault)) => {
                        return match asking.as_mut().poll(cx) {
                            Poll::Ready(answer) => Poll::Ready(Ok(answer)),
                            Poll::Pending => Poll::Ready(Err(fault)),
                        };
                    }
                    // What it has read may be the answer.
                    Poll::Pending => return asking.as_mut().poll(cx).map(Ok),
                }
            }
        });
        let silent = |_| Err(Fault::silent(&address, within));
        timeout_at(until, answered).await.unwrap_or_else(silent)
    }

    /// The same for what the server should not refuse.
    pub(super) async fn get<T>(
        &mut self,
        asking: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Fault> {
        let answer = self.ask(asking).await?;
        answer.map_err(|error| match error.as_db_error() {
            Some(refusal) if *refusal.code() == SqlState::PROTOCOL_VIOLATION => {
                Fault::given_up(&self.address, refusal.message())
            }
            Some(_) => Fault::refused(&self.address, &error),
            None => Fault::broken(&self.address, &error),
        })
    }

    /// The same for a query on a connection whose session may not be ours.
    pub(super) async fn query(
        &mut self,
        names: &Names,
        sql: &str,
        arguments: &[Argument<'_>],
    ) -> Result<Vec<Row>, Fault> {
        let caller = self.caller.clone();
        self.get(caller.bounded(names, sql, arguments)).await
    }

    /// Writes what is to be sent. What comes meanwhile is heard later.
    pub(super) fn flush(&mut self) {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        while let Poll::Ready(Ok(notice)) = self.poll_message(&mut cx) {
            self.heard.push_back(notice);
        }
    }

    /// The next notice. Writes and reads; fails when the connection has ended. Cancel safe.
    pub(super) async fn notice(&mut self) -> Result<Notification, Fault> {
        poll_fn(|cx| self.poll_notice(cx)).await
    }

    /// The same as [`Self::notice`].
    pub(super) fn poll_notice(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Notification, Fault>> {
        match self.heard.pop_front() {
            Some(notice) => Poll::Ready(Ok(notice)),
            None => self.poll_message(cx),
        }
    }

    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Result<Notification, Fault>> {
        loop {
            if let Some(fault) = &self.end {
                return Poll::Ready(Err(fault.clone()));
            }
            match ready!(self.messages.poll_next_unpin(cx)) {
                Some(Ok(AsyncMessage::Notification(notice))) => return Poll::Ready(Ok(notice)),
                // The wait for a synchronous standby was cancelled: what was answered may be lost with this server. Its
                // code is that of many warnings, and its text may be in any language.
                Some(Ok(AsyncMessage::Notice(warning)))
                    if warning.routine() == Some("SyncRepWaitForLSN") =>
                {
                    self.end = Some(Fault::given_up(&self.address, warning.message()));
                }
                Some(Ok(_)) => {}
                Some(Err(error)) if error.as_db_error().is_some() => {
                    self.end = Some(Fault::broken(&self.address, &error));
                }
                ended => {
                    self.end = Some(match ended {
                        Some(Err(error)) => Fault::broken(&self.address, &error),
                        _ => Fault::given_up(&self.address, "it was closed"),
                    });
                    // Whoever asked is told at once, also what the server had said to the first of several statements.
                    self.messages = stream::empty().boxed();
                }
            }
        }
    }
}
