//! The one list of cases.

/// Enrols a store of records in every conformance case: a module of tests named after the cases, each on a
/// fresh harness.
///
/// ```text
/// hapax::records_conformance!(sqlite, SqliteRecordsHarness::new().await);
/// ```
#[macro_export]
macro_rules! records_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__records_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every store.
#[doc(hidden)]
#[macro_export]
macro_rules! __records_cases {
    ([$($how:tt)*]) => {
        $crate::__records_expand! { [$($how)*]
            writes {
                r1_a_write_and_its_event_are_one
                r1_a_rollback_leaves_neither_record_nor_event
                r1_a_record_follows_its_aggregate_if_others_append
                r1_the_id_of_an_event_cannot_be_foretold
                r2_another_seq_is_a_conflict_and_burns_nothing
                r2_of_many_writers_with_one_seq_one_wins
                r3_an_id_that_exists_is_a_conflict
                r3_of_many_creators_of_one_id_one_wins
                r4_a_deleted_record_is_gone_and_its_seq_goes_on
            }
            reads {
                r5_two_tenants_never_meet
                r6_an_unknown_module_is_not_found_and_not_made
                r6_a_module_is_made_once_and_listed
                r7_a_list_is_ordered_and_paged
                r7_a_page_of_large_records_is_bounded
                r8_payloads_come_back_as_they_were
                r9_bad_input_is_refused_with_a_sentence
                r10_times_are_the_stores_own
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __records_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::records::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __records_cases!([names]);
