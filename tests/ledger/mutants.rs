//! A suite that passes everything proves nothing: each deliberately broken ledger must fail it, and by the cases that
//! were written against its mistake. The unbroken one passes those same cases.
#![cfg(feature = "testing")]

use hapax::testing::mutants::{Mutant, MutantHarness};
use hapax::testing::{MemoryHarness, counting, doubt, lease, model};

/// Runs cases, each on a fresh harness in a task of its own, and names those that fail.
macro_rules! failing {
    ($harness:expr; $($theme:ident :: $case:ident),* $(,)?) => {{
        let mut failing: Vec<&'static str> = Vec::new();
        $(
            let case = tokio::spawn(async move {
                let harness = $harness;
                $theme::$case(&harness).await;
            });
            if case.await.is_err() {
                failing.push(stringify!($case));
            }
        )*
        failing
    }};
}

/// Asserts that every one of the cases catches the mutant, and that none of them fails without it.
macro_rules! caught {
    ($name:ident, $mutant:expr, [$($cases:tt)*]) => {
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $name() {
            quiet();
            let without = failing!(MemoryHarness::new(); $($cases)*);
            assert!(without.is_empty(), "fail without the mutant: {without:?}");
            let caught = failing!(MutantHarness::new($mutant); $($cases)*);
            let all = stringify!($($cases)*).matches("::").count();
            assert_eq!(caught.len(), all, "only {caught:?} caught {:?}", $mutant);
        }
    };
}

/// The panics of mutants happen in tasks, on purpose: only those of the tests themselves are printed.
fn quiet() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let worker =
                std::thread::current().name().is_some_and(|name| name.starts_with("tokio-rt-worker"));
            if !worker {
                usual(info);
            }
        }));
    });
}

caught!(
    owner_instead_of_token_is_caught,
    Mutant::OwnerInsteadOfToken,
    [
        lease::c2_owner_is_not_a_token,
        lease::c2_stale_token_cannot_settle,
        lease::c2_stale_token_cannot_extend,
        lease::t20_a_zombie_task_of_the_same_owner_is_fenced,
        doubt::t43_recovery_from_a_stale_read_changes_nothing,
        model::model_random_commands_agree,
    ]
);
caught!(
    client_clock_is_caught,
    Mutant::ClientClock,
    [lease::c1_one_live_lease, lease::acceptance_5_two_receivers_one_claim]
);
caught!(check_then_act_is_caught, Mutant::CheckThenAct, [lease::c1_concurrent_claims_have_one_winner]);
caught!(
    token_per_row_is_caught,
    Mutant::TokenPerRow,
    [lease::c2_tokens_grow_across_reopening, model::model_random_commands_agree]
);
caught!(
    read_back_is_caught,
    Mutant::ReadBack,
    [
        doubt::c7_same_claim_again_is_first_again,
        doubt::c7_a_failure_is_counted_once_under_its_nonce,
        doubt::c7_a_repeat_in_an_order_is_first_again,
        model::model_random_commands_agree,
    ]
);
caught!(
    release_that_deletes_is_caught,
    Mutant::ReleaseDeletes,
    [counting::c6_release_is_retry_now_not_delete, model::model_random_commands_agree]
);
caught!(all_or_nothing_is_caught, Mutant::AllOrNothing, [doubt::c8_bad_row_harms_only_itself]);
caught!(
    uncounted_deaths_are_caught,
    Mutant::DeathsUncounted,
    [
        counting::c5_lapsed_leases_count_and_end_dead,
        counting::c5_a_killer_parks_its_aggregate,
        counting::t22_an_event_that_kills_its_process_is_dead_lettered,
        model::model_random_commands_agree,
    ]
);
