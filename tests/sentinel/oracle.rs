//! A sentinel that says whatever it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// Answers every question on its port; its threads end with the test's process.
pub(crate) struct Oracle {
    port: u16,
    heard: Arc<Mutex<State>>,
}

struct State {
    answer: String,
    questions: usize,
}

impl Oracle {
    /// Says that the primary is at this port here.
    pub(crate) fn saying(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let oracle = Self {
            port: listener.local_addr().unwrap().port(),
            heard: Arc::new(Mutex::new(State {
                answer: address(port),
                questions: 0,
            })),
        };
        let heard = oracle.heard.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let heard = heard.clone();
                std::thread::spawn(move || {
                    // The client may disconnect at any time.
                    let _ = serve(stream, &heard);
                });
            }
        });
        oracle
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn say(&self, port: u16) {
        self.heard.lock().unwrap().answer = address(port);
    }

    /// Says exactly this.
    pub(crate) fn say_raw(&self, answer: &str) {
        self.heard.lock().unwrap().answer = answer.to_owned();
    }

    /// How often it was asked where the primary is.
    pub(crate) fn questions(&self) -> usize {
        self.heard.lock().unwrap().questions
    }
}

fn address(port: u16) -> String {
    let port = port.to_string();
    format!("*2\r\n$9\r\n127.0.0.1\r\n${}\r\n{port}\r\n", port.len())
}

fn serve(stream: TcpStream, heard: &Mutex<State>) -> std::io::Result<()> {
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let words: usize = line.trim().trim_start_matches('*').parse().unwrap_or(0);
        let mut command = Vec::new();
        for _ in 0..words {
            let mut length = String::new();
            reader.read_line(&mut length)?;
            let length: usize = length.trim().trim_start_matches('$').parse().unwrap_or(0);
            let mut word = vec![0; length + 2];
            reader.read_exact(&mut word)?;
            command.push(String::from_utf8_lossy(&word[..length]).to_uppercase());
        }
        let answer = if command.first().is_some_and(|it| it == "SENTINEL") {
            let mut state = heard.lock().unwrap();
            state.questions += 1;
            state.answer.clone()
        } else {
            "+OK\r\n".to_owned()
        };
        writer.write_all(answer.as_bytes())?;
    }
}
