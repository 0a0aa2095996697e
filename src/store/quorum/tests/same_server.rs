//! Two nodes that are one server by two names.

use super::harness::{attempt, release, renew};
use super::subscriptions::Bare;
use crate::base::StoreError;
use crate::store::contract::{OpError, Outcome, StoreEvent};

const WON: Outcome = Outcome::Won { epoch: 5 };

/// Three nodes whose connections stand, to these servers.
fn connected(servers: [&str; 3]) -> Bare {
    let mut bare = Bare::new(3);
    for (node, server) in servers.into_iter().enumerate() {
        let identity = (!server.is_empty()).then(|| server.into());
        bare.state.came_up(bare.now, node, identity);
    }
    bare
}

fn answer(bare: &mut Bare) -> Option<Result<Outcome, OpError>> {
    let events = std::mem::take(&mut bare.state.deferred.events);
    events.into_iter().find_map(|event| match event {
        StoreEvent::Replied { result, .. } => Some(result.map(|answer| answer.outcome)),
        _ => None,
    })
}

/// Two votes of one server were a majority.
#[tokio::test(start_paused = true)]
async fn one_server_by_two_names_has_one_vote() {
    let mut bare = connected(["x", "x", "y"]);
    let asked: Vec<_> = bare.submit(attempt(1)).into_iter().map(|it| it.0).collect();
    assert_eq!(asked, [0, 2]);
    bare.answer(0, Ok(WON));
    assert!(answer(&mut bare).is_none(), "one server is no majority");
    bare.answer(2, Ok(WON));
    assert!(matches!(answer(&mut bare), Some(Ok(WON))));
    bare.submit(renew(1));
    bare.answer(0, Ok(Outcome::Renewed));
    bare.answer(2, Ok(Outcome::Renewed));
    assert!(matches!(answer(&mut bare), Some(Ok(Outcome::Renewed))));
    bare.submit(release(1));
    bare.answer(0, Ok(Outcome::Gone { held: true }));
    bare.answer(2, Ok(Outcome::Gone { held: true }));
    let Some(Ok(Outcome::Gone { held: true })) = answer(&mut bare) else {
        panic!("it was held until then")
    };
    assert_eq!(bare.state.keys(), 0);
}

/// The first ops are handed over before any connection stands.
#[tokio::test(start_paused = true)]
async fn votes_given_before_the_duplicate_was_known_do_not_count() {
    let mut bare = Bare::new(3);
    assert_eq!(bare.submit(attempt(1)).len(), 3);
    for node in [0, 1] {
        bare.state.came_up(bare.now, node, Some("x".into()));
    }
    bare.answer(0, Ok(WON));
    bare.answer(1, Ok(WON));
    assert!(answer(&mut bare).is_none(), "one server is no majority");
    let error = StoreError::new("nobody listens");
    bare.answer(2, Err(OpError::Unsent(error)));
    let Some(Err(error)) = answer(&mut bare) else {
        panic!("no majority is left")
    };
    let text = error.store_error().to_string();
    let same = "two nodes of the quorum are the same server: node 1 is node 0";
    assert!(
        text.contains(same) && text.contains("nobody listens"),
        "{text}"
    );
    // What came by the second name may have come after the first had given it back.
    assert_eq!(bare.sent(), [0, 1].map(|node| (node, release(1))));
    for node in [0, 1] {
        bare.answer(node, Ok(Outcome::Gone { held: node == 0 }));
    }
    assert_eq!(bare.state.keys(), 0);
}

#[tokio::test(start_paused = true)]
async fn servers_without_an_identity_are_taken_for_different_ones() {
    let mut bare = connected(["", "", "y"]);
    assert_eq!(bare.submit(attempt(1)).len(), 3);
}

/// Of two of two none can be missed, and it does not mend by itself.
#[tokio::test(start_paused = true)]
async fn no_majority_is_left_and_that_is_told_as_lasting() {
    let mut bare = Bare::new(2);
    for node in [0, 1] {
        bare.state.came_up(bare.now, node, Some("x".into()));
    }
    let is_down = |event: &StoreEvent| matches!(event, StoreEvent::Down { error, .. } if !error.is_retryable());
    assert!(
        bare.state.deferred.events.iter().any(is_down),
        "{:?}",
        bare.state.deferred
    );
    bare.submit(attempt(1));
    bare.answer(0, Ok(WON));
    let Some(Err(error)) = answer(&mut bare) else {
        panic!("no majority is left")
    };
    assert!(!error.store_error().is_retryable());
}

/// A name is given to another server, or the server was started again: the other node was there first.
#[tokio::test(start_paused = true)]
async fn a_node_has_its_vote_back_with_another_server() {
    let mut bare = connected(["x", "x", "y"]);
    let error = StoreError::new("it broke");
    bare.state.went_down(1, error);
    bare.state.came_up(bare.now, 1, Some("z".into()));
    assert_eq!(bare.submit(attempt(1)).len(), 3);

    // Of two nodes whose server went away and came back the first counts.
    let mut bare = connected(["x", "x", "y"]);
    for node in [0, 1] {
        let error = StoreError::new("it broke");
        bare.state.went_down(node, error);
    }
    for node in [1, 0] {
        bare.state.came_up(bare.now, node, Some("x2".into()));
    }
    let asked: Vec<_> = bare.submit(attempt(1)).into_iter().map(|it| it.0).collect();
    assert_eq!(asked, [1, 2]);
}
