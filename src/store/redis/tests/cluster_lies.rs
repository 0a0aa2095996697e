//! A cluster that lies: about where its slots are, where else to ask, what became of a call, and what is listened for.
//! Nothing panics, nobody has a lease that it did not give in so many words, everything ends in time, and no more is
//! connected to than a cluster has.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::time::{sleep, timeout};

use super::fake::{Fake, NOW, push};
use super::liar::{Forced, KEYS, Lie, Said};
use super::liars::{Called, Heard, Map, NODES, Port, SaidNode, Script, Shard, To, start};
use super::lies::{PANICS, SLACK, any_push, asks, count_panics, raw, said};
use crate::LockRegistry;
use crate::store::RedisStore;

/// Longer than to one server: a cluster's map and connections take a dozen answers before the first call.
const WAIT: Duration = Duration::from_millis(400);
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(150);

/// So many clusters lie at the same time: most of a case is waiting.
const AT_ONCE: usize = 25;

fn hosts() -> impl Strategy<Value = String> {
    let odd = select(vec![
        "",
        "?",
        "localhost",
        "::1",
        "[::1]",
        "a b",
        "h\r\n",
        "\u{1b}[2J",
        "u:p@h",
        "256.1.1.1.",
        "é",
        "-",
        "127.0.0.1:1",
    ]);
    prop_oneof![
        6 => Just("127.0.0.1".to_owned()),
        3 => odd.prop_map(str::to_owned),
        1 => (250..400_usize).prop_map(|long| "h".repeat(long)),
        1 => (0..4_u8).prop_map(|last| format!("127.0.0.{last}")),
    ]
}

fn map() -> impl Strategy<Value = Map> {
    let port = prop_oneof![
        6 => (0..NODES).prop_map(Port::Of),
        2 => select(vec![0, 1, -1, 65_535, 65_536, i64::MAX, i64::MIN]).prop_map(Port::Exactly),
    ];
    let node = (
        hosts(),
        port,
        select(vec!["master", "master", "master", "replica", "slave", ""]),
        select(vec!["online", "online", "fail", "loading", ""]),
        prop_oneof![8 => Just(None), 1 => (0..6_usize).prop_map(Some)],
    );
    let node = node.prop_map(|(host, port, role, health, lacks)| SaidNode {
        host,
        port,
        role,
        health,
        lacks,
    });
    let slot = select(vec![
        0,
        0,
        1,
        5000,
        9000,
        16_383,
        16_383,
        16_384,
        -1,
        i64::MAX,
    ]);
    let slots = prop_oneof![
        4 => Just(vec![0, 16_383]),
        2 => vec(slot, 0..5),
        1 => (1..9_usize).prop_map(|many| [0, 16_383].repeat(many)),
    ];
    let shard = (slots, vec(node, 0..4), any::<bool>());
    let shard = shard.prop_map(|(slots, nodes, is_map)| Shard {
        slots,
        nodes,
        is_map,
    });
    prop_oneof![
        8 => Just(Map::Truth),
        6 => vec(shard, 0..5).prop_map(Map::Shards),
        1 => select(vec![40, 1001, 16_384]).prop_map(Map::Many),
        1 => (0..400_usize).prop_map(Map::Half),
        2 => raw().prop_map(Map::Raw),
        1 => Just(Map::Silence),
        1 => Just(Map::HangUp),
    ]
}

fn called() -> impl Strategy<Value = Called> {
    let texts = select(vec![
        "",
        " ",
        "x",
        "1",
        "1 ",
        "1 x",
        "1 :",
        "1 127.0.0.1",
        "1 127.0.0.1:",
        "1 127.0.0.1:99999",
        "1 127.0.0.1:-1",
        "-1 127.0.0.1:1",
        "99999999999 127.0.0.1:1",
        "1 a b:1",
        "1 \u{1b}:1",
        "1 :1",
        "1 ?:1",
        "1 ::1:1",
        "1 h,h:1",
        "1 u:p@127.0.0.1:1",
    ]);
    let to = prop_oneof![
        1 => Just(To::Self_),
        4 => Just(To::Next),
        1 => Just(To::Nobody),
        2 => Just(To::Elsewhere),
        2 => texts.prop_map(|text| To::Text(text.to_owned())),
        1 => (1..3000_usize).prop_map(|long| To::Text(format!("1 {}:1", "h".repeat(long)))),
    ];
    let code = select(vec![
        "MOVED",
        "MOVED",
        "ASK",
        "ASK",
        "TRYAGAIN",
        "CLUSTERDOWN",
    ]);
    prop_oneof![
        3 => (code, to).prop_map(|(code, to)| Called::Redirect(code, to)),
        5 => said().prop_map(Called::Said),
    ]
}

fn heard() -> impl Strategy<Value = Heard> {
    prop_oneof![
        5 => Just(Heard::Truth),
        3 => vec(any_push(), 1..5).prop_map(Heard::And),
        1 => Just(Heard::Taken),
        1 => Just(Heard::Twice),
        1 => raw().prop_map(Heard::Raw),
        1 => Just(Heard::Silence),
        1 => Just(Heard::HangUp),
    ]
}

fn script() -> impl Strategy<Value = Script> {
    let step = prop_oneof![
        12 => Just(None),
        1 => raw().prop_map(|raw| Some(Lie::Raw(raw))),
        1 => (0..80_usize).prop_map(|length| Some(Lie::Half(length))),
        1 => Just(Some(Lie::Silence)),
    ];
    // Whoever lies about everything is asked nothing: mostly some of it is true.
    let maps = prop_oneof![
        2 => Just(vec![Map::Truth]),
        1 => (vec(map(), 1..4), 0..2_usize).prop_map(|(mut maps, at)| {
            maps.insert(at, Map::Truth);
            maps
        }),
    ];
    let steps = prop_oneof![3 => Just(vec![None]), 1 => vec(step, 1..6)];
    let truth = Called::Said(Said {
        before: Vec::new(),
        lie: Lie::Truth,
        after: Vec::new(),
    });
    let calls = vec(prop_oneof![1 => called(), 1 => Just(truth)], 1..8);
    let granted = vec(vec(any_push(), 0..4), 1..4);
    let parts = (maps, calls, vec(heard(), 1..5), granted, steps);
    parts.prop_map(|(maps, calls, heard, granted, steps)| Script {
        maps,
        calls,
        heard,
        granted,
        steps,
    })
}

fn registry(fakes: &[Fake], response_timeout: Duration) -> LockRegistry {
    let hosts: Vec<_> = fakes
        .iter()
        .map(|fake| format!("127.0.0.1:{}", fake.port()))
        .collect();
    let url = format!("redis+cluster://{}/", hosts.join(","));
    let store = RedisStore::connect_lazy(url).unwrap();
    LockRegistry::builder(store)
        .response_timeout(response_timeout)
        .build()
}

fn honest() -> Script {
    Script {
        maps: vec![Map::Truth],
        calls: vec![Called::Said(Said {
            before: Vec::new(),
            lie: Lie::Truth,
            after: Vec::new(),
        })],
        heard: vec![Heard::Truth],
        granted: vec![Vec::new()],
        steps: vec![None],
    }
}

/// One cluster, from first to last, and how many leases it gave; `Err`: what should not have been.
async fn lies(script: Script) -> Result<usize, String> {
    let forced = Forced::default();
    let (ring, fakes) = start(script, &forced);
    let locks = registry(&fakes, RESPONSE_TIMEOUT);
    let callers = KEYS
        .iter()
        .cycle()
        .take(4)
        .map(|key| asks(&locks, key, WAIT, &forced));
    let told: Result<Vec<usize>, _> = join_all(callers).await.into_iter().collect();
    let in_use = locks.in_use();
    let shut = timeout(SLACK, locks.shutdown()).await;
    fakes.iter().for_each(Fake::stop);
    let leases = told?.into_iter().sum();
    if in_use > KEYS.len() + 8 {
        return Err(format!("{in_use} keys in use"));
    }
    shut.map_err(|_| "the shutdown hangs".to_owned())?;
    if locks.in_use() > 0 {
        return Err(format!("{} keys in use after it", locks.in_use()));
    }
    let most = ring.lock().unwrap().most;
    if most > MOST {
        return Err(format!("{most} connections at once"));
    }
    Ok(leases)
}

/// What `cluster/answers.rs` allows.
const STRANGERS: usize = 32;

/// So many connections are open at a time: two to each node, and some that end just now or ask for the map.
const MOST: usize = 2 * (NODES + STRANGERS) + 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, max_shrink_iters: 30, failure_persistence: None, ..ProptestConfig::default() })]

    fn whatever_a_cluster_says(scripts in vec(script(), AT_ONCE)) {
        count_panics();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let all = scripts.into_iter().map(|script| async {
            let shown = format!("{script:?}");
            lies(script).await.map_err(|told| format!("{told}, of {shown}"))
        });
        let told = runtime.block_on(join_all(all));
        drop(runtime);
        for told in told {
            prop_assert!(told.is_ok(), "{}", told.unwrap_err());
            LEASES.fetch_add(told.unwrap_or_default(), Ordering::Relaxed);
        }
        prop_assert_eq!(PANICS.get(), 0, "something panicked");
    }
}

/// How many leases they gave in all.
static LEASES: AtomicUsize = AtomicUsize::new(0);

#[test]
fn a_cluster_that_lies_gives_no_lease_but_in_so_many_words() {
    whatever_a_cluster_says();
    let leases = LEASES.load(Ordering::Relaxed);
    println!("{leases} leases");
    assert!(leases > 10, "{leases} leases: they were about nothing");
}

/// Else the lies above would be about a cluster that nobody gets as far as to ask anything.
#[tokio::test]
async fn a_fake_cluster_that_does_not_lie_is_one() {
    let forced = Forced::default();
    let mut script = honest();
    // Nobody wins but by a grant.
    script.calls = vec![Called::Said(busy())];
    let (ring, fakes) = start(script, &forced);
    let locks = registry(&fakes, Duration::from_secs(5));
    let waiter = tokio::spawn(locks.obtain("a").wait(Duration::from_secs(20)).lease());
    // True: somebody stands there, and was told.
    let grant = || {
        let mut ring = ring.lock().unwrap();
        let Some(owner) = ring.liar.standing.get("a").cloned() else {
            return false;
        };
        let channel = ring.ears.keys().find(|it| it.contains("{lock:a}"));
        let channel = channel.expect("it listens before it enters").clone();
        let message = format!("1 {owner} 30000 77 {} a", NOW + 1);
        let bytes = push(&["smessage", &channel, &message], "");
        ring.push(&channel, &bytes);
        true
    };
    let standing = async {
        while !grant() {
            sleep(Duration::from_millis(1)).await;
        }
    };
    let bound = Duration::from_secs(20);
    timeout(bound, standing).await.expect("somebody enters");
    let lease = timeout(bound, waiter).await.expect("it is granted");
    assert_eq!(lease.unwrap().unwrap().token() / 64, 77);
    fakes.iter().for_each(Fake::stop);
}

fn busy() -> Said {
    Said {
        before: Vec::new(),
        lie: super::lies::busy(),
        after: Vec::new(),
    }
}

/// Each knows for certain that the other has it: whoever asks is told so in time, and neither is kept busy.
#[tokio::test]
async fn nodes_that_send_to_each_other_for_ever_are_left_to_it() {
    let each = async |code| {
        let mut script = honest();
        script.calls = vec![Called::Redirect(code, To::Next)];
        let (ring, fakes) = start(script, &Forced::default());
        let within = Duration::from_secs(2);
        let locks = registry(&fakes, within);
        let begin = Instant::now();
        let told = locks.obtain("a").lease_once().await;
        let error = told.expect_err("nobody has it").to_string();
        assert!(error.contains(code), "{error}");
        assert!(begin.elapsed() < within + SLACK, "{:?}", begin.elapsed());
        let calls = ring.lock().unwrap().calls;
        assert!((6..200).contains(&calls), "{code}: {calls} calls");
        fakes.iter().for_each(Fake::stop);
    };
    futures::join!(each("MOVED"), each("ASK"));
}

/// Each names another that nobody has heard of: they are not all connected to.
#[tokio::test]
async fn no_more_nodes_are_connected_to_than_a_few_that_no_map_names() {
    for code in ["MOVED", "ASK"] {
        let mut script = honest();
        script.calls = vec![Called::Redirect(code, To::Elsewhere)];
        let (ring, fakes) = start(script, &Forced::default());
        let locks = registry(&fakes, Duration::from_millis(500));
        let keys: Vec<_> = (0..100).map(|number| number.to_string()).collect();
        // On a busy machine the first of them may end before there is a connection.
        for _ in 0..20 {
            let all = keys.iter().map(|key| locks.obtain(key).lease_once());
            for told in join_all(all).await {
                assert!(told.is_err(), "{told:?}");
            }
            if ring.lock().unwrap().calls > 4 * STRANGERS {
                break;
            }
        }
        let ring = ring.lock().unwrap();
        assert!(ring.calls > 4 * STRANGERS, "{} calls", ring.calls);
        assert!(ring.most <= MOST, "{code}: {} connections", ring.most);
        fakes.iter().for_each(Fake::stop);
    }
}

/// Every node that answers is away for its own reason: none of them goes unsaid, and no password is said.
#[tokio::test]
async fn of_seeds_that_are_all_away_each_is_named() {
    let (_, fakes) = start(honest(), &Forced::default());
    let locked = Fake::start(|request| {
        request
            .is("HELLO")
            .then(|| b"-WRONGPASS invalid username-password pair\r\n".to_vec())
    });
    let single = Fake::start(|request| {
        request
            .is("CLUSTER")
            .then(|| b"-ERR This instance has cluster support disabled\r\n".to_vec())
    });
    let silent = Fake::start(|_| Some(Vec::new()));
    let seeds = |more: &[u16]| {
        let ports = [locked.port(), single.port(), silent.port(), 1];
        let hosts: Vec<_> = ports.iter().chain(more).collect();
        let hosts: Vec<_> = hosts
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let url = format!("redis+cluster://me:s3cret@{}/", hosts.join(","));
        RedisStore::connect_lazy(url).unwrap()
    };
    let told = async |store: RedisStore| {
        let locks = LockRegistry::builder(store)
            .response_timeout(Duration::from_secs(2))
            .build();
        let told = locks.obtain("k").lease_within(Duration::from_secs(6)).await;
        told.unwrap_err().to_string()
    };
    let (error, many) = futures::join!(told(seeds(&[])), told(seeds(&[2, 3, 4, 5])));
    for (port, reason) in [
        (locked.port(), "WRONGPASS"),
        (single.port(), "cluster support disabled"),
        (silent.port(), "timed out"),
        (1, "Connection refused"),
    ] {
        assert!(
            error.contains(&format!("127.0.0.1:{port}")),
            "{port}: {error}"
        );
        assert!(error.contains(reason), "{reason}: {error}");
    }
    assert!(
        !error.contains("more") && !error.contains("s3cret"),
        "{error}"
    );
    assert!(many.ends_with("; and 3 more"), "{many}");
    // One that knows is enough.
    let port = fakes[0].port();
    let lease = LockRegistry::builder(seeds(&[port]))
        .build()
        .obtain("k")
        .lease()
        .await;
    assert!(lease.is_ok(), "{lease:?}");
    for fake in fakes.iter().chain([&locked, &single, &silent]) {
        fake.stop();
    }
}
