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

/// What the library advises to those who write programs, and what to do here.
const ADVICE: [(&str, &str); 5] = [
    (
        "run PostgresStore::SQL",
        "run what `lockstream migrate --print` writes",
    ),
    ("PostgresStore::migrate", "lockstream migrate"),
    (" or in PostgresStoreBuilder", ""),
    (", or use PostgresStoreBuilder::credentials", ""),
    (
        "takes the pooler's by `pooled`",
        "takes the pooler's by --pooled",
    ),
];

/// What an error says, and each of its causes. Its advice is for the command line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    here(text)
}

fn here(text: String) -> String {
    let replace = |text: String, (there, here): &(&str, &str)| text.replace(there, here);
    ADVICE.iter().fold(text, replace)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Of those that the command can meet: it has no client of its own to convert.
    #[test]
    fn no_advice_names_what_only_programs_have() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../src/store/postgres");
        let files = fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().path());
        let is_source = |path: &std::path::PathBuf| path.extension().is_some_and(|it| it == "rs");
        let mut advised = 0;
        for path in files.filter(is_source) {
            let text = fs::read_to_string(&path).unwrap();
            let lines = text.lines().map(str::trim);
            let told = lines.filter(|line| !line.starts_with("//") && line.contains('"'));
            for line in
                told.filter(|line| line.contains("PostgresStore") && !line.contains("debug_struct"))
            {
                advised += 1;
                let line = here(line.to_owned());
                assert!(
                    !line.contains("PostgresStore"),
                    "{}: {line}",
                    path.display()
                );
            }
        }
        assert!(advised > 3, "{advised}");
    }
}
