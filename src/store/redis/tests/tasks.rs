//! Where a session's task lives, and when it ends.

use super::registry::{BOUND, HELD, Registry, Settings, attempt, release, unknown, unsent, won};
use super::support::{Proxy, RedisServer, Way, wait_until};

#[tokio::test]
async fn a_dropped_session_closes_its_connection() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    assert_eq!(server.clients().len(), 1);
    one.session = None;
    wait_until("closed", BOUND, || server.clients().is_empty()).await;
    one.down().await;
}

#[tokio::test]
async fn a_session_has_one_task() {
    let server = RedisServer::start();
    let mut one = Registry::on(&server, "a1").await;
    won(&one.outcome("k", attempt(1)).await);
    let metrics = tokio::runtime::Handle::current().metrics();
    assert_eq!(metrics.num_alive_tasks(), 1);
    one.session = None;
    wait_until("it ends", BOUND, || metrics.num_alive_tasks() == 0).await;
}

#[tokio::test]
async fn a_session_dropped_while_it_pauses_ends_its_task() {
    let mut server = RedisServer::start();
    server.kill();
    let mut one = Settings::new(&server, "a1").open();
    one.session().start();
    for _ in 0..4 {
        one.down().await;
    }
    one.session = None;
    let alive = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    wait_until("the task ends", BOUND, || alive() == 0).await;
}

#[test]
fn a_session_outlives_the_runtime_that_it_ran_on() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let mut one = Settings::url(proxy.url(), "a1").open();
    one.session().start();
    one.submit("early", attempt(1));

    let runtime = || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    };
    let first = runtime();
    first.block_on(async {
        one.session().start();
        assert!(one.up().await);
        won(&one.reply("early", &attempt(1)).await.unwrap().outcome);
        proxy.hold(Way::ToClient, true);
        one.submit("sent", attempt(2));
        wait_until("sent", BOUND, || server.exists("lock:sent")).await;
        one.submit("sent", release(2));
    });
    drop(first);
    proxy.hold(Way::ToClient, false);

    runtime().block_on(async {
        unknown(one.reply("sent", &attempt(2)).await);
        unsent(one.reply("sent", &release(2)).await);
        one.down().await;
        // No task, and nobody has called start: the op sees to it itself.
        one.submit("sent", release(2));
        assert!(one.up().await);
        assert_eq!(one.reply("sent", &release(2)).await.unwrap().outcome, HELD);
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_threads_start_one_task_and_some_have_no_runtime() {
    let server = RedisServer::start();
    let mut one = Settings::new(&server, "a1").open();
    std::thread::scope(|scope| {
        let runtime = tokio::runtime::Handle::current();
        for owner in 0..8 {
            let (one, runtime) = (&one, runtime.clone());
            scope.spawn(move || {
                let _guard = (owner % 2 == 0).then(|| runtime.enter());
                one.session().start();
                one.submit(&format!("k{owner}"), attempt(owner));
            });
        }
    });
    for owner in 0..8 {
        won(&one
            .reply(&format!("k{owner}"), &attempt(owner))
            .await
            .unwrap()
            .outcome);
    }
    assert_eq!(server.clients().len(), 1);
}
