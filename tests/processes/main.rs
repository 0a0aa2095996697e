//! Real processes around one server of each kind: killed, stopped, woken, racing.
#![cfg(feature = "redis")]

mod forks;
mod group;
#[path = "../support/lock_server.rs"]
mod lock_server;
mod pipelines;
#[path = "../support/mod.rs"]
mod support;
mod workers;

use std::time::{Duration, Instant};

use futures::future::join_all;
use lock_server::{BOUND, LockServer, START, registry_builder, wait_for_queue};
use lockstream::{LockRegistry, Renewal};
use support::{
    PATIENCE, Proxy, RedisServer, Role, Way, Worker, ms, on_a_steady_machine, wait_until,
};
use tokio::time::{sleep, timeout};
use workers::ANSWER_WITHIN;

/// For so long a machine may stand still.
const LATE: Duration = ms(2_000);

/// Whoever is not told that a lease is over asks 8 s after it began to wait, or later (W2).
const UNASKED: Duration = ms(7_500);

/// Of a lease that is not renewed, and not over before somebody waits for it, also where that takes long.
const FIXED: Duration = ms(5_000);

/// A registry that need not connect any more.
async fn connected(server: &impl LockServer) -> LockRegistry {
    let registry = registry(&server.url()).await;
    registry.obtain("k").inspect().await.unwrap();
    registry
}

async fn registry(url: &str) -> LockRegistry {
    registry_builder(url).await.build().unwrap()
}

/// Not a test, but what the other processes run.
#[tokio::test]
async fn worker() {
    if let Some(role) = Role::of_this_process() {
        workers::run(role).await;
    }
}

on_each_server! {
    #[tokio::test] {
        the_lock_of_a_killed_holder_comes_when_its_ttl_is_over,
        a_killed_job_is_done_again_when_its_ttl_is_over,
        a_killed_waiter_is_passed_by,
        who_gave_up_and_who_was_killed_delay_nobody,
        a_stopped_holder_learns_of_its_loss_before_its_work_goes_on,
        a_stopped_waiter_costs_its_own_ttl,
        processes_count_together,
        the_permit_of_a_killed_holder_comes_back,
        readers_of_another_process_are_let_in_though_the_releaser_is_killed,
        a_killed_writer_does_not_keep_readers_waiting,
        groups_of_two_processes_do_not_deadlock,
        consumers_that_are_killed_and_stopped_do_all_in_order,
    }
}

/// A process is stopped while an answer is on its way to it, for longer than an answer may take. When it goes on, that time
/// is over and the answer is there: it counts, and the connection stays. The system interrupts the wait for sockets then,
/// so tokio looks at its timers without having asked the sockets.
#[tokio::test]
async fn an_answer_that_came_while_the_process_was_stopped_counts() {
    on_a_steady_machine(async || {
        let server = RedisServer::start();
        let proxy = Proxy::to(&server);
        let mut worker = Worker::spawn("worker", "asker", &[("URL", &proxy.url())]);
        worker.expect_line("holds", START).await;
        let connections = proxy.accepted();
        for _ in 0..2 {
            let (asked, answered) = proxy.bytes();
            proxy.hold(Way::ToClient, true);
            worker.tell("ask");
            wait_until("it is asked", PATIENCE, || proxy.bytes().0 > asked).await;
            worker.sigstop();
            proxy.hold(Way::ToClient, false);
            wait_until("it is answered", PATIENCE, || proxy.bytes().1 > answered).await;
            sleep(ANSWER_WITHIN + ms(100)).await;
            worker.sigcont();
            let told = worker.expect_line("told ", PATIENCE).await;
            assert_eq!(told, "Ok(())");
        }
        assert_eq!(proxy.accepted(), connections, "the connection stands");
    })
    .await;
}

use pipelines::consumers_that_are_killed_and_stopped_do_all_in_order;

fn spawn(server: &impl LockServer, role: &str, env: &[(&str, &str)]) -> Worker {
    spawn_at("worker", server, role, env)
}

fn spawn_at(entry: &str, server: &impl LockServer, role: &str, env: &[(&str, &str)]) -> Worker {
    let url = server.url();
    let env: Vec<_> = env.iter().copied().chain([("URL", &*url)]).collect();
    Worker::spawn(entry, role, &env)
}

/// A holder that is killed cannot release: its lease runs out, and the waiter has it then, and not before.
async fn the_lock_of_a_killed_holder_comes_when_its_ttl_is_over<S: LockServer>() {
    let server = S::start();
    let here = connected(&server).await;
    let millis = FIXED.as_millis().to_string();
    let begin = Instant::now();
    let mut holder = spawn(&server, "holder", &[("TTL", &*millis)]);
    let token: u64 = holder.expect_line("holds ", START).await.parse().unwrap();
    let held_at_the_latest = Instant::now();
    let waiting = tokio::spawn(here.obtain("k").lease());
    wait_for_queue(&server, 1).await;
    holder.sigkill();
    let lease = timeout(UNASKED, waiting)
        .await
        .expect("in time")
        .unwrap()
        .unwrap();
    assert!(
        begin.elapsed() >= FIXED,
        "taken from a holder that might live"
    );
    assert!(held_at_the_latest.elapsed() <= UNASKED);
    assert!(lease.token().get() > token);
    lease.release().await.unwrap();
    assert_eq!(server.leftovers(), [""; 0]);
}

/// Only the end of a lease keeps its key. A crash does not: the job was not done.
async fn a_killed_job_is_done_again_when_its_ttl_is_over<S: LockServer>() {
    let server = S::start();
    let here = connected(&server).await;
    let millis = FIXED.as_millis().to_string();
    let job = [("TTL", &*millis), ("KEEP_FOR", "60000")];
    let mut holder = spawn(&server, "holder", &job);
    holder.expect_line("holds ", START).await;
    let held_at_the_latest = Instant::now();
    let waiting = tokio::spawn(here.obtain("k").lease());
    wait_for_queue(&server, 1).await;
    holder.sigkill();
    let lease = timeout(UNASKED, waiting).await.expect("in time");
    assert!(held_at_the_latest.elapsed() <= UNASKED);
    lease.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.leftovers(), [""; 0]);
}

/// Waiters that are killed leave tickets at the front of the queue. The hand-over passes all of them by at once: the first
/// that lives is next, and nobody waits a ttl for the dead.
async fn a_killed_waiter_is_passed_by<S: LockServer>() {
    let server = S::start();
    let here = registry(&server.url()).await;
    let lease = here.obtain("k").lease().await.unwrap();
    let mut workers = Vec::new();
    for place in 1..=5 {
        workers.push(spawn(&server, "holder", &[]));
        wait_for_queue(&server, place).await;
    }

    let _dead = server.keep_dead();
    let connections = server.connections();
    let living = workers.split_off(3);
    workers.iter_mut().for_each(Worker::sigkill);
    wait_until("the server sees it", BOUND, || {
        server.connections() + 3 <= connections
    })
    .await;
    assert_eq!(server.queue(), 5);
    let mut token = lease.token().get();
    lease.release().await.unwrap();
    for (left, mut worker) in [1, 0].into_iter().zip(living) {
        let released = Instant::now();
        let next = worker.expect_line("holds ", PATIENCE).await;
        // Of the 8 s of W2 some have passed while processes started.
        assert!(released.elapsed() < 3 * LATE, "{:?}", released.elapsed());
        let next: u64 = next.parse().unwrap();
        assert_eq!(server.queue(), left);
        assert!(next > token);
        token = next;
        worker.tell("release");
        worker.expect_line("released", PATIENCE).await;
    }
    assert_eq!(server.leftovers(), [""; 0]);
}

/// In Redisson's fair lock each waiter had a time until which those behind it waited for it. Callers that gave up and came
/// again moved these times on, up to days; then the first in the queue died, and the others waited for it until then (its
/// tickets 1104 and 2099). Here tickets have no such time: a hand-over looks who is there (S2).
async fn who_gave_up_and_who_was_killed_delay_nobody<S: LockServer>() {
    const IMPATIENT: usize = 3;
    const ROUNDS: usize = 20;
    let server = S::start();
    let [here, first, last] = [
        registry(&server.url()).await,
        registry(&server.url()).await,
        registry(&server.url()).await,
    ];
    let lease = here.obtain("k").lease().await.unwrap();
    // The queue is never empty.
    let first = tokio::spawn(first.obtain("k").lease());
    wait_for_queue(&server, 1).await;
    let impatient = (0..IMPATIENT).map(async |_| {
        let registry = registry(&server.url()).await;
        for _ in 0..ROUNDS {
            assert!(!registry.obtain("k").acquire_within(ms(20)).await.unwrap());
        }
        registry
    });
    let _impatient = join_all(impatient).await;
    // Their tickets are withdrawn (G3).
    wait_for_queue(&server, 1).await;
    let mut killed = spawn(&server, "holder", &[]);
    wait_for_queue(&server, 2).await;
    let last = tokio::spawn(last.obtain("k").lease());
    wait_for_queue(&server, 3).await;
    let connections = server.connections();
    killed.sigkill();
    wait_until("the server sees it", BOUND, || {
        server.connections() < connections
    })
    .await;
    // Nobody asks for 8 s (W2), and the ttl of the dead is longer.
    lease.release().await.unwrap();
    for waiter in [first, last] {
        let lease = timeout(BOUND, waiter).await.expect("in time");
        lease.unwrap().unwrap().release().await.unwrap();
    }
    assert_eq!(server.leftovers(), [""; 0]);
}

/// A process that was stopped past its ttl thinks that it holds, however often its lease was renewed before. When it is
/// woken its work is not polled once more: the lease is compared with the clock before each poll.
async fn a_stopped_holder_learns_of_its_loss_before_its_work_goes_on<S: LockServer>() {
    let server = S::start();
    let here = registry(&server.url()).await;
    // Renewed after a third of it, also where the machine stands still then.
    let ttl = ms(3_600);
    let mut holder = spawn(&server, "stopper", &[("TTL", "3600")]);
    let token: u64 = holder.expect_line("holds ", START).await.parse().unwrap();
    // Renewed for two ttls.
    assert!(!here.obtain("k").acquire_within(2 * ttl).await.unwrap());
    holder.tell("stop");
    holder.until_stopped();
    let margin = 2 * ttl / 3;
    let lease = timeout(ttl + margin, here.obtain("k").lease()).await;
    let lease = lease.expect("within its ttl and a margin").unwrap();
    assert!(
        lease.token().get() > token,
        "{} after {token}",
        lease.token()
    );

    // What it finds when it wakes: renewals that were due, timers that are late, answers of long ago.
    sleep(ms(1_500)).await;
    holder.sigcont();
    let told = holder.expect_line("ended ", PATIENCE).await;
    assert_eq!(told, format!("Lost {token}, polled late: false"));
    sleep(ms(1_500)).await;
    assert!(lease.is_valid(), "the late one took nothing from the next");
    assert!(server.is_held(false));
    lease.release().await.unwrap();
    holder.tell("end");
    assert!(holder.exit(PATIENCE).success());
    assert_eq!(server.leftovers(), [""; 0]);
}

/// A stopped waiter is still connected, so its turn comes, and costs its ttl. Those behind it find that out when the
/// ttl is over that they were told last, its predecessor's (W2), and then ask once more.
async fn a_stopped_waiter_costs_its_own_ttl<S: LockServer>() {
    let server = S::start();
    let here = registry(&server.url()).await;
    let there = registry(&server.url()).await;
    let ttl = ms(3_000);
    // Until both wait, however long that takes.
    let lock = here.obtain("k").ttl(ttl).renewal(Renewal::watchdog());
    let lease = lock.lease().await.unwrap();
    // So long that it releases in time, when its turn has come at last.
    let own = ms(3_000);
    let mut stopped = spawn(&server, "holder", &[("TTL", "3000")]);
    wait_for_queue(&server, 1).await;
    stopped.sigstop();
    let next = tokio::spawn(there.obtain("k").lease());
    wait_for_queue(&server, 2).await;
    let released = Instant::now();
    lease.release().await.unwrap();
    let next = timeout(2 * BOUND, next).await.unwrap().unwrap().unwrap();
    let took = released.elapsed();
    assert!(took >= own - ms(100) && took < ttl + own + LATE, "{took:?}");
    // It wakes to a grant that is over, does not believe it, and enters the queue again.
    stopped.sigcont();
    wait_for_queue(&server, 1).await;
    assert!(next.is_valid() && stopped.said().is_empty());
    let token = next.token();
    next.release().await.unwrap();
    let last = stopped.expect_line("holds ", 3 * LATE).await;
    assert!(last.parse::<u64>().unwrap() > token.get());
    stopped.tell("release");
    stopped.expect_line("released", PATIENCE).await;
}

/// Many tasks of many processes on one counter in a file: none is lost, and the tokens grow in the order of writes.
async fn processes_count_together<S: LockServer>() {
    const PROCESSES: usize = 4;
    const TASKS: usize = 4;
    const ROUNDS: usize = 40;
    let server = S::start();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("counter");
    std::fs::write(&path, "0").unwrap();
    let (tasks, rounds) = (TASKS.to_string(), ROUNDS.to_string());
    let env = [
        ("FILE", path.to_str().unwrap()),
        ("TASKS", &tasks),
        ("ROUNDS", &rounds),
    ];
    let mut workers: Vec<_> = (0..PROCESSES)
        .map(|_| spawn(&server, "counter", &env))
        .collect();
    for worker in &workers {
        worker.expect_line("ready", START).await;
    }
    for worker in &mut workers {
        worker.tell("go");
    }
    // Some hundred turns, each with commits, on a machine that has other things to do.
    for worker in &workers {
        worker.expect_line("done", 12 * BOUND).await;
    }
    let lines = std::fs::read_to_string(path).unwrap();
    let rows: Vec<_> = lines
        .lines()
        .skip(1)
        .map(|row| row.split_once(' ').unwrap())
        .collect();
    assert_eq!(rows.len(), PROCESSES * TASKS * ROUNDS);
    let mut last = 0;
    for (at, (count, token)) in rows.iter().enumerate() {
        assert_eq!(count.parse(), Ok(at + 1), "a count was lost");
        let token: u64 = token.parse().unwrap();
        assert!(token > last, "{token} after {last}");
        last = token;
    }
    wait_until("all is given back", BOUND, || server.leftovers().is_empty()).await;
}

/// A permit of a process that is killed comes back when its ttl is over. The others are held meanwhile.
async fn the_permit_of_a_killed_holder_comes_back<S: LockServer>() {
    let server = S::start();
    let here = registry(&server.url()).await;
    let permit = here.obtain("k").permits(2);
    let stays = permit.lease().await.unwrap();
    let millis = FIXED.as_millis().to_string();
    let mut holder = spawn(&server, "holder", &[("TTL", &*millis), ("MODE", "permit")]);
    holder.expect_line("holds ", START).await;
    let held_at_the_latest = Instant::now();
    let waiting = tokio::spawn(permit.lease());
    wait_for_queue(&server, 1).await;
    holder.sigkill();
    let lease = timeout(UNASKED, waiting).await.expect("in time");
    let lease = lease.unwrap().unwrap();
    assert!(held_at_the_latest.elapsed() <= UNASKED);
    assert!(stays.is_valid());
    lease.release().await.unwrap();
    stays.release().await.unwrap();
    assert_eq!(server.leftovers(), [""; 0]);
}

/// Its release has served some of them, and nobody tells the killed process to serve the rest. Theirs does.
async fn readers_of_another_process_are_let_in_though_the_releaser_is_killed<S: LockServer>() {
    let server = S::start();
    let mut writer = spawn(&server, "holder", &[]);
    writer.expect_line("holds ", START).await;
    let mut readers = spawn(&server, "readers", &[]);
    wait_for_queue(&server, 200).await;
    // It is stopped in the moment after its release was sent, and killed.
    writer.tell("release");
    // All readers may have read and gone before anybody looks.
    wait_until("it is released", PATIENCE, || !server.is_held(false)).await;
    writer.sigkill();
    let within = 3 * LATE + S::LOST_NOTICE;
    readers.expect_line("read", within).await;
    readers.tell("end");
    wait_until("all is given back", BOUND, || server.leftovers().is_empty()).await;
}

/// A writer that is killed while it waits stands in nobody's way.
async fn a_killed_writer_does_not_keep_readers_waiting<S: LockServer>() {
    let server = S::start();
    let here = registry(&server.url()).await;
    let held = here.obtain("k").shared().lease().await.unwrap();
    let mut writer = spawn(&server, "holder", &[]);
    wait_for_queue(&server, 1).await;
    let connections = server.connections();
    writer.sigkill();
    wait_until("the server sees it", BOUND, || {
        server.connections() < connections
    })
    .await;
    let lease = here
        .obtain("k")
        .shared()
        .lease_within(UNASKED)
        .await
        .unwrap();
    lease.release().await.unwrap();
    held.release().await.unwrap();
    assert_eq!(server.leftovers(), [""; 0]);
}

/// A hundred tasks of two processes, each with three of ten keys in its own order.
async fn groups_of_two_processes_do_not_deadlock<S: LockServer>() {
    let server = S::start();
    let mut workers: Vec<_> = ["0", "5"]
        .map(|first| spawn(&server, "transfers", &[("FIRST", first)]))
        .into();
    for worker in &workers {
        worker.expect_line("ready", START).await;
    }
    for worker in &mut workers {
        worker.tell("go");
    }
    // Five hundred groups, on a machine that has other things to do.
    for worker in &workers {
        worker
            .expect_line("done", workers::TRANSFER_WITHIN + 12 * BOUND)
            .await;
    }
    wait_until("all is given back", BOUND, || server.leftovers().is_empty()).await;
}
