use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", shared, permits = 4)]
async fn shared_permits() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4, shared)]
async fn permits_shared() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", weight = 2)]
async fn weight_alone() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", shared, weight = 2)]
async fn shared_weight() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 0)]
async fn no_permits() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4, weight = 0)]
async fn no_weight() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 100, weight = 65)]
async fn too_heavy() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4, weight = 5)]
async fn heavier_than_all() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4 + 4, weight = 0x41)]
async fn heavy_by_expression() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = "4")]
async fn permits_text() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4, weight = 1.5)]
async fn weight_text() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits)]
async fn permits_flag() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4u64)]
async fn permits_u64() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4294967296)]
async fn too_many() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", shared = true)]
async fn shared_value() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", reentrant, shared)]
async fn reentrant_shared() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", permits = 4, reentrant)]
async fn reentrant_permits() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", nested, shared)]
async fn nested_shared() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", nested, reentrant)]
async fn nested_reentrant() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
