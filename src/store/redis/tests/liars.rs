//! A cluster of fakes, which says of itself what it was told to say.

use std::collections::HashMap;
use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::{Arc, Mutex};

use super::fake::{Fake, HANG_UP, Kept, NOW, Request, push};
use super::liar::{Forced, Liar, Lie, Push, Said};
use super::lies::SLACK;

pub(super) const NODES: usize = 3;
const SLOTS: i64 = 16_384;

/// A port that a node is said to have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Port {
    /// That of one of the nodes.
    Of(usize),
    Exactly(i64),
}

#[derive(Clone, Debug)]
pub(super) struct SaidNode {
    pub(super) host: String,
    pub(super) port: Port,
    pub(super) role: &'static str,
    pub(super) health: &'static str,
    /// Which of the fields is not there.
    pub(super) lacks: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Shard {
    pub(super) slots: Vec<i64>,
    pub(super) nodes: Vec<SaidNode>,
    pub(super) is_map: bool,
}

/// What is said of where the slots are.
#[derive(Clone, Debug)]
pub(super) enum Map {
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
pub(super) enum To {
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
pub(super) enum Called {
    Redirect(&'static str, To),
    Said(Said),
}

/// What comes of a wish to be told of grants.
#[derive(Clone, Debug)]
pub(super) enum Heard {
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
pub(super) struct Script {
    pub(super) maps: Vec<Map>,
    pub(super) calls: Vec<Called>,
    pub(super) heard: Vec<Heard>,
    /// What is pushed on the second connection when somebody enters.
    pub(super) granted: Vec<Vec<Push>>,
    pub(super) steps: Vec<Option<Lie>>,
}

/// One end of a connection to a node.
pub(super) type Wire = (usize, usize);

/// All nodes of a cluster.
pub(super) struct Ring {
    script: Script,
    pub(super) liar: Liar,
    ports: Vec<u16>,
    /// How often each kind of thing was asked.
    turns: [usize; 5],
    wires: HashMap<Wire, TcpStream>,
    /// The most of them at a time.
    pub(super) most: usize,
    /// Who listens to a channel.
    pub(super) ears: HashMap<String, Wire>,
    pub(super) calls: usize,
}

pub(super) type Shared = Arc<Mutex<Ring>>;

pub(super) fn start(script: Script, forced: &Forced) -> (Shared, Vec<Fake>) {
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
            let ended = move || {
                ring.lock().unwrap().wires.remove(&wire);
            };
            Some(Kept { stream, ended })
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

    pub(super) fn push(&mut self, channel: &str, bytes: &[u8]) {
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
