//! A suite that passes everything proves nothing: each deliberately broken projection must fail it, and by the cases that were
//! written against its mistake.

use hapax::testing::projection::mutants::{MutantProjectionHarness, ProjectionMutant};
use hapax::testing::projection::{documents, versions};

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($theme:ident :: $case:ident),*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = MutantProjectionHarness::new($mutant);
                    $theme::$case(&harness).await;
                });
                assert!(case.await.is_err(), "{} does not catch {:?}", stringify!($case), $mutant);
            )*
        }
    };
}

caught!(
    what_arrives_last_is_caught,
    ProjectionMutant::LastWins,
    [
        versions::p1_the_highest_version_counts_in_any_order,
        versions::p1_shuffled_and_repeated_changes_give_the_same_documents
    ]
);
caught!(
    t44_forgotten_tombstones_are_caught,
    ProjectionMutant::TombstonesForgotten,
    [
        versions::p2_a_deleted_record_stays_deleted_whatever_arrives_later,
        versions::p2_a_deletion_may_come_before_what_it_deletes,
        versions::p1_shuffled_and_repeated_changes_give_the_same_documents
    ]
);
caught!(
    t321_versions_as_doubles_are_caught,
    ProjectionMutant::DoubleVersions,
    [versions::p5_versions_above_2_to_the_53_are_told_apart]
);
caught!(
    deciding_before_writing_is_caught,
    ProjectionMutant::ReadThenWrite,
    [versions::p1_many_at_once_leave_the_highest]
);
caught!(
    ignored_tenants_are_caught,
    ProjectionMutant::TenantIgnored,
    [documents::p4_tenants_modules_and_ids_never_meet]
);
caught!(
    wrong_outcomes_are_caught,
    ProjectionMutant::AlwaysNewer,
    [documents::p3_each_change_has_its_outcome, versions::p1_an_equal_version_changes_nothing]
);
caught!(
    scans_without_deleted_records_are_caught,
    ProjectionMutant::ScanForgetsDeleted,
    [documents::p7_a_scan_shows_everything]
);
caught!(
    rebuilds_that_show_are_caught,
    ProjectionMutant::RebuildShows,
    [
        documents::p8_a_rebuild_shows_itself_when_it_is_switched_to,
        documents::p8_an_unfinished_rebuild_is_in_nobodys_way
    ]
);
