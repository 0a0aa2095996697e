//! A TCP proxy before a server, to break the connection with.
//!
//! It runs on a thread and a runtime of its own, so a busy test does not hold it up and paused time does not hurry it.
//! Every switch has taken effect when its method returns: no byte moves by the old rule from then on.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::RedisServer;
use super::ports::Port;
use super::redirect::Redirect;

/// Which of the two directions a switch is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    ToServer,
    ToClient,
    Both,
}

/// A proxy on 127.0.0.1; its connections end when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: Port,
    orders: Option<mpsc::UnboundedSender<Order>>,
    counts: Arc<Counts>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    pub fn to(server: &RedisServer) -> Self {
        Self::to_port(server.port())
    }

    /// To any port on 127.0.0.1.
    pub fn to_port(target: u16) -> Self {
        let (port, listener) = loop {
            let port = Port::pick();
            // Another process may have taken it since.
            if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port.number())) {
                break (port, listener);
            }
        };
        let counts = Arc::<Counts>::default();
        let (orders, inbox) = mpsc::unbounded_channel();
        let shunt = Shunt {
            port: port.number(),
            rules: watch::Sender::new(Rules::new(target)),
            counts: Arc::clone(&counts),
            connections: JoinSet::new(),
        };
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(shunt.run(listener, inbox));
        });
        Self {
            port,
            orders: Some(orders),
            counts,
            thread: Some(thread),
        }
    }

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// `redis://127.0.0.1:port/`
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port())
    }

    /// `redis://user:password@127.0.0.1:port/db`, with nothing escaped; an empty user is the default user.
    pub fn url_with(&self, user: &str, password: &str, db: u32) -> String {
        format!("redis://{user}:{password}@127.0.0.1:{}/{db}", self.port())
    }

    /// Closes every connection on both sides, with what was on its way in them. New ones are accepted as before.
    pub fn cut(&self) {
        self.order(Change::Cut);
    }

    /// New connections are refused from now on, as by a host where nobody listens. Those that stand are left alone.
    pub fn refuse(&self) {
        self.order(Change::Listen(false));
    }

    /// The end of [`Proxy::refuse`].
    pub fn accept(&self) {
        self.order(Change::Listen(true));
    }

    /// In each connection whose client sends this word, the bytes that hold it and all that the client sends after them
    /// vanish, as if it had come no further. Its end is passed on. An empty word lifts that for connections yet to come.
    pub fn lose_from(&self, word: &'static [u8]) {
        self.order(Change::Rules(Box::new(move |rules| rules.word = word)));
    }

    /// In how many connections that word was sent so far.
    pub fn words(&self) -> u64 {
        self.counts.words.load(Ordering::SeqCst)
    }

    /// What the client of a connection sends counts in [`Proxy::bytes`] from this word on; all of it, if the word is empty.
    pub fn count_from(&self, word: &'static [u8]) {
        self.order(Change::Rules(Box::new(move |rules| rules.counted = word)));
    }

    /// While on, bytes and ends of that way vanish, in standing and in new connections, which are accepted and connected
    /// to the server all the same. What vanished is never made up for, so lift it only for connections yet to come.
    pub fn blackhole(&self, way: Way, on: bool) {
        self.rule(way, move |rule| rule.swallow = on);
    }

    /// Bytes and ends of standing connections on which somebody has subscribed to something vanish from now on, both
    /// ways. All others, and those to come, are left alone.
    pub fn lose_subscribers(&self) {
        let before = self.accepted();
        self.order(Change::Rules(Box::new(move |rules| rules.lost = before)));
    }

    /// While on, bytes and ends of that way are kept back; they go on in order when it is lifted, as after a network's
    /// own retransmission, and also when their sender has closed its connection meanwhile.
    pub fn hold(&self, way: Way, on: bool) {
        self.rule(way, move |rule| rule.hold = on);
    }

    /// What is read from now on is passed on that much later, in order, to the millisecond.
    pub fn delay(&self, way: Way, delay: Duration) {
        self.rule(way, move |rule| rule.delay = delay);
    }

    /// Ends that way of every standing connection with a FIN, behind what was read before; the other goes on.
    pub fn half_close(&self, way: Way) {
        self.rule(way, |rule| rule.closings += 1);
    }

    /// Connections from now on go to another server, as after a fail-over. Those that stand are left alone.
    pub fn aim_at(&self, server: &RedisServer) {
        self.aim_at_port(server.port());
    }

    /// The same for any port on 127.0.0.1.
    pub fn aim_at_port(&self, target: u16) {
        self.order(Change::Rules(Box::new(move |rules| rules.target = target)));
    }

    /// Where the server tells its clients where others are (sentinels of a primary, nodes of each other), they are told
    /// the second of a pair of ports for the first: so that they come by a proxy there as well. For connections yet to
    /// come.
    pub fn redirect(&self, ports: Vec<(u16, u16)>) {
        let ports = ports.into();
        self.order(Change::Rules(Box::new(move |rules| rules.ports = ports)));
    }

    /// Connections that stand, even half.
    pub fn connections(&self) -> u64 {
        self.counts.standing.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> u64 {
        self.counts.accepted.load(Ordering::SeqCst)
    }

    /// Bytes passed on to the server and to clients so far.
    pub fn bytes(&self) -> (u64, u64) {
        let [to_server, to_client] = &self.counts.bytes;
        (
            to_server.load(Ordering::SeqCst),
            to_client.load(Ordering::SeqCst),
        )
    }

    fn rule(&self, way: Way, change: impl Fn(&mut Rule) + Send + 'static) {
        self.order(Change::Rules(Box::new(move |rules| {
            for single in [Single::ToServer, Single::ToClient] {
                if single.is_in(way) {
                    change(&mut rules[single]);
                }
            }
        })));
    }

    /// Returns when the change is made. Blocks for a moment, which cannot be a deadlock: the thread is the proxy's own.
    fn order(&self, change: Change) {
        let (done, made) = std::sync::mpsc::channel();
        self.orders
            .as_ref()
            .expect("open until dropped")
            .send(Order { change, done })
            .expect("the proxy's thread lives as long as the proxy");
        made.recv().expect("the proxy's thread does not panic");
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed, and has failed whoever gave the order.
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Order {
    change: Change,
    done: std::sync::mpsc::Sender<()>,
}

enum Change {
    Cut,
    Listen(bool),
    Rules(Box<dyn FnOnce(&mut Rules) + Send>),
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cut => "Cut",
            Self::Listen(true) => "Listen",
            Self::Listen(false) => "Refuse",
            Self::Rules(_) => "Rules",
        })
    }
}

#[derive(Debug, Default)]
struct Counts {
    standing: AtomicU64,
    accepted: AtomicU64,
    words: AtomicU64,
    bytes: [AtomicU64; 2],
}

/// One direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Single {
    ToServer,
    ToClient,
}

impl Single {
    fn is_in(self, way: Way) -> bool {
        match way {
            Way::ToServer => self == Self::ToServer,
            Way::ToClient => self == Self::ToClient,
            Way::Both => true,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Rule {
    swallow: bool,
    hold: bool,
    delay: Duration,
    /// How often this way was closed; a connection is concerned when the number grows after it was made.
    closings: u64,
}

#[derive(Clone, Debug)]
struct Rules {
    target: u16,
    /// What subscribers of the first so many connections say or hear vanishes.
    lost: u64,
    /// From where on the bytes of a client vanish.
    word: &'static [u8],
    /// From where on the bytes of a client count.
    counted: &'static [u8],
    /// What clients are told instead of which port.
    ports: Arc<[(u16, u16)]>,
    ways: [Rule; 2],
}

impl Rules {
    fn new(target: u16) -> Self {
        Self {
            target,
            lost: 0,
            word: b"",
            counted: b"",
            ports: Arc::new([]),
            ways: Default::default(),
        }
    }
}

impl Index<Single> for Rules {
    type Output = Rule;

    fn index(&self, single: Single) -> &Rule {
        &self.ways[single as usize]
    }
}

impl IndexMut<Single> for Rules {
    fn index_mut(&mut self, single: Single) -> &mut Rule {
        &mut self.ways[single as usize]
    }
}

/// The proxy on its own thread.
struct Shunt {
    port: u16,
    rules: watch::Sender<Rules>,
    counts: Arc<Counts>,
    connections: JoinSet<()>,
}

impl Shunt {
    async fn run(mut self, listener: TcpListener, mut inbox: mpsc::UnboundedReceiver<Order>) {
        let mut ear = Some(Ear::new(listener).expect("a listener of ours, and a runtime"));
        loop {
            tokio::select! {
                biased;
                order = inbox.recv() => {
                    let Some(Order { change, done }) = order else { return };
                    // A client that is connected already, though only in the backlog, has a connection that stands.
                    while let Some(client) = ear.as_ref().and_then(Ear::waiting) {
                        self.connect(client);
                    }
                    match change {
                        Change::Cut => self.connections.shutdown().await,
                        Change::Listen(false) => ear = None,
                        Change::Listen(true) => ear = Some(self.listen_again(ear).await),
                        Change::Rules(change) => self.rules.send_modify(change),
                    }
                    // An order's giver that panicked meanwhile wants no answer.
                    let _ = done.send(());
                }
                Some(_) = self.connections.join_next() => {}
                client = next(ear.as_ref()) => self.connect(client),
            }
        }
    }

    async fn listen_again(&self, ear: Option<Ear>) -> Ear {
        if let Some(ear) = ear {
            return ear;
        }
        let begin = Instant::now();
        loop {
            match TcpListener::bind((Ipv4Addr::LOCALHOST, self.port)).and_then(Ear::new) {
                Ok(ear) => return ear,
                Err(error) if begin.elapsed() > super::PATIENCE => {
                    panic!("the proxy cannot have its port {} back: {error}", self.port)
                }
                Err(_) => tokio::time::sleep(super::LOOK_AGAIN).await,
            }
        }
    }

    fn connect(&mut self, client: tokio::net::TcpStream) {
        let rules = self.rules.subscribe();
        // What holds for a connection is fixed here, and not when its task first runs, which may be after another order.
        let target = (Ipv4Addr::LOCALHOST, rules.borrow().target);
        let closings = [Single::ToServer, Single::ToClient].map(|way| rules.borrow()[way].closings);
        let number = self.counts.accepted.fetch_add(1, Ordering::SeqCst);
        let standing = Standing::new(Arc::clone(&self.counts));
        self.connections.spawn(async move {
            // No server: the client sees its connection close.
            let Ok(server) = tokio::net::TcpStream::connect(target).await else {
                return;
            };
            for side in [&client, &server] {
                // Fails only on a connection that is gone, as reading will tell.
                let _ = side.set_nodelay(true);
            }
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            let subscribed = AtomicBool::new(false);
            let pump = |source, sink, way| Pump {
                way,
                number,
                subscribed: &subscribed,
                closings: closings[way as usize],
                rules: rules.clone(),
                counts: &standing.0,
                source,
                sink,
            };
            tokio::join!(
                pump(from_client, to_server, Single::ToServer).run(),
                pump(from_server, to_client, Single::ToClient).run(),
            );
        });
    }
}

/// Counts a connection for as long as its task lives, also if that is cut.
struct Standing(Arc<Counts>);

impl Standing {
    fn new(counts: Arc<Counts>) -> Self {
        counts.standing.fetch_add(1, Ordering::SeqCst);
        Self(counts)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.0.standing.fetch_sub(1, Ordering::SeqCst);
    }
}

/// What was read at once, or nothing for the end, and when it goes on.
struct Chunk {
    bytes: Option<Vec<u8>>,
    due: Option<tokio::time::Instant>,
}

/// One direction of one connection.
struct Pump<'a> {
    way: Single,
    /// How many were accepted before it.
    number: u64,
    /// Whether its client has subscribed to something.
    subscribed: &'a AtomicBool,
    /// How often this way had been closed when the connection was made.
    closings: u64,
    rules: watch::Receiver<Rules>,
    counts: &'a Counts,
    source: OwnedReadHalf,
    sink: OwnedWriteHalf,
}

impl Pump<'_> {
    /// Reading goes on while what was read waits for its time, so that a delay does not narrow the connection.
    async fn run(self) {
        let (chunks, queue) = mpsc::unbounded_channel();
        let rules = self.rules.clone();
        tokio::join!(
            read(self.source, chunks, self.way, self.closings, rules),
            deliver(
                queue,
                self.sink,
                (self.way, self.number),
                self.rules,
                self.counts,
                self.subscribed
            ),
        );
    }
}

async fn read(
    mut source: OwnedReadHalf,
    chunks: mpsc::UnboundedSender<Chunk>,
    way: Single,
    closings: u64,
    mut rules: watch::Receiver<Rules>,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut redirect = (way == Single::ToClient)
        .then(|| Redirect::to(rules.borrow().ports.clone()))
        .flatten();
    loop {
        let read = tokio::select! {
            biased;
            _ = rules.wait_for(|rules| rules[way].closings > closings) => 0,
            // A reset passes on as an end.
            read = source.read(&mut buffer) => read.unwrap_or(0),
        };
        let delay = rules.borrow()[way].delay;
        let bytes = (read > 0).then(|| buffer[..read].to_vec());
        let chunk = Chunk {
            bytes: match (bytes, &mut redirect) {
                (Some(bytes), Some(redirect)) => Some(redirect.apply(&bytes)),
                (bytes, _) => bytes,
            },
            due: (!delay.is_zero()).then(|| tokio::time::Instant::now() + delay),
        };
        // The other end may be gone, which ends this way as well.
        if chunks.send(chunk).is_err() || read == 0 {
            return;
        }
    }
}

async fn deliver(
    mut queue: mpsc::UnboundedReceiver<Chunk>,
    mut sink: OwnedWriteHalf,
    (way, number): (Single, u64),
    mut rules: watch::Receiver<Rules>,
    counts: &Counts,
    subscribed: &AtomicBool,
) {
    let mut is_beyond_the_word = false;
    let mut has_begun_to_count = way == Single::ToClient;
    while let Some(Chunk { bytes, due }) = queue.recv().await {
        if let Some(due) = due {
            tokio::time::sleep_until(due).await;
        }
        if rules.wait_for(|rules| !rules[way].hold).await.is_err() {
            // The proxy is being dropped.
            return;
        }
        let holds = |word: &[u8]| {
            let bytes = bytes.as_deref().unwrap_or_default();
            bytes.windows(word.len()).any(|it| it == word)
        };
        if way == Single::ToServer && holds(b"SUBSCRIBE") {
            subscribed.store(true, Ordering::SeqCst);
        }
        let (word, counted) = (rules.borrow().word, rules.borrow().counted);
        has_begun_to_count |= !counted.is_empty() && holds(counted);
        if way == Single::ToServer && !word.is_empty() && !is_beyond_the_word && holds(word) {
            is_beyond_the_word = true;
            counts.words.fetch_add(1, Ordering::SeqCst);
        }
        let is_lost = number < rules.borrow().lost && subscribed.load(Ordering::SeqCst);
        let swallow = is_lost || rules.borrow()[way].swallow;
        match bytes {
            Some(_) if swallow || is_beyond_the_word => {}
            Some(bytes) => {
                // Counted first: whoever has got an answer finds it counted.
                if counted.is_empty() || has_begun_to_count {
                    counts.bytes[way as usize].fetch_add(bytes.len() as u64, Ordering::SeqCst);
                }
                if sink.write_all(&bytes).await.is_err() {
                    return;
                }
            }
            // Dropping the sink would send the FIN that is to vanish.
            None if swallow => std::future::pending().await,
            None => {
                // Fails only if the other end has closed before.
                let _ = sink.shutdown().await;
                return;
            }
        }
    }
}

/// The listening socket, twice: to be waited on, and to be asked who is in the backlog at this moment, which the
/// runtime's own readiness may tell too late.
struct Ear {
    waking: tokio::net::TcpListener,
    asking: TcpListener,
}

impl Ear {
    fn new(listener: TcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            asking: listener.try_clone()?,
            waking: tokio::net::TcpListener::from_std(listener)?,
        })
    }

    fn waiting(&self) -> Option<tokio::net::TcpStream> {
        let (client, _) = self.asking.accept().ok()?;
        client.set_nonblocking(true).ok()?;
        tokio::net::TcpStream::from_std(client).ok()
    }
}

impl Drop for Ear {
    /// Closing is not enough: a process that was forked just now has the socket too, until it runs its own program.
    fn drop(&mut self) {
        // Fails where a listening socket cannot be shut down, as on macOS.
        let _ = rustix::net::shutdown(&self.asking, rustix::net::Shutdown::Both);
    }
}

async fn next(ear: Option<&Ear>) -> tokio::net::TcpStream {
    let Some(ear) = ear else {
        return std::future::pending().await;
    };
    loop {
        // A client that was gone again before it was accepted is no connection.
        if let Ok((client, _)) = ear.waking.accept().await {
            return client;
        }
    }
}
