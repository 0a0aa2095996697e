//! Locks that a `lockstream` around this process holds: to wait for one of them is to wait for oneself.

use lockstream::LockRegistry;

use crate::store::Failure;

/// The environment variable with what is held around a command: a line each, the owner in the store and the key. It is
/// the owner that tells: a key of another store or prefix has another one.
pub(crate) const VARIABLE: &str = "LOCKSTREAM_HELD";

/// The value for a command that holds these as well: owners and keys.
pub(crate) fn with<'a>(held: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let around = std::env::var(VARIABLE).unwrap_or_default();
    let own: Vec<_> = held.map(|(owner, key)| format!("{owner} {key}")).collect();
    let lines = around.lines().chain(own.iter().map(String::as_str));
    lines.collect::<Vec<_>>().join("\n")
}

/// The first of the keys that is held around this process, as far as the store tells.
pub(crate) async fn held_around(registry: &LockRegistry, keys: &[String]) -> Option<String> {
    let around = std::env::var(VARIABLE).unwrap_or_default();
    let around: Vec<_> = around
        .lines()
        .filter_map(|line| line.split_once(' '))
        .collect();
    for key in keys {
        let owners: Vec<_> = around.iter().filter(|(_, it)| it == key).collect();
        // Nothing is asked of the store where nothing is nested.
        if owners.is_empty() {
            continue;
        }
        let holders = registry.obtain(key).inspect().await.ok()?.holders;
        let is_held = |holder: &lockstream::InspectedHolder| {
            owners.iter().any(|(owner, _)| *owner == holder.owner)
        };
        if holders.iter().any(is_held) {
            return Some(key.clone());
        }
    }
    None
}

/// Why nobody waits for it.
pub(crate) fn refusal(key: &str) -> Failure {
    Failure::usage(format!(
        "lock {key:?} is held by the lockstream that runs this command, and is not free before the command ends: it would \
         wait for itself"
    ))
}
