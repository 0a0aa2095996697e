//! A cluster of fakes that does as one should, but for what its nodes say to whoever asks what replicas have.

use std::collections::{HashMap, HashSet};
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::sleep;

use super::fake::{Fake, Kept, NOW, Request, push};
use super::support::wait_until;
use crate::LockRegistry;
use crate::store::RedisStore;
use crate::store::redis::cluster::slots;

pub(super) const NODES: usize = 3;
const SLOTS: usize = 16_384;

/// What is over then is over in time.
pub(super) const BOUND: Duration = Duration::from_secs(5);
/// So much later nothing is asked for any more: what is sent on for ever is asked for every 20 ms.
const QUIET: Duration = Duration::from_millis(80);

const CONFIRM: &str = include_str!("../replicas/confirm.lua");
static HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(CONFIRM).get_hash().to_owned());

/// What a node says to whoever asks for a lock that replicas are to have.
#[derive(Clone, Copy, Debug)]
pub(super) enum Proof {
    Truth,
    Moved(To),
    Ask(To),
    TryAgain,
    Down,
    Forgotten,
    Silence,
}

use Proof::{Ask, Down, Forgotten, Moved, Silence, Truth, TryAgain};

/// Whom it is sent on to.
#[derive(Clone, Copy, Debug)]
pub(super) enum To {
    Own,
    Next,
    /// Where nobody listens.
    Nobody,
    /// Somebody else each time, who is the same node.
    Elsewhere,
}

use To::{Elsewhere, Next, Nobody, Own};

/// One end of a connection to a node.
type Wire = (usize, usize);

/// Who was asked for a lock, by how many nodes it is from the one that has it, and whether that was after ASKING.
pub(super) type Asked = (usize, bool);

/// What all nodes of a cluster know.
#[derive(Default)]
pub(super) struct Ring {
    ports: Vec<u16>,
    /// From the first call on nobody says where the slots are.
    pub(super) hides: bool,
    /// Who has which lock.
    pub(super) locks: HashMap<String, String>,
    pub(super) given_back: Vec<(String, String)>,
    /// Who stands for it.
    standing: HashMap<String, String>,
    /// What is said of a lock, over and over; nothing: the truth.
    pub(super) proofs: HashMap<String, Vec<Proof>>,
    asked: HashMap<String, Vec<Asked>>,
    has_asking: HashSet<Wire>,
    /// How often somebody was sent elsewhere.
    elsewhere: u32,
    draw: u64,
    /// What a node answers to WAIT; nothing: that two replicas have it all.
    pub(super) waits: HashMap<usize, &'static str>,
    /// Who was told to.
    pub(super) told_to_wait: HashSet<usize>,
    wires: HashMap<Wire, TcpStream>,
    /// Those of whoever was sent elsewhere.
    strangers: HashSet<Wire>,
    pub(super) most_strangers: usize,
    pub(super) all_strangers: usize,
    /// Who listens at which node to which channel.
    ears: HashMap<(usize, String), Wire>,
    /// How many nodes further each slot is than where it began.
    shift: usize,
    /// How many more they are said to be.
    pub(super) lie: usize,
    /// The last node has no slot.
    pub(super) has_spare: bool,
    /// Who lets nobody connect.
    pub(super) refuses: Option<usize>,
    /// Who was asked whether what is published there arrives.
    pub(super) probed: HashSet<usize>,
    /// Who is slow to tell its time, which is the last that is asked of a node without slots before it is used.
    pub(super) ponders: Option<usize>,
    /// What is to be answered later.
    unanswered: Vec<(Wire, Request)>,
    /// How many calls came to a node that does not have the slot.
    pub(super) astray: usize,
    /// Who is slow to hear who wants to be told of grants, and what it has yet to hear.
    pub(super) slow: Option<usize>,
    unheard: Vec<(Wire, Vec<String>)>,
    /// Says that all is well to whoever wants to be told of grants, and does nothing; once.
    pub(super) shrugs: bool,
    /// Who sends the calls about locks.
    callers: HashSet<Wire>,
}

pub(super) struct Cluster {
    ring: Arc<Mutex<Ring>>,
    fakes: Vec<Fake>,
}

impl Cluster {
    pub(super) fn start() -> Self {
        let ring = Arc::new(Mutex::new(Ring::default()));
        let node = |node| {
            let (keeper, answerer) = (ring.clone(), ring.clone());
            let dress = move |stream: TcpStream, connection| {
                let wire = (node, connection);
                let is_stranger = stream.local_addr().ok()?.ip() != Ipv4Addr::LOCALHOST;
                let mut ring = keeper.lock().unwrap();
                if ring.refuses == Some(node) {
                    return None;
                }
                ring.wires.insert(wire, stream.try_clone().ok()?);
                if is_stranger {
                    ring.strangers.insert(wire);
                    ring.most_strangers = ring.most_strangers.max(ring.strangers.len());
                    ring.all_strangers += 1;
                }
                let ring = keeper.clone();
                let ended = move || {
                    let mut ring = ring.lock().unwrap_or_else(PoisonError::into_inner);
                    ring.wires.remove(&wire);
                    ring.strangers.remove(&wire);
                    ring.ears.retain(|_, ear| *ear != wire);
                };
                Some(Kept { stream, ended })
            };
            Fake::start_over(dress, move |request| {
                answerer.lock().unwrap().answer(node, request)
            })
        };
        let fakes: Vec<_> = (0..NODES).map(node).collect();
        let cluster = Self { ring, fakes };
        cluster.ring().ports = cluster.ports();
        cluster
    }

    pub(super) fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap()
    }

    pub(super) fn url(&self) -> String {
        let ports = self.ports();
        let hosts: Vec<_> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        format!("redis+cluster://{}/", hosts.join(","))
    }

    pub(super) fn locks(&self, within: Duration, response_timeout: Duration) -> LockRegistry {
        let store = RedisStore::builder(self.url()).min_replicas(1, within);
        LockRegistry::builder(store.connect_lazy().unwrap())
            .response_timeout(response_timeout)
            .build()
    }

    /// One that wants no replicas.
    pub(super) fn registry(&self) -> LockRegistry {
        self.registry_within(4 * BOUND)
    }

    pub(super) fn registry_within(&self, response_timeout: Duration) -> LockRegistry {
        let store = RedisStore::connect_lazy(self.url()).unwrap();
        LockRegistry::builder(store)
            .response_timeout(response_timeout)
            .build()
    }

    pub(super) fn ports(&self) -> Vec<u16> {
        self.fakes.iter().map(Fake::port).collect()
    }

    pub(super) fn lies(&self, key: &str, proofs: &[Proof]) {
        let lock = format!("lock:{key}");
        self.ring().proofs.insert(lock, proofs.to_vec());
    }

    pub(super) fn asked(&self, key: &str) -> Vec<Asked> {
        let asked = self.ring().asked.get(&format!("lock:{key}")).cloned();
        asked.unwrap_or_default()
    }

    pub(super) fn is_held(&self, key: &str) -> bool {
        self.ring().locks.contains_key(&format!("lock:{key}"))
    }

    /// How often it was given back by whoever had it.
    pub(super) fn given_back(&self, key: &str) -> usize {
        let ring = self.ring();
        let locks = ring.given_back.iter().map(|(lock, _)| lock);
        locks.filter(|lock| **lock == format!("lock:{key}")).count()
    }

    /// Nothing is held, or asked for, any more.
    pub(super) async fn is_quiet(&self, locks: &LockRegistry) {
        wait_until("nothing is in use", BOUND, || locks.in_use() == 0).await;
        assert_eq!(self.ring().locks, HashMap::new());
        let asked = self.ring().asked.clone();
        sleep(QUIET).await;
        assert_eq!(self.ring().asked, asked, "asked for after it was over");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.fakes.iter().for_each(Fake::stop);
    }
}

fn word(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

impl Ring {
    fn answer(&mut self, node: usize, request: &Request) -> Option<Vec<u8>> {
        let wire = (node, request.connection);
        if request.is("CLUSTER") {
            if self.hides && !self.callers.is_empty() {
                self.unanswered.push((wire, request.clone()));
                return Some(Vec::new());
            }
            return Some(self.shards().into_bytes());
        }
        if request.is("TIME") {
            if self.ponders == Some(node) {
                self.unanswered.push((wire, request.clone()));
                return Some(Vec::new());
            }
            let (seconds, micros) = (NOW / 1_000_000, NOW % 1_000_000);
            let time = [seconds, micros].map(|part| word(&part.to_string()));
            return Some(format!("*2\r\n{}", time.concat()).into_bytes());
        }
        if request.is("ASKING") {
            self.has_asking.insert(wire);
            return None;
        }
        let asked = self.has_asking.remove(&wire);
        if (request.is("EVAL") || request.is("EVALSHA"))
            && (request.words[1] == CONFIRM || request.words[1] == *HASH)
        {
            return Some(self.prove(node, asked, request));
        }
        if request.is("WAIT") {
            self.told_to_wait.insert(node);
            let answer = self.waits.get(&node).copied();
            return Some(answer.unwrap_or(":2\r\n").into());
        }
        if request.is("SSUBSCRIBE") || request.is("SUNSUBSCRIBE") {
            if std::mem::take(&mut self.shrugs) {
                return None;
            }
            if self.slow == Some(node) {
                self.unheard.push((wire, request.words.clone()));
                return Some(Vec::new());
            }
            return Some(self.listen(wire, &request.words));
        }
        if request.is_probe() {
            let [_, channel, message] = request.arguments() else {
                panic!("{:?}", request.words)
            };
            self.push(node, channel, message);
            self.probed.insert(node);
            return Some(request.reply(NOW, b"*1\r\n$9\r\npublished\r\n"));
        }
        if request.is_call() {
            self.callers.insert(wire);
            let lock = request.keys().last().expect("a call is about a lock");
            let home = self.home(lock);
            if home != node {
                self.astray += 1;
                let (slot, port) = (slots::slot(lock), self.ports[home]);
                return Some(format!("-MOVED {slot} 127.0.0.1:{port}\r\n").into_bytes());
            }
            return Some(self.call(request));
        }
        None
    }

    /// It is all there, and each has as much of it.
    fn shards(&self) -> String {
        let sharers = self.sharers();
        let mut text = format!("*{sharers}\r\n");
        for node in 0..sharers {
            let port = self.ports[(node + self.shift + self.lie) % NODES];
            let first = (SLOTS * node).div_ceil(sharers);
            let last = (SLOTS * (node + 1)).div_ceil(sharers) - 1;
            text += &format!(
                "%2\r\n{}*2\r\n:{first}\r\n:{last}\r\n{}*1\r\n%4\r\n",
                word("slots"),
                word("nodes")
            );
            text += &format!("{}:{port}\r\n", word("port"));
            for (name, value) in [
                ("endpoint", "127.0.0.1"),
                ("role", "master"),
                ("health", "online"),
            ] {
                text += &(word(name) + &word(value));
            }
        }
        text
    }

    /// Who has the slot of a lock.
    fn home(&self, lock: &str) -> usize {
        let owner = usize::from(slots::slot(lock)) * self.sharers() / SLOTS;
        (owner + self.shift) % NODES
    }

    /// How many nodes have slots.
    fn sharers(&self) -> usize {
        NODES - usize::from(self.has_spare)
    }

    pub(super) fn home_of(&self, key: &str) -> usize {
        self.home(&format!("lock:{key}"))
    }

    fn listen(&mut self, wire: Wire, words: &[String]) -> Vec<u8> {
        let (kind, channel) = (words[0].to_lowercase(), &words[1]);
        let ear = (wire.0, channel.clone());
        if kind == "ssubscribe" {
            self.ears.insert(ear, wire);
        } else {
            self.ears.remove(&ear);
        }
        push(&[&kind, channel], ":1\r\n")
    }

    /// Whoever was slow is so no more.
    pub(super) fn catch_up(&mut self) {
        self.slow = None;
        let mut answers: HashMap<Wire, Vec<u8>> = HashMap::new();
        for (wire, words) in std::mem::take(&mut self.unheard) {
            let answer = self.listen(wire, &words);
            answers.entry(wire).or_default().extend(answer);
        }
        for (wire, bytes) in answers {
            (&self.wires[&wire]).write_all(&bytes).unwrap();
        }
    }

    /// All say where the slots are, also to those who have asked.
    pub(super) fn shows(&mut self) {
        self.hides = false;
        self.answer_all(true);
    }

    /// Whoever pondered answers.
    pub(super) fn ponders_no_more(&mut self) {
        self.ponders = None;
        self.answer_all(false);
    }

    fn answer_all(&mut self, maps: bool) {
        let asked = self
            .unanswered
            .extract_if(.., |(_, request)| request.is("CLUSTER") == maps);
        for (wire, request) in asked.collect::<Vec<_>>() {
            let answer = self.answer(wire.0, &request).expect("it was asked for");
            // Whoever asked may have gone.
            if let Some(mut stream) = self.wires.get(&wire) {
                let _ = stream.write_all(&answer);
            }
        }
    }

    /// Somebody waits for who ponders, and for who hides.
    pub(super) fn keeps_waiting(&self) -> bool {
        let asked = &self.unanswered;
        let waits_for = |word| asked.iter().any(|(_, request)| request.is(word));
        ["TIME", "CLUSTER"].into_iter().all(waits_for)
    }

    /// What a slow node was told, and has yet to hear.
    pub(super) fn unheard(&self) -> Vec<&str> {
        let all = self.unheard.iter();
        all.map(|(_, words)| &*words[0]).collect()
    }

    /// Every slot goes to another node, and who listened at the one that had it is told so.
    pub(super) fn move_slots(&mut self, shift: usize) {
        self.shift = shift;
        for ((_, channel), wire) in std::mem::take(&mut self.ears) {
            let bytes = push(&["sunsubscribe", &channel], ":0\r\n");
            (&self.wires[&wire]).write_all(&bytes).unwrap();
        }
    }

    /// All nodes at which somebody listens for a key.
    pub(super) fn ears(&self, key: &str) -> Vec<usize> {
        let channel = format!("{{lock:{key}}}:~grant:");
        let ears = self.ears.keys();
        let ears = ears.filter(|(_, of)| of.starts_with(&channel));
        let mut ears: Vec<_> = ears.map(|(node, _)| *node).collect();
        ears.sort_unstable();
        ears
    }

    pub(super) fn is_waited_for(&self, key: &str) -> bool {
        self.standing.contains_key(&format!("lock:{key}"))
    }

    fn prove(&mut self, node: usize, has_asked: bool, request: &Request) -> Vec<u8> {
        let first = &request.keys()[0];
        let from = (node + NODES - self.home(first)) % NODES;
        let turn = self.asked.get(first).map_or(0, Vec::len);
        let proofs = self.proofs.get(first);
        let proof = proofs.map_or(Truth, |proofs| proofs[turn % proofs.len()]);
        for lock in request.keys() {
            let asked = self.asked.entry(lock.clone()).or_default();
            asked.push((from, has_asked));
        }
        let slot = slots::slot(first);
        let said = match proof {
            Truth => {
                let locks = request.keys().iter().zip(request.arguments());
                let ours = locks.map(|(lock, owner)| self.locks.get(lock) == Some(owner));
                let ours: Vec<_> = ours.map(|it| format!(":{}\r\n", u8::from(it))).collect();
                return format!("*{}\r\n{}", ours.len(), ours.concat()).into_bytes();
            }
            Moved(to) => format!("MOVED {slot} {}", self.target(node, to)),
            Ask(to) => format!("ASK {slot} {}", self.target(node, to)),
            TryAgain => "TRYAGAIN Multiple keys request during rehashing of slot".to_owned(),
            Down => "CLUSTERDOWN The cluster is down".to_owned(),
            Forgotten => "NOSCRIPT No matching script".to_owned(),
            Silence => return Vec::new(),
        };
        format!("-{said}\r\n").into_bytes()
    }

    fn target(&mut self, node: usize, to: To) -> String {
        match to {
            Own => format!("127.0.0.1:{}", self.ports[node]),
            Next => format!("127.0.0.1:{}", self.ports[(node + 1) % NODES]),
            Nobody => "127.0.0.1:1".to_owned(),
            Elsewhere => {
                self.elsewhere += 1;
                let host = Ipv4Addr::from(u32::from(Ipv4Addr::LOCALHOST) + self.elsewhere);
                format!("{host}:{}", self.ports[node])
            }
        }
    }

    /// Each registry renews what it has, or may have, whenever it has connected.
    fn renew(&self, request: &Request) -> Vec<u8> {
        let (locks, words) = (request.keys(), request.arguments());
        let mut reply = format!("*{}\r\n:{}\r\n:{NOW}\r\n", 2 + locks.len(), words[0]);
        for (lock, owner_and_ttl) in locks.iter().zip(words[1..].chunks(2)) {
            let is_ours = self.locks.get(lock) == Some(&owner_and_ttl[0]);
            reply += &format!("*1\r\n{}", word(if is_ours { "renewed" } else { "lost" }));
        }
        reply.into_bytes()
    }

    fn call(&mut self, request: &Request) -> Vec<u8> {
        if !request.keys()[0].starts_with("lock:~fence") {
            return self.renew(request);
        }
        let letters = request.letters();
        let mut reply = format!("*{}\r\n:{}\r\n", 2 + letters.len(), request.number());
        reply += &format!(":{NOW}\r\n");
        for (index, letter) in letters.chars().enumerate() {
            let (lock, owner) = (&request.keys()[1 + index], &request.arguments()[1 + index]);
            let holder = self.locks.get(lock);
            match letter {
                'A' | 'E' if holder.is_none_or(|holder| holder == owner) => {
                    self.locks.insert(lock.clone(), owner.clone());
                    if self.standing.get(lock) == Some(owner) {
                        self.standing.remove(lock);
                    }
                    self.draw += 1;
                    reply += &format!("*2\r\n{}:{}\r\n", word("won"), self.draw);
                }
                'A' | 'E' => {
                    // Who only looks is told of nothing.
                    if letter == 'E' {
                        self.standing.insert(lock.clone(), owner.clone());
                    }
                    reply += &format!("*3\r\n{}:20000\r\n:7\r\n", word("busy"));
                }
                'R' | 'W' => {
                    let held = holder == Some(owner);
                    if held {
                        self.locks.remove(lock);
                        self.given_back.push((lock.clone(), owner.clone()));
                        self.grant(&lock["lock:".len()..]);
                    } else if self.standing.get(lock) == Some(owner) {
                        self.standing.remove(lock);
                    }
                    reply += &format!("*2\r\n{}:{}\r\n", word("gone"), u8::from(held));
                }
                other => panic!("{other} of {:?}", request.words),
            }
        }
        reply.into_bytes()
    }

    fn push(&mut self, node: usize, channel: &str, message: &str) {
        if let Some(wire) = self.ears.get(&(node, channel.to_owned()))
            && let Some(stream) = self.wires.get_mut(wire)
        {
            // Whoever listened may have gone.
            let _ = stream.write_all(&push(&["smessage", channel, message], ""));
        }
    }

    /// Ends the connections to a node on which locks are asked for, or grants heard.
    pub(super) fn hang_up_at(&mut self, node: usize) {
        for ((of, _), stream) in &self.wires {
            if *of == node {
                stream.shutdown(Shutdown::Both).unwrap();
            }
        }
    }

    /// The connections on which a node was ever called.
    pub(super) fn callers_of(&self, node: usize) -> usize {
        let callers = self.callers.iter();
        callers.filter(|(of, _)| *of == node).count()
    }

    /// Ends the connections on which locks are asked for.
    pub(super) fn hang_up(&mut self) {
        for wire in std::mem::take(&mut self.callers) {
            self.wires[&wire].shutdown(Shutdown::Both).unwrap();
        }
    }

    /// Gives it to whoever stands for it, if somebody does.
    pub(super) fn grant(&mut self, key: &str) -> bool {
        let lock = format!("lock:{key}");
        let Some(owner) = self.standing.remove(&lock) else {
            return false;
        };
        let (home, channel) = (self.home(&lock), format!("{{{lock}}}:~grant:"));
        let mut ears = self.ears.keys();
        let ear = ears.find(|(node, it)| *node == home && it.starts_with(&channel));
        let channel = ear.expect("it listens before it stands").1.clone();
        self.push(
            home,
            &channel,
            &format!("1 {owner} 30000 77 {} {key}", NOW + 1),
        );
        self.locks.insert(lock, owner);
        true
    }
}
