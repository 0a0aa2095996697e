//! `lockstream watch`: who holds what and who waits, as it changes.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use lockstream::{Inspection, LockError, LockRegistry};
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::args::WatchArgs;
use crate::exit;
use crate::messages::chain;
use crate::run::catch_signals;
use crate::show::{brief, name_of, of_mode, plain, print, registry, to_json};
use crate::store::Failure;

/// Clears the screen, and goes to its first column and line.
const CLEAR: &str = "\u{1b}[2J\u{1b}[H";

/// The shortest pause between two looks.
const SHORTEST: Duration = Duration::from_millis(100);

/// How much longer the pause is than the look, at least: a look reads the names of the whole database.
const REST: u32 = 4;

/// The pause after a look that took so long. It counts from the end of the look.
pub(crate) fn pause(every: Duration, took: Duration) -> Duration {
    every.max(SHORTEST).max(took * REST)
}

/// A party to a lock: whether it holds the lock, its owner, and its mode as text.
type Party = (bool, String, String);

/// What was seen, and since when.
#[derive(Debug, Default)]
struct Seen {
    parties: BTreeMap<Party, Instant>,
    waiting: u64,
}

/// Looks again and again. On a terminal the table is drawn anew, elsewhere each change is a line.
pub(crate) async fn watch(args: WatchArgs) -> Result<u8, Failure> {
    let mut signals = catch_signals()?;
    let registry = registry(&args.store)?;
    let is_table = !args.store.json && std::io::stdout().is_terminal();
    let mut locks = BTreeMap::new();
    let (mut rest, mut has_seen) = (Duration::ZERO, false);
    loop {
        let looking = async {
            sleep(rest).await;
            let began = Instant::now();
            let looked = look(&registry, &args.prefix_of_keys).await;
            rest = pause(args.every, began.elapsed());
            looked
        };
        let looked = tokio::select! {
            looked = looking => looked,
            signal = signals.end() => return Ok(exit::of_signal(signal as i32)),
        };
        let found = match looked {
            Ok(found) => found,
            Err(error) if !has_seen => return Err(Failure::lock(&error, exit::BUSY)),
            Err(error) => {
                // The next look may succeed: what was seen stays.
                let text = chain(&error);
                args.store.messages().say("failed", text, json!({}));
                continue;
            }
        };
        has_seen = true;
        let changed = update(&mut locks, &found);
        if is_table {
            draw(&locks);
            continue;
        }
        for key in changed {
            if args.store.json {
                let free = || json!({ "key": *key, "holders": [], "waiting": 0, "queue": [] });
                let seen = found
                    .get(&key)
                    .map_or_else(free, |seen| to_json(&key, seen));
                print(&seen.to_string());
            } else if let Some(seen) = locks.get(&key) {
                lines(&key, seen).for_each(|line| print(&line));
            } else {
                print(&format!("{key}\tfree"));
            }
        }
    }
}

async fn look(
    registry: &LockRegistry,
    prefix: &str,
) -> Result<BTreeMap<Arc<str>, Inspection>, LockError> {
    let mut found = BTreeMap::new();
    let mut locks = registry.scan(prefix);
    while let Some(lock) = locks.next().await {
        match lock {
            Ok(lock) => drop(found.insert(lock.key, lock.inspection)),
            // A key that cannot be looked at does not hide the others.
            Err(error) if *error.key() != *prefix => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// Takes over what was found, and yields the keys that have changed.
fn update(
    locks: &mut BTreeMap<Arc<str>, Seen>,
    found: &BTreeMap<Arc<str>, Inspection>,
) -> Vec<Arc<str>> {
    let mut changed: Vec<_> = locks
        .keys()
        .filter(|key| !found.contains_key(*key))
        .cloned()
        .collect();
    locks.retain(|key, _| found.contains_key(key));
    let now = Instant::now();
    for (key, inspection) in found {
        let seen = locks.entry(key.clone()).or_default();
        let holders = inspection
            .holders
            .iter()
            .map(|it| (true, &it.owner, it.mode));
        let queue = inspection
            .queue
            .iter()
            .map(|it| (false, &it.owner, it.mode));
        let parties: BTreeMap<Party, Instant> = holders
            .chain(queue)
            .map(|(holds, owner, mode)| {
                let party = (holds, plain(owner), of_mode(mode));
                let since = seen.parties.get(&party).copied().unwrap_or(now);
                (party, since)
            })
            .collect();
        let is_same = parties.keys().eq(seen.parties.keys()) && inspection.waiting == seen.waiting;
        if !is_same {
            changed.push(key.clone());
        }
        seen.parties = parties;
        seen.waiting = inspection.waiting;
    }
    changed
}

/// The lines of a lock: its holders first.
fn lines(key: &str, seen: &Seen) -> impl Iterator<Item = String> {
    let parties = seen.parties.iter().rev();
    parties.map(move |((holds, owner, mode), since)| {
        let what = if *holds { "held" } else { "waits" };
        let name = name_of(owner).unwrap_or("-");
        let since = brief(since.elapsed());
        format!("{key}\t{what}{mode}\t{name}\t{owner}\t{since}")
    })
}

fn draw(locks: &BTreeMap<Arc<str>, Seen>) {
    let mut rows = vec!["KEY\tSTATE\tNAME\tOWNER\tSEEN FOR".to_owned()];
    rows.extend(locks.iter().flat_map(|(key, seen)| lines(key, seen)));
    let cells: Vec<Vec<_>> = rows.iter().map(|row| row.split('\t').collect()).collect();
    let width = |column: usize| {
        let widths = cells.iter().filter_map(|row| row.get(column));
        widths.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..5).map(width).collect();
    let mut screen = String::from(CLEAR);
    for row in &cells {
        for (cell, width) in row.iter().zip(&widths) {
            screen.push_str(&format!("{cell:<width$}  "));
        }
        screen.push('\n');
    }
    let mut out = std::io::stdout().lock();
    if out
        .write_all(screen.as_bytes())
        .and_then(|()| out.flush())
        .is_err()
    {
        std::process::exit(exit::of_signal(nix::libc::SIGHUP).into());
    }
}
