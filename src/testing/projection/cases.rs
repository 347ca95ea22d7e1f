//! The one list of cases.

/// Enrols a projection in every conformance case: a module of tests named after the cases, each on a
/// fresh harness.
///
/// ```text
/// hapax::projection_conformance!(cache, CacheHarness::new());
/// ```
#[macro_export]
macro_rules! projection_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__projection_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every projection.
#[doc(hidden)]
#[macro_export]
macro_rules! __projection_cases {
    ([$($how:tt)*]) => {
        $crate::__projection_expand! { [$($how)*]
            versions {
                p1_the_highest_version_counts_in_any_order
                p1_an_equal_version_changes_nothing
                p1_a_later_generation_is_newer_than_every_seq
                p1_many_at_once_leave_the_highest
                p1_shuffled_and_repeated_changes_give_the_same_documents
                p2_a_deleted_record_stays_deleted_whatever_arrives_later
                p2_a_deletion_may_come_before_what_it_deletes
                p2_a_record_that_is_created_again_is_back
                p5_versions_above_2_to_the_53_are_told_apart
            }
            documents {
                p3_each_change_has_its_outcome
                p4_tenants_modules_and_ids_never_meet
                p5_payloads_come_back_as_they_were
                p6_what_was_applied_is_there_when_it_is_opened_again
                p7_a_scan_shows_everything
                p8_a_rebuild_shows_itself_when_it_is_switched_to
                p8_an_unfinished_rebuild_is_in_nobodys_way
                p8_a_rebuild_is_unfinished_until_its_switch
                p9_what_is_erased_is_served_no_more_whoever_has_the_writes
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __projection_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::projection::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __projection_cases!([names]);
