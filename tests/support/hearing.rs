//! How does a test hear all that its thread logs?

#![allow(
    dead_code,
    reason = "every test that includes it is a crate of its own and uses another part of it"
)]

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Mutex};

use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Level};
use tracing_subscriber::fmt::MakeWriter;

/// To be called before a subscriber is set for one thread.
///
/// While that is the only subscriber there is, `tracing` asks the thread that is the first to log something whether
/// anybody wants it. If that is the thread of a test beside, nobody does, and nobody hears of it from then on. With a
/// second one, which stays, all are asked.
pub(crate) fn beside_others() {
    static OTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
    LazyLock::force(&OTHER);
}

/// What was logged, kept as text, without its times. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Keeps what this thread logs, down to a level, until the guard is dropped.
    #[must_use]
    pub(crate) fn hear(&self, level: Level) -> DefaultGuard {
        beside_others();
        tracing::subscriber::set_default(
            tracing_subscriber::fmt()
                .with_writer(self.clone())
                .with_max_level(level)
                .with_ansi(false)
                .with_target(false)
                .without_time()
                .finish(),
        )
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The lines so far, which are then forgotten.
    pub(crate) fn take(&self) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        let text = String::from_utf8(bytes).unwrap();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
