//! A suite that passes everything proves nothing: each deliberately broken bus must fail it, and by the cases that were
//! written against its mistake. (That the unbroken one passes them is `tests/bus.rs`.)
#![cfg(feature = "testing")]

use hapax::testing::bus::mutants::{BusMutant, MutantBusHarness};
use hapax::testing::bus::{consume, members, publish};

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($theme:ident :: $case:ident),*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = MutantBusHarness::new($mutant);
                    $theme::$case(&harness).await;
                });
                assert!(case.await.is_err(), "{} does not catch {:?}", stringify!($case), $mutant);
            )*
        }
    };
}

caught!(ignored_keys_are_caught, BusMutant::KeyIgnored, [publish::b2_a_key_has_one_partition]);
caught!(
    committing_the_last_record_is_caught,
    BusMutant::CommitsTheLast,
    [consume::b4_a_group_goes_on_at_its_commit, consume::b5_a_commit_is_the_offset_after]
);
caught!(
    ignored_epochs_are_caught,
    BusMutant::EpochIgnored,
    [members::b5_a_commit_of_an_epoch_that_is_over_is_fenced]
);
caught!(
    calling_fenced_commits_done_is_caught,
    BusMutant::FencedIsDone,
    [
        members::b5_a_commit_of_an_epoch_that_is_over_is_fenced,
        members::b6_who_never_gives_back_is_thrown_out,
        members::b7_a_silent_member_loses_its_partitions
    ]
);
caught!(
    giving_back_at_once_is_caught,
    BusMutant::GivesBackAtOnce,
    [members::b6_a_revoked_partition_moves_once_it_is_given_back]
);
caught!(
    ignored_pauses_are_caught,
    BusMutant::PauseIgnored,
    [consume::b8_a_paused_partition_is_silent_and_others_go_on, consume::b8_membership_survives_a_pause]
);
caught!(
    pauses_by_name_are_caught,
    BusMutant::PausesByName,
    [members::b8_a_pause_of_an_epoch_that_is_over_changes_nothing]
);
caught!(seeking_too_far_is_caught, BusMutant::SeeksOneBefore, [consume::b9_seek_goes_back_and_forth]);
caught!(losing_when_cancelled_is_caught, BusMutant::LosesWhenCancelled, [consume::next_can_be_cancelled]);
caught!(
    ignored_partitions_are_caught,
    BusMutant::PartitionIgnored,
    [publish::b12_a_record_goes_to_the_partition_it_is_published_to]
);
caught!(
    taking_any_partition_is_caught,
    BusMutant::AnyPartition,
    [publish::b12_a_partition_that_is_not_there_is_an_error]
);
caught!(
    unreported_losses_are_caught,
    BusMutant::LostUnreported,
    [members::b7_a_silent_member_loses_its_partitions]
);
caught!(
    telling_of_removed_records_late_is_caught,
    BusMutant::RemovedLate,
    [consume::b13_what_was_removed_is_reported_before_what_lies_behind_it]
);
