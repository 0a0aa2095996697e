//! Every interleaving of small worlds: the turnstiles that ship, the memory store's keyspace, and connections that break.
//!
//! A world has two or three registries with a caller or two each, and one key. `stateright` visits every state that
//! callers, the network, the timers and faults can bring about, up to a number of faults and of waits that each world
//! names. In each state, leases that are valid at the same time are compatible, tokens grow, what an answer says is freed is free
//! and stays so, each caller gets a verdict that fits its stage, and nothing is left when all have gone. Where no step is left, everything
//! goes well from then on, and everybody who waits must be served.
//!
//! | file | contents |
//! |---|---|
//! | `world.rs` | one state, and the steps from it |
//! | `referee.rs` | what must be so |
//! | `plan.rs` | the worlds |
//! | `planted.py` | plants bugs, and tells which worlds find them |
//!
//! `LOCKSTREAM_WORLDS=large cargo test --release --lib worlds -- --nocapture` visits the large ones.

mod plan;
mod referee;
mod world;

use std::num::NonZeroUsize;
use std::time::Instant;
use std::{env, thread};

use stateright::{Checker, HasDiscoveries, Model, Property};

use self::plan::Plan;
use self::referee::Rule;
use self::world::{Step, World};

impl Model for Plan {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        *steps = world.steps(self);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        Some(world.after(self, step))
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "leases that are valid at the same time are compatible",
                |_, world: &World| world.keeps(Rule::Exclusion),
            ),
            Property::always("tokens grow", |_, world: &World| world.keeps(Rule::Tokens)),
            Property::always(
                "what is freed is free, what is kept is kept",
                |_, world: &World| world.keeps(Rule::Freed),
            ),
            Property::always(
                "each caller gets a verdict that fits its stage",
                |_, world: &World| world.keeps(Rule::Told),
            ),
            Property::always(
                "whoever waits is served, and nothing is left",
                |plan: &Self, world: &World| {
                    !world.steps(plan).is_empty()
                        || world.referee.breach.is_some()
                        || world.clone().check_end(plan).is_ok()
                },
            ),
        ]
    }
}

/// Visits every state of a world, and prints how many there are. If a rule is broken, tells the shortest way there.
fn check(plan: &Plan) -> Result<(), String> {
    let began = Instant::now();
    let name = plan.name;
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let checker = plan
        .clone()
        .checker()
        .threads(threads)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    println!(
        "{name}: {} states, {} steps, the longest path has {}, {:.1?}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth(),
        began.elapsed()
    );
    if let Some((property, path)) = checker.discoveries().into_iter().next() {
        let last = path.last_state().clone();
        let broken = last.referee.breach.clone();
        let end = last.clone().check_end(plan).err();
        let steps = path.into_actions().into_iter();
        let steps: String = steps.map(|step| format!("\n  {step:?}")).collect();
        return Err(format!(
            "{name}: it is not so that {property}: {broken:?} {end:?}, after{steps}\n{last:?}"
        ));
    }
    assert!(checker.is_done(), "{name}: not all states were visited");
    Ok(())
}

/// `LOCKSTREAM_WORLD`: a part of the names of those to visit.
#[test]
fn every_interleaving_of_small_worlds_keeps_the_rules() {
    let is_large = match env::var("LOCKSTREAM_WORLDS").as_deref() {
        Err(_) => false,
        Ok("large") => true,
        Ok(other) => panic!("LOCKSTREAM_WORLDS may be `large`, not `{other}`"),
    };
    let part = env::var("LOCKSTREAM_WORLD").unwrap_or_default();
    let plans = match is_large {
        true => plan::large(),
        false => plan::small(),
    };
    let plans: Vec<_> = { plans.iter() }
        .filter(|plan| plan.name.contains(&part))
        .collect();
    assert!(!plans.is_empty(), "no world has `{part}` in its name");
    let broken: Vec<_> = plans
        .into_iter()
        .filter_map(|plan| check(plan).err())
        .collect();
    assert!(broken.is_empty(), "{}", broken.join("\n\n"));
}
