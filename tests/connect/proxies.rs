//! Proxies before servers.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use lockstream::LockEvent;

use crate::support::{Cluster, HaProxy, Proxy, RedisServer, Way, on_a_steady_machine};
use crate::{BOUND, lazy, ms, told};

/// A proxy that knows RESP2 and some commands, and sends a command to a server by its first key, as Envoy, twemproxy and
/// predixy do. Returns its url.
fn spreading(servers: &[&RedisServer]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let ports: Vec<_> = servers.iter().map(|server| server.port()).collect();
    thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let ports = ports.clone();
            thread::spawn(move || serve(client, &ports));
        }
    });
    url
}

fn serve(client: TcpStream, ports: &[u16]) -> std::io::Result<()> {
    let connect = |port: &u16| TcpStream::connect(("127.0.0.1", *port)).map(BufReader::new);
    let mut servers = ports.iter().map(connect).collect::<Result<Vec<_>, _>>()?;
    let mut client = BufReader::new(client);
    loop {
        let (mut command, mut words) = (Vec::new(), Vec::new());
        read_command(&mut client, &mut command, &mut words)?;
        let key = match words[0].to_ascii_uppercase().as_str() {
            "GET" | "SET" | "DEL" | "PTTL" => 1,
            "EVAL" | "EVALSHA" => 3,
            "PING" => {
                client.get_mut().write_all(b"+PONG\r\n")?;
                continue;
            }
            other => {
                let refusal = format!("-ERR unknown command '{other}'\r\n");
                client.get_mut().write_all(refusal.as_bytes())?;
                continue;
            }
        };
        // Any hash would do.
        let sum = |sum: usize, byte: u8| (sum * 31 + usize::from(byte)) % 65_521;
        let hash = words[key].bytes().fold(7, sum);
        let server = &mut servers[hash % ports.len()];
        server.get_mut().write_all(&command)?;
        let mut reply = Vec::new();
        read_reply(server, &mut reply)?;
        client.get_mut().write_all(&reply)?;
    }
}

fn read_line(from: &mut impl BufRead, raw: &mut Vec<u8>) -> std::io::Result<String> {
    let mut line = Vec::new();
    if from.read_until(b'\n', &mut line)? == 0 {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    raw.extend(&line);
    Ok(String::from_utf8_lossy(&line).trim_end().to_owned())
}

fn read_command(
    from: &mut impl BufRead,
    raw: &mut Vec<u8>,
    words: &mut Vec<String>,
) -> std::io::Result<()> {
    let count: usize = read_line(from, raw)?[1..].parse().unwrap();
    for _ in 0..count {
        let length: usize = read_line(from, raw)?[1..].parse().unwrap();
        let mut word = vec![0; length + 2];
        from.read_exact(&mut word)?;
        raw.extend(&word);
        words.push(String::from_utf8_lossy(&word[..length]).into_owned());
    }
    Ok(())
}

fn read_reply(from: &mut impl BufRead, raw: &mut Vec<u8>) -> std::io::Result<()> {
    let line = read_line(from, raw)?;
    let (kind, rest) = line.split_at(1);
    match (kind, rest.parse::<i64>()) {
        ("$", Ok(length @ 0..)) => {
            let mut text = vec![0; usize::try_from(length).unwrap() + 2];
            from.read_exact(&mut text)?;
            raw.extend(text);
        }
        ("*", Ok(count)) => {
            for _ in 0..count {
                read_reply(from, raw)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// One key worked. But the locks of one call all went to the server of the first, and two registries could hold one key.
#[tokio::test]
async fn a_proxy_that_spreads_keys_is_refused() {
    let servers = [RedisServer::start(), RedisServer::start()];
    let url = spreading(&[&servers[0], &servers[1]]);
    let locks = lazy(&url);
    let by_lock = told(locks.obtain("a").lease().await);
    let by_check = locks.check().await.unwrap_err();
    for error in [by_lock, by_check] {
        let told = error.to_string();
        assert!(
            told.contains("a proxy that spreads keys over several servers"),
            "{told}"
        );
        assert!(
            told.contains("redis+cluster://"),
            "it says what to do: {told}"
        );
        assert!(!error.is_retryable(), "{told}");
    }
    for server in &servers {
        assert_eq!(server.keys("*"), Vec::<String>::new(), "nothing is left");
    }
}

/// The same proxy before one server is as good as that: it only knows no push.
#[tokio::test]
async fn such_a_proxy_before_one_server_works_by_polling() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let url = spreading(&[&server, &server]);
        let (one, two) = (lazy(&url), lazy(&url));
        let check = one.check().await.unwrap();
        assert!(check.servers[0].no_push.is_some(), "{check}");
        let lease = one.obtain("k").lease().await.unwrap();
        assert!(two.obtain("k").lease_once().await.unwrap().is_none());
        let waiting = tokio::spawn(two.obtain("k").lease());
        // Also several in one call.
        let many: Vec<_> = ["a", "b", "c", "d"]
            .map(|key| one.obtain(key).lease())
            .into();
        for lease in futures::future::join_all(many).await {
            lease.unwrap().release().await.unwrap();
        }
        lease.release().await.unwrap();
        let next = tokio::time::timeout(BOUND, waiting).await.unwrap().unwrap();
        next.unwrap().release().await.unwrap();
    })
    .await;
}

/// Somebody accepts the first connection and never speaks, as an address does whose server has just gone.
#[tokio::test]
async fn an_attempt_that_hangs_does_not_keep_the_next_from_trying() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let to = server.port();
        thread::spawn(move || {
            let (silent, _) = listener.accept().unwrap();
            for client in listener.incoming().map_while(Result::ok) {
                crate::lookups::relay(client, to);
            }
            drop(silent);
        });
        // The next one begins after 12.5 to 17.5 s.
        let url = format!("redis://127.0.0.1:{port}/?connect_timeout=20");
        let begin = std::time::Instant::now();
        let locks = lazy(&format!("{url}&response_timeout=4"));
        let lease = locks.obtain("k").lease_once().await.unwrap().unwrap();
        let took = begin.elapsed();
        assert!((ms(12_000)..ms(20_000)).contains(&took), "{took:?}");
        lease.release().await.unwrap();
    })
    .await;
}

/// After a third of the time to connect each registry began another set-up, though the server was only slow: it got twice
/// and three times the work because it had too much.
#[tokio::test]
async fn a_slow_server_sees_one_set_up_of_each_registry() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        // A set-up takes three of these; another one began after 8 s, a third of the time, and begins after 15 s.
        proxy.delay(Way::ToServer, ms(3000));
        let url = format!("{}?connect_timeout=24&response_timeout=8", proxy.url());
        let fleet = [lazy(&url), lazy(&url), lazy(&url)];
        let leases = fleet.iter().enumerate();
        let leases = leases.map(|(key, locks)| locks.obtain(key.to_string()).lease());
        for lease in futures::future::join_all(leases).await {
            assert!(lease.unwrap().is_valid());
        }
        assert_eq!(proxy.accepted(), 3);
    })
    .await;
}

/// Each node was asked for the map an eighth of a second after the one before, though that one was at work.
#[tokio::test]
async fn a_slow_cluster_sees_one_question_for_the_map() {
    on_a_steady_machine(async || {
        let cluster = Cluster::without_replicas();
        let nodes = [0, 1].map(|index| Proxy::to_port(cluster.server(index).port()));
        // A question takes two of these, and the next node has its turn after 10 s.
        nodes
            .iter()
            .for_each(|node| node.delay(Way::ToServer, ms(1000)));
        let [one, two] = nodes.each_ref().map(Proxy::port);
        let url = format!(
            "redis+cluster://127.0.0.1:{one},127.0.0.1:{two}/?response_timeout=10&connect_timeout=30"
        );
        let lease = lazy(&url).obtain("k").lease().await.unwrap();
        assert!(lease.is_valid());
        // At a random one of them.
        let mut accepted = nodes.each_ref().map(Proxy::accepted);
        accepted.sort_unstable();
        assert_eq!(accepted, [0, 1]);
        lease.release().await.unwrap();
    })
    .await;
}

/// It ends each connection after a second of silence, and a renewal comes every ten.
#[tokio::test]
async fn a_proxy_that_ends_idle_connections_costs_no_lease() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = HaProxy::to(server.port(), ms(1000));
        let (one, two) = (lazy(&proxy.url()), lazy(&proxy.url()));
        let lease = one.obtain("k").lease().await.unwrap();
        let waiting = tokio::spawn(two.obtain("k").lease());
        while one.obtain("k").inspect().await.unwrap().waiting == 0 {
            tokio::time::sleep(ms(10)).await;
        }
        let renewed = lease.deadline();
        // Each has lost its connection three times or more.
        let begin = std::time::Instant::now();
        while begin.elapsed() < ms(5000) {
            assert!(lease.is_valid());
            tokio::time::sleep(ms(100)).await;
        }
        assert!(
            lease.deadline() > renewed,
            "it is renewed at each reconnect"
        );
        let waiter = two.snapshot();
        assert_eq!(waiter.keys.len(), 1);
        lease.release().await.unwrap();
        // The grant may come between two connections: then the waiter finds it at the next.
        let next = tokio::time::timeout(BOUND, waiting).await.unwrap().unwrap();
        next.unwrap().release().await.unwrap();
    })
    .await;
}

/// A connection that is closed while nobody uses it says nothing of how long the next one takes.
#[tokio::test]
async fn after_an_idle_loss_a_caller_waits_for_the_connection() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let locks = lazy(&proxy.url());
        let events = locks.every_event();
        let lease = locks.obtain("k").lease().await.unwrap();
        lease.release().await.unwrap();
        proxy.cut();
        let lost = tokio::task::spawn_blocking(move || {
            let mut events = events.iter();
            events.any(|it| matches!(it, LockEvent::StoreDown { .. }))
        });
        assert!(tokio::time::timeout(BOUND, lost).await.unwrap().unwrap());
        // Longer than the caller waits for others.
        proxy.delay(Way::ToServer, ms(100));
        let lease = locks.obtain("k").lease_within(ms(50)).await.unwrap();
        lease.release().await.unwrap();
    })
    .await;
}
