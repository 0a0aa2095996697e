use futures::Stream;
use lockstream::with_lock;

#[derive(Debug)]
struct ShopError;

#[with_lock(key = "ticket")]
async fn sell() -> Result<u32, ShopError> {
    Ok(1)
}

#[with_lock(key = "ticket")]
fn sales() -> impl Stream<Item = Result<u32, ShopError>> {
    futures::stream::iter([Ok(1)])
}

fn main() {}
