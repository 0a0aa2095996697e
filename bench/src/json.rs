//! The whole run as JSON, every round of it.

use std::path::Path;
use std::{fmt, fs};

use serde::{Deserialize, Serialize};
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
    let machine = Machine {
        flush_us: report.flush,
        ..machine_of(&report.server)
    };
    let all = json!({
        "machine": machine,
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
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Machine {
    processor: Option<String>,
    cores: Option<usize>,
    #[serde(rename = "virtual")]
    is_virtual: Option<bool>,
    system: String,
    kernel: Option<String>,
    server: String,
    /// How long PostgreSQL takes to bring a commit to the disk, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flush_us: Option<f64>,
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = match self.is_virtual {
            Some(true) => " of a virtual machine",
            _ => "",
        };
        let cores = self.cores.unwrap_or(0);
        let processor = self.processor.as_deref().unwrap_or("an unknown processor");
        let (system, server) = (&self.system, &self.server);
        write!(
            f,
            "{cores} cores{of} ({processor}, {system}), {server} over loopback"
        )
    }
}

/// This one.
pub(crate) fn machine_of(server: &str) -> Machine {
    let read = |path| fs::read_to_string(path).ok();
    let info = read("/proc/cpuinfo").unwrap_or_default();
    let processor = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    let flags = info.lines().find_map(|line| line.strip_prefix("flags"));
    let is_virtual = flags.map(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"));
    Machine {
        processor,
        cores: std::thread::available_parallelism().ok().map(usize::from),
        is_virtual,
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
        server: server.to_owned(),
        flush_us: None,
    }
}
