//! Nodes that are one server by two names.

use lockstream::LockError;
use lockstream::store::{QuorumStore, RedisStore};
use tokio::time::timeout;

use super::hearing::Log;
use super::support::chain;
use super::{BOUND, nothing_left, servers, settle};

/// The release of one gave back the vote of the other, and each was told as a lease lost. While it was held, one server
/// was a majority of two.
#[tokio::test]
async fn one_server_by_two_names_has_one_vote() {
    let log = Log::default();
    let _logging = log.hear(tracing::Level::ERROR);
    let names = ["127.0.0.1", "localhost", "a socket"];
    for (first, second) in [(0, 1), (0, 2), (2, 1)] {
        let mut servers = servers(2);
        let port = servers[0].port();
        let url = |name| match name {
            "a socket" => servers[0].unix_url(),
            host => format!("redis://{host}:{port}/"),
        };
        let urls = [url(names[first]), url(names[second]), servers[1].url()];
        let nodes = urls.map(|url| RedisStore::connect_lazy(url).unwrap());
        let store = QuorumStore::new(nodes).unwrap().quarantine(None);
        let registry = settle(store).build().unwrap();
        let said = log.text().matches("are the same server").count();
        // Both of the servers are needed, and enough.
        for _ in 0..3 {
            let lease = timeout(BOUND, registry.obtain("k").lease()).await;
            lease.unwrap().unwrap().release().await.unwrap();
        }
        servers[1].kill();
        let error = registry.obtain("k").acquire_once().await.unwrap_err();
        let text = chain(&error);
        assert!(matches!(error, LockError::Store { .. }), "{text}");
        assert!(text.contains("are the same server"), "{text}");
        servers[0].client_kill_all();
        servers[1].restart();
        let lease = timeout(BOUND, registry.obtain("k").lease()).await;
        lease.unwrap().unwrap().release().await.unwrap();
        let says = log.text().matches("are the same server").count();
        assert_eq!(says, said + 1, "once a registry: {}", log.text());
        nothing_left(&servers, &[&registry]).await;
    }
}
