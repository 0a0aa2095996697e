//! A server that says what no real one says on demand.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
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
        std::thread::spawn(move || {
            for (index, stream) in listener.incoming().enumerate() {
                let (stream, answers, dress) = (stream.unwrap(), answers.clone(), dress.clone());
                if !stream.peer_addr().is_ok_and(|peer| peer.ip().is_loopback()) {
                    continue;
                }
                // Else what is pushed could wait for what was said before it to be acknowledged.
                let _ = stream.set_nodelay(true);
                // Ends when the client disconnects.
                std::thread::spawn(move || {
                    let connection = index + 1;
                    serve(dress(stream, connection)?, connection, &answers)
                });
            }
        });
        Self { address }
    }

    pub(super) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    #[cfg(feature = "cluster")]
    pub(super) fn port(&self) -> u16 {
        self.address.port()
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

    /// The number that the reply is to name.
    pub(super) fn number(&self) -> u64 {
        self.arguments()[0].parse().unwrap()
    }

    /// What a call is about, op by op.
    pub(super) fn letters(&self) -> &str {
        &self.arguments()[1]
    }

    /// The last time at which a call is of use.
    pub(super) fn of_use(&self) -> u64 {
        self.arguments()[2].parse().unwrap()
    }

    /// The reply to a call that answers the same to each op, told at that time.
    pub(super) fn reply(&self, at: u64, answer: &[u8]) -> Vec<u8> {
        let (number, ops) = (self.number().to_string(), self.letters().len());
        let mut reply = format!("*{}\r\n", 2 + ops).into_bytes();
        for word in [number, at.to_string()] {
            reply.extend(format!("${}\r\n{word}\r\n", word.len()).into_bytes());
        }
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
            let [_, _, _, channel, message] = self.arguments() else {
                panic!("{:?}", self.words)
            };
            let mut bytes = Vec::new();
            if !channel.is_empty() {
                bytes = push(&["message", channel, message], "");
            }
            bytes.extend(self.reply(NOW, b"$1\r\n1\r\n"));
            return bytes;
        }
        if self.is_call() {
            return self.reply(NOW, WON);
        }
        if self.is("CLIENT") && self.words[1] == "INFO" {
            let info = format!("id={} addr=127.0.0.1:1 name=", self.connection);
            return format!("${}\r\n{info}\r\n", info.len()).into_bytes();
        }
        if self.is("EVAL") && self.words[1].contains("KEYS") && !self.is_probe() {
            // It is one server: what was made is there.
            return b":1\r\n".to_vec();
        }
        b"+OK\r\n".to_vec()
    }
}

pub(super) const WON: &[u8] = b"$1\r\n7\r\n";
pub(super) const STALE: &[u8] = b"$5\r\nstale\r\n";

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
