//! How a connection is opened: TLS as libpq means it, time-outs, and every address of a name.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use lockstream::store::PostgresStore;
use lockstream::{LockRegistry, StoreError};

use crate::support::{Lookups, PgServer, Proxy, Role, Way, Worker, on_a_steady_machine};
use crate::{BOUND, PATIENCE, builder, ms, patient, told};

/// A server that says what each connection gets, and keeps what was sent to it.
struct Fake {
    address: SocketAddr,
    received: Arc<Mutex<Vec<u8>>>,
}

impl Fake {
    /// To each connection it says this as soon as anything comes, and then hears on; nothing at all if it is empty.
    fn saying(ip: Ipv4Addr, words: &'static [u8]) -> Self {
        let listener = TcpListener::bind((ip, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let received = Arc::new(Mutex::new(Vec::new()));
        let keeps = received.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let keeps = keeps.clone();
                thread::spawn(move || Self::serve(stream, words, &keeps));
            }
        });
        Self { address, received }
    }

    fn serve(mut stream: TcpStream, words: &[u8], keeps: &Mutex<Vec<u8>>) {
        let mut buffer = [0; 4096];
        let mut has_spoken = false;
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            keeps.lock().unwrap().extend(&buffer[..length]);
            if !has_spoken && !words.is_empty() && stream.write_all(words).is_err() {
                return;
            }
            has_spoken = true;
            if words.starts_with(b"HTTP") {
                return;
            }
        }
    }

    fn url(&self, query: &str) -> String {
        format!("postgres://app:hunter2@{}/db?{query}", self.address)
    }

    fn config(&self) -> tokio_postgres::Config {
        let mut config = tokio_postgres::Config::new();
        config
            .host(self.address.ip().to_string())
            .port(self.address.port())
            .user("app")
            .password("hunter2")
            .connect_timeout(ms(5000));
        config
    }
}

/// The address of this machine in its network: no packet is sent.
#[cfg(feature = "tls-rustls")]
fn of_this_machine() -> Ipv4Addr {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let connected = socket.connect("198.51.100.1:9");
    connected.expect("this test needs an address that is not of the loopback");
    match socket.local_addr().unwrap() {
        SocketAddr::V4(address) if !address.ip().is_loopback() => *address.ip(),
        other => panic!("this test needs an IPv4 address that is not of the loopback: {other}"),
    }
}

async fn fails(store: lockstream::future::ConnectPostgres) -> StoreError {
    let failed = tokio::time::timeout(BOUND, store);
    failed.await.expect("an answer").unwrap_err()
}

#[cfg(feature = "tls-rustls")]
mod secured {
    use tracing::Level;

    use super::*;
    use crate::authority::{Authority, Identity};
    use crate::hearing::Log;

    /// With and without TLS, and a role whose password is checked by SCRAM.
    fn server(authority: &Authority) -> PgServer {
        let server = PgServer::builder()
            .tls(authority.sign(&["localhost"]).serving(None))
            .client("host all app all scram-sha-256")
            .start();
        server.run(
            "CREATE ROLE app LOGIN PASSWORD 'hunter2'; GRANT CREATE ON DATABASE postgres TO app",
        );
        server
    }

    #[tokio::test]
    async fn sslmode_means_what_libpq_says() {
        let (authority, other) = (Authority::new("ours"), Authority::new("another"));
        let server = server(&authority);
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, pem: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, pem).unwrap();
            path.display().to_string()
        };
        let (ca, wrong) = (file("ca", &authority.pem), file("wrong", &other.pem));
        for (host, query, expected) in [
            ("127.0.0.1", "sslmode=disable", Ok((false, 0))),
            ("127.0.0.1", "sslmode=allow", Ok((true, 0))),
            ("127.0.0.1", "sslmode=prefer", Ok((true, 0))),
            ("127.0.0.1", "sslmode=require", Ok((true, 0))),
            (
                "127.0.0.1",
                "sslmode=require&sslrootcert={ca}",
                Ok((true, 0)),
            ),
            (
                "127.0.0.1",
                "sslmode=require&sslrootcert={wrong}",
                Err("unknown authority"),
            ),
            (
                "127.0.0.1",
                "sslmode=prefer&sslrootcert={wrong}",
                Err("unknown authority"),
            ),
            (
                "127.0.0.1",
                "sslmode=verify-ca&sslrootcert={ca}",
                Ok((true, 0)),
            ),
            (
                "127.0.0.1",
                "sslmode=verify-ca&sslrootcert={wrong}",
                Err("unknown authority"),
            ),
            (
                "127.0.0.1",
                "sslmode=verify-full&sslrootcert={ca}",
                Err("not valid for name \"127.0.0.1\""),
            ),
            (
                "localhost",
                "sslmode=verify-full&sslrootcert={ca}",
                Ok((true, 0)),
            ),
            ("localhost", "sslrootcert={ca}", Ok((true, 0))),
            (
                "127.0.0.1",
                "ca_file={ca}&server_name=localhost",
                Ok((true, 0)),
            ),
            (
                "127.0.0.1",
                "sslrootcert={ca}",
                Err("valid for DnsName(\"localhost\")"),
            ),
            (
                "localhost",
                "",
                Err("unknown authority: name it by ca_file"),
            ),
            (
                "127.0.0.1",
                "danger_accept_invalid_certificates=true",
                Ok((true, 0)),
            ),
            // As it is with a server elsewhere.
            ("db.example", "hostaddr=127.0.0.1", Err("unknown authority")),
            (
                "db.example",
                "hostaddr=127.0.0.1&sslmode=require",
                Ok((true, 0)),
            ),
        ] {
            let query = query.replace("{ca}", &ca).replace("{wrong}", &wrong);
            let url = format!(
                "postgres://app:hunter2@{host}:{}/postgres?response_timeout=60s&connect_timeout=60s&{query}",
                server.port()
            );
            let log = Log::default();
            let guard = log.hear(Level::WARN);
            let connected = LockRegistry::connect(&url).await;
            drop(guard);
            match (connected, expected) {
                (Ok(locks), Ok((is_encrypted, warnings))) => {
                    locks.obtain("k").inspect().await.unwrap();
                    let encrypted = "SELECT bool_or(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'app'";
                    assert_eq!(server.one::<bool>(encrypted), is_encrypted, "{url}");
                    let told = log.text().matches("not verified").count();
                    assert_eq!(told, warnings, "{url}: {}", log.text());
                    locks.shutdown().await;
                }
                (Err(error), Err(says)) => {
                    assert!(
                        told(&error).contains(says) && !error.is_retryable(),
                        "{url}: {error}"
                    );
                }
                (is, expected) => panic!("{url}: {is:?}, not {expected:?}"),
            }
            crate::eventually("no connection is left", async || {
                server.one::<i64>("SELECT count(*) FROM pg_stat_activity WHERE usename = 'app'")
                    == 0
            })
            .await;
        }
    }

    /// One warning a store, not one a connection.
    #[tokio::test]
    async fn a_certificate_that_is_not_verified_is_told_once() {
        let authority = Authority::new("ours");
        let server = PgServer::builder()
            .tls(authority.sign(&["localhost"]).serving(None))
            .config("listen_addresses = '*'")
            .client("host all postgres all trust")
            .start();
        let log = Log::default();
        let guard = log.hear(Level::WARN);
        let url = format!(
            "postgres://postgres@{}:{}/postgres?sslmode=require",
            of_this_machine(),
            server.port()
        );
        let store = patient(&url).lanes(3).connect().await.unwrap();
        for _ in 0..2 {
            let locks = builder(store.clone()).build().unwrap();
            locks
                .obtain("k")
                .lease()
                .await
                .unwrap()
                .release()
                .await
                .unwrap();
        }
        drop(guard);
        assert_eq!(
            log.text().matches("not verified").count(),
            1,
            "{}",
            log.text()
        );
    }

    /// Whoever stands between answers that there is no TLS. What would follow is the proof of a password.
    #[tokio::test]
    async fn no_password_is_proved_in_plain_text_over_a_network() {
        let authority = Authority::new("ours");
        for ip in [of_this_machine(), Ipv4Addr::LOCALHOST] {
            let fake = Fake::saying(ip, b"N");
            let mut stores = vec![
                PostgresStore::builder(fake.url("")),
                PostgresStore::builder(fake.url("sslmode=require")),
                PostgresStore::from_config(fake.config()).root_certificate(&authority.pem),
                PostgresStore::builder(fake.url("sslmode=prefer")).root_certificate(&authority.pem),
            ];
            if !ip.is_loopback() {
                stores.extend([
                    PostgresStore::builder(fake.url("sslmode=prefer")),
                    PostgresStore::builder(fake.url("sslmode=allow")),
                    PostgresStore::from_config(fake.config()),
                ]);
            }
            let count = stores.len();
            for store in stores {
                let error = fails(store.connect()).await;
                assert!(error.to_string().contains("TLS"), "{error}");
            }
            let received = fake.received.lock().unwrap().clone();
            // The requests for TLS, and nothing else.
            assert_eq!(received, [0, 0, 0, 8, 4, 210, 22, 47].repeat(count), "{ip}");
        }
        // On this machine `prefer` goes without.
        let server = PgServer::start();
        for mode in ["prefer", "allow"] {
            let url = server
                .url()
                .replace("sslmode=disable", &format!("sslmode={mode}"));
            patient(url).connect().await.unwrap();
        }
        let mut config = tokio_postgres::Config::new();
        config
            .host("127.0.0.1")
            .port(server.port())
            .user("postgres");
        PostgresStore::from_config(config).connect().await.unwrap();
    }

    /// The password's proof is bound to the certificate: whoever stands between with another certificate cannot use it.
    #[tokio::test]
    async fn a_channel_is_bound() {
        let authority = Authority::new("ours");
        let server = server(&authority);
        let url = |user: &str, query: &str| {
            let port = server.port();
            format!("postgres://{user}@localhost:{port}/postgres?{query}")
        };
        for (query, works) in [
            ("sslmode=require&channel_binding=require", true),
            ("sslmode=require&channel_binding=prefer", true),
            ("sslmode=require&channel_binding=disable", true),
            ("sslmode=disable&channel_binding=prefer", true),
            ("sslmode=disable&channel_binding=require", false),
        ] {
            let connected = patient(url("app:hunter2", query)).connect().await;
            assert_eq!(connected.is_ok(), works, "{query}: {connected:?}");
            if let Err(error) = connected {
                assert!(
                    error
                        .to_string()
                        .contains("channel_binding=require needs TLS"),
                    "{error}"
                );
            }
        }
        // A server that trusts everybody proves nothing.
        let trusting = url("postgres", "sslmode=require&channel_binding=require");
        fails(PostgresStore::connect(trusting)).await;

        // What another shows in the server's place.
        let shown = Authority::new("anybody").sign(&["localhost"]);
        let between = between(&shown, &authority, server.port()).await;
        for (binding, works) in [("require", false), ("prefer", false), ("disable", true)] {
            let query = format!("sslmode=require&channel_binding={binding}");
            let url = url("app:hunter2", &query)
                .replace(&server.port().to_string(), &between.to_string());
            let connected = patient(url).connect().await;
            assert_eq!(connected.is_ok(), works, "{binding}: {connected:?}");
        }
    }

    /// Shows another certificate, and hands on what it hears to the server, over TLS of its own.
    async fn between(shown: &Identity, trusted: &Authority, server: u16) -> u16 {
        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};
        use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let certificate = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(shown.key.as_bytes()).unwrap();
        let serving = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate(&shown.certificate)], key)
            .unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(certificate(&trusted.pem)).unwrap();
        let asking = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(serving));
        let connector = tokio_rustls::TlsConnector::from(Arc::new(asking));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (acceptor, connector) = (acceptor.clone(), connector.clone());
                tokio::spawn(async move {
                    let mut request = [0; 8];
                    client.read_exact(&mut request).await?;
                    client.write_all(b"S").await?;
                    let mut server = tokio::net::TcpStream::connect(("127.0.0.1", server)).await?;
                    server.write_all(&request).await?;
                    assert_eq!(server.read_u8().await?, b'S');
                    let name = "localhost".try_into().unwrap();
                    let mut server = connector.connect(name, server).await?;
                    let mut client = acceptor.accept(client).await?;
                    copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        port
    }
}

/// Each host has the time for connecting, whatever the response time-out is.
#[tokio::test]
async fn connecting_has_a_time_out_of_its_own() {
    let silent = Fake::saying(Ipv4Addr::LOCALHOST, b"");
    on_a_steady_machine(async || {
        for store in [
            PostgresStore::builder(silent_url(silent.address, "&connect_timeout=300ms")),
            PostgresStore::builder(silent_url(silent.address, "")).connect_timeout(ms(300)),
            PostgresStore::from_config({
                let mut config = silent.config();
                config.ssl_mode(tokio_postgres::config::SslMode::Disable);
                config.connect_timeout(ms(300));
                config
            }),
        ] {
            let begin = Instant::now();
            let error = fails(store.clone().connect()).await;
            let took = begin.elapsed();
            assert!(
                error.to_string().contains("within 300ms") && error.is_retryable(),
                "{error}"
            );
            // The usual time is 5 s.
            assert!(took >= ms(300) && took < ms(4000), "{took:?}");
        }
    })
    .await;
    for refused in [Duration::ZERO, Duration::from_secs(86_401)] {
        let store = PostgresStore::builder("postgres://h").connect_timeout(refused);
        let error = store.connect_lazy().unwrap_err();
        assert!(error.to_string().contains("from 1 ms to 24 h"), "{error}");
    }
}

fn silent_url(address: SocketAddr, query: &str) -> String {
    format!("postgres://app@{address}/db?sslmode=disable{query}")
}

/// A network that takes longer than the response time-out for TLS, startup and greeting together, and not for one answer.
#[tokio::test]
async fn a_slow_network_only_delays_connecting() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let proxy = Proxy::to_port(server.port());
        proxy.delay(Way::Both, ms(60));
        // All round trips of a set-up fit into the usual time to connect.
        let store = PostgresStore::connect_lazy(PgServer::url_at(proxy.port())).unwrap();
        let locks = LockRegistry::builder(store)
            .response_timeout(ms(500))
            .build()
            .unwrap();
        let begin = Instant::now();
        let lease = locks.obtain("k").lease_within(BOUND).await.unwrap();
        assert!(
            begin.elapsed() > ms(500),
            "it was slow: {:?}",
            begin.elapsed()
        );
        lease.release().await.unwrap();
    })
    .await;
}

/// What is told of servers that cannot answer yet, and of what is no PostgreSQL server.
#[tokio::test]
async fn what_answers_is_named() {
    let starting = b"E\0\0\0\x3eSFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
    let starting = Fake::saying(Ipv4Addr::LOCALHOST, starting);
    let error = fails(PostgresStore::connect(starting.url("sslmode=disable"))).await;
    assert!(
        error.to_string().contains("57P03") && error.is_retryable(),
        "{error}"
    );
    let web = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
    let web = Fake::saying(Ipv4Addr::LOCALHOST, web);
    let mut queries = vec!["sslmode=disable"];
    if cfg!(feature = "tls-rustls") {
        queries.extend(["", "sslmode=prefer"]);
    }
    for query in queries {
        let error = fails(PostgresStore::connect(web.url(query))).await;
        assert!(
            error.to_string().contains("is it a PostgreSQL server?"),
            "{error}"
        );
    }
    #[cfg(feature = "tls-rustls")]
    {
        // As a TLS port of something else does.
        let mute = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("postgres://app@{}/db", mute.local_addr().unwrap());
        thread::spawn(move || {
            for stream in mute.incoming() {
                let _ = stream.unwrap().read(&mut [0; 8]);
            }
        });
        let error = fails(PostgresStore::connect(url)).await;
        assert!(
            error.to_string().contains("is it a PostgreSQL server?"),
            "{error}"
        );
    }
}

/// Look-ups of names as they are elsewhere.
#[cfg(target_os = "linux")]
mod lookups {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tokio::net::TcpListener;

    use super::*;

    /// What the processes below do.
    #[test]
    fn worker() {
        let Some(role) = Role::of_this_process() else {
            return;
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.unwrap().block_on(async {
            let store = PostgresStore::connect_lazy(role.env("URL")).unwrap();
            // The response time-out is as usual.
            let locks = LockRegistry::builder(store).build().unwrap();
            for _ in 0..role.env("TIMES").parse().unwrap() {
                let lease = locks.obtain("k").lease_within(2 * BOUND).await.unwrap();
                lease.release().await.unwrap();
            }
            locks.shutdown().await;
        });
        role.say("done");
    }

    fn run(url: &str, times: &str, env: &[(&str, &str)]) {
        let lookups = Lookups::compile();
        let mut all = vec![
            ("URL", url),
            ("TIMES", times),
            ("LD_PRELOAD", lookups.library()),
        ];
        all.extend(env);
        let worker = Worker::spawn("connecting::lookups::worker", "worker", &all);
        worker.expect_line_blocking("done", PATIENCE);
    }

    /// Longer than the response time-out, which is 1 s.
    #[test]
    fn a_slow_look_up_only_delays() {
        let server = PgServer::start();
        server.run(PostgresStore::SQL);
        let url = server.url().replace("127.0.0.1", "localhost");
        run(&url, "1", &[("LOOKUP_MILLIS", "1500")]);
    }

    /// A name for a primary and something else, in either order: what may write is taken.
    #[tokio::test(flavor = "multi_thread")]
    async fn of_all_addresses_of_a_name_the_one_that_may_write_is_taken() {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let standby = server.standby(&["hot_standby = on"]);
        // The standby, a server that is silent, and nobody, at another address and the same port. It is listened to only
        // once: a port cannot be had again at once while another test starts a process, which has our files until then.
        let listener = TcpListener::bind(("127.0.0.2", server.port()))
            .await
            .unwrap();
        let (is_silent, to) = (Arc::new(AtomicBool::new(false)), standby.port());
        let is_silent_now = Arc::clone(&is_silent);
        let mut serving = tokio::spawn(async move {
            let mut kept = Vec::new();
            while let Ok((mut client, _)) = listener.accept().await {
                if is_silent_now.load(Ordering::SeqCst) {
                    kept.push(client);
                } else {
                    tokio::spawn(async move {
                        let mut server = tokio::net::TcpStream::connect(("127.0.0.1", to)).await?;
                        tokio::io::copy_bidirectional(&mut client, &mut server).await
                    });
                }
            }
        });
        for other in ["standby", "silent", "nobody"] {
            is_silent.store(other == "silent", Ordering::SeqCst);
            if other == "nobody" {
                serving.abort();
                let _ = (&mut serving).await;
            }
            for (first, second) in [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")] {
                let url = server.url().replace("127.0.0.1", "postgres-headless");
                let names = [
                    ("LOOKUP_NAME", "postgres-headless"),
                    ("LOOKUP_FIRST", first),
                    ("LOOKUP_SECOND", second),
                ];
                tokio::task::block_in_place(|| run(&url, "3", &names));
            }
        }
    }

    /// The second address was tried after an eighth of the time, though the first was at work.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_slow_server_with_two_addresses_sees_one_set_up() {
        let server = PgServer::start();
        patient(server.url()).connect().await.unwrap();
        let proxy = Proxy::to_port(server.port());
        let listener = TcpListener::bind(("127.0.0.2", proxy.port()))
            .await
            .unwrap();
        let to = proxy.port();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut server = tokio::net::TcpStream::connect(("127.0.0.1", to)).await?;
                    tokio::io::copy_bidirectional(&mut client, &mut server).await
                });
            }
        });
        on_a_steady_machine(async || {
            // A set-up takes more than eight of these, and the second address has its turn after 7.5 s.
            proxy.delay(Way::ToServer, ms(350));
            let url = PgServer::url_at(proxy.port()).replace("127.0.0.1", "postgres-headless");
            let url = format!(
                "{url}{}connect_timeout=20",
                if url.contains('?') { '&' } else { '?' }
            );
            let names = [
                ("LOOKUP_NAME", "postgres-headless"),
                ("LOOKUP_FIRST", "127.0.0.1"),
                ("LOOKUP_SECOND", "127.0.0.2"),
            ];
            let connections = || {
                let (before, begin) = (proxy.accepted(), Instant::now());
                tokio::task::block_in_place(|| run(&url, "1", &names));
                assert!(begin.elapsed() > ms(2500), "{:?}", begin.elapsed());
                proxy.accepted() - before
            };
            // One time in a hundred a sweep begins meanwhile, which has a connection of its own.
            let made: Vec<_> = (0..3)
                .map(|_| connections())
                .take_while(|it| *it != 1)
                .collect();
            assert!(made.len() < 3, "{made:?}");
        })
        .await;
    }
}
