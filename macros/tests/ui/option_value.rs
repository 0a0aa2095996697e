use lockstream::{LockError, with_lock};

#[with_lock(key)]
async fn no_value() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = , ttl = "1s")]
async fn no_value_either() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = 42)]
async fn number() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", reentrant = true)]
async fn no_flag() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", on_lost = "ignore")]
async fn unknown_word() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", on_finish = "keep")]
async fn another_unknown_word() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", renewal = "always")]
async fn yet_another() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", max_renewals = "360")]
async fn text_for_a_number() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", renewal = "off", max_renewals = 360)]
async fn nothing_to_count() -> Result<(), LockError> {
    Ok(())
}

#[with_lock(key = "ticket", crate = "lockstream")]
async fn no_path() -> Result<(), LockError> {
    Ok(())
}

fn main() {}
