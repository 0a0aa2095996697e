//! What a server is, and what our user may do there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use redis::{Cmd, Value, cmd};

use super::backend::RedisBackend;
use super::fault::{ErrorReply, Fault};
use super::handshake::field;
use crate::base::CheckedServer;
use crate::roaming::time::timeout_at;
use crate::store::attempts::SetUps;
use crate::store::driver::{Address, Hello, SlotSet};

/// How often the way to the server is measured.
const TRIES: usize = 3;

/// Looks at all primaries side by side, each on a connection of its own.
pub(super) async fn check(backend: Arc<RedisBackend>) -> Result<Vec<CheckedServer>, Fault> {
    let within = backend.times.connect + backend.times.answer;
    let until = tokio::time::Instant::now() + within;
    let primaries = backend.topology.primaries(backend.times).await?;
    let looks = primaries.iter().map(async |(address, slots)| {
        let silent = |_| Err(Fault::silent(address, within));
        let looking = timeout_at(until, look(&backend, address, slots));
        looking.await.unwrap_or_else(silent)
    });
    try_join_all(looks).await
}

async fn look(
    backend: &Arc<RedisBackend>,
    address: &Address,
    slots: &SlotSet,
) -> Result<CheckedServer, Fault> {
    let hello = Hello {
        address,
        slots: slots.clone(),
        is_beside: false,
        is_first: false,
        predecessor: None,
    };
    let connected = backend.open(hello, &SetUps::default(), true).await?;
    let mut link = connected.link.link;
    let within = backend.times.answer;

    let (mut round_trip, mut greeting) = (Duration::MAX, Value::Nil);
    for _ in 0..TRIES {
        let began = Instant::now();
        // Everybody may ask that, and a refusal is an answer.
        let mut answers = link.ask_all(&[cmd("HELLO")], within).await?;
        round_trip = round_trip.min(began.elapsed());
        greeting = answers.pop().unwrap_or(Value::Nil);
    }
    let info = |section: &str| cmd("INFO").arg(section).take();
    // What not everybody needs, and a question that shows whether it is allowed.
    let mut rights: Vec<(&str, Cmd)> = vec![
        ("info", info("server")),
        ("client|info", cmd("CLIENT").arg("INFO").take()),
        // Nobody has that id.
        (
            "client|kill",
            cmd("CLIENT").arg(&["KILL", "ID", NOBODY]).take(),
        ),
        // Not a script, so that none is added: ours was looked for by the connection.
        ("script|load", cmd("SCRIPT").arg(&["LOAD", ")"]).take()),
        ("scan", cmd("SCAN").arg(&["0", "COUNT", "1"]).take()),
    ];
    if backend.min_replicas.is_some() {
        rights.push(("wait", cmd("WAIT").arg(&["0", "1"]).take()));
    }
    let mut questions: Vec<_> = rights
        .iter()
        .map(|(_, question)| question.clone())
        .collect();
    questions.push(info("memory"));
    let answers = link.ask_all(&questions, within).await?;
    let is_refused = |answer: &Value| matches!(answer, Value::ServerError(error) if ErrorReply::from(error).code() == "NOPERM");
    let lacking = rights.iter().zip(&answers);
    let lacking = lacking.filter(|(_, answer)| is_refused(answer));
    let missing_rights = lacking.map(|((right, _), _)| (*right).to_owned()).collect();

    let memory = answers.last().unwrap_or(&Value::Nil);
    let mut warnings = Vec::new();
    if let Some(policy) = field(memory, "maxmemory_policy:").filter(|it| *it != "noeviction") {
        warnings.push(format!(
            "it may evict locks when its memory is full (maxmemory-policy {policy}): set noeviction"
        ));
    }
    Ok(CheckedServer {
        address: link.address.to_string(),
        version: version(&answers[0], &greeting),
        round_trip,
        no_push: connected.no_push,
        missing_rights,
        warnings,
    })
}

/// An id that no client has.
const NOBODY: &str = "9223372036854775807";

/// The product and its version, from `INFO server`, or from `HELLO`, to which everybody has the right.
fn version(info: &Value, greeting: &Value) -> Option<String> {
    if let Some(version) = field(info, "valkey_version:") {
        return Some(format!("Valkey {version}"));
    }
    if let Some(version) = field(info, "redis_version:") {
        return Some(format!("Redis {version}"));
    }
    let greeting: HashMap<String, Value> = redis::from_redis_value_ref(greeting).ok()?;
    let greeted = |name| redis::from_redis_value_ref::<String>(greeting.get(name)?).ok();
    let product = match greeted("server")?.as_str() {
        "valkey" => "Valkey".to_owned(),
        "redis" => "Redis".to_owned(),
        other => other.chars().take(64).collect(),
    };
    let version = format!("{product} {}", greeted("version")?);
    Some(version.replace(char::is_control, " "))
}
