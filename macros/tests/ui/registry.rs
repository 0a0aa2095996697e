use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", registry = locks)]
async fn no_registry(locks: u32) -> Result<(), LockError> {
    let _ = locks;
    Ok(())
}

#[with_lock(key = "ticket", registry = self.locks)]
async fn no_self() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
