//! A suite that passes everything proves nothing: each deliberately broken store of keys must fail it, and by the cases
//! that were written against its mistake. (That the unbroken one passes them is `memory::k…`.)

use hapax::testing::keyed::mutants::{KeysMutant, MutantKeysHarness};
use hapax::testing::keyed::{forget, once, state};

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($theme:ident :: $case:ident),*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = MutantKeysHarness::new($mutant);
                    $theme::$case(&harness).await;
                });
                assert!(case.await.is_err(), "{} does not catch {:?}", stringify!($case), $mutant);
            )*
        }
    };
}

caught!(one_space_for_all_tenants_is_caught, KeysMutant::TenantIgnored, [once::k2_two_tenants_never_meet]);
caught!(
    ignored_fingerprints_are_caught,
    KeysMutant::FingerprintIgnored,
    [
        once::k3_another_request_is_a_mismatch_in_every_state,
        once::k3_a_mismatch_names_what_differs_and_nothing_else
    ]
);
caught!(lost_headers_are_caught, KeysMutant::HeadersLost, [once::k4_the_answer_comes_back_byte_for_byte]);
caught!(
    finishing_under_any_token_is_caught,
    KeysMutant::FinishIgnoresTheToken,
    [state::k5_a_stale_token_changes_nothing, state::k5_a_lease_that_was_released_or_decided_is_over]
);
caught!(
    t227_extending_under_any_token_is_caught,
    KeysMutant::ExtendIgnoresTheToken,
    [state::k5_a_stale_token_changes_nothing, state::k5_a_lease_that_was_released_or_decided_is_over]
);
caught!(
    ignored_nonces_are_caught,
    KeysMutant::NonceIgnored,
    [once::k6_the_same_begin_again_gets_the_same_token, once::k6_its_own_answer_is_known_as_its_own]
);
caught!(
    running_again_what_is_held_is_caught,
    KeysMutant::HoldIgnored,
    [state::k7_a_held_key_waits_for_a_person, state::k7_a_held_key_waits_for_its_time]
);
caught!(
    forgotten_releases_are_caught,
    KeysMutant::ReleaseForgotten,
    [state::k8_what_did_nothing_runs_again_at_once, state::k8_what_failed_follows_its_rule]
);
caught!(
    t262_late_copies_that_run_are_caught,
    KeysMutant::LateCopiesRun,
    [state::k5_a_lease_that_was_released_or_decided_is_over]
);
caught!(
    t263_keys_bound_by_what_did_nothing_are_caught,
    KeysMutant::UndoneBinds,
    [state::k8_what_did_nothing_leaves_the_key_to_any_request]
);
caught!(
    new_keys_from_before_the_horizon_are_caught,
    KeysMutant::HorizonIgnored,
    [
        forget::k9_a_v7_key_that_was_forgotten_is_expired_never_new,
        forget::k9_a_key_from_a_clock_that_is_ahead_is_never_new
    ]
);
caught!(
    sweeps_that_forget_nothing_are_caught,
    KeysMutant::SweepsNothing,
    [forget::k9_only_what_is_older_than_the_retention_goes, forget::k9_a_sweep_goes_in_batches]
);
caught!(
    lists_of_all_tenants_are_caught,
    KeysMutant::ListsAllTenants,
    [state::k10_keys_are_listed_in_pages, state::k10_no_tenant_is_a_tenant_of_its_own]
);
