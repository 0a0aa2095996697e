//! `cargo bench -p lockstream-bench --bench hot_path`: how many instructions the hot paths take, as
//! valgrind counts them. README.md says what it needs, and how to read it.
//!
//! Each count covers [`STEPS`] steps, so the last three digits of a count are to be cut off.
#![allow(missing_docs, reason = "the macros make items that nobody reads")]

use std::future::Future;
use std::hint::black_box;

use gungraun::{library_benchmark, library_benchmark_group, main};
use lockstream::{Lock, LockRegistry, store::MemoryStore};
use tokio::runtime::Runtime;

/// How many steps a count covers.
const STEPS: usize = 1_000;

/// A runtime on this thread alone, and a registry in memory that has had its first lock.
struct Bench {
    runtime: Runtime,
    registry: LockRegistry,
}

impl Bench {
    fn new(local_passes: u32) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime of one thread");
        let registry = LockRegistry::builder(MemoryStore::new())
            .local_passes(local_passes)
            // Valgrind is slow: 20 ms would be over after a few passes.
            .local_span(std::time::Duration::from_secs(3_600))
            .build()
            .expect("the settings are valid");
        let bench = Self { runtime, registry };
        bench.run(take_turns(bench.registry.obtain("warm"), 3));
        bench
    }

    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }
}

/// Acquires and releases it, so many times.
async fn take_turns(lock: Lock, times: usize) {
    for _ in 0..times {
        let lease = black_box(lock.lease().await.expect("the lock is to be had"));
        lease.release().await.expect("it is held");
    }
}

/// As few tenures as there can be: 63 passes in each.
fn most_passes() -> Bench {
    Bench::new(63)
}

/// 16 in each, which is four times as many as are settled: nobody else wants the key.
fn few_passes() -> Bench {
    Bench::new(4)
}

fn default_passes() -> Bench {
    Bench::new(16)
}

// An uncontended pair: acquire and release.
#[library_benchmark]
#[bench::memory(default_passes())]
fn pair(bench: Bench) -> Bench {
    bench.run(take_turns(bench.registry.obtain("free"), STEPS));
    bench
}

// Two tasks on one key: a step is one turn of one of them, from the other's release to its own.
#[library_benchmark]
#[bench::of_63(most_passes())]
#[bench::of_16(few_passes())]
fn pass(bench: Bench) -> Bench {
    bench.run(async {
        let lock = bench.registry.obtain("hot");
        let held = lock.lease().await.expect("the lock is to be had");
        let tasks = [(); 2].map(|()| tokio::spawn(take_turns(lock.clone(), STEPS / 2)));
        // Until both wait. From here on whoever releases enters the queue again before the other
        // runs, so that it takes turns with it: else each would have all of its own in a row.
        tokio::task::yield_now().await;
        held.release().await.expect("it is held");
        for task in tasks {
            task.await.expect("it takes its turns");
        }
    });
    bench
}

library_benchmark_group!(name = hot_path, benchmarks = [pair, pass]);

main!(library_benchmark_groups = hot_path);
