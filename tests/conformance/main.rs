//! One suite for every store: each case runs on the memory store, under paused time, and on a Redis server, in real
//! time, and on a PostgreSQL server; those that are marked as the core also on Valkey 9.1, Redis 8.2 and Redis 6.2, where a replica must have it, on a
//! cluster, as a user with the least rights, and on a PostgreSQL server that publishes all tables. A case sees its store as a [`World`](world::World), and every registry made there as a process.
//!
//! | file | question it answers |
//! |---|---|
//! | `waiting.rs` | what do `acquire*` and `lease*` say of a lock that is free, or busy? |
//! | `work.rs`, `streams.rs` | what becomes of a future or a stream under a lock? |
//! | `renewal.rs` | who keeps a lease for longer than its ttl? |
//! | `leadership.rs` | who leads, and what runs only while leading? |
//! | `ends.rs` | how does a lease end, but by a release? |
//! | `loss.rs` | who learns that a lease is over, and when? |
//! | `told.rs` | who has a busy lock, and why was a lease lost? |
//! | `outage.rs` | what if the store is away, or slow? |
//! | `turns.rs` | who is next? |
//! | `shutdown.rs` | what does the end of a registry leave? |
//! | `invalid.rs` | what is refused before anything is sent? |
//! | `scenarios.rs` | does it do what its model does? (Its cases are with the events that they bring.) |
//! | `events.rs` | what does a registry tell of itself? |
//! | `exclusion.rs` | is there one holder at a time, and do tokens grow? |
//! | `leftovers.rs` | what is left when nobody wants anything? |
//! | `handles.rs` | whose is a lock? |
//! | `runtimes.rs` | what if runtimes come and go? |
//! | `busy.rs` | what if a task computes, or blocks? |
//! | `redis_alone.rs` | what does only a server show? |
#![cfg(feature = "test-util")]

mod busy;
#[cfg(feature = "cluster")]
mod cluster;
mod ends;
mod events;
mod exclusion;
mod groups;
mod handles;
#[path = "../support/hearing.rs"]
mod hearing;
mod invalid;
mod leadership;
mod leftovers;
mod looking;
mod loss;
mod memory;
mod modes;
mod outage;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
mod redis_alone;
mod renewal;
#[cfg(feature = "redis")]
mod replicas;
mod runtimes;
mod scenarios;
mod shutdown;
#[cfg(not(any(feature = "redis", feature = "postgres")))]
#[path = "../support/steady.rs"]
#[allow(unreachable_pub, dead_code, reason = "it stands by itself here")]
mod steady;
mod streams;
mod suite;
#[cfg(any(feature = "redis", feature = "postgres"))]
#[path = "../support/mod.rs"]
mod support;
#[cfg(any(feature = "redis", feature = "postgres"))]
use support as steady;
mod told;
mod turns;
mod waiting;
mod watch;
mod work;
mod world;

/// How many cases there are.
const CASES: usize = 255;

/// How many more there are that need a server.
#[cfg(feature = "redis")]
const CASES_OF_REDIS_ALONE: usize = 18;

/// How many of each are the core: what may go wrong on one server and not on another.
#[cfg(any(feature = "redis", feature = "postgres"))]
const CORE: usize = 69;
#[cfg(feature = "redis")]
const CORE_OF_REDIS_ALONE: usize = 12;

suite! {
    waiting: in_runtime {
        #[core]
        a_free_lock_is_had_at_once,
        a_busy_lock_is_false_when_the_wait_is_over,
        a_wait_of_nothing_asks_once,
        #[core]
        a_waiter_gets_what_is_released,
        a_release_that_crosses_an_arrival_is_not_missed,
        waits_end_each_in_its_own_time,
        a_waiter_that_gave_up_leaves_nothing_in_the_way,
        #[core]
        what_is_released_when_the_only_waiter_has_gone_is_free,
        #[core]
        what_was_granted_to_a_dropped_waiter_is_given_back,
        #[core]
        a_crashed_holders_key_is_had_when_its_ttl_is_over,
        a_waiter_that_looks_in_vain_goes_on_waiting,
        a_future_polled_now_and_then_keeps_its_place,
        a_future_that_is_not_polled_has_taken_nothing,
        other_keys_and_prefixes_are_other_locks,
        no_two_prefixes_share_a_lock,
        #[core]
        a_name_is_seen_and_need_not_be_unique,
        #[core]
        nothing_is_left_of_a_wait,
        done_futures_say_so,
    }
    work: in_runtime {
        #[core]
        work_runs_under_the_lock,
        work_is_not_polled_while_others_hold_the_lock,
        work_starts_when_the_lock_is_free,
        work_that_errs_releases,
        an_inner_locks_busy_is_not_skipped,
        #[core]
        work_dropped_at_any_await_releases,
        a_combinator_dropped_around_its_work_leaves_nothing,
        work_that_panics_releases,
        #[core]
        work_that_wants_its_token_gets_it,
        nested_locks_take_the_outermost_first,
        done_combinators_say_so,
        the_works_own_wakers_reach_it,
    }
    streams: in_runtime {
        #[core]
        a_stream_is_held_to_its_end_not_to_its_first_item,
        a_stream_dropped_half_way_releases,
        a_stream_is_not_polled_while_others_hold_the_lock,
        a_stream_starts_when_the_lock_is_free,
        a_streams_own_errors_do_not_end_it,
        back_pressure_is_the_streams_own,
        a_stream_that_is_slow_is_waited_for_under_the_lease,
        done_streams_say_so,
    }
    modes: in_runtime {
        #[core]
        readers_share_a_key_and_exclude_writers,
        #[core]
        permits_are_held_up_to_their_limit,
        #[core]
        permits_of_two_limits_count_each_other,
        a_permit_of_another_limit_comes_when_enough_have_run_out,
        #[core]
        shared_tokens_grow,
        #[core]
        nobody_overtakes_a_writer,
        #[core]
        a_writer_that_gives_up_wakes_the_readers_behind_it,
        #[core]
        very_many_readers_behind_a_writer_are_all_let_in,
        #[core]
        a_permit_that_is_released_goes_to_the_next,
        shared_leases_are_renewed_and_lost_each_by_itself,
        permits_that_are_left_behind_run_out,
        shared_waiters_that_are_dropped_leave_nothing,
        a_shared_waiter_gives_up_in_its_time,
        #[core]
        modes_are_seen_in_inspections_snapshots_and_events,
        settings_that_do_not_fit_are_refused,
        an_exclusive_lock_inside_a_shared_one_is_refused,
        a_shared_lock_shares_no_lease_inside,
        #[core]
        permits_and_readers_go_from_process_to_process,
        #[core]
        a_permit_is_adopted_as_it_is,
        a_shutdown_releases_shared_leases_and_refuses_shared_waiters,
        shared_waiters_survive_an_outage,
        streams_run_under_shared_locks,
    }
    groups: in_runtime {
        #[core]
        a_group_is_one_lease_of_all_its_keys,
        everything_that_takes_a_lock_takes_a_group,
        #[core]
        a_group_gets_all_keys_or_none,
        the_keys_share_one_wait,
        #[core]
        groups_never_wait_for_each_other_in_a_circle,
        #[core]
        a_key_that_is_lost_while_the_last_is_waited_for_is_taken_again,
        the_loss_of_one_key_is_the_loss_of_all,
        the_first_loss_releases_the_rest_by_itself,
        a_loss_leaves_what_is_to_be_kept,
        a_group_that_is_dropped_leaves_nothing,
        #[core]
        a_group_that_nobody_polls_holds_nothing,
        a_fixed_lease_of_a_group_begins_when_it_is_complete,
        groups_that_cannot_be_are_refused,
        a_group_shares_no_lease_inside,
    }
    renewal: in_runtime {
        #[core]
        a_renewed_lease_is_held_for_three_ttls_and_still_ours,
        work_longer_than_its_ttl_keeps_its_lock,
        at_most_so_many_renewals,
        #[core]
        a_renewal_finds_the_loss,
        released_leases_are_not_renewed,
    }
    busy: without_runtime {
        #[core]
        work_that_computes_keeps_every_lease,
        a_busy_runtime_is_told_of_once_each_time,
        #[core]
        an_outage_while_the_runtime_is_busy_is_outlasted,
        a_loss_while_the_runtime_is_busy_is_seen_there,
        a_fixed_lease_ends_while_the_runtime_is_busy,
        callers_of_another_runtime_go_on_while_this_one_is_busy,
        a_runtime_that_stays_busy_loses_its_leases_in_the_end,
        without_a_heartbeat_a_busy_runtime_loses_its_leases,
        a_turn_that_comes_while_the_runtime_is_busy_goes_on,
        a_runtime_that_ends_while_it_is_busy_is_left,
    }
    ends: in_runtime {
        #[core]
        a_kept_key_stays_until_its_ttl_is_over,
        a_key_that_is_kept_for_a_time_is_free_after_it,
        a_key_is_kept_for_a_year,
        work_that_lasts_longer_than_its_key_is_kept_releases_it,
        how_long_a_key_is_kept_is_not_how_long_a_lease_lasts,
        who_waits_gets_a_kept_key_when_its_time_is_over,
        only_work_that_succeeds_keeps_its_key,
        nested_locks_keep_the_key_only_for_work_that_succeeds,
        each_key_of_a_group_is_kept,
        who_waits_here_gets_a_kept_key_no_sooner,
        the_end_of_a_kept_lease_waits_for_nothing,
        what_was_to_stay_can_be_released,
        nothing_prolongs_what_is_kept,
        a_shutdown_leaves_what_is_to_stay,
        #[core]
        a_lease_is_extended,
        a_handle_extends_what_it_holds,
        what_cannot_be_extended_says_so,
        an_extension_outlasts_an_outage,
        #[core]
        a_lease_goes_from_process_to_process,
        a_registry_adopts_what_it_left,
        what_is_not_there_cannot_be_adopted,
        a_lost_lease_is_not_detached,
        #[core]
        of_many_that_adopt_one_is_served,
        who_waits_here_waits_on_behind_an_adoption,
        an_adopted_lease_is_renewed,
        an_outage_does_not_lose_what_is_detached,
        adoptions_that_cannot_be,
        what_is_held_here_cannot_be_adopted,
        handed_round_tokens_grow,
    }
    loss: in_runtime {
        #[core]
        lost_work_is_dropped_at_once,
        a_lost_stream_is_dropped_at_once,
        work_done_too_late_has_lost,
        run_on_lets_the_work_end,
        #[core]
        a_release_that_finds_another_is_a_loss,
        a_handle_learns_of_the_end_by_itself,
        a_lease_tells_its_end,
        an_expired_lease_does_not_release_its_successor,
    }
    looking: in_runtime {
        #[core]
        who_is_over_is_told_no_more,
        a_scan_leaves_out_the_dead,
        #[core]
        holders_are_told_whole_and_how_much_is_taken,
        #[core]
        a_waiter_that_died_is_told_no_more,
        holders_and_waiters_have_a_key_and_a_name,
        #[core]
        a_lease_tells_its_owner,
        #[core]
        a_lease_is_verified_at_the_store,
        a_verification_prolongs_nothing,
        a_verification_without_an_answer_says_so,
        #[core]
        a_ping_is_answered_while_locks_would_be,
        #[core]
        force_takes_an_exclusive_lock,
        #[core]
        force_takes_one_reader,
        #[core]
        force_takes_one_permit,
        force_takes_a_key_that_is_kept,
        force_takes_nothing_from_another,
    }
    told: in_runtime {
        #[core]
        a_busy_lock_names_its_holder,
        a_holder_here_is_named,
        a_holder_without_a_name_is_its_id,
        #[core]
        who_shares_a_busy_lock_is_counted,
        #[core]
        a_long_wait_names_who_has_it_at_its_end,
        who_waits_behind_others_is_told_what_they_know,
        a_group_names_the_key_and_who_has_it,
        #[core]
        who_keeps_a_key_is_named,
        a_fixed_lease_that_ends_says_why,
        a_lease_that_an_outage_ends_says_so,
        a_lease_whose_key_is_gone_says_so,
        a_lease_that_another_guard_ended_says_so,
    }
    leadership: in_runtime {
        a_free_lead_is_had_at_once,
        #[core]
        a_follower_leads_when_the_leader_leaves,
        a_lost_lead_is_followed_and_had_again,
        a_lead_taken_away_comes_back,
        one_of_three_leads,
        a_campaign_that_ends_leaves_nothing,
        a_store_that_is_too_slow_for_the_ttl_is_tried_again,
        who_resigns_does_not_wait_for_an_absent_store,
        a_campaign_ends_with_its_registry,
        what_waiting_cannot_mend_ends_a_campaign,
        an_outage_is_waited_out,
        a_full_queue_is_waited_out,
        a_campaign_that_is_not_polled,
        work_runs_only_while_leading,
        work_done_when_the_lead_is_over_begins_anew,
        work_dropped_under_the_lead_resigns,
        a_shutdown_ends_what_leads,
    }
    outage: in_runtime {
        acquiring_from_an_absent_store_errs,
        an_absent_store_leaves_nothing_behind,
        #[core]
        a_store_that_comes_back_within_the_wait_serves_it,
        #[core]
        waiters_outlast_an_outage,
        #[core]
        a_release_that_cannot_be_told_is_made_good_later,
        a_guards_release_tries_until_the_deadline,
        a_reply_that_comes_too_late_brings_no_dead_lease,
        a_store_that_is_too_slow_for_the_ttl_is_told,
        a_slow_store_serves_a_short_wait,
        a_store_that_does_not_answer_errs_in_time,
        #[core]
        an_outage_is_no_loss,
    }
    turns: in_runtime {
        #[core]
        processes_take_turns_in_order_of_arrival,
        waiters_of_one_process_take_turns_in_order_of_arrival,
        #[core]
        many_waiters_in_one_process_do_not_shut_others_out,
        #[core]
        a_turn_that_is_not_taken_goes_to_the_next_process,
        a_turn_that_is_not_taken_goes_to_the_next_in_the_process,
        a_turn_that_nobody_takes_frees_the_lock,
        a_turn_lost_after_the_wait_is_busy,
        too_many_waiters_are_turned_away,
    }
    shutdown: in_runtime {
        #[core]
        everybody_is_told_and_everything_given_back,
        a_closed_registry_stays_closed,
        a_shutdown_dropped_goes_on,
        a_shutdown_does_not_wait_for_an_absent_store,
        #[core]
        a_drain_lets_work_end_and_takes_nobody,
    }
    invalid: in_runtime {
        bad_keys,
        bad_ttls,
        bad_settings,
    }
    events: in_runtime {
        #[core]
        a_lease_is_told_from_its_wait_to_its_end,
        waits_that_end_with_nothing_are_told,
        a_turn_lost_does_not_end_a_wait,
        passes_are_told,
        renewals_are_told_and_the_last_is,
        a_renewal_without_an_answer_is_told,
        the_ways_to_lose_a_lease_are_told_apart,
        a_full_queue_is_told,
        a_handle_dropped_while_it_holds_is_told,
        an_outage_is_told_once,
        a_shutdown_is_told_and_ends_it,
        a_shutdown_that_nobody_awaits_ends_it,
        events_end_with_their_registry,
        a_slow_reader_is_told_how_many_it_missed,
        a_reader_is_woken_for_everything_in_order,
        #[core]
        a_snapshot_shows_what_is_held_and_waited_for,
        of_five_that_ask_once,
        #[core]
        three_that_wait,
        three_of_which_one_waits_too_short,
    }
    exclusion: in_runtime {
        #[core]
        a_hundred_tasks_in_eight_processes_never_meet,
        comings_and_goings_break_nothing,
        #[core]
        everything_at_once_breaks_nothing,
        tokens_grow_over_thousands_of_leases,
        #[core]
        tokens_grow_through_passes,
    }
    leftovers: in_runtime {
        idle_registries_hold_no_entries,
        a_release_by_another_handle_harms_nothing,
        #[core]
        the_last_of_a_registry_gives_everything_back,
        a_future_keeps_its_registry_alive,
        #[core]
        inspecting_touches_nothing,
        a_scan_lists_what_is_held_and_waited_for,
        a_scan_of_many_keys_lists_each_once,
    }
    handles: in_runtime {
        a_clone_is_a_contender_of_its_own,
        a_shared_handle_is_one_contender,
        acquiring_a_held_handle_waits,
        a_handle_has_one_shared_lease,
        many_that_share_a_handle_meet_nobody,
        who_has_lost_does_not_release_the_next,
        a_guard_is_not_the_handles,
        a_second_release_says_that_nothing_was_held,
        a_release_after_a_refusal_is_told,
        #[core]
        a_guards_release_goes_on_when_dropped,
        a_held_handle_dropped_releases_and_warns,
        a_temporary_handle_releases_at_once_and_warns,
        a_combinator_outlives_the_handle_that_made_it,
    }
    runtimes: without_runtime {
        a_runtime_dropped_right_after_a_lease_was_taken,
        a_lease_dropped_with_its_runtime_runs_out,
        a_lease_of_one_runtime_is_released_on_another,
        a_registry_outlives_its_runtimes,
        waiters_outlive_another_runtime,
        a_loss_is_told_after_another_runtime_is_gone,
        a_lease_is_renewed_by_the_runtime_that_is_left,
        a_lease_is_renewed_where_it_is_looked_at,
        a_runtime_without_timers_is_passed_over,
        work_that_moves_to_another_runtime_keeps_its_lease,
        a_drop_on_a_thread_without_a_runtime_releases,
        what_is_in_a_local_of_a_thread_is_released_at_its_end,
        a_registry_made_outside_a_runtime_works_in_one,
        a_clean_end_warns_of_nothing,
    }
}

#[cfg(feature = "redis")]
redis_alone! {
    #[core]
    plain_locks_exclude_us_and_we_them,
    #[core]
    what_a_foreign_lock_has_in_it_is_named,
    a_waiter_that_finds_a_foreign_lock_prolonged_goes_on_waiting,
    a_foreign_lock_without_a_ttl_is_looked_at,
    a_value_of_somebody_else_is_never_deleted,
    #[core]
    force_takes_a_plain_lock_of_others,
    #[core]
    an_inspection_writes_nothing,
    #[core]
    nothing_is_left_but_the_fence,
    #[core]
    who_waits_sends_nothing,
    #[core]
    a_lock_costs_two_calls,
    #[core]
    tokens_grow_without_their_fence,
    #[core]
    scripts_that_the_server_forgot_are_sent_again,
    #[core]
    connections_that_are_killed_lose_nothing,
    #[core]
    a_server_that_is_stopped_is_told_of_in_time,
    #[core]
    a_server_that_lost_its_data_tells_the_holders,
    a_lead_that_the_server_refuses_is_had_when_it_relents,
    connecting_tells_what_is_wrong,
    a_restart_is_told_once,
}
