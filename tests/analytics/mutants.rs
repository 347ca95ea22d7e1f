//! A suite that passes everything proves nothing: each deliberately broken read model must fail it, and by the cases that
//! were written against its mistake.

use hapax::testing::analytics::mutants::{MutantReadModelHarness, ReadModelMutant};
use hapax::testing::analytics::{questions, scans, sync, versions};

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($theme:ident :: $case:ident),*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = MutantReadModelHarness::new($mutant);
                    $theme::$case(&harness).await;
                });
                assert!(case.await.is_err(), "{} does not catch {:?}", stringify!($case), $mutant);
            )*
        }
    };
}

caught!(
    what_arrives_last_is_caught,
    ReadModelMutant::LastWins,
    [
        versions::m1_a_later_generation_is_newer_than_every_seq,
        versions::m2_a_record_that_is_created_again_is_back
    ]
);
caught!(
    t48_forgotten_tombstones_are_caught,
    ReadModelMutant::TombstonesForgotten,
    [
        versions::m2_a_deleted_record_stays_deleted_whatever_arrives_later,
        versions::m1_an_equal_version_changes_nothing
    ]
);
caught!(
    ignored_tenants_are_caught,
    ReadModelMutant::TenantIgnored,
    [questions::m4_tenants_and_modules_never_meet]
);
caught!(
    the_latest_pulse_is_caught,
    ReadModelMutant::LatestPulse,
    [sync::m5_last_sync_at_is_the_earliest_of_the_last_pulses]
);
caught!(
    forgotten_rejections_are_caught,
    ReadModelMutant::RejectedForgotten,
    [
        sync::m5_a_rejected_change_holds_its_tenant_back,
        sync::m5_a_rejected_change_of_nobody_holds_everybody_back
    ]
);
caught!(
    an_ignored_since_is_caught,
    ReadModelMutant::SinceIgnored,
    [questions::m8_since_looks_at_the_current_version]
);
caught!(forgetful_pages_are_caught, ReadModelMutant::PageForgets, [questions::m6_rows_are_ordered_and_paged]);
caught!(an_id_that_changes_is_caught, ReadModelMutant::IdMadeAnew, [versions::m11_the_id_stays]);
caught!(
    a_forgotten_generation_is_caught,
    ReadModelMutant::GenerationForgotten,
    [versions::m15_a_model_of_a_generation_takes_no_other]
);
caught!(
    payloads_that_are_not_hashed_are_caught,
    ReadModelMutant::PayloadUnhashed,
    [scans::m12_a_scan_hashes_what_is_stored]
);
caught!(
    forgetful_scans_are_caught,
    ReadModelMutant::ScanForgets,
    [scans::m12_a_scan_shows_every_record_once]
);
