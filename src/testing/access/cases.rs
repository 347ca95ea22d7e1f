//! The one list of cases.

/// Enrols a store of API tokens in every conformance case: a module of tests named after the cases, each on a fresh
/// harness.
///
/// ```text
/// hapax::access_conformance!(sqlite, SqliteAccessHarness::new());
/// ```
#[macro_export]
macro_rules! access_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__access_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every store.
#[doc(hidden)]
#[macro_export]
macro_rules! __access_cases {
    ([$($how:tt)*]) => {
        $crate::__access_expand! { [$($how)*]
            tokens {
                a1_creating_again_changes_nothing
                a1_an_id_with_another_secret_is_a_conflict
                a1_of_many_creations_at_once_one_is_made
                a2_only_the_whole_secret_is_granted
                a3_a_token_ends_by_the_stores_clock
                a3_only_the_right_secret_learns_why
                a4_a_revoked_token_stays_revoked
                a5_a_rotation_keeps_everything_but_the_secret
                a5_the_old_secret_lasts_for_the_overlap
                a5_a_rotation_that_came_second_is_a_conflict
                a6_a_store_that_had_tokens_always_has
                a7_a_use_is_noted_now_and_then
                a8_tokens_are_listed_in_pages
                a1_a_token_ends_with_the_one_that_made_it
                a1_a_token_that_is_over_makes_none
                a1_what_a_token_made_is_revoked_with_it
                a12_bad_input_is_refused_with_a_sentence
            }
            audit {
                a9_each_change_leaves_one_row
                a10_a_note_that_is_added_again_adds_nothing
                a10_rows_are_listed_in_pages
                a10_hostile_texts_are_stored
                a11_only_what_is_older_than_the_retention_goes
                a11_a_sweep_goes_in_batches
                a11_one_of_many_sweepers_sweeps
                a11_a_leap_of_the_clock_forgets_nothing
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __access_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::access::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __access_cases!([names]);
