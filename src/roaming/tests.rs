use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures::channel::oneshot;
use shuttle::future::{block_on, spawn};
use shuttle::thread;
use tokio::runtime::{Builder, Runtime};

use super::*;
use crate::base::model::check;

const MS: Duration = Duration::from_millis(1);

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// A task that counts its rounds: how many there were, and whether it is there.
struct Rounds {
    tasks: Tasks,
    count: Arc<AtomicUsize>,
    is_there: Weak<()>,
}

impl Rounds {
    fn start<F: Future<Output = ()> + Send>(
        host: &Runtime,
        mut round: impl FnMut() -> F + Send + 'static,
    ) -> Self {
        let (tasks, count, there) = (Tasks::default(), Arc::default(), Arc::new(()));
        let is_there = Arc::downgrade(&there);
        let counted: Arc<AtomicUsize> = Arc::clone(&count);
        tasks.spawn(host.handle(), async move {
            let _there = there;
            loop {
                round().await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self {
            tasks,
            count,
            is_there,
        }
    }

    fn sleeping(host: &Runtime) -> Self {
        Self::start(host, || time::sleep(MS))
    }

    /// Runs the runtime until there were some more.
    fn go_on(&self, runtime: &Runtime) {
        let enough = self.count.load(Ordering::Relaxed) + 5;
        runtime.block_on(async {
            while self.count.load(Ordering::Relaxed) < enough {
                tokio::time::sleep(MS).await;
            }
        });
    }

    /// As the thread does that has guests. Returns whether any was lent.
    fn lend(&self, guest: &Runtime) -> bool {
        guest.block_on(async {
            for (task, polls) in self.tasks.wake() {
                task.lend(polls);
            }
        });
        self.tasks.away_since().is_some()
    }
}

#[test]
fn timers_move_with_their_task() {
    let (host, guest) = (runtime(), runtime());
    let rounds = Rounds::sleeping(&host);
    for _ in 0..3 {
        rounds.go_on(&host);
        assert!(rounds.lend(&guest));
        rounds.go_on(&guest);
        rounds.go_on(&host);
        assert!(rounds.tasks.away_since().is_none());
    }
}

/// On the connection that stands. It was made by the guest, and serves the host when the guest's runtime has gone.
#[cfg(any(feature = "redis", feature = "postgres"))]
#[test]
fn sockets_move_with_their_task() {
    use std::io::{Read, Write};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let echo = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() {
            stream.write_all(&byte).unwrap();
        }
    });
    let socket = Arc::new(tokio::sync::Mutex::new(None));
    let (host, guest) = (runtime(), runtime());
    let rounds = Rounds::start(&host, move || {
        let socket = socket.clone();
        async move {
            let mut socket = socket.lock().await;
            if socket.is_none() {
                let connected = tokio::net::TcpStream::connect(address).await.unwrap();
                *socket = Some(stream::Roaming::new(connected));
            }
            let socket = socket.as_mut().unwrap();
            socket.write_all(b"x").await.unwrap();
            assert_eq!(socket.read_u8().await.unwrap(), b'x');
        }
    });
    assert!(rounds.lend(&guest));
    rounds.go_on(&guest);
    rounds.go_on(&host);
    assert!(rounds.lend(&guest));
    rounds.go_on(&guest);
    drop(guest);
    rounds.go_on(&host);
    drop(host);
    echo.join().unwrap();
}

/// The host is busy for so long that the time is over. What has come meanwhile counts for the guest, and what comes while
/// the guest has it counts for the host.
#[cfg(any(feature = "redis", feature = "postgres"))]
#[test]
fn what_has_come_counts_though_its_time_is_over() {
    use std::io::{Read, Write};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const WITHIN: Duration = Duration::from_millis(200);
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let (host, guest) = (runtime(), runtime());
    let (asks, mut asked) = tokio::sync::mpsc::unbounded_channel();
    let counted = Arc::new(AtomicUsize::new(0));
    let tasks = Tasks::default();
    let answers = counted.clone();
    tasks.spawn(host.handle(), async move {
        let socket = tokio::net::TcpStream::from_std(socket).unwrap();
        let mut socket = stream::Roaming::new(socket);
        loop {
            socket.write_all(b"x").await.unwrap();
            asks.send(Instant::now()).unwrap();
            let answer = time::timeout(WITHIN, socket.read_u8()).await;
            assert_eq!(answer.expect("it has come").unwrap(), b'x');
            answers.fetch_add(1, Ordering::Relaxed);
        }
    });
    let mut byte = [0];
    // Runs the runtime until the next question, and answers it when its time is over.
    let mut answer_late_to = |runtime: &Runtime| {
        let begun: Instant = runtime.block_on(async {
            // It knows what time it is.
            tokio::time::sleep(MS).await;
            asked.recv().await.unwrap()
        });
        server.read_exact(&mut byte).unwrap();
        server.write_all(&byte).unwrap();
        std::thread::sleep((begun + 2 * WITHIN).saturating_duration_since(Instant::now()));
    };
    for round in 1..=2 {
        answer_late_to(&host);
        guest.block_on(async {
            let woken = tasks.wake();
            tokio::time::sleep(MS).await;
            for (task, polls) in woken {
                task.lend(polls);
            }
        });
        answer_late_to(&guest);
        assert_eq!(counted.load(Ordering::Relaxed), 2 * round - 1);
    }
}

#[test]
fn a_host_that_polls_keeps_its_task() {
    let (host, guest) = (runtime(), runtime());
    let rounds = Rounds::sleeping(&host);
    rounds.go_on(&host);
    let woken = rounds.tasks.wake();
    rounds.go_on(&host);
    guest.block_on(async {
        for (task, polls) in woken {
            task.lend(polls);
        }
    });
    assert!(rounds.tasks.away_since().is_none());
}

#[test]
fn what_is_given_up_is_not_lent_before_its_host_was_back() {
    let (host, guest) = (runtime(), runtime());
    let rounds = Rounds::sleeping(&host);
    rounds.go_on(&host);
    assert!(rounds.lend(&guest));
    rounds.go_on(&guest);
    rounds.tasks.leave();
    assert!(!rounds.lend(&guest));
    rounds.go_on(&host);
    assert!(rounds.lend(&guest));
    rounds.go_on(&guest);
}

#[test]
fn a_task_ends_with_its_host_also_while_a_guest_has_it() {
    let (host, guest) = (runtime(), runtime());
    let rounds = Rounds::sleeping(&host);
    assert!(rounds.lend(&guest));
    rounds.go_on(&guest);
    drop(host);
    assert_eq!(rounds.is_there.strong_count(), 0);
    assert!(rounds.tasks.away_since().is_none());
    assert!(!rounds.lend(&guest), "there is nothing to lend");
}

/// Whatever a task starts belongs to its host, and goes on at once.
#[test]
fn what_a_guest_starts_belongs_to_the_host() {
    let (host, guest) = (runtime(), runtime());
    let (tasks, started) = (Arc::new(Tasks::default()), Arc::new(AtomicUsize::new(0)));
    let inner = (tasks.clone(), started.clone());
    let id = host.handle().id();
    tasks.spawn(host.handle(), async move {
        let (tasks, started) = inner;
        let runtime = runtime_of_host();
        assert_eq!(runtime.id(), id);
        tasks.spawn(&runtime, async move {
            time::sleep(MS).await;
            started.fetch_add(1, Ordering::Relaxed);
        });
    });
    guest.block_on(async {
        for (task, polls) in tasks.wake() {
            task.lend(polls);
        }
        while started.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(MS).await;
        }
    });
}

fn runtime_of_host() -> Handle {
    super::runtime().expect("a task has one")
}

/// Twice: the heartbeat lends a task to a guest, and takes it away from it again. The task is polled when what it waits
/// for has come, whoever has it then, and the guests end.
///
/// Finds: the heartbeat reads how often the host has polled after it woke it (the host slept again before the guest came,
/// and nobody wakes it when the guest has gone), or a guest polls what was taken away from it.
#[test]
fn model_a_task_sleeps_through_nothing_while_it_roams() {
    let runtime = runtime();
    let handle = runtime.handle().clone();
    check(move || {
        let tasks = Arc::new(Tasks::default());
        let (first, one) = oneshot::channel();
        let (second, two) = oneshot::channel();
        let task = tasks.add(&handle, async move {
            one.await.unwrap();
            two.await.unwrap();
        });
        let host = spawn(Host(task));
        let heart = thread::spawn(move || {
            let mut guests = Vec::new();
            for _ in 0..2 {
                for (task, polls) in tasks.wake() {
                    guests.extend(task.borrow(polls).map(spawn));
                }
                tasks.leave();
            }
            for guest in guests {
                block_on(guest).unwrap();
            }
        });
        first.send(()).unwrap();
        crate::base::model::step();
        second.send(()).unwrap();
        block_on(host).unwrap();
        heart.join().unwrap();
    });
}

/// Finds: a host that is dropped does not wake the guest.
#[test]
fn model_a_guest_ends_with_the_host() {
    let runtime = runtime();
    let handle = runtime.handle().clone();
    check(move || {
        let tasks = Tasks::default();
        let host = Host(tasks.add(&handle, std::future::pending()));
        let guests = tasks.wake().into_iter();
        let guests: Vec<_> = guests
            .filter_map(|(task, polls)| task.borrow(polls))
            .collect();
        let guests: Vec<_> = guests.into_iter().map(spawn).collect();
        let end = thread::spawn(|| drop(host));
        for guest in guests {
            block_on(guest).unwrap();
        }
        end.join().unwrap();
    });
}
