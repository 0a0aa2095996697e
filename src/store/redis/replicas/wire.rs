//! The connection on which the replicas are asked.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join;
use redis::{Cmd, RedisResult, Value, cmd};

use super::ledger::{Round, Seen};
use super::rule::Replicas;
use crate::store::redis::endpoint::Endpoint;
use crate::store::redis::fault::Fault;
use crate::store::redis::keys::Names;
use crate::store::redis::socket::Socket;

/// So small that it goes whole: then it is there whatever the server has forgotten.
const CONFIRM: &str = include_str!("confirm.lua");

pub(in crate::store::redis) struct Wire {
    socket: Socket,
    address: Arc<str>,
}

impl Wire {
    /// Connects to the server that locks are on, and sees that it lets us wait for its replicas. Each step takes `within`
    /// at most.
    pub(in crate::store::redis) async fn connect(
        endpoint: &Endpoint,
        within: Duration,
    ) -> Result<Self, Fault> {
        let found = endpoint.resolve(within).await?;
        let endpoint = found.as_ref().unwrap_or(endpoint);
        let wire = Self::connect_here(endpoint, within).await;
        wire.inspect_err(|_| endpoint.doubt())
    }

    async fn connect_here(endpoint: &Endpoint, within: Duration) -> Result<Self, Fault> {
        // Nothing is pushed to it.
        let mut wire = Self {
            socket: endpoint.connect_resp2(within).await?,
            address: endpoint.address().clone(),
        };
        // For none, so that the answer comes at once. A replica says that it is one.
        let count = wire.ask(&wait(0, Duration::from_millis(1)), within).await?;
        wire.count(count)?;
        Ok(wire)
    }

    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Asks whether the locks are their owners' and how many replicas know it.
    pub(super) async fn confirm(
        &mut self,
        names: &Names,
        round: &Round,
        rule: Replicas,
        timeout: Duration,
    ) -> Result<Seen, Fault> {
        let mut look = cmd("EVAL");
        look.arg(CONFIRM).arg(round.locks.len());
        for (key, _) in &round.locks {
            look.arg(names.lock(key).concat());
        }
        for (_, owner) in &round.locks {
            look.arg(format!("{}:{}", names.instance(), owner.0));
        }
        let wait = wait(rule.least, round.wait);
        let Socket { connection, pump } = &mut self.socket;
        let mut other = connection.clone();
        // In this order, and the second without the first's answer.
        let asking = join(
            connection.send_packed_command(&look),
            other.send_packed_command(&wait),
        );
        let asking = pump.run(asking);
        let patience = round.wait + timeout;
        let (ours, replicas) = bounded(&self.address, patience, asking).await?;
        Ok(Seen {
            ours: self.flags(self.said(ours)?, round.locks.len())?,
            replicas: self.count(self.said(replicas)?)?,
        })
    }

    /// Returns when the connection has ended, if that can be seen.
    pub(super) async fn ended(&mut self) {
        poll_fn(|cx| self.socket.pump.poll(cx)).await;
    }

    async fn ask(&mut self, command: &Cmd, within: Duration) -> Result<Value, Fault> {
        let Socket { connection, pump } = &mut self.socket;
        let asking = pump.run(connection.send_packed_command(command));
        let answer = bounded(&self.address, within, asking).await?;
        self.said(answer)
    }

    fn said(&self, answer: RedisResult<Value>) -> Result<Value, Fault> {
        let address = self.address.clone();
        match answer {
            Err(source) => Err(Fault::Broken { address, source }),
            Ok(Value::ServerError(error)) => {
                let refusal = (&error).into();
                Err(Fault::Refused { address, refusal })
            }
            Ok(value) => Ok(value),
        }
    }

    fn count(&self, answer: Value) -> Result<u64, Fault> {
        match answer {
            Value::Int(count) => u64::try_from(count).ok(),
            _ => None,
        }
        .ok_or_else(|| self.garbled())
    }

    fn flags(&self, answer: Value, count: usize) -> Result<Vec<bool>, Fault> {
        let Value::Array(flags) = answer else {
            return Err(self.garbled());
        };
        let flag = |value| match value {
            Value::Int(0) => Some(false),
            Value::Int(1) => Some(true),
            _ => None,
        };
        let flags: Option<Vec<_>> = flags.into_iter().map(flag).collect();
        flags
            .filter(|flags| flags.len() == count)
            .ok_or_else(|| self.garbled())
    }

    fn garbled(&self) -> Fault {
        Fault::Garbled {
            address: self.address.clone(),
            what: "an answer about replicas is none",
        }
    }
}

fn wait(replicas: u32, within: Duration) -> Cmd {
    let mut wait = cmd("WAIT");
    // Rounded up: to the server no time at all is for ever.
    let millis = within.as_nanos().div_ceil(1_000_000).max(1);
    wait.arg(replicas)
        .arg(u64::try_from(millis).unwrap_or(u64::MAX));
    wait
}

async fn bounded<T>(
    address: &Arc<str>,
    within: Duration,
    step: impl Future<Output = T>,
) -> Result<T, Fault> {
    let step = tokio::time::timeout(within, step).await;
    step.map_err(|_| Fault::Silent {
        address: address.clone(),
        within,
    })
}
