use futures::Stream;
use futures::stream::BoxStream;
use lockstream::with_lock;

struct Ticket;

#[with_lock(key = "ticket")]
async fn nothing() {}

#[with_lock(key = "ticket")]
async fn number() -> u32 {
    1
}

#[with_lock(key = "ticket")]
async fn option(some: bool) -> Option<Ticket> {
    some.then_some(Ticket)
}

#[with_lock(key = "ticket")]
fn numbers() -> impl Stream<Item = u32> {
    futures::stream::iter([1, 2])
}

#[with_lock(key = "ticket")]
fn boxed_numbers() -> BoxStream<'static, u32> {
    Box::pin(futures::stream::iter([1, 2]))
}

fn main() {}
