//! The connection to one primary, as the driver sees it: calls of the script, pushes, and what replicas confirm.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::FutureExt;
use futures::channel::oneshot;
use futures::future::BoxFuture;
use redis::{PushInfo, PushKind, Value, cmd};
use tokio::time::Instant;

use super::backend::RedisBackend;
use super::call;
use super::cluster::{map_question, read_map_of};
use super::fault::{ErrorReply, Fault};
use super::grant::Message;
use super::handshake::{ClientId, message};
use super::link::{self, Event};
use super::replicas::Confirmer;
use super::reply::{self, RequestReply};
use crate::base::StoreError;
use crate::store::contract::ServerTime;
use crate::store::driver::{
    Call, Incoming, Link, Order, Received, Refusal, Replies, Reply, Request, SlotMap,
};

/// What a request on the connection asks.
pub(super) enum Tag {
    /// The call with this number.
    Call(u64),
    /// On a cluster, a change of a subscription.
    Order(Order),
    /// The map of the cluster's slots.
    Map(oneshot::Sender<SlotMap>),
}

pub(super) struct Primary {
    pub(super) backend: Arc<RedisBackend>,
    /// Grants that came during the handshake are events of it.
    pub(super) link: link::Link<Tag>,
    /// Which address of the host it is.
    at_address: Option<SocketAddr>,
    pub(super) id: Option<ClientId>,
    /// The last time that the server told.
    pub(super) at: ServerTime,
    /// The script is loaded again in front of the next call.
    is_to_load: bool,
    /// Calls with this number or a later one come behind the script. None of them was answered yet.
    loaded_before: Option<u64>,
    /// Whether each call carries the whole script: it cannot be loaded, or a proxy stands before several servers.
    sends_text: bool,
    confirmer: Confirmer,
    /// What was heard and not taken yet.
    heard: VecDeque<Received>,
    /// Resolves when another server is the primary.
    moved: Option<BoxFuture<'static, Fault>>,
}

impl Primary {
    pub(super) fn new(
        backend: Arc<RedisBackend>,
        link: link::Link<Tag>,
        at_address: Option<SocketAddr>,
        id: Option<ClientId>,
        at: ServerTime,
        moved: Option<BoxFuture<'static, Fault>>,
    ) -> Self {
        Self {
            backend,
            link,
            at_address,
            id,
            at,
            is_to_load: false,
            loaded_before: None,
            sends_text: false,
            confirmer: Confirmer::default(),
            heard: VecDeque::new(),
            moved,
        }
    }

    fn on_event(
        &mut self,
        event: Event<Tag>,
    ) -> Result<Option<Incoming<(u64, Value)>>, StoreError> {
        Ok(match event {
            Event::Push(push) => {
                self.on_push(&push)?;
                self.heard.pop_front().map(Incoming::Other)
            }
            Event::Reply(Tag::Call(number), sent_at, reply) => Some(Incoming::Answer {
                lane: 0,
                sent_at,
                answer: (number, reply),
            }),
            Event::Reply(Tag::Order(order), _, answer) => {
                let told = match &answer {
                    Value::Push { .. } => Ok(()),
                    Value::ServerError(error) => Err(self.refusal(error.into())),
                    _ => return Err(self.garbled("unexpected reply to a subscription")),
                };
                Some(Incoming::Told(order, told))
            }
            Event::Reply(Tag::Map(asked), _, answer) => {
                if let Ok(map) = read_map_of(&answer, &self.link.address) {
                    // Whoever asked may have gone.
                    let _ = asked.send(map);
                }
                None
            }
        })
    }

    fn on_push(&mut self, push: &PushInfo) -> Result<(), StoreError> {
        match (message(&self.backend.names, push), &push.kind) {
            (Some(Message::Events(events)), _) => {
                self.heard.extend(events.into_iter().map(Received::Heard));
            }
            // From a late probe, or of another format.
            (_, PushKind::Message | PushKind::SMessage | PushKind::Other(_)) => {}
            // A slot has moved away.
            (_, PushKind::SUnsubscribe) if self.backend.is_cluster() => {
                let channel = match push.data.first() {
                    Some(Value::BulkString(channel)) => std::str::from_utf8(channel).ok(),
                    _ => None,
                };
                let key = channel.and_then(|it| self.backend.names.key_of_channel(it));
                self.heard
                    .extend(key.map(|key| Received::Unsubscribed { key: key.into() }));
            }
            _ => return Err(self.garbled("unexpected change of a subscription")),
        }
        Ok(())
    }

    /// The reply to each request of a call that the server refused as a whole.
    fn on_refused_call(
        &mut self,
        number: u64,
        requests: &mut [Request],
        refusal: ErrorReply,
    ) -> RequestReply {
        if refusal.code() == "NOSCRIPT" {
            match self.loaded_before {
                Some(call) => self.sends_text |= number >= call,
                None => {
                    self.is_to_load = true;
                    self.loaded_before = Some(self.backend.next_number());
                }
            }
            return RequestReply::More;
        }
        // The server checks the keys of a call before it runs any of it, and does not say which one it refuses (S1).
        // So each request is sent again by itself, at once.
        let may_be_one_keys = ["NOPERM", "CROSSSLOT", "TRYAGAIN"].contains(&refusal.code());
        if requests.len() > 1 && may_be_one_keys {
            requests.iter_mut().for_each(|it| it.most = 1);
            return RequestReply::More;
        }
        RequestReply::Refused(refusal)
    }

    fn reply(&self, reply: RequestReply) -> Reply {
        let done = |outcome, unserved| Reply::Done {
            at: self.at,
            outcome,
            unserved,
        };
        match reply {
            RequestReply::Done(outcome) => done(outcome, false),
            RequestReply::DoneUnserved(outcome) => done(outcome, true),
            RequestReply::Seen(key_status) => Reply::Seen(key_status),
            RequestReply::Stale => Reply::Stale,
            RequestReply::More => Reply::Again,
            RequestReply::Refused(refusal) => Reply::Refused(self.refusal(refusal)),
        }
    }

    fn refusal(&self, refusal: ErrorReply) -> Refusal {
        self.backend.refusal(&self.link.address, refusal)
    }

    fn garbled(&self, what: &'static str) -> StoreError {
        Fault::garbled(&self.link.address, what).into()
    }
}

impl Link for Primary {
    type Answer = (u64, Value);
    type Trace = ClientId;

    fn send(&mut self, call: Call<'_>) {
        let backend = &self.backend;
        let number = backend.next_number();
        let (script, names) = (backend.script, &backend.names);
        if std::mem::take(&mut self.is_to_load) {
            self.link.send_aside(&script.load());
        }
        if call.requests.iter().any(|request| request.asking.is_some()) {
            self.link.send_aside(&cmd("ASKING"));
        }
        let script = match self.sends_text {
            true => script.whole(),
            false => script.named(),
        };
        self.link.send_written(Tag::Call(number), call.now, |out| {
            call::write(out, script, names, number, call.of_use, call.requests);
        });
    }

    fn poll_next(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Incoming<Self::Answer>, StoreError>> {
        if let Some(heard) = self.heard.pop_front() {
            return Poll::Ready(Ok(Incoming::Other(heard)));
        }
        while let Poll::Ready(event) = self.link.poll_next(cx) {
            if let Some(incoming) = self.on_event(event?)? {
                return Poll::Ready(Ok(incoming));
            }
        }
        if self.backend.min_replicas.is_some() {
            self.confirmer
                .begin(&self.backend, &self.link.address, self.at_address);
            if let Poll::Ready(confirmed) = self.confirmer.poll_end(&self.backend, cx) {
                self.heard.extend(confirmed);
                return self.poll_next(cx);
            }
        }
        match &mut self.moved {
            Some(moved) => moved.poll_unpin(cx).map(|fault| Err(fault.into())),
            None => Poll::Pending,
        }
    }

    fn read(
        &mut self,
        _: usize,
        (number, reply): Self::Answer,
        requests: &mut [Request],
    ) -> Result<Replies, StoreError> {
        let (at, replies) = if let Value::ServerError(error) = &reply {
            let reply = self.on_refused_call(number, requests, error.into());
            (None, vec![reply; requests.len()])
        } else {
            self.loaded_before.take_if(|call| number >= *call);
            let read = reply::read_reply(number, requests, reply);
            let read = read.ok_or_else(|| self.garbled("unexpected reply to a call"))?;
            (read.at, read.replies)
        };
        self.at = at.unwrap_or(self.at);
        let ending = replies.iter().find_map(|reply| match reply {
            RequestReply::Refused(refusal) if refusal.ends_connection() => Some(refusal.clone()),
            _ => None,
        });
        let ending = ending.filter(|_| !self.backend.is_cluster());
        Ok(Replies {
            at,
            end: ending.map(|refusal| self.refusal(refusal).error),
            list: replies.into_iter().map(|it| self.reply(it)).collect(),
        })
    }

    fn is_quiet(&self) -> bool {
        self.link.is_quiet() && self.confirmer.is_empty()
    }

    fn trace(&self) -> Option<ClientId> {
        self.id.clone()
    }

    fn ask_map(&mut self, asked: oneshot::Sender<SlotMap>) {
        let now = Instant::now();
        self.link.send(Tag::Map(asked), now, &map_question());
    }

    fn subscribe(&mut self, order: Order) {
        let verb = match order.number {
            Some(_) => "SSUBSCRIBE",
            None => "SUNSUBSCRIBE",
        };
        let channel = self.backend.names.channel_of(&order.key);
        let (tag, now) = (Tag::Order(order), Instant::now());
        self.link.send(tag, now, &cmd(verb).arg(channel).take());
    }

    fn confirm(&mut self, request: Request) {
        self.confirmer.waiting.push(request);
    }

    fn unconfirmed(&mut self) -> Vec<Request> {
        self.confirmer.abort().collect()
    }
}
