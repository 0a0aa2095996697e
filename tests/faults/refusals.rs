//! Whatever a server may refuse with: who is told, who waits on, and that all is well when the cause is gone.

use std::time::Instant;

use lockstream::store::RedisStore;
use lockstream::{Lease, LockError, LockRegistry, StoreError};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::support::{PATIENCE, Program, RedisServer, wait_until, wait_until_blocking};
use crate::{BOUND, LONG, Scene, UNASKED, builder, ms, nothing_left, served};

/// The store's word, which must begin with the server's code.
#[track_caller]
fn told<T: std::fmt::Debug>(result: Result<T, LockError>, code: &str) -> StoreError {
    match result {
        Err(LockError::Store { source, .. }) => {
            assert!(source.to_string().contains(code), "{code}: {source}");
            source
        }
        other => panic!("{code}: {other:?}"),
    }
}

/// Asks until the refusal is there: a connection may have to break first.
async fn refused(registry: &LockRegistry, code: &str) -> StoreError {
    let begin = Instant::now();
    for n in 0.. {
        assert!(begin.elapsed() < PATIENCE, "{code}: it is never refused");
        // A release would be waited for until all is well again, and a key in use not be asked for.
        match registry.obtain(format!("other {n}")).lease_once().await {
            Ok(Some(lease)) => drop(lease),
            Err(LockError::Store { source, .. }) if source.to_string().contains(code) => {
                return source;
            }
            Ok(None) | Err(LockError::Store { .. }) => sleep(ms(5)).await,
            Err(other) => panic!("{code}: {other:?}"),
        }
    }
    unreachable!("it ends in one way or the other")
}

/// A temporary error: `acquire_once` gets it, waiters wait, and holders hold. Afterwards everybody is served.
async fn passes(server: &RedisServer, scene: Scene, code: &str, mend: impl FnOnce()) {
    let error = refused(&scene.waiting, code).await;
    assert!(error.is_retryable(), "{error}");
    let begin = Instant::now();
    told(
        scene.holding.obtain("other").acquire_within(ms(300)).await,
        code,
    );
    assert!(begin.elapsed() >= ms(290), "{code}: {:?}", begin.elapsed());
    let patient = tokio::spawn(scene.holding.obtain("patient").lease());
    sleep(ms(200)).await;
    assert!(!patient.is_finished(), "{code}");
    assert!(!scene.waiter.is_finished(), "{code}");
    assert!(scene.lease.is_valid(), "{code}");
    mend();
    served(patient, UNASKED).await.release().await.unwrap();
    scene.ends_well(server).await;
}

/// What asking again will not mend: everybody is told at once, but who holds holds; and when somebody mends it, it
/// works again without anything being started again.
async fn lasts(server: &RedisServer, scene: Scene, code: &str, mend: impl FnOnce()) {
    for registry in [&scene.waiting, &scene.holding] {
        let error = refused(registry, code).await;
        assert!(!error.is_retryable(), "{error}");
        let begin = Instant::now();
        told(registry.obtain("other").lease().await, code);
        // At the next connection, after a pause of 2 s at most. It would wait for 30 s.
        assert!(begin.elapsed() < 3 * BOUND, "{code}: {:?}", begin.elapsed());
    }
    let Scene {
        holding,
        waiting,
        lease,
        waiter,
    } = scene;
    let waiter = tells(waiter).await;
    told(waiter, code);
    assert!(lease.is_valid(), "{code}");
    mend();
    timeout(4 * BOUND, lease.release())
        .await
        .expect("a release ends")
        .unwrap();
    let next = waiting.obtain("k").lease_within(4 * BOUND).await.unwrap();
    next.release().await.unwrap();
    nothing_left(server, &[&holding, &waiting]).await;
}

async fn tells(waiter: JoinHandle<Result<Lease, LockError>>) -> Result<Lease, LockError> {
    timeout(BOUND, waiter)
        .await
        .expect("a waiter is told what will not pass")
        .unwrap()
}

#[tokio::test]
async fn oom() {
    let server = RedisServer::builder()
        .config("maxmemory-policy noeviction")
        .start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    passes(&server, scene, "OOM", || {
        server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    })
    .await;
}

#[tokio::test]
async fn readonly() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.cmd(&["REPLICAOF", "127.0.0.1", "1"]);
    passes(&server, scene, "READONLY", || {
        server.cmd(&["REPLICAOF", "NO", "ONE"]);
    })
    .await;
}

#[tokio::test]
async fn noreplicas() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.cmd(&["CONFIG", "SET", "min-replicas-to-write", "1"]);
    passes(&server, scene, "NOREPLICAS", || {
        server.cmd(&["CONFIG", "SET", "min-replicas-to-write", "0"]);
    })
    .await;
}

/// A snapshot cannot be written: a folder is in its place.
#[tokio::test]
async fn misconf() {
    let server = RedisServer::builder()
        .config("save 3600 1000000")
        .config("dbfilename snapshot")
        .start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let place = server.folder().join("snapshot");
    std::fs::create_dir_all(place.join("in the way")).unwrap();
    let save = |ends: &str| {
        server.cmd(&["BGSAVE"]);
        wait_until_blocking(ends, PATIENCE, || {
            let info: String = server.ask(&["INFO", "persistence"]);
            info.contains("rdb_bgsave_in_progress:0") && info.contains(ends)
        });
    };
    save("rdb_last_bgsave_status:err");
    passes(&server, scene, "MISCONF", || {
        std::fs::remove_dir_all(&place).unwrap();
        save("rdb_last_bgsave_status:ok");
    })
    .await;
}

/// On a node of a cluster that has lost its slots. (That all keys are in one slot is the prefix's doing.)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusterdown() {
    let server = RedisServer::builder()
        .config("cluster-enabled yes")
        // So long it stays down after its slots are back.
        .config("cluster-node-timeout 500")
        .start();
    let slots = |word: &str| {
        server.cmd(&["CLUSTER", word, "0", "16383"]);
    };
    let is = |state: &str| {
        wait_until_blocking(state, PATIENCE, || {
            let info: String = server.ask(&["CLUSTER", "INFO"]);
            info.contains(state)
        });
    };
    slots("ADDSLOTSRANGE");
    is("cluster_state:ok");
    let registry = async || {
        builder(&server.url())
            .await
            .prefix("{app}")
            .wait(LONG)
            .build()
            .unwrap()
    };
    let (holding, waiting) = (registry().await, registry().await);
    let lease = holding.obtain("k").ttl(LONG).lease().await.unwrap();
    let lock = waiting.obtain("k");
    let waiter = tokio::spawn(lock.lease());
    while waiting.obtain("k").inspect().await.unwrap().waiting == 0 {
        tokio::task::yield_now().await;
    }

    slots("DELSLOTSRANGE");
    is("cluster_state:fail");
    let error = refused(&waiting, "CLUSTERDOWN").await;
    assert!(error.is_retryable(), "{error}");
    told(
        holding.obtain("other").acquire_within(ms(300)).await,
        "CLUSTERDOWN",
    );
    let patient = tokio::spawn(holding.obtain("patient").lease());
    sleep(ms(200)).await;
    assert!(!patient.is_finished() && !waiter.is_finished() && lease.is_valid());
    slots("ADDSLOTSRANGE");
    is("cluster_state:ok");
    served(patient, UNASKED).await.release().await.unwrap();
    lease.release().await.unwrap();
    served(waiter, BOUND).await.release().await.unwrap();
    wait_until_blocking("nothing is left", BOUND, || {
        server.keys("*") == ["{app}:~fence"]
    });
}

/// A server that reads its data again takes its time, and says so to whoever asks meanwhile.
#[tokio::test]
async fn loading() {
    let mut server = RedisServer::builder()
        .keep_data()
        // In µs. It looks at its clients every 1024 of the writes below, and to be made out each step of a connection
        // takes one such look.
        .config("key-load-delay 100")
        .start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    let writes =
        "for _ = 1, 30000 do redis.call('SET', 'filler', '') end redis.call('DEL', 'filler')";
    server.cmd(&["EVAL", writes, "0"]);
    let restarting = tokio::task::spawn_blocking(move || {
        server.restart();
        server
    });
    let error = refused(&scene.waiting, "LOADING").await;
    assert!(error.is_retryable(), "{error}");
    assert!(!restarting.is_finished() && scene.lease.is_valid() && !scene.waiter.is_finished());
    let patient = tokio::spawn(scene.holding.obtain("patient").wait(LONG).lease());
    // On a busy machine each of the pauses of 100 µs takes a millisecond or more.
    let server = timeout(6 * PATIENCE, restarting).await.unwrap().unwrap();
    // After more than a minute the pauses between attempts to connect are of 10 s at most.
    served(patient, 4 * BOUND).await.release().await.unwrap();
    wait_until("both are back", 4 * BOUND, || server.clients().len() == 2).await;
    scene.ends_well(&server).await;
}

/// A password is asked for from now on, which nobody has.
#[tokio::test]
async fn noauth() {
    let server = RedisServer::start();
    let scene = Scene::set(&server, &server.url(), LONG).await;
    server.cmd(&["CONFIG", "SET", "requirepass", "new"]);
    server.client_kill_all();
    let error = RedisStore::connect(server.url()).await.unwrap_err();
    assert!(error.to_string().contains("requires a password"), "{error}");
    lasts(&server, scene, "NOAUTH", || {
        server.cmd(&["CONFIG", "SET", "requirepass", ""]);
    })
    .await;
}

/// The password is changed, on each kind of server.
#[tokio::test]
async fn wrongpass() {
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let server = RedisServer::builder()
            .program(program)
            .config("requirepass old")
            .start();
        let scene = Scene::set(&server, &server.url_with("", "old", 0), LONG).await;
        server.cmd(&["CONFIG", "SET", "requirepass", "new"]);
        server.client_kill_all();
        lasts(&server, scene, "WRONGPASS", || {
            server.cmd(&["CONFIG", "SET", "requirepass", "old"]);
        })
        .await;
    }
}

/// The right to scripts is taken away: connections stay, and every call is refused.
#[tokio::test]
async fn noperm() {
    for program in [
        Program::Usual,
        Program::Valkey,
        Program::Redis8,
        Program::Redis6,
    ] {
        let server = RedisServer::builder()
            .program(program)
            .config("user x on >p ~* &* +@all")
            .start();
        let scene = Scene::set(&server, &server.url_with("x", "p", 0), LONG).await;
        server.cmd(&["ACL", "SETUSER", "x", "-@scripting"]);
        server.client_kill_all();
        lasts(&server, scene, "NOPERM", || {
            server.cmd(&["ACL", "SETUSER", "x", "+@scripting"]);
        })
        .await;
    }
}
