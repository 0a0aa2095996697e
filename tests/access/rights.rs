use std::time::{Duration, Instant};

use lockstream::{LockRegistry, Repeat};
use tokio::time::timeout;

use crate::hearing::Log;
use crate::support::{
    PATIENCE, Program, RedisServer, again_if_it_stood_still, least_rights, on_a_steady_machine,
};
use crate::{BOUND, WAIT, patient, told};

const ALL: [Program; 4] = [
    Program::Usual,
    Program::Valkey,
    Program::Redis8,
    Program::Redis6,
];

/// What is missing without a right.
#[derive(Debug, PartialEq)]
enum Want {
    /// Nothing works, and it is said what is missing.
    Everything,
    /// Pushes: it is logged what is missing, and waiters ask again.
    Pushes,
    /// Nothing but a warning.
    Warning,
    /// Nothing that shows.
    Nothing,
}

/// A right as the page lists it, what is missing without it, and how an error names it.
fn expected(right: &'static str) -> (Want, &'static str) {
    match right {
        // A server that refuses a key does not say which.
        "~lock:*" | "~{lock:*" => (Want::Everything, right),
        "&lock:~grant:*" => (Want::Pushes, right),
        "+subscribe" | "+publish" => (Want::Pushes, &right[1..]),
        "+info" => (Want::Warning, "no right to INFO"),
        // Of `eval` and `script|load` one is enough.
        "+client|info" | "+client|kill" | "+eval" | "+ping" | "+script|load" => (Want::Nothing, ""),
        _ => (Want::Everything, &right[1..]),
    }
}

fn registry(url: &str) -> LockRegistry {
    let store = patient(url).connect_lazy().unwrap();
    LockRegistry::builder(store)
        .repeat(Repeat::fixed(Duration::from_millis(20)))
        .response_timeout(2 * BOUND)
        .wait(WAIT)
        .build()
        .unwrap()
}

/// Whatever asks the server for each of its rights: two in turn, a look, a renewal, a connection made again.
async fn takes_turns(server: &RedisServer, url: &str) {
    again_if_it_stood_still(async || {
        let (one, two) = (registry(url), registry(url));
        let lock = one.obtain("k");
        let lease = lock.lease().await.unwrap();
        let waiter = tokio::spawn(two.obtain("k").lease());
        lock.inspect().await.unwrap();
        lease.extend(Duration::from_secs(60)).await.unwrap();
        server.client_kill_all();
        lease.release().await.unwrap();
        let next = timeout(BOUND, waiter).await.expect("it is served").unwrap();
        next.unwrap().release().await.unwrap();
    })
    .await;
}

/// So many servers share the rights, for each takes a second.
const SERVERS: usize = 4;

fn each_right_is_needed(program: Program) {
    // What is logged is heard in a thread of its own.
    std::thread::scope(|threads| {
        for first in 0..SERVERS {
            threads.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime.unwrap().block_on(these_are_needed(program, first));
            });
        }
    });
}

/// On one server all rights but one, for every fourth in turn; and with that one again it works.
async fn these_are_needed(program: Program, first: usize) {
    let server = RedisServer::builder().program(program).start();
    let url = server.url_with("lockstream", "password", 0);
    let words = least_rights();
    let set = |words: &[&str]| {
        server.cmd(&["ACL", "DELUSER", "lockstream"]);
        server.cmd(&[&["ACL", "SETUSER"], words].concat());
        server.script_flush();
    };
    let is_right = |word: &&&str| word.starts_with(['~', '&', '+']);
    let rights: Vec<_> = words.iter().filter(is_right).copied().collect();
    assert!(rights.len() > 20, "{rights:?}");
    for right in rights.into_iter().skip(first).step_by(SERVERS) {
        let fewer: Vec<_> = words.iter().copied().filter(|it| *it != right).collect();
        set(&fewer);
        let (want, name) = expected(right);
        let log = Log::default();
        let logging = log.hear(tracing::Level::TRACE);
        let begin = Instant::now();
        match want {
            Want::Everything => {
                let registry = registry(&url);
                for error in [
                    told(registry.obtain("k").acquire_once().await),
                    told(registry.obtain("k").lease().await),
                    told(registry.obtain("k").inspect().await),
                ] {
                    let text = error.to_string();
                    assert!(
                        text.contains("NOPERM") && text.contains(name),
                        "{right}: {text}"
                    );
                    assert!(!error.is_retryable(), "{right}: {text}");
                }
                // None of them is waited with.
                let took = begin.elapsed();
                assert!(took < PATIENCE, "{right}: {took:?}");
                set(&words);
                // The registry is as good as new.
                let lease = registry.obtain("k").lease().await.unwrap();
                lease.release().await.unwrap();
            }
            Want::Pushes => {
                takes_turns(&server, &url).await;
                let said = log.text();
                let warning = said
                    .lines()
                    .find(|line| line.contains("cannot push grants"));
                let warning = warning.unwrap_or_else(|| panic!("{right}: no warning: {said}"));
                assert!(warning.contains(name), "{right}: {warning}");
            }
            Want::Warning => {
                takes_turns(&server, &url).await;
                assert!(log.text().contains(name), "{right}: {}", log.text());
            }
            Want::Nothing => {
                patient(&url).connect().await.unwrap();
                takes_turns(&server, &url).await;
            }
        }
        drop(logging);
    }
    set(&words);
    takes_turns(&server, &url).await;
}

#[test]
fn each_right_is_needed_on_the_usual_server() {
    each_right_is_needed(ALL[0]);
}

#[test]
fn each_right_is_needed_on_valkey() {
    each_right_is_needed(ALL[1]);
}

#[test]
fn each_right_is_needed_on_redis_8() {
    each_right_is_needed(ALL[2]);
}

#[test]
fn each_right_is_needed_on_redis_6() {
    each_right_is_needed(ALL[3]);
}

/// Rights are taken away while a lock is held and waited for, and released.
#[tokio::test]
async fn a_right_is_taken_away_and_given_back() {
    on_a_steady_machine(async || {
        for program in ALL {
            let server = RedisServer::builder().program(program).start();
            server.cmd(&[&["ACL", "SETUSER"], &least_rights()[..]].concat());
            let url = server.url_with("lockstream", "password", 0);
            let (one, two) = (registry(&url), registry(&url));
            let lease = one.obtain("k").lease().await.unwrap();
            let waiter = tokio::spawn(two.obtain("k").lease());
            while one.obtain("k").inspect().await.unwrap().waiting == 0 {
                tokio::task::yield_now().await;
            }
            server.cmd(&["ACL", "SETUSER", "lockstream", "-set", "-get"]);
            let error = told(one.obtain("other").acquire_once().await);
            assert!(error.to_string().contains("NOPERM"), "{program:?}: {error}");
            assert!(!error.is_retryable(), "{program:?}: {error}");
            assert!(lease.is_valid() && !waiter.is_finished(), "{program:?}");
            server.cmd(&["ACL", "SETUSER", "lockstream", "+set", "+get"]);
            lease.release().await.unwrap();
            let next = timeout(BOUND, waiter).await.expect("it is served").unwrap();
            next.unwrap().release().await.unwrap();
        }
    })
    .await;
}
