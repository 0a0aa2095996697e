//! The example of another client.

use crate::support::PgServer;

/// The example of sqlx has a lock file of its own, so it is built here.
#[tokio::test]
async fn the_example_of_sqlx_runs() {
    let server = PgServer::start();
    let output = tokio::process::Command::new(env!("CARGO"))
        .args(["run", "--locked", "--manifest-path"])
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/examples/sqlx_fence/Cargo.toml"
        ))
        .env(
            "CARGO_TARGET_DIR",
            concat!(env!("CARGO_TARGET_TMPDIR"), "/sqlx_fence"),
        )
        .env("DATABASE_URL", server.url())
        .output()
        .await
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.contains("paid under token"), "{said}");
    assert!(said.contains("refused: "), "{said}");
}
