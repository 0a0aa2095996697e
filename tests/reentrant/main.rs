//! Locks inside work that holds them already. Each case runs on the memory store, under paused time, and on a Redis
//! server, in real time.
//!
//! | file | question it answers |
//! |---|---|
//! | `structure.rs` | what is inside, whatever the work is built from? |
//! | `outside.rs` | what is not inside? |
//! | `endings.rs` | who frees the lock, whoever ends first? |
//! | `loss.rs` | who learns that the shared lease is over, and what then? |
//! | `threads.rs` | what if the work moves between threads, and ends on several at once? |
//! | `cost.rs` | what does a nested lock ask of the store, and of its registry? |
//! | `in_vain.rs` | who is told of a lock that is waited for inside itself? |
//! | `shapes.rs` | and whatever is nested in whatever, and dropped whenever? |
//! | `scene.rs` | what stands on the stage? |
#![cfg(feature = "test-util")]

mod cost;
mod endings;
#[path = "../support/hearing.rs"]
mod hearing;
mod in_vain;
mod loss;
mod outside;
mod scene;
mod shapes;
mod structure;
#[cfg(feature = "redis")]
#[path = "../support/mod.rs"]
mod support;
mod threads;

/// Each case on each store. The number of cases is pinned: one that is not listed would not run.
macro_rules! on_each_store {
    ($($file:ident { $($case:ident),+ $(,)? })+) => {
        mod memory {$(
            mod $file {$(
                #[tokio::test(start_paused = true)]
                async fn $case() {
                    let scene = crate::scene::Scene::new(crate::scene::Memory::default()).await;
                    crate::$file::$case(&scene).await;
                    scene.settles().await;
                }
            )+}
        )+}
        #[cfg(feature = "redis")]
        mod redis {$(
            mod $file {$(
                #[tokio::test]
                async fn $case() {
                    crate::support::on_a_steady_machine(async || {
                        let scene = crate::scene::Scene::new(crate::scene::Redis::default()).await;
                        crate::$file::$case(&scene).await;
                        scene.settles().await;
                    })
                    .await;
                }
            )+}
        )+}
        #[test]
        fn every_case_is_listed() {
            $({
                let listed = [$(stringify!($case)),+].len();
                let text = include_str!(concat!(stringify!($file), ".rs"));
                let there = text.matches("\npub(crate) async fn ").count();
                assert_eq!(listed, there, "{}", stringify!($file));
            })+
        }
    };
}

on_each_store! {
    structure {
        three_deep_through_select,
        three_deep_through_join,
        three_deep_through_try_join,
        three_deep_through_boxed_futures,
        three_deep_through_streams,
        three_deep_through_buffer_unordered,
        three_deep_through_futures_unordered,
        every_form_shares,
        a_clone_of_the_registry_is_the_registry,
        what_is_begun_inside_is_inside,
        who_shares_is_not_excluded,
        two_keys_crosswise,
    }
    outside {
        a_spawned_task_waits_as_anyone_does,
        the_tasks_of_a_local_set_wait,
        another_registry_waits,
        another_key_is_another_lock,
        what_is_beside_a_guard_or_a_handle_waits,
        what_is_between_two_items_waits,
        an_outer_lock_that_asks_does_not_help_an_inner_that_does_not,
        nothing_is_inside_of_work_that_ended,
        what_must_be_inside_fails_outside,
        faults_are_told_inside_too,
    }
    endings {
        the_inner_one_goes_first,
        a_guard_that_was_carried_out_goes_last,
        a_guard_that_was_carried_out_may_be_released,
        a_handle_that_was_carried_out_goes_last,
        a_handle_does_not_count,
        a_release_of_one_of_many_is_told_at_once,
        inner_work_dropped_half_way,
        outer_work_dropped_half_way,
        the_inner_one_panics,
        the_outer_one_panics,
        inner_work_carried_out_keeps_the_lock,
        the_outermost_says_how_it_ends,
        a_shared_lease_that_is_detached_is_lost_to_the_others,
    }
    loss {
        a_loss_stops_everything,
        each_combinator_stops_or_runs_on_by_itself,
        a_release_of_one_of_many_tells_the_loss,
        a_release_of_one_of_many_tells_the_shutdown,
        what_is_nested_in_what_was_lost_queues,
        a_shutdown_ends_everything,
        who_carries_it_out_learns_of_the_loss,
    }
    cost {
        others_in_the_queue_are_not_in_the_way,
        who_shares_is_no_waiter,
    }
}
