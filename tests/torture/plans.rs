//! The same seed is the same plan.

use crate::plan::{Kind, plan};

const MINUTE: u64 = 60_000;

#[test]
fn the_same_seed_is_the_same_plan_and_another_is_another() {
    for seed in 0..20 {
        assert_eq!(
            plan(seed, MINUTE, &Kind::EVERYWHERE, 4),
            plan(seed, MINUTE, &Kind::EVERYWHERE, 4)
        );
        assert_ne!(
            plan(seed, MINUTE, &Kind::EVERYWHERE, 4),
            plan(seed + 1, MINUTE, &Kind::EVERYWHERE, 4)
        );
    }
}

/// A seed in a note or a commit means the same plan for ever: who changes this changes what all of them say.
#[test]
fn the_plan_of_a_seed_never_changes() {
    let plan: Vec<String> = plan(1, MINUTE, &Kind::EVERYWHERE, 4)
        .iter()
        .take(4)
        .map(|stroke| {
            stroke
                .to_string()
                .split_whitespace()
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect();
    assert_eq!(
        plan,
        [
            "561 ms 1399 ms child 0 blackholed (Both)",
            "705 ms 129 ms child 2 SIGKILL",
            "918 ms 164 ms child 1 flood of waiters",
            "1063 ms 0 ms server SCRIPT FLUSH",
        ]
    );
}

#[test]
fn half_a_minute_has_every_kind_and_no_two_at_once_on_one_target() {
    for (seed, kinds) in (0..50).flat_map(|seed| {
        let deployments = ["standalone", "sentinel", "quorum", "cluster", "postgres"];
        deployments.map(|deployment| (seed, Kind::of(deployment)))
    }) {
        let plan = plan(seed, MINUTE / 2, &kinds, 4);
        for kind in kinds {
            assert!(
                plan.iter().any(|stroke| stroke.kind == kind),
                "seed {seed}: no {kind:?}"
            );
        }
        for row in 0..=4 {
            let row: Vec<_> = plan.iter().filter(|stroke| stroke.slot == row).collect();
            assert!(
                row.windows(2).all(|pair| pair[0].end() < pair[1].at),
                "seed {seed}: {row:?}"
            );
        }
        assert!(
            plan.iter().all(|stroke| stroke.end() <= MINUTE / 2),
            "seed {seed}"
        );
    }
}

/// Children and wires of a PostgreSQL server are not spared, either; the server has faults of its own.
#[test]
fn postgres_has_the_faults_of_children_and_its_own() {
    let kinds = Kind::of("postgres");
    let everywhere = Kind::EVERYWHERE.into_iter();
    let of_children: Vec<_> = everywhere.filter(|kind| kind.is_of_a_child()).collect();
    assert_eq!(kinds, [&of_children[..], &Kind::IN_POSTGRES].concat());
    assert_eq!(kinds, Kind::of("postgres-async"));
}

/// Whatever can befall one server, and the children and wires before it, befalls every deployment.
#[test]
fn no_deployment_is_spared() {
    for (deployment, more) in [
        ("standalone", 0),
        ("valkey", 0),
        ("sentinel", 5),
        ("quorum", 2),
        ("cluster", 4),
    ] {
        let kinds = Kind::of(deployment);
        assert_eq!(kinds.len(), Kind::EVERYWHERE.len() + more, "{deployment}");
        assert!(
            Kind::EVERYWHERE.iter().all(|kind| kinds.contains(kind)),
            "{deployment}"
        );
    }
}

#[test]
fn a_plan_has_only_faults_that_the_deployment_can_have() {
    let plan = plan(1, MINUTE, &[Kind::Kill, Kind::ClientKill], 2);
    assert!(
        plan.iter()
            .any(|stroke| stroke.kind == Kind::Kill && stroke.slot < 2)
    );
    assert!(plan.iter().all(|stroke| match stroke.kind {
        Kind::Kill => stroke.slot < 2,
        Kind::ClientKill => stroke.slot == 2,
        _ => false,
    }));
}
