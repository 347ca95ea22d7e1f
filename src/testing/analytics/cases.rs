//! The one list of cases.

/// Enrols a read model in every conformance case: a module of tests named after the cases, each on a fresh
/// harness.
///
/// ```text
/// hapax::read_model_conformance!(sqlite, SqliteReadModelHarness::new());
/// ```
#[macro_export]
macro_rules! read_model_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__read_model_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every read model.
#[doc(hidden)]
#[macro_export]
macro_rules! __read_model_cases {
    ([$($how:tt)*]) => {
        $crate::__read_model_expand! { [$($how)*]
            versions {
                m1_the_highest_version_counts_in_any_order
                m1_an_equal_version_changes_nothing
                m1_a_later_generation_is_newer_than_every_seq
                m2_a_deleted_record_stays_deleted_whatever_arrives_later
                m2_a_record_that_is_created_again_is_back
                m3_a_repeated_block_changes_nothing
                m10_what_was_applied_is_there_when_it_is_opened_again
                m11_the_id_stays
                m13_what_is_erased_has_no_content_and_stays_deleted
                m15_a_model_of_a_generation_takes_no_other
            }
            sync {
                m5_last_sync_at_is_the_earliest_of_the_last_pulses
                m5_a_late_pulse_takes_nothing_back
                m5_a_rejected_change_holds_its_tenant_back
                m5_a_rejected_change_of_nobody_holds_everybody_back
                m5_two_notes_at_one_offset_hold_back_what_each_does
                m5_a_read_model_says_how_far_each_partition_is
            }
            questions {
                m4_tenants_and_modules_never_meet
                m6_rows_are_ordered_and_paged
                m6_a_page_of_large_rows_is_bounded
                m7_sums_are_exact_and_what_is_no_number_is_left_out
                m7_groups_are_ordered_and_complete
                m8_since_looks_at_the_current_version
                m9_payloads_come_back_as_they_were
            }
            scans {
                m12_a_scan_shows_every_record_once
                m12_a_scan_hashes_what_is_stored
                m12_a_scan_of_a_tenant_or_a_module_shows_no_other
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __read_model_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::analytics::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __read_model_cases!([names]);
