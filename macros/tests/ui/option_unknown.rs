use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", lease_time = "10s")]
async fn sell() -> Result<(), LockError> {
    Ok(())
}

#[with_lock("ticket")]
async fn resell() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
