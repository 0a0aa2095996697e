//! What the attribute says of what it cannot do.
//!
//! `TRYBUILD=overwrite cargo test -p lockstream-macros --test ui` writes the messages again.

#[test]
fn messages() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
