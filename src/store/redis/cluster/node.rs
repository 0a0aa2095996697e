//! One primary: its two connections, from first to last, and what is under way on them.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, MaybeDone, maybe_done};
use redis::{Cmd, PushInfo, PushKind, RedisResult, Value, cmd};
use tokio::task::coop;
use tokio::time::Instant;

use super::map::Address;
use super::parcel::Parcel;
use super::setup::{Setup, Standing};
use super::slots::Slot;
use crate::store::contract::{Grant, ServerTime};
use crate::store::redis::call::{self, Verdict};
use crate::store::redis::clock::Clock;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::grant::{self, Message};
use crate::store::redis::keys::Names;
use crate::store::redis::pauses::Pauses;
use crate::store::redis::script;
use crate::store::redis::setup::{ClientId, is_subscription};
use crate::store::traffic::{Lane, Limits, Traffic};

/// A call carries one slot only, so that there are more of them than to a server: they are written
/// and read together all the same.
const LIMITS: Limits = Limits {
    jobs: 64,
    calls: 32,
};

/// A second connection that has been silent for so long is asked whether it is there, when somebody
/// who waits looks again.
const TEST_EARS_AFTER: Duration = Duration::from_secs(1);

/// What came of a primary.
pub(super) enum Event {
    /// It can be used; `deaf`: why its grants cannot reach us.
    Up {
        deaf: Option<String>,
    },
    /// The connections are gone, or could not be made.
    Down {
        fault: Fault,
        had_stood: bool,
        sent: Vec<Parcel>,
        unsent: Vec<Parcel>,
    },
    Answered {
        parcel: Parcel,
        at: ServerTime,
        verdict: Verdict,
    },
    Subscribed(Arc<str>),
    NotSubscribed(Arc<str>, Refusal),
    /// `asked`: by us.
    Unsubscribed {
        key: Arc<str>,
        asked: bool,
    },
    Granted {
        key: Arc<str>,
        grant: Grant,
    },
}

/// What all primaries have in common.
pub(super) struct Common<'a> {
    pub(super) names: &'a Names,
    pub(super) response_timeout: Duration,
    /// The last call's number.
    pub(super) number: &'a mut u64,
}

pub(super) struct Node {
    pub(super) address: Address,
    endpoint: Endpoint,
    /// One of its slots, as far as is known.
    pub(super) slot: Option<Slot>,
    state: State,
    pub(super) traffic: Traffic<Parcel, Instant>,
    /// What is to go there when it stands.
    pub(super) parked: Vec<Parcel>,
    old: Vec<ClientId>,
    pauses: Pauses,
    /// The map names it.
    pub(super) is_wanted: bool,
    made_for_slot: bool,
}

enum State {
    Pausing(Instant),
    Connecting(BoxFuture<'static, Result<Standing, Fault>>),
    Standing(Box<Wires>),
}

struct Wires {
    standing: Standing,
    began: Instant,
    /// In the order in which they were sent.
    calls: VecDeque<Call>,
    /// What was asked of the second connection, in order.
    asked: VecDeque<Asked>,
    /// When the second connection last said something.
    heard: Instant,
    /// The channels that we are or may be subscribed to, and their keys.
    channels: HashMap<String, Arc<str>>,
}

struct Call {
    number: u64,
    reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

/// What the second connection was asked.
struct Asked {
    what: Question,
    since: Instant,
    reply: MaybeDone<BoxFuture<'static, RedisResult<Value>>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Question {
    /// For the grants of this channel.
    Enter(String),
    /// For them no more.
    Leave(String),
    /// Whether it is there.
    Ping,
}

impl Node {
    pub(super) fn new(endpoint: Endpoint, address: Address, now: Instant) -> Self {
        Self {
            address,
            endpoint,
            slot: None,
            state: State::Pausing(now),
            traffic: Traffic::new(LIMITS),
            parked: Vec::new(),
            old: Vec::new(),
            pauses: Pauses::default(),
            is_wanted: false,
            made_for_slot: false,
        }
    }

    pub(super) fn stands(&self) -> bool {
        matches!(self.state, State::Standing(_))
    }

    /// Whether it stands and grants reach us from there.
    pub(super) fn hears(&self) -> bool {
        matches!(&self.state, State::Standing(wires) if wires.standing.ears.is_ok())
    }

    /// Whether its connections were made for a slot, so that it has ears.
    pub(super) fn had_slot(&self) -> bool {
        self.made_for_slot
    }

    /// Ends connections that nothing is under way on, to make them anew.
    pub(super) fn renew_wires(&mut self) {
        if self.is_idle() {
            self.state = State::Pausing(Instant::now());
        }
    }

    /// Is not connected to again: the map does not name it.
    pub(super) fn forsake(&mut self) {
        if let State::Pausing(until) = &mut self.state {
            *until += Duration::from_secs(3600);
        }
    }

    /// Ends the connections.
    pub(super) fn give_up(&mut self, fault: Fault, now: Instant, events: &mut Vec<Event>) {
        if self.stands() {
            self.end(fault, now, events);
        }
    }

    /// Nothing would be lost with it.
    pub(super) fn is_idle(&self) -> bool {
        self.parked.is_empty()
            && self.traffic.is_landed()
            && !self.traffic.is_waiting()
            && match &self.state {
                State::Standing(wires) => wires.asked.is_empty(),
                _ => true,
            }
    }

    /// Does not wait any longer before it connects.
    pub(super) fn hurry(&mut self, now: Instant) {
        if let State::Pausing(until) = &mut self.state {
            *until = now;
        }
    }

    /// Asks for the grants of a key, which are confirmed by an event; or not for them any more.
    pub(super) fn subscribe(&mut self, names: &Names, key: &Arc<str>, enter: bool, now: Instant) {
        let State::Standing(wires) = &mut self.state else {
            return;
        };
        let channel = names.channel_of(key);
        wires.channels.insert(channel.clone(), key.clone());
        let word = if enter { "SSUBSCRIBE" } else { "SUNSUBSCRIBE" };
        let command = cmd(word).arg(&channel).take();
        let what = match enter {
            true => Question::Enter(channel),
            false => Question::Leave(channel),
        };
        wires.ask(what, command, now);
    }

    /// Asks the second connection whether it is there, if it has said nothing for a while. One that
    /// was lost without a word is silent as one is on which nothing is granted, while the first
    /// goes on answering: every hand-over would be found by W2 alone, and so for ever.
    pub(super) fn test_ears(&mut self, now: Instant) {
        if let State::Standing(wires) = &mut self.state
            && wires.asked.is_empty()
            && now.saturating_duration_since(wires.heard) >= TEST_EARS_AFTER
        {
            wires.ask(Question::Ping, cmd("PING"), now);
        }
    }

    /// Sends what may go, and hears what came.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        common: &mut Common<'_>,
        now: Instant,
        events: &mut Vec<Event>,
    ) {
        match &mut self.state {
            State::Pausing(until) => {
                if *until <= now {
                    *common.number += 1;
                    self.made_for_slot = self.slot.is_some();
                    let setup = Setup {
                        endpoint: self.endpoint.clone(),
                        names: common.names.clone(),
                        within: common.response_timeout,
                        slot: self.slot,
                        old: std::mem::take(&mut self.old),
                        number: *common.number,
                    };
                    self.state = State::Connecting(setup.run().boxed());
                    self.poll(cx, common, now, events);
                }
            }
            State::Connecting(connecting) => {
                let Poll::Ready(made) = connecting.poll_unpin(cx) else {
                    return;
                };
                match made {
                    Ok(standing) => {
                        self.old.clone_from(&standing.ids);
                        let deaf = standing.ears.as_ref().err().cloned();
                        self.state = State::Standing(Box::new(Wires {
                            standing,
                            began: now,
                            calls: VecDeque::new(),
                            asked: VecDeque::new(),
                            heard: now,
                            channels: HashMap::new(),
                        }));
                        events.push(Event::Up { deaf });
                        cx.waker().wake_by_ref();
                    }
                    Err(fault) => self.end(fault, now, events),
                }
            }
            State::Standing(_) => {
                if let Err(fault) = self.serve(cx, common, now, events) {
                    self.end(fault, now, events);
                    cx.waker().wake_by_ref();
                }
            }
        }
    }

    /// When something is to be done if nothing comes.
    pub(super) fn deadline(&self, response_timeout: Duration) -> Option<Instant> {
        match &self.state {
            State::Pausing(until) => Some(*until),
            State::Connecting(_) => None,
            State::Standing(wires) => {
                let asked = wires.asked.front().map(|asked| asked.since);
                let oldest = self.traffic.oldest().into_iter().chain(asked).min();
                oldest.map(|oldest| oldest + response_timeout)
            }
        }
    }

    /// Both connections are gone with this, and all that they would have written.
    fn end(&mut self, fault: Fault, now: Instant, events: &mut Vec<Event>) {
        let had_stood = match &self.state {
            State::Standing(wires) => {
                // One that breaks at once is as good as none.
                if now.saturating_duration_since(wires.began) > Pauses::LONGEST {
                    self.pauses = Pauses::default();
                }
                true
            }
            _ => false,
        };
        self.state = State::Pausing(now + self.pauses.next());
        let sent = self.traffic.crash().collect();
        let mut unsent: Vec<_> = self.traffic.cancel().collect();
        unsent.append(&mut self.parked);
        events.push(Event::Down {
            fault,
            had_stood,
            sent,
            unsent,
        });
    }

    fn serve(
        &mut self,
        cx: &mut Context<'_>,
        common: &mut Common<'_>,
        now: Instant,
        events: &mut Vec<Event>,
    ) -> Result<(), Fault> {
        let State::Standing(wires) = &mut self.state else {
            return Ok(());
        };
        let address = self.endpoint.address();
        wires.send(&mut self.traffic, common, now);
        let closed = || Fault::Closed {
            address: address.clone(),
        };

        let mut moved = wires.standing.main.pump.poll(cx).is_ready();
        if let Ok(ears) = &mut wires.standing.ears {
            moved |= ears.socket.pump.poll(cx).is_ready();
        }
        wires.hear(cx, common.names, address, now, events)?;
        let mut index = 0;
        while let Some(call) = wires.calls.get_mut(index) {
            if call.reply.poll_unpin(cx).is_pending() {
                index += 1;
                continue;
            }
            let mut call = wires.calls.remove(index).expect("it was just looked at");
            let reply = Pin::new(&mut call.reply).take_output();
            let reply = reply.expect("it is done").map_err(|source| Fault::Broken {
                address: address.clone(),
                source,
            })?;
            on_reply(
                &mut self.traffic,
                wires,
                address,
                call.number,
                reply,
                events,
            )?;
            cx.waker().wake_by_ref();
        }
        if moved {
            return Err(closed());
        }
        let asked = wires.asked.front().map(|asked| asked.since);
        let oldest = self.traffic.oldest().into_iter().chain(asked).min();
        if oldest.is_some_and(|oldest| oldest + common.response_timeout <= now) {
            return Err(Fault::Silent {
                address: address.clone(),
                within: common.response_timeout,
            });
        }
        Ok(())
    }
}

impl Wires {
    /// Asks the second connection something.
    fn ask(&mut self, what: Question, command: Cmd, now: Instant) {
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

    fn send(
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
    fn hear(
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
        while let Poll::Ready(push) = ears.pushes.poll_recv(cx) {
            let closed = || Fault::Closed {
                address: address.clone(),
            };
            let push = push.ok_or_else(closed)?;
            self.heard = now;
            match push.kind {
                PushKind::Disconnection => return Err(closed()),
                ref kind if is_subscription(kind) => {
                    let channel = named(&push).unwrap_or_default();
                    let is_enter = matches!(kind, PushKind::SSubscribe);
                    let Some(key) = self.channels.get(channel).cloned() else {
                        return Err(shifted(address));
                    };
                    let is_asked = self.asked.iter().any(|asked| match &asked.what {
                        Question::Enter(of) => is_enter && of == channel,
                        Question::Leave(of) => !is_enter && of == channel,
                        Question::Ping => false,
                    });
                    if is_enter && is_asked {
                        events.push(Event::Subscribed(key));
                    } else if is_enter || !is_asked && !self.asked.is_empty() {
                        // From now on the answers would be each other's.
                        return Err(shifted(address));
                    } else {
                        self.channels.remove(channel);
                        events.push(Event::Unsubscribed {
                            key,
                            asked: is_asked,
                        });
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
            match (&reply, asked.what) {
                (Value::ServerError(error), Question::Enter(channel)) => {
                    if let Some(key) = self.channels.remove(&channel) {
                        let refusal = Refusal::from(error).naming(names);
                        events.push(Event::NotSubscribed(key, refusal));
                    }
                }
                (Value::ServerError(_), Question::Leave(_)) => return Err(shifted(address)),
                // Whatever it says, it is there.
                _ => {}
            }
        }
        Ok(())
    }
}

fn on_reply(
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
    let Some(reply) = call::read_reply(number, &flight.jobs, reply) else {
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

/// The channel that a push is about.
fn named(push: &PushInfo) -> Option<&str> {
    match push.data.first()? {
        Value::BulkString(channel) => std::str::from_utf8(channel).ok(),
        _ => None,
    }
}

/// The grant in a push to the channel of its key.
fn message(
    names: &Names,
    channels: &HashMap<String, Arc<str>>,
    push: &PushInfo,
) -> Option<(Arc<str>, Grant)> {
    let (PushKind::SMessage, [_, Value::BulkString(payload)]) = (&push.kind, &push.data[..]) else {
        return None;
    };
    let of = channels.get(named(push)?)?;
    match grant::read(names, payload)? {
        Message::Granted { key, grant } if key == *of => Some((key, grant)),
        _ => None,
    }
}
