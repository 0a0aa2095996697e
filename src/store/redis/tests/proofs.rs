//! A cluster whose nodes send on whoever asks what replicas have: in turns, for ever, and to somebody else each time.
//! Whoever waits for that is told in time, what is not proved is given back, and nothing is asked for after that.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use tokio::time::{sleep, timeout};

use super::fake::{Fake, NOW, Request, push};
use super::support::wait_until;
use crate::LockRegistry;
use crate::store::RedisStore;
use crate::store::redis::cluster::{STRANGERS, slots};

const NODES: usize = 3;
const SLOTS: usize = 16_384;

/// How long the replicas of one that lies have.
const WITHIN: Duration = Duration::from_millis(150);
/// And where they have it all in the end, for as long as a busy machine may take.
const LONG: Duration = Duration::from_secs(20);
/// What is over then is over in time.
const BOUND: Duration = Duration::from_secs(5);
/// So much later nothing is asked for any more: what is sent on for ever is asked for every 20 ms.
const QUIET: Duration = Duration::from_millis(80);

const CONFIRM: &str = include_str!("../replicas/confirm.lua");
static HASH: LazyLock<String> = LazyLock::new(|| redis::Script::new(CONFIRM).get_hash().to_owned());

/// What a node says to whoever asks for a lock that replicas are to have.
#[derive(Clone, Copy, Debug)]
enum Proof {
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
enum To {
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

/// What all nodes of a cluster know.
#[derive(Default)]
struct Ring {
    ports: Vec<u16>,
    /// Who has which lock.
    locks: HashMap<String, String>,
    given_back: Vec<(String, String)>,
    /// Who stands for it.
    standing: HashMap<String, String>,
    /// What is said of a lock, over and over; nothing: the truth.
    proofs: HashMap<String, Vec<Proof>>,
    /// Who was asked for it, by how many nodes it is from the one that has it, and whether that was after ASKING.
    asked: HashMap<String, Vec<(usize, bool)>>,
    has_asking: HashSet<Wire>,
    /// How often somebody was sent elsewhere.
    elsewhere: u32,
    draw: u64,
    wires: HashMap<Wire, TcpStream>,
    /// Those of whoever was sent elsewhere.
    strangers: HashSet<Wire>,
    most_strangers: usize,
    all_strangers: usize,
    /// Who listens to a channel.
    ears: HashMap<String, Wire>,
    /// Who sends the calls about locks.
    callers: HashSet<Wire>,
}

/// A connection that is forgotten when it ends.
struct Kept {
    stream: TcpStream,
    wire: Wire,
    ring: Arc<Mutex<Ring>>,
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
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        ring.wires.remove(&self.wire);
        ring.strangers.remove(&self.wire);
    }
}

struct Cluster {
    ring: Arc<Mutex<Ring>>,
    fakes: Vec<Fake>,
}

impl Cluster {
    fn start() -> Self {
        let ring = Arc::new(Mutex::new(Ring::default()));
        let node = |node| {
            let (keeper, answerer) = (ring.clone(), ring.clone());
            let dress = move |stream: TcpStream, connection| {
                let wire = (node, connection);
                let is_stranger = stream.local_addr().ok()?.ip() != Ipv4Addr::LOCALHOST;
                let mut ring = keeper.lock().unwrap();
                ring.wires.insert(wire, stream.try_clone().ok()?);
                if is_stranger {
                    ring.strangers.insert(wire);
                    ring.most_strangers = ring.most_strangers.max(ring.strangers.len());
                    ring.all_strangers += 1;
                }
                let ring = keeper.clone();
                Some(Kept { stream, wire, ring })
            };
            Fake::start_over(dress, move |request| {
                answerer.lock().unwrap().answer(node, request)
            })
        };
        let fakes: Vec<_> = (0..NODES).map(node).collect();
        ring.lock().unwrap().ports = fakes.iter().map(Fake::port).collect();
        Self { ring, fakes }
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap()
    }

    fn locks(&self, within: Duration, response_timeout: Duration) -> LockRegistry {
        let ports = self.fakes.iter().map(Fake::port);
        let hosts: Vec<_> = ports.map(|port| format!("127.0.0.1:{port}")).collect();
        let url = format!("redis+cluster://{}/", hosts.join(","));
        let store = RedisStore::builder(url).min_replicas(1, within);
        LockRegistry::builder(store.connect_lazy().unwrap())
            .response_timeout(response_timeout)
            .build()
    }

    fn lies(&self, key: &str, proofs: &[Proof]) {
        let lock = format!("lock:{key}");
        self.ring().proofs.insert(lock, proofs.to_vec());
    }

    fn asked(&self, key: &str) -> Vec<(usize, bool)> {
        let asked = self.ring().asked.get(&format!("lock:{key}")).cloned();
        asked.unwrap_or_default()
    }

    fn is_held(&self, key: &str) -> bool {
        self.ring().locks.contains_key(&format!("lock:{key}"))
    }

    /// How often it was given back by whoever had it.
    fn given_back(&self, key: &str) -> usize {
        let ring = self.ring();
        let locks = ring.given_back.iter().map(|(lock, _)| lock);
        locks.filter(|lock| **lock == format!("lock:{key}")).count()
    }

    /// Nothing is held, or asked for, any more.
    async fn is_quiet(&self, locks: &LockRegistry) {
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

fn owner_of(lock: &str) -> usize {
    usize::from(slots::slot(lock)) * NODES / SLOTS
}

impl Ring {
    fn answer(&mut self, node: usize, request: &Request) -> Option<Vec<u8>> {
        let wire = (node, request.connection);
        if request.is("CLUSTER") {
            return Some(self.shards().into_bytes());
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
            return Some(b":2\r\n".to_vec());
        }
        if request.is("SSUBSCRIBE") || request.is("SUNSUBSCRIBE") {
            let (kind, channel) = (request.words[0].to_lowercase(), &request.words[1]);
            self.ears.insert(channel.clone(), wire);
            return Some(push(&[&kind, channel], ":1\r\n"));
        }
        if request.is_probe() {
            let [_, channel, message] = request.arguments() else {
                panic!("{:?}", request.words)
            };
            self.push(channel, message);
            return Some(request.reply(NOW, b"*1\r\n$9\r\npublished\r\n"));
        }
        if request.is_call() {
            self.callers.insert(wire);
            return Some(self.call(request));
        }
        None
    }

    /// It is all there, and each has as much of it.
    fn shards(&self) -> String {
        let mut text = format!("*{NODES}\r\n");
        for (node, port) in self.ports.iter().enumerate() {
            let first = (SLOTS * node).div_ceil(NODES);
            let last = (SLOTS * (node + 1)).div_ceil(NODES) - 1;
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

    fn prove(&mut self, node: usize, has_asked: bool, request: &Request) -> Vec<u8> {
        let first = &request.keys()[0];
        let from = (node + NODES - owner_of(first)) % NODES;
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

    fn call(&mut self, request: &Request) -> Vec<u8> {
        let letters = request.letters();
        let mut reply = format!("*{}\r\n:{}\r\n", 2 + letters.len(), request.number());
        reply += &format!(":{NOW}\r\n");
        for (index, letter) in letters.chars().enumerate() {
            let (lock, owner) = (&request.keys()[1 + index], &request.arguments()[1 + index]);
            let holder = self.locks.get(lock);
            match letter {
                'A' | 'E' if holder.is_none_or(|holder| holder == owner) => {
                    self.locks.insert(lock.clone(), owner.clone());
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
                    }
                    reply += &format!("*2\r\n{}:{}\r\n", word("gone"), u8::from(held));
                }
                other => panic!("{other} of {:?}", request.words),
            }
        }
        reply.into_bytes()
    }

    fn push(&mut self, channel: &str, message: &str) {
        if let Some(wire) = self.ears.get(channel)
            && let Some(stream) = self.wires.get_mut(wire)
        {
            // Whoever listened may have gone.
            let _ = stream.write_all(&push(&["smessage", channel, message], ""));
        }
    }

    /// Gives it to whoever stands for it, if somebody does.
    fn grant(&mut self, key: &str) -> bool {
        let lock = format!("lock:{key}");
        let Some(owner) = self.standing.remove(&lock) else {
            return false;
        };
        let channel = format!("{{{lock}}}:~grant:");
        let channel = self.ears.keys().find(|it| it.starts_with(&channel));
        let channel = channel.expect("it listens before it stands").clone();
        self.push(&channel, &format!("1 {owner} 30000 77 {} {key}", NOW + 1));
        self.locks.insert(lock, owner);
        true
    }
}

/// Sent on, put off and sent back it is proved nevertheless, at each place as that place wants to be asked.
#[tokio::test]
async fn what_is_sent_on_in_turns_is_proved_in_the_end() {
    let cluster = Cluster::start();
    let locks = cluster.locks(LONG, BOUND);
    let cases: [(&[Proof], &[(usize, bool)]); 7] = [
        (
            &[Ask(Next), TryAgain, Moved(Next), Truth],
            &[(0, false), (1, true), (0, false), (1, false)],
        ),
        (
            &[Moved(Next), Moved(Next), Ask(Next), Truth],
            &[(0, false), (1, false), (2, false), (0, true)],
        ),
        (
            &[Down, Forgotten, TryAgain, Ask(Own), Truth],
            &[(0, false), (0, false), (0, false), (0, false), (0, true)],
        ),
        (&[Moved(Nobody), Truth], &[(0, false); 2]),
        (&[Ask(Nobody), Truth], &[(0, false); 2]),
        (&[Ask(Elsewhere), Truth], &[(0, false), (0, true)]),
        // Longer than it is sent on at once.
        (
            &[
                Moved(Next),
                Ask(Next),
                Moved(Next),
                Ask(Next),
                Moved(Next),
                Ask(Next),
                Truth,
            ],
            &[
                (0, false),
                (1, false),
                (2, true),
                (0, false),
                (1, true),
                (2, false),
                (0, true),
            ],
        ),
    ];
    let all = cases
        .iter()
        .zip(0..)
        .map(async |((proofs, expected), number)| {
            let key = format!("k{number}");
            cluster.lies(&key, proofs);
            let lease = timeout(LONG, locks.obtain(&key).lease()).await.unwrap();
            let lease = lease.unwrap_or_else(|error| panic!("{proofs:?}: {error}"));
            assert_eq!(cluster.asked(&key), *expected, "{proofs:?}");
            assert!(cluster.is_held(&key), "{proofs:?}");
            lease.release().await.unwrap();
            assert_eq!(cluster.given_back(&key), 1, "{proofs:?}");
        });
    join_all(all).await;
    cluster.is_quiet(&locks).await;
}

/// Its caller is told in time and why, others have theirs meanwhile, and it is given back once.
#[tokio::test]
async fn what_is_sent_on_for_ever_is_given_back_in_time() {
    let cases: [(&[Proof], &str); 10] = [
        (&[Moved(Next)], "MOVED"),
        (&[Moved(Own)], "MOVED"),
        (&[Moved(Elsewhere)], "MOVED"),
        (&[Moved(Nobody)], ""),
        (&[Ask(Next)], "ASK"),
        (&[Ask(Own)], "ASK"),
        (&[TryAgain], "TRYAGAIN"),
        (&[Down], "CLUSTERDOWN"),
        (&[Forgotten], "NOSCRIPT"),
        (&[Ask(Next), TryAgain, Moved(Next)], ""),
    ];
    let all = cases.map(async |(proofs, reason)| {
        let cluster = Cluster::start();
        let locks = cluster.locks(WITHIN, BOUND);
        // All connections stand.
        let others: Vec<_> = (0..6).map(|number| format!("other{number}")).collect();
        let leases = async || {
            let leases = others.iter().map(|key| locks.obtain(key).lease());
            for lease in join_all(leases).await {
                lease.unwrap().release().await.unwrap();
            }
        };
        timeout(BOUND, leases()).await.unwrap();
        cluster.lies("k", proofs);
        let begun = Instant::now();
        let asks = async {
            let told = locks.obtain("k").lease_once().await;
            (told, begun.elapsed())
        };
        let ((told, passed), ()) = futures::join!(asks, leases());
        let error = told.expect_err("nobody proves it").to_string();
        assert!(error.contains("given back"), "{proofs:?}: {error}");
        assert!(error.contains(reason), "{proofs:?}: {error}");
        assert!(passed >= WITHIN && passed < BOUND, "{proofs:?}: {passed:?}");
        cluster.is_quiet(&locks).await;
        assert_eq!(cluster.given_back("k"), 1, "{proofs:?}");
        // A few times at once, and then every 20 ms.
        let asked = cluster.asked("k").len();
        assert!((2..=14).contains(&asked), "{proofs:?}: asked {asked} times");
    });
    join_all(all).await;
}

/// A node that has gone mute: nobody waits for it alone, and what was asked of it is given back.
#[tokio::test]
async fn what_nobody_answers_is_given_back() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, Duration::from_millis(300));
    let warm = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    warm.unwrap().release().await.unwrap();
    cluster.lies("k", &[Silence]);
    let told = timeout(BOUND, locks.obtain("k").lease_once()).await;
    assert!(told.unwrap().is_err());
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 2);
    cluster.lies("k", &[Truth]);
    let lease = timeout(BOUND, locks.obtain("k").lease()).await.unwrap();
    lease.unwrap().release().await.unwrap();
}

/// Each names another that nobody has heard of, with each answer: they are not all connected to, and those that no map
/// names are forgotten, and make room for others.
#[tokio::test]
async fn no_more_strangers_are_asked_for_proofs_than_a_few() {
    const MANY: usize = 200;
    let all = [Moved(Elsewhere), Ask(Elsewhere)].map(async |proof| {
        let cluster = Cluster::start();
        let locks = cluster.locks(2 * WITHIN, BOUND);
        let keys: Vec<_> = (0..MANY).map(|number| number.to_string()).collect();
        keys.iter().for_each(|key| cluster.lies(key, &[proof]));
        // On a busy machine they may have no time to make room.
        for round in 1..20 {
            let told = keys.iter().map(|key| locks.obtain(key).lease_once());
            for told in timeout(BOUND, join_all(told)).await.unwrap() {
                assert!(told.is_err(), "{proof:?}: {told:?}");
            }
            cluster.is_quiet(&locks).await;
            let ring = cluster.ring();
            assert_eq!(ring.given_back.len(), round * MANY);
            if ring.all_strangers > 2 * STRANGERS {
                break;
            }
        }
        let ring = cluster.ring();
        let (most, all) = (ring.most_strangers, ring.all_strangers);
        assert!(all > 2 * STRANGERS, "{proof:?}: {all} connections in all");
        // Those that end just now are counted with those that are made for the next.
        assert!(most <= 3 * STRANGERS, "{proof:?}: {most} at once");
    });
    join_all(all).await;
}

/// A turn that was granted is proved like any other: in vain it goes to whoever is next.
#[tokio::test]
async fn a_grant_that_is_sent_on_for_ever_is_given_back() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    let held = (String::from("lock:k"), String::from("other:1"));
    cluster.ring().locks.extend([held]);
    cluster.lies("k", &[Ask(Next), TryAgain, Moved(Next)]);
    let waiter = tokio::spawn(locks.obtain("k").wait(4 * WITHIN).lease());
    wait_until("it is granted", BOUND, || cluster.ring().grant("k")).await;
    wait_until("it is given back", BOUND, || cluster.given_back("k") > 0).await;
    let told = timeout(BOUND, waiter).await.expect("it ends").unwrap();
    let error = told.expect_err("nobody proves it").to_string();
    assert!(error.contains("given back"), "{error}");
    cluster.is_quiet(&locks).await;
}

/// What goes with the connection by which it was won is not asked for any more, and proved anew by the next.
#[tokio::test]
async fn what_is_sent_on_while_the_connection_breaks_is_proved_by_the_next() {
    let cluster = Cluster::start();
    let locks = cluster.locks(LONG, BOUND);
    cluster.lies("k", &[Moved(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || cluster.asked("k").len() > 4).await;
    {
        let mut ring = cluster.ring();
        ring.proofs.clear();
        let callers = std::mem::take(&mut ring.callers);
        for wire in callers {
            ring.wires[&wire].shutdown(Shutdown::Both).unwrap();
        }
    }
    let lease = timeout(BOUND, asking).await.expect("it ends").unwrap();
    lease.unwrap().release().await.unwrap();
    assert_eq!(cluster.given_back("k"), 1);
    cluster.is_quiet(&locks).await;
}

#[tokio::test]
async fn whoever_goes_while_it_is_sent_on_leaves_nothing() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    cluster.lies("k", &[Ask(Next), Moved(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || !cluster.asked("k").is_empty()).await;
    asking.abort();
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 1);
}

#[tokio::test]
async fn a_shutdown_ends_what_is_sent_on_for_ever() {
    let cluster = Cluster::start();
    let locks = cluster.locks(WITHIN, BOUND);
    cluster.lies("k", &[Moved(Next), Ask(Next)]);
    let asking = tokio::spawn(locks.obtain("k").lease());
    wait_until("it is sent on", BOUND, || !cluster.asked("k").is_empty()).await;
    timeout(BOUND, locks.shutdown()).await.expect("it ends");
    assert!(asking.await.unwrap().is_err());
    cluster.is_quiet(&locks).await;
    assert_eq!(cluster.given_back("k"), 1);
}
