//! The settings of a registry.

use std::sync::Arc;
use std::time::Duration;

use crate::base::limits::{RESPONSE_TIMEOUT, TTL, is_name};
use crate::base::token::MOST_PASSES;
use crate::base::{BuildError, Renewal, Repeat, key};
use crate::store::contract::RegistryOptions;
use crate::turnstile::Rules;

/// The settings of a registry.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) prefix: Arc<str>,
    pub(crate) name: Option<String>,
    pub(crate) ttl: Duration,
    pub(crate) wait: Duration,
    pub(crate) repeat: Repeat,
    pub(crate) renewal: Renewal,
    pub(crate) max_waiters: usize,
    pub(crate) local_passes: u32,
    pub(crate) local_span: Duration,
    pub(crate) response_timeout: Duration,
    pub(crate) renew_while_busy: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prefix: Arc::from("lock"),
            name: None,
            ttl: Duration::from_secs(30),
            wait: Duration::from_secs(30),
            repeat: Repeat::default(),
            renewal: Renewal::watchdog(),
            max_waiters: usize::MAX,
            local_passes: 16,
            local_span: Duration::from_millis(20),
            response_timeout: Duration::from_secs(1),
            renew_while_busy: Duration::from_secs(5 * 60),
        }
    }
}

impl Settings {
    pub(crate) fn rules(&self) -> Rules {
        Rules {
            local_passes: self.local_passes,
            local_span: self.local_span,
            max_waiters: self.max_waiters,
            response_timeout: self.response_timeout,
        }
    }

    /// Takes what the builder was told, and else what the url says.
    pub(crate) fn take(
        &mut self,
        set: RegistryOptions,
        url: RegistryOptions,
    ) -> Result<(), BuildError> {
        // Whoever writes the url and whoever writes the code would lock different things.
        if let (Some(set), Some(url)) = (&set.prefix, &url.prefix)
            && set != url
        {
            return Err(BuildError {
                setting: "prefix",
                reason: "the url of the store has another one",
            });
        }
        if let Some(prefix) = set.prefix.or(url.prefix) {
            self.prefix = prefix.into();
        }
        self.name = set.name.or(url.name);
        if let Some(within) = set.response_timeout.or(url.response_timeout) {
            self.response_timeout = within;
        }
        Ok(())
    }

    /// Refuses the first setting that is out of range.
    pub(crate) fn check(&self) -> Result<(), BuildError> {
        let refuse = |setting, reason| Err(BuildError { setting, reason });
        if let Some(reason) = key::prefix_fault(&self.prefix) {
            refuse("prefix", reason)
        } else if self.name.as_deref().is_some_and(|name| !is_name(name)) {
            refuse("name", "must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
        } else if !TTL.contains(&self.ttl) {
            refuse("ttl", "must be from 10 ms to 24 h")
        } else if self.max_waiters == 0 {
            refuse("max_waiters", "must be at least 1")
        } else if self.local_passes > MOST_PASSES {
            refuse("local_passes", "must be at most 63")
        } else if !RESPONSE_TIMEOUT.contains(&self.response_timeout) {
            refuse("response_timeout", "must be from 1 ms to 24 h")
        } else {
            Ok(())
        }
    }
}
