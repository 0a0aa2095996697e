//! A cluster that lies: about where its slots are, where else to ask, what became of a call, and what is listened for.
//! Nothing panics, nobody has a lease that it did not give in so many words, everything ends in time, and no more is
//! connected to than a cluster has.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::future::join_all;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use tokio::time::timeout;

use super::fake::{Fake, HANG_UP, NOW, Request, push};
use super::lies::{
    Forced, KEYS, Liar, Lie, PANICS, Push, SLACK, Said, any_push, asks, count_panics, raw, said,
};
use crate::LockRegistry;
use crate::store::RedisStore;

const NODES: usize = 3;
const SLOTS: i64 = 16_384;

/// Longer than to one server: a cluster's map and connections take a dozen answers before the first call.
const WAIT: Duration = Duration::from_millis(400);
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(150);

/// So many clusters lie at the same time: most of a case is waiting.
const AT_ONCE: usize = 25;

/// A port that a node is said to have.
#[derive(Clone, Copy, Debug)]
enum Port {
    /// That of one of the nodes.
    Of(usize),
    Exactly(i64),
}

#[derive(Clone, Debug)]
struct SaidNode {
    host: String,
    port: Port,
    role: &'static str,
    health: &'static str,
    /// Which of the fields is not there.
    lacks: Option<usize>,
}

#[derive(Clone, Debug)]
struct Shard {
    slots: Vec<i64>,
    nodes: Vec<SaidNode>,
    is_map: bool,
}

/// What is said of where the slots are.
#[derive(Clone, Debug)]
enum Map {
    Truth,
    Shards(Vec<Shard>),
    /// So many shards of one slot each, where nobody listens.
    Many(u16),
    Half(usize),
    Raw(Vec<u8>),
    Silence,
    HangUp,
}

/// Whom a call is sent on to.
#[derive(Clone, Debug)]
enum To {
    /// Back to where it came from.
    Self_,
    Next,
    /// Where nobody listens.
    Nobody,
    /// Somewhere else each time.
    Elsewhere,
    Text(String),
}

/// What a call is answered.
#[derive(Clone, Debug)]
enum Called {
    Redirect(&'static str, To),
    Said(Said),
}

/// What comes of a wish to be told of grants.
#[derive(Clone, Debug)]
enum Heard {
    Truth,
    /// And then these, on the same connection.
    And(Vec<Push>),
    /// And at once no more.
    Taken,
    Twice,
    Raw(Vec<u8>),
    Silence,
    HangUp,
}

#[derive(Clone, Debug)]
struct Script {
    maps: Vec<Map>,
    calls: Vec<Called>,
    heard: Vec<Heard>,
    /// What is pushed on the second connection when somebody enters.
    granted: Vec<Vec<Push>>,
    steps: Vec<Option<Lie>>,
}

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
        4 => Just(vec![0, SLOTS - 1]),
        2 => vec(slot, 0..5),
        1 => (1..9_usize).prop_map(|many| [0, SLOTS - 1].repeat(many)),
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

/// One end of a connection to a node.
type Wire = (usize, usize);

/// All nodes of a cluster.
struct Ring {
    script: Script,
    liar: Liar,
    ports: Vec<u16>,
    /// How often each kind of thing was asked.
    turns: [usize; 5],
    wires: HashMap<Wire, TcpStream>,
    /// The most of them at a time.
    most: usize,
    /// Who listens to a channel.
    ears: HashMap<String, Wire>,
    calls: usize,
}

type Shared = Arc<Mutex<Ring>>;

/// A connection that the ring can push on, and that is forgotten when it ends.
struct Kept {
    stream: TcpStream,
    wire: Wire,
    ring: Shared,
}

impl Read for Kept {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.ring.lock().unwrap().wires.remove(&self.wire);
    }
}

fn start(script: Script, forced: &Forced) -> (Shared, Vec<Fake>) {
    let calls = script.calls.iter().filter_map(|called| match called {
        Called::Said(said) => Some(said.clone()),
        Called::Redirect(..) => None,
    });
    let truth = Said {
        before: Vec::new(),
        lie: Lie::Truth,
        after: Vec::new(),
    };
    let mut calls: Vec<_> = calls.collect();
    if calls.is_empty() {
        calls.push(truth);
    }
    let liar = Liar::new(calls, vec![None], forced.clone());
    let ring = Arc::new(Mutex::new(Ring {
        script,
        liar,
        ports: Vec::new(),
        turns: [0; 5],
        wires: HashMap::new(),
        most: 0,
        ears: HashMap::new(),
        calls: 0,
    }));
    let node = |node| {
        let (keeper, answerer) = (ring.clone(), ring.clone());
        let dress = move |stream: TcpStream, connection| {
            let wire = (node, connection);
            stream.set_write_timeout(Some(SLACK)).ok()?;
            let mut ring = keeper.lock().unwrap();
            ring.wires.insert(wire, stream.try_clone().ok()?);
            ring.most = ring.most.max(ring.wires.len());
            let ring = keeper.clone();
            Some(Kept { stream, wire, ring })
        };
        Fake::start_over(dress, move |request| {
            answerer.lock().unwrap().answer(node, request)
        })
    };
    let fakes: Vec<_> = (0..NODES).map(node).collect();
    ring.lock().unwrap().ports = fakes.iter().map(Fake::port).collect();
    (ring, fakes)
}

fn word(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

impl Ring {
    /// The next of a kind of lie, over and over.
    fn turn<T: Clone>(&mut self, kind: usize, of: impl Fn(&Script) -> &Vec<T>) -> T {
        let all = of(&self.script);
        let next = all[self.turns[kind] % all.len()].clone();
        self.turns[kind] += 1;
        next
    }

    fn answer(&mut self, node: usize, request: &Request) -> Option<Vec<u8>> {
        let wire = (node, request.connection);
        let answer = self.say(wire, request);
        if answer.as_ref().is_some_and(|it| it.ends_with(HANG_UP)) {
            // Else it would stay open.
            self.wires.remove(&wire);
        }
        answer
    }

    fn say(&mut self, wire: Wire, request: &Request) -> Option<Vec<u8>> {
        let mut request = request.clone();
        // Each node numbers its own.
        request.connection += wire.0 << 16;
        if request.is("EVAL") {
            // In full, as after ASKING.
            request.words[0] = "EVALSHA".to_owned();
        }
        if request.is("CLUSTER") {
            let map = self.turn(0, |script| &script.maps);
            return Some(self.map(&map));
        }
        if request.is_call() {
            self.calls += 1;
            return Some(self.call(wire, &request));
        }
        if request.is("SSUBSCRIBE") || request.is("SUNSUBSCRIBE") {
            return Some(self.subscribe(wire, &request));
        }
        match self.turn(4, |script| &script.steps) {
            Some(Lie::Raw(raw)) => return Some(raw),
            Some(Lie::Half(length)) => {
                let mut half = request.usual();
                half.truncate(length);
                half.extend(HANG_UP);
                return Some(half);
            }
            Some(_) => return Some(Vec::new()),
            None => {}
        }
        if request.is_probe() {
            let [_, channel, message] = request.arguments() else {
                panic!("{:?}", request.words)
            };
            let pushed = push(&["smessage", channel, message], "");
            self.push(channel, &pushed);
            return Some(request.reply(NOW, b"*1\r\n$9\r\npublished\r\n"));
        }
        if request.is("TIME") {
            return Some(b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n".to_vec());
        }
        None
    }

    fn push(&mut self, channel: &str, bytes: &[u8]) {
        let Some(wire) = self.ears.get(channel) else {
            return;
        };
        if let Some(stream) = self.wires.get_mut(wire) {
            // Whoever listened may have gone.
            let _ = stream.write_all(bytes);
        }
    }

    fn subscribe(&mut self, wire: Wire, request: &Request) -> Vec<u8> {
        let (kind, channel) = (request.words[0].to_lowercase(), &request.words[1]);
        let confirmed = push(&[&kind, channel], ":1\r\n");
        let is_enter = kind == "ssubscribe";
        if is_enter {
            self.ears.insert(channel.clone(), wire);
        }
        if channel.contains("~fence") {
            return confirmed;
        }
        self.liar.channel.clone_from(channel);
        match self.turn(2, |script| &script.heard) {
            Heard::Truth => confirmed,
            Heard::And(pushes) => {
                let mut bytes = confirmed;
                bytes.extend(self.liar.pushes("smessage", &pushes));
                bytes
            }
            Heard::Taken => {
                let mut bytes = confirmed;
                bytes.extend(push(&["sunsubscribe", channel], ":0\r\n"));
                bytes
            }
            Heard::Twice => confirmed.repeat(2),
            Heard::Raw(raw) => raw,
            Heard::Silence => Vec::new(),
            Heard::HangUp => HANG_UP.to_vec(),
        }
    }

    fn call(&mut self, (node, _): Wire, request: &Request) -> Vec<u8> {
        if request.letters().contains('E') {
            let pushes = self.turn(3, |script| &script.granted);
            let key = request.keys()[1].clone();
            let channel = format!("{{{key}}}:~grant:");
            let channel = self.ears.keys().find(|it| it.starts_with(&channel));
            if let Some(channel) = channel.cloned() {
                self.liar.channel.clone_from(&channel);
                let bytes = self.liar.pushes("smessage", &pushes);
                self.push(&channel, &bytes);
            }
        }
        match self.turn(1, |script| &script.calls) {
            Called::Said(_) => self.liar.answer(request).expect("it answers every call"),
            Called::Redirect(code, to) => {
                let at = |port: u16| format!("7 127.0.0.1:{port}");
                let to = match to {
                    To::Self_ => at(self.ports[node]),
                    To::Next => at(self.ports[(node + 1) % NODES]),
                    To::Nobody => at(1),
                    To::Elsewhere => {
                        let number = u32::try_from(self.calls).unwrap();
                        let host = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + number);
                        format!("7 {host}:{}", self.ports[node])
                    }
                    To::Text(text) => text,
                };
                format!("-{code} {to}\r\n").into_bytes()
            }
        }
    }

    fn map(&self, map: &Map) -> Vec<u8> {
        let each = SLOTS / NODES as i64;
        let honest = |node: usize| {
            let first = each * node as i64;
            let last = if node + 1 == NODES {
                SLOTS - 1
            } else {
                first + each - 1
            };
            Shard {
                slots: vec![first, last],
                nodes: vec![SaidNode {
                    host: "127.0.0.1".to_owned(),
                    port: Port::Of(node),
                    role: "master",
                    health: "online",
                    lacks: None,
                }],
                is_map: true,
            }
        };
        let truth = || self.shards(&(0..NODES).map(honest).collect::<Vec<_>>());
        match map {
            Map::Truth => truth(),
            Map::Shards(shards) => self.shards(shards),
            Map::Many(many) => {
                let shards: Vec<_> = (0..*many)
                    .map(|slot| {
                        let mut shard = honest(0);
                        shard.slots = vec![slot.into(); 2];
                        shard.nodes[0].port = Port::Exactly(i64::from(slot) + 1);
                        shard.nodes[0].host = "127.0.0.9".to_owned();
                        shard
                    })
                    .collect();
                self.shards(&shards)
            }
            Map::Half(length) => {
                let mut half = truth();
                half.truncate(*length);
                half.extend(HANG_UP);
                half
            }
            Map::Raw(raw) => raw.clone(),
            Map::Silence => Vec::new(),
            Map::HangUp => HANG_UP.to_vec(),
        }
    }

    fn shards(&self, shards: &[Shard]) -> Vec<u8> {
        let mut text = format!("*{}\r\n", shards.len());
        for shard in shards {
            let begin = if shard.is_map { "%2\r\n" } else { "*4\r\n" };
            text += begin;
            text += &word("slots");
            text += &format!("*{}\r\n", shard.slots.len());
            for slot in &shard.slots {
                text += &format!(":{slot}\r\n");
            }
            text += &word("nodes");
            text += &format!("*{}\r\n", shard.nodes.len());
            for node in &shard.nodes {
                let port = match node.port {
                    Port::Of(index) => self.ports[index].into(),
                    Port::Exactly(port) => port,
                };
                let fields = [
                    word("id") + &word("x"),
                    word("port") + &format!(":{port}\r\n"),
                    word("ip") + &word(&node.host),
                    word("endpoint") + &word(&node.host),
                    word("role") + &word(node.role),
                    word("health") + &word(node.health),
                ];
                let fields = fields.iter().enumerate();
                let told = fields.filter(|(index, _)| Some(*index) != node.lacks);
                let told: Vec<_> = told.map(|(_, field)| field.as_str()).collect();
                text += &format!("%{}\r\n{}", told.len(), told.concat());
            }
        }
        text.into_bytes()
    }
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
            tokio::task::yield_now().await;
        }
    };
    timeout(SLACK, standing).await.expect("somebody enters");
    let lease = timeout(SLACK, waiter).await.expect("it is granted");
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
        let within = Duration::from_secs(1);
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
            .response_timeout(Duration::from_millis(200))
            .build();
        let told = locks
            .obtain("k")
            .lease_within(Duration::from_millis(900))
            .await;
        told.unwrap_err().to_string()
    };
    let error = told(seeds(&[])).await;
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
    let error = told(seeds(&[2, 3, 4, 5])).await;
    assert!(error.ends_with("; and 3 more"), "{error}");
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
