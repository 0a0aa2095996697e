use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", ttl = "10 parsecs")]
async fn unknown_unit() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", wait = "soon")]
async fn no_number() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", ttl = 10)]
async fn no_unit() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", ttl = "9ms")]
async fn too_short() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", ttl = "1day 1s")]
async fn too_long() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", ttl = "forever")]
async fn no_length() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
