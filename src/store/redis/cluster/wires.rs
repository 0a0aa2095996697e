//! The two connections to a primary while they stand: what goes out on them, and what comes.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::FutureExt;
use futures::future::{BoxFuture, MaybeDone, maybe_done};
use redis::{Cmd, PushInfo, PushKind, RedisResult, Value, cmd};
use tokio::task::coop;
use tokio::time::Instant;

use super::channels::{Channels, Told, Wish};
use super::node::{Common, Event};
use super::parcel::Parcel;
use super::setup::Connected;
use crate::store::contract::Grant;
use crate::store::redis::call;
use crate::store::redis::clock::Clock;
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::grant::{self, Message};
use crate::store::redis::keys::Names;
use crate::store::redis::reply::{self, Verdict};
use crate::store::redis::script;
use crate::store::redis::setup::is_subscription;
use crate::store::traffic::{Lane, Traffic};

pub(super) struct Wires {
    pub(super) standing: Connected,
    pub(super) began: Instant,
    /// In the order in which they were sent.
    pub(super) calls: VecDeque<Call>,
    /// What was asked of the second connection, in order.
    pub(super) asked: VecDeque<Asked>,
    /// When the second connection last said something.
    pub(super) heard: Instant,
    /// What came of it so far.
    pub(super) channels: Channels,
}

pub(super) struct Call {
    pub(super) number: u64,
    pub(super) reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

/// What the second connection was asked.
pub(super) struct Asked {
    pub(super) what: Question,
    pub(super) since: Instant,
    pub(super) reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// For the grants of this channel.
    Enter(String),
    /// For them no more.
    Leave(String),
    /// Whether it is there.
    Ping,
}

impl Wires {
    /// Asks the second connection something.
    pub(super) fn ask(&mut self, what: Question, command: Cmd, now: Instant) {
        let Ok(ears) = &self.standing.ears else {
            return;
        };
        let mut connection = ears.socket.connection.clone();
        let asking = async move { connection.send_packed_command(&command).await };
        let mut reply = maybe_done(coop::unconstrained(asking).boxed());
        let _ = reply.poll_unpin(&mut Context::from_waker(Waker::noop()));
        self.asked.push_back(Asked {
            what,
            since: now,
            reply,
        });
    }

    pub(super) fn send(
        &mut self,
        traffic: &mut Traffic<Parcel, Instant>,
        common: &mut Common<'_>,
        now: Instant,
    ) {
        while let Some((lane, parcels)) = traffic.next_call() {
            *common.number += 1;
            let number = *common.number;
            let of_use = self.standing.clock.of_use(now, common.response_timeout);
            let is_bare = parcels.iter().any(|parcel| parcel.is_bare);
            let script = match lane {
                Lane::Batch if is_bare => &script::CLUSTER_FREE,
                Lane::Batch => &script::CLUSTER_BATCH,
                _ => lane.script(),
            };
            let command = if is_bare {
                call::free_command(common.names, number, &parcels)
            } else {
                lane.command_of(script, common.names, number, of_use, &parcels)
            };
            let mut connection = self.standing.main.connection.clone();
            let is_asking = parcels.iter().any(|parcel| parcel.asking.is_some());
            if is_asking {
                // Whatever it answers, the call's own answer tells. Written before it, since nobody
                // else writes here.
                let mut connection = connection.clone();
                let asking = async move { connection.send_packed_command(&cmd("ASKING")).await };
                let mut asking = maybe_done(coop::unconstrained(asking).boxed());
                let _ = asking.poll_unpin(&mut Context::from_waker(Waker::noop()));
                self.calls.push_back(Call {
                    number: 0,
                    reply: asking,
                });
            }
            let reply = async move {
                if is_asking {
                    // A second sending would lack the word before it.
                    connection
                        .send_packed_command(&script.in_full(&command))
                        .await
                } else {
                    script.send(&mut connection, &command).await
                }
            };
            let mut reply = maybe_done(coop::unconstrained(reply).boxed());
            let _ = reply.poll_unpin(&mut Context::from_waker(Waker::noop()));
            self.calls.push_back(Call { number, reply });
            traffic.take_off(number, lane, parcels, now);
        }
    }

    /// Hears the second connection: confirmations by the name in them, since a server that takes a
    /// subscription away says so in the same words, and the client gives that to the oldest question.
    pub(super) fn hear(
        &mut self,
        cx: &mut Context<'_>,
        names: &Names,
        address: &Arc<str>,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<(), Fault> {
        let Ok(ears) = &mut self.standing.ears else {
            return Ok(());
        };
        // No budget holds it up: where a lot comes, the pump has used it.
        while let Poll::Ready(push) = pin!(coop::unconstrained(ears.pushes.recv())).poll(cx) {
            let closed = || Fault::Closed {
                address: address.clone(),
            };
            let push = push.ok_or_else(closed)?;
            self.heard = now;
            ears.socket.pump.taken();
            match push.kind {
                PushKind::Disconnection => return Err(closed()),
                ref kind if is_subscription(kind) => {
                    let said = named(kind, &push.data);
                    let told = said.and_then(|(said, channel)| self.channels.told(channel, said));
                    match told {
                        Some(Told::Heard(key)) => events.push(Event::Subscribed(key)),
                        Some(Told::Taken(key)) => events.push(Event::Unsubscribed(key)),
                        Some(Told::Unheard(_) | Told::Passed) => {}
                        None => return Err(shifted(address)),
                    }
                }
                _ => match message(names, &self.channels, &push) {
                    Some((key, grant)) => events.push(Event::Granted { key, grant }),
                    None => {
                        tracing::debug!(kind = ?push.kind, "passed over a push that is no grant for us");
                    }
                },
            }
        }
        while let Some(asked) = self.asked.front_mut() {
            if asked.reply.poll_unpin(cx).is_pending() {
                break;
            }
            let mut asked = self.asked.pop_front().expect("it was just looked at");
            self.heard = now;
            let reply = Pin::new(&mut asked.reply).take_output();
            let reply = reply.expect("it is done").map_err(|source| Fault::Broken {
                address: address.clone(),
                source,
            })?;
            // One that is not its own was taken for it by the client, and its own would be taken for the next one's.
            let is_its_own = match (&reply, &asked.what) {
                // Whatever it says, it is there.
                (_, Question::Ping) => !matches!(reply, Value::Push { .. }),
                (
                    Value::ServerError(error),
                    Question::Enter(channel) | Question::Leave(channel),
                ) => {
                    let told = self.channels.refused(channel);
                    match &told {
                        Some(Told::Heard(key)) => events.push(Event::Subscribed(key.clone())),
                        Some(Told::Unheard(key)) => {
                            let refusal = Refusal::from(error).naming(names);
                            events.push(Event::NotSubscribed(key.clone(), refusal));
                        }
                        _ => {}
                    }
                    told.is_some()
                }
                (Value::Push { kind, data }, Question::Enter(channel)) => {
                    named(kind, data) == Some((Wish::Listen, channel))
                }
                (Value::Push { kind, data }, Question::Leave(channel)) => {
                    named(kind, data) == Some((Wish::Leave, channel))
                }
                _ => false,
            };
            if !is_its_own {
                return Err(shifted(address));
            }
        }
        Ok(())
    }
}

pub(super) fn on_reply(
    traffic: &mut Traffic<Parcel, Instant>,
    wires: &mut Wires,
    address: &Arc<str>,
    number: u64,
    reply: Value,
    events: &mut Vec<Event>,
) -> Result<(), Fault> {
    if number == 0 {
        return Ok(());
    }
    let flight = traffic
        .land(number)
        .expect("a call is under way until its reply is here");
    if let Value::ServerError(error) = &reply {
        let refusal = Refusal::from(error);
        if flight.jobs.len() > 1 && refusal.may_be_one_keys() {
            // As for a server (S1): each goes again by itself, once, before whatever else waits.
            for mut parcel in flight.jobs.into_iter().rev() {
                parcel.job.alone = true;
                traffic.add_again(parcel);
            }
            return Ok(());
        }
        let at = wires.standing.clock.last();
        events.extend(flight.jobs.into_iter().map(|parcel| Event::Answered {
            parcel,
            at,
            verdict: Verdict::Refused(refusal.clone()),
        }));
        return Ok(());
    }
    let Some(reply) = reply::read_reply(number, &flight.jobs, reply) else {
        // Perhaps they are done, perhaps not: they are among those that the end takes along.
        traffic.take_off(number, Lane::Batch, flight.jobs, Instant::now());
        return Err(Fault::Garbled {
            address: address.clone(),
            what: "a reply is not the one to its call",
        });
    };
    if let Some(at) = reply.at {
        // Not before it reached us (O5).
        wires.standing.clock = Clock::told(at, Instant::now());
    }
    let at = wires.standing.clock.last();
    for (parcel, verdict) in flight.jobs.into_iter().zip(reply.verdicts) {
        events.push(Event::Answered {
            parcel,
            at,
            verdict,
        });
    }
    Ok(())
}

fn shifted(address: &Arc<str>) -> Fault {
    Fault::Garbled {
        address: address.clone(),
        what: "a subscription changed that nobody asked to",
    }
}

/// The channel that is said to be listened to, or to be left.
fn named<'a>(kind: &PushKind, data: &'a [Value]) -> Option<(Wish, &'a str)> {
    let said = match kind {
        PushKind::SSubscribe => Wish::Listen,
        PushKind::SUnsubscribe => Wish::Leave,
        _ => return None,
    };
    Some((said, first(data)?))
}

fn first(data: &[Value]) -> Option<&str> {
    match data.first()? {
        Value::BulkString(channel) => std::str::from_utf8(channel).ok(),
        _ => None,
    }
}

/// The grant in a push to the channel of its key.
fn message(names: &Names, channels: &Channels, push: &PushInfo) -> Option<(Arc<str>, Grant)> {
    let (PushKind::SMessage, [_, Value::BulkString(payload)]) = (&push.kind, &push.data[..]) else {
        return None;
    };
    let of = channels.key(first(&push.data)?)?;
    match grant::read(names, payload)? {
        Message::Granted { key, grant } if key == *of => Some((key, grant)),
        _ => None,
    }
}
