use lockstream::{LockError, with_lock};

struct Order {
    id: u32,
}

#[with_lock(key = "order:{order.id}")]
async fn no_such_argument(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

#[with_lock(key = "order:{order.number}")]
async fn no_such_field(order: Order) -> Result<(), LockError> {
    let _ = order.id;
    Ok(())
}

#[with_lock(key = "order:{order}")]
async fn not_shown(order: Order) -> Result<(), LockError> {
    let _ = order.id;
    Ok(())
}

#[with_lock(key = id)]
async fn no_text(id: u32) -> Result<(), LockError> {
    let _ = id;
    Ok(())
}

fn main() {}
