//! What is said on a new connection before it is used (O4, G2).

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Pipeline, PushInfo, PushKind, Value, cmd};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::{Instant, timeout};

use super::call;
use super::clock::Clock;
use super::cluster::Address;
use super::endpoint::Endpoint;
use super::fault::{Fault, Refusal};
use super::grant::{self, Message};
use super::keys::Names;
use super::reply;
use super::script::Script;
use super::slots::Slot;
use super::stream::Link;

/// A connection that is ready for calls.
pub(super) struct Connected {
    pub(super) link: Link,
    /// What the server sends unasked.
    pub(super) pushes: UnboundedReceiver<PushInfo>,
    /// Grants that came during the handshake.
    pub(super) early: Vec<PushInfo>,
    /// Why the server cannot push grants to us, if it cannot.
    pub(super) no_push: Option<String>,
    pub(super) clock: Clock,
    pub(super) id: Option<ClientId>,
    pub(super) server: ServerInfo,
}

/// A connection, as its server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientId {
    id: String,
    /// Our end; a server that was restarted gives the same ids to others.
    address: String,
}

/// What `INFO` says of a server.
#[derive(Debug, Default)]
pub(super) struct ServerInfo {
    /// Differs from server to server, and from start to start.
    pub(super) run_id: Option<Arc<str>>,
    /// The memory policy, if it may evict locks.
    pub(super) evicts: Option<String>,
    /// Why the server does not say, if it does not.
    pub(super) refusal: Option<Refusal>,
}

/// What the calls of a connection will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Calls and grants, on a server that has all keys.
    Server,
    /// Calls, on a primary that has this slot, among others.
    Primary(Slot),
    /// Calls, on a node that has no slot yet.
    Importing,
}

pub(super) struct Handshake<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) names: &'a Names,
    pub(super) script: &'a Script,
    pub(super) purpose: Purpose,
    /// The connection that ended with calls in flight: it may still hold some of them.
    pub(super) predecessor: Option<&'a ClientId>,
    /// The probe's call number.
    pub(super) number: u64,
    /// Whether to ask if the server evicts: `INFO` takes far longer than other commands.
    pub(super) asks_policy: bool,
    /// Each round trip may take so long.
    pub(super) within: Duration,
}

pub(super) const ONLY_RESP2: &str = "it, or a proxy before it, speaks RESP2 only";
pub(super) const UNHEARD: &str = "a message published to our own channel did not arrive";

impl Handshake<'_> {
    /// May be dropped half-way: no step touches a lock.
    pub(super) async fn run(&self) -> Result<Connected, Fault> {
        let (address, within) = (self.endpoint.address(), self.within);
        let (sender, mut pushes) = mpsc::unbounded_channel();
        let (mut link, speaks_resp3) = match self.endpoint.connect(within, sender).await? {
            Some(link) => (link, true),
            None => (self.endpoint.connect_resp2(within).await?, false),
        };
        let subscribes = self.purpose == Purpose::Server && speaks_resp3;
        let probe = Probe::new(self.names, address);
        let last = self.last_command(&probe, subscribes);
        let mut commands = client_commands(self.predecessor);
        commands.cmd("INFO").arg("server");
        if self.asks_policy {
            commands.cmd("INFO").arg("memory");
        }
        if subscribes {
            commands.cmd("SUBSCRIBE").arg(self.names.channel());
        }
        commands.add_command(last.clone());
        let mut answers = link.ask_all(&commands, address, within).await?;
        let mut last_answer = || answers.pop().unwrap_or(Value::Nil);
        let proved = last_answer();
        let subscribed = subscribes.then(&mut last_answer);
        let memory = self.asks_policy.then(&mut last_answer);
        let server = last_answer();
        let (clock, mut no_push) = self.read_last(&mut link, &last, proved).await?;
        let mut early = Vec::new();
        if let Some(subscribed) = subscribed {
            if let Value::ServerError(error) = &subscribed {
                no_push = Some(Refusal::from(error).naming(self.names).to_string());
            }
            // What has come is read in any case: a push confirms the subscription, too.
            let wait = no_push.as_ref().map_or(within, |_| Duration::ZERO);
            let heard;
            (heard, early) = probe.hear(&mut pushes, wait).await?;
            if !heard {
                no_push.get_or_insert_with(|| UNHEARD.to_owned());
            }
        } else if !speaks_resp3 {
            no_push = Some(ONLY_RESP2.to_owned());
        }
        Ok(Connected {
            link,
            pushes,
            early,
            no_push,
            clock,
            id: answers.first().and_then(ClientId::read),
            server: ServerInfo::read(&server, &memory.unwrap_or(Value::Nil)),
        })
    }

    /// Sees that the server takes writes and gives us the rights that the scripts need, and has it
    /// publish the probe; or asks for its time alone.
    fn last_command(&self, probe: &Probe<'_>, publishes: bool) -> Cmd {
        let keys = match self.purpose {
            Purpose::Server => self.names.probe(),
            Purpose::Primary(slot) => self.names.probe_in(slot),
            Purpose::Importing => return cmd("TIME"),
        };
        let [lock, queue, channel] = &keys;
        let channel = if publishes { &**channel } else { "" };
        let message = probe.message();
        call::probe_command(self.script, [lock, queue], self.number, channel, &message)
    }

    /// Tells the server's time, and why it does not publish.
    async fn read_last(
        &self,
        link: &mut Link,
        command: &Cmd,
        mut answer: Value,
    ) -> Result<(Clock, Option<String>), Fault> {
        let address = self.endpoint.address();
        let garbled = |what| {
            let address = address.clone();
            Fault::Garbled { address, what }
        };
        if self.purpose == Purpose::Importing {
            let (seconds, micros): (u64, u64) = redis::from_redis_value(answer)
                .map_err(|_| garbled("it does not tell its time"))?;
            let at = seconds.saturating_mul(1_000_000).saturating_add(micros);
            return Ok((Clock::told(at, Instant::now()), None));
        }
        // Without the right to load it, the call carries the whole text.
        let loaded = vec![self.script.load(), command.clone()];
        for again in [loaded, vec![self.script.in_full(command)]] {
            if matches!(&answer, Value::ServerError(error) if error.code() == "NOSCRIPT") {
                let mut commands = Pipeline::new();
                for command in again {
                    commands.add_command(command);
                }
                let answers = link.ask_all(&commands, address, self.within).await?;
                answer = answers.into_iter().last().unwrap_or(Value::Nil);
            }
        }
        if let Value::ServerError(error) = &answer {
            let refusal = Refusal::from(error).naming(self.names);
            return Err(Fault::refused(address.clone(), refusal, self.names));
        }
        let (at, refusal) = reply::read_probe(self.number, &answer)
            .ok_or_else(|| garbled("the reply to the probe is another's"))?;
        let refusal = refusal.map(|refusal| refusal.naming(self.names).to_string());
        Ok((Clock::told(at, Instant::now()), refusal))
    }
}

/// What a connection asks first: who it is to the server, and that the one before it is closed.
pub(super) fn client_commands(predecessor: Option<&ClientId>) -> Pipeline {
    let mut commands = Pipeline::new();
    commands.cmd("CLIENT").arg("INFO");
    if let Some(predecessor) = predecessor {
        commands.add_command(predecessor.kill());
    }
    commands
}

/// A message to ourselves, which proves that pushes arrive (O4).
pub(super) struct Probe<'a> {
    names: &'a Names,
    address: &'a Address,
    nonce: String,
}

impl<'a> Probe<'a> {
    pub(super) fn new(names: &'a Names, address: &'a Address) -> Self {
        Self {
            names,
            address,
            nonce: format!("{:016x}", rand::random::<u64>()),
        }
    }

    pub(super) fn message(&self) -> String {
        grant::probe(&self.nonce)
    }

    /// Whether the message comes within that time, and what else came until then. No other message
    /// proves anything: the predecessor may still be subscribed, too.
    pub(super) async fn hear(
        &self,
        pushes: &mut UnboundedReceiver<PushInfo>,
        within: Duration,
    ) -> Result<(bool, Vec<PushInfo>), Fault> {
        let mut others = Vec::new();
        let hearing = async {
            while let Some(push) = pushes.recv().await {
                match (message(self.names, &push), &push.kind) {
                    (Some(Message::Probe(nonce)), _) if nonce == self.nonce => return Ok(true),
                    (_, PushKind::Disconnection) => break,
                    (_, PushKind::Subscribe) => {}
                    _ => others.push(push),
                }
            }
            let address = self.address.clone();
            Err(Fault::Closed { address })
        };
        let heard = timeout(within, hearing).await;
        Ok((heard.unwrap_or(Ok(false))?, others))
    }
}

/// Whether the client takes such a push for the answer to the oldest request.
pub(super) fn is_subscription(kind: &PushKind) -> bool {
    matches!(
        kind,
        PushKind::Subscribe
            | PushKind::PSubscribe
            | PushKind::SSubscribe
            | PushKind::Unsubscribe
            | PushKind::PUnsubscribe
            | PushKind::SUnsubscribe
    )
}

/// The message in a push, if it is one that we understand.
pub(super) fn message<'a>(names: &Names, push: &'a PushInfo) -> Option<Message<'a>> {
    match (&push.kind, &push.data[..]) {
        (PushKind::Message | PushKind::SMessage, [_, Value::BulkString(payload)]) => {
            grant::read(names, payload)
        }
        _ => None,
    }
}

impl ClientId {
    /// Has the server close the connection. Without the right to do so it is refused, and O5 guards
    /// against the worst.
    pub(super) fn kill(&self) -> Cmd {
        let words = ["KILL", "ID", &self.id, "ADDR", &self.address];
        cmd("CLIENT").arg(&words).take()
    }

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

/// Hosts that hide the id give the same for all servers.
fn is_run_id(id: &str) -> bool {
    id.len() == 40 && id.bytes().any(|digit| digit != b'0')
}

/// The word that follows `name`, with which a word of the text begins.
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
                // They become words of a command, and name no more than was said.
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
