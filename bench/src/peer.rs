//! One library in one role, as the programs in `peers/` have it in other languages: see `peers/README.md`.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader, Lines, Stdin};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::clock::{self, MILLISECOND, Nanos};
use crate::libs::{
    Advisory, AsyncRedisLock, Bare, Library, Lockstream, Outcome, Passes, Rslock, told,
};

type Hear = Lines<BufReader<Stdin>>;

/// Prints one line of JSON: the word, when it was said, and more.
fn say(word: &str, more: Value) {
    let mut line = json!({ "say": word, "at": clock::now() });
    if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
        line.extend(more);
    }
    println!("{line}");
}

struct Args(HashMap<String, String>);

impl Args {
    fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn number<T: FromStr + Default>(&self, name: &str) -> T {
        self.text(name).parse().unwrap_or_default()
    }

    fn millis(&self, name: &str) -> Duration {
        Duration::from_millis(self.number(name))
    }

    fn key(&self, task: usize) -> String {
        match self.text("hot") {
            "1" => "hot".to_owned(),
            _ => format!("free-{}-{task}", self.text("name")),
        }
    }
}

/// The whole program.
pub(crate) async fn main(words: Vec<String>) {
    let [lib, role, port, args @ ..] = &words[..] else {
        return say(
            "failed",
            json!({ "error": "usage: peer LIB ROLE PORT NAME=VALUE…" }),
        );
    };
    let args = args.iter().filter_map(|arg| arg.split_once('='));
    let args = Args(
        args.map(|(name, value)| (name.into(), value.into()))
            .collect(),
    );
    let url = match args.text("url") {
        "" => format!("redis://127.0.0.1:{port}/"),
        url => url.to_owned(),
    };
    let done = match &**lib {
        "lockstream" | "lockstream-postgres" => play::<Lockstream>(role, &url, args).await,
        "bare" => play::<Bare>(role, &url, args).await,
        "rslock" => play::<Rslock>(role, &url, args).await,
        "async-redis-lock" => play::<AsyncRedisLock>(role, &url, args).await,
        "sqlx-advisory" => play::<Advisory>(role, &url, args).await,
        _ => Err(format!("no such library: {lib}")),
    };
    if let Err(error) = done {
        say("failed", json!({ "error": error }));
    }
}

async fn play<L: Library>(role: &str, url: &str, args: Args) -> Outcome<()> {
    let callers = 1 + args.number::<usize>("tasks").max(args.number("keys"));
    let lib = L::connect(url, Passes::Default, callers).await?;
    let lib = Arc::new(lib.lasting(args.millis("ttl")));
    let hear = BufReader::new(tokio::io::stdin()).lines();
    match role {
        "run" => run(lib, hear, args).await,
        "hold" => hold(&*lib, hear, args).await,
        "work" => work(&*lib, args).await,
        "wait" => wait(lib, hear, args).await,
        _ => Err(format!("no such role: {role}")),
    }
}

/// What one task does.
#[derive(Default)]
struct Task {
    /// Asked, held, about to release.
    turns: Mutex<Vec<[Nanos; 3]>>,
    /// Or 0. It is not begun anew when it was refused.
    waiting_since: AtomicU64,
    failures: AtomicU64,
    error: Mutex<String>,
}

/// Many tasks, each of which takes and releases a lock again and again.
async fn run<L: Library>(lib: Arc<L>, mut hear: Hear, args: Args) -> Outcome<()> {
    let (_, cold) = turns(&lib, &args, args.millis("warm")).await;
    say("warm", json!({ "hung": cold }));
    let _ = hear.next_line().await;
    let (begin, used) = (clock::now(), clock::processor_time());
    let (tasks, hung) = turns(&lib, &args, args.millis("millis")).await;
    let (end, used) = (clock::now(), clock::processor_time() - used);
    let mut journal = String::new();
    let (mut failures, mut error) = (0, String::new());
    for (number, task) in tasks.iter().enumerate() {
        let key = args.key(number);
        for [asked, held, left] in task.turns.lock().expect("no panic").iter() {
            let _ = writeln!(journal, "{key} {number} {asked} {held} {left}");
        }
        // It waits still, or was refused when it asked last.
        let since = task.waiting_since.load(Ordering::Relaxed);
        if since > 0 {
            let _ = writeln!(journal, "{key} {number} {since} 0 0");
        }
        failures += task.failures.load(Ordering::Relaxed);
        let its = task.error.lock().expect("no panic");
        if !its.is_empty() {
            error.clone_from(&its);
        }
    }
    fs::write(args.text("journal"), journal).map_err(told("the journal"))?;
    let cpu = used.as_nanos() as u64;
    say(
        "done",
        json!({ "begin": begin, "end": end, "cpu": cpu, "hung": hung, "failures": failures, "error": error }),
    );
    Ok(())
}

/// Gives what they did, and how many hang.
async fn turns<L: Library>(lib: &Arc<L>, args: &Args, time: Duration) -> (Vec<Arc<Task>>, usize) {
    let end = clock::now() + time.as_nanos() as u64;
    let inside = args.number::<u64>("inside");
    let mut running = JoinSet::new();
    let tasks: Vec<_> = (0..args.number("tasks"))
        .map(|number| {
            let (lib, key, task) = (Arc::clone(lib), args.key(number), Arc::new(Task::default()));
            let me = Arc::clone(&task);
            running.spawn(async move {
                let lock = lib.lock(&key);
                while clock::now() < end {
                    let asked = match me.waiting_since.load(Ordering::Relaxed) {
                        0 => clock::now(),
                        since => since,
                    };
                    me.waiting_since.store(asked, Ordering::Relaxed);
                    let done = async {
                        let held = lib.acquire(&lock).await?;
                        let at = clock::now();
                        if inside > 0 {
                            sleep(Duration::from_millis(inside)).await;
                        }
                        me.waiting_since.store(0, Ordering::Relaxed);
                        let turn = [asked, at, clock::now()];
                        me.turns.lock().expect("no panic").push(turn);
                        lib.release(held).await
                    };
                    if let Err(error) = done.await {
                        me.failures.fetch_add(1, Ordering::Relaxed);
                        *me.error.lock().expect("no panic") = error;
                        sleep(Duration::from_millis(10)).await;
                    }
                }
            });
            task
        })
        .collect();
    // Whoever has no lock long after the end hangs.
    let all = async { while running.join_next().await.is_some() {} };
    let _ = timeout(time + args.millis("patience"), all).await;
    let hung = running.len();
    running.detach_all();
    (tasks, hung)
}

/// Takes some keys, and releases and takes them again as it is told.
async fn hold<L: Library>(lib: &L, mut hear: Hear, args: Args) -> Outcome<()> {
    let keys = (0..args.number::<usize>("keys")).map(|n| format!("{}{n}", args.text("key")));
    let locks: Vec<_> = keys.map(|key| lib.lock(&key)).collect();
    let mut held = Vec::new();
    let mut order = "lock".to_owned();
    loop {
        if order == "lock" {
            for lock in &locks {
                held.push(lib.acquire(lock).await?);
            }
            say("held", json!({}));
        } else {
            say("releasing", json!({}));
            for one in held.drain(..) {
                lib.release(one).await?;
            }
        }
        match hear.next_line().await {
            Ok(Some(line)) => order = line,
            _ => return Ok(()),
        }
    }
}

/// Works for so many milliseconds under a lock, one at a time, unless the library says that it is lost. Meanwhile another
/// task of this process may compute.
async fn work<L: Library>(lib: &L, args: Args) -> Outcome<()> {
    let lock = lib.lock(&format!("{}0", args.text("key")));
    let held = loop {
        match lib.acquire(&lock).await {
            Ok(held) => break held,
            Err(_) => sleep(Duration::from_millis(100)).await,
        }
    };
    say("held", json!({}));
    let compute: u64 = args.number("compute");
    if compute > 0 {
        let end = clock::now() + compute * MILLISECOND;
        tokio::spawn(async move { while clock::now() < end {} });
    }
    let (mut last, mut worked, mut gaps) = (clock::now(), 0, Vec::new());
    while worked < args.number::<u64>("millis") * MILLISECOND && !L::is_lost(&held) {
        let at = clock::now();
        // When its process was stopped, or had no processor, it did not work.
        if at - last > 100 * MILLISECOND {
            gaps.push([last, at]);
        }
        worked += (at - last).min(5 * MILLISECOND);
        last = at;
        sleep(Duration::from_millis(1)).await;
    }
    let told = L::is_lost(&held);
    say("ended", json!({ "last": last, "gaps": gaps, "told": told }));
    // It may be refused, as it should be if it is lost.
    let _ = timeout(Duration::from_secs(5), lib.release(held)).await;
    Ok(())
}

/// Many tasks wait for one key.
async fn wait<L: Library>(lib: Arc<L>, mut hear: Hear, args: Args) -> Outcome<()> {
    for _ in 0..args.number::<usize>("tasks") {
        let lib = Arc::clone(&lib);
        let lock = lib.lock(&format!("{}0", args.text("key")));
        tokio::spawn(async move {
            let done = async {
                let held = lib.acquire(&lock).await?;
                lib.release(held).await
            };
            if let Err(error) = done.await {
                say("gave-up", json!({ "error": error }));
            }
        });
    }
    say("waiting", json!({}));
    let _ = hear.next_line().await;
    Ok(())
}
