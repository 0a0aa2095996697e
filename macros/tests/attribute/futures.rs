//! Free `async fn`s.

use std::fmt::Display;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, LocalBoxFuture};
use lockstream::{LockError, LockRegistry, with_lock};

use crate::{ShopError, free, held};

#[with_lock(key = "ticket", registry = locks)]
async fn look(locks: &LockRegistry) -> Result<bool, LockError> {
    Ok(held(locks, "ticket").await)
}

#[tokio::test(start_paused = true)]
async fn the_lock_is_held_while_the_body_runs_and_free_after() {
    let locks = LockRegistry::in_memory();
    assert!(look(&locks).await.unwrap());
    assert!(!held(&locks, "ticket").await);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_locked_before_the_first_poll() {
    let locks = LockRegistry::in_memory();
    let looking = look(&locks);
    assert!(!held(&locks, "ticket").await);
    assert!(looking.await.unwrap());
}

/// Both return paths, `?` with a conversion, and an error type that only the signature names.
#[with_lock(key = "seat:{row}", registry = locks)]
async fn parse(locks: &LockRegistry, row: u32, text: &str) -> anyhow::Result<u32> {
    assert!(held(locks, &format!("seat:{row}")).await);
    if text.is_empty() {
        return Ok(row);
    }
    let seat: u32 = text.parse()?;
    Ok(row + seat)
}

#[tokio::test(start_paused = true)]
async fn returns_and_question_marks_work_as_without_the_lock() {
    let locks = LockRegistry::in_memory();
    assert_eq!(parse(&locks, 7, "").await.unwrap(), 7);
    assert_eq!(parse(&locks, 7, "3").await.unwrap(), 10);
    let error = parse(&locks, 7, "x").await.unwrap_err();
    assert!(error.is::<std::num::ParseIntError>(), "{error}");
    assert!(!held(&locks, "seat:7").await);
}

/// Nothing but the return type says what the error is.
#[with_lock(key = "ticket", registry = locks)]
async fn only_ok(locks: &LockRegistry) -> Result<Vec<u8>, ShopError> {
    let _ = locks;
    Ok("abc".bytes().collect())
}

#[tokio::test(start_paused = true)]
async fn the_return_type_is_known_inside() {
    assert_eq!(only_ok(&LockRegistry::in_memory()).await.unwrap(), b"abc");
}

#[with_lock(key = "{kind}", registry = locks)]
async fn generic<'a, T, const N: usize>(
    locks: &LockRegistry,
    kind: &'a str,
    all: [T; N],
    shown: impl Display + Send + 'a,
) -> Result<(&'a str, String, impl Iterator<Item = T>), ShopError>
where
    T: Clone + Send + 'a,
{
    if N == 0 {
        return Err(ShopError::SoldOut);
    }
    assert!(held(locks, kind).await);
    Ok((kind, shown.to_string(), all.into_iter().rev()))
}

#[tokio::test(start_paused = true)]
async fn generics_lifetimes_and_impl_trait_stay() {
    let locks = LockRegistry::in_memory();
    let (kind, shown, all) = generic(&locks, "shop", [1, 2, 3], 4.5).await.unwrap();
    assert_eq!((kind, &*shown), ("shop", "4.5"));
    assert_eq!(all.collect::<Vec<_>>(), [3, 2, 1]);
    let none: [u8; 0] = [];
    assert!(generic(&locks, "shop", none, "").await.is_err());
}

struct Order {
    id: u32,
    lines: Vec<String>,
}

/// The key is made before the body takes the argument, and the body may change what it takes.
#[with_lock(key = "order:{order.id}", registry = locks)]
async fn consume(
    locks: LockRegistry,
    mut order: Order,
    (first, mut rest): (u32, Vec<u32>),
    Order { id, lines: _ }: Order,
) -> Result<Vec<String>, LockError> {
    assert!(held(&locks, "order:42").await);
    rest.push(first + id);
    order.lines.extend(rest.iter().map(u32::to_string));
    drop(locks);
    let Order { lines, .. } = order;
    Ok(lines)
}

fn order(id: u32) -> Order {
    let lines = vec![String::from("line")];
    Order { id, lines }
}

#[tokio::test(start_paused = true)]
async fn arguments_are_moved_into_the_body() {
    let locks = LockRegistry::in_memory();
    let lines = consume(locks.clone(), order(42), (1, vec![5]), order(2)).await;
    assert_eq!(lines.unwrap(), ["line", "5", "3"]);
    assert!(!held(&locks, "order:42").await);
}

/// Tells, as it is dropped, whether the key was held then.
struct Witness(LockRegistry, tokio::sync::mpsc::UnboundedSender<bool>);

impl Drop for Witness {
    fn drop(&mut self) {
        let seen = self.0.obtain("ticket").inspect().now_or_never();
        let held = seen.is_some_and(|seen| seen.unwrap().owner().is_some());
        self.1.send(held).unwrap();
    }
}

struct Bundle {
    number: u32,
    _witness: Witness,
}

/// An `async move` block takes of its surroundings no more than it names: here a number.
#[with_lock(key = "ticket", registry = locks)]
async fn uses_a_field(locks: &LockRegistry, bundle: Bundle) -> Result<u32, LockError> {
    assert!(held(locks, "ticket").await);
    Ok(bundle.number)
}

#[tokio::test(start_paused = true)]
async fn an_argument_is_dropped_under_the_lock() {
    let locks = LockRegistry::in_memory();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let bundle = Bundle {
        number: 7,
        _witness: Witness(locks.clone(), tell),
    };
    assert_eq!(uses_a_field(&locks, bundle).await.unwrap(), 7);
    assert_eq!(told.recv().await, Some(true));
}

/// The body comes to a call of itself, on another key.
#[with_lock(key = "level:{level}", registry = locks)]
async fn descend(locks: &LockRegistry, level: u32) -> Result<u32, LockError> {
    if level == 0 {
        for above in 0..=2 {
            assert!(held(locks, &format!("level:{above}")).await);
        }
        return Ok(1);
    }
    Ok(Box::pin(descend(locks, level - 1)).await? + 1)
}

#[tokio::test(start_paused = true)]
async fn a_locked_function_may_call_itself() {
    let locks = LockRegistry::in_memory();
    assert_eq!(descend(&locks, 3).await.unwrap(), 4);
    let spawned = locks.clone();
    let task = tokio::spawn(async move { descend(&spawned, 2).await });
    assert_eq!(task.await.unwrap().unwrap(), 3);
    assert!(!held(&locks, "level:0").await);
}

#[with_lock(key = "boxed:{id}", registry = locks)]
fn boxed<'a>(locks: &'a LockRegistry, id: &'a str) -> BoxFuture<'a, Result<bool, ShopError>> {
    let key = format!("boxed:{id}");
    Box::pin(async move { Ok(held(locks, &key).await) })
}

#[with_lock(key = "local:{id}", registry = locks)]
fn local(locks: LockRegistry, id: u8) -> LocalBoxFuture<'static, Result<bool, ShopError>> {
    let shared = std::rc::Rc::new(id);
    async move { Ok(held(&locks, &format!("local:{shared}")).await) }.boxed_local()
}

#[with_lock(key = "pinned", registry = locks)]
fn pinned(
    locks: &LockRegistry,
) -> Pin<Box<dyn Future<Output = Result<bool, ShopError>> + Send + '_>> {
    Box::pin(async move { Ok(held(locks, "pinned").await) })
}

#[with_lock(key = "opaque", registry = locks)]
fn opaque(locks: &LockRegistry) -> impl Future<Output = Result<bool, ShopError>> + Send + '_ {
    async move { Ok(held(locks, "opaque").await) }
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_returned_runs_under_the_lock() {
    let locks = LockRegistry::in_memory();
    assert!(boxed(&locks, "a").await.unwrap());
    assert!(local(locks.clone(), 7).await.unwrap());
    assert!(pinned(&locks).await.unwrap());
    assert!(opaque(&locks).await.unwrap());
    for key in ["boxed:a", "local:7", "pinned", "opaque"] {
        assert!(!held(&locks, key).await, "{key}");
    }
}

#[with_lock(key = "spawned", registry = locks)]
async fn spawned(locks: LockRegistry, millis: u64) -> Result<bool, LockError> {
    tokio::time::sleep(Duration::from_millis(millis)).await;
    Ok(held(&locks, "spawned").await)
}

#[tokio::test(start_paused = true)]
async fn the_future_can_be_spawned() {
    let locks = LockRegistry::in_memory();
    let task = tokio::spawn(spawned(locks.clone(), 5));
    assert!(task.await.unwrap().unwrap());
    free(&locks, "spawned").await;
}

#[with_lock(key = "applied", registry = locks)]
async fn applied<T>(
    locks: &LockRegistry,
    work: impl AsyncFnOnce(&LockRegistry) -> T,
    all: &mut Vec<T>,
) -> Result<usize, ShopError> {
    all.push(work(locks).await);
    Ok(all.len())
}

#[tokio::test(start_paused = true)]
async fn work_that_is_an_argument() {
    let locks = LockRegistry::in_memory();
    let mut all = vec![false];
    let work = async |locks: &LockRegistry| held(locks, "applied").await;
    assert_eq!(applied(&locks, work, &mut all).await.unwrap(), 2);
    assert_eq!(all, [false, true]);
}
