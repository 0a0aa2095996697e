use lockstream::{LockError, with_lock};

#[with_lock(ttl = "10s")]
async fn sell() -> Result<(), LockError> {
    Ok(())
}

#[with_lock]
async fn resell() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
