//! O4: how a connection is made, what it can do, and what happens to the one before it.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};

use super::fake::{Fake, push};
use super::hearing::Log;
use super::registry::{
    BOUND, HELD, NOT_HELD, Registry, Settings, TTL, attempt, release, renew, unknown, unsent,
    withdraw, won,
};
use super::support::{Proxy, RedisServer, Way, on_a_steady_machine, wait_until};
use crate::handle::LockRegistry;
use crate::store::RedisStore;
use crate::store::contract::{Outcome, StoreEvent};

/// The connection of the one registry on the server.
fn id(server: &RedisServer) -> u64 {
    let mut clients = server.clients().into_iter();
    clients
        .find(|client| client.subscriptions() == 1)
        .expect("one is subscribed")
        .id()
}

#[tokio::test]
async fn o4_a_reconnect_goes_in_order() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = seen.clone();
    let fake = Fake::start(move |request| {
        if request.connection == 2 {
            record.lock().unwrap().push(request.words.join(" "));
        } else if request.is_call() {
            return Some(b"what is this".to_vec());
        }
        None
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    unknown(one.ask("k", attempt(1)).await);
    one.down().await;
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);

    let seen = seen.lock().unwrap();
    let order = [
        "HELLO 3",
        // The fake server numbers its connections.
        "CLIENT KILL ID 1 ADDR",
        "SUBSCRIBE lock:~grant:a1",
        "lock:~grant:a1 probe ",
        "lock:k",
    ];
    let places = order.map(|wanted| seen.iter().position(|line| line.contains(wanted)));
    assert!(
        places.iter().all(Option::is_some) && places.is_sorted(),
        "{places:?} in {seen:#?}"
    );
}

/// `INFO` takes a server far longer than other commands. Its run id may be another each time, and the
/// policy is warned of once.
#[tokio::test]
async fn g2_the_memory_policy_is_asked_for_at_the_first_connection_alone() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let record = asked.clone();
    let fake = Fake::start(move |request| {
        if request.is("INFO") {
            let mut asked = record.lock().unwrap();
            asked.push(format!("{} {}", request.connection, request.words[1]));
        }
        (request.connection == 1 && request.is_call()).then(|| b"what is this".to_vec())
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    unknown(one.ask("k", attempt(1)).await);
    one.down().await;
    assert!(one.up().await);
    assert_eq!(*asked.lock().unwrap(), ["1 server", "1 memory", "2 server"]);
}

/// A command was on its way when the connection broke, and arrives after all: the one that asked
/// has long been told that nobody knows, and has begun again.
#[tokio::test]
async fn o4_the_old_connection_is_killed_with_its_commands() {
    let server = RedisServer::start();
    let far = Proxy::to(&server);
    let near = Proxy::to_port(far.port());
    let mut one = Settings::url(near.url(), "a1").up().await;
    let old = id(&server);

    // So that the server knows the script.
    won(&one.outcome("other", attempt(9)).await);
    // The far one keeps it back, and connections to come do not go by there.
    far.hold(Way::ToServer, true);
    near.aim_at(&server);
    let (before, _) = near.bytes();
    one.submit("k", attempt(1));
    wait_until("it is on its way", BOUND, || near.bytes().0 > before).await;
    near.half_close(Way::ToClient);
    unknown(one.reply("k", &attempt(1)).await);
    one.down().await;
    assert!(one.up().await);
    assert!(
        server.clients().iter().all(|client| client.id() != old),
        "killed"
    );

    far.hold(Way::ToServer, false);
    wait_until("the old connection's bytes go on", BOUND, || {
        far.connections() == 0
    })
    .await;
    one.has_not_heard(|event| matches!(event, StoreEvent::Down { .. }))
        .await;
    assert!(!server.exists("lock:k"), "nothing was won for nobody");
}

/// Ids start again with the server. What has our old id is somebody else's connection now.
#[tokio::test]
async fn o4_no_stranger_is_killed_after_the_server_was_started_again() {
    let mut server = RedisServer::start();
    let client = redis::Client::open(server.url()).unwrap();
    let padding = [(); 5].map(|()| client.get_connection().unwrap());
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").up().await;
    let old = id(&server);
    drop(padding);

    proxy.refuse();
    server.restart();
    one.down().await;
    let mut strangers: Vec<(u64, redis::Connection)> = Vec::new();
    while strangers.last().is_none_or(|(id, _)| *id < old) {
        let mut stranger = client.get_connection().unwrap();
        let id = redis::cmd("CLIENT").arg("ID").query(&mut stranger).unwrap();
        strangers.push((id, stranger));
    }
    proxy.accept();
    assert!(one.up().await);
    let (id, stranger) = strangers.last_mut().unwrap();
    assert_eq!(*id, old);
    redis::cmd("PING")
        .exec(stranger)
        .expect("it was left alone");
}

#[tokio::test]
async fn o4_no_right_to_kill_is_no_error() {
    let server = RedisServer::builder()
        .config("user meek on nopass ~* &* +@all -client")
        .start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url_with("meek", "x", 0), "a1")
        .up()
        .await;
    proxy.cut();
    one.down().await;
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}

#[tokio::test]
async fn a_broken_connection_is_noticed_at_once_and_made_again() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    let mut waiter = Registry::on(&server, "b2").await;
    for _ in 0..3 {
        server.client_kill_all();
        assert!(one.down().await.is_retryable());
        assert!(one.up().await);
        won(&one.outcome("k", attempt(1)).await);
        waiter.down().await;
        assert!(waiter.up().await);
    }
}

/// Whatever a no-push registry needs, under each of the reasons to be one.
async fn works_without_push(server: &RedisServer, url: String) {
    let log = Log::default();
    let _collecting = log.hear(tracing::Level::TRACE);
    let proxy = Proxy::to(server);
    let url = url.replace(
        &format!(":{}/", server.port()),
        &format!(":{}/", proxy.port()),
    );
    let mut one = Settings::url(url, "a1").open();
    one.session().start();
    assert!(!one.up().await, "no queue");
    won(&one.outcome("k", attempt(1)).await);
    assert_eq!(one.outcome("k", renew(1, 2 * TTL)).await, Outcome::Renewed);
    let key_status = one.session().inspect("k".into()).await.unwrap();
    assert_eq!(key_status.owner(), Some(one.text(1)));
    assert_eq!(one.outcome("k", withdraw(2)).await, NOT_HELD);
    assert_eq!(one.outcome("k", release(1)).await, HELD);

    // The same after a reconnect, but for the warning.
    proxy.cut();
    let _ = one.ask("k", attempt(3)).await;
    assert!(!one.up().await);
    won(&one.outcome("k", attempt(3)).await);
    let warnings = log.text().matches("WARN").count();
    assert_eq!(warnings, 1, "said once:\n{}", log.text());
}

#[tokio::test]
async fn o4_without_a_right_to_the_channel_there_is_no_push() {
    let server = RedisServer::builder()
        .config("user deaf on nopass ~* resetchannels +@all")
        .start();
    works_without_push(&server, server.url_with("deaf", "x", 0)).await;
}

#[tokio::test]
async fn o4_without_a_right_to_publish_there_is_no_push() {
    let server = RedisServer::builder()
        .config("user mute on nopass ~* &* +@all -publish")
        .start();
    works_without_push(&server, server.url_with("mute", "x", 0)).await;
}

#[tokio::test]
async fn o4_on_a_server_that_speaks_resp2_only_there_is_no_push() {
    let server = RedisServer::builder()
        .config("rename-command HELLO \"\"")
        .start();
    works_without_push(&server, server.url()).await;
}

#[tokio::test]
async fn o4_on_a_proxy_that_knows_no_third_version_there_is_no_push() {
    let fake = Fake::start(|request| {
        let is_hello = request.is("HELLO");
        is_hello.then(|| b"-NOPROTO unsupported protocol version\r\n".to_vec())
    });
    let mut one = Settings::url(fake.url(), "a1").open();
    one.session().start();
    assert!(!one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}

/// A proxy that takes the subscription, and drops what is pushed.
#[tokio::test]
async fn o4_pushes_that_do_not_arrive_make_no_push() {
    on_a_steady_machine(async || {
        let fake = Fake::start(|request| {
            request
                .is_probe()
                .then(|| request.reply(super::fake::NOW, b"$1\r\n1\r\n"))
        });
        let settings = Settings::url(fake.url(), "a1").response_timeout(Duration::from_millis(300));
        let mut one = settings.open();
        one.session().start();
        assert!(!one.up().await);
        won(&one.outcome("k", attempt(1)).await);
    })
    .await;
}

/// The wait for it was as long as an answer may take, and left no time for connecting.
#[tokio::test]
async fn o4_pushes_that_do_not_arrive_leave_time_to_connect() {
    on_a_steady_machine(async || {
        let fake = Fake::start(|request| {
            request
                .is_probe()
                .then(|| request.reply(super::fake::NOW, b"$1\r\n1\r\n"))
        });
        let url = format!("{}?connect_timeout=600ms", fake.url());
        let mut one = Settings::url(url, "a1")
            .response_timeout(Duration::from_secs(1))
            .open();
        one.session().start();
        assert!(!one.up().await);
        won(&one.outcome("k", attempt(1)).await);
    })
    .await;
}

/// The time of the server is that of the probe's reply, however long its push was waited for: else the first calls would
/// come too late.
#[tokio::test]
async fn o5_the_wait_for_a_push_that_does_not_arrive_counts() {
    on_a_steady_machine(async || {
        let of_use = Arc::new(Mutex::new(None));
        let seen = of_use.clone();
        let fake = Fake::start(move |request| {
            if request.is_call() {
                seen.lock().unwrap().get_or_insert(request.of_use());
            }
            let probed = || request.reply(super::fake::NOW, b"$1\r\n1\r\n");
            request.is_probe().then(probed)
        });
        let settings = Settings::url(fake.url(), "a1").response_timeout(Duration::from_millis(300));
        let mut one = settings.open();
        one.session().start();
        assert!(!one.up().await);
        won(&one.outcome("k", attempt(1)).await);
        // 300 ms in which nothing was heard, less the drift, and 300 ms for the answer.
        let of_use = of_use.lock().unwrap().expect("a call");
        assert!(of_use >= super::fake::NOW + 599_000, "{of_use}");
    })
    .await;
}

/// The old connection is still subscribed, and hears what the probe before published.
#[tokio::test]
async fn o4_a_push_with_another_nonce_proves_nothing() {
    let fake = Fake::start(|request| {
        request.is_probe().then(|| {
            let mut bytes = push(&["message", "lock:~grant:a1", "probe 0000000000000000"], "");
            bytes.extend(request.reply(super::fake::NOW, b"$1\r\n1\r\n"));
            bytes
        })
    });
    let settings = Settings::url(fake.url(), "a1").response_timeout(Duration::from_millis(300));
    let mut one = settings.open();
    one.session().start();
    assert!(!one.up().await);
}

/// A ticket of ours stood from before; its grant comes between the subscription and the proof.
#[tokio::test]
async fn a_grant_that_comes_before_the_proof_is_told_after_up() {
    let fake = Fake::start(|request| {
        request.is_probe().then(|| {
            let grant = "1 a1:5 30000 8 9 some key";
            let mut bytes = push(&["message", "lock:~grant:a1", grant], "");
            bytes.extend(request.usual());
            bytes
        })
    });
    let mut one = Settings::url(fake.url(), "a1").open();
    one.session().start();
    assert!(matches!(
        one.next().await,
        StoreEvent::Up { queue: true, .. }
    ));
    let (key, grant) = one.granted().await;
    assert_eq!((&*key, grant.epoch), ("some key", 8));
}

#[tokio::test]
async fn other_messages_than_our_grants_are_ignored() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    for rubbish in [
        "",
        "1",
        "2 a1:1 30000 1 1 k",
        "1 b2:1 30000 1 1 k",
        "\u{0}\u{1}",
        "probe x",
    ] {
        assert_eq!(
            server.ask::<u64>(&["PUBLISH", "lock:~grant:a1", rubbish]),
            1
        );
    }
    server.cmd(&["PUBLISH", "lock:~grant:a1", "1 a1:1 30000 1 1 k"]);
    assert_eq!(&*one.granted().await.0, "k");
    one.has_not_heard(|event| !matches!(event, StoreEvent::Up { .. }))
        .await;
}

#[tokio::test]
async fn g1_a_failed_attempt_fails_the_requests_that_wait_for_it() {
    let mut server = RedisServer::start();
    server.kill();
    let mut one = Settings::new(&server, "a1").open();
    let began = Instant::now();
    // The pauses between so many attempts are 0.2, 1 and 2 s at most. A request that waited for its own time-out would
    // take longer than all of them may.
    for owner in 1..=4 {
        let error = unsent(one.ask("k", attempt(owner)).await);
        assert!(
            error.is_retryable() && error.to_string().contains("refused"),
            "{error}"
        );
        one.down().await;
    }
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    assert!(one.session().inspect("k".into()).await.is_err());
    one.down().await;

    server.restart();
    assert!(one.up().await, "by itself, with nothing submitted");
    won(&one.outcome("k", attempt(21)).await);
}

#[tokio::test]
async fn o4_a_replica_is_no_server_to_us_until_it_is_promoted() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]);

    let (why, retryable) = super::registry::refused(one.ask("k", release(1)).await);
    assert!(why.contains("READONLY") && retryable, "{why}");
    assert!(one.down().await.to_string().contains("READONLY"));
    let error = unsent(one.ask("k", attempt(2)).await);
    assert!(
        error.to_string().contains("READONLY") && error.is_retryable(),
        "{error}"
    );

    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    assert!(one.up().await);
    assert_eq!(one.outcome("k", release(1)).await, HELD);
}

#[tokio::test]
async fn o4_a_server_that_loads_counts_as_a_reconnect() {
    let fake = Fake::start(move |request| {
        let loads = request.is_call() && request.connection == 1
            || request.is_probe() && request.connection == 2;
        loads.then(|| b"-LOADING Redis is loading the dataset in memory\r\n".to_vec())
    });
    let mut one = Settings::url(fake.url(), "a1").up().await;
    let (why, retryable) = super::registry::refused(one.ask("k", attempt(1)).await);
    assert!(why.contains("LOADING") && retryable, "{why}");
    one.down().await;
    assert!(
        one.down().await.to_string().contains("LOADING"),
        "the second connection's probe"
    );
    assert!(one.up().await);
    won(&one.outcome("k", attempt(1)).await);
}

/// A proxy that knows passwords and no users: the database is chosen after the log-in that counts.
#[tokio::test]
async fn a_database_is_selected_again_when_the_user_is_left_out() {
    let is_in = Arc::new(Mutex::new(false));
    let state = is_in.clone();
    let fake = Fake::start(move |request| {
        let mut is_in = state.lock().unwrap();
        let refusal = match request.words[0].as_str() {
            "HELLO" => "ERR unknown command 'HELLO'",
            "AUTH" if request.words.len() == 3 => {
                "ERR wrong number of arguments for 'auth' command"
            }
            "AUTH" => {
                *is_in = true;
                return None;
            }
            _ if !*is_in => "NOAUTH Authentication required.",
            _ => return None,
        };
        Some(format!("-{refusal}\r\n").into_bytes())
    });
    let url = fake.url().replace("redis://", "redis://me:password@") + "3";
    let mut one = Settings::url(url, "a1").open();
    one.session().start();
    assert!(!one.up().await, "over RESP2 waiters poll");
    assert!(*is_in.lock().unwrap());
}

/// The first thing that a process does. Whoever gave it up left the request to be done, and then the lease was released.
#[tokio::test]
async fn an_adoption_waits_for_the_first_connection() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let within = Duration::from_millis(300);
        let open = |url: &str| {
            let store = RedisStore::connect_lazy(url).unwrap();
            let builder = LockRegistry::builder(store).response_timeout(within);
            builder.build().unwrap()
        };
        let lease = open(&server.url()).obtain("k").lease().await.unwrap();
        let detached = lease.detach().unwrap();

        // As far away as a server is whose TLS or whose name takes its time.
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let real = server.url();
        let real = real
            .trim_start_matches("redis://")
            .trim_end_matches('/')
            .to_owned();
        let relay = tokio::spawn(async move {
            loop {
                let (mut near, _) = listener.accept().await.unwrap();
                let real = real.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(3 * within).await;
                    let mut far = TcpStream::connect(real).await.unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                });
            }
        });
        let lease = open(&url).adopt(detached).await.unwrap();
        lease.release().await.unwrap();
        relay.abort();
    })
    .await;
}

/// As where a role may have one connection, or the server is at its limit: the attempts took it from each other, for ever.
#[tokio::test]
async fn g1_an_attempt_that_is_slow_is_not_ended_by_the_failure_of_the_next() {
    on_a_steady_machine(async || {
        let of_each_first = Duration::from_millis(800);
        let fake = Fake::start_over(
            move |stream, connection| {
                // The first of each two is slow, and the second refused.
                (connection % 2 == 1).then(|| std::thread::sleep(of_each_first))?;
                Some(stream)
            },
            |_| None,
        );
        let url = format!("{}?connect_timeout=1200ms&protocol=2", fake.url());
        let mut one = Settings::url(url, "a1")
            .response_timeout(Duration::from_millis(300))
            .open();
        one.session().start();
        assert!(!one.up().await);
    })
    .await;
}
