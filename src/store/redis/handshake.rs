//! What is said on a new connection before it is used (O4, G2).

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, PushInfo, PushKind, RedisError, RedisResult, Value, cmd};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{Instant, timeout, timeout_at};

use super::call;
use super::clock::Clock;
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
    /// Keeps that open where the server sends nothing.
    pub(super) open: UnboundedSender<PushInfo>,
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
    /// Each round trip may take so long.
    pub(super) within: Duration,
}

impl Handshake<'_> {
    /// May be dropped half-way: no step touches a lock.
    pub(super) async fn run(&self) -> Result<Connected, Fault> {
        let (sender, mut pushes) = mpsc::unbounded_channel();
        let open = sender.clone();
        let (mut link, speaks_resp3) = match self.endpoint.connect(self.within, sender).await? {
            Some(link) => (link, true),
            None => (self.endpoint.connect_resp2(self.within).await?, false),
        };
        let subscribes = self.purpose == Purpose::Server && speaks_resp3;
        let nonce = format!("{:016x}", rand::random::<u64>());
        let (asked, subscribed, probed) = {
            let connection = &link.connection;
            let mut questions = vec![cmd("CLIENT").arg("INFO").take()];
            questions.extend(["server", "memory"].map(|it| cmd("INFO").arg(it).take()));
            questions.extend(self.predecessor.map(ClientId::kill));
            // Polled in this order, so all of it is sent in this order and in one go.
            let asking = questions.into_iter().map(|question| {
                let mut connection = connection.clone();
                async move { connection.send_packed_command(&question).await }
            });
            let asking = futures::future::join_all(asking);
            let mut subscriber = connection.clone();
            let subscribing = async {
                match subscribes {
                    true => subscriber.subscribe(self.names.channel()).await,
                    false => Ok(()),
                }
            };
            let mut prober = connection.clone();
            let probing = self.probe(&mut prober, &nonce, subscribes);
            let steps = async { tokio::join!(asking, subscribing, probing) };
            let (within, address) = (self.within, self.address());
            timeout(within, link.run(steps))
                .await
                .map_err(|_| Fault::Silent { address, within })?
        };
        let mut answers = Vec::new();
        for answer in asked {
            answers.push(answer.map_err(|source| self.broken(source))?);
        }
        let (clock, probe_refusal) = probed?;
        let mut no_push = self.no_push(speaks_resp3, subscribed)?;
        no_push = no_push.or(probe_refusal.map(|refusal| refusal.to_string()));
        let mut heard = Heard::default();
        while let Ok(push) = pushes.try_recv() {
            self.hear(push, &nonce, &mut heard)?;
        }
        let give_up = Instant::now() + self.within;
        while subscribes && no_push.is_none() && !heard.nonce {
            match timeout_at(give_up, link.run(pushes.recv())).await {
                Ok(Some(push)) => self.hear(push, &nonce, &mut heard)?,
                Ok(None) => return Err(self.closed()),
                Err(_) => {
                    let reason = "a message published to our own channel did not arrive";
                    no_push = Some(reason.to_owned());
                }
            }
        }
        Ok(Connected {
            link,
            pushes,
            open,
            early: heard.early,
            no_push,
            clock,
            id: ClientId::read(&answers[0]),
            server: ServerInfo::read(&answers[1], &answers[2]),
        })
    }

    fn address(&self) -> Arc<str> {
        self.endpoint.address().clone()
    }

    fn broken(&self, source: RedisError) -> Fault {
        let address = self.address();
        Fault::Broken { address, source }
    }

    fn garbled(&self, what: &'static str) -> Fault {
        let address = self.address();
        Fault::Garbled { address, what }
    }

    /// Why grants cannot be pushed, as far as the subscription tells.
    fn no_push(
        &self,
        speaks_resp3: bool,
        subscribed: RedisResult<()>,
    ) -> Result<Option<String>, Fault> {
        if !speaks_resp3 {
            return Ok(Some(
                "it, or a proxy before it, speaks RESP2 only".to_owned(),
            ));
        }
        match subscribed {
            Ok(()) => Ok(None),
            Err(error) => match Refusal::of(&error) {
                Some(refusal) => Ok(Some(refusal.naming(self.names).to_string())),
                None => Err(self.broken(error)),
            },
        }
    }

    /// Sees that the server takes writes and gives us the rights that the scripts need, and has it
    /// publish the nonce. The refusal is one to publish.
    async fn probe(
        &self,
        connection: &mut redis::aio::MultiplexedConnection,
        nonce: &str,
        publishes: bool,
    ) -> Result<(Clock, Option<Refusal>), Fault> {
        let keys = match self.purpose {
            Purpose::Server => self.names.probe(),
            Purpose::Primary(slot) => self.names.probe_in(slot),
            Purpose::Importing => return self.ask_time(connection).await,
        };
        let [lock, queue, channel] = &keys;
        let channel = if publishes { &**channel } else { "" };
        let message = grant::probe(nonce);
        let command =
            call::probe_command(self.script, [lock, queue], self.number, channel, &message);
        let mut answer = self.send(connection, &command).await?;
        if matches!(&answer, Value::ServerError(error) if error.code() == "NOSCRIPT") {
            let load = self.script.load();
            let loaded = self.send(connection, &load).await?;
            answer = match loaded {
                // Without the right to load it, each call carries the whole text.
                Value::ServerError(_) => {
                    self.send(connection, &self.script.in_full(&command))
                        .await?
                }
                _ => self.send(connection, &command).await?,
            };
        }
        if let Value::ServerError(error) = &answer {
            let refusal = Refusal::from(error).naming(self.names);
            return Err(Fault::refused(self.address(), refusal, self.names));
        }
        let (at, refusal) = reply::read_probe(self.number, &answer)
            .ok_or_else(|| self.garbled("the reply to the probe is another's"))?;
        let refusal = refusal.map(|refusal| refusal.naming(self.names));
        Ok((Clock::told(at, Instant::now()), refusal))
    }

    async fn send(
        &self,
        connection: &mut redis::aio::MultiplexedConnection,
        command: &Cmd,
    ) -> Result<Value, Fault> {
        let sent = connection.send_packed_command(command).await;
        sent.map_err(|source| self.broken(source))
    }

    async fn ask_time(
        &self,
        connection: &mut redis::aio::MultiplexedConnection,
    ) -> Result<(Clock, Option<Refusal>), Fault> {
        let time = self.send(connection, &cmd("TIME")).await?;
        let heard = Instant::now();
        let (seconds, micros): (u64, u64) =
            redis::from_redis_value(time).map_err(|_| self.garbled("it does not tell its time"))?;
        let at = seconds.saturating_mul(1_000_000).saturating_add(micros);
        Ok((Clock::told(at, heard), None))
    }

    /// The predecessor may still be subscribed too, so no other message proves anything.
    fn hear(&self, push: PushInfo, nonce: &str, heard: &mut Heard) -> Result<(), Fault> {
        if push.kind == PushKind::Disconnection {
            return Err(self.closed());
        }
        match message(self.names, &push) {
            Some(Message::Probe(other)) => heard.nonce |= other == nonce,
            _ if push.kind == PushKind::Subscribe => {}
            _ => heard.early.push(push),
        }
        Ok(())
    }

    fn closed(&self) -> Fault {
        let address = self.address();
        Fault::Closed { address }
    }
}

/// What came during the handshake.
#[derive(Default)]
struct Heard {
    nonce: bool,
    early: Vec<PushInfo>,
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
        let mut kill = cmd("CLIENT");
        kill.arg("KILL")
            .arg("ID")
            .arg(&self.id)
            .arg("ADDR")
            .arg(&self.address);
        kill
    }

    /// Reads the answer to `CLIENT INFO`.
    pub(super) fn read(info: &Value) -> Option<Self> {
        let text = text(info)?;
        let field = |name| {
            let mut fields = text.split_ascii_whitespace();
            fields
                .find_map(|field| field.strip_prefix(name))
                .map(str::to_owned)
        };
        Some(Self {
            id: field("id=")?,
            address: field("addr=")?,
        })
    }
}

impl ServerInfo {
    fn read(server: &Value, memory: &Value) -> Self {
        let policy = field(memory, "maxmemory_policy:");
        Self {
            run_id: field(server, "run_id:")
                .filter(|id| is_run_id(id))
                .map(Into::into),
            evicts: policy
                .filter(|policy| *policy != "noeviction")
                .map(str::to_owned),
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

fn field<'a>(info: &'a Value, name: &str) -> Option<&'a str> {
    text(info)?
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => Some(text),
        _ => None,
    }
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
