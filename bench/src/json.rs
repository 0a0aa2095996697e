//! The whole run as JSON, every round of it.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::figures::{median, spread};
use crate::libs::Outcome;
use crate::ratios;
use crate::report::{Entry, Report};

/// Whether the file can be written, before the run and not after it.
pub(crate) fn prepare(path: &Path) -> Outcome<()> {
    let file = fs::OpenOptions::new().append(true).create(true).open(path);
    file.map(drop)
        .map_err(|error| format!("{}: {error}", path.display()))
}

pub(crate) fn write(path: &Path, report: &Report) -> Outcome<()> {
    let ratios = ratios::of(report).into_iter();
    let ratios: serde_json::Map<String, Value> = ratios
        .map(|ratio| (ratio.name.to_owned(), json!(ratio.value)))
        .collect();
    let entries: Vec<Value> = report.entries.iter().map(entry).collect();
    let all = json!({
        "machine": machine(report),
        "secs": report.secs,
        "rounds": report.rounds,
        "results": entries,
        "ratios": ratios,
    });
    let text = serde_json::to_string_pretty(&all).expect("plain data");
    fs::write(path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))
}

fn entry(entry: &Entry) -> Value {
    let figures = entry.names().into_iter().map(|(name, unit)| {
        let values = entry.values(name);
        json!({
            "figure": name,
            "unit": unit,
            "median": median(&values),
            "spread_percent": spread(&values),
            "rounds": values,
        })
    });
    json!({
        "scenario": entry.scenario.name(),
        "lib": entry.lib.name(),
        "figures": figures.collect::<Vec<_>>(),
        "failures": entry.failures(),
    })
}

/// What the figures were taken on, as far as the system tells.
fn machine(report: &Report) -> Value {
    let mut machine = machine_of(&report.server);
    machine["flush_us"] = json!(report.flush);
    machine
}

/// The same without what only one kind of run measures.
pub(crate) fn machine_of(server: &str) -> Value {
    let read = |path| fs::read_to_string(path).ok();
    let info = read("/proc/cpuinfo").unwrap_or_default();
    let processor = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    let flags = info.lines().find_map(|line| line.strip_prefix("flags"));
    let is_virtual = flags.map(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
    let kernel = read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned());
    json!({
        "processor": processor,
        "cores": std::thread::available_parallelism().ok().map(usize::from),
        "virtual": is_virtual,
        "system": format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        "kernel": kernel,
        "server": server,
    })
}
