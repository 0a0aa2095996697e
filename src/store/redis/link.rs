//! One connection: what is asked on it, and what the server says. Whoever owns it polls it: it has no task of its own.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::StreamExt;
use redis::{Arg, Cmd, PushInfo, PushKind, Value, cmd};
use tokio::io::ReadBuf;
use tokio::time::Instant;

use super::credentials::Logins;
use super::fault::{ErrorReply, Fault};
use super::incoming::Incoming;
use super::stream::Stream;
use crate::base::user_code::log;
use crate::roaming::time::{Sleep, sleep_until, timeout};
use crate::store::attempts::SetUp;
use crate::store::driver::Address;

/// How many bytes are read at once.
const PIECE: usize = 8 << 10;

/// What the server said. Each request has a tag, which says what it asks.
pub(super) enum Event<T> {
    Push(PushInfo),
    /// The reply to the oldest request, which was sent at that time. A subscription, and the end of one, are answered by
    /// a [`Value::Push`].
    Reply(T, Instant, Value),
}

/// Replies come in the order of the requests. Dropping it closes the connection; requests that are not written by then are
/// never sent (O4).
pub(super) struct Link<T = ()> {
    pub(super) address: Address,
    /// A request must be answered within this time.
    within: Duration,
    stream: Pin<Box<dyn Stream>>,
    incoming: Incoming,
    /// What one read has brought.
    piece: Box<[u8; PIECE]>,
    /// Requests that are not written yet.
    outgoing: Vec<u8>,
    is_flushed: bool,
    /// Why nothing more can be written. What had come by then is still read.
    broken: Option<io::Error>,
    /// The oldest first.
    sent: VecDeque<Sent<T>>,
    /// Whether a push was taken for the answer to an unsubscription, and no reply has come since.
    has_unsubscribed: bool,
    /// Pushes that came before an answer that was waited for.
    pushed: VecDeque<PushInfo>,
    /// At the latest when the oldest request is overdue.
    alarm: Pin<Box<Sleep>>,
    logins: Option<Logins>,
    /// Until it is ready for calls.
    set_up: Option<SetUp>,
}

/// What the server said, and the request that it answers.
type Message<T> = (Option<Sent<T>>, Value);

/// A request that is not answered yet.
struct Sent<T> {
    purpose: Purpose<T>,
    at: Instant,
    /// The push that answers it: its kind and channel.
    confirmation: Option<(PushKind, Vec<u8>)>,
}

enum Purpose<T> {
    /// Its owner is told of the reply.
    Request(T),
    /// [`Link::ask_all`] waits for it.
    Question,
    /// New credentials.
    Login,
    /// Nobody needs the reply.
    Aside,
}

impl<T> Link<T> {
    pub(super) fn new(
        stream: Pin<Box<dyn Stream>>,
        set_up: Option<SetUp>,
        address: Address,
        within: Duration,
    ) -> Self {
        Self {
            address,
            within,
            stream,
            incoming: Incoming::default(),
            piece: Box::new([0; PIECE]),
            outgoing: Vec::new(),
            is_flushed: true,
            broken: None,
            sent: VecDeque::new(),
            has_unsubscribed: false,
            pushed: VecDeque::new(),
            alarm: Box::pin(sleep_until(Instant::now() + within)),
            logins: None,
            set_up,
        }
    }

    /// It is set up: from now on a request must be answered within this time.
    pub(super) fn answers_within(&mut self, within: Duration) {
        self.set_up = None;
        self.within = within;
        self.alarm.as_mut().reset(Instant::now() + within);
    }

    /// Authenticates anew whenever there are new credentials.
    pub(super) fn follow(&mut self, logins: Logins) {
        self.logins = Some(logins);
    }

    /// Sends a request. It is written when the link is polled next.
    pub(super) fn send(&mut self, tag: T, at: Instant, command: &Cmd) {
        self.put(command, at, Purpose::Request(tag));
    }

    /// Sends a request that `write` adds to what goes out.
    pub(super) fn send_written(&mut self, tag: T, at: Instant, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.outgoing);
        self.sent.push_back(Sent {
            purpose: Purpose::Request(tag),
            at,
            confirmation: None,
        });
    }

    /// Sends a command whose reply does not matter.
    pub(super) fn send_aside(&mut self, command: &Cmd) {
        self.put(command, Instant::now(), Purpose::Aside);
    }

    fn put(&mut self, command: &Cmd, at: Instant, purpose: Purpose<T>) {
        command.write_packed_command(&mut self.outgoing);
        let confirmation = confirmation(command);
        let unsubscribes = matches!(confirmation, Some((PushKind::SUnsubscribe, _)));
        self.sent.push_back(Sent {
            purpose,
            at,
            confirmation,
        });
        if unsubscribes {
            // If the slot has moved, the push that is taken for the answer was unasked, and the answer is a refusal. It
            // comes before the reply to this.
            self.put(&cmd("PING"), at, Purpose::Aside);
        }
    }

    /// Whether each request is answered.
    pub(super) fn is_quiet(&self) -> bool {
        self.sent.is_empty()
    }

    /// Sends one command, and waits for its reply for `within` at most.
    pub(super) async fn ask(&mut self, command: &Cmd, within: Duration) -> Result<Value, Fault> {
        let answers = self.ask_all(std::slice::from_ref(command), within).await?;
        match answers.into_iter().next() {
            Some(Value::ServerError(error)) => Err(Fault::refused(&self.address, &error)),
            answer => Ok(answer.unwrap_or(Value::Nil)),
        }
    }

    /// The same for several commands in one write. Errors are among the replies. Pushes are events later.
    pub(super) async fn ask_all(
        &mut self,
        commands: &[Cmd],
        within: Duration,
    ) -> Result<Vec<Value>, Fault> {
        match timeout(within, self.answers(commands)).await {
            Ok(answers) => answers,
            Err(_) => Err(Fault::silent(&self.address, within)),
        }
    }

    /// The same without a time-out.
    pub(super) async fn answers(&mut self, commands: &[Cmd]) -> Result<Vec<Value>, Fault> {
        // Whoever asked before has gone.
        for sent in &mut self.sent {
            if let Purpose::Question = sent.purpose {
                sent.purpose = Purpose::Aside;
            }
        }
        let now = Instant::now();
        for command in commands {
            self.put(command, now, Purpose::Question);
        }
        let mut answers = Vec::with_capacity(commands.len());
        while answers.len() < commands.len() {
            let (sent, value) = poll_fn(|cx| self.poll_message(cx)).await?;
            match (sent.map(|sent| sent.purpose), value) {
                (None, Value::Push { kind, data }) => {
                    self.pushed.push_back(PushInfo { kind, data });
                }
                (Some(Purpose::Question), value) => answers.push(value),
                _ => {}
            }
        }
        Ok(answers)
    }

    /// Events that were taken and not handled.
    pub(super) fn put_back(&mut self, pushes: Vec<PushInfo>) {
        for push in pushes.into_iter().rev() {
            self.pushed.push_front(push);
        }
    }

    /// The next event. Fails when the connection has ended, or the oldest request is overdue. Cancel safe.
    pub(super) async fn next(&mut self) -> Result<Event<T>, Fault> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Resolves when the connection has ended. For one on which nothing is asked.
    pub(super) fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if ready!(self.poll_next(cx)).is_err() {
                return Poll::Ready(());
            }
        }
    }

    /// The same as [`Self::next`].
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Event<T>, Fault>> {
        if let Some(push) = self.pushed.pop_front() {
            return Poll::Ready(Ok(Event::Push(push)));
        }
        loop {
            let (sent, value) = ready!(self.poll_message(cx))?;
            let event = match (sent, value) {
                (None, Value::Push { kind, data }) => Event::Push(PushInfo { kind, data }),
                (Some(Sent { purpose, at, .. }), value) => match purpose {
                    Purpose::Request(tag) => Event::Reply(tag, at, value),
                    Purpose::Question | Purpose::Login | Purpose::Aside => continue,
                },
                (None, _) => continue,
            };
            return Poll::Ready(Ok(event));
        }
    }

    /// Writes what can be written, and reads a message, with the request that it answers.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Result<Message<T>, Fault>> {
        self.log_in_anew(cx);
        self.poll_write(cx);
        if let Poll::Ready(value) = self.poll_read(cx) {
            return Poll::Ready(self.assign(value?));
        }
        if let Some(error) = self.broken.take() {
            return Poll::Ready(Err(self.broke(error.into())));
        }
        self.poll_overdue(cx).map(Err)
    }

    fn log_in_anew(&mut self, cx: &mut Context<'_>) {
        while let Some(logins) = &mut self.logins
            && let Poll::Ready(login) = logins.poll_next_unpin(cx)
        {
            match login {
                Some(login) => self.put(&login, Instant::now(), Purpose::Login),
                None => self.logins = None,
            }
        }
    }

    fn poll_write(&mut self, cx: &mut Context<'_>) {
        while !self.outgoing.is_empty() {
            match self.stream.as_mut().poll_write(cx, &self.outgoing) {
                Poll::Ready(Ok(0)) => return self.cannot_write(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(written)) => drop(self.outgoing.drain(..written)),
                Poll::Ready(Err(error)) => return self.cannot_write(error),
                Poll::Pending => return,
            }
            self.is_flushed = false;
        }
        if !self.is_flushed {
            match self.stream.as_mut().poll_flush(cx) {
                Poll::Ready(Ok(())) => self.is_flushed = true,
                Poll::Ready(Err(error)) => self.cannot_write(error),
                Poll::Pending => {}
            }
        }
    }

    fn cannot_write(&mut self, error: io::Error) {
        self.outgoing.clear();
        self.is_flushed = true;
        self.broken = Some(error);
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<Result<Value, Fault>> {
        loop {
            match self.incoming.next() {
                Ok(Some(value)) => return Poll::Ready(Ok(value)),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Err(self.broke(error))),
            }
            let mut piece = ReadBuf::new(&mut self.piece[..]);
            if let Err(error) = ready!(self.stream.as_mut().poll_read(cx, &mut piece)) {
                return Poll::Ready(Err(self.broke(error.into())));
            }
            if piece.filled().is_empty() {
                let address = self.address.clone();
                return Poll::Ready(Err(Fault::Closed { address }));
            }
            self.incoming.put(piece.filled());
        }
    }

    /// Finds the request that a message answers.
    fn assign(&mut self, value: Value) -> Result<Message<T>, Fault> {
        let is_answer = match (&value, self.sent.front()) {
            (Value::Push { kind, data }, Some(sent)) => sent.is_confirmed_by(kind, data),
            (Value::Push { .. }, None) => false,
            (_, Some(_)) => true,
            (_, None) => {
                return Err(Fault::garbled(&self.address, "a reply to no request"));
            }
        };
        if let Value::Push { kind, .. } = &value {
            self.has_unsubscribed |= is_answer && *kind == PushKind::SUnsubscribe;
        } else if std::mem::take(&mut self.has_unsubscribed)
            && let Value::ServerError(error) = &value
            && ["MOVED", "ASK", "CLUSTERDOWN"].contains(&error.code())
        {
            // It is not about the request that is the oldest now, which is a PING.
            return Err(Fault::garbled(
                &self.address,
                "unexpected change of a subscription",
            ));
        }
        let sent = is_answer.then(|| self.sent.pop_front()).flatten();
        if let Some(Purpose::Login) = sent.as_ref().map(|sent| &sent.purpose) {
            told_of_login(&self.address, &value);
        }
        Ok((sent, value))
    }

    fn poll_overdue(&mut self, cx: &mut Context<'_>) -> Poll<Fault> {
        let oldest = self.sent.front();
        // Whoever waits for a question has a time-out.
        let oldest = oldest.filter(|sent| !matches!(sent.purpose, Purpose::Question));
        let Some(sent_at) = oldest.map(|sent| sent.at) else {
            return Poll::Pending;
        };
        let due = sent_at + self.within;
        // Of an earlier request, and over before this one was sent. A timer that is late would be put off first.
        if self.alarm.deadline() <= sent_at {
            self.alarm.as_mut().reset(due);
        }
        while self.alarm.as_mut().poll(cx).is_ready() {
            // If it was set for an earlier request, what has come for this one may not have been seen.
            if self.alarm.deadline() == due {
                return Poll::Ready(Fault::silent(&self.address, self.within));
            }
            self.alarm.as_mut().reset(due);
        }
        Poll::Pending
    }

    fn broke(&self, source: redis::RedisError) -> Fault {
        let address = self.address.clone();
        Fault::Broken { address, source }
    }
}

impl<T> Sent<T> {
    fn is_confirmed_by(&self, kind: &PushKind, data: &[Value]) -> bool {
        let Some((expected, channel)) = &self.confirmation else {
            return false;
        };
        kind == expected && matches!(data.first(), Some(Value::BulkString(it)) if it == channel)
    }
}

/// The push that answers a command, if a push does.
fn confirmation(command: &Cmd) -> Option<(PushKind, Vec<u8>)> {
    let mut words = command.args_iter();
    let kind = match words.next() {
        Some(Arg::Simple(b"SUBSCRIBE")) => PushKind::Subscribe,
        Some(Arg::Simple(b"SSUBSCRIBE")) => PushKind::SSubscribe,
        Some(Arg::Simple(b"SUNSUBSCRIBE")) => PushKind::SUnsubscribe,
        _ => return None,
    };
    match words.next() {
        Some(Arg::Simple(channel)) => Some((kind, channel.to_vec())),
        _ => None,
    }
}

fn told_of_login(address: &str, answer: &Value) {
    let Value::ServerError(error) = answer else {
        log!(debug, address, "authenticated with new credentials");
        return;
    };
    // Its text may quote the password.
    let error = ErrorReply::from(error);
    let code = error.code();
    log!(
        warn,
        address,
        code,
        "the server refused the new credentials"
    );
}

#[cfg(test)]
pub(super) mod tests;
