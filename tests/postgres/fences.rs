//! Transactions that are fenced by a lease.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use futures::future::join;
use lockstream::store::PostgresStore;
use lockstream::{FenceSql, FutureLockExt, Lock, LockError, LockRegistry, LossCause, OnFinish};
use tokio_postgres::IsolationLevel;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use crate::support::{PgServer, on_a_steady_machine};
use crate::{BOUND, PATIENCE, builder, client, eventually, ms, patient, registry};

/// A server with a table of accounts, and two processes.
async fn shop() -> (PgServer, LockRegistry, LockRegistry) {
    let server = PgServer::start();
    let (one, other) = (registry(&server.url()).await, registry(&server.url()).await);
    server.run("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL); INSERT INTO account VALUES (1, 100)");
    (server, one, other)
}

/// Leases that are over, and not given to others.
const ENDED: &str =
    "SELECT count(*) FROM lockstream.lock WHERE owner <> '' AND expires_at <= lockstream.now_1()";

const SPEND: &str = "UPDATE account SET balance = balance - 30 WHERE id = 1";

async fn commits(registry: &LockRegistry, url: &str) {
    let lease = registry.obtain("account:1").lease().await.unwrap();
    let mut client = client(url).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    transaction.execute(SPEND, &[]).await.unwrap();
    transaction.commit().await.unwrap();
    lease.release().await.unwrap();
}

#[tokio::test]
async fn a_holder_commits_and_one_whose_lease_is_over_does_not() {
    let (server, one, other) = shop().await;
    commits(&one, &server.url()).await;
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 70);

    let lease = one.obtain("account:1").ttl(ms(500)).lease().await.unwrap();
    let view = lease.view();
    lease.lost().await;
    commits(&other, &server.url()).await;
    let mut client = client(&server.url()).await;
    let transaction = client.transaction().await.unwrap();
    let stale = view.fence(&transaction).await.unwrap_err();
    assert!(
        matches!(&stale, LockError::Lost { token, .. } if *token == view.token()),
        "{stale:?}"
    );
    let aborted = transaction.execute(SPEND, &[]).await.unwrap_err();
    assert_eq!(aborted.code(), Some(&SqlState::IN_FAILED_SQL_TRANSACTION));
    // The client says `Ok`, and the server has rolled back.
    transaction.commit().await.unwrap();
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 40);
}

/// Of another lease of the key, of another key, of no lease at all.
#[tokio::test]
async fn a_token_fences_by_its_own_lease_alone() {
    let (server, one, _other) = shop().await;
    let lease = one.obtain("account:1").lease().await.unwrap();
    let token = lease.token().get();
    let mut sql = server.client();
    sql.run(&format!(
        "BEGIN; SELECT lockstream.fence('account:1', {token}); COMMIT"
    ));
    for (key, token) in [
        ("account:1", token - 64),
        ("account:1", token + 64),
        ("account:2", token),
        ("account:1", 0),
    ] {
        let error = sql
            .try_run(&format!("SELECT lockstream.fence('{key}', {token})"))
            .unwrap_err();
        assert_eq!(
            error.code().unwrap().code(),
            "LS001",
            "{key} {token}: {error}"
        );
    }
    lease.release().await.unwrap();
    let error = sql
        .try_run(&format!("SELECT lockstream.fence('account:1', {token})"))
        .unwrap_err();
    assert_eq!(error.code().unwrap().code(), "LS001");
}

/// Was told as a lease that is over, though it was held: under another prefix, and of a group, whose key is none of its keys.
#[tokio::test]
async fn a_fence_says_where_it_has_looked() {
    let server = PgServer::start();
    let store = || patient(server.url()).connect();
    let builder = crate::builder(store().await.unwrap()).prefix("shop");
    let (shop, plain) = (builder.build().unwrap(), registry(&server.url()).await);
    let of_shop = shop.obtain("account:1").lease().await.unwrap();
    let of_two = plain.obtain_all(["b", "a"]).lease().await.unwrap();
    let mut sql = server.client();
    let mut refused = |key: &str, token: i64, more: &str| {
        let fence = format!("SELECT lockstream.fence('{key}', {token}{more})");
        let error = sql.try_run(&fence).unwrap_err();
        let error = error.as_db_error().unwrap();
        assert_eq!(error.code().code(), FenceSql::REFUSED);
        error.message().to_owned()
    };
    let token = of_shop.token().as_i64();
    let why = "its key or its prefix is another, or it ended long ago";
    assert_eq!(
        refused("account:1", token, ""),
        format!(r#"no lease on "account:1" under the prefix "lock" has the token {token}: {why}"#)
    );
    let of_a = of_two.token().as_i64();
    assert_eq!(
        refused(of_two.key(), of_a, ""),
        format!(r#"no lease on "a,b" under the prefix "lock" has the token {of_a}: {why}"#)
    );
    let of_b = of_two.token_of("b").unwrap().as_i64();
    assert_eq!(
        refused("a", of_b, ""),
        format!(r#"no lease on "a" under the prefix "lock" has the token {of_b}: {why}"#)
    );
    of_shop.release().await.unwrap();
    assert_eq!(
        refused("account:1", token, ", 'shop'"),
        format!(r#"the lease on "account:1" under the prefix "shop" with token {token} is over"#)
    );
}

/// What another driver executes does what `fence` does, under whatever prefix, schema and keys.
#[tokio::test]
async fn any_driver_can_fence() {
    let server = PgServer::start();
    let store = patient(server.url()).schema("app_locks");
    let store = store.connect().await.unwrap();
    let locks = crate::builder(store).prefix("shop").build().unwrap();
    let lease = locks.obtain_all(["b", "a"]).lease().await.unwrap();
    let fences = lease.view().fence_sql().unwrap();
    let keys = fences.iter().map(|fence| (fence.key(), fence.prefix()));
    assert_eq!(keys.collect::<Vec<_>>(), [("a", "shop"), ("b", "shop")]);
    let client = client(&server.url()).await;
    client.batch_execute("BEGIN").await.unwrap();
    for fence in &fences {
        let arguments: [&(dyn ToSql + Sync); 3] = [&fence.key(), &fence.token(), &fence.prefix()];
        client.query(fence.text(), &arguments).await.unwrap();
    }
    // Both keys wait for the transaction.
    let releasing = tokio::spawn(lease.release());
    let other = patient(server.url()).schema("app_locks");
    let other = crate::builder(other.connect().await.unwrap())
        .prefix("shop")
        .build()
        .unwrap();
    for key in ["a", "b"] {
        assert!(
            other.obtain(key).lease_once().await.unwrap().is_none(),
            "{key}"
        );
    }
    client.batch_execute("COMMIT").await.unwrap();
    releasing.await.unwrap().unwrap();
    for fence in &fences {
        let arguments: [&(dyn ToSql + Sync); 3] = [&fence.key(), &fence.token(), &fence.prefix()];
        let error = client.query(fence.text(), &arguments).await.unwrap_err();
        assert_eq!(error.code().unwrap().code(), FenceSql::REFUSED, "{error}");
    }
}

/// The lease is over, and the transaction goes on: nobody gets the lock before its end.
#[tokio::test]
async fn a_lease_that_runs_out_in_a_transaction_is_not_given_away() {
    on_a_steady_machine(async || {
        let (server, one, other) = shop().await;
        let mut client = client(&server.url()).await;
        let lease = one.obtain("account:1").ttl(ms(1500)).lease().await.unwrap();
        let transaction = client.transaction().await.unwrap();
        lease.view().fence(&transaction).await.unwrap();
        transaction.execute(SPEND, &[]).await.unwrap();
        lease.lost().await;
        let lock = other.obtain("account:1");
        assert!(!lock.acquire_once().await.unwrap(), "not even now");
        let waiting =
            tokio::spawn(async move { lock.lease_within(BOUND).await.map(|_| Instant::now()) });
        tokio::time::sleep(ms(500)).await;
        let ending = Instant::now();
        assert!(!waiting.is_finished());
        transaction.commit().await.unwrap();
        let got = waiting.await.unwrap().unwrap();
        assert!(got >= ending, "before the end of the transaction");
        assert_eq!(server.one::<i64>("SELECT balance FROM account"), 70);
    })
    .await;
}

/// Whoever takes a lock by force waits for a transaction that is fenced by it. No fence begins meanwhile, and the key goes
/// to whoever waits when the transaction has ended.
#[tokio::test]
async fn force_waits_for_the_transaction() {
    let (server, one, other) = shop().await;
    for shared in [false, true] {
        let lock = one.obtain("account:1").ttl(ms(60_000));
        let lock = if shared { lock.shared() } else { lock };
        let lease = lock.lease().await.unwrap();
        let (owner, token) = (lease.owner().unwrap(), lease.token().get());
        let mut client = client(&server.url()).await;
        let transaction = client.transaction().await.unwrap();
        lease.view().fence(&transaction).await.unwrap();
        let waiter = tokio::spawn(other.obtain("account:1").lease_within(BOUND));
        eventually("it waits", async || {
            other.obtain("account:1").inspect().await.unwrap().waiting == 1
        })
        .await;
        let forced = tokio::spawn(other.force_release("account:1", &owner));
        let mut sql = server.client();
        eventually("the lease is over", async || lease.verify().await.is_err()).await;
        let fence = format!("SELECT lockstream.fence('account:1', {token})");
        let error = sql.try_run(&fence).unwrap_err();
        assert_eq!(error.code().unwrap().code(), "LS001");
        let third = registry(&server.url()).await;
        let abandoned = tokio::spawn(third.force_release("account:1", &owner));
        tokio::time::sleep(ms(300)).await;
        // Nobody waits behind it.
        let busy = third.obtain("account:1").lease_once().await;
        assert!(busy.unwrap().is_none());
        abandoned.abort();
        assert!(!forced.is_finished() && !waiter.is_finished());
        transaction.commit().await.unwrap();
        assert!(forced.await.unwrap().unwrap());
        waiter.await.unwrap().unwrap().release().await.unwrap();
        assert!(!other.force_release("account:1", &owner).await.unwrap());
        drop(lease);
    }
}

/// An adoption that is done when nobody waits for it any more would end the lease.
#[tokio::test]
async fn an_adoption_waits_for_the_transaction_as_long_as_its_caller() {
    on_a_steady_machine(async || {
        let (server, one, _) = shop().await;
        // An eighth of it is the time for a slow machine to hear of the refusal.
        let store = PostgresStore::connect(server.url()).await.unwrap();
        let other = LockRegistry::builder(store).response_timeout(Duration::from_secs(12));
        let other = other.build().unwrap();
        let refused_and_adopted = async |lock: Lock| {
            let lease = lock.lease().await.unwrap();
            let mut client = client(&server.url()).await;
            let transaction = client.transaction().await.unwrap();
            lease.view().fence(&transaction).await.unwrap();
            let detached = lease.detach().unwrap();
            let refused = other.adopt(detached.clone()).await;
            let Err(LockError::Store { source, .. }) = refused else {
                panic!("{refused:?}");
            };
            assert!(source.is_retryable(), "{source}");
            // It is held as before.
            assert!(one.obtain(lock.key()).lease_once().await.unwrap().is_none());
            transaction.commit().await.unwrap();
            // Time for an adoption that nobody waits for any more.
            tokio::time::sleep(ms(600)).await;
            let adopted = other.adopt(detached).await.unwrap();
            adopted.release().await.unwrap();
        };
        let lasting = |key: &str| one.obtain(key).ttl(ms(60_000));
        join(
            refused_and_adopted(lasting("account:1")),
            refused_and_adopted(lasting("account:2").shared()),
        )
        .await;
    })
    .await;
}

/// The end of a lease whose key is kept waits for nothing: the key is nobody's. Its time may be over before the transaction
/// is, and then it is given to nobody before that has ended. No fence begins meanwhile.
#[tokio::test]
async fn m8_a_kept_key_waits_for_the_transaction() {
    let (server, one, other) = shop().await;
    // So long that it can be looked at meanwhile.
    let kept = ms(4000);
    for shared in [false, true] {
        let lock = one.obtain("account:1");
        let lock = if shared { lock.shared() } else { lock };
        let lease = lock.on_finish(OnFinish::KeepFor(kept));
        let lease = lease.lease().await.unwrap();
        let (view, token) = (lease.view(), lease.token());
        let mut client = client(&server.url()).await;
        let transaction = client.transaction().await.unwrap();
        view.fence(&transaction).await.unwrap();
        lease.finish().await.unwrap();
        let late = format!("SELECT lockstream.fence('account:1', {})", token.get());
        let refused = server.client().try_run(&late).unwrap_err();
        assert_eq!(refused.code().unwrap().code(), "LS001");
        let lock = other.obtain("account:1");
        let seen = lock.inspect().await.unwrap();
        assert!(seen.owner().unwrap().contains("+kept:"));
        tokio::time::sleep(kept + ms(400)).await;
        assert!(!lock.acquire_once().await.unwrap(), "not even now");
        transaction.execute(SPEND, &[]).await.unwrap();
        transaction.commit().await.unwrap();
        assert!(lock.acquire_within(BOUND).await.unwrap());
        lock.release().await.unwrap();
    }
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 40);
}

/// A release in the midst of the transaction is done when that has ended. No fence begins meanwhile.
#[tokio::test]
async fn a_release_waits_for_the_transaction() {
    let (server, one, other) = shop().await;
    for is_waited_for in [false, true] {
        let lease = one.obtain("account:1").lease().await.unwrap();
        let (view, token) = (lease.view(), lease.token());
        let mut client = client(&server.url()).await;
        let transaction = client.transaction().await.unwrap();
        view.fence(&transaction).await.unwrap();
        let lock = other.obtain("account:1");
        let waiting =
            is_waited_for.then(|| tokio::spawn(async move { lock.lease_within(BOUND).await }));
        if is_waited_for {
            let lock = other.obtain("account:1");
            eventually("it waits", async || {
                lock.inspect().await.unwrap().waiting == 1
            })
            .await;
        }
        let releasing = tokio::spawn(async move { lease.release().await });
        eventually("the release has come", async || {
            server.one::<i64>(ENDED) == 1
        })
        .await;
        tokio::time::sleep(ms(300)).await;
        assert!(!releasing.is_finished());
        let late = format!("SELECT lockstream.fence('account:1', {})", token.get());
        assert_eq!(
            server
                .client()
                .try_run(&late)
                .unwrap_err()
                .code()
                .unwrap()
                .code(),
            "LS001"
        );
        transaction.execute(SPEND, &[]).await.unwrap();
        transaction.commit().await.unwrap();
        releasing
            .await
            .unwrap()
            .expect("it was held until its release");
        if let Some(waiting) = waiting {
            waiting.await.unwrap().unwrap().release().await.unwrap();
        }
    }
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 40);
}

#[tokio::test]
async fn an_older_snapshot_does_not_hide_the_end_of_a_lease() {
    let (server, one, other) = shop().await;
    for level in [IsolationLevel::RepeatableRead, IsolationLevel::Serializable] {
        for is_shared in [false, true] {
            let lock = |registry: &LockRegistry| match is_shared {
                true => registry.obtain("account:1").permits(1),
                false => registry.obtain("account:1"),
            };
            let lease = lock(&one).lease().await.unwrap();
            let view = lease.view();
            let mut client = client(&server.url()).await;
            let transaction = client
                .build_transaction()
                .isolation_level(level)
                .start()
                .await
                .unwrap();
            transaction
                .query("SELECT balance FROM account", &[])
                .await
                .unwrap();
            lease.release().await.unwrap();
            let next = lock(&other).lease().await.unwrap();
            let error = view.fence(&transaction).await.unwrap_err();
            let told = crate::told(&error);
            assert!(
                told.contains("40001") || matches!(error, LockError::Lost { .. }),
                "{told}"
            );
            next.release().await.unwrap();
        }
    }
}

/// Of renewals a fence knows nothing, and they know nothing of it.
#[tokio::test]
async fn a_fenced_lease_is_renewed() {
    on_a_steady_machine(async || {
        let (server, one, _other) = shop().await;
        let renewal = lockstream::Renewal::watchdog();
        let locks = [one.obtain("account:1"), one.obtain("account:1").permits(2)];
        for lock in locks {
            let mut client = client(&server.url()).await;
            let lease = lock.ttl(ms(3000)).renewal(renewal).lease().await.unwrap();
            let transaction = client.transaction().await.unwrap();
            lease.view().fence(&transaction).await.unwrap();
            let fenced_until = lease.deadline();
            eventually("it is renewed", async || lease.deadline() > fenced_until).await;
            lease.view().fence(&transaction).await.unwrap();
            transaction.commit().await.unwrap();
            lease.release().await.unwrap();
        }
    })
    .await;
}

/// The fence of one permit keeps no other.
#[tokio::test]
async fn a_permits_fence_is_its_own() {
    let (server, one, other) = shop().await;
    let fenced = one.obtain("account:1").permits(2).lease().await.unwrap();
    let neighbour = other.obtain("account:1").permits(2).lease().await.unwrap();
    let mut client = client(&server.url()).await;
    let transaction = client.transaction().await.unwrap();
    fenced.view().fence(&transaction).await.unwrap();
    neighbour.release().await.unwrap();
    let neighbour = other.obtain("account:1").permits(2).lease().await.unwrap();
    let busy = other
        .obtain("account:1")
        .permits(2)
        .acquire_once()
        .await
        .unwrap();
    assert!(!busy);
    let releasing = tokio::spawn(async move { fenced.release().await });
    tokio::time::sleep(ms(200)).await;
    assert!(!releasing.is_finished());
    assert!(
        !other
            .obtain("account:1")
            .permits(2)
            .acquire_once()
            .await
            .unwrap(),
        "it is not free yet"
    );
    transaction.commit().await.unwrap();
    releasing.await.unwrap().unwrap();
    neighbour.release().await.unwrap();
}

#[tokio::test]
async fn several_keys_are_fenced_together() {
    let (server, one, _other) = shop().await;
    let lease = one.obtain_all(["b", "a"]).lease().await.unwrap();
    let mut client = client(&server.url()).await;
    let transaction = client.transaction().await.unwrap();
    lease.view().fence(&transaction).await.unwrap();
    assert_eq!(
        server.one::<i64>(
            "SELECT count(*) FROM pg_locks WHERE relation = 'lockstream.guard'::regclass"
        ),
        1
    );
    transaction.commit().await.unwrap();
    server.run("UPDATE lockstream.lock SET expires_at = 0 WHERE key = 'lock:b'");
    let transaction = client.transaction().await.unwrap();
    let lost = lease.view().fence(&transaction).await.unwrap_err();
    assert_eq!(lost.key(), "b", "{lost:?}");
}

/// A fence does not tell the callers of a registry apart, so a lease whose token was seen is not passed between them.
#[tokio::test]
async fn callers_of_one_registry_that_fence_have_tenures_of_their_own() {
    let (_server, one, _other) = shop().await;
    // The tokens of one tenure are one apart, and the first of a tenure is a multiple of 64.
    let tokens = async |sees: bool| {
        let one = &one;
        let take = async || {
            let lease = one.obtain("account:1").lease().await.unwrap();
            if sees {
                lease.token();
            }
            tokio::time::sleep(ms(1)).await;
            let token = format!("{lease:?}");
            lease.release().await.unwrap();
            let (_, token) = token.split_once("Token(").unwrap();
            token.split_once(')').unwrap().0.parse::<u64>().unwrap()
        };
        futures::future::join_all((0..8).map(|_| take())).await
    };
    // A tenure lasts 20 ms, which may be over after each turn on a busy machine.
    eventually("a lease is passed on", async || {
        tokens(false).await.iter().any(|token| token % 64 != 0)
    })
    .await;
    let fenced = tokens(true).await;
    assert!(fenced.iter().all(|token| token % 64 == 0), "{fenced:?}");
}

/// The key was passed on to the next caller, which works under the same row.
#[tokio::test]
async fn a_view_that_is_asked_after_its_lease_has_ended_fences_nothing() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let store = patient(server.url()).connect().await.unwrap();
        let locks = builder(store).local_span(BOUND).build().unwrap();
        let lock = locks.obtain("k");
        let lease = lock.lease().await.unwrap();
        let view = lease.view();
        let mut next = std::pin::pin!(lock.lease());
        assert!(futures::poll!(&mut next).is_pending());
        lease.release().await.unwrap();
        let next = next.await.unwrap();
        assert_eq!(
            next.token().get(),
            view.token().get() + 1,
            "it was passed on"
        );
        let mut client = client(&server.url()).await;
        let transaction = client.transaction().await.unwrap();
        let error = view.fence(&transaction).await.unwrap_err();
        let is_over = matches!(
            error,
            LockError::Lost {
                cause: LossCause::Ended,
                ..
            }
        );
        assert!(is_over, "{error:?}");
        let write = transaction.batch_execute("CREATE TABLE t ()").await;
        assert!(write.is_err(), "the transaction cannot go on");
        transaction.rollback().await.unwrap();
        assert_eq!(view.fence_sql().unwrap()[0].token(), 0);
        let transaction = client.transaction().await.unwrap();
        next.view().fence(&transaction).await.unwrap();
        transaction.commit().await.unwrap();
        next.release().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_fence_in_a_savepoint_ends_with_it() {
    on_a_steady_machine(async || {
        let (server, one, other) = shop().await;
        let mut sql = server.client();
        let lease = one.obtain("account:1").ttl(ms(1500)).lease().await.unwrap();
        let token = lease.token().get();
        sql.run(&format!(
            "BEGIN; SAVEPOINT s; SELECT lockstream.fence('account:1', {token}); ROLLBACK TO s"
        ));
        lease.lost().await;
        let next = other.obtain("account:1").lease_within(BOUND).await;
        drop(next.expect("nothing is fenced any more"));
        sql.run("COMMIT");
    })
    .await;
}

/// On a store without transactions, and in another database.
#[tokio::test]
async fn what_cannot_be_fenced_says_so() {
    let (server, one, _other) = shop().await;
    let memory = LockRegistry::in_memory().obtain("k").lease().await.unwrap();
    let lease = one.obtain("k").lease().await.unwrap();
    let mut here = client(&server.url()).await;
    let transaction = here.transaction().await.unwrap();
    let error = memory.view().fence(&transaction).await.unwrap_err();
    assert!(
        crate::told(&error).contains("no transactions") && !error.is_retryable(),
        "{error:?}"
    );
    let error = memory.view().fence_sql().unwrap_err();
    assert!(crate::told(&error).contains("no transactions"), "{error:?}");
    server.run("CREATE DATABASE elsewhere");
    let url = server.url().replace("/postgres?", "/elsewhere?");
    let mut elsewhere = client(&url).await;
    let transaction = elsewhere.transaction().await.unwrap();
    let error = lease.view().fence(&transaction).await.unwrap_err();
    assert!(
        crate::told(&error).contains("3F000") && !error.is_retryable(),
        "{error:?}"
    );
}

/// How it goes where leases end at any moment of a transaction.
struct Stress {
    lock: fn(&LockRegistry) -> Lock,
    /// For how long a lease is held, at most.
    hold: Duration,
    releases: bool,
}

/// Many read a balance, think, and write it, each in a transaction of its own under its lease. Whatever was committed
/// must be there.
async fn no_update_is_lost(stress: Stress) {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    // Each renewal of a lock is slow: its row has much that is stored elsewhere, and is another one each time.
    server.run(
        "CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL); INSERT INTO account VALUES (1, 0); \
         ALTER TABLE lockstream.lock ADD COLUMN filler text; ALTER TABLE lockstream.lock ALTER filler SET STORAGE EXTERNAL; \
         ALTER TABLE lockstream.holder ADD COLUMN filler text; ALTER TABLE lockstream.holder ALTER filler SET STORAGE EXTERNAL; \
         CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN NEW.filler := repeat(md5(random()::text), 3000); RETURN NEW; END $$; \
         CREATE TRIGGER slow BEFORE UPDATE ON lockstream.lock FOR EACH ROW EXECUTE FUNCTION slow(); \
         CREATE TRIGGER slow BEFORE UPDATE ON lockstream.holder FOR EACH ROW EXECUTE FUNCTION slow()",
    );
    // Until there were some, however slow the machine is.
    let begin = Instant::now();
    let committed = AtomicI64::new(0);
    let goes_on = || match begin.elapsed() {
        early if early < Duration::from_secs(4) => true,
        late => late < 2 * PATIENCE && committed.load(Ordering::Relaxed) <= 5,
    };
    let work = async |n: u64| {
        let registry = registry(&server.url()).await;
        let mut client = client(&server.url()).await;
        let mut dice = n;
        while goes_on() {
            dice = dice
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let lock = (stress.lock)(&registry).wait(ms(500));
            let Ok(lease) = lock.lease().await else {
                continue;
            };
            let pause = Duration::from_micros((dice >> 33) % (stress.hold.as_micros() as u64));
            let view = lease.view();
            let spend = async {
                let transaction = client.transaction().await.ok()?;
                view.fence(&transaction).await.ok()?;
                let row = transaction
                    .query_one("SELECT balance FROM account", &[])
                    .await
                    .ok()?;
                tokio::time::sleep(pause).await;
                let sql = "UPDATE account SET balance = $1";
                transaction
                    .execute(sql, &[&(row.get::<_, i64>(0) + 1)])
                    .await
                    .ok()?;
                transaction.commit().await.ok()
            };
            if stress.releases && dice.is_multiple_of(3) {
                let (spent, _) = tokio::join!(spend, async {
                    tokio::time::sleep(pause / 2).await;
                    lease.release().await
                });
                committed.fetch_add(i64::from(spent.is_some()), Ordering::Relaxed);
            } else {
                let spent = spend.await;
                committed.fetch_add(i64::from(spent.is_some()), Ordering::Relaxed);
                let _ = lease.release().await;
            }
        }
    };
    futures::future::join_all((0..6).map(work)).await;
    let commits = committed.load(Ordering::Relaxed);
    assert!(commits > 5, "{commits}");
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), commits);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_though_leases_run_out_in_the_midst_of_transactions() {
    no_update_is_lost(Stress {
        lock: |registry| {
            registry
                .obtain("account:1")
                .ttl(ms(60))
                .renewal(lockstream::Renewal::watchdog().max_renewals(1))
        },
        hold: ms(200),
        releases: false,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_though_leases_are_released_in_the_midst_of_transactions() {
    no_update_is_lost(Stress {
        lock: |registry| {
            registry
                .obtain("account:1")
                .ttl(ms(300))
                .renewal(lockstream::Renewal::watchdog())
        },
        hold: ms(30),
        releases: true,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_update_is_lost_though_a_permit_ends_in_the_midst_of_transactions() {
    no_update_is_lost(Stress {
        lock: |registry| {
            registry
                .obtain("account:1")
                .permits(1)
                .ttl(ms(60))
                .renewal(lockstream::Renewal::watchdog().max_renewals(1))
        },
        hold: ms(150),
        releases: true,
    })
    .await;
}

/// Work under a lock fences by the view that it is given.
#[tokio::test]
async fn work_under_a_lock_fences_its_transaction() {
    let (server, one, _other) = shop().await;
    let mut client = client(&server.url()).await;
    let lock = one.obtain("account:1");
    let spent = lock
        .with_lease(|lease| async move {
            let transaction = client.transaction().await?;
            lease.fence(&transaction).await.unwrap();
            transaction.execute(SPEND, &[]).await?;
            transaction.commit().await
        })
        .await;
    spent.unwrap().unwrap();
    async {}.with_lock(&lock).await.unwrap();
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 70);
}

/// What the functions say to calls of one key: the verdict and how long it lasts.
fn call(
    sql: &mut crate::support::PgClient,
    letter: &str,
    owner: &str,
    mode: &str,
    ttl: Duration,
) -> (String, Option<i64>) {
    let call = format!(
        "SELECT verdict, remaining FROM lockstream.ops_1(true, 0, {}, '{letter}', '{{lock:k}}', '{{{owner}}}', \
         '{{\"{mode}\"}}', '{{{}}}', '{{\"\"}}', '{{NULL}}')",
        i64::MAX,
        ttl.as_micros()
    );
    let rows = sql.rows(&call);
    (rows[0].get(0), rows[0].get(1))
}

/// A fence by the epoch that the lock has now.
fn fence(sql: &mut crate::support::PgClient) -> String {
    let token: i64 = sql.one("SELECT epoch * 64 FROM lockstream.lock WHERE key = 'lock:k'");
    format!("SELECT lockstream.fence('k', {token})")
}

/// Who asks again for its shared lease serves the queue, too. It had the epoch of the last that it let in.
#[tokio::test]
async fn who_asks_again_has_an_epoch_of_its_own() {
    let server = PgServer::start();
    server.run(PostgresStore::SQL);
    let mut sql = server.client();
    let ask = |sql: &mut crate::support::PgClient| -> i64 {
        sql.one(
            "SELECT epoch FROM lockstream.ops_1(true, 0, 9223372036854775807, 'E', '{lock:k}', '{a:1}', '{r}', \
             '{60000000}', '{\"\"}', '{NULL}')",
        )
    };
    ask(&mut sql);
    // Another reader waits. Its registry is there: it is ours.
    sql.run("INSERT INTO lockstream.ticket VALUES ('lock:k', 1, 'a:2', 0, 'r', 60000000)");
    let told = ask(&mut sql);
    let epochs: Vec<i64> = sql
        .rows("SELECT epoch FROM lockstream.holder ORDER BY owner")
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(epochs.len(), 2, "the other was let in");
    assert_eq!(epochs[0], told);
    assert!(epochs[1] > told, "{epochs:?}");
}

/// Whoever asks for a lock whose lease is over, and whose transaction goes on, does not bring that lease back.
#[tokio::test]
async fn a_lease_that_is_over_stays_so_while_its_transaction_goes_on() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let mut sql = server.client();
    let long = Duration::from_secs(60);
    for mode in ["", "1/1"] {
        for letter in ["R", "E"] {
            server.run(
                "TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard, lockstream.ticket",
            );
            assert_eq!(call(&mut sql, "A", "a:1", mode, long).0, "won");
            let fence = fence(&mut sql);
            let (mut transaction, mut late) = (server.client(), server.client());
            transaction.run(&format!("BEGIN; {fence}"));
            sql.run("UPDATE lockstream.lock SET expires_at = 1; UPDATE lockstream.holder SET expires_at = 1");
            let other = if letter == "R" { "a:1" } else { "b:1" };
            let version = "SELECT xmin::text || ctid FROM lockstream.lock";
            let mut versions = Vec::new();
            for _ in 0..20 {
                let (verdict, _) = call(&mut sql, letter, other, mode, long);
                assert_eq!(
                    verdict,
                    if letter == "R" { "again" } else { "busy" },
                    "{mode}"
                );
                versions.push(sql.one::<String>(version));
                let error = late.try_run(&fence).unwrap_err();
                assert_eq!(error.code().unwrap().code(), "LS001", "{letter} {mode:?}");
                // The error is told before the transaction has ended, and its locks are gone.
                late.run("SELECT 1");
                let (verdict, _) = call(&mut sql, "N", "a:1", mode, long);
                assert_eq!(verdict, "lost", "{letter} {mode:?}");
            }
            if letter == "R" {
                // It is sent every few milliseconds, and old versions of the row stay until the transaction has ended.
                versions.dedup();
                assert_eq!(versions.len(), 1, "{mode:?}");
            }
            transaction.run("COMMIT");
            let expected = if letter == "R" { "not held" } else { "won" };
            assert_eq!(
                call(&mut sql, letter, other, mode, long).0,
                expected,
                "{mode:?}"
            );
        }
    }
}

/// nothing.
#[tokio::test]
async fn a_lock_that_is_kept_for_others_is_not_fenced_by_its_last_token() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let mut sql = server.client();
    let long = Duration::from_secs(60);
    for keep in [
        "UPDATE lockstream.state SET quiet = 60000000; UPDATE lockstream.alive SET since = lockstream.now_1()",
        "UPDATE lockstream.state SET quiet = 0; INSERT INTO lockstream.ticket VALUES ('lock:k', 1, 'b:1', 4711, '', NULL); \
         UPDATE lockstream.lock SET waited = true",
    ] {
        server.run("UPDATE lockstream.state SET quiet = 0; TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard");
        let mut subscriber = server.client();
        subscriber.run("SELECT lockstream.hello_1(4711)");
        assert_eq!(call(&mut sql, "A", "a:1", "", long).0, "won");
        let fence = fence(&mut sql);
        sql.run(&fence);
        sql.run(keep);
        assert_eq!(call(&mut sql, "R", "a:1", "", long).0, "held");
        // For a waiter it is kept for a tenth of a second.
        sql.run("UPDATE lockstream.lock SET expires_at = lockstream.now_1() + 60000000 WHERE owner <> ''");
        assert_eq!(call(&mut sql, "A", "c:1", "", long).0, "busy");
        let kept = "SELECT owner <> '' AND expires_at > lockstream.now_1() FROM lockstream.lock";
        assert_eq!(
            (
                sql.one::<bool>(kept),
                sql.try_run(&fence)
                    .map_err(|error| error.code().unwrap().code().to_owned())
            ),
            (true, Err("LS001".to_owned())),
            "{keep}"
        );
    }
}

/// since is not over.
#[tokio::test]
async fn an_older_snapshot_does_not_make_a_lease_seem_over() {
    on_a_steady_machine(async || {
        let server = PgServer::start();
        let one = registry(&server.url()).await;
        for level in ["REPEATABLE READ", "SERIALIZABLE"] {
            for is_shared in [false, true] {
                for (is_taken_since, is_new) in [(false, false), (true, false), (true, true)] {
                    server.run("TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard");
                    let lock = match is_shared {
                        true => one.obtain("k").permits(1),
                        false => one.obtain("k"),
                    };
                    if !is_new {
                        lock.lease().await.unwrap().release().await.unwrap();
                    }
                    let mut sql = server.client();
                    let begin =
                        format!("BEGIN ISOLATION LEVEL {level}; SELECT 1 FROM lockstream.lock");
                    let lease;
                    if is_taken_since {
                        sql.run(&begin);
                        lease = lock.lease().await.unwrap();
                    } else {
                        lease = lock.ttl(ms(1000)).lease().await.unwrap();
                        sql.run(&begin);
                        let ends: i64 = sql.one(
                            "SELECT greatest((SELECT max(expires_at) FROM lockstream.lock), \
                             (SELECT max(expires_at) FROM lockstream.holder))",
                        );
                        lease.extend(BOUND).await.unwrap();
                        let is_over = format!("SELECT lockstream.now_1() > {ends}");
                        eventually("what the snapshot sees is over", async || {
                            server.one::<bool>(&is_over)
                        })
                        .await;
                    }
                    let fence = format!("SELECT lockstream.fence('k', {})", lease.token().get());
                    let error = sql.try_run(&fence).unwrap_err();
                    assert_eq!(
                        error.code().unwrap().code(),
                        "40001",
                        "{level}, shared: {is_shared}, taken since: {is_taken_since}, new: {is_new}"
                    );
                    sql.run(&format!("ROLLBACK; {begin}; {fence}; COMMIT"));
                    lease.release().await.unwrap();
                    sql.run(&begin);
                    let error = sql.try_run(&fence).unwrap_err();
                    assert_eq!(error.code().unwrap().code(), "LS001", "one that is over is");
                }
            }
        }
    })
    .await;
}

/// A transaction that is prepared for two-phase commit is no session's any more, and outlives the server's process.
#[tokio::test]
async fn a_prepared_transaction_is_fenced_until_it_is_committed() {
    let mut server = PgServer::builder()
        .config("max_prepared_transactions = 4")
        .start();
    server.run("CREATE TABLE account (id int PRIMARY KEY, balance bigint NOT NULL); INSERT INTO account VALUES (1, 100)");
    let locks = registry(&server.url()).await;
    for end in ["COMMIT PREPARED 'spend'", "ROLLBACK PREPARED 'spend'"] {
        let lease = locks.obtain("account:1").lease().await.unwrap();
        let token = lease.token().get();
        server.run(&format!(
            "BEGIN; SELECT lockstream.fence('account:1', {token}); {SPEND}; PREPARE TRANSACTION 'spend'"
        ));
        if end.starts_with("COMMIT") {
            server.kill();
            server.restart();
        }
        let other = registry(&server.url()).await;
        let lock = other.obtain("account:1");
        let waiting = tokio::spawn(async move { lock.lease_within(BOUND).await });
        let releasing = tokio::spawn(async move { lease.release().await });
        eventually("the release has come", async || {
            server.one::<i64>(ENDED) == 1
        })
        .await;
        assert!(!releasing.is_finished() && !waiting.is_finished());
        server.run(end);
        releasing.await.unwrap().unwrap();
        waiting.await.unwrap().unwrap().release().await.unwrap();
    }
    assert_eq!(server.one::<i64>("SELECT balance FROM account"), 70);
}

/// A renewal in time whose commit takes until after the end of its lease is not undone.
#[tokio::test]
async fn a_renewal_that_is_not_committed_yet_counts() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let (short, long) = (ms(3000), Duration::from_secs(60));
    for mode in ["", "r", "1/1"] {
        server.run("TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard");
        let (mut renewing, mut asking) = (server.client(), server.client());
        assert_eq!(call(&mut renewing, "A", "a:1", mode, short).0, "won");
        renewing.run("BEGIN");
        assert_eq!(call(&mut renewing, "N", "a:1", mode, long).0, "renewed");
        let is_over = "SELECT NOT EXISTS (SELECT 1 FROM lockstream.lock WHERE owner <> '' AND expires_at > lockstream.now_1()) \
                       AND NOT EXISTS (SELECT 1 FROM lockstream.holder WHERE expires_at > lockstream.now_1())";
        eventually("others see it as over", async || {
            server.one::<bool>(is_over)
        })
        .await;
        let pid: i32 = asking.one("SELECT pg_backend_pid()");
        let asked = std::thread::spawn(move || call(&mut asking, "A", "b:1", "", long).0);
        let waits =
            format!("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = {pid}");
        eventually("it waits for the renewal", async || {
            asked.is_finished() || server.one::<Option<bool>>(&waits) == Some(true)
        })
        .await;
        renewing.run("COMMIT");
        assert_eq!(asked.join().unwrap(), "busy", "{mode:?}");
    }
}

/// Of each mode: no transaction is fenced by a lease that is being released, or it could delay that for ever.
#[tokio::test]
async fn no_fence_begins_after_a_release() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let (mut sql, mut transaction) = (server.client(), server.client());
    let long = Duration::from_secs(60);
    for mode in ["", "r", "1/1"] {
        server.run("TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard");
        assert_eq!(call(&mut sql, "A", "a:1", mode, long).0, "won");
        let fence = fence(&mut sql);
        transaction.run(&format!("BEGIN; {fence}"));
        assert_eq!(
            call(&mut sql, "R", "a:1", mode, long).0,
            "again",
            "{mode:?}"
        );
        let error = server.client().try_run(&fence).unwrap_err();
        assert_eq!(error.code().unwrap().code(), "LS001", "{mode:?}");
        transaction.run("COMMIT");
    }
}

/// K2: a session that does not know the place of its ticket, since the answer was lost with its connection, keeps it.
#[tokio::test]
async fn a_ticket_keeps_its_place_over_a_new_connection() {
    let server = PgServer::start();
    drop(registry(&server.url()).await);
    let (mut sql, mut other) = (server.client(), server.client());
    other.run("SELECT pg_advisory_lock(12)");
    for mode in ["", "r"] {
        server.run(
            "TRUNCATE lockstream.lock, lockstream.holder, lockstream.guard, lockstream.ticket",
        );
        let mut op = |letter: &str, owner: &str, mode: &str, line: i64| {
            let call = format!(
                "SELECT verdict FROM lockstream.ops_1(true, {line}, {}, '{letter}', '{{lock:k}}', '{{{owner}}}', \
                 '{{\"{mode}\"}}', '{{60000000}}', '{{\"\"}}', '{{NULL}}')",
                i64::MAX
            );
            sql.one::<String>(&call)
        };
        assert_eq!(op("A", "x:1", "", 0), "won");
        // Nobody holds the line 11 any more.
        assert_eq!(op("E", "a:1", mode, 11), "busy");
        assert_eq!(op("E", "b:1", "", 12), "busy");
        server.run("UPDATE lockstream.lock SET expires_at = 1");
        assert_eq!(op("E", "a:1", mode, 13), "won", "{mode:?}");
    }
}
