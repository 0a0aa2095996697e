//! The connection on which the replicas of a primary are asked.

use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisError, Value, cmd};

use super::ledger::{Hint, Lock, Round, Said, Seen};
use super::rule::Replicas;
use crate::store::redis::endpoint::{Endpoint, is_host};
use crate::store::redis::fault::{Fault, Refusal};
use crate::store::redis::keys::Names;
use crate::store::redis::socket::Socket;

/// So many locks share a call at most: a longer script would hold up everybody else's.
const MOST_IN_CALL: usize = 512;

const CONFIRM: &str = include_str!("confirm.lua");

/// By which a server knows the script that it has just run.
static HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(CONFIRM).get_hash().to_owned());

pub(super) struct Wire {
    socket: Socket,
    address: Arc<str>,
    /// Whether it leads to a node of a cluster, which has some of the locks.
    is_node: bool,
}

impl Wire {
    /// Connects to the server that locks are on, and sees that it lets us wait for its replicas; or to a node of a
    /// cluster, which may be a replica by now, and says of each lock where it is. Each step takes `within` at most.
    pub(super) async fn connect(
        endpoint: &Endpoint,
        is_node: bool,
        within: Duration,
    ) -> Result<Self, Fault> {
        let found = endpoint.resolve(within).await?;
        let endpoint = found.as_ref().unwrap_or(endpoint);
        let wire = Self::connect_here(endpoint, is_node, within).await;
        wire.inspect_err(|_| endpoint.doubt())
    }

    async fn connect_here(
        endpoint: &Endpoint,
        is_node: bool,
        within: Duration,
    ) -> Result<Self, Fault> {
        // Nothing is pushed to it.
        let mut wire = Self {
            socket: endpoint.connect_resp2(within).await?,
            address: endpoint.address().clone(),
            is_node,
        };
        if !is_node {
            // For none, so that the answer comes at once. A replica says that it is one.
            let count = wire.ask(&wait(0, Duration::from_millis(1)), within).await?;
            wire.count(count)?;
        }
        Ok(wire)
    }

    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Asks whether the locks are their owners' and how many replicas know it: all calls and one WAIT in one go. It counts
    /// who has the last write of this connection, and so all before it.
    pub(super) async fn confirm(
        &mut self,
        names: &Names,
        round: &Round,
        rule: Replicas,
        timeout: Duration,
    ) -> Result<Seen, Fault> {
        let calls = calls(&round.locks);
        let mut pipe = Pipeline::with_capacity(2 * calls.len() + 1);
        for (number, call) in calls.iter().enumerate() {
            let locks = || call.iter().map(|index| &round.locks[*index]);
            if locks().any(|lock| lock.asking) {
                pipe.cmd("ASKING");
            }
            // The first goes whole, so the others are known whatever the server has forgotten.
            match number {
                0 => pipe.cmd("EVAL").arg(CONFIRM),
                _ => pipe.cmd("EVALSHA").arg(&*HASH),
            };
            pipe.arg(call.len());
            for lock in locks() {
                pipe.arg(names.lock(&lock.key).concat());
            }
            for lock in locks() {
                pipe.arg(format!("{}:{}", names.instance(), lock.owner.0));
            }
        }
        pipe.add_command(wait(rule.least, round.wait));
        let count = pipe.len();
        let Socket { connection, pump } = &mut self.socket;
        let asking = pump.run(connection.send_packed_commands(&pipe, 0, count));
        let patience = round.wait + timeout;
        let answers = bounded(&self.address, patience, asking).await?;
        let answers = answers.map_err(|source| self.broken(source))?;
        self.read(&round.locks, &calls, answers)
    }

    fn read(
        &self,
        locks: &[Lock],
        calls: &[Vec<usize>],
        answers: Vec<Value>,
    ) -> Result<Seen, Fault> {
        let mut answers = answers.into_iter();
        let mut next = || answers.next().ok_or_else(|| self.garbled());
        let mut said = vec![Said::Gone; locks.len()];
        for call in calls {
            if call.iter().any(|index| locks[*index].asking) {
                next()?;
            }
            let answer = next()?;
            if let Value::ServerError(error) = &answer {
                let elsewhere = self.elsewhere(error.into())?;
                for index in call {
                    said[*index] = elsewhere.clone();
                }
                continue;
            }
            for (index, ours) in call.iter().zip(self.flags(answer, call.len())?) {
                said[*index] = if ours { Said::Ours } else { Said::Gone };
            }
        }
        let replicas = next()?;
        let replicas = if said.iter().any(|said| matches!(said, Said::Ours)) {
            self.count(self.said(replicas)?)?
        } else {
            // Whoever has nothing of ours may well be a replica, and refuse to count any.
            0
        };
        Ok(Seen { said, replicas })
    }

    /// What a refusal of one call means for its locks; most are the whole round's.
    fn elsewhere(&self, refusal: Refusal) -> Result<Said, Fault> {
        let mut hint = Hint::default();
        match refusal.code() {
            // The first call was not run, or all scripts were thrown away after it.
            "NOSCRIPT" => {}
            "CLUSTERDOWN" if self.is_node => {}
            "TRYAGAIN" if self.is_node => hint.is_alone = true,
            code @ ("MOVED" | "ASK") if self.is_node => {
                hint.asking = code == "ASK";
                // Where its slot is not yet, others of it may be missing: together all would be told TRYAGAIN, and each
                // alone ASK again.
                hint.is_alone = hint.asking;
                hint.to = self.target(&refusal);
            }
            _ => return Err(self.refused(refusal)),
        }
        let source = Box::new(self.refused(refusal));
        Ok(Said::Elsewhere(hint, Fault::Unasked { source }.into()))
    }

    /// Where a redirect leads; without a host, to another port of the node's own.
    fn target(&self, refusal: &Refusal) -> Option<Arc<str>> {
        let to = refusal.text().split(' ').nth(1)?;
        let (host, port) = to.rsplit_once(':')?;
        port.parse::<u16>().ok()?;
        if host.is_empty() || host == "?" {
            let (own, _) = self.address.rsplit_once(':')?;
            return Some(format!("{own}:{port}").into());
        }
        is_host(host).then(|| to.into())
    }

    /// Ready when the connection has ended, if that can be seen.
    pub(super) fn poll_ended(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.socket.pump.poll(cx)
    }

    async fn ask(&mut self, command: &Cmd, within: Duration) -> Result<Value, Fault> {
        let Socket { connection, pump } = &mut self.socket;
        let asking = pump.run(connection.send_packed_command(command));
        let answer = bounded(&self.address, within, asking).await?;
        self.said(answer.map_err(|source| self.broken(source))?)
    }

    fn said(&self, answer: Value) -> Result<Value, Fault> {
        match answer {
            Value::ServerError(error) => Err(self.refused((&error).into())),
            value => Ok(value),
        }
    }

    fn broken(&self, source: RedisError) -> Fault {
        let address = self.address.clone();
        Fault::Broken { address, source }
    }

    fn refused(&self, refusal: Refusal) -> Fault {
        let address = self.address.clone();
        Fault::Refused { address, refusal }
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

/// Which locks share a call, by their places: those of a slot that are in one place.
fn calls(locks: &[Lock]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..locks.len()).collect();
    // Those who are alone come last, so that they do not stand between others.
    order.sort_by_key(|index| {
        let lock = &locks[*index];
        (lock.is_alone, lock.slot, lock.asking)
    });
    let together = |one: &usize, next: &usize| {
        let (one, next) = (&locks[*one], &locks[*next]);
        !next.is_alone && (one.slot, one.asking) == (next.slot, next.asking)
    };
    let groups = order.chunk_by(together);
    let calls = groups.flat_map(|group| group.chunks(MOST_IN_CALL));
    calls.map(<[usize]>::to_vec).collect()
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
