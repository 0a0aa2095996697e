//! The set-up of a new connection (O4, G2).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use rand::seq::IteratorRandom;
use redis::{Cmd, PushInfo, PushKind, Value, cmd};
use tokio::time::Instant;

use super::backend::RedisBackend;
use super::endpoint::Endpoint;
use super::fault::{ErrorReply, Fault};
use super::grant::{self, Message};
use super::keys::Names;
use super::link::{Event, Link};
use super::primary::{Primary, Tag};
use super::reply;
use crate::roaming::time::timeout;
use crate::store::contract::ServerTime;
use crate::store::driver::{Connected, Hello, ServerClock, SlotSet};

/// A connection as its server sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientId {
    id: String,
    /// Our address; a server that has restarted gives the same ids to others.
    address: String,
}

/// What `INFO` says about a server.
#[derive(Debug, Default)]
pub(super) struct ServerInfo {
    /// Different for each server and each start.
    pub(super) run_id: Option<Arc<str>>,
    /// The memory policy, if it may evict locks.
    pub(super) evicts: Option<String>,
    /// Why the server does not say it, if so.
    pub(super) refusal: Option<ErrorReply>,
}

/// They last no longer, whatever becomes of us.
const MAKE: &str =
    "for i = 1, #KEYS do redis.call('SET', KEYS[i], '1', 'PX', '10000') end return 1";
const TAKE: &str = "return redis.call('DEL', KEYS[1])";
/// Of the server where it runs.
const RUN_ID: &str = "local info = redis.pcall('INFO', 'server') \
                      return type(info) == 'string' and info:match('run_id:(%x+)')";
const CLEAR: &str = "for i = 1, #KEYS do redis.call('DEL', KEYS[i]) end return 1";

pub(super) const ONLY_RESP2: &str = "it, or a proxy before it, speaks RESP2 only";
pub(super) const UNHEARD: &str = "a message published to our own channel did not arrive";

impl RedisBackend {
    /// Connects. Cancel safe: no step touches a lock. `looks`: to look, and not for locks.
    pub(super) async fn set_up(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        hello: Hello<'_, ClientId>,
        looks: bool,
    ) -> Result<Connected<Primary>, Fault> {
        let (names, within) = (&self.names, self.times.connect);
        let number = self.next_number();
        let (mut link, speaks_resp3) = endpoint.connect(within).await?;
        let nonce = format!("{:016x}", rand::random::<u64>());
        // Checks that the server accepts writes and that we have the rights for the scripts, and publishes the probe.
        // It names a lock that never exists. A node without a slot cannot run it: its first call brings its time (O5).
        let call = self
            .probe_names(&hello.slots)
            .map(|[lock, queue, channel]| {
                let published = if speaks_resp3 { &*channel } else { "" };
                let mut call = self.script.command(2, 5);
                call.arg(&[lock, queue]).arg(number).arg("P").arg("");
                call.arg(published).arg(grant::probe(&nonce));
                (call.take(), channel)
            });
        let (call, channel) = call.unzip();
        let channel = channel.filter(|_| speaks_resp3);
        let mut commands = vec![cmd("CLIENT").arg("INFO").take()];
        if let Some(ClientId { id, address }) = hello.predecessor {
            // Without that right it is refused, and O5 guards against late commands.
            let words = ["KILL", "ID", id, "ADDR", address];
            commands.push(cmd("CLIENT").arg(&words).take());
        }
        commands.push(cmd("INFO").arg("server").take());
        // `INFO memory` takes the server far longer than other commands.
        let asks_policy = hello.is_first;
        if asks_policy {
            commands.push(cmd("INFO").arg("memory").take());
        }
        // On a cluster each key that is waited for has a channel of its own, and this one has served with the probe.
        let subscribe = match self.is_cluster() {
            true => "SSUBSCRIBE",
            false => "SUBSCRIBE",
        };
        commands.extend(channel.iter().map(|it| cmd(subscribe).arg(it).take()));
        commands.extend(call.clone());
        let mut answers = link.ask_all(&commands, within).await?;
        let mut last_answer = || answers.pop().unwrap_or(Value::Nil);
        let (mut at, mut no_push) = (0, None);
        let mut told = Instant::now();
        let probed = call.map(|call| (call, last_answer()));
        let subscribed = channel.as_ref().map(|_| last_answer());
        let memory = asks_policy.then(&mut last_answer);
        let server = last_answer();
        if let Some((call, answer)) = probed {
            let read = self.read_probe(&mut link, &call, number, answer);
            (at, no_push) = read.await?;
            told = Instant::now();
        }
        if let Some(subscribed) = subscribed {
            if let Value::ServerError(error) = &subscribed {
                let refusal = ErrorReply::from(error).naming(names);
                if self.is_cluster() && !refusal.is_lasting() {
                    // Perhaps its slots have moved since.
                    return Err(Fault::refused(&link.address, refusal));
                }
                no_push = Some(refusal.to_string());
            }
            // Reads what has come in any case: a push confirms the subscription, too.
            // A push that does not arrive must leave time to connect without it.
            let longest = self.times.answer.min(within / 2);
            let wait = no_push.as_ref().map_or(longest, |_| Duration::ZERO);
            if !hear(&nonce, names, &mut link, wait).await? {
                no_push.get_or_insert_with(|| UNHEARD.to_owned());
            }
            if let Some(channel) = channel.filter(|_| self.is_cluster() && no_push.is_none()) {
                let unsubscribing = cmd("SUNSUBSCRIBE").arg(channel).take();
                match link.ask(&unsubscribing, within).await {
                    Err(Fault::Refused { refusal, .. }) if refusal.is_lasting() => {
                        no_push = Some(refusal.naming(names).to_string());
                    }
                    answer => drop(answer?),
                }
            }
        } else if !speaks_resp3 {
            no_push = Some(ONLY_RESP2.to_owned());
        }
        let info = answers.first().unwrap_or(&Value::Nil);
        // A server that speaks RESP3 knows the command.
        let is_proxy =
            matches!(info, Value::ServerError(error) if ErrorReply::from(error).code() != "NOPERM");
        if !self.is_cluster() && (is_proxy || !speaks_resp3) {
            self.refuse_spread(&mut link, looks).await?;
        }
        link.answers_within(self.times.answer);
        let server = ServerInfo::read(&server, &memory.unwrap_or(Value::Nil));
        self.warn_of(&link.address, &server);
        let id = answers.first().and_then(ClientId::read);
        let moved = self.topology.moved(endpoint.clone(), self.times);
        Ok(Connected {
            link: Primary::new(self.clone(), link, endpoint.at, id, at, moved),
            no_push,
            clock: ServerClock::told(at, told),
            identity: server.run_id,
        })
    }

    /// Refuses a proxy that spreads keys over several servers, and sends a call to that of its first key: the other keys
    /// of the call would be elsewhere for other calls. One script makes several names, and each is looked for by itself.
    /// Whoever only looks believes the servers' ids, and writes only if these are hidden.
    async fn refuse_spread(&self, link: &mut Link<Tag>, looks: bool) -> Result<(), Fault> {
        let (names, within) = (&self.names, self.times.connect);
        let names = names.far_apart(&format!("{:016x}", rand::random::<u64>()));
        let run = |script: &str, names: &[String]| {
            let mut run = cmd("EVAL");
            run.arg(script).arg(names.len()).arg(names).take()
        };
        let about = |script| names.chunks(1).map(move |name| run(script, name));
        if looks {
            let questions: Vec<_> = about(RUN_ID).collect();
            let answers = link.ask_all(&questions, within).await?;
            let ids = answers
                .iter()
                .map(|id| field(id, "").filter(|id| is_run_id(id)));
            match ids.collect::<Option<BTreeSet<_>>>() {
                Some(ids) if ids.len() == 1 => return Ok(()),
                Some(_) => return Err(Fault::spread(&link.address)),
                None => {}
            }
        }
        match link.ask(&run(MAKE, &names), within).await {
            // Without that right, or on a full server, it cannot be found out. Who has a lock there must be able to release it.
            Err(Fault::Refused { refusal, .. }) if matches!(refusal.code(), "NOPERM" | "OOM") => {
                return Ok(());
            }
            made => drop(made?),
        }
        let commands: Vec<_> = about(TAKE).chain([run(CLEAR, &names)]).collect();
        let answers = link.ask_all(&commands, within).await?;
        for found in answers.iter().take(names.len()) {
            match found {
                Value::Int(1) => {}
                Value::Int(0) => return Err(Fault::spread(&link.address)),
                Value::ServerError(error) => return Err(Fault::refused(&link.address, error)),
                _ => return Err(Fault::garbled(&link.address, "unexpected reply to a probe")),
            }
        }
        Ok(())
    }

    /// Names for a probe of a node that has these slots, if it has any: a lock, its queue and its channel.
    fn probe_names(&self, slots: &SlotSet) -> Option<[String; 3]> {
        if !self.is_cluster() {
            return Some(self.names.probe());
        }
        // Any of them: one that is being moved away has no place for new names.
        let here = slots.iter().filter(|slot| self.names.has_locks_in(**slot));
        here.choose(&mut rand::rng())
            .map(|slot| self.names.probe_in(*slot))
    }

    /// Returns the server's time, and why it does not publish.
    async fn read_probe(
        &self,
        link: &mut Link<Tag>,
        command: &Cmd,
        number: u64,
        mut answer: Value,
    ) -> Result<(ServerTime, Option<String>), Fault> {
        let (names, within) = (&self.names, self.times.connect);
        // Without the right to load it, the call carries the whole text.
        let loaded = vec![self.script.load(), command.clone()];
        for again in [loaded, vec![self.script.in_full(command)]] {
            if matches!(&answer, Value::ServerError(error) if error.code() == "NOSCRIPT") {
                let answers = link.ask_all(&again, within).await?;
                answer = answers.into_iter().last().unwrap_or(Value::Nil);
            }
        }
        if let Value::ServerError(error) = &answer {
            // In a cluster its slots may have moved since: not a lasting error.
            return Err(self.refused(&link.address, ErrorReply::from(error).naming(names)));
        }
        let (at, refusal) = reply::read_probe(number, &answer)
            .ok_or_else(|| Fault::garbled(&link.address, "unexpected reply to the probe"))?;
        let refusal = refusal.map(|refusal| refusal.naming(names).to_string());
        Ok((at, refusal))
    }
}

/// Whether the message of our own probe arrives in time, which proves that pushes do (O4). No other message proves
/// anything: the previous connection may still be subscribed, too. What else came until then is an event of the link
/// later.
async fn hear<T>(
    nonce: &str,
    names: &Names,
    link: &mut Link<T>,
    within: Duration,
) -> Result<bool, Fault> {
    let mut others = Vec::new();
    let hearing = async {
        loop {
            let Event::Push(push) = link.next().await? else {
                continue;
            };
            match message(names, &push) {
                Some(Message::Probe(heard)) if heard == nonce => return Ok(true),
                _ => others.push(push),
            }
        }
    };
    let heard = timeout(within, hearing).await.unwrap_or(Ok(false))?;
    link.put_back(others);
    Ok(heard)
}

/// The message in a push, if we understand it.
pub(super) fn message<'a>(names: &Names, push: &'a PushInfo) -> Option<Message<'a>> {
    match (&push.kind, &push.data[..]) {
        (PushKind::Message | PushKind::SMessage, [_, Value::BulkString(payload)]) => {
            grant::read(names, payload)
        }
        _ => None,
    }
}

impl ClientId {
    /// Reads the answer to `CLIENT INFO`.
    pub(super) fn read(info: &Value) -> Option<Self> {
        let field = |name| field(info, name).map(str::to_owned);
        Some(Self {
            id: field("id=")?,
            address: field("addr=")?,
        })
    }
}

impl ServerInfo {
    fn read(server: &Value, memory: &Value) -> Self {
        let run_id = field(server, "run_id:").filter(|id| is_run_id(id));
        let policy = field(memory, "maxmemory_policy:");
        Self {
            run_id: run_id.map(Into::into),
            evicts: policy.filter(|it| *it != "noeviction").map(str::to_owned),
            refusal: match server {
                Value::ServerError(error) => Some(error.into()),
                _ => None,
            },
        }
    }
}

/// Hosts that hide the id give the same one for all servers.
fn is_run_id(id: &str) -> bool {
    id.len() == 40 && id.bytes().any(|digit| digit != b'0')
}

/// The word that follows `name`, where `name` starts a word of the text.
pub(super) fn field<'a>(info: &'a Value, name: &str) -> Option<&'a str> {
    let text = match info {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => text,
        _ => return None,
    };
    let mut words = text.split_whitespace();
    words.find_map(|word| word.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn info_names_the_server_and_a_policy_that_evicts() {
        let info = |text: &str| Value::BulkString(text.into());
        let id = "b4e9f2f7a3c1d5e8f0a1b2c3d4e5f60718293a4b";
        let server = |id| {
            info(&format!(
                "# Server\r\nredis_version:7.0.15\r\nrun_id:{id}\r\n"
            ))
        };
        for hidden in ["0", "", "0000000000000000000000000000000000000000"] {
            assert_eq!(ServerInfo::read(&server(hidden), &Value::Nil).run_id, None);
        }
        let server = server(id);
        let memory = |policy| info(&format!("# Memory\r\nmaxmemory_policy:{policy}\r\n"));
        let read = ServerInfo::read(&server, &memory("volatile-lru"));
        assert_eq!(read.run_id.as_deref(), Some(id));
        assert_eq!(read.evicts.as_deref(), Some("volatile-lru"));
        assert_eq!(
            ServerInfo::read(&server, &memory("noeviction")).evicts,
            None
        );
        let nothing = ServerInfo::read(&Value::Nil, &Value::Nil);
        assert!(nothing.run_id.is_none() && nothing.evicts.is_none());
    }

    proptest! {
        #[test]
        fn nothing_like_client_info_panics(text in "(id=|addr=|name=|[ \\t=]|[0-9a-z.:]{0,9}|\\PC){0,12}") {
            if let Some(ClientId { id, address }) = ClientId::read(&Value::BulkString(text.clone().into())) {
                // They become words of a command, so they must be plain numbers.
                prop_assert!(text.contains(&id) && text.contains(&address));
                prop_assert!(!id.contains(char::is_whitespace) && !address.contains(char::is_whitespace));
            }
        }

        #[test]
        fn no_bytes_for_client_info_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = ClientId::read(&Value::BulkString(bytes));
        }
    }
}
