//! One of two instances polls an inbox, and the other takes over when it ends: `lead_stream`.
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example poller   # without a url: locks in this process alone
//! ```
//!
//! Each line says who has answered what, under which token. After three mails the first instance ends. Its lead is released
//! at once, and the second goes on where the inbox stands.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::error::Error;
use std::pin::pin;
use std::time::Duration;

use futures::{Stream, StreamExt, TryStreamExt, stream};
use lockstream::prelude::*;
use lockstream::store::MemoryStore;
use lockstream::{LeaseView, Token};
use tokio::sync::Notify;
use tokio::time::sleep;

/// What is to be answered. A real one would be asked for it over a network.
type Inbox = RefCell<VecDeque<&'static str>>;

/// The mails, one after the other, until there is none. Dropped in the midst of one, it leaves that in the inbox.
fn answered(inbox: &Inbox, lease: LeaseView) -> impl Stream<Item = (Token, &'static str)> {
    let token = lease.token();
    stream::unfold((), move |()| async move {
        let mail = *inbox.borrow().front()?;
        sleep(Duration::from_millis(50)).await;
        inbox.borrow_mut().pop_front();
        Some(((token, mail), ()))
    })
}

/// What an instance is: a stream of what it has answered, which has items only while it leads.
fn instance<'a>(
    locks: &LockRegistry,
    inbox: &'a Inbox,
) -> impl Stream<Item = Result<(Token, &'static str), LockError>> + 'a {
    let lock = locks.obtain("poller").ttl(Duration::from_secs(3));
    lock.lead_stream(move |lease| answered(inbox, lease))
}

/// Two registries, as two processes have them.
async fn registries() -> Result<[LockRegistry; 2], Box<dyn Error>> {
    if let Ok(url) = std::env::var("REDIS_URL") {
        let connect = || LockRegistry::connect(url.clone());
        return Ok([connect().await?, connect().await?]);
    }
    let store = MemoryStore::new();
    let build = || LockRegistry::builder(store.clone()).build();
    Ok([build()?, build()?])
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let [here, there] = registries().await?;
    let inbox = Inbox::new(["one", "two", "three", "four", "five", "six"].into());
    let first_leads = Notify::new();
    let first = async {
        let mut answered = pin!(instance(&here, &inbox).take(3));
        while let Some((token, mail)) = answered.try_next().await? {
            println!("first   {token}  {mail}");
            first_leads.notify_one();
        }
        println!("first   ends");
        Ok::<_, LockError>(())
    };
    let second = async {
        first_leads.notified().await;
        let mut answered = pin!(instance(&there, &inbox));
        while let Some((token, mail)) = answered.try_next().await? {
            println!("second  {token}  {mail}");
        }
        Ok(())
    };
    tokio::try_join!(first, second)?;
    println!("the inbox is empty");
    here.shutdown().await;
    there.shutdown().await;
    Ok(())
}
