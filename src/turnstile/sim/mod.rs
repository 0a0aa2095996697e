//! Registries, a server and a net in one deterministic run: many seeds, virtual time, everything
//! that may go wrong, and a referee who sees it all.
//!
//! `LOCKSTREAM_SEED=42 cargo test --lib simulation` replays one seed and prints what happened;
//! `LOCKSTREAM_SEEDS=100000` runs so many, `LOCKSTREAM_FIRST=n` starts at seed n.

mod caller;
mod clock;
mod ends;
mod faults;
mod link;
mod process;
mod profile;
mod referee;
mod rng;
mod rounds;
mod scenes;
mod server;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use self::world::{Trace, World};

/// How many seeds run by default.
const SEEDS: u64 = 3_000;

/// How many of the last steps are shown, unless `LOCKSTREAM_STEPS` says so.
const SHOWN: usize = 120;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a seed is a number"))
}

/// Runs a seed; an error is what was broken.
fn run(seed: u64, trace: Option<Trace>) -> Result<World, String> {
    catch_unwind(AssertUnwindSafe(|| World::new(seed, trace).run()))
        .unwrap_or_else(|_| Err("it panicked".into()))
}

/// Runs a seed again and prints its last steps.
fn show(seed: u64, broken: &str) -> String {
    let trace = Trace::default();
    let again = run(seed, Some(trace.clone()));
    let again = again.err().unwrap_or_else(|| "nothing".into());
    let lines: Vec<_> = trace.borrow().iter().cloned().collect();
    let shown = number("LOCKSTREAM_STEPS").map_or(SHOWN, |steps| steps as usize);
    let shown = &lines[lines.len().saturating_sub(shown)..];
    format!(
        "seed {seed}: {broken} (again: {again})\n{}\nseed {seed}: {broken}\n\
         LOCKSTREAM_SEED={seed} replays it",
        shown.join("\n")
    )
}

#[test]
fn simulation() {
    if let Some(seed) = number("LOCKSTREAM_SEED") {
        match run(seed, None) {
            Ok(world) => println!("seed {seed}: {:?}", world.referee.counts),
            Err(broken) => panic!("{}", show(seed, &broken)),
        }
        return;
    }
    let first = number("LOCKSTREAM_FIRST").unwrap_or(0);
    let seeds = number("LOCKSTREAM_SEEDS").unwrap_or(SEEDS);
    let mut steps = 0;
    let mut counts = [0; 16];
    for seed in first..first + seeds {
        match run(seed, None) {
            Ok(world) => {
                let c = world.referee.counts;
                steps += world.steps;
                let seen = [
                    c.begun,
                    c.taken,
                    c.passed,
                    c.renewals,
                    c.prolonged,
                    c.crossed,
                    c.kept,
                    c.extended,
                    c.adopted,
                    c.shared,
                    c.lost,
                    c.again,
                    c.unconfirmed,
                    c.late,
                    c.shed,
                    c.too_slow,
                ];
                for (sum, count) in counts.iter_mut().zip(seen) {
                    *sum += count;
                }
            }
            Err(broken) => panic!("{}", show(seed, &broken)),
        }
    }
    let [
        begun,
        taken,
        passed,
        renewals,
        prolonged,
        crossed,
        kept,
        extended,
        adopted,
        shared,
        lost,
        again,
        unconfirmed,
        late,
        shed,
        too_slow,
    ] = counts;
    println!(
        "{seeds} seeds, {steps} steps; leases begun {begun}, taken {taken}, passed {passed}; renewals \
         {renewals}, {prolonged} told, {crossed} crossed by the end of their lease; kept {kept}, \
         extended {extended}, adopted {adopted}; calls of several ops {shared}, {lost} times several \
         ops lost, {again} ops sent again; {unconfirmed} wins and grants that did not count; {late} \
         renewals late, {shed} not sent; {too_slow} callers for whom the store was too slow"
    );
    // A run without them would prove nothing about renewal, nor about the other ends of leases.
    let few = seeds / 2;
    assert!(seeds < SEEDS || (prolonged > few && crossed > few / 4));
    assert!(seeds < SEEDS || (kept > few && extended > few && adopted > few / 4));
    // Nor about group commit.
    assert!(seeds < SEEDS || (shared > few && lost > few / 4 && again > few / 64));
    assert!(seeds < SEEDS || unconfirmed > few);
    assert!(seeds < SEEDS || (late > few / 4 && shed > few / 64));
    assert!(seeds < SEEDS || too_slow > few / 64);
}
