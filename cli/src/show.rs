//! `lockstream inspect`, `ls` and `free`: locks as the store has them.

use std::io::Write;
use std::time::Duration;

use futures::StreamExt;
use lockstream::{InspectedHolder, Inspection, LockRegistry, Mode};
use serde_json::{Value, json};

use crate::args::{FreeArgs, InspectArgs, LsArgs, StoreArgs};
use crate::exit;
use crate::messages::chain;
use crate::store::{Failure, Store};

/// A registry for looking: a missing schema is not made.
pub(crate) fn registry(args: &StoreArgs) -> Result<LockRegistry, Failure> {
    Store::for_looking(args)?.registry()
}

/// Shows one lock.
pub(crate) async fn inspect(args: InspectArgs) -> Result<u8, Failure> {
    let registry = registry(&args.store)?;
    let seen = look(&registry, &args.key).await?;
    if args.store.json {
        print(&to_json(&args.key, &seen).to_string());
    } else if seen.holders.is_empty() && seen.waiting == 0 {
        print(&format!("{}: free", args.key));
    } else {
        for holder in &seen.holders {
            print(&format!("{}: held by {}", args.key, of_holder(holder)));
        }
        for ticket in &seen.queue {
            let (owner, mode) = (plain(&ticket.owner), of_mode(ticket.mode));
            print(&format!("{}: waited for by {owner}{mode}", args.key));
        }
        let more = seen.waiting.saturating_sub(seen.queue.len() as u64);
        if more > 0 {
            print(&format!("{}: waited for by {more} more", args.key));
        }
    }
    Ok(0)
}

/// Shows all locks.
pub(crate) async fn ls(args: LsArgs) -> Result<u8, Failure> {
    let registry = registry(&args.store)?;
    let mut locks = registry.scan(&args.prefix_of_keys);
    let mut code = 0;
    while let Some(lock) = locks.next().await {
        match lock {
            Ok(lock) if args.store.json => print(&to_json(&lock.key, &lock.inspection).to_string()),
            Ok(lock) => print(&line(&lock.key, &lock.inspection)),
            Err(error) => {
                code = exit::of_error(&error, exit::BUSY);
                let text = chain(&error);
                args.store
                    .messages()
                    .say("failed", text, json!({ "key": error.key() }));
            }
        }
    }
    Ok(code)
}

/// Takes a lock from its holder, if it is still the one that was seen.
pub(crate) async fn free(args: FreeArgs) -> Result<u8, Failure> {
    let messages = args.store.messages();
    let registry = registry(&args.store)?;
    let key = args.key.as_str();
    let seen = look(&registry, key).await?;
    if seen.holders.is_empty() {
        messages.say(
            "free",
            format!("lock {key:?} is free"),
            json!({ "key": key }),
        );
        return Ok(0);
    }
    let (owner, told) = match (chosen(key, &seen, args.holder.as_deref()), &args.holder) {
        // The store knows those that are not shown.
        (Err(_), Some(owner)) if !shows_all(&seen) && is_ours(owner) => (owner, None),
        (holder, _) => {
            let holder = holder?;
            (&holder.owner, Some(of_holder(holder)))
        }
    };
    let fields = json!({ "key": key, "owner": owner });
    if !args.yes {
        let text = match told {
            Some(told) => format!("lock {key:?} is held by {told}: give --yes to take it away"),
            None => format!(
                "{:?} is not among the first {} holders of lock {key:?}, and no more are shown: give --yes to take it away \
                 if it has it",
                plain(owner),
                seen.holders.len()
            ),
        };
        messages.say("held", text, fields);
        return Ok(0);
    }
    // Whoever waits is served.
    let released = registry.force_release(key, owner).await;
    if !released.map_err(|error| Failure::lock(&error, exit::BUSY))? {
        let text = format!("lock {key:?} is not held by {}", plain(owner));
        return Err(Failure::new(exit::BUSY, text));
    }
    let told = told.unwrap_or_else(|| plain(owner));
    let text = format!("lock {key:?} taken from {told}");
    messages.say("freed", text, fields);
    Ok(0)
}

/// The holder that is meant. Of those who share a lock, and of other programs, it must be named.
fn chosen<'a>(
    key: &str,
    seen: &'a Inspection,
    named: Option<&str>,
) -> Result<&'a InspectedHolder, Failure> {
    let holders = &seen.holders;
    let list = |holders: &[&InspectedHolder]| {
        let holders: Vec<_> = holders.iter().map(|it| of_holder(it)).collect();
        holders.join(", ")
    };
    let is_meant = |it: &&InspectedHolder| {
        named.is_none_or(|named| it.owner == named || name_of(&it.owner) == Some(named))
    };
    let meant: Vec<_> = holders.iter().filter(is_meant).collect();
    match (&meant[..], named) {
        ([], Some(named)) if !shows_all(seen) => {
            let (named, first) = (plain(named), holders.len());
            let text = format!(
                "{named:?} is not among the first {first} holders of lock {key:?}, and no more are shown: give --holder \
                 the whole of its owner"
            );
            Err(Failure::new(exit::BUSY, text))
        }
        ([], named) => {
            let all = list(&holders.iter().collect::<Vec<_>>());
            let named = plain(named.unwrap_or_default());
            let text = format!("lock {key:?} is not held by {named:?}: it is held by {all}");
            Err(Failure::new(exit::BUSY, text))
        }
        ([holder], Some(_)) => Ok(holder),
        ([holder], None) if holder.mode == Mode::Exclusive && is_ours(&holder.owner) => Ok(holder),
        ([holder], None) if holder.mode == Mode::Exclusive => Err(Failure::usage(format!(
            "lock {key:?} is held by {:?}, which is no holder of ours: name it by --holder",
            plain(&holder.owner)
        ))),
        (_, None) => Err(Failure::usage(format!(
            "lock {key:?} is shared by {}: name one of them by --holder",
            list(&meant)
        ))),
        (_, Some(_)) => Err(Failure::usage(format!(
            "lock {key:?} is held by several of that name: {}: give --holder the whole of one",
            list(&meant)
        ))),
    }
}

/// Whether nobody else holds the lock: of those who share it only the first are shown.
fn shows_all(seen: &Inspection) -> bool {
    let weight = |holder: &InspectedHolder| match holder.mode {
        Mode::Permits { weight, .. } => u64::from(weight),
        _ => 1,
    };
    seen.holders.iter().map(weight).sum::<u64>() >= seen.taken
}

/// Whether this is how a registry writes itself: an instance, a colon and a number.
fn is_ours(owner: &str) -> bool {
    let (instance, sequence) = owner.rsplit_once(':').unwrap_or_default();
    let is_number = sequence.bytes().all(|byte| byte.is_ascii_digit());
    !instance.is_empty() && !sequence.is_empty() && is_number
}

async fn look(registry: &LockRegistry, key: &str) -> Result<Inspection, Failure> {
    let seen = registry.obtain(key).inspect().await;
    seen.map_err(|error| Failure::lock(&error, exit::BUSY))
}

/// One line for people: the key, who holds it, and how many wait.
fn line(key: &str, seen: &Inspection) -> String {
    let holders: Vec<_> = seen.holders.iter().map(of_holder).collect();
    let holders = if holders.is_empty() {
        "-".to_owned()
    } else {
        holders.join(", ")
    };
    format!("{key}\t{holders}\t{} waiting", seen.waiting)
}

/// A holder by its owner, as others need it to free the lock.
fn of_holder(holder: &InspectedHolder) -> String {
    told(holder, &holder.owner)
}

/// The same by the name alone, if it has one.
pub(crate) fn named_holder(holder: &InspectedHolder) -> String {
    told(holder, name_of(&holder.owner).unwrap_or(&holder.owner))
}

fn told(holder: &InspectedHolder, who: &str) -> String {
    let left = holder.remaining.map_or_else(
        || " without an end".to_owned(),
        |left| format!(" for {}", brief(left)),
    );
    format!("{}{}{left}", plain(who), of_mode(holder.mode))
}

/// Without control characters: whoever may write to the store must not write to the terminal.
pub(crate) fn plain(owner: &str) -> String {
    owner.replace(char::is_control, "\u{fffd}")
}

pub(crate) fn of_mode(mode: Mode) -> String {
    match mode {
        Mode::Shared => " (shared)".to_owned(),
        Mode::Permits { limit, weight, .. } => format!(" (permit {weight}/{limit})"),
        _ => String::new(),
    }
}

/// A time in tenths of seconds, or in whole ones.
pub(crate) fn brief(time: Duration) -> String {
    match time.as_secs() {
        0..10 => format!("{:.1}s", time.as_secs_f64()),
        seconds @ 10..120 => format!("{seconds}s"),
        seconds => format!("{}m", seconds / 60),
    }
}

/// A lock as a line of JSON.
pub(crate) fn to_json(key: &str, seen: &Inspection) -> Value {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let holders = seen.holders.iter().map(|holder| {
        let left = holder.remaining.map(millis);
        let mut value = named(&holder.owner, holder.mode);
        value["remaining_ms"] = json!(left);
        value
    });
    let queue = seen
        .queue
        .iter()
        .map(|ticket| named(&ticket.owner, ticket.mode));
    json!({
        "key": key,
        "holders": holders.collect::<Vec<_>>(),
        "waiting": seen.waiting,
        "queue": queue.collect::<Vec<_>>(),
    })
}

fn named(owner: &str, mode: Mode) -> Value {
    let mode = match mode {
        Mode::Shared => json!("shared"),
        Mode::Permits { limit, weight, .. } => json!({ "permits": limit, "weight": weight }),
        _ => json!("exclusive"),
    };
    json!({ "owner": owner, "name": name_of(owner), "mode": mode })
}

/// The name of the registry that an owner belongs to, if it has one.
pub(crate) fn name_of(owner: &str) -> Option<&str> {
    owner.split_once('~').map(|(name, _)| name)
}

/// Writes a line to standard output. A reader that has gone, as `head` does, ends the program.
pub(crate) fn print(line: &str) {
    if writeln!(std::io::stdout().lock(), "{line}").is_err() {
        std::process::exit(exit::of_signal(nix::libc::SIGPIPE).into());
    }
}
