use std::env;
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use lockstream::store::{RedisStore, RedisStoreBuilder};
use lockstream::{LockRegistry, Renewal, StoreError};
use tokio::time::timeout;

use crate::authority::{Authority, Identity};
use crate::hearing::Log;
use crate::support::{
    PATIENCE, RedisServer, again_if_it_stood_still, on_a_steady_machine, wait_until,
};
use crate::{BOUND, WAIT, patient, told};

const HERE: &[&str] = &["localhost", "127.0.0.1"];

fn start(identity: &Identity) -> RedisServer {
    let tls = identity.serving(None);
    RedisServer::builder().tls(tls).start()
}

fn trusting(server: &RedisServer, authority: &Authority) -> RedisStoreBuilder {
    patient(server.tls_url("localhost")).root_certificate(&authority.pem)
}

fn locks(store: RedisStore) -> LockRegistry {
    LockRegistry::builder(store)
        .response_timeout(Duration::from_secs(10))
        .wait(WAIT)
        .build()
        .unwrap()
}

/// Takes a lock, has another process wait for it, and hands it over.
async fn takes_turns(store: RedisStoreBuilder) {
    let store = store.connect_timeout(PATIENCE);
    again_if_it_stood_still(async || {
        let (one, two) = (
            locks(store.clone().connect().await.unwrap()),
            locks(store.clone().connect().await.unwrap()),
        );
        let lease = one.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(two.obtain("k").lease());
        while one.obtain("k").inspect().await.unwrap().waiting == 0 {
            tokio::task::yield_now().await;
        }
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.expect("it is served").unwrap();
        next.unwrap().release().await.unwrap();
    })
    .await;
}

/// The socket below the encryption moves to the thread that renews, and back.
#[tokio::test]
async fn a_lease_outlasts_a_runtime_that_is_busy() {
    on_a_steady_machine(async || {
        let authority = Authority::new("ours");
        let server = start(&authority.sign(HERE));
        let locks = locks(trusting(&server, &authority).connect().await.unwrap());
        let lock = locks.obtain("k").ttl(Duration::from_secs(6));
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        for _ in 0..2 {
            std::thread::sleep(Duration::from_secs(7));
            assert!(lease.is_valid());
            assert!(locks.obtain("other").inspect().await.is_ok());
        }
        assert_eq!(server.clients().len(), 1, "on one connection");
        lease.release().await.unwrap();
    })
    .await;
}

/// Refused at once by every way in, for a reason that is named, and for good.
async fn refused(store: RedisStoreBuilder, reason: &str) -> StoreError {
    let begin = Instant::now();
    let store = store.connect_timeout(PATIENCE);
    let by_store = store.clone().connect().await.unwrap_err();
    let registry = locks(store.connect_lazy().unwrap());
    let lock = registry.obtain("k");
    for error in [
        by_store.clone(),
        told(lock.lease().await),
        told(lock.acquire_once().await),
    ] {
        assert!(error.to_string().contains(reason), "{error}");
        assert!(!error.is_retryable(), "{error}");
    }
    // None of them is waited with.
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    assert_eq!(registry.in_use(), 0);
    by_store
}

#[tokio::test]
async fn a_trusted_authority_s_certificate_is_believed() {
    let authority = Authority::new("ours");
    let server = start(&authority.sign(HERE));
    takes_turns(trusting(&server, &authority)).await;
    let by_number = RedisStore::builder(server.tls_url("127.0.0.1"));
    takes_turns(by_number.root_certificate(&authority.pem)).await;
    // One of several: in one text, or one after the other.
    let (other, url) = (Authority::new("theirs"), server.tls_url("localhost"));
    let both = format!("{}{}", other.pem, authority.pem);
    takes_turns(RedisStore::builder(&url).root_certificate(both)).await;
    let each = RedisStore::builder(&url)
        .root_certificate(other.pem.trim_end())
        .root_certificate(authority.pem.trim_end());
    takes_turns(each).await;
}

/// Runs one of these tests again, in a process of its own that has these variables.
fn run_alone(test: &str, variables: &[(&str, &std::ffi::OsStr)]) {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &format!("tls::{test}")])
        .envs(variables.iter().copied())
        .env_remove("SSL_CERT_DIR")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("1 passed"), "{told}");
}

/// Whom the system trusts is for a variable to say, and so for a process of its own.
#[tokio::test]
async fn whom_the_system_trusts_is_trusted() {
    const URL: &str = "LOCKSTREAM_TEST_TRUSTED_URL";
    if let Ok(url) = env::var(URL) {
        #[cfg(feature = "redis-1")]
        {
            let client = redis::Client::open(&*url).unwrap();
            let registry = locks(RedisStore::from_client(client).unwrap());
            let lease = registry.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
        }
        takes_turns(RedisStore::builder(url)).await;
        return;
    }
    let authority = Authority::new("ours");
    let server = start(&authority.sign(HERE));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(authority.pem.as_bytes()).unwrap();
    let url = server.tls_url("localhost");
    let variables = [
        (URL, url.as_ref()),
        ("SSL_CERT_FILE", file.path().as_os_str()),
    ];
    run_alone("whom_the_system_trusts_is_trusted", &variables);
}

/// Neither does the store install a crypto provider for the whole process, nor does it use one that
/// the program installed: here one that can do nothing.
#[tokio::test]
async fn no_provider_of_the_process_is_installed_or_used() {
    use rustls::crypto::{CryptoProvider, ring};

    const URL: &str = "LOCKSTREAM_TEST_PROVIDER_URL";
    const ROOT: &str = "LOCKSTREAM_TEST_PROVIDER_ROOT";
    if let (Ok(url), Ok(root)) = (env::var(URL), env::var(ROOT)) {
        let authority = Authority::new("ours");
        let identity = authority.sign(&[]);
        let store = RedisStore::builder(url)
            .root_certificate(root)
            .client_certificate(identity.certificate, identity.key);
        takes_turns(store.clone()).await;
        assert!(CryptoProvider::get_default().is_none());
        let useless = CryptoProvider {
            cipher_suites: Vec::new(),
            ..ring::default_provider()
        };
        useless.install_default().unwrap();
        takes_turns(store).await;
        return;
    }
    let authority = Authority::new("ours");
    let server = start(&authority.sign(HERE));
    let url = server.tls_url("localhost");
    let variables = [(URL, url.as_ref()), (ROOT, authority.pem.as_ref())];
    run_alone(
        "no_provider_of_the_process_is_installed_or_used",
        &variables,
    );
}

/// Takes TLS off in front of a server, and tells how each handshake went.
async fn terminate_tls(
    identity: &Identity,
    server: u16,
) -> (u16, std::sync::mpsc::Receiver<rustls::HandshakeKind>) {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    use tokio::net::{TcpListener, TcpStream};

    let chain = vec![CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
    let provider = rustls::crypto::ring::default_provider();
    let config = rustls::ServerConfig::builder_with_provider(provider.into())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, kinds) = std::sync::mpsc::channel();
    // Ends with the test's runtime.
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (acceptor, sender) = (acceptor.clone(), sender.clone());
            tokio::spawn(async move {
                let mut client = acceptor.accept(client).await.unwrap();
                let kind = client.get_ref().1.handshake_kind().unwrap();
                sender.send(kind).unwrap();
                let mut server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (port, kinds)
}

/// A server that comes back is met by all its clients at once: a resumed session costs it a fraction
/// of a whole handshake.
#[tokio::test]
async fn a_store_resumes_its_tls_sessions() {
    use rustls::HandshakeKind::{Full, Resumed};

    let authority = Authority::new("ours");
    let server = RedisServer::start();
    let (port, kinds) = terminate_tls(&authority.sign(HERE), server.port()).await;
    let url = format!("rediss://localhost:{port}/");
    for _ in 0..2 {
        // Each store has sessions of its own.
        let store = patient(&url).root_certificate(&authority.pem);
        let store = store.connect().await.unwrap();
        for _ in 0..2 {
            let registry = locks(store.clone());
            let lease = registry.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
        }
        let kinds: Vec<_> = kinds.try_iter().collect();
        assert_eq!(kinds, [Full, Resumed, Resumed]);
    }
}

#[tokio::test]
async fn a_certificate_of_an_unknown_authority_is_not_believed() {
    let (authority, other) = (Authority::new("ours"), Authority::new("theirs"));
    let server = start(&authority.sign(HERE));
    let reason = "is from an unknown authority";
    refused(trusting(&server, &other), reason).await;
    // The system knows neither.
    refused(RedisStore::builder(server.tls_url("localhost")), reason).await;
}

/// What a url says of TLS, for those who have nothing but a url.
#[tokio::test]
async fn a_url_names_certificates() {
    let (authority, other) = (Authority::new("ours"), Authority::new("theirs"));
    let tls = authority.sign(HERE).serving(Some(&authority));
    let server = RedisServer::builder().tls(tls).start();
    let client = authority.sign(&[]);
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, pem: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (ca, foreign) = (
        file("ca.pem", &authority.pem),
        file("foreign.pem", &other.pem),
    );
    let certificate = file("client.pem", &client.certificate);
    let key = file("client.key", &client.key);
    let base = server.tls_url("localhost");
    let shown = format!("cert_file={certificate}&key_file={key}");
    takes_turns(RedisStore::builder(format!("{base}?ca_file={ca}&{shown}"))).await;
    let as_libpq = format!("{base}?sslrootcert={ca}&sslcert={certificate}&sslkey={key}");
    takes_turns(RedisStore::builder(as_libpq)).await;
    let as_redis_py =
        format!("{base}?ssl_ca_certs={ca}&ssl_certfile={certificate}&ssl_keyfile={key}");
    takes_turns(RedisStore::builder(as_redis_py)).await;
    let reason = "is from an unknown authority";
    refused(
        RedisStore::builder(format!("{base}?ca_file={foreign}&{shown}")),
        reason,
    )
    .await;
    let none = RedisStore::builder(format!("{base}?ca_file={key}")).connect_lazy();
    let none = none.unwrap_err().to_string();
    assert!(
        none.contains(&format!("ca_file={key:?}: no root")),
        "{none}"
    );
    // Nobody says which of two counts.
    let twice = RedisStore::builder(format!("{base}?ca_file={ca}&{shown}"));
    let twice = twice.root_certificate(&authority.pem).connect_lazy();
    assert!(twice.unwrap_err().to_string().contains("give them once"));
}

/// A server behind a tunnel, or named by an address.
#[tokio::test]
async fn the_name_in_the_certificate_may_be_another_one() {
    let authority = Authority::new("ours");
    let server = start(&authority.sign(&["redis.example"]));
    refused(
        trusting(&server, &authority),
        "certificate not valid for name",
    )
    .await;
    takes_turns(trusting(&server, &authority).server_name("redis.example")).await;
    let url = format!("{}?server_name=redis.example", server.tls_url("127.0.0.1"));
    let both = RedisStore::builder(&url).root_certificate(&authority.pem);
    assert!(
        both.connect_lazy().is_err(),
        "certificates in the url and in the builder"
    );
    let wrong = trusting(&server, &authority).server_name("other.example");
    refused(wrong, "certificate not valid for name").await;
    let invalid = trusting(&server, &authority).server_name("no name");
    assert!(invalid.connect_lazy().is_err());
}

/// Asked for by a name that nobody writes by chance, and told each time.
#[tokio::test]
async fn whoever_answers_is_trusted_on_request_and_with_a_warning() {
    let server = start(&Authority::new("theirs").sign_expired(&["elsewhere.example"]));
    let url = server.tls_url("localhost");
    let log = Log::default();
    let _hearing = log.hear(tracing::Level::WARN);
    let careful = RedisStore::builder(&url).danger_accept_invalid_certificates(false);
    refused(careful, "certificate").await;
    assert!(!log.text().contains("not verified"), "{}", log.text());
    takes_turns(RedisStore::builder(&url).danger_accept_invalid_certificates(true)).await;
    let warnings = log.take();
    let told = warnings
        .iter()
        .filter(|line| line.contains("are not verified"));
    assert_eq!(told.count(), 2, "one a registry: {warnings:?}");
    let in_url = format!("{url}?danger_accept_invalid_certificates=true");
    takes_turns(RedisStore::builder(in_url)).await;
    assert!(log.text().contains("are not verified"), "{}", log.text());
}

/// Two authorities of one name differ by their keys.
#[tokio::test]
async fn a_certificate_of_an_authority_of_the_same_name_is_not_believed() {
    let (authority, other) = (Authority::new("ours"), Authority::new("ours"));
    let server = start(&other.sign(HERE));
    refused(trusting(&server, &authority), "certificate").await;
}

#[tokio::test]
async fn a_certificate_for_another_host_is_not_believed() {
    let authority = Authority::new("ours");
    let server = start(&authority.sign(&["elsewhere.example"]));
    let reason = "certificate not valid for name";
    refused(trusting(&server, &authority), reason).await;
    let by_number = RedisStore::builder(server.tls_url("127.0.0.1"));
    refused(by_number.root_certificate(&authority.pem), reason).await;
}

#[tokio::test]
async fn a_certificate_out_of_its_time_is_not_believed() {
    let authority = Authority::new("ours");
    let expired = start(&authority.sign_expired(HERE));
    refused(trusting(&expired, &authority), "certificate expired").await;
    let early = start(&authority.sign_early(HERE));
    refused(trusting(&early, &authority), "certificate not valid yet").await;
}

/// What one line of openssl makes is both, and no server's.
#[tokio::test]
async fn the_certificate_of_an_authority_is_not_believed() {
    let both = Authority::for_itself(HERE);
    let server = start(&both);
    let store = RedisStore::builder(server.tls_url("localhost"));
    let reason = "is that of an authority";
    refused(store.root_certificate(&both.certificate), reason).await;
}

#[tokio::test]
async fn a_client_shows_its_certificate() {
    let (authority, other) = (Authority::new("ours"), Authority::new("theirs"));
    let tls = authority.sign(HERE).serving(Some(&authority));
    let server = RedisServer::builder().tls(tls).start();
    let store = trusting(&server, &authority);
    let with = |identity: Identity| {
        let store = store.clone();
        store.client_certificate(identity.certificate, identity.key)
    };
    takes_turns(with(authority.sign(&[]))).await;
    refused(store.clone(), "requires a client certificate").await;
    let reason = "rejected the client certificate";
    refused(with(other.sign(&[])), reason).await;
    refused(with(authority.sign_expired(&[])), reason).await;
}

/// Its authorities, its certificate, and that it checks none: of a client nothing is left beside what the builder was given.
#[cfg(feature = "redis-1")]
#[tokio::test]
async fn certificates_of_a_builder_replace_those_of_its_client() {
    let (authority, other) = (Authority::new("ours"), Authority::new("theirs"));
    let tls = authority.sign(HERE).serving(Some(&authority));
    let server = RedisServer::builder().tls(tls).start();
    let url = server.tls_url("localhost");
    let having = |authority: &Authority, identity: &Identity| {
        let certificates = redis::TlsCertificates {
            client_tls: Some(redis::ClientTlsConfig {
                client_cert: identity.certificate.clone().into(),
                client_key: identity.key.clone().into(),
            }),
            root_cert: Some(authority.pem.clone().into()),
        };
        let client = redis::Client::build_with_tls(&*url, certificates).unwrap();
        RedisStoreBuilder::from_client(client)
    };
    let (ours, theirs) = (authority.sign(&[]), other.sign(&[]));
    let showing = |store: RedisStoreBuilder, identity: &Identity| {
        store.client_certificate(&*identity.certificate, &*identity.key)
    };
    // What it has cannot be read, so it is refused at once, with advice.
    let error = having(&authority, &ours).connect_lazy().unwrap_err();
    let told = error.to_string();
    assert!(
        told.contains("root_certificate and client_certificate"),
        "{told}"
    );
    assert!(!error.is_retryable());
    let store = having(&other, &theirs).root_certificate(&authority.pem);
    takes_turns(showing(store, &ours)).await;
    let reason = "requires a client certificate";
    let store = having(&authority, &ours).root_certificate(&authority.pem);
    refused(store, reason).await;
    let reason = "is from an unknown authority";
    let store = having(&authority, &ours).root_certificate(&other.pem);
    refused(store, reason).await;
    // The system trusts neither.
    refused(showing(having(&authority, &ours), &ours), reason).await;
    let careless = || redis::Client::open(format!("{url}#insecure")).unwrap();
    let error = RedisStore::from_client(careless()).unwrap_err();
    assert!(
        error.to_string().contains("without verification"),
        "{error}"
    );
    let store = RedisStoreBuilder::from_client(careless()).root_certificate(&other.pem);
    refused(showing(store, &ours), reason).await;
}

/// What can be seen without a server is said without one.
#[tokio::test]
async fn an_invalid_certificate_is_reported_at_once() {
    let authority = Authority::new("ours");
    let (one, two) = (authority.sign(&[]), authority.sign(&[]));
    let store = || RedisStore::builder("rediss://:secret@localhost:1/");
    let cases = [
        (store().root_certificate(""), "no root certificate"),
        (store().root_certificate("rubbish"), "no root certificate"),
        (store().root_certificate(&one.key), "no root certificate"),
        (
            store().root_certificate(authority.pem.replace("MII", "AAA")),
            "root certificate",
        ),
        (
            store().client_certificate("", &*one.key),
            "no client certificate",
        ),
        (
            store().client_certificate(&*one.certificate, "rubbish"),
            "no private key",
        ),
        (
            store().client_certificate(&*one.certificate, &*two.key),
            "client certificate and key",
        ),
        (
            RedisStore::builder("redis://:secret@localhost:1/").root_certificate(&authority.pem),
            "rediss://",
        ),
    ];
    for (store, reason) in cases {
        let shown = format!("{store:?}");
        let error = store.clone().connect_lazy().unwrap_err();
        assert!(error.to_string().contains(reason), "{reason}: {error}");
        assert!(!error.is_retryable(), "{error}");
        let connecting = store.connect().await.unwrap_err();
        assert_eq!(connecting.to_string(), error.to_string());
        for shown in [shown, format!("{error:?} {error}")] {
            assert!(!shown.contains("secret"), "{shown}");
            assert!(!shown.contains("PRIVATE KEY"), "{shown}");
        }
    }
}

/// The certificate runs out while a lock is held, and the connection breaks: the holder holds, whoever asks is told why
/// there is no connection, and a new certificate is all it takes.
#[tokio::test]
async fn a_certificate_runs_out_and_is_renewed() {
    let authority = Authority::new("ours");
    let good = authority.sign(HERE);
    let server = start(&good);
    let registry = locks(trusting(&server, &authority).connect().await.unwrap());
    let lock = registry.obtain("k").ttl(24 * BOUND);
    let lock = lock.renewal(Renewal::watchdog());
    let lease = lock.lease().await.unwrap();

    let expired = authority.sign_expired(HERE);
    server.show(&expired.certificate, &expired.key);
    server.client_kill_all();
    let error = loop {
        // Until the break is noticed.
        match registry.obtain("other").acquire_once().await {
            Ok(_) => tokio::task::yield_now().await,
            error => break told(error),
        }
    };
    let error = if error.is_retryable() {
        told(registry.obtain("other").acquire_once().await)
    } else {
        error
    };
    assert!(error.to_string().contains("certificate expired"), "{error}");
    assert!(!error.is_retryable());
    let waiter = told(registry.obtain("other").lease().await);
    assert!(
        waiter.to_string().contains("certificate expired"),
        "{waiter}"
    );
    assert!(lease.is_valid());

    server.show(&good.certificate, &good.key);
    // By itself, and long before the lease is to be renewed.
    wait_until("it is back", 4 * BOUND, || server.clients().len() == 1).await;
    lease.release().await.unwrap();
    let other = registry.obtain("other").lease().await.unwrap();
    other.release().await.unwrap();
}

/// A port that speaks plainly does not speak TLS, and the other way round. Neither answers what the other can read, which
/// is told in time.
#[tokio::test]
async fn plain_and_tls_ports_are_told_apart() {
    on_a_steady_machine(async || {
        let authority = Authority::new("ours");
        let (plain, tls) = (RedisServer::start(), start(&authority.sign(HERE)));
        // As a port of something else does.
        let closing = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let closing_url = format!("rediss://{}/", closing.local_addr().unwrap());
        std::thread::spawn(move || {
            for client in closing.incoming() {
                let _ = std::io::Read::read(&mut client.unwrap(), &mut [0; 1024]);
            }
        });
        let within = Duration::from_secs(2);
        for (url, supposed) in [
            (plain.tls_url("localhost"), "may not speak TLS"),
            (closing_url, "may not speak TLS"),
            (
                tls.tls_url("localhost").replace("rediss", "redis"),
                "may require TLS",
            ),
        ] {
            let store = RedisStore::builder(&url).connect_timeout(within);
            let registry = LockRegistry::builder(store.connect_lazy().unwrap())
                .response_timeout(within)
                .build()
                .unwrap();
            let begin = Instant::now();
            let error = told(registry.obtain("k").lease_within(2 * within).await);
            assert!(
                begin.elapsed() < 2 * within + BOUND,
                "{:?}",
                begin.elapsed()
            );
            assert!(error.to_string().contains(supposed), "{url}: {error}");
            assert!(error.is_retryable(), "it may be away: {error}");
        }
    })
    .await;
}
