use lockstream::{LockError, with_lock};

#[with_lock(key = "")]
async fn empty() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "~{id}")]
async fn begins_as_ours(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "{id}\n")]
async fn control_character(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "{{}}{id}")]
async fn empty_tag(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "{id}:~queue7")]
async fn contains_ours(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef!")]
async fn too_long() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
