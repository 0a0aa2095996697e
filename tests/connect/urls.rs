//! Urls as people write them, after the pages of other libraries.

use lockstream::LockRegistry;
use lockstream::store::RedisStore;

use crate::support::RedisServer;
use crate::{lazy, told};

/// What becomes of a url.
enum Fate {
    /// It is taken.
    Taken,
    /// It is refused, and this is in the error.
    Refused(&'static str),
}
use Fate::{Refused, Taken};

/// Of redis-rs, redis-py, node-redis, ioredis, go-redis, Jedis, Lettuce and Spring, Sidekiq and Rails, Celery, Laravel,
/// and of managed services.
const URLS: &[(&str, Fate)] = &[
    ("redis://127.0.0.1", Taken),
    ("redis://127.0.0.1/", Taken),
    ("redis://redis.example:7372/0", Taken),
    ("redis://:p4ssw0rd@10.0.1.1:6380/15", Taken),
    ("redis://alice:foobared@awesome.redis.server:6380/2", Taken),
    ("redis://[::1]:6379/1", Taken),
    ("REDIS://host/", Taken),
    ("valkey://host:6379/0", Taken),
    (
        "rediss://default:AVNS_x@db-redis-nyc3.example.com:25061",
        Taken,
    ),
    (
        "rediss://master.cache.abc123.use1.cache.amazonaws.com:6379",
        Taken,
    ),
    ("redis://localhost:6379?db=2", Taken),
    ("redis://localhost:6379/2?db=2", Taken),
    ("redis://localhost:6379/0?db=2", Taken),
    (
        "redis://localhost:6379/1?db=2",
        Refused("different databases"),
    ),
    (
        "redis://localhost:6379?db=two",
        Refused("db must be a number"),
    ),
    ("redis://localhost?username=u&password=p", Taken),
    (
        "redis://u:p@localhost?password=other",
        Refused("given twice"),
    ),
    ("redis://localhost/?protocol=resp3", Taken),
    ("redis://localhost/?protocol=3", Taken),
    ("redis://localhost/?protocol=resp2", Taken),
    (
        "redis://localhost/?protocol=4",
        Refused("protocol must be 2 or 3"),
    ),
    ("unix:///run/redis.sock", Taken),
    ("redis+unix:///run/redis.sock?db=1&user=u&pass=p", Taken),
    ("unix:///run/redis.sock?db=0&password=p", Taken),
    (
        "redis://host/?connect_timeout=2&response_timeout=500ms&name=web-1&prefix=shop",
        Taken,
    ),
    (
        "redis://host/?connect_timeout=0",
        Refused("from 1ms to 24h"),
    ),
    (
        "redis://host/?connect_timeout=fast",
        Refused("such as 5 (seconds)"),
    ),
    ("redis://host/?name=", Taken),
    (
        "redis://host/?ssl_cert_reqs=none",
        Refused("danger_accept_invalid_certificates"),
    ),
    ("rediss://host/?ssl_cert_reqs=required", Refused("ca_file=")),
    (
        "rediss://host/?ssl_cert_reqs=CERT_NONE",
        Refused("danger_accept_invalid_certificates"),
    ),
    (
        "rediss://host/?verifyPeer=NONE",
        Refused("danger_accept_invalid_certificates"),
    ),
    (
        "rediss://host/#insecure",
        Refused("danger_accept_invalid_certificates=true"),
    ),
    (
        "rediss://host/?danger_accept_invalid_certificates=true",
        Taken,
    ),
    (
        "redis://host/?danger_accept_invalid_certificates=true",
        Refused("rediss://"),
    ),
    ("rediss://host/?server_name=redis.example", Taken),
    (
        "rediss://host/?ca_file=/nowhere/ca.pem",
        Refused("/nowhere/ca.pem"),
    ),
    (
        "rediss://host/?cert_file=/nowhere/client.pem",
        Refused("need each other"),
    ),
    ("redis://host/?ssl=true", Refused("rediss://")),
    (
        "redis://localhost?socket_timeout=5",
        Refused("response_timeout="),
    ),
    (
        "redis://localhost?socket_connect_timeout=1",
        Refused("connect_timeout="),
    ),
    (
        "redis://localhost:6379?decode_responses=True&health_check_interval=2",
        Refused("leave it out"),
    ),
    (
        "redis://localhost/0?max_connections=10",
        Refused("one connection"),
    ),
    (
        "redis://user:password@localhost:6789/3?dial_timeout=3&db=1&read_timeout=6s&max_retries=2",
        Refused("different databases"),
    ),
    (
        "redis://localhost:6789/3?dial_timeout=3",
        Refused("connect_timeout="),
    ),
    (
        "redis://localhost:6789/3?read_timeout=6s",
        Refused("response_timeout="),
    ),
    (
        "redis://localhost/1?timeout=10s&clientName=web",
        Refused("response_timeout="),
    ),
    ("redis://localhost/1?clientName=web", Refused("name=")),
    ("redis://localhost/1?keyPrefix=shop", Refused("prefix=")),
    (
        "redis://host/?sslmode=require",
        Refused("write rediss:// for TLS"),
    ),
    ("redis://host/?family=6", Refused("unknown option family")),
    ("redis://host/?db=1&db=1", Refused("given twice")),
    ("redis://host/?db=1&database=1", Refused("mean the same")),
    (
        "redis-sentinel://localhost:26379,localhost:26380/0#mymaster",
        Refused("redis+sentinel://"),
    ),
    ("redis-socket:///tmp/redis", Refused("unix:///path")),
    ("sentinel://localhost:26379", Refused("redis+sentinel://")),
    (
        "redis+sentinel://one,two:26380/mymaster/1?sentinel_user=u&sentinel_password=p",
        Taken,
    ),
    (
        "redis+sentinel://one/mymaster?sentinel_user=u",
        Refused("sentinel_password"),
    ),
    (
        "redis+sentinel://one/mymaster?master=x",
        Refused("unknown option master"),
    ),
    (
        "redis+sentinel://one/mymaster?prefix=shop&connect_timeout=1",
        Taken,
    ),
    ("redis+cluster://one:7000,two:7000/", Taken),
    ("redis+cluster://one:7000/?db=1", Refused("database 0")),
    (
        "redis+cluster://one:7000/?cluster=yes",
        Refused("unknown option cluster"),
    ),
    ("redis://one:6379,two:6379/", Refused("redis+cluster://")),
    ("tcp://127.0.0.1:6379?database=2", Refused("redis://")),
    ("http://127.0.0.1:6379", Refused("redis://")),
    ("localhost:6379", Refused("write redis://localhost:6379")),
    #[cfg(feature = "postgres")]
    ("localhost:5432/shop", Refused("PostgreSQL is postgres://")),
    (
        "redis.example:6379,password=x,ssl=True",
        Refused("it has no scheme"),
    ),
    ("memcached://host", Refused("expected redis://")),
    ("", Refused("it has no scheme")),
];

#[tokio::test]
async fn every_url_is_honoured_or_refused_with_what_to_write() {
    for (url, fate) in URLS {
        match (RedisStore::connect_lazy(*url), fate) {
            (Ok(_), Taken) => {}
            (Err(error), Refused(word)) => {
                assert!(error.to_string().contains(word), "{url}: {error}");
                assert!(!error.is_retryable(), "{url}: {error}");
            }
            (Ok(_), Refused(word)) => panic!("{url} was taken, and not refused with {word:?}"),
            (Err(error), Taken) => panic!("{url} was refused: {error}"),
        }
    }
}

/// Options were ignored: two processes were in, in different databases.
#[tokio::test]
async fn a_database_is_one_whether_in_the_path_or_an_option() {
    let server = RedisServer::start();
    let base = server.url();
    let base = base.trim_end_matches('/');
    let by_path = lazy(&format!("{base}/1"));
    let lease = by_path.obtain("k").lease().await.unwrap();
    let unix = server.unix_url();
    for url in [
        format!("{base}/?db=1"),
        format!("{base}?database=1"),
        format!("{unix}?db=1"),
    ] {
        let locks = lazy(&format!("{url}&response_timeout=10"));
        assert!(locks.obtain("k").lease_once().await.unwrap().is_none());
    }
    lease.release().await.unwrap();
}

#[tokio::test]
async fn what_a_url_says_of_the_registry_holds() {
    let server = RedisServer::start();
    let url = format!("{}?prefix=shop&name=web-1&response_timeout=3", server.url());
    let locks = LockRegistry::connect(&*url).await.unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    assert!(server.exists("shop:k"), "{:?}", server.keys("*"));
    let owner = server.get("shop:k").unwrap();
    assert!(owner.starts_with("web-1~"), "{owner}");
    // The code may say the same, and another name.
    let builder = || LockRegistry::builder_for(&url).unwrap();
    let other = builder().prefix("shop").name("web-2").build().unwrap();
    assert!(other.obtain("k").lease_once().await.unwrap().is_none());
    let error = builder().prefix("other").build().unwrap_err();
    assert_eq!(error.setting(), "prefix");
    lease.release().await.unwrap();

    // What is out of range is refused when the registry is built, or connected.
    for option in ["prefix=a:b", "prefix=", "name=a%20b", "name="] {
        let url = format!("{}?{option}", server.url());
        assert!(
            LockRegistry::builder_for(&url).unwrap().build().is_err(),
            "{option}"
        );
        let error = LockRegistry::connect(url).await.unwrap_err();
        assert!(!error.is_retryable(), "{error}");
    }

    // The time-out is that of the url, and not the usual one, of a second.
    let waits = builder().build().unwrap();
    assert!(waits.obtain("j").lease_once().await.unwrap().is_some());
    server.stop();
    let begin = std::time::Instant::now();
    let error = told(waits.obtain("j2").lease_once().await);
    assert!(error.is_retryable(), "{error}");
    assert!(begin.elapsed() >= crate::ms(2_990));
    server.cont();
}

/// The nodes of a quorum speak for one registry.
#[tokio::test]
async fn the_urls_of_a_quorum_say_the_same_of_the_registry() {
    use lockstream::store::QuorumStore;
    let quorum = |options: [&str; 2]| {
        let url = |(index, option)| format!("redis://10.0.0.{index}/{option}");
        let urls = options.into_iter().enumerate().map(url);
        let nodes: Result<Vec<_>, _> = urls.map(RedisStore::connect_lazy).collect();
        QuorumStore::new(nodes.unwrap())
    };
    let store = quorum(["?prefix=shop", "?prefix=shop"]).unwrap();
    let locks = LockRegistry::builder(store.clone()).prefix("other").build();
    assert_eq!(locks.unwrap_err().setting(), "prefix");
    assert!(LockRegistry::builder(store).prefix("shop").build().is_ok());
    for options in [
        ["?prefix=shop", ""],
        ["?prefix=a", "?prefix=b"],
        ["", "?name=x"],
    ] {
        let error = quorum(options).unwrap_err();
        assert!(error.to_string().contains("the same prefix"), "{error}");
        assert!(!error.is_retryable());
    }
}

/// What is typed at a prompt, and servers of another kind: the error says what was seen.
#[tokio::test]
async fn a_port_of_something_else_is_told() {
    use std::io::{Read, Write};
    for page in [
        "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        // Without a status line, as to a client of HTTP/0.9.
        "<!DOCTYPE HTML>\n<html><p>Bad request syntax</p></html>\n",
    ] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("redis://{}/", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let mut client = client.unwrap();
                let _ = client.read(&mut [0; 1024]);
                let _ = client.write_all(page.as_bytes());
            }
        });
        let error = LockRegistry::connect(url).await.unwrap_err();
        assert!(error.to_string().contains("HTTP"), "{page}: {error}");
    }
}
