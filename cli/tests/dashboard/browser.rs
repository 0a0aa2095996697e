//! A headless Chromium, driven by the DevTools protocol over a pipe: it needs no port, and ends when the pipe is closed, so
//! also when the test is killed.

use std::cell::{Cell, RefCell};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::wait_until_blocking;

/// How long it may take to start, to answer, or to end, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

const VARIABLE: &str = "LOCKSTREAM_CHROMIUM";

const REMEDY: &str = "this test needs Chromium: `apt-get install chromium`, `brew install --cask chromium`, run the tests with \
    `./tests/run`, which sees to it, or name the program in LOCKSTREAM_CHROMIUM";

/// A name that leads to this machine.
pub(crate) const REBOUND: &str = "rebound.example";

/// With `--remote-debugging-pipe` it reads commands from file 3 and writes answers to file 4.
const START: &str = r#"exec "$@" 3<&0 4>&1 </dev/null >"$0" 2>&1"#;

pub(crate) struct Browser {
    child: Child,
    commands: RefCell<Option<ChildStdin>>,
    answers: Receiver<Value>,
    last: Cell<u64>,
    folder: TempDir,
}

pub(crate) struct Page<'a> {
    browser: &'a Browser,
    session: String,
}

fn program() -> PathBuf {
    if let Some(named) = env::var_os(VARIABLE).filter(|named| !named.is_empty()) {
        return named.into();
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let names = ["chromium", "chromium-browser", "google-chrome"].into_iter();
    let on_path =
        names.flat_map(|name| env::split_paths(&path).map(move |folder| folder.join(name)));
    let applications = [
        "/Applications/Chromium.app/Contents/MacOS/Chromium",
        "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    ];
    let mut all = on_path.chain(applications.map(PathBuf::from));
    all.find(|candidate| candidate.is_file())
        .unwrap_or_else(|| panic!("no Chromium here; {REMEDY}"))
}

/// Each message ends with a zero byte.
fn read(answers: ChildStdout) -> Receiver<Value> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for message in BufReader::new(answers).split(0).map_while(Result::ok) {
            let message = serde_json::from_slice(&message).expect("it speaks JSON");
            if sender.send(message).is_err() {
                break;
            }
        }
    });
    receiver
}

impl Browser {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let program = program();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", START]).arg(folder.path().join("log"));
        command.arg(&program).args([
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--hide-scrollbars",
            "--host-resolver-rules=MAP rebound.example 127.0.0.1",
        ]);
        let profile = folder.path().join("profile");
        command.arg(format!("--user-data-dir={}", profile.display()));
        // A group of its own: its helpers end with it.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("there is a shell");
        let commands = RefCell::new(child.stdin.take());
        let answers = read(child.stdout.take().expect("piped"));
        let last = Cell::new(0);
        let browser = Self {
            child,
            commands,
            answers,
            last,
            folder,
        };
        browser.call(None, "Browser.getVersion", json!({}));
        browser
    }

    /// The result of a command of the DevTools protocol.
    fn call(&self, session: Option<&str>, method: &str, params: Value) -> Value {
        let id = self.last.get() + 1;
        self.last.set(id);
        let mut command = json!({ "id": id, "method": method, "params": params });
        if let Some(session) = session {
            command["sessionId"] = json!(session);
        }
        let command = format!("{command}\0");
        let sent = match &mut *self.commands.borrow_mut() {
            Some(pipe) => pipe.write_all(command.as_bytes()).is_ok(),
            None => false,
        };
        // Others are events.
        let answer = sent.then(|| {
            loop {
                match self.answers.recv_timeout(PATIENCE) {
                    Ok(answer) if answer["id"] == id => break Some(answer),
                    Ok(_) => {}
                    Err(_) => break None,
                }
            }
        });
        let Some(answer) = answer.flatten() else {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            panic!("Chromium does not answer to {method}; {REMEDY}; it says:\n{log}");
        };
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    /// A page 1000 pixels wide.
    pub(crate) fn open(&self, url: &str) -> Page<'_> {
        let target = self.call(None, "Target.createTarget", json!({ "url": "about:blank" }));
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let session = self.call(None, "Target.attachToTarget", target);
        let session = session["sessionId"].as_str().unwrap().to_owned();
        let page = Page {
            browser: self,
            session,
        };
        page.call(
            "Emulation.setDeviceMetricsOverride",
            json!({ "width": 1000, "height": 700, "deviceScaleFactor": 1, "mobile": false }),
        );
        let opened = page.call("Page.navigate", json!({ "url": url }));
        assert!(opened["errorText"].is_null(), "{url}: {opened}");
        // The answer comes when the page begins to load. Until then there is an empty one.
        wait_until_blocking(format!("{url} is loaded"), PATIENCE, || {
            page.value("location.href !== 'about:blank' && document.readyState === 'complete'")
                == true
        });
        page
    }
}

impl Page<'_> {
    fn call(&self, method: &str, params: Value) -> Value {
        self.browser.call(Some(&self.session), method, params)
    }

    /// The value of an expression of JavaScript.
    pub(crate) fn value(&self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true });
        let value = self.call("Runtime.evaluate", params);
        assert!(value["exceptionDetails"].is_null(), "{expression}: {value}");
        value["result"]["value"].clone()
    }

    pub(crate) fn set_dark(&self) {
        let dark = json!([{ "name": "prefers-color-scheme", "value": "dark" }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": dark }));
    }

    /// Writes the whole page as a PNG.
    pub(crate) fn screenshot(&self, to: &Path) {
        let height = self.value("document.documentElement.offsetHeight");
        let clip = json!({ "x": 0, "y": 0, "width": 1000, "height": height, "scale": 1 });
        let params = json!({ "captureBeyondViewport": true, "clip": clip });
        let png = self.call("Page.captureScreenshot", params);
        let png = BASE64_STANDARD.decode(png["data"].as_str().unwrap());
        fs::write(to, png.unwrap()).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Without its pipe it ends, in order.
        self.commands.take();
        if !thread::panicking() {
            let child = &mut self.child;
            wait_until_blocking("Chromium ends", PATIENCE, || {
                child.try_wait().unwrap().is_some()
            });
        }
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}
