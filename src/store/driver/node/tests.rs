//! What a node's task does, on a paused clock, with a server that connects and answers as the test says.

mod fake;

use std::sync::atomic::Ordering;

use tokio::time::sleep;

use self::fake::*;
use super::super::backend::{Next, Replies};
use super::*;
use crate::store::contract::{Grant, Op, Outcome, Owner, Session, SubmittedOp};

#[tokio::test(start_paused = true)]
async fn g1_there_is_a_pause_after_each_attempt_that_fails() {
    let (server, _session) = server([fails("1"), fails("2"), fails("3"), Plan::Hangs]);
    sleep(ms(10_000)).await;
    let began: Vec<_> = server.see(|seen| seen.attempts.iter().map(|it| it.at).collect());
    // How long each may be: `Backoff`.
    for (earlier, least, most) in [(1, 250, 1000), (2, 400, 2000)] {
        let pause = began[earlier + 1] - began[earlier];
        assert!((ms(least)..=ms(most + 5)).contains(&pause), "{pause:?}");
    }
}

/// Which error is told, and when. The first attempt counts however it ends, and those beside it if they succeed. But what
/// they were told says more than that the first one hung, and an error that will not pass more than one that may.
#[tokio::test(start_paused = true)]
async fn an_attempt_that_hangs_hides_no_error_of_those_beside_it() {
    let lasting = |after, text: &str| Plan::Fails(after, StoreError::lasting(text));
    let late = |text: &str| Plan::Fails(ms(3000), StoreError::new(text));
    // An eighth more than connecting may take.
    let at_last = 5625;
    for (plans, told, at) in [
        (vec![], "Silent(5s)", at_last),
        (vec![Plan::Hangs, fails("beside")], "beside", at_last),
        (
            vec![Plan::Hangs, fails("one"), fails("two")],
            "two",
            at_last,
        ),
        (
            vec![Plan::Hangs, lasting(ms(0), "no right"), fails("busy")],
            "no right",
            at_last,
        ),
        (vec![late("first"), fails("beside")], "beside", 3000),
        (
            vec![lasting(ms(3000), "first"), fails("beside")],
            "first",
            3000,
        ),
    ] {
        let begin = Instant::now();
        let (server, _session) = server(plans);
        sleep(ms(at_last + 1)).await;
        server.see(|seen| {
            let Some((when, StoreEvent::Down { error, .. })) = seen.events.first() else {
                panic!("{told}: {:?}", seen.events);
            };
            assert_eq!((error.to_string().as_str(), *when - begin), (told, ms(at)));
            let beside = seen.attempts.iter().take(2).map(|it| it.is_beside);
            assert!(beside.eq([false, true]), "{told}");
            let [one, other] = [0, 1].map(|number| seen.attempts[number].at);
            assert!(other - one >= CONNECTS_WITHIN / ATTEMPTS);
        });
    }
}

/// An adoption that waits for the end of a transaction is asked again, and its key's next op is done after it.
#[tokio::test(start_paused = true)]
async fn what_the_server_puts_off_is_sent_again_after_its_pause() {
    let (server, session) = server([Plan::Stands]);
    session.submit(SubmittedOp::unattended("k", adopt(TTL)));
    session.submit(SubmittedOp::unattended("k", release(1)));
    sleep(ms(1)).await;
    let put_off = Instant::now();
    server.replies([Reply::Later(ms(700))]).await;
    sleep(ms(690)).await;
    assert_eq!(server.calls(), 1, "not before");
    sleep(ms(20)).await;
    server.replies([done(Outcome::NotOld)]).await;
    server.replies([done(Outcome::Gone { held: false })]).await;
    server.see(|seen| {
        let letters = seen.calls.iter().map(|it| it.ops[0].letter());
        assert!(letters.eq(*b"DDR"));
        assert!(seen.calls[1].at >= put_off + ms(700));
    });
    assert_eq!(server.answers(), ["D NotOld", "R Gone { held: false }"]);
}

/// An eighth of the response time-out before its caller gives up, with the reason, and without an end of the connection.
/// Then the key's next op is done.
#[tokio::test(start_paused = true)]
async fn an_adoption_that_is_put_off_too_long_is_given_up() {
    for is_stale in [false, true] {
        let (server, session) = server([Plan::Stands]);
        let begin = Instant::now();
        let until = begin + ms(2000 - 125);
        session.submit(SubmittedOp::unattended("k", adopt(ms(2000))));
        session.submit(SubmittedOp::unattended("k", release(1)));
        sleep(ms(1)).await;
        server.replies([Reply::Later(ms(1000))]).await;
        sleep(ms(1000)).await;
        server.see(|seen| {
            let of_use = seen.calls.iter().map(|it| it.of_use / 10_000);
            assert!(of_use.eq([100, 187]), "hundredths");
        });
        if is_stale {
            // Its time was over when the server had it.
            sleep_until(until).await;
            server.replies([Reply::Stale]).await;
        } else {
            server.replies([Reply::Later(until - Instant::now())]).await;
        }
        assert_eq!(server.answers(), ["D refused: Fenced"]);
        assert_eq!(server.calls(), 3);
        server.replies([done(Outcome::Gone { held: false })]).await;
        assert_eq!(server.answers().last().unwrap(), "R Gone { held: false }");
        assert_eq!(server.see(|seen| seen.attempts.len()), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_put_off_when_the_connection_breaks_may_be_done_or_not() {
    let (server, session) = server([Plan::Stands]);
    session.submit(SubmittedOp::unattended("k", adopt(TTL)));
    sleep(ms(1)).await;
    server.replies([Reply::Later(ms(700))]).await;
    server.says(Err(StoreError::new("gone"))).await;
    assert_eq!(server.answers(), ["D unknown: gone"]);
}

/// W5: else the caller would wait for a notice that cannot come.
#[tokio::test(start_paused = true)]
async fn w5_at_a_server_that_cannot_push_whoever_listens_only_attempts() {
    for (kind, plan, letter) in [
        (Kind::Alone, Plan::Stands, b'L'),
        (Kind::Alone, Plan::Mute, b'A'),
        (Kind::Node, Plan::Stands, b'A'),
    ] {
        let (server, session) = server_of(kind, [plan]);
        let owner = Owner::exclusive(1);
        session.submit(SubmittedOp::unattended("k", Op::Listen { owner, ttl: TTL }));
        sleep(ms(200)).await;
        let op = server.see(|seen| seen.calls[0].ops[0].letter());
        assert_eq!(char::from(op), char::from(letter));
    }
}

/// However many keys there are: what the node has confirmed makes room for more. What nobody waits for is left.
#[tokio::test(start_paused = true)]
async fn keys_are_subscribed_to_and_left_when_nobody_waits() {
    let (server, session) = server_of(Kind::Node, [Plan::Stands]);
    let keys: Vec<_> = (0..150).map(|number| format!("k{number}")).collect();
    for (number, key) in (1..).zip(&keys) {
        session.submit(SubmittedOp::unattended(key.as_str(), turn(number)));
    }
    sleep(ms(200)).await;
    let sorted = |mut orders: Vec<_>| {
        orders.sort();
        orders
    };
    let expected = |begins| sorted(keys.iter().map(|key| (key.clone(), begins)).collect());
    let ordered = server.see(|seen| std::mem::take(&mut seen.orders));
    assert_eq!(sorted(ordered), expected(true));
    // A key is left after a whole round without a new ticket.
    sleep(CLEANUP).await;
    assert!(server.see(|seen| seen.orders.is_empty()));
    sleep(CLEANUP).await;
    let left = server.see(|seen| std::mem::take(&mut seen.orders));
    assert_eq!(sorted(left), expected(false));
    // It pushes grants, whatever it says of that.
    let queues = |event: &StoreEvent| match event {
        StoreEvent::Up { queue, .. } => Some(*queue),
        _ => None,
    };
    let ups: Vec<_> = server.see(|seen| {
        seen.events
            .iter()
            .filter_map(|(_, it)| queues(it))
            .collect()
    });
    assert!(!ups.is_empty() && ups.iter().all(|queue| *queue), "{ups:?}");
}

/// A minute after its last use. Whoever waits for an answer uses it.
#[tokio::test(start_paused = true)]
async fn a_connection_is_closed_when_it_was_not_used_for_a_while() {
    let (server, session) = server([Plan::Stands]);
    let closed = || server.see(|seen| seen.closed.len());
    let ask = |number| session.submit(SubmittedOp::unattended("k", release(number)));
    ask(1);
    sleep(ms(1)).await;
    server.replies([done(Outcome::Gone { held: true })]).await;
    server.is_used.store(false, Ordering::Relaxed);
    sleep(IDLE / 2).await;
    ask(2);
    sleep(IDLE * 2).await;
    assert_eq!(closed(), 0, "an answer is to come");
    server.replies([Reply::Later(IDLE * 2)]).await;
    sleep(IDLE * 2).await;
    assert_eq!(closed(), 0, "something is put off");
    sleep(ms(10)).await;
    server.replies([done(Outcome::Gone { held: true })]).await;
    sleep(IDLE / 2).await;
    ask(3);
    sleep(ms(1)).await;
    server.replies([done(Outcome::Gone { held: true })]).await;
    sleep(IDLE - ms(10)).await;
    assert_eq!(closed(), 0);
    sleep(ms(20)).await;
    assert_eq!(closed(), 1);
}

/// While its slot is being moved, the end of a lease may find the lock's own key alone. It is not to wait for the rest until
/// its caller gives up. Others do wait.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_lease_names_the_lock_alone_if_the_rest_is_long_in_coming() {
    let owner = Owner::exclusive(1);
    for (op, may_be_bare) in [
        (release(1), true),
        (Op::Keep { owner, left: TTL }, true),
        (Op::Unlisten { owner }, false),
    ] {
        let (server, session) = server_of(Kind::Node, [Plan::Stands]);
        session.submit(SubmittedOp::unattended("k", op));
        let begin = Instant::now();
        while begin.elapsed() < ms(700) {
            sleep(ms(200)).await;
            server.replies([refused(Next::Wait)]).await;
        }
        sleep(ms(200)).await;
        server.see(|seen| {
            let bare = seen.calls.iter().map(|it| (it.at - begin, it.is_bare));
            for (at, is_bare) in bare {
                assert_eq!(is_bare, may_be_bare && at > ANSWERS_WITHIN / 2, "{at:?}");
            }
            assert!(seen.calls.last().unwrap().at > begin + ANSWERS_WITHIN / 2);
        });
    }
}

/// Two nodes may name each other. Then a request pauses now and then.
#[tokio::test(start_paused = true)]
async fn a_request_that_is_sent_round_in_a_circle_pauses_now_and_then() {
    let to: Address = "a:1".into();
    for next in [Next::Moved(to.clone()), Next::Ask(to)] {
        let (server, session) = server_of(Kind::Node, [Plan::Stands]);
        session.submit(SubmittedOp::unattended("k", release(1)));
        sleep(ms(100)).await;
        for round in 0..2 {
            for hop in 1..=5 {
                assert_eq!(server.calls(), 5 * round + hop);
                server.replies([refused(next.clone())]).await;
            }
            assert_eq!(server.calls(), 5 * round + 5, "it pauses");
            sleep(ms(20)).await;
        }
        let asks = matches!(next, Next::Ask(_));
        server.see(|seen| {
            for (index, call) in seen.calls.iter().enumerate() {
                assert_eq!(call.is_asking, asks && index % 5 > 0);
            }
        });
    }
}

/// If nobody has the slot, the map is asked for, and the request goes on. A fleet does not ask at one moment, and whoever is
/// connected is asked first.
#[tokio::test(start_paused = true)]
async fn the_map_is_asked_for_when_nobody_has_a_slot() {
    for is_known in [false, true] {
        let (server, session) = server_of(Kind::Node, [Plan::Stands]);
        session.submit(SubmittedOp::unattended("k", release(1)));
        sleep(ms(200)).await;
        server.see(|seen| {
            seen.maps.clear();
            seen.map = is_known.then(|| server.map());
        });
        let searched = Instant::now();
        server.replies([refused(Next::Search)]).await;
        sleep(ms(200)).await;
        server.see(|seen| {
            assert!(seen.map.is_none(), "a node says it");
            assert_eq!(seen.maps.len(), usize::from(!is_known), "once");
            for asked in &seen.maps {
                assert!(*asked >= searched + ms(25));
            }
            assert!(is_known || seen.known == [server.address.clone()]);
        });
        server.replies([done(Outcome::Gone { held: true })]).await;
        assert_eq!(server.answers(), ["R Gone { held: true }"]);
    }
}

/// Callers hear that no map is found. Those who come later do not wait for it as for a first connection. It is searched for,
/// with pauses, as long as somebody needs it; with an older one at hand only once.
#[tokio::test(start_paused = true)]
async fn the_map_is_searched_for_until_it_is_found() {
    let (server, session) = server_of(Kind::Node, [Plan::Stands]);
    let downs = || {
        let is_down = |event: &StoreEvent| matches!(event, StoreEvent::Down { .. });
        server.see(|seen| seen.events.iter().filter(|(_, it)| is_down(it)).count())
    };
    let searches = || server.see(|seen| seen.maps.len());
    server.see(|seen| seen.no_maps = 3);
    let owner = Owner::exclusive(1);
    let asked = session.ask("k".into(), Op::Verify { owner });
    assert_eq!(session.connects_within(), CONNECTS_WITHIN);
    match asked.await {
        Err(OpError::Unsent(error)) => assert_eq!(error.to_string(), "no map"),
        other => panic!("{other:?}"),
    }
    assert_eq!(session.connects_within(), Duration::ZERO);
    sleep(ms(10_000)).await;
    assert_eq!((downs(), searches()), (3, 4));
    server.see(|seen| {
        // How long each pause may be: `Backoff`.
        for (earlier, least, most) in [(1, 250, 1000), (2, 400, 2000)] {
            let pause = seen.maps[earlier + 1] - seen.maps[earlier];
            // A search takes 10 ms.
            assert!((ms(least)..=ms(most + 15)).contains(&pause), "{pause:?}");
        }
        let connected = seen.events.iter();
        let ups = connected.filter(|(_, it)| matches!(it, StoreEvent::Up { .. }));
        assert_eq!(ups.count(), 1);
        seen.no_maps = 1;
    });
    session.submit(SubmittedOp::unattended("k", release(1)));
    sleep(ms(1)).await;
    let searched = Instant::now();
    server.replies([refused(Next::Search)]).await;
    sleep(ms(10_000)).await;
    assert_eq!((downs(), searches()), (3, 5));
    let pause = server.see(|seen| seen.maps[4] - searched);
    assert!(pause >= ms(25), "{pause:?}: the outage is over");
}

/// Else it might be as it was before the change that the refusal tells of.
#[tokio::test(start_paused = true)]
async fn the_map_is_asked_for_again_after_what_came_meanwhile() {
    let (server, session) = server_of(Kind::Node, [Plan::Stands]);
    session.submit(SubmittedOp::unattended("k", release(1)));
    session.submit(SubmittedOp::unattended("other", release(2)));
    sleep(ms(200)).await;
    let searches = || server.see(|seen| seen.maps.len());
    let before = searches();
    let search = || [refused(Next::Search), refused(Next::Search)];
    server.replies(search()).await;
    let begin = Instant::now();
    while searches() == before {
        sleep(ms(1)).await;
        assert!(begin.elapsed() < ms(1000), "nobody asks");
    }
    // Its answer is on its way.
    server.replies(search()).await;
    sleep(ms(300)).await;
    assert_eq!(searches(), before + 2);
}

/// Scripts rely on it that no other op of a call is about the same exclusive lock.
#[tokio::test(start_paused = true)]
async fn an_eviction_has_a_call_of_its_own() {
    let (server, session) = server([Plan::Stands]);
    let evict = Op::Evict {
        whose: "b1:1".into(),
    };
    let mut evicted = session.ask("k".into(), evict);
    assert!((&mut evicted).now_or_never().is_none());
    for key in ["k", "other"] {
        session.submit(SubmittedOp::unattended(key, release(1)));
    }
    sleep(ms(1)).await;
    server.see(|seen| {
        let mut calls: Vec<_> = seen.calls.iter().map(|it| it.ops.len()).collect();
        calls.sort();
        assert_eq!(calls, [1, 2]);
    });
}

/// Until somebody needs it.
#[tokio::test(start_paused = true)]
async fn a_map_that_nobody_needs_is_searched_for_once() {
    let (server, session) = server_of(Kind::Node, []);
    server.is_used.store(false, Ordering::Relaxed);
    server.see(|seen| seen.no_maps = 2);
    for searches in [1, 2] {
        session.submit(SubmittedOp::unattended("k", release(1)));
        sleep(ms(10_000)).await;
        assert_eq!(server.see(|seen| seen.maps.len()), searches);
        assert_eq!(server.answers().len(), searches);
    }
}

/// Grants were missed while the key was not subscribed to, so its ticket is entered again.
#[tokio::test(start_paused = true)]
async fn a_ticket_whose_subscription_ended_on_the_way_is_entered_again() {
    for ends in [false, true] {
        let (server, session) = server_of(Kind::Node, [Plan::Stands]);
        session.submit(SubmittedOp::unattended("k", turn(1)));
        sleep(ms(200)).await;
        assert_eq!(server.calls(), 1);
        if ends {
            let key = "k".into();
            let ended = Received::Unsubscribed { key };
            let maps = || server.see(|seen| seen.maps.len());
            let before = maps();
            server.says(Ok(Said::Other(ended))).await;
            sleep(ms(200)).await;
            assert_eq!(maps(), before + 1, "its slot may have moved");
        }
        server.see(|seen| seen.events.clear());
        let busy = Outcome::Busy {
            left: None,
            score: Some(1),
            entered: true,
            holder: None,
        };
        server.replies([done(busy)]).await;
        server.see(|seen| {
            let told = seen.events.iter().map(|(_, event)| match event {
                StoreEvent::Replied { .. } => "replied",
                StoreEvent::Up { scope, .. } if scope.contains("k") => "up",
                other => panic!("{other:?}"),
            });
            let expected = ["replied", "up"];
            assert!(told.eq(expected[..1 + usize::from(ends)].iter().copied()));
        });
    }
}

/// What cannot be done yet is asked for again, ever more seldom, until the caller gives up. He waits for first connections, too.
#[tokio::test(start_paused = true)]
async fn what_must_wait_is_asked_again_until_its_caller_gives_up() {
    for (has_b, least, most) in [(false, 750, 760), (true, 5000, 5760)] {
        let (server, session) = server_of(Kind::Node, [Plan::Stands]);
        server.has_b.store(has_b, Ordering::Relaxed);
        let begin = Instant::now();
        session.submit(SubmittedOp::unattended("k", release(1)));
        let mut answered = 0;
        while server.answers().is_empty() {
            if server.calls() > answered {
                answered += 1;
                server.replies([refused(Next::Wait)]).await;
            } else {
                sleep(ms(1)).await;
            }
            assert!(begin.elapsed() < ms(2 * most), "nobody answers");
        }
        assert_eq!(server.answers(), ["R refused: not here"]);
        let took = begin.elapsed();
        assert!((ms(least)..=ms(most)).contains(&took), "{took:?}");
        let most_calls = 6 + took.as_millis() / 80;
        assert!((server.calls() as u128) < most_calls, "{}", server.calls());
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_that_no_server_has_is_refused_in_time() {
    let (server, session) = server_of(Kind::Node, [Plan::Stands]);
    sleep(ms(200)).await;
    session.submit(SubmittedOp::unattended("of nobody", release(1)));
    sleep(ms(740)).await;
    assert!(server.answers().is_empty());
    sleep(ms(20)).await;
    assert_eq!(server.answers(), ["R refused: NoOwner"]);
}

/// The replicas must have it.
#[tokio::test(start_paused = true)]
async fn a_grant_is_told_once_it_is_confirmed() {
    for kind in [Kind::Alone, Kind::Confirms] {
        let (server, _session) = server_of(kind, [Plan::Stands]);
        sleep(ms(1)).await;
        let owner = Owner::exclusive(1);
        let grant = Grant {
            owner,
            ttl: TTL,
            epoch: 1,
            at: 1,
        };
        let granted = || {
            let is_grant = |event: &StoreEvent| matches!(event, StoreEvent::Granted { .. });
            server.see(|seen| seen.events.iter().filter(|(_, it)| is_grant(it)).count())
        };
        let heard = StoreEvent::Granted {
            key: "k".into(),
            grant,
        };
        server.says(Ok(Said::Other(Received::Heard(heard)))).await;
        if kind == Kind::Confirms {
            assert_eq!(granted(), 0);
            let request = server.see(|seen| seen.to_confirm.pop()).expect("it asks");
            let confirmed = Received::Confirmed { request };
            server.says(Ok(Said::Other(confirmed))).await;
        }
        assert_eq!(granted(), 1);
    }
}

/// One key is enough, of each that is in use. If none is, any will do.
#[tokio::test(start_paused = true)]
async fn a_ping_asks_each_server_that_is_in_use() {
    let stand = [Plan::Stands, Plan::Stands];
    let (server, session) = server_of(Kind::Node, stand);
    server.has_b.store(true, Ordering::Relaxed);
    session.start();
    session.submit(SubmittedOp::unattended("k", release(1)));
    sleep(ms(200)).await;
    server.see(|seen| {
        assert_eq!(seen.nodes.len(), 2);
        let link = &seen.links[seen.nodes.iter().position(|it| **it == *"a:1").unwrap()];
        let list = vec![done(Outcome::Gone { held: true })];
        let replies = Replies {
            list,
            ..Replies::default()
        };
        link.unbounded_send(Ok(Said::Replies(replies))).unwrap();
    });
    sleep(ms(1)).await;
    for answering in [1, 2] {
        let pinged = session.ping(ms(500));
        let calls = server.calls();
        let answer = async {
            sleep(ms(10)).await;
            assert_eq!(server.calls(), calls + 2);
            server.see(|seen| {
                for link in &seen.links[..answering] {
                    let list = vec![done(Outcome::Lost)];
                    let replies = Replies {
                        list,
                        ..Replies::default()
                    };
                    link.unbounded_send(Ok(Said::Replies(replies))).unwrap();
                }
            });
        };
        let (ended, ()) = futures::join!(pinged, answer);
        assert_eq!(ended.is_ok(), answering == 2, "{ended:?}");
        // An answer is that of the oldest call.
        if answering == 1 {
            server.replies([done(Outcome::Lost)]).await;
        }
    }

    let (server, session) = server_of(Kind::Alone, [Plan::Stands]);
    server.is_used.store(false, Ordering::Relaxed);
    sleep(ms(1)).await;
    assert!(server.see(|seen| seen.attempts.is_empty()));
    let (ended, ()) = futures::join!(session.ping(ms(500)), async {
        sleep(ms(1)).await;
        server.replies([done(Outcome::Lost)]).await;
    });
    ended.unwrap();
}

/// Nobody waits for grants there any more, so the next connection is not asked for them.
#[tokio::test(start_paused = true)]
async fn a_node_that_nobody_needs_keeps_no_subscription() {
    let (server, session) = server_of(Kind::Node, [Plan::Stands, Plan::Stands]);
    session.submit(SubmittedOp::unattended("k", turn(1)));
    sleep(ms(200)).await;
    server.replies([done(Outcome::NotOld)]).await;
    server.is_used.store(false, Ordering::Relaxed);
    server.says(Err(StoreError::new("gone"))).await;
    sleep(ms(1000)).await;
    let ordered = || server.see(|seen| seen.orders.len());
    assert_eq!(ordered(), 1);
    session.submit(SubmittedOp::unattended("other", release(1)));
    sleep(ms(1000)).await;
    server.replies([done(Outcome::Gone { held: true })]).await;
    assert_eq!(ordered(), 1);
}

/// It cannot come back to say so itself.
#[tokio::test(start_paused = true)]
async fn the_outage_of_a_node_ends_when_others_have_its_slots() {
    let plans = [Plan::Stands, fails("gone"), fails("gone"), fails("gone")];
    let (server, session) = server_of(Kind::Node, plans);
    server.has_b.store(true, Ordering::Relaxed);
    session.submit(SubmittedOp::unattended("k", release(1)));
    sleep(ms(100)).await;
    server.has_b.store(false, Ordering::Relaxed);
    sleep(ms(10_000)).await;
    server.see(|seen| {
        let mut told = seen.events.iter().filter_map(|(_, event)| match event {
            StoreEvent::Up { complete, .. } => Some(*complete),
            StoreEvent::Down { .. } => None,
            other => panic!("{other:?}"),
        });
        assert_eq!(told.next_back(), Some(true), "{:?}", seen.events);
        assert!(
            seen.events
                .iter()
                .any(|(_, it)| matches!(it, StoreEvent::Down { .. }))
        );
    });
}
