//! A suite that passes everything proves nothing: each deliberately broken store of keys, of records and of API tokens
//! must fail it, and by the cases that were written against its mistake. (That the unbroken ones pass them is
//! `memory::k…`, `sqlite::r…` and `memory::a…`.)

use hapax::testing::access::mutants::{AccessMutant, MutantAccessHarness};
use hapax::testing::access::tokens;
use hapax::testing::keyed::mutants::{KeysMutant, MutantKeysHarness};
use hapax::testing::keyed::{forget, once, state};
use hapax::testing::records::mutants::{MutantRecordsHarness, RecordsMutant};
use hapax::testing::records::{reads, writes};

use crate::records::SqliteRecordsHarness;

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, KeysMutant::$mutant:ident, $cases:tt) => {
        caught!($name, KeysMutant::$mutant, MutantKeysHarness::new(KeysMutant::$mutant), $cases);
    };
    ($name:ident, RecordsMutant::$mutant:ident, $cases:tt) => {
        caught!(
            $name,
            RecordsMutant::$mutant,
            MutantRecordsHarness::new(SqliteRecordsHarness::new().await, RecordsMutant::$mutant),
            $cases
        );
    };
    ($name:ident, AccessMutant::$mutant:ident, $cases:tt) => {
        caught!($name, AccessMutant::$mutant, MutantAccessHarness::new(AccessMutant::$mutant), $cases);
    };
    ($name:ident, $mutant:expr, $harness:expr, [$($theme:ident :: $case:ident),*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = $harness;
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

caught!(
    one_space_for_the_records_of_all_tenants_is_caught,
    RecordsMutant::TenantIgnored,
    [reads::r5_two_tenants_never_meet]
);
caught!(
    writes_over_what_was_not_seen_are_caught,
    RecordsMutant::SeqIgnored,
    [writes::r2_another_seq_is_a_conflict_and_burns_nothing]
);
caught!(
    a_seq_that_begins_again_is_caught,
    RecordsMutant::SeqReset,
    [writes::r4_a_deleted_record_is_gone_and_its_seq_goes_on, writes::r3_of_many_creators_of_one_id_one_wins]
);
caught!(
    a_write_without_its_event_is_caught,
    RecordsMutant::NoEvent,
    [writes::r1_a_write_and_its_event_are_one, writes::r2_of_many_writers_with_one_seq_one_wins]
);
caught!(
    a_module_made_by_a_write_is_caught,
    RecordsMutant::UnknownModuleMade,
    [reads::r6_an_unknown_module_is_not_found_and_not_made]
);
caught!(
    a_grant_that_outlives_its_token_is_caught,
    AccessMutant::ExpiryIgnored,
    [tokens::a3_a_token_ends_by_the_stores_clock]
);
caught!(
    a_token_without_its_secret_is_caught,
    AccessMutant::SecretIgnored,
    [
        tokens::a2_only_the_whole_secret_is_granted,
        tokens::a3_only_the_right_secret_learns_why,
        tokens::a5_a_rotation_keeps_everything_but_the_secret
    ]
);
caught!(
    a_revoked_token_that_lives_is_caught,
    AccessMutant::RevokedLives,
    [tokens::a4_a_revoked_token_stays_revoked]
);
