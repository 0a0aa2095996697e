//! The set-up of a new connection (O4, G2).

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, PushInfo, PushKind, Value};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::cluster::Address;
use super::endpoint::Endpoint;
use super::fault::{ErrorReply, Fault};
use super::grant::{self, Message};
use super::keys::Names;
use super::node::NodeTask;
use super::pipe::{Event, Pipe};
use super::reply;
use super::stream::Link;
use crate::store::server_clock::ServerClock;

/// A connection that is ready for calls.
pub(super) struct Connected {
    /// Each request is a call; its tag is the call's number.
    pub(super) pipe: Pipe<u64>,
    /// Grants that came during the handshake.
    pub(super) early: Vec<PushInfo>,
    /// Why the server cannot push grants to us, if it cannot.
    pub(super) no_push: Option<String>,
    pub(super) clock: ServerClock,
    pub(super) id: Option<ClientId>,
    pub(super) server: ServerInfo,
}

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

pub(super) const ONLY_RESP2: &str = "it, or a proxy before it, speaks RESP2 only";
pub(super) const UNHEARD: &str = "a message published to our own channel did not arrive";

impl NodeTask {
    /// Connects. Cancel safe: no step touches a lock.
    pub(super) async fn set_up(&mut self, endpoint: &Endpoint) -> Result<Connected, Fault> {
        let shared = self.shared.clone();
        let names = &shared.names;
        let (address, within) = (&endpoint.address, shared.config.response_timeout);
        let (sender, pushes) = mpsc::unbounded_channel();
        let (mut link, speaks_resp3) = endpoint.connect(within, sender).await?;
        let subscribes = !shared.is_cluster() && speaks_resp3;
        let probe = Probe::new(names);
        // Checks that the server accepts writes and that we have the rights for the scripts, and publishes the probe.
        // It names a lock that never exists. A node without a slot cannot run it: its first call brings its time (O5).
        let call = shared.probe_names(self.id).map(|[lock, queue, channel]| {
            let channel = if subscribes { &*channel } else { "" };
            let mut call = shared.script.command(2, 5);
            call.arg(&[lock, queue]).arg(self.number).arg("P").arg("");
            call.arg(channel).arg(probe.message()).take()
        });
        let mut commands = client_commands(self.predecessor.as_ref());
        commands.cmd("INFO").arg("server");
        // `INFO memory` takes the server far longer than other commands.
        let asks_policy = !self.has_connected;
        if asks_policy {
            commands.cmd("INFO").arg("memory");
        }
        if subscribes {
            commands.cmd("SUBSCRIBE").arg(names.channel());
        }
        if let Some(call) = &call {
            commands.add_command(call.clone());
        }
        let mut answers = link.ask_all(&commands, address, within).await?;
        let mut last_answer = || answers.pop().unwrap_or(Value::Nil);
        let (mut clock, mut no_push) = (ServerClock::told(0, Instant::now()), None);
        let probed = call.map(|call| (call, last_answer()));
        let subscribed = subscribes.then(&mut last_answer);
        let memory = asks_policy.then(&mut last_answer);
        let server = last_answer();
        if let Some((call, answer)) = probed {
            (clock, no_push) = self.read_probe(&mut link, address, &call, answer).await?;
        }
        let mut pipe = Pipe::new(link, pushes, address.clone(), within);
        let mut early = Vec::new();
        if let Some(subscribed) = subscribed {
            if let Value::ServerError(error) = &subscribed {
                no_push = Some(ErrorReply::from(error).naming(names).to_string());
            }
            // Reads what has come in any case: a push confirms the subscription, too.
            let wait = no_push.as_ref().map_or(within, |_| Duration::ZERO);
            let heard;
            (heard, early) = probe.hear(&mut pipe, wait).await?;
            if !heard {
                no_push.get_or_insert_with(|| UNHEARD.to_owned());
            }
        } else if !speaks_resp3 {
            no_push = Some(ONLY_RESP2.to_owned());
        }
        Ok(Connected {
            pipe,
            early,
            no_push,
            clock,
            id: answers.first().and_then(ClientId::read),
            server: ServerInfo::read(&server, &memory.unwrap_or(Value::Nil)),
        })
    }

    /// Returns the server's time, and why it does not publish.
    async fn read_probe(
        &mut self,
        link: &mut Link,
        address: &Address,
        command: &Cmd,
        mut answer: Value,
    ) -> Result<(ServerClock, Option<String>), Fault> {
        let shared = self.shared.clone();
        let names = &shared.names;
        let within = shared.config.response_timeout;
        // Without the right to load it, the call carries the whole text.
        let loaded = vec![shared.script.load(), command.clone()];
        for again in [loaded, vec![shared.script.in_full(command)]] {
            if matches!(&answer, Value::ServerError(error) if error.code() == "NOSCRIPT") {
                let mut commands = Pipeline::new();
                for command in again {
                    commands.add_command(command);
                }
                let answers = link.ask_all(&commands, address, within).await?;
                answer = answers.into_iter().last().unwrap_or(Value::Nil);
            }
        }
        if let Value::ServerError(error) = &answer {
            let (address, refusal) = (address.clone(), ErrorReply::from(error).naming(names));
            return Err(match shared.is_cluster() {
                // Perhaps its slots have moved since: not a lasting error.
                true => Fault::Refused { address, refusal },
                false => Fault::refused(address, refusal, names),
            });
        }
        let (at, refusal) = reply::read_probe(self.number, &answer)
            .ok_or_else(|| Fault::garbled(address, "unexpected reply to the probe"))?;
        let refusal = refusal.map(|refusal| refusal.naming(names).to_string());
        Ok((ServerClock::told(at, Instant::now()), refusal))
    }
}

/// The first commands of a connection: who it is for the server, and closing the one before it.
pub(super) fn client_commands(predecessor: Option<&ClientId>) -> Pipeline {
    let mut commands = Pipeline::new();
    commands.cmd("CLIENT").arg("INFO");
    if let Some(predecessor) = predecessor {
        // Without that right it is refused, and O5 guards against late commands.
        let words = ["KILL", "ID", &predecessor.id, "ADDR", &predecessor.address];
        commands.cmd("CLIENT").arg(&words);
    }
    commands
}

/// A message to ourselves, which proves that pushes arrive (O4).
pub(super) struct Probe<'a> {
    names: &'a Names,
    nonce: String,
}

impl<'a> Probe<'a> {
    pub(super) fn new(names: &'a Names) -> Self {
        let nonce = format!("{:016x}", rand::random::<u64>());
        Self { names, nonce }
    }

    pub(super) fn message(&self) -> String {
        grant::probe(&self.nonce)
    }

    /// Whether the message arrives in time, and what else came until then. No other message proves anything: the
    /// previous connection may still be subscribed, too.
    pub(super) async fn hear<T>(
        &self,
        pipe: &mut Pipe<T>,
        within: Duration,
    ) -> Result<(bool, Vec<PushInfo>), Fault> {
        let mut others = Vec::new();
        let hearing = async {
            loop {
                let Event::Push(push) = pipe.next().await? else {
                    continue;
                };
                match message(self.names, &push) {
                    Some(Message::Probe(nonce)) if nonce == self.nonce => return Ok(true),
                    _ if push.kind == PushKind::Subscribe => {}
                    _ => others.push(push),
                }
            }
        };
        let heard = timeout(within, hearing).await.unwrap_or(Ok(false))?;
        Ok((heard, others))
    }
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
fn field<'a>(info: &'a Value, name: &str) -> Option<&'a str> {
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
