//! What is told when a connection ends.

use std::time::Duration;

use super::support::PgServer;
use crate::store::postgres::address::Endpoint;
use crate::store::postgres::call::Names;

const BOUND: Duration = Duration::from_secs(10);

/// The server answers to the second of three statements that it ends the connection, and to the third nothing. The words
/// are those of the second.
#[tokio::test]
async fn an_end_is_told_in_the_words_of_the_server() {
    let server = PgServer::start();
    let (mut endpoint, _) = Endpoint::parse(&server.url()).unwrap();
    endpoint.secure().unwrap();
    let mut connection = endpoint.connect().await.unwrap();
    let names = Names::new("lock".into(), "a1".into(), "lockstream", BOUND);
    let caller = connection.caller.clone();
    let sql = "SELECT pg_terminate_backend(pg_backend_pid())";
    let asked = connection.ask(caller.bounded(&names, sql, &[])).await;
    let error = asked.expect("an answer").expect_err("it has ended");
    let refusal = error.as_db_error().expect("the server's words");
    assert_eq!(refusal.code().code(), "57P01", "{refusal}");
    // It stays as it is, however often it is asked.
    for _ in 0..2 {
        assert!(connection.notice().await.is_err());
    }
}
