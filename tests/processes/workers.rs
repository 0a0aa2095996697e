//! What the other processes do.

use std::fs::OpenOptions;
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::future::join_all;
use futures::poll;
use lockstream::{FutureLockExt, Lock, LockError, LockRegistry, OnFinish, Renewal};
use nix::sys::signal::{Signal, raise};
use tokio::sync::Barrier;
use tokio::time::sleep;

use crate::lock_server::registry_builder;
use crate::registry;
use crate::support::{Role, ms};

/// The response time-out of the asker.
pub(crate) const ANSWER_WITHIN: Duration = Duration::from_secs(3);

/// A deadlock fails a transfer at the end of its wait.
pub(crate) const TRANSFER_WITHIN: Duration = Duration::from_secs(120);

pub(crate) async fn run(role: Role) {
    if role.name() == "asker" {
        return ask(role).await;
    }
    let locks = registry(&role.env("URL")).await;
    match role.name() {
        "holder" => hold(role, &locks).await,
        "stopper" => work_and_stop(role, &locks).await,
        "counter" => count(role, &locks).await,
        "readers" => read(role, &locks).await,
        "transfers" => transfer(role, &locks).await,
        "consumer" => crate::pipelines::consume(role, &locks).await,
        "group" => crate::group::consume(role, &locks).await,
        other => panic!("no such role: {other}"),
    }
}

/// `k`, with the mode and the ttl that the spawner wants, if it wants one.
fn lock(locks: &LockRegistry) -> Lock {
    let lock = match std::env::var("MODE").as_deref() {
        Ok("shared") => locks.obtain("k").shared(),
        Ok("permit") => locks.obtain("k").permits(2),
        _ => locks.obtain("k"),
    };
    let lock = match std::env::var("TTL") {
        Ok(millis) => lock.ttl(ms(millis.parse().unwrap())),
        Err(_) => lock,
    };
    match std::env::var("KEEP_FOR") {
        Ok(millis) => lock.on_finish(OnFinish::KeepFor(ms(millis.parse().unwrap()))),
        Err(_) => lock,
    }
}

/// Acquires, and holds until it is told otherwise.
async fn hold(mut role: Role, locks: &LockRegistry) {
    let lease = lock(locks).lease().await.unwrap();
    role.say(format!("holds {}", lease.token()));
    role.hear().await;
    lease.release().await.unwrap();
    role.say("released");
    role.hear().await;
}

/// Holds a lease, and asks the store about it whenever it is told to.
async fn ask(mut role: Role) {
    let builder = registry_builder(&role.env("URL")).await;
    let builder = builder.response_timeout(ANSWER_WITHIN);
    let locks = builder.ttl(10 * ANSWER_WITHIN).build().unwrap();
    let lease = locks.obtain("k").lease().await.unwrap();
    role.say("holds");
    loop {
        role.hear().await;
        role.say(format!("told {:?}", lease.verify().await));
    }
}

/// Two hundred readers wait, and tell when all of them are in.
async fn read(mut role: Role, locks: &LockRegistry) {
    const READERS: usize = 200;
    let all_in = Barrier::new(READERS);
    let reads = async || {
        let read = async {
            all_in.wait().await;
        };
        read.with_lock(locks.obtain("k").shared()).await.unwrap();
    };
    join_all((0..READERS).map(|_| reads())).await;
    role.say("read");
    role.hear().await;
}

/// Takes three of ten keys at once, again and again.
async fn transfer(mut role: Role, locks: &LockRegistry) {
    let first: usize = role.env("FIRST").parse().unwrap();
    role.say("ready");
    role.hear().await;
    let task = async |task: usize| {
        for round in 0..5 {
            let keys = [first + task, task * 7 + round, 3 * task + first];
            let keys = keys.map(|key| format!("account-{}", key % 10));
            let group = locks.obtain_all(&keys).wait(TRANSFER_WITHIN);
            let moves = async || {
                for key in &keys {
                    // Nobody else has the key.
                    let seen = locks.obtain(key).inspect().await.unwrap();
                    assert_eq!(seen.holders.len(), 1);
                }
            };
            moves().with_lock(group).await.unwrap();
        }
    };
    join_all((0..50).map(task)).await;
    role.say("done");
    role.hear().await;
}

/// Works under the lock, renewed. Told to stop, it stops its own process in the midst of a step, and tells whether its
/// work was polled again after that.
///
/// A signal from outside might come between the look at the deadline and the poll that follows it: such a step is late,
/// and no lock can tell.
async fn work_and_stop(mut role: Role, locks: &LockRegistry) {
    let late = Arc::new(AtomicBool::new(false));
    let (seen, orders) = (late.clone(), &mut role);
    let lock = lock(locks).renewal(Renewal::watchdog());
    let work = lock.with_lease(async move |lease| {
        orders.say(format!("holds {}", lease.token()));
        assert_eq!(orders.hear().await, "stop");
        // The work's own timer is due as well when the process goes on.
        let mut next_step = pin!(sleep(ms(5)));
        assert!(poll!(&mut next_step).is_pending());
        stop_this_process();
        next_step.await;
        seen.store(true, Ordering::SeqCst);
        std::future::pending::<()>().await;
    });
    let told: Result<(), _> = work.await;
    let told = match told {
        Err(LockError::Lost { token, .. }) => format!("Lost {token}"),
        told => format!("{told:?}"),
    };
    let late = late.load(Ordering::SeqCst);
    role.say(format!("ended {told}, polled late: {late}"));
    role.hear().await;
}

/// Stops this process until somebody continues it.
///
/// A signal to a process may take any of its threads. The caller would go on until that one runs, which may be long on a
/// busy machine. This signal takes the caller's own thread, which stops before the call returns.
pub(crate) fn stop_this_process() {
    raise(Signal::SIGSTOP).expect("a process may stop itself");
}

/// Counts on from the last line of a file, with the token of the lease beside it.
async fn count(mut role: Role, locks: &LockRegistry) {
    let path = role.env("FILE");
    let number = |name| role.env(name).parse::<usize>().unwrap();
    let (tasks, rounds) = (number("TASKS"), number("ROUNDS"));
    let lock = locks.obtain("counter");
    role.say("ready");
    role.hear().await;
    let task = async || {
        for _ in 0..rounds {
            let write = lock.with_lease(async |lease| {
                let before = std::fs::read_to_string(&path).unwrap();
                let last = before.lines().last().unwrap();
                let last: usize = last.split(' ').next().unwrap().parse().unwrap();
                tokio::task::yield_now().await;
                let mut file = OpenOptions::new().append(true).open(&path).unwrap();
                write!(file, "\n{} {}", last + 1, lease.token()).unwrap();
            });
            write.await.unwrap();
        }
    };
    join_all((0..tasks).map(|_| task())).await;
    role.say("done");
    role.hear().await;
}
