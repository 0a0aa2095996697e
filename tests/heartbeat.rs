//! The thread that helps runtimes that are busy. It is one of the process, so this is the only test here.
#![cfg(target_os = "linux")]

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use lockstream::{Lease, LockRegistry, Renewal};

const TTL: Duration = Duration::from_secs(6);

/// How many threads of this process have its name.
fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.unwrap().path().join("comm")).ok());
    names.filter(|name| name.trim() == "lockstream").count()
}

#[track_caller]
fn wait_until(count: usize) {
    let begin = Instant::now();
    while threads() != count {
        assert!(
            begin.elapsed() < Duration::from_secs(10),
            "{} threads",
            threads()
        );
        sleep(Duration::from_millis(5));
    }
}

async fn renewed(locks: &LockRegistry) -> Lease {
    let lock = locks.obtain("renewed").ttl(TTL);
    lock.renewal(Renewal::watchdog()).lease().await.unwrap()
}

#[test]
fn there_is_one_thread_while_a_key_is_in_use_and_else_none() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let paused = runtime.enable_all().start_paused(true).build().unwrap();
    paused.block_on(async {
        let locks = LockRegistry::in_memory();
        let lease = renewed(&locks).await;
        tokio::time::sleep(10 * TTL).await;
        assert!(lease.is_valid());
    });
    let runtime = runtime.start_paused(false).build().unwrap();
    runtime.block_on(async {
        let (one, two) = (LockRegistry::in_memory(), LockRegistry::in_memory());
        assert_eq!(threads(), 0, "nothing was in use in real time");
        // Those of other runtimes may wait for it.
        let fixed = one.obtain("fixed").ttl(TTL).lease().await.unwrap();
        wait_until(1);
        fixed.release().await.unwrap();
        wait_until(0);
        for _ in 0..2 {
            let leases = (renewed(&one).await, renewed(&two).await);
            wait_until(1);
            drop(leases);
            wait_until(0);
        }
    });
}
