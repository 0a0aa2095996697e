//! Processes that are forked from one that has built registries.

use fork::{Fork, fork, waitpid};
use lockstream::LockRegistry;
use tokio::runtime::Builder;

use crate::spawn_at;
use crate::support::{PATIENCE, RedisServer, Role};

/// Not a test, but what another process runs, in which nothing else does.
#[test]
fn forking_worker() {
    let Some(role) = Role::of_this_process() else {
        return;
    };
    let url = role.env("URL");
    // What its children have in common: random numbers of this thread, and what a process has for all registries.
    let used = LockRegistry::in_memory();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    drop(runtime.block_on(used.obtain("k").lease()).unwrap());
    drop(runtime);
    let built = LockRegistry::builder_for(&url).unwrap().build().unwrap();
    for _ in 0..2 {
        match fork().unwrap() {
            Fork::Parent(child) => assert_eq!(waitpid(child).unwrap(), 0),
            Fork::Child => {
                let runtime = Builder::new_current_thread().enable_all().build();
                runtime.unwrap().block_on(in_child(&role, &url, &built));
                std::process::exit(0);
            }
        }
    }
}

async fn in_child(role: &Role, url: &str, built: &LockRegistry) {
    match built.obtain("k").lease_once().await {
        Ok(lease) => role.say(format!("copy: {}", lease.is_some())),
        Err(error) => role.say(format!("copy: {error}")),
    }
    role.say(format!("check: {}", built.check().await.unwrap_err()));
    let own = LockRegistry::connect(url).await.unwrap();
    let lease = own.obtain("other").lease_within(PATIENCE).await.unwrap();
    role.say(format!("owner {}", lease.owner().unwrap()));
    lease.release().await.unwrap();
}

/// They would be one owner, and so each would have the lock.
#[tokio::test]
async fn a_registry_is_of_one_process() {
    let server = RedisServer::start();
    let worker = spawn_at("forks::forking_worker", &server, "forking", &[]);
    let mut owners = Vec::new();
    for _ in 0..2 {
        let told = worker.expect_line("copy: ", PATIENCE).await;
        let why = "was built before this process was forked: build one in each process";
        assert_eq!(
            told,
            format!("invalid setting `registry` for lock \"k\": {why}")
        );
        let told = worker.expect_line("check: ", PATIENCE).await;
        assert_eq!(told, format!("the registry {why}"));
        let owner = worker.expect_line("owner ", PATIENCE).await;
        let (instance, _) = owner.split_once(':').unwrap();
        owners.push(instance.to_owned());
    }
    assert_ne!(owners[0], owners[1], "each has an id of its own");
}
