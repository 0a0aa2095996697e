use std::error::Error;
use std::fmt::Debug;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use lockstream::store::{QuorumStore, RedisStore};
use lockstream::{LockRegistry, StoreError};
use proptest::prelude::*;

use crate::hearing::Log;
use crate::patient;
use crate::support::RedisServer;

/// What every password here begins and ends with, and nothing else does, in whatever case.
const MARKS: [&str; 2] = ["s3kr", "z9qx"];

/// Fails if a part of the password is in the text.
#[track_caller]
fn assert_hidden(text: &str) {
    let text = text.to_lowercase();
    for mark in MARKS {
        assert!(!text.contains(mark), "the password is shown: {text}");
    }
}

#[track_caller]
fn shows_nothing(shown: &(impl Debug + ?Sized)) {
    assert_hidden(&format!("{shown:?} {shown:#?}"));
}

/// Nor in what is told of the error, or of what caused it; which is told once, to whoever follows the causes, too.
#[track_caller]
fn tells_nothing(error: &impl Error) {
    assert_hidden(&format!("{error} {error:?} {error:#?}"));
    let mut told = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        assert_hidden(&format!("{error} {error:?} {error:#?}"));
        assert!(!told.contains(&error.to_string()), "{told}: {error}");
        told += &error.to_string();
        cause = error.source();
    }
}

fn escaped(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(escape).collect()
}

/// Anything between the marks, what means something in a url above all.
fn passwords() -> impl Strategy<Value = String> {
    prop_oneof![
        "[:/?#@%&=+\\[\\] \\\\'\"a-z0-9]{0,12}",
        "\\PC{0,12}",
        ".{0,12}"
    ]
    .prop_map(|odd| format!("{}{odd}{}", MARKS[0], MARKS[1]))
}

/// The ways to write an address with a password, right and wrong ones.
fn urls(port: u16, password: &str) -> Vec<String> {
    let mut urls = Vec::new();
    for password in [password.to_owned(), escaped(password)] {
        for scheme in [
            "redis",
            "rediss",
            "valkey",
            "REDISS",
            "redis+sentinel",
            "redis+cluster",
            "rediss+cluster",
            "http",
            "",
        ] {
            for host in [
                &*format!("127.0.0.1:{port}"),
                "127.0.0.1:x",
                "",
                "[::1",
                "0.0.0.0",
            ] {
                for rest in ["", "/0", "/x", "/?protocol=9", "/#insecure"] {
                    urls.push(format!("{scheme}://:{password}@{host}{rest}"));
                }
            }
            urls.push(format!("{scheme}://user:{password}@127.0.0.1:{port}/0"));
            urls.push(format!("{scheme}://{password}@127.0.0.1:{port}/0"));
        }
        for rest in ["", "&db=x", "&protocol=9", "#x"] {
            urls.push(format!("unix:///nowhere?user=u&pass={password}{rest}"));
            urls.push(format!("redis+unix:///nowhere?pass={password}{rest}"));
        }
        // The sentinels have one of their own.
        for scheme in ["redis+sentinel", "rediss+sentinel", "valkey+sentinel"] {
            for host in [&*format!("127.0.0.1:{port},[::1]"), "x:y", ""] {
                for rest in ["/mine", "/mine/0", "/", ""] {
                    for query in [
                        format!("sentinel_password={password}"),
                        format!("sentinel_user=u&sentinel_password={password}"),
                        format!("sentinel_user={password}"),
                        format!("{password}=x&sentinel_password={password}#x"),
                    ] {
                        urls.push(format!("{scheme}://{host}{rest}?{query}"));
                    }
                }
                urls.push(format!("{scheme}://u:{password}@{host}/mine"));
            }
        }
    }
    urls
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

/// The one error of a store that cannot be reached, or is refused.
async fn error_of(store: RedisStore) -> StoreError {
    let registry = LockRegistry::builder(store).build().unwrap();
    let lock = registry.obtain("k");
    shows_nothing(&(&registry, &lock));
    let error = lock.acquire_once().await.unwrap_err();
    tells_nothing(&error);
    crate::told::<()>(Err(error))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// However the url is written, read or misread: it is not shown, and nobody needs to connect for that.
    #[test]
    fn no_url_shows_its_password(password in passwords()) {
        let log = Log::default();
        let logging = log.hear(tracing::Level::TRACE);
        for url in urls(1, &password) {
            let builder = RedisStore::builder(&url);
            shows_nothing(&builder);
            shows_nothing(&builder.clone().connect());
            shows_nothing(&LockRegistry::connect(&url));
            match builder.connect_lazy() {
                Ok(store) => shows_nothing(&store),
                Err(error) => tells_nothing(&error),
            }
        }
        drop(logging);
        assert_hidden(&log.text());
    }

    /// Nor does what happens on the way to a server that is not there.
    #[test]
    fn no_connection_shows_its_password(password in passwords()) {
        let log = Log::default();
        let logging = log.hear(tracing::Level::TRACE);
        runtime().block_on(async {
            let password = escaped(&password);
            for url in [
                format!("redis://:{password}@127.0.0.1:1/"),
                format!("unix:///nowhere?pass={password}"),
                #[cfg(feature = "tls-rustls")]
                format!("rediss://:{password}@127.0.0.1:1/"),
                #[cfg(feature = "sentinel")]
                format!("redis+sentinel://:{password}@127.0.0.1:1/mine?sentinel_password={password}"),
            ] {
                tells_nothing(&RedisStore::connect(&url).await.unwrap_err());
                tells_nothing(&LockRegistry::connect(&url).await.unwrap_err());
                error_of(RedisStore::connect_lazy(&url).unwrap()).await;
                // One of several: their errors are told together.
                let nodes = (1..=3).map(|node| {
                    let url = url.replace(":1/", &format!(":{node}/"));
                    let url = url.replace("nowhere", &format!("nowhere{node}"));
                    RedisStore::connect_lazy(url).unwrap()
                });
                let registry = LockRegistry::builder(QuorumStore::new(nodes).unwrap()).build().unwrap();
                shows_nothing(&registry);
                tells_nothing(&registry.obtain("k").acquire_once().await.unwrap_err());
            }
        });
        drop(logging);
        let logged = log.text();
        assert!(!logged.is_empty(), "nothing was logged at all");
        assert_hidden(&logged);
    }
}

/// With the right password it works, with another it does not, and neither shows: on one server, for many passwords.
#[test]
fn no_server_makes_a_password_show() {
    let server = RedisServer::start();
    let log = Log::default();
    let logging = log.hear(tracing::Level::TRACE);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 48,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let tried = runner.run(&passwords(), |password| {
        // What a server cannot be told of in a line.
        prop_assume!(!password.contains('\0'));
        server.cmd(&["ACL", "DELUSER", "u"]);
        server.cmd(&[
            "ACL",
            "SETUSER",
            "u",
            "on",
            &format!(">{password}"),
            "~*",
            "&*",
            "+@all",
        ]);
        let url = |password: &str| server.url_with("u", &escaped(password), 0);
        runtime().block_on(async {
            let patiently = format!("{}?connect_timeout=60", url(&password));
            let registry = LockRegistry::connect(patiently).await.unwrap();
            let lease = registry.obtain("k").lease().await.unwrap();
            shows_nothing(&(&registry, &lease));
            lease.release().await.unwrap();
            registry.shutdown().await;

            let wrong = url(&format!("{password}!"));
            tells_nothing(&patient(&wrong).connect().await.unwrap_err());
            let error = error_of(patient(&wrong).connect_lazy().unwrap()).await;
            assert!(error.to_string().contains("WRONGPASS"), "{error}");
        });
        Ok(())
    });
    tried.unwrap();
    drop(logging);
    assert_hidden(&log.text());
}

/// Nor does a certificate that is not believed, neither at a server nor at a sentinel.
#[cfg(feature = "tls-rustls")]
#[test]
fn no_certificate_makes_a_password_show() {
    use crate::authority::Authority;

    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let password = MARKS.concat();
    let log = Log::default();
    let logging = log.hear(tracing::Level::TRACE);
    for identity in [
        theirs.sign(&["localhost"]),
        ours.sign(&["elsewhere.example"]),
        ours.sign_expired(&["localhost"]),
    ] {
        let server = RedisServer::builder().tls(identity.serving(None)).start();
        let port = server.port();
        for url in [
            format!("rediss://u:{password}@localhost:{port}/"),
            #[cfg(feature = "sentinel")]
            format!(
                "rediss+sentinel://u:{password}@localhost:{port}/mine?sentinel_password={password}"
            ),
        ] {
            let store = patient(&url).root_certificate(&ours.pem);
            shows_nothing(&store);
            runtime().block_on(async {
                let error = store.clone().connect().await.unwrap_err();
                assert!(error.to_string().contains("certificate"), "{error}");
                tells_nothing(&error);
                error_of(store.connect_lazy().unwrap()).await;
            });
        }
    }
    drop(logging);
    assert_hidden(&log.text());
}

/// Nor does a client of the user's own, of which all is known but what may be told.
#[cfg(feature = "redis-1")]
#[tokio::test]
async fn no_client_makes_a_password_show() {
    let password = MARKS.concat();
    let url = format!("redis://u:{password}@127.0.0.1:1/");
    let store = RedisStore::from_client(redis::Client::open(url).unwrap()).unwrap();
    shows_nothing(&store);
    error_of(store).await;
}

/// Knows no command, and repeats the arguments of each, as servers do: here those with the password.
fn repeater() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // Ends with the test's process, and does nothing meanwhile.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.unwrap();
            std::thread::spawn(move || repeat(&stream));
        }
    });
    port
}

fn repeat(mut stream: &TcpStream) -> Option<()> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    loop {
        let count: usize = lines.next()?.strip_prefix('*')?.parse().ok()?;
        // Each word comes after a line with its length.
        let words: Vec<_> = (0..count)
            .map(|_| lines.next().and_then(|_| lines.next()))
            .collect::<Option<_>>()?;
        let (name, args) = words.split_first()?;
        let args = args.join("' '");
        write!(
            stream,
            "-ERR unknown command '{name}', with args beginning with: '{args}' \r\n"
        )
        .ok()?;
    }
}

#[test]
fn an_error_that_quotes_the_password_is_not_shown() {
    let port = repeater();
    let log = Log::default();
    let logging = log.hear(tracing::Level::TRACE);
    let password = MARKS.concat();
    runtime().block_on(async {
        for user in ["", "u"] {
            let url = format!("redis://{user}:{password}@127.0.0.1:{port}/");
            let error = patient(&url).connect().await.unwrap_err();
            assert!(!error.is_retryable(), "{error}");
            tells_nothing(&error);
            error_of(patient(&url).connect_lazy().unwrap()).await;
        }
    });
    drop(logging);
    assert_hidden(&log.text());
}
