use lockstream::{LockError, with_lock};

#[with_lock(key = "a", keys = ["b", "c"])]
async fn both() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = [])]
async fn none() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = "a, b")]
async fn one_text() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", "~b"])]
async fn invalid() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", 2])]
async fn no_key() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", "b"], shared)]
async fn shared() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", "b"], permits = 3)]
async fn permits() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", "b"], nested)]
async fn nested() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = ["a", "b"], reentrant)]
async fn reentrant() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys)]
async fn no_value() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(keys = 3 + 4)]
async fn no_keys() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
