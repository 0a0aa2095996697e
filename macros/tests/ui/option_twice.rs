use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", ttl = "10s", key = "tickets")]
async fn sell() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
