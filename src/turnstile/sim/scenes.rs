//! Scenes with a cast of their own, for what has to hold to the millisecond or to the turn.

use super::caller::Caller;
use super::clock::{MILLI, SECOND};
use super::profile::{Profile, Theme};
use super::rng::Rng;
use super::world::{Event, World};
use crate::base::Mode;
use crate::store::send_window::Limits;

/// A quick net on which nothing fails, and nobody in it yet.
fn scene(seed: u64, registries: usize, change: impl FnOnce(&mut Profile)) -> World {
    let mut rng = Rng::new(seed);
    let mut profile = Profile::of(0, &mut rng);
    assert_eq!(profile.theme, Theme::Calm);
    profile.registries = registries;
    profile.callers = 0;
    profile.keys = 1;
    profile.calm_at = 4 * SECOND;
    profile.latency = (50, 300);
    profile.reply_lag = 0;
    profile.lateness = MILLI;
    profile.returns = 0;
    profile.sleepers = 0;
    profile.droppers = 0;
    profile.keepers = 0;
    profile.extensions = 0;
    profile.seals = 0;
    profile.detached = 0;
    profile.max_waiters = 1000;
    profile.response_timeout = SECOND;
    change(&mut profile);
    World::with(profile, rng, None)
}

fn comes(world: &mut World, at: u64, caller: Caller) {
    world.callers.push(caller);
    let id = world.callers.len() - 1;
    world.plan(at, Event::Arrive(id));
}

/// The holder's process crashes, and those behind it know how long its ttl is: the first of them
/// has the lock within 100 ms of the ttl's end, the others follow.
#[test]
fn w2_a_waiter_behind_a_crashed_holder_is_served_within_100_ms_of_its_ttls_end() {
    for seed in 0..200 {
        let ttl = [100 * MILLI, SECOND, 9 * SECOND][seed as usize % 3];
        let mut world = scene(seed, 4, |profile| {
            profile.ttls = vec![ttl];
            profile.holds = vec![60 * SECOND];
            profile.theme = Theme::Stops;
        });
        comes(&mut world, 700 * MILLI, Caller::standing(0, ttl));
        for process in 1..4 {
            comes(&mut world, 710 * MILLI, Caller::standing(process, ttl));
        }
        world.plan(740 * MILLI, Event::Exit(0));
        let world = world
            .run()
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        let log = &world.referee.log;
        assert_eq!(log[0].1, 0, "seed {seed}: {log:?}");
        assert_eq!(log.len(), 4, "seed {seed}: all are served");
        let (from, to) = (log[0].0 + ttl, log[0].0 + ttl + 100 * MILLI);
        // The clocks differ by a thousandth at most.
        let early = ttl / 1000 + MILLI;
        let served = log[1].0;
        assert!(
            served + early >= from && served <= to,
            "seed {seed}: {served}, not {from} to {to}"
        );
    }
}

/// One whose key nobody else wants for two tenures passes it on longer, and as soon as another is in the queue no
/// longer than was settled.
#[test]
fn w6_tenures_are_longer_if_no_other_registry_waits() {
    for seed in 0..8 {
        let mut world = scene(seed, 2, |profile| {
            profile.ttls = vec![SECOND];
            profile.holds = vec![100];
            profile.returns = 1000;
            profile.rests = vec![0];
            profile.calm_at = SECOND;
            profile.local_passes = 4;
            profile.local_span = 20 * MILLI;
        });
        for caller in 0..30 {
            comes(&mut world, caller, Caller::standing(0, SECOND));
        }
        comes(&mut world, SECOND / 2, Caller::standing(1, SECOND));
        let world = world.run().expect("nothing breaks");
        let passes = |from, to| {
            let log = world.referee.log.iter();
            let between =
                log.filter(move |(at, process, _)| (from..to).contains(at) && *process == 0);
            between.map(|(_, _, token)| token % 64).max().unwrap_or(0)
        };
        assert_eq!(passes(0, SECOND / 2), 16, "seed {seed}: alone");
        let settled = SECOND / 2 + 50 * MILLI;
        assert_eq!(passes(settled, SECOND), 4, "seed {seed}: with another");
    }
}

/// Four registries with 1, 3, 10 and 30 callers who come again and again have as many tenures.
#[test]
fn w6_turns_go_round_registries() {
    for seed in 0..8 {
        let mut world = scene(seed, 4, |profile| {
            profile.ttls = vec![SECOND];
            profile.holds = vec![100];
            profile.returns = 1000;
            profile.rests = vec![0];
            profile.calm_at = 2 * SECOND;
            profile.local_passes = 16;
            profile.local_span = 20 * MILLI;
        });
        for (process, callers) in [1, 3, 10, 30].into_iter().enumerate() {
            for caller in 0..callers {
                comes(&mut world, caller, Caller::standing(process, SECOND));
            }
        }
        let world = world.run().expect("nothing breaks");
        let mut tenures = [0; 4];
        for (at, process, token) in &world.referee.log {
            if token.is_multiple_of(64) && *at < 2 * SECOND {
                tenures[*process] += 1;
            }
        }
        let least = tenures.iter().min().copied().unwrap_or(0);
        let most = tenures.iter().max().copied().unwrap_or(0);
        assert!(least > 50, "seed {seed}: {tenures:?}");
        assert!(most - least <= 1 + most / 20, "seed {seed}: {tenures:?}");
    }
}

/// Answers take longer than a lease lasts, and callers come one after the other: when one is refused after its third late
/// win, the next one waits already. Nobody ever has the key, and nobody waits for longer than D4 allows.
#[test]
fn d4_callers_that_are_refused_one_after_the_other_are_not_starved() {
    for seed in 0..20 {
        let mode = [Mode::Exclusive, Mode::Shared][seed as usize % 2];
        let ttl = 10 * MILLI;
        let mut world = scene(seed, 1, |profile| {
            profile.ttls = vec![ttl];
            profile.latency = (5 * MILLI, 5 * MILLI);
            profile.batches = false;
            profile.limits = Limits::USUAL;
            profile.modes = vec![mode];
        });
        for caller in 0..12 {
            let at = 700 * MILLI + caller * 25 * MILLI;
            let mut caller = Caller::standing(0, ttl);
            caller.mode = mode;
            comes(&mut world, at, caller);
        }
        let world = world
            .run()
            .unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        let counts = world.referee.counts;
        assert_eq!((counts.too_slow, counts.begun), (12, 0), "seed {seed}");
    }
}
