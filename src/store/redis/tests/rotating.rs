//! Credentials that change, and what a server may say of them.

use tokio::sync::watch;

use super::fake::Fake;
use super::hearing::Log;
use super::registry::BOUND;
use super::support::wait_until;
use crate::store::Credentials;
use crate::store::redis::credentials::Source;
use crate::store::redis::endpoint::Endpoint;

/// Servers quote the arguments of what they do not know.
#[tokio::test]
async fn an_error_that_quotes_new_credentials_is_not_logged() {
    let fake = Fake::start(|request| {
        let quoted = request.words[1..].join("' '");
        let error = format!("-ERR unknown command, with args beginning with: '{quoted}'\r\n");
        request.is("AUTH").then(|| error.into_bytes())
    });
    let log = Log::default();
    let _hearing = log.hear(tracing::Level::TRACE);
    let (rotate, newest) = watch::channel(Credentials::new("app", "s3kret0"));
    let mut endpoint = Endpoint::parse(&fake.url()).unwrap();
    endpoint.credentials = Some(Source::watching(newest));
    let (mut link, _) = endpoint.connect::<()>(BOUND).await.unwrap();
    let rotating = async {
        rotate.send(Credentials::new("app", "s3kret1")).unwrap();
        wait_until("it is refused", BOUND, || {
            let logged = log.text();
            logged.contains("the server refused the new credentials") && logged.contains("\"ERR\"")
        })
        .await;
    };
    tokio::select! {
        _ = link.next() => panic!("nothing was asked"),
        () = rotating => {}
    }
    assert!(!log.text().contains("s3kret"), "{}", log.text());
    // The connection goes on, and so do credentials that come later.
    link.ask(&redis::cmd("PING"), BOUND).await.unwrap();
    let rotating = async {
        rotate.send(Credentials::new("app", "s3kret2")).unwrap();
        wait_until("it is refused again", BOUND, || {
            log.text().matches("the server refused").count() >= 2
        })
        .await;
    };
    tokio::select! {
        _ = link.next() => panic!("nothing was asked"),
        () = rotating => {}
    }
    // A connection that is given up takes the task along that waits for more.
    drop(link);
    wait_until("nobody listens", BOUND, || rotate.receiver_count() == 1).await;
}
