use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use crate::base::limits::{KEEP, TTL};
use crate::base::{LockError, Mode, OnFinish, OnLost, Pauses, Renewal, Repeat, key};
use crate::engine::{Arrival, Engine, FORKED};
use crate::store::contract::Session;

/// What a lock was told to lock, and how. What is not set is the registry's.
#[derive(Clone, Debug)]
pub(crate) struct LockOptions {
    engine: Option<Arc<Engine>>,
    key: Arc<str>,
    /// The keys of a group, in the order of their bytes. `key` is the [name](group_name) of all of them.
    keys: Option<Arc<[Arc<str>]>>,
    /// Which key is invalid, if one is, and why: checked once, however often the lock is acquired.
    key_fault: Option<(usize, &'static str)>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) repeat: Option<Repeat>,
    pub(crate) renewal: Option<Renewal>,
    pub(crate) on_lost: OnLost,
    pub(crate) on_finish: OnFinish,
    /// Whether `on_finish` is only for work that succeeds.
    pub(crate) is_conditional: bool,
    pub(crate) reentrant: bool,
    /// Whether it must share the lease of the work around it.
    pub(crate) is_nested: bool,
    /// Whether a combinator says where the work under its lease begins and ends.
    pub(crate) is_scoped: bool,
    /// Whether it campaigns for the lead.
    pub(crate) leads: bool,
    /// Whether its wait wants to know when it waits for others.
    pub(crate) hears_of_others: bool,
    /// What it was told to exclude, which may be what no lock can: see [`checked`](Self::checked).
    pub(crate) mode: Mode,
    /// Where the lock was asked for.
    place: &'static Location<'static>,
}

const EXCLUSIVE_ONLY: &str = "is for exclusive locks of one key only";

/// The greatest weight of a permit.
const MOST_WEIGHT: u32 = 64;

/// The name of several keys: all of them, separated by commas. What could be read as a separator is escaped by a
/// backslash, so two groups never have one name (H5).
fn group_name(keys: &[Arc<str>]) -> String {
    let escaped = keys.iter();
    let escaped = escaped.map(|key| key.replace('\\', "\\\\").replace(',', "\\,"));
    escaped.collect::<Vec<_>>().join(",")
}

impl LockOptions {
    #[track_caller]
    pub(crate) fn new(engine: Option<Arc<Engine>>, key: &str) -> Self {
        let key_fault = engine
            .as_ref()
            .and_then(|engine| key::fault(&engine.settings.prefix, key));
        let key_fault = key_fault.map(|reason| (0, reason));
        Self {
            engine,
            key: Arc::from(key),
            keys: None,
            key_fault,
            ttl: None,
            wait: None,
            repeat: None,
            renewal: None,
            on_lost: OnLost::default(),
            on_finish: OnFinish::default(),
            is_conditional: false,
            reentrant: false,
            is_nested: false,
            is_scoped: false,
            leads: false,
            hears_of_others: false,
            mode: Mode::Exclusive,
            place: Location::caller(),
        }
    }

    /// A lock of all these keys.
    #[track_caller]
    pub(crate) fn of_all<K: AsRef<str>>(
        engine: Option<Arc<Engine>>,
        keys: impl IntoIterator<Item = K>,
    ) -> Self {
        let keys = keys.into_iter().map(|key| Arc::from(key.as_ref()));
        let keys: Vec<Arc<str>> = keys.collect::<BTreeSet<_>>().into_iter().collect();
        if let [key] = &keys[..] {
            return Self::new(engine, key);
        }
        let fault = engine.as_ref().and_then(|engine| {
            let prefix = &engine.settings.prefix;
            let mut keys = keys.iter().enumerate();
            keys.find_map(|(at, key)| Some((at, key::fault(prefix, key)?)))
        });
        Self {
            key_fault: fault.or(keys.is_empty().then_some((0, "must be at least one key"))),
            keys: Some(keys.clone().into()),
            ..Self::new(engine, &group_name(&keys))
        }
    }

    pub(crate) fn is_group(&self) -> bool {
        self.keys.is_some()
    }

    /// All keys: one, or those of a group.
    pub(crate) fn keys(&self) -> &[Arc<str>] {
        self.keys
            .as_deref()
            .unwrap_or(std::slice::from_ref(&self.key))
    }

    /// The lock of one key of a group. It is renewed while the others are waited for.
    pub(crate) fn member(&self, index: usize) -> Option<Self> {
        let key = self.keys().get(index)?.clone();
        Some(Self {
            key,
            keys: None,
            renewal: Some(Renewal::watchdog()),
            // Nothing is kept before all are had.
            on_finish: OnFinish::Release,
            ..self.clone()
        })
    }

    /// How often a lease of it is renewed at most.
    pub(crate) fn renewals(&self) -> u32 {
        // A ttl that was set asks for a lease of just that length.
        let settings = &self.known_engine().settings;
        let default = self.ttl.map_or(settings.renewal, |_| Renewal::off());
        self.renewal.unwrap_or(default).times()
    }

    /// The same, asked for where the caller's caller stands.
    #[track_caller]
    pub(crate) fn asked_here(mut self) -> Self {
        self.place = Location::caller();
        self
    }

    pub(crate) fn place(&self) -> &'static Location<'static> {
        self.place
    }

    /// The registry that can look at the lock, or why none can.
    pub(crate) fn engine(&self) -> Result<&Arc<Engine>, LockError> {
        let key = || self.key().clone();
        let Some(engine) = &self.engine else {
            return Err(LockError::NoRegistry { key: key() });
        };
        let ttl = self.ttl(engine);
        Err(if let Some((at, reason)) = self.key_fault {
            let key = self.keys().get(at).cloned().unwrap_or_else(key);
            LockError::InvalidKey { key, reason }
        } else if !engine.is_of_this_process() {
            self.fault("registry", FORKED)
        } else if !TTL.contains(&ttl) {
            LockError::InvalidTtl { key: key(), ttl }
        } else if let OnFinish::KeepFor(time) = self.on_finish
            && !KEEP.contains(&time)
        {
            self.fault("on_finish", "must keep the key for 10 ms to a year")
        } else if ttl <= engine.overhead {
            self.fault("min_replicas", "must give replicas less time than the ttl")
        } else {
            return Ok(engine);
        })
    }

    /// The registry that can acquire the lock, and what it excludes then; or why it cannot be acquired.
    pub(crate) fn checked(&self) -> Result<(&Arc<Engine>, Mode), LockError> {
        let engine = self.engine()?;
        match self.mode_fault(engine) {
            Some((setting, reason)) => Err(self.fault(setting, reason)),
            None => Ok((engine, self.mode)),
        }
    }

    fn mode_fault(&self, engine: &Engine) -> Option<(&'static str, &'static str)> {
        let shares = match self.mode {
            Mode::Exclusive if !self.is_group() => return None,
            Mode::Exclusive => None,
            Mode::Shared => Some("shared"),
            Mode::Permits { limit: 0, .. } => return Some(("permits", "must be at least 1")),
            Mode::Permits { limit, weight } => {
                if !(1..=limit.min(MOST_WEIGHT)).contains(&weight.into()) {
                    return Some(("weight", "must be from 1 to 64, and within the limit"));
                }
                Some("permits")
            }
        };
        match shares {
            Some(setting) if self.is_group() => Some((setting, "is for locks of one key only")),
            Some(setting) if !engine.shares => Some((setting, "a quorum has exclusive locks only")),
            _ if self.is_nested => Some(("nested", EXCLUSIVE_ONLY)),
            _ if self.reentrant => Some(("reentrant", EXCLUSIVE_ONLY)),
            _ if self.leads => Some(("leadership", EXCLUSIVE_ONLY)),
            _ => None,
        }
    }

    /// The error of a setting that is invalid.
    pub(crate) fn fault(&self, setting: &'static str, reason: &'static str) -> LockError {
        LockError::InvalidSetting {
            key: self.key().clone(),
            setting,
            reason,
        }
    }

    /// The session by which the lock can be looked at, or why it cannot.
    pub(crate) fn session(&self) -> Result<Arc<dyn Session>, LockError> {
        let closed = || LockError::Closed {
            key: self.key().clone(),
        };
        self.engine()?.session().ok_or_else(closed)
    }

    /// The same for a lock that [can be acquired](Self::engine).
    pub(crate) fn known_engine(&self) -> &Arc<Engine> {
        self.engine.as_ref().expect("whoever waits has a registry")
    }

    /// Moves the registry to the lease; nothing is acquired with these options after that. A clone
    /// would make all threads contend for one reference count.
    pub(crate) fn take_engine(&mut self) -> Arc<Engine> {
        self.engine.take().expect("whoever waits has a registry")
    }

    pub(crate) fn ttl(&self, engine: &Engine) -> Duration {
        self.ttl.unwrap_or(engine.settings.ttl)
    }

    pub(crate) fn key(&self) -> &Arc<str> {
        &self.key
    }
    pub(crate) fn wait(&self) -> Duration {
        self.wait.unwrap_or(self.known_engine().settings.wait)
    }

    /// What the registry is asked for.
    pub(crate) fn arrival(&self) -> Arrival {
        let engine = self.known_engine();
        let asks_once = self.wait().is_zero();
        Arrival {
            ttl: self.ttl(engine),
            renewals: self.renewals(),
            on_finish: self.on_finish,
            is_conditional: self.is_conditional,
            asks_once,
            hears_of_others: self.hears_of_others,
            wait: match asks_once {
                // The store has this long to answer.
                true => engine.settings.response_timeout,
                false => self.wait(),
            },
            repeats: self.repeat.as_ref().map_or(Pauses::Usual, Repeat::start),
            adopts: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// `["x,y", "z"]` and `["x", "y,z"]` had one name.
    #[test]
    fn two_groups_never_have_one_name() {
        let options = |keys: &[&str]| LockOptions::of_all(None, keys);
        let (one, other) = (options(&["x,y", "z"]), options(&["x", "y,z"]));
        assert_eq!(&**one.key(), r"x\,y,z");
        assert_eq!(&**other.key(), r"x,y\,z");
        assert_eq!(&**options(&[r"c:\d", "b"]).key(), r"b,c:\\d");
        assert_eq!(&**options(&["x,y"]).key(), "x,y", "one key is itself");
        let keys = [
            "x", ",", r"\", "x,", ",x", r"x\", r"\,", r"\\", r"x,\", ",,",
        ];
        let mut groups = HashMap::new();
        for first in keys {
            for second in keys {
                for third in keys {
                    let group = options(&[first, second, third]);
                    if group.is_group() {
                        let keys = group.keys().to_vec();
                        let before = groups.entry(group.key().clone()).or_insert(keys.clone());
                        assert_eq!(*before, keys, "{}", group.key());
                    }
                }
            }
        }
    }
}
