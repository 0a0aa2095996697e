//! How does a test hear all that its thread logs?

use std::sync::LazyLock;

use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;

/// To be called before a subscriber is set for one thread.
///
/// While that is the only subscriber there is, `tracing` asks the thread that is the first to log something whether
/// anybody wants it. If that is the thread of a test beside, nobody does, and nobody hears of it from then on. With a
/// second one, which stays, all are asked.
pub(crate) fn beside_others() {
    static OTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));
    LazyLock::force(&OTHER);
}
