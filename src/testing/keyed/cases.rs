//! The one list of cases.

/// Enrols a store of keys in every conformance case: a module of tests named after the cases, each on a fresh harness.
///
/// ```text
/// hapax::keys_conformance!(sqlite, SqliteKeysHarness::new());
/// ```
#[macro_export]
macro_rules! keys_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__keys_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every store.
#[doc(hidden)]
#[macro_export]
macro_rules! __keys_cases {
    ([$($how:tt)*]) => {
        $crate::__keys_expand! { [$($how)*]
            once {
                k1_of_100_at_once_one_is_first
                k1_others_see_that_it_runs
                k2_two_tenants_never_meet
                k3_another_request_is_a_mismatch_in_every_state
                k3_a_mismatch_names_what_differs_and_nothing_else
                k4_the_answer_comes_back_byte_for_byte
                k6_the_same_begin_again_gets_the_same_token
                k6_its_own_answer_is_known_as_its_own
                k12_a_transaction_is_all_or_nothing
                k12_a_transaction_without_an_answer_never_runs_again
            }
            state {
                k5_a_stale_token_changes_nothing
                k5_finishing_twice_keeps_the_first_answer
                k5_a_lease_that_was_released_or_decided_is_over
                k7_a_lapsed_lease_runs_again
                k7_a_lease_that_is_extended_does_not_lapse
                k7_a_held_key_waits_for_a_person
                k7_a_held_key_waits_for_its_time
                k7_a_person_gives_the_answer
                k7_who_decided_and_why_is_stored
                k8_what_did_nothing_runs_again_at_once
                k8_what_did_nothing_leaves_the_key_to_any_request
                k8_what_failed_follows_its_rule
                k10_looking_changes_nothing
                k10_keys_are_listed_in_pages
                k10_no_tenant_is_a_tenant_of_its_own
                k10_an_answer_says_whose_it_is
                k11_bad_input_is_refused_with_a_sentence
            }
            forget {
                k9_only_what_is_older_than_the_retention_goes
                k9_a_v7_key_that_was_forgotten_is_expired_never_new
                k9_other_keys_are_new_after_the_retention
                k9_running_and_held_keys_stay
                k9_a_key_from_a_clock_that_is_ahead_is_never_new
                k9_a_key_that_could_not_be_kept_is_not_begun
                k9_a_sweep_goes_in_batches
                k9_one_of_many_sweepers_sweeps
                k9_a_dry_run_counts_and_changes_nothing
                k9_a_leap_of_the_clock_forgets_nothing
                k9_the_horizon_never_goes_back
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __keys_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::keyed::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __keys_cases!([names]);
