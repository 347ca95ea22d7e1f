//! Ledgers that make a mistake that people make. The cases are those that every ledger has to pass.

use hapax::testing::mutants::{Mutant, MutantHarness};
use hapax::testing::{MemoryHarness, doubt, lease, retention};

use super::is_mutant;

#[tokio::test]
async fn an_id_of_a_dropped_week_is_too_old() {
    retention::c10_dropped_week_is_too_old(&MemoryHarness::new()).await;
}

#[tokio::test]
async fn one_live_lease_whatever_a_client_s_clock_says() {
    if is_mutant("lease judged by the client's clock") {
        lease::c1_one_live_lease(&MutantHarness::new(Mutant::ClientClock)).await;
    }
    lease::c1_one_live_lease(&MemoryHarness::new()).await;
}

#[tokio::test]
async fn a_stale_token_settles_nothing() {
    if is_mutant("settle by owner instead of token") {
        lease::c2_stale_token_cannot_settle(&MutantHarness::new(Mutant::OwnerInsteadOfToken)).await;
    }
    lease::c2_stale_token_cannot_settle(&MemoryHarness::new()).await;
}

#[tokio::test]
async fn concurrent_claims_have_one_winner() {
    if is_mutant("claim looks first and writes later") {
        lease::c1_concurrent_claims_have_one_winner(&MutantHarness::new(Mutant::CheckThenAct)).await;
    }
    lease::c1_concurrent_claims_have_one_winner(&MemoryHarness::new()).await;
}

#[tokio::test]
async fn the_same_claim_again_is_first_again() {
    if is_mutant("a lost answer is asked for anew") {
        doubt::c7_same_claim_again_is_first_again(&MutantHarness::new(Mutant::ReadBack)).await;
    }
    doubt::c7_same_claim_again_is_first_again(&MemoryHarness::new()).await;
}
