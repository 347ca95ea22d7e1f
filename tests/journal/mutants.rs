//! A suite that passes everything proves nothing: each deliberately broken journal must fail it, and by the cases that were
//! written against its mistake. (That the unbroken one passes them is `tests/journal_memory.rs`.)
#![cfg(feature = "testing")]

use hapax::testing::journal::mutants::{JournalMutant, MutantJournalHarness};
use hapax::testing::journal::{append, horizon, identity, leadership, model, page, read, sweep};

/// Asserts that every one of the cases catches the mutant.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($theme:ident :: $case:ident),* $(,)?]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            $(
                // In a task of its own: its panic is what is asked for.
                let case = tokio::spawn(async move {
                    let harness = MutantJournalHarness::new($mutant);
                    $theme::$case(&harness).await;
                });
                assert!(case.await.is_err(), "{} does not catch {:?}", stringify!($case), $mutant);
            )*
        }
    };
}

caught!(
    burned_numbers_are_caught,
    JournalMutant::BurnsNumbers,
    [
        append::j1_a_refused_append_burns_no_number,
        append::j1_32_writers_on_8_aggregates_leave_no_gap,
        append::j1_an_append_is_all_or_nothing,
        model::model_random_commands_agree,
    ]
);
caught!(
    expecting_of_repeats_is_caught,
    JournalMutant::ExpectsOfRepeats,
    [
        identity::j3_a_repeat_is_not_asked_what_it_expects,
        identity::j3_a_repeat_has_its_original_place,
        append::j1_32_writers_on_8_aggregates_leave_no_gap,
        model::model_random_commands_agree,
    ]
);
caught!(
    storing_a_mismatch_is_caught,
    JournalMutant::StoresTheMismatch,
    [identity::j4_warned_mismatches_keep_the_original, model::model_random_commands_agree]
);
caught!(skipping_a_hole_is_caught, JournalMutant::SkipsHoles, [read::j7_following_while_writers_run]);
caught!(
    another_order_is_caught,
    JournalMutant::OtherOrder,
    [read::j7_following_gives_every_event_once, read::j7_following_while_writers_run]
);
caught!(
    stale_tokens_that_save_are_caught,
    JournalMutant::StaleTokenSaves,
    [
        leadership::j9_tokens_grow_and_stale_ones_are_fenced,
        leadership::j9_leadership_lapses_by_the_journals_clock,
        leadership::j9_rewinding_fences_the_leader,
        model::model_random_commands_agree,
    ]
);
caught!(
    sweeping_past_a_relay_is_caught,
    JournalMutant::SweepPassesARelay,
    [sweep::j11_only_what_every_relay_has_passed_goes, sweep::j11_what_is_behind_stays]
);
caught!(
    all_or_nothing_is_caught,
    JournalMutant::AllOrNothing,
    [append::j1_of_many_appends_one_refused_harms_no_other, model::model_random_commands_agree]
);
caught!(
    tenants_that_meet_are_caught,
    JournalMutant::TenantsMeet,
    [identity::j5_two_tenants_never_meet, model::model_random_commands_agree]
);
caught!(
    pages_without_an_end_are_caught,
    JournalMutant::UnboundedPages,
    [
        page::j13_a_page_of_an_aggregate_ends_at_so_many_bytes,
        page::j13_a_page_that_is_followed_ends_at_so_many_bytes,
        page::j13_a_page_has_at_least_one_event,
    ]
);
caught!(
    taking_a_short_page_for_the_last_is_caught,
    JournalMutant::ShortIsTheEnd,
    [
        page::j13_a_page_of_an_aggregate_ends_at_so_many_bytes,
        page::j13_a_page_that_is_followed_ends_at_so_many_bytes,
    ]
);
caught!(
    a_horizon_that_is_too_low_is_caught,
    JournalMutant::HorizonTooLow,
    [horizon::j14_what_is_acknowledged_is_within_the_horizon, horizon::j14_a_horizon_holds_while_writers_run]
);
caught!(
    a_horizon_that_reads_the_clock_last_is_caught,
    JournalMutant::HorizonReadsTheClockLast,
    [horizon::j14_a_horizon_holds_while_writers_run]
);

// Writers that commit late are not a mistake if readers wait for them: the suite must not catch what is sound.
hapax::journal_conformance!(late_writers, MutantJournalHarness::new(JournalMutant::WaitsAtHoles));
