//! Acquisitions that count only when replicas have them.
//!
//! A request that has won a lock is not answered yet. It goes once more to the node that has the lock's slot, to be
//! confirmed there. So does each grant. Meanwhile it may be redirected, delayed and lost like any other request.
//!
//! `WAIT` blocks its connection, and counts only the writes of that connection. So each node's task has a second
//! connection. On it the task first writes something that comes after the acquisition in the replication stream: a
//! replica that has the one has the other. All acquisitions that come meanwhile share the next question.
//!
//! The node that has the lock by then is asked. That may be another node than the one that gave it, if a slot has
//! moved or a replica was promoted. What counts is that one node says, on one connection, that the owner has the lock
//! and how many replicas have it.
//!
//! Renewals and releases do not wait for replicas. A replica that missed a renewal keeps the lock until the end of the
//! renewal before. A replica that missed a release keeps the lock until its ttl is over, and gives it to nobody.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use redis::{Cmd, Value, cmd};
use tokio::time::Instant;

use super::backend::{RedisBackend, Times};
use super::fault::{ErrorReply, Fault};
use super::keys::Names;
use super::link::Link;
use super::script::Script;
use super::topology::Topology;
use crate::base::Mode;
use crate::base::limits::TTL;
use crate::base::user_code::log;
use crate::roaming::time::sleep_until;
use crate::store::attempts::{Pace, first_success};
use crate::store::contract::{OpError, Owner};
use crate::store::driver::{Address, Backoff, IDLE, Received, Reply, Request};

/// How many locks may share a call: a longer script would block all other clients.
const MOST_IN_CALL: usize = 512;

static SCRIPT: LazyLock<Script> = LazyLock::new(|| Script::new(include_str!("confirm.lua")));

/// How many replicas must have an acquisition, and within what time.
#[derive(Clone, Copy, Debug)]
pub(super) struct MinReplicas {
    least: u32,
    pub(super) within: Duration,
}

impl MinReplicas {
    /// `None` for no replicas.
    pub(super) fn new(least: u32, within: Duration) -> Result<Option<Self>, Fault> {
        // For the server a zero time-out means for ever.
        if !(Duration::from_millis(1)..*TTL.end()).contains(&within) {
            let reason = format!("{within:?} is not from 1 ms to less than 24 h");
            return Err(Fault::invalid("min_replicas", reason));
        }
        Ok((least > 0).then_some(Self { least, within }))
    }
}

/// The requests of a node that wait for replicas, and the connection for `WAIT`. Dropping it closes that connection.
#[derive(Default)]
pub(super) struct Confirmer {
    pub(super) waiting: Vec<Request>,
    /// The requests of the current round. Those that share a call are next to each other.
    asked: Vec<Request>,
    round: Option<BoxFuture<'static, Result<Round, Fault>>>,
    /// Its server has the script. Absent during a round; with the time since when it is idle.
    connection: Option<(Link, Instant)>,
    backoff: Backoff,
}

struct Round {
    rule: MinReplicas,
    link: Link,
    /// For each request whether its owner has the lock.
    states: Vec<Result<bool, ErrorReply>>,
    /// How many replicas have all of these locks.
    replicas: u64,
}

impl Confirmer {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.asked.is_empty()
    }

    /// Closes the connection, and returns all requests.
    pub(super) fn abort(&mut self) -> impl Iterator<Item = Request> + use<> {
        let aborted = std::mem::take(self);
        aborted.asked.into_iter().chain(aborted.waiting)
    }

    /// Starts a round with all waiting requests, so that nobody waits for more than two rounds.
    pub(super) fn begin(
        &mut self,
        backend: &Arc<RedisBackend>,
        address: &Address,
        at: Option<SocketAddr>,
    ) {
        let now = Instant::now();
        let is_idle = |it: &mut (_, Instant)| now >= it.1 + IDLE;
        self.connection.take_if(is_idle);
        let (Some(rule), None, false) =
            (backend.min_replicas, &self.round, self.waiting.is_empty())
        else {
            return;
        };
        self.asked = std::mem::take(&mut self.waiting);
        self.asked.sort_by_key(|it| (it.most == 1, it.slot));
        let until = self.asked.iter_mut().filter_map(|it| it.held.as_mut());
        let until = until.map(|it| *it.until.get_or_insert(now + rule.within));
        let until = until.max().unwrap_or(now);
        let begin = self.backoff.not_before().map_or(now, |it| it.min(until));
        let connection = self.connection.take();
        let (mut commands, mut calls) = (Vec::new(), Vec::new());
        let by_slot = |one: &Request, next: &Request| next.most > 1 && one.slot == next.slot;
        let slots = self.asked.chunk_by(by_slot);
        for requests in slots.flat_map(|requests| requests.chunks(MOST_IN_CALL)) {
            if requests[0].asking.is_some() {
                commands.push(cmd("ASKING"));
            }
            let call = call(&backend.names, requests);
            commands.push(match connection {
                Some(_) => call,
                None => SCRIPT.in_full(&call),
            });
            calls.push(requests.len());
        }
        let (backend, address) = (backend.clone(), address.clone());
        let round = async move {
            sleep_until(begin).await;
            let timeout = backend.times.answer;
            let mut link = match connection {
                Some((link, _)) => link,
                None => {
                    let endpoint = backend.topology.endpoint(&address, backend.times);
                    // The same server, whatever else has its name.
                    endpoint.await?.at(at).connect_resp2(timeout).await?
                }
            };
            let within = until.saturating_duration_since(Instant::now());
            commands.push(wait(rule.least, within));
            let answers = link.ask_all(&commands, within + timeout).await?;
            let (states, replicas) = read(&calls, answers, &link.address)?;
            Ok(Round {
                rule,
                link,
                states,
                replicas,
            })
        };
        self.round = Some(Box::pin(round));
    }

    /// Resolves when a round has ended.
    pub(super) fn poll_end(
        &mut self,
        backend: &RedisBackend,
        cx: &mut Context<'_>,
    ) -> Poll<Vec<Received>> {
        if let Some(round) = &mut self.round {
            let ended = ready!(round.as_mut().poll(cx));
            self.round = None;
            return Poll::Ready(self.on_end(backend, ended));
        }
        if let Some((link, _)) = &mut self.connection
            && link.poll_ended(cx).is_ready()
        {
            self.connection = None;
        }
        Poll::Pending
    }

    fn on_end(&mut self, backend: &RedisBackend, ended: Result<Round, Fault>) -> Vec<Received> {
        let now = Instant::now();
        let asked = std::mem::take(&mut self.asked);
        let round = match ended {
            Ok(round) => round,
            Err(fault) => return self.on_fault(asked, &fault, now),
        };
        self.backoff = Backoff::default();
        let MinReplicas { least, within } = round.rule;
        let (replicas, address) = (round.replicas, round.link.address.clone());
        // A server that has none of our locks may be another one than the session's.
        if !round.states.iter().all(|state| *state == Ok(false)) {
            self.connection = Some((round.link, now));
        }
        let told = asked.into_iter().zip(round.states).map(|(mut request, state)| {
            let reason = match state {
                Ok(true) if replicas >= u64::from(least) => return Received::Confirmed { request },
                Ok(true) => format!(
                    "{replicas} of {least} replicas of Redis at {address} had it within {within:?}"
                ),
                // It was released meanwhile, or another server was asked than the one that gave it.
                Ok(false) => format!("it was gone before Redis at {address} was asked"),
                Err(refusal) => {
                    // If its slot is not there yet, others may be missing, too.
                    if matches!(refusal.code(), "ASK" | "TRYAGAIN") {
                        request.most = 1;
                    }
                    let reply = Reply::Refused(backend.refusal(&address, refusal));
                    return Received::Answer { request, reply };
                }
            };
            unconfirmed(request, reason, false)
        });
        told.collect()
    }

    /// Requests with time left go into the next round.
    fn on_fault(&mut self, mut asked: Vec<Request>, fault: &Fault, now: Instant) -> Vec<Received> {
        log!(debug, %fault, "could not ask the replicas");
        self.backoff.failed(now, None);
        if !fault.is_lasting() {
            let has_time = |it: &mut Request| it.useful_until().is_some_and(|until| now < until);
            self.waiting.extend(asked.extract_if(.., has_time));
        }
        let over = asked
            .into_iter()
            .map(|request| unconfirmed(request, fault, fault.is_lasting()));
        over.collect()
    }
}

fn call(names: &Names, requests: &[Request]) -> Cmd {
    let mut call = SCRIPT.command(requests.len(), requests.len());
    for request in requests {
        call.arg(names.lock(request.key()).concat());
    }
    for held in requests.iter().filter_map(|it| it.held.as_ref()) {
        let Owner { sequence, mode } = held.owner;
        let member = match mode {
            Mode::Permits { limit, .. } => format!(" 1/{limit}"),
            _ => String::new(),
        };
        call.arg(format!("{}:{sequence}{member}", names.instance()));
    }
    call
}

fn wait(replicas: u32, within: Duration) -> Cmd {
    // Rounded up: for the server a zero time-out means for ever.
    let millis = u64::try_from(within.as_millis() + 1).unwrap_or(u64::MAX);
    cmd("WAIT").arg(replicas).arg(millis).take()
}

/// Reads the answers to calls for this many locks each, and to the `WAIT` after them.
fn read(
    calls: &[usize],
    answers: Vec<Value>,
    address: &Address,
) -> Result<(Vec<Result<bool, ErrorReply>>, u64), Fault> {
    // ASKING is answered by OK.
    let mut answers = answers.into_iter().filter(|answer| *answer != Value::Okay);
    let garbled = || Fault::garbled(address, "unexpected answer about replicas");
    let mut states = Vec::new();
    for count in calls {
        match answers.next() {
            Some(Value::ServerError(error)) if error.code() != "NOSCRIPT" => {
                states.extend(vec![Err(ErrorReply::from(&error)); *count]);
            }
            Some(Value::Array(flags)) if flags.len() == *count => {
                states.extend(flags.iter().map(|flag| Ok(*flag == Value::Int(1))));
            }
            // Also if it has lost the script, which the next connection loads.
            _ => return Err(garbled()),
        }
    }
    let replicas = match answers.next() {
        // A server that has none of our locks may be a replica by now, and refuse to count.
        _ if !states.contains(&Ok(true)) => 0,
        Some(Value::Int(count)) => u64::try_from(count).unwrap_or(0),
        Some(Value::ServerError(error)) => return Err(Fault::refused(address, &error)),
        _ => return Err(garbled()),
    };
    Ok((states, replicas))
}

fn unconfirmed(request: Request, reason: impl fmt::Display, is_lasting: bool) -> Received {
    let fault = Fault::unconfirmed(reason, is_lasting);
    let error = OpError::Unconfirmed(fault.into());
    Received::Failed { request, error }
}

/// Whether the server, or a primary of the cluster, allows `WAIT`. `within` bounds all attempts together.
pub(super) async fn try_out(topology: &Topology, times: Times) -> Result<(), Fault> {
    let within = times.connect;
    let until = Instant::now() + within;
    let nodes = topology.primaries(times).await?;
    let asking = nodes.into_keys().map(|node| {
        let asking = async move {
            let mut link = topology.connect_resp2(&node, times).await?;
            // For no replicas, so the answer comes at once. A replica refuses.
            let wait = wait(0, Duration::from_millis(1));
            link.ask(&wait, within).await
        };
        asking.boxed()
    });
    let tried = first_success(asking, Pace::regular(Duration::ZERO), until).await;
    tried.map(drop).map_err(|failed| {
        // A lasting error is reported in preference to a temporary one.
        let faults = failed.errors.into_iter();
        let told = faults.reduce(|told, next| if told.is_lasting() { told } else { next });
        told.unwrap_or_else(|| Fault::silent(topology.address(), within))
    })
}

#[cfg(test)]
mod tests {
    use redis::parse_redis_value;

    use super::*;

    /// Reads the answers of a server to calls for this many locks.
    fn read_bytes(calls: &[usize], bytes: &str) -> Result<(Vec<String>, u64), Fault> {
        let count = bytes.matches("\r\n").count();
        let all =
            parse_redis_value(format!("*{count}\r\n{bytes}{}", "$-1\r\n".repeat(count)).as_bytes());
        let Ok(Value::Array(answers)) = all else {
            panic!("{all:?}")
        };
        let (states, replicas) = read(calls, answers, &"a:1".into())?;
        let short = |state: &Result<bool, ErrorReply>| match state {
            Ok(true) => "ours".to_owned(),
            Ok(false) => "gone".to_owned(),
            Err(refusal) => refusal.code().to_owned(),
        };
        Ok((states.iter().map(short).collect(), replicas))
    }

    #[test]
    fn a_round_is_read_call_by_call() {
        let no = "-ERR WAIT cannot be used with replica instances\r\n";
        for (calls, bytes, states, replicas) in [
            (
                &[2][..],
                "*2\r\n:1\r\n:0\r\n:2\r\n",
                &["ours", "gone"][..],
                2,
            ),
            (
                &[1, 1],
                "-MOVED 1 h:7\r\n*1\r\n:1\r\n:3\r\n",
                &["MOVED", "ours"],
                3,
            ),
            // ASKING has an answer, too.
            (
                &[1, 1],
                "*1\r\n:1\r\n+OK\r\n-ASK 2 :7\r\n:1\r\n",
                &["ours", "ASK"],
                1,
            ),
            (
                &[2, 1],
                &format!("-TRYAGAIN not all\r\n*1\r\n:0\r\n{no}"),
                &["TRYAGAIN", "TRYAGAIN", "gone"],
                0,
            ),
        ] {
            let (read, count) = read_bytes(calls, bytes).unwrap();
            assert_eq!(
                (&read[..], count),
                (
                    &states.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>()[..],
                    replicas
                )
            );
        }
    }

    #[test]
    fn an_invalid_answer_about_replicas_is_rejected() {
        for bytes in [
            "*1\r\n:1\r\n:2\r\n",
            "*3\r\n:1\r\n:1\r\n:1\r\n:2\r\n",
            "$-1\r\n:2\r\n",
            "*2\r\n:1\r\n:1\r\n$-1\r\n",
            "-NOSCRIPT No matching script.\r\n:2\r\n",
        ] {
            let fault = read_bytes(&[2], bytes).unwrap_err();
            assert!(matches!(fault, Fault::Garbled { .. }), "{bytes:?}: {fault}");
        }
        let no = "-NOPERM User x has no permissions to run the 'wait' command\r\n";
        let fault = read_bytes(&[1], &format!("*1\r\n:1\r\n{no}")).unwrap_err();
        assert!(
            fault.is_lasting() && fault.to_string().contains("'wait'"),
            "{fault}"
        );
    }
}
