//! What a command line that was refused was meant to be.

use std::ffi::OsString;

use clap::CommandFactory;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::args::Arguments;

/// Adds the right line to the error of a `run` or `lead` without `--`. `line` begins with the name of the program.
pub(crate) fn add(error: &mut clap::Error, line: &[OsString]) {
    let is_meant = matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument | ErrorKind::UnknownArgument
    );
    if !is_meant || line.iter().any(|word| word == "--") {
        return;
    }
    if let Some(keys_end) = end_of_key(line) {
        let (before, behind) = line.split_at(keys_end);
        let words: Vec<_> = before.iter().skip(1).map(quoted).collect();
        let command: Vec<_> = behind.iter().map(quoted).collect();
        let tip = format!(
            "the command stands behind `--`: lockstream {} -- {}",
            words.join(" "),
            command.join(" ")
        );
        let tips = ContextValue::StyledStrs(vec![tip.into()]);
        error.insert(ContextKind::Suggested, tips);
    }
}

/// Where the first key ends, if something follows it that may be a command.
fn end_of_key(line: &[OsString]) -> Option<usize> {
    let parser = Arguments::command().ignore_errors(true);
    let found = parser.try_get_matches_from(line).ok()?;
    let (name, found) = found.subcommand()?;
    let mut keys = match name {
        "run" => found.get_many::<String>("keys")?,
        "lead" => found.get_many::<String>("key")?,
        _ => return None,
    };
    let key = keys.next()?;
    let next = keys.next();
    // The value of an option may have the same text.
    let is_key = |(place, word): (usize, &OsString)| {
        let follows = line.get(place + 1);
        let is_followed = follows.is_some_and(|word| next.is_none_or(|next| *word == **next));
        (*word == **key && is_followed).then_some(place + 1)
    };
    line.iter().enumerate().skip(2).find_map(is_key)
}

/// As a shell takes it.
fn quoted(word: &OsString) -> String {
    let word = word.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.into_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}
