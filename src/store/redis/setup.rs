//! Makes a connection that can be relied on, in the one order that works (O4): connect, kill the
//! old connection, subscribe, prove that pushes arrive.

use std::future::Future;
use std::time::Duration;

use redis::{Cmd, ErrorKind, PushInfo, PushKind, RedisError, RedisResult, Value, cmd};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use super::clock::Clock;
use super::endpoint::Endpoint;
use super::fault::{Fault, Refusal};
use super::grant::{self, Message};
use super::keys::Names;
use super::reply;
use super::script;
use super::socket::Socket;

/// A connection that stands.
pub(super) struct Connected {
    pub(super) socket: Socket,
    /// What the server says unasked; `None` on a connection that carries no such thing.
    pub(super) pushes: Option<UnboundedReceiver<PushInfo>>,
    /// Grants that came before the proof was complete.
    pub(super) early: Vec<PushInfo>,
    /// Why grants cannot reach us on it, if they cannot.
    pub(super) deaf: Option<String>,
    pub(super) clock: Clock,
    pub(super) id: Option<ClientId>,
}

/// A connection, as its server knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClientId {
    id: String,
    /// Server and our end; a server that was started again gives the same ids to others.
    address: String,
}

/// No id or address is longer: a path is 108 bytes at most.
const LONGEST_FIELD: usize = 256;

/// What every connection is made for.
pub(super) struct Setup<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) names: &'a Names,
    /// Each step is to take no longer.
    pub(super) within: Duration,
}

impl Setup<'_> {
    /// Makes a connection. `number` is the probe's call number. Steps may be dropped half-way: the
    /// connection is then thrown away with them, and none of them touches a lock.
    pub(super) async fn run(
        &self,
        old: Option<&ClientId>,
        number: u64,
    ) -> Result<Connected, Fault> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (socket, mut ears) = match self.endpoint.connect(self.within, sender).await? {
            Some(socket) => (socket, Some(Ears::new(receiver))),
            None => (self.endpoint.connect_resp2(self.within).await?, None),
        };
        let mut steps = Steps {
            setup: self,
            socket,
        };

        let id = steps.ask_id().await?;
        if let Some(old) = old {
            steps.kill(old).await?;
        }
        let mut deaf = match &mut ears {
            Some(ears) => steps
                .subscribe(ears)
                .await?
                .map(|refusal| refusal.to_string()),
            None => Some("it, or a proxy before it, speaks RESP2 only".to_owned()),
        };
        let nonce = format!("{:016x}", rand::random::<u64>());
        let (clock, refusal) = steps.probe(number, &nonce, deaf.is_none()).await?;
        deaf = deaf.or(refusal.map(|refusal| refusal.to_string()));
        if let Some(ears) = &mut ears
            && deaf.is_none()
            && !steps.hears(ears, &nonce).await?
        {
            deaf = Some("what was published to our own channel did not arrive".to_owned());
        }

        let (pushes, early) =
            ears.map_or((None, Vec::new()), |ears| (Some(ears.receiver), ears.early));
        Ok(Connected {
            socket: steps.socket,
            pushes,
            early,
            deaf,
            clock,
            id,
        })
    }

    fn broken(&self, source: RedisError) -> Fault {
        let address = self.endpoint.address().clone();
        Fault::Broken { address, source }
    }

    fn closed(&self) -> Fault {
        let address = self.endpoint.address().clone();
        Fault::Closed { address }
    }

    fn garbled(&self, what: &'static str) -> Fault {
        let address = self.endpoint.address().clone();
        Fault::Garbled { address, what }
    }

    async fn bounded<T>(
        &self,
        step: impl Future<Output = RedisResult<T>>,
    ) -> Result<RedisResult<T>, Fault> {
        tokio::time::timeout(self.within, step)
            .await
            .map_err(|_| Fault::Silent {
                address: self.endpoint.address().clone(),
                within: self.within,
            })
    }
}

/// The receiving end of the pushes, until the connection stands.
struct Ears {
    receiver: UnboundedReceiver<PushInfo>,
    early: Vec<PushInfo>,
    subscribed: bool,
}

impl Ears {
    fn new(receiver: UnboundedReceiver<PushInfo>) -> Self {
        Self {
            receiver,
            early: Vec::new(),
            subscribed: false,
        }
    }
}

/// The steps after connecting.
struct Steps<'a> {
    setup: &'a Setup<'a>,
    socket: Socket,
}

impl Steps<'_> {
    async fn ask(&mut self, command: &Cmd) -> Result<Value, Fault> {
        let Socket { connection, pump } = &mut self.socket;
        let asking = connection.send_packed_command(command);
        self.setup
            .bounded(pump.run(asking))
            .await?
            .map_err(|source| self.setup.broken(source))
    }

    /// Who we are to the server; unknown to old servers, and without the right to ask.
    async fn ask_id(&mut self) -> Result<Option<ClientId>, Fault> {
        Ok(ClientId::read(&self.ask(cmd("CLIENT").arg("INFO")).await?))
    }

    /// The old connection may still hold commands that are on their way. A server that does not
    /// let us kill it says so in vain: O5 guards against the worst of them.
    async fn kill(&mut self, old: &ClientId) -> Result<(), Fault> {
        let killed = self.ask(&old.kill()).await?;
        tracing::debug!(
            ?killed,
            "asked the server to drop the connection before this one"
        );
        Ok(())
    }

    /// Subscribes to our channel, and sees that confirmed. `Some`: it was refused.
    async fn subscribe(&mut self, ears: &mut Ears) -> Result<Option<Refusal>, Fault> {
        let Socket { connection, pump } = &mut self.socket;
        let subscribing = connection.subscribe(self.setup.names.channel());
        match self.setup.bounded(pump.run(subscribing)).await? {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension) => {
                return Ok(Refusal::of(&error).map(|it| it.naming(self.setup.names)));
            }
            Err(error) => return Err(self.setup.broken(error)),
        }
        // The client shows us a confirmation before it takes it for the answer.
        while let Ok(push) = ears.receiver.try_recv() {
            self.hear(ears, push, None)?;
        }
        Ok(None)
    }

    /// Sees that the server takes writes, and has it publish the nonce to our channel. `Some`: it
    /// does not let us publish.
    async fn probe(
        &mut self,
        number: u64,
        nonce: &str,
        publish: bool,
    ) -> Result<(Clock, Option<Refusal>), Fault> {
        let channel = self.setup.names.channel();
        let mut command = script::PROBE.command(2, 3);
        // Named as the channel is: no lock of anybody's may begin so.
        let never = format!("~grant:{}", self.setup.names.instance());
        command
            .arg(self.setup.names.lock(&never).concat())
            .arg(self.setup.names.queue(&never).concat())
            .arg(number)
            .arg(if publish { channel } else { "" })
            .arg(grant::probe(nonce));
        let Socket { connection, pump } = &mut self.socket;
        let asking = script::PROBE.send(connection, &command);
        let reply = self
            .setup
            .bounded(pump.run(asking))
            .await?
            .map_err(|source| self.setup.broken(source))?;
        if let Value::ServerError(error) = &reply {
            let address = self.setup.endpoint.address().clone();
            let refusal = Refusal::from(error).naming(self.setup.names);
            return Err(Fault::refused(address, refusal, self.setup.names));
        }
        let (at, answers) = reply::read_head(number, reply)
            .ok_or_else(|| self.setup.garbled("the reply to the probe is another's"))?;
        let refusal = answers.first().and_then(reply::read_error);
        let refusal = refusal.map(|it| it.naming(self.setup.names));
        Ok((Clock::told(at, Instant::now()), refusal))
    }

    /// Waits for the nonce. The old connection may still be subscribed too, so any other message
    /// proves nothing.
    async fn hears(&mut self, ears: &mut Ears, nonce: &str) -> Result<bool, Fault> {
        let give_up = Instant::now() + self.setup.within;
        loop {
            let hearing = self.socket.pump.run(ears.receiver.recv());
            match tokio::time::timeout_at(give_up, hearing).await {
                Ok(Some(push)) => {
                    if self.hear(ears, push, Some(nonce))? {
                        return Ok(true);
                    }
                }
                Ok(None) => return Err(self.setup.closed()),
                Err(_) => return Ok(false),
            }
        }
    }

    /// Takes a push; true if it is the nonce's.
    fn hear(&self, ears: &mut Ears, push: PushInfo, nonce: Option<&str>) -> Result<bool, Fault> {
        match push.kind {
            PushKind::Disconnection => Err(self.setup.closed()),
            PushKind::Subscribe if !ears.subscribed => {
                ears.subscribed = true;
                Ok(false)
            }
            ref kind if is_subscription(kind) => Err(self
                .setup
                .garbled("a subscription changed that nobody asked to")),
            _ => {
                let probe = message(self.setup.names, &push).is_some_and(|message| {
                    nonce.is_some_and(|nonce| message == Message::Probe(nonce))
                });
                if !probe {
                    ears.early.push(push);
                }
                Ok(probe)
            }
        }
    }
}

/// Whether the client takes such a push for the answer to the oldest call.
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

/// The message in a push, if it is one to our channel that we understand.
pub(super) fn message<'a>(names: &Names, push: &'a PushInfo) -> Option<Message<'a>> {
    match (&push.kind, &push.data[..]) {
        (PushKind::Message, [Value::BulkString(channel), Value::BulkString(payload)])
            if channel == names.channel().as_bytes() =>
        {
            grant::read(names, payload)
        }
        _ => None,
    }
}

impl ClientId {
    /// Has the server drop it.
    pub(super) fn kill(&self) -> Cmd {
        let mut kill = cmd("CLIENT");
        kill.arg("KILL")
            .arg("ID")
            .arg(&self.id)
            .arg("ADDR")
            .arg(&self.address);
        kill
    }

    /// Reads the answer to CLIENT INFO.
    pub(super) fn read(info: &Value) -> Option<Self> {
        let info = match info {
            Value::BulkString(bytes) => std::str::from_utf8(bytes).ok()?,
            Value::VerbatimString { text, .. } => text,
            _ => return None,
        };
        let field = |name| {
            info.split_ascii_whitespace()
                .find_map(|field| field.strip_prefix(name))
                // It is kept as long as the connection is.
                .filter(|field| field.len() <= LONGEST_FIELD)
                .map(str::to_owned)
        };
        Some(Self {
            id: field("id=")?,
            address: field("addr=")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn nothing_like_client_info_panics(text in "(id=|addr=|name=|[ \\t=]|[0-9a-z.:]{0,9}|\\PC){0,12}", verbatim in any::<bool>()) {
            let info = if verbatim {
                Value::VerbatimString { format: redis::VerbatimFormat::Text, text: text.clone() }
            } else {
                Value::BulkString(text.clone().into())
            };
            if let Some(ClientId { id, address }) = ClientId::read(&info) {
                // They go into a command as words of their own, and name no more than was said.
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
