use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::try_join_all;
use lockstream::store::RedisStore;
use lockstream::{LockError, LockEvent, LockRegistry, Renewal};
use tokio::time::timeout;

use crate::oracle::Oracle;
use crate::support::{
    Passwords, Proxy, RedisServer, Watched, chain, on_a_steady_machine, wait_until,
};
use crate::{BOUND, ms, registry};

fn url(oracles: &[&Oracle]) -> String {
    let hosts: Vec<_> = oracles
        .iter()
        .map(|it| format!("127.0.0.1:{}", it.port()))
        .collect();
    format!("redis+sentinel://{}/mine", hosts.join(","))
}

/// A server and its replica, which has all that it has.
fn pair() -> (RedisServer, RedisServer) {
    let primary = RedisServer::builder()
        .config("repl-diskless-sync-delay 0")
        .start();
    let replica = RedisServer::builder()
        .config(format!("replicaof 127.0.0.1 {}", primary.port()))
        .start();
    (primary, replica)
}

async fn wait_until_synced(replica: &RedisServer) {
    wait_until("the replica is in step", BOUND, || {
        let info: String = replica.ask(&["INFO", "replication"]);
        info.contains("master_link_status:up")
    })
    .await;
}

/// The sentinels' password and the servers' are not the same, and each gets its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_with_passwords_of_their_own() {
    on_a_steady_machine(async || {
        let watched = Watched::start_with(Some(Passwords {
            server: "for-servers",
            sentinel: "for-sentinels",
        }));
        let url = watched.url();
        let lease = registry(&url).await.obtain("k").lease().await.unwrap();
        assert!(watched.primary().exists("lock:k"));
        lease.release().await.unwrap();

        for (wrong, word) in [
            (
                url.replace("sentinel_password=", "sentinel_password=x"),
                "authentication failed",
            ),
            (url.replace("//:for", "//:xfor"), "(primary of \"mine\""),
            (url.split('?').next().unwrap().to_owned(), "(sentinel)"),
        ] {
            let error = RedisStore::connect(&*wrong).await.unwrap_err();
            assert!(!error.is_retryable(), "{error}");
            let told = format!("{error} {error:?}");
            assert!(told.contains(word) && !told.contains("for-"), "{told}");
        }

        // Taken for a server.
        let sentinel = watched.sentinels[0].port();
        let url = format!("redis://:for-sentinels@127.0.0.1:{sentinel}/");
        let locks = LockRegistry::connect(url).await.unwrap();
        let told = chain(&locks.obtain("k").lease().await.unwrap_err());
        assert!(told.contains("unknown command 'EVALSHA"), "{told}");
    })
    .await;
}

/// A response time-out that is longer than the time to connect was the turn of the first one, and the next connection
/// began there as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_sentinels_leave_time_for_the_next_however_long_an_answer_may_take() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let oracle = Oracle::saying(server.port());
        let silent = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let [one, two] = silent.each_ref().map(|it| it.local_addr().unwrap());
        let url = format!(
            "redis+sentinel://{one},{two},127.0.0.1:{}/mine",
            oracle.port()
        );
        // Each begins with a random one.
        let attempts = (0..12).map(|number| {
            let store = RedisStore::builder(&*url).connect_timeout(ms(24_000));
            let registry = LockRegistry::builder(store.connect_lazy().unwrap());
            let registry = registry.response_timeout(3 * BOUND).build().unwrap();
            async move { registry.obtain(number.to_string()).acquire_once().await }
        });
        assert_eq!(try_join_all(attempts).await.unwrap(), [true; 12]);
    })
    .await;
}

#[tokio::test]
async fn a_lease_outlasts_a_runtime_that_is_busy() {
    on_a_steady_machine(async || {
        let watched = Watched::start();
        let lock = registry(&watched.url()).await.obtain("k");
        let lock = lock.ttl(Duration::from_secs(3));
        let lease = lock.renewal(Renewal::watchdog()).lease().await.unwrap();
        std::thread::sleep(Duration::from_secs(6));
        assert!(lease.is_valid());
        lease.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn nobody_says_where_the_primary_is() {
    let nobody = [Proxy::to_port(0), Proxy::to_port(0)];
    nobody.iter().for_each(Proxy::refuse);
    let ports = nobody.each_ref().map(Proxy::port);
    let url = format!(
        "redis+sentinel://user:secret@127.0.0.1:{},127.0.0.1:{}/mine?sentinel_password=secret",
        ports[0], ports[1]
    );
    let error = RedisStore::connect(&*url).await.unwrap_err();
    let told = format!("{error} {error:?}");
    assert!(error.is_retryable() && !told.contains("secret"), "{told}");
    for part in ["primary of service \"mine\" not found", "refused"] {
        assert!(told.contains(part), "{told}");
    }
    for port in &ports {
        assert!(
            told.contains(&format!("127.0.0.1:{port} (sentinel)")),
            "{told}"
        );
    }

    // One is named, but nobody answers there.
    let oracle = Oracle::saying(ports[0]);
    let error = RedisStore::connect(self::url(&[&oracle]))
        .await
        .unwrap_err();
    let place = format!(
        "127.0.0.1:{} (primary of \"mine\", says 127.0.0.1:{})",
        ports[0],
        oracle.port()
    );
    assert!(
        error.is_retryable() && error.to_string().contains(&place),
        "{error}"
    );

    // A caller that does not wait is told the same.
    let store = RedisStore::connect_lazy(&*url).unwrap();
    assert!(!format!("{store:?}").contains("secret"));
    let locks = LockRegistry::builder(store).build().unwrap();
    let told = locks.obtain("k").acquire_once().await;
    assert!(
        matches!(&told, Err(LockError::Store { source, .. }) if source.to_string().contains("not found")),
        "{told:?}"
    );
}

#[tokio::test]
async fn a_service_that_no_sentinel_knows() {
    let (one, two) = (Oracle::saying(1), Oracle::saying(1));
    for oracle in [&one, &two] {
        oracle.say_raw("*-1\r\n");
    }
    let error = RedisStore::connect(url(&[&one, &two])).await.unwrap_err();
    assert!(!error.is_retryable(), "all were asked: {error}");
    let told = error.to_string();
    assert!(told.contains("unknown to 127.0.0.1"), "{told}");

    // One that is silent, or says nonsense, might know it.
    two.say_raw("+what\r\n");
    let error = RedisStore::connect(url(&[&one, &two])).await.unwrap_err();
    assert!(error.is_retryable(), "{error}");
    assert!(error.to_string().contains("no address"), "{error}");
    // A server that is no sentinel says so.
    let server = RedisServer::start();
    let url = format!("redis+sentinel://127.0.0.1:{}/mine", server.port());
    let error = RedisStore::connect(url).await.unwrap_err();
    assert!(!error.is_retryable(), "{error}");
    let told = error.to_string();
    assert!(told.contains("unknown command 'SENTINEL"), "{told}");
}

/// One sentinel is cut off from the others and goes on to send us to who was the primary: the next is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_is_wrong_is_not_believed() {
    on_a_steady_machine(async || {
        let (primary, replica) = pair();
        wait_until_synced(&replica).await;
        let (wrong, right) = (
            Oracle::saying(replica.port()),
            Oracle::saying(primary.port()),
        );
        // A random one is asked first. So this is repeated until it is the wrong one.
        let error = loop {
            if let Err(error) = RedisStore::connect(url(&[&wrong, &right])).await {
                break error;
            }
        };
        assert!(error.is_retryable(), "{error}");
        let place = format!("127.0.0.1:{} (primary of \"mine\"", replica.port());
        let told = error.to_string();
        assert!(
            told.contains(&place) && told.contains("not a primary"),
            "{told}"
        );

        let locks = loop {
            let asked = wrong.questions();
            let store = RedisStore::connect_lazy(url(&[&wrong, &right])).unwrap();
            let locks = LockRegistry::builder(store).build().unwrap();
            let lease = timeout(BOUND, locks.obtain("k").lease()).await;
            let lease = lease.expect("the other is asked").unwrap();
            assert!(primary.exists("lock:k"));
            lease.release().await.unwrap();
            if wrong.questions() > asked {
                break locks;
            }
        };

        // From then on it is the right one that is asked first.
        let asked = (wrong.questions(), right.questions());
        primary.client_kill_all();
        let lease = timeout(BOUND, locks.obtain("k").lease()).await;
        lease
            .expect("it is there")
            .unwrap()
            .release()
            .await
            .unwrap();
        assert_eq!(wrong.questions(), asked.0);
        assert!(right.questions() > asked.1);

        // Where replicas can be written to, their role alone gives them away.
        replica.cmd(&["CONFIG", "SET", "replica-read-only", "no"]);
        let error = RedisStore::connect(url(&[&wrong])).await.unwrap_err();
        assert!(error.to_string().contains("not a primary"), "{error}");
    })
    .await;
}

/// It sends us to a server that accepts connections and says nothing: the attempt beside that one asks another sentinel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_beside_one_that_hangs_asks_another_sentinel() {
    on_a_steady_machine(async || {
        let (primary, silent) = (
            RedisServer::start(),
            std::net::TcpListener::bind("127.0.0.1:0").unwrap(),
        );
        let (wrong, right) = (
            Oracle::saying(silent.local_addr().unwrap().port()),
            Oracle::saying(primary.port()),
        );
        // The second begins 3 s before the first is given up, or sooner.
        let within = Duration::from_secs(24);
        let mut begin;
        loop {
            let url = format!("{}?connect_timeout=24s", url(&[&wrong, &right]));
            let locks = LockRegistry::builder_for(url).unwrap().build().unwrap();
            begin = Instant::now();
            let lease = locks.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
            // Each registry begins with a random one.
            if wrong.questions() > 0 {
                break;
            }
        }
        assert!(begin.elapsed() < within, "{:?}", begin.elapsed());
    })
    .await;
}

/// The primary is made a replica by hand, which ends no connection: its first refusal does, and the sentinels are asked
/// again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_primary_that_takes_no_more_writes_is_left() {
    on_a_steady_machine(async || {
        let (old, new) = pair();
        wait_until_synced(&new).await;
        let oracle = Oracle::saying(old.port());
        let url = url(&[&oracle]);
        let (holding, waiting) = (registry(&url).await, registry(&url).await);
        let lease = holding.obtain("k").lease().await.unwrap();
        let token = lease.token();
        wait_until("the replica has it", BOUND, || new.exists("lock:k")).await;
        waiting.obtain("other").inspect().await.unwrap();
        new.cmd(&["REPLICAOF", "NO", "ONE"]);
        oracle.say(new.port());
        old.cmd(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
        // Refused where it was.
        let waiter = tokio::spawn(waiting.obtain("k").lease());
        let released = timeout(BOUND, lease.release()).await;
        released.expect("a release ends").unwrap();
        let next = timeout(BOUND, waiter).await.expect("it is served");
        let next = next.unwrap().unwrap();
        assert!(next.token() > token);
        assert!(new.exists("lock:k"));
        assert_eq!(new.channels().len(), 2, "both are there");
        next.release().await.unwrap();
    })
    .await;
}

/// The connection is lost while nobody needs it, so that nobody makes it again: its loss is told, and that the store is
/// back when it is used next.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_use_after_a_fail_over_tells_that_the_store_is_back() {
    on_a_steady_machine(async || {
        let (mut old, new) = pair();
        wait_until_synced(&new).await;
        let oracle = Oracle::saying(old.port());
        let locks = registry(&url(&[&oracle])).await;
        let mut events = locks.events();
        let mut told = async |is_up: bool| loop {
            let event = timeout(BOUND, events.next()).await.expect("it is told");
            match event.expect("the registry lives") {
                LockEvent::StoreUp { .. } if is_up => break,
                LockEvent::StoreDown { .. } if !is_up => break,
                LockEvent::StoreUp { .. } | LockEvent::StoreDown { .. } => panic!("out of turn"),
                _ => {}
            }
        };
        let lease = locks.obtain("k").lease().await.unwrap();
        told(true).await;
        lease.release().await.unwrap();
        wait_until("nothing is needed", BOUND, || locks.in_use() == 0).await;

        new.cmd(&["REPLICAOF", "NO", "ONE"]);
        oracle.say(new.port());
        old.kill();
        told(false).await;
        assert_eq!(new.channels().len(), 0, "nobody is there yet");
        let lease = locks.obtain("k").lease().await.unwrap();
        assert!(new.exists("lock:k"));
        told(true).await;
        lease.release().await.unwrap();
    })
    .await;
}
