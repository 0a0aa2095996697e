use lockstream::{LockError, with_lock};

#[with_lock(key = "order:{id")]
async fn unclosed(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:{id:{}")]
async fn unclosed_before_another(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:id}")]
async fn unopened(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:{}")]
async fn empty_hole(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:{0}")]
async fn positional(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:{ids[0]}")]
async fn too_much(ids: Vec<u32>) -> Result<(), LockError> {
    let _ = ids;
    Ok(())
}

#[with_lock(key = "order:{id +}")]
async fn no_expression(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

fn main() {}
