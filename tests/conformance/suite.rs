//! The table of cases, and what is done around each.

#[cfg(any(feature = "redis", feature = "postgres"))]
use crate::steady::on_a_steady_machine;
use crate::steady::on_a_steady_machine_blocking;
use crate::world::{World, empty, ms};

/// Under paused time a case that hangs has nothing left to wait for but this; in real time it is long enough.
const HANGS: std::time::Duration = ms(240_000);

/// Runs a case on a store of its own. When all of it is gone nothing may be left in the store, and its registries must
/// have told of everything, in order.
pub(crate) async fn run<W: World>(case: impl AsyncFn(&mut W)) {
    let mut world = W::new();
    let ended = tokio::time::timeout(HANGS, case(&mut world)).await;
    ended.unwrap_or_else(|_| panic!("not done within {HANGS:?}"));
    assert_nothing_left(&world).await;
    world.watch().all().await;
}

/// [`run`] in real time.
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) async fn run_in_real_time<W: World>(case: impl AsyncFn(&mut W)) {
    on_a_steady_machine(async || run(&case).await).await;
}

/// [`run`] for cases that make runtimes of their own, in real time on every store.
pub(crate) fn run_outside<W: World>(case: fn(&dyn World)) {
    on_a_steady_machine_blocking(|| {
        let world = W::new();
        case(&world);
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
            .block_on(async {
                assert_nothing_left(&world).await;
                world.watch().all_without_runtime().await;
            });
    });
}

async fn assert_nothing_left(world: &dyn World) {
    world.set_offline(false);
    world.set_latency(ms(0));
    empty(world).await;
}

/// Makes a test of every case on every store, by the name `store::module::case`; of those that are marked `#[core]` on
/// every kind of server, with the least rights, and on a PostgreSQL server that publishes all tables.
#[macro_export]
macro_rules! suite {
    ($($module:ident: $kind:ident { $($(#[$mark:ident])? $case:ident),* $(,)? })*) => {
        /// On the memory store.
        mod on_memory {
            $(mod $module {
                use $crate::memory::Memory;
                $($crate::case! { $kind Memory, $module, $case, (start_paused = true) })*
            })*
        }

        /// On a Redis server.
        #[cfg(feature = "redis")]
        mod on_redis {
            $(mod $module {
                use $crate::redis::Redis;
                $($crate::case! {
                    $kind Redis, $module, $case, (flavor = "multi_thread", worker_threads = 2)
                })*
            })*
        }

        /// On a PostgreSQL server.
        #[cfg(feature = "postgres")]
        mod on_postgres {
            $(mod $module {
                use $crate::postgres::Postgres;
                $($crate::case! {
                    $kind Postgres, $module, $case, (flavor = "multi_thread", worker_threads = 2)
                })*
            })*
        }

        #[cfg(feature = "redis")]
        $crate::core! { on_valkey, redis::OnValkey, $($module: $kind { $([$($mark)?] $case)* })* }
        #[cfg(feature = "redis")]
        $crate::core! { on_redis_8, redis::OnRedis8, $($module: $kind { $([$($mark)?] $case)* })* }
        #[cfg(feature = "redis")]
        $crate::core! { on_redis_6, redis::OnRedis6, $($module: $kind { $([$($mark)?] $case)* })* }
        #[cfg(feature = "cluster")]
        $crate::core! { on_cluster, redis::OnCluster, $($module: $kind { $([$($mark)?] $case)* })* }
        #[cfg(feature = "redis")]
        $crate::core! {
            with_replicas, redis::OnReplicas, $($module: $kind { $([$($mark)?] $case)* })*
        }
        #[cfg(feature = "redis")]
        $crate::core! {
            with_least_rights, redis::WithLeastRights, $($module: $kind { $([$($mark)?] $case)* })*
        }

        #[cfg(feature = "postgres")]
        $crate::core! {
            with_a_publication, postgres::Published, $($module: $kind { $([$($mark)?] $case)* })*
        }

        /// A suite that lost its cases, or its second store, must not pass in silence.
        #[test]
        fn no_case_is_missing() {
            const CASES: &[&str] = &[$($(concat!(stringify!($module), "::", stringify!($case))),*),*];
            assert_eq!(CASES.len(), $crate::CASES);
            let stores = [
                ("on_memory", true),
                ("on_redis", cfg!(feature = "redis")),
                ("on_postgres", cfg!(feature = "postgres")),
            ];
            let tests = $crate::suite::tests_of_this_binary();
            for (store, _) in stores.into_iter().filter(|(_, is_tested)| *is_tested) {
                for case in CASES {
                    let test = format!("{store}::{case}: test");
                    assert!(tests.contains(&test), "no test {test}");
                }
            }
            #[cfg(feature = "redis")]
            for server in ["on_valkey", "on_redis_8", "on_redis_6", "with_replicas", "with_least_rights"] {
                assert_eq!($crate::suite::count_in(&tests, server), $crate::CORE, "{server}");
            }
            #[cfg(feature = "cluster")]
            assert_eq!($crate::suite::count_in(&tests, "on_cluster"), $crate::CORE);
            #[cfg(feature = "postgres")]
            assert_eq!($crate::suite::count_in(&tests, "with_a_publication"), $crate::CORE);
        }
    };
}

/// Makes a test of every case that is marked, on one kind of server.
#[cfg(any(feature = "redis", feature = "postgres"))]
#[macro_export]
macro_rules! core {
    ($name:ident, $home:ident::$world:ident, $($module:ident: $kind:ident { $([$($mark:ident)?] $case:ident)* })*) => {
        mod $name {
            $(mod $module {
                #[allow(unused_imports, reason = "a module may have no case of the core")]
                use $crate::$home::$world;
                $($crate::core_case! { [$($mark)?] $kind $world, $module, $case })*
            })*
        }
    };
}

/// One test of one case, if it is marked.
#[cfg(any(feature = "redis", feature = "postgres"))]
#[macro_export]
macro_rules! core_case {
    ([] $kind:ident $world:ident, $module:ident, $case:ident) => {};
    ([core] $kind:ident $world:ident, $module:ident, $case:ident) => {
        $crate::case! {
            $kind $world, $module, $case, (flavor = "multi_thread", worker_threads = 2)
        }
    };
}

/// Makes a test of every case that needs a server; of those that are marked `#[core]` on every kind of server.
#[cfg(feature = "redis")]
#[macro_export]
macro_rules! redis_alone {
    ($($(#[$mark:ident])? $case:ident),* $(,)?) => {
        mod on_redis_alone {
            use $crate::redis::Redis;
            $($crate::case! {
                in_runtime Redis, redis_alone, $case, (flavor = "multi_thread", worker_threads = 2)
            })*

            #[test]
            fn no_case_is_missing() {
                let tests = $crate::suite::tests_of_this_binary();
                let cases = [$(stringify!($case)),*].map(|case| format!("on_redis_alone::{case}: test"));
                assert_eq!(cases.len(), $crate::CASES_OF_REDIS_ALONE);
                assert!(cases.iter().all(|case| tests.contains(case)));
                for server in ["on_valkey_alone", "on_redis_8_alone", "on_redis_6_alone", "with_least_rights_alone"] {
                    let cases = $crate::suite::count_in(&tests, server);
                    assert_eq!(cases, $crate::CORE_OF_REDIS_ALONE, "{server}");
                }
            }
        }

        $crate::core! { on_valkey_alone, redis::OnValkey, redis_alone: in_runtime { $([$($mark)?] $case)* } }
        $crate::core! { on_redis_8_alone, redis::OnRedis8, redis_alone: in_runtime { $([$($mark)?] $case)* } }
        $crate::core! { on_redis_6_alone, redis::OnRedis6, redis_alone: in_runtime { $([$($mark)?] $case)* } }
        $crate::core! {
            with_least_rights_alone, redis::WithLeastRights, redis_alone: in_runtime {
                $([$($mark)?] $case)*
            }
        }
    };
}

/// One test of one case.
#[macro_export]
macro_rules! case {
    (without_runtime $world:ident, $module:ident, $case:ident, $runtime:tt) => {
        #[test]
        fn $case() {
            $crate::suite::run_outside::<$world>($crate::$module::$case);
        }
    };
    (in_runtime $world:ident, $module:ident, $case:ident, (start_paused = true)) => {
        #[tokio::test(start_paused = true)]
        async fn $case() {
            $crate::suite::run(async |world: &mut $world| $crate::$module::$case(world).await).await;
        }
    };
    (in_runtime $world:ident, $module:ident, $case:ident, ($($runtime:tt)*)) => {
        #[tokio::test($($runtime)*)]
        async fn $case() {
            $crate::suite::run_in_real_time(async |world: &mut $world| {
                $crate::$module::$case(world).await;
            })
            .await;
        }
    };
}

/// What the test runner says that it would run.
pub(crate) fn tests_of_this_binary() -> Vec<String> {
    let this = std::env::current_exe().unwrap();
    let listed = std::process::Command::new(this)
        .arg("--list")
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    listed.lines().map(str::to_owned).collect()
}

/// How many of the tests are in the module.
#[cfg(any(feature = "redis", feature = "postgres"))]
pub(crate) fn count_in(tests: &[String], module: &str) -> usize {
    let is_in = |test: &&String| {
        test.strip_prefix(module)
            .is_some_and(|rest| rest.starts_with("::"))
    };
    tests.iter().filter(is_in).count()
}
