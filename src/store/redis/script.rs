//! The scripts, and how one is sent.

use std::borrow::Cow;
use std::sync::LazyLock;

use redis::{Arg, Cmd};

/// The script as it is for one server.
pub(super) const TEXT: &str = include_str!("script.lua");

pub(super) static SERVER: LazyLock<Script> = LazyLock::new(|| Script::new(TEXT));

/// On a cluster grants go by shard channels.
pub(super) static CLUSTER: LazyLock<Script> = LazyLock::new(|| {
    let channels = [
        "'PUBLISH', 'NUMSUB', false",
        "'SPUBLISH', 'SHARDNUMSUB', true",
    ];
    Script::new(TEXT.replace(channels[0], channels[1]))
});

/// A script's text, and the hash by which a server knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: Cow<'static, str>,
    hash: String,
}

impl Script {
    pub(super) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// The first words of a call.
    pub(super) fn named(&self) -> [&str; 2] {
        ["EVALSHA", &self.hash]
    }

    /// The same with the whole text.
    pub(super) fn whole(&self) -> [&str; 2] {
        ["EVAL", &self.text]
    }

    /// Begins a command with the number of keys; keys and arguments are to follow.
    pub(super) fn command(&self, keys: usize, words: usize) -> Cmd {
        let mut command = Cmd::with_capacity(3 + keys + words, 128 + 48 * (keys + words));
        command.arg("EVALSHA").arg(&self.hash).arg(keys);
        command
    }

    /// Has the server keep the script.
    pub(super) fn load(&self) -> Cmd {
        redis::cmd("SCRIPT").arg("LOAD").arg(&*self.text).take()
    }

    /// The same command with the whole text.
    pub(super) fn in_full(&self, command: &Cmd) -> Cmd {
        let mut full = redis::cmd("EVAL");
        full.arg(&*self.text);
        for arg in command.args_iter().skip(2) {
            if let Arg::Simple(bytes) = arg {
                full.arg(bytes);
            }
        }
        full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_for_clusters_publishes_to_shards_alone() {
        assert_ne!(CLUSTER.hash, SERVER.hash);
        for word in ["'SPUBLISH'", "'SHARDNUMSUB'"] {
            assert_eq!(CLUSTER.text.matches(word).count(), 1, "{word}");
        }
        for word in ["'PUBLISH'", "'NUMSUB'"] {
            assert_eq!(CLUSTER.text.matches(word).count(), 0, "{word}");
        }
    }

    #[test]
    fn a_script_in_full_carries_the_same_keys_and_arguments() {
        let mut command = SERVER.command(1, 2);
        command.arg("key").arg("a word").arg("");
        let full = SERVER.in_full(&command).get_packed_command();
        let text = String::from_utf8(full).unwrap();
        assert!(text.starts_with("*6\r\n$4\r\nEVAL\r\n"), "{text}");
        assert!(
            text.ends_with("$1\r\n1\r\n$3\r\nkey\r\n$6\r\na word\r\n$0\r\n\r\n"),
            "{text}"
        );
    }
}
