//! What is done to one server, whichever deployment it is of.

use crate::judge::Span;
use crate::judge::reigns::Reigns;
use crate::log::now;
use crate::plan::{Kind, Stroke};
use crate::support::RedisServer;

/// Strikes this server, the one of that number among the reigns if it matters what it forgets. Some kinds are a
/// deployment's own, and not for here.
pub(super) fn begin(
    server: &mut RedisServer,
    stroke: &Stroke,
    reigns: Option<(&mut Reigns, usize)>,
) {
    match stroke.kind {
        Kind::ClientKill => drop(server.client_kill_all()),
        Kind::ClientPause => {
            let lasts = stroke.lasts.to_string();
            drop(server.cmd(&["CLIENT", "PAUSE", &lasts, "ALL"]));
        }
        Kind::ScriptFlush => server.script_flush(),
        Kind::FlushAll => {
            let from = now();
            server.flushall();
            if let Some((reigns, number)) = reigns {
                reigns.flushed(number, Span { from, to: now() });
            }
        }
        Kind::RestartKept | Kind::MajorityKill | Kind::PrimaryKill => {
            server.kill();
            if let Some((reigns, number)) = reigns {
                reigns.killed(number, now());
            }
        }
        Kind::RestartEmpty => {
            server.kill();
            let at = now();
            std::fs::remove_dir_all(server.folder().join("appendonlydir"))
                .expect("a server that keeps its data has them there");
            if let Some((reigns, number)) = reigns {
                reigns.killed(number, at);
                reigns.emptied(number);
            }
        }
        Kind::ServerStop | Kind::MajorityStop | Kind::PrimaryStop => server.stop(),
        _ => {}
    }
}

/// Whether a server gives nobody a lease while it lasts.
pub(super) fn silences(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::ClientPause
            | Kind::RestartKept
            | Kind::RestartEmpty
            | Kind::ServerStop
            | Kind::MajorityStop
            | Kind::MajorityKill
            | Kind::BackendCrash
            | Kind::TablesLocked
    )
}

/// Undoes what lasts.
pub(super) fn end(server: &mut RedisServer, stroke: &Stroke) {
    match stroke.kind {
        Kind::RestartKept | Kind::RestartEmpty | Kind::MajorityKill | Kind::PrimaryKill => {
            server.restart();
        }
        Kind::ServerStop | Kind::MajorityStop | Kind::PrimaryStop => server.cont(),
        _ => {}
    }
}
