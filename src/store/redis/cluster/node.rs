//! One primary: its two connections, from first to last, and what is under way on them.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use redis::cmd;
use tokio::time::Instant;

use super::channels::Channels;
use super::map::Address;
use super::parcel::Parcel;
use super::setup::{Connected, Setup};
use super::slots::Slot;
use super::wires::{Question, Wires, on_reply};
use crate::store::contract::{Grant, ServerTime};
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::keys::Names;
use crate::store::redis::pauses::Pauses;
use crate::store::redis::reply::Verdict;
use crate::store::redis::setup::ClientId;
use crate::store::traffic::{Limits, Traffic};

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
    /// Nobody had asked for it.
    Unsubscribed(Arc<str>),
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
    /// Its connections were made for a slot, so that they have ears.
    made_for_slot: bool,
}

enum State {
    Pausing(Instant),
    Connecting(BoxFuture<'static, Result<Connected, Fault>>),
    Standing(Box<Wires>),
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

    /// It can be used, by all who come.
    pub(super) fn stands(&self) -> bool {
        matches!(self.state, State::Standing(_)) && !self.is_outgrown()
    }

    /// Whether it stands and grants reach us from there.
    pub(super) fn hears(&self) -> bool {
        matches!(&self.state, State::Standing(wires) if wires.standing.ears.is_ok())
    }

    /// Its connections were made when no slot of it was known, so they have no ears. They are made anew when nothing is
    /// under way on them.
    fn is_outgrown(&self) -> bool {
        self.is_wanted && self.slot.is_some() && !self.made_for_slot
    }

    /// Is not connected to again, unless a map names it.
    pub(super) fn forsake(&mut self) {
        if let State::Pausing(until) = &mut self.state {
            *until += Duration::from_secs(3600);
        }
    }

    /// Ends the connections.
    pub(super) fn give_up(&mut self, fault: Fault, now: Instant, events: &mut Vec<Event>) {
        if matches!(self.state, State::Standing(_)) {
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

    /// Asks for the grants of a key, which is confirmed by an event; only of a node that hears.
    pub(super) fn listen(&mut self, names: &Names, key: &Arc<str>, now: Instant) {
        if let State::Standing(wires) = &mut self.state {
            let channel = names.channel_of(key);
            wires.channels.ask_to_listen(&channel, key);
            let command = cmd("SSUBSCRIBE").arg(&channel).take();
            wires.ask(Question::Enter(channel), command, now);
        }
    }

    /// Asks not for them any more, if it was asked for them.
    pub(super) fn leave(&mut self, names: &Names, key: &str, now: Instant) {
        if let State::Standing(wires) = &mut self.state {
            let channel = names.channel_of(key);
            if wires.channels.ask_to_leave(&channel) {
                let command = cmd("SUNSUBSCRIBE").arg(&channel).take();
                wires.ask(Question::Leave(channel), command, now);
            }
        }
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
                            channels: Channels::default(),
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
                } else if self.is_outgrown()
                    && self.traffic.is_landed()
                    && !self.traffic.is_waiting()
                {
                    self.state = State::Pausing(now);
                    self.poll(cx, common, now, events);
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
