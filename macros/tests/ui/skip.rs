use std::future::Future;

use futures::Stream;
use futures::future::BoxFuture;
use lockstream::{LockError, with_lock};

struct ShopError;

#[with_lock(key = "ticket", skip)]
async fn no_option() -> Result<u32, LockError> {
    Ok(1)
}

#[with_lock(key = "ticket", skip)]
async fn no_result() -> Option<u32> {
    Some(1)
}

#[with_lock(key = "ticket", skip)]
async fn nothing() {}

#[with_lock(key = "ticket", skip)]
async fn error_type() -> Result<Option<u32>, ShopError> {
    Ok(Some(1))
}

#[with_lock(key = "ticket", skip)]
fn future() -> impl Future<Output = Result<u32, LockError>> {
    async { Ok(1) }
}

#[with_lock(key = "ticket", skip)]
fn boxed() -> BoxFuture<'static, Result<u32, LockError>> {
    Box::pin(async { Ok(1) })
}

#[with_lock(key = "first")]
#[with_lock(key = "second", skip)]
async fn one_of_two() -> u32 {
    1
}

#[with_lock(key = "ticket", skip)]
fn stream() -> impl Stream<Item = Result<Option<u32>, LockError>> {
    futures::stream::iter([Ok(Some(1))])
}

#[with_lock(key = "ticket", skip = true)]
async fn value() -> Result<Option<u32>, LockError> {
    Ok(Some(1))
}

fn main() {}
