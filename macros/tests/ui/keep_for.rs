use lockstream::{LockError, with_lock};

#[with_lock(key = "ticket", keep_for = "1h", on_finish = "let_expire")]
async fn both() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = "9ms")]
async fn too_short() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = "2 years")]
async fn too_long() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = "forever")]
async fn for_ever() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = 10)]
async fn no_unit() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = 5 + 5)]
async fn no_duration() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_on_success)]
async fn for_how_long() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", keep_for = "1h", keep_on_success)]
fn a_stream() -> impl futures::Stream<Item = Result<(), LockError>> {
    futures::stream::empty()
}

fn main() {}
