//! The scripts, and how one is sent.

use std::borrow::Cow;
use std::sync::LazyLock;

use redis::aio::MultiplexedConnection;
use redis::{Arg, Cmd, RedisResult, Value};

/// What is done plainly, and what is done in full.
pub(super) const BATCH_TEXT: &str = concat!(include_str!("batch.lua"), include_str!("in_full.lua"));

pub(super) static BATCH: LazyLock<Script> = LazyLock::new(|| Script::new(BATCH_TEXT));
pub(super) static RENEW: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("renew.lua")));
pub(super) static INSPECT: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("inspect.lua")));
pub(super) static PROBE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("probe.lua")));

#[cfg(feature = "cluster")]
pub(super) static CLUSTER_BATCH: LazyLock<Script> = LazyLock::new(|| Script::sharded(BATCH_TEXT));
#[cfg(feature = "cluster")]
pub(super) static CLUSTER_FREE: LazyLock<Script> =
    LazyLock::new(|| Script::new(include_str!("cluster/free.lua")));
#[cfg(feature = "cluster")]
pub(super) static CLUSTER_PROBE: LazyLock<Script> =
    LazyLock::new(|| Script::sharded(include_str!("probe.lua")));

/// A script's text, and the hash by which a server knows it.
#[derive(Debug)]
pub(super) struct Script {
    text: Cow<'static, str>,
    hash: String,
}

impl Script {
    fn new(text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// The copy for clusters, so that the one for servers need not ask where it runs.
    #[cfg(feature = "cluster")]
    fn sharded(text: &str) -> Self {
        let text = text
            .replace("local sharded = false", "local sharded = true")
            .replace("'NUMSUB'", "'SHARDNUMSUB'")
            .replace("pubsub|numsub", "pubsub|shardnumsub")
            .replace("'PUBLISH'", "'SPUBLISH'")
            .replace("'publish'", "'spublish'");
        Self::new(text)
    }

    /// Begins a command with the number of keys; keys and arguments are to follow.
    pub(super) fn command(&self, keys: usize, words: usize) -> Cmd {
        let mut command = Cmd::with_capacity(3 + keys + words, 128 + 48 * (keys + words));
        command.arg("EVALSHA").arg(&self.hash).arg(keys);
        command
    }

    /// Sends a command that [`Self::command`] began; if the server does not know the script (any
    /// more), the same once more with the whole text.
    ///
    /// The answer is the raw value: the client's other calls turn one nested error into an error
    /// for all (S1).
    pub(super) async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        command: &Cmd,
    ) -> RedisResult<Value> {
        let answer = connection.send_packed_command(command).await?;
        match &answer {
            Value::ServerError(error) if error.code() == "NOSCRIPT" => {
                connection.send_packed_command(&self.in_full(command)).await
            }
            _ => Ok(answer),
        }
    }

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

    #[cfg(feature = "cluster")]
    #[test]
    fn the_copies_for_clusters_publish_to_shards_alone() {
        // At once, and in full; the first of two messages goes to none there.
        for (script, asked, told) in [(&CLUSTER_BATCH, 2, 4), (&CLUSTER_PROBE, 1, 1)] {
            for (word, times) in [("'SHARDNUMSUB'", asked), ("'SPUBLISH'", told)] {
                assert_eq!(script.text.matches(word).count(), times, "{word}");
            }
            for word in [
                "'NUMSUB'",
                "'PUBLISH'",
                "|numsub",
                "'publish'",
                "sharded = false",
            ] {
                assert!(!script.text.contains(word), "{word}");
            }
        }
        assert!(CLUSTER_BATCH.text.contains("local sharded = true"));
    }

    #[test]
    fn a_script_in_full_carries_the_same_keys_and_arguments() {
        let mut command = RENEW.command(1, 2);
        command.arg("key").arg("a word").arg("");
        let full = RENEW.in_full(&command).get_packed_command();
        let text = String::from_utf8(full).unwrap();
        assert!(text.starts_with("*6\r\n$4\r\nEVAL\r\n"), "{text}");
        assert!(
            text.ends_with("$1\r\n1\r\n$3\r\nkey\r\n$6\r\na word\r\n$0\r\n\r\n"),
            "{text}"
        );
    }
}
