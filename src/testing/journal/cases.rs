//! The one list of cases.

/// Enrols a journal in every conformance case: a module of tests named after the cases, each on a fresh harness.
///
/// ```text
/// hapax::journal_conformance!(sqlite, SqliteJournalHarness::new());
/// ```
#[macro_export]
macro_rules! journal_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__journal_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every journal.
#[doc(hidden)]
#[macro_export]
macro_rules! __journal_cases {
    ([$($how:tt)*]) => {
        $crate::__journal_expand! { [$($how)*]
            append {
                j1_numbers_begin_at_one_and_have_no_gap
                j1_an_append_is_all_or_nothing
                j1_a_refused_append_burns_no_number
                j1_32_writers_on_8_aggregates_leave_no_gap
                j1_what_is_acknowledged_others_see
                j1_of_many_appends_one_refused_harms_no_other
                j2_what_is_expected_is_checked
                j2_a_conflict_says_both_numbers
                j2_of_those_who_expect_the_same_one_wins
                j2_an_event_that_has_a_seq_must_be_next
                j2_update_and_delete_commands_must_expect
            }
            identity {
                j3_a_repeat_has_its_original_place
                j3_a_repeat_is_not_asked_what_it_expects
                j3_repeats_mix_with_new_events
                j3_one_id_twice_in_an_append
                j3_the_same_fact_written_otherwise_is_a_repeat
                j3_a_repeat_of_an_append_in_doubt_is_stored_once
                j4_other_content_is_a_mismatch
                j4_a_mismatch_stores_nothing_of_its_append
                j4_warned_mismatches_keep_the_original
                j4_commands_are_no_exception
                j5_two_tenants_never_meet
                j8_an_event_is_found_by_its_id
                j8_ids_are_compared_as_bytes
            }
            read {
                j6_an_aggregate_is_read_in_pages
                j6_bytes_come_back_exactly
                j6_hostile_names_are_aggregates_of_their_own
                j7_following_gives_every_event_once
                j7_following_while_writers_run
                j7_what_follows_is_counted
                j7_waiting_ends_when_something_is_appended
                j7_waiting_ends_at_its_limit
            }
            page {
                j13_a_page_of_an_aggregate_ends_at_so_many_bytes
                j13_a_page_that_is_followed_ends_at_so_many_bytes
                j13_a_page_has_at_least_one_event
                j13_a_page_that_is_not_full_is_the_last
            }
            horizon {
                j14_the_horizon_of_an_empty_journal_is_its_start
                j14_what_is_acknowledged_is_within_the_horizon
                j14_a_horizon_holds_while_writers_run
            }
            leadership {
                j9_one_of_two_leads
                j9_tokens_grow_and_stale_ones_are_fenced
                j9_leadership_lapses_by_the_journals_clock
                j9_leadership_that_is_renewed_does_not_lapse
                j9_relays_of_two_names_do_not_meet
                j9_of_many_candidates_one_leads
                j9_rewinding_fences_the_leader
                j9_a_rewind_from_what_is_no_longer_so_changes_nothing
                j10_a_checkpoint_comes_back_whole
                j10_a_checkpoint_of_another_journal_is_refused
                j10_a_checkpoint_beyond_the_journal_is_refused
            }
            sweep {
                j11_a_journal_that_nobody_follows_keeps_everything
                j11_only_what_every_relay_has_passed_goes
                j11_what_is_behind_stays
                j11_what_is_young_stays
                j11_a_dry_run_only_counts
                j11_a_sweep_goes_in_steps
                j11_numbers_go_on_where_they_were
                j11_a_relay_that_is_forgotten_holds_nothing_back
                j11_a_relay_that_someone_leads_is_not_forgotten
            }
            model {
                model_random_commands_agree
            }
            input {
                j12_bad_input_is_refused_with_a_sentence
                j12_what_is_just_allowed_is_taken
                j12_there_is_nothing_in_an_empty_journal
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __journal_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::journal::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __journal_cases!([names]);
