//! What a key may be made of.

use std::sync::{Arc, LazyLock};

use lockstream::{LockError, LockRegistry, with_lock};

use crate::held;

static LOCKS: LazyLock<LockRegistry> = LazyLock::new(LockRegistry::in_memory);

const DESK: &str = "desk";

struct Order {
    id: u32,
    part: (char, f64),
}

impl Order {
    fn name(&self) -> String {
        format!("o{}", self.id)
    }
}

macro_rules! keys {
    ($($name:ident, $key:expr, ($($arg:ident: $ty:ty),*), ($($value:expr),*), $is:expr;)*) => {$(
        #[tokio::test(start_paused = true)]
        async fn $name() {
            #[with_lock(key = $key, registry = locks)]
            async fn locked(locks: &LockRegistry, $($arg: $ty),*) -> Result<bool, LockError> {
                $(let _ = &$arg;)*
                Ok(held(locks, $is).await)
            }

            let locks = LockRegistry::in_memory();
            assert!(locked(&locks, $($value),*).await.unwrap(), "{} is not held", $is);
            assert!(!held(&locks, $is).await);
        }
    )*};
}

keys! {
    no_holes, "order", (), (), "order";
    braces, "{{order}}:{{", (), (), "{order}:{";
    braces_and_holes, "{{{id}}}:x", (id: u32), (7), "{7}:x";
    raw_string, r#"a"b"#, (), (), "a\"b";
    not_ascii, "ключ:{id}", (id: &str), ("я"), "ключ:я";
    argument, "order:{id}", (id: u32), (7), "order:7";
    two_holes, "{a}:{b}", (a: u32, b: &str), (7, "x"), "7:x";
    spaces, "{ id }:{ id :03}", (id: u32), (7), "7:007";
    field, "{order.id}", (order: Order), (Order { id: 7, part: ('c', 0.5) }), "7";
    tuple_fields, "{order.part.0}{order.part.1:.2}", (order: Order), (Order { id: 7, part: ('c', 0.5) }), "c0.50";
    method, "{order.name()}", (order: Order), (Order { id: 7, part: ('c', 0.5) }), "o7";
    method_of_method, "{order.name().len()}", (order: Order), (Order { id: 7, part: ('c', 0.5) }), "2";
    constant, "{DESK}:{id}", (id: u32), (7), "desk:7";
    path, "{u8::MAX}:{std::u32::MAX:x}", (), (), "255:ffffffff";
    width, "{id:08}", (id: u32), (7), "00000007";
    hexadecimal, "{id:#x}", (id: u32), (255), "0xff";
    debug, "{id:?}", (id: Option<u32>), (Some(7)), "Some(7)";
    width_from_an_argument, "{id:>width$}", (id: u32, width: usize), (7, 3), "  7";
    str_argument, id, (id: &str), ("order:7"), "order:7";
    string_argument, id, (id: String), (String::from("order:7")), "order:7";
    arc_argument, id, (id: Arc<str>), (Arc::from("order:7")), "order:7";
    expression, format!("order:{}", ids[1] + 1), (ids: Vec<u32>), (vec![5, 6]), "order:7";
    concatenated, concat!("a", "{b}"), (), (), "a{b}";
}

struct Named {
    key: String,
    locks: LockRegistry,
}

impl Named {
    /// The key's field is not moved out of what is borrowed.
    #[with_lock(key = self.key, registry = self.locks)]
    async fn locked(&self) -> Result<bool, LockError> {
        Ok(held(&self.locks, "named").await)
    }
}

#[tokio::test(start_paused = true)]
async fn a_field_as_a_key() {
    let named = Named {
        key: String::from("named"),
        locks: LockRegistry::in_memory(),
    };
    assert!(named.locked().await.unwrap());
}

#[with_lock(key = "static", registry = LOCKS)]
async fn by_static() -> Result<bool, LockError> {
    Ok(held(&LOCKS, "static").await)
}

#[with_lock(key = "arc", registry = locks)]
async fn by_arc(locks: Arc<LockRegistry>) -> Result<bool, LockError> {
    Ok(held(&locks, "arc").await)
}

#[with_lock(key = "borrow", registry = locks)]
async fn by_borrow<R: std::borrow::Borrow<LockRegistry>>(locks: R) -> Result<bool, LockError> {
    Ok(held(locks.borrow(), "borrow").await)
}

#[with_lock(key = "call", registry = LockRegistry::clone(locks))]
async fn by_call(locks: &LockRegistry) -> Result<bool, LockError> {
    Ok(held(locks, "call").await)
}

#[with_lock(key = "late", registry = state.upgrade().expect("kept by the caller"))]
async fn by_temporary(state: std::sync::Weak<LockRegistry>) -> Result<bool, LockError> {
    Ok(held(&state.upgrade().unwrap(), "late").await)
}

#[tokio::test(start_paused = true)]
async fn whatever_has_a_registry() {
    let locks = LockRegistry::in_memory();
    assert!(by_static().await.unwrap());
    assert!(by_arc(Arc::new(locks.clone())).await.unwrap());
    assert!(by_borrow(&locks).await.unwrap());
    assert!(by_borrow(locks.clone()).await.unwrap());
    assert!(by_call(&locks).await.unwrap());
    let shared = Arc::new(locks);
    assert!(by_temporary(Arc::downgrade(&shared)).await.unwrap());
}

/// Names that the attribute uses for itself are the function's own, too.
#[with_lock(key = "{__lock_0}:{__refused}", registry = never)]
async fn same_names(
    never: &LockRegistry,
    __lock_0: u32,
    __refused: u32,
) -> Result<bool, LockError> {
    Ok(held(never, &format!("{__lock_0}:{__refused}")).await)
}

#[tokio::test(start_paused = true)]
async fn the_attributes_names_meet_no_others() {
    assert!(same_names(&LockRegistry::in_memory(), 1, 2).await.unwrap());
}

#[with_lock(key = "{key}", registry = locks)]
async fn any_key(locks: &LockRegistry, key: &str) -> Result<(), LockError> {
    let _ = (locks, key);
    Ok(())
}

/// What cannot be known of a key before it is made is told when it is.
#[tokio::test(start_paused = true)]
async fn a_key_that_cannot_be_is_an_error() {
    let locks = LockRegistry::in_memory();
    for key in ["", "~a", "a\n", "a}"] {
        let error = any_key(&locks, key).await.unwrap_err();
        assert!(matches!(error, LockError::InvalidKey { .. }), "{error}");
    }
}
