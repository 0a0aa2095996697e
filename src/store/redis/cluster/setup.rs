//! Makes the two connections to a primary that can be relied on, in the one order that works (O4).

use std::convert::Infallible;
use std::future::Future;
use std::time::Duration;

use redis::{Cmd, PushInfo, PushKind, RedisResult, Value, cmd};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::time::Instant;

use super::slots::Slot;
use crate::store::redis::clock::Clock;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::grant;
use crate::store::redis::keys::Names;
use crate::store::redis::reply;
use crate::store::redis::script;
use crate::store::redis::setup::ClientId;
use crate::store::redis::socket::Socket;

/// Two connections that stand.
pub(super) struct Connected {
    /// Carries the calls.
    pub(super) main: Socket,
    /// Carries the subscriptions and what is published there; `Err`: why grants cannot reach us.
    pub(super) ears: Result<Ears, String>,
    pub(super) clock: Clock,
    pub(super) ids: Vec<ClientId>,
}

pub(super) struct Ears {
    pub(super) socket: Socket,
    pub(super) pushes: UnboundedReceiver<PushInfo>,
}

/// What they are made for.
pub(super) struct Setup {
    pub(super) endpoint: Endpoint,
    pub(super) names: Names,
    /// Each step is to take no longer.
    pub(super) within: Duration,
    /// One that the primary has, for the probe; `None` if it has none yet.
    pub(super) slot: Option<Slot>,
    /// The connections before these.
    pub(super) old: Vec<ClientId>,
    /// The probe's call number.
    pub(super) number: u64,
}

impl Setup {
    /// May be dropped half-way: the connections are thrown away with it, and no step touches a lock.
    pub(super) async fn run(self) -> Result<Connected, Fault> {
        let nowhere = |_| Ok::<_, Infallible>(());
        let (mut main, mut deaf) = match self.endpoint.connect(self.within, nowhere).await? {
            Some(socket) => (socket, None),
            None => {
                let reason = "it, or a proxy before it, speaks RESP2 only".to_owned();
                let socket = self.endpoint.connect_resp2(self.within).await?;
                (socket, Some(reason))
            }
        };
        let mut ids = Vec::new();
        ids.extend(self.ask_id(&mut main).await?);
        for old in &self.old {
            // In vain where we have no right to: O5 guards against the worst.
            self.ask(&mut main, &old.kill()).await?;
        }
        let Some(slot) = self.slot else {
            let clock = self.ask_time(&mut main).await?;
            let ears = Err("it has no slot".to_owned());
            return Ok(Connected {
                main,
                ears,
                clock,
                ids,
            });
        };

        let mut ears = None;
        if deaf.is_none() {
            let (sender, pushes) = mpsc::unbounded_channel();
            match self.endpoint.connect(self.within, sender).await? {
                Some(socket) => ears = Some(Ears { socket, pushes }),
                None => deaf = Some("it speaks RESP2 only".to_owned()),
            }
        }
        let [_, _, channel] = self.names.probe_in(slot);
        if let Some(some) = &mut ears {
            ids.extend(self.ask_id(&mut some.socket).await?);
            let subscribe = cmd("SSUBSCRIBE").arg(&channel).take();
            deaf = match self.ask(&mut some.socket, &subscribe).await? {
                Value::ServerError(error) => Some(self.naming((&error).into()).to_string()),
                _ => None,
            };
        }
        let nonce = format!("{:016x}", rand::random::<u64>());
        let (clock, refusal) = self.probe(&mut main, slot, &nonce, deaf.is_none()).await?;
        deaf = deaf.or(refusal.map(|refusal| refusal.to_string()));
        if let Some(some) = &mut ears
            && deaf.is_none()
        {
            if self.hears(some, &channel, &nonce).await? {
                let unsubscribe = cmd("SUNSUBSCRIBE").arg(&channel).take();
                self.ask(&mut some.socket, &unsubscribe).await?;
                // All that is about the probe's channel.
                while some.pushes.try_recv().is_ok() {}
            } else {
                deaf = Some("what was published to our own channel did not arrive".to_owned());
            }
        }
        let ears = match (ears, deaf) {
            (Some(ears), None) => Ok(ears),
            (_, deaf) => Err(deaf.unwrap_or_default()),
        };
        Ok(Connected {
            main,
            ears,
            clock,
            ids,
        })
    }

    async fn bounded<T>(&self, step: impl Future<Output = RedisResult<T>>) -> Result<T, Fault> {
        let address = || self.endpoint.address().clone();
        let within = self.within;
        match tokio::time::timeout(within, step).await {
            Err(_) => Err(Fault::Silent {
                address: address(),
                within,
            }),
            Ok(Err(source)) => Err(Fault::Broken {
                address: address(),
                source,
            }),
            Ok(Ok(value)) => Ok(value),
        }
    }

    async fn ask(&self, socket: &mut Socket, command: &Cmd) -> Result<Value, Fault> {
        let Socket { connection, pump } = socket;
        let asking = connection.send_packed_command(command);
        self.bounded(pump.run(asking)).await
    }

    async fn ask_id(&self, socket: &mut Socket) -> Result<Option<ClientId>, Fault> {
        let info = self.ask(socket, cmd("CLIENT").arg("INFO")).await?;
        Ok(ClientId::read(&info))
    }

    async fn ask_time(&self, socket: &mut Socket) -> Result<Clock, Fault> {
        let time = self.ask(socket, &cmd("TIME")).await?;
        let heard = Instant::now();
        if let Value::ServerError(error) = &time {
            return Err(self.refused(error.into()));
        }
        let told: Option<(u64, u64)> = redis::from_redis_value(time).ok();
        let (seconds, micros) = told.ok_or_else(|| self.garbled("it does not tell its time"))?;
        let at = seconds.saturating_mul(1_000_000).saturating_add(micros);
        Ok(Clock::told(at, heard))
    }

    /// As on a server, in a slot of this primary.
    async fn probe(
        &self,
        socket: &mut Socket,
        slot: Slot,
        nonce: &str,
        publish: bool,
    ) -> Result<(Clock, Option<Refusal>), Fault> {
        let [lock, queue, channel] = self.names.probe_in(slot);
        let mut command = script::CLUSTER_PROBE.command(2, 3);
        command
            .arg(lock)
            .arg(queue)
            .arg(self.number)
            .arg(if publish { &*channel } else { "" })
            .arg(grant::probe(nonce));
        let Socket { connection, pump } = socket;
        let asking = script::CLUSTER_PROBE.send(connection, &command);
        let reply = self.bounded(pump.run(asking)).await?;
        if let Value::ServerError(error) = &reply {
            return Err(self.refused(error.into()));
        }
        let (at, answers) = reply::read_head(self.number, reply)
            .ok_or_else(|| self.garbled("the reply to the probe is another's"))?;
        let refusal = answers.first().and_then(reply::read_error);
        let refusal = refusal.map(|refusal| self.naming(refusal));
        Ok((Clock::told(at, Instant::now()), refusal))
    }

    /// Waits for the nonce.
    async fn hears(&self, ears: &mut Ears, channel: &str, nonce: &str) -> Result<bool, Fault> {
        let give_up = Instant::now() + self.within;
        let expected = grant::probe(nonce);
        loop {
            let hearing = ears.socket.pump.run(ears.pushes.recv());
            match tokio::time::timeout_at(give_up, hearing).await {
                Ok(Some(push)) => match (push.kind, &push.data[..]) {
                    (PushKind::Disconnection, _) => return Err(self.closed()),
                    (PushKind::SUnsubscribe, _) => {
                        return Err(self.garbled("the slot of the probe has moved"));
                    }
                    (PushKind::SMessage, [Value::BulkString(to), Value::BulkString(message)])
                        if to == channel.as_bytes() && message == expected.as_bytes() =>
                    {
                        return Ok(true);
                    }
                    _ => {}
                },
                Ok(None) => return Err(self.closed()),
                Err(_) => return Ok(false),
            }
        }
    }

    fn naming(&self, refusal: Refusal) -> Refusal {
        refusal.naming(&self.names)
    }

    fn refused(&self, refusal: Refusal) -> Fault {
        Fault::Refused {
            address: self.endpoint.address().clone(),
            refusal: self.naming(refusal),
        }
    }

    fn closed(&self) -> Fault {
        Fault::Closed {
            address: self.endpoint.address().clone(),
        }
    }

    fn garbled(&self, what: &'static str) -> Fault {
        Fault::Garbled {
            address: self.endpoint.address().clone(),
            what,
        }
    }
}
