//! A server that does not stop talking: whatever it is that has no end, it is not kept, on whatever kind of connection.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::timeout;

use super::fake::{Fake, NOW, Request, push};
use crate::handle::LockRegistry;
use crate::store::RedisStore;

/// More than is kept of anything.
const MORE: usize = 20 << 20;

type Seen = Arc<Mutex<Talk>>;

/// What a fake server has seen.
#[derive(Default)]
struct Talk {
    /// How many connections there were.
    connections: usize,
    /// The channel of the registry.
    channel: String,
}

impl Talk {
    fn hear(&mut self, request: &Request) {
        self.connections = request.connection;
        if request.is("SUBSCRIBE") {
            self.channel.clone_from(&request.words[1]);
        }
    }

    /// A grant of no lock, and of no owner of ours: nothing comes of it.
    fn push(&self) -> Vec<u8> {
        let message = format!("1 ffff:1 1000 7 {NOW} {}", "k".repeat(400));
        push(&["message", &self.channel, &message], "")
    }
}

/// Answers the first call, and then says no end of something that nobody asked for.
fn talks(seen: Seen) -> impl FnMut(&Request) -> Option<Vec<u8>> + Send + 'static {
    move |request| {
        seen.lock().unwrap().connections = request.connection;
        if !request.is_call() || request.connection > 1 {
            return None;
        }
        let mut bytes = request.usual();
        bytes.extend(b"$1000000000\r\n");
        bytes.resize(bytes.len() + MORE, b'x');
        Some(bytes)
    }
}

/// Somebody holds, and nobody waits for an answer: a message that has no end would be kept for ever.
async fn ends_its_connection(store: RedisStore, seen: &Seen) {
    let locks = LockRegistry::builder(store)
        .response_timeout(Duration::from_secs(240))
        .build()
        .unwrap();
    // Nothing is sent for the next twenty seconds, and the answer to what is sent then is waited for a minute.
    let lease = locks.obtain("k").ttl(Duration::from_secs(60)).lease().await;
    let lease = lease.unwrap();
    let again = async {
        while seen.lock().unwrap().connections < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(40), again)
        .await
        .expect("it connects anew");
    assert!(lease.is_valid());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_without_an_end_ends_its_connection() {
    let seen = Seen::default();
    let fake = Fake::start(talks(seen.clone()));
    let store = RedisStore::connect_lazy(fake.url()).unwrap();
    ends_its_connection(store, &seen).await;
}

#[cfg(feature = "redis-1")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_s_own_client_keeps_no_message_without_an_end() {
    let seen = Seen::default();
    let fake = Fake::start(talks(seen.clone()));
    let client = redis::Client::open(fake.url()).unwrap();
    ends_its_connection(RedisStore::from_client(client).unwrap(), &seen).await;
}

/// On a waiting registry's connection nothing is said for hours by us, and a lot by the server: what is heard is no
/// reason to end it, however much it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_registry_may_receive_any_number_of_events() {
    const MANY: usize = 60_000;
    let seen = Seen::default();
    let talk = seen.clone();
    let fake = Fake::start(move |request| {
        let mut talk = talk.lock().unwrap();
        talk.hear(request);
        if !request.is_call() || request.letters() != "A" {
            return None;
        }
        let one = talk.push();
        assert!(one.len() * MANY > MORE, "too few");
        let mut bytes = one.repeat(MANY);
        bytes.extend(request.usual());
        Some(bytes)
    });
    let store = RedisStore::connect_lazy(fake.url()).unwrap();
    let locks = LockRegistry::builder(store)
        .response_timeout(Duration::from_secs(240))
        .ttl(Duration::from_secs(240))
        .build()
        .unwrap();
    let lease = locks.obtain("k").lease_once().await.unwrap();
    assert!(lease.is_some());
    assert_eq!(seen.lock().unwrap().connections, 1);
}

#[cfg(feature = "tls-rustls")]
mod over_tls {
    use std::net::TcpStream;

    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;
    use rustls::{ServerConfig, ServerConnection, StreamOwned};

    use super::*;

    /// Shows a certificate for `localhost`; its authority in PEM comes with it.
    fn start(answers: impl FnMut(&Request) -> Option<Vec<u8>> + Send + 'static) -> (Fake, String) {
        let made = |ca: bool| {
            let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            if ca {
                params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            }
            (params, rcgen::KeyPair::generate().unwrap())
        };
        let (params, key) = made(true);
        let root = params.self_signed(&key).unwrap().pem();
        let issuer = rcgen::Issuer::new(params, key);
        let (params, key) = made(false);
        let chain = vec![params.signed_by(&key, &issuer).unwrap().der().clone()];
        let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        let config = Arc::new(config);
        let dress = move |stream: TcpStream, _| {
            let connection = ServerConnection::new(config.clone()).ok()?;
            Some(StreamOwned::new(connection, stream))
        };
        (Fake::start_over(dress, answers), root)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_message_without_an_end_ends_its_connection() {
        let seen = Seen::default();
        let (fake, root) = start(talks(seen.clone()));
        let url = format!("rediss://localhost:{}/", fake.port());
        let store = RedisStore::builder(url).root_certificate(root);
        ends_its_connection(store.connect_lazy().unwrap(), &seen).await;
    }
}
