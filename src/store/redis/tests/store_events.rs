//! What sentinels tell unasked.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::sleep;

use super::fake::{Fake, Request, push};
use super::registry::BOUND;
use super::support::wait_until;
use crate::handle::LockRegistry;
use crate::store::RedisStore;

/// So many fail-overs are told of at once.
const MANY: usize = 400;

#[derive(Default)]
struct Talk {
    port: String,
    /// The connection that was told.
    told: Option<usize>,
    /// How often the sentinel was asked on it.
    questions: usize,
}

/// The sentinel and its primary in one.
fn answer(talk: &mut Talk, request: &Request) -> Option<Vec<u8>> {
    let word = |word: &str| format!("${}\r\n{word}\r\n", word.len());
    if request.is("SENTINEL") {
        talk.questions += usize::from(talk.told == Some(request.connection));
        let address = format!("*2\r\n{}{}", word("127.0.0.1"), word(&talk.port));
        return Some(address.into_bytes());
    }
    if request.is("ROLE") {
        return Some(format!("*3\r\n{}:0\r\n*0\r\n", word("master")).into_bytes());
    }
    if request.is("SUBSCRIBE") && request.words[1].starts_with("+failover") {
        talk.told = Some(request.connection);
        let mut bytes = request.usual();
        bytes.extend(push(&["message", &request.words[1], "master other"], "").repeat(MANY));
        return Some(bytes);
    }
    if request.is_call() && request.letters() == "R" {
        return Some(word(&format!("{}  1", request.number())).into_bytes());
    }
    None
}

/// One answer is newer than all that was told before its question. Else whatever is told faster than questions are answered
/// is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_question_does_for_all_events_before_it() {
    let talk = Arc::new(Mutex::new(Talk::default()));
    let seen = talk.clone();
    let fake = Fake::start(move |request| answer(&mut seen.lock().unwrap(), request));
    let url = fake.url();
    let authority = url.trim_start_matches("redis://").trim_end_matches('/');
    authority
        .rsplit(':')
        .next()
        .unwrap()
        .clone_into(&mut talk.lock().unwrap().port);
    let url = format!("redis+sentinel://{authority}/service");
    let locks = LockRegistry::builder(RedisStore::connect_lazy(url).unwrap())
        .build()
        .unwrap();
    locks
        .obtain("k")
        .lease()
        .await
        .unwrap()
        .release()
        .await
        .unwrap();
    let questions = || talk.lock().unwrap().questions;
    wait_until("it is asked", BOUND, || questions() > 0).await;
    // Time for some forty more.
    sleep(Duration::from_secs(2)).await;
    // The events may come in pieces.
    assert!(questions() <= MANY / 40, "{} questions", questions());
}
