//! What is no cluster, and who may do what in one.

use lockstream::LockRegistry;
use lockstream::store::RedisStore;
use tokio::time::{sleep, timeout};

#[cfg(feature = "tls-rustls")]
use crate::authority::Authority;
use crate::moving::errors;
use crate::support::{
    Cluster, Program, RedisServer, chain, least_rights, on_a_steady_machine, wait_until,
};
use crate::{BOUND, BY_GRANT, ms, nothing_left, queued};

#[tokio::test]
async fn a_server_without_cluster_support_is_reported() {
    let server = RedisServer::start();
    let error = RedisStore::cluster([server.url()]).await.unwrap_err();
    assert!(
        error.to_string().contains("cluster support disabled"),
        "{error}"
    );
    assert!(!error.is_retryable());
    for (url, reason) in [
        ("redis+cluster://127.0.0.1:1/3", "database 0"),
        ("redis+cluster://a:1,b:x/", "invalid Redis url"),
        ("http+cluster://a:1/", "invalid Redis url"),
        ("unix+cluster:///a", "hosts and ports"),
    ] {
        let error = RedisStore::connect_lazy(url).unwrap_err();
        assert!(error.to_string().contains(reason), "{url}: {error}");
    }
    let none: [String; 0] = [];
    let error = RedisStore::cluster(none).await.unwrap_err();
    assert!(error.to_string().contains("at least one node"), "{error}");
    let secret = "redis+cluster://me:pa/ss@a:1,b:2/";
    let error = RedisStore::connect_lazy(secret).unwrap_err();
    assert!(!error.to_string().contains("ss@"), "{error}");
}

/// A node that is taken for a server of its own refuses most keys, and some by a word that may mend on a server:
/// nobody is to wait for that.
#[tokio::test]
async fn a_node_that_is_taken_for_a_server_is_told() {
    let cluster = Cluster::without_replicas();
    for _ in 0..4 {
        for url in cluster.urls() {
            let locks = LockRegistry::connect(url).await.unwrap();
            let lock = locks.obtain("k");
            let error = timeout(BOUND, lock.lease()).await.unwrap().unwrap_err();
            assert!(
                chain(&error).contains("is a node of a cluster"),
                "{error:?}"
            );
        }
    }
}

#[tokio::test]
async fn one_url_of_all_nodes_is_as_good_as_one_each() {
    let cluster = Cluster::without_replicas();
    let store = RedisStore::cluster([cluster.url()]).await.unwrap();
    let locks = LockRegistry::builder(store).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    lease.release().await.unwrap();
}

/// The rights that the documentation adds for clusters, each of which is needed for grants.
const RIGHTS: &str = "&lock:* &{lock:* +asking +cluster|slots +ssubscribe \
     +sunsubscribe +spublish +pubsub|shardnumsub";

/// A user's line with the rights of a server's, and with these.
fn user(more: &str) -> String {
    let rights = least_rights().join(" ");
    let end = rights.split_once("&lock:~grant:*").expect("one channel");
    format!(
        "user {}{}{more}",
        end.0,
        end.1.trim_start().to_owned() + " "
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rights_that_are_told_are_enough() {
    on_a_steady_machine(async || {
        let page = include_str!("../../docs/operations.md");
        assert!(page.contains(RIGHTS), "the page names other rights");
        let cluster = Cluster::of(Program::Usual, &[&user(RIGHTS)]);
        let connect = || {
            let url = cluster.url_with("lockstream:password@");
            let store = RedisStore::connect_lazy(url).unwrap();
            let builder = LockRegistry::builder(store).response_timeout(BOUND);
            builder.build().unwrap()
        };
        let (here, there) = (connect(), connect());
        let lease = here.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(there.obtain("k").lease());
        queued(&here, "k").await;
        lease.release().await.unwrap();
        let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
        next.unwrap().unwrap().release().await.unwrap();
        nothing_left(&cluster, &[&here, &there]).await;

        // Without one that grants take, everybody asks again and again.
        for server in cluster.primaries() {
            server.cmd(&["ACL", "SETUSER", "lockstream", "-spublish"]);
            server.client_kill_all();
        }
        let connect = || {
            let url = cluster.url_with("lockstream:password@");
            let store = RedisStore::connect_lazy(url).unwrap();
            let builder = LockRegistry::builder(store).response_timeout(BOUND);
            builder.build().unwrap()
        };
        let (here, there) = (connect(), connect());
        let lease = here.obtain("k").lease().await.unwrap();
        assert!(!there.obtain("k").acquire_once().await.unwrap());
        let waiter = tokio::spawn(there.obtain("k").lease());
        sleep(ms(300)).await;
        assert_eq!(here.obtain("k").inspect().await.unwrap().waiting, 0);
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.unwrap().unwrap().unwrap();
        next.release().await.unwrap();
    })
    .await;
}

/// The right to publish is there, and grants reach nobody all the same: any waiter asks again and again, and stands
/// in no queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_subscribe_a_waiter_gets_the_lock_by_asking() {
    let rights = user(&RIGHTS.replace("+ssubscribe", ""));
    let cluster = Cluster::of(Program::Usual, &[&rights]);
    let connect = || {
        let url = cluster.url_with("lockstream:password@");
        let store = RedisStore::connect_lazy(url).unwrap();
        let builder = LockRegistry::builder(store).response_timeout(BOUND);
        builder.build().unwrap()
    };
    let (here, there) = (connect(), connect());
    let home = cluster.server(cluster.home("lock:k"));
    let lease = here.obtain("k").lease().await.unwrap();
    let waiter = tokio::spawn(there.obtain("k").lease());
    // Their one connection there carries nothing else.
    let asked = home.calls("evalsha");
    wait_until("it asks again and again", BOUND, || {
        home.calls("evalsha") > asked + 5
    })
    .await;
    assert!(!waiter.is_finished());
    assert_eq!(here.obtain("k").inspect().await.unwrap().waiting, 0);
    assert!(errors(&cluster, "NOPERM") > 0, "it tried to subscribe");
    lease.release().await.unwrap();
    let next = timeout(BOUND, waiter).await.expect("by asking");
    next.unwrap().unwrap().release().await.unwrap();
    nothing_left(&cluster, &[&here, &there]).await;
}

/// Nodes are connected to as the seeds are: over TLS, with the same certificates, by whatever address the cluster names.
#[cfg(feature = "tls-rustls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_of_seeds_with_tls_are_connected_to_with_tls() {
    on_a_steady_machine(async || {
        let authority = Authority::new("ours");
        let identity = authority.sign(&["127.0.0.1"]);
        let cluster = Cluster::over_tls(identity.serving(Some(&authority)));
        assert!(cluster.url().starts_with("rediss+cluster://"));
        let trusting = || RedisStore::builder(cluster.url()).root_certificate(&authority.pem);
        let known = || trusting().client_certificate(&*identity.certificate, &*identity.key);
        let build = async || {
            LockRegistry::builder(known().connect().await.unwrap())
                .build()
                .unwrap()
        };
        let (here, there) = (build().await, build().await);
        for key in ["a", "b", "c", "{m}:d"] {
            let lease = here.obtain(key).lease().await.unwrap();
            let waiter = tokio::spawn(there.obtain(key).lease());
            queued(&here, key).await;
            lease.release().await.unwrap();
            let next = timeout(BY_GRANT, waiter).await.expect("by a grant");
            next.unwrap().unwrap().release().await.unwrap();
        }
        // A redirect leads to the port for TLS, too.
        let (slot, from) = (cluster.slot("m"), cluster.home("m"));
        cluster.hand_slot(slot, from, (from + 1) % 3);
        here.obtain("{m}:d")
            .lease()
            .await
            .unwrap()
            .release()
            .await
            .unwrap();
        nothing_left(&cluster, &[&here, &there]).await;

        // Who shows no certificate is refused, and so is a cluster whose certificate is not believed.
        for (store, reason) in [
            (trusting(), "certificate"),
            (
                RedisStore::builder(cluster.url()).root_certificate(&Authority::new("theirs").pem),
                "certificate",
            ),
        ] {
            let error = store.connect().await.unwrap_err();
            assert!(error.to_string().contains(reason), "{error}");
            assert!(!error.is_retryable(), "{error}");
        }
    })
    .await;
}

/// Certificates are for TLS, and the seeds of one cluster are all reached in one way.
#[cfg(feature = "tls-rustls")]
#[test]
fn seeds_with_and_without_tls_do_not_go_together() {
    let authority = Authority::new("ours");
    let plain = RedisStore::builder("redis+cluster://a:1,b:2/").root_certificate(&authority.pem);
    let error = plain.connect_lazy().unwrap_err();
    assert!(error.to_string().contains("rediss://"), "{error}");
}

/// Which right finds the nodes. Without it the error names what is missing, and is not tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_ask_for_the_nodes_an_error_names_it() {
    let cluster = Cluster::of(Program::Usual, &[&user(RIGHTS)]);
    let allow = |rights: &[&str]| {
        for server in cluster.primaries() {
            server.cmd(&[&["ACL", "SETUSER", "lockstream"], rights].concat());
        }
    };
    let connect = || RedisStore::connect(cluster.url_with("lockstream:password@"));
    connect().await.expect("all rights are there");
    allow(&["-cluster|slots"]);
    let error = connect().await.unwrap_err();
    assert!(error.to_string().contains("cluster|slots"), "{error}");
    assert!(!error.is_retryable(), "{error}");
    let wrong = RedisStore::connect(cluster.url_with("lockstream:wrong@"));
    let error = wrong.await.unwrap_err();
    assert!(error.to_string().contains("WRONGPASS"), "{error}");
    assert!(!error.is_retryable() && !error.to_string().contains("wrong@"));
}
