//! Measures lockstream beside its peers, on the machine at hand:
//! `cargo bench -p lockstream-bench --bench scenarios`, with `-- --help` for what can be said.
//!
//! It starts a Redis or PostgreSQL server of its own. Each round of each library runs in processes of its own, the
//! libraries taking turns in every round, so that a noisy minute hits all of them; a library that
//! errs or hangs is reported as such, and the run goes on.
//!
//! | module | what is in it |
//! |---|---|
//! | `options` | what the command line says |
//! | `target` | the server of the run, of whatever kind |
//! | `server`, `monitor` | a Redis server, and how commands are counted on it |
//! | `database`, `support` | a PostgreSQL server |
//! | `cluster`, `net` | a cluster, and proxies that delay and count what clients send |
//! | `libs` | the libraries, behind one trait |
//! | `peers`, `peer` | libraries of other languages beside them, and the program of those in Rust |
//! | `worker` | the processes that do the work, and the talk with them |
//! | `scenarios` | what they do, a file a scenario or group |
//! | `clock`, `journal`, `tally`, `figures` | from points in time to figures |
//! | `speed`, `page` | what `docs/speed.md` shows of a run, and how it is put into a page |
//! | `run`, `report`, `ratios`, `json`, `plot` | from figures to what is printed, written and drawn |

mod clock;
mod cluster;
mod database;
mod figures;
mod journal;
mod json;
mod libs;
mod monitor;
mod net;
mod options;
mod page;
mod peer;
mod peers;
mod plot;
mod ratios;
mod report;
mod run;
mod scenarios;
mod server;
mod speed;
mod support;
mod tally;
mod target;
mod worker;

use std::process::ExitCode;

/// The whole program: the bench, or one of its workers.
///
/// It fails if the arguments are not understood, the server cannot be had, a file cannot be
/// written, or lockstream itself failed at a scenario.
pub fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == worker::FLAG) {
        return be_a_worker();
    }
    let options = options::parse(args).unwrap_or_else(|error| error.exit());
    let done = match options.redraw {
        true => speed::make(),
        false => run::run(&options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// One library of Rust in one role, for [`compare`]: the program `peer`.
pub fn peer(words: Vec<String>) {
    let runtime = tokio::runtime::Runtime::new().expect("there are threads");
    // A task, as in a service: what is polled by `block_on` itself is woken over threads each time.
    let done = runtime.block_on(runtime.spawn(peer::main(words)));
    done.expect("it does not panic");
    // What still waits for a lock is not waited for.
    runtime.shutdown_background();
}

/// Measures lockstream beside libraries of other languages: the program `peers`, with `--help` for what can be said.
pub fn compare() -> ExitCode {
    peers::main()
}

fn be_a_worker() -> ExitCode {
    let done = worker::Boss::meet().and_then(|(boss, job)| {
        // As a service has it by `#[tokio::main]`.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()
            .map_err(libs::told("a runtime"))?;
        let done = runtime.block_on(scenarios::work(job, boss));
        // What still waits for a lock is not waited for.
        runtime.shutdown_background();
        done
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            worker::fail(&error);
            ExitCode::FAILURE
        }
    }
}
