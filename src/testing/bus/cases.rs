//! The one list of cases.

/// Enrols a bus in every conformance case: a module of tests named after the cases, each on a harness of its own.
///
/// ```text
/// hapax::bus_conformance!(kafka, KafkaHarness::new().await);
/// ```
#[macro_export]
macro_rules! bus_conformance {
    ($module:ident, $harness:expr) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $crate::__bus_cases! { [tests ($harness)] }
        }
    };
}

/// The one list. A case that is not here does not run; one that is here runs on every bus.
#[doc(hidden)]
#[macro_export]
macro_rules! __bus_cases {
    ([$($how:tt)*]) => {
        $crate::__bus_expand! { [$($how)*]
            publish {
                b1_each_record_is_answered_with_where_it_lies
                b1_what_is_acknowledged_others_see
                b1_an_unknown_topic_is_an_error
                b1_a_topic_is_made_once
                b2_a_key_has_one_partition
                b2_a_partition_keeps_its_publishers_order
                b10_offsets_are_never_reused
                b10_what_was_removed_leaves_a_gap
                b12_a_record_goes_to_the_partition_it_is_published_to
                b12_what_is_published_after_an_acknowledgement_comes_after_it
                b12_a_partition_that_is_not_there_is_an_error
            }
            consume {
                b4_a_group_goes_on_at_its_commit
                b4_earliest_begins_with_the_oldest
                b4_latest_begins_with_what_comes
                b4_latest_goes_on_with_what_is_left
                b4_latest_of_a_group_that_has_begun_begins_at_the_beginning
                b4_refuse_does_not_begin
                b5_a_commit_is_the_offset_after
                b8_a_paused_partition_is_silent_and_others_go_on
                b8_membership_survives_a_pause
                b9_seek_goes_back_and_forth
                b9_seek_to_what_was_removed_goes_on_above
                b13_what_was_removed_is_reported_before_what_lies_behind_it
                next_can_be_cancelled
            }
            members {
                b3_each_partition_has_one_member
                b3_groups_do_not_share
                b5_a_commit_of_an_epoch_that_is_over_is_fenced
                b8_a_pause_of_an_epoch_that_is_over_changes_nothing
                b6_a_revoked_partition_moves_once_it_is_given_back
                b6_who_never_gives_back_is_thrown_out
                b7_a_silent_member_loses_its_partitions
                b7_who_leaves_is_not_waited_for
            }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __bus_expand {
    ([tests ($harness:expr)] $($theme:ident { $($case:ident)* })*) => {$($(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let harness = $harness;
            $crate::testing::bus::$theme::$case(&harness).await;
        }
    )*)*};
    ([names] $($theme:ident { $($case:ident)* })*) => { &[$($(stringify!($case),)*)*] };
}

/// The names of all cases.
pub const NAMES: &[&str] = __bus_cases!([names]);
