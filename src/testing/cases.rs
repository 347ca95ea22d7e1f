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
