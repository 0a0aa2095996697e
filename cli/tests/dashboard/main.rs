//! The dashboard as a process, on real servers, in a real browser.
#![cfg(unix)]

mod browser;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use browser::{Browser, Page, REBOUND};
use lockstream::LockRegistry;
use lockstream::store::{LockStore, PostgresStore, RedisStore};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use support::{PgServer, Proxy, RedisServer, Way, wait_until, wait_until_blocking};

/// For what takes some looks on a busy machine.
const BOUND: Duration = Duration::from_secs(30);

/// A process of the dashboard, killed when it is dropped.
struct Dashboard {
    child: Child,
    url: String,
}

impl Dashboard {
    fn command(url: &str, options: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstream"));
        command.arg("dashboard").args(["--listen", "0"]);
        command.args(options).env("LOCKSTREAM_URL", url);
        command
    }

    fn start(url: &str, options: &[&str]) -> Self {
        let mut child = Self::command(url, options)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let first = lines.next().expect("it says where it listens").unwrap();
        let url = first.strip_prefix("listening on ").unwrap().to_owned();
        Self { child, url }
    }

    fn on_redis(server: &RedisServer) -> Self {
        Self::start(&server.url(), &[])
    }

    fn port(&self) -> u16 {
        let (_, port) = self.url.rsplit_once(':').unwrap();
        port.parse().unwrap()
    }

    /// The status of the answer to a request with this method, path and these headers, and what is before its body.
    fn ask(&self, request: &str, headers: &[&str]) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port())).unwrap();
        stream.set_read_timeout(Some(BOUND)).unwrap();
        let headers: Vec<_> = headers.iter().map(|it| format!("{it}\r\n")).collect();
        let text = format!("{request} HTTP/1.1\r\n{}\r\n", headers.concat());
        stream.write_all(text.as_bytes()).unwrap();
        let lines = BufReader::new(stream).lines().map_while(Result::ok);
        let head: Vec<_> = lines.take_while(|line| !line.is_empty()).collect();
        let status = head[0].split_whitespace().nth(1).unwrap();
        (
            status.parse().unwrap(),
            head.join("\n").to_ascii_lowercase(),
        )
    }

    fn events(&self) -> Events {
        let answer = ureq::get(format!("{}/events", self.url)).call().unwrap();
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        Events(BufReader::new(answer.into_body().into_reader()).lines())
    }
}

impl Drop for Dashboard {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a page is sent.
struct Events(Lines<BufReader<ureq::BodyReader<'static>>>);

impl Iterator for Events {
    type Item = Value;

    fn next(&mut self) -> Option<Value> {
        let mut lines = self.0.by_ref().map(Result::unwrap);
        let data = lines.find_map(|line| line.strip_prefix("data: ").map(str::to_owned));
        data.map(|data| serde_json::from_str(&data).unwrap())
    }
}

impl Events {
    /// The first that is as wanted. They come twice a second.
    fn until(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        for event in self.take(2 * BOUND.as_secs() as usize) {
            if wanted(&event) {
                return event;
            }
            last = event;
        }
        panic!("not within {BOUND:?}: {what}: {last}");
    }
}

fn named(store: &(impl LockStore + Clone), name: &str) -> LockRegistry {
    LockRegistry::builder(store.clone())
        .name(name)
        .build()
        .unwrap()
}

/// A text in one line.
fn words(text: &Value) -> String {
    let words = text.as_str().unwrap().split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}

/// What is seen in the cells of the row of a key.
fn row(page: &Page<'_>, key: &str) -> Option<Vec<String>> {
    let rows = page.value(
        "[...document.querySelectorAll('#locks tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))",
    );
    let mut rows = rows.as_array().unwrap().iter().map(|row| {
        let cells = row.as_array().unwrap().iter();
        cells.map(words).collect::<Vec<_>>()
    });
    rows.find(|row| row[0] == key)
}

/// Waits until the cells after the key are as wanted, where `_` is any text.
async fn until_row(page: &Page<'_>, key: &str, wanted: &[&str; 6]) -> Vec<String> {
    let mut seen = None;
    let fits = |row: &Vec<String>| {
        row[1..]
            .iter()
            .zip(wanted)
            .all(|(cell, wanted)| *wanted == "_" || cell == wanted)
    };
    let begin = Instant::now();
    loop {
        seen = row(page, key).or(seen);
        match &seen {
            Some(row) if fits(row) => return row.clone(),
            _ => assert!(
                begin.elapsed() < BOUND,
                "not within {BOUND:?}: {wanted:?}: {seen:?}"
            ),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn text_of(page: &Page<'_>, selector: &str) -> String {
    words(&page.value(&format!("document.querySelector('{selector}').innerText")))
}

/// Whom a hand-over went from and to.
fn hand_over(seen: &Value) -> (&Value, &Value, &Value) {
    let last = &seen["hand_overs"][0];
    (&last["key"], &last["from"], &last["to"])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_who_holds_who_waits_and_who_hands_over() {
    let mut server = RedisServer::start();
    let dashboard = Dashboard::on_redis(&server);
    let browser = Browser::start();
    let page = browser.open(&dashboard.url);
    wait_until("it shows that nothing is locked", BOUND, || {
        text_of(&page, "#more") == "No lock is held or waited for."
    })
    .await;
    assert_eq!(text_of(&page, "#store"), "Redis");
    assert_eq!(text_of(&page, "#hand-overs"), "None was seen yet.");

    let store = RedisStore::connect(server.url()).await.unwrap();
    let [one, two] = ["till-1", "till-2"].map(|name| named(&store, name));
    let held = one.obtain("order:42").lease().await.unwrap();
    let waits = tokio::spawn(two.obtain("order:42").wait(4 * BOUND).lease());
    let shown = until_row(
        &page,
        "order:42",
        &["exclusive", "till-1", "_", "_", "1 till-2", "0"],
    )
    .await;
    let left: u64 = shown[3].strip_suffix(" s").unwrap().parse().unwrap();
    assert!((10..=30).contains(&left), "a lease of 30 s: {shown:?}");
    assert!(shown[4].ends_with(" s"), "{shown:?}");

    // Those that share, and what they keep out.
    let readers = [
        one.obtain("doc").shared().lease().await.unwrap(),
        two.obtain("doc").shared().lease().await.unwrap(),
    ];
    let writes = tokio::spawn(one.obtain("doc").wait(4 * BOUND).lease());
    let permit = two.obtain("gpu").permits_of(4, 3).lease().await.unwrap();
    let shown = until_row(
        &page,
        "doc",
        &["shared", "_", "_", "_", "1 till-1 exclusive", "0"],
    )
    .await;
    assert!(
        ["till-1 till-2", "till-2 till-1"].contains(&&*shown[2]),
        "{shown:?}"
    );
    until_row(&page, "gpu", &["permits 3/4", "till-2", "_", "_", "", "0"]).await;
    assert_eq!(text_of(&page, "#held"), "3");
    assert_eq!(text_of(&page, "#waiting"), "2");
    // Whoever puts a foreign lock there has no say in what the page is.
    let key = "<img src=x onerror=document.title=1>";
    server.set(&format!("lock:{key}"), "<b>them</b>");
    until_row(
        &page,
        key,
        &["exclusive", "<b>them</b>", "no end", "_", "", "0"],
    )
    .await;
    assert_eq!(
        page.value("document.querySelectorAll('img, td b:not(.queue b)').length"),
        0
    );

    // The lock is handed over, and the page says from whom to whom.
    held.release().await.unwrap();
    let held = waits.await.unwrap().unwrap();
    until_row(
        &page,
        "order:42",
        &["exclusive", "till-2", "_", "_", "", "1"],
    )
    .await;
    let last = text_of(&page, "#hand-overs li");
    assert!(last.ends_with("order:42 till-1 → till-2"), "{last}");
    assert_eq!(text_of(&page, "#seen"), "1");

    // A store that does not answer, and one that is gone.
    server.stop();
    wait_until("it says that the store is away", BOUND, || {
        text_of(&page, "#state") == "away"
    })
    .await;
    let says = text_of(&page, "#away");
    assert!(says.starts_with("The store is away: "), "{says}");
    assert_eq!(
        row(&page, "order:42").unwrap()[2],
        "till-2",
        "what was seen last stays"
    );
    server.cont();
    wait_until("it is back", BOUND, || text_of(&page, "#state") == "live").await;
    assert_eq!(text_of(&page, "#away"), "");
    drop((held, readers, permit));
    writes.abort();
    one.shutdown().await;
    two.shutdown().await;
    until_row(&page, "order:42", &["free", "", "", "", "", "1"]).await;
    server.kill();
    wait_until("it says that the store is gone", BOUND, || {
        text_of(&page, "#away").contains("refused")
    })
    .await;

    // The dashboard itself ends.
    drop(dashboard);
    wait_until("it says that nobody answers", BOUND, || {
        text_of(&page, "#away") == "The dashboard does not answer. Trying again."
    })
    .await;
}

/// What the page is sent of PostgreSQL. It makes no tables there: without them it says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_is_shown_and_not_changed() {
    let server = PgServer::start();
    let url = server.url();
    let dashboard = Dashboard::start(&url, &[]);
    let mut events = dashboard.events();
    let first = events.next().unwrap();
    assert_eq!(first["store"], "PostgreSQL");
    let away = first["away"].as_str().unwrap();
    assert!(away.contains("lockstream"), "{away}");

    let store = PostgresStore::connect(&url).await.unwrap();
    let [one, two] = ["till-1", "till-2"].map(|name| named(&store, name));
    let held = one.obtain("order:42").lease().await.unwrap();
    let waits = tokio::spawn(two.obtain("order:42").wait(4 * BOUND).lease());
    let seen = events.until("one holds and two waits", |seen| seen["waiting"] == 1);
    assert_eq!(seen["away"], Value::Null);
    assert_eq!(seen["locks"][0]["key"], "order:42");
    assert_eq!(seen["locks"][0]["holders"][0]["name"], "till-1");
    assert_eq!(seen["locks"][0]["queue"][0]["name"], "till-2");
    held.release().await.unwrap();
    let _held = waits.await.unwrap().unwrap();
    let seen = events.until("a hand-over", |seen| seen["hand_overs_seen"] == 1);
    let (from, to) = (json!(["till-1"]), json!(["till-2"]));
    assert_eq!(hand_over(&seen), (&json!("order:42"), &from, &to));
}

/// However many pages are open there is one look at a time, and none while there is no page.
#[test]
fn it_looks_once_for_all_pages_and_not_without_one() {
    let server = RedisServer::start();
    let dashboard = Dashboard::on_redis(&server);
    let mut pages = [(); 3].map(|()| dashboard.events());
    for page in &mut pages {
        page.until("the fifth look", |seen| seen["looks"].as_u64() >= Some(5));
    }
    // The store is empty, so that a look is one call.
    let calls = server.calls("scan");
    let [page, ..] = &mut pages;
    let seen = page.until("a look after the last of these", |seen| {
        seen["looks"].as_u64() >= Some(calls)
    });
    assert!(calls >= 5, "{calls} calls: {seen}");

    drop(pages);
    let mut before = None;
    wait_until_blocking("it looks no more", BOUND, || {
        // Three times as long as from one look to the next.
        std::thread::sleep(Duration::from_millis(1_500));
        let calls = server.calls("scan");
        before.replace(calls) == Some(calls)
    });
    let calls = server.calls("scan");
    // What is shown first may be what was seen last.
    let _page = dashboard.events();
    wait_until_blocking("it looks again", BOUND, || server.calls("scan") > calls);
}

/// A look at a large database takes long, and the next one began at its end: the server did nothing else. An answer that
/// is a second on its way stands in for it.
#[test]
fn it_pauses_after_a_slow_look() {
    let server = RedisServer::start();
    let proxy = Proxy::to(&server);
    let options = ["--every", "100ms", "--response-timeout", "1m"];
    let dashboard = Dashboard::start(&proxy.url(), &options);
    let mut events = dashboard.events();
    events.until("the second look", |seen| seen["looks"].as_u64() >= Some(2));
    proxy.delay(Way::ToClient, Duration::from_secs(1));
    let calls = server.calls("scan");
    let mut before = Instant::now();
    wait_until_blocking("a look is slow", BOUND, || {
        let at = Instant::now();
        let asks = server.calls("scan") > calls;
        if !asks {
            before = at;
        }
        asks
    });
    wait_until_blocking("it looks again", BOUND, || server.calls("scan") > calls + 1);
    let later = before.elapsed();
    // A second, and four times as long.
    assert!(later >= Duration::from_secs(5), "{later:?}");
}

/// It looks no more often than is asked for, and a page that is opened meanwhile shows what was seen last.
#[test]
fn it_looks_as_often_as_was_said() {
    let server = RedisServer::start();
    let dashboard = Dashboard::start(&server.url(), &["--every", "10m"]);
    let mut pages = [(); 2].map(|()| dashboard.events());
    for page in &mut pages {
        assert_eq!(page.next().unwrap()["looks"], 1);
    }
    assert_eq!(server.calls("scan"), 1);
}

/// With `LOCKSTREAM_SCREENSHOT=docs/dashboard.png` (a path from the repository's root) the page's picture is written there.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_there_is_a_demo() {
    let dashboard = Dashboard::start("", &["--demo"]);
    let browser = Browser::start();
    let page = browser.open(&dashboard.url);
    wait_until("there are some hand-overs", 2 * BOUND, || {
        let shown = page.value("document.querySelectorAll('#hand-overs li .age').length");
        shown.as_u64() >= Some(8)
    })
    .await;
    for key in ["account:7", "doc:terms", "gpu", "nightly:report"] {
        assert!(row(&page, key).is_some(), "{key}");
    }
    let ground = || page.value("getComputedStyle(document.body).backgroundColor");
    let light = ground();
    if let Some(path) = std::env::var_os("LOCKSTREAM_SCREENSHOT") {
        page.screenshot(&Path::new("..").join(path));
    }
    page.set_dark();
    assert_ne!(ground(), light);
    assert_eq!(
        page.value("document.documentElement.scrollWidth"),
        1000,
        "it fits"
    );
}

/// A url or a port that is none, and one that is taken.
#[test]
fn a_wrong_setting_is_told() {
    let taken = Dashboard::start("", &["--demo"]);
    let taken = taken.port().to_string();
    for (url, options, code, told) in [
        ("http://example.org", &[][..], 64, "expected redis://"),
        ("", &[], 64, "no store"),
        (
            "",
            &["--demo", "--url", "redis://h/"],
            64,
            "cannot be used with",
        ),
        (
            "",
            &["--demo", "--prefix", "x", "--listen", "many"],
            64,
            "expected a port",
        ),
        (
            "",
            &["--demo", "--listen", &taken],
            69,
            "cannot listen on 127.0.0.1:",
        ),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstream"));
        command.arg("dashboard").args(options);
        let output = command.env("LOCKSTREAM_URL", url).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(told), "{said}");
        assert_eq!(output.stdout, b"");
    }
}

/// Whoever reaches the port may look; a page of somebody else in the browser of who may is not who may.
#[test]
fn other_origins_and_other_names_get_nothing() {
    let dashboard = Dashboard::start("", &["--demo", "--allow-host", "locks.example"]);
    let port = dashboard.port();
    let own = format!("Host: 127.0.0.1:{port}");
    let status = |request: &str, headers: &[&str]| dashboard.ask(request, headers).0;
    for path in ["GET /", "GET /events"] {
        for host in [
            &*own,
            &format!("Host: localhost:{port}"),
            "Host: locks.example",
        ] {
            assert_eq!(status(path, &[host]), 200, "{path} {host}");
        }
        for host in [
            "Host: evil.example",
            &format!("Host: evil.example:{port}"),
            "X: no host",
        ] {
            let status = status(path, &[host]);
            assert!([400, 403].contains(&status), "{path} {host}: {status}");
        }
        let origin = format!("Origin: http://127.0.0.1:{port}");
        assert_eq!(status(path, &[&own, &origin]), 200);
        assert_eq!(status(path, &[&own, "Origin: http://evil.example"]), 403);
    }
    assert_eq!(
        status("GET /events", &[&own, "Sec-Fetch-Site: cross-site"]),
        403
    );
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        assert_eq!(
            status(&format!("{method} /"), &[&own, "Content-Length: 0"]),
            405
        );
    }
    let (_, head) = dashboard.ask("GET /", &[&own]);
    assert!(head.contains("frame-ancestors 'none'"), "{head}");
    assert!(!head.contains("access-control"), "{head}");
}

/// DNS rebinding: the name of a page of somebody else leads here, and to the browser this is the same origin.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_was_made_to_lead_here_shows_nothing() {
    let server = RedisServer::start();
    let dashboard = Dashboard::on_redis(&server);
    let browser = Browser::start();
    let page = browser.open(&format!("http://{REBOUND}:{}/", dashboard.port()));
    let says = text_of(&page, "body");
    assert!(says.contains("does not have that name"), "{says}");
    let asks = "fetch('/events').then(it => { window.status_was = it.status })";
    page.value(&format!("{asks}; 0"));
    wait_until("it is refused", BOUND, || {
        page.value("window.status_was") == 403
    })
    .await;
    assert_eq!(server.calls("scan"), 0);
    let page = browser.open(&dashboard.url);
    wait_until("by its address it shows all", BOUND, || {
        text_of(&page, "#state") == "live"
    })
    .await;
}

/// As a service it ends when it is told to, and that is no failure.
#[test]
fn a_signal_ends_it() {
    let server = RedisServer::start();
    let mut dashboard = Dashboard::on_redis(&server);
    let mut events = dashboard.events();
    events.next().unwrap();
    // Whoever runs the tests in the background may have SIGINT ignored, for the command, too.
    kill_process(Pid::from_child(&dashboard.child), Signal::TERM).unwrap();
    let status = dashboard.child.wait().unwrap();
    assert_eq!(status.code(), Some(0));
}

/// It is said if others than this machine may look.
#[test]
fn an_address_that_others_reach_is_warned_of() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lockstream"))
        .args(["dashboard", "--demo", "--listen", "0.0.0.0:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let said = lines.next().unwrap().unwrap();
    let _ = child.kill();
    let _ = child.wait();
    assert!(said.contains("warning: whoever reaches 0.0.0.0:"), "{said}");
}
