//! A cluster of one node that says what no real one says on demand: what becomes of requests that wait for something
//! when their runtime goes, when the node cannot be subscribed at, and when it refuses a whole call.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use super::fake::{Fake, NOW, Request, push};
use super::paused::in_real_time;
use super::registry::{BOUND, Registry, Settings, TTL, attempt, enter, place, renew, unsent, won};
use super::support::wait_until;
use crate::store::contract::{Outcome, StoreEvent};
use crate::store::redis::slots::slot;

/// Its ticket's place in the queue.
const PLACE: u64 = 5;

const CHANNEL: &str = "{lock:k}:~grant:a1";

/// A node that has all slots, and answers as `answers` says, or as a node would.
fn registry(mut answers: impl FnMut(&Request) -> Option<Vec<u8>> + Send + 'static) -> Registry {
    let port = Arc::new(OnceLock::new());
    let own = port.clone();
    let fake = Fake::start(move |request| {
        answers(request).or_else(|| {
            if request.is("CLUSTER") {
                let port = own.get().unwrap();
                let node = format!("*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
                return Some(format!("*1\r\n*3\r\n:0\r\n:16383\r\n{node}").into_bytes());
            }
            cluster(request)
        })
    });
    port.set(fake.port()).unwrap();
    let url = format!(
        "redis+cluster://127.0.0.1:{}/?connect_timeout=30s",
        fake.port()
    );
    Settings::url(url, "a1").open()
}

/// What a node of a cluster says where a single server would say something else.
fn cluster(request: &Request) -> Option<Vec<u8>> {
    let word = |index: usize| request.words[index].as_str();
    if request.is("SSUBSCRIBE") || request.is("SUNSUBSCRIBE") {
        let kind = word(0).to_lowercase();
        return Some(push(&[&kind, word(1)], ":1\r\n"));
    }
    // The probe's message goes by a shard's channel.
    let [.., channel, message] = request.is_probe().then(|| request.arguments())? else {
        return None;
    };
    let mut bytes = match channel.is_empty() {
        true => Vec::new(),
        false => push(&["smessage", channel, message], ""),
    };
    bytes.extend(request.reply(NOW, b"$1\r\n1\r\n"));
    Some(bytes)
}

/// The second half of the slots begins here.
const MIDDLE: u16 = 8_192;

/// The map of a cluster whose halves are two addresses of one server.
fn halves(port: &u16) -> [String; 2] {
    let range = |first: u16, last: u16, host: &str| {
        format!("*3\r\n:{first}\r\n:{last}\r\n*2\r\n$9\r\n{host}\r\n:{port}\r\n")
    };
    [
        range(0, MIDDLE - 1, "127.0.0.1"),
        range(MIDDLE, 16_383, "127.0.0.2"),
    ]
}

/// A key of the first half, or of the second.
fn key_in(is_first: bool) -> String {
    let mut keys = (0..).map(|number| format!("k{number}"));
    let is_there = |key: &String| (slot(&format!("lock:{key}")) < MIDDLE) == is_first;
    keys.find(is_there).unwrap()
}

/// The lock is another's, and whoever enters gets a place.
fn busy(request: &Request) -> Option<Vec<u8>> {
    let word = match request.is_call().then(|| request.letters())? {
        "A" => "busy:30000:::::x:1".to_owned(),
        "E" => format!("busy:30000:{PLACE}::::x:1"),
        _ => return None,
    };
    let word = format!("${}\r\n{word}\r\n", word.len());
    Some(request.reply(NOW, word.as_bytes()))
}

fn runtime(is_paused: bool) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(is_paused)
        .build()
        .unwrap()
}

/// On a clock that stands still a request that is tried again later stays where it is.
#[test]
fn a_request_that_was_to_be_tried_again_is_answered_when_its_runtime_goes() {
    for refusal in ["-CLUSTERDOWN not now\r\n", "-TRYAGAIN not now\r\n"] {
        let refused = Arc::new(AtomicUsize::new(0));
        let refuses = Arc::new(AtomicBool::new(true));
        let (count, is_refusing) = (refused.clone(), refuses.clone());
        let mut one = registry(move |request| {
            let is_ours = request.is_call() && request.words[3] == "lock:k";
            (is_ours && is_refusing.load(Ordering::Relaxed)).then(|| {
                count.fetch_add(1, Ordering::Relaxed);
                refusal.into()
            })
        });
        let first = runtime(true);
        first.block_on(in_real_time(async {
            one.submit("k", attempt(1));
            wait_until("refused", BOUND, || refused.load(Ordering::Relaxed) > 0).await;
            // Its answer comes behind the refusal.
            won(&one.outcome("other", attempt(2)).await);
        }));
        drop(first);
        assert_eq!(refused.load(Ordering::Relaxed), 1, "{refusal}");
        refuses.store(false, Ordering::Relaxed);
        runtime(false).block_on(async {
            let error = unsent(one.reply("k", &attempt(1)).await);
            assert!(error.is_retryable(), "{error}");
            one.down().await;
            one.session().start();
            assert!(one.up().await, "after the first, of the runtime before");
            assert!(one.up().await);
            won(&one.outcome("k", attempt(1)).await);
        });
    }
}

/// Nothing is submitted to the second runtime: it only has to be there.
#[test]
fn a_search_for_the_map_goes_on_with_the_next_runtime() {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    let mut one = registry(move |request| {
        let is_first = request.is("CLUSTER") && count.fetch_add(1, Ordering::Relaxed) == 0;
        // It says nothing.
        is_first.then(Vec::new)
    });
    let first = runtime(false);
    first.block_on(async {
        one.submit("k", attempt(1));
        wait_until("asked", BOUND, || asked.load(Ordering::Relaxed) >= 1).await;
    });
    drop(first);
    runtime(false).block_on(async {
        one.session().start();
        won(&one.reply("k", &attempt(1)).await.unwrap().outcome);
    });
}

/// The ticket stands in its queue all the while, and nobody else knows that its grants are not heard.
#[test]
fn subscriptions_are_asked_for_again_with_the_next_runtime() {
    let channels = Arc::new(Mutex::new(Vec::new()));
    let seen = channels.clone();
    let mut one = registry(move |request| {
        if request.is("SSUBSCRIBE") && request.words[1] == CHANNEL {
            let mut seen = seen.lock().unwrap();
            seen.push(request.connection);
            if seen.len() == 2 {
                let mut bytes = push(&["ssubscribe", CHANNEL], ":1\r\n");
                let grant = format!("1 a1:1 30000 7 {NOW} k");
                bytes.extend(push(&["smessage", CHANNEL, &grant], ""));
                return Some(bytes);
            }
        }
        busy(request)
    });
    let first = runtime(false);
    first.block_on(async {
        assert_eq!(place(&one.outcome("k", enter(1)).await), PLACE);
    });
    drop(first);
    runtime(false).block_on(async {
        one.session().start();
        assert_eq!(&*one.granted().await.0, "k");
        // An earlier grant may have gone unheard: the ticket is to be entered again.
        let is_of_k = |event| match event {
            StoreEvent::Up { scope, queue, .. } => queue && scope.contains("k"),
            _ => false,
        };
        assert!(std::iter::from_fn(|| one.heard_by_now()).any(is_of_k));
    });
    let channels = channels.lock().unwrap();
    assert!(channels.is_sorted_by(|a, b| a < b), "{channels:?}");
}

/// A ticket whose grants are not heard would be dropped.
#[tokio::test]
async fn a_ticket_is_entered_when_its_subscription_is_no_longer_refused() {
    let mut has_refused = false;
    let mut one = registry(move |request| {
        let is_ours = request.is("SSUBSCRIBE") && request.words[1] == CHANNEL;
        if is_ours && !std::mem::replace(&mut has_refused, true) {
            return Some(b"-LOADING Redis is loading the dataset in memory\r\n".to_vec());
        }
        busy(request)
    });
    one.submit("k", enter(1));
    assert!(one.up().await);
    let answer = one.reply("k", &enter(1)).await.unwrap();
    assert_eq!(place(&answer.outcome), PLACE);
}

/// When a slot moves away, the server says that the subscription has ended, and nobody asked for that.
#[tokio::test]
async fn a_ticket_is_entered_again_when_the_node_ends_its_subscription() {
    let connections = Arc::new(AtomicUsize::new(0));
    let count = connections.clone();
    let mut entered = 0;
    let mut one = registry(move |request| {
        count.fetch_max(request.connection, Ordering::Relaxed);
        let mut answer = busy(request)?;
        if request.letters() == "E" {
            entered += 1;
            if entered == 1 {
                answer.extend(push(&["sunsubscribe", CHANNEL], ":0\r\n"));
            }
        }
        Some(answer)
    });
    one.submit("k", enter(1));
    assert!(one.up().await);
    let answer = one.reply("k", &enter(1)).await.unwrap();
    assert_eq!(place(&answer.outcome), PLACE);
    let before = connections.load(Ordering::Relaxed);
    let event = one.next().await;
    let StoreEvent::Up { scope, queue, .. } = &event else {
        panic!("{event:?}");
    };
    assert!(*queue && scope.contains("k") && !scope.contains("other"));
    assert_eq!(place(&one.outcome("k", enter(1)).await), PLACE);
    assert_eq!(connections.load(Ordering::Relaxed), before, "it stands");
}

/// Keys whose node stands need no map: they do not wait for a server that does not give it.
#[tokio::test]
async fn a_key_may_ask_again_while_the_search_for_the_map_hangs() {
    let (moves, stays) = (key_in(true), key_in(false));
    let lock = format!("lock:{moves}");
    let (port, moved) = (Arc::new(OnceLock::new()), Arc::new(AtomicBool::new(false)));
    let (own, has_moved) = (port.clone(), moved.clone());
    let mut has_told = false;
    let fake = Fake::start(move |request| {
        let port: &u16 = own.get().unwrap();
        if request.is("CLUSTER") {
            if std::mem::replace(&mut has_told, true) {
                // It says nothing.
                return Some(Vec::new());
            }
            let [first, second] = halves(port);
            return Some(format!("*2\r\n{first}{second}").into_bytes());
        }
        let is_ours = request.is_call() && request.words[3] == lock;
        if is_ours && has_moved.swap(false, Ordering::Relaxed) {
            return Some(format!("-MOVED {} 127.0.0.2:{port}\r\n", slot(&lock)).into_bytes());
        }
        cluster(request)
    });
    port.set(fake.port()).unwrap();
    let url = format!("redis+cluster://127.0.0.1:{}/", fake.port());
    let mut one = Settings::url(url, "a1").open();
    for (owner, key) in [(1, &moves), (2, &stays)] {
        won(&one.outcome(key, attempt(owner)).await);
    }
    while one.heard_by_now().is_some() {}
    moved.store(true, Ordering::Relaxed);
    let begin = Instant::now();
    won(&one.outcome(&moves, attempt(1)).await);
    let event = one.next().await;
    assert!(begin.elapsed() < BOUND / 2, "after the search");
    let StoreEvent::Up { scope, .. } = &event else {
        panic!("{event:?}");
    };
    assert!(scope.contains(&moves) && !scope.contains(&stays));
}

/// A node that is stopped is silent on a connection that stands. Whoever waits for the map has it from the next one, on a
/// new connection, in time for the answer.
#[tokio::test]
async fn a_connected_node_that_is_silent_leaves_time_for_the_next() {
    let port = Arc::new(OnceLock::new());
    let own = port.clone();
    let mut questions = 0;
    let fake = Fake::start(move |request| {
        if !request.is("CLUSTER") {
            return cluster(request);
        }
        questions += 1;
        let port = own.get().unwrap();
        let [first, second] = halves(port);
        let map = match questions {
            // Nobody has the rest yet.
            1 => format!("*1\r\n{first}"),
            2 => String::new(),
            _ => format!("*2\r\n{first}{second}"),
        };
        Some(map.into_bytes())
    });
    port.set(fake.port()).unwrap();
    let url = format!("redis+cluster://127.0.0.1:{}/", fake.port());
    let mut one = Settings::url(url, "a1").open();
    won(&one.outcome(&key_in(true), attempt(1)).await);
    let begin = Instant::now();
    won(&one.outcome(&key_in(false), attempt(2)).await);
    assert!(begin.elapsed() < BOUND / 2, "{:?}", begin.elapsed());
}

/// What has no right to subscribe does not get it by asking again: no key of the node is waited for in a queue.
#[tokio::test]
async fn without_the_right_to_subscribe_no_key_of_the_node_has_a_queue() {
    let subscribed = Arc::new(AtomicUsize::new(0));
    let count = subscribed.clone();
    let mut one = registry(move |request| {
        if request.is("SSUBSCRIBE") {
            count.fetch_add(1, Ordering::Relaxed);
            return Some(b"-NOPERM this user has no permissions\r\n".to_vec());
        }
        busy(request)
    });
    one.submit("k", enter(1));
    let event = one.next().await;
    let StoreEvent::Up { scope, queue, .. } = &event else {
        panic!("{event:?}");
    };
    assert!(!queue && scope.contains("k") && scope.contains("other"));
    let answer = one.reply("k", &enter(1)).await.unwrap();
    let has_no_place = matches!(answer.outcome, Outcome::Busy { score: None, .. });
    assert!(has_no_place, "{answer:?}");
    // Whoever enters all the same stands in no queue.
    let before = subscribed.load(Ordering::Relaxed);
    let outcome = one.outcome("other", enter(2)).await;
    let has_no_place = matches!(outcome, Outcome::Busy { score: None, .. });
    assert!(has_no_place, "{outcome:?}");
    assert_eq!(subscribed.load(Ordering::Relaxed), before);
}

/// Else the server would keep a channel for every key that was ever waited for.
#[tokio::test]
async fn without_the_right_to_unsubscribe_no_key_of_the_node_has_a_queue() {
    let mut one = registry(move |request| {
        if request.is("SUNSUBSCRIBE") {
            return Some(b"-NOPERM this user has no permissions\r\n".to_vec());
        }
        busy(request)
    });
    one.submit("k", enter(1));
    assert!(!one.up().await, "waiters poll");
    let answer = one.reply("k", &enter(1)).await.unwrap();
    let has_no_place = matches!(answer.outcome, Outcome::Busy { score: None, .. });
    assert!(has_no_place, "{answer:?}");
}

/// A node that had no slot when we connected was not tried out, and refuses when the first key is waited for there.
#[tokio::test]
async fn a_right_that_is_found_missing_later_leaves_no_key_of_the_node_with_a_queue() {
    let subscribed = Arc::new(AtomicUsize::new(0));
    let count = subscribed.clone();
    let mut one = registry(move |request| {
        if request.is("SSUBSCRIBE") && request.words[1] == CHANNEL {
            count.fetch_add(1, Ordering::Relaxed);
            return Some(b"-NOPERM this user has no permissions\r\n".to_vec());
        }
        busy(request)
    });
    one.submit("k", enter(1));
    assert!(one.up().await, "it may push as far as is known");
    let error = unsent(one.reply("k", &enter(1)).await);
    assert!(error.to_string().contains("NOPERM"), "{error}");
    assert!(error.is_retryable());
    let event = one.next().await;
    let StoreEvent::Up { scope, queue, .. } = &event else {
        panic!("{event:?}");
    };
    assert!(!queue && scope.contains("k") && scope.contains("other"));
    let outcome = one.outcome("k", enter(1)).await;
    let has_no_place = matches!(outcome, Outcome::Busy { score: None, .. });
    assert!(has_no_place, "{outcome:?}");
    assert_eq!(subscribed.load(Ordering::Relaxed), 1);
}

/// The node says of all keys of a call that it cannot do it for one of them. Those that it could do for must not wait
/// for those that it could not.
#[tokio::test(start_paused = true)]
async fn requests_of_a_refused_call_are_repeated_one_by_one_at_once() {
    let calls = Arc::new(Mutex::new(Vec::new()));
    let seen = calls.clone();
    let mut one = registry(move |request| {
        let is_renewal = request.is_call() && request.letters().contains('N');
        is_renewal.then(|| {
            let count = request.letters().len();
            seen.lock().unwrap().push(count);
            match count {
                1 => request.reply(NOW, b"$1\r\n1\r\n"),
                _ => b"-TRYAGAIN not all of them are here\r\n".to_vec(),
            }
        })
    });
    in_real_time(async {
        let keys = ["{k}:1", "{k}:2", "{k}:3"];
        won(&one.outcome("{k}", attempt(9)).await);
        let begin = Instant::now();
        for (owner, key) in (1..).zip(keys) {
            one.submit(key, renew(owner, TTL));
        }
        for (owner, key) in (1..).zip(keys) {
            let answer = one.reply(key, &renew(owner, TTL)).await.unwrap();
            assert_eq!(answer.outcome, Outcome::Renewed);
        }
        assert_eq!(begin.elapsed(), Duration::ZERO, "a pause");
    })
    .await;
    assert_eq!(*calls.lock().unwrap(), [3, 1, 1, 1]);
}
