use futures::Stream;
use futures::stream::BoxStream;
use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket")]
fn sell() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket")]
fn sell_nothing() {}

#[with_lock(key = "ticket")]
async fn late() -> impl Stream<Item = Result<u8, LockError>> {
    futures::stream::empty()
}

#[with_lock(key = "ticket")]
async fn boxed_late() -> BoxStream<'static, Result<u8, LockError>> {
    Box::pin(futures::stream::empty())
}

fn main() {}
