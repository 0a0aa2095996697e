//! TCP proxies on loopback. Bytes arrive after a fixed time, in order and without a limit of
//! bandwidth.
//!
//! One thread serves all connections of all proxies with `epoll`, since tokio's timer is too coarse
//! for half a millisecond. As every byte is held back for the same time, what is under way is one queue.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::fd::OwnedFd;

use super::link::{Link, Side, reset};
use crate::clock::{self, Nanos};
use crate::libs::{Outcome, told};

/// So many connections may wait to be accepted: a fleet arrives at once.
const BACKLOG: i32 = 4096;

/// How long a server may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(1);

/// Proxies in front of some servers; they end, and all their connections, when this is dropped.
pub(crate) struct Proxies {
    ports: Vec<u16>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    gates: Vec<Gate>,
    over: AtomicBool,
    /// Ends the wait of the thread.
    wake: OwnedFd,
}

/// One proxy, as both threads see it.
#[derive(Default)]
struct Gate {
    /// When each connection was accepted.
    accepted: Mutex<Vec<Nanos>>,
    open: AtomicUsize,
    is_to_be_cut: AtomicBool,
}

impl Proxies {
    /// One for each of those ports, which delay each way by so much.
    pub(crate) fn to(ports: &[u16], one_way: Duration) -> Outcome<Self> {
        Self::start(ports, one_way).map_err(told("a proxy"))
    }

    fn start(targets: &[u16], one_way: Duration) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let shared = Arc::new(Shared {
            gates: targets.iter().map(|_| Gate::default()).collect(),
            over: AtomicBool::new(false),
            wake,
        });
        let mut listeners = Vec::new();
        for target in targets {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            rustix::net::listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)?;
            listeners.push((listener, *target));
        }
        let ports = listeners.iter().map(|(listener, _)| listener.local_addr());
        let ports = ports
            .map(|address| Ok(address?.port()))
            .collect::<io::Result<Vec<_>>>()?;
        let mut traffic = Traffic::new(Arc::clone(&shared), listeners, one_way)?;
        let thread = std::thread::Builder::new().name("proxies".to_owned());
        let thread = thread.spawn(move || {
            if let Err(error) = traffic.run() {
                eprintln!("the proxies ended: {error}");
            }
        })?;
        Ok(Self {
            ports,
            shared,
            thread: Some(thread),
        })
    }

    pub(crate) fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// `redis://` with the address of one.
    pub(crate) fn url(&self, index: usize) -> String {
        format!("redis://127.0.0.1:{}/", self.ports[index])
    }

    /// When each connection of one was accepted, whether the server behind it was there or not.
    pub(crate) fn accepted(&self, index: usize) -> Vec<Nanos> {
        lock(&self.shared.gates[index].accepted).clone()
    }

    /// How many connections go through one.
    pub(crate) fn open(&self, index: usize) -> usize {
        self.shared.gates[index].open.load(Ordering::Acquire)
    }

    /// Ends all connections of one; new ones are accepted.
    pub(crate) fn cut(&self, index: usize) {
        let gate = &self.shared.gates[index];
        gate.is_to_be_cut.store(true, Ordering::Release);
        self.wake();
    }

    fn wake(&self) {
        // It fails only if it was woken 2^64 times.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Release);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // Its panic was printed.
            let _ = thread.join();
        }
    }
}

/// What has to be done at a side of a link.
struct Due {
    at: Instant,
    link: u64,
    side: Side,
    /// None at the end of the stream.
    bytes: Option<Vec<u8>>,
}

/// The thread's own state.
struct Traffic {
    shared: Arc<Shared>,
    epoll: OwnedFd,
    listeners: Vec<(TcpListener, u16)>,
    one_way: Duration,
    /// By number, with the number of their proxy.
    links: HashMap<u64, (usize, Link)>,
    next: u64,
    under_way: VecDeque<Due>,
    buffer: Vec<u8>,
}

/// An epoll token is twice a number, and one more for the server's side. The wake-up is number 0,
/// listeners follow, then links.
fn token(number: u64, side: Side) -> u64 {
    number * 2 + side as u64
}

impl Traffic {
    fn new(
        shared: Arc<Shared>,
        listeners: Vec<(TcpListener, u16)>,
        one_way: Duration,
    ) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &shared.wake, EventData::new_u64(0), EventFlags::IN)?;
        for (number, (listener, _)) in (1..).zip(&listeners) {
            let data = EventData::new_u64(token(number, Side::Client));
            epoll::add(&epoll, listener, data, EventFlags::IN)?;
        }
        Ok(Self {
            shared,
            epoll,
            next: listeners.len() as u64 + 1,
            listeners,
            one_way,
            links: HashMap::new(),
            under_way: VecDeque::new(),
            buffer: vec![0; 1 << 16],
        })
    }

    fn run(&mut self) -> io::Result<()> {
        let mut events: Vec<Event> = Vec::with_capacity(1024);
        while !self.shared.over.load(Ordering::Acquire) {
            self.deliver();
            let next = self.under_way.front().map(|due| due.at);
            let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = timeout.map(|left| Timespec::try_from(left).expect("it is short"));
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                waited => {
                    waited?;
                }
            }
            for event in &events {
                let (flags, token) = (event.flags, event.data.u64());
                self.handle(token, flags)?;
            }
        }
        Ok(())
    }

    fn handle(&mut self, token: u64, flags: EventFlags) -> io::Result<()> {
        let number = token / 2;
        if number == 0 {
            self.obey()?;
        } else if number <= self.listeners.len() as u64 {
            self.accept(number as usize - 1)?;
        } else {
            let side = if token.is_multiple_of(2) {
                Side::Client
            } else {
                Side::Server
            };
            self.read(number, side);
            if flags.contains(EventFlags::OUT) {
                self.flush(number, side);
            }
        }
        Ok(())
    }

    fn obey(&mut self) -> io::Result<()> {
        rustix::io::read(&self.shared.wake, &mut [0; 8][..])?;
        let shared = Arc::clone(&self.shared);
        for (index, gate) in shared.gates.iter().enumerate() {
            if gate.is_to_be_cut.swap(false, Ordering::AcqRel) {
                let of_it = self.links.iter().filter(|(_, (proxy, _))| *proxy == index);
                let numbers: Vec<u64> = of_it.map(|(number, _)| *number).collect();
                for number in numbers {
                    self.end(number);
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, index: usize) -> io::Result<()> {
        loop {
            let (listener, target) = &self.listeners[index];
            let client = match listener.accept() {
                Ok((client, _)) => client,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The client has gone again.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            };
            let gate = &self.shared.gates[index];
            lock(&gate.accepted).push(clock::now());
            let target = SocketAddr::from((Ipv4Addr::LOCALHOST, *target));
            let Ok(server) = TcpStream::connect_timeout(&target, CONNECT) else {
                reset(client);
                continue;
            };
            let number = self.next;
            self.next += 1;
            let tokens = [Side::Client, Side::Server].map(|side| token(number, side));
            let link = Link::new(&self.epoll, tokens, client, server)?;
            self.links.insert(number, (index, link));
            gate.open.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn read(&mut self, number: u64, side: Side) {
        let Some((_, link)) = self.links.get_mut(&number) else {
            return;
        };
        let bytes = match link.read(side, &mut self.buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Ok(0) | Err(_) => {
                // Else epoll would report the end for as long as it is under way.
                if link.mute(&self.epoll, side).is_err() {
                    return self.end(number);
                }
                None
            }
            Ok(length) => Some(self.buffer[..length].to_vec()),
        };
        self.under_way.push_back(Due {
            at: Instant::now() + self.one_way,
            link: number,
            side: side.other(),
            bytes,
        });
    }

    fn deliver(&mut self) {
        let now = Instant::now();
        while self.under_way.front().is_some_and(|due| due.at <= now) {
            let due = self.under_way.pop_front().expect("it was seen");
            let Some((_, link)) = self.links.get_mut(&due.link) else {
                continue;
            };
            let token = token(due.link, due.side);
            let delivered = due.bytes.is_some_and(|bytes| {
                let written = link.write(&self.epoll, token, due.side, &bytes);
                written.is_ok()
            });
            if !delivered {
                self.end(due.link);
            }
        }
    }

    fn flush(&mut self, number: u64, side: Side) {
        if let Some((_, link)) = self.links.get_mut(&number)
            && link.flush(&self.epoll, token(number, side), side).is_err()
        {
            self.end(number);
        }
    }

    fn end(&mut self, number: u64) {
        if let Some((index, link)) = self.links.remove(&number) {
            self.shared.gates[index].open.fetch_sub(1, Ordering::AcqRel);
            link.reset();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    const ONE_WAY: Duration = Duration::from_millis(20);

    fn pair(proxies: &Proxies, server: &TcpListener) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect((Ipv4Addr::LOCALHOST, proxies.ports()[0])).unwrap();
        let (server, _) = server.accept().unwrap();
        for stream in [&client, &server] {
            stream
                .set_read_timeout(Some(Duration::from_secs(10)))
                .unwrap();
        }
        (client, server)
    }

    fn proxied() -> (Proxies, TcpListener) {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = server.local_addr().unwrap().port();
        (Proxies::to(&[port], ONE_WAY).unwrap(), server)
    }

    #[test]
    fn bytes_arrive_late_whole_and_in_order() {
        let (proxies, server) = proxied();
        let (mut client, mut server) = pair(&proxies, &server);
        // More than sockets have room for.
        let sent: Vec<u8> = (0..5_000_000u32).map(|n| (n % 251) as u8).collect();
        let begin = Instant::now();
        let mut received = vec![0; sent.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| client.write_all(&sent).unwrap());
            server.read_exact(&mut received[..1]).unwrap();
            assert!(begin.elapsed() >= ONE_WAY);
            server.read_exact(&mut received[1..]).unwrap();
        });
        assert!(received == sent);
        server.write_all(b"x").unwrap();
        client.read_exact(&mut received[..1]).unwrap();
        assert!(begin.elapsed() >= 2 * ONE_WAY);
    }

    #[test]
    fn a_cut_ends_both_sides_and_others_may_come() {
        let (proxies, listener) = proxied();
        let (mut client, mut server) = pair(&proxies, &listener);
        client.write_all(b"x").unwrap();
        server.read_exact(&mut [0]).unwrap();
        assert_eq!(proxies.open(0), 1);
        proxies.cut(0);
        for stream in [&mut client, &mut server] {
            assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
        }
        assert_eq!(proxies.open(0), 0);
        pair(&proxies, &listener);
        assert_eq!(proxies.accepted(0).len(), 2);
    }

    #[test]
    fn a_client_of_a_server_that_is_away_is_counted_and_turned_away() {
        let (proxies, server) = proxied();
        drop(server);
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, proxies.ports()[0])).unwrap();
        assert!(!matches!(client.read(&mut [0]), Ok(1..)));
        assert_eq!(proxies.accepted(0).len(), 1);
    }
}
