//! PostgreSQL as the driver sees it.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;

use super::address::Endpoint;
use super::call::Names;
use super::check;
use super::fault::Fault;
use super::hello::Process;
use super::link::PostgresLink;
use super::scan;
use super::store::Settings;
use crate::base::{CheckedServer, StoreError};
use crate::store::attempts::SetUps;
use crate::store::driver::{Address, Backend, Connected, Hello, Trouble};
use crate::store::send_window::Limits;

/// A connection has one call in flight. All that comes meanwhile shares the next, and one flush of the server's log.
const LIMITS: Limits = Limits {
    requests: 256,
    calls: 1,
    bytes: 1 << 20,
};

/// What one registry knows of its database.
pub(super) struct PostgresBackend {
    pub(super) settings: Settings,
    pub(super) names: Names,
    /// The same with the bounds of connecting.
    pub(super) greeting: Names,
    /// The response time-out.
    pub(super) within: Duration,
    pub(super) has_warned_of_sweep: AtomicBool,
}

impl PostgresBackend {
    pub(super) fn new(
        settings: Settings,
        prefix: Arc<str>,
        instance: Arc<str>,
        within: Duration,
    ) -> Self {
        let names =
            |within| Names::new(prefix.clone(), instance.clone(), settings.schema(), within);
        Self {
            names: names(within),
            greeting: names(settings.endpoint.connect_within),
            settings,
            within,
            has_warned_of_sweep: AtomicBool::new(false),
        }
    }

    /// The same to look with, on one connection: the server refuses whatever would change something.
    pub(super) fn looking(&self) -> Arc<Self> {
        let mut settings = self.settings.clone();
        (settings.migrates, settings.lanes) = (false, 1);
        Arc::new(Self {
            settings,
            names: self.names.looking(),
            greeting: self.greeting.looking(),
            within: self.within,
            has_warned_of_sweep: AtomicBool::new(false),
        })
    }
}

impl Backend for PostgresBackend {
    type Link = PostgresLink;

    fn address(&self) -> &Address {
        &self.settings.endpoint.address
    }

    fn limits(&self) -> Limits {
        LIMITS
    }

    fn lanes(&self) -> usize {
        self.settings.lanes
    }

    fn connect<'a>(
        self: &'a Arc<Self>,
        hello: Hello<'a, Vec<Process>>,
        set_ups: &'a SetUps,
    ) -> BoxFuture<'a, Result<Connected<PostgresLink>, StoreError>> {
        let predecessors = hello.predecessor.map_or(&[][..], |all| all);
        async move { Ok(self.set_up(predecessors, set_ups).await?) }.boxed()
    }

    fn connect_timeout(&self) -> Duration {
        // One connection after the other. Each host has its time, until one of them was chosen.
        let of = |endpoint: &Endpoint, connections: usize| {
            let attempts = endpoint.sites.len() + connections - 1;
            endpoint.connect_within * u32::try_from(attempts).unwrap_or(u32::MAX)
        };
        let (endpoint, lanes) = (&self.settings.endpoint, self.settings.lanes);
        match &self.settings.pooled {
            None => of(endpoint, lanes),
            Some(pooled) => of(endpoint, 1) + of(pooled, lanes),
        }
    }

    fn host_timeout(&self) -> Duration {
        self.settings.endpoint.connect_within
    }

    fn check(self: &Arc<Self>) -> BoxFuture<'static, Result<Vec<CheckedServer>, StoreError>> {
        let backend = self.clone();
        async move { Ok(check::check(&backend).await?) }.boxed()
    }

    fn error(&self, address: &Address, trouble: Trouble<'_>) -> StoreError {
        let fault = match trouble {
            Trouble::Silent(within) => Fault::silent(address, within),
            Trouble::Abandoned => Fault::abandoned(address),
            Trouble::TooLate => Fault::too_late(address),
            Trouble::Fenced => Fault::fenced(address),
            Trouble::Garbled(what) => Fault::given_up(address, what),
            Trouble::NoPush(reason) => Fault::unusable(address, reason),
            Trouble::NoOwner | Trouble::Unconfirmed(_) => {
                unreachable!("one server has all keys, and confirms nothing later")
            }
        };
        fault.into()
    }

    fn fence(&self) -> Option<Arc<str>> {
        let schema = &self.names.schema;
        Some(format!("SELECT {schema}.fence($1, $2, $3)").into())
    }

    fn scan(
        self: &Arc<Self>,
        start: Arc<str>,
    ) -> BoxStream<'static, Result<Vec<Arc<str>>, StoreError>> {
        scan::scan(self.clone(), &start)
    }
}
