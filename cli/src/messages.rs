//! What the program says of itself, on standard error. Standard output is the command's.

use std::error::Error;
use std::fmt::Display;
use std::io::Write;

use serde_json::{Map, Value, json};

/// How messages are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Messages {
    quiet: bool,
    json: bool,
}

impl Messages {
    pub(crate) const fn new(quiet: bool, json: bool) -> Self {
        Self { quiet, json }
    }

    /// Tells people, and with `--json` programs, that something happened.
    pub(crate) fn say(self, event: &str, text: impl Display, fields: Value) {
        if self.quiet {
            return;
        }
        let mut line = format!("lockstream: {text}");
        if self.json {
            let mut object = Map::new();
            object.insert("event".to_owned(), json!(event));
            if let Value::Object(fields) = fields {
                object.extend(fields);
            }
            object.insert("message".to_owned(), json!(text.to_string()));
            line = Value::Object(object).to_string();
        }
        write_line(&line);
    }

    /// Tells programs alone.
    pub(crate) fn note(self, event: &str, text: impl Display, fields: Value) {
        if self.json {
            self.say(event, text, fields);
        }
    }
}

/// Writes to standard error. The terminal may be gone by now, which is no reason to stop.
pub(crate) fn write_line(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

/// What an error says, and each of its causes.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
