use lockstream::store::RedisStore;
use tokio::time::timeout;

use crate::support::{
    Passwords, RedisServer, Watched, least_rights, least_rights_at_sentinels, on_a_steady_machine,
    wait_until,
};
use crate::{BOUND, ms, registry};

/// Certificates on every way: to sentinels, to the primary that they name, and to the next one.
#[cfg(feature = "tls-rustls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fail_over_over_tls() {
    on_a_steady_machine(async || {
        use crate::LONG;
        use crate::authority::Authority;
        use lockstream::LockRegistry;

        let (authority, other) = (Authority::new("ours"), Authority::new("theirs"));
        let here = &["127.0.0.1"];
        let watched = Watched::start_over_tls(&authority.sign(here).serving(Some(&authority)));
        let url = watched.url();
        assert!(url.starts_with("rediss+sentinel://"), "{url}");
        let us = authority.sign(&[]);
        let trusting = |authority: &Authority| {
            RedisStore::builder(&*url)
                .root_certificate(&authority.pem)
                .client_certificate(&*us.certificate, &*us.key)
        };
        let locks = async || {
            let store = trusting(&authority).connect().await.unwrap();
            LockRegistry::builder(store)
                .ttl(LONG)
                .wait(LONG)
                .build()
                .unwrap()
        };
        let (holding, waiting) = (locks().await, locks().await);
        let lease = holding.obtain("k").lease().await.unwrap();
        let waiter = tokio::spawn(waiting.obtain("k").lease());
        let queue = "{lock:k}:~queue2";
        wait_until("one waits in the queue", BOUND, || {
            watched.primary().exists(queue)
        })
        .await;
        watched.wait_until_replicated();
        let old = watched.fail_over();
        wait_until("both have left the old one", BOUND, || {
            let channels = watched.servers[old].channels();
            !channels.iter().any(|it| it.contains("~grant:"))
        })
        .await;
        assert!(lease.is_valid() && !waiter.is_finished());
        let released = timeout(BOUND, lease.release()).await;
        released.expect("a release ends").unwrap();
        let next = timeout(BOUND, waiter).await.expect("it is served");
        assert!(watched.primary().exists("lock:k"));
        next.unwrap().unwrap().release().await.unwrap();

        // Each sentinel is refused by us, or refuses us, and that will not pass.
        for (store, reason) in [
            (trusting(&other), "is from an unknown authority"),
            (
                RedisStore::builder(&*url).root_certificate(&authority.pem),
                "requires a client certificate",
            ),
        ] {
            let error = store.connect().await.unwrap_err();
            assert!(!error.is_retryable(), "{error}");
            let told = error.to_string();
            for part in ["not found", "(sentinel)", reason] {
                assert!(told.contains(part), "{told}");
            }
        }
        // They do not speak plainly, and what they answer instead is no reason to wait for long.
        let plain = url.replace("rediss", "redis");
        let error = timeout(BOUND, RedisStore::connect(plain)).await;
        error.expect("it ends").unwrap_err();
    })
    .await;
}

/// The rights that the page lists are enough at the sentinels and at the servers, also for a fail-over; and what is said
/// without each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rights_of_the_page_are_enough() {
    on_a_steady_machine(async || {
        let watched = Watched::start_with(Some(Passwords {
            server: "s",
            sentinel: "t",
        }));
        let url = watched
            .url()
            .replace("//:s@", "//lockstream:password@")
            .replace(
                "sentinel_password=t",
                "sentinel_user=watcher&sentinel_password=password",
            );
        let servers = [&least_rights()[..], &["+role"]].concat();
        let set_at_servers = |words: &[&str]| {
            for server in &watched.servers {
                server.cmd(&["ACL", "DELUSER", "lockstream"]);
                server.cmd(&[&["ACL", "SETUSER"], words].concat());
            }
        };
        let sentinels = least_rights_at_sentinels();
        let set_at_sentinels = |words: &[&str]| {
            for sentinel in &watched.sentinels {
                sentinel.try_cmd(&["ACL", "DELUSER", "watcher"]).unwrap();
                sentinel
                    .try_cmd(&[&["ACL", "SETUSER"], words].concat())
                    .unwrap();
            }
        };
        let without = |words: &[&'static str], right: &str| -> Vec<&'static str> {
            let fewer: Vec<_> = words.iter().copied().filter(|it| *it != right).collect();
            assert_eq!(fewer.len() + 1, words.len(), "{right} is on the page");
            fewer
        };
        set_at_servers(&servers);

        // What must be there.
        let asking = "+sentinel|get-master-addr-by-name";
        set_at_sentinels(&without(&sentinels, asking));
        let error = RedisStore::connect(&*url).await.unwrap_err();
        assert!(!error.is_retryable(), "{error}");
        for part in ["NOPERM", "(sentinel)", &asking[1..]] {
            assert!(error.to_string().contains(part), "{error}");
        }

        // What shows in nothing but how soon a fail-over is seen.
        for right in ["", "&+switch-master", "+subscribe"] {
            set_at_sentinels(&match right {
                "" => sentinels.clone(),
                right => without(&sentinels, right),
            });
            let lease = registry(&url).await.obtain("k").lease().await.unwrap();
            lease.release().await.unwrap();
        }
        // Not the right to be told, nor to ask a server for its role: found all the same.
        set_at_servers(&without(&servers, "+role"));
        let locks = registry(&url).await;
        let lease = locks.obtain("k").lease().await.unwrap();
        watched.wait_until_replicated();
        let old = watched.fail_over();
        let callers = |server: &RedisServer| {
            let channels = server.channels();
            channels.iter().filter(|it| it.contains("~grant:")).count()
        };
        wait_until("it has left the old one", ms(8_000), || {
            callers(&watched.servers[old]) == 0
        })
        .await;
        wait_until("it has found the new one", BOUND, || {
            callers(watched.primary()) == 1
        })
        .await;
        assert!(lease.is_valid());
        timeout(BOUND, lease.release())
            .await
            .expect("a release ends")
            .unwrap();
    })
    .await;
}
