//! The scripts do what the model in memory does.

use std::time::Instant;

use futures::channel::oneshot;
use proptest::prelude::*;
use redis::{Connection, ConnectionLike};

use super::registry::{BOUND, attempt};
use super::support::{Program, RedisServer, next_message};
use crate::base::Mode;
use crate::store::contract::{Holder, KeyStatus, StoreEvent, SubmittedOp};
use crate::store::driver::{Request, RequestKind};
use crate::store::model;
use crate::store::model::{Answers, INSTANCES, KEYS, PREFIX, Server};
use crate::store::redis::grant::Message;
use crate::store::redis::keys::Names;
use crate::store::redis::reply::RequestReply;
use crate::store::redis::{call, grant, reply, script};

const FENCE: &str = "p:~fence";

#[derive(Clone, Debug)]
enum FenceStep {
    Gone,
    /// It holds a text.
    Bad,
    /// It is ahead of the clock by so many micros.
    Ahead(u64),
}

struct Scripts {
    script: String,
    connection: Connection,
    hearing: redis::PubSub<'static>,
    number: u64,
    /// Of the history.
    begin: Instant,
}

fn names(who: usize) -> Names {
    Names::new(PREFIX.into(), INSTANCES[who].into())
}

fn lock(key: usize) -> String {
    names(0).lock(KEYS[key]).concat()
}

impl Scripts {
    fn ask<T: redis::FromRedisValue>(&mut self, words: &[&str]) -> T {
        let command = redis::cmd(words[0]).arg(&words[1..]).take();
        command.query(&mut self.connection).unwrap()
    }

    fn send(&mut self, who: usize, requests: &[Request]) -> Vec<RequestReply> {
        self.number += 1;
        let (names, until) = (names(who), u64::MAX >> 12);
        let (mut command, script) = (Vec::new(), ["EVAL", &self.script]);
        call::write(&mut command, script, &names, self.number, until, requests);
        let reply = self.connection.req_packed_command(&command);
        let reply = reply::read_reply(self.number, requests, reply.unwrap());
        reply.expect("the reply to this call").replies
    }

    /// What was published by now, and to whom.
    fn heard(&mut self) -> Vec<(usize, StoreEvent)> {
        self.ask::<()>(&["PUBLISH", "end", "end"]);
        let mut heard = Vec::new();
        loop {
            let message = next_message(&mut self.hearing, BOUND);
            let channel = message.get_channel_name();
            if channel == "end" {
                return heard;
            }
            let mut all = 0..INSTANCES.len();
            let who = all.find(|who| names(*who).channel() == channel).unwrap();
            let names = names(who);
            let Some(Message::Events(events)) = grant::read(&names, message.get_payload_bytes())
            else {
                panic!("{message:?}")
            };
            heard.extend(events.into_iter().map(|event| (who, event)));
        }
    }
}

impl Server for Scripts {
    type Step = FenceStep;
    const FENCES: [usize; KEYS.len()] = [0; KEYS.len()];
    /// Nobody subscribes to the channel of the dead one.
    const CALLER_IS_LIVE: bool = false;

    fn own_steps() -> BoxedStrategy<FenceStep> {
        prop_oneof![
            Just(FenceStep::Gone),
            Just(FenceStep::Bad),
            (0..3_000_000_u64).prop_map(FenceStep::Ahead),
        ]
        .boxed()
    }

    fn clear(&mut self) {
        self.ask::<()>(&["FLUSHALL"]);
        self.begin = Instant::now();
    }

    fn call(&mut self, who: usize, requests: &[Request]) -> Answers {
        let renews = |request: &Request| request.op().is_some_and(model::renews);
        let mut outcomes = Vec::new();
        // Renewals name fewer keys, and need a call of their own.
        for requests in requests.chunk_by(|one, other| renews(one) == renews(other)) {
            for (request, reply) in requests.iter().zip(self.send(who, requests)) {
                let RequestReply::Done(outcome) = reply else {
                    panic!("{request:?}: {reply:?}");
                };
                outcomes.push(outcome);
            }
        }
        (outcomes, self.heard())
    }

    fn run_out(&mut self, key: usize) {
        self.ask::<()>(&["DEL", &lock(key)]);
    }

    fn take(&mut self, step: &FenceStep, last_epochs: &mut [u64; KEYS.len()]) {
        let (seconds, micros): (u64, u64) = self.ask(&["TIME"]);
        let (now, last) = (seconds * 1_000_000 + micros, &mut last_epochs[0]);
        match step {
            FenceStep::Ahead(micros) => {
                *last = now.max(*last) + micros;
                self.ask(&["SET", FENCE, &last.to_string()])
            }
            // A fence that is ahead of the clock may not be lost as well (F1).
            _ if *last >= now => {}
            FenceStep::Gone => self.ask(&["DEL", FENCE]),
            FenceStep::Bad => {
                self.ask::<()>(&["SET", FENCE, "no number"]);
                let submitted = SubmittedOp::unattended("other", attempt(1));
                let replies = self.send(0, &[Request::new(RequestKind::Op(submitted))]);
                let is_refused = matches!(replies[..], [RequestReply::Refused(_)]);
                assert!(is_refused, "{replies:?}");
                assert_eq!(self.ask::<String>(&["GET", FENCE]), "no number");
                assert!(!self.ask::<bool>(&["EXISTS", "p:other"]));
                self.ask::<()>(&["DEL", FENCE]);
            }
        }
    }

    fn written_owner(&mut self, key: usize) -> Option<String> {
        match &*self.ask::<String>(&["TYPE", &lock(key)]) {
            "zset" => None,
            _ => self.ask(&["GET", &lock(key)]),
        }
    }

    fn look(&mut self, key: usize) -> (KeyStatus, Vec<String>) {
        let look = RequestKind::Look(KEYS[key].into(), oneshot::channel().0);
        let replies = self.send(0, &[Request::new(look)]);
        let [RequestReply::Seen(status)] = &replies[..] else {
            panic!("{replies:?}");
        };
        let lock = lock(key);
        let mut held: Vec<String> = match &*self.ask::<String>(&["TYPE", &lock]) {
            "none" => Vec::new(),
            "string" => vec![self.ask(&["GET", &lock])],
            _ => self.ask(&["ZRANGE", &lock, "0", "-1"]),
        };
        held.sort();
        assert_eq!(held, members(&status.holders), "{lock}");
        let queue = names(0).queue(KEYS[key]).concat();
        let listen = names(0).listeners(KEYS[key]).concat();
        let listeners: Vec<String> = self.ask(&["ZRANGE", &listen, "0", "-1"]);
        // The sets outlast the lock by 60 s (K3). Each was set in this history.
        for (name, is_empty, least) in [
            (&lock, held.is_empty(), model::TTL.as_millis()),
            (&queue, status.tickets == 0, 60_000),
            (&listen, listeners.is_empty(), 60_000),
        ] {
            let left: i64 = self.ask(&["PTTL", name]);
            let at_first = left + self.begin.elapsed().as_millis() as i64 + 1;
            assert!(is_empty || at_first >= least as i64, "k3: {name}: {left}");
        }
        (status.clone(), listeners)
    }
}

/// How a server has these holders.
fn members(holders: &[Holder]) -> Vec<String> {
    let members = holders.iter().flat_map(|holder| match holder.mode {
        Mode::Permits { limit, weight } => {
            let all = (1..=weight).map(|i| format!("{} {i}/{limit}", holder.name));
            all.collect()
        }
        _ => vec![holder.name.clone()],
    });
    let mut members: Vec<_> = members.collect();
    members.sort();
    members
}

#[test]
fn the_scripts_agree_with_the_model() {
    let original = script::TEXT;
    // What is kept for a listener must not run out while it is looked at.
    let script = original.replace("'NX', 'PX', 100)", "'NX', 'PX', 300000)");
    assert_ne!(original, script);
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let server = RedisServer::builder().program(program).start();
        let client = redis::Client::open(server.url()).unwrap();
        let hearing = Box::leak(Box::new(client.get_connection().unwrap()));
        let mut hearing = hearing.as_pubsub();
        for channel in ["p:~grant:a1", "p:~grant:b2", "end"] {
            hearing.subscribe(channel).unwrap();
        }
        let scripts = Scripts {
            script: script.clone(),
            connection: client.get_connection().unwrap(),
            hearing,
            number: 0,
            begin: Instant::now(),
        };
        model::agree(&format!("{program:?}"), scripts);
    }
}
