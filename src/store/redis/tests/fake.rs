//! A server that says what no real one says on demand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// What the server's time is, until a test says otherwise.
pub(super) const NOW: u64 = 1_700_000_000_000_000;

/// At the end of an answer: it is not sent, and the connection is closed.
pub(super) const HANG_UP: &[u8] = b"\0hang up\0";

/// Bytes to answer a command with; `None`: as a server would.
type Answers = dyn FnMut(&Request) -> Option<Vec<u8>> + Send;

/// A command, and the number of the connection that it came on, from 1.
#[derive(Clone)]
pub(super) struct Request {
    pub(super) connection: usize,
    pub(super) words: Vec<String>,
}

/// Listens until it is stopped, or the test's process ends; its threads do nothing meanwhile.
pub(super) struct Fake {
    address: SocketAddr,
    #[cfg(feature = "cluster")]
    stop: Arc<AtomicBool>,
}

impl Fake {
    pub(super) fn start(answers: impl FnMut(&Request) -> Option<Vec<u8>> + Send + 'static) -> Self {
        Self::start_over(|stream, _| Some(stream), answers)
    }

    /// `dress`: what becomes of each connection, by its number, before anything is said on it.
    pub(super) fn start_over<S: Read + Write + 'static>(
        dress: impl Fn(TcpStream, usize) -> Option<S> + Send + Sync + 'static,
        answers: impl FnMut(&Request) -> Option<Vec<u8>> + Send + 'static,
    ) -> Self {
        // At every address that begins with 127, for those who are sent from one to the other.
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let answers: Arc<Mutex<Answers>> = Arc::new(Mutex::new(answers));
        let dress = Arc::new(dress);
        let stop = Arc::new(AtomicBool::new(false));
        let has_stopped = stop.clone();
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let (stream, answers, dress) = (stream.unwrap(), answers.clone(), dress.clone());
                if has_stopped.load(Ordering::Relaxed) {
                    return;
                }
                if !stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) {
                    continue;
                }
                // Else what is pushed could wait for what was said before it to be acknowledged.
                let _ = stream.set_nodelay(true);
                // Ends when the client hangs up.
                std::thread::spawn(move || {
                    let connection = index + 1;
                    serve(dress(stream, connection)?, connection, &answers)
                });
            }
        });
        Self {
            address,
            #[cfg(feature = "cluster")]
            stop,
        }
    }

    pub(super) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Lets nobody connect any more: for those who start many.
    #[cfg(feature = "cluster")]
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes it.
        let _ = TcpStream::connect(self.address);
    }

    #[cfg(feature = "cluster")]
    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }
}

/// A connection, and what is to be done when it has ended.
#[cfg(feature = "cluster")]
pub(super) struct Kept<F: FnMut()> {
    pub(super) stream: TcpStream,
    pub(super) ended: F,
}

#[cfg(feature = "cluster")]
impl<F: FnMut()> Read for Kept<F> {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.stream.read(bytes)
    }
}

#[cfg(feature = "cluster")]
impl<F: FnMut()> Write for Kept<F> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(feature = "cluster")]
impl<F: FnMut()> Drop for Kept<F> {
    fn drop(&mut self) {
        (self.ended)();
    }
}

fn serve(stream: impl Read + Write, connection: usize, answers: &Mutex<Answers>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    loop {
        let request = Request {
            connection,
            words: read_command(&mut reader)?,
        };
        let answer = (*answers.lock().unwrap())(&request);
        let answer = answer.unwrap_or_else(|| request.usual());
        let stream = reader.get_mut();
        if let Some(answer) = answer.strip_suffix(HANG_UP) {
            stream.write_all(answer).ok()?;
            return None;
        }
        stream.write_all(&answer).ok()?;
        stream.flush().ok()?;
    }
}

fn read_command(reader: &mut impl BufRead) -> Option<Vec<String>> {
    let count = read_length(reader, '*')?;
    (0..count).map(|_| read_word(reader)).collect()
}

fn read_word(reader: &mut impl BufRead) -> Option<String> {
    let length = read_length(reader, '$')?;
    let mut word = vec![0; length + 2];
    reader.read_exact(&mut word).ok()?;
    word.truncate(length);
    String::from_utf8(word).ok()
}

fn read_length(reader: &mut impl BufRead, mark: char) -> Option<usize> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    line.trim_end().strip_prefix(mark)?.parse().ok()
}

impl Request {
    pub(super) fn is(&self, name: &str) -> bool {
        self.words[0].eq_ignore_ascii_case(name)
    }

    pub(super) fn is_probe(&self) -> bool {
        self.is("EVALSHA")
            && self
                .words
                .last()
                .is_some_and(|word| word.starts_with("probe "))
    }

    /// A script call that is about locks.
    pub(super) fn is_call(&self) -> bool {
        self.is("EVALSHA") && !self.is_probe()
    }

    /// The arguments of a script, after its keys.
    pub(super) fn arguments(&self) -> &[String] {
        let keys: usize = self.words[2].parse().unwrap();
        &self.words[3 + keys..]
    }

    /// The names of locks, queues and what else a script is about.
    pub(super) fn keys(&self) -> &[String] {
        let keys: usize = self.words[2].parse().unwrap();
        &self.words[3..3 + keys]
    }

    /// The number that the reply is to name.
    pub(super) fn number(&self) -> u64 {
        self.word().0.parse().unwrap()
    }

    /// What a call of the batch lane is about, op by op.
    pub(super) fn letters(&self) -> &str {
        self.word().1
    }

    fn word(&self) -> (&str, &str) {
        let word = &self.arguments()[0];
        let letters = word.find(char::is_alphabetic);
        word.split_at(letters.unwrap_or(word.len()))
    }

    /// How many ops a call is about; a probe counts as one.
    fn ops(&self) -> usize {
        if self.is_probe() {
            1
        } else {
            self.letters().len()
        }
    }

    /// The last time at which a call is of use.
    pub(super) fn of_use(&self) -> u64 {
        self.arguments()[1 + self.ops()].parse().unwrap()
    }

    /// The reply to a call that answers the same to each op, told at that time.
    pub(super) fn reply(&self, at: u64, answer: &[u8]) -> Vec<u8> {
        let (number, ops) = (self.number(), self.ops());
        let mut reply = format!("*{}\r\n:{number}\r\n:{at}\r\n", 2 + ops).into_bytes();
        reply.extend(answer.repeat(ops));
        reply
    }

    /// Whatever a server would say; to an attempt that it has won.
    pub(super) fn usual(&self) -> Vec<u8> {
        if self.is("HELLO") {
            return b"%1\r\n$5\r\nproto\r\n:3\r\n".to_vec();
        }
        if self.is("SUBSCRIBE") {
            return push(&["subscribe", &self.words[1]], ":1\r\n");
        }
        if self.is_probe() {
            let [_, channel, message] = self.arguments() else {
                panic!("{:?}", self.words)
            };
            let mut bytes = Vec::new();
            if !channel.is_empty() {
                bytes = push(&["message", channel, message], "");
            }
            bytes.extend(self.reply(NOW, b"*1\r\n$9\r\npublished\r\n"));
            return bytes;
        }
        if self.is_call() {
            return self.reply(NOW, WON);
        }
        if self.is("CLIENT") && self.words[1] == "INFO" {
            let info = format!("id={} addr=127.0.0.1:1 name=", self.connection);
            return format!("${}\r\n{info}\r\n", info.len()).into_bytes();
        }
        b"+OK\r\n".to_vec()
    }
}

pub(super) const WON: &[u8] = b"*2\r\n$3\r\nwon\r\n:7\r\n";
pub(super) const STALE: &[u8] = b"*1\r\n$5\r\nstale\r\n";

/// A push of some words, and what else is in it.
pub(super) fn push(words: &[&str], last: &str) -> Vec<u8> {
    let count = words.len() + usize::from(!last.is_empty());
    let mut bytes = format!(">{count}\r\n");
    for word in words {
        bytes.push_str(&format!("${}\r\n{word}\r\n", word.len()));
    }
    bytes.push_str(last);
    bytes.into_bytes()
}
