use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket")]
struct Ticket;

#[with_lock(key = "ticket")]
impl Ticket {}

#[with_lock(key = "ticket")]
const fn constant() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket")]
extern "C" fn foreign() -> i32 {
    0
}

trait Seller {
    #[with_lock(key = "ticket")]
    async fn sell(&self) -> Result<(), LockError>;
}

fn main() {}
