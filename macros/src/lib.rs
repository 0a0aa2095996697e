//! The attribute `#[with_lock]` of [`lockstream`](https://docs.rs/lockstream), which has it behind
//! its feature `macros`. Use it from there: this crate is of no use alone.

mod duration;
mod expand;
mod function;
mod key;
mod options;
mod returns;

use proc_macro::TokenStream;
use quote::quote;

use self::function::Function;
use self::options::Options;

/// Runs the body of a function under a lock, which is held exactly as long as the body runs.
///
/// The function is an `async fn`, or one that returns a stream or a future; free, or a method. It
/// returns a `Result` (its stream yields them) whose error is `From<LockError>`, for what may go
/// wrong with the lock: `LockError` itself, `anyhow::Error`, or an error of your own.
///
/// ```
/// use lockstream::{LockError, LockRegistry, with_lock};
///
/// struct Order { id: u64 }
/// struct Shop { locks: LockRegistry }
///
/// impl Shop {
///     #[with_lock(key = "order:{order.id}", ttl = "10s", wait = "3s", registry = self.locks)]
///     async fn charge(&self, order: Order) -> Result<u64, LockError> {
///         Ok(order.id) // nobody else is at this order
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// let shop = Shop { locks: LockRegistry::in_memory() };
/// assert_eq!(shop.charge(Order { id: 42 }).await?, 42);
/// # Ok(()) }
/// ```
///
/// # Options
///
/// | option | value | default |
/// |---|---|---|
/// | `key` | what to lock: a format string over the arguments, or an expression that is `AsRef<str>` | none: it must be said |
/// | `keys` | instead of `key`: several keys as one lock, as by `LockRegistry::obtain_all`: an array of such keys, or an expression with an `iter()` over `AsRef<str>` | one key |
/// | `registry` | an expression: a `LockRegistry`, or what is `Borrow<LockRegistry>` or leads to one by `Deref`, as `self.locks`, an argument, a `static` `LazyLock` | the installed registry |
/// | `ttl` | a fixed lease of this length, which is not renewed unless `renewal` says so: `"10s"`, `"1m 30s"`, `"500ms"`, from 10 ms to 24 h; or a `Duration` | the registry's, and it is renewed |
/// | `wait` | how long to wait for the lock: as `ttl`, `"0s"` to ask once, `"forever"` | the registry's |
/// | `skip` | no value: a lock that is busy for the whole `wait` is `Ok(None)`, see [below](#skipping) | busy is an error |
/// | `renewal` | `"watchdog"`, `"off"`, or a `Renewal` | as for `Lock::renewal`: off if `ttl` is said, else the registry's |
/// | `max_renewals` | how often the watchdog renews at most, a `u32`; it brings the watchdog | without end |
/// | `on_lost` | `"stop"`, `"run_on"`, or an `OnLost`: what becomes of the body if the lease is lost | `"stop"` |
/// | `on_finish` | `"release"`, `"let_expire"`, or an `OnFinish`: what becomes of the key after the body | `"release"` |
/// | `keep_for` | instead of `on_finish`: how long the key is kept after it was acquired, as `ttl`, up to a year; see `OnFinish::KeepFor` | not kept |
/// | `keep_on_success` | no value: the key is kept only if the body returns `Ok`; otherwise it is released, and the next may try | kept in any case |
/// | `shared` | no value: others that are `shared` may run at the same time, as by `Lock::shared` | exclusive |
/// | `permits` | how many may run at the same time, a `u32`, as by `Lock::permits`: each caller's own limit | exclusive |
/// | `weight` | how many of the `permits` this one takes, as by `Lock::permits_of`: a `u32` from 1 to 64, and at most `permits` | 1 |
/// | `reentrant` | no value: called inside work that holds the key already, it runs at once under that lease, as by `Lock::reentrant`; what the body itself locks has to ask for that, too. For exclusive locks only | not reentrant |
/// | `nested` | no value: as `reentrant`, and an error unless called inside work that holds the key, as by `Lock::nested` | may run by itself |
/// | `repeat` | a `Repeat`: how to try again on a store without a queue | the registry's |
/// | `crate` | the path of the crate `lockstream`, if it has another name | `::lockstream` |
///
/// Durations in quotes are read by the crate `humantime`, when the function is compiled.
///
/// # Keys
///
/// A hole of a format string takes an argument, a constant, their fields, and their methods without
/// arguments, each with a format as `format!` has it; `{{` and `}}` stand for the braces. All else is
/// an expression.
///
/// ```
/// use lockstream::{LockError, LockRegistry, with_lock};
/// # struct Seat { row: u32, place: (u32, char) }
/// # impl Seat { fn hall(&self) -> &str { "main" } }
///
/// #[with_lock(key = "{seat.hall()}:{seat.row:03}:{seat.place.1}", registry = locks)]
/// async fn book(locks: &LockRegistry, seat: Seat) -> Result<(), LockError> {
///     // the key was made before this body took the seat: "main:007:c"
///     drop(seat);
///     Ok(())
/// }
///
/// #[with_lock(key = ids.join("+"), registry = locks)]
/// async fn merge(locks: &LockRegistry, ids: &[&str]) -> Result<usize, LockError> {
///     Ok(ids.len())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// # let locks = LockRegistry::in_memory();
/// # book(&locks, Seat { row: 7, place: (1, 'c') }).await?;
/// # assert_eq!(merge(&locks, &["a", "b"]).await?, 2);
/// # Ok(()) }
/// ```
///
/// The key, the registry and the other options are evaluated before the body takes the arguments,
/// which they only borrow: when the future of an `async fn` is first polled, or when a function that
/// returns a stream is called. A key that cannot be one is a compile error where that can be known,
/// else `LockError::InvalidKey`.
///
/// # Streams
///
/// A function that returns `impl Stream`, `Pin<Box<dyn Stream>>`, `Box<dyn Stream + Unpin>`,
/// `BoxStream` or `LocalBoxStream` gives a stream under one lease, from its first poll to its end.
/// The whole body runs under the lock, so it begins at the first poll, too: what it uses of the
/// arguments lives as long as the stream does.
///
/// ```
/// use futures::{Stream, TryStreamExt};
/// use lockstream::{LockError, LockRegistry, with_lock};
///
/// #[with_lock(key = "import:{file}", registry = locks)]
/// fn rows(locks: LockRegistry, file: &str) -> impl Stream<Item = Result<u32, LockError>> {
///     let first = file.len() as u32; // under the lock already
///     futures::stream::iter([Ok(first), Ok(2)])
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// let rows: Vec<u32> = rows(LockRegistry::in_memory(), "a.csv").try_collect().await?;
/// assert_eq!(rows, [5, 2]);
/// # Ok(()) }
/// ```
///
/// The same goes for `impl Future`, `Pin<Box<dyn Future>>`, `BoxFuture` and `LocalBoxFuture`.
///
/// # Skipping
///
/// With `skip`, an `async fn` or a function that returns a future does nothing if others have the lock. It
/// returns `Result<Option<T>, E>`: the body `Ok(Some(value))`, and a lock that was busy for the whole
/// `wait` is `Ok(None)`. All other errors of the lock stay errors. A job that any of many machines may do
/// once an hour:
///
/// ```
/// use lockstream::{LockError, LockRegistry, with_lock};
///
/// #[with_lock(key = "report", wait = "0s", skip, keep_for = "59m", registry = locks)]
/// async fn report(locks: &LockRegistry) -> Result<Option<u32>, LockError> {
///     Ok(Some(7))
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// let locks = LockRegistry::in_memory();
/// assert_eq!(report(&locks).await?, Some(7));
/// assert_eq!(report(&locks).await?, None); // done already, in this hour
/// # Ok(()) }
/// ```
///
/// # Several locks
///
/// With `keys` all of them are had, or none, whatever their order. They are exclusive: `shared`, `permits`,
/// `reentrant` and `nested` are for one `key`.
///
/// ```
/// use lockstream::{LockError, LockRegistry, with_lock};
///
/// #[with_lock(keys = ["account:{from}", "account:{to}"], registry = locks)]
/// async fn transfer(locks: &LockRegistry, from: u32, to: u32) -> Result<(), LockError> {
///     Ok(())
/// }
///
/// #[with_lock(keys = files, registry = locks)]
/// async fn archive(locks: &LockRegistry, files: &[String]) -> Result<usize, LockError> {
///     Ok(files.len())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// # let locks = LockRegistry::in_memory();
/// # transfer(&locks, 1, 2).await?;
/// # assert_eq!(archive(&locks, &["a".to_owned()]).await?, 1);
/// # Ok(()) }
/// ```
///
/// Locks with different options take an attribute each, the first line first: they are to be taken in the same order
/// everywhere.
///
/// ```
/// use lockstream::{LockError, LockRegistry, with_lock};
///
/// #[with_lock(key = "catalog", shared, registry = locks)]
/// #[with_lock(key = "product:{id}", registry = locks)]
/// async fn change_price(locks: &LockRegistry, id: u32) -> Result<(), LockError> {
///     Ok(())
/// }
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), LockError> {
/// # change_price(&LockRegistry::in_memory(), 1).await
/// # }
/// ```
///
/// # Other attributes
///
/// `#[tracing::instrument]` goes on either side: above, its span has the waiting in it. `#[async_trait]`
/// stands on the trait and the `impl`, as it does; arguments that are patterns cannot be in the key
/// then. An attribute that makes an `async fn` an ordinary one, as `#[tokio::main]`, goes below. What
/// is under a lock with `async` returns a value; a stream or future in that value runs without it.
///
/// # Errors
///
/// Those of `FutureLockExt::with_lock`, as the function's own by `From<LockError>`. If the lock was not
/// available in time (`Ok(None)` with `skip`), the body was never begun; if the lease is lost, the body is dropped at once
/// (`on_lost = "run_on"` lets it run on).
///
/// # Cancel safety
///
/// That of `FutureLockExt::with_lock`: dropped while it waits, it gives up its place in the queue; dropped
/// while the body runs, the body is dropped and the lock released in the background.
///
/// # Threads
///
/// The future is `Send` if the body, the arguments and what is returned are: the value is kept while
/// the lock is released.
///
/// # Recursion
///
/// A function that comes to itself with the same key waits for itself, until `wait` is over, unless
/// the lock is `reentrant`. One that is `nested` fails unless something around it holds the key.
#[proc_macro_attribute]
pub fn with_lock(arguments: TokenStream, item: TokenStream) -> TokenStream {
    let item_tokens = proc_macro2::TokenStream::from(item.clone());
    let result = (|| {
        let mut function: Function = syn::parse(item)?;
        let mut locks = vec![syn::parse::<Options>(arguments)?];
        locks.extend(function.take_further_locks()?);
        expand::expand(&function, &locks)
    })();
    result
        .unwrap_or_else(|error| {
            let error = error.into_compile_error();
            quote!(#error #item_tokens)
        })
        .into()
}
