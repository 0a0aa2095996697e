//! What docs/postgres.md tells an administrator to type.

use std::time::Duration;

use lockstream::LockError;

use crate::support::{PgServer, on_a_steady_machine};
use crate::{BOUND, eventually, registry};

/// The statements under "Locks by hand", in their order.
fn statements() -> Vec<&'static str> {
    let page = include_str!("../../docs/postgres.md");
    let (_, section) = page.split_once("## Locks by hand").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let blocks = section.split("```sql\n").skip(1);
    blocks
        .map(|block| block.split_once("```").unwrap().0)
        .collect()
}

#[tokio::test]
async fn a_lock_is_seen_and_freed_by_hand() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let (one, other) = (registry(&server.url()).await, registry(&server.url()).await);
        let [held, waited, free, free_shared] = statements()[..] else {
            panic!("four statements");
        };
        let ttl = Duration::from_secs(60);
        for mode in ["exclusive", "shared", "permit"] {
            let lock = |locks: &lockstream::LockRegistry| {
                let lock = locks.obtain("order:42").ttl(ttl);
                match mode {
                    "shared" => lock.shared(),
                    "permit" => lock.permits_of(2, 2),
                    _ => lock,
                }
            };
            let lease = lock(&one).lease().await.unwrap();
            let exclusive = other.obtain("order:42").ttl(ttl);
            let waiting = tokio::spawn(async move { exclusive.lease_within(BOUND).await });
            eventually("it waits", async || server.rows(waited).len() == 1).await;
            let row = &server.rows(held)[0];
            let (key, owner) = (row.get::<_, String>("key"), row.get::<_, String>("owner"));
            assert!(
                key == "lock:order:42" && owner.contains(':'),
                "{key} {owner}"
            );
            let is_fresh = format!(
                "SELECT until > now() + interval '30 s' FROM ({}) x",
                held.trim().trim_end_matches(';')
            );
            assert!(server.one::<bool>(&is_fresh));
            let waiter: String = server.rows(waited)[0].get("owner");
            assert_ne!(waiter, owner);
            let frees = if mode == "exclusive" {
                free
            } else {
                free_shared
            };
            let verdict: String = server.rows(frees)[0].get("verdict");
            assert_eq!(verdict, "held");
            // Nobody asks by itself for 8 s (W2).
            let next = tokio::time::timeout(Duration::from_secs(5), waiting).await;
            let next = next.expect("it is told").unwrap().unwrap();
            assert!(next.token() > lease.token());
            assert!(matches!(lease.release().await, Err(LockError::Lost { .. })));
            next.release().await.unwrap();
            assert!(server.rows(held).is_empty() && server.rows(waited).is_empty());
        }
    })
    .await;
}

/// A fenced transaction is waited for.
#[tokio::test]
async fn a_fenced_lock_is_not_freed_by_hand() {
    let server = PgServer::start();
    let locks = registry(&server.url()).await;
    let lease = locks.obtain("order:42").lease().await.unwrap();
    let mut client = crate::client(&server.url()).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    let free = statements()[2];
    assert_eq!(server.rows(free)[0].get::<_, String>("verdict"), "again");
    let other = registry(&server.url()).await;
    assert!(
        other
            .obtain("order:42")
            .lease_once()
            .await
            .unwrap()
            .is_none()
    );
    transaction.commit().await.unwrap();
    server.rows(free);
    assert!(server.rows(statements()[0]).is_empty());
    assert!(
        other
            .obtain("order:42")
            .lease_once()
            .await
            .unwrap()
            .is_some()
    );
    assert!(matches!(lease.release().await, Err(LockError::Lost { .. })));
}
