//! Redis as the driver sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;

use super::check;
use super::cluster::absolute;
use super::fault::{ErrorReply, Fault};
use super::handshake::{ClientId, ServerInfo};
use super::keys::Names;
use super::primary::Primary;
use super::replicas::MinReplicas;
use super::scan;
use super::script::{self, Script};
use super::slots::SLOTS;
use super::topology::Topology;
use crate::base::key::has_hash_tag;
use crate::base::user_code::log;
use crate::base::{CheckedServer, StoreError};
use crate::store::attempts::SetUps;
use crate::store::contract::SessionConfig;
use crate::store::driver::{
    Address, Backend, Connected, Hello, Next, Refusal, Slot, SlotMap, Trouble,
};
use crate::store::send_window::Limits;

/// How long servers may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// To be found and connected to, from the look-up of a name to the proof of a push.
    pub(super) connect: Duration,
    /// To answer: the response time-out.
    pub(super) answer: Duration,
}

impl Times {
    /// How long a server is waited for before the next one, which may answer in its place, is asked as well: so that
    /// `many` of them can be silent within the time to connect, however long an answer may take.
    pub(super) fn turn(self, many: usize) -> Duration {
        let turns = u32::try_from(many).unwrap_or(u32::MAX).saturating_add(1);
        self.answer.min(self.connect / turns)
    }
}

/// What one registry knows of its servers.
pub(super) struct RedisBackend {
    pub(super) topology: Topology,
    pub(super) names: Names,
    pub(super) script: &'static Script,
    /// How many replicas must have an acquisition.
    pub(super) min_replicas: Option<MinReplicas>,
    pub(super) times: Times,
    last_number: AtomicU64,
    has_warned_of_eviction: AtomicBool,
    has_warned_of_info: AtomicBool,
}

impl RedisBackend {
    pub(super) fn new(
        topology: Topology,
        min_replicas: Option<MinReplicas>,
        connect: Duration,
        config: &SessionConfig,
    ) -> Self {
        let (prefix, instance) = (config.prefix.clone(), config.instance.clone());
        let (names, script) = match topology.seeds() {
            Some(_) => (Names::clustered(prefix, instance), &script::CLUSTER),
            None => (Names::new(prefix, instance), &script::SERVER),
        };
        Self {
            topology,
            names,
            script,
            min_replicas,
            times: Times {
                connect,
                answer: config.response_timeout,
            },
            last_number: AtomicU64::new(0),
            has_warned_of_eviction: AtomicBool::new(false),
            has_warned_of_info: AtomicBool::new(false),
        }
    }

    /// Connects to any address of the server. `looks`: to look, and not for locks.
    pub(super) async fn open(
        self: &Arc<Self>,
        hello: Hello<'_, ClientId>,
        set_ups: &SetUps,
        looks: bool,
    ) -> Result<Connected<Primary>, Fault> {
        if hello.is_beside {
            // The first hangs where a sentinel has sent it.
            self.topology.doubt();
        }
        let endpoint = self.topology.endpoint(hello.address, self.times).await?;
        // Of several addresses one may be that of a replica, which takes no writes.
        let opened = endpoint.at_any_address(self.times.connect, set_ups, |endpoint| {
            let (backend, hello) = (self.clone(), hello.clone());
            async move { backend.set_up(&endpoint, hello, looks).await }.boxed()
        });
        opened.await.inspect_err(|_| self.topology.doubt())
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.topology.seeds().is_some()
    }

    /// The number of the next call. No two calls of a registry have the same.
    pub(super) fn next_number(&self) -> u64 {
        self.last_number.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// What a refusal by the server at `address` means.
    pub(super) fn refusal(&self, address: &Address, reply: ErrorReply) -> Refusal {
        let next = self.next(address, &reply);
        let named = reply.clone().naming(&self.names);
        let text = named.to_string();
        let reply = if self.is_cluster() { named } else { reply };
        Refusal {
            error: self.refused(address, reply).into(),
            text,
            next,
        }
    }

    /// The error of a refusal. A node of a cluster that was taken for a single server says MOVED, ASK or CROSSSLOT unless
    /// all keys are in one slot of its own, as with a prefix that has a hash tag.
    pub(super) fn refused(&self, address: &Address, reply: ErrorReply) -> Fault {
        let is_node = matches!(reply.code(), "MOVED" | "ASK" | "CROSSSLOT");
        if is_node && !self.is_cluster() && !has_hash_tag(self.names.prefix()) {
            let what = "is a node of a cluster, not a server of its own";
            return Fault::told(format!("Redis at {address} {what}: {reply}"), true);
        }
        Fault::refused(address, reply)
    }

    fn next(&self, address: &Address, reply: &ErrorReply) -> Next {
        if !self.is_cluster() {
            return Next::Nothing;
        }
        let to = || absolute(reply.text().split(' ').nth(1)?, address);
        match reply.code() {
            "MOVED" => to().map_or(Next::Nothing, Next::Moved),
            "ASK" => to().map_or(Next::Nothing, Next::Ask),
            "CLUSTERDOWN" | "READONLY" | "LOADING" | "MASTERDOWN" => Next::Search,
            "TRYAGAIN" => Next::Wait,
            _ => Next::Nothing,
        }
    }

    pub(super) fn warn_of(&self, address: &str, server: &ServerInfo) {
        if let Some(policy) = &server.evicts
            && !self.has_warned_of_eviction.swap(true, Ordering::Relaxed)
        {
            log!(
                warn,
                address,
                policy,
                "this server may evict locks when its memory is full: set maxmemory-policy to noeviction"
            );
        }
        if let Some(refusal) = &server.refusal
            && !self.has_warned_of_info.swap(true, Ordering::Relaxed)
        {
            log!(
                warn,
                address,
                %refusal,
                "no right to INFO: the server's identity and memory policy are unknown"
            );
        }
    }
}

impl Backend for RedisBackend {
    type Link = Primary;

    fn address(&self) -> &Address {
        self.topology.address()
    }

    fn limits(&self) -> Limits {
        Limits::USUAL
    }

    fn slots(&self) -> usize {
        if self.is_cluster() { SLOTS } else { 1 }
    }

    fn slot(&self, key: &str) -> Slot {
        self.names.slot(key)
    }

    fn confirms(&self) -> bool {
        self.min_replicas.is_some()
    }

    fn connect<'a>(
        self: &'a Arc<Self>,
        hello: Hello<'a, ClientId>,
        set_ups: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<Primary>, StoreError>> {
        async move { Ok(self.open(hello, set_ups, false).await?) }.boxed()
    }

    fn connect_timeout(&self) -> Duration {
        self.times.connect
    }

    fn find_map(&self, known: Vec<Address>) -> BoxFuture<'_, Result<SlotMap, StoreError>> {
        async move {
            let seeds = self.topology.seeds().expect("a cluster has them");
            Ok(seeds.find_map(&known, self.times).await?)
        }
        .boxed()
    }

    fn error(&self, address: &Address, trouble: Trouble<'_>) -> StoreError {
        let passing = |text| Fault::told(text, false);
        let fault = match trouble {
            Trouble::Silent(within) => Fault::silent(address, within),
            Trouble::Abandoned => {
                let what = "its registry or runtime is gone";
                return StoreError::abandoned(Fault::garbled(address, what));
            }
            Trouble::TooLate => passing(format!(
                "renewal not sent to Redis at {address}: too late for an answer in time"
            )),
            Trouble::Fenced => unreachable!("Redis has no transactions"),
            Trouble::NoPush(reason) => {
                passing(format!("Redis at {address} cannot push grants: {reason}"))
            }
            Trouble::Garbled(what) => Fault::garbled(address, what),
            Trouble::NoOwner => Fault::refused(
                address,
                ErrorReply::parse("CLUSTERDOWN nobody has the slot"),
            ),
            Trouble::Unconfirmed(error) => Fault::unconfirmed(error, !error.is_retryable()),
        };
        fault.into()
    }

    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>> {
        let backend = self.clone();
        async move { Ok(check::check(backend).await?) }.boxed()
    }

    fn scan(
        self: &Arc<Self>,
        start: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        scan::scan(self.clone(), start)
    }
}
