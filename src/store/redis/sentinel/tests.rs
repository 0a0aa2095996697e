use redis::ConnectionInfo;

use super::*;

fn server(url: &str) -> (Sentinels, ConnectionInfo) {
    let sentinels = Sentinels::parse(url).unwrap();
    let info = sentinels.server.info.clone();
    (sentinels, info)
}

fn addresses(sentinels: &Sentinels) -> Vec<String> {
    sentinels
        .all
        .iter()
        .map(|it| it.info.addr().to_string())
        .collect()
}

#[test]
fn a_url_names_sentinels_a_service_and_who_we_are_to_each() {
    let (sentinels, info) = server(
        "redis+sentinel://us%40er:p%2Fw@one,two:7,[::1],[::1]:8/my%20service/3\
         ?sentinel_user=watch&sentinel_password=a%26b",
    );
    assert_eq!(&*sentinels.service, "my service");
    assert_eq!(
        addresses(&sentinels),
        ["one:26379", "two:7", "::1:26379", "::1:8"]
    );
    let settings = info.redis_settings();
    assert_eq!(settings.username(), Some("us@er"));
    assert_eq!(settings.password(), Some("p/w"));
    assert_eq!(settings.db(), 3);
    for sentinel in &sentinels.all {
        let settings = sentinel.info.redis_settings().clone();
        assert_eq!(settings.username(), Some("watch"));
        assert_eq!(settings.password(), Some("a&b"));
        assert_eq!(settings.db(), 0, "sentinels have none");
    }
    let primary = sentinels.at("10.0.0.1", 6380, &sentinels.all[1]);
    assert_eq!(
        &*primary.address,
        "10.0.0.1:6380 (primary of \"my service\", says two:7)"
    );
    assert_eq!(primary.info.redis_settings().password(), Some("p/w"));
}

#[test]
fn a_server_s_password_is_not_told_to_sentinels() {
    let (sentinels, info) = server("valkey+sentinel://:secret@one/s/");
    assert_eq!(info.redis_settings().password(), Some("secret"));
    let settings = sentinels.all[0].info.redis_settings().clone();
    assert_eq!((settings.username(), settings.password()), (None, None));
}

#[test]
fn an_invalid_url_is_refused_and_not_shown() {
    for url in [
        "redis+sentinel://one",
        "redis+sentinel://one/",
        "redis+sentinel:///service",
        "redis+sentinel://one,/service",
        "redis+sentinel://one:x/service",
        "redis+sentinel://one/service/x",
        "redis+sentinel://one/service/1/2",
        "redis+sentinel://one/service#secret",
        "redis+sentinel://one/service?secret",
        "redis+sentinel://one/service?option=secret",
        "redis+sentinel://one/service?sentinel_user=secret",
        "redis+sentinel://one/service?sentinel_password=%FF",
        "http+sentinel://one/service",
    ] {
        let Err(fault) = Sentinels::parse(url) else {
            panic!("{url} was taken");
        };
        assert!(fault.is_lasting());
        assert!(!fault.to_string().contains("secret"), "{fault}");
    }
}

#[test]
fn the_one_that_was_wrong_is_not_asked_first_again() {
    let (sentinels, _) = server("redis+sentinel://one,two,three/s");
    let first = || sentinels.first.load(Ordering::Relaxed) % sentinels.all.len();
    for _ in 0..4 {
        let before = first();
        sentinels.doubt();
        assert_eq!(first(), (before + 1) % 3);
    }
}

/// All processes of a fleet asked the sentinel that the url names first.
#[test]
fn any_sentinel_may_be_the_first() {
    let first = |_| {
        let (sentinels, _) = server("redis+sentinel://one,two,three/s");
        sentinels.first.load(Ordering::Relaxed)
    };
    // That one is never the first of 500 happens once in 10^87 runs.
    let firsts: std::collections::BTreeSet<_> = (0..500).map(first).collect();
    assert_eq!(firsts, [0, 1, 2].into());
}

#[test]
fn any_answer_of_a_sentinel_is_handled() {
    let bulk = |text: &str| Value::BulkString(text.into());
    let pair = |host: &str, port: &str| Value::Array(vec![bulk(host), bulk(port)]);
    assert_eq!(read(pair("::1", "7")), Some(("::1".to_owned(), 7)));
    for odd in [
        pair("", "7"),
        pair("h\nh", "7"),
        pair(&"h".repeat(254), "7"),
        pair("h", "0"),
        pair("h", "70000"),
        pair("h", "-1"),
        Value::Array(vec![bulk("h")]),
        Value::Okay,
        bulk("h"),
    ] {
        assert_eq!(read(odd.clone()), None, "{odd:?}");
    }
}
