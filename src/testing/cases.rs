//! The one list of cases.

/// Enrols a ledger in every conformance case: a module of tests named after the cases, each on a fresh harness.
///
/// ```text
/// hapax::conformance!(sqlite, SqliteHarness::new().await);
/// ```
#[macro_export]
macro_rules! conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__conformance_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every backend.
#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_cases {
    ([$($how:tt)*]) => {
        $crate::__conformance_expand! { [$($how)*]
            lease {
                c1_one_live_lease
                c1_concurrent_claims_have_one_winner
                c1_concurrent_batches_have_one_winner_each
                c2_stale_token_cannot_settle
                c2_stale_token_cannot_extend
                c2_settling_again_is_fine
                c2_settling_otherwise_is_fenced
                c2_owner_is_not_a_token
                c2_tokens_grow_across_reopening
                c2_a_late_settle_of_the_current_token_counts
                c3_lease_lapses_by_ledger_time
                c3_extending_moves_the_end
                t19_a_skewed_client_clock_steals_nothing
                t20_a_zombie_task_of_the_same_owner_is_fenced
                t25_dead_is_terminal_for_deliveries
                acceptance_5_two_receivers_one_claim
            }
            counting {
                c4_done_and_last_seq_move_together
                c4_rolled_back_claims_leave_nothing
                c4_committed_claims_are_done
                c4_unwanted_events_advance_with_the_settling
                c5_lapsed_leases_count_and_end_dead
                c5_only_a_death_alone_counts
                c5_errors_and_deaths_add_up
                c5_a_killer_parks_its_aggregate
                t22_an_event_that_kills_its_process_is_dead_lettered
                c5_counted_failures_end_dead
                c6_backoff_is_stored
                c6_release_is_retry_now_not_delete
                c6_held_bytes_are_kept_exactly
                t16_a_failed_event_stays_claimable_without_redelivery
                t26_backoff_survives_a_restart_and_old_rows_are_swept
                acceptance_6_failures_back_off_then_die_then_redrive
            }
            doubt {
                c7_same_claim_again_is_first_again
                c7_a_repeated_lease_begins_anew
                c7_a_repeat_after_a_takeover_is_busy
                c7_a_repeat_after_its_aggregate_was_taken_over_waits
                c7_a_repeat_in_an_order_is_first_again
                c7_a_failure_is_counted_once_under_its_nonce
                c7_was_committed
                c8_bad_row_harms_only_itself
                c8_bad_settling_harms_only_itself
                c8_same_id_twice_in_a_batch
                c8_a_batch_has_an_outcome_each
                c8_a_batch_of_one_aggregate_follows_its_order
                c8_empty_and_large_batches
                t43_recovery_from_a_stale_read_changes_nothing
            }
            identity {
                c9_other_fingerprint_is_a_mismatch
                c9_a_nonce_does_not_hide_other_content
                c9_warned_mismatch_is_answered_as_the_original
                c9_other_time_is_a_duplicate
                t10_one_id_with_two_times_is_claimed_once
                id_and_time_makes_two_weeks_two_identities
                weeks_begin_on_monday_in_utc
                two_tenants_never_meet
                t14_a_scope_remembers_only_under_its_own_name
                t17_scopes_are_apart_and_long_ids_are_refused_before_sql
                ids_are_compared_as_bytes
                entries_keep_what_they_were_given
                metadata_has_a_limit
                far_future_ids_are_invalid_and_change_nothing
                t11_late_and_future_weeks_are_made_on_demand
                weeks_are_capped
            }
            retention {
                c10_dropped_week_is_too_old
                t35_an_id_of_a_dropped_week_is_too_old
                c10_younger_scope_is_admitted
                c10_open_entries_survive_as_held
                c10_kept_entries_go_when_they_are_settled
                c10_order_is_decided_before_age
                c10_a_week_in_use_stays
                t72_a_leap_of_the_clock_forgets_nothing
                t400_a_second_leap_of_the_clock_forgets_nothing
                sweep_dry_run_changes_nothing
                sweep_keeps_open_entries
                sweep_beside_claims_loses_nothing
                sweep_marks_what_is_lost
                t84_markers_of_a_finished_scope_go_away
            }
            order {
                order_a_batch_is_as_one_by_one
                order_latest_never_goes_back
                order_one_event_of_an_aggregate_runs_at_a_time
                t23_a_higher_seq_waits_for_a_lower_retry
                t23_a_lower_seq_waits_for_a_higher_lease
                order_strict_admits_only_the_next
                order_strict_from_first_seen
                order_strict_gap_parks_after_its_timeout
                order_parked_successors_are_drained_in_order
                order_below_the_dead_one_goes_on
                order_two_dead_are_both_waited_for
                order_skip_goes_on_and_refuses_a_late_redrive
                t24_strict_order_never_skips_and_redrive_drains_in_order
                order_forgetting_frees_the_successors
                order_forgetting_leaves_the_order_where_it_is
                order_what_became_stale_blocks_nobody
                acceptance_4_shuffled_events_leave_stale_ones_out
                order_concurrent_claims_of_an_aggregate
                t72_a_reused_id_stays_in_the_order_of_the_original
            }
            once {
                once_is_never_twice
                once_finishes_or_is_lost
                t405_an_end_that_is_reported_late_ends_no_other_lease
                once_overdue_is_listed_as_lost
                once_lost_can_be_retried_by_hand
                once_given_back_is_claimable_or_listed
                t12_busy_is_not_done_and_lost_claims_are_listed
            }
            held {
                c5_a_dead_claim_keeps_its_bytes
                c6_held_is_due_when_its_time_has_come
                t79_what_is_held_comes_in_bounded_pages
                c6_a_held_one_stays_held_while_it_runs
                c6_hold_parks_what_would_wait
                c6_what_was_overtaken_is_due_and_stale
                c5_refused_is_dead_beside_every_order
                c10_refused_of_a_dropped_week_is_kept
                c2_a_dead_event_is_published_once_per_death
                t120_dead_letters_of_all_tenants_come_oldest_first
                held_events_of_other_topics_are_left
                a_reserved_dead_event_is_for_one_copier
                c4_settling_and_marking_in_a_transaction
                c7_a_repeat_is_as_suspect_as_the_first
                c9_warned_mismatches_are_counted
                c2_an_unknown_scope_is_not_registered
                order_drop_goes_on_past_the_dead_one
                order_skip_by_hand_goes_on_past_a_gap
                order_out_of_order_by_permission
                listing_filters_by_aggregate_and_origin
            }
            model {
                model_random_commands_agree
            }
            operate {
                interventions_fence_and_are_audited
                t359_audit_rows_of_two_tenants_are_told_apart
                t536_audit_rows_of_an_entry_are_found_behind_those_of_others
                redrive_and_retry_bring_back
                interventions_that_do_not_fit_are_refused
                interventions_dry_run_changes_nothing
                t390_an_intervention_changes_only_what_was_looked_at
                listing_pages_through_everything_once
                listing_filters
                listing_pages_are_bounded_by_bytes
                a_cursor_is_made_from_what_the_filter_matches
                statistics_count_what_there_is
                scopes_are_listed_also_without_entries
                kill_then_redrive
                t69_what_was_killed_takes_its_bytes_from_the_next_delivery
                t69_an_aggregate_goes_on_behind_what_was_killed
                t341_a_redrive_says_that_nobody_takes_the_event_up
                c11_the_epoch_is_shared_and_stays
            }
            skips {
                skips_keep_the_first_and_the_last_few
                prevented_counts_of_many_writers_add_up
                skips_are_bounded_whatever_arrives
                skips_and_counts_are_swept
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __conformance_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __conformance_cases!([names]);
